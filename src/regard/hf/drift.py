"""How far a swap moves a model: hidden states, outputs, and a metric of the user."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.block import Layer
from regard.deep_init import evaluation_mode
from regard.hf.model_inputs import ModelInputs
from regard.models.config import ModuleSpec
from regard.models.model import Model

if TYPE_CHECKING:
    from rich.table import Table

BLOCK_PATH = re.compile(
    r"^(?:.*?\bblock\.\d+|(?:.*\.)?\d+)(?=\.|$)"
)  # T5 also numbers the layers of a block


def block_path(path: str) -> str:
    """The block of an attention layer: "encoder.layer.3.attention.self" -> "encoder.layer.3"."""
    match = BLOCK_PATH.match(path)
    return match.group(0) if match else path.rpartition(".")[0]


class LayerChange(NamedTuple):
    """A swapped layer: old class, mixer, kept projections, and number of new weights."""

    layer: int
    path: str
    old: str
    mixer: ModuleSpec
    kept: tuple[str, ...]
    new_weights: int

    @property
    def block(self) -> str:
        """The path of the block around the layer."""
        return block_path(self.path)


class ModelOutputs(NamedTuple):
    """Hidden states (b, n, d) by block, and the output: an "embedding" or "logits"."""

    hidden: dict[str, Tensor]
    output: Tensor
    kind: str


@dataclass
class SwapReport:
    """What a swap changed, and how far the model drifted. `print` shows a table.

    Attributes:
        changes: The swapped layers.
        examples: Size of the sample.
        cosine: Cosine similarity of hidden states with the old ones after each swapped layer, the
            mean over tokens.
        worst: The smallest such similarity of a token.
        kind: "embedding" (the mean of the last hidden states) or "logits".
        output: Mean cosine similarity of the outputs.
        agreement: For logits, the share of equal argmax.
        metric: The user's metric before and after.
    """

    changes: list[LayerChange]
    examples: int = 0
    cosine: dict[int, float] = field(default_factory=dict)
    worst: dict[int, float] = field(default_factory=dict)
    kind: str | None = None
    output: float | None = None
    agreement: float | None = None
    metric: tuple[float, float] | None = None

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.as_dict(), indent=1)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        values = asdict(self)
        values["changes"] = [
            change._asdict() | {"mixer": dict(change.mixer)} for change in self.changes
        ]
        return json.loads(json.dumps(values, default=repr))

    def table(self) -> Table:
        """A rich table of the layers."""
        from rich.table import Table  # `import regard` stays light

        table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
        for name in ("layer", "old", "new", "kept", "new weights", "cosine", "worst"):
            table.add_column(name, justify="left" if name in ("old", "new", "kept") else "right")
        for change in self.changes:
            spec = " ".join(
                [change.mixer.name, *(f"{k}={v}" for k, v in change.mixer.arguments.items())]
            )
            numbers = (measured.get(change.layer) for measured in (self.cosine, self.worst))
            table.add_row(
                str(change.layer),
                change.old,
                spec,
                " ".join(change.kept),
                f"{change.new_weights:,}",
                *("" if number is None else f"{number:.4f}" for number in numbers),
            )
        return table

    def lines(self) -> list[str]:
        """Text below the table."""
        lines = ["Drift was not measured: no sample was given."]
        if self.output is not None:
            lines = [
                f"Cosine similarity of the {self.kind} with the original: {self.output:.4f} "
                f"({self.examples} examples)"
            ]
        if self.agreement is not None:
            lines.append(f"Same top prediction: {100 * self.agreement:.1f} %")
        if self.metric is not None:
            lines.append(f"Metric: {self.metric[0]:.4g} before, {self.metric[1]:.4g} after")
        return lines

    def __str__(self) -> str:
        from regard.console import PlainConsole

        console = PlainConsole(width=120)
        with console.capture() as text:
            console.print(self.table())
        return "\n".join([*(line.rstrip() for line in text.get().splitlines()), *self.lines()])


# ---------------------------------------------------------------------------------------- measuring
def evaluate_metric(metric: Callable[[nn.Module], float], model: nn.Module) -> float:
    """The user's metric, in evaluation mode and without gradients."""
    with evaluation_mode(model), torch.no_grad():
        return float(metric(model))


def measure_drift(
    report: SwapReport,
    sample: list[ModelInputs],
    old_outputs: Callable[[ModelInputs], ModelOutputs],
    new_outputs: Callable[[ModelInputs], ModelOutputs],
) -> None:
    """Compare old and new outputs on a sample, and store the result in the report."""
    similarity: dict[int, list[Tensor]] = {change.layer: [] for change in report.changes}
    outputs: list[Tensor] = []
    same: list[Tensor] = []
    for batch in sample:
        old, new = old_outputs(batch), new_outputs(batch)
        for change in report.changes:
            cosine = F.cosine_similarity(
                old.hidden[change.block].float(), new.hidden[change.block].float(), dim=-1
            )
            if batch.mask is not None and cosine.dim() == 2:  # some models lengthen their inputs
                cosine = cosine[F.pad(batch.mask, (0, cosine.shape[1] - batch.mask.shape[1]))]
            similarity[change.layer].append(cosine.flatten())
        a, b = (out.output.float().flatten(0, -2) for out in (old, new))
        outputs.append(F.cosine_similarity(a, b, dim=-1))
        if old.kind == "logits":
            same.append((old.output.argmax(-1) == new.output.argmax(-1)).flatten())
    report.cosine = {layer: float(torch.cat(values).mean()) for layer, values in similarity.items()}
    report.worst = {layer: float(torch.cat(values).min()) for layer, values in similarity.items()}
    report.kind, report.output = old.kind, float(torch.cat(outputs).mean())
    report.agreement = float(torch.cat(same).float().mean()) if same else None
    report.examples = sum(batch.main_tensor.shape[0] for batch in sample)


def model_outputs(
    model: nn.Module, blocks: Sequence[str], batch: ModelInputs, *, training: bool = False
) -> ModelOutputs:
    """Run the model and record hidden states after these blocks.

    Args:
        training: Keep gradients and the mode of the model.
    """
    hidden: dict[str, Tensor] = {}
    with ExitStack() as stack:
        if not training:
            stack.enter_context(evaluation_mode(model))
            stack.enter_context(torch.no_grad())
        for path in blocks:
            stack.enter_context(recording(model.get_submodule(path), hidden, path))
        result = batch.call(model)
    has_head = isinstance(model, Model) and model.head is not None
    logits = result if has_head else getattr(result, "logits", None)
    if logits is not None:
        select = batch.mask is not None and logits.dim() == 3
        return ModelOutputs(hidden, logits[batch.mask] if select else logits, "logits")
    y = getattr(result, "last_hidden_state", result)
    if not isinstance(y, Tensor):
        y = next(tensor for tensor in y if isinstance(tensor, Tensor))
    return ModelOutputs(
        hidden, *((mean_pool(y, batch.mask), "embedding") if y.dim() == 3 else (y, "logits"))
    )


@contextmanager
def recording(block: nn.Module, hidden: dict[str, Tensor], path: str) -> Iterator[None]:
    """Record the output of a block inside the context.

    Regard's layers are called by `run`, which has no hooks.
    """
    if isinstance(block, Layer):
        original_run = block.run

        def run(*args: Any, **kwargs: Any) -> Any:
            hidden[path], state = original_run(*args, **kwargs)
            return hidden[path], state

        block.run = run  # type: ignore[method-assign]
        try:
            yield
        finally:
            del block.run
        return

    def record(module: nn.Module, args: Any, y: Any) -> None:
        hidden[path] = y if isinstance(y, Tensor) else y[0]

    handle = block.register_forward_hook(record)
    try:
        yield
    finally:
        handle.remove()


def mean_pool(y: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over tokens: (b, n, d) -> (b, d)."""
    if mask is None or mask.shape[1] != y.shape[1]:
        return y.mean(1)
    share = mask.to(y.dtype) / mask.sum(1, keepdim=True).clamp(min=1)
    return (y * share[..., None]).sum(1)
