"""Random inputs of any size for a mixer or model, and which of their dimensions are dynamic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import Unsupported
from regard.mixer import Mixer
from regard.models.embeddings import InputEmbedding, PatchEmbedding, TokenEmbedding, VectorEmbedding
from regard.models.model import DualEncoder, Model, Seq2Seq, SingleStackModel

SEED = 0
CONTEXT_EXTRA = 3  # a context is longer than the queries by so many tokens


class BatchShape(NamedTuple):
    """Number of examples, and of tokens in each."""

    batch: int
    length: int


class ExportInputs(NamedTuple):
    """Inputs of a module.

    Args:
        make: Makes the inputs, by name, for a batch shape.
        axes: Dynamic dimensions of each input. The first is the batch.
        max_length: Maximum number of tokens, None = any. 1 for images, whose size is fixed.
    """

    make: Callable[[BatchShape], dict[str, Tensor]]
    axes: Mapping[str, tuple[int, ...]]
    max_length: int | None

    def example(self, shape: BatchShape) -> dict[str, Tensor]:
        """Random inputs, the same for each call.

        Masks have padding and holes, see `ragged_mask`.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED + 1000 * shape.batch + shape.length)
            return self.make(shape)


def export_inputs(module: nn.Module, *, mask: bool, context: bool) -> ExportInputs:
    """The inputs of a mixer or model."""
    if isinstance(module, Mixer):
        return _mixer_inputs(module, mask, context)
    if not isinstance(module, Model):
        raise TypeError(f"Only a Mixer or a Model can be exported, not {type(module).__name__}")
    if context:
        raise ValueError("context=True is for mixers only; an encoder-decoder always has a source")
    return _model_inputs(module, mask)


def _mixer_inputs(mixer: Mixer, mask: bool, context: bool) -> ExportInputs:
    if mask:
        mixer._require("mask")
    if context:
        mixer._require("cross")
    if context and mixer.causal:
        raise Unsupported(f"{mixer.name} is causal, so it cannot attend to a context")
    like = _floating_tensor(mixer)

    def make(shape: BatchShape) -> dict[str, Tensor]:
        b, n = shape
        m = n + CONTEXT_EXTRA if context else n
        m = m if mixer.length is None else min(m, mixer.length)
        inputs = {"x": like.new_empty(b, n, mixer.dim).normal_()}
        if context:
            inputs["context"] = like.new_empty(b, m, mixer.dim).normal_()
        if mask:
            inputs["mask"] = ragged_mask(b, m, like.device)
        return inputs

    names = ["x", *["context"] * context, *["mask"] * mask]
    return ExportInputs(make, dict.fromkeys(names, (0, 1)), mixer.length)


def _model_inputs(model: Model, mask: bool) -> ExportInputs:
    if isinstance(model, Seq2Seq):
        backbones = {"source": model.encoder, "target": model.decoder}
    elif isinstance(model, SingleStackModel | DualEncoder):
        backbones = {"x": model.backbone}
    else:
        raise Unsupported(f"The inputs of {type(model).__name__} are unknown")
    embeddings = {name: backbone.embed for name, backbone in backbones.items()}
    limits = [backbone.stack.length for backbone in backbones.values()]
    limits.append(None if model.config is None else model.config.length)
    max_length = min((limit for limit in limits if limit is not None), default=None)
    axes: tuple[int, ...] = (0, 2) if isinstance(model, DualEncoder) else (0, 1)
    types = None
    if isinstance(model, SingleStackModel) and isinstance(model.backbone.embed, TokenEmbedding):
        types = model.backbone.embed.token_types
    if any(isinstance(embed, PatchEmbedding) for embed in embeddings.values()):
        if len(embeddings) > 1:
            raise Unsupported("A model from images to text cannot be exported as one graph")
        if mask:
            raise Unsupported("Images have no padding: export without a mask")
        axes, max_length = (0,), 1

    def make(shape: BatchShape) -> dict[str, Tensor]:
        b, n = shape
        longer = n + CONTEXT_EXTRA if max_length is None else min(n + CONTEXT_EXTRA, max_length)
        b = 2 * b if isinstance(model, DualEncoder) else b
        lengths = {name: longer if name == "source" else n for name in embeddings}
        inputs = {
            name: _random_input(embed, BatchShape(b, lengths[name]), model)
            for name, embed in embeddings.items()
        }
        if types is not None:
            inputs["token_type_ids"] = torch.randint(
                types.num_embeddings, (b, n), device=types.weight.device
            )
        if mask:
            first, tokens = next(iter(inputs.items()))
            inputs["mask"] = ragged_mask(b, lengths[first], tokens.device)
        if isinstance(model, DualEncoder):  # (2b n) -> (b 2 n)
            inputs = {name: tensor.unflatten(0, (-1, 2)) for name, tensor in inputs.items()}
        return inputs

    names = [*embeddings, *["token_type_ids"] * (types is not None), *["mask"] * mask]
    return ExportInputs(make, dict.fromkeys(names, axes), max_length)


def _random_input(embed: InputEmbedding, shape: BatchShape, model: nn.Module) -> Tensor:
    """What an embedding takes: token ids, vectors or images."""
    like = _floating_tensor(model)
    if isinstance(embed, TokenEmbedding):
        return torch.randint(embed.tokens.num_embeddings, tuple(shape), device=like.device)
    if isinstance(embed, VectorEmbedding):
        return like.new_empty(*shape, embed.project.in_features).normal_()
    if isinstance(embed, PatchEmbedding):
        return like.new_empty(shape.batch, *embed.shape).normal_()
    raise Unsupported(f"The input of {type(embed).__name__} is unknown")


def _floating_tensor(module: nn.Module) -> Tensor:
    """A tensor with the dtype and device of the parameters, detached."""
    parameters = (p.detach() for p in module.parameters() if p.is_floating_point())
    return next(parameters, torch.empty(0))


def ragged_mask(b: int, n: int, device: torch.device) -> Tensor:
    """A mask (b n) whose rows are, by turns: all True; with holes and padding; all False."""
    positions = torch.arange(n)
    rows = (
        positions >= 0,
        (positions % 5 != 3) & (positions < max(1, n - n // 3)),
        positions < 0,
    )
    return torch.stack([rows[i % 3] for i in range(b)]).to(device)
