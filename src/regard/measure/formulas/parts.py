"""What stands around mixers: feed-forward layers, norms, residuals, positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from regard.ffn import (
    GLU,
    MLP,
    ExpertBank,
    MixtureOfExperts,
    ProductKeyMemory,
    Router,
    ShardedExpertBank,
)
from regard.ffn.activations import identity
from regard.measure.work import CallShape, ModuleCost, formula, kept, module_cost, product, together
from regard.norm import BatchNorm, GroupNorm, LayerNorm, NoNorm, PowerNorm, RMSNorm, ScaleNorm
from regard.position import PositionEmbedding
from regard.residual import Admin, LayerScale, Residual

FROM_OUTPUT = (
    F.relu,
    F.tanh,
    torch.tanh,
    F.sigmoid,
    torch.sigmoid,
)  # whose backward pass needs the result alone


# ---------------------------------------------------------------------------------------------- feed-forward layers
@formula(MLP)
def _mlp(module: MLP, call: CallShape) -> ModuleCost:
    """Two products: O(n d d')."""
    inner = 0 if module.activation in FROM_OUTPUT else call.rows * module.up.out_features
    return module_cost(module.up, call) + module_cost(module.down, call) + kept(inner)


@formula(GLU)
def _glu(module: GLU, call: CallShape) -> ModuleCost:
    """Three products: O(n d d').  x is kept once; of each hidden number the gate before and after its bend, and the other."""
    total = (
        module_cost(module.gate, call)
        + module_cost(module.up, call).keeping(0)
        + module_cost(module.down, call)
    )
    bent = 0 if module.activation in (*FROM_OUTPUT, identity) else 1
    return total + kept((2 + bent) * call.rows * module.up.out_features)


@formula(Router)
def _router(module: Router, call: CallShape) -> ModuleCost:
    """A score for each expert: O(n experts d), twice where there is learned noise."""
    once = product(1, call.rows, module.dim, module.count, saved=call.rows * module.dim)
    return once if module.noise is None else 2 * once


@formula(ExpertBank)
def _bank(module: ExpertBank, call: CallShape) -> ModuleCost:
    """b buffers of n places, each with its own weights."""
    return module_cost(module.expert, call)


@formula(ShardedExpertBank)
def _spread_bank(module: ShardedExpertBank, call: CallShape) -> ModuleCost:
    """What this process computes: its share of the experts, with the buffers that all processes send."""
    return module_cost(module.bank, call)


@formula(MixtureOfExperts)
def _experts(module: MixtureOfExperts, call: CallShape) -> ModuleCost:
    """The router, and k experts of each token: O(n k d d').

    With a limit every expert is taken to fill its buffer, as the fullest does; without one tokens are taken to spread evenly.
    """
    limit = module.capacity if module.training else module.eval_capacity
    even = module.top * call.n / module.count
    places = max(1, int(call.b * even) if limit is None else call.b * max(1, int(limit * even)))
    routed = module_cost(module.router, call) + kept(3 * call.rows * module.count)
    gathered = product(
        call.rows, 1, module.top, module.dim, saved=call.rows * module.top * (module.dim + 2)
    )
    return together(
        router=routed,
        bank=module_cost(module.bank, CallShape(module.count, places, places)),
        take=gathered,
    )


@formula(ProductKeyMemory)
def _product_keys(module: ProductKeyMemory, call: CallShape) -> ModuleCost:
    """Half-keys are scored, and the best slots read: O(n heads (d width + keys width + top d))."""
    heads, _, keys, half = module.keys.shape
    halves = call.rows * heads * 2
    query = module_cost(module.query, call) + kept(0 if module.norm is None else 2 * halves * half)
    scores = product(1, halves, half, keys, saved=halves * half)
    pairs = kept(
        call.rows * heads * (2 * 2 * module.top + 3 * module.top)
    )  # numbers and places of the best, and weights
    return query + scores + pairs + product(call.rows, 1, heads * module.top, module.dim, saved=0)


# ---------------------------------------------------------------------------------------------- norms and residuals
@formula(LayerNorm)
def _layer_norm(module: LayerNorm, call: CallShape) -> ModuleCost:
    """Elementwise, as all norms are.  Kept: x, and mean and deviation of each token."""
    return kept(call.rows * (module.dim + 2))


@formula(GroupNorm)
def _group_norm(module: GroupNorm, call: CallShape) -> ModuleCost:
    return kept(call.rows * (module.dim + 2 * module.groups))


@formula(RMSNorm, ScaleNorm)
def _rms_norm(module: RMSNorm | ScaleNorm, call: CallShape) -> ModuleCost:
    """Kept: x, x as it is scaled, and a number of each token."""
    return kept(call.rows * (2 * module.dim + 2))


@formula(BatchNorm)
def _batch_norm(module: BatchNorm, call: CallShape) -> ModuleCost:
    """Kept: x less its mean, once for the variance and once to be scaled, and x as it is scaled."""
    return kept(call.rows * 3 * module.dim)


@formula(PowerNorm)
def _power_norm(module: PowerNorm, call: CallShape) -> ModuleCost:
    """Kept: x as it is scaled."""
    return kept(call.rows * module.dim)


@formula(NoNorm)
def _no_norm(module: NoNorm, call: CallShape) -> ModuleCost:
    return ModuleCost()


@formula(Residual)
def _residual(module: Residual, call: CallShape) -> ModuleCost:
    """What its norms cost; a bare sum keeps nothing."""
    return sum((module_cost(part, call) for part in module.children()), ModuleCost())


@formula(LayerScale)
def _layer_scale(module: LayerScale, call: CallShape) -> ModuleCost:
    """A learned scale keeps what it multiplies."""
    return _residual(module, call) + kept(call.rows * module.scale.numel())


@formula(Admin)
def _admin(module: Admin, call: CallShape) -> ModuleCost:
    return _residual(module, call) + kept(call.rows * module.omega.numel())


# ---------------------------------------------------------------------------------------------- positions
@formula(PositionEmbedding)
def _position(module: PositionEmbedding, call: CallShape) -> ModuleCost:
    """Those that are added cost nothing; those that are projected, a layer."""
    return sum(
        (module_cost(part, call) for part in module.children() if isinstance(part, nn.Linear)),
        ModuleCost(),
    )
