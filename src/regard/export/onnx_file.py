"""ONNX files, written once onnxruntime has given the same results as eager."""

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
    check_capability,
    compare,
    suppress_output,
    trace,
)
from regard.models.serialization import write_atomically

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
MAX_BYTES = (1 << 31) - (1 << 20)  # the limit of protobuf, less some room for the graph
OUTPUT = "y"


class ExportedFile(NamedTuple):
    """A file that was written.

    Args:
        path: Its path.
        bytes: Its size.
        inputs: Names of the inputs.
        lengths: Minimum and maximum length that it takes; the maximum is None if there is none.
        checks: Comparisons of onnxruntime with eager.
    """

    path: Path
    bytes: int
    inputs: tuple[str, ...]
    lengths: tuple[int, int | None]
    checks: tuple[SizeCheck, ...]

    @property
    def max_difference(self) -> float:
        """The largest difference from eager."""
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
    """Write a mixer or model as an ONNX file for any batch size and length.

    See `to_program` for the arguments. Inputs are named as in `forward` (x, context, mask), the
    output is y. The file is written only if onnxruntime gives the same as eager, at other batch
    sizes and lengths than the traced ones.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give a file name, such as {path / 'model.onnx'}")
    if not path.parent.is_dir():
        raise FileNotFoundError(2, "no such folder", str(path.parent))
    check_positive("tolerance", tolerance)
    runtime = import_onnxruntime()
    if not isinstance(module, nn.Module):
        raise TypeError(f"Only a Mixer or a Model can be exported, not {type(module).__name__}")
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if not dtypes <= {torch.float32, torch.float64}:  # others have no kernels for some operators
        names = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(
            f"The parameters are {names}: convert them first, for example with .float()"
        )
    size = sum(tensor.nbytes for tensor in module.state_dict().values())
    if size > MAX_BYTES:
        raise Unsupported(
            f"The parameters take {size / 2**30:.1f} GiB, but an ONNX file is limited to 2 GiB"
        )
    check_capability(module, "onnx")
    traced = trace(module, mask=mask, context=context, length=length)
    content = onnx_bytes(traced)
    checks = compare(module, traced, onnx_runner(runtime, content), tolerance)
    write_atomically(path, content)
    lengths = (traced.min_length, traced.max_length)
    return ExportedFile(path, len(content), tuple(traced.inputs.axes), lengths, checks)


def import_onnxruntime() -> Any:
    """onnxruntime; ImportError if a package of the export extra is missing."""
    for name in PACKAGES:
        try:
            module = import_module(name)
        except ImportError:
            raise ImportError(
                f"ONNX export needs {name}: pip install 'regard[export]'", name=name
            ) from None
    return module


def onnx_bytes(traced: TracedGraph) -> bytes:
    """A traced graph as the content of an ONNX file."""
    with suppress_output(), torch.no_grad():
        try:
            program = torch.onnx.export(
                traced.program,
                (),
                dynamo=True,
                verbose=False,
                input_names=list(traced.inputs.axes),
                output_names=[OUTPUT],
                external_data=False,
            )
            assert program is not None
            return program.model_proto.SerializeToString()
        except Exception as error:  # an operator that ONNX does not have
            lines = [line.strip() for line in str(error.__cause__ or error).splitlines()]
            reason = next((line for line in lines if line), type(error).__name__)
            raise Unsupported(f"ONNX cannot express the graph: {reason}") from None


def onnx_runner(runtime: Any, content: bytes) -> GraphRunner:
    """A function that runs an ONNX file with onnxruntime: inputs by name -> output."""
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # errors are raised as well
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise Unsupported(
            f"onnxruntime cannot run the graph: {str(error).splitlines()[0]}"
        ) from None

    def run(inputs: Mapping[str, Tensor]) -> Tensor:
        arrays = {name: tensor.cpu().numpy() for name, tensor in inputs.items()}
        return torch.from_numpy(session.run([OUTPUT], arrays)[0])

    return run
