"""ONNX files: written at once, after onnxruntime gave the same as eager."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import Unsupported, check_positive
from regard.export.tracing import (
    GraphRunner,
    SizeCheck,
    TracedGraph,
    check_can,
    compare,
    suppress_output,
    trace,
)
from regard.models.serialization import write_atomically

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
LARGEST = (1 << 31) - (1 << 20)  # bytes: what protobuf can hold, and some room for the graph
OUTPUT = "y"


class ExportedFile(NamedTuple):
    """What was written.

    lengths   from, to: which lengths it takes; None: any above
    checks    the comparisons with eager, by onnxruntime
    """

    path: Path
    bytes: int
    inputs: tuple[str, ...]
    lengths: tuple[int, int | None]
    checks: tuple[SizeCheck, ...]

    @property
    def difference(self) -> float:
        """The largest of all checks."""
        return max(check.difference for check in self.checks)


def to_onnx(
    module: nn.Module,
    path: str | Path,
    *,
    mask: bool = False,
    context: bool = False,
    length: int | None = None,
    tolerance: float = 1e-4,
) -> ExportedFile:
    """Write a mixer or a model as an ONNX file, for any batch and length; see `to_program` for the arguments.

    The inputs are called as in `forward`: x, memory, mask; the output y.  The file appears only after onnxruntime has given
    what eager gives, at other batches and lengths than the traced one.  What cannot be exported raises `Unsupported`.
    """
    path = _checked(path)
    check_positive("tolerance", tolerance)
    runtime = import_onnxruntime()
    _check_kind(module)
    check_can(module, "onnx", "be written as ONNX")
    found = trace(module, mask=mask, context=context, length=length)
    content = onnx_bytes(found)
    checks = compare(module, found, onnx_runner(runtime, content), tolerance)
    write_atomically(path, content)
    return ExportedFile(
        path, len(content), tuple(found.inputs.axes), (found.least, found.most), checks
    )


def import_onnxruntime() -> Any:
    """onnxruntime, once all packages of the extra are there."""
    for name in PACKAGES:
        try:
            found = import_module(name)
        except ImportError:
            raise ImportError(
                f"to write ONNX files {name} is needed: pip install 'regard[export]'", name=name
            ) from None
    return found


def _checked(path: str | Path) -> Path:
    """A place that a file can be put to."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder: give the name of a file, such as {path / 'model.onnx'}"
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(2, "there is no such folder", str(path.parent))
    return path


def _check_kind(module: nn.Module) -> None:
    """onnxruntime computes in single and in double precision everywhere, in shorter ones here and there."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"a Mixer or a Model can be exported, not {type(module).__name__}")
    kinds = {x.dtype for x in module.parameters() if x.is_floating_point()}
    if not kinds <= {torch.float32, torch.float64}:
        raise ValueError(
            f"the parameters are of {', '.join(sorted(map(str, kinds)))}: convert them first, as by .float()"
        )
    size = sum(x.nbytes for x in module.state_dict().values())
    if size > LARGEST:
        raise Unsupported(
            f"the parameters take {size / 2**30:.1f} GiB, and an ONNX file holds less than 2"
        )


def onnx_bytes(found: TracedGraph) -> bytes:
    """The graph as the content of an ONNX file."""
    names = list(found.inputs.axes)
    with suppress_output(), torch.no_grad():
        try:
            written = torch.onnx.export(
                found.program,
                (),
                dynamo=True,
                verbose=False,
                input_names=names,
                output_names=[OUTPUT],
                external_data=False,
            )
            assert written is not None
            return written.model_proto.SerializeToString()
        except Exception as error:  # an operator that ONNX has no word for
            lines = [
                line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()
            ]
            raise Unsupported(
                f"ONNX cannot say it: {lines[0] if lines else type(error).__name__}"
            ) from None


def onnx_runner(runtime: Any, content: bytes) -> GraphRunner:
    """The file, run by onnxruntime: tensors by name -> the output."""
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # what fails is raised as well
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise Unsupported(f"onnxruntime cannot run it: {str(error).splitlines()[0]}") from None

    def run(given: Mapping[str, Tensor]) -> Tensor:
        return torch.from_numpy(
            session.run([OUTPUT], {name: x.cpu().numpy() for name, x in given.items()})[0]
        )

    return run
