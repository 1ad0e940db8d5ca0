"""Activations, the memory of a training step, and plans: formulas against counted bytes and against
arithmetic.
"""

import inspect
from dataclasses import replace

import pytest
import torch

import regard
from regard.errors import Unsupported
from regard.measure.accelerators import ACCELERATORS, find_accelerator
from regard.measure.cost import cost
from regard.measure.count import PeakCounter, record_saved_activations
from regard.measure.memory import OPTIMIZER_STATES, count_step_bytes, step_memory
from regard.measure.model import build_on_meta, example_batch, simple_config
from regard.measure.module_cost import CallShape, module_cost
from regard.measure.plan import (
    BYTES,
    Parallelism,
    TrainingJob,
    communication_bytes,
    device_memory,
    parallelisms,
    plan,
)
from regard.models import build
from regard.registry import get_recipe, list_recipes
from regard.show.build import fill_length_arguments

MODELS = [
    ("vanilla", 512, 4, 256, 1000),
    ("vanilla", 2048, 2, 128, 500),
    ("vanilla", 512, 1, 512, 8000),
    ("local", 1024, 2, 128, 500),
    ("local", 4096, 1, 64, 100),
    ("linear", 1024, 2, 128, 500),
    ("linformer", 1024, 2, 128, 500),
    ("fnet", 2048, 2, 128, 500),
    ("performer", 1024, 2, 128, 500),
    ("talking_heads", 512, 2, 128, 500),
    ("gmlp", 512, 2, 128, 500),
    ("synthesizer_dense", 512, 2, 128, 500),
    ("bigbird", 1024, 2, 128, 500),
    ("nystrom", 1024, 2, 128, 500),
]


def sizes_of(name, n, layers, dim, vocab_size, **more):
    recipe = get_recipe(name)
    heads = recipe.parameters["heads"].default
    given = {"heads": 4 if heads is inspect.Parameter.empty else heads, **more}
    return simple_config(
        recipe,
        fill_length_arguments(recipe, n, given),
        dim=dim,
        layers=layers,
        vocab_size=vocab_size,
    )


@pytest.mark.parametrize(("name", "n", "layers", "dim", "vocab_size"), MODELS)
def test_peak_of_a_training_step(name, n, layers, dim, vocab_size):
    """Fails if the predicted peak is off by more than 25 % of the bytes that were alive at once,
    counted storage by storage.
    """
    torch.manual_seed(0)
    sizes = sizes_of(name, n, layers, dim, vocab_size)
    model = build(sizes)
    counted = count_step_bytes(
        model, example_batch(sizes, n, 2), torch.optim.AdamW(model.parameters())
    )
    predicted = step_memory(build_on_meta(sizes), n, batch=2)
    assert predicted.peak_bytes == pytest.approx(counted, rel=0.25)
    assert predicted.peak_bytes >= (
        predicted.parameter_bytes + predicted.optimizer_bytes + predicted.activation_bytes
    )


@pytest.mark.parametrize("name", list_recipes())
def test_activations_that_autograd_keeps(name):
    """Fails if the formula for what is kept is off by more than two fifths, for any recipe at its
    usual sizes.
    """
    n, recipe = 320, get_recipe(name)
    heads = recipe.parameters["heads"].default
    given = {"dim": 64, "heads": 4 if heads is inspect.Parameter.empty else heads}
    torch.manual_seed(0)
    mixer = recipe.build(**fill_length_arguments(recipe, n, given))
    runs = []
    for _ in range(2):  # masks that all calls share are no activations: the first run has them too
        with record_saved_activations(mixer) as seen:
            runs.append((mixer(torch.randn(2, n, 64, requires_grad=True)), seen))
    (_, first), (_, second) = runs
    kept = sum(size for at, size in second.storages.items() if at not in first.storages)
    found = 4 * module_cost(mixer, CallShape(2, n, n)).saved
    assert 0.6 * found <= kept <= 1.67 * found


def test_activations_grow_as_they_should():
    """Fails if those of fused attention grow with the square of the length, or those of kept scores
    do not.
    """
    plain, scored = (regard.create(name, dim=32, heads=2) for name in ("vanilla", "talking_heads"))
    ratios = [
        module_cost(mixer, CallShape(1, 4096, 4096)).saved
        / module_cost(mixer, CallShape(1, 1024, 1024)).saved
        for mixer in (plain, scored)
    ]
    assert ratios[0] == pytest.approx(4, rel=0.01)
    assert ratios[1] > 12


def test_counter_sees_what_lives_and_dies():
    """Fails if a tensor that died still counts, or a view counts twice."""
    with PeakCounter() as seen:
        x = torch.zeros(1000)
        assert x.view(10, 100).sum() == 0
        del x
        y = torch.zeros(500)
    assert 4000 <= seen.peak_bytes < 4100
    assert 2000 <= seen.live_bytes < 2100
    assert y.numel() == 500


@pytest.mark.parametrize("optimizer", OPTIMIZER_STATES)
def test_optimizers(optimizer):
    """Fails if an optimizer's numbers are not counted."""
    model = build_on_meta(sizes_of("vanilla", 64, 1, 64, 100))
    found = step_memory(model, 64, optimizer=optimizer)
    assert found.optimizer_bytes == OPTIMIZER_STATES[optimizer] * found.parameter_bytes
    with pytest.raises(ValueError, match="optimizer must be one of"):
        step_memory(model, 64, optimizer="adams")


# -------------------------------------------------------------------------------------------- plans
def job(length=2048, batch=8, **more):
    return TrainingJob(
        build_on_meta(sizes_of("vanilla", length, 4, 512, 1000, causal=True)), length, batch, **more
    )


def test_memory_of_a_device():
    """Fails if states are not sharded over all devices, activations not split by batch, width and
    length, or a weight does not take 16 bytes.
    """
    total = job().cost
    assert total == cost(job().model, 2048, batch=8, itemsize=2)
    alone = device_memory(job(), Parallelism())
    assert alone.parameters + alone.gradients + alone.optimizer == 16 * total.parameters
    assert sum(BYTES["bfloat16"]) == sum(BYTES["float32"]) == 16
    assert alone.activations == total.activation_bytes + 2 * 8 * 2048 * 1000 * 2
    split = device_memory(job(), Parallelism(4, 2, 2))
    assert split.total - split.gathered == pytest.approx(alone.total / 16, rel=0.01)
    assert alone.gathered == 0
    assert split.gathered == 2 * max(part.parameters for part in total.parts) * 2 // 2
    ffn, layers = (
        device_memory(job(recompute=what), Parallelism()).activations for what in ("ffn", "layers")
    )
    assert alone.activations > ffn > layers > 0
    accumulated = device_memory(job(accumulate=4), Parallelism()).activations
    assert accumulated == pytest.approx(alone.activations / 4, rel=0.01)


def test_fewest_devices_that_fit():
    """Fails if fewer devices would be enough, or the plan does not fit."""
    config = sizes_of("vanilla", 4096, 40, 5120, 32000, heads=40, causal=True)
    large = TrainingJob(build_on_meta(config), 4096, 64)
    device = find_accelerator("a100-80")
    found = plan(large, device, heads=40)
    assert found.memory.total <= device.memory
    devices = found.memory.parallelism.devices
    fewer = [each for each in parallelisms(large, 40) if each.devices < devices]
    assert fewer and all(device_memory(large, each).total > device.memory for each in fewer)
    again = plan(replace(large, recompute="layers"), device, heads=40)
    assert again.memory.parallelism.devices < devices


def test_seconds_of_a_step():
    """Fails if a step is not the slower of compute and memory traffic, or tokens and days do not
    follow from it.
    """
    device, tokens = ACCELERATORS["H100"], 10**9
    found = plan(job(tokens=tokens), device, efficiency=0.5)
    total = job().cost
    flops = total.forward_flops + total.backward_flops
    assert found.memory.parallelism == Parallelism() and found.communication_seconds == 0
    assert found.compute_seconds == pytest.approx(flops / (0.5 * 989e12))
    assert found.step_seconds == max(found.compute_seconds, found.memory_seconds)
    assert found.tokens_per_second == pytest.approx(8 * 2048 / found.step_seconds)
    assert found.days == pytest.approx(tokens / found.tokens_per_second / 86400)
    again = plan(job(recompute="layers"), device, efficiency=0.5)
    repeated = sum(part.forward_flops for part in total.parts if part.name.startswith("layer"))
    assert again.compute_seconds == pytest.approx((flops + repeated) / (0.5 * 989e12))


def test_communication():
    """Fails if one device sends anything, or more devices send less."""
    axes = ((1, 1, 1), (2, 1, 1), (8, 1, 1), (8, 2, 1), (8, 2, 2))
    sent = [communication_bytes(job(), Parallelism(*each)) for each in axes]
    assert sent[0] == 0 and sent[1] == pytest.approx(3 * job().cost.parameters * 2 / 2)
    assert 0 < sent[1] < sent[2]
    assert communication_bytes(job(), Parallelism(tensor=2)) == 4 * 4 * 8 * 2048 * 512 * 2


def test_plans_that_are_refused():
    """Fails if an unknown device, dtype or size passes, or if what fits nowhere is planned."""
    with pytest.raises(ValueError, match="no accelerator 'H10': did you mean 'H100'"):
        find_accelerator("H10")
    with pytest.raises(ValueError, match="dtype must be one of"):
        job(dtype="int4")
    with pytest.raises(ValueError, match="TPU-v5e has no peak for float32"):
        find_accelerator("TPU-v5e").peak("float32")
    with pytest.raises(ValueError, match="tokens must be an integer >= 1"):
        job(tokens=-1)
    with pytest.raises(ValueError, match="efficiency must be a finite number above 0"):
        plan(job(), ACCELERATORS["H100"], efficiency=0)
    huge = TrainingJob(build_on_meta(sizes_of("talking_heads", 1 << 24, 2, 1024, 100)), 1 << 24, 64)
    with pytest.raises(Unsupported, match="does not fit on 131,072 L4 devices"):
        plan(huge, ACCELERATORS["L4"], heads=4)
    with pytest.raises(ValueError, match="layers: Input should be greater"):
        sizes_of("vanilla", 64, 0, 64, 100)
    with pytest.raises(ValueError, match="dim: Input should be less"):
        sizes_of("vanilla", 64, 1, 1 << 30, 100)
    with pytest.raises(ValueError, match="accumulate must be at most the batch, 8, not 9"):
        job(accumulate=9)
    with pytest.raises(ValueError, match="recompute must be one of"):
        job(recompute="all")


def test_this_machine():
    """Fails if the machine at hand is not measured, or its numbers make no sense."""
    here = find_accelerator("this machine")
    assert 1e8 < here.flops["float32"] < 1e14
    assert 1e8 < here.bandwidth < 1e13
    assert here.memory > 1e8
