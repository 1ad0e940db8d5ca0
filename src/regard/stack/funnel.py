"""Funnel: groups of layers at shrinking length, and back to the full one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from regard.block import Block, Layer, LayerInputs
from regard.errors import Unsupported, check_int
from regard.mixer import Can
from regard.mixers.funnel import POOLS_FUTURE_TOKENS, pool_tokens, upsample_tokens
from regard.stack.memory_attention import layer_name
from regard.stack.sequential import combine_capabilities

NO_MARKS = "tokens are pooled, and marks are of single tokens"
OR_NOT = "put it elsewhere, or give ask_all=False"


class FunnelStack(Layer):
    """Dai et al. 2020, arXiv 2006.03236.  Between two groups the sequence is pooled to means of `stride` tokens in a row,
    and the first layer of the shorter group asks the longer sequence:

        x -> group 1 = h -> pool -> group 2 -> pool -> ... -> group G = s,      y = decoder(h + up(s))

    where `up` repeats each of s for every token that it stands for.  `encode` stops at s, for what needs one vector of all.

    groups   of layers; the first layer of each but the first group must be a block whose mixer can ask another sequence
    decoder  layers at the full length after the sum; there may be none
    cls      the first token is kept by itself, and runs begin after it
    ask_all  False: the first layer of a group asks the pooled tokens alone, so that it may be any layer
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Layer]],
        decoder: Sequence[Layer] = (),
        *,
        stride: int = 2,
        cls: bool = False,
        ask_all: bool = True,
    ) -> None:
        check_int(1, stride=stride)
        if len(groups) < 2 or not all(groups):
            raise ValueError(
                f"a funnel needs two groups of layers or more, none empty, not {[len(g) for g in groups]}"
            )
        can, _, length = combine_capabilities(
            [*(layer for group in groups for layer in group), *decoder]
        )
        unsupported = can.unsupported | {
            "causal": POOLS_FUTURE_TOKENS,
            "stream": POOLS_FUTURE_TOKENS,
            "global_attention_mask": NO_MARKS,
        }
        super().__init__(
            groups[0][0].dim,
            can=Can(supports_global_mask=True, **unsupported),
            causal=False,
            length=length,
        )
        if ask_all:
            for group in groups[1:]:
                _asking(group[0])
        self.stride, self.cls, self.ask_all = stride, cls, ask_all
        self.groups: Sequence[Sequence[Layer]] = nn.ModuleList(map(nn.ModuleList, groups))  # type: ignore[assignment]
        self.decoder: Sequence[Layer] = nn.ModuleList(decoder)  # type: ignore[assignment]

    def run(self, x: Tensor, given: LayerInputs, state: None) -> tuple[Tensor, None]:
        """See `Layer`."""
        if not x.shape[1]:
            return x, None
        first = _through(self.groups[0], x, given)
        short, _ = self._narrow(first, given)
        x = first + upsample_tokens(
            short, x.shape[1], self.stride ** (len(self.groups) - 1), cls=self.cls
        )
        return _through(self.decoder, x, given), None

    def encode(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The tokens after the last group, (b p d), and which of them hold a real token, (b p); None: all."""
        given = LayerInputs(mask, context, context_mask)
        return self._narrow(_through(self.groups[0], self.checked(x, given), given), given)

    def _narrow(self, x: Tensor, given: LayerInputs) -> tuple[Tensor, Tensor | None]:
        """All groups after the first."""
        for group in self.groups[1:]:
            short, mask = pool_tokens(x, given.mask, self.stride, cls=self.cls)
            below, given = given, given._replace(mask=mask)
            first = (
                _ask(_asking(group[0]), short, x, given, below)
                if self.ask_all
                else group[0].run(short, given, None)[0]
            )
            x = _through(group[1:], first, given)
        return x, given.mask

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"stride={self.stride}, cls={self.cls}, ask_all={self.ask_all}"


def _through(layers: Sequence[Layer], x: Tensor, given: LayerInputs) -> Tensor:
    for layer in layers:
        x, _ = layer.run(x, given, None)
    return x


def _asking(layer: Layer) -> Block:
    """A block whose mixer can ask another sequence; any other raises."""
    if not isinstance(layer, Block):
        raise Unsupported(
            f"{layer_name(layer)} is no block, and the first layer of a group asks the longer sequence: {OR_NOT}"
        )
    mixer = layer.mixer
    if mixer.causal or not mixer.can.cross:
        why = "it was built causal" if mixer.causal else mixer.can.reason("cross")
        raise Unsupported(f"{mixer.name} cannot ask the longer sequence: {why}; {OR_NOT}")
    return layer


def _ask(block: Block, short: Tensor, x: Tensor, given: LayerInputs, below: LayerInputs) -> Tensor:
    """A block whose pooled tokens, short (b p d), ask all of x (b n d); `given` is of the first, `below` of the second."""
    before = block.mixer_residual.before
    y = block.mixer(before(short, given.mask), before(x, below.mask), mask=below.mask)
    return block.join(short, y, given)
