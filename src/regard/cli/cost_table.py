"""Tables of costs, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, zip_longest

from rich.table import Table

from regard.measure.cost import Cost
from regard.measure.memory import StepMemory
from regard.measure.plan import RECOMPUTE, TrainingPlan
from regard.measure.timing import MeasuredStep

COLUMNS = ("parameters", "FLOPs forward", "backward", "activations", "state", "a token")


def amount(number: float) -> str:
    """1,234, 12.3 K, 4.56 M and so on: three figures."""
    return _short(number, 1000, ("", " K", " M", " G", " T", " P", " E", " Z", " Y"))


def size(number: float) -> str:
    """Bytes, in powers of ten."""
    return _short(number, 1000, (" B", " kB", " MB", " GB", " TB", " PB", " EB", " ZB", " YB"))


def _short(number: float, step: int, units: Sequence[str]) -> str:
    place = 0
    while abs(number) >= step and place < len(units) - 1:
        number, place = number / step, place + 1
    return f"{number:,.0f}{units[0]}" if not place else f"{number:.3g}{units[place]}"


def span(seconds: float) -> str:
    """Seconds, in words."""
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= length:
            many = seconds / length
            return f"{many:,.0f} {unit}" if many >= 100 else f"{many:.3g} {unit}"
    return f"{seconds * 1e3:.3g} ms"


def cost_table(found: Cost) -> Table:
    """A line for each part; layers that are alike share one."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    table.add_column("part", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for depth, name, part in _lines(found):
        table.add_row("  " * depth + name, *_numbers(part), style="bold" if not depth else "")
    table.add_row("total", *_numbers(found), style="bold")
    return table


def _numbers(part: Cost) -> list[str]:
    bytes_ = (
        size(part.saved),
        size(part.state) if part.state else "",
        size(part.per_token) if part.per_token else "",
    )
    return [
        f"{part.parameters:,}" if part.parameters else "",
        amount(part.forward),
        amount(part.backward),
        *bytes_,
    ]


def _lines(found: Cost) -> Iterator[tuple[int, str, Cost]]:
    """Parts, and the parts of the first of each run of layers that are alike."""
    for _, run in groupby(found.parts, key=_alike):
        parts = list(run)
        times = f" .. {parts[-1].name.split()[-1]}, each" if len(parts) > 1 else ""
        yield 0, parts[0].name + times, parts[0]
        for part in parts[0].parts:
            yield 1, f"{part.name}: {part.kind}", part


def _alike(part: Cost) -> Cost:
    return replace(part, name="")


def measured_table(found: Cost, memory: StepMemory, measured: MeasuredStep | None) -> Table:
    """A training step as predicted, and as measured where it was."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for name in (
        "a training step",
        "by formula",
        *(("measured", "formula / measured") if measured else ()),
    ):
        table.add_column(
            name, justify="left" if name == "a training step" else "right", no_wrap=True
        )
    predicted = {
        "FLOPs forward": found.forward,
        "FLOPs backward": found.backward,
        "activations kept, bytes": memory.saved,
        "peak memory with AdamW, bytes": memory.peak,
        "the same of a whole process, about, bytes": memory.process,
    }
    real = (
        ()
        if measured is None
        else (measured.forward, measured.backward, measured.saved, measured.peak)
    )
    for (name, number), beside in zip_longest(predicted.items(), real):
        more = (
            () if beside is None else (amount(beside), f"{number / beside:.3f}" if beside else "")
        )
        table.add_row(name, amount(number), *more)
    if measured is not None:
        table.add_row("seconds of the processor, for each thread", "", f"{measured.seconds:.3g}")
    return table


def plan_table(plans: Sequence[TrainingPlan | str]) -> Table:
    """One column for each way to compute again."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for name in ("training", *(f"{what} again" for what in RECOMPUTE)):
        table.add_column(name, justify="left" if name == "training" else "right")
    columns = [_plan_lines(each) for each in plans]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(column.get(name, "") for column in columns))
    return table


def _plan_lines(each: TrainingPlan | str) -> dict[str, str]:
    if isinstance(each, str):
        return {"devices": each}
    share, ways = each.share, each.share.ways
    return {
        "devices": f"{ways.devices:,}",
        "data x tensor x sequence ways": f"{ways.data:,} x {ways.tensor:,} x {ways.sequence:,}",
        **({"experts, among data ways": f"{share.expert:,}"} if share.expert > 1 else {}),
        "a device: weights and gradients": size(share.parameters + share.gradients),
        "a device: optimizer": size(share.optimizer),
        "a device: a layer, gathered": size(share.gathered),
        "a device: activations": size(share.activations),
        "a device: in all": size(share.total),
        "a step: products": span(each.compute),
        "a step: memory traffic": span(each.memory),
        "a step: communication": span(each.communication),
        "a step": span(each.seconds),
        "tokens a second": amount(each.tokens_per_second),
        "in all": "" if each.days is None else span(each.days * 86_400),
    }
