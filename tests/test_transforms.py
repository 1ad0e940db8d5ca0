"""What PyTorch may do to a recipe: build it on the meta device and fill it later, transform its
calls with `torch.func`, and differentiate them twice or forward."""

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap

import regard
from regard import Unsupported
from regard.attentions import additive
from regard.registry import get_recipe
from regard.testing import random_tokens


@pytest.mark.parametrize("name", regard.list_recipes())
def test_built_on_the_meta_device_then_filled(name):
    """Fails if a mixer that was built without memory and then filled gives another output: what is
    neither a parameter nor a saved buffer must not be on the meta device, nor be lost.
    """
    for causal in get_recipe(name).causal_options():
        mixer = get_recipe(name).example(causal=causal)
        with torch.device("meta"):
            empty = get_recipe(name).example(causal=causal)
        empty = empty.to_empty(device="cpu")
        for tensor in (*empty.parameters(), *empty.buffers()):
            tensor.data.fill_(torch.nan if tensor.is_floating_point() else 99)
        empty.load_state_dict(mixer.state_dict())
        x = random_tokens(mixer, 23).float()
        assert torch.equal(empty.eval()(x), mixer.eval()(x))
        assert torch.equal(empty.train()(x), mixer.train()(x))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", regard.list_recipes())
def test_transforms_and_second_derivatives(name):
    """Fails if `grad`, `vmap` or `jvp` of torch.func raises or disagrees with autograd, or if a
    second derivative raises anything but `Unsupported` or is wrong.
    """
    causal = get_recipe(name).causal_options()[-1]
    mixer = get_recipe(name).example(causal=causal).double().eval()
    x, weight, direction = (random_tokens(mixer, 12, seed=seed) for seed in (1, 2, 3))
    x.requires_grad_()
    inputs = [x, *(p for p in mixer.parameters() if p.requires_grad)]
    y = mixer(x)
    expected = torch.autograd.grad((y * weight).sum(), inputs, retain_graph=True)

    def loss(x, parameters):
        return (functional_call(mixer, parameters, (x,)) * weight).sum()

    parameters = {key: p.detach() for key, p in mixer.named_parameters() if p.requires_grad}
    of_x, of_parameters = grad(loss, argnums=(0, 1))(x.detach(), parameters)
    for found, wanted in zip([of_x, *of_parameters.values()], expected, strict=True):
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(vmap(lambda one: mixer(one[None])[0])(x), y)
    tangent = jvp(mixer, (x.detach(),), (direction,))[1]
    torch.testing.assert_close((tangent * weight).sum(), (expected[0] * direction).sum())

    try:
        slope = torch.autograd.grad((y * weight).sum(), x, create_graph=True)[0]
        along = (slope * direction + 0 * x).sum()  # the slope of a linear mixer has no graph
        second = torch.autograd.grad(along, x)[0]
    except Unsupported:
        return
    step = 1e-5 * direction
    slopes = [grad(loss)(x.detach() + sign * step, parameters) for sign in (1, -1)]
    torch.testing.assert_close(second, (slopes[0] - slopes[1]) / 2e-5, rtol=1e-4, atol=1e-5)


def test_long_additive_scores_under_torch_func(monkeypatch):
    """Fails if the checkpoints of long additive scores stop `torch.func.grad`."""
    monkeypatch.setattr(additive, "MAX_ELEMENTS", 64)
    for name in ("bahdanau", "show_attend"):
        mixer = get_recipe(name).example().double()
        x = random_tokens(mixer, 12).requires_grad_()
        expected = torch.autograd.grad(mixer(x).square().sum(), x)[0]
        found = grad(lambda x, mixer=mixer: mixer(x).square().sum())(x.detach())
        torch.testing.assert_close(found, expected)


def test_second_derivatives_of_long_patterns_are_refused():
    """Fails if a second derivative of the tiled backends raises PyTorch's error."""
    mixer = regard.create("local", dim=8, heads=2, window=4)
    x = torch.randn(1, 300, 8, requires_grad=True)
    with pytest.raises(Unsupported, match="second derivatives"):
        torch.autograd.grad(mixer(x).sum(), x, create_graph=True)
