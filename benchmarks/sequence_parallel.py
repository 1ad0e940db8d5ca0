"""Bytes that processes exchange when each holds a slice of one sequence: counted in the exchange,
beside what must travel.

    python benchmarks/sequence_parallel.py
    python benchmarks/sequence_parallel.py --tokens 8192 --processes 2 --json
    python benchmarks/sequence_parallel.py --memory --tokens 16384 --processes 4

Bytes are those of one mixer and one example in float32, forward, over all processes; those of the
backward pass are asserted to be as many, and for keys, which go round once more, twice as many.
"must" is counted from the dense mask, or from the size of the sums. With --memory: the growth of
the resident peak of a process, forward and backward, beside that of one which holds all the keys
that it sees at once. No time is measured.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import regard
from regard import parallel
from regard.attentions.kv_cache import KVCacheAttention
from regard.mixer import Attention, Mixer
from regard.parallel import ring

DIM, HEADS = 256, 4
KINDS = {
    "dense": ("vanilla", {}),
    "dense, causal": ("vanilla", {"causal": True}),
    "window 128": ("local", {"window": 128}),
    "window 128, causal": ("local", {"window": 128, "causal": True}),
    "BigBird": ("bigbird", {}),
    "BigBird, causal": ("bigbird", {"causal": True}),
    "linear": ("linear", {}),
    "linear, causal": ("linear", {"causal": True}),
}


def made(kind: str, tokens: int) -> Mixer:
    """The mixer, alike in every process."""
    name, more = KINDS[kind]
    torch.manual_seed(0)
    return regard.create(
        name, dim=DIM, heads=HEADS, **more, **({"length": tokens} if name == "bigbird" else {})
    )


def must(kind: str, tokens: int, world: int) -> int:
    """Bytes that cannot stay at home."""
    mixer = made(kind, tokens)
    attention = next(part for part in mixer.modules() if isinstance(part, Attention))
    if not isinstance(attention, KVCacheAttention):
        width = DIM // HEADS
        pairs = world * (world - 1) // (2 if mixer.causal else 1)
        return pairs * HEADS * width * (width + 1) * 4
    mask = (attention.causal_pattern if mixer.causal else attention.pattern).dense(tokens)
    cuts = [
        slice(int(part[0]), int(part[-1]) + 1) for part in torch.arange(tokens).tensor_split(world)
    ]
    keys = sum(
        int(mask[mine, theirs].any(0).sum()) for mine in cuts for theirs in cuts if mine != theirs
    )
    return keys * 2 * DIM * 4


def process(rank: int, world: int, tokens: int, path: str) -> None:
    """Run each mixer on a slice, and leave the bytes that were sent."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=world)
    x = torch.randn(1, tokens, DIM, generator=torch.Generator().manual_seed(0))
    found = {}
    for kind in KINDS:
        mixer = parallel.sequence_parallel(made(kind, tokens))
        with parallel.count_traffic() as ahead:
            y = mixer(parallel.local_slice(x))
        with parallel.count_traffic() as back:
            y.sum().backward()
        again = isinstance(
            getattr(mixer.inner, "inner", None), KVCacheAttention
        )  # keys are not kept, and sent again
        assert (back.sent, back.received) == (
            (ahead.sent + ahead.received,) * 2 if again else (ahead.received, ahead.sent)
        )
        found[kind] = ahead.sent, ahead.received
    Path(path, str(rank)).write_text(json.dumps(found))
    dist.destroy_process_group()


def resident(what: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def remembered(rank: int, world: int, tokens: int, kind: str, at_once: bool, path: str) -> None:
    """Leave the bytes that forward and backward took at the peak."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=world)
    if at_once:
        ring.supports_ring = lambda *_: False
    for n in (64 * world, tokens):  # the first loads what is loaded once
        mixer = parallel.sequence_parallel(made(kind, n))
        x = parallel.local_slice(
            torch.randn(1, n, DIM, generator=torch.Generator().manual_seed(0))
        ).clone()
        before = resident("VmRSS")
        mixer(x).sum().backward()
    Path(path, str(rank)).write_text(str(resident("VmHWM") - before))
    dist.destroy_process_group()


def memory(tokens: int, world: int) -> list[dict[str, str | int]]:
    """The most that any process took, in a ring and with all keys at once."""
    found = []
    for kind in ("dense", "window 128", "BigBird"):
        peaks = []
        for at_once in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(remembered, (world, tokens, kind, at_once, folder), nprocs=world)  # type: ignore[no-untyped-call]
                peaks.append(max(int(Path(folder, str(rank)).read_text()) for rank in range(world)))
        found.append(
            {
                "mixer": kind,
                "tokens": tokens,
                "processes": world,
                "ring": peaks[0],
                "at once": peaks[1],
            }
        )
    return found


def rows(tokens: int, world: int) -> list[dict[str, str | int]]:
    """What was sent by all, and got by one at most."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, (world, tokens, folder), nprocs=world)  # type: ignore[no-untyped-call]
        told = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(world)]
    return [
        {
            "mixer": kind,
            "tokens": tokens,
            "processes": world,
            "sent": sum(part[kind][0] for part in told),
            "must": must(kind, tokens, world),
            "most": max(part[kind][1] for part in told),
        }
        for kind in KINDS
    ]


def main() -> None:
    """Print a row for each mixer and number of processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--memory", action="store_true", help="the peak of a process, and not the bytes that travel"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    chosen = parser.parse_args()
    measured = memory if chosen.memory else rows
    found = [row for world in chosen.processes for row in measured(chosen.tokens, world)]
    if chosen.json:
        print(json.dumps(found, indent=1))
        return
    if chosen.memory:
        print("| mixer | processes | tokens | MB, in a ring | MB, all at once |")
        print("| --- | --- | --- | --- | --- |")
        for row in found:
            peaks = (f"{int(row[key]) / 1e6:.0f}" for key in ("ring", "at once"))
            print(
                f"| {row['mixer']} | {row['processes']} | {row['tokens']:,} | {' | '.join(peaks)} |"
            )
        return
    print(
        "| mixer | processes | bytes sent by all | must travel | of dense "
        "| most that one process gets |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for row in found:
        dense = next(r["sent"] for r in found if r["processes"] == row["processes"])
        cells = [f"{row[key]:,}" for key in ("sent", "must")] + [
            f"{int(row['sent']) / int(dense):.2%}",
            f"{row['most']:,}",
        ]
        print(f"| {row['mixer']} | {row['processes']} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
