"""Tokens per second with a state, beside what recomputing the whole for every token gives.

    python benchmarks/generation.py                       some minutes on a free core
    python benchmarks/generation.py --prompts 512 --times 1

A small model of bytes, 4 layers 256 wide, random weights, one thread, float32, one example, greedy.
"state" goes on from the state of the model; "whole" is the same model, and the same `generate`,
with a state that is nothing but the tokens so far. The time of the prompt, up to the first new
token, is told apart from that of the tokens after it. The two take turns, and the median of each is
kept. Results go to benchmarks/results/generation.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import regard
from regard.block import Block
from regard.ffn import MLP
from regard.models import DecodingStep, stream_tokens
from regard.stack import SequentialStack
from regard.state import State, state_bytes

RESULT = Path(__file__).parent / "results" / "generation.json"
LAYERS, WIDTH, HEADS, VOCAB = 4, 256, 4, 256
NEW = {"state": 65, "whole": 5}  # tokens; the first belongs to the prompt
MECHANISMS = {"vanilla": {}, "local": {"window": 128}, "linear": {}}


class Bytes(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        mixers = [
            regard.create(name, dim=WIDTH, heads=HEADS, causal=True, **MECHANISMS[name])
            for _ in range(LAYERS)
        ]
        self.layers = SequentialStack([Block(mixer, MLP(WIDTH)) for mixer in mixers])
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.held: State = None

    def with_state(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """The next tokens, from the state."""
        y, self.held = self.layers.stream(self.embed(tokens), state)
        return self.head(y[:, -1:]), self.held

    def whole(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """All tokens again."""
        self.held = tokens if state is None else torch.cat((state, tokens), 1)
        return self.head(self.layers(self.embed(self.held))[:, -1:]), self.held


def timed(step: DecodingStep, prompt: list[int], new: int) -> tuple[float, float, list[int]]:
    """Seconds for the prompt, new tokens per second after it, and the tokens."""
    begin = time.perf_counter()
    pieces = stream_tokens(step, [prompt], max_new_tokens=new)
    tokens = [next(pieces).token]
    first = time.perf_counter()
    tokens += [piece.token for piece in pieces]
    return first - begin, (new - 1) / (time.perf_counter() - first), tokens


def measure(name: str, length: int, times: int) -> dict:
    """One mechanism at one length of the prompt."""
    model = Bytes(name).eval()
    prompt = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    steps: dict[str, DecodingStep] = {"state": model.with_state, "whole": model.whole}
    found: dict[str, list] = {way: [] for way in steps}
    row: dict = {"mechanism": name, **MECHANISMS[name], "prompt": length}
    for _ in range(times):
        for way, step in steps.items():
            found[way].append(timed(step, prompt, NEW[way]))
            row[f"{way}, MB held"] = state_bytes(model.held) / 1e6
    for way, runs in found.items():
        row[f"{way}, prompt s"] = statistics.median(run[0] for run in runs)
        row[f"{way}, tokens per s"] = statistics.median(run[1] for run in runs)
    row["times as fast"] = row["state, tokens per s"] / row["whole, tokens per s"]
    row["same tokens"] = found["state"][0][2][: NEW["whole"]] == found["whole"][0][2]
    return row


def main() -> None:
    """Measure, write and show."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument(
        "--prompts", type=int, nargs="+", default=[512, 4096], help="lengths of the prompt"
    )
    asked.add_argument("--times", type=int, default=3, help="turns")
    options = asked.parse_args()
    torch.set_num_threads(1)
    rows = [
        measure(name, length, options.times) for length in options.prompts for name in MECHANISMS
    ]
    report = {
        "threads": 1,
        "layers": LAYERS,
        "width": WIDTH,
        "heads": HEADS,
        "vocabulary": VOCAB,
        "new tokens": NEW,
        "times": options.times,
        "load of the machine": os.getloadavg()[0],
        "rows": rows,
    }
    RESULT.write_text(json.dumps(report, indent=2) + "\n")
    show(rows)


def show(rows: list[dict]) -> None:
    """A line for each mechanism and length."""
    print(
        f"{'':10} {'prompt':>6} {'tokens/s: state':>16} {'whole':>8} {'times':>7} "
        f"{'MB held':>9} {'same':>5}"
    )
    for row in rows:
        speeds = f"{row['state, tokens per s']:16.1f} {row['whole, tokens per s']:8.2f}"
        speeds += f" {row['times as fast']:7.1f}"
        print(
            f"{row['mechanism']:10} {row['prompt']:6} {speeds} "
            f"{row['state, MB held']:9.2f} {row['same tokens']!s:>5}"
        )


if __name__ == "__main__":
    main()
