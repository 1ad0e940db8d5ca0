"""Does a model fit, over how many devices must it be spread, and how long is a training step?

Bytes of a device, with N = data · tensor · sequence devices:

    states        (weights + gradients + optimizer) / N                       all are sharded, as FSDP does
    activations   those of ⌈batch / data⌉ examples / (tensor · sequence)      by heads and widths, and by length

Seconds of a step:

    max(FLOPs / (N · peak · efficiency), bytes / bandwidth)  +  communication / link

    bytes           2 weights + gradients + 2 optimizer, and activations four times: written and read, forward and backward
    communication   weights gathered twice and gradients scattered once; four sums of all activations a layer between
                    tensor ways; keys and values passed round three times a layer between sequence ways

Nothing is assumed to overlap, and nothing to be accumulated over smaller batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from regard.errors import Unsupported, check_positive, check_whole
from regard.measure.accelerators import Accelerator, peak
from regard.measure.cost import Cost, cost
from regard.measure.model import TokenModel

MOST_TENSOR = 8  # ways inside one node
MOST_DEVICES = 1 << 17
TOUCHED = 4  # how often the bytes of an activation are moved
DAY = 86_400
# bytes of a weight, of its gradient, and of what AdamW keeps for it: two moments, and where weights are short a long copy
BYTES = {"float32": (4, 4, 8), "tf32": (4, 4, 8), "bfloat16": (2, 2, 12)}


@dataclass(frozen=True)
class Job:
    """What is to be trained: `batch` examples of `length` tokens a step, `tokens` in all."""

    model: TokenModel
    length: int
    batch: int = 1
    dtype: str = "bfloat16"
    tokens: int | None = None

    def __post_init__(self) -> None:
        check_whole(1, length=self.length, batch=self.batch)
        if self.dtype not in BYTES:
            raise ValueError(f"dtype must be one of {', '.join(BYTES)}, not {self.dtype!r}")
        if self.tokens is not None:
            check_whole(1, tokens=self.tokens)


@dataclass(frozen=True)
class Ways:
    """Into how many parts the batch, the widths and the length are cut."""

    data: int = 1
    tensor: int = 1
    sequence: int = 1

    @property
    def devices(self) -> int:
        """All together."""
        return self.data * self.tensor * self.sequence


@dataclass(frozen=True)
class Share:
    """Bytes on each device."""

    ways: Ways
    recompute: bool
    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All together."""
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Plan:
    """The fewest devices that hold it, what each holds, and the seconds of a step."""

    share: Share
    compute: float
    memory: float
    communication: float
    tokens_per_second: float
    days: float | None

    @property
    def seconds(self) -> float:
        """Of a step."""
        return max(self.compute, self.memory) + self.communication


def activations(job: Job, found: Cost, batch: int, *, recompute: bool) -> int:
    """Bytes of activations of so many examples; recomputed, a layer keeps its input alone, and one of them all it needs."""
    width = BYTES[job.dtype][0]
    rows = batch * job.length * width
    logits = 2 * rows * job.model.head.out_features
    if not recompute:
        return found.saved * batch // job.batch + logits
    layers = len(job.model.stack.layers)
    most = max(part.saved for part in found.parts) * batch // job.batch
    return layers * rows * job.model.stack.dim + most + logits


def share(job: Job, found: Cost, ways: Ways, *, recompute: bool = False) -> Share:
    """What each device holds."""
    weights, gradients, optimizer = (ceil(found.parameters * each / ways.devices) for each in BYTES[job.dtype])
    batch = ceil(job.batch / ways.data)
    kept = ceil(activations(job, found, batch, recompute=recompute) / (ways.tensor * ways.sequence))
    return Share(ways, recompute, weights, gradients, optimizer, kept)


def spread(job: Job, heads: int) -> Iterator[Ways]:
    """Ways to cut the work, fewest devices first; the batch before the widths, and those before the length."""
    count = 1
    while count <= MOST_DEVICES:
        found = [w for w in _cuts(count) if w.data <= job.batch and heads % w.tensor == 0 and w.sequence <= job.length]
        yield from sorted(found, key=lambda w: (-w.data, w.sequence))
        count *= 2


def _cuts(count: int) -> Iterator[Ways]:
    tensor = 1
    while tensor <= min(MOST_TENSOR, count):
        data = 1
        while tensor * data <= count:
            yield Ways(data, tensor, count // (tensor * data))
            data *= 2
        tensor *= 2


def plan(job: Job, device: Accelerator, *, heads: int = 1, recompute: bool = False, efficiency: float | None = None) -> Plan:
    """The fewest devices, a power of two, that hold the job, and how long a step takes on them."""
    efficiency = device.efficiency if efficiency is None else efficiency
    check_positive("efficiency", efficiency)
    width = BYTES[job.dtype][0]
    found = cost(job.model, job.length, batch=job.batch, width=width)
    for ways in spread(job, heads):
        each = share(job, found, ways, recompute=recompute)
        if each.total <= device.memory:
            return _timed(job, found, each, device, efficiency)
    raise Unsupported(f"{MOST_DEVICES:,} of {device.name} do not hold it: each has {device.memory / 1e9:,.0f} GB")


def _timed(job: Job, found: Cost, each: Share, device: Accelerator, efficiency: float) -> Plan:
    """Seconds of a step on these devices."""
    ways = each.ways
    flops = found.forward + found.backward + (found.forward if each.recompute else 0)
    compute = flops / (ways.devices * peak(device, job.dtype) * efficiency)
    local = found.saved / ways.devices
    moved = 2 * each.parameters + each.gradients + 2 * each.optimizer + TOUCHED * local
    sent = communication(job, found, ways)
    seconds = max(compute, moved / device.bandwidth) + sent / device.link
    rate = job.batch * job.length / seconds
    days = None if job.tokens is None else job.tokens / rate / DAY
    return Plan(each, compute, moved / device.bandwidth, sent / device.link, rate, days)


def communication(job: Job, found: Cost, ways: Ways) -> float:
    """Bytes that each device sends and receives in a step."""
    width = BYTES[job.dtype][0]
    shards, layers = ways.data * ways.sequence, len(job.model.stack.layers)
    states = 3 * found.parameters * width / ways.tensor * (shards - 1) / shards
    stream = ceil(job.batch / ways.data) * job.length * job.model.stack.dim * width / ways.sequence
    sums = 4 * layers * 2 * stream * (ways.tensor - 1) / ways.tensor
    passed = 3 * layers * 2 * stream / ways.tensor * (ways.sequence - 1)
    return states + sums + passed
