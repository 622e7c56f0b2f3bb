"""`fallow predict`: files go through exactly what the run's own images went through."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import few_digits
from PIL import Image

import fallow
from fallow.export import predict as predicting
from fallow.export.inputs import Inputs
from fallow.export.predict import predict
from fallow.runs import Result, load_source

KEYS = {
    "method": "fedavg", "labels": "clients", "label_ratio": 0.5, "clients": 2, "rounds": 2, "batch": 8, "steps": 4, "lr": 0.1,
    "device": "cpu", "slots": 1, "defaults": "paper",
}  # fmt: skip


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Digits as files of several modes and sizes, by class, 120 to train on and 60 to test with."""
    source, rng = few_digits(), np.random.default_rng(0)
    for part, split, count in (("train", source.train, 120), ("test", source.test, 60)):
        for number in range(count):
            pixels = split.images[number, 0].numpy()
            image, name = Image.fromarray(pixels), f"{number:03d}.png"
            if number % 5 == 1:
                image = Image.merge("RGBA", [image, image, Image.fromarray(255 - pixels), Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8))])
            elif number % 5 == 2:
                image = image.convert("P")
            elif number % 5 == 3:
                image = image.convert("RGB").resize((11, 9))
            elif number % 5 == 4:
                image, name = image.convert("RGB"), f"{number:03d}.jpg"
            folder = tmp_path / "photos" / part / f"digit-{split.labels[number]}"
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / name)
    return tmp_path / "photos"


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def run(photos: Path, **keys: Any) -> Result:
    return fallow.run(out=photos.parent, name="run", data=f"folder:{photos}", **KEYS | keys)


@pytest.mark.parametrize("image", [
    {}, {"size": 12}, {"size": 6, "fit": "resize"}, {"channels": 1}, {"size": 12, "channels": 1, "normalise": "none"},
], ids=str)  # fmt: skip
def test_files_are_read_as_in_the_run(image: dict[str, Any], photos: Path) -> None:
    result = run(photos, image=image, rounds=1, steps=1)
    inputs, source = Inputs.of(result), load_source(result.config)
    files = sorted((photos / "test").rglob("*.*"))
    assert len(files) == 60
    assert torch.equal(torch.stack([inputs.read(f) for f in files]), source.test.images)
    assert inputs.shape == tuple(source.test.images.shape[1:])


@pytest.mark.parametrize("keys", [{"norm": "gn"}, {"norm": "bn"}, {"norm": "bn-batch", "eval_batch": 25}], ids=str)
def test_labels_are_those_of_the_test(keys: dict[str, Any], photos: Path, fallow_cli: Any) -> None:
    """The share of right labels in the CSV is the accuracy that the run found, whatever batch norm does."""
    result = run(photos, **keys)
    told = fallow_cli("predict", str(result.path), str(photos / "test"), "--probabilities")
    assert told.code == 0 and told.out.endswith("labelled 60 images: predictions.csv\n")
    assert ("depend on which images share a batch" in told.out) == (keys["norm"] == "bn-batch")
    found = rows(Path("predictions.csv"))
    assert [r["file"] for r in found] == sorted(f.relative_to(photos / "test").as_posix() for f in (photos / "test").rglob("*.*"))
    right = np.mean([r["file"].split("/")[0] == r["label"] for r in found])
    assert right == pytest.approx(result.accuracy)
    for r in found:
        p = {k.removeprefix("p_"): float(v) for k, v in r.items() if k.startswith("p_")}
        assert sorted(p) == [f"digit-{i}" for i in range(10)] and sum(p.values()) == pytest.approx(1, abs=1e-4)
        assert p[r["label"]] == float(r["confidence"]) == max(p.values()) and r["error"] == ""


def test_what_cannot_be_read_is_listed_and_left_out(photos: Path, fallow_cli: Any) -> None:
    result, bad = run(photos), photos / "test" / "bad"
    bad.mkdir()
    whole = next((photos / "test").rglob("*.jpg")).read_bytes()
    (bad / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (bad / "empty.png").write_bytes(b"")
    (bad / "text.PNG").write_text("no image")
    (bad / "gone.png").symlink_to(bad / "nowhere.png")
    Image.fromarray(np.zeros((8, 8), np.float32)).save(bad / "real.tif")
    (bad / "notes.txt").write_text("not looked at")
    (bad / ".hidden.png").write_text("nor this")
    told = fallow_cli("predict", str(result.path), str(photos / "test"), "-o", "out.csv", "--batch", "7")
    assert told.code == 0 and "labelled 60 images: out.csv" in told.out
    assert "5 of 65 files could not be read; the column error says why (bad/cut.jpg is the first)" in told.out
    found = {r["file"]: r for r in rows(Path("out.csv"))}
    assert len(found) == 65
    errors = {name: r["error"] for name, r in found.items() if r["error"]}
    assert sorted(errors) == [f"bad/{n}" for n in ("cut.jpg", "empty.png", "gone.png", "real.tif", "text.PNG")]
    assert all(not found[name]["label"] and not found[name]["confidence"] for name in errors)
    assert "No such file" in errors["bad/gone.png"] and "real numbers" in errors["bad/real.tif"]
    told = fallow_cli("predict", str(result.path), str(bad), "-o", "bad.csv")
    assert told.sentence == f"none of the 5 images below {bad} can be read; see the column error of bad.csv."


def test_any_number_of_cores_gives_the_same_file(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under batch statistics, where an image's label depends on its batch, and past files that cannot be read."""
    result = run(photos, norm="bn-batch")
    (photos / "test" / "digit-0" / "000.png").write_text("no image")
    texts = set()
    for cores in (1, 2, 5):
        monkeypatch.setattr(predicting, "cores", lambda: cores)
        texts.add(predict(result.path, photos / "test", photos.parent / "p.csv", batch=9).path.read_text())
    assert len(texts) == 1


def test_few_images_are_in_memory(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, read = run(photos), []
    monkeypatch.setattr(predicting, "cores", lambda: 1)
    original = Inputs.read
    monkeypatch.setattr(Inputs, "read", lambda self, path: (read.append(path), original(self, path))[1])
    predictor = predicting.Predictor(result, batch=4)
    files = sorted((photos / "test").rglob("*.*"))
    ahead = [len(read) - done for done, _ in enumerate(predicting._rows(predictor, files, photos, False, lambda *_: None))]
    assert len(ahead) == 60 == len(read) and max(ahead) <= 8  # two chunks of four


def test_mistakes(photos: Path, fallow_cli: Any) -> None:
    path, empty = str(run(photos).path), photos.parent / "empty"
    empty.mkdir()
    assert fallow_cli("predict", path, "nowhere").sentence == "there is no folder nowhere; give the path of a folder of images."
    assert fallow_cli("predict", path, str(empty)).sentence == f"{empty} holds no images; put PNG, JPEG or other image files there, in folders or not."
    assert fallow_cli("predict", path, str(photos), "-o", "no/p.csv").sentence.startswith("no/p.csv cannot be written (No such file or directory)")
    assert fallow_cli("predict", path, str(photos), "-o", str(empty)).sentence == f"{empty} is a folder, not a file; name a file with -o."
    assert fallow_cli("predict", path, str(photos), "--batch", "0").sentence == "--batch 0 is not a count of images; give 1 or more."
    assert fallow_cli("predict", path, str(photos), "--device", "abacus").sentence == "device='abacus' cannot be used; use cpu, cuda, cuda:N or auto."
    assert not list(Path().glob(".*.part"))


def test_images_that_are_not_square(photos: Path, fallow_cli: Any) -> None:
    """A run says so before it begins; brought to a square, it labels other such images."""
    for part in ("train", "test"):
        for number, name in enumerate("ab" * 4):
            folder = photos.parent / "wide" / part / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (12, 8), "white" if name == "a" else "black").save(folder / f"{number}.png")
    words = [f"{k}={v}" for k, v in KEYS.items()]
    told = fallow_cli("run", "data=folder:wide", *words, "defaults=paper")
    assert told.sentence == "the images of folder:wide are 8x12, not square; set image.size, with image.fit=crop, resize or pad."
    assert not Path("runs").exists() or not list(Path("runs").iterdir())
    assert fallow_cli("run", "data=folder:wide", *words, "image.size=8", "image.fit=resize", "--name", "x").code == 0
    assert Inputs.of(fallow.load("runs/x")).decoded == (3, 8, 8)
    assert fallow_cli("predict", "x", "wide/test").code == 0
    assert {r["file"][0]: r["label"] for r in rows(Path("predictions.csv"))} == {"a": "a", "b": "b"}
