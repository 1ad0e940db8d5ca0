"""The names that `import regard` offers, and what importing them costs."""

import builtins
import importlib
import subprocess
import sys

import pytest

import regard


def test_every_public_name_can_be_imported_and_shadows_no_builtin():
    assert {"attend", "create", "list_recipes", "swap", "Band", "Mixer", "hf"} <= set(
        regard.__all__
    )
    for name in regard.__all__:
        assert getattr(regard, name) is not None
    assert regard.attend is importlib.import_module("regard.backends").attend
    assert not set(regard.__all__) & set(dir(builtins))
    with pytest.raises(AttributeError, match="nope"):
        regard.nope  # noqa: B018


def test_importing_regard_does_not_import_torch():
    code = "import sys, regard; assert 'torch' not in sys.modules; regard.Band; print('ok')"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "ok\n"
