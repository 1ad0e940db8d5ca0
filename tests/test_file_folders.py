"""Folders of images and sounds: classes, splits, files of all kinds and broken ones."""

import json
import lzma
import struct
import wave

import numpy as np
import pytest
import torch

from real import real
from regard.tasks import create_task
from regard.tasks.base import SPLITS
from regard.tasks.sound_folder import SoundProcessor, mel_filters, read_wav, resample

image_module = pytest.importorskip("PIL.Image")


# ------------------------------------------------------------------------------------------- images
def write_images(folder, count=20, classes=("dark", "light")):
    """Noise around 60 or 190 for two classes, of different sizes."""
    rng = np.random.default_rng(0)
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            shape = (20 + i % 7, 30 - i % 5)
            pixels = rng.integers(0, 120, (*shape, 3)) + 130 * number
            path = folder / name / f"{i:03d}.png"
            image_module.fromarray(pixels.astype(np.uint8)).save(path)
    return folder


def test_images_of_different_sizes_are_fitted_and_split_by_class(tmp_path):
    task = create_task("image_folder", data=write_images(tmp_path / "a"), size=16, patch=4)
    assert sorted(task.labels) == ["dark", "light"] and sum(map(task.size, SPLITS)) == 40
    for split in SPLITS:
        assert np.bincount(task.classes_of(split)).tolist() == [task.size(split) // 2] * 2
    x = task.example("train", 0).inputs["x"]
    assert x.shape == (3, 16, 16) and task.needs.length == 16
    label = task.labels[int(task.example("train", 0).targets["labels"])]
    assert (x.mean() > 0) == (label == "light")
    scores = {n: task.metric.compute(b(range(4))) for n, b in task.baselines().items()}
    assert scores == {"constant": 0.5, "linear on pixels": 1.0}
    assert task.notes() == []


def test_all_modes_become_gray_or_colour(tmp_path):
    processor = create_task(
        "image_folder", data=write_images(tmp_path / "a"), size=8, channels=1
    ).processor
    red = np.zeros((8, 8, 4), np.uint8)
    red[..., 0] = 255  # red, but transparent: white
    image_module.fromarray(red, "RGBA").save(tmp_path / "alpha.png")
    image_module.fromarray(np.full((8, 8), 40_000, np.uint16)).save(tmp_path / "deep.png")
    image_module.fromarray(np.full((8, 8), 100, np.uint8)).convert("P").save(tmp_path / "p.png")
    found = {
        name: int(processor.read(tmp_path / name).mean())
        for name in ("alpha.png", "deep.png", "p.png")
    }
    assert found == {"alpha.png": 255, "deep.png": 155, "p.png": 100}


def test_broken_images_are_named_and_counted_or_refused(tmp_path):
    folder = write_images(tmp_path / "a")
    (folder / "dark" / "000x.png").write_bytes(b"no image")
    whole = (folder / "light" / "003.png").read_bytes()
    (folder / "light" / "003.png").write_bytes(whole[: len(whole) // 2])
    task = create_task("image_folder", data=folder, size=8)
    (note,) = task.notes()
    assert note.startswith("2 files that cannot be read were left out: ")
    assert "000x.png: it is no complete image" in note and "003.png" in note
    with pytest.raises(ValueError, match=r"000x.png: it is no complete image .*missing='error'"):
        create_task("image_folder", data=folder, missing="error")
    with pytest.raises(ValueError, match=r"000x.png: it is no complete image"):
        task.processor.encode(folder / "dark" / "000x.png")


def test_folders_named_after_splits_copies_and_unknown_classes(tmp_path):
    for split, count in (("train", 9), ("val", 2), ("test", 3)):
        write_images(tmp_path / split, count)
    task = create_task("image_folder", data=tmp_path, size=8)
    assert [task.size(split) for split in SPLITS] == [18, 4, 6]
    assert any("2 of 4 files of the valid split are also" in note for note in task.notes())
    write_images(tmp_path / "test", 1, classes=("other",))
    with pytest.raises(ValueError, match="has label 'other', which no training row has"):
        create_task("image_folder", data=tmp_path, size=8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"patch": 5}, "patch=5 does not divide size=32: use one of 1, 2, 4, 8, 16, 32"),
        ({"channels": 2}, "channels must be 1"),
        ({"data": "dark"}, "no files in sub-folders"),
        ({"data": "nowhere"}, "nowhere does not exist"),
        ({"missing": "keep"}, "missing must be one of"),
    ],
)
def test_bad_arguments_of_images(tmp_path, arguments, words):
    folder = write_images(tmp_path / "a")
    given = {"data": folder / arguments["data"]} if "data" in arguments else {"data": folder}
    with pytest.raises(ValueError, match=words):
        create_task("image_folder", **{**arguments, **given})


def test_few_images_of_many_classes_are_a_warning(tmp_path):
    write_images(tmp_path / "train", 4, classes=("a", "b", "c"))
    write_images(tmp_path / "valid", 1, classes=("a",))
    write_images(tmp_path / "test", 1, classes=("a", "b", "c"))
    notes = create_task("image_folder", data=tmp_path, size=8).notes()
    assert "The valid split has 1 row for 3 classes: its score says little." in notes


# ------------------------------------------------------------------------------------------- sounds
def write_wav(path, samples, rate=8000, width=2, channels=1):
    """Samples (n) between -1 and 1, the same in all channels."""
    scaled = np.repeat(np.asarray(samples), channels) * (2 ** (8 * width - 1) - 1)
    values = np.rint(scaled).astype(np.int64)
    if width == 1:
        content = (values + 128).astype(np.uint8).tobytes()
    elif width == 3:
        content = b"".join(struct.pack("<i", v)[:3] for v in values)
    else:
        content = values.astype(f"<i{width}").tobytes()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(content)


def tone(frequency, seconds=0.3, rate=8000):
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(int(seconds * rate)) / rate)


def write_sounds(folder, count=20):
    rng = np.random.default_rng(0)
    for name, frequency in (("low", 300), ("high", 2000)):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            samples = tone(frequency * rng.uniform(0.9, 1.1), 0.2 + 0.01 * i)
            write_wav(folder / name / f"{i:03d}.wav", samples)
    return folder


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_wav_files_of_all_widths(tmp_path, width, channels):
    samples = tone(440)
    write_wav(tmp_path / "x.wav", samples, width=width, channels=channels)
    sound = read_wav(tmp_path / "x.wav")
    assert sound.rate == 8000 and np.abs(sound.wave - samples).max() < 2 ** (2 - 8 * width)


@pytest.mark.parametrize("rate", [4000, 16_000, 11_025])
def test_resampling_keeps_a_tone(tmp_path, rate):
    write_wav(tmp_path / "x.wav", tone(440, 1.0), rate=8000)
    resampled = resample(read_wav(tmp_path / "x.wav"), rate)
    expected = tone(440, 1.0, rate)
    assert len(resampled) == rate and np.abs(resampled - expected).max() < 2e-3
    aliased = resample(read_wav(tmp_path / "x.wav")._replace(wave=tone(3000, 1.0)), 4000)
    assert np.abs(aliased).max() < 1e-6  # above half the new rate, so it is gone


def test_the_mel_band_of_a_tone_is_loudest(tmp_path):
    processor = SoundProcessor(16_000, 40, 1024)
    filters = mel_filters(40, 257, 16_000)
    for frequency in (300, 1000, 3000):
        write_wav(tmp_path / "x.wav", tone(frequency, 0.5, 16_000), rate=16_000)
        frames = processor.frames(read_wav(tmp_path / "x.wav"))
        assert frames.shape == (51, 40)
        assert frames[20].argmax() == int(filters[:, round(frequency / 16_000 * 512)].argmax())


def test_sounds_of_two_classes(tmp_path):
    task = create_task("sound_folder", data=write_sounds(tmp_path / "a"), rate=8000, mels=20)
    assert sum(map(task.size, SPLITS)) == 40 and task.needs.input.width == 20
    batch = task.batch("train", range(task.size("train")))
    assert batch.inputs["x"].shape[2] == 20 and batch.inputs["mask"] is not None
    assert task.length == int(batch.inputs["mask"].sum(1).max())
    kept = batch.inputs["x"][batch.inputs["mask"]]
    assert kept.mean(0).abs().max() < 1e-3 and (kept.std(0) - 1).abs().max() < 1e-2
    scores = {n: task.metric.compute(b(range(4))) for n, b in task.baselines().items()}
    assert scores["constant"] == 0.5
    assert scores["linear on mean and deviation of the frames"] == 1
    index = 2
    rendered = task.render(task.example("valid", index))
    path = task.files["valid"].paths[index]
    assert np.array_equal(rendered.wave, read_wav(path).wave) and rendered.rate == 8000
    encoded = task.processor.encode(path)["x"]
    assert torch.equal(encoded, task.example("valid", index).inputs["x"])
    restored = task.load_processor(json.loads(json.dumps(task.processor.to_dict())))
    assert torch.allclose(restored.encode(path)["x"], encoded)


def test_a_wav_that_is_none_is_named_and_counted_or_refused(tmp_path):
    folder = write_sounds(tmp_path / "a")
    (folder / "low" / "000x.wav").write_bytes(b"ID3 an mp3 in disguise")
    (folder / "low" / "001x.wav").write_bytes(b"")
    write_wav(folder / "high" / "000x.wav", [])
    task = create_task("sound_folder", data=folder, rate=8000, mels=20)
    (note,) = task.notes()
    assert note.startswith("3 files that cannot be read were left out: ")
    assert "000x.wav: it is no WAV file of PCM samples" in note and "it has no samples" in note
    with pytest.raises(ValueError, match=r"000x.wav: it .*missing='error'"):
        create_task("sound_folder", data=folder, missing="error")
    with pytest.raises(ValueError, match="mels=200 are too many bands"):
        create_task("sound_folder", data=folder, mels=200)
    cut = create_task("sound_folder", data=folder, rate=8000, mels=20, length=10)
    assert cut.length == 10 and cut.example("train", 0).inputs["x"].shape == (10, 20)


def test_real_digits(tmp_path):
    pytest.importorskip("sklearn")
    folder = real("fsdd") / "fsdd"
    index = np.genfromtxt(
        folder / "index.csv", delimiter=",", names=True, dtype=None, encoding="utf-8"
    )
    with lzma.open(folder / "samples_int16_8khz.npy.xz") as file:
        samples = np.load(file, allow_pickle=False)
    ends = np.cumsum(index["n_samples"])
    for row, end in list(zip(index, ends, strict=True))[::10]:
        name = tmp_path / str(row["digit"])
        name.mkdir(exist_ok=True)
        wave_ = samples[end - row["n_samples"] : end] / 2**15
        write_wav(name / f"{row['speaker']}-{row['take']}.wav", wave_)
    task = create_task("sound_folder", data=tmp_path, rate=8000, mels=20)
    assert len(task.labels) == 10 and sum(map(task.size, SPLITS)) == 300
    baseline = task.baselines()["linear on mean and deviation of the frames"]
    assert task.metric.compute(baseline(range(task.size("test")))) > 0.5  # chance is 0.1
