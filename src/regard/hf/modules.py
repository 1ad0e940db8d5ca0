"""The modules that replace attention layers in swapped models."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard.errors import Unsupported
from regard.mixer import Mixer, State
from regard.state import take


class Replacement(nn.Module):
    """Stands in place of a module and keeps it, outside parameters and state dict.

    Attributes:
        spec: Name and arguments of the mixer.
        old_weights_lost: The old module has its shape only, since the model was loaded from a file
            without its weights.
    """

    spec: dict[str, Any]
    old_weights_lost: bool = False

    def keep_old(self, old: nn.Module) -> None:
        """Store the old module in a tuple, which nn.Module does not register."""
        self.__dict__["_old"] = (old,)

    @property
    def old(self) -> nn.Module:
        """The module that was replaced."""
        return self.__dict__["_old"][0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.old._apply(fn, recurse)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


class SwappedAttention(Replacement):
    """A mixer in place of an attention layer of another library.

    Args:
        mixer: The mixer, without output projection.
        adapter_forward: `AttentionAdapter.forward`, called with this module as self.
        old: The replaced layer.
        out: Output projection, if the old layer contained it.

    Attributes:
        kept: Modules of the old layer that stay in use, such as the norm behind it.
        partial: Whether other layers of the model were not swapped.
    """

    def __init__(
        self,
        mixer: Mixer,
        adapter_forward: Callable[..., Any],
        old: nn.Module,
        out: nn.Linear | None = None,
    ) -> None:
        super().__init__()
        self.keep_old(old)
        self.mixer, self.adapter_forward = mixer, adapter_forward
        self.out = nn.Identity() if out is None else out
        self.kept = nn.ModuleDict()
        self.partial = False
        self.streams: WeakKeyDictionary[Any, tuple[State, int]] = WeakKeyDictionary()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the old layer."""
        return self.adapter_forward(self, *args, **kwargs)

    def run(
        self,
        x: Tensor,
        mask: Tensor | None,
        *,
        global_attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Mix tokens (b, n, d) with a padding mask (b, n).

        With a cache of transformers, x continues a stream.
        """
        masks = {"mask": mask, "global_attention_mask": global_attention_mask}
        maps = attention_collector()
        if maps is not None:
            if cache is not None and cache.get_seq_length(self.layer_index):
                raise Unsupported(
                    "Attention maps with a cache are not supported: use use_cache=False."
                )
            maps.append(self.mixer.attention_map(x, context, **masks))
        y = self.mixer(x, context, **masks) if cache is None else self._run_cached(x, mask, cache)
        return self.out(y)

    @property
    def layer_index(self) -> int:
        """The index of this layer in a cache."""
        return getattr(self.old, "layer_idx", None) or 0

    def _run_cached(self, x: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """Continue the stream of a cache of transformers.

        The cache stores, in place of keys and values, the number of the example of each token. So
        it counts tokens, and shows how beam search reordered the examples. The state of the mixer
        is stored separately.
        """
        layer, n = self.layer_index, x.shape[1]
        seen = int(cache.get_seq_length(layer))
        state: State = None
        if seen:
            if cache not in self.streams or self.streams[cache][1] != seen:
                raise Unsupported(
                    "The cache was filled by another model, cropped, or began with padding: "
                    "generate with use_cache=False, or one text at a time."
                )
            examples = cache.layers[layer].keys[:, 0, -1, 0].long() - 1
            state = take(self.streams[cache][0], examples)
        numbers = torch.arange(1, len(x) + 1, dtype=torch.float32, device=x.device)
        numbers = numbers[:, None, None, None].expand(-1, 1, n, 1)
        cache.update(numbers, numbers, layer)
        if cache.layers[layer].keys.shape[-2] != seen + n:
            raise Unsupported(
                "Caches of fixed size are not supported: use the dynamic cache or use_cache=False."
            )
        if not seen and (not self.mixer.can.stream or (mask is not None and not mask.all())):
            self.streams.pop(cache, None)
            return self.mixer(x, mask=mask)
        y, state = self.mixer.stream(x, state)
        self.streams[cache] = (state, seen + n)
        return y

    def extra_repr(self) -> str:
        """The class of the old layer."""
        return f"in place of {type(self.old).__name__}"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "streams": None}  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "streams": WeakKeyDictionary()})  # type: ignore[no-untyped-call]


class SwappedMixer(Replacement, Mixer):
    """A mixer in place of a mixer of a Regard model, with the output projection of the old one."""

    def __init__(self, mixer: Mixer, old: nn.Module, out: nn.Linear) -> None:
        Mixer.__init__(
            self,
            mixer.dim,
            can=mixer.can.without(rotary="its queries and keys, if any, are inside another mixer"),
            causal=mixer.causal,
            length=mixer.length,
            name=mixer.name,
        )
        self.keep_old(old)
        self.mixer, self.out = mixer, out

    def initial_state(self) -> State:
        """The initial state of the inner mixer."""
        return self.mixer.initial_state()

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State, **more: Any
    ) -> tuple[Tensor, State]:
        """Mix, then project."""
        y, state = self.mixer.mix(x, context, mask, state, **more)
        return self.out(y), state

    def weights(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, **more: Any
    ) -> Tensor:
        """The attention map of the inner mixer."""
        return self.mixer.weights(x, context, mask, **more)


# ----------------------------------------------------------------------------------- attention maps
# transformers collects attention maps by hooks on modules of declared classes
# (`_can_record_outputs`). Replacements are of another class, and it has no public way to add one,
# so they append to the active collector themselves. `test_attention_maps_of_a_swapped_model` fails
# if transformers changes this.
def attention_collector() -> list[Tensor] | None:
    """The list in which transformers collects attention maps in this call, or None."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collected = None if capturing is None else capturing._active_collector.get()
    return None if collected is None else collected.get("attentions")


def install_capturing_hooks(model: nn.Module) -> None:
    """Let transformers install its hooks, which it does once, before layers are replaced."""
    capturing, modeling = (
        sys.modules.get(f"transformers.{name}")
        for name in ("utils.output_capturing", "modeling_utils")
    )
    if capturing is None or modeling is None:
        return
    for part in model.modules():
        if isinstance(part, modeling.PreTrainedModel) and not any(
            getattr(module, "_output_capturing_hooks_installed", False) for module in part.modules()
        ):
            capturing.maybe_install_capturing_hooks(part)  # also installs those of models inside it
