"""A process that imports PyTorch and reads the data once, and is forked for each run.

Starting a process for a run takes two seconds of imports, and the time to read and encode the data;
a fork takes milliseconds, starts from the same state every time, and crashes alone.

The server reads a folder from each line of stdin and writes a line of JSON to stdout for each
process that it starts or that ends.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

REAP_SECONDS = 0.05  # until the server notices that a run has ended
ENDED = "the process that starts the runs ended"


class ForkServer:
    """The client's side of a server.

    Args:
        environment: Environment variables of the server and its runs.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  closed with the server
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,  # Ctrl-C is for the parent alone, which asks its runs to stop
            env=dict(environment),
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.unread = b""
        self.pids: dict[str, int] = {}
        self.exit_codes: dict[str, int] = {}

    def start(self, folder: Path) -> None:
        """Start the run in a folder."""
        name = str(folder.absolute())
        self.pids.pop(name, None)
        self.exit_codes.pop(name, None)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # `is_alive` tells
            self.process.stdin.write(json.dumps(name).encode() + b"\n")
            self.process.stdin.flush()

    def update(self) -> None:
        """Read which runs have started or ended."""
        assert self.process.stdout is not None
        while chunk := self.process.stdout.read():
            self.unread += chunk
        *lines, self.unread = self.unread.split(b"\n")
        for line in lines:
            event = json.loads(line)
            values = self.pids if "pid" in event else self.exit_codes
            values[event["folder"]] = event["pid" if "pid" in event else "exit_code"]

    def is_alive(self) -> bool:
        """Whether the server can start runs."""
        return self.process.poll() is None

    def failure_reason(self) -> str:
        """Why the server ended."""
        self.errors.seek(0)
        lines = self.errors.read().decode("utf-8", "replace").strip().splitlines()
        return f"{ENDED}: {lines[-1]}" if lines else ENDED

    def close(self) -> None:
        """End the server; runs in progress notice it, save a checkpoint and exit."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.errors.close()


def main() -> int:
    """Serve until stdin is closed; in a fork, return the exit code of its run."""
    import torch

    from regard.compare.executors import LOG_FILE
    from regard.compare.worker import prepare_task, run_worker

    torch.set_num_threads(1)  # a fork has only the thread that called it: no pool may exist by then
    buffer, folders = b"", dict[int, str]()
    while True:
        ready, _, _ = select.select([0], [], [], REAP_SECONDS if folders else None)
        if ready:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                return 0
            buffer += chunk
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            folder = json.loads(line)
            task = prepare_task(Path(folder))
            pid = os.fork()
            if not pid:
                os.setsid()
                redirect_output(os.path.join(folder, LOG_FILE))
                start_time = time.time()
                touch_libraries()
                return run_worker(Path(folder), start_time, task)
            folders[pid] = folder
            _send({"folder": folder, "pid": pid})
        while folders:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            code = os.waitstatus_to_exitcode(status)
            _send({"folder": folders.pop(pid), "exit_code": code})


def redirect_output(path: str) -> None:
    """Write stdout and stderr to a file, and read nothing from stdin."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    log, nothing = os.open(path, flags, 0o666), os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)


def touch_libraries() -> None:
    """Train a tiny model for a step.

    A fork has mapped no page of PyTorch's libraries yet. What it maps later would count as memory
    of the mixer, which is the peak above that before its model is built.
    """
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        model = nn.Sequential(nn.Embedding(4, 8), layer, nn.Linear(8, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.zeros(2, 3, dtype=torch.int64)
        nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _send(event: dict[str, Any]) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
