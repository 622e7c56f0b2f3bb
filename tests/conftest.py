"""What several tests need: a small data set, tiny settings, and ways to compare runs."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("FALLOW_DATA", "/nonexistent/fallow-data")  # no test reads the user's own data
os.environ["FALLOW_HOME"] = tempfile.mkdtemp(prefix="fallow-home-")  # nor changes what the user trusts
os.environ["FALLOW_CACHE"] = tempfile.mkdtemp(prefix="fallow-cache-")  # nor keeps images beside his
torch.set_num_threads(1)  # as the engine does; with more of them a busy machine is slow

from fallow.data import sources  # noqa: E402
from fallow.data.readers.common import ImageSet  # noqa: E402
from fallow.data.sources import Source  # noqa: E402

HERE = Path(__file__).parent
SINGLE = torch.float32
TINY: dict[str, Any] = {
    "data": "few-digits", "clients": 4, "active": 2, "label_count": 40, "batch": 8, "steps": 2, "rounds": 2,
    "device": "cpu", "slots": 1, "defaults": "paper",
}  # fmt: skip


def few_digits() -> Source:
    """240 of scikit-learn's digits for training, 60 for testing."""
    whole = sources.load("digits")
    train, test = whole.train, whole.test
    return Source(
        "few-digits", whole.classes, ImageSet(train.images[:240], train.labels[:240]), ImageSet(test.images[:60], test.labels[:60]), False
    )


sources.register("few-digits", few_digits)


def weights(path: Path) -> bytes:
    """The bytes of a run's result."""
    return (path / "model.safetensors").read_bytes()


def best_weights(path: Path) -> bytes | None:
    """The bytes of the best round's weights, where a run keeps them."""
    file = path / "best.safetensors"
    return file.read_bytes() if file.exists() else None


def rows(path: Path) -> list[dict[str, Any]]:
    """A run's metrics, times aside; what stands behind the last whole line is a row that a kill cut off."""
    lines = (path / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def same(one: Path, other: Path) -> None:
    """Two runs came to the same bits."""
    assert rows(one) == rows(other)
    assert weights(one) == weights(other)
    assert best_weights(one) == best_weights(other)


class Told:
    """What a command printed and how it ended."""

    def __init__(self, code: int, out: str, err: str):
        self.code, self.out, self.err = code, out, err

    @property
    def sentence(self) -> str:
        """The one sentence of a user's mistake."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert self.err.startswith("error: ") and self.err.count("\n") == 1, self.err
        assert "Traceback" not in self.err + self.out
        return self.err.removeprefix("error: ").strip()


@pytest.fixture
def ctrl_c_is_heard() -> Iterator[None]:
    """A shell that puts tests into the background has them ignore Ctrl-C, nohup a closed terminal, and their children with them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    hung_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before)
    signal.signal(signal.SIGHUP, hung_up)


@pytest.fixture
def in_double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is float32 is float64. Two ways to one number then differ by some 1e-15 on every CPU, too little to tip a ReLU,
    a maximum or a threshold; in float32 some seed on some CPU has a value within rounding of each."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(SINGLE)


@pytest.fixture
def fallow_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """The command line in this process, in a folder of its own."""
    from fallow import cli

    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> Told:
        monkeypatch.setattr(sys, "argv", ["fallow", *words])
        capsys.readouterr()
        code: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        printed = capsys.readouterr()
        return Told(code, printed.out, printed.err)

    return call
