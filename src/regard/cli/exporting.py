"""regard export: a recipe or a saved model as an ONNX file, checked by onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import nn

from regard.cli.output import console, print_json, user_errors
from regard.cli.recipe_arguments import parse_recipe_arguments
from regard.registry import create, get_recipe, list_recipes
from regard.show.build import default_heads, fill_length_arguments

DIM, HEADS, LENGTH = 64, 4, 512


def export_command(
    name: Annotated[str, typer.Argument(help="A recipe, or the folder of a saved model.")],
    path: Annotated[Path, typer.Argument(help="The file to write, such as out.onnx.")],
    dim: Annotated[int | None, typer.Option(help=f"Width of a token: {DIM} unless given.")] = None,
    heads: Annotated[
        int | None, typer.Option(help=f"{HEADS} unless given, or what the recipe prefers.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(help=f"The longest sequence, for recipes that ask: {LENGTH}.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Built causal.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another argument, as name=value; may be repeated."),
    ] = None,
    mask: Annotated[bool, typer.Option("--mask", help="It takes a padding mask.")] = False,
    context: Annotated[
        bool, typer.Option("--context", help="It looks at another sequence: recipes only.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the parameters of a recipe.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="One JSON object to stdout.")] = False,
) -> None:
    """Write an ONNX file for any batch and length, and compare it with PyTorch at other sizes than the traced one.

    Example: regard export bigbird bigbird.onnx --dim 64 --heads 4 --length 4096 --mask
    """
    from regard.export import to_onnx  # loads the tracer, which takes a while

    with user_errors():
        flags = {
            "dim": dim,
            "heads": heads,
            "length": length,
            "causal": causal or None,
            "set": set_,
        }
        module = _loaded(name, flags) if Path(name).is_dir() else _built(name, flags, seed)
        try:
            done = to_onnx(module, path, mask=mask, context=context)
        except RuntimeError as error:  # it is not what eager gives: no file was written
            raise ValueError(str(error)) from None
    if json:
        print_json(_as_json(name, done))
    else:
        _print(done)


def _loaded(folder: str, flags: dict[str, Any]) -> nn.Module:
    from regard.models import load

    for flag, value in flags.items():
        if value is not None:
            raise ValueError(f"{folder} says what the model is: leave --{flag} out")
    try:
        return load(folder)
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None


def _built(name: str, flags: dict[str, Any], seed: int) -> nn.Module:
    if name not in list_recipes() and ("/" in name or Path(name).exists()):
        raise ValueError(f"{name} is no folder of a saved model, and no recipe")
    recipe = get_recipe(name)
    given = {flag: flags[flag] for flag in ("dim", "heads", "causal") if flags[flag] is not None}
    told = {
        "dim": DIM,
        "heads": default_heads(recipe, HEADS),
        **given,
        **parse_recipe_arguments(recipe, flags["set"] or []),
    }
    if flags["length"] is not None and "length" not in recipe.parameters:
        raise ValueError(f"{name} takes any length: leave --length out")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return create(name, **fill_length_arguments(recipe, flags["length"] or LENGTH, told))


def _as_json(name: str, done: Any) -> dict[str, Any]:
    return {
        "name": name,
        "path": str(done.path),
        "bytes": done.bytes,
        "inputs": list(done.inputs),
        "lengths": list(done.lengths),
        "difference": done.difference,
        "checks": [check._asdict() for check in done.checks],
    }


def _print(done: Any) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for column in ("examples", "tokens", "difference to eager"):
        table.add_column(column, justify="right", no_wrap=True)
    for check in done.checks:
        table.add_row(str(check.batch), f"{check.length:,}", f"{check.difference:.1e}")
    least, most = done.lengths
    out = console()
    out.print(table)
    reach = f"from {least:,} tokens on" if most is None else f"{least:,} to {most:,} tokens"
    out.print(
        f"\n{done.path}: {done.bytes:,} bytes; inputs {', '.join(done.inputs)}; any batch, {reach}",
        soft_wrap=True,
    )
