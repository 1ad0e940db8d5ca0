"""regard bench: how fast is it on this machine, beside dense attention and beside other people's code?"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from regard.bench.cell import MODES, SCOPES, BenchCell, Contender
from regard.bench.contenders import RecipeContender, build_mixer
from regard.bench.flex import FlexContender
from regard.bench.formatting import notes
from regard.bench.plan import LENGTHS, STOPPED, BenchPlan, BenchResult
from regard.bench.schedule import run_bench, start_bench
from regard.bench.stats import LEAST
from regard.cli.bench_table import print_bench
from regard.cli.output import INTERRUPTED, console, print_json, user_errors
from regard.cli.parsing import parse_duration, parse_ints, parse_specs
from regard.cli.recipe_arguments import OPTIONS
from regard.environment import cores
from regard.errors import Unsupported, check_positive, did_you_mean
from regard.models import ModuleSpec
from regard.registry import get_recipe

NAMES = ("vanilla", "local", "bigbird", "linear")
ALL = "all"


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"Recipes: local:window=64 linear; {' '.join(NAMES)} unless named."),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Lengths: 1024,4096; else 128 to 65,536.")] = "",
    ways: Annotated[str, typer.Option(help=f"Of {', '.join(MODES)}.")] = "forward,training",
    levels: Annotated[
        str, typer.Option(help="kernel is the attention alone, layer the whole mixer.")
    ] = "kernel,layer",
    threads: Annotated[str, typer.Option(help="Numbers of threads.")] = f"1,{ALL}",
    batch: Annotated[int, typer.Option(help="Examples.")] = 1,
    heads: Annotated[int, typer.Option(help="Heads.")] = 8,
    width: Annotated[int, typer.Option(help="Width of a head.")] = 64,
    causal: Annotated[
        bool, typer.Option("--causal", help="Built causal, beside causal dense attention.")
    ] = False,
    peers: Annotated[
        bool, typer.Option("--peers", help="Beside other packages that do the same.")
    ] = False,
    flex: Annotated[
        bool,
        typer.Option(
            "--flex", help="Beside compiled FlexAttention, for patterns: forward, kernel."
        ),
    ] = False,
    budget: Annotated[str, typer.Option(help="Time for all of it.")] = "2m",
    rounds: Annotated[
        int, typer.Option(help="At least so many pairs; 0: one call each, for its memory.")
    ] = LEAST,
    memory: Annotated[
        float | None,
        typer.Option(help="GB that a call may take; 80 % of what is free unless given."),
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Measure a busy machine too; the result is flagged.")
    ] = False,
    clock: Annotated[
        str,
        typer.Option(help="wall; or processor: for one thread, on a machine that is never quiet."),
    ] = "wall",
    page: Annotated[
        Path | None, typer.Option(help="Write a page with plots to this HTML file.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object to stdout.")] = False,
) -> None:
    """Measure mechanisms in turns with dense attention: times, ratios with intervals, memory, and what the machine allows.

    Example: regard bench bigbird local:window=64 --lengths 1024,4096 --ways forward,training --budget 1m
    """
    with user_errors():
        plan = BenchPlan(
            groups=_groups(names or [], peers, flex),
            lengths=parse_ints(lengths) or LENGTHS,
            ways=_words("way", ways, MODES),
            levels=_words("level", levels, SCOPES),
            threads=_threads(threads),
            batch=batch,
            heads=heads,
            width=width,
            causal=causal,
            budget=parse_duration(budget),
            memory=_bytes(memory),
            rounds=rounds,
            clock=clock,
        )
        if names:
            _check_levels(plan)
        _check_values(plan)
        _check_page(page)
        with _output_aside():
            found = start_bench(plan, anyway=anyway)
    with _output_aside():
        stopped = _run(found, quiet=json)
    if page is not None:  # first: the reader of a pipe may be gone by now
        _write(found, page)
    with user_errors():
        if json:
            print_json(found.as_json() | {"notes": notes(found)})
        else:
            print_bench(found, console())
    if stopped:
        raise typer.Exit(INTERRUPTED)


# ---------------------------------------------------------------------------------------------- what is asked
def _groups(names: Sequence[str], peers: bool, flex: bool) -> list[list[Contender]]:
    asked = [part for word in names for part in parse_specs(word)]
    if peers and flex:
        raise ValueError(
            "--flex goes beside recipes, and --peers has packages of its own: ask for one of them"
        )
    if peers:
        from regard.bench.peers import peer_groups

        for part in asked:
            if part.arguments:
                raise ValueError(
                    f"with --peers the sizes are those of the adapters: write {part.name} alone"
                )
        return peer_groups([part.name for part in asked])
    chosen = asked or [ModuleSpec(name=name) for name in NAMES]
    for part in chosen:
        _check(part)
    once = {str(part): part for part in chosen}.values()
    return [[*map(RecipeContender, once), *(map(FlexContender, once) if flex else ())]]


def _check(part: ModuleSpec) -> None:
    """Names and arguments that exist: a wrong one would else be a row that says so at every length."""
    known = get_recipe(part.name).parameters
    for name in part.arguments:
        if name in ("dim", "heads", "causal"):
            raise ValueError(
                f"{name!r} has an option of its own: {'--heads and --width' if name == 'dim' else f'--{name}'}"
            )
        if name not in known:
            raise ValueError(
                f"{part.name} takes no argument {name!r}: {did_you_mean(name, [k for k in known if k not in OPTIONS])}"
            )


def _check_levels(plan: BenchPlan) -> None:
    """Peers are adapters for one level each: what has none at those that were asked for would be left out without a word."""
    known: dict[str, list[str]] = {}
    for group in plan.groups:
        known.setdefault(group[0].label, []).extend(
            level for level in SCOPES if all(level in each.levels for each in group)
        )
    for name, levels in known.items():
        if not set(levels) & set(plan.levels):
            raise ValueError(
                f"{name} has peers at the level {', '.join(levels)}, not at {', '.join(plan.levels)}"
            )


def _check_values(plan: BenchPlan) -> None:
    """Values of arguments that are wrong at every length, as window=-3 is, are told before anything is measured."""
    ends = {min(plan.lengths), max(plan.lengths)}
    cells = [
        replace(cell, level="layer")
        for cell in plan.cells()
        if cell.length in ends and cell.way == plan.ways[0]
    ]
    for ours in (
        each for group in plan.groups for each in group if isinstance(each, RecipeContender)
    ):
        wrong = [_refusal(ours, cell) for cell in cells]
        if wrong[0] is not None and None not in wrong:
            raise ValueError(wrong[0])


def _refusal(ours: RecipeContender, cell: BenchCell) -> str | None:
    """What is wrong with its arguments; None: nothing, or what a row will say."""
    try:
        build_mixer(ours.part, cell, device="meta")
    except Unsupported:
        return None
    except (ValueError, TypeError) as error:
        return str(error)
    except (NotImplementedError, RuntimeError):  # made of numbers that the meta device has not
        return None
    return None


def _check_page(page: Path | None) -> None:
    """Whether the page can be written, before it takes minutes to fill it."""
    if page is None:
        return
    if not page.parent.is_dir():
        raise ValueError(f"there is no folder {page.parent} for the page")
    if page.is_dir():
        raise ValueError(f"{page} is a folder, and the page is one file: {page / 'bench.html'}")
    if not os.access(page if page.exists() else page.parent, os.W_OK):
        raise ValueError(f"{page} cannot be written")


def _bytes(memory: float | None) -> int | None:
    """GB -> bytes."""
    if memory is None:
        return None
    check_positive("memory", memory)
    return max(1, int(memory * 1e9))


def _words(what: str, text: str, known: Sequence[str] | dict[str, str]) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for word in found:
        if word not in known:
            raise ValueError(f"there is no {what} {word!r}: {did_you_mean(word, known)}")
    return found


def _threads(text: str) -> tuple[int, ...]:
    words = [str(cores()) if word.strip() == ALL else word for word in text.split(",")]
    return tuple(dict.fromkeys(parse_ints(",".join(words), "threads")))


# ---------------------------------------------------------------------------------------------- what is done
@contextmanager
def _output_aside() -> Iterator[None]:
    """Packages that are imported, here or in a process of ours, may have something to say: it goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _run(found: BenchResult, *, quiet: bool) -> bool:
    """All of it, with a bar on stderr; whether it was stopped."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        whole = bar.add_task("measuring", total=1.0)
        try:
            run_bench(
                found, lambda what, share: bar.update(whole, completed=share, description=what)
            )
        except KeyboardInterrupt:
            bar.stop()
            typer.echo(f"{STOPPED}: this is what there is so far", err=True)
            return True
    return False


def _write(found: BenchResult, path: Path) -> None:
    from regard.bench.page import (
        write,  # plots take a second to import, and not every measurement is drawn
    )

    with user_errors():
        size = write(found, path)
    typer.echo(f"wrote {path} ({size / 1e6:.1f} MB)", err=True)
