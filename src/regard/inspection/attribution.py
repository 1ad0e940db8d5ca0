"""Which input tokens a prediction depends on, by four methods, and how well they agree.

- occlusion: the fall of the score when the token's embedding becomes the mean of all: the truth
  about what the model does, and the slowest.
- gradient x input: |∂score/∂x_j · x_j| of the embedding x_j.
- gradient x attention: mean over layers and heads of Σ_i relu(∂score/∂A_ij) A_ij, as in Grad-SAM
  (Barkan et al. 2021, arXiv 2204.11073). ∂score/∂A_ij is the gradient of output i times value j, so
  it exists for every map, whatever computed it.
- rollout: the product of the maps of all layers, each half mixed with the identity (Abnar &
  Zuidema 2020, arXiv 2005.00928).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.inspection.answers import Answer, read_answer
from regard.inspection.inspected import InspectedModel, PlacedMap
from regard.inspection.operators import HeadOperator, RecordedHeads, cell_means
from regard.inspection.rows import changed_rows, embedding_of
from regard.models.heads import FirstTokenPooling

MAX_TOKENS = 512  # of a rollout and of gradient x attention as scores of tokens
MAX_OCCLUDED = 256  # calls; in longer inputs several tokens are occluded together
BATCH = 16
OCCLUSION = "occlusion"


# ------------------------------------------------------------------------------------- rollout
def rollout_maps(model: InspectedModel) -> list[PlacedMap]:
    """The maps that a rollout multiplies: all layers of the input, or of the source. Empty if they
    are over other tokens in some layer, or negative somewhere."""
    maps = [p for p in model.maps if p.role in ("self", "encoder") and p.queries != "second"]
    count = {(p.queries, p.keys) for p in maps}
    whole = all(isinstance(p.map.operator, HeadOperator) for p in maps)
    if len(count) != 1 or not whole or maps[0].queries != maps[0].keys:
        return []
    for placed in maps:
        operator = placed.map.operator
        assert isinstance(operator, HeadOperator)
        shape = min(64, operator.queries), min(64, operator.keys)
        weights = operator.pool_map(slice(None), slice(None), shape)
        if not bool((weights >= -1e-4 * weights.abs().max()).all()):
            return []
    return maps


def weigh_by_rollout(maps: list[PlacedMap], values: Tensor) -> Tensor:
    """The rollout times values (n, c): (n, c). The map of a layer is the mean of its heads, with
    rows that sum to one."""
    for placed in maps:
        operator = placed.map.operator
        assert isinstance(operator, HeadOperator)
        ones = torch.ones(1, operator.keys, 1, dtype=operator.dtype)
        columns = torch.cat((values.to(operator.dtype)[None], ones), -1)
        mixed = operator.weigh(columns).mean(0)
        share = mixed[:, :-1] / mixed[:, -1:].clamp(min=1e-12)
        values = (share + values.to(share)) / 2
    return values


def rollout_tile(model: InspectedModel, cells: int) -> Tensor | None:
    """The rollout in at most `cells` x `cells` cells, (1, rows, columns); None without one."""
    maps = rollout_maps(model)
    if not maps:
        return None
    operator = maps[0].map.operator
    assert operator is not None
    n = operator.queries
    means = cell_means(slice(None), n, min(cells, n))
    return (means.T @ weigh_by_rollout(maps, means).float())[None]


# ------------------------------------------------------------------------------------- methods
def attributions(model: InspectedModel) -> dict[str, list[float]]:
    """Scores of the input tokens by each method that the model allows."""
    embedding = embedding_of(model.subject)
    if embedding is None:
        return {}
    answer = read_answer(model.subject, model.output)
    sequence = "source" if model.subject.is_seq2seq else "input"
    if sequence not in model.sequences:
        return {}
    count = model.sequences[sequence]["count"]
    first = model.sequences[sequence].get("first_patch", 0)
    scores: dict[str, Tensor] = {}
    gradient, attention = gradient_scores(model, embedding, answer, sequence)
    scores["gradient x input"] = gradient
    if attention is not None:
        scores["gradient x attention"] = attention
    rolled = rollout_scores(model, answer)
    if rolled is not None:
        scores["rollout"] = rolled
    scores[OCCLUSION] = occlusion_scores(model, embedding, answer)
    padded = {
        name: torch.cat((values.new_zeros(first), values))
        if len(values) + first == count
        else values
        for name, values in scores.items()
    }
    return {
        name: [float(f"{v:.5g}") for v in values.tolist()]
        for name, values in padded.items()
        if len(values) == count and bool(values.isfinite().all())
    }


def gradient_scores(
    model: InspectedModel, embedding: nn.Module, answer: Answer, sequence: str
) -> tuple[Tensor, Tensor | None]:
    """Gradient x input (n), and gradient x attention (n) if the maps are recorded."""
    leaf: list[Tensor] = []

    def watch(rows: Tensor) -> Tensor:
        leaf.append(rows.detach().requires_grad_())
        return leaf[0]

    with torch.enable_grad(), changed_rows(embedding, watch):
        records, output = model.record()
        score = answer.score(read_answer(model.subject, output))[0]
    wanted = [
        (placed, records[placed.number].calls[0])
        for placed in model.maps
        if isinstance(placed.map.operator, RecordedHeads)
        and placed.keys == sequence
        and records[placed.number].calls[0].output.requires_grad  # not inside a reversible stack
    ]
    outputs = [record.output for _, record in wanted]
    gradients = torch.autograd.grad(
        score, [leaf[0], *outputs], allow_unused=True, materialize_grads=True
    )
    by_input = (gradients[0] * leaf[0]).sum(-1)[0].abs().detach().float().cpu()
    n = max((record.keys for _, record in wanted), default=0)
    if not wanted or n > MAX_TOKENS:
        return by_input, None
    total = torch.zeros(n)
    for (placed, record), gradient in zip(wanted, gradients[1:], strict=True):
        assert isinstance(placed.map.operator, RecordedHeads)
        slope = (gradient[0] @ record.values()[0].detach().mT).float().cpu()
        total += (slope.relu() * placed.map.operator.dense().float().abs()).mean((0, 1))
    return by_input, total / len(wanted)


def rollout_scores(model: InspectedModel, answer: Answer) -> Tensor | None:
    """The rollout from the tokens that the prediction is read from."""
    maps = rollout_maps(model)
    operator = maps[0].map.operator if maps else None
    if operator is None or operator.keys > MAX_TOKENS:
        return None
    rolled = weigh_by_rollout(maps, torch.eye(operator.keys)).float()
    if model.subject.is_seq2seq:
        return rolled.mean(0)
    if answer.kind in ("next token", "token"):
        return rolled[answer.places].mean(0)
    head: Any = getattr(model.subject.model, "head", None)
    config = getattr(model.subject.model, "config", None)
    by_first = isinstance(getattr(head, "pooling", None), FirstTokenPooling) or (
        answer.kind == "class" and hasattr(config, "model_type")
    )
    return rolled[0] if by_first else rolled.mean(0)


@torch.no_grad()
def occlusion_scores(model: InspectedModel, embedding: nn.Module, answer: Answer) -> Tensor:
    """Fall of the score when the row of a token becomes the mean of all rows, (n). In a long input
    neighbours are occluded together and share the score."""
    count = 0

    def measure(rows: Tensor) -> Tensor:
        nonlocal count
        count = rows.shape[1]
        return rows

    with changed_rows(embedding, measure):
        base = answer.score(read_answer(model.subject, model.subject.call()))[0]
    size = -(-count // MAX_OCCLUDED)
    starts = list(range(0, count, size))
    scores = torch.zeros(count)
    for first in range(0, len(starts), BATCH):
        part = starts[first : first + BATCH]

        def occlude(rows: Tensor, part: list[int] = part) -> Tensor:
            rows = rows.clone()
            mean = rows.mean(1)
            for example, start in enumerate(part):
                rows[example, start : start + size] = mean[example, None]
            return rows

        subject = model.subject.repeat(len(part))
        with changed_rows(embedding, occlude):
            found = answer.score(read_answer(subject, subject.call()))
        for start, score in zip(part, found, strict=True):
            scores[start : start + size] = float(base - score)
    return scores


# ----------------------------------------------------------------------------------- agreement
def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's rank correlation of two vectors; equal values share their mean rank."""
    ranks = torch.stack([average_ranks(a), average_ranks(b)])
    return float(torch.corrcoef(ranks)[0, 1])


def average_ranks(values: Tensor) -> Tensor:
    """Rank of each value, from 0; equal values have the mean of theirs."""
    _, group, counts = values.double().unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts + 1) / 2)[group].double()


def agreement(scores: dict[str, list[float]]) -> dict[str, float]:
    """Rank correlation of each method with the size of the occlusion."""
    if OCCLUSION not in scores:
        return {}
    truth = torch.tensor(scores[OCCLUSION]).abs()
    found = {
        name: rank_correlation(torch.tensor(values), truth)
        for name, values in scores.items()
        if name != OCCLUSION and len(values) > 2
    }
    return {name: round(value, 4) for name, value in found.items() if value == value}
