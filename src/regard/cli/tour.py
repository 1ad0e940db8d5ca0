"""regard tour: what the library does, in seconds and without a network."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
import typer

import regard
from regard.cli.listing import list_command
from regard.cli.showing import show

TOKENS, HEADS, WIDTH, WINDOW = 4096, 8, 64, 128
TIMES = 5


def tour() -> None:
    """A tour: list, look, measure, stream, and what happens when something cannot be done.

    Example: regard tour
    """
    _title("what there is", "regard list")
    list_command()
    _title("one of them", "regard show bigbird")
    show("bigbird")
    _title(
        "a window against dense softmax, measured now",
        f"regard.attend(q, k, v, pattern=Band({WINDOW}, {WINDOW}))",
    )
    _measure()
    _title(
        "chunk by chunk gives what the whole gives",
        'regard.create("local", ..., causal=True).stream(chunk, state)',
    )
    _stream()
    _title("what cannot be done says why", 'regard.create("linformer", ..., causal=True)')
    _refusal()


def _title(words: str, command: str) -> None:
    typer.secho(f"\n== {words}", bold=True)
    typer.echo(f"   {command}\n")


def _measure() -> None:
    """The two take turns, and of each the fastest run counts."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, TOKENS, WIDTH, generator=generator) for _ in range(3))
    window = regard.Band(WINDOW, WINDOW)
    rivals: dict[str, Callable[[], torch.Tensor]] = {
        "dense softmax (torch SDPA)": lambda: F.scaled_dot_product_attention(q, k, v),
        "window, sparse executor": lambda: regard.attend(q, k, v, pattern=window, backend="sparse"),
    }
    best = dict.fromkeys(rivals, float("inf"))
    with torch.no_grad():
        for _ in range(TIMES):
            for name, run in rivals.items():
                start = time.perf_counter()
                run()
                best[name] = min(best[name], time.perf_counter() - start)
    for name, seconds in best.items():
        typer.echo(f"   {name:<28} {seconds * 1e3:8.1f} ms")
    dense, sparse = best.values()
    typer.echo(
        f"   {dense / sparse:.1f} times as fast, for {window.density(TOKENS):.1%} of the pairs"
    )
    typer.echo(
        f"   forward, {TOKENS:,} tokens, {HEADS} heads of {WIDTH}, float32, {torch.get_num_threads()} threads, "
        f"the fastest of {TIMES} in turns"
    )


def _stream() -> None:
    """A causal window, whole and in chunks of odd sizes; its cache stays small."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        mixer = regard.create("local", dim=64, heads=4, window=32, causal=True).double()
    x = torch.randn(1, 2000, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    state, parts, most = None, [], 0
    with torch.no_grad():
        whole = mixer(x)
        for chunk in x.split(37, 1):
            y, state = mixer.stream(chunk, state)
            parts.append(y)
            most = max(most, len(state.at))
    error = (torch.cat(parts, 1) - whole).abs().max().item()
    typer.echo(f"   2,000 tokens in chunks of 37: largest difference {error:.1e}")
    typer.echo(f"   never more than {most} keys in the cache, of 2,000")
    if error > 1e-10:
        raise AssertionError("chunk by chunk differs from the whole")


def _refusal() -> None:
    try:
        regard.create("linformer", dim=64, heads=4, length=2048, causal=True)
    except regard.Unsupported as refusal:
        typer.echo(f"   Unsupported: {refusal}")
