"""One model on several processes: copies of it (DDP), or a share of each weight on every process (FSDP2).

Each process sees its share of a batch.  Gradients are those of the mean over all targets of the whole batch, whatever share of
them a process has: what one process would have found, but for rounding.  Experts that were spread (`MixtureOfExperts.spread`) stay
where they are: their gradients are complete already, and are only brought to the same scale.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from regard.block import Layer
from regard.errors import Unsupported
from regard.ffn.expert_bank import ShardedExpertBank
from regard.models.serialization import unique_tensors
from regard.stack import SequentialStack
from regard.train.distributed import WorkerGroup


class ParallelStrategy(ABC):
    """Where the weights of a model are, and how their gradients come together.

    Made before the optimiser, which has to see the parameters as they then are.  Every method is called by all processes.
    """

    foreach: bool | None = (
        None  # whether the optimiser may take many parameters at once; None: as torch likes
    )

    def __init__(self, model: nn.Module, group: WorkerGroup) -> None:
        self.model, self.group = model, group
        self.spread = spread_parameters(model, group)
        if group.world > 1:
            model.to(group.device)
            self._agree()

    @abstractmethod
    def wrap(self, lesson: nn.Module) -> nn.Module:
        """What to call for a loss, so that `backward` brings the gradients together."""

    def holding(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Inside, gradients need not come together yet: more of the same batch follows."""
        return nullcontext()

    @abstractmethod
    def clip(self, most: float | None) -> float:
        """Finish the gradients and cut them to a norm over all processes; returns the norm that they had."""

    # ------------------------------------------------------------------------------------------ whole tensors
    def whole(self, tensor: Tensor, owner: Tensor) -> Tensor:
        """All of a tensor of which this process may have a share; `owner` is the parameter that it is or belongs to."""
        if isinstance(tensor, DTensor):
            return tensor.full_tensor()
        if id(owner) in self.spread and tensor.shape == owner.shape:
            return torch.cat(self.group.every(tensor.detach()))
        return tensor

    def share(self, tensor: Tensor, owner: Tensor) -> Tensor:
        """The other way round: what of a whole tensor belongs here."""
        if isinstance(owner, DTensor) and tensor.shape == owner.shape:
            return distribute_tensor(
                tensor.to(self.group.device), owner.device_mesh, owner.placements
            )
        if id(owner) in self.spread and tensor.dim():
            return tensor.chunk(self.group.world)[self.group.rank]
        return tensor

    def collect(self) -> dict[str, Tensor]:
        """The model's own tensors, whole and on the CPU, under the names that they have in one process."""
        return {
            self.public(name): self.kept(t, t) for name, t in unique_tensors(self.model).items()
        }

    @torch.no_grad()
    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `collect` gave, here or with another number of processes."""
        for name, mine in unique_tensors(self.model).items():
            mine.copy_(self.share(tensors[self.public(name)], mine))

    def kept(self, tensor: Tensor, owner: Tensor) -> Tensor:
        """The whole tensor, on the CPU."""
        return self.whole(tensor.detach(), owner).cpu()

    def public(self, name: str) -> str:
        """The name of a tensor in a model that is not spread."""
        for path, module in self.model.named_modules():
            if isinstance(module, ShardedExpertBank) and name.startswith(f"{path}.bank."):
                return f"{path}.{name.removeprefix(f'{path}.bank.')}"
        return name

    def parameters(self) -> int:
        """How many numbers the whole model has."""
        return sum(
            p.numel() * (self.group.world if id(p) in self.spread else 1)
            for p in self.model.parameters()
        )

    @torch.no_grad()
    def _agree(self) -> None:
        """All begin with the weights of the first process."""
        for tensor in unique_tensors(self.model).values():
            if id(tensor) not in self.spread:
                told = (
                    tensor.detach()
                    .to(torch.uint8 if tensor.dtype == torch.bool else tensor.dtype)
                    .contiguous()
                )
                dist.broadcast(told, 0)
                tensor.copy_(told)


class SingleProcess(ParallelStrategy):
    """One process has it all."""

    def wrap(self, lesson: nn.Module) -> nn.Module:
        """See `ParallelStrategy`."""
        return lesson

    def clip(self, most: float | None) -> float:
        """See `ParallelStrategy`."""
        return float(
            nn.utils.clip_grad_norm_(self.model.parameters(), math.inf if most is None else most)
        )


class DDPStrategy(ParallelStrategy):
    """Every process has a copy, and gradients are averaged while they are computed (`DistributedDataParallel`)."""

    def wrap(self, lesson: nn.Module) -> nn.Module:
        """See `ParallelStrategy`."""
        names = [name for name, p in lesson.named_parameters() if id(p) in self.spread]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(lesson, names)
        # a batch may leave out parts of a model, such as an expert that nobody asks
        return DistributedDataParallel(lesson, find_unused_parameters=True)

    def holding(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """See `ParallelStrategy`."""
        assert isinstance(wrapped, DistributedDataParallel)
        return wrapped.no_sync()

    def clip(self, most: float | None) -> float:
        """See `ParallelStrategy`."""
        own = [p for p in self.model.parameters() if p.grad is not None and id(p) in self.spread]
        copied = [
            p for p in self.model.parameters() if p.grad is not None and id(p) not in self.spread
        ]
        scale(
            own, 1 / self.group.world
        )  # each process counted its loss `world` times, for the average over copies
        return cut(own, copied, most, self.group)


class FSDPStrategy(ParallelStrategy):
    """Every process has a share of each weight, and all of it only while a layer runs (`fully_shard`, FSDP2).

    Layers of other stacks than plain ones, and those that share weights, are gathered with the rest of the model.  Weights that
    are one number are copied.
    """

    foreach = False  # it would mix shares and copies

    def __init__(self, model: nn.Module, group: WorkerGroup) -> None:
        super().__init__(model, group)
        self.copied = {id(p) for p in model.parameters() if p.dim() == 0}
        mesh = init_device_mesh(group.device.type, (group.world,))
        left = {p for p in model.parameters() if id(p) in self.copied or id(p) in self.spread}
        for layer in separate(model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=left)
            register_fsdp_forward_method(layer, "run")  # stacks call it, and not `forward`
        fully_shard(model, mesh=mesh, reshard_after_forward=True, ignored_params=left)

    def wrap(self, lesson: nn.Module) -> nn.Module:
        """See `ParallelStrategy`: the model itself does it."""
        return lesson

    def clip(self, most: float | None) -> float:
        """See `ParallelStrategy`."""
        copied = [p for p in self.model.parameters() if id(p) in self.copied]
        for p in copied:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
        scale(
            [*copied, *(p for p in self.model.parameters() if id(p) in self.spread)],
            1 / self.group.world,
        )
        shares = [
            p for p in self.model.parameters() if p.grad is not None and id(p) not in self.copied
        ]
        return cut(shares, copied, most, self.group)


PARALLEL: dict[str, type[ParallelStrategy]] = {"ddp": DDPStrategy, "fsdp": FSDPStrategy}


def build_strategy(model: nn.Module, kind: str, group: WorkerGroup) -> ParallelStrategy:
    """Put a model on the processes of a group."""
    return (SingleProcess if group.world == 1 else PARALLEL[kind])(model, group)


def separate(model: nn.Module) -> list[Layer]:
    """The layers that can be gathered one by one: those of plain stacks, with parameters that are theirs alone.

    Other stacks may go around `run`, or run a layer again while they go back.
    """
    stacks = [m for m in model.modules() if isinstance(m, Layer) and made_of_layers(m)]
    hidden = {
        id(m) for stack in stacks if not isinstance(stack, SequentialStack) for m in stack.modules()
    }
    plain = [
        stack for stack in stacks if isinstance(stack, SequentialStack) and id(stack) not in hidden
    ]
    layers = list(
        dict.fromkeys(
            layer for stack in plain for layer in stack.layers if not made_of_layers(layer)
        )
    )
    inside = {id(m) for layer in layers for m in layer.modules()}
    held = Counter(id(p) for layer in layers for p in layer.parameters())
    held.update(
        id(p) for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)
    )
    return [layer for layer in layers if all(held[id(p)] == 1 for p in layer.parameters())]


def made_of_layers(module: nn.Module) -> bool:
    """Whether there are layers inside."""
    return any(isinstance(m, Layer) for m in module.modules() if m is not module)


def spread_parameters(model: nn.Module, group: WorkerGroup) -> set[int]:
    """The parameters of experts that live on this process alone, by their ids."""
    banks = [module for module in model.modules() if isinstance(module, ShardedExpertBank)]
    for bank in banks:
        if bank.world != group.world:
            raise Unsupported(
                f"experts are spread over {bank.world} processes, and {group.world} train: spread them over all"
            )
    return {id(p) for bank in banks for p in bank.parameters()} if group.world > 1 else set()


@torch.no_grad()
def scale(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply the gradients that are there."""
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(factor)


def cut(
    shares: Sequence[Tensor], copied: Sequence[Tensor], most: float | None, group: WorkerGroup
) -> float:
    """The norm of the gradient, of which some is here alone and some the same everywhere; cut it to `most`, as
    `clip_grad_norm_` does."""
    norm = math.sqrt(group.sum(squares(shares))[0] + squares(copied))
    if most is not None:
        scale([*shares, *copied], min(1.0, most / (norm + 1e-6)))
    return norm


def squares(parameters: Iterable[Tensor]) -> float:
    """Σ of the squared gradients that are on this process."""
    grads = [p.grad for p in parameters if p.grad is not None]
    here = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    return sum(float(g.detach().double().square().sum()) for g in here)
