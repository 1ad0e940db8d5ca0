"""One model on several processes: a copy on each (DDP), or a shard of every weight on each (FSDP2).

Each process reads its part of a batch. The gradients are those of the mean over all targets of the
batch, however the targets are distributed: the same as in one process, up to rounding. Experts that
are spread over the processes (`MixtureOfExperts.spread`) stay where they are. Their gradients are
complete already and only need to be rescaled.
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
    """Where the weights of a model are, and how their gradients are combined.

    Create it before the optimizer, because it may replace the parameters. All processes must call
    every method.

    Attributes:
        foreach: The optimizer's `foreach` argument; None leaves it to PyTorch.
    """

    foreach: bool | None = None

    def __init__(self, model: nn.Module, group: WorkerGroup) -> None:
        self.model, self.group = model, group
        self.local_ids = local_expert_ids(model, group)
        model.to(group.device)
        if group.world_size > 1:
            self._broadcast_weights()

    @abstractmethod
    def wrap(self, loss_module: nn.Module) -> nn.Module:
        """The module to call for the loss, whose backward pass combines the gradients."""

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """A context in which gradients only accumulate: more parts of the same batch follow."""
        return nullcontext()

    @abstractmethod
    def clip_gradients(self, max_norm: float | None) -> float:
        """Finish the gradients, clip their norm over all processes, and return the norm."""

    # ---------------------------------------------------------------- full tensors and shards
    def full_tensor(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """The full tensor, on the CPU, of which this process may have a shard.

        Args:
            tensor: A parameter, or a tensor of its shape such as an optimizer state.
            parameter: The parameter that it belongs to.
        """
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        elif id(parameter) in self.local_ids and tensor.shape == parameter.shape:
            tensor = torch.cat(self.group.all_gather(tensor))
        return tensor.cpu()

    def local_shard(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """The inverse of `full_tensor`: the shard of a full tensor that belongs to this process."""
        if isinstance(parameter, DTensor) and tensor.shape == parameter.shape:
            tensor = tensor.to(self.group.device)
            return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
        if id(parameter) in self.local_ids and tensor.dim():
            return tensor.chunk(self.group.world_size)[self.group.rank]
        return tensor

    def full_state(self) -> dict[str, Tensor]:
        """The tensors of the model, full and on the CPU, under their names in a single process."""
        tensors = unique_tensors(self.model)
        return {self.full_name(name): self.full_tensor(t, t) for name, t in tensors.items()}

    @torch.no_grad()
    def load_full_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `full_state` returned, possibly with another number of processes."""
        for name, mine in unique_tensors(self.model).items():
            mine.copy_(self.local_shard(tensors[self.full_name(name)], mine))

    def full_name(self, name: str) -> str:
        """The name of a tensor in a model whose experts are not spread."""
        for path, module in self.model.named_modules():
            if isinstance(module, ShardedExpertBank) and name.startswith(f"{path}.bank."):
                return f"{path}.{name.removeprefix(f'{path}.bank.')}"
        return name

    def count_parameters(self) -> int:
        """Number of parameters of the full model."""
        copies = {True: self.group.world_size, False: 1}
        return sum(p.numel() * copies[id(p) in self.local_ids] for p in self.model.parameters())

    @torch.no_grad()
    def _broadcast_weights(self) -> None:
        """Give all processes the weights of the first one."""
        for tensor in unique_tensors(self.model).values():
            if id(tensor) not in self.local_ids:
                dtype = torch.uint8 if tensor.dtype == torch.bool else tensor.dtype
                sent = tensor.detach().to(dtype).contiguous()
                dist.broadcast(sent, 0)
                tensor.copy_(sent)


class SingleProcess(ParallelStrategy):
    """One process has the whole model."""

    def wrap(self, loss_module: nn.Module) -> nn.Module:
        """Return the module itself."""
        return loss_module

    def clip_gradients(self, max_norm: float | None) -> float:
        """See `ParallelStrategy`."""
        norm = math.inf if max_norm is None else max_norm
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), norm))


class DDPStrategy(ParallelStrategy):
    """Every process has a copy; gradients are averaged (`DistributedDataParallel`)."""

    def wrap(self, loss_module: nn.Module) -> nn.Module:
        """See `ParallelStrategy`."""
        ignored = [name for name, p in loss_module.named_parameters() if id(p) in self.local_ids]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(loss_module, ignored)
        # a batch may not use all parameters, such as those of an expert without tokens
        return DistributedDataParallel(loss_module, find_unused_parameters=True)

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """See `ParallelStrategy`."""
        assert isinstance(wrapped, DistributedDataParallel)
        return wrapped.no_sync()

    def clip_gradients(self, max_norm: float | None) -> float:
        """See `ParallelStrategy`."""
        used = [p for p in self.model.parameters() if p.grad is not None]
        local = [p for p in used if id(p) in self.local_ids]
        replicated = [p for p in used if id(p) not in self.local_ids]
        # the loss of each process was multiplied by world_size, for the average over the copies
        scale_gradients(local, 1 / self.group.world_size)
        return clip_total_norm(local, replicated, max_norm, self.group)


class FSDPStrategy(ParallelStrategy):
    """Every process has a shard of each weight, gathered while a layer runs (`fully_shard`, FSDP2).

    Layers of other stacks than `SequentialStack`, and layers that share weights, are gathered with
    the rest of the model. Scalar weights are replicated.
    """

    foreach = False  # it would mix shards and copies

    def __init__(self, model: nn.Module, group: WorkerGroup) -> None:
        super().__init__(model, group)
        self.replicated_ids = {id(p) for p in model.parameters() if p.dim() == 0}
        unsharded = self.replicated_ids | self.local_ids
        options: dict[str, Any] = {
            "mesh": init_device_mesh(group.device.type, (group.world_size,)),
            "reshard_after_forward": True,
            "ignored_params": {p for p in model.parameters() if id(p) in unsharded},
        }
        for layer in shardable_layers(model):
            fully_shard(layer, **options)
            register_fsdp_forward_method(layer, "run")  # stacks call it instead of `forward`
        fully_shard(model, **options)

    def wrap(self, loss_module: nn.Module) -> nn.Module:
        """Return the module itself: the sharded model combines its gradients."""
        return loss_module

    def clip_gradients(self, max_norm: float | None) -> float:
        """See `ParallelStrategy`."""
        parameters = list(self.model.parameters())
        replicated = [p for p in parameters if id(p) in self.replicated_ids]
        for p in replicated:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
        local = [p for p in parameters if id(p) in self.local_ids]
        scale_gradients([*replicated, *local], 1 / self.group.world_size)
        shards = [p for p in parameters if p.grad is not None and id(p) not in self.replicated_ids]
        return clip_total_norm(shards, replicated, max_norm, self.group)


STRATEGIES: dict[str, type[ParallelStrategy]] = {"ddp": DDPStrategy, "fsdp": FSDPStrategy}


def build_strategy(model: nn.Module, name: str, group: WorkerGroup) -> ParallelStrategy:
    """Place a model on the processes of a group."""
    return (SingleProcess if group.world_size == 1 else STRATEGIES[name])(model, group)


def shardable_layers(model: nn.Module) -> list[Layer]:
    """Layers that FSDP can gather one at a time: in sequential stacks, without shared parameters.

    Other stacks may bypass `Layer.run`, or run a layer again in the backward pass.
    """
    stacks = [m for m in model.modules() if isinstance(m, Layer) and _has_layers(m)]
    sequential = [stack for stack in stacks if isinstance(stack, SequentialStack)]
    hidden = {
        id(m) for stack in stacks if not isinstance(stack, SequentialStack) for m in stack.modules()
    }
    layers = list(
        dict.fromkeys(
            layer
            for stack in sequential
            if id(stack) not in hidden
            for layer in stack.layers
            if not _has_layers(layer)
        )
    )
    inside = {id(m) for layer in layers for m in layer.modules()}
    owners = Counter(id(p) for layer in layers for p in layer.parameters())
    outside = [m for m in model.modules() if id(m) not in inside]
    owners.update(id(p) for m in outside for p in m.parameters(recurse=False))
    return [layer for layer in layers if all(owners[id(p)] == 1 for p in layer.parameters())]


def _has_layers(module: nn.Module) -> bool:
    return any(isinstance(m, Layer) for m in module.modules() if m is not module)


def local_expert_ids(model: nn.Module, group: WorkerGroup) -> set[int]:
    """The ids of the parameters of experts that only this process has."""
    banks = [module for module in model.modules() if isinstance(module, ShardedExpertBank)]
    for bank in banks:
        if bank.world != group.world_size:
            raise Unsupported(
                f"Experts are spread over {bank.world} processes, but {group.world_size} train: "
                "spread them over all."
            )
    if group.world_size == 1:
        return set()
    return {id(p) for bank in banks for p in bank.parameters()}


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply all gradients that exist."""
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(factor)


def clip_total_norm(
    shards: Sequence[Tensor],
    replicated: Sequence[Tensor],
    max_norm: float | None,
    group: WorkerGroup,
) -> float:
    """Like `clip_grad_norm_`, where each process has its own `shards` and the same `replicated`."""
    norm = math.sqrt(group.sum(_sum_squares(shards))[0] + _sum_squares(replicated))
    if max_norm is not None:
        scale_gradients([*shards, *replicated], min(1.0, max_norm / (norm + 1e-6)))
    return norm


def _sum_squares(parameters: Iterable[Tensor]) -> float:
    """Sum of the squared gradients on this process."""
    grads = [p.grad for p in parameters if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    return sum(float(g.detach().double().square().sum()) for g in local)
