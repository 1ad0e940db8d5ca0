"""What a page shows, as JSON values: the format between `regard.inspection` and its front end."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

FORMAT = 1  # raised when the front end of another version could not read the data


class SequenceData(TypedDict):
    """A sequence that maps are over.

    `tokens` are texts, at most `count` of them; a long sequence may leave them out. An image has
    `image`, a data URI, and its `grid` of patches (rows, columns), which are the tokens from
    `first_patch` on.
    """

    id: str
    kind: Literal["text", "image", "vectors"]
    count: int
    tokens: list[str]
    image: NotRequired[str]
    grid: NotRequired[tuple[int, int]]
    first_patch: NotRequired[int]


class TileData(TypedDict):
    """A rectangle of a map, all heads: queries `q` (from, to) by keys `k`, in `rows` x `columns`
    cells.

    `weights` is base64 of uint8 (heads, rows, columns): the size of the mean weight of a cell,
    divided by `scale[head]`, times 255. A cell is one pair of tokens if there are as many as
    tokens; else cell i of a side of `size` tokens in `cells` cells has the tokens from
    i * size // cells to (i + 1) * size // cells. Some maps have negative weights: delta rules, and
    kernels of convolutions.
    """

    q: tuple[int, int]
    k: tuple[int, int]
    rows: int
    columns: int
    scale: list[float]
    weights: str


class MapData(TypedDict):
    """The maps of the heads of one layer.

    `kind` says what the map is: "exact": map x values = output, up to `error`; "implied": composed
    of several steps; "influence": the norm of the derivative of output i by input j. Without a map,
    `reason` says why, and there are no tiles. The first tile is of the whole map; others are finer.
    `metrics` has a number for each head by name; `chance` the same with shuffled tokens.
    """

    layer: int
    name: str
    mixer: str
    role: Literal["self", "encoder", "decoder", "cross"]
    queries: str
    keys: str
    heads: int
    causal: bool
    kind: Literal["exact", "implied", "influence", "none"]
    error: float | None
    reason: str
    tiles: list[TileData]
    metrics: dict[str, list[float | None]]
    chance: dict[str, list[float | None]]
    spectrum: NotRequired[list[list[float]]]  # by head: cumulative share of singular values


class ModelData(TypedDict):
    """One model. `rollout` is a tile over the first sequence; `tables` and `figures` are other
    results, such as the logit lens, the importance of heads, agreement with occlusion, position
    similarity and embedding filters of a ViT, each with a title and a caption."""

    name: str
    parameters: int
    maps: list[MapData]
    prediction: NotRequired[str]
    rollout: NotRequired[TileData]
    attribution: NotRequired[dict[str, list[float]]]  # method -> score of each input token
    # {"map", "layer", "head", "change"}: the index in `maps`; head None is the whole layer
    importance: NotRequired[list[dict[str, Any]]]
    lens: NotRequired[dict[str, Any]]  # {"positions", "layers": [[[token, probability], ...], ...]}
    tables: NotRequired[list[dict[str, Any]]]  # {"title", "caption", "columns", "rows"}
    figures: NotRequired[list[dict[str, Any]]]  # {"title", "caption", "image": data URI}


class HeadMatch(TypedDict):
    """A head of the first model and the head of the second that is most like it."""

    first: tuple[int, int]  # index in `maps`, head
    second: tuple[int, int]
    similarity: float
    same_place: float  # similarity to the head at the same place


class ViewData(TypedDict):
    """Everything that a page shows. `server` is True if more can be asked of a server, which counts
    in `revision` how often the input was changed."""

    format: int
    title: str
    notes: list[str]
    sequences: list[SequenceData]
    models: list[ModelData]
    matches: list[HeadMatch]
    server: bool
    revision: NotRequired[int]


class HeadEdit(TypedDict):
    """A change of a head of a model: `map` is an index in `maps`; head None is every head of it.

    `replace` is what is there instead: "zero" switches the head off, "uniform" and "identity"
    replace its map, "example" replaces it by the map of another text, `example`.
    """

    map: int
    head: int | None
    replace: Literal["zero", "uniform", "identity", "example"]
    example: NotRequired[str]


class OutputData(TypedDict):
    """What a model answers: a text, and the most likely labels or next tokens with their
    probabilities. `lens` is as in `ModelData`."""

    prediction: str
    probabilities: list[tuple[str, float]]
    lens: NotRequired[dict[str, Any]]


class InterventionData(TypedDict):
    """Outputs without and with the edits. `change` is how far they are apart, in `unit`: bits of
    the Kullback-Leibler divergence, 1 - cosine of vectors, or a difference of numbers. `metric` is
    the metric of the task on a sample: {"name", "before", "after", "examples"}."""

    before: OutputData
    after: OutputData
    change: float
    unit: str
    metric: NotRequired[dict[str, Any]]
