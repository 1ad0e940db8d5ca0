"""Softmax attention, without weights and with them."""

from oracles.loop import by_rule, softmax_loop

CASES = {
    "parameter_free": [{}],
    "vanilla": [{}, {"bias": True, "kv_heads": 2}, {"kv_heads": 1}],
}


def parameter_free(p, x, *, heads, causal, context=None, mask=None, global_attention_mask=None):
    """softmax(x xᵀ) x, unscaled."""
    q, k = (t.unflatten(-1, (heads, -1)) for t in (x, x if context is None else context))
    return softmax_loop(q, k, k, lambda a, h, i, j: j <= i or not causal, mask=mask, scale=1)


def vanilla(
    p,
    x,
    *,
    heads,
    causal,
    context=None,
    mask=None,
    global_attention_mask=None,
    kv_heads=None,
    bias=False,
):
    """Vaswani et al. 2017, equation 1."""
    return by_rule(p, x, heads, lambda h, i, j: j <= i or not causal, context=context, mask=mask)
