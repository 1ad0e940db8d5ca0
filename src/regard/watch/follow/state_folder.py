"""The state folder of `follow`: what it may contain, and which model belongs to it."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit, urlunsplit

from regard.folder_lock import LOCK_FILE
from regard.json_files import PARTIAL_PREFIX, CorruptFile
from regard.output_folders import check_output_folder
from regard.watch.detector import Detector
from regard.watch.follow.database import DATABASE_FILE
from regard.watch.follow.store import WatchStore

DEAD_LETTERS_FILE = "dead-letters.jsonl"
MODEL_FOLDER = "model"  # what the model has learned since it was made
POSITIONS_FOLDER = "positions"  # how far files were read
MODEL_FACT = "model_id"


def prepare_folder(folder: Path) -> None:
    """Create a state folder, or check that it is one."""
    others = (LOCK_FILE, DEAD_LETTERS_FILE, POSITIONS_FOLDER, f"{DATABASE_FILE}-wal")
    check_output_folder(folder, "state folder of regard watch follow", DATABASE_FILE, others=others)
    folder.mkdir(parents=True, exist_ok=True)


def load_detector(
    model: Path,
    folder: Path,
    *,
    secret: bytes = b"",
    new_model: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> Detector:
    """The model of a state folder, with what it has learned there.

    Args:
        model: Folder that `regard watch learn` wrote.
        folder: The state folder, locked by the caller.
        secret: Key of the hashes of values.
        new_model: Take the model even if the folder was used with another one: alerts, mutes,
            labels and shapes stay, and the states of entities begin anew.
        report: Called with lines for people.

    Raises:
        ValueError: The folder was used with another model.
        CorruptFile: The model is damaged, or of another version.
    """
    detector = Detector.load(model, secret=secret)
    store = WatchStore(folder, create=True, check=True)
    try:
        known = store.fact(MODEL_FACT)
        if known not in (None, detector.model_id):
            if not new_model:
                raise ValueError(
                    f"{folder} was used with another model ({known}) than {model} "
                    f"({detector.model_id}). Give that model or another folder, or --new-model to "
                    "keep alerts, mutes and labels and to begin the states of entities anew."
                )
            with store.transaction():
                store.database.connection.execute("DELETE FROM entities")
                store.set_fact(MODEL_FACT, detector.model_id)
            report(f"{folder}: new model {detector.model_id}; the states of entities begin anew")
            return detector
        store.set_fact(MODEL_FACT, detector.model_id)
    finally:
        store.close()
    learned = folder / MODEL_FOLDER
    replaced = folder / f"{PARTIAL_PREFIX}old-{MODEL_FOLDER}"  # killed while it was replaced
    if not learned.exists() and not replaced.exists():
        return detector
    try:
        current = Detector.load(learned, secret=secret)
    except CorruptFile as error:
        report(f"warning: {error} Starting from {model}: what was learned since is lost.")
        return detector
    return current if current.model_id == detector.model_id else detector


def begin_replay(folder: Path) -> None:
    """Let the states of entities begin anew, so that replayed events do not count in them twice,
    and forget which records are done."""
    store = WatchStore(folder)
    try:
        with store.transaction():
            for table in ("entities", "processed"):
                store.database.connection.execute(f"DELETE FROM {table}")
    finally:
        store.close()


def name_consumer(url: str, folder: Path) -> str:
    """The URL of a Redis stream with the name of a consumer, unless it has one.

    The name belongs to the state folder, so that what a killed process has not acknowledged is
    delivered at once to the next one with this folder.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss") or "consumer" in parse_qs(parts.query):
        return url
    digest = hashlib.sha256(str(folder.resolve()).encode(errors="surrogateescape")).hexdigest()
    option = f"consumer={socket.gethostname()}-{digest[:8]}"
    return urlunsplit(parts._replace(query=f"{parts.query}&{option}".lstrip("&")))
