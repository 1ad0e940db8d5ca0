"""regard tour: a short demonstration, in seconds and without a network."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.text import Text

import regard
from regard.cli.listing import list_command
from regard.cli.output import console, echo
from regard.cli.showing import show

TOKENS, HEADS, WIDTH, WINDOW = 4096, 8, 64, 128
TIMES = 5


def tour() -> None:
    """Show the library at work: list, show, time and stream recipes, and see an error message.

    Example: regard tour
    """
    _title("All recipes", "regard list")
    list_command()
    _title("One recipe", "regard show bigbird")
    show("bigbird")
    _title(
        "Sliding window against dense attention, timed now",
        f"regard.attend(q, k, v, pattern=Band({WINDOW}, {WINDOW}))",
    )
    _measure()
    _title(
        "Streaming in chunks equals one call",
        'regard.create("local", ..., causal=True).stream(chunk, state)',
    )
    _stream()
    _title(
        "Unsupported arguments raise with a reason", 'regard.create("linformer", ..., causal=True)'
    )
    _error_message()


def _title(title: str, command: str) -> None:
    console().print(Text(f"\n== {title}", "bold"))
    echo(f"   {command}\n")


def _measure() -> None:
    """Time both in alternation, and print the fastest run of each."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, TOKENS, WIDTH, generator=generator) for _ in range(3))
    window = regard.Band(WINDOW, WINDOW)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "dense softmax (torch SDPA)": lambda: F.scaled_dot_product_attention(q, k, v),
        "sliding window (sparse)": lambda: regard.attend(q, k, v, pattern=window, backend="sparse"),
    }
    best = dict.fromkeys(calls, float("inf"))
    with torch.no_grad():
        for _ in range(TIMES):
            for name, run in calls.items():
                start = time.perf_counter()
                run()
                best[name] = min(best[name], time.perf_counter() - start)
    for name, seconds in best.items():
        echo(f"   {name:<28} {seconds * 1e3:8.1f} ms")
    dense, sparse = best.values()
    echo(f"   {dense / sparse:.1f}x as fast, with {window.density(TOKENS):.1%} of the pairs")
    echo(
        f"   forward, {TOKENS:,} tokens, {HEADS} heads of {WIDTH}, float32, "
        f"{torch.get_num_threads()} threads, "
        f"the fastest of {TIMES} in turns"
    )


def _stream() -> None:
    """Compare streaming in chunks with one call, and print the size of the cache."""
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
            most = max(most, len(state.positions))
    error = (torch.cat(parts, 1) - whole).abs().max().item()
    echo(f"   2,000 tokens in chunks of 37: largest difference {error:.1e}")
    echo(f"   never more than {most} keys in the cache, of 2,000")
    if error > 1e-10:
        raise AssertionError("streaming differs from one call")


def _error_message() -> None:
    try:
        regard.create("linformer", dim=64, heads=4, length=2048, causal=True)
    except regard.Unsupported as error:
        echo(f"   Unsupported: {error}")
