"""Trace a module with `torch.export` for any batch size and length, and compare the graph with
eager."""

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
from regard.deep_init import evaluation_mode
from regard.errors import Unsupported, check_int, check_positive
from regard.export.inputs import BatchShape, ExportInputs, export_inputs
from regard.mixer import Mixer

GraphRunner = Callable[[Mapping[str, Tensor]], Tensor]
PACKAGE = Path(__file__).parents[1]
# lengths to trace, the longest that fits: primes, so that no block is full
TRACE_LENGTHS = (211, 127, 61, 31, 23, 19, 13, 11, 7, 5, 3, 2, 1)


class SizeCheck(NamedTuple):
    """A comparison with eager. The difference is relative to the largest output (at least 1)."""

    batch: int
    length: int
    difference: float


class TracedGraph(NamedTuple):
    """A program, its inputs, the shape it was traced at, and the lengths it takes (max_length None
    = any)."""

    program: ExportedProgram
    inputs: ExportInputs
    traced_at: BatchShape
    min_length: int
    max_length: int | None


def to_program(
    module: nn.Module,
    *,
    mask: bool = False,
    context: bool = False,
    length: int | None = None,
    tolerance: float = 1e-4,
) -> ExportedProgram:
    """Export a mixer or model as a `torch.export.ExportedProgram` for any batch size and length.

    Attention over a pattern becomes dense attention with a mask that is computed from the
    positions.

    Args:
        module: A mixer or a model. It is exported in evaluation mode.
        mask: Whether the program takes a padding mask (b n), True = keep; over the context if there
            is one.
        context: Whether it takes a context (b m d) for cross-attention. Mixers only.
        length: Length of the example that is traced; default 211, or less if the module is limited.
            It matters for modules that do something else for long sequences, such as more than one
            block.
        tolerance: Allowed difference from eager at other sizes, relative to the largest output.

    Returns:
        The program. Run it with `program.module(check_guards=False)`: the tracer also guards
        against coincidences, such as a length that needs no padding, where the graph gives the same
        result.

    Raises:
        Unsupported: If the module cannot be exported, with the reason.
        RuntimeError: If the program differs from eager by more than `tolerance`.
    """
    check_positive("tolerance", tolerance)
    traced = trace(module, mask=mask, context=context, length=length)
    graph = traced.program.module(check_guards=False)
    compare(module, traced, lambda inputs: graph(**inputs), tolerance)
    return traced.program


def trace(module: nn.Module, *, mask: bool, context: bool, length: int | None) -> TracedGraph:
    """Trace a module, without comparing it to eager."""
    inputs = export_inputs(module, mask=mask, context=context)
    check_capability(module, "export")
    if any(p.is_meta for p in module.parameters()):
        raise ValueError(f"{_name(module)} is on the meta device: it has no values to export")
    if length is None:
        most = inputs.max_length
        length = next(n for n in TRACE_LENGTHS if most is None or n <= most)
    else:
        check_int(2, length=length)
        if inputs.max_length is not None and length > inputs.max_length:
            raise ValueError(
                f"length is {length}, but the module was built for at most {inputs.max_length}"
            )
    shape = BatchShape(2, length)
    dynamic = {name: dict.fromkeys(axes, Dim.DYNAMIC) for name, axes in inputs.axes.items()}
    example = inputs.example(shape)
    with evaluation_mode(module), torch.no_grad(), suppress_output():
        try:
            program = torch.export.export(module, (), example, dynamic_shapes=dynamic, strict=False)
        except Unsupported:
            raise
        except Exception as error:
            reason = f"{_first_line(error)}{_location(error)}"
            raise Unsupported(f"{_name(module)} cannot be exported: {reason}") from None
        return TracedGraph(program, inputs, shape, *_length_range(program, inputs))


def compare(
    module: nn.Module, traced: TracedGraph, run: GraphRunner, tolerance: float
) -> tuple[SizeCheck, ...]:
    """Compare a graph with eager at other sizes; RuntimeError if they differ."""
    checks = []
    for shape in other_sizes(traced):
        inputs = traced.inputs.example(shape)
        sizes = f"{shape.batch} examples of {shape.length} tokens"
        with evaluation_mode(module), torch.no_grad():
            expected = module(**inputs).cpu()
        if not expected.isfinite().all():
            raise ValueError(
                f"{_name(module)} returns values that are not finite: check its weights"
            )
        with torch.no_grad(), suppress_output():
            try:
                actual = run(inputs).cpu()
            except Exception as error:
                raise Unsupported(
                    f"{_name(module)} cannot be exported for any length: traced at "
                    f"{traced.traced_at.length} tokens, it fails for {sizes}: {_first_line(error)}"
                ) from None
        difference = 0.0
        if expected.numel():
            scale = expected.abs().max().clamp(min=1)
            difference = ((actual - expected).abs().max() / scale).item()
        checks.append(SizeCheck(*shape, difference))
        if not difference <= tolerance:
            raise RuntimeError(
                f"The exported {_name(module)} differs from eager by {difference:.2g} "
                f"for {sizes}; the tolerance is {tolerance:g}"
            )
    return tuple(checks)


def other_sizes(traced: TracedGraph) -> list[BatchShape]:
    """Shorter and longer than the traced length, odd and even, for one example and for several."""
    n, least, most = traced.traced_at.length, traced.min_length, traced.max_length
    last = n - 1 if most == n else n + 1
    sizes = [(3, n // 2 + 1), (2, 2 * n + 5), (1, 300), (1, least), (3, last)]
    fitting = [BatchShape(b, m) for b, m in sizes if m >= least and (most is None or m <= most)]
    return list(dict.fromkeys(fitting)) or [BatchShape(b, n) for b in (1, 3)]


def check_capability(module: nn.Module, capability: str) -> None:
    """Raise `Unsupported` for the innermost part without the capability "export" or "onnx"."""
    action = {"export": "be exported", "onnx": "be written as ONNX"}[capability]
    for part in reversed(list(module.modules())):
        reason = part.can.reason(capability) if isinstance(part, Mixer | Layer) else None
        if reason is not None:
            raise Unsupported(f"{_name(part)} cannot {action}: {reason}")


def _length_range(program: ExportedProgram, inputs: ExportInputs) -> tuple[int, int | None]:
    """The lengths that a program takes. The tracer says 2 or more where 1 usually works as well."""
    for node in program.graph.nodes:
        axes = inputs.axes.get(node.name, ()) if node.op == "placeholder" else ()
        if len(axes) < 2:
            continue
        bounds = program.range_constraints.get(node.meta["val"].shape[axes[-1]].node.expr)
        if bounds is None:
            continue
        least, most = int(bounds.lower), inputs.max_length
        if "oo" not in str(bounds.upper):
            most = int(bounds.upper)
        if least <= 2:
            try:
                program.module(check_guards=False)(**inputs.example(BatchShape(1, 1)))
                least = 1
            except Exception:  # only longer sequences work
                pass
        return least, most
    return 1, inputs.max_length


@contextmanager
def suppress_output() -> Iterator[None]:
    """Hide logs and prints.

    The tracer prints whole graphs when it fails; the error has what matters.
    """
    level = logging.root.manager.disable
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
        logging.disable(level)


def _name(module: nn.Module) -> str:
    return module.name if isinstance(module, Mixer) else type(module).__name__


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".!") if lines else type(error).__name__


def _location(error: BaseException) -> str:
    """The last place in this package that an error came through, as ", in file:line"."""
    location, frame = "", error.__traceback__
    while frame is not None:
        path = Path(frame.tb_frame.f_code.co_filename)
        if PACKAGE in path.parents and path.parent.name != "export":
            location = f", in {path.relative_to(PACKAGE)}:{frame.tb_lineno}"
        frame = frame.tb_next
    return location
