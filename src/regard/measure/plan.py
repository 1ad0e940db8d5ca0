"""How many accelerators a training job needs, what each holds, and how long a step takes.

This is arithmetic on data sheets; docs/cost.md has the model behind it. All states are sharded as
by FSDP, experts are spread over data-parallel devices, nothing overlaps, and there is no pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil, gcd

from regard.errors import Unsupported, check_choice, check_int, check_positive
from regard.ffn import MixtureOfExperts
from regard.measure.accelerators import Accelerator
from regard.measure.cost import Cost, cost
from regard.measure.model import ModelSizes, model_sizes
from regard.models import Model

MAX_TENSOR_PARALLEL = 8  # inside one node
MAX_DEVICES = 1 << 17
ACTIVATION_TRAFFIC = 4  # how often an activation is moved: written and read, forward and backward
SECONDS_PER_DAY = 86_400
# bytes of a weight, of its gradient, and of AdamW's state: two moments, and a float32 copy of
# bfloat16 weights
BYTES = {"float32": (4, 4, 8), "tf32": (4, 4, 8), "bfloat16": (2, 2, 12)}
RECOMPUTE = ("nothing", "ffn", "layers")


@dataclass(frozen=True)
class TrainingJob:
    """What is trained.

    Args:
        model: The model, which may be on the meta device.
        length: Sequence length.
        batch: Sequences in a step.
        dtype: Type of weights and activations.
        tokens: Tokens to train on in total.
        accumulate: Number of micro-batches that a batch is split into.
        recompute: Activation checkpointing: of "nothing", of feed-forward layers ("ffn"), or of
            whole "layers".
    """

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
    def itemsize(self) -> int:
        """Bytes of a number."""
        return BYTES[self.dtype][0]

    @cached_property
    def cost(self) -> Cost:
        """Cost of a step without recomputation."""
        return cost(self.model, self.length, batch=self.batch, itemsize=self.itemsize)

    @cached_property
    def sizes(self) -> ModelSizes:
        """Sizes over the whole batch."""
        return model_sizes(self.model, self.length, self.batch)

    @cached_property
    def experts(self) -> list[MixtureOfExperts]:
        """The mixture-of-experts layers."""
        return [part for part in self.model.modules() if isinstance(part, MixtureOfExperts)]

    @cached_property
    def recomputation(self) -> tuple[int, int]:
        """Activation bytes that are saved, and FLOPs that are repeated, with `recompute`.

        A recomputed part saves its input alone; one part at a time has all its activations.
        """
        saved, layers = self.cost.activation_bytes, self.cost.parts
        if self.recompute == "layers":
            parts = [layer for layer in layers if layer.parts]
            saved += len(parts) * self.sizes.hidden * self.itemsize
        else:  # the norm before a feed-forward layer saves its input already
            parts = [
                part for layer in layers for part in layer.parts if part.name == self.recompute
            ]
        freed = [part.activation_bytes for part in parts]
        return saved - sum(freed) + max(freed, default=0), sum(part.forward_flops for part in parts)


@dataclass(frozen=True)
class Parallelism:
    """Number of devices along each axis: batch, heads and widths, and sequence length."""

    data: int = 1
    tensor: int = 1
    sequence: int = 1

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.data * self.tensor * self.sequence

    @property
    def shards(self) -> int:
        """Devices that share the states of the same weights."""
        return self.data * self.sequence


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on each device.

    `gathered` is the largest layer with its gradients, while it is in use.
    """

    parallelism: Parallelism
    expert_parallel: int
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int

    @property
    def total(self) -> int:
        """All bytes of a device."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.gathered + self.activations


@dataclass(frozen=True)
class TrainingPlan:
    """The fewest devices that hold a job, and the seconds of a step on them."""

    memory: DeviceMemory
    recompute: str
    compute_seconds: float
    memory_seconds: float
    communication_seconds: float
    tokens_per_second: float
    days: float | None

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return max(self.compute_seconds, self.memory_seconds) + self.communication_seconds


def plan(
    job: TrainingJob, device: Accelerator, *, heads: int = 1, efficiency: float | None = None
) -> TrainingPlan:
    """Find the smallest power of two of devices that holds a job, and the time of a step.

    Args:
        job: What is trained.
        device: The accelerator.
        heads: Attention heads, which tensor parallelism must divide.
        efficiency: Share of the peak FLOP/s that is reached. Default: that of the device.
    """
    efficiency = device.efficiency if efficiency is None else efficiency
    check_positive("efficiency", efficiency)
    for parallelism in parallelisms(job, heads):
        memory = device_memory(job, parallelism)
        if memory.total <= device.memory:
            break
    else:
        raise Unsupported(
            f"The model does not fit on {MAX_DEVICES:,} {device.name} devices "
            f"of {device.memory / 1e9:,.0f} GB each"
        )
    devices = memory.parallelism.devices
    flops = job.cost.forward_flops + job.cost.backward_flops + job.recomputation[1]
    compute = flops / (devices * device.peak(job.dtype) * efficiency)
    states = 2 * memory.parameters + memory.gradients + 2 * memory.optimizer
    traffic = states + ACTIVATION_TRAFFIC * job.cost.activation_bytes / devices
    times = (
        compute,
        traffic / device.bandwidth,
        communication_bytes(job, memory.parallelism) / device.link,
    )
    rate = job.batch * job.length / (max(times[:2]) + times[2])
    days = None if job.tokens is None else job.tokens / rate / SECONDS_PER_DAY
    return TrainingPlan(memory, job.recompute, *times, rate, days)


def parallelisms(job: TrainingJob, heads: int) -> Iterator[Parallelism]:
    """All ways to split a job: fewest devices first, then batch before widths before length."""
    powers = [1 << i for i in range(MAX_DEVICES.bit_length())]
    tensor_sizes = [t for t in powers if t <= MAX_TENSOR_PARALLEL and heads % t == 0]
    for devices in powers:
        found = [
            Parallelism(data, tensor, devices // (data * tensor))
            for data, tensor in product(powers, tensor_sizes)
            if data * tensor <= devices and data <= job.batch // job.accumulate
        ]
        found = [each for each in found if each.sequence <= job.length]
        yield from sorted(found, key=lambda each: (-each.data, each.sequence))


def device_memory(job: TrainingJob, parallelism: Parallelism) -> DeviceMemory:
    """Bytes on each device."""
    p, itemsize = parallelism, job.itemsize
    parameters, gradients, optimizer = (
        ceil(job.cost.parameters * size / p.devices) for size in BYTES[job.dtype]
    )
    expert_parallel = _expert_parallel(job, p)
    largest = max(
        part.active_parameters if expert_parallel > 1 else part.parameters
        for part in job.cost.parts
    )
    examples = ceil(job.batch / (p.data * job.accumulate))
    activations = job.recomputation[0] + 2 * job.sizes.outputs * itemsize
    return DeviceMemory(
        p,
        expert_parallel,
        parameters,
        gradients,
        optimizer,
        gathered=ceil(2 * largest * itemsize / p.tensor) if p.shards > 1 else 0,
        activations=ceil(activations * examples / job.batch / (p.tensor * p.sequence)),
    )


def communication_bytes(job: TrainingJob, parallelism: Parallelism) -> float:
    """Bytes that each device sends and receives in a step."""
    p, layers = parallelism, job.sizes.layers
    expert_parallel = _expert_parallel(job, p)
    in_experts = sum(weight.numel() for part in job.experts for weight in part.bank.parameters())
    dense = (job.cost.parameters - in_experts) * (p.shards - 1) / p.shards
    own_experts = in_experts / expert_parallel * (p.shards - expert_parallel) / p.shards
    # weights are gathered forward and backward, gradients are scattered
    states = 3 * job.accumulate * (dense + own_experts) * job.itemsize / p.tensor
    hidden = job.sizes.hidden * job.itemsize / p.shards
    # two all-reduces forward and two backward in each layer
    tensor = 4 * layers * 2 * hidden * (p.tensor - 1) / p.tensor
    # keys and values around the ring, once forward and twice backward
    sequence = 3 * layers * 2 * hidden / p.tensor * (p.sequence - 1)
    # tokens to their experts and back, forward and backward
    choices = sum(part.top_k for part in job.experts)
    experts = 4 * choices * hidden * (expert_parallel - 1) / expert_parallel
    return states + tensor + sequence + experts


def _expert_parallel(job: TrainingJob, parallelism: Parallelism) -> int:
    """Devices that share the experts: as many data-parallel ones as divide their number."""
    return gcd(*(part.num_experts for part in job.experts), parallelism.data) if job.experts else 1
