"""Does a model fit, over how many devices must it be spread, and how long is a training step?

Bytes of a device, with N = data · tensor · sequence devices:

    states        (weights + gradients + optimizer) / N                       all are sharded, as FSDP does
    gathered      weights and gradients of the largest layer / tensor         where there is more than one shard; of experts
                                                                              only those that live here
    activations   those of ⌈batch / (data · accumulate)⌉ examples / (tensor · sequence)      by heads and widths, and by length

Seconds of a step:

    max(FLOPs / (N · peak · efficiency), bytes / bandwidth)  +  communication / link

    bytes           2 weights + gradients + 2 optimizer, and activations four times: written and read, forward and backward
    communication   for each part of the batch, weights gathered twice and gradients scattered once; four sums of all
                    activations a layer between tensor ways; keys and values passed round three times a layer between
                    sequence ways; tokens to their experts and back, forward and backward

Experts live on as many of the data ways as divide them, and are not gathered.  Nothing is assumed to overlap, and there is no
pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, gcd
from typing import NamedTuple

from regard.errors import Unsupported, check_choice, check_int, check_positive
from regard.ffn import MixtureOfExperts
from regard.measure.accelerators import Accelerator, peak
from regard.measure.cost import Cost, cost
from regard.measure.model import Outline, outline
from regard.models import Model

MOST_TENSOR = 8  # ways inside one node
MOST_DEVICES = 1 << 17
TOUCHED = 4  # how often the bytes of an activation are moved
DAY = 86_400
# bytes of a weight, of its gradient, and of what AdamW keeps for it: two moments, and where weights are short a long copy
BYTES = {"float32": (4, 4, 8), "tf32": (4, 4, 8), "bfloat16": (2, 2, 12)}


# what the backward pass computes again instead of keeping it, by name: the sub-layers that a layer makes again
RECOMPUTE = ("nothing", "ffn", "layers")


@dataclass(frozen=True)
class TrainingJob:
    """What is to be trained: `batch` examples of `length` tokens a step, in `accumulate` parts one after the other, and
    `tokens` in all; of `recompute`, nothing, the feed-forward layers, or whole layers are computed again."""

    model: Model
    length: int
    batch: int = 1
    dtype: str = "bfloat16"
    tokens: int | None = None
    accumulate: int = 1
    recompute: str = "nothing"

    def __post_init__(self) -> None:
        check_int(1, length=self.length, batch=self.batch, accumulate=self.accumulate)
        check_choice("dtype", self.dtype, BYTES)
        check_choice("recompute", self.recompute, RECOMPUTE)
        if self.accumulate > self.batch:
            raise ValueError(
                f"accumulate must be at most the batch, {self.batch}, not {self.accumulate}"
            )
        if self.tokens is not None:
            check_int(1, tokens=self.tokens)

    @property
    def width(self) -> int:
        """Bytes of a number."""
        return BYTES[self.dtype][0]

    @property
    def outline(self) -> Outline:
        """Sizes over the whole batch."""
        return outline(self.model, self.length, self.batch)


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
    """Bytes on each device; experts live `expert` ways apart."""

    ways: Ways
    expert: int
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int

    @property
    def total(self) -> int:
        """All together."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.activations


@dataclass(frozen=True)
class TrainingPlan:
    """The fewest devices that hold it, what each holds, and the seconds of a step."""

    share: Share
    recompute: str
    compute: float
    memory: float
    communication: float
    tokens_per_second: float
    days: float | None

    @property
    def seconds(self) -> float:
        """Of a step."""
        return max(self.compute, self.memory) + self.communication


# ---------------------------------------------------------------------------------------------- what is computed again
class Again(NamedTuple):
    """What recomputation leaves: bytes that are kept over the whole batch, and FLOPs that are done a second time."""

    kept: int
    flops: int


def again(job: TrainingJob, found: Cost) -> Again:
    """A part that is computed again keeps its input alone, and one of them at a time all it needs."""
    whole = job.recompute == "layers"
    parts = [
        part
        for layer in found.parts
        for part in ([layer] if whole else layer.parts)
        if _repeats(job.recompute, part)
    ]
    if not parts:
        return Again(found.saved, 0)
    freed = sum(part.saved for part in parts) - max(part.saved for part in parts)
    inputs = (
        0 if not whole else len(parts) * job.outline.stream * job.width
    )  # a norm keeps the input of an ffn already
    return Again(found.saved - freed + inputs, sum(part.forward for part in parts))


def _repeats(recompute: str, part: Cost) -> bool:
    """Whether a part is made again: any layer, which has parts of its own, or a feed-forward layer by its name."""
    return bool(part.parts) if recompute == "layers" else recompute == "ffn" and part.name == "ffn"


# ---------------------------------------------------------------------------------------------- what a device holds
class Crowd(NamedTuple):
    """The experts of a model: how many stand side by side, their parameters in all, and choices of a token in all layers."""

    side_by_side: int
    parameters: int
    asked: int


def crowd(model: Model) -> Crowd:
    """All experts of a model; layers with different numbers of them count by what divides all."""
    layers = [part for part in model.modules() if isinstance(part, MixtureOfExperts)]
    parameters = sum(p.numel() for part in layers for p in part.bank.parameters())
    return Crowd(
        gcd(*(part.count for part in layers)) or 1, parameters, sum(part.top for part in layers)
    )


def share(job: TrainingJob, found: Cost, ways: Ways) -> Share:
    """What each device holds."""
    weights, gradients, optimizer = (
        ceil(found.parameters * each / ways.devices) for each in BYTES[job.dtype]
    )
    examples = ceil(job.batch / (ways.data * job.accumulate))
    here = again(job, found).kept + 2 * job.outline.logits * job.width
    kept = ceil(here * examples / job.batch / (ways.tensor * ways.sequence))
    experts, shards = gcd(crowd(job.model).side_by_side, ways.data), ways.data * ways.sequence
    largest = max(
        part.parameters - (part.parameters - part.active) * (experts > 1) for part in found.parts
    )
    gathered = ceil(2 * largest * job.width / ways.tensor) if shards > 1 else 0
    return Share(ways, experts, weights, gradients, optimizer, gathered, kept)


def spread(job: TrainingJob, heads: int) -> Iterator[Ways]:
    """Ways to cut the work, fewest devices first; the batch before the widths, and those before the length."""
    count, examples = 1, job.batch // job.accumulate
    while count <= MOST_DEVICES:
        found = [
            w
            for w in _cuts(count)
            if w.data <= examples and heads % w.tensor == 0 and w.sequence <= job.length
        ]
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


# ---------------------------------------------------------------------------------------------- how long a step takes
def plan(
    job: TrainingJob, device: Accelerator, *, heads: int = 1, efficiency: float | None = None
) -> TrainingPlan:
    """The fewest devices, a power of two, that hold the job, and how long a step takes on them."""
    efficiency = device.efficiency if efficiency is None else efficiency
    check_positive("efficiency", efficiency)
    found = cost(job.model, job.length, batch=job.batch, width=job.width)
    for ways in spread(job, heads):
        each = share(job, found, ways)
        if each.total <= device.memory:
            return _timed(job, found, each, device, efficiency)
    raise Unsupported(
        f"{MOST_DEVICES:,} of {device.name} do not hold it: each has {device.memory / 1e9:,.0f} GB"
    )


def _timed(
    job: TrainingJob, found: Cost, each: Share, device: Accelerator, efficiency: float
) -> TrainingPlan:
    """Seconds of a step on these devices."""
    devices = each.ways.devices
    flops = found.forward + found.backward + again(job, found).flops
    compute = flops / (devices * peak(device, job.dtype) * efficiency)
    moved = (
        2 * each.parameters + each.gradients + 2 * each.optimizer + TOUCHED * found.saved / devices
    )
    memory, sent = moved / device.bandwidth, communication(job, found, each.ways) / device.link
    rate = job.batch * job.length / (max(compute, memory) + sent)
    days = None if job.tokens is None else job.tokens / rate / DAY
    return TrainingPlan(each, job.recompute, compute, memory, sent, rate, days)


def communication(job: TrainingJob, found: Cost, ways: Ways) -> float:
    """Bytes that each device sends and receives in a step."""
    experts = crowd(job.model)
    spread_over = gcd(experts.side_by_side, ways.data)
    shards, layers = ways.data * ways.sequence, job.outline.layers
    dense = (found.parameters - experts.parameters) * (shards - 1) / shards
    own = experts.parameters / spread_over * (shards - spread_over) / shards
    states = 3 * job.accumulate * (dense + own) * job.width / ways.tensor
    stream = job.outline.stream * job.width / (ways.data * ways.sequence)
    sums = 4 * layers * 2 * stream * (ways.tensor - 1) / ways.tensor
    passed = 3 * layers * 2 * stream / ways.tensor * (ways.sequence - 1)
    exchanged = 4 * experts.asked * stream * (spread_over - 1) / spread_over
    return states + sums + passed + exchanged
