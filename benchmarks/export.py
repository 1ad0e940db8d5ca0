"""Export every recipe: difference of torch.export and ONNX from eager, and graph breaks of
torch.compile.

    python benchmarks/export.py                 all recipes that have no result yet, some ten
                                                minutes
    python benchmarks/export.py local linear    these, anew

The small form of each recipe, causal and not, with a padding mask where it takes one, in float32.
Differences are the largest over five batches and lengths that were not traced, beside the largest
number of the output; onnxruntime runs ONNX. Graph breaks are counted at 210 tokens, where sparse
backends are tried, without gradients. Results go to benchmarks/results/export.json, row by row, and
the table into docs/export.md.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import Tensor

from regard import registry
from regard.errors import Unsupported
from regard.export.inputs import ragged_mask
from regard.export.onnx_file import import_onnxruntime, onnx_bytes, onnx_runner
from regard.export.tracing import compare, suppress_output, trace
from regard.mixer import Mixer

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/export.json", ROOT / "docs/export.md"
START, END = "<!-- table -->", "<!-- end -->"
LONG = 210
TOLERANCE = 1e-4


def example(name: str, causal: bool) -> Mixer:
    """The small form, with the same parameters each time."""
    torch.manual_seed(0)
    mixer = registry.get_recipe(name).example(causal=causal).eval()
    mixer.name = name
    return mixer


def exported(mixer: Mixer) -> dict[str, Any]:
    """The differences, or why there are none."""
    row: dict[str, Any] = {
        "lengths": None,
        "export": mixer.can.reason("export"),
        "onnx": mixer.can.reason("onnx"),
    }
    if row["export"] is not None:
        return row
    found = trace(mixer, mask=mixer.can.mask, context=False, length=None)
    graph = found.program.module(check_guards=False)
    row["lengths"] = [found.min_length, found.max_length]
    row["export"] = max(
        check.difference for check in compare(mixer, found, lambda given: graph(**given), TOLERANCE)
    )
    if row["onnx"] is None:
        checks = compare(
            mixer, found, onnx_runner(import_onnxruntime(), onnx_bytes(found)), TOLERANCE
        )
        row["onnx"] = max(check.difference for check in checks)
    return row


def breaks(mixer: Mixer, n: int, *, grad: bool = False) -> int:
    """Graph breaks in one forward."""
    n = n if mixer.length is None else min(n, mixer.length)
    x = torch.randn(2, n, mixer.dim, requires_grad=grad)
    given: dict[str, Tensor] = {"mask": ragged_mask(2, n, x.device)} if mixer.can.mask else {}
    dynamo.reset()
    with suppress_output(), torch.set_grad_enabled(grad):
        return int(dynamo.explain(mixer)(x, **given).graph_break_count)


def row(name: str, causal: bool) -> dict[str, Any]:
    """All that is known of one form of a recipe."""
    mixer = example(name, causal)
    try:
        found = exported(mixer)
    except (Unsupported, RuntimeError) as error:
        found = {"lengths": None, "export": f"FAILED: {error}", "onnx": None}
    return {"recipe": name, "causal": causal, **found, "breaks": breaks(mixer, LONG)}


# --------------------------------------------------------------------------------------- the table
def cell(value: float | str | None) -> str:
    """A difference, or a dash where there is a reason."""
    return f"{value:.0e}" if isinstance(value, float) else "–"


def lengths(found: list[int | None] | None) -> str:
    """From, to."""
    if found is None:
        return "–"
    least, most = found
    return f"{least} to {most}" if most else f"from {least}"


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each form of each recipe."""
    head = ("recipe", "form", "lengths", "torch.export", "ONNX", "graph breaks")
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    for each in rows:
        form = "causal" if each["causal"] else "all"
        cells = (
            f"`{each['recipe']}`",
            form,
            lengths(each["lengths"]),
            cell(each["export"]),
            cell(each["onnx"]),
            str(each["breaks"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def put(text: str, rows: list[dict[str, Any]]) -> str:
    """The page with the table between its markers."""
    before, rest = text.split(START, 1)
    _, after = rest.split(END, 1)
    return f"{before}{START}\n{table(rows)}\n{END}{after}"


def main() -> None:
    """Measure what is missing, and write both files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="*", help="measure these anew")
    asked = parser.parse_args().recipes
    wanted = [
        (name, causal)
        for name in registry.list_recipes()
        for causal in registry.get_recipe(name).causal_options()
    ]
    known = (
        {(r["recipe"], r["causal"]): r for r in json.loads(RESULTS.read_text())["rows"]}
        if RESULTS.exists()
        else {}
    )
    todo = [key for key in wanted if key[0] in asked or (not asked and key not in known)]
    began = time.monotonic()
    for done, key in enumerate(todo):
        known[key] = row(*key)
        rows = [known[each] for each in wanted if each in known]
        RESULTS.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
        left = (time.monotonic() - began) / (done + 1) * (len(todo) - done - 1)
        print(
            f"{done + 1}/{len(todo)}, {left / 60:.0f} min left: {json.dumps(known[key])}",
            flush=True,
        )
    rows = [known[each] for each in wanted if each in known]
    if PAGE.exists():
        PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
