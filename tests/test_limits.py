"""What is too much or not what it says: bounded, refused in a sentence, never a traceback, a hang or a crash."""

from __future__ import annotations

import gzip
import io
import logging
import os
import pickle
import random
import socket
import struct
import tarfile
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from test_page import fabricated, row, watching

from fallow import disk, limits
from fallow.data.holdings import Federation
from fallow.data.readers import archives, images, kept
from fallow.data.readers.holdout import in_order
from fallow.data.readers.pickled import Array, Refused, parsed
from fallow.data.sources import fit, from_dataset, load
from fallow.errors import UserError
from fallow.export.predict import predict
from fallow.paths import open_plain, shown, user_path
from fallow.report import watch
from fallow.runs import finding
from fallow.trees import parse_pairs, read_yaml
from fallow.yamls import safe_yaml

TINY = Path(__file__).resolve().parents[2] / "shared" / "data" / "tiny"


# CIFAR's pickles


def batch(count: int = 2, text: bool = False) -> dict[bytes | str, object]:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3072), np.uint8)
    made = {b"data": pixels, b"labels": [i % 10 for i in range(count)], b"filenames": [b"a.png"] * count, b"batch_label": b"1 of 5"}
    return {key.decode(): value for key, value in made.items()} if text else made  # type: ignore[return-value]


def python2(pixels: np.ndarray, labels: list[int]) -> bytes:
    """A batch as Python 2 and numpy 1 wrote the official ones, instruction by instruction."""
    raw = pixels.tobytes()
    rows = b"".join(b"K" + bytes([label]) for label in labels)
    kind = b"cnumpy\ndtype\nq\x08(U\x02u1q\tK\x00K\x01tq\nRq\x0b(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"M" + struct.pack("<H", len(pixels)) + b"M\x00\x0c\x86"
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x04(cnumpy\nndarray\nq\x05K\x00\x85U\x01btR(K\x01" + shape + kind
    return b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03(" + rows + b"eU\x04dataq\x06" + array + b"\x89T" + struct.pack("<I", len(raw)) + raw + b"tbu."


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("text", [True, False])
def test_pickles_are_read_as_python_reads_them(protocol, text):
    given = batch(3, text)
    found = parsed(pickle.dumps(given, protocol=protocol))
    assert list(found) == list(given)
    for key, value in given.items():
        if isinstance(value, np.ndarray):
            assert isinstance(found[key], Array) and np.array_equal(found[key].pixels, value)
        else:
            assert found[key] == value


def test_pickles_of_python_2():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3072), np.uint8)
    content = python2(pixels, [3, 0, 9, 255])
    found, by_pickle = parsed(content), pickle.loads(content, encoding="bytes")
    assert found[b"labels"] == by_pickle[b"labels"] == [3, 0, 9, 255]
    assert np.array_equal(found[b"data"].pixels, pixels) and np.array_equal(by_pickle[b"data"], pixels)


def test_columns_first():
    pixels = np.asfortranarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    assert parsed(pickle.dumps({b"data": pixels}, protocol=2))[b"data"].pixels.tolist() == pixels.tolist()


REAL = [*TINY.glob("cifar-1*-python/*"), *TINY.glob("cifar-1*-py/*")]


@pytest.mark.skipif(not REAL, reason="the excerpts of real sets are not there")
def test_real_pickles_are_read_as_python_reads_them():
    for path in REAL:
        found, by_pickle = parsed(path.read_bytes()), pickle.loads(path.read_bytes(), encoding="bytes")
        assert found.keys() == by_pickle.keys()
        for key, value in by_pickle.items():
            mine = found[key].pixels if isinstance(found[key], Array) else found[key]
            assert np.array_equal(mine, value) if isinstance(value, np.ndarray) else mine == value


HOSTILE = {
    "a dtype's own state": b"\x80\x02cnumpy\ndtype\n(U\x02V8K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\x7fK\x01K\x10tb.",
    "a dtype with fields": b"\x80\x02cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|N(U\x01a\x85}K\x01K\x01K\x10tb.",
    "a function": b"cos\nsystem\n(U\x02lstR.",
    "a module of numpy": b"cnumpy\nload\n(U\x02lstR.",
    "a name that is text": b"\x80\x04\x8c\x05posix\x8c\x06system\x93.",
    "a name that is no text": b"\x80\x04K\x01K\x02\x93.",
    "an extension": b"\x80\x02\x82\x01.",
    "a class": b"\x80\x02cnumpy\nndarray\n)\x81.",
    "an old class": b"(inumpy\nndarray\n.",
    "a persistent id": b"P1\n.",
    "a buffer": b"\x80\x05\x97.",
    "a promise of 4 GB": b"\x80\x02T\xff\xff\xff\xff.",
    "a promise of 16 EiB": b"\x80\x04\x8e" + b"\xff" * 8 + b".",
    "a deep key": b"}" + b")" + b"\x85" * 50_000 + b"K\x01s.",
    "a key that is a list": b"}]K\x01s.",
    "an object not made": b"h\x07.",
    "no end": b"}" * 2_000_000,
    "no mark": b"e.",
    "nothing": b".",
    "only a mark": b"(.",
    "bytes again and again": b"\x80\x02(X\xa0\x86\x01\x00" + b"a" * 100_000 + b"q\x00" + b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R" * 3000 + b"t.",
    "another encoding": b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00utf16\x86R.",
    "a shape too large": python2(np.zeros((2, 3072), np.uint8), [0, 1]).replace(b"M\x02\x00M", b"M\xff\xffM"),
    "a negative shape": python2(np.zeros((2, 3072), np.uint8), [0, 1]).replace(b"M\x00\x0c", b"J\x00\xf4\xff\xff"),
    "a line without end": b"c" + b"a" * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_pickles_are_refused(content, tmp_path):
    with pytest.raises(ValueError):
        parsed(content)


def test_changed_pickles_end_in_a_sentence_and_little_memory():
    seeds = [pickle.dumps(batch(), protocol=2), pickle.dumps(batch(), protocol=4), python2(np.ones((2, 3072), np.uint8), [1, 2])]
    draw = random.Random(0)
    refused = 0
    tracemalloc.start()
    try:
        for number in range(3000):
            content = bytearray(seeds[number % 3])
            heads = [*range(120), *range(len(content) - 300, len(content))]  # most of a file is pixels
            for _ in range(draw.randint(1, 4)):
                at = draw.choice(heads)
                if draw.random() < 0.3:
                    content[at:at] = draw.randbytes(draw.randint(1, 6))
                elif draw.random() < 0.3:
                    del content[at : at + draw.randint(1, 6)]
                else:
                    content[min(at, len(content) - 1)] = draw.randrange(256)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                parsed(bytes(content))
            except ValueError:
                refused += 1
            assert tracemalloc.get_traced_memory()[1] - before < 10 * len(content) + 100_000
    finally:
        tracemalloc.stop()
    assert refused > 1000


def test_a_hostile_cifar_file_is_told(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for content in (HOSTILE["a dtype's own state"], pickle.dumps({b"data": [[1]], b"labels": [True]}), pickle.dumps({b"data": b"x" * 3072})):
        (folder / "data_batch_1").write_bytes(content)
        with pytest.raises(UserError, match=r"data_batch_1 is damaged"):
            load("cifar10", tmp_path)
    assert issubclass(Refused, ValueError)


# memory


def test_what_memory_there_is():
    import resource
    import subprocess
    import sys

    assert 0 < limits.available() < 2**50
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30));"
        "from fallow.limits import available; assert available() < 2**30; print(available())"
    )
    assert int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) < 2**30
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != 2**30


def test_memory_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(limits, "available", lambda: 3 << 20)
    limits.check_room(3 << 20, "reading it")
    with pytest.raises(UserError, match=r"reading it takes 4.0 MiB of memory, and 3.0 MiB are free"):
        limits.check_room(4 << 20, "reading it")
    with pytest.raises(UserError, match=r"does not suffice for reading it"), limits.memory_told("reading it"):
        raise MemoryError
    with pytest.raises(RuntimeError, match=r"other"), limits.memory_told("reading it"):
        raise RuntimeError("other")


def small(monkeypatch: pytest.MonkeyPatch, mebibytes: int) -> None:
    monkeypatch.setattr(limits, "available", lambda: mebibytes << 20)


def png(path: Path, side: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (side, side)).save(path)


def test_images_that_do_not_fit_are_told_before_they_are_decoded(tmp_path, monkeypatch):
    for name in ("a/1.png", "a/2.png", "b/1.png", "b/2.png"):
        png(tmp_path / name, 1000)
    small(monkeypatch, 3)
    with pytest.raises(UserError, match=r"holding 4 images of 1000x1000 takes 3.8 MiB of memory, and 3.0 MiB are free; give a smaller image.size"):
        load(f"folder:{tmp_path}")
    with pytest.raises(UserError, match=r"holding 4 images of 100000x100000"):
        load(f"folder:{tmp_path}", size=100_000)
    assert load(f"folder:{tmp_path}", size=8).size == 8
    monkeypatch.setattr(images, "LARGE", 999_999)
    kept.clear()  # what was decoded is not decoded again
    with pytest.raises(UserError, match=r"1.png cannot be used: decoding 1000x1000 pixels takes 15.3 MiB"):
        load(f"folder:{tmp_path}", size=8)


@pytest.mark.parametrize("how", ["pad", "resize"])
def test_image_size_that_does_not_fit(how):
    with pytest.raises(UserError, match=r"bringing 1,500 images to 100000x100000 takes 13,969.8 GiB"):
        fit(load("digits"), 100_000, how)
    with pytest.raises(UserError, match=r"bringing 1,500 images"):
        fit(load("digits"), 10**30, how)


def test_memory_that_ends_in_a_reader_is_told(monkeypatch):
    def full() -> None:
        raise np._core._exceptions._ArrayMemoryError((2**60,), np.dtype(np.uint8))

    monkeypatch.setitem(__import__("fallow.data.sources", fromlist=["x"])._registered, "mine", full)
    with pytest.raises(UserError, match=r"the memory does not suffice for the data set mine"):
        load("mine")


# idx, npz, archives


def idx_bomb(folder: Path, promised: tuple[int, int, int], content: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    header = struct.pack(">BBBB3I", 0, 0, 8, 3, *promised)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + content, 1))


def test_idx_reads_no_more_than_promised(tmp_path, monkeypatch):
    idx_bomb(tmp_path / "mnist", (2, 28, 28), bytes(64 << 20))
    labels = struct.pack(">BBBBI", 0, 0, 8, 1, 2) + bytes(2)
    (tmp_path / "mnist" / "train-labels-idx1-ubyte").write_bytes(labels)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"more bytes than its header promises"):
            load("mnist", tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        idx_bomb(tmp_path / "mnist", (2**32 - 1, 2**32 - 1, 2**32 - 1), bytes(100))
        with pytest.raises(UserError, match=r"truncated"):
            load("mnist", tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    idx_bomb(tmp_path / "mnist", (2**20, 28, 28), bytes(64 << 20))
    small(monkeypatch, 8)
    with pytest.raises(UserError, match=r"reading .*train-images-idx3-ubyte.gz takes 12.0 MiB of memory"):
        load("mnist", tmp_path)


def npy(shape: str, kind: str = "|u1", content: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    header = f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY" + version + struct.pack("<H" if version[0] == 1 else "<I", len(header)) + header + content


def zipped(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, content in members.items():
            out.writestr(name.replace("__", "."), content)
    return path


LABELS = npy("(2,)", "<i8", np.zeros(2, np.int64).tobytes())
NPZ = {
    "58 TiB": npy("(1000000, 8000, 8000)"), "negative": npy("(-1, 8, 8)"), "text": b"hello", "empty": b"", "objects": npy("(2,)", "|O"),
    "too deep": npy("(" * 500), "no header": b"\x93NUMPY\x01\x00\xff\xff", "code": npy("__import__('os')"), "a set": npy("{1}"), "text shape": npy("'ab'"),
    "version 3": npy("(2, 8, 8)", content=bytes(128), version=b"\x03\x00"), "bad kind": npy("(2,)", "zz"), "float shape": npy("(2.0, 8, 8)"), "header of 4 GB": b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
}  # fmt: skip


@pytest.mark.parametrize("content", NPZ.values(), ids=NPZ)
def test_npz_members_are_checked_before_they_are_read(tmp_path, content):
    path = zipped(tmp_path / "own.npz", images__npy=content, labels__npy=LABELS)
    with pytest.raises(UserError, match=r"own.npz is damaged"):
        load(f"numpy:{path}")
    with pytest.raises(UserError, match=r"is damaged"):
        Federation.load(path)


def test_npz_with_text_beside_arrays(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 8), np.uint8)
    four = npy("(4,)", "<i8", np.array([0, 1, 0, 1]).tobytes())
    path = zipped(tmp_path / "own.npz", readme__txt=b"hello", images__npy=npy("(4, 8, 8)", content=pixels.tobytes()), labels__npy=four, other__npy=npy("(10**9,)"))
    source = load(f"numpy:{path}")
    found = torch.cat([source.train.images, source.test.images])[:, 0]
    assert sorted(found.tolist()) == sorted(pixels.tolist())
    with pytest.raises(UserError, match=r"own.npz is damaged"):
        load(f"numpy:{zipped(path, images=b'hello', labels__npy=four)}")


def test_matlab_files_that_do_not_fit(tmp_path, monkeypatch):
    """A header may promise what the file unpacks to, or what it does not have."""
    from scipy.io import savemat

    (tmp_path / "svhn").mkdir()
    file = tmp_path / "svhn" / "train_32x32.mat"
    savemat(file, {"X": np.zeros((32, 32, 3, 4096), np.uint8), "y": np.ones((4096, 1), np.uint8)}, do_compression=True)
    assert file.stat().st_size < 1 << 20
    small(monkeypatch, 8)
    with pytest.raises(UserError, match=r"reading .*train_32x32.mat takes .* MiB of memory, and 8.0 MiB are free"):
        load("svhn", tmp_path)


def test_npz_that_does_not_fit(tmp_path, monkeypatch):
    small(monkeypatch, 3)
    np.savez_compressed(tmp_path / "own.npz", images=np.zeros((4, 1024, 1024), np.uint8), labels=np.zeros(4, int))
    with pytest.raises(UserError, match=r"reading .*own.npz takes 4.0 MiB of memory, and 3.0 MiB are free"):
        load(f"numpy:{tmp_path / 'own.npz'}")


def test_archives_that_unpack_to_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "SPARE", 1 << 20)
    with zipfile.ZipFile(tmp_path / "tiny-imagenet-200.zip", "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("tiny-imagenet-200/wnids.txt", bytes(8 << 20))
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as packed:
        info = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        info.size = 8 << 20
        packed.addfile(info, io.BytesIO(bytes(8 << 20)))
    for name in ("tinyimagenet", "cifar10"):
        with pytest.raises(UserError, match=r"it would unpack to 8.0 MiB"):
            load(name, tmp_path)
    monkeypatch.setattr(archives, "SPARE", 1 << 30)
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda folder: os.statvfs_result and type("U", (), {"free": 1 << 20}))
    with pytest.raises(UserError, match=r"takes 8.0 MiB of disk, and 1.0 MiB are free"):
        load("cifar10", tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cifar-10-python.tar.gz", "tiny-imagenet-200.zip"]


# labels


@pytest.mark.parametrize("labels", [
    np.array([0, 2**32 - 1, 0, 1], np.uint32), np.array([0, 2**64 - 1, 0, 1], np.uint64), np.array([0, 2**63 - 1, 0, 1]),
    np.array([-(2**63), 0, 0, 1]), np.array([0, 100_000, 0, 1]),
])  # fmt: skip
def test_labels_are_checked_before_names_are_made(tmp_path, labels):
    np.savez(tmp_path / "own.npz", images=np.zeros((4, 8, 8), np.uint8), labels=labels)
    with pytest.raises(UserError, match=r"own.npz has the label .*out of range"):
        load(f"numpy:{tmp_path / 'own.npz'}")


@pytest.mark.parametrize("label", [10**30, 2**32 - 1, -5, float("inf"), float("nan"), torch.tensor([1, 2]), "x"])
def test_labels_of_datasets(label):
    good = [(np.zeros((8, 8), np.uint8), 0)] * 2
    with pytest.raises(UserError, match=r"item 1 of train"):
        from_dataset([good[0], (good[0][0], label)], good)


def test_classes_named_by_very_long_numbers():
    long = "9" * 5000
    assert in_order({"10", "9", "010", long, "0"}) == ("0", "9", "010", "10", long)


# YAML


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    return "\n".join(lines + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)])


YAML = {
    "aliases": bomb(9), "merges": "a: &a {x: 1}\n" + "".join(f"b{i}: &b{i}\n  <<: [{', '.join(['*a' if not i else f'*b{i - 1}'] * 10)}]\n" for i in range(9)),
    "itself": "a: &a [*a]", "itself as a key": "a: &a {b: *a}", "deep": "a: " + "[" * 30_000, "deep blocks": "- " * 20_000, "deep keys": "? " * 5000,
    "a date": "a: 2020-13-45", "int": "a: !!int x", "digits": f"a: {'9' * 5000}", "hex": f"a: 0x{'f' * 5000}", "minutes": "a: 1" + ":1" * 50_000, "bool": "a: !!bool x",
    "timestamp": "a: !!timestamp x", "long": "a: b\n" * 1_000_000, "binary digits": "a: 0b_", "lists as keys": "[1]: 2",
}  # fmt: skip


@pytest.mark.parametrize("text", YAML.values(), ids=YAML)
def test_yaml_is_bounded(tmp_path, text):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(UserError, match=r"r.yaml is not valid YAML"):
        read_yaml(tmp_path / "r.yaml")
    with pytest.raises(yaml.YAMLError):
        safe_yaml(text)


def test_yaml_within_bounds():
    text = bomb(4) + "\nb: {<<: {c: 1}, d: 2020-01-31, e: [1, 0x10, 1:30, 1.5, ~, yes]}"
    assert safe_yaml(text) == yaml.safe_load(text)


def test_yaml_files_that_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "r.yaml")
    with pytest.raises(UserError, match=r"r.yaml cannot be read"):
        read_yaml(tmp_path / "r.yaml")


@pytest.mark.parametrize("text", ["2020-13-45", "!!int x", "[[[" * 1000, "!!python/object:os.system x", "&a [*a]"])
def test_values_of_keys_that_are_no_yaml_are_text(text):
    assert parse_pairs([f"data={text}"]) == {"data": text}


# special files, names, paths


def test_special_files_are_left_out_with_a_word(tmp_path, caplog):
    for name in ("a/1.png", "a/2.png", "b/1.png", "b/2.png"):
        png(tmp_path / name)
    os.mkfifo(tmp_path / "a" / "f.png")
    with socket.socket(socket.AF_UNIX) as s, caplog.at_level(logging.WARNING):
        s.bind(os.path.relpath(tmp_path / "b" / "s.png"))
        assert len(load(f"folder:{tmp_path}").train) == 2
    assert [r.getMessage().partition(": ")[2] for r in caplog.records] == [
        "1 named as images are no plain files and are left out (f.png is the first)",
        "1 named as images are no plain files and are left out (s.png is the first)",
    ]
    (tmp_path / "own.csv").write_text("file,label\na/1.png,x\na/f.png,x\n")
    with pytest.raises(UserError, match=r"line 3 of .*own.csv names a/f.png, which is no plain file"):
        load(f"csv:{tmp_path / 'own.csv'}")
    for kind in ("csv", "numpy", "folder"):
        with pytest.raises(UserError, match=r"there is no (file|folder)"):
            load(f"{kind}:{tmp_path / 'a' / 'f.png'}")
    with pytest.raises(OSError, match=r"not a plain file"):
        open_plain("/dev/null")


def odd(folder: Path) -> list[Path]:
    """Images in a class and under a name that are no UTF-8."""
    paths = [Path(os.fsdecode(os.fsencode(folder) + b"/" + name)) for name in (b"a/1.png", b"a/\xff2.png", b"caf\xe9/1.png", b"caf\xe9/\xe92.png")]
    for path in paths:
        png(path)
    return paths


def test_names_that_are_no_utf8(tmp_path):
    paths = odd(tmp_path / "photos")
    source = load(f"folder:{tmp_path / 'photos'}")
    assert source.classes == ("a", "caf\\udce9") and len(source.train) + len(source.test) == 4
    paths[3].write_bytes(b"no image")
    with pytest.raises(UserError) as caught:
        load(f"folder:{tmp_path / 'photos'}")
    assert "\\udce92.png is truncated or not an image" in str(caught.value)
    str(caught.value).encode()
    disk.write(tmp_path / "out.txt", "caf\udce9")
    assert (tmp_path / "out.txt").read_bytes() == b"caf\\udce9"


def test_predict_of_names_that_are_no_utf8_and_of_special_files(tmp_path, fallow_cli):
    import csv

    import fallow

    run = fallow.run(out=tmp_path, name="run", method="fedavg", label_ratio=0.5, clients=2, rounds=1, batch=8, steps=1, device="cpu").path
    odd(tmp_path / "photos")[3].write_bytes(b"no image")
    os.mkfifo(tmp_path / "photos" / "a" / "f.png")
    done = predict(run, tmp_path / "photos", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as f:
        found = {r["file"]: (bool(r["label"]), r["error"][:20]) for r in csv.DictReader(f)}
    assert found == {
        "a/1.png": (True, ""), "a/\\udcff2.png": (True, ""), "a/f.png": (False, "cannot be read (not "),
        "caf\\udce9/1.png": (True, ""), "caf\\udce9/\\udce92.png": (False, "is truncated or not "),
    }  # fmt: skip
    assert len(done.unreadable) == 2
    told = fallow_cli("predict", str(run), str(tmp_path / "photos"), "-o", os.fsdecode(b"caf\xe9.csv"))
    assert told.code == 0 and "caf\\udce9.csv" in told.out, told.err


@pytest.mark.parametrize(("text", "words"), [
    ("~nouser/x", "home of a user who is not known"), ("a\0b", "NUL byte"), ("", "empty"), ("a" * 300, "too long"), ("a/" * 3000, "too long"), ("\ud800", "no file name has"),
])  # fmt: skip
def test_paths_that_are_none(text, words):
    with pytest.raises(UserError, match=words):
        user_path(text)
    for kind in ("folder", "csv", "numpy") if text else ():
        with pytest.raises(UserError, match=words):
            load(f"{kind}:{text}")
    with pytest.raises(UserError, match=words):
        load("mnist", text)
    with pytest.raises(UserError, match=words):
        finding.found([text])


def test_paths(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/x") == Path("/home/me/x") and user_path("./~nouser") == Path("~nouser") and user_path(Path("a")) == Path("a")
    assert shown("é\udce9") == "é\\udce9"


# watch


def answer(connection: socket.socket) -> bytes:
    connection.settimeout(20)
    got = b""
    while chunk := connection.recv(65536):
        got += chunk
    return got


def test_watch_bounds_connections_and_half_sent_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(watch.Answers, "timeout", 0.5)
    monkeypatch.setattr(watch, "SECONDS", 0.5)
    run = fabricated(tmp_path / "run", [row(1)])
    with watching(run) as server:
        place = (watch.LOOPBACK, server.server.server_port)
        half = [socket.create_connection(place) for _ in range(watch.CONNECTIONS)]
        for connection in half:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
        with socket.create_connection(place) as further:
            first = answer(further)
        assert first.startswith(b"HTTP/1.1 503")
        for connection in half:  # each is cut off, and none is answered
            assert answer(connection) == b""
            connection.close()
        with socket.create_connection(place) as again:
            again.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            assert answer(again).startswith(b"HTTP/1.1 200")


def test_watch_cuts_a_request_that_drips(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "SECONDS", 0.5)
    with watching(fabricated(tmp_path / "run", [row(1)])) as server, socket.create_connection((watch.LOOPBACK, server.server.server_port)) as slow:
        slow.settimeout(0.02)
        with pytest.raises((ConnectionError, EOFError)):
            for _ in range(3000):
                slow.sendall(b"x")
                try:
                    if not slow.recv(1):
                        raise EOFError
                except TimeoutError:
                    pass


@pytest.mark.parametrize("config", [
    {"rounds": float("nan")}, {"rounds": float("inf")}, {"rounds": "x"}, {"lr": float("nan")}, {1: 2, "a": 3}, {"image": {1: 2, "size": float("nan")}}, {"rounds": 10**400},
], ids=str)  # fmt: skip
def test_odd_configs_are_shown(tmp_path, config):
    fabricated(tmp_path / "run", [row(1, 10**400), row(2)], **{"rounds": 5})
    keys: dict[Any, Any] = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()) | config
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(keys))
    (tmp_path / "run" / "summary.json").write_text('{"device": NaN, "commit": [NaN], "versions": {"torch": NaN}}')
    with watching(tmp_path / "run") as server, socket.create_connection((watch.LOOPBACK, server.server.server_port)) as asked:
        asked.sendall(b"GET /runs.json HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        got = answer(asked)
    assert got.startswith(b"HTTP/1.1 200") and b'"error"' not in got and b"NaN" not in got.split(b'"versions"')[0].split(b'"config"')[0].split(b'"made"')[0], got[:300]


def test_a_decoder_has_no_word_of_its_own(tmp_path, recwarn):
    """Of a tag that promises more than there is Pillow warns, and then cannot read the file."""
    file = io.BytesIO()
    Image.new("CMYK", (8, 8)).save(file, "TIFF")
    data = bytearray(file.getvalue())
    entry = data.index(b"\x11\x01")  # StripOffsets: tag, kind, count, value
    data[entry + 4 : entry + 8] = (2**20).to_bytes(4, "little")
    (tmp_path / "a.tif").write_bytes(data)
    with pytest.raises(UserError, match=r"a\.tif"):
        images.decode([tmp_path / "a.tif"])
    assert not recwarn.list
