"""Detection as set prediction: queries attend to the tokens of an image, and each predicts one
object or none (DETR, Carion et al. 2020, arXiv 2005.12872)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attentions import SoftmaxAttention
from regard.block import Block
from regard.ffn import MLP
from regard.mixer import MultiHead
from regard.models.heads import HeadContext, HeadSpec, ModelHead
from regard.models.spec import Depth, Size
from regard.numerics import at_least_float32
from regard.position.frequencies import sinusoidal_encoding

CLASS_WEIGHT, L1_WEIGHT, GIOU_WEIGHT = 1.0, 5.0, 2.0  # of the paper, in costs and losses
NO_OBJECT_WEIGHT = 0.1  # of a query without an object in the cross-entropy
POSITION_SCALE = 64.0  # positions 0..1 are encoded as 0..64
EPSILON = 1e-4  # the centres of boxes lie in [ε, 1 − ε] before the inverse of the sigmoid


class DetectionOutput(NamedTuple):
    """What each layer of the decoder predicts; the last is the result.

    Attributes:
        logits: (layers, b, queries, num_classes + 1); the last class is "no object".
        boxes: (layers, b, queries, 4): centre x, centre y, width and height, from 0 to 1.
    """

    logits: Tensor
    boxes: Tensor


class DetectionHeadConfig(HeadSpec):
    """Objects of an image in patches: `DetectionOutput`.

    Attributes:
        rows: Rows of patches.
        columns: Columns of patches.
        queries: Number of queries, the largest number of objects that can be found.
        layers: Layers of the decoder.
    """

    models: ClassVar[tuple[str, ...]] = ("encoder",)
    predicts_numbers: ClassVar[bool] = True
    kind: Literal["detection"] = "detection"
    num_classes: Size
    rows: Size
    columns: Size
    queries: Size = 25
    layers: Depth = 2

    def build(self, context: HeadContext) -> DetectionHead:
        """See `HeadSpec`."""
        return DetectionHead(
            context.dim,
            context.heads,
            self.num_classes,
            (self.rows, self.columns),
            queries=self.queries,
            layers=self.layers,
            dropout=context.dropout,
        )

    def loss(self, output: Any, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Not used: the targets are classes and boxes, see `set_prediction_loss`."""
        raise ValueError("The detection head needs boxes: use set_prediction_loss.")


class DetectionHead(ModelHead):
    """A decoder of blocks in which queries attend to each other and to the tokens of the image.

    Each query starts at a reference point of its own, learned, at first on a grid; the position of
    the point is added to the query, as that of its patch is to each token. A layer predicts the
    centre of the box relative to the point. Queries of DETR have no such point and need hundreds of
    epochs to find one (Meng et al. 2021, arXiv 2108.06152; Wang et al. 2022, arXiv 2109.07107).

    Args:
        dim: Model width.
        heads: Number of attention heads.
        num_classes: Number of classes of objects.
        grid: Rows and columns of patches.
    """

    pools = True

    def __init__(
        self,
        dim: int,
        heads: int,
        num_classes: int,
        grid: tuple[int, int],
        *,
        queries: int,
        layers: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.grid, self.dim = grid, dim
        self.content = nn.Parameter(0.02 * torch.randn(queries, dim))
        self.points = nn.Parameter(inverse_sigmoid(grid_points(queries)))
        self.position = nn.Linear(2 * (dim // 2), dim)
        self.blocks = nn.ModuleList(
            Block(
                MultiHead(dim, heads, SoftmaxAttention()),
                MLP(dim, 4 * dim),
                cross=MultiHead(dim, heads, SoftmaxAttention()),
                dropout=dropout,
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.classify = nn.Linear(dim, num_classes + 1)
        self.box_hidden, self.box = nn.Linear(dim, dim), nn.Linear(dim, 4)
        nn.init.zeros_(self.box.weight)
        with torch.no_grad():
            self.box.bias.copy_(torch.tensor([0.0, 0.0, -1.5, -1.5]))  # a fifth of the image

    def forward(self, x: Tensor, mask: Tensor | None = None) -> DetectionOutput:
        """Tokens (b, n, d) -> classes and boxes; a class token before the patches is left out."""
        rows, columns = self.grid
        memory = x[:, -rows * columns :] + self.encode_points(self.patch_centres(x))
        points = self.points.sigmoid()
        y = (self.content + self.encode_points(points)).to(x.dtype).expand(len(x), -1, -1)
        logits, boxes = [], []
        for block in self.blocks:
            y = block(y, memory)
            found = self.norm(y)
            logits.append(self.classify(found))
            centre, size = self.box(F.gelu(self.box_hidden(found))).split(2, -1)
            boxes.append(torch.cat((self.points + centre, size), -1).sigmoid())
        return DetectionOutput(torch.stack(logits), torch.stack(boxes))

    def patch_centres(self, x: Tensor) -> Tensor:
        """Centres (patches, 2) of the patches, x and y from 0 to 1."""
        rows, columns = self.grid
        y = (torch.arange(rows, device=x.device) + 0.5) / rows
        x = (torch.arange(columns, device=x.device) + 0.5) / columns
        return torch.stack((x.expand(rows, -1), y[:, None].expand(-1, columns)), -1).flatten(0, 1)

    def encode_points(self, points: Tensor) -> Tensor:
        """Points (k, 2) -> (k, d): a linear layer of the sinusoids of both coordinates."""
        half = self.dim // 2
        waves = [sinusoidal_encoding(POSITION_SCALE * axis, half, 100.0) for axis in points.mT]
        encoded: Tensor = self.position(torch.cat(waves, -1).to(self.position.weight.dtype))
        return encoded


def grid_points(count: int) -> Tensor:
    """`count` points (count, 2) in the unit square, in rows."""
    rows = max(1, round(count**0.5))
    columns = -(-count // rows)
    index = torch.arange(count)
    return torch.stack(((index % columns + 0.5) / columns, (index // columns + 0.5) / rows), -1)


def inverse_sigmoid(p: Tensor) -> Tensor:
    """log(p / (1 − p)), with p in [ε, 1 − ε]."""
    return p.clamp(EPSILON, 1 - EPSILON).logit()


# --------------------------------------------------------------------------------------------- loss
def set_prediction_loss(
    output: DetectionOutput, labels: list[Tensor], boxes: list[Tensor]
) -> Tensor:
    """The mean loss of DETR over the layers, each with a matching of its own.

    Cross-entropy of the classes, with weight 0.1 for queries without an object; 5 times the L1
    distance and 2 times 1 − GIoU of matched boxes, per object.

    Args:
        labels: Classes (k) of the objects of each image.
        boxes: Their boxes (k, 4), as centre, width and height.
    """
    total = output.boxes.new_zeros(())
    for logits, predicted in zip(*map(at_least_float32, output), strict=True):
        total = total + _layer_loss(logits, predicted, labels, boxes)
    return total / len(output.logits)


def _layer_loss(
    logits: Tensor, predicted: Tensor, labels: list[Tensor], boxes: list[Tensor]
) -> Tensor:
    none = logits.shape[-1] - 1
    targets = torch.full(logits.shape[:2], none, device=logits.device)
    box_loss, count = logits.new_zeros(()), sum(map(len, labels))
    for i, (label, box) in enumerate(zip(labels, boxes, strict=True)):
        if not len(label):
            continue
        queries, objects = match(logits[i], predicted[i], label, box)
        targets[i, queries] = label[objects]
        found, wanted = predicted[i, queries], box[objects]
        giou = generalized_iou(found, wanted).diagonal()
        box_loss = box_loss + L1_WEIGHT * (found - wanted).abs().sum()
        box_loss = box_loss + GIOU_WEIGHT * (1 - giou).sum()
    weight = torch.ones(none + 1, dtype=logits.dtype, device=logits.device)
    weight[none] = NO_OBJECT_WEIGHT
    classes = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight)
    return CLASS_WEIGHT * classes + box_loss / max(count, 1)


@torch.no_grad()
def match(logits: Tensor, predicted: Tensor, label: Tensor, box: Tensor) -> tuple[Tensor, Tensor]:
    """The assignment of the lowest cost (Hungarian algorithm): queries and the objects they get.

    Args:
        logits: (queries, classes + 1).
        predicted: Boxes (queries, 4).
        label: Classes of the objects (k).
        box: Boxes of the objects (k, 4).
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        raise ImportError(
            "Matching of boxes needs the package scipy: pip install 'regard[image]'"
        ) from None
    cost = -CLASS_WEIGHT * logits.softmax(-1)[:, label]
    cost = cost + L1_WEIGHT * torch.cdist(predicted, box, p=1)
    cost = cost - GIOU_WEIGHT * generalized_iou(predicted, box)
    if not cost.isfinite().all():
        raise ValueError("The predicted boxes are not finite: lower the learning rate.")
    queries, objects = linear_sum_assignment(cost.cpu().numpy())
    return (
        torch.as_tensor(queries, device=label.device),
        torch.as_tensor(objects, device=label.device),
    )


def to_corners(boxes: Tensor) -> Tensor:
    """Centre x, centre y, width, height -> left, top, right, bottom, (..., 4)."""
    centre, size = boxes.split(2, -1)
    return torch.cat((centre - size / 2, centre + size / 2), -1)


def generalized_iou(first: Tensor, second: Tensor) -> Tensor:
    """GIoU (n, m) of boxes (n, 4) and (m, 4) as centre, width and height: IoU minus the share of
    the smallest box around both that neither covers (Rezatofighi et al. 2019, arXiv 1902.09630)."""
    a, b = to_corners(first)[:, None], to_corners(second)[None]
    areas = first[:, None, 2:].prod(-1) + second[None, :, 2:].prod(-1)
    inner = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(0)
    outer = torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])
    both, around = inner.prod(-1), outer.prod(-1).clamp(min=1e-12)
    union = (areas - both).clamp(min=1e-12)
    return both / union - (around - union) / around
