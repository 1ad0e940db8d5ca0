"""Activations, the memory of a training step, and plans: formulas against counted bytes and against arithmetic."""

import inspect
from dataclasses import replace

import pytest
import torch

import regard
from regard.errors import Unsupported
from regard.measure.accelerators import TABLE, accelerator, peak
from regard.measure.cost import cost
from regard.measure.count import PeakCounter, keeping
from regard.measure.memory import STATES, count_step_bytes, step_memory
from regard.measure.model import build_on_meta, example_batch, simple_config
from regard.measure.plan import BYTES, TrainingJob, Ways, communication, plan, share, spread
from regard.measure.work import CallShape, module_cost
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
    """Fails if the predicted peak is off by more than 25 % of the bytes that were alive at once, counted storage by storage."""
    torch.manual_seed(0)
    sizes = sizes_of(name, n, layers, dim, vocab_size)
    model = build(sizes)
    counted = count_step_bytes(
        model, example_batch(sizes, n, 2), torch.optim.AdamW(model.parameters())
    )
    predicted = step_memory(build_on_meta(sizes), n, batch=2)
    assert predicted.peak == pytest.approx(counted, rel=0.25)
    assert predicted.peak >= predicted.parameters + predicted.optimizer + predicted.saved


@pytest.mark.parametrize("name", list_recipes())
def test_activations_that_autograd_keeps(name):
    """Fails if the formula for what is kept is off by more than two fifths, for any recipe at its usual sizes."""
    n, recipe = 320, get_recipe(name)
    heads = recipe.parameters["heads"].default
    given = {"dim": 64, "heads": 4 if heads is inspect.Parameter.empty else heads}
    torch.manual_seed(0)
    mixer = recipe.build(**fill_length_arguments(recipe, n, given))
    runs = []
    for _ in range(2):  # masks that all calls share are no activations: the first run has them too
        with keeping(mixer) as seen:
            runs.append((mixer(torch.randn(2, n, 64, requires_grad=True)), seen))
    (_, first), (_, second) = runs
    kept = sum(size for at, size in second.storages.items() if at not in first.storages)
    found = 4 * module_cost(mixer, CallShape(2, n, n)).saved
    assert 0.6 * found <= kept <= 1.67 * found


def test_activations_grow_as_they_should():
    """Fails if those of fused attention grow with the square of the length, or those of kept scores do not."""
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
    assert 4000 <= seen.peak < 4100
    assert 2000 <= seen.now < 2100
    assert y.numel() == 500


@pytest.mark.parametrize("optimizer", STATES)
def test_optimizers(optimizer):
    """Fails if an optimizer's numbers are not counted."""
    model = build_on_meta(sizes_of("vanilla", 64, 1, 64, 100))
    found = step_memory(model, 64, optimizer=optimizer)
    assert found.optimizer == STATES[optimizer] * found.parameters
    with pytest.raises(ValueError, match="optimizer must be one of"):
        step_memory(model, 64, optimizer="adams")


# ---------------------------------------------------------------------------------------------- plans
def job(length=2048, batch=8, **more):
    return TrainingJob(
        build_on_meta(sizes_of("vanilla", length, 4, 512, 1000, causal=True)), length, batch, **more
    )


def test_shares_of_a_device():
    """Fails if states are not cut by all ways, activations by batch, width and length, or bytes are not 16 a weight."""
    here, found = job(), cost(job().model, 2048, batch=8, width=2)
    alone = share(here, found, Ways())
    assert alone.parameters + alone.gradients + alone.optimizer == 16 * found.parameters
    assert sum(BYTES["bfloat16"]) == sum(BYTES["float32"]) == 16
    assert alone.activations == found.saved + 2 * 8 * 2048 * 1000 * 2
    cut = share(here, found, Ways(4, 2, 2))
    assert cut.total - cut.gathered == pytest.approx(alone.total / 16, rel=0.01)
    assert (
        alone.gathered == 0
        and cut.gathered == 2 * max(part.parameters for part in found.parts) * 2 // 2
    )
    both = [share(job(recompute=what), found, Ways()).activations for what in ("ffn", "layers")]
    assert alone.activations > both[0] > both[1] > 0
    assert share(job(accumulate=4), found, Ways()).activations == pytest.approx(
        alone.activations / 4, rel=0.01
    )


def test_fewest_devices_that_fit():
    """Fails if fewer devices would do, or those that are named do not hold it."""
    large = TrainingJob(
        build_on_meta(sizes_of("vanilla", 4096, 40, 5120, 32000, heads=40, causal=True)), 4096, 64
    )
    device = accelerator("a100-80")
    found = plan(large, device, heads=40)
    work_ = cost(large.model, 4096, batch=64, width=2)
    assert found.share.total <= device.memory
    fewer = [ways for ways in spread(large, 40) if ways.devices < found.share.ways.devices]
    assert fewer and all(share(large, work_, ways).total > device.memory for ways in fewer)
    again = plan(replace(large, recompute="layers"), device, heads=40)
    assert again.share.ways.devices < found.share.ways.devices


def test_seconds_of_a_step():
    """Fails if a step is not the slower of products and traffic, or tokens and days do not follow from it."""
    device, total = TABLE["H100"], 10**9
    found = plan(job(tokens=total), device, efficiency=0.5)
    work_ = cost(job().model, 2048, batch=8, width=2)
    assert found.share.ways == Ways() and found.communication == 0
    assert found.compute == pytest.approx((work_.forward + work_.backward) / (0.5 * 989e12))
    assert found.seconds == max(found.compute, found.memory)
    assert found.tokens_per_second == pytest.approx(8 * 2048 / found.seconds)
    assert found.days == pytest.approx(total / found.tokens_per_second / 86400)
    again = plan(job(recompute="layers"), device, efficiency=0.5)
    repeated = sum(part.forward for part in work_.parts if part.name.startswith("layer"))
    assert again.compute == pytest.approx(
        (work_.forward + repeated + work_.backward) / (0.5 * 989e12)
    )


def test_communication():
    """Fails if one device sends anything, or more ways send less."""
    work_ = cost(job().model, 2048, batch=8, width=2)
    sent = [
        communication(job(), work_, ways)
        for ways in (Ways(), Ways(2), Ways(8), Ways(8, 2), Ways(8, 2, 2))
    ]
    assert sent[0] == 0 and sent[1] == pytest.approx(3 * work_.parameters * 2 / 2)
    assert 0 < sent[1] < sent[2]
    assert communication(job(), work_, Ways(tensor=2)) == 4 * 4 * 8 * 2048 * 512 * 2


def test_plans_that_cannot_be():
    """Fails if an unknown device, number type or size passes, or if what fits nowhere is planned."""
    with pytest.raises(ValueError, match="no accelerator 'H10': did you mean 'H100'"):
        accelerator("H10")
    with pytest.raises(ValueError, match="dtype must be one of"):
        job(dtype="int4")
    with pytest.raises(ValueError, match="TPU-v5e has no peak for float32"):
        peak(accelerator("TPU-v5e"), "float32")
    with pytest.raises(ValueError, match="tokens must be an integer >= 1"):
        job(tokens=-1)
    with pytest.raises(ValueError, match="efficiency must be a finite number above 0"):
        plan(job(), TABLE["H100"], efficiency=0)
    huge = TrainingJob(build_on_meta(sizes_of("talking_heads", 1 << 24, 2, 1024, 100)), 1 << 24, 64)
    with pytest.raises(Unsupported, match="do not hold it"):
        plan(huge, TABLE["L4"], heads=4)
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
    here = accelerator("this machine")
    assert 1e8 < here.flops["float32"] < 1e14
    assert 1e8 < here.bandwidth < 1e13
    assert here.memory > 1e8
