"""The tensors of examples of a `TokenTask`, and a metric of one batch."""

from torch import Tensor

from regard.tasks import Batch, Example, Metric


def tokens_and_labels(example: Example) -> tuple[Tensor, Tensor]:
    """The tokens and the labels of an example."""
    return example.inputs["x"], example.targets["labels"]


def token_batch(x: Tensor, labels: Tensor, mask: Tensor | None = None) -> Batch:
    """A batch of tokens and labels."""
    return Batch({"x": x, "mask": mask}, {"labels": labels})


def total(metric: Metric, output: Tensor, labels: Tensor) -> tuple[float, ...]:
    """Sums of the statistics of a batch with these labels."""
    batch = Batch({"x": output}, {"labels": labels})
    return tuple(metric.update(output, batch, []).sum(0).tolist())
