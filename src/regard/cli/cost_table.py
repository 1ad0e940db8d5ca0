"""Tables of `regard cost` for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import groupby

from rich.table import Table

from regard.measure.cost import Cost
from regard.measure.memory import StepMemory
from regard.measure.plan import RECOMPUTE, TrainingPlan
from regard.measure.timing import MeasuredStep


def format_number(number: float, unit: str = "") -> str:
    """Three significant digits with a metric prefix: "1.23 K", or "1.23 kB" with unit B."""
    for prefix in ("", "k" if unit else "K", "M", "G", "T", "P", "E", "Z", "Y"):
        if abs(number) < 1000 or prefix == "Y":
            break
        number /= 1000
    value = f"{number:.3g}" if prefix else f"{number:,.0f}"
    return f"{value} {prefix}{unit}".rstrip()


def format_bytes(number: float) -> str:
    """Bytes, with a decimal prefix."""
    return format_number(number, "B")


def format_seconds(seconds: float) -> str:
    """Seconds in the largest unit that fits, from ms to days."""
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= length:
            value = seconds / length
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{seconds * 1e3:.3g} ms"


def _table(title: str, columns: Iterable[str], *, wrap: bool = False) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    table.add_column(title, no_wrap=not wrap)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=not wrap)
    return table


def cost_table(total: Cost) -> Table:
    """One row for each part. Consecutive layers with equal costs share a row."""
    columns = ("parameters", "forward FLOPs", "backward", "activations", "state", "per token")
    table = _table("part", columns)

    def add(name: str, part: Cost, *, bold: bool = False) -> None:
        table.add_row(
            name,
            f"{part.parameters:,}" if part.parameters else "",
            format_number(part.forward_flops),
            format_number(part.backward_flops),
            format_bytes(part.activation_bytes),
            format_bytes(part.state_bytes) if part.state_bytes else "",
            format_bytes(part.state_bytes_per_token) if part.state_bytes_per_token else "",
            style="bold" if bold else "",
        )

    for _, group in groupby(total.parts, key=lambda part: replace(part, name="")):
        first, *others = group
        more = f" .. {others[-1].name.split()[-1]}, each" if others else ""
        add(first.name + more, first, bold=True)
        for part in first.parts:
            add(f"  {part.name}: {part.kind}" if part.kind else f"  {part.name}", part)
    add("total", total, bold=True)
    return table


def step_table(total: Cost, memory: StepMemory, measured: MeasuredStep | None) -> Table:
    """A training step as predicted, and as measured if it was."""
    columns = ("predicted",) if measured is None else ("predicted", "measured", "ratio")
    table = _table("training step", columns)
    rows = {
        "forward FLOPs": ("forward_flops", total.forward_flops),
        "backward FLOPs": ("backward_flops", total.backward_flops),
        "activation bytes": ("activation_bytes", memory.activation_bytes),
        "peak memory with AdamW, bytes": ("peak_bytes", memory.peak_bytes),
        "peak memory of the process, bytes": ("process_bytes", memory.process_bytes),
    }
    values = {} if measured is None else asdict(measured)
    for name, (field, predicted) in rows.items():
        actual = values.get(field)
        ratio = [format_number(actual), f"{predicted / actual:.3f}"] if actual else []
        table.add_row(name, format_number(predicted), *ratio)
    if measured is not None:
        table.add_row("processor seconds, per thread", "", f"{measured.seconds:.3g}")
    return table


def plan_table(plans: Sequence[TrainingPlan | str]) -> Table:
    """One column for each kind of recomputation."""
    table = _table("training plan", (f"recompute {what}" for what in RECOMPUTE), wrap=True)
    columns = [{"devices": each} if isinstance(each, str) else _plan_rows(each) for each in plans]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(column.get(name, "") for column in columns))
    return table


def _plan_rows(plan: TrainingPlan) -> dict[str, str]:
    memory, parallelism = plan.memory, plan.memory.parallelism
    axes = (parallelism.data, parallelism.tensor, parallelism.sequence)
    rows = {
        "devices": f"{parallelism.devices:,}",
        "data x tensor x sequence parallel": " x ".join(f"{axis:,}" for axis in axes),
    }
    if memory.expert_parallel > 1:
        rows["expert parallel"] = f"{memory.expert_parallel:,}"
    rows |= {
        "device memory: weights, gradients": format_bytes(memory.parameters + memory.gradients),
        "device memory: optimizer": format_bytes(memory.optimizer),
        "device memory: gathered layer": format_bytes(memory.gathered),
        "device memory: activations": format_bytes(memory.activations),
        "device memory: total": format_bytes(memory.total),
        "step: compute": format_seconds(plan.compute_seconds),
        "step: memory traffic": format_seconds(plan.memory_seconds),
        "step: communication": format_seconds(plan.communication_seconds),
        "step: total": format_seconds(plan.step_seconds),
        "tokens per second": format_number(plan.tokens_per_second),
    }
    if plan.days is not None:
        rows["training time"] = format_seconds(plan.days * 86_400)
    return rows
