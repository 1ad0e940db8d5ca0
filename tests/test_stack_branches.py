"""Branches of any mixers. The recipe `lite` is tested with the other recipes."""

import pytest
import torch

import regard
from regard.block import Block
from regard.ffn import MLP
from regard.mixers import Branches
from regard.registry import get_recipe
from regard.testing import check_mixer


def branches(*names, causal=False):
    torch.manual_seed(0)
    return Branches([get_recipe(name).example(8, causal=causal) for name in names]).double().eval()


@pytest.mark.parametrize(
    "names",
    [
        ("vanilla", "dynamic_conv"),
        ("linear", "local", "retnet"),
        ("fnet", "vanilla"),
        ("longformer",),
    ],
)
def test_capabilities_of_branches(names):
    """Branches have the capabilities that all of their mixers have, and no other."""
    causal_options = [
        form
        for form in (False, True)
        if all(form in get_recipe(name).causal_options() for name in names)
    ]

    def build(causal):
        if causal not in causal_options:
            raise regard.Unsupported("a branch has no such form")
        return Branches([get_recipe(name).example(8, causal=causal) for name in names])

    check_mixer(build)


def test_branches_keep_channels_apart(rand):
    """Each branch reads its own channels, and their order is kept."""
    mixer, x = branches("vanilla", "linear", "local"), rand(2, 9, 24)
    parts = [branch(x[..., 8 * i : 8 * i + 8]) for i, branch in enumerate(mixer.branches)]
    torch.testing.assert_close(mixer(x), torch.cat(parts, -1))
    assert mixer.attention_map(x).shape == (2, 6, 9, 9)


def test_combined_capabilities(rand):
    """Cross-attention, global attention masks and length limits are combined."""
    assert (
        branches("vanilla", "linear").can.cross
        and not branches("vanilla", "dynamic_conv").can.cross
    )
    both = branches("vanilla", "linear")
    x, context = rand(2, 5, 16), rand(2, 7, 16)
    parts = [
        branch(x[..., 8 * i : 8 * i + 8], context[..., 8 * i : 8 * i + 8])
        for i, branch in enumerate(both.branches)
    ]
    torch.testing.assert_close(both(x, context), torch.cat(parts, -1))
    global_attention_mask = torch.arange(5).expand(2, 5) == 2
    marked = branches("longformer", "longformer")
    assert marked.can.global_attention_mask and not torch.equal(
        marked(x, global_attention_mask=global_attention_mask), marked(x)
    )
    assert marked.attention_map(x, global_attention_mask=global_attention_mask).shape[1] == 4
    assert branches("gmlp", "vanilla").length == get_recipe("gmlp").example(8).length


def test_block_mixes_branches(rand):
    """In a block, the feed-forward layer mixes the branches."""
    torch.manual_seed(0)
    block, x = Block(regard.create("lite", dim=8, heads=2), MLP(8)).double().eval(), rand(1, 5, 8)
    jacobian = torch.autograd.functional.jacobian(lambda t: block(t)[0, 0], x)[
        :, 0, 4
    ]  # token 4 is out of the kernel's reach
    assert jacobian[:4, :4].abs().max() > 0 and jacobian[4:, :4].abs().max() > 0


def test_invalid_arguments():
    """Branches that do not fit together raise an error."""
    with pytest.raises(ValueError, match="at least one mixer"):
        Branches([])
    with pytest.raises(ValueError, match="all branches must be causal, or none"):
        Branches([get_recipe("vanilla").example(8, causal=c) for c in (False, True)])
    with pytest.raises(
        ValueError, match="near must be less than dim=8, so that some channels attend, not 8"
    ):
        regard.create("lite", dim=8, heads=2, near=8)
    with pytest.raises(ValueError, match="divisible by heads"):
        regard.create("lite", dim=8, heads=3)
    with pytest.raises(ValueError, match="dim must be an integer >= 2"):
        regard.create("lite", dim=1, heads=1)
