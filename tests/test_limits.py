"""What is too much or not what it says: bounded, refused in a sentence, never a traceback, a hang or a crash."""

from __future__ import annotations

import pickle
import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from fallow import limits
from fallow.data.readers.pickled import Array, Refused, parsed
from fallow.data.sources import load
from fallow.errors import UserError

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
        with pytest.raises(UserError, match="data_batch_1 is damaged"):
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
    with pytest.raises(UserError, match="does not suffice for reading it"), limits.memory_told("reading it"):
        raise MemoryError
    with pytest.raises(RuntimeError, match="other"), limits.memory_told("reading it"):
        raise RuntimeError("other")
