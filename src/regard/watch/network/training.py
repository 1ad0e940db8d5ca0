"""Training of the networks, by the trainer of the library on tasks made of events."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from regard.models import Model, ModelConfig, ModuleSpec, build
from regard.models.model import outer_mixers
from regard.tasks.base import Task
from regard.train import TrainSettings
from regard.train.trainer import Trainer, TrainProgress
from regard.watch.network.settings import NetworkSettings

EVALUATIONS, EVALUATED = 5, 512  # of a training; examples of each

OnStep = Callable[[TrainProgress], None]
"""Called after each step, with the step, the number of steps and the loss."""


def build_network(
    task: Task, settings: NetworkSettings, *, position: str, length: int | None
) -> Model:
    """The untrained network of a task.

    Args:
        position: Positional encoding; see `regard.position`.
        length: Maximum number of tokens. None: any.

    Raises:
        Unsupported: The mixer does not fit; the message says why.
    """
    needs = task.needs
    torch.manual_seed(settings.seed)
    return build(
        ModelConfig(
            kind=needs.kind,
            input=needs.input,
            head=needs.head,
            dim=settings.dim,
            heads=settings.heads,
            layers=settings.layers,
            length=length,
            mixer=[settings.mixer],
            position=ModuleSpec(name=position),
            seed=settings.seed,
        )
    )


def train_network(
    model: Model,
    task: Task,
    settings: NetworkSettings,
    *,
    folder: Path | None = None,
    on_step: OnStep = lambda progress: None,
) -> None:
    """Train a network; it then has the weights of the best validation, and is on the CPU.

    Args:
        folder: Folder for checkpoints, from which an interrupted training resumes. None: none.
        on_step: Called after each step.
    """
    interval = max(1, settings.steps // EVALUATIONS)
    trainer = Trainer(
        model,
        task,
        TrainSettings(
            steps=settings.steps,
            batch_size=settings.batch_size,
            lr=settings.lr,
            warmup_steps=min(50, settings.steps // 4),
            max_seconds=settings.max_seconds,
            eval_every=interval,
            save_every=interval,
            eval_examples=EVALUATED,
            seed=settings.seed,
            device=settings.device,
        ),
        folder=folder,
        on_step=on_step,
    )
    trainer.run()
    with trainer.kept_weights():
        weights = {name: each.detach().cpu().clone() for name, each in model.state_dict().items()}
    model.load_state_dict(weights)
    model.cpu().eval()


def takes_mask(model: Model) -> bool:
    """Whether all mixers of a model take a padding mask."""
    return all(mixer.can.mask for mixer in outer_mixers(model))
