"""Checks of built models: what holds for mixers also holds for the stack around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.can import Can
from regard.models.build import build
from regard.models.config import ModelConfig, ModuleSpec, TokenInput, module_spec
from regard.models.model import Decoder, Model, Seq2Seq, SingleStackModel, outer_mixers
from regard.registry import get_recipe

LENGTH, REAL = 13, 8  # tokens of an example, and of one with padding
WORDS, SMALL_LENGTH = 11, 24  # of the models of `check_recipe`
Kind = Literal["encoder", "decoder"]
Run = Callable[..., Tensor]  # tokens (2, n), mask (2, n), model -> outputs


def check_model(config: ModelConfig) -> Model:
    """Check a model of tokens: finite outputs; padding equals truncating, also with masked tokens
    between others and in 16 bits; no influence of later tokens or of other examples; streaming
    equals one pass.

    Args:
        config: A configuration with `TokenInput`. A small vocabulary draws equal tokens.

    Returns:
        The model, in float64, with random parameters: zeros would hide what they multiply.

    Raises:
        AssertionError: If a promise is broken.
        Unsupported, ValueError: If the model cannot be built.
    """
    if not isinstance(config.input, TokenInput):
        raise ValueError("check_model needs a model with TokenInput")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(config).double().eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.4)
    words = config.input.vocab_size
    x, source = (random_tokens(words, seed) for seed in (0, 1))
    with torch.no_grad():
        if isinstance(model, Seq2Seq):

            def encode(tokens: Tensor, mask: Tensor | None, model: Seq2Seq = model) -> Tensor:
                return model.encode(tokens, mask)[0]

            def decode(target: Tensor, mask: Tensor | None, model: Seq2Seq = model) -> Tensor:
                output: Tensor = model(source, target, target_mask=mask)
                return output

            _check_padding(encode, model.encoder.stack.can, source, model)

            context, _ = model.encode(source)
            can = model.decoder.stack.can
            _check_padding(decode, can, x, model)
            _check_causality(decode, partial(model.stream, context=context), can, x, words)
            return model

        def run(tokens: Tensor, mask: Tensor | None, model: Model = model) -> Tensor:
            output: Tensor = model(tokens, mask)
            return output

        assert isinstance(model, SingleStackModel)
        can = model.backbone.stack.can
        _check_padding(run, can, x, model)
        if isinstance(model, Decoder):
            _check_causality(run, model.stream, can, x, words)
    return model


def random_tokens(vocab_size: int, seed: int, length: int = LENGTH) -> Tensor:
    """Random tokens (2, length)."""
    return torch.randint(0, vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))


def _check_padding(run: Run, can: Can, x: Tensor, model: nn.Module) -> None:
    whole = run(x, None)
    assert whole.isfinite().all(), "the output is not finite"
    if not can.mask:
        return
    tail = torch.arange(LENGTH) < torch.tensor([[LENGTH], [REAL]])
    holes = tail & (torch.arange(LENGTH) % 4 != 1)
    padded = run(x, tail)
    _assert_close(padded[0], whole[0], "an example depends on the padding of another")
    _assert_close(padded[1, :REAL], run(x[:, :REAL], None)[1], "padded differs from truncated")
    keep = holes[1, :REAL]
    cut, padded = run(x[:, :REAL], holes[:, :REAL])[1], run(x, holes)[1, :REAL]
    message = "padded differs from truncated with masked tokens between others"
    _assert_close(padded[keep], cut[keep], message)
    for dtype in (torch.float16, torch.bfloat16):
        if whole.abs().max() < torch.finfo(dtype).max / 1e4:  # layers inside may have larger ones
            y = run(x, holes, deepcopy(model).to(dtype))
            assert y[holes].isfinite().all(), f"the output is not finite in {dtype}"


def _check_causality(
    run: Run,
    stream: Callable[[Tensor, Any], tuple[Tensor, Any]],
    can: Can,
    x: Tensor,
    vocab_size: int,
) -> None:
    whole = run(x, None)
    later = torch.cat((x[:, :9], vocab_size - 1 - x[:, 9:]), 1)
    _assert_close(run(later, None)[:, :9], whole[:, :9], "a later token has influence")
    _assert_close(run(x[:, :9], None), whole[:, :9], "the number of later tokens has influence")
    if can.stream:
        state, parts = None, []
        for chunk in x.split((1, 6, 1, 5), 1):
            y, state = stream(chunk, state)
            parts.append(y)
        _assert_close(torch.cat(parts, 1), whole, "a stream differs from the whole")


def _assert_close(found: Tensor, expected: Tensor, promise: str) -> None:
    torch.testing.assert_close(
        found, expected, rtol=1e-7, atol=1e-7, msg=lambda details: f"{promise}\n{details}"
    )


# ------------------------------------------------------------------------- a recipe in a model
def check_recipe(
    name: str,
    *,
    same_as_softmax: bool = False,
    layers: Sequence[int] = (1, 2),
    **arguments: object,
) -> None:
    """Check a recipe in built models: it is not plain softmax attention, and what it draws from its
    seed differs from layer to layer and from seed to seed.

    Args:
        name: A registered recipe, which is built as in its example.
        same_as_softmax: Whether its outputs are those of softmax attention by definition.
        layers: Numbers of layers of the models that are compared with softmax attention.
        arguments: More arguments of the recipe.

    Raises:
        AssertionError: If a promise is broken.
    """
    recipe = get_recipe(name)
    example = {k: v for k, v in recipe.example_kwargs.items() if k not in ("length", "layer")}
    spec = module_spec(name, **{**example, **arguments})
    kind: Kind = "encoder" if False in recipe.causal_options() else "decoder"
    for count in layers:
        model, plain = (_small_model(each, kind, count) for each in (spec, module_spec("vanilla")))
        _copy_weights(plain, model)
        x = random_tokens(WORDS, 0, SMALL_LENGTH)
        with torch.no_grad():
            change = (model(x) - plain(x)).abs().max()
        if same_as_softmax:
            assert change == 0, f"{name} in {count} layers differs from softmax attention"
        else:
            assert change > 1e-3, f"{name} in {count} layers is plain softmax attention"
    if "seed" in recipe.parameters:
        _check_seeds(name, spec, kind)


def _small_model(spec: ModuleSpec, kind: Kind, layers: int, seed: int = 1) -> Model:
    config = ModelConfig(
        kind=kind,
        input=TokenInput(vocab_size=WORDS),
        dim=8,
        heads=2,
        layers=layers,
        length=SMALL_LENGTH,
        mixer=[spec],
        seed=seed,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(config).eval()


def _copy_weights(source: Model, target: Model) -> None:
    """Copy weights of the same name and shape, whatever the stack and the mixer around them; the
    others, which may start as an identity or as zero, get noise."""

    def weights(model: Model) -> dict[str, Tensor]:
        found = {}
        for name, weight in model.named_parameters():
            for long, short in (("stack.blocks.", "stack.layers."), ("mixer.heads.", "mixer.")):
                name = name.replace(long, short)
            found[name] = weight.data
        return found

    known, generator = weights(source), torch.Generator().manual_seed(0)
    for name, weight in weights(target).items():
        if name in known and known[name].shape == weight.shape:
            weight.copy_(known[name])
        else:
            weight += 0.3 * torch.randn(weight.shape, generator=generator)


def _check_seeds(name: str, spec: ModuleSpec, kind: Kind) -> None:
    """What changes with the seed of the configuration, and not with torch's, was drawn from it."""
    (first, second), (other, _) = (
        [_content(mixer) for mixer in outer_mixers(_small_model(spec, kind, 2, seed))]
        for seed in (1, 2)
    )
    drawn = [key for key in first if first[key] != other[key]]
    assert drawn, f"another seed changes nothing in {name}"
    same = [key for key in drawn if first[key] == second[key]]
    assert not same, f"two layers of {name} draw the same {', '.join(same)}"


def _content(mixer: nn.Module) -> dict[str, object]:
    """Parameters, buffers, the text and the seeds of a mixer."""
    found: dict[str, object] = {"repr": repr(mixer)}
    for name, tensor in (*mixer.named_parameters(), *mixer.named_buffers()):
        found[name] = tensor.tolist()
    for name, module in mixer.named_modules():
        if "seed" in vars(module):
            found[f"{name}.seed"] = module.seed
    return found
