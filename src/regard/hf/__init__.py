"""Regard and Hugging Face: attention names, swapping, Regard models, checkpoints.

    import regard.hf
    from transformers import AutoModel

    model = AutoModel.from_pretrained("bert-base-uncased", attn_implementation="regard:bigbird")
    model.set_attn_implementation("regard:local?window=256")

- Attention names: `register`, `attention_names`.
- Replace attention layers: `swap`, `restore`, `recover`, `extend_positions`, `save_swapped`,
  `load_swapped`.
- Regard models as transformers classes: `RegardForCausalLM` and others, `HubModel`.
- Published checkpoints as Regard models: `convert_checkpoint`.

The public names are declared in `__init__.pyi` and imported on first use, so importing this package
is cheap.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import lazy_loader

_import_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    try:
        return _import_name(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("transformers", "huggingface_hub"):
            raise
        message = f"regard.hf.{name} needs transformers: pip install 'regard[hf]'"
        raise ImportError(message, name=error.name) from error


class _PatchOnImport(importlib.abc.MetaPathFinder):
    """Patches transformers when it is imported: importing it here would take seconds."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "transformers.modeling_utils":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            original = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                original(module)
                import_module("regard.hf.patching")  # which patches it

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "transformers.modeling_utils" in sys.modules:
    import_module("regard.hf.patching")
elif not any(isinstance(finder, _PatchOnImport) for finder in sys.meta_path):
    sys.meta_path.insert(0, _PatchOnImport())
