"""Which folders may be written to: new ones, empty ones, and those that Regard wrote before."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from regard.json_files import PARTIAL_PREFIX


def check_output_folder(
    folder: Path, kind: str, marker: str, *, others: Collection[str] = ()
) -> None:
    """Raise ValueError if a folder contains files of somebody else.

    Args:
        kind: What the folder should contain, for the message: "run".
        marker: A file that is in every such folder. The caller checks its content.
        others: Names that may be there without the marker, if a process was killed early.
    """
    if folder.is_symlink() and not folder.exists():
        raise ValueError(f"{folder} is a link to {folder.readlink()}, which does not exist.")
    parent = next((each for each in folder.parents if each.exists()), None)
    if parent is not None and not parent.is_dir():
        raise ValueError(f"{parent} is a file: choose another folder than {folder}.")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file: give a folder.")
    names = {path.name for path in folder.iterdir()}
    foreign = sorted(names - {f"{PARTIAL_PREFIX}{marker}", *others})
    if marker not in names and foreign:
        raise ValueError(
            f"{folder} contains {foreign[0]!r} and is not a {kind}: choose an empty or new folder."
        )
