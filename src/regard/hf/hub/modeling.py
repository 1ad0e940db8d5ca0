# mypy: disable-error-code="no-untyped-call, arg-type, attr-defined"
"""Our models in transformers that read all at once; and a coat for any model of ours."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    ModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from regard.auxiliary import collect_aux
from regard.errors import Unsupported
from regard.hf.hub.base import RegardPreTrained, choices, real_mask, returned, second_names, told
from regard.hf.hub.config import RegardConfig
from regard.hf.hub.speaking import RegardForCausalLM, RegardForConditionalGeneration
from regard.models import Decoder, Model, Seq2Seq
from regard.models.config import (
    HeadConfig,
    LMHeadConfig,
    MaskedLMHeadConfig,
    ModelConfig,
    SequenceClassificationHeadConfig,
    TokenClassificationHeadConfig,
)


class RegardModel(RegardPreTrained):
    """The tokens (b n d) themselves: an encoder or a decoder without a head."""

    kinds = ("encoder", "decoder")

    @classmethod
    def head_of(cls, config: RegardConfig, ours: ModelConfig) -> HeadConfig | None:
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
        """attention_mask (b n), 1 = a real token; global_attention_mask (b n), 1 = a marked one, for mixers that know them."""
        y = self._whole(
            input_ids, real_mask(attention_mask, input_ids), token_type_ids, global_attention_mask
        )
        return returned(BaseModelOutput(last_hidden_state=y), return_dict)


class _WithHead(RegardPreTrained):
    """Encoders (and decoders) whose head speaks of all tokens at once."""

    output: ClassVar[type[ModelOutput]]

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
        """See `RegardModel.forward`.  A label of -100 does not count; the loss has the costs that parts of the model tell."""
        mask = real_mask(attention_mask, input_ids)
        with collect_aux() as notes:
            y = self._whole(input_ids, mask, token_type_ids, global_attention_mask)
            logits = self.net.head(y, mask)
        loss = (
            None
            if labels is None
            else self._loss(logits, labels, num_items_in_batch)
            + told(notes, labels, num_items_in_batch)
        )
        return returned(self.output(loss=loss, logits=logits), return_dict)

    def _loss(self, logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
        return choices(logits, labels, count)


class RegardForMaskedLM(_WithHead):
    """Logits over the vocabulary for each token of an encoder; labels are the tokens behind the gaps, -100 elsewhere."""

    kinds = ("encoder",)
    output = MaskedLMOutput

    @classmethod
    def head_of(cls, config: RegardConfig, ours: ModelConfig) -> HeadConfig | None:
        """A masked or a language head."""
        return (
            ours.head
            if isinstance(ours.head, MaskedLMHeadConfig | LMHeadConfig)
            else MaskedLMHeadConfig()
        )


class RegardForTokenClassification(_WithHead):
    """Logits over `num_labels` for each token."""

    kinds = ("encoder", "decoder")
    output = TokenClassifierOutput

    @classmethod
    def head_of(cls, config: RegardConfig, ours: ModelConfig) -> HeadConfig | None:
        """Tags."""
        return TokenClassificationHeadConfig(classes=config.num_labels)


class RegardForSequenceClassification(_WithHead):
    """Logits over `num_labels` for a whole sequence; `problem_type` may be a regression, or several labels at once."""

    kinds = ("encoder", "decoder")
    output = SequenceClassifierOutput

    @classmethod
    def head_of(cls, config: RegardConfig, ours: ModelConfig) -> HeadConfig | None:
        """The pooling of the configuration; else the first token of an encoder, the last of a decoder."""
        if isinstance(ours.head, SequenceClassificationHeadConfig):
            return ours.head.model_copy(update={"classes": config.num_labels})
        return SequenceClassificationHeadConfig(
            classes=config.num_labels, pooling="cls" if ours.kind == "encoder" else "last"
        )

    def _loss(self, logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
        more = {} if count is None else {"num_items_in_batch": count}
        loss: Tensor = self.loss_function(
            labels=labels, pooled_logits=logits, config=self.config, **more
        )
        return loss


def wrap_model(model: Model, **more: Any) -> RegardPreTrained:
    """A model of ours in the class that fits its head, with the same weights (the same tensors, not copies).

    more   keys of their configuration, such as pad_token_id, eos_token_id and id2label
    """
    if model.config is None:
        raise ValueError(
            "this model was built by hand: only one that `build` made of a configuration can be wrapped"
        )
    kind = class_for(model)
    with torch.device("meta"):  # its own weights would only take memory
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
    if isinstance(head, LMHeadConfig) and isinstance(model, Decoder):
        return RegardForCausalLM
    known: dict[str, type[RegardPreTrained]] = {
        "masked": RegardForMaskedLM,
        "language": RegardForMaskedLM,
        "tag": RegardForTokenClassification,
        "classify": RegardForSequenceClassification,
    }
    if head is None:
        return RegardModel
    if head.kind not in known:
        raise Unsupported(
            f"transformers has no class for the head {head.kind!r}: see regard.hub.auto.HubModel"
        )
    return known[head.kind]
