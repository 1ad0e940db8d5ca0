"""Export mixers and models for other runtimes: `torch.export` programs, and ONNX files checked with
onnxruntime.

import regard
from regard import export

mixer = regard.create("bigbird", dim=64, heads=4, length=4096)
exported = export.to_onnx(mixer, "bigbird.onnx", mask=True)  # any batch size, any length up to
4,096 print(exported.max_difference)  # from eager, at sizes that were not traced
"""

from regard.export.onnx_file import ExportedFile, to_onnx
from regard.export.tracing import SizeCheck, to_program

__all__ = ["ExportedFile", "SizeCheck", "to_onnx", "to_program"]
