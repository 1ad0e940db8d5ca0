"""Time to open a view and size of its page at 128 to 16,384 tokens, with bertviz beside.

    pip install bertviz                      # needs nothing that changes torch
    python benchmarks/look_time.py           a few minutes

A decoder of Regard (2 layers, 4 heads, width 64, softmax attention, then `linear`) and a GPT-2 of
the same size in transformers, with random weights. CPU seconds from the call to the written page;
for bertviz, which needs eager attention, of the model call with maps and of its page
(`head_view(html_action="return")`). The largest memory of the process is that after each length.
Results go to benchmarks/results/look_time.json.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

RESULT = Path(__file__).parent / "results" / "look_time.json"
LENGTHS = (128, 1024, 4096, 16_384)
NUMBER_BYTES = 28  # of a weight in a page of bertviz, measured at 1,024 tokens
BERTVIZ_BYTES = 1e9  # of its page; a larger one is not tried
SIZE = {"layers": 2, "dim": 64, "heads": 4}


def open_view(mixer: str, n: int) -> dict[str, Any]:
    """CPU seconds, bytes of the page, and peak memory of a view of a Regard model."""
    import regard
    from regard.models import build, gpt

    torch.manual_seed(0)
    config = gpt(SIZE["layers"], SIZE["dim"], SIZE["heads"], vocab_size=256, length=n, mixer=mixer)
    model = build(config).eval()
    tokens = torch.randint(1, 256, (1, n))
    return measure(lambda path: regard.look(model, tokens).save(path))


def open_transformers(n: int) -> dict[str, Any]:
    """The same for a GPT-2 of transformers with fused attention."""
    import regard

    model = small_gpt2(n, "sdpa")
    tokens = torch.randint(1, 256, (1, n))
    return measure(lambda path: regard.look(model, tokens).save(path))


def open_bertviz(n: int) -> dict[str, Any]:
    """The same for the head view of bertviz."""
    from bertviz import head_view

    model = small_gpt2(n, "eager")
    tokens = torch.randint(1, 256, (1, n))
    numbers = SIZE["layers"] * SIZE["heads"] * n * n
    if numbers * NUMBER_BYTES > BERTVIZ_BYTES:
        return {"not_tried": f"a page of about {numbers * NUMBER_BYTES / 1e9:.1f} GB"}

    def write(path: Path) -> None:
        with torch.no_grad():
            attentions = model(tokens, output_attentions=True).attentions
        texts = [str(token) for token in tokens[0].tolist()]
        page = head_view(attentions, texts, html_action="return")
        path.write_text(page.data, encoding="utf-8")

    return measure(write)


def small_gpt2(n: int, attention: str) -> Any:
    import transformers

    config = transformers.GPT2Config(
        n_layer=SIZE["layers"],
        n_embd=SIZE["dim"],
        n_head=SIZE["heads"],
        vocab_size=256,
        n_positions=n,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).eval()


def measure(write: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path, start = Path(folder) / "page.html", time.process_time()
        write(path)
        return {
            "cpu_seconds": time.process_time() - start,
            "bytes": path.stat().st_size,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


CASES = {
    "regard, softmax": lambda n: open_view("vanilla", n),
    "regard, linear": lambda n: open_view("linear", n),
    "regard, GPT-2 of transformers": open_transformers,
    "bertviz, GPT-2 of transformers": open_bertviz,
}


def main() -> None:
    if len(sys.argv) == 3:  # one case, in a process of its own
        torch.set_num_threads(1)
        print(json.dumps(CASES[sys.argv[1]](int(sys.argv[2]))))
        return
    rows = []
    for n in LENGTHS:
        for name in CASES:
            if name.startswith("bertviz") and importlib.util.find_spec("bertviz") is None:
                continue
            command = [sys.executable, __file__, name, str(n)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = done.stdout.splitlines()
            found = (
                json.loads(lines[-1])
                if lines and not done.returncode
                else {"failed": (done.stderr.strip().splitlines() or ["killed"])[-1]}
            )
            rows.append({"what": name, "tokens": n, **found})
            print(rows[-1], flush=True)
            RESULT.write_text(json.dumps({"size": SIZE, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
