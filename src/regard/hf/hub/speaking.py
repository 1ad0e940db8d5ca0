# mypy: disable-error-code="no-untyped-call, arg-type, attr-defined"
"""Our models that speak: causal ones, and encoder–decoders.  The cache of `generate` is the state of the stream."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput

from regard.auxiliary import collect_aux
from regard.errors import Unsupported
from regard.hf.hub.base import RegardPreTrained, choices, real_mask, returned, told
from regard.hf.hub.cache import StreamCache, StreamGroup, by_length, real_first
from regard.hf.hub.config import RegardConfig
from regard.models import Backbone, Seq2Seq
from regard.models.config import HeadConfig, LMHeadConfig, ModelConfig
from regard.models.losses import IGNORE_INDEX


class _Speaking(RegardPreTrained, GenerationMixin):
    """A decoder that `generate` can ask."""

    _is_stateful = True  # states are not taken back: no assisted generation

    def __init__(self, config: RegardConfig) -> None:
        super().__init__(config)
        if not self._side().stack.can.stream:
            config.use_cache = False
            if self.generation_config is not None:
                self.generation_config.use_cache = False

    @classmethod
    def head_of(cls, config: RegardConfig, ours: ModelConfig) -> HeadConfig | None:
        """A language head."""
        return ours.head if isinstance(ours.head, LMHeadConfig) else LMHeadConfig()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """No: the cache is our state."""
        return False

    def _side(self) -> Backbone:
        """The trunk that speaks."""
        backbone: Backbone = (
            self.net.decoder if isinstance(self.net, Seq2Seq) else self.net.backbone
        )
        return backbone

    def _streamed(
        self, ids: Tensor, mask: Tensor | None, cache: Any, **context: Tensor | None
    ) -> tuple[Tensor, StreamCache]:
        """The next tokens (b n) -> (b n d), zero for padding, and the cache, which is changed in place."""
        cache = StreamCache() if cache is None else cache
        if not isinstance(cache, StreamCache):
            raise TypeError(
                f"past_key_values must be what the last call gave, a StreamCache, not {type(cache).__name__}"
            )
        if not self._side().stack.can.stream:
            reason = self._side().stack.can.reason("stream")
            raise Unsupported(
                f"this model cannot go on from a cache: {reason}; give use_cache=False"
            )
        now = None if mask is None else latest(mask, ids, cache.seen)
        if cache.groups and now is not None:
            raise ValueError("there is padding among the tokens that a stream goes on with")
        fed = [(g.rows, ids[g.rows], g.state) for g in cache.groups] or [
            (*each, None) for each in by_length(ids, now)
        ]
        y = self._embed().tokens.weight.new_zeros(*ids.shape, self._side().stack.wide)
        cache.groups, cache.seen = [], cache.seen + ids.shape[1]
        for rows, tokens, state in fed:
            here = {name: None if t is None else t[rows] for name, t in context.items()}
            out, state = self._side().stream(tokens, state, **here)
            y[rows, -tokens.shape[1] :] = out.to(y.dtype)
            cache.groups.append(StreamGroup(rows, state))
        return y, cache


class RegardForCausalLM(_Speaking):
    """Logits for the token that comes next.  Positions count from the first real token, wherever the padding stands."""

    kinds = ("decoder",)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        past_key_values: StreamCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """attention_mask (b n), 1 = a real token, of all tokens so far; labels (b n) are the tokens themselves, shifted here.

        A label of -100 does not count, nor one that only padding could tell.  logits_to_keep: of the last so many; 0: of all.
        """
        cached = past_key_values is not None or bool(use_cache)
        with collect_aux() as notes:
            if cached:
                self._no_types(token_type_ids)
                y, past_key_values = self._streamed(input_ids, attention_mask, past_key_values)
            else:
                y = self._aligned(input_ids, real_mask(attention_mask, input_ids), token_type_ids)
            logits = self.net.head(y[:, -logits_to_keep:] if logits_to_keep else y)
        loss = None
        if labels is not None:
            if logits_to_keep or past_key_values is not None:
                raise ValueError(
                    "a loss needs the logits of all tokens: give labels without a cache and without logits_to_keep"
                )
            asked = after_real(labels, real_mask(attention_mask, input_ids))
            loss = choices(logits[:, :-1], asked, num_items_in_batch) + told(
                notes, asked, num_items_in_batch
            )
        return returned(
            CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values),
            return_dict,
        )

    def _no_types(self, types: Tensor | None) -> None:
        if self._types(types) is not None and types is not None and types.any():
            raise Unsupported("a stream knows no token types other than 0")

    def _aligned(self, ids: Tensor, mask: Tensor | None, types: Tensor | None) -> Tensor:
        """All tokens, with the real ones moved to the front, and back: as if there were no padding before them."""
        if mask is None or not (mask.int().diff(dim=1) > 0).any():
            return self._whole(ids, mask, types)
        order = real_first(mask)
        y = self._whole(
            ids.gather(1, order),
            mask.gather(1, order),
            None if types is None else types.gather(1, order),
        )
        return torch.zeros_like(y).scatter(1, order[..., None].expand_as(y), y)


class _Read(nn.Module):
    """The encoder as `generate` calls it.  It holds no parameters of its own: they stand in the model."""

    main_input_name = "input_ids"

    def __init__(self, model: RegardForConditionalGeneration) -> None:
        super().__init__()
        self.__dict__["model"] = model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        return_dict: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> Any:
        """(b m) -> (b m d)."""
        if output_attentions or output_hidden_states:
            raise Unsupported(
                "there are no maps and no states of single layers to give: model.net.attention has the maps"
            )
        y, _ = self.__dict__["model"].net.encode(input_ids, real_mask(attention_mask, input_ids))
        return returned(BaseModelOutput(last_hidden_state=y), return_dict)


class RegardForConditionalGeneration(_Speaking):
    """An encoder–decoder: labels are the target, and what the decoder reads is made of them, shifted to the right."""

    kinds = ("seq2seq",)

    def get_encoder(self, *given: Any, **named: Any) -> nn.Module:
        """What reads the source."""
        return _Read(self)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: StreamCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """attention_mask is over the source; a label of -100 does not count."""
        decoder_input_ids = self._target(decoder_input_ids, labels)
        with collect_aux() as notes:
            context, mask = self._context(input_ids, attention_mask, encoder_outputs)
            if past_key_values is not None or use_cache:
                if decoder_attention_mask is not None and not decoder_attention_mask.all():
                    raise ValueError(
                        "there is padding among the tokens of the target, and a stream has none"
                    )
                looks = {"context": context, "context_mask": mask}
                y, past_key_values = self._streamed(
                    decoder_input_ids, None, past_key_values, **looks
                )
            else:
                target = real_mask(decoder_attention_mask, decoder_input_ids)
                y, _ = self.net.decoder(
                    decoder_input_ids, target, context=context, context_mask=mask
                )
            logits = self.net.head(y)
        loss = (
            None
            if labels is None
            else choices(logits, labels, num_items_in_batch)
            + told(notes, labels, num_items_in_batch)
        )
        found = Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values,
            encoder_last_hidden_state=context,
        )
        return returned(found, return_dict)

    def _target(self, ids: Tensor | None, labels: Tensor | None) -> Tensor:
        """What the decoder reads."""
        if ids is not None:
            return ids
        if labels is None:
            raise ValueError("give decoder_input_ids, or labels to make them of")
        return self.prepare_decoder_input_ids_from_labels(labels)

    def _context(
        self, ids: Tensor | None, mask: Tensor | None, read: Any
    ) -> tuple[Tensor, Tensor | None]:
        """What was read of the source (b m d), and its mask."""
        if read is not None:
            context: Tensor = read[0]
            return context, real_mask(mask, context[..., 0])
        if ids is None:
            raise ValueError("give input_ids, the source, or encoder_outputs, what was read of it")
        found: tuple[Tensor, Tensor | None] = self.net.encode(ids, real_mask(mask, ids))
        return found

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The start token, then the labels without the last; -100 as padding."""
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None:
            raise ValueError(
                "the configuration has no decoder_start_token_id: RegardConfig.of(config, decoder_start_token_id=0)"
            )
        shifted = F.pad(labels[:, :-1], (1, 0), value=start)
        return shifted.masked_fill(shifted == IGNORE_INDEX, 0 if pad is None else pad)


def latest(mask: Tensor, ids: Tensor, seen: int) -> Tensor | None:
    """The mask of the tokens that are fed now, (b n), of one over all tokens so far; None where all are real."""
    want = (ids.shape[0], seen + ids.shape[1])
    if tuple(mask.shape) != want:
        raise ValueError(
            f"attention_mask is over all tokens so far, {want}, not {tuple(mask.shape)}"
        )
    return real_mask(mask[:, seen:], ids)


def after_real(labels: Tensor, mask: Tensor | None) -> Tensor:
    """Labels (b n) -> what the tokens but the last are to tell, (b n-1); nothing is asked of padding."""
    return labels[:, 1:] if mask is None else labels[:, 1:].masked_fill(~mask[:, :-1], IGNORE_INDEX)
