"""What Python hands to run, resume and load beside what a command line could say: one sentence for each that is of another kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TINY

import fallow
from fallow import UserError

BIG = 10**5000  # Python writes no number of so many digits


def told(what: Any, *args: Any, **named: Any) -> str:
    with pytest.raises(UserError) as error:
        what(*args, **named)
    return str(error.value)


@pytest.mark.parametrize("value", [BIG, -BIG, [BIG], {"x": BIG}, {BIG: 1}, {BIG}], ids=["big", "negative", "list", "dict", "key", "set"])
def test_a_number_of_5000_digits_for_any_key(value: Any, tmp_path: Path) -> None:
    for name in ("labels", "method", "data", "rounds", "lr", "seed", "track", "measure", "image", "augment", "partition", "reading", "defaults", "nokey"):
        assert len(told(fallow.run, **TINY | {"out": tmp_path, name: value})) < 700


@pytest.mark.parametrize(("named", "said"), [
    ({"out": 3}, "out=3 is no path; give the path of a folder, as a text or a Path."),
    ({"out": b"x"}, "out=b'x' is no path; "),
    ({"out": "a\0b"}, "out='a\\x00b' has a NUL character in it"),
    ({"name": 3}, "name=3 is no name; give a text, or leave it out."),
    ({"name": "a\0b"}, "name='a\\x00b' has a NUL character in it"),
    ({"recipe": 3}, "3 is no recipe; give a recipe's name, the path of a .yaml file, or a dict of keys."),
    ({"recipe": ["demo"]}, "['demo'] is no recipe; "),
    ({"stop_after": 1.5}, "--stop-after=1.5 is no number of rounds; "),
    ({"stop_after": [1]}, "--stop-after=[1] is no number of rounds; "),
    ({"stop_after": -BIG}, "--stop-after a number of thousands of digits is not a round; "),
    ({"data": {"images": 1}}, "data is of the type dict, which cannot be read as images; "),
])  # fmt: skip
def test_arguments_of_another_kind(named: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert told(fallow.run, **TINY | {"out": tmp_path} | named).startswith(said)


@pytest.mark.parametrize("path", [None, 3, b"x", ["x"], "a\0b"])
def test_no_path_of_a_run(path: Any) -> None:
    assert told(fallow.resume, path).startswith("path=") and told(fallow.load, path).startswith("path=")


@pytest.mark.parametrize("classes", [10**9, BIG, 0, -1, 1.5, True, "ab", b"ab", object()], ids=range(9))
def test_what_are_no_classes(classes: Any) -> None:
    arrays = np.zeros((8, 8, 8), np.uint8), np.arange(8) % 2
    assert "are no classes; give their names as a list, or how many they are, at most 100,000." in told(fallow.run, data=arrays, classes=classes)
