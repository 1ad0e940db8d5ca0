"""How far a model has drifted: hidden states layer by layer, what comes out, and the user's own number."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.block import Layer
from regard.deep_init import evaluation_mode
from regard.hf.sample import ModelInputs
from regard.models.config import ModuleSpec
from regard.models.model import Model

if TYPE_CHECKING:
    from rich.table import Table

BLOCK = re.compile(
    r"^(?:.*?\bblock\.\d+|(?:.*\.)?\d+)(?=\.|$)"
)  # T5 numbers what is inside a block too


class LayerChange(NamedTuple):
    """What was done to a layer: what stood there, what does now, what of the old it took over, and how many weights are new."""

    layer: int
    path: str
    old: str
    mixer: ModuleSpec
    kept: tuple[str, ...]
    new: int


class MetricBefore(NamedTuple):
    """The user's own number: how to take it, and what it was before."""

    of: Callable[[nn.Module], float]
    before: float


class ModelOutputs(NamedTuple):
    """What a call gave: hidden states (b n d) after each layer, and what came out, with its name."""

    hidden: dict[str, Tensor]
    out: Tensor
    name: str


@dataclass
class SwapReport:
    """What a swap did, and how far it moved the model.  Prints as a table; `report_to_json` for machines.

    changes  layer by layer; see `Change`
    cosine   of the hidden states after each swapped layer with the old ones, the mean over real tokens; `worst` the least
    output   the mean cosine of what comes out, "embedding" (the mean over real tokens) or "logits"; `agree` for logits: how
             often the greatest is the same
    metric   the user's number before and after
    """

    changes: list[LayerChange]
    examples: int = 0
    cosine: dict[int, float] = field(default_factory=dict)
    worst: dict[int, float] = field(default_factory=dict)
    kind: str | None = None
    output: float | None = None
    agree: float | None = None
    metric: tuple[float, float] | None = None

    def to_json(self) -> str:
        """All of it as text."""
        return json.dumps(self.as_dict(), indent=1)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        plain = asdict(self)
        plain["changes"] = [c._asdict() | {"mixer": dict(c.mixer)} for c in self.changes]
        return json.loads(json.dumps(plain, default=repr))

    def table(self) -> Table:
        """For a terminal."""
        from rich.table import Table  # not with `import regard`, which stays light

        made = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
        for name in ("layer", "was", "is", "kept", "new weights", "cosine", "worst"):
            made.add_column(name, justify="left" if name in ("was", "is", "kept") else "right")
        for c in self.changes:
            made.add_row(
                str(c.layer),
                c.old,
                words(c.mixer),
                " ".join(c.kept),
                f"{c.new:,}",
                number(self.cosine.get(c.layer)),
                number(self.worst.get(c.layer)),
            )
        return made

    def lines(self) -> list[str]:
        """What stands below the table."""
        if self.output is None:
            found = ["no sample was given, so the drift was not measured"]
        else:
            found = [
                f"cosine of the {self.kind} with the old ones: {self.output:.4f}, over {self.examples} examples"
            ]
        if self.agree is not None:
            found.append(f"the greatest logit is the same in {100 * self.agree:.1f} %")
        if self.metric is not None:
            found.append(f"the metric: {self.metric[0]:.4g} before, {self.metric[1]:.4g} after")
        return found

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120, highlight=False)
        with console.capture() as text:
            console.print(self.table())
        return "\n".join([*(line.rstrip() for line in text.get().splitlines()), *self.lines()])


def words(part: ModuleSpec) -> str:
    """ "local window=64"."""
    return " ".join([part.name, *(f"{k}={v}" for k, v in part.arguments.items())])


def number(value: float | None) -> str:
    """Four digits, or nothing."""
    return "" if value is None else f"{value:.4f}"


# ---------------------------------------------------------------------------------------------- measuring
Original = Callable[[nn.Module], AbstractContextManager[nn.Module]]


def measured(
    model: nn.Module,
    changes: list[LayerChange],
    sample: list[ModelInputs] | None,
    original: Original,
    score: MetricBefore | None = None,
) -> SwapReport:
    """The report of a swap that was made; inside `original_attention(model)` it is as it was."""
    report = SwapReport(changes)
    if sample is not None:

        def before(one: ModelInputs) -> ModelOutputs:
            with original(model):
                return states(model, paths(changes), one)

        drifted(report, sample, before, lambda one: states(model, paths(changes), one))
    if score is not None:
        report.metric = (score.before, scored(score.of, model))
    return report


def scored(metric: Callable[[nn.Module], float], model: nn.Module) -> float:
    """The user's number, in evaluation."""
    with evaluation_mode(model), torch.no_grad():
        return float(metric(model))


def paths(changes: Sequence[LayerChange]) -> list[str]:
    """Of the blocks around the attentions."""
    return [block_of(c.path) for c in changes]


def block_of(path: str) -> str:
    """The layer that an attention stands in: "encoder.layer.3.attention.self" -> "encoder.layer.3"."""
    found = BLOCK.match(path)
    return found.group(0) if found else path.rpartition(".")[0]


def drifted(
    report: SwapReport,
    sample: list[ModelInputs],
    before: Callable[[ModelInputs], ModelOutputs],
    after: Callable[[ModelInputs], ModelOutputs],
) -> None:
    """Fill in the numbers of a report."""
    near: dict[int, list[Tensor]] = {c.layer: [] for c in report.changes}
    out: list[Tensor] = []
    same: list[Tensor] = []
    for one in sample:
        old, new = before(one), after(one)
        for c in report.changes:
            a, b = (s.hidden[block_of(c.path)] for s in (old, new))
            near[c.layer].append(cosines(a, b, one.mask))
        out.append(
            F.cosine_similarity(
                old.out.float().flatten(0, -2), new.out.float().flatten(0, -2), dim=-1
            )
        )
        if old.name == "logits":
            same.append((old.out.argmax(-1) == new.out.argmax(-1)).flatten())
    report.cosine = {layer: float(torch.cat(each).mean()) for layer, each in near.items()}
    report.worst = {layer: float(torch.cat(each).min()) for layer, each in near.items()}
    report.kind, report.output = old.name, float(torch.cat(out).mean())
    report.agree = float(torch.cat(same).float().mean()) if same else None
    report.examples = sum(one.tokens.shape[0] for one in sample)


def cosines(a: Tensor, b: Tensor, mask: Tensor | None) -> Tensor:
    """Of real tokens; some models lengthen what they are given, which the mask does not know."""
    found = F.cosine_similarity(a.float(), b.float(), dim=-1)
    if mask is None or found.dim() != 2:
        return found.flatten()
    if mask.shape[1] != found.shape[1]:
        mask = F.pad(mask, (0, found.shape[1] - mask.shape[1]))
    return found[mask]


def states(
    model: nn.Module, blocks: Sequence[str], one: ModelInputs, *, live: bool = False
) -> ModelOutputs:
    """Run the model, and look at what leaves the blocks; `live`: with gradients, in whatever mode it is in."""
    hidden: dict[str, Tensor] = {}
    with ExitStack() as stack:
        if not live:
            stack.enter_context(evaluation_mode(model))
            stack.enter_context(torch.no_grad())
        for path in blocks:
            stack.enter_context(watching(model.get_submodule(path), hidden, path))
        out, name = result(
            one.call(model), one.mask, speaks=isinstance(model, Model) and model.head is not None
        )
    return ModelOutputs(hidden, out, name)


@contextmanager
def watching(block: nn.Module, into: dict[str, Tensor], name: str) -> Iterator[None]:
    """Note what a block gives; those of ours are called by `run`."""
    if isinstance(block, Layer):
        usual = block.run

        def run(*given: Any, **named: Any) -> Any:
            y, state = usual(*given, **named)
            into[name] = y
            return y, state

        block.run = run  # type: ignore[method-assign]
        try:
            yield
        finally:
            del block.run
        return

    def note(module: nn.Module, given: Any, y: Any) -> None:
        into[name] = y if isinstance(y, Tensor) else y[0]

    handle = block.register_forward_hook(note)
    try:
        yield
    finally:
        handle.remove()


def result(given: Any, mask: Tensor | None, *, speaks: bool = False) -> tuple[Tensor, str]:
    """What came out: logits (... classes), which ours give as they are, or the mean over real tokens (b d)."""
    logits = given if speaks else getattr(given, "logits", None)
    if logits is not None:
        return (logits if mask is None or logits.dim() != 3 else logits[mask]), "logits"
    y = getattr(given, "last_hidden_state", given)
    if not isinstance(y, Tensor):
        y = next(t for t in y if isinstance(t, Tensor))
    return (mean_pool(y, mask), "embedding") if y.dim() == 3 else (y, "logits")


def mean_pool(y: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over real tokens: (b n d) -> (b d)."""
    if mask is None or mask.shape[1] != y.shape[1]:
        return y.mean(1)
    share = mask.to(y.dtype) / mask.sum(1, keepdim=True).clamp(min=1)
    return (y * share[..., None]).sum(1)
