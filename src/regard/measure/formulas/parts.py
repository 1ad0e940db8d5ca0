"""What stands around mixers: feed-forward layers, norms, residuals, positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from regard.ffn import GLU, MLP, Bank, Experts, ProductKeys, Router, SpreadBank
from regard.ffn.activation import identity
from regard.measure.work import Call, Work, formula, kept, product, together, work
from regard.norm import BatchNorm, GroupNorm, LayerNorm, NoNorm, PowerNorm, RMSNorm, ScaleNorm
from regard.position import Embed
from regard.residual import Admin, LayerScale, Residual

FROM_OUTPUT = (F.relu, F.tanh, torch.tanh, F.sigmoid, torch.sigmoid)  # whose backward pass needs the result alone


# ---------------------------------------------------------------------------------------------- feed-forward layers
@formula(MLP)
def _mlp(module: MLP, call: Call) -> Work:
    """Two products: O(n d d')."""
    inner = 0 if module.activation in FROM_OUTPUT else call.rows * module.up.out_features
    return work(module.up, call) + work(module.down, call) + kept(inner)


@formula(GLU)
def _glu(module: GLU, call: Call) -> Work:
    """Three products: O(n d d').  x is kept once; of each hidden number the gate before and after its bend, and the other."""
    total = work(module.gate, call) + work(module.up, call).keeping(0) + work(module.down, call)
    bent = 0 if module.activation in (*FROM_OUTPUT, identity) else 1
    return total + kept((2 + bent) * call.rows * module.up.out_features)


@formula(Router)
def _router(module: Router, call: Call) -> Work:
    """A score for each expert: O(n experts d), twice where there is learned noise."""
    once = product(1, call.rows, module.dim, module.count, saved=call.rows * module.dim)
    return once if module.noise is None else 2 * once


@formula(Bank)
def _bank(module: Bank, call: Call) -> Work:
    """b buffers of n places, each with its own weights."""
    return work(module.expert, call)


@formula(SpreadBank)
def _spread_bank(module: SpreadBank, call: Call) -> Work:
    """What this process computes: its share of the experts, with the buffers that all processes send."""
    return work(module.bank, call)


@formula(Experts)
def _experts(module: Experts, call: Call) -> Work:
    """The router, and k experts of each token: O(n k d d').

    With a limit every expert is taken to fill its buffer, as the fullest does; without one tokens are taken to spread evenly.
    """
    limit = module.capacity if module.training else module.eval_capacity
    even = module.top * call.n / module.count
    places = max(1, int(call.b * even) if limit is None else call.b * max(1, int(limit * even)))
    routed = work(module.router, call) + kept(3 * call.rows * module.count)
    gathered = product(call.rows, 1, module.top, module.dim, saved=call.rows * module.top * (module.dim + 2))
    return together(router=routed, bank=work(module.bank, Call(module.count, places, places)), take=gathered)


@formula(ProductKeys)
def _product_keys(module: ProductKeys, call: Call) -> Work:
    """Half-keys are scored, and the best slots read: O(n heads (d width + keys width + top d))."""
    heads, _, keys, half = module.keys.shape
    halves = call.rows * heads * 2
    query = work(module.query, call) + kept(0 if module.norm is None else 2 * halves * half)
    scores = product(1, halves, half, keys, saved=halves * half)
    pairs = kept(call.rows * heads * (2 * 2 * module.top + 3 * module.top))  # numbers and places of the best, and weights
    return query + scores + pairs + product(call.rows, 1, heads * module.top, module.dim, saved=0)


# ---------------------------------------------------------------------------------------------- norms and residuals
@formula(LayerNorm)
def _layer_norm(module: LayerNorm, call: Call) -> Work:
    """Elementwise, as all norms are.  Kept: x, and mean and deviation of each token."""
    return kept(call.rows * (module.dim + 2))


@formula(GroupNorm)
def _group_norm(module: GroupNorm, call: Call) -> Work:
    return kept(call.rows * (module.dim + 2 * module.groups))


@formula(RMSNorm, ScaleNorm)
def _rms_norm(module: RMSNorm | ScaleNorm, call: Call) -> Work:
    """Kept: x, x as it is scaled, and a number of each token."""
    return kept(call.rows * (2 * module.dim + 2))


@formula(BatchNorm)
def _batch_norm(module: BatchNorm, call: Call) -> Work:
    """Kept: x less its mean, once for the variance and once to be scaled, and x as it is scaled."""
    return kept(call.rows * 3 * module.dim)


@formula(PowerNorm)
def _power_norm(module: PowerNorm, call: Call) -> Work:
    """Kept: x as it is scaled."""
    return kept(call.rows * module.dim)


@formula(NoNorm)
def _no_norm(module: NoNorm, call: Call) -> Work:
    return Work()


@formula(Residual)
def _residual(module: Residual, call: Call) -> Work:
    """What its norms cost; a bare sum keeps nothing."""
    return sum((work(part, call) for part in module.children()), Work())


@formula(LayerScale)
def _layer_scale(module: LayerScale, call: Call) -> Work:
    """A learned scale keeps what it multiplies."""
    return _residual(module, call) + kept(call.rows * module.scale.numel())


@formula(Admin)
def _admin(module: Admin, call: Call) -> Work:
    return _residual(module, call) + kept(call.rows * module.omega.numel())


# ---------------------------------------------------------------------------------------------- positions
@formula(Embed)
def _position(module: Embed, call: Call) -> Work:
    """Those that are added cost nothing; those that are projected, a layer."""
    return sum((work(part, call) for part in module.children() if isinstance(part, nn.Linear)), Work())
