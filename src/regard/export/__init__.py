"""Mixers and models as graphs for other runtimes: `torch.export`, and ONNX files that onnxruntime has checked.

import regard
from regard import export

mixer = regard.create("bigbird", dim=64, heads=4, length=4096)
done = export.onnx(mixer, "bigbird.onnx", mask=True)      # any batch, any length up to 4,096
print(done.difference)                                    # to eager, at sizes that were not traced
"""

from regard.export.onnx_file import ExportedFile, to_onnx
from regard.export.tracing import SizeCheck, to_program

__all__ = ["SizeCheck", "ExportedFile", "to_onnx", "to_program"]
