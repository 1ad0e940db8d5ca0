"""`regard export`: write a recipe or a saved model as an ONNX file, checked with onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from regard.cli.output import console, print_json, user_errors

if TYPE_CHECKING:  # it loads torch, which takes seconds
    from torch import nn

    from regard.export import ExportedFile

DIM, HEADS, LENGTH = 64, 4, 512


def export_command(
    name: Annotated[str, typer.Argument(help="Recipe, or folder of a saved model.")],
    path: Annotated[Path, typer.Argument(help="File to write, such as out.onnx.")],
    dim: Annotated[int | None, typer.Option(help="Model width.", show_default=f"{DIM}")] = None,
    heads: Annotated[
        int | None,
        typer.Option(help="Number of heads.", show_default=f"{HEADS}, or that of the recipe"),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="Maximum length, for recipes that need one.", show_default=f"{LENGTH}"),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Build a causal mixer.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Recipe argument, as name=value. Can be repeated."),
    ] = None,
    mask: Annotated[bool, typer.Option("--mask", help="Add a padding mask input.")] = False,
    context: Annotated[
        bool, typer.Option("--context", help="Add a context input, for cross-attention of recipes.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed for the parameters of a recipe.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write an ONNX file for any batch size and length, and compare it with PyTorch at several
    sizes.

    Example: regard export bigbird bigbird.onnx --dim 64 --heads 4 --length 4096 --mask
    """
    with user_errors():
        from regard.export import to_onnx

        options = {
            "dim": dim,
            "heads": heads,
            "length": length,
            "causal": causal or None,
            "set": set_ or None,
        }
        if Path(name).is_dir():
            module = _load_model(name, options)
        else:
            module = _build_mixer(name, options, seed)
        try:
            exported = to_onnx(module, path, mask=mask, context=context)
        except RuntimeError as error:  # it differs from eager: no file was written
            raise ValueError(str(error)) from None
    if json:
        print_json(_as_json(name, exported))
    else:
        _print(exported)


def _load_model(folder: str, options: dict[str, Any]) -> nn.Module:
    from regard.models import load

    for option, value in options.items():
        if value is not None:
            raise ValueError(f"{folder} describes the whole model: remove --{option}")
    try:
        return load(folder)
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None


def _build_mixer(name: str, options: dict[str, Any], seed: int) -> nn.Module:
    import torch

    from regard.cli.recipe_arguments import parse_recipe_arguments
    from regard.registry import create, get_recipe, list_recipes
    from regard.show.build import fill_length_arguments

    if name not in list_recipes() and ("/" in name or Path(name).exists()):
        raise ValueError(f"{name} is neither the folder of a saved model nor a recipe")
    recipe = get_recipe(name)
    if options["length"] is not None and "length" not in recipe.parameters:
        raise ValueError(f"{name} has no maximum length: remove --length")
    sizes = ("dim", "heads", "causal")
    arguments = {"dim": DIM, "heads": recipe.default_heads(HEADS)}
    arguments |= {key: options[key] for key in sizes if options[key] is not None}
    arguments |= parse_recipe_arguments(recipe, options["set"] or [])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return create(name, **fill_length_arguments(recipe, options["length"] or LENGTH, arguments))


def _as_json(name: str, exported: ExportedFile) -> dict[str, Any]:
    return {
        "name": name,
        "path": str(exported.path),
        "bytes": exported.bytes,
        "inputs": list(exported.inputs),
        "lengths": list(exported.lengths),
        "max_difference": exported.max_difference,
        "checks": [check._asdict() for check in exported.checks],
    }


def _print(exported: ExportedFile) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for column in ("examples", "tokens", "difference from eager"):
        table.add_column(column, justify="right", no_wrap=True)
    for check in exported.checks:
        table.add_row(str(check.batch), f"{check.length:,}", f"{check.difference:.1e}")
    least, most = exported.lengths
    lengths = f"from {least:,} tokens" if most is None else f"{least:,} to {most:,} tokens"
    out = console()
    out.print(table)
    out.print(
        f"\n{exported.path}: {exported.bytes:,} bytes; inputs {', '.join(exported.inputs)}; "
        f"any batch size, {lengths}",
        soft_wrap=True,
    )
