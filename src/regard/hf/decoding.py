"""Step-by-step decoding of transformers models, swapped or not, with states as values.

transformers changes its caches in place. A step of Regard returns a new state and leaves the old
one as it was, so a prompt is read once and continued in many ways:

    step = decoding_step(model)
    logits, state = step(prompt, None)
    for ending in endings:  # all after the same prompt
        logits, _ = step(ending, state)
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import Unsupported
from regard.hf.model_inputs import max_length
from regard.hf.modules import SwappedAttention
from regard.models.model import DecodingStep, Model
from regard.state import JoinedState, State, run_by_group


class CachedTokens(NamedTuple):
    """State of a transformers model.

    Attributes:
        position: Number of tokens that were read.
        layers: Keys and values (b, h, n, e) of each layer; None for a swapped layer.
        streams: State of the mixer of each swapped layer.
    """

    position: int
    layers: tuple[tuple[Tensor, Tensor] | None, ...]
    streams: tuple[State, ...]


def decoding_step(model: nn.Module, *, logits_to_keep: int = 0) -> DecodingStep:
    """The step of a causal language model of transformers, for `regard.models.generate`.

    Keys and values are cached, and swapped layers stream. Call `model.eval()` first.

    Args:
        model: A model with a causal LM head, swapped or not, or a `RegardForCausalLM`.
        logits_to_keep: Compute the logits of this many last tokens only, where the model can. 0: of
            all.

    Returns:
        A function of tokens (b, n) and a state (None at the start) that returns the logits
        (b, n, vocab_size) and the next state. `regard.state.take` selects examples of a state.
    """
    check_causal_lm(model)
    inner = getattr(model, "net", None)
    if isinstance(inner, Model):
        return inner.stream  # type: ignore[return-value]
    swapped = [module for module in model.modules() if isinstance(module, SwappedAttention)]
    for module in swapped:
        if not module.mixer.can.stream:
            reason = module.mixer.can.reason("stream")
            raise Unsupported(f"{module.mixer.name} does not support streaming: {reason}")
    limit = max_length(model)
    can_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
    keep = {"logits_to_keep": logits_to_keep} if can_keep else {}

    @torch.no_grad()
    def step(tokens: Tensor, state: Any = None) -> tuple[Tensor, State]:
        if isinstance(state, JoinedState):
            return run_by_group(lambda group, tokens: step(tokens, group), state, tokens)
        end = tokens.shape[1] + (0 if state is None else state.position)
        if limit is not None and end > limit:
            raise ValueError(f"The text has {end} tokens; the model supports {limit}.")
        return _cached_step(model, swapped, tokens, state, keep)

    return step


def _cached_step(
    model: nn.Module,
    swapped: list[SwappedAttention],
    tokens: Tensor,
    state: CachedTokens | None,
    keep: dict[str, int],
) -> tuple[Tensor, CachedTokens]:
    """Run the model with a new cache that is filled from the state."""
    from transformers import DynamicCache

    swapped_layers = {module.layer_index for module in swapped}
    cache = DynamicCache()
    position = 0
    if state is not None:
        # In place of keys, the cache of a swapped layer holds the numbers of the examples.
        position, b = state.position, len(tokens)
        numbers = torch.arange(1, b + 1, dtype=torch.float32, device=tokens.device)
        numbers = numbers[:, None, None, None].expand(-1, 1, position, 1)
        keys_values = [(numbers, numbers) if kv is None else kv for kv in state.layers]
        cache = DynamicCache([(k[:, :, :0], v[:, :, :0]) for k, v in keys_values])
        for (keys, values), layer in zip(keys_values, _layers(cache), strict=True):
            layer.keys, layer.values = keys, values  # not copied: `update` makes new ones
        for module, stream in zip(swapped, state.streams, strict=True):
            module.streams[cache] = (stream, position)
    output = model(input_ids=tokens, past_key_values=cache, use_cache=True, **keep)
    end = position + tokens.shape[1]
    if output.past_key_values is not cache or cache.get_seq_length() != end:
        raise Unsupported(f"{type(model).__name__} does not use the dynamic cache of transformers.")
    layers = tuple(
        None if i in swapped_layers else (layer.keys, layer.values)
        for i, layer in enumerate(_layers(cache))
    )
    streams = tuple(module.streams[cache][0] for module in swapped)
    return output.logits, CachedTokens(end, layers, streams)


def _layers(cache: Any) -> list[Any]:
    """The layers of a dynamic cache."""
    return list(cache.layers)


def check_causal_lm(model: nn.Module) -> None:
    """Raise `Unsupported` unless the model is a decoder with a causal LM head."""
    name, config = type(model).__name__, getattr(model, "config", None)
    encoder = getattr(config, "is_encoder_decoder", False)
    if encoder or not name.endswith(("ForCausalLM", "LMHeadModel")):
        raise Unsupported(
            f"{name} is no causal language model: a model such as LlamaForCausalLM or "
            "GPT2LMHeadModel is needed."
        )


def end_tokens(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a text: that of the tokenizer, and those of the generation settings,
    which are several for chat models."""
    found = [tokenizer.eos_token_id]
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found += configured if isinstance(configured, list | tuple) else [configured]
    return tuple(sorted({int(token) for token in found if token is not None}))
