# mypy: disable-error-code="no-untyped-call, arg-type, attr-defined"
"""Regard models as transformers classes.

Importing this module registers them with the Auto classes.

Each class wraps a model from `regard.models.build`, which is in `net`. The cache of `generate` is
the state of its stream.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    ModelOutput,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from regard.auxiliary import AuxOutputs, collect_aux
from regard.backends import check_mask
from regard.errors import Unsupported
from regard.hf.configuration import RegardConfig
from regard.hf.files import refuse_pickle_files
from regard.hf.hub_model import require_config
from regard.hf.stream_cache import StreamCache, split_by_length
from regard.models import Backbone, Decoder, Model, Seq2Seq, build
from regard.models.config import (
    HeadConfig,
    LMHeadConfig,
    MaskedLMHeadConfig,
    ModelConfig,
    SequenceClassificationHeadConfig,
    TokenClassificationHeadConfig,
    TokenInput,
)
from regard.models.embeddings import InputEmbedding, TokenEmbedding
from regard.models.heads import LMHead, MaskedLMHead
from regard.models.losses import IGNORE_INDEX
from regard.models.serialization import unique_tensors
from regard.state import join, take


class RegardPreTrainedModel(PreTrainedModel):
    """Base class: building, saving, loading, embeddings and inputs."""

    config_class = RegardConfig
    base_model_prefix = "regard"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = False
    accepts_loss_kwargs = True  # num_items_in_batch
    kinds: ClassVar[tuple[str, ...]] = ("encoder", "decoder", "seq2seq")

    def __init__(self, config: RegardConfig) -> None:
        super().__init__(config)
        name, model_config = type(self).__name__, config.regard
        if model_config.kind not in self.kinds:
            expected = " or ".join(map(repr, self.kinds))
            raise ValueError(
                f"{name} expects a model of kind {expected}, not {model_config.kind!r}."
            )
        if not isinstance(model_config.input, TokenInput):
            raise ValueError(
                f"{name} expects tokens, but the input is {model_config.input.kind}: use "
                "regard.hf.HubModel."
            )
        config.regard = model_config.replace(head=self.choose_head(config, model_config))
        self.net: Any = build(config.regard)
        self._tied_weights_keys = tied_names(self)
        self.post_init()

    @classmethod
    def choose_head(cls, config: RegardConfig, model_config: ModelConfig) -> HeadConfig | None:
        """The head of the configuration if it is of the right kind, else a new one."""
        raise NotImplementedError

    # ------------------------------------------------------------------------- building and loading
    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """`from_pretrained` of transformers, from safetensors only."""
        if (
            pretrained_model_name_or_path is not None
            and Path(pretrained_model_name_or_path).is_dir()
        ):
            refuse_pickle_files(Path(pretrained_model_name_or_path))
        return super().from_pretrained(
            pretrained_model_name_or_path, *args, **{"use_safetensors": True, **kwargs}
        )

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: modules initialize their weights when they are built."""

    @classmethod
    def get_init_context(cls, *args: Any, **kwargs: Any) -> list[Any]:
        """Without the meta device, so that missing weights and buffers keep their values."""
        contexts = super().get_init_context(*args, **kwargs)
        return [context for context in contexts if not isinstance(context, torch.device)]

    def _move_missing_keys_from_meta_to_device(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is on the meta device."""

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Second names of shared tensors -> first names."""
        return dict(self._tied_weights_keys)

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported."""
        raise Unsupported(
            'Gradient checkpointing is not supported. stack="reversible" stores no activations.'
        )

    # ----------------------------------------------------------------------------------- vocabulary
    def _embedding(self) -> TokenEmbedding:
        embed: InputEmbedding = (
            self.net.decoder if isinstance(self.net, Seq2Seq) else self.net.backbone
        ).embed
        assert isinstance(embed, TokenEmbedding)
        return embed

    def get_input_embeddings(self) -> nn.Module:
        """The token embeddings; in an encoder-decoder, the decoder's."""
        return self._embedding().tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embeddings."""
        self._embedding().tokens = value  # type: ignore[assignment]

    def _lm_head(self) -> LMHead | None:
        head = self.net.head.lm_head if isinstance(self.net.head, MaskedLMHead) else self.net.head
        return head if isinstance(head, LMHead) else None

    def get_output_embeddings(self) -> nn.Module | None:
        """The linear layer that computes logits over the vocabulary, or None."""
        head = self._lm_head()
        return None if head is None else head.proj

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace that layer."""
        head = self._lm_head()
        if head is None:
            raise ValueError("This model has no head over the vocabulary.")
        head.proj = value  # type: ignore[assignment]

    # --------------------------------------------------------------------------------------- inputs
    def _token_types(self, types: Tensor | None) -> Tensor | None:
        """Token types, or None if the model has none; tokenizers give zeros in that case."""
        has_types = self._embedding().token_types is not None
        if types is not None and not has_types and types.any():
            raise ValueError("This model has no token types: leave out token_type_ids.")
        return types if has_types else None

    def _run_backbone(
        self,
        ids: Tensor,
        mask: Tensor | None,
        types: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Token ids (b, n) -> hidden states (b, n, d)."""
        if global_attention_mask is not None:
            global_attention_mask = as_bool_mask(global_attention_mask, ids)
            global_attention_mask = global_attention_mask if global_attention_mask.any() else None
        y: Tensor = self.net.backbone(
            ids,
            mask,
            token_type_ids=self._token_types(types),
            global_attention_mask=global_attention_mask,
        )[0]
        return y

    # ----------------------------------------------------------------------------------- losses
    def _loss(self, logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
        """Mean cross-entropy over labels other than -100, or the sum divided by `count`."""
        total = F.cross_entropy(
            logits.flatten(0, -2).float(),
            labels.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
        )
        loss: Tensor = total / (
            (labels != IGNORE_INDEX).sum().clamp(min=1) if count is None else count
        )
        return loss

    def _total_loss(
        self, logits: Tensor, labels: Tensor, aux: AuxOutputs, count: Tensor | int | None
    ) -> Tensor:
        """The loss with auxiliary losses, such as load balancing of experts.

        Args:
            count: Labels in all batches of a step, for gradient accumulation. None: of this batch.
        """
        share = 1 if count is None else (labels != IGNORE_INDEX).sum() / count
        return self._loss(logits, labels, count) + aux.loss().to(labels.device) * share


def as_bool_mask(mask: Tensor, ids: Tensor) -> Tensor:
    """A mask of ones and zeros as bools (b, n)."""
    if mask.dim() != 2:
        raise ValueError(f"attention_mask must be (b, n), not {tuple(mask.shape)}.")
    mask = mask.bool()
    check_mask(mask, (ids.shape[0], ids.shape[1]), "attention_mask")
    return mask


def padding_mask(mask: Tensor | None, ids: Tensor) -> Tensor | None:
    """An attention mask of ones and zeros as bools (b, n), or None if there is no padding."""
    mask = None if mask is None else as_bool_mask(mask, ids)
    return None if mask is None or mask.all() else mask


def as_requested(output: ModelOutput, return_dict: bool | None) -> Any:
    """The output, or a tuple of it."""
    return output.to_tuple() if return_dict is False else output


def tied_names(module: nn.Module) -> dict[str, str]:
    """Second names of shared tensors -> first names."""
    first = {id(tensor): name for name, tensor in unique_tensors(module).items()}
    tensors = module.state_dict(keep_vars=True)
    return {
        name: first[id(tensor)] for name, tensor in tensors.items() if first[id(tensor)] != name
    }


# ----------------------------------------------------------------------------------------- encoders
class RegardModel(RegardPreTrainedModel):
    """An encoder or decoder without a head: returns hidden states (b, n, d)."""

    kinds = ("encoder", "decoder")

    @classmethod
    def choose_head(cls, config: RegardConfig, model_config: ModelConfig) -> HeadConfig | None:
        """None."""
        return None

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Compute hidden states.

        Args:
            attention_mask: (b, n), 1 = token, 0 = padding.
            global_attention_mask: (b, n), 1 = global attention, for mixers that support it.
        """
        mask = padding_mask(attention_mask, input_ids)
        y = self._run_backbone(input_ids, mask, token_type_ids, global_attention_mask)
        return as_requested(BaseModelOutput(last_hidden_state=y), return_dict)


class RegardModelWithHead(RegardPreTrainedModel):
    """Base class of models whose head reads all tokens at once."""

    output_class: ClassVar[type[ModelOutput]]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """See `RegardModel.forward`.

        Labels of -100 are ignored; the loss includes auxiliary losses.
        """
        mask = padding_mask(attention_mask, input_ids)
        with collect_aux() as aux:
            y = self._run_backbone(input_ids, mask, token_type_ids, global_attention_mask)
            logits = self.net.head(y, mask)
        loss = None
        if labels is not None:
            loss = self._total_loss(logits, labels, aux, num_items_in_batch)
        return as_requested(self.output_class(loss=loss, logits=logits), return_dict)


class RegardForMaskedLM(RegardModelWithHead):
    """Logits over the vocabulary for each token; labels are the masked tokens, -100 elsewhere."""

    kinds = ("encoder",)
    output_class = MaskedLMOutput

    @classmethod
    def choose_head(cls, config: RegardConfig, model_config: ModelConfig) -> HeadConfig | None:
        """A masked LM or LM head."""
        is_lm = isinstance(model_config.head, MaskedLMHeadConfig | LMHeadConfig)
        return model_config.head if is_lm else MaskedLMHeadConfig()


class RegardForTokenClassification(RegardModelWithHead):
    """Logits over `num_labels` for each token."""

    kinds = ("encoder", "decoder")
    output_class = TokenClassifierOutput

    @classmethod
    def choose_head(cls, config: RegardConfig, model_config: ModelConfig) -> HeadConfig | None:
        """A token classification head."""
        return TokenClassificationHeadConfig(num_classes=config.num_labels)


class RegardForSequenceClassification(RegardModelWithHead):
    """Logits over `num_labels` for a sequence.

    `problem_type` selects regression or multi-label classification.
    """

    kinds = ("encoder", "decoder")
    output_class = SequenceClassifierOutput

    @classmethod
    def choose_head(cls, config: RegardConfig, model_config: ModelConfig) -> HeadConfig | None:
        """The configured pooling, else the first token of an encoder, the last of a decoder."""
        if isinstance(model_config.head, SequenceClassificationHeadConfig):
            return model_config.head.model_copy(update={"num_classes": config.num_labels})
        pooling = "cls" if model_config.kind == "encoder" else "last"
        return SequenceClassificationHeadConfig(num_classes=config.num_labels, pooling=pooling)

    def _loss(self, logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
        more = {} if count is None else {"num_items_in_batch": count}
        loss: Tensor = self.loss_function(
            labels=labels, pooled_logits=logits, config=self.config, **more
        )
        return loss


# --------------------------------------------------------------------------------------- generation
class RegardGenerationModel(RegardPreTrainedModel, GenerationMixin):
    """Base class of decoders for `generate`."""

    _is_stateful = True  # states cannot be cropped, so there is no assisted generation

    def __init__(self, config: RegardConfig) -> None:
        super().__init__(config)
        if not self._decoder().stack.can.stream:
            config.use_cache = False
            if self.generation_config is not None:
                self.generation_config.use_cache = False

    @classmethod
    def choose_head(cls, config: RegardConfig, model_config: ModelConfig) -> HeadConfig | None:
        """An LM head."""
        return model_config.head if isinstance(model_config.head, LMHeadConfig) else LMHeadConfig()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """No: the cache is a `StreamCache`."""
        return False

    def _decoder(self) -> Backbone:
        decoder: Backbone = self.net.decoder if isinstance(self.net, Seq2Seq) else self.net.backbone
        return decoder

    def _stream(
        self, ids: Tensor, mask: Tensor | None, cache: Any, **context: Tensor | None
    ) -> tuple[Tensor, StreamCache]:
        """The next tokens (b, n) -> hidden states (b, n, d), and the cache, updated in place."""
        cache = StreamCache() if cache is None else cache
        decoder = self._decoder()
        if not isinstance(cache, StreamCache):
            raise TypeError(
                "past_key_values must be a StreamCache from the previous call, not "
                f"{type(cache).__name__}."
            )
        if not decoder.stack.can.stream:
            raise Unsupported(
                f"This model does not support a cache: {decoder.stack.can.reason('stream')}; use "
                "use_cache=False."
            )
        if mask is not None:
            expected = (ids.shape[0], cache.seen + ids.shape[1])
            if tuple(mask.shape) != expected:
                raise ValueError(
                    f"attention_mask must cover all tokens so far, {expected}, not "
                    f"{tuple(mask.shape)}."
                )
            mask = padding_mask(mask[:, cache.seen :], ids)
        if cache.state is not None and mask is not None:
            raise ValueError("Padding among the tokens that continue a stream is not supported.")
        cache.seen += ids.shape[1]
        if cache.state is not None or mask is None:
            y, cache.state = decoder.stream(ids, cache.state, **context)
            return y, cache

        y = self._embedding().tokens.weight.new_zeros(*ids.shape, decoder.stack.out_dim)
        all_rows, states = [], []
        for rows, tokens in split_by_length(ids, mask):
            selected = {
                name: None if tensor is None else tensor[rows] for name, tensor in context.items()
            }
            out, state = decoder.stream(tokens, None, **selected)
            y[rows, -tokens.shape[1] :] = out.to(y.dtype)
            all_rows.append(rows)
            states.append(state)
        cache.state = take(join(states), torch.cat(all_rows).argsort())
        return y, cache


class RegardForCausalLM(RegardGenerationModel):
    """Logits for the next token.

    Positions count from the first token, on whichever side the padding is.
    """

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
        """Compute logits and, with labels, the loss.

        Args:
            attention_mask: (b, n) over all tokens so far, 1 = token, 0 = padding.
            labels: The tokens themselves, (b, n); they are shifted here. -100 and predictions from
                padding are ignored.
            logits_to_keep: Compute logits of the last tokens only. 0: of all.
        """
        with collect_aux() as aux:
            if past_key_values is not None or use_cache:
                types = self._token_types(token_type_ids)
                if types is not None and types.any():
                    raise Unsupported("Token types other than 0 are not supported with a cache.")
                y, past_key_values = self._stream(input_ids, attention_mask, past_key_values)
            else:
                y = self._run_right_padded(
                    input_ids, padding_mask(attention_mask, input_ids), token_type_ids
                )
            logits = self.net.head(y[:, -logits_to_keep:] if logits_to_keep else y)
        loss = None
        if labels is not None:
            if logits_to_keep or past_key_values is not None:
                raise ValueError(
                    "A loss needs the logits of all tokens: leave out the cache and logits_to_keep."
                )
            mask, labels = padding_mask(attention_mask, input_ids), labels[:, 1:]
            if mask is not None:
                labels = labels.masked_fill(~mask[:, :-1], IGNORE_INDEX)
            loss = self._total_loss(logits[:, :-1], labels, aux, num_items_in_batch)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
        return as_requested(output, return_dict)

    def _run_right_padded(self, ids: Tensor, mask: Tensor | None, types: Tensor | None) -> Tensor:
        """Hidden states, with padding moved to the end so that it does not shift positions."""
        if mask is None or not (mask.int().diff(dim=1) > 0).any():
            return self._run_backbone(ids, mask, types)
        order = mask.logical_not().int().argsort(dim=1, stable=True)  # tokens first, in their order
        types = None if types is None else types.gather(1, order)
        y = self._run_backbone(ids.gather(1, order), mask.gather(1, order), types)
        return torch.zeros_like(y).scatter(1, order[..., None].expand_as(y), y)


class EncoderForGeneration(nn.Module):
    """The encoder as `generate` calls it. Its parameters belong to the model."""

    main_input_name = "input_ids"

    def __init__(self, model: RegardForConditionalGeneration) -> None:
        super().__init__()
        self.__dict__["model"] = model  # not registered as a sub-module

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        return_dict: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> Any:
        """(b, m) -> (b, m, d)."""
        if output_attentions or output_hidden_states:
            raise Unsupported(
                "output_attentions and output_hidden_states are not supported: "
                "model.net.attention_maps computes attention maps."
            )
        y, _ = self.__dict__["model"].net.encode(input_ids, padding_mask(attention_mask, input_ids))
        return as_requested(BaseModelOutput(last_hidden_state=y), return_dict)


class RegardForConditionalGeneration(RegardGenerationModel):
    """An encoder-decoder.

    Labels are the target; the decoder's input is the labels shifted to the right.
    """

    kinds = ("seq2seq",)

    def get_encoder(self, *args: Any, **kwargs: Any) -> nn.Module:
        """The encoder, for `generate`."""
        return EncoderForGeneration(self)

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
        """Compute logits and, with labels, the loss.

        `attention_mask` is that of the source; labels of -100 are ignored.
        """
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("Give decoder_input_ids or labels.")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        with collect_aux() as aux:
            if encoder_outputs is not None:
                context: Tensor = encoder_outputs[0]
                mask = padding_mask(attention_mask, context[..., 0])
            elif input_ids is not None:
                context, mask = self.net.encode(input_ids, padding_mask(attention_mask, input_ids))
            else:
                raise ValueError("Give input_ids or encoder_outputs.")
            source = {"context": context, "context_mask": mask}
            if past_key_values is not None or use_cache:
                if decoder_attention_mask is not None and not decoder_attention_mask.all():
                    raise ValueError("Padding in the target is not supported with a cache.")
                y, past_key_values = self._stream(
                    decoder_input_ids, None, past_key_values, **source
                )
            else:
                target_mask = padding_mask(decoder_attention_mask, decoder_input_ids)
                y, _ = self.net.decoder(decoder_input_ids, target_mask, **source)
            logits = self.net.head(y)
        loss = None
        if labels is not None:
            loss = self._total_loss(logits, labels, aux, num_items_in_batch)
        output = Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values,
            encoder_last_hidden_state=context,
        )
        return as_requested(output, return_dict)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The start token, then the labels without the last; -100 becomes padding."""
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None:
            raise ValueError(
                "The configuration has no decoder_start_token_id: give it to "
                "RegardConfig.from_model_config."
            )
        shifted = F.pad(labels[:, :-1], (1, 0), value=start)
        return shifted.masked_fill(shifted == IGNORE_INDEX, 0 if pad is None else pad)


# ------------------------------------------------------------------------ wrapping and Auto classes
def wrap_model(model: Model, **kwargs: Any) -> RegardPreTrainedModel:
    """Wrap a Regard model in the class for its head, sharing its weights.

    Args:
        kwargs: Keys of a transformers configuration, such as pad_token_id, eos_token_id and
            id2label.
    """
    config = require_config(model)
    with torch.device("meta"):  # without memory for weights that are replaced at once
        wrapper = class_for(model)(RegardConfig.from_model_config(config, **kwargs))
    wrapper.net = model
    wrapper._tied_weights_keys = tied_names(wrapper)
    wrapper.all_tied_weights_keys = dict(wrapper._tied_weights_keys)
    return wrapper.train(model.training)


def class_for(model: Model) -> type[RegardPreTrainedModel]:
    """The class for the kind and head of a model."""
    head = require_config(model).head
    if isinstance(model, Seq2Seq):
        return RegardForConditionalGeneration
    if head is None:
        return RegardModel
    if isinstance(head, LMHeadConfig):
        return RegardForCausalLM if isinstance(model, Decoder) else RegardForMaskedLM
    if isinstance(head, MaskedLMHeadConfig):
        return RegardForMaskedLM
    if isinstance(head, TokenClassificationHeadConfig):
        return RegardForTokenClassification
    if isinstance(head, SequenceClassificationHeadConfig):
        return RegardForSequenceClassification
    raise Unsupported(
        f"transformers has no class for the head {head.kind!r}: use regard.hf.HubModel."
    )


AutoConfig.register("regard", RegardConfig, exist_ok=True)
for _auto, _class in (
    (AutoModel, RegardModel),
    (AutoModelForCausalLM, RegardForCausalLM),
    (AutoModelForMaskedLM, RegardForMaskedLM),
    (AutoModelForSeq2SeqLM, RegardForConditionalGeneration),
    (AutoModelForSequenceClassification, RegardForSequenceClassification),
    (AutoModelForTokenClassification, RegardForTokenClassification),
):
    _auto.register(RegardConfig, _class, exist_ok=True)
