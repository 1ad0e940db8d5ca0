"""regard bench: speed and memory on this machine, relative to dense attention and peers."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.device_options import DeviceOption, check_device
from regard.cli.output import INTERRUPTED, console, echo, print_json, progress_bar, user_errors
from regard.errors import Unsupported, check_positive, did_you_mean

if TYPE_CHECKING:
    from regard.bench import BenchCell, BenchPlan, BenchResult, Contender, RecipeContender

DEFAULT_RECIPES = ("vanilla", "local", "bigbird", "linear")
ALL_CORES = "all"


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Recipes: local:window=64 linear.", show_default=" ".join(DEFAULT_RECIPES)
        ),
    ] = None,
    lengths: Annotated[
        str,
        typer.Option(help="Sequence lengths, comma-separated.", show_default="128 to 65,536"),
    ] = "",
    mode: Annotated[
        str, typer.Option(help="What to time, comma-separated: forward, training, decode.")
    ] = "forward,training",
    scope: Annotated[
        str,
        typer.Option(help="kernel: the attention alone; layer: the whole mixer; comma-separated."),
    ] = "kernel,layer",
    device: DeviceOption = "auto",
    dtype: Annotated[
        str,
        typer.Option(help="dtype of inputs and weights: float32, bfloat16, float16 or float64."),
    ] = "float32",
    threads: Annotated[
        str,
        typer.Option(
            help="Thread counts, comma-separated.",
            show_default=f"1,{ALL_CORES}; {ALL_CORES} on an accelerator",
        ),
    ] = "",
    batch_size: Annotated[int, typer.Option(help="Batch size.")] = 1,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = 64,
    causal: Annotated[
        bool, typer.Option("--causal", help="Causal mixers and causal dense attention.")
    ] = False,
    peers: Annotated[
        bool, typer.Option("--peers", help="Compare with other packages for the same mechanism.")
    ] = False,
    flex: Annotated[
        bool,
        typer.Option("--flex", help="Compare with compiled FlexAttention (forward, kernel only)."),
    ] = False,
    budget: Annotated[str, typer.Option(help="Time for the whole benchmark: 90s, 3m.")] = "2m",
    rounds: Annotated[
        int, typer.Option(help="Minimum number of timed rounds. 0: one call each, for its memory.")
    ] = 5,
    memory_limit: Annotated[
        float | None,
        typer.Option(help="Memory of a call in GB.", show_default="80 % of the available memory"),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Measure even if the machine is busy (flagged).")
    ] = False,
    clock: Annotated[
        str, typer.Option(help="wall, or cpu for one thread on a machine that is never idle.")
    ] = "wall",
    html: Annotated[Path | None, typer.Option(help="Write a page with plots to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure speed and memory of mixers, interleaved with dense attention.

    The result has times, speedups with confidence intervals, peak memory, and the fraction of the
    machine's theoretical speed.

    Example: regard bench bigbird local:window=64 --lengths 1024,4096 --mode forward --budget 1m
    """
    with user_errors():
        from regard.bench import BenchPlan, schedule
        from regard.bench.cell import MODES, SCOPES
        from regard.bench.formatting import peer_notes
        from regard.bench.plan import LENGTHS
        from regard.cli.bench_table import print_bench
        from regard.cli.parsing import parse_duration, parse_ints
        from regard.device import DTYPES

        on = check_device(device, dtype, DTYPES)
        if memory_limit is not None:
            check_positive("memory_limit", memory_limit)
        plan = BenchPlan(
            groups=contender_groups(names or [], peers, flex),
            lengths=parse_ints(lengths) or LENGTHS,
            modes=parse_choices("mode", mode, MODES),
            scopes=parse_choices("scope", scope, SCOPES),
            threads=parse_threads(threads) if threads else (),
            batch=batch_size,
            heads=heads,
            head_dim=head_dim,
            causal=causal,
            budget=parse_duration(budget),
            memory_limit=None if memory_limit is None else max(1, int(memory_limit * 1e9)),
            rounds=rounds,
            clock=clock,
            device=str(on),
            dtype=dtype,
        )
        if names:
            check_scopes(plan)
        check_arguments(plan)
        check_writable(html)
        with stdout_to_stderr():
            result = schedule.start_bench(plan, force=force)
    with stdout_to_stderr():
        completed = run_with_progress(result, quiet=json)
    if html is not None:  # first: the reader of a pipe may be gone by now
        from regard.bench.page import write_page

        with user_errors():
            size = write_page(result, html)
        echo(f"Wrote {html} ({size / 1e6:.1f} MB)", err=True)
    with user_errors():
        if json:
            print_json(result.as_json() | {"notes": peer_notes(result)})
        else:
            print_bench(result, console())
    if not completed:
        raise typer.Exit(INTERRUPTED)


def contender_groups(names: Sequence[str], peers: bool, flex: bool) -> list[list[Contender]]:
    """Return the groups of contenders that the options ask for."""
    from regard.bench import RecipeContender
    from regard.bench.flex import FlexContender
    from regard.cli.parsing import parse_specs

    specs = [spec for name in names for spec in parse_specs(name)]
    if peers and flex:
        raise ValueError("--flex compares recipes and --peers has its own: give one of them")
    if peers:
        from regard.bench.peers import peer_groups

        for spec in specs:
            if spec.arguments:
                raise ValueError(f"--peers sets the arguments of recipes: write {spec.name} alone")
        return peer_groups([spec.name for spec in specs])
    specs = specs or parse_specs(",".join(DEFAULT_RECIPES))
    for spec in specs:
        check_argument_names(spec.name, spec.arguments)
    unique = {str(spec): spec for spec in specs}.values()
    return [[*map(RecipeContender, unique), *(map(FlexContender, unique) if flex else ())]]


def check_argument_names(recipe: str, arguments: Collection[str]) -> None:
    """Raise ValueError for an unknown recipe or argument, which would fail at every length."""
    from regard.cli.recipe_arguments import OPTIONS
    from regard.registry import get_recipe

    known = get_recipe(recipe).parameters
    for name in arguments:
        if name in ("dim", "heads", "causal"):
            option = "--heads and --head-dim" if name == "dim" else f"--{name}"
            raise ValueError(f"Set {name!r} with {option}, not in the recipe.")
        if name not in known:
            hint = did_you_mean(name, [each for each in known if each not in OPTIONS])
            raise ValueError(f"{recipe} has no argument {name!r}: {hint}")


def check_scopes(plan: BenchPlan) -> None:
    """Raise ValueError for a recipe whose peers have none of the scopes of the plan."""
    from regard.bench.cell import SCOPES

    known: dict[str, list[str]] = {}
    for group in plan.groups:
        scopes = [scope for scope in SCOPES if all(scope in each.scopes for each in group)]
        known.setdefault(group[0].label, []).extend(scopes)
    for name, scopes in known.items():
        if not set(scopes) & set(plan.scopes):
            raise ValueError(
                f"The peers of {name} are measured with --scope {', '.join(scopes)}, not "
                f"{', '.join(plan.scopes)}"
            )


def check_arguments(plan: BenchPlan) -> None:
    """Raise ValueError for arguments that are wrong at every length, such as window=-3."""
    from regard.bench import RecipeContender

    ends = {min(plan.lengths), max(plan.lengths)}
    cells = [
        replace(cell, scope="layer")
        for cell in plan.cells()
        if cell.length in ends and cell.mode == plan.modes[0]
    ]
    for group in plan.groups:
        for contender in group:
            if isinstance(contender, RecipeContender):
                errors = [argument_error(contender, cell) for cell in cells]
                if errors[0] is not None and None not in errors:
                    raise ValueError(errors[0])


def argument_error(contender: RecipeContender, cell: BenchCell) -> str | None:
    """Return what is wrong with the arguments; None: nothing, or what the row will say."""
    from regard.bench.contenders import build_mixer

    try:
        build_mixer(contender.spec, cell, device="meta")
    except (Unsupported, NotImplementedError, RuntimeError):
        return None  # a few recipes cannot be built on the meta device
    except (ValueError, TypeError) as error:
        return str(error)
    return None


def check_writable(path: Path | None) -> None:
    """Raise ValueError if the page cannot be written, before measuring for minutes."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ValueError(f"There is no folder {path.parent} for the page.")
    if path.is_dir():
        raise ValueError(f"--html {path} is a folder: give a file such as {path / 'bench.html'}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{path} is not writable.")


def parse_choices(name: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    """Parse comma-separated words that must be known."""
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for word in words:
        if word not in known:
            raise ValueError(f"Unknown {name} {word!r}: {did_you_mean(word, known)}")
    return words


def parse_threads(text: str) -> tuple[int, ...]:
    """Parse comma-separated thread counts; "all" is the number of cores."""
    from regard.cli.parsing import parse_ints
    from regard.environment import cores

    words = [str(cores()) if word.strip() == ALL_CORES else word for word in text.split(",")]
    return tuple(dict.fromkeys(parse_ints(",".join(words), "threads")))


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what packages print, here or in child processes, to stderr: stdout is for the result."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def run_with_progress(result: BenchResult, *, quiet: bool) -> bool:
    """Run the benchmark with a progress bar; False if it was interrupted."""
    from regard.bench import run_bench

    with progress_bar(visible=not quiet) as bar:
        task = bar.add_task("measuring", total=1.0)
        try:
            run_bench(
                result,
                lambda text, fraction: bar.update(task, completed=fraction, description=text),
            )
        except KeyboardInterrupt:
            bar.stop()
            echo("Interrupted: these are the results so far.", err=True)
            return False
    return True
