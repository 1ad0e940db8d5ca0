"""Suggest the current name when an option does not exist, also for options that were renamed.

Every command of the CLI uses `Command`. When you rename an option, add the old name here: it stays
an error, but the error names the new option.
"""

from __future__ import annotations

import difflib
from typing import Any

from typer.core import TyperCommand

# command -> {old option: current option}
RENAMED_OPTIONS: dict[str, dict[str, str]] = {
    "compare": {
        "--batch": "--batch-size",
        "--no-equal": "--no-match-params",
        "--on": "--executor",
        "--rate": "--lr",
    },
    "bench": {
        "--anyway": "--force",
        "--batch": "--batch-size",
        "--levels": "--scope",
        "--memory": "--memory-limit",
        "--page": "--html",
        "--ways": "--mode",
        "--width": "--head-dim",
    },
    "train": {
        "--rate": "--lr",
        "--batch": "--batch-size",
        "--hidden": "--ffn-dim",
        "--seconds": "--max-time",
    },
    "eval": {"--batch": "--batch-size", "--examples": "--max-examples"},
    "predict": {"--batch": "--batch-size"},
    "cost": {
        "--batch": "--batch-size",
        "--hidden": "--ffn-dim",
        "--vocab": "--vocab-size",
        "--accumulate": "--accumulation-steps",
    },
    "export": {"--memory": "--context"},
    "generate": {"--length": "--max-new-tokens", "--beams": "--num-beams"},
}

# old name -> current name of a setting: `regard train --set NAME=VALUE`
RENAMED_SETTINGS = {
    "accumulate": "accumulation_steps",
    "batch": "batch_size",
    "clip": "max_grad_norm",
    "decay": "weight_decay",
    "ema": "ema_decay",
    "evaluate": "eval_every",
    "examples": "eval_examples",
    "precision": "dtype",
    "rate": "lr",
    "save": "save_every",
    "seconds": "max_seconds",
    "warmup": "warmup_steps",
}


def suggest_option(command: str, option: str, known: list[str]) -> str:
    """A sentence that names the current or the most similar option; empty if nothing is similar."""
    current = RENAMED_OPTIONS.get(command, {}).get(option)
    close = [current] if current else difflib.get_close_matches(option, known, 1)
    return f" Did you mean {close[0]}?" if close else ""


class Command(TyperCommand):
    """A command that suggests an option when it is given an unknown one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse unknown long options with a suggestion before the arguments are parsed."""
        known = [
            name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)
        ]
        if not ctx.ignore_unknown_options:
            for argument in args:
                if argument == "--":
                    break
                option = argument.partition("=")[0]
                if option.startswith("--") and option not in known:
                    ctx.fail(
                        f"No such option: {option}.{suggest_option(ctx.info_name, option, known)}"
                    )
        return super().parse_args(ctx, args)
