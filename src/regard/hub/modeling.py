# mypy: disable-error-code="no-untyped-call, arg-type, attr-defined"
"""Our models in transformers: save_pretrained, from_pretrained, generate, pipelines and the Trainer.

Each class is a thin coat around a model that `regard.models.build` made, which stands in `net`.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    ModelOutput,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from regard.attend import check_mask
from regard.errors import Unsupported
from regard.hub.cache import Group, StreamCache, by_length, real_first
from regard.hub.config import RegardConfig
from regard.models import Decoder, Model, Seq2Seq, Trunk, build
from regard.models.config import Classify, Config, Head, Language, Masked, Tag, Tokens
from regard.models.embed import Embed, TokenEmbed
from regard.models.loss import IGNORE
from regard.models.save import own_tensors
from regard.notes import noted


class RegardPreTrained(PreTrainedModel):
    """What all of them share: how they are built, saved and loaded."""

    config_class = RegardConfig
    base_model_prefix = "regard"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = False
    accepts_loss_kwargs = True  # num_items_in_batch
    kinds: ClassVar[tuple[str, ...]] = ("encoder", "decoder", "seq2seq")

    def __init__(self, config: RegardConfig) -> None:
        super().__init__(config)
        ours = config.regard
        if ours.kind not in self.kinds:
            wanted = " or ".join(map(repr, self.kinds))
            raise ValueError(f"{type(self).__name__} is for models of kind {wanted}, and this one is of kind {ours.kind!r}")
        if not isinstance(ours.input, Tokens):
            raise ValueError(
                f"{type(self).__name__} reads tokens, and this model {ours.input.kind}: see regard.hub.auto.HubModel"
            )
        config.regard = ours.but(head=self.head_of(config, ours))
        self.net: Any = build(config.regard)
        self._tied_weights_keys = second_names(self)
        self.post_init()

    @classmethod
    def head_of(cls, config: RegardConfig, ours: Config) -> Head | None:
        """What stands on top: that of the configuration where it is of the right kind, else a fresh one."""
        raise NotImplementedError

    # -------------------------------------------------------------------------------- how it is made
    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: every part of ours draws its own weights when it is made."""

    @classmethod
    def get_init_context(cls, *given: Any, **named: Any) -> list[Any]:
        """Theirs without the meta device: weights that a file lacks stay as they were drawn, and buffers as computed."""
        contexts = super().get_init_context(*given, **named)
        return [each for each in contexts if not isinstance(each, torch.device)]

    def _move_missing_keys_from_meta_to_device(self, *given: Any, **named: Any) -> None:
        """Nothing is on the meta device."""

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """The second names of shared tensors -> the first: those are saved once, and shared again."""
        return dict(self._tied_weights_keys)

    def gradient_checkpointing_enable(self, *given: Any, **named: Any) -> NoReturn:
        """Refused, with what there is instead."""
        raise Unsupported(
            "our stacks are not checkpointed layer by layer: a model with stack 'reversible' keeps no activations at all"
        )

    # -------------------------------------------------------------------------------- the vocabulary
    def _embed(self) -> TokenEmbed:
        embed: Embed = self.net.decoder.embed if isinstance(self.net, Seq2Seq) else self.net.trunk.embed
        assert isinstance(embed, TokenEmbed)
        return embed

    def get_input_embeddings(self) -> nn.Module:
        """The table of tokens; of an encoder–decoder, that of the decoder, which both share unless a target was given."""
        return self._embed().tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Another table."""
        self._embed().tokens = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module | None:
        """The linear layer that gives logits over the vocabulary; None: there is none."""
        head = getattr(self.net, "head", None)
        words = getattr(head, "words", None)
        return getattr(words, "words", words)

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Another layer."""
        head = self.net.head
        (head if isinstance(head.words, nn.Linear) else head.words).words = value

    # -------------------------------------------------------------------------------- what goes in
    def _types(self, types: Tensor | None) -> Tensor | None:
        """Token types as ours; tokenizers give zeros where there are none."""
        knows = self._embed().types is not None
        if types is not None and not knows and types.any():
            raise ValueError("token_type_ids tell tokens apart, and this model knows no types: give none")
        return types if knows else None

    def _whole(self, ids: Tensor, mask: Tensor | None, types: Tensor | None = None, marks: Tensor | None = None) -> Tensor:
        """All tokens at once: (b n) -> (b n d)."""
        y: Tensor = self.net.trunk(ids, mask, types=self._types(types), marks=real_mask(marks, ids, some=True))[0]
        return y


# ---------------------------------------------------------------------------------------------- bare
class RegardModel(RegardPreTrained):
    """The tokens (b n d) themselves: an encoder or a decoder without a head."""

    kinds = ("encoder", "decoder")

    @classmethod
    def head_of(cls, config: RegardConfig, ours: Config) -> Head | None:
        """None."""
        return None

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None,
        global_attention_mask: Tensor | None = None, return_dict: bool | None = None,
    ) -> Any:  # fmt: skip
        """attention_mask (b n), 1 = a real token; global_attention_mask (b n), 1 = a marked one, for mixers that know them."""
        y = self._whole(input_ids, real_mask(attention_mask, input_ids), token_type_ids, global_attention_mask)
        return returned(BaseModelOutput(last_hidden_state=y), return_dict)


class _WithHead(RegardPreTrained):
    """Encoders (and decoders) whose head speaks of all tokens at once."""

    output: ClassVar[type[ModelOutput]]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None,
        global_attention_mask: Tensor | None = None, labels: Tensor | None = None, return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:  # fmt: skip
        """See `RegardModel.forward`.  A label of -100 does not count; the loss has the costs that parts of the model tell."""
        mask = real_mask(attention_mask, input_ids)
        with noted() as notes:
            y = self._whole(input_ids, mask, token_type_ids, global_attention_mask)
            logits = self.net.head(y, mask)
        loss = None if labels is None else self._loss(logits, labels, num_items_in_batch) + told(notes, logits)
        return returned(self.output(loss=loss, logits=logits), return_dict)

    def _loss(self, logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
        return choices(logits, labels, count)


class RegardForMaskedLM(_WithHead):
    """Logits over the vocabulary for each token of an encoder; labels are the tokens behind the gaps, -100 elsewhere."""

    kinds = ("encoder",)
    output = MaskedLMOutput

    @classmethod
    def head_of(cls, config: RegardConfig, ours: Config) -> Head | None:
        """A masked or a language head."""
        return ours.head if isinstance(ours.head, Masked | Language) else Masked()


class RegardForTokenClassification(_WithHead):
    """Logits over `num_labels` for each token."""

    kinds = ("encoder", "decoder")
    output = TokenClassifierOutput

    @classmethod
    def head_of(cls, config: RegardConfig, ours: Config) -> Head | None:
        """Tags."""
        return Tag(classes=config.num_labels)


class RegardForSequenceClassification(_WithHead):
    """Logits over `num_labels` for a whole sequence; `problem_type` may be a regression, or several labels at once."""

    kinds = ("encoder", "decoder")
    output = SequenceClassifierOutput

    @classmethod
    def head_of(cls, config: RegardConfig, ours: Config) -> Head | None:
        """The pooling of the configuration; else the first token of an encoder, the last of a decoder."""
        if isinstance(ours.head, Classify):
            return ours.head.model_copy(update={"classes": config.num_labels})
        return Classify(classes=config.num_labels, pooling="cls" if ours.kind == "encoder" else "last")

    def _loss(self, logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
        more = {} if count is None else {"num_items_in_batch": count}
        loss: Tensor = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **more)
        return loss


# ---------------------------------------------------------------------------------------------- generation
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
    def head_of(cls, config: RegardConfig, ours: Config) -> Head | None:
        """A language head."""
        return ours.head if isinstance(ours.head, Language) else Language()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """No: the cache is our state."""
        return False

    def _side(self) -> Trunk:
        """The trunk that speaks."""
        trunk: Trunk = self.net.decoder if isinstance(self.net, Seq2Seq) else self.net.trunk
        return trunk

    def _streamed(self, ids: Tensor, mask: Tensor | None, cache: Any, **context: Tensor | None) -> tuple[Tensor, StreamCache]:
        """The next tokens (b n) -> (b n d), zero for padding, and the cache, which is changed in place."""
        cache = StreamCache() if cache is None else cache
        if not isinstance(cache, StreamCache):
            raise TypeError(f"past_key_values must be what the last call gave, a StreamCache, not {type(cache).__name__}")
        if not self._side().stack.can.stream:
            reason = self._side().stack.can.reason("stream")
            raise Unsupported(f"this model cannot go on from a cache: {reason}; give use_cache=False")
        now = None if mask is None or mask[:, -ids.shape[1] :].all() else mask[:, -ids.shape[1] :]
        if cache.groups and now is not None:
            raise ValueError("there is padding among the tokens that a stream goes on with")
        fed = [(g.rows, ids[g.rows], g.state) for g in cache.groups] or [(*each, None) for each in by_length(ids, now)]
        y = self._embed().tokens.weight.new_zeros(*ids.shape, self.config.regard.dim)
        cache.groups, cache.seen = [], cache.seen + ids.shape[1]
        for rows, tokens, state in fed:
            here = {name: None if t is None else t[rows] for name, t in context.items()}
            out, state = self._side().stream(tokens, state, **here)
            y[rows, -tokens.shape[1] :] = out.to(y.dtype)
            cache.groups.append(Group(rows, state))
        return y, cache


class RegardForCausalLM(_Speaking):
    """Logits for the token that comes next.  Positions count from the first real token, wherever the padding stands."""

    kinds = ("decoder",)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None,
        past_key_values: StreamCache | None = None, labels: Tensor | None = None, use_cache: bool | None = None,
        logits_to_keep: int = 0, return_dict: bool | None = None, num_items_in_batch: Tensor | int | None = None,
    ) -> Any:  # fmt: skip
        """attention_mask (b n), 1 = a real token, of all tokens so far; labels (b n) are the tokens themselves, shifted here.

        A label of -100 does not count, nor one that only padding could tell.  logits_to_keep: of the last so many; 0: of all.
        """
        cached = past_key_values is not None or bool(use_cache)
        with noted() as notes:
            if cached:
                self._no_types(token_type_ids)
                mask = real_mask(attention_mask, None)
                y, past_key_values = self._streamed(input_ids, mask, past_key_values)
            else:
                mask = real_mask(attention_mask, input_ids)
                y = self._aligned(input_ids, mask, token_type_ids)
            logits = self.net.head(y[:, -logits_to_keep:] if logits_to_keep else y)
        loss = None
        if labels is not None:
            if logits_to_keep or past_key_values is not None:
                raise ValueError(
                    "a loss needs the logits of all tokens: give labels without a cache and without logits_to_keep"
                )
            loss = choices(logits[:, :-1], after_real(labels, mask), num_items_in_batch) + told(notes, logits)
        return returned(CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values), return_dict)

    def _no_types(self, types: Tensor | None) -> None:
        if self._types(types) is not None and types is not None and types.any():
            raise Unsupported("a stream knows no token types other than 0")

    def _aligned(self, ids: Tensor, mask: Tensor | None, types: Tensor | None) -> Tensor:
        """All tokens, with the real ones moved to the front, and back: as if there were no padding before them."""
        if mask is None or not (mask.int().diff(dim=1) > 0).any():
            return self._whole(ids, mask, types)
        order = real_first(mask)
        y = self._whole(ids.gather(1, order), mask.gather(1, order), None if types is None else types.gather(1, order))
        return torch.zeros_like(y).scatter(1, order[..., None].expand_as(y), y)


class _Read(nn.Module):
    """The encoder as `generate` calls it.  It holds no parameters of its own: they stand in the model."""

    main_input_name = "input_ids"

    def __init__(self, model: RegardForConditionalGeneration) -> None:
        super().__init__()
        self.__dict__["model"] = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, return_dict: bool | None = None,
        output_attentions: bool | None = None, output_hidden_states: bool | None = None,
    ) -> Any:  # fmt: skip
        """(b m) -> (b m d)."""
        if output_attentions or output_hidden_states:
            raise Unsupported("there are no maps and no states of single layers to give: model.net.attention has the maps")
        y, _ = self.__dict__["model"].net.encode(input_ids, real_mask(attention_mask, input_ids))
        return returned(BaseModelOutput(last_hidden_state=y), return_dict)


class RegardForConditionalGeneration(_Speaking):
    """An encoder–decoder: labels are the target, and what the decoder reads is made of them, shifted to the right."""

    kinds = ("seq2seq",)

    def get_encoder(self, *given: Any, **named: Any) -> nn.Module:
        """What reads the source."""
        return _Read(self)

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None, encoder_outputs: Any = None,
        past_key_values: StreamCache | None = None, labels: Tensor | None = None, use_cache: bool | None = None,
        return_dict: bool | None = None, num_items_in_batch: Tensor | int | None = None,
    ) -> Any:  # fmt: skip
        """attention_mask is over the source; a label of -100 does not count."""
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("give decoder_input_ids, or labels to make them of")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        with noted() as notes:
            context, mask = self._context(input_ids, attention_mask, encoder_outputs)
            if past_key_values is not None or use_cache:
                if decoder_attention_mask is not None and not decoder_attention_mask.all():
                    raise ValueError("there is padding among the tokens of the target, and a stream has none")
                looks = {"context": context, "context_mask": mask}
                y, past_key_values = self._streamed(decoder_input_ids, None, past_key_values, **looks)
            else:
                target = real_mask(decoder_attention_mask, decoder_input_ids)
                y, _ = self.net.decoder(decoder_input_ids, target, context=context, context_mask=mask)
            logits = self.net.head(y)
        loss = None if labels is None else choices(logits, labels, num_items_in_batch) + told(notes, logits)
        found = Seq2SeqLMOutput(loss=loss, logits=logits, past_key_values=past_key_values, encoder_last_hidden_state=context)
        return returned(found, return_dict)

    def _context(self, ids: Tensor | None, mask: Tensor | None, read: Any) -> tuple[Tensor, Tensor | None]:
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
        return shifted.masked_fill(shifted == IGNORE, 0 if pad is None else pad)


# ---------------------------------------------------------------------------------------------- small parts
def real_mask(mask: Tensor | None, ids: Tensor | None, *, some: bool = False) -> Tensor | None:
    """Their mask of ones and zeros as ours (b n); None where it leaves nothing out, or with `some` where it names nothing."""
    if mask is None:
        return None
    if mask.dim() != 2:
        raise ValueError(f"attention_mask must be (b n), not {tuple(mask.shape)}: mechanisms have no masks of pairs")
    found = mask.bool()
    if ids is not None:
        check_mask(found, (ids.shape[0], ids.shape[1]), "attention_mask")
    return None if (not found.any() if some else found.all()) else found


def after_real(labels: Tensor, mask: Tensor | None) -> Tensor:
    """Labels (b n) -> what the tokens but the last are to tell, (b n-1); nothing is asked of padding."""
    return labels[:, 1:] if mask is None else labels[:, 1:].masked_fill(~mask[:, :-1], IGNORE)


def choices(logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
    """Cross-entropy in the mean over the labels that count, or their sum over `count`, as the Trainer asks with several
    batches to a step; zero where none counts."""
    total = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    mean: Tensor = total / ((labels != IGNORE).sum().clamp(min=1) if count is None else count)
    return mean


def told(notes: Any, like: Tensor) -> Tensor:
    """The costs that parts of the model told, such as the balance of experts."""
    cost: Tensor = notes.cost().to(like.device)
    return cost


def returned(found: Any, return_dict: bool | None) -> Any:
    """As an object, or as the tuple of what is there."""
    return found.to_tuple() if return_dict is False else found


def second_names(module: nn.Module) -> dict[str, str]:
    """Names of tensors that stand under another name already -> that name."""
    first = {id(tensor): name for name, tensor in own_tensors(module).items()}
    every = module.state_dict(keep_vars=True)
    return {name: first[id(tensor)] for name, tensor in every.items() if first[id(tensor)] != name}


def wrapped(model: Model, **more: Any) -> RegardPreTrained:
    """A model of ours in the class that fits its head, with the same weights (the same tensors, not copies).

    more   keys of their configuration, such as pad_token_id, eos_token_id and id2label
    """
    if model.config is None:
        raise ValueError("this model was built by hand: only one that `build` made of a configuration can be wrapped")
    kind = class_for(model)
    coat = kind(RegardConfig.of(model.config, **more))
    coat.net = model
    coat._tied_weights_keys = second_names(coat)
    coat.all_tied_weights_keys = dict(coat._tied_weights_keys)
    return coat.train(model.training)


def class_for(model: Model) -> type[RegardPreTrained]:
    """By its head and kind."""
    assert model.config is not None
    head = model.config.head
    if isinstance(model, Seq2Seq):
        return RegardForConditionalGeneration
    if isinstance(head, Language) and isinstance(model, Decoder):
        return RegardForCausalLM
    known: dict[str, type[RegardPreTrained]] = {
        "masked": RegardForMaskedLM, "language": RegardForMaskedLM, "tag": RegardForTokenClassification,
        "classify": RegardForSequenceClassification,
    }  # fmt: skip
    if head is None:
        return RegardModel
    if head.kind not in known:
        raise Unsupported(f"transformers has no class for the head {head.kind!r}: see regard.hub.auto.HubModel")
    return known[head.kind]
