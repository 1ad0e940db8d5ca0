"""What a mixer or a model is given: random inputs of any size, and which of their sizes may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import Unsupported
from regard.mixer import Mixer
from regard.models.embeddings import InputEmbedding, PatchEmbedding, TokenEmbedding, VectorEmbedding
from regard.models.model import Backbone, DualEncoder, Model, Seq2Seq, SingleStackModel

TRACED = (
    211,
    127,
    61,
    31,
    23,
    19,
    13,
    11,
    7,
    5,
    3,
    2,
    1,
)  # tokens of the example that is traced: primes fill no block
SEED = 0


class BatchShape(NamedTuple):
    """How many examples, and how many tokens each has; of another sequence it has as many and three more."""

    batch: int
    length: int


class ExportInputs(NamedTuple):
    """What goes in.

    make      sizes -> tensors by name, the same each time
    axes      which axes of each input may change: the first is the batch
    longest   the most tokens it takes, None: any number; an image counts as one, for its size is fixed
    """

    make: Callable[[BatchShape], dict[str, Tensor]]
    axes: Mapping[str, tuple[int, ...]]
    longest: int | None

    def of(self, sizes: BatchShape) -> dict[str, Tensor]:
        """The tensors; those that stand for padding are ragged, and from three examples on the last is nothing else."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED + 1000 * sizes.batch + sizes.length)
            return self.make(sizes)


def export_inputs(module: nn.Module, *, mask: bool, context: bool) -> ExportInputs:
    """The inputs of a mixer or of a model."""
    if isinstance(module, Mixer):
        return _of_mixer(module, mask, context)
    if not isinstance(module, Model):
        raise TypeError(f"a Mixer or a Model can be exported, not {type(module).__name__}")
    if context:
        raise ValueError("memory is for mixers: a model with two inputs always takes both")
    if isinstance(module, Seq2Seq):
        return _of_two(module, mask)
    if isinstance(module, SingleStackModel):
        return _of_one(module, module.backbone.embed, mask)
    if isinstance(module, DualEncoder):
        return _of_pair(module, mask)
    raise Unsupported(f"{type(module).__name__} is no model whose inputs are known")


def _of_mixer(mixer: Mixer, mask: bool, context: bool) -> ExportInputs:
    if mask:
        mixer._require("mask")
    if context:
        mixer._require("cross")
    if context and mixer.causal:
        raise Unsupported(
            f"{mixer.name} was built causal, and another sequence has no past or future to it"
        )
    here = _like(mixer)

    def make(sizes: BatchShape) -> dict[str, Tensor]:
        b, n = sizes
        m = n + 3 if context else n
        m = m if mixer.length is None else min(m, mixer.length)
        found = {"x": torch.randn(b, n, mixer.dim, dtype=here.dtype, device=here.device)}
        if context:
            found["context"] = torch.randn(b, m, mixer.dim, dtype=here.dtype, device=here.device)
        return found | ({"mask": ragged_mask(b, m, here.device)} if mask else {})

    names = ["x"] + ["context"] * context + ["mask"] * mask
    return ExportInputs(make, dict.fromkeys(names, (0, 1)), mixer.length)


def _longest(model: Model, *trunks: Backbone) -> int | None:
    """What the layers take, and the positions that there are."""
    limits = [backbone.stack.length for backbone in trunks] + [
        None if model.config is None else model.config.length
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def _of_one(model: SingleStackModel, embed: InputEmbedding, mask: bool) -> ExportInputs:
    device = _like(model).device
    if isinstance(embed, PatchEmbedding):
        if mask:
            raise Unsupported("the patches of an image are all there: export without a mask")
        return ExportInputs(lambda sizes: {"x": _tokens(embed, sizes, model)}, {"x": (0,)}, 1)

    def make(sizes: BatchShape) -> dict[str, Tensor]:
        return {"x": _tokens(embed, sizes, model)} | (
            {"mask": ragged_mask(*sizes, device)} if mask else {}
        )

    return ExportInputs(
        make, dict.fromkeys(["x"] + ["mask"] * mask, (0, 1)), _longest(model, model.backbone)
    )


def _of_pair(model: DualEncoder, mask: bool) -> ExportInputs:
    def make(sizes: BatchShape) -> dict[str, Tensor]:
        both = BatchShape(2 * sizes.batch, sizes.length)
        found = {"x": _tokens(model.backbone.embed, both, model)}
        found |= {"mask": ragged_mask(*both, found["x"].device)} if mask else {}
        return {name: tensor.unflatten(0, (-1, 2)) for name, tensor in found.items()}

    return ExportInputs(
        make, dict.fromkeys(["x"] + ["mask"] * mask, (0, 2)), _longest(model, model.backbone)
    )


def _of_two(model: Seq2Seq, mask: bool) -> ExportInputs:
    longest = _longest(model, model.encoder, model.decoder)

    def make(sizes: BatchShape) -> dict[str, Tensor]:
        source = BatchShape(
            sizes.batch, sizes.length + 3 if longest is None else min(sizes.length + 3, longest)
        )
        found = {
            "source": _tokens(model.encoder.embed, source, model),
            "target": _tokens(model.decoder.embed, sizes, model),
        }
        return found | ({"mask": ragged_mask(*source, found["source"].device)} if mask else {})

    if isinstance(model.encoder.embed, PatchEmbedding):
        raise Unsupported(
            "a model that reads images and writes text has inputs of two kinds: export its parts"
        )
    return ExportInputs(
        make, dict.fromkeys(["source", "target"] + ["mask"] * mask, (0, 1)), longest
    )


def _tokens(embed: InputEmbedding, sizes: BatchShape, model: nn.Module) -> Tensor:
    """As the embedding takes them."""
    here = _like(model)
    if isinstance(embed, TokenEmbedding):
        return torch.randint(embed.tokens.num_embeddings, tuple(sizes), device=here.device)
    if isinstance(embed, VectorEmbedding):
        return torch.randn(*sizes, embed.project.in_features, dtype=here.dtype, device=here.device)
    if isinstance(embed, PatchEmbedding):
        return torch.randn(sizes.batch, *embed.shape, dtype=here.dtype, device=here.device)
    raise Unsupported(f"{type(embed).__name__} is no embedding whose input is known")


def ragged_mask(b: int, n: int, device: torch.device) -> Tensor:
    """A mask (b n): whole, with holes and cut short, and nothing at all, in turn."""
    at = torch.arange(n)
    rows = (at >= 0, (at % 5 != 3) & (at < max(1, n - n // 3)), at < 0)
    return torch.stack([rows[i % 3] for i in range(b)]).to(device)


def _like(module: nn.Module) -> Tensor:
    """A tensor of the kind that it computes in."""
    return next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
