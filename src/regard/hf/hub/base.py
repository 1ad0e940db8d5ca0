# mypy: disable-error-code="no-untyped-call, arg-type, attr-defined"
"""What our models in transformers share: how they are built, saved and loaded, and how their inputs are read.

Each is a thin coat around a model that `regard.models.build` made, which stands in `net`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.auxiliary import AuxOutputs
from regard.backends import check_mask
from regard.errors import Unsupported
from regard.hf.checkpoints import refuse_pickle_files
from regard.hf.hub.config import RegardConfig
from regard.models import Seq2Seq, build
from regard.models.config import HeadConfig, ModelConfig, TokenInput
from regard.models.embeddings import InputEmbedding, TokenEmbedding
from regard.models.heads import LMHead, MaskedLMHead
from regard.models.losses import IGNORE_INDEX
from regard.models.serialization import unique_tensors


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
            raise ValueError(
                f"{type(self).__name__} is for models of kind {wanted}, and this one is of kind {ours.kind!r}"
            )
        if not isinstance(ours.input, TokenInput):
            raise ValueError(
                f"{type(self).__name__} reads tokens, and this model {ours.input.kind}: see regard.hub.auto.HubModel"
            )
        config.regard = ours.replace(head=self.head_of(config, ours))
        self.net: Any = build(config.regard)
        self._tied_weights_keys = second_names(self)
        self.post_init()

    @classmethod
    def head_of(cls, config: RegardConfig, ours: ModelConfig) -> HeadConfig | None:
        """What stands on top: that of the configuration where it is of the right kind, else a fresh one."""
        raise NotImplementedError

    # -------------------------------------------------------------------------------- how it is made
    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *given: Any, **named: Any) -> Any:
        """Theirs, from safetensors only: a pickle is refused, with the way to convert it."""
        if (
            pretrained_model_name_or_path is not None
            and Path(pretrained_model_name_or_path).is_dir()
        ):
            refuse_pickle_files(Path(pretrained_model_name_or_path))
        return super().from_pretrained(
            pretrained_model_name_or_path, *given, **{"use_safetensors": True, **named}
        )

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
    def _embed(self) -> TokenEmbedding:
        embed: InputEmbedding = (
            self.net.decoder.embed if isinstance(self.net, Seq2Seq) else self.net.backbone.embed
        )
        assert isinstance(embed, TokenEmbedding)
        return embed

    def get_input_embeddings(self) -> nn.Module:
        """The table of tokens; of an encoder–decoder, that of the decoder, which both share unless a target was given."""
        return self._embed().tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Another table."""
        self._embed().tokens = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module | None:
        """The linear layer that gives logits over the vocabulary; None: there is none."""
        head = self._words()
        return None if head is None else head.words

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Another layer."""
        head = self._words()
        if head is None:
            raise ValueError("this model gives no logits over a vocabulary")
        head.words = value  # type: ignore[assignment]

    def _words(self) -> LMHead | None:
        head = self.net.head.words if isinstance(self.net.head, MaskedLMHead) else self.net.head
        return head if isinstance(head, LMHead) else None

    # -------------------------------------------------------------------------------- what goes in
    def _types(self, types: Tensor | None) -> Tensor | None:
        """Token types as ours; tokenizers give zeros where there are none."""
        knows = self._embed().types is not None
        if types is not None and not knows and types.any():
            raise ValueError(
                "token_type_ids tell tokens apart, and this model knows no types: give none"
            )
        return types if knows else None

    def _whole(
        self,
        ids: Tensor,
        mask: Tensor | None,
        types: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """All tokens at once: (b n) -> (b n d)."""
        y: Tensor = self.net.backbone(
            ids,
            mask,
            types=self._types(types),
            global_attention_mask=real_mask(global_attention_mask, ids, some=True),
        )[0]
        return y


# ---------------------------------------------------------------------------------------------- small parts
def real_mask(mask: Tensor | None, ids: Tensor, *, some: bool = False) -> Tensor | None:
    """Their mask of ones and zeros as ours (b n); None where it leaves nothing out, or with `some` where it names nothing."""
    if mask is None:
        return None
    if mask.dim() != 2:
        raise ValueError(
            f"attention_mask must be (b n), not {tuple(mask.shape)}: mechanisms have no masks of pairs"
        )
    found = mask.bool()
    check_mask(found, (ids.shape[0], ids.shape[1]), "attention_mask")
    return None if (not found.any() if some else found.all()) else found


def choices(logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
    """Cross-entropy in the mean over the labels that count, or their sum over `count`, as the Trainer asks with several
    batches to a step; zero where none counts."""
    total = F.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    mean: Tensor = total / ((labels != IGNORE_INDEX).sum().clamp(min=1) if count is None else count)
    return mean


def told(notes: AuxOutputs, labels: Tensor, count: Tensor | int | None) -> Tensor:
    """The costs that parts of the model told, such as the balance of experts; with several batches to a step, their share."""
    share = 1 if count is None else (labels != IGNORE_INDEX).sum() / count
    return notes.loss().to(labels.device) * share


def returned(found: Any, return_dict: bool | None) -> Any:
    """As an object, or as the tuple of what is there."""
    return found.to_tuple() if return_dict is False else found


def second_names(module: nn.Module) -> dict[str, str]:
    """Names of tensors that stand under another name already -> that name."""
    first = {id(tensor): name for name, tensor in unique_tensors(module).items()}
    every = module.state_dict(keep_vars=True)
    return {name: first[id(tensor)] for name, tensor in every.items() if first[id(tensor)] != name}
