"""The map of every recipe: what kind it is, and how exact.

    python benchmarks/look_exactness.py         two minutes

For exact maps the largest |map x values - output| over the largest |output|, in float32, on 48
random tokens, bidirectional if the recipe allows it and causal. For influence maps the largest
difference from the Jacobian of torch.autograd.functional, over the largest norm, on 10 tokens; and
for a tile of 64 x 64 cells over 512 tokens, where the map is estimated by random probes, the
median relative difference from the exact norms. Results go to
benchmarks/results/look_exactness.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from regard.errors import Unsupported
from regard.inspection.influence import Influence
from regard.inspection.maps import LayerMap, layer_map
from regard.inspection.recording import record_call
from regard.mixer import Mixer
from regard.registry import get_recipe, list_recipes
from regard.show.build import build_example

RESULT = Path(__file__).parent / "results" / "look_exactness.json"
TOKENS, JACOBIAN_TOKENS, ESTIMATED_TOKENS = 48, 10, 512
CHECKED = 16  # every so many rows of cells are compared with the exact norm


def find_map(mixer: Mixer, x: torch.Tensor) -> LayerMap:
    with torch.no_grad():
        layers, _ = record_call(mixer, lambda: mixer(x))
    return layer_map(layers[0])


def jacobian_norms(mixer: Mixer, x: torch.Tensor) -> torch.Tensor:
    """‖∂y_i / ∂x_j‖ (n, n) from the whole Jacobian."""
    jacobian = torch.autograd.functional.jacobian(lambda x: mixer(x)[0], x)[:, :, 0]
    return jacobian.square().sum((1, 3)).sqrt()


def influence_errors(name: str, causal: bool) -> dict[str, float]:
    recipe = get_recipe(name)
    mixer = build_example(recipe, JACOBIAN_TOKENS, causal=causal).eval()
    x = torch.randn(1, JACOBIAN_TOKENS, mixer.dim)
    found = find_map(mixer, x).operator
    assert isinstance(found, Influence)
    wanted = jacobian_norms(mixer, x)
    exact = float((found.dense()[0] - wanted).abs().max() / wanted.max())

    mixer = build_example(recipe, ESTIMATED_TOKENS, causal=causal).eval()
    x = torch.randn(1, ESTIMATED_TOKENS, mixer.dim)
    operator = find_map(mixer, x).operator
    assert isinstance(operator, Influence)
    everything = slice(None), slice(None)
    if operator.is_exact(slice(None), (64, 64)):  # of a narrow example also at this length
        return {"jacobian_error": exact}
    estimate = operator.pool_map(*everything, (64, 64))[:, ::CHECKED]
    parts = [
        operator.pool_map(slice(row * 8, row * 8 + 8), slice(None), (1, 64))
        for row in range(0, 64, CHECKED)
    ]  # few enough rows for the exact norm
    truth = torch.cat(parts, 1)
    large = truth > 1e-3 * truth.max()
    difference = (estimate - truth).abs()[large] / truth[large]
    return {"jacobian_error": exact, "estimate_error": float(difference.median())}


def measure(name: str, causal: bool) -> dict[str, Any] | None:
    torch.manual_seed(0)
    try:
        mixer = build_example(get_recipe(name), TOKENS, causal=causal).eval()
    except (Unsupported, ValueError):
        return None
    if mixer.causal != causal:
        return None
    found = find_map(mixer, torch.randn(1, TOKENS, mixer.dim))
    row: dict[str, Any] = {
        "recipe": name,
        "causal": causal,
        "kind": found.kind,
        "error": found.error,
        "reason": found.reason,
    }
    if found.kind == "influence":
        row |= influence_errors(name, causal)
    return row


def main() -> None:
    torch.set_num_threads(1)
    rows = [
        row for name in list_recipes() for causal in (False, True) if (row := measure(name, causal))
    ]
    RESULT.write_text(json.dumps({"tokens": TOKENS, "rows": rows}, indent=1) + "\n")
    for row in rows:
        errors = [row.get(key) for key in ("error", "jacobian_error", "estimate_error")]
        shown = "  ".join("-" if each is None else f"{each:.1e}" for each in errors)
        print(f"{row['recipe']:24}{'causal' if row['causal'] else '':8}{row['kind']:10}{shown}")
    kinds = [row["kind"] for row in rows]
    print({kind: kinds.count(kind) for kind in sorted(set(kinds))})


if __name__ == "__main__":
    main()
