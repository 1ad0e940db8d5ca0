"""Next event: what a user or any other entity calls next, and when."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.errors import check_int
from regard.models.config import FeatureInput, TokenClassificationHeadConfig
from regard.models.losses import IGNORE_INDEX, cross_entropy_loss
from regard.tasks.base import (
    LABELS,
    SPLITS,
    Batch,
    Example,
    ModelNeeds,
    Task,
    check_index,
    to_int64,
)
from regard.tasks.baselines import Baseline, NGramModel
from regard.tasks.event_splits import EventSplits, read_event_splits
from regard.tasks.metrics import MeanMetric
from regard.tasks.processors import Prediction
from regard.tasks.rendering import Rendered, RenderedText

if TYPE_CHECKING:
    from regard.models import Model
    from regard.watch.event import Event

GAPS, NEXT = "gaps", "next"  # names of targets: NEXT are the labels without those of first events
ORDERS = (0, 1, 2, 3)  # of the baselines
FLOOR = "back-off Markov"


class EventHistory:
    """Consecutive events of an entity in a split: the tokens (n) that are read, and the classes (n)
    of the endpoints and gaps that are predicted from each token and those before it.

    Args:
        context: Classes of the last endpoints before; empty if the history starts here.
    """

    def __init__(self, context: Sequence[int]) -> None:
        self.context = list(context)
        self.tokens: list[list[int]] = []
        self.endpoints: list[int] = []
        self.gaps: list[int] = []


class NextEvent(Task):
    """Predict the endpoint of the next event of an entity, and the time until it, from the events
    before, which is the network of events in `regard watch`.

    An event is a token: the sum of features of its endpoint, the gap before it, the hour and the
    values of a few paths; see `regard.watch.network.event_features`. The metric is nats per
    event, of the endpoint alone. The first event of an entity is learned, but not measured.

    Args:
        data: JSON lines or any format of `regard watch`, split in order of time; or the events of
            each split.
        entity: Path of who acted. Events without an entity are left out.
        endpoint: Paths of what was called.
        time: Path of the time.
        format: Format of the file, or "auto".
        length: Maximum number of events of an example; longer histories are cut.
    """

    causal = True

    def __init__(
        self,
        data: str | Path | EventSplits,
        *,
        entity: str = "",
        endpoint: str = "",
        time: str = "",
        format: str = "auto",
        length: int = 128,
    ) -> None:
        from regard.watch.network.event_features import EventFeatures

        check_int(1, length=length)
        events = read_event_splits(data, entity=entity, endpoint=endpoint, time=time, format=format)
        self._length = length
        self.features = EventFeatures.learn(events["train"])
        histories, self.skipped = self._histories(events)
        self.histories = {split: histories[split] for split in events}
        if any(not each for each in self.histories.values()):
            raise ValueError("Some split has no event with an entity: set entity.")
        self.metrics = (
            EventNats("nats_per_event", NEXT, 0, self.features.num_classes),
            EventNats("nats_per_gap", GAPS, self.features.num_classes, None),
            EndpointAccuracy(self.features.num_classes),
        )

    def _histories(
        self, events: dict[str, Sequence[Event]]
    ) -> tuple[dict[str, list[EventHistory]], int]:
        """Examples of each split. What an entity did in an earlier split is the first token."""
        from regard.watch.network.event_features import START_TOKEN
        from regard.watch.sequences.level import gap_class

        last: dict[tuple[str, str], tuple[list[int], float, list[int]]] = {}
        found: dict[str, list[EventHistory]] = {}
        skipped = 0
        for split in SPLITS:
            current: dict[tuple[str, str], EventHistory] = {}
            found[split] = []
            for event in events[split]:
                if not event.entity:
                    skipped += 1
                    continue
                key = (event.tenant, event.entity)
                token, time, context = last.get(key, (START_TOKEN, math.nan, []))
                history = current.get(key)
                if history is None or len(history.tokens) == self._length:
                    history = current[key] = EventHistory(context)
                    found[split].append(history)
                number, gap = self.features.endpoint_class(event), event.time - time
                history.tokens.append(token)
                history.endpoints.append(number)
                history.gaps.append(gap_class(gap))
                context = [*context, number][-max(ORDERS) :]
                last[key] = self.features.token(event, gap), event.time, context
        return found, skipped

    @property
    def needs(self) -> ModelNeeds:
        """See `Task`: a decoder of features with outputs for the classes of endpoints and gaps."""
        from regard.watch.network.event_features import BUCKETS, WIDTH
        from regard.watch.sequences.level import GAP_CLASSES

        return ModelNeeds(
            kind="decoder",
            input=FeatureInput(num_features=BUCKETS, features_per_token=WIDTH),
            head=TokenClassificationHeadConfig(num_classes=self.features.num_classes + GAP_CLASSES),
            length=self._length,
        )

    def size(self, split: str) -> int:
        """See `Task`: number of histories."""
        return len(self.histories[split])

    def example(self, split: str, index: int) -> Example:
        """See `Task`: the events of an entity, each of which predicts the next."""
        check_index(split, index, self.size(split))
        history = self.histories[split][index]
        labels, gaps = to_int64(history.endpoints), to_int64(history.gaps)
        after = labels.clone()
        if not history.context:
            after[0] = IGNORE_INDEX
        x = torch.tensor(history.tokens, dtype=torch.int64).T.contiguous()
        return Example({"x": x}, {LABELS: labels, GAPS: gaps, NEXT: after})

    def collate(self, examples: Sequence[Example]) -> Batch:
        """See `Task`: without a mask, as no output of a causal model depends on what is behind."""
        batch = super().collate(examples)
        return Batch({**batch.inputs, "mask": None}, batch.targets)

    def lengths_of(self, split: str) -> Any:
        """See `Task`."""
        return to_int64([len(each.tokens) for each in self.histories[split]]).numpy()

    def loss(self, output: Any, batch: Batch, *, label_smoothing: float = 0.0) -> Tensor:
        """See `Task`: cross-entropy of the endpoint plus that of the gap."""
        classes = self.features.num_classes
        endpoint = cross_entropy_loss(
            output[..., :classes], batch.targets[LABELS], label_smoothing=label_smoothing
        )
        gap = cross_entropy_loss(
            output[..., classes:], batch.targets[GAPS], label_smoothing=label_smoothing
        )
        return endpoint + gap

    def predict(self, model: Model, batch: Batch) -> list[Prediction]:
        """See `Task`: the most probable next endpoint after the last event, with probability."""
        output, labels = model(**batch.inputs).detach(), batch.targets[LABELS]
        predictions: list[Prediction] = []
        for row, targets in zip(output, labels, strict=True):
            last = int((targets != IGNORE_INDEX).sum()) - 1
            p = row[last, : self.features.num_classes].softmax(-1)
            best = int(p.argmax())
            predictions.append({"endpoint": self._name(best), "p": round(float(p[best]), 4)})
        return predictions

    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """The endpoints in order, and what a model predicts for the last of them."""
        names = [self._name(each) for each in example.targets[LABELS].tolist()]
        text = " → ".join(names)
        if prediction is not None:
            text += f"\npredicted for the last: {prediction['endpoint']} ({prediction['p']:.3f})"
        return RenderedText(text)

    def _name(self, number: int) -> str:
        """The endpoint of a class."""
        return self.features.endpoints[number - 1][1] if number else "(another endpoint)"

    def notes(self) -> list[str]:
        """See `Task`: events that are left out, and test histories that are copies."""
        notes = []
        if self.skipped:
            notes.append(f"{self.skipped:,} events without an entity are left out.")
        known = {tuple(each.endpoints) for each in self.histories["train"] if not each.context}
        starts = [each for each in self.histories["test"] if not each.context]
        copies = sum(tuple(each.endpoints) in known for each in starts)
        if starts:
            notes.append(
                f"{copies:,} of {len(starts):,} test histories have the same endpoints as a "
                "training history."
            )
        return notes

    # ------------------------------------------------------------------------------- baselines
    def baselines(self) -> dict[str, Baseline]:
        """See `Task`: Markov models of several orders, and the floor of `regard watch`."""
        found: dict[str, Baseline] = {
            f"order-{order} Markov": partial(self._ngram_score, order=order) for order in ORDERS
        }
        return found | {FLOOR: self._floor_score}

    def _ngram_score(self, test: Sequence[int], *, order: int) -> Tensor:
        """n-grams with Witten-Bell smoothing; the class after the last stands for the start."""
        start = self.features.num_classes
        model = NGramModel([], start + 1, order=order)
        for history in self.histories["train"]:
            context = history.context or [start]
            for symbol in history.endpoints:
                model.add(context[max(0, len(context) - order) :], symbol)
                context = [*context, symbol]

        def nats(context: Sequence[int], symbol: int) -> float:
            known = context[max(0, len(context) - order) :]
            return -math.log(model.probability(known, symbol))

        return self._statistics(test, nats, start)

    def _floor_score(self, test: Sequence[int]) -> Tensor:
        """The Markov model of `regard watch`, which chooses order and smoothing by itself."""
        from regard.watch.sequences.markov import BackoffMarkov

        size, order = self.features.num_classes + 1, max(ORDERS)
        contexts, symbols = [], []
        for history in self.histories["train"]:
            context = history.context or [size - 1]
            for symbol in history.endpoints:
                contexts.append(_as_number(context, size))
                symbols.append(symbol)
                context = [*context, symbol][-order:]
        model = BackoffMarkov(order, size)
        model.fit(to_int64(contexts).numpy(), to_int64(symbols).numpy())

        def nats(context: Sequence[int], symbol: int) -> float:
            return -math.log(model.probability(_as_number(context[-order:], size), symbol))

        return self._statistics(test, nats, size - 1)

    def _statistics(
        self, test: Sequence[int], nats: Callable[[Sequence[int], int], float], start: int
    ) -> Tensor:
        """Statistics of `EventNats` from the nats of a symbol after a context."""
        statistics = []
        for index in test:
            history = self.histories["test"][index]
            context, total = history.context or [start], 0.0
            for place, symbol in enumerate(history.endpoints):
                total += nats(context, symbol) if history.context or place else 0.0
                context = [*context, symbol][-max(ORDERS) :]
            count = len(history.endpoints) - (not history.context)
            statistics.append((total, float(count)))
        return torch.tensor(statistics, dtype=torch.float64)


def _as_number(context: Sequence[int], size: int) -> int:
    """The last endpoints as digits, the newest last."""
    number = 0
    for symbol in context:
        number = number * size + symbol
    return number


class EventNats(MeanMetric):
    """Cross-entropy in nats per event of one of the targets.

    Args:
        name: Its name.
        target: Name of the target.
        first, last: The outputs that are its classes.
    """

    higher_is_better = False

    def __init__(self, name: str, target: str, first: int, last: int | None) -> None:
        self.name, self.target, self.classes = name, target, slice(first, last)

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        labels = batch.targets[self.target].to(output.device)
        counted = labels != IGNORE_INDEX
        log_p = output[..., self.classes].float().log_softmax(-1)
        nats = -log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0].double()
        return torch.stack((nats.masked_fill(~counted, 0).sum(1), counted.sum(1)), -1).cpu()


class EndpointAccuracy(MeanMetric):
    """Share of the events whose most probable endpoint is right."""

    name, margin = "accuracy", 0.01

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        labels = batch.targets[NEXT].to(output.device)
        right = output[..., : self.num_classes].argmax(-1) == labels
        counts = (right.sum(1), (labels != IGNORE_INDEX).sum(1))
        return torch.stack(counts, -1).double().cpu()
