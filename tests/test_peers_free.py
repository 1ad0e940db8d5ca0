"""Beside libraries that users know, with copied weights: outputs and gradients."""

import pytest
import torch
from torch import nn

import regard


def grads(f, x, parameters):
    """The output, and the gradients of x and of the parameters."""
    x = x.clone().requires_grad_()
    y = f(x)
    weight = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(5))
    return [y, *torch.autograd.grad((y * weight).sum(), [x, *parameters])]


def agree(ours, theirs):
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("n", [1, 16, 23, 64])
def test_fnet_of_transformers(n, rand):
    """Fails if the Fourier layer of Hugging Face gives something else, at an odd length too."""
    fnet = pytest.importorskip("transformers.models.fnet.modeling_fnet")
    config = pytest.importorskip("transformers").FNetConfig(hidden_size=12)
    theirs, ours, x = (
        fnet.FNetBasicFourierTransform(config),
        regard.create("fnet", dim=12),
        rand(2, n, 12),
    )
    agree(grads(ours, x, []), grads(lambda t: theirs(t)[0], x, []))


@pytest.mark.parametrize("attention", [0, 5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [20, 13])
def test_gmlp_of_g_mlp_pytorch(attention, causal, n, rand):
    """Fails if gMLP or aMLP is another than the peer's block, causal too; the peer takes shorter
    inputs only if causal.
    """
    module = pytest.importorskip("g_mlp_pytorch.g_mlp_pytorch")
    if n < 20 and not causal:
        pytest.skip("the peer has no shorter inputs there")
    torch.manual_seed(0)
    theirs = module.gMLPBlock(
        dim=8, dim_ff=12, seq_len=20, attn_dim=attention or None, causal=causal
    ).double()
    more = {"attention": attention} if attention else {}
    ours = regard.create(
        "amlp" if attention else "gmlp", dim=8, length=20, hidden=12, causal=causal, **more
    ).double()
    pairs = [
        (ours.up, theirs.proj_in[0]),
        (ours.norm, theirs.sgu.norm),
        (ours.down, theirs.proj_out),
        *([(ours.attend.out, theirs.attn.to_out)] if attention else []),
    ]
    with torch.no_grad():
        theirs.sgu.weight.uniform_(-1, 1)  # as it is drawn, it would hardly show
        theirs.sgu.bias.uniform_(-1, 1)
        ours.weight.copy_(theirs.sgu.weight[0])
        ours.bias.copy_(theirs.sgu.bias[0])
        for mine, other in pairs:
            mine.load_state_dict(other.state_dict())
        for mine, part in (
            zip(
                (ours.attend.q, ours.attend.k, ours.attend.v),
                theirs.attn.to_qkv.weight.chunk(3),
                strict=True,
            )
            if attention
            else ()
        ):
            mine.weight.copy_(part)
    mine = [p for pair in pairs for p in pair[0].parameters()]
    other = [p for pair in pairs for p in pair[1].parameters()]
    x = rand(2, n, 8)
    got, want = (
        grads(ours, x, [*mine, ours.weight, ours.bias]),
        grads(theirs, x, [*other, theirs.sgu.weight, theirs.sgu.bias]),
    )
    agree(got, [*want[:-2], want[-2][0], want[-1][0]])


def test_mlp_mixer_of_mlp_mixer_pytorch(rand):
    """Fails if the token half of the peer's layer gives something else."""
    module = pytest.importorskip("mlp_mixer_pytorch")
    torch.manual_seed(0)
    theirs = module.MLPMixer(
        image_size=8, channels=1, patch_size=2, dim=6, depth=1, num_classes=2
    ).double()
    token_half = next(
        part.fn for part in theirs.modules() if type(part).__name__ == "PreNormResidual"
    )
    up, down = (part for part in token_half if isinstance(part, nn.Conv1d))
    ours = regard.create("mlp_mixer", dim=6, length=16, hidden=up.out_channels).double()
    with torch.no_grad():
        for mine, other in ((ours.up, up), (ours.down, down)):
            mine.weight.copy_(other.weight[..., 0])
            mine.bias.copy_(other.bias)
    x = rand(2, 16, 6)
    ours_all, theirs_all = (
        [ours.up.weight, ours.down.weight, ours.up.bias, ours.down.bias],
        [up.weight, down.weight, up.bias, down.bias],
    )
    got, want = grads(ours, x, ours_all), grads(token_half, x, theirs_all)
    agree(got, [t.view_as(g) for g, t in zip(got, want, strict=True)])


def test_dynamic_conv_of_a_depthwise_convolution(rand):
    """Fails if, with kernels that no token changes, it is not torch's own convolution."""
    torch.manual_seed(0)
    mixer = regard.create("dynamic_conv", dim=8, heads=2, kernel=5).double()
    nn.init.zeros_(mixer.taps.weight)  # so all kernels are 1/5
    x = rand(2, 17, 8)
    z = nn.functional.glu(mixer.up(x), -1)
    mean = nn.functional.avg_pool1d(z.mT, 5, stride=1, padding=2, count_include_pad=True).mT
    torch.testing.assert_close(mixer(x), mixer.out(mean))


def test_average_pool_of_torch(rand):
    """Fails if pooling on a grid is not PoolFormer's: torch's average pool that counts no padding,
    less the input.
    """
    x = rand(2, 30, 8)
    image = x.mT.unflatten(2, (5, 6))
    want = nn.functional.avg_pool2d(image, 3, stride=1, padding=1, count_include_pad=False) - image
    torch.testing.assert_close(regard.create("average_pool", dim=8, width=6)(x), want.flatten(2).mT)
