"""Your own recipes and tasks from a Python file, which registers them when it is imported.

A run remembers the files that it was trained with by path and checksum. Only files that the user
names are imported: a run that needs one is refused until it is given again, because a folder that
was downloaded could name any file. For a comparison, it is enough that the same content was named
once: its checksum is kept in the cache directory.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import SourceLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

from regard.disk_cache import cache_dir, read_verified, write_verified
from regard.models.config import StrictModel
from regard.tasks.files import existing_path

MODULE_PREFIX = "regard_plugin_"


class PluginFile(StrictModel):
    """A Python file that was imported.

    Attributes:
        path: Its absolute path.
        sha256: Checksum of its content.
    """

    path: str
    sha256: str


_loaded: dict[str, PluginFile] = {}  # by absolute path


class _PluginLoader(SourceLoader):
    """Imports a file from the content whose checksum was taken, without a cache of bytecode."""

    def __init__(self, path: str, content: bytes) -> None:
        self.path, self.content = path, content

    def get_filename(self, fullname: str) -> str:
        return self.path

    def get_data(self, path: str | bytes) -> bytes:
        return self.content


def load_plugin(path: str | Path) -> PluginFile:
    """Import a Python file, which registers recipes (`regard.recipe`) or tasks
    (`regard.tasks.TASKS`). A file that was imported before is not imported again."""
    from regard.registry import get_recipe

    file = existing_path(path).resolve()
    if not file.is_file() or file.suffix != ".py":
        raise ValueError(f"A plugin is a Python file (.py), not {file}.")
    content = file.read_bytes()
    plugin = PluginFile(path=str(file), sha256=hashlib.sha256(content).hexdigest())
    if _loaded.get(plugin.path) == plugin:
        return plugin
    get_recipe("vanilla")  # the recipes of this package are registered first
    number = hashlib.sha256(plugin.path.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    loader = _PluginLoader(plugin.path, content)
    spec = spec_from_loader(f"{MODULE_PREFIX}{file.stem}_{number}", loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        where = _line_of(error, str(file))
        raise ValueError(
            f"Cannot import the plugin {file}{where}: {type(error).__name__}: {error}"
        ) from error
    _loaded[plugin.path] = plugin
    write_verified(_marker(plugin), plugin.path)
    return plugin


def _marker(plugin: PluginFile) -> Path:
    """The file in the cache directory that says that this content was executed before."""
    return cache_dir() / "plugins" / plugin.sha256


def load_known_plugins(recorded: Iterable[PluginFile]) -> None:
    """Import the recorded files that have not changed and whose content this user has named
    before; others are left out."""
    for plugin in recorded:
        path = Path(plugin.path)
        if read_verified(_marker(plugin)) is None or not path.is_file():
            continue
        if hashlib.sha256(path.read_bytes()).hexdigest() == plugin.sha256:
            load_plugin(path)


def load_plugins(paths: Iterable[str | Path]) -> list[PluginFile]:
    """Import several files; see `load_plugin`."""
    return [load_plugin(path) for path in paths]


def require_plugins(
    recorded: Sequence[PluginFile],
    folder: Path,
    on_warning: Callable[[str], None] = warnings.warn,
) -> None:
    """Check that the plugins of a run were imported in this process; warn if one has changed.

    A plugin is found by its path, or by its content or name if it was moved.
    """
    for plugin in recorded:
        loaded = list(_loaded.values())
        same = [each for each in loaded if each.sha256 == plugin.sha256]
        by_path = [each for each in loaded if each.path == plugin.path]
        by_name = [each for each in loaded if Path(each.path).name == Path(plugin.path).name]
        found = same or by_path or by_name
        if not found:
            lost = "" if Path(plugin.path).exists() else ", which does not exist any more"
            raise ValueError(
                f"Run {folder} was trained with the plugin {plugin.path}{lost}. Plugins are "
                f"executed, so read it first if it is not yours; then add --plugin {plugin.path}, "
                f"or plugins=[{plugin.path!r}] in Python."
            )
        if not same:
            on_warning(
                f"The plugin {found[0].path} has changed since the run in {folder} was trained: "
                "its model may give other results."
            )


def _line_of(error: Exception, path: str) -> str:
    """The last line of a file in the traceback of an error, in words."""
    traceback, line = error.__traceback__, None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == path:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return "" if line is None else f", line {line}"
