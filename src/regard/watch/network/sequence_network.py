"""A network over the events of an entity, mixed with the level that has none."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from regard.errors import Unsupported
from regard.models import Model
from regard.models.model import Decoder
from regard.state import State, join, split
from regard.tasks.event_splits import split_by_time
from regard.tasks.next_event import NextEvent
from regard.watch.event import Event
from regard.watch.level import Finding, Surprise
from regard.watch.network.cascade import Cascade
from regard.watch.network.event_features import (
    OTHER,
    START_TOKEN,
    WIDTH,
    EventFeatures,
    Token,
)
from regard.watch.network.mixture import Gain, fit_weights, measure_gain, saved_bits
from regard.watch.network.network_level import NetworkLevel
from regard.watch.network.settings import NetworkSettings
from regard.watch.network.stream_states import StreamStateCodec
from regard.watch.network.training import OnStep, build_network, train_network
from regard.watch.network.weights import (
    load_model,
    load_settings,
    model_json,
    with_prefix,
)
from regard.watch.sequences.level import PARTS, SequenceLevel, gap_class

Key = tuple[str, str]
Floats = npt.NDArray[np.float64]

TRANSITION, GAP = PARTS.index("transition"), PARTS.index("gap")
STREAM_LENGTH = 2  # windows that a network with a state is trained on
ROWS = 512  # sequences that the network reads at a time
WARM_UP = 20_000  # events that precede the held-out ones
EXPECTED, CANDIDATES = 3, 4  # endpoints in an explanation; that many times as many are looked at
START_CLASS, UNKNOWN = -1, -2  # in place of the class of the endpoint before
MIXED = [TRANSITION, GAP]  # parts of an event that the network predicts


class PredictedEvents(NamedTuple):
    """What a network says before each event.

    Attributes:
        output: (events, classes of endpoints and gaps), 0 for events that are not wanted.
        before: Class of the endpoint before, (events), `START_CLASS` at the start.
        gaps: Class of the gap before each event, (events).
    """

    output: Tensor
    before: npt.NDArray[np.int64]
    gaps: npt.NDArray[np.int64]


class EventScorer:
    """Predicts the endpoint and the gap of the next event of entities.

    A mixer whose stream state has a fixed size reads each event once, and entities at different
    positions share a batch (`regard.state.join`). Any other causal mixer reads the last `window`
    events anew each time.

    Args:
        model: A trained model of the task `NextEvent`.
        features: Features of events.
        window: Tokens that are kept of an entity without a stream state.
    """

    def __init__(self, model: Model, features: EventFeatures, window: int) -> None:
        assert isinstance(model, Decoder)
        self.model, self.features, self.window = model.eval(), features, window
        self.codec = StreamStateCodec(model, WIDTH)

    @property
    def streams(self) -> bool:
        """Whether a state of fixed size stands for the past of an entity."""
        return self.codec.reason is None

    def new_state(self) -> dict[str, Any]:
        """The state of an entity at its start."""
        past: dict[str, Any] = {"stream": None} if self.streams else {"ring": []}
        return {"time": None, "endpoint": START_CLASS, "token": START_TOKEN, **past}

    @torch.no_grad()
    def read(
        self, events: Sequence[Event], states: dict[Key, Any], wanted: npt.NDArray[np.bool_]
    ) -> PredictedEvents:
        """Read events in order of time; states are replaced.

        Args:
            events: A micro-batch; events without an entity are not read.
            states: State of each entity, or None.
            wanted: The events whose outputs are needed, (events). A stream reads all.
        """
        tokens: dict[Key, list[Token]] = {}
        places: dict[Key, list[int]] = defaultdict(list)
        current: dict[Key, dict[str, Any]] = {}
        before = np.full(len(events), START_CLASS)
        gaps = np.zeros(len(events), dtype=np.int64)
        for i, event in enumerate(events):
            if not event.entity:
                continue
            key = (event.tenant, event.entity)
            if key not in current:
                current[key] = dict(states.get(key) or self.new_state())
                tokens[key] = [current[key]["token"]]
            state = current[key]
            gap = math.nan if state["time"] is None else event.time - state["time"]
            before[i], gaps[i] = state["endpoint"], gap_class(gap)
            places[key].append(i)
            tokens[key].append(self.features.token(event, gap))
            state["time"], state["endpoint"] = event.time, self.features.endpoint_class(event)
        if self.streams:
            output = self._stream(tokens, places, current, len(events))
        else:
            output = self._read_windows(tokens, places, current, wanted)
        for key, state in current.items():
            state["token"] = tokens[key][-1]
            states[key] = state
        return PredictedEvents(output, before, gaps)

    def log_probabilities(
        self, events: Sequence[Event], predicted: PredictedEvents, wanted: npt.NDArray[np.bool_]
    ) -> Floats:
        """log2 p of the endpoints and gaps of the wanted events, (wanted, 2)."""
        rows, classes = np.flatnonzero(wanted), self.features.num_classes
        if not len(rows):
            return np.zeros((0, 2))
        output = predicted.output[torch.from_numpy(rows)].double()
        endpoints = torch.tensor([self.features.endpoint_class(events[i]) for i in rows.tolist()])
        gaps = torch.from_numpy(predicted.gaps[rows])
        of_endpoint = output[:, :classes].log_softmax(1).gather(1, endpoints[:, None])
        of_gap = output[:, classes:].log_softmax(1).gather(1, gaps[:, None])
        log_p: Floats = torch.cat((of_endpoint, of_gap), 1).numpy() / math.log(2)
        return log_p

    def _stream(
        self,
        tokens: dict[Key, list[Token]],
        places: dict[Key, list[int]],
        current: dict[Key, dict[str, Any]],
        count: int,
    ) -> Tensor:
        """Stream the tokens of all entities: in chunks of powers of two, so that entities with
        different numbers of events share batches."""
        live: dict[Key, State] = {}
        for key, state in current.items():
            live[key] = None if state["stream"] is None else self.codec.decode(state["stream"])
        done = dict.fromkeys(places, 0)
        output = torch.zeros(0)
        length = 1 << max((len(each) for each in places.values()), default=1).bit_length() - 1
        while length:
            ready = [key for key, each in places.items() if len(each) - done[key] >= length]
            for start in range(0, len(ready), ROWS):
                keys = ready[start : start + ROWS]
                chunk = torch.tensor([tokens[key][done[key] : done[key] + length] for key in keys])
                known = [live[key] for key in keys]
                start_state = known[0] if len(keys) == 1 else join(known)
                y, end_state = self.model.stream(chunk.transpose(1, 2), start_state)
                if not len(output):
                    output = y.new_zeros(count, y.shape[-1])
                rows = [i for key in keys for i in places[key][done[key] : done[key] + length]]
                output[rows] = y.flatten(0, 1)
                live.update(zip(keys, split(end_state, [1] * len(keys)), strict=True))
                for key in keys:
                    done[key] += length
            length //= 2
        for key, state in current.items():
            state["stream"] = self.codec.encode(live[key])
        return output

    def _read_windows(
        self,
        tokens: dict[Key, list[Token]],
        places: dict[Key, list[int]],
        current: dict[Key, dict[str, Any]],
        wanted: npt.NDArray[np.bool_],
    ) -> Tensor:
        """Read the last `window` tokens before each event."""
        windows: list[list[Token]] = []
        rows: list[int] = []
        for key, members in places.items():
            past = current[key]["ring"] + tokens[key]
            first = len(current[key]["ring"]) + 1
            for number, i in enumerate(members):
                if wanted[i]:
                    rows.append(i)
                    windows.append(past[max(0, first + number - self.window) : first + number])
            current[key]["ring"] = past[max(0, len(past) - self.window) : -1]
        output = torch.zeros(0)
        order = sorted(range(len(rows)), key=lambda i: len(windows[i]))
        for start in range(0, len(order), ROWS):
            chosen = order[start : start + ROWS]
            longest = len(windows[chosen[-1]])
            empty: Token = [0] * WIDTH
            padded = [windows[i] + [empty] * (longest - len(windows[i])) for i in chosen]
            y, _ = self.model.backbone(torch.tensor(padded).transpose(1, 2))
            last = torch.tensor([len(windows[i]) - 1 for i in chosen])
            assert self.model.head is not None
            y = self.model.head(y[torch.arange(len(chosen)), last][:, None])[:, 0]
            if not len(output):
                output = y.new_zeros(len(wanted), y.shape[-1])
            output[[rows[i] for i in chosen]] = y
        return output


class ReadEvents(NamedTuple):
    """Events as floor and network see them.

    Attributes:
        surprise: That of the floor.
        ratios: p_network / p_floor of transition and gap, (events, 2).
        before: Class of the endpoint before, (events), `START_CLASS` at the start; `UNKNOWN` if the
            network did not read the event.
    """

    surprise: Surprise
    ratios: Floats
    before: npt.NDArray[np.int64]


class SequenceNetwork(NetworkLevel[SequenceLevel]):
    """The level of sequences with a network: -log2 of a mixture of network and floor.

        p(x | past) = w p_network(x | past) + (1 - w) p_floor(x | past)

    for the endpoint x, and in the same way for the class of the gap before it. The weight depends
    on the endpoint before. For an endpoint that the network does not know, the floor speaks alone,
    so the mixture sums to 1 up to w times the difference between the two estimates of the
    probability of a new endpoint. The part "session" is that of the floor.

    Without a stream state the network reads the events that the floor finds least likely; see
    `Cascade`. A stream has to read all events.

    Args:
        floor: The level without a network.
        settings: How to build and train the network.

    Attributes:
        window_reason: Why the network has no stream state and reads windows; None if it streams.
    """

    def __init__(self, floor: SequenceLevel, settings: NetworkSettings) -> None:
        super().__init__(floor, settings)
        self.window_reason: str | None = None
        self.scorer: EventScorer | None = None

    @property
    def model(self) -> Model:
        """See `NetworkLevel`."""
        assert self.scorer is not None
        return self.scorer.model

    def fit_network(
        self,
        events: Sequence[Event],
        *,
        folder: Path | None = None,
        on_step: OnStep = lambda progress: None,
    ) -> Gain:
        """See `NetworkLevel`. Weights and gain are those beside a floor that knows the training
        events only."""
        splits = split_by_time(events, "the traffic")
        s = self.settings
        task = NextEvent(splits, length=STREAM_LENGTH * s.window)
        try:
            model = build_network(task, s, position="none", length=None)
            self.window_reason = StreamStateCodec(model, WIDTH).reason
        except (Unsupported, ValueError) as error:  # such as a mixer that needs a length
            self.window_reason = str(error)
        if self.window_reason is not None:
            task = NextEvent(splits, length=s.window)
            model = build_network(task, s, position="learned", length=s.window)
        train_network(model, task, s, folder=folder, on_step=on_step)
        self.scorer = EventScorer(model, task.features, s.window)

        floor, states = type(self.floor)(self.floor.settings), dict[Key, Any]()
        floor.fit(splits["train"])
        self._read(floor, splits["train"][-WARM_UP:], states)
        valid = self._read(floor, splits["valid"], states)
        self.cascade = Cascade.fit(valid.surprise, s.cascade, s.audit)
        groups, count = valid.before + 1, 1 + task.features.num_classes
        known = valid.before > UNKNOWN
        self.weights = np.stack(
            [fit_weights(groups[known], valid.ratios[known, i], count) for i in range(2)]
        )
        test = self._read(floor, splits["test"], states)
        saved, bits = self._saved(test), test.surprise.bits.reshape(-1, len(PARTS))
        owner = np.repeat(np.arange(len(saved)), 2)
        self.gain = measure_gain(owner, bits[:, MIXED].ravel(), saved.ravel(), len(saved))
        return self.gain

    def score(self, events: Sequence[Event], states: dict[Key, Any]) -> Surprise:
        """See `Level`."""
        if self.scorer is None:
            raise ValueError("The network of the level 'sequence' has not been trained: call fit.")
        read = self._read(self.floor, events, states, self.cascade)
        bits = read.surprise.bits.copy().reshape(-1, len(PARTS))
        bits[:, MIXED] -= self._saved(read)
        return read.surprise._replace(bits=bits.ravel())

    def _read(
        self,
        floor: SequenceLevel,
        events: Sequence[Event],
        states: dict[Key, Any],
        cascade: Cascade | None = None,
    ) -> ReadEvents:
        """Score events by the floor and read them by the network; without a cascade, all."""
        assert self.scorer is not None
        keys = {(event.tenant, event.entity) for event in events if event.entity}
        before = {key: states.get(key) or {"floor": None, "network": None} for key in keys}
        of_floor = {key: state["floor"] for key, state in before.items()}
        of_network = {key: state["network"] for key, state in before.items()}
        surprise = floor.score(events, of_floor)
        wanted = np.full(len(events), cascade is None or self.scorer.streams)
        if cascade is not None:
            wanted[cascade.select(surprise, events)] = True
        wanted &= np.array([bool(event.entity) for event in events], dtype=bool)
        predicted = self.scorer.read(events, of_network, wanted)
        for key in keys:
            states[key] = {"floor": of_floor[key], "network": of_network[key]}
        ratios = np.ones((len(events), 2))
        log_p = self.scorer.log_probabilities(events, predicted, wanted)
        bits = surprise.bits.reshape(-1, len(PARTS))[:, MIXED]
        ratios[wanted] = 2.0 ** (log_p + bits[wanted])
        known = np.array([self.scorer.features.endpoint_class(event) != OTHER for event in events])
        ratios[~known.astype(bool), 0] = 1.0
        return ReadEvents(surprise, ratios, np.where(wanted, predicted.before, UNKNOWN))

    def _saved(self, read: ReadEvents) -> Floats:
        """Bits saved of the transition and of the gap, (events, 2)."""
        weights = self.weights[:, np.maximum(read.before, START_CLASS) + 1].T
        return np.where((read.before > UNKNOWN)[:, None], saved_bits(weights, read.ratios), 0.0)

    def update(self, events: Sequence[Event]) -> None:
        """See `Level`: the floor learns; the network is trained anew by `regard watch learn`."""
        self.floor.update(events)

    def explain(self, event: Event, part: int, state: Any) -> Finding:
        """See `Level`: the finding of the floor, with the bits and endpoints of the mixture."""
        assert self.scorer is not None
        key = (event.tenant, event.entity)
        state = state or {"floor": None, "network": None}
        finding = self.floor.explain(event, part, state["floor"])
        if part not in (TRANSITION, GAP) or not event.entity:
            return finding
        finding.bits = float(self.score([event], {key: state}).bits[part])
        if part == GAP:
            return finding
        features, states = self.scorer.features, {key: state["network"]}
        predicted = self.scorer.read([event], states, np.array([True]))
        p = predicted.output[0, : features.num_classes].double().softmax(0).numpy()
        w = float(self.weights[0, predicted.before[0] + 1])
        expected = []
        for number in np.argsort(-p, kind="stable")[: CANDIDATES * EXPECTED].tolist():
            if number == OTHER or features.endpoints[number - 1][0] != event.tenant:
                continue
            name = features.endpoints[number - 1][1]
            other = replace(event, endpoint=name)
            floor_bits = self.floor.score([other], {key: state["floor"]}).bits[TRANSITION]
            expected.append((name, float(w * p[number] + (1 - w) * 2.0**-floor_bits)))
        finding.expected = sorted(expected, key=lambda each: -each[1])[:EXPECTED]
        return finding

    # ---------------------------------------------------------------------------------- saving
    def to_json(self) -> dict[str, Any]:
        """See `Level`."""
        assert self.scorer is not None
        assert self.gain is not None
        return {
            "floor": self.floor.to_json(),
            "settings": self.settings.model_dump(mode="json"),
            "model": model_json(self.scorer.model),
            "features": self.scorer.features.to_json(),
            "weights": self.weights.tolist(),
            "cascade": self.cascade.to_json(),
            "gain": self.gain._asdict(),
            "window_reason": self.window_reason,
        }

    @classmethod
    def from_json(
        cls, content: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]
    ) -> SequenceNetwork:
        """See `Level`."""
        floor = SequenceLevel.from_json(content["floor"], with_prefix("floor.", tensors))
        level = cls(floor, load_settings(content["settings"]))
        model = load_model(content["model"], with_prefix("model.", tensors))
        features = EventFeatures.from_json(content["features"])
        level.scorer = EventScorer(model, features, level.settings.window)
        level.weights = np.array(content["weights"])
        level.cascade = Cascade.from_json(content["cascade"])
        level.gain = Gain(**content["gain"])
        level.window_reason = content["window_reason"]
        return level
