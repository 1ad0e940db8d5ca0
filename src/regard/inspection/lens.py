"""The logit lens: what a model would answer if it ended after each layer (nostalgebraist 2020).

The residual stream behind a layer goes through the last norm and the head of the model. Behind the
last layer this must be the answer of the model, which is checked: where it is not, because the
model does more after its layers, there is no lens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.block import Layer
from regard.inspection.answers import Answer, read_answer
from regard.inspection.inspected import InspectedModel
from regard.models.model import SingleStackModel

FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "layernorm", "final_norm")
HEADS = ("lm_head", "cls", "classifier", "score", "embed_out")
MAX_PLACES = 12
TOP = 3
TOLERANCE = 1e-3  # relative, between the lens behind the last layer and the answer


class Lens:
    """The residual streams (1, n, d) behind each layer of one call, and how one becomes logits."""

    def __init__(self, streams: list[Tensor], answer: Answer, head: Callable[[Tensor], Tensor]):
        self.streams, self.answer, self.head = streams, answer, head

    def data(self) -> dict[str, Any]:
        """The most likely answers behind each layer, for the last places of the answer."""
        places = self.answer.places[-MAX_PLACES:]
        layers = []
        for stream in self.streams:
            logits = self.head(stream)
            rows = logits[0, places] if logits.dim() == 3 else logits[:1]
            best = rows.float().softmax(-1).topk(min(TOP, rows.shape[-1]))
            layers.append(
                [
                    [
                        [self.answer.name(token), round(p, 5)]
                        for token, p in zip(tokens, shares, strict=True)
                    ]
                    for tokens, shares in zip(
                        best.indices.tolist(), best.values.tolist(), strict=True
                    )
                ]
            )
        return {"positions": places, "layers": layers}


@torch.no_grad()
def logit_lens(model: InspectedModel) -> Lens | None:
    """The lens of a model on its input; None for models that it does not fit. The model is called,
    so changes of heads apply."""
    parts = lens_parts(model.subject.model)
    if parts is None or model.subject.is_seq2seq:
        return None
    layers, head = parts
    with recorded_streams(layers) as streams:
        answer = read_answer(model.subject, model.subject.call())
    if not streams or not answer.is_logits or answer.values.shape[-1] < 2:
        return None
    try:
        logits = head(streams[-1])
    except (RuntimeError, TypeError, ValueError):  # a head that reads something else
        return None
    found = logits[:, None] if logits.dim() == 2 else logits
    if found.shape != answer.values.shape:
        return None
    largest = answer.values.abs().max().clamp(min=1e-6)
    if float((found - answer.values).abs().max() / largest) > TOLERANCE:
        return None
    return Lens(streams, answer, head)


def lens_parts(model: Any) -> tuple[list[nn.Module], Callable[[Tensor], Tensor]] | None:
    """The layers of a model, and the function from their stream (1, n, d) to its logits."""
    if isinstance(model, SingleStackModel):
        layers, head, norm = model.backbone.stack, model.head, model.backbone.norm
        blocks = getattr(layers, "layers", None)
        if head is None or not isinstance(blocks, nn.ModuleList):
            return None
        return list(blocks), lambda x: head(x if norm is None else norm(x, None), None)
    base = getattr(model, "base_model", None)
    if base is None or base is model:
        return None
    head = next((getattr(model, n) for n in HEADS if hasattr(model, n)), None)
    lists = [part for part in base.modules() if isinstance(part, nn.ModuleList)]
    if head is None or not lists:
        return None
    norm = next((getattr(base, n) for n in FINAL_NORMS if hasattr(base, n)), None)
    reads_first = hasattr(model, "classifier") and head is model.classifier

    def finish(x: Tensor) -> Tensor:
        x = x if norm is None else norm(x)
        logits: Tensor = head(x[:, 0] if reads_first else x)
        return logits

    longest = max(lists, key=lambda each: len(each))
    return list(longest), finish


@contextmanager
def recorded_streams(layers: list[nn.Module]) -> Iterator[list[Tensor]]:
    """Inside, the outputs of layers are collected, in the order of their calls. Stacks of Regard
    call `run` of their layers, other models call the layers."""
    streams: list[Tensor] = []

    def keep(output: Any) -> None:
        streams.append(output[0] if isinstance(output, tuple) else output)

    def wrap(layer: Layer) -> None:
        run = layer.run

        def record_output(*args: Any) -> Any:
            output = run(*args)
            keep(output)
            return output

        layer.__dict__["run"] = record_output

    handles = []
    for layer in layers:
        if isinstance(layer, Layer):
            wrap(layer)
        else:
            handles.append(layer.register_forward_hook(lambda _, args, output: keep(output)))
    try:
        yield streams
    finally:
        for handle in handles:
            handle.remove()
        for layer in layers:
            layer.__dict__.pop("run", None)
