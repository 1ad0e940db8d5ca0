"""torch.export with batch and length left open, and the comparison with eager at other sizes."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from regard.block import Layer
from regard.errors import Unsupported, check_int, check_positive
from regard.export.inputs import TRACED, BatchShape, ExportInputs, export_inputs
from regard.mixer import Mixer

GraphRunner = Callable[[Mapping[str, Tensor]], Tensor]
HOME = Path(__file__).parents[1]


class SizeCheck(NamedTuple):
    """One comparison with eager: the sizes, and the largest difference, over the largest number of eager or 1."""

    batch: int
    length: int
    difference: float


class TracedGraph(NamedTuple):
    """A graph, what goes into it, and which lengths it is for; most None: any."""

    program: ExportedProgram
    inputs: ExportInputs
    at: BatchShape
    least: int
    most: int | None


def to_program(
    module: nn.Module,
    *,
    mask: bool = False,
    context: bool = False,
    length: int | None = None,
    tolerance: float = 1e-4,
) -> ExportedProgram:
    """A mixer or a model as a `torch.export.ExportedProgram`, for any batch and length.

    mask     it takes a padding mask (b n), True = a real token; over `memory` where that is given
    memory   it takes another sequence (b m d), of any length m: mixers only
    length   of the example that is traced: 211 tokens unless given, or a prime that the module takes.  Only where a mechanism
             does something else for long sequences (more than one block, a window that does not reach over all) does it matter
    within   how far it may be from eager at other sizes, beside the largest number; else RuntimeError

    Run it by `to_program.module(check_guards=False)`: the tracer also guards against sizes that happen to be equal, such as a
    length that needs no filling up, where the graph gives the same.

    Attention over a pattern becomes dense: its mask is computed from the positions, for whatever length comes.  What cannot
    be exported raises `Unsupported`, with the reason.
    """
    check_positive("tolerance", tolerance)
    found = trace(module, mask=mask, context=context, length=length)
    graph = found.program.module(check_guards=False)
    compare(module, found, lambda given: graph(**given), tolerance)
    return found.program


def trace(module: nn.Module, *, mask: bool, context: bool, length: int | None) -> TracedGraph:
    """The graph, not yet compared with anything."""
    wanted = export_inputs(module, mask=mask, context=context)
    check_can(module, "export", "be exported")
    _check_numbers(module)
    at = BatchShape(2, _traced_length(length, wanted.longest))
    example = wanted.of(at)
    dims = {name: dict.fromkeys(axes, Dim.DYNAMIC) for name, axes in wanted.axes.items()}
    with evaluating(module), torch.no_grad(), suppress_output():
        try:
            found = torch.export.export(module, (), example, dynamic_shapes=dims, strict=False)
        except Unsupported:
            raise
        except (
            Exception
        ) as error:  # whatever it is, it is about tracing: the same call was run in eager before
            raise Unsupported(
                f"{_name(module)} cannot be exported: {_first_line(error)}{_where(error)}"
            ) from None
        least, most = _lengths(found, wanted)
    return TracedGraph(found, wanted, at, least, most)


def compare(
    module: nn.Module, found: TracedGraph, run: GraphRunner, tolerance: float
) -> tuple[SizeCheck, ...]:
    """Run both at other sizes than the traced one; too large a difference raises RuntimeError."""
    checks = []
    for sizes in other_sizes(found):
        given = found.inputs.of(sizes)
        with evaluating(module), torch.no_grad():
            want = module(**given).cpu()
        if not want.isfinite().all():
            raise ValueError(
                f"{_name(module)} itself gives numbers that are not finite: look at its parameters"
            )
        with torch.no_grad(), suppress_output():
            try:
                got = run(given).cpu()
            except (
                Exception
            ) as error:  # a guard of the graph, or a runtime that has no such operator
                raise Unsupported(
                    f"{_name(module)} cannot be exported for any length: traced at {found.at.length} tokens, it fails for "
                    f"{sizes.batch} examples of {sizes.length}: {_first_line(error)}"
                ) from None
        difference = (
            ((got - want).abs().max() / want.abs().max().clamp(min=1)).item()
            if want.numel()
            else 0.0
        )
        checks.append(SizeCheck(*sizes, difference))
        if not difference <= tolerance:
            raise RuntimeError(
                f"the exported {_name(module)} is not what eager gives: for {sizes.batch} examples of {sizes.length} tokens "
                f"they differ by {difference:.2g}, and at most {tolerance:g} was allowed"
            )
    return tuple(checks)


def other_sizes(found: TracedGraph) -> list[BatchShape]:
    """Shorter and longer than the traced one, odd and even, for one example and for several."""
    n, most = found.at.length, found.most
    tried = [
        (3, n // 2 + 1),
        (2, 2 * n + 5),
        (1, 300),
        (1, found.least),
        (3, n - 1 if most == n else n + 1),
    ]
    fitting = [
        BatchShape(b, m) for b, m in tried if m >= found.least and (most is None or m <= most)
    ]
    return list(dict.fromkeys(fitting)) or [BatchShape(b, n) for b in (1, 3)]


# ---------------------------------------------------------------------------------------------- what may be asked
def check_can(module: nn.Module, promise: str, what: str) -> None:
    """The part that refuses, with its reason: of a model, the innermost, for it knows best."""
    for part in reversed(list(module.modules())):
        if isinstance(part, Mixer | Layer) and part.can.reason(promise) is not None:
            raise Unsupported(f"{_name(part)} cannot {what}: {part.can.reason(promise)}")


def _check_numbers(module: nn.Module) -> None:
    if any(p.is_meta for p in module.parameters()):
        raise ValueError(f"{_name(module)} is on the meta device and has no numbers to export")


def _traced_length(length: int | None, longest: int | None) -> int:
    if length is None:
        return next(n for n in TRACED if longest is None or n <= longest)
    check_int(2, length=length)
    if longest is not None and length > longest:
        raise ValueError(f"length is {length}, and this was built for at most {longest}")
    return length


def _lengths(found: ExportedProgram, wanted: ExportInputs) -> tuple[int, int | None]:
    """The range that the graph is for, as the tracer found it.  It says 2 where 1 mostly runs as well."""
    for node in found.graph.nodes:
        for name, axes in wanted.axes.items():
            if node.op == "placeholder" and node.name == name and len(axes) > 1:
                symbol = node.meta["val"].shape[axes[-1]].node.expr
                bounds = found.range_constraints.get(symbol)
                if bounds is None:
                    continue
                least, most = (
                    int(bounds.lower),
                    None if "oo" in str(bounds.upper) else int(bounds.upper),
                )
                least = 1 if least <= 2 and _runs(found, wanted.of(BatchShape(1, 1))) else least
                return least, wanted.longest if most is None else most
    return 1, wanted.longest


def _runs(found: ExportedProgram, given: Mapping[str, Tensor]) -> bool:
    try:
        found.module(check_guards=False)(**given)
    except Exception:  # whatever it says, it is for longer ones only
        return False
    return True


# ---------------------------------------------------------------------------------------------- around torch
@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, no dropout and no noise; after it, each part is as it was."""
    were = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in were.items():
            part.training = training


@contextmanager
def suppress_output() -> Iterator[None]:
    """The tracer prints whole graphs where it fails: the error says what matters."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _name(module: nn.Module) -> str:
    return module.name if isinstance(module, Mixer) else type(module).__name__


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".!") if lines else type(error).__name__


def _where(error: BaseException) -> str:
    """The last place in this package that it came through."""
    place, trace = "", error.__traceback__
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if HOME in path.parents and path.parent.name != "export":
            place = f", in {path.relative_to(HOME)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
