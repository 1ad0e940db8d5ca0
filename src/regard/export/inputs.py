"""What a mixer or a model is given: random inputs of any size, and which of their sizes may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import Unsupported
from regard.mixer import Mixer
from regard.models.embed import Embed, PatchEmbed, TokenEmbed, VectorEmbed
from regard.models.model import Model, OneSided, Pair, Seq2Seq, Trunk

TRACED = (211, 127, 61, 31, 23, 19, 13, 11, 7, 5, 3, 2, 1)  # tokens of the example that is traced: primes fill no block
SEED = 0


class Sizes(NamedTuple):
    """How many examples, and how many tokens each has; of another sequence it has as many and three more."""

    batch: int
    length: int


class Inputs(NamedTuple):
    """What goes in.

    make      sizes -> tensors by name, the same each time
    axes      which axes of each input may change: the first is the batch
    longest   the most tokens it takes, None: any number; an image counts as one, for its size is fixed
    """

    make: Callable[[Sizes], dict[str, Tensor]]
    axes: Mapping[str, tuple[int, ...]]
    longest: int | None

    def of(self, sizes: Sizes) -> dict[str, Tensor]:
        """The tensors; those that stand for padding are ragged, and from three examples on the last is nothing else."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED + 1000 * sizes.batch + sizes.length)
            return self.make(sizes)


def inputs(module: nn.Module, *, mask: bool, memory: bool) -> Inputs:
    """The inputs of a mixer or of a model."""
    if isinstance(module, Mixer):
        return _of_mixer(module, mask, memory)
    if not isinstance(module, Model):
        raise TypeError(f"a Mixer or a Model can be exported, not {type(module).__name__}")
    if memory:
        raise ValueError("memory is for mixers: a model with two inputs always takes both")
    if isinstance(module, Seq2Seq):
        return _of_two(module, mask)
    if isinstance(module, OneSided):
        return _of_one(module, module.trunk.embed, mask)
    if isinstance(module, Pair):
        return _of_pair(module, mask)
    raise Unsupported(f"{type(module).__name__} is no model whose inputs are known")


def _of_mixer(mixer: Mixer, mask: bool, memory: bool) -> Inputs:
    for wanted, promise, what in ((mask, "mask", "leave tokens out"), (memory, "cross", "look at another sequence")):
        if wanted:
            mixer._need(promise, what)
    if memory and mixer.causal:
        raise Unsupported(f"{mixer.name} was built causal, and another sequence has no past or future to it")
    here = _like(mixer)

    def make(sizes: Sizes) -> dict[str, Tensor]:
        b, n = sizes
        m = n + 3 if memory else n
        m = m if mixer.length is None else min(m, mixer.length)
        found = {"x": torch.randn(b, n, mixer.dim, dtype=here.dtype, device=here.device)}
        if memory:
            found["memory"] = torch.randn(b, m, mixer.dim, dtype=here.dtype, device=here.device)
        return found | ({"mask": ragged(b, m, here.device)} if mask else {})

    names = ["x"] + ["memory"] * memory + ["mask"] * mask
    return Inputs(make, dict.fromkeys(names, (0, 1)), mixer.length)


def _longest(model: Model, *trunks: Trunk) -> int | None:
    """What the layers take, and the positions that there are."""
    limits = [trunk.stack.length for trunk in trunks] + [None if model.config is None else model.config.length]
    return min((limit for limit in limits if limit is not None), default=None)


def _of_one(model: OneSided, embed: Embed, mask: bool) -> Inputs:
    device = _like(model).device
    if isinstance(embed, PatchEmbed):
        if mask:
            raise Unsupported("the patches of an image are all there: export without a mask")
        return Inputs(lambda sizes: {"x": _tokens(embed, sizes, model)}, {"x": (0,)}, 1)

    def make(sizes: Sizes) -> dict[str, Tensor]:
        return {"x": _tokens(embed, sizes, model)} | ({"mask": ragged(*sizes, device)} if mask else {})

    return Inputs(make, dict.fromkeys(["x"] + ["mask"] * mask, (0, 1)), _longest(model, model.trunk))


def _of_pair(model: Pair, mask: bool) -> Inputs:
    def make(sizes: Sizes) -> dict[str, Tensor]:
        both = Sizes(2 * sizes.batch, sizes.length)
        found = {"x": _tokens(model.trunk.embed, both, model)}
        found |= {"mask": ragged(*both, found["x"].device)} if mask else {}
        return {name: tensor.unflatten(0, (-1, 2)) for name, tensor in found.items()}

    return Inputs(make, dict.fromkeys(["x"] + ["mask"] * mask, (0, 2)), _longest(model, model.trunk))


def _of_two(model: Seq2Seq, mask: bool) -> Inputs:
    longest = _longest(model, model.encoder, model.decoder)

    def make(sizes: Sizes) -> dict[str, Tensor]:
        source = Sizes(sizes.batch, sizes.length + 3 if longest is None else min(sizes.length + 3, longest))
        found = {"source": _tokens(model.encoder.embed, source, model), "target": _tokens(model.decoder.embed, sizes, model)}
        return found | ({"mask": ragged(*source, found["source"].device)} if mask else {})

    if isinstance(model.encoder.embed, PatchEmbed):
        raise Unsupported("a model that reads images and writes text has inputs of two kinds: export its parts")
    return Inputs(make, dict.fromkeys(["source", "target"] + ["mask"] * mask, (0, 1)), longest)


def _tokens(embed: Embed, sizes: Sizes, model: nn.Module) -> Tensor:
    """As the embedding takes them."""
    here = _like(model)
    if isinstance(embed, TokenEmbed):
        return torch.randint(embed.tokens.num_embeddings, tuple(sizes), device=here.device)
    if isinstance(embed, VectorEmbed):
        return torch.randn(*sizes, embed.project.in_features, dtype=here.dtype, device=here.device)
    if isinstance(embed, PatchEmbed):
        return torch.randn(sizes.batch, *embed.shape, dtype=here.dtype, device=here.device)
    raise Unsupported(f"{type(embed).__name__} is no embedding whose input is known")


def ragged(b: int, n: int, device: torch.device) -> Tensor:
    """A mask (b n): whole, with holes and cut short, and nothing at all, in turn."""
    at = torch.arange(n)
    rows = (at >= 0, (at % 5 != 3) & (at < max(1, n - n // 3)), at < 0)
    return torch.stack([rows[i % 3] for i in range(b)]).to(device)


def _like(module: nn.Module) -> Tensor:
    """A tensor of the kind that it computes in."""
    return next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
