"""One's own image files: turned upright, brought to a shape, skipped where they cannot be read, decoded once and kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY, same
from PIL import Image

import fallow
from fallow.config import Config
from fallow.data import sources
from fallow.data.readers import images, kept, opening
from fallow.data.readers.images import Settings, brought, decode, read, survey
from fallow.data.sources import load, opened
from fallow.errors import UserError
from fallow.export.inputs import Inputs
from fallow.runs import data

KEYS = {k: v for k, v in TINY.items() if k not in ("data", "clients", "active", "label_count", "defaults")} | {"method": "fedavg", "clients": 2, "label_ratio": 0.5}


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(path: Path, pixels: np.ndarray, **how: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **how)
    return path


def folder(home: Path, count: int = 8, size: int = 8) -> Path:
    """Two classes of so many images each."""
    for c, name in enumerate(("cat", "dog")):
        for i in range(count):
            save(home / name / f"{i}.png", noise(size, size, 100 * c + i))
    return home


def spoil(home: Path, *names: str) -> None:
    """A file that ends too early, one that is none, and an empty one."""
    whole = (home / names[0]).read_bytes()
    for name, content in zip(names, (whole[: len(whole) * 2 // 3], b"no image", b"")):
        (home / name).write_bytes(content)


# -- upright -----------------------------------------------------------------------------------------------------------------
# where a picture's first row and first column are seen, as EXIF defines its values 1 to 8
SEEN = {1: ("top", "left"), 2: ("top", "right"), 3: ("bottom", "right"), 4: ("bottom", "left"), 5: ("left", "top"), 6: ("right", "top"), 7: ("right", "bottom"), 8: ("left", "bottom")}


@pytest.mark.parametrize("kind", ["png", "jpg", "webp", "tiff"])
@pytest.mark.parametrize("value", SEEN)
def test_exif_says_how_the_camera_was_held(value: int, kind: str, tmp_path: Path) -> None:
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:4], pixels[4:, :4] = 255, 100  # the first row is white, the first column grey
    exif = Image.Exif()
    exif[opening.ORIENTATION] = value
    path = save(tmp_path / f"a.{kind}", pixels, exif=exif, **({"quality": 95} if kind == "jpg" else {"lossless": True} if kind == "webp" else {}))
    found = survey([path], Settings())
    high, wide = found.shape
    assert (high, wide) == ((16, 32) if value <= 4 else (32, 16))
    seen = read(path, 1, found.shape)[0].astype(int)
    sides = {"top": seen[2, wide // 2], "bottom": seen[-3, wide // 2], "left": seen[high // 2, 2], "right": seen[high // 2, -3]}
    row, column = SEEN[value]
    assert abs(sides[row] - 255) < 20 and abs(sides[column] - 100) < 20, sides
    assert sum(v < 20 for v in sides.values()) == 2


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")  # pytest puts aside what Fallow says of it
def test_a_damaged_note_does_not_spoil_the_picture(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jpg", noise(8, 8), exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert read(path, 3, (8, 8)).shape == (3, 8, 8)


# -- shapes ------------------------------------------------------------------------------------------------------------------
def test_crop_brings_the_short_side_to_size_and_cuts_the_centre(tmp_path: Path) -> None:
    pixels = noise(20, 60)
    by_pillow = Image.fromarray(pixels).resize((30, 10), Image.Resampling.BILINEAR).crop((10, 0, 20, 10))
    path = save(tmp_path / "wide.png", pixels)
    assert np.array_equal(read(path, 3, (10, 10), "crop"), np.asarray(by_pillow).transpose(2, 0, 1))
    assert np.array_equal(read(save(tmp_path / "high.png", pixels.transpose(1, 0, 2)), 3, (10, 10), "crop")[:, ::1].shape, (3, 10, 10))
    square = noise(12, 12).transpose(2, 0, 1)
    assert np.array_equal(brought(square, (5, 5), "crop"), brought(square, (5, 5), "resize"))
    wide = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))[None]
    split = sources.ImageSet(wide, torch.zeros(1, dtype=torch.int64))
    fitted = sources.fit(sources.Source("x", ("a",), split, split, True), 10, "crop")
    assert np.array_equal(fitted.train.images[0].numpy(), np.asarray(by_pillow).transpose(2, 0, 1))


def test_pad_makes_what_is_larger_fit_in(tmp_path: Path) -> None:
    pixels = noise(20, 40)
    inner = np.asarray(Image.fromarray(pixels).resize((10, 5), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    by_hand = np.zeros((3, 10, 10), np.uint8)
    by_hand[:, 2:7] = inner
    assert np.array_equal(read(save(tmp_path / "a.png", pixels), 3, (10, 10), "pad"), by_hand)
    small = noise(4, 6)
    by_hand = np.zeros((3, 10, 10), np.uint8)
    by_hand[:, 3:7, 2:8] = small.transpose(2, 0, 1)
    assert np.array_equal(read(save(tmp_path / "b.png", small), 3, (10, 10), "pad"), by_hand)


@pytest.mark.parametrize("fit", ["pad", "resize", "crop"])
def test_predictions_see_what_the_training_saw(fit: str, tmp_path: Path) -> None:
    for i in range(8):
        save(tmp_path / "photos" / "ab"[i % 2] / f"{i}.png", noise(6 + i, 20 - i, i))
    run = fallow.run(out=tmp_path, data=f"folder:{tmp_path / 'photos'}", image={"size": 8, "fit": fit}, **KEYS)
    source, inputs = load(f"folder:{tmp_path / 'photos'}", size=8, fit=fit), Inputs.of(run)
    files = sorted((tmp_path / "photos").rglob("*.png"))
    seen = {tuple(inputs.read(path).flatten().tolist()) for path in files}
    assert seen == {tuple(image.flatten().tolist()) for split in (source.train, source.test) for image in split.images}
    assert len(seen) == 8
    by_python = run.predict(Image.open(files[0])).probabilities
    assert np.array_equal(by_python, run.predict(files[0]).probabilities)


def test_settings_are_checked_before_anything_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallow_cli: Any) -> None:
    for i in range(8):
        save(tmp_path / "photos" / "ab"[i % 2] / f"{i}.jpg", noise(12, 16, i))

    def forbidden(*_: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(images, "array_of", forbidden)
    words = [f"{k}={v}" for k, v in KEYS.items()]
    for more, sentence in {
        "defaults=paper": "the images of folder:photos are 12x16, not square; set image.size, with image.fit=crop, resize or pad.",
        "image.fit=squeeze": "image.fit=squeeze is not allowed; give pad, resize or crop (",
        "image.size=8 device=gpu": "device='gpu' cannot be used; ",
        "image.size=8 schedule=cosin": "schedule='cosin' is not known; ",
        "image.size=8 model=small-cn": "there is no model 'small-cn'; ",
        "image.size=8 augment.strong=nope": "augment.strong=nope is no view; ",
        "image.size=8 clients=30": "30 clients but only 6 samples; ",
        "image.size=8 label_ratio=0.01": "0.01 of a client's 3 samples is less than one label; ",
    }.items():
        assert fallow_cli("run", "data=photos", *words, *more.split()).sentence.startswith(sentence), more
    assert "is truncated or not an image (decoded)" in fallow_cli("run", "data=photos", *words, "image.size=8").sentence
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


def test_photographs_without_a_word_on_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallow_cli: Any) -> None:
    words = [f"{k}={v}" for k, v in (KEYS | {"defaults": "fitted"}).items()]
    for name, (height, width), more, on_cpu, on_gpu in (
        ("wide", (90, 120), [], "120 wide and 90 high; on a CPU all are brought to 32x32 (image.size=32 image.fit=crop); image.size=64 keeps more and takes longer", 64),
        ("low", (20, 30), ["image.fit=pad"], "30 wide and 20 high; all are brought to 20x20 (image.size=20 image.fit=pad)\n", 20),
        ("large", (100, 100), [], "100 wide and 100 high; on a CPU all are brought to 32x32 (image.size=32 image.fit=crop); image.size=64 keeps more and takes longer", 64),
        ("square", (96, 96), [], "96 wide and 96 high; on a CPU all are brought to 32x32 (image.size=32 image.fit=crop); image.size=96 keeps more and takes longer", None),
        ("small", (32, 32), [], "", None), ("said", (90, 120), ["image.size=16"], "", 16),
    ):  # fmt: skip
        for i in range(8):
            save(tmp_path / name / "ab"[i % 2] / f"{i}.png", noise(height, width, i))
        found = fallow_cli("split", f"data={name}", *words, *more)
        told = f"the most common size is {on_cpu}"
        assert found.code == 0 and (told in found.out if on_cpu else "brought to" not in found.out), (found.out, found.err)
        with monkeypatch.context() as m:
            m.setattr(data, "device_of", lambda _: torch.device("cuda"))
            options, sentence = data.sized(Config.model_validate({"data": f"folder:{name}", "image": dict(word[6:].split("=") for word in more)}))
        assert options.image.size == on_gpu and "CPU" not in "".join(sentence)
    assert fallow_cli("run", "data=low", *words, "--name", "x").code == 0
    assert fallow.load("runs/x").config.image.model_dump() == {"size": 20, "fit": "crop", "channels": None, "normalise": None}
    assert fallow_cli("resume", "runs/x").code == 0


# -- files that cannot be read -----------------------------------------------------------------------------------------------
def test_all_files_that_cannot_be_read_are_named_at_once(tmp_path: Path) -> None:
    home = folder(tmp_path)
    spoil(home, "cat/1.png", "cat/2.png", "dog/3.png")
    with pytest.raises(UserError) as told:
        load(f"folder:{home}")
    sentence = str(told.value)
    assert sentence.startswith("3 of 16 files cannot be read (") and sentence.count("\n") == 0
    assert f"{home}/cat/2.png: is truncated or not an image" in sentence and f"{home}/dog/3.png: is empty" in sentence and f"{home}/cat/1.png" in sentence
    assert told.value.remedy == "replace or remove them, or go on without them with --skip-bad"
    for i in range(4, 8):
        for name in ("cat", "dog"):
            (home / name / f"{i}.png").write_bytes(b"x")
    with pytest.raises(UserError) as told:
        load(f"folder:{home}")
    assert "11 of 16 files" in str(told.value) and str(told.value).count(".png") == 10 and "; and 1 more)" in str(told.value)
    for path in home.rglob("*.png"):
        path.write_bytes(b"x")
    with pytest.raises(UserError, match="16 of 16 files cannot be read"):
        load(f"folder:{home}", skip_bad=True)


def test_one_file_that_cannot_be_read(tmp_path: Path) -> None:
    home = folder(tmp_path)
    spoil(home, "cat/1.png")
    with pytest.raises(UserError, match=r"cat/1.png is truncated or not an image \(.*\); replace or remove that file, or go on without it with --skip-bad"):
        load(f"folder:{home}")


@pytest.mark.parametrize("header", [True, False])  # found by the header, or only when decoded
def test_skip_bad_goes_on_without_them(header: bool, tmp_path: Path, fallow_cli: Any) -> None:
    home = folder(tmp_path / "photos")
    whole = load(f"folder:{home}")
    spoil(home, "cat/7.png", *(["dog/2.png"] if header else []))
    source = load(f"folder:{home}", skip_bad=True)
    lost = 2 if header else 1
    assert source.skipped == lost and len(source.train) + len(source.test) == len(whole.train) + len(whole.test) - lost
    every = {tuple(i.flatten().tolist()) for s in (whole.train, whole.test) for i in s.images}
    assert {tuple(i.flatten().tolist()) for s in (source.train, source.test) for i in s.images} < every
    words = [f"{k}={v}" for k, v in KEYS.items()]
    assert "cannot be read" in fallow_cli("run", "data=photos", *words).err or "truncated" in fallow_cli("run", "data=photos", *words).err
    told = fallow_cli("run", "data=photos", "--skip-bad", "--name", "skipping", *words)
    assert told.code == 0, told.err
    names = "(cat/7.png, dog/2.png)" if header else "(cat/7.png)"
    assert f"photos: {lost} of 16 files cannot be read and are left out {names}\n" in told.out
    assert json.loads(Path("runs/skipping/summary.json").read_text())["skipped"] == lost
    assert "skip_bad: true" in Path("runs/skipping/config.yaml").read_text()
    assert fallow_cli("split", "data=photos", *words).code == 2 and fallow_cli("split", "data=photos", "--skip-bad", *words).code == 0
    cut = fallow_cli("run", "data=photos", "--skip-bad", "--name", "cut", "--stop-after", "1", *words)
    assert cut.code == 0 and fallow_cli("resume", "runs/cut").code == 0
    same(Path("runs/cut"), Path("runs/skipping"))


def test_what_is_too_large_for_the_memory_is_never_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run would have other data on another machine."""
    home = folder(tmp_path)
    monkeypatch.setattr(images, "LARGE", 10)
    monkeypatch.setattr(images, "check_room", lambda wanted, doing, remedy: (_ for _ in ()).throw(UserError(doing, remedy)) if "decoding" in doing else None)
    with pytest.raises(UserError, match="cannot be used: decoding 8x8 pixels"):
        load(f"folder:{home}", skip_bad=True)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_pixel_bomb_is_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = folder(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)  # Pillow refuses more than twice as many
    save(home / "cat" / "0.png", noise(10, 10))
    with pytest.raises(UserError, match=r"cat/0.png is truncated or not an image \(Image size \(100 pixels\) exceeds limit"):
        load(f"folder:{home}")


def test_only_formats_that_are_read_safely(tmp_path: Path) -> None:
    """Pillow knows dozens by their content, whatever the file's name, and hands one of them to ghostscript."""
    home = folder(tmp_path)
    Image.fromarray(noise(8, 8)).save(home / "cat" / "0.pcx")
    (home / "cat" / "0.pcx").rename(home / "cat" / "0.png")
    with pytest.raises(UserError, match=r"cat/0.png is truncated or not an image"):
        load(f"folder:{home}")


# -- other libraries ---------------------------------------------------------------------------------------------------------
def test_heic(tmp_path: Path) -> None:
    heif = pytest.importorskip("pillow_heif")
    heif.register_heif_opener()
    pixels = np.zeros((32, 64, 3), np.uint8)
    pixels[:, :32, 0], pixels[:, 32:, 2] = 250, 250  # red left, blue right
    exif = Image.Exif()
    exif[opening.ORIENTATION] = 6  # to be turned right: red comes to the top
    path = save(tmp_path / "a.heic", pixels, format="HEIF", quality=100, exif=exif.tobytes())
    found = survey([path], Settings())
    assert (found.shape, found.channels) == ((64, 32), 3)
    seen = read(path, 3, found.shape).astype(int)
    assert seen[0, 8, 16] > 200 and seen[2, 8, 16] < 60 and seen[2, -8, 16] > 200 and seen[0, -8, 16] < 60
    path.rename(tmp_path / "a.jpg")  # as phones' exports are often named
    assert np.array_equal(read(tmp_path / "a.jpg", 3, found.shape), seen)


def dicom(path: Path, pixels: np.ndarray, **tags: Any) -> Path:
    pydicom = pytest.importorskip("pydicom")
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = SecondaryCaptureImageStorage, generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    colour = pixels.ndim == 3
    file.Rows, file.Columns, file.SamplesPerPixel = *pixels.shape[:2], 3 if colour else 1
    file.PhotometricInterpretation, file.PixelRepresentation = "RGB" if colour else "MONOCHROME2", int(pixels.dtype.kind == "i")
    file.BitsAllocated = file.BitsStored = 8 * pixels.dtype.itemsize
    file.HighBit = file.BitsStored - 1
    if colour:
        file.PlanarConfiguration = 0
    for name, value in tags.items():
        setattr(file, name, value)
    file.PixelData = pixels.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    pydicom.dcmwrite(path, file, enforce_file_format=True)
    return path


def test_dicom(tmp_path: Path) -> None:
    values = np.array([[0, 100, 200], [300, 400, 1000]], np.uint16)
    plain = dicom(tmp_path / "plain.dcm", values)
    assert survey([plain], Settings()).shape == (2, 3) and survey([plain], Settings()).channels == 1
    assert read(plain, 1, (2, 3))[0].tolist() == [[0, 26, 51], [76, 102, 255]]  # a thousand is white: 25.5, 51, 76.5, 102
    inverted = dicom(tmp_path / "inverted.dcm", values, PhotometricInterpretation="MONOCHROME1")
    assert read(inverted, 1, (2, 3))[0].tolist() == [[255, 229, 204], [179, 153, 0]]
    # stored 0 to 1000 is -1000 to 1000 by slope and intercept; the window of 401 around -599.5 goes from -800 to -400
    window = dicom(tmp_path / "window.dcm", values, RescaleSlope=2, RescaleIntercept=-1000, WindowCenter=-599.5, WindowWidth=401)
    assert read(window, 1, (2, 3))[0].tolist() == [[0, 0, 128], [255, 255, 255]]
    colour = noise(4, 5)
    assert np.array_equal(read(dicom(tmp_path / "colour.dcm", colour), 3, (4, 5)), colour.transpose(2, 0, 1))


def test_dicom_that_is_not_read(tmp_path: Path) -> None:
    pydicom = pytest.importorskip("pydicom")
    many = dicom(tmp_path / "many.dcm", np.zeros((2, 3), np.uint8), NumberOfFrames=20)
    with pytest.raises(opening.Unreadable, match=r"many.dcm is a DICOM file of 20 frames \(give a file for each\); replace"):
        survey([many], Settings())
    half = dicom(tmp_path / "half.dcm", np.zeros((64, 64), np.uint8))
    half.write_bytes(half.read_bytes()[:-100])
    with pytest.raises(opening.Unreadable, match=r"half.dcm is truncated or not an image"):
        read(half, 1, (64, 64))
    bomb = dicom(tmp_path / "bomb.dcm", np.zeros((2, 2), np.uint8))
    file = pydicom.dcmread(bomb)
    file.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    pydicom.dcmwrite(bomb, file)
    with pytest.raises(opening.Unreadable, match=r"bomb.dcm is a deflated DICOM file, which is not read"):
        survey([bomb], Settings())


def test_a_library_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = folder(tmp_path)
    (home / "cat" / "a.heic").write_bytes(b"\0\0\0\x1cftypheic" + bytes(200))
    (home / "dog" / "b.dcm").write_bytes(bytes(128) + b"DICM" + bytes(100))
    monkeypatch.setattr(opening, "_has_heif", lambda: False)
    monkeypatch.setattr(opening, "_has_dicom", lambda: False)
    with pytest.raises(UserError) as told:
        load(f"folder:{home}")
    assert "cat/a.heic: is a HEIC file, which needs pillow-heif" in str(told.value) and "dog/b.dcm: is a DICOM file, which needs pydicom" in str(told.value)
    assert "install them with `pip install fallow[heic,dicom]`" in told.value.remedy
    (home / "dog" / "b.dcm").unlink()
    with pytest.raises(UserError, match=r"a.heic is a HEIC file, which needs pillow-heif; install it with `pip install fallow\[heic\]`, or go on without it with --skip-bad"):
        load(f"folder:{home}")


# -- kept on disk ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FALLOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "decoded"


def test_the_next_run_maps_what_was_decoded(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = folder(tmp_path / "photos")
    first = load(f"folder:{home}", size=6)
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(images, "opened", lambda *_: pytest.fail("a file was opened"))
    second = load(f"folder:{home}", size=6)
    assert all(torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels) for a, b in ((first.train, second.train), (first.test, second.test)))
    second.train.images[0] = 0  # a copy of its own: the file stays as it is
    assert torch.equal(load(f"folder:{home}", size=6).train.images, first.train.images)


@pytest.mark.parametrize("change", ["content", "time", "another", "size", "fit", "channels", "library"])
def test_what_is_another_is_decoded_again(change: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = folder(tmp_path / "photos")
    load(f"folder:{home}", size=6, channels=3)
    keys = {"size": 6, "channels": 3}
    path = home / "cat" / "1.png"
    if change == "content":  # of the same size and time
        about = path.stat()
        data = bytearray(path.read_bytes())
        Image.fromarray(255 - noise(8, 8, 1)).save(path)
        path.write_bytes(path.read_bytes()[: len(data)].ljust(len(data), b"\0"))
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    elif change == "time":
        os.utime(path, ns=(1, 1))
    elif change == "another":
        save(home / "cat" / "new.png", noise(8, 8, 99))
    elif change == "library":
        monkeypatch.setattr(kept, "libraries", lambda: "another Pillow")
    else:
        keys |= {"size": 5} if change == "size" else {"channels": 1} if change == "channels" else {"fit": "crop"}
    read_files = []
    monkeypatch.setattr(images, "opened", lambda path, look: read_files.append(path) or opening.opened(path, look))
    found = load(f"folder:{home}", **keys)
    assert len(read_files) == (17 if change == "another" else 16) and len(list(cache.iterdir())) == 2
    if change == "content":
        seen = [tuple(i.flatten().tolist()) for s in (found.train, found.test) for i in s.images]
        assert tuple(brought(255 - noise(8, 8, 1).transpose(2, 0, 1), (6, 6), "resize").flatten().tolist()) in seen


@pytest.mark.parametrize("damage", ["cut", "pixel", "header", "longer", "other shape", "empty", "promise"])
def test_a_damaged_entry_is_written_again(damage: str, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    home = folder(tmp_path / "photos")
    good = load(f"folder:{home}")
    (entry,) = cache.iterdir()
    data = bytearray(entry.read_bytes())
    if damage == "pixel":
        data[-5] ^= 1
    elif damage == "other shape":
        data = data.replace(b"[16, 3, 8, 8]", b"[8, 6, 8, 8] ")
    elif damage == "promise":
        data[16:24] = b"\xff" * 8
    else:
        data = {"cut": data[:-7], "header": data[:30] + b"\xff\xff" + data[32:], "longer": data + b"\0", "empty": bytearray()}[damage]
    entry.write_bytes(bytes(data))
    again = load(f"folder:{home}")
    assert torch.equal(again.train.images, good.train.images) and "not as they were written" in caplog.text
    caplog.clear()
    assert torch.equal(load(f"folder:{home}").test.images, good.test.images) and not caplog.text


def test_files_that_cannot_be_read_are_remembered(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = folder(tmp_path / "photos")
    spoil(home, "cat/1.png", "dog/2.png")
    with pytest.raises(UserError, match="2 of 16 files"):
        load(f"folder:{home}")
    monkeypatch.setattr(images, "opened", lambda *_: pytest.fail("a file was opened"))
    with pytest.raises(UserError, match="2 of 16 files"):
        load(f"folder:{home}")
    assert load(f"folder:{home}", skip_bad=True).skipped == 2


def test_nothing_is_kept_where_it_cannot_be(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    home = folder(tmp_path / "photos")
    cache.parent.write_text("a file")
    assert len(load(f"folder:{home}").train) == 12 and "cannot be kept in" in caplog.text
    caplog.clear()
    monkeypatch.setenv("FALLOW_CACHE", str(tmp_path / "other"))
    monkeypatch.setenv("FALLOW_CACHE_GIB", "0")
    assert len(load(f"folder:{home}").train) == 12 and not caplog.text and not (tmp_path / "other").exists()
    monkeypatch.setenv("FALLOW_CACHE_GIB", "many")
    with pytest.raises(UserError, match="FALLOW_CACHE_GIB=many is no number"):
        load(f"folder:{home}")


def test_the_longest_unused_go(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = folder(tmp_path / "photos")
    for age, size in enumerate((4, 5, 6)):
        load(f"folder:{home}", size=size)
        newest = max(kept.entries(), key=lambda e: e.path.stat().st_ctime_ns).path
        os.utime(newest, (1000 + age, 1000 + age))
    load(f"folder:{home}", size=4)  # is used again
    (cache / ".x.images.part").write_text("of a run that was killed")
    os.utime(cache / ".x.images.part", (1, 1))
    monkeypatch.setenv("FALLOW_CACHE_GIB", str(12_000 / 2**30))  # an entry is a page of 4 KiB and 16 images: 11,312 bytes for two
    load(f"folder:{home}", size=7)
    assert sorted(json.loads(e.path.read_bytes()[24:4096].rstrip(b"\0"))["shape"][2] for e in kept.entries()) == [4, 7]
    assert not (cache / ".x.images.part").exists()


def test_two_runs_at_once_and_a_kill(cache: Path, tmp_path: Path) -> None:
    home = folder(tmp_path / "photos", 20, 32)
    code = f"from fallow.data.sources import load; s = load({f'folder:{home}'!r}); print(int(s.train.images.sum()))"
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=dict(os.environ)) for _ in range(2)]
    sums = {process.communicate()[0] for process in both}
    assert sums == {f"{int(load(f'folder:{home}').train.images.sum())}\n".encode()} and len(list(cache.iterdir())) == 1
    (entry,) = cache.iterdir()
    part = entry.with_name(f".{entry.name}.part")
    part.write_bytes(entry.read_bytes()[:5000])  # what a kill leaves
    entry.unlink()
    load(f"folder:{home}")
    assert list(cache.iterdir()) == [entry]


def test_the_command_lists_and_clears(cache: Path, tmp_path: Path, fallow_cli: Any) -> None:
    assert "nothing is kept" in fallow_cli("cache").out
    folder(tmp_path / "photos")
    load("folder:photos", size=6)
    told = fallow_cli("cache")
    assert told.code == 0 and "photos" in told.out and "16" in told.out and str(cache) in told.out
    (cache / "my.images").write_text("somebody's")
    assert "removed" in fallow_cli("cache", "--clear").out and [p.name for p in cache.iterdir()] == ["my.images"]


def test_a_bar_while_images_are_decoded(tmp_path: Path) -> None:
    told = []
    load(f"folder:{folder(tmp_path, 20)}", tell=lambda done, count: told.append((done, count)))
    assert told[-1] == (40, 40) and [d for d, _ in told] == sorted(d for d, _ in told) and len(told) > 1
    events: list[tuple[str, Any]] = []
    fallow.run(out=tmp_path / "runs", data=f"folder:{folder(tmp_path / 'more')}", watch=lambda e, w: events.append((e, w)), **KEYS)
    kinds = [e for e, _ in events]
    assert kinds[:2] == ["data", "reading"] and kinds.index("start") > kinds.index("reading") and events[0][1].endswith("2 classes: cat, dog")


def test_opened_sources_know_all_but_the_pixels(tmp_path: Path) -> None:
    home = folder(tmp_path)
    source = opened(f"folder:{home}", size=6)
    assert source.later is not None and source.train.images.is_meta and (source.size, source.channels) == (6, 3)
    whole = source.whole()
    assert whole.later is None and whole.whole() is whole and whole.train.images.shape == source.train.images.shape
    assert torch.equal(whole.train.labels, source.train.labels)
    assert decode([home / "cat" / "0.png"], Settings(6)).images.shape == (1, 3, 6, 6)


def test_a_grid_finds_its_runs_of_a_path_and_of_photographs_again(tmp_path: Path, fallow_cli: Any) -> None:
    for i in range(16):
        save(tmp_path / "photos" / "ab"[i % 2] / f"{i}.png", noise(20, 30, i))
    (tmp_path / "photos" / "a" / "0.png").write_bytes(b"")
    words = [f"{k}={v}" for k, v in (KEYS | {"defaults": "fitted", "rounds": 1}).items()]
    again = ["run", "data=photos", "--skip-bad", *words, "seed=0,1", "--jobs", "1"]
    first = fallow_cli(*again)
    assert first.code == 0 and "2 new" in first.out, (first.out, first.err)
    second = fallow_cli(*again)
    assert second.code == 0 and "new" not in second.out.splitlines()[0], second.out
