"""The readers: files in every official format are written here, and their pixels and labels must come back exactly."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fallow.data import sources
from fallow.data.download import REMOTES
from fallow.data.readers.cifar import CLASSES as CIFAR10
from fallow.data.readers.images import decode
from fallow.data.sources import Source, fit, from_dataset, load, names, register
from fallow.errors import UserError

TINY = Path(__file__).resolve().parents[2] / "shared" / "data" / "tiny"


def images_of(count: int, channels: int = 3, size: int = 28, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, channels, size, size), dtype=np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_png(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)).save(path)


def expect(split: sources.ImageSet, images: np.ndarray, labels: object) -> None:
    assert split.images.dtype == torch.uint8 and split.labels.dtype == torch.int64
    assert split.images.is_contiguous()
    assert np.array_equal(split.images.numpy(), images)
    assert split.labels.tolist() == list(labels)  # type: ignore[call-overload]


# the official formats, each as a function that writes a small set and returns what must be read


def write_cifar10(home: Path, folder: str = "cifar-10-batches-py") -> tuple[np.ndarray, list[int]]:
    images, labels = images_of(12, size=32), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    (home / folder).mkdir(parents=True)
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        part, known = images[2 * i : 2 * i + 2].reshape(2, -1), labels[2 * i : 2 * i + 2]
        if folder.endswith("py"):
            content = pickle.dumps({b"data": part, b"labels": known, b"batch_label": b"x"}, protocol=2)
            (home / folder / name).write_bytes(content)
        else:
            records = np.concatenate([np.array(known, np.uint8)[:, None], part], 1)
            (home / folder / f"{name}.bin").write_bytes(records.tobytes())
    return images, labels


def write_idx(folder: Path, prefixes: tuple[str, str], labels: list[int], end: str = ".gz") -> np.ndarray:
    images = images_of(len(labels), 1)
    folder.mkdir(parents=True, exist_ok=True)
    pack = gzip.compress if end else bytes
    for at, prefix in zip((slice(0, 4), slice(4, None)), prefixes):
        (folder / f"{prefix}-images-idx3-ubyte{end}").write_bytes(pack(idx_bytes(images[at, 0])))
        (folder / f"{prefix}-labels-idx1-ubyte{end}").write_bytes(pack(idx_bytes(np.array(labels[at]))))
    return images


MNIST = ("train", "t10k")
LABELS = [7, 2, 1, 0, 4, 9]


@pytest.mark.parametrize("folder", ["cifar-10-batches-py", "cifar-10-batches-bin"])
def test_cifar10(tmp_path, folder):
    images, labels = write_cifar10(tmp_path, folder)
    source = load("cifar10", tmp_path)
    expect(source.train, images[:10], labels[:10])
    expect(source.test, images[10:], labels[10:])
    assert source.classes == CIFAR10 and source.flip and (source.size, source.channels) == (32, 3)


def test_cifar100_python(tmp_path):
    images, folder = images_of(5, size=32), tmp_path / "cifar-100-python"
    folder.mkdir()
    fine = [f"class {i}" for i in range(100)]
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": [name.encode() for name in fine]}, protocol=2))
    for name, at, known in (("train", slice(0, 3), [99, 0, 42]), ("test", slice(3, 5), [1, 2])):
        batch = {b"data": images[at].reshape(-1, 3072), b"fine_labels": known, b"coarse_labels": [0] * len(known)}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    source = load("cifar100", tmp_path)
    expect(source.train, images[:3], [99, 0, 42])
    expect(source.test, images[3:], [1, 2])
    assert source.classes == tuple(fine)


def test_cifar100_binary(tmp_path):
    images, folder = images_of(3, size=32), tmp_path / "cifar-100-binary"
    folder.mkdir()
    (folder / "fine_label_names.txt").write_text("\n".join(f"class{i}" for i in range(100)) + "\n\n")
    records = np.concatenate([np.array([[19, 99], [0, 3], [5, 7]], np.uint8), images.reshape(3, -1)], 1)
    (folder / "train.bin").write_bytes(records[:2].tobytes())
    (folder / "test.bin").write_bytes(records[2:].tobytes())
    source = load("cifar100", tmp_path)
    expect(source.train, images[:2], [99, 3])
    expect(source.test, images[2:], [7])


def test_svhn(tmp_path):
    from scipy.io import savemat

    images = images_of(5, size=32)
    (tmp_path / "svhn").mkdir()
    for name, at, known in (("train", slice(0, 3), [1, 10, 9]), ("test", slice(3, 5), [10, 2])):
        content = {"X": images[at].transpose(2, 3, 1, 0), "y": np.array(known, np.uint8)[:, None]}
        savemat(tmp_path / "svhn" / f"{name}_32x32.mat", content, do_compression=True)
    source = load("svhn", tmp_path)
    expect(source.train, images[:3], [1, 0, 9])
    expect(source.test, images[3:], [0, 2])
    assert not source.flip


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize(("name", "flip"), [("mnist", False), ("fashion-mnist", True)])
def test_idx(tmp_path, name, flip, end):
    images = write_idx(tmp_path / name, MNIST, LABELS, end)
    source = load(name, tmp_path)
    expect(source.train, images[:4], LABELS[:4])
    expect(source.test, images[4:], LABELS[4:])
    assert source.flip is flip and (source.size, source.channels) == (28, 1)


def test_idx_with_a_dot(tmp_path):
    write_idx(tmp_path / "mnist", MNIST, LABELS, "")
    for path in list((tmp_path / "mnist").iterdir()):
        path.rename(path.with_name(path.name.replace("-idx", ".idx")))
    assert load("mnist", tmp_path).train.labels.tolist() == LABELS[:4]


@pytest.mark.parametrize(("split", "first", "classes"), [("balanced", 0, 47), ("letters", 1, 26), ("byclass", 0, 62)])
def test_emnist_is_transposed(tmp_path, split, first, classes):
    stored = [first, first + 25, first + 3, first + 4, first + 1, first + 2]
    images = write_idx(tmp_path / "emnist", (f"emnist-{split}-train", f"emnist-{split}-test"), stored)
    source = load(f"emnist:{split}", tmp_path)
    expect(source.train, images[:4].transpose(0, 1, 3, 2), [0, 25, 3, 4])
    expect(source.test, images[4:].transpose(0, 1, 3, 2), [1, 2])
    assert len(source.classes) == classes and not source.flip


def test_emnist_class_names():
    from fallow.data.readers.idx import EMNIST

    assert "".join(EMNIST["balanced"][36:]) == "abdefghnqrt" and EMNIST["letters"][0] == "A"


def test_stl10(tmp_path):
    images, folder = images_of(9, size=96), tmp_path / "stl10_binary"
    folder.mkdir()
    for name, at in (("train", slice(0, 3)), ("test", slice(3, 5)), ("unlabeled", slice(5, 9))):
        (folder / f"{name}_X.bin").write_bytes(images[at].transpose(0, 1, 3, 2).tobytes())
    (folder / "train_y.bin").write_bytes(bytes([1, 10, 2]))
    (folder / "test_y.bin").write_bytes(bytes([3, 4]))
    source = load("stl10", tmp_path)
    expect(source.train, images[[0, 1, 2, 5, 6, 7, 8]], [0, 9, 1, -1, -1, -1, -1])
    expect(source.test, images[3:5], [2, 3])


def test_cinic10(tmp_path):
    images = images_of(30, size=32)
    for p, part in enumerate(("train", "valid", "test")):
        for c, name in enumerate(CIFAR10):
            write_png(tmp_path / "CINIC-10" / part / name / f"cifar10-{part}-1.png", images[10 * p + c])
    source = load("cinic10", tmp_path)
    expect(source.train, images[:10], range(10))
    expect(source.test, images[20:], range(10))


def test_tinyimagenet(tmp_path):
    home = tmp_path / "tiny-imagenet-200"
    images = images_of(5, size=64)
    for i, (wnid, name) in enumerate((("n2", "n2_0"), ("n1", "n1_0"), ("n1", "n1_1"))):
        write_png(home / "train" / wnid / "images" / f"{name}.png", images[i])
        (home / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{name}.JPEG\t0\t0\t62\t62\n")
    write_png(home / "val" / "images" / "val_0.png", images[3])
    write_png(home / "val" / "images" / "val_1.png", images[4, :1])
    (home / "val" / "val_annotations.txt").write_text("val_1.png\tn1\t0\t0\t1\t1\nval_0.png\tn2\t0\t0\t1\t1\n")
    (home / "wnids.txt").write_text("n2\nn1\n")
    (home / "words.txt").write_text("n1\tcat, house cat\nn3\tother\nn2\treel\n")
    source = load("tinyimagenet", tmp_path)
    expect(source.train, images[:3], [0, 1, 1])
    expect(source.test, np.stack([images[4, [0, 0, 0]], images[3]]), [1, 0])
    assert source.classes == ("reel", "cat")


def write_medmnist(home: Path, name: str, channels: int = 1, **changed: np.ndarray) -> np.ndarray:
    images = images_of(5, channels)
    stored = images[:, 0] if channels == 1 else images.transpose(0, 2, 3, 1)
    arrays = {}
    for part, at, known in (("train", slice(0, 2), [0, 1]), ("val", slice(2, 3), [1]), ("test", slice(3, 5), [1, 0])):
        arrays[f"{part}_images"], arrays[f"{part}_labels"] = stored[at], np.array(known, np.uint8)[:, None]
    (home / "medmnist").mkdir()
    np.savez(home / "medmnist" / f"{name}.npz", **(arrays | changed))
    return images


@pytest.mark.parametrize(("name", "channels"), [("breastmnist", 1), ("bloodmnist", 3), ("pathmnist_64", 3)])
def test_medmnist(tmp_path, name, channels):
    images = write_medmnist(tmp_path, name, channels)
    source = load(f"medmnist:{name}", tmp_path)
    expect(source.train, images[:2], [0, 1])
    expect(source.test, images[3:], [1, 0])


def test_digits():
    from sklearn.datasets import load_digits

    raw, source = load_digits(), load("digits")
    assert (len(source.train), len(source.test), source.size, source.channels) == (1500, 297, 8, 1)
    assert source.test.labels.tolist() == raw.target[1500:].tolist() and not source.flip
    by_hand = {0: 0, 1: 16, 7: 112, 8: 128, 15: 239, 16: 255}
    for stored, byte in by_hand.items():
        assert set(source.train.images[:, 0][torch.from_numpy(raw.images[:1500] == stored)].tolist()) == {byte}


# the user's own


def test_folder_with_train_and_test(tmp_path):
    images = images_of(6, size=5)
    for i, name in enumerate(["train/b/1.png", "train/a/x/2.PNG", "train/unlabelled/3.png", "test/a/4.png",
                              "test/b/5.png", "unlabeled/6.png"]):  # fmt: skip
        write_png(tmp_path / name, images[i])
    (tmp_path / "train" / "a" / "notes.txt").write_text("not an image")
    source = load(f"folder:{tmp_path}")
    assert source.classes == ("a", "b")
    expect(source.train, images[[1, 0, 5, 2]], [0, 1, -1, -1])
    expect(source.test, images[[3, 4]], [0, 1])


def test_folder_gives_a_stratified_fifth(tmp_path):
    images = images_of(31, 1, size=4)
    for i in range(20):
        write_png(tmp_path / "10" / f"{i}.png", images[i])
    for i in range(10):
        write_png(tmp_path / "9" / f"{i}.png", images[20 + i])
    write_png(tmp_path / "unlabeled" / "u.png", images[30])
    source, again = load(f"folder:{tmp_path}"), load(f"folder:{tmp_path}")
    assert source.classes == ("9", "10") and source.channels == 1
    assert source.test.labels.bincount().tolist() == [2, 4]
    assert source.train.labels.tolist() == [0] * 8 + [1] * 16 + [-1]
    assert torch.equal(source.test.images, again.test.images)
    every = torch.cat([source.train.images, source.test.images]).flatten(1).tolist()
    assert sorted(every) == sorted(images.reshape(31, -1).tolist())


def test_folder_resizes_to_the_most_common_size_or_the_given(tmp_path):
    wide = images_of(1, size=9)[0]
    for i, pixels in enumerate([*images_of(5, size=6), wide]):
        write_png(tmp_path / "a" / f"{i}.png", pixels)
        write_png(tmp_path / "b" / f"{i}.png", pixels)
    source = load(f"folder:{tmp_path}")
    assert source.size == 6
    by_pillow = np.asarray(Image.fromarray(wide.transpose(1, 2, 0)).resize((6, 6), Image.Resampling.BILINEAR))
    shown = torch.cat([source.train.images, source.test.images])
    assert sum(torch.equal(image, torch.from_numpy(by_pillow.transpose(2, 0, 1).copy())) for image in shown) == 2
    assert load(f"folder:{tmp_path}", size=8).size == 8


def test_modes_of_image_files(tmp_path):
    deep = np.array([[0, 255, 256], [65535, 32768, 511]], np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert decode([tmp_path / "deep.png"]).images[0, 0].tolist() == [[0, 0, 1], [255, 128, 1]]
    colour = images_of(1, 3, 3)[0]
    write_png(tmp_path / "colour.png", colour)
    Image.fromarray(np.dstack([colour.transpose(1, 2, 0), np.full((3, 3), 7, np.uint8)])).save(tmp_path / "alpha.png")
    write_png(tmp_path / "grey.png", colour[:1])
    decoded = decode([tmp_path / "colour.png", tmp_path / "alpha.png", tmp_path / "grey.png"])
    assert np.array_equal(decoded.images, np.stack([colour, colour, colour[[0, 0, 0]]])) and not decoded.bad


def test_csv(tmp_path):
    images = images_of(5, size=4)
    for i in range(5):
        write_png(tmp_path / "pictures" / f"{i}.png", images[i])
    lines = ["file,label,client,split", "pictures/0.png,wolf,north,train", "pictures/1.png,,south,", "pictures/2.png,fox,server,",
             f"{tmp_path}/pictures/3.png,fox,,test", "pictures/4.png,,north,train"]  # fmt: skip
    (tmp_path / "list.csv").write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    source = load(f"csv:{tmp_path / 'list.csv'}")
    assert source.classes == ("fox", "wolf")
    expect(source.train, images[[0, 1, 2, 4]], [1, -1, 0, -1])
    expect(source.test, images[[3]], [0])
    assert source.train.clients == ("north", "south", "server", "north") and source.test.clients is None


def test_csv_with_two_columns(tmp_path):
    for i, pixels in enumerate(images_of(12, size=4)):
        write_png(tmp_path / f"{i}.png", pixels)
    rows = [f"{i}.png,{i % 2 + 9 if i < 10 else ''}" for i in range(12)]
    (tmp_path / "list.csv").write_text("\n".join(["file,label", *rows]))
    source = load(f"csv:{tmp_path / 'list.csv'}")
    assert source.classes == ("9", "10") and source.train.clients is None
    assert source.test.labels.bincount().tolist() == [1, 1] and (source.train.labels == -1).sum() == 2


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NHW"])
def test_numpy(tmp_path, layout):
    images = images_of(6, 1 if layout == "NHW" else 3, size=8)
    stored = {"NHWC": images.transpose(0, 2, 3, 1), "NCHW": images, "NHW": images[:, 0]}[layout]
    np.savez(tmp_path / "own.npz", images=stored[:4], labels=np.array([0, -1, 2, 1]), test_images=stored[4:],
             test_labels=np.array([[2], [0]]), clients=np.array(["a", "a", "server", "b"]))  # fmt: skip
    source = load(f"numpy:{tmp_path / 'own.npz'}")
    expect(source.train, images[:4], [0, -1, 2, 1])
    expect(source.test, images[4:], [2, 0])
    assert source.classes == ("0", "1", "2") and source.train.clients == ("a", "a", "server", "b")


def test_numpy_without_test_set_and_with_other_names(tmp_path):
    labels = np.array([0] * 10 + [1] * 5 + [-1])
    np.savez(tmp_path / "own.npz", x_train=images_of(16, 1, 4)[:, 0], y_train=labels, clients=np.arange(16),
             classes=np.array(["no", "yes"]))  # fmt: skip
    source = load(f"numpy:{tmp_path / 'own.npz'}")
    assert source.classes == ("no", "yes") and source.test.labels.tolist() == [0, 0, 1]
    assert source.train.clients is not None and len(source.train.clients) == len(source.train) == 13


class Pairs(torch.utils.data.Dataset):
    def __init__(self, items: list[tuple[object, object]]):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[object, object]:
        return self.items[index]


def test_torch_dataset():
    images = images_of(4, size=5)
    forms = [Image.fromarray(images[0].transpose(1, 2, 0)), torch.from_numpy(images[1]), images[2].transpose(1, 2, 0),
             torch.from_numpy(images[3]) / 255]  # fmt: skip
    train = Pairs(list(zip(forms, [0, None, torch.tensor(2), np.int64(-1)])))
    source = from_dataset(train, Pairs([(forms[0], 1)]), name="mine", clients=[3, 3, 4, 4])
    expect(source.train, images, [0, -1, 2, -1])
    expect(source.test, images[:1], [1])
    assert source.train.clients == ("3", "3", "4", "4") and len(source.classes) == 3
    assert load(source) is source


def test_registered_sources(monkeypatch):
    monkeypatch.setattr(sources, "_registered", {})
    mine = from_dataset(
        Pairs([(images_of(1)[0].transpose(1, 2, 0), 0)]), Pairs([(images_of(1)[0].transpose(1, 2, 0), 0)])
    )
    register("mine", mine)
    register("made", lambda: mine)
    assert load("mine") is mine and load("made") is mine
    assert {"mine", "made"} <= {row.name for row in names()}
    with pytest.raises(UserError, match="taken"):
        register("cifar10", mine)


# bringing images to a size and a channel count


def source_of(images: np.ndarray) -> Source:
    split = sources.ImageSet(torch.from_numpy(images), torch.zeros(len(images), dtype=torch.int64))
    return Source("some", ("a",), split, split, True)


def test_fit_pads_in_the_centre():
    images = images_of(2, 1, 28)
    fitted = fit(source_of(images), 32, channels=3)
    assert np.array_equal(fitted.train.images.numpy(), np.pad(images, ((0, 0), (0, 0), (2, 2), (2, 2))).repeat(3, 1))
    assert fit(source_of(images), 31).train.images[0, 0, 1, 1] == images[0, 0, 0, 0]


def test_fit_resizes_and_greys_as_pillow_does():
    images = images_of(3, 3, 12)
    pictures = [Image.fromarray(image.transpose(1, 2, 0)) for image in images]
    grey = fit(source_of(images), channels=1).train.images.numpy()
    assert np.array_equal(grey[:, 0], np.stack([np.asarray(picture.convert("L")) for picture in pictures]))
    small = fit(source_of(images), 7, "resize").test.images.numpy().transpose(0, 2, 3, 1)
    by_pillow = [np.asarray(picture.resize((7, 7), Image.Resampling.BILINEAR)) for picture in pictures]
    assert np.array_equal(small, np.stack(by_pillow))


def test_fit_refuses():
    for arguments, words in [({"size": 8}, "padding cannot"), ({"channels": 2}, "1 or 3"), ({"fit": "stretch"}, "pad, resize or crop")]:
        with pytest.raises(UserError, match=words):
            fit(source_of(images_of(1)), **arguments)


# archives


def packed(kind: str, entries: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, content in entries.items():
                archive.writestr(name, content)
    else:
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for name, content in entries.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def contents(folder: Path, below: Path) -> dict[str, bytes]:
    return {path.relative_to(below).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("folder", "archive"), [("cifar-10-batches-py", "cifar-10-python.tar.gz"),
                                                 ("cifar-10-batches-bin", "cifar-10-binary.tar.gz")])  # fmt: skip
def test_tar_archive(tmp_path, folder, archive):
    images, labels = write_cifar10(tmp_path / "made", folder)
    home = tmp_path / "home"
    home.mkdir()
    (home / archive).write_bytes(packed("tar", contents(tmp_path / "made", tmp_path / "made")))
    for _ in range(2):
        expect(load("cifar10", home).train, images[:10], labels[:10])
    assert sorted(path.name for path in home.iterdir()) == [folder, archive]


def test_tar_archive_without_a_folder_inside(tmp_path):
    for part in ("train", "test"):
        for name in CIFAR10:
            write_png(tmp_path / "made" / part / name / "1.png", images_of(1, size=32)[0])
    (tmp_path / "CINIC-10.tar.gz").write_bytes(packed("tar", contents(tmp_path / "made", tmp_path / "made")))
    assert len(load("cinic10", tmp_path).train) == 10


@pytest.mark.parametrize("where", [".", "emnist"])
def test_zip_archive(tmp_path, where):
    write_idx(tmp_path / "made" / "gzip", ("emnist-digits-train", "emnist-digits-test"), LABELS)
    (tmp_path / where).mkdir(exist_ok=True)
    (tmp_path / where / "gzip.zip").write_bytes(packed("zip", contents(tmp_path / "made", tmp_path / "made")))
    assert load("emnist:digits", tmp_path).train.labels.tolist() == LABELS[:4]


@pytest.mark.parametrize("name", ["../outside", "/outside", "cifar-10-batches-py/../../outside"])
def test_archive_cannot_write_outside(tmp_path, name):
    home = tmp_path / "home"
    home.mkdir()
    (home / "cifar-10-python.tar.gz").write_bytes(packed("tar", {name: b"x"}))
    told(r"cifar-10-python.tar.gz is damaged: its entry .* points outside", "cifar10", home)
    assert [path.name for path in tmp_path.rglob("*")] == ["home", "cifar-10-python.tar.gz"]


@pytest.mark.parametrize(
    ("name", "archive"), [("cifar10", "cifar-10-python.tar.gz"), ("tinyimagenet", "tiny-imagenet-200.zip")]
)
def test_truncated_archive_leaves_nothing(tmp_path, name, archive):
    entries = {f"x/{i}": os.urandom(5000) for i in range(20)}
    (tmp_path / archive).write_bytes(packed(archive[-3:], entries)[:50_000])
    told(f"{archive} is damaged", name, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [archive]


# what is wrong with a file, told in one sentence


def told(words: str, name: str, home: Path | None = None) -> UserError:
    with pytest.raises(UserError, match=words) as caught:
        load(name, home)
    sentence = str(caught.value)
    assert "\n" not in sentence and caught.value.remedy and sentence.endswith((".", "?"))
    return caught.value


def test_missing_sets_name_the_place_and_the_flag(tmp_path):
    for row in names(tmp_path):
        if row.present is False:
            error = told(f"{row.name} is not in {tmp_path}", row.name, tmp_path)
            key = row.name if row.name.startswith("medmnist") else row.name.partition(":")[0]
            assert ("--download" in error.remedy) is (key in REMOTES)
    assert sum(row.present is False for row in names(tmp_path)) == 25


def test_default_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FALLOW_DATA", str(tmp_path / "here"))
    told(f"is not in {tmp_path}/here", "cifar10")
    write_cifar10(tmp_path / "here")
    assert {row.name for row in names() if row.present} >= {"digits", "cifar10"}


@pytest.mark.parametrize(("name", "words"), [
    ("cifar-10", "did you mean 'cifar10'"), ("nothing at all", "fallow list datasets"), ("emnist", "write emnist:SPLIT"),
    ("emnist:leters", "did you mean 'letters'"), ("medmnist", "write medmnist:NAME"), ("medmnist:blod", "bloodmnist"),
    ("medmnist:chestmnist", "several labels per image"), ("medmnist:organmnist3d", "3-D images"), ("folder:", "names no path"),
])  # fmt: skip
def test_names_that_are_not_known(tmp_path, name, words):
    told(words, name, tmp_path)


def test_idx_files_without_a_folder_are_refused(tmp_path):
    write_idx(tmp_path, MNIST, LABELS)
    told(f"Fashion-MNIST's, whose files have the same names; move .*{tmp_path}/mnist", "mnist", tmp_path)


def idx_fault(tmp_path: Path, file: str, change: object, words: str) -> None:
    write_idx(tmp_path / "mnist", MNIST, LABELS, ".gz" if file.endswith("gz") else "")
    path = tmp_path / "mnist" / file
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    told(f"{file} {words}", "mnist", tmp_path)


@pytest.mark.parametrize(("file", "change", "words"), [
    ("train-images-idx3-ubyte", lambda b: b[:-1], "is truncated: it has 3,151 bytes where 3,152 were promised"),
    ("train-images-idx3-ubyte", lambda b: b[:9], "is truncated"),
    ("train-images-idx3-ubyte", lambda b: b + b"!", "is damaged: it has more bytes"),
    ("train-images-idx3-ubyte", lambda b: b"\x00\x00\x0d\x03" + b[4:], "is damaged: it begins with 00000d03"),
    ("t10k-images-idx3-ubyte.gz", lambda b: b[:-20], "is damaged: it is truncated or not gzip"),
    ("t10k-images-idx3-ubyte.gz", lambda b: b"no" + b[2:], "is damaged: it is truncated or not gzip"),
    ("t10k-images-idx3-ubyte.gz", lambda b: b[:60] + bytes([b[60] ^ 255]) + b[61:], "is damaged"),
    ("train-labels-idx1-ubyte", lambda b: b[:-1] + b"\x0a", "has the label 10, out of range for 10 classes"),
    ("train-labels-idx1-ubyte", lambda b: idx_bytes(np.zeros(3)), ""),
])  # fmt: skip
def test_idx_faults(tmp_path, file, change, words):
    if not words:
        write_idx(tmp_path / "mnist", MNIST, LABELS, "")
        (tmp_path / "mnist" / file).write_bytes(change(b""))
        told("4 images but 3 labels", "mnist", tmp_path)
    else:
        idx_fault(tmp_path, file, change, words)


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/fallow-evil",)


@pytest.mark.parametrize(("content", "words"), [
    (pickle.dumps(Evil(), protocol=2), r"it asks for (posix|nt)\.system"),
    (pickle.dumps({b"data": np.array([Evil()], object)}, protocol=2), "not of unsigned bytes"),
    (pickle.dumps({b"data": images_of(1, size=32).reshape(1, -1), b"labels": [0]}, protocol=2)[:-100], "truncated"),
    (b"", "truncated"), (pickle.dumps([1]), "not CIFAR's"), (pickle.dumps({b"data": 1}), "not an array"),
    (pickle.dumps({b"data": images_of(2, size=32).reshape(2, -1), b"labels": [0]}, protocol=2), "2 images but 1 labels"),
    (pickle.dumps({b"data": images_of(1, size=32).reshape(1, -1), b"labels": [10]}, protocol=2), "the label 10, out of"),
    (pickle.dumps({b"data": images_of(1, size=32).reshape(1, -1), b"labels": ["x"]}, protocol=2), "whole numbers"),
])  # fmt: skip
def test_cifar_pickle_faults(tmp_path, content, words):
    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(content)
    assert "data_batch_3" in told(words, "cifar10", tmp_path).cause
    assert not Path("/tmp/fallow-evil").exists()


def test_cifar_incomplete_and_truncated(tmp_path):
    write_cifar10(tmp_path, "cifar-10-batches-bin")
    batch = tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin"
    batch.write_bytes(batch.read_bytes()[:-1])
    told("data_batch_2.bin is truncated: it has 6,145 bytes where 6,146", "cifar10", tmp_path)
    batch.unlink()
    told("incomplete: it has no data_batch_2.bin", "cifar10", tmp_path)


def test_svhn_faults(tmp_path):
    from scipy.io import savemat

    path = tmp_path / "svhn" / "train_32x32.mat"
    path.parent.mkdir()
    savemat(path, {"X": images_of(3, size=32).transpose(2, 3, 1, 0), "y": np.array([[1], [2], [11]])})
    told("train_32x32.mat has the label 11", "svhn", tmp_path)
    whole = path.read_bytes()
    for content in (whole[:5000], b"", b"no matlab" * 50):
        path.write_bytes(content)
        told("train_32x32.mat is damaged", "svhn", tmp_path)
    savemat(path, {"Z": np.zeros(3)})
    told("no array X", "svhn", tmp_path)


def test_stl10_truncated(tmp_path):
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    (folder / "train_X.bin").write_bytes(bytes(27648 * 2 - 5))
    told("train_X.bin is truncated: it has 55,291 bytes where 55,296", "stl10", tmp_path)


def test_medmnist_faults(tmp_path):
    write_medmnist(tmp_path, "breastmnist", train_labels=np.array([[0], [2]], np.uint8))
    path = tmp_path / "medmnist" / "breastmnist.npz"
    told("breastmnist.npz has the label 2, out of range for 2 classes", "medmnist:breastmnist", tmp_path)
    path.write_bytes(path.read_bytes()[:-30])
    told("breastmnist.npz is damaged", "medmnist:breastmnist", tmp_path)
    for arrays, words in (({"train_labels": np.zeros((2, 14), np.uint8)}, "several labels per image"),
                          ({"train_images": np.zeros((2, 28, 28, 28), np.uint8)}, "3-D")):  # fmt: skip
        path.unlink()
        path.parent.rmdir()
        write_medmnist(tmp_path, "breastmnist", **arrays)
        told(words, "medmnist:breastmnist", tmp_path)


def test_tinyimagenet_faults(tmp_path):
    home = tmp_path / "tiny-imagenet-200"
    write_png(home / "train" / "n1" / "images" / "n1_0.png", images_of(1, size=64)[0])
    (home / "wnids.txt").write_text("n1\n")
    told("val is incomplete: it has no val_annotations.txt", "tinyimagenet", tmp_path)
    (home / "val").mkdir(exist_ok=True)
    (home / "val" / "val_annotations.txt").write_text("val_0.png\tn9\t0\t0\t1\t1\n")
    told("line 1 names the class 'n9'", "tinyimagenet", tmp_path)
    (home / "val" / "val_annotations.txt").write_text("val_0.png\tn1\t0\t0\t1\t1\n")
    told("it has no val_0.png", "tinyimagenet", tmp_path)


def test_folder_faults(tmp_path):
    told("there is no folder", f"folder:{tmp_path / 'none'}")
    told("holds no class folders", f"folder:{tmp_path}")
    write_png(tmp_path / "a" / "1.png", images_of(1)[0])
    (tmp_path / "b").mkdir()
    told(f"{tmp_path}/b holds no images", f"folder:{tmp_path}")
    write_png(tmp_path / "b" / "1.png", images_of(1)[0])
    told("too few labels", f"folder:{tmp_path}")
    for i in range(2, 6):
        write_png(tmp_path / "b" / f"{i}.png", images_of(1)[0])
    whole = (tmp_path / "b" / "3.png").read_bytes()
    for content in (whole[: len(whole) // 2], b"no image", b"", whole[:100] + b"\xff" * 20 + whole[120:]):
        (tmp_path / "b" / "3.png").write_bytes(content)
        told("b/3.png is " + ("truncated or not an image" if content else "empty"), f"folder:{tmp_path}")


def test_folder_train_and_test_faults(tmp_path):
    write_png(tmp_path / "train" / "a" / "1.png", images_of(1)[0])
    told("has a folder train but no folder test", f"folder:{tmp_path}")
    (tmp_path / "test").mkdir()
    told("test holds no class folders", f"folder:{tmp_path}")
    write_png(tmp_path / "test" / "A" / "1.png", images_of(1)[0])
    told("test/A has no counterpart", f"folder:{tmp_path}")


def test_unreadable_folder(tmp_path, monkeypatch):
    write_png(tmp_path / "a" / "1.png", images_of(1)[0])
    refused = tmp_path / "a"
    real = os.scandir

    def scandir(path):
        if Path(path) == refused:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    told(f"{refused} cannot be read: permission denied", f"folder:{tmp_path}")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_unreadable_set(tmp_path):
    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py").chmod(0)
    try:
        told("cifar-10-batches-py.* cannot be read: permission denied", "cifar10", tmp_path)
    finally:
        (tmp_path / "cifar-10-batches-py").chmod(0o755)


@pytest.mark.parametrize(("text", "words"), [
    ("file;label\na.png;x\n", "has no column 'file' .found: file;label"), ("file,client\na.png,1\n", "has no column 'label'"),
    ("", "has no column 'file' .found: none"), ("file,label\n", "lists no training image"), ("file,label\n,x\n", "line 2 .* names no file"),
    ("file,label\na.png,x\nb.png,x\n", "line 3 .* names b.png, and there is no file"), ("file,label\na.png,\n", "no labelled"),
    ("file,label,split\na.png,x,val\n", "the split 'val'"), ("file,label,split\na.png,x,\na.png,,test\n", "line 3 .* without a label"),
    ("file,label,client\na.png,x,\n", "line 2 .* names no client"), ("file,label,split\na.png,x,\na.png,y,test\n", "the label 'y', which no"),
    ("file,label\na.png,\xff\n", "not a CSV in UTF-8"), ("file,label\na.png,x\nbad.png,x\n", "bad.png is truncated or not an image"),
])  # fmt: skip
def test_csv_faults(tmp_path, text, words):
    write_png(tmp_path / "a.png", images_of(1)[0])
    (tmp_path / "bad.png").write_bytes(b"\x89PNG")
    (tmp_path / "list.csv").write_bytes(text.encode("latin1"))
    told(words, f"csv:{tmp_path / 'list.csv'}")


@pytest.mark.parametrize(("arrays", "words"), [
    ({"labels": np.zeros(4, int)}, "no array 'images'"), ({"images": images_of(4)}, "no array 'labels'"),
    ({"images": images_of(4) / 255, "labels": np.zeros(4, int)}, "float64 images"),
    ({"images": images_of(4), "labels": np.zeros(4)}, "labels of type float64"),
    ({"images": images_of(4), "labels": np.zeros(3, int)}, "4 images but 3 labels"),
    ({"images": images_of(4), "labels": np.full(4, -1)}, "no labelled image"),
    ({"images": images_of(4), "labels": np.array([0, 0, -2, 1])}, "the label -2, out of range"),
    ({"images": images_of(4), "labels": np.array([0, 0, 2, 1]), "classes": np.array(["a", "b"])}, "the label 2, out of range"),
    ({"images": images_of(4), "labels": np.array([0] * 4), "clients": np.zeros(2)}, "4 images but 2 clients"),
    ({"images": images_of(4), "labels": np.array([0] * 4), "test_images": images_of(1)}, "only one of"),
    ({"images": images_of(4), "labels": np.array([0] * 4), "test_images": images_of(1, 1), "test_labels": np.zeros(1, int)}, "another shape"),
    ({"images": images_of(4), "labels": np.array([0] * 4), "test_images": images_of(1), "test_labels": np.array([-1])}, "label -1, out"),
    ({"images": images_of(4, 4), "labels": np.zeros(4, int)}, "shape .4, 4, 28, 28"),
    ({"images": np.array([{}, {}], object), "labels": np.zeros(2, int)}, "Python objects inside"),
])  # fmt: skip
def test_numpy_faults(tmp_path, arrays, words):
    np.savez(tmp_path / "own.npz", **arrays)
    told(words, f"numpy:{tmp_path / 'own.npz'}")


def test_numpy_files_that_are_none(tmp_path):
    path = tmp_path / "own.npz"
    told("there is no file", f"numpy:{path}")
    np.savez(path, images=images_of(4), labels=np.zeros(4, int))
    whole = path.read_bytes()
    for content in (whole[:-40], whole[:3000], b"", b"PK\x03\x04 nothing", whole[:2000] + b"\x00" * 9 + whole[2009:]):
        path.write_bytes(content)
        told("own.npz is damaged", f"numpy:{path}")
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    told("single array", f"numpy:{path}")


@pytest.mark.parametrize(("items", "words"), [
    ([], "without items"), ([(images_of(1)[0], 0), (images_of(1, size=9)[0], 0)], "item 1 of train has the shape"),
    ([(np.zeros((28, 28)) - 1, 0)], "outside 0 to 1"), ([3], "is not an .image, label. pair"), ([(np.zeros((2, 5, 5, 1)), 0)], "shape"),
    ([(images_of(1)[0], 9)], "the label 9, out of range"),
])  # fmt: skip
def test_dataset_faults(items, words):
    with pytest.raises(UserError, match=words):
        from_dataset(Pairs(items), Pairs([(images_of(1)[0], 0)]), classes=["a", "b"])


# real excerpts, where they lie beside the checkout

TINY_SETS = {  # name: (train, test, classes, size, channels)
    "cifar10": (400, 100, 10, 32, 3), "cifar100": (100, 100, 100, 32, 3), "svhn": (150, 50, 10, 32, 3),
    "mnist": (200, 100, 10, 28, 1), "fashion-mnist": (200, 100, 10, 28, 1), "emnist:balanced": (188, 94, 47, 28, 1),
    "stl10": (15, 5, 10, 96, 3), "cinic10": (20, 20, 10, 32, 3), "tinyimagenet": (80, 20, 10, 64, 3),
    "medmnist:breastmnist": (546, 156, 2, 28, 1),
}  # fmt: skip


@pytest.mark.skipif(not TINY.is_dir(), reason="the real excerpts are not beside this checkout")
@pytest.mark.parametrize("name", TINY_SETS)
def test_real_excerpts(name):
    source = load(name, TINY)
    assert (len(source.train), len(source.test), len(source.classes), source.size, source.channels) == TINY_SETS[name]
    assert source.train.images.float().std() > 10


@pytest.mark.skipif(not TINY.is_dir(), reason="the real excerpts are not beside this checkout")
def test_real_excerpts_agree_between_python_and_binary(tmp_path):
    (tmp_path / "cifar-10-batches-bin").symlink_to(TINY / "cifar-10-batches-bin")
    python, binary = load("cifar10", TINY), load("cifar10", tmp_path)
    assert torch.equal(python.train.images, binary.train.images)
    assert torch.equal(python.test.labels, binary.test.labels)
