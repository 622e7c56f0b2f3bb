"""Any text is a word of the command line: it ends in a sentence, and is printed as it is."""

from __future__ import annotations

import errno
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import TINY

from fallow import config
from fallow.errors import UserError
from fallow.said import Speaker
from fallow.trees import shown

WORDS = [f"{k}={v}" for k, v in (TINY | {"method": "fedavg", "rounds": 1}).items()]
ODD = {
    "data=2020-13-45": "there is no data set, folder or file '2020-13-45'",
    "data=2020-12-24": "there is no data set, folder or file '2020-12-24'",
    "seed=!!int x": "seed=!!int x is not allowed",
    "nesterov=!!bool x": "nesterov=!!bool x is not allowed",
    "seed=!!timestamp x": "seed=!!timestamp x is not allowed",
    "seed=" + "9" * 5000: "seed=999",
    "seed=0x" + "f" * 9000: "seed=0xfff",
    "seed=99999999999999999999": "seed=99999999999999999999 is not allowed",
    "clients=" + "[" * 3000: "clients=[[[",
    "weight_decay=1e300": "weight_decay=1e+300 is not allowed; give a number between -3e+38 and 3e+38",
    "server_lr=1e39": "server_lr=1e+39 is not allowed",
    "augment.cutout=1e20": "augment.cutout=1e+20 is not allowed",
    "augment.cutout=100000000000000000000": "augment.cutout=100000000000000000000 is not allowed",
    'data="folder:\\0"': "data=folder:\\x00 has a NUL character in it",
    "augment={1: 2}": "there is no key augment.1",
    "augment=[]": "augment is a section, not []",
    "unlabelled_batch=ratio:²": "unlabelled_batch=ratio:² is not known",
    "unlabelled_batch=ratio:" + "9" * 5000: "unlabelled_batch=ratio:999",
    "schedule=cosine,warmup=nan": "schedule='cosine,warmup=nan' has an option that is no number",
    "model=\udcff": "there is no model '\\udcff'",
    "\udcff=1": "there is no key '\\udcff'",
    "=": "'=' is not key=value",
    "": "'' is not key=value",
    "[red]=x[/y]": "there is no key '[red]'",
    "a\nb=\x1b[2J": "there is no key 'a\\nb'",
    "seed=\0": "'seed=\\x00' has a NUL character in it",
    "data={" + "a: {" * 400 + "}" * 401: "{a: {a: ",
}


@pytest.mark.parametrize(("word", "said"), ODD.items(), ids=[ascii(w)[:24] for w in ODD])
def test_odd_words(word: str, said: str, fallow_cli: Any) -> None:
    told = fallow_cli("run", *WORDS, word).sentence
    assert told.startswith(said) and len(told) < 3000
    assert not list(Path().glob("runs/*"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("feddure", "base"), "feddure/base is no table; there are: table1-short, table1, table2."),
        (("feddure", "²"), "feddure has no recipe for its table ²"),
        (("", ""), "there is no paper ''"),
        (("feddure", "1", "--only", "data"), "--only 'data' is not key=value"),
        (("feddure", "1", "--only", "clients=" + "[" * 3000), "nothing in the table agrees with clients=[["),
        (("feddure", "1", "--only", "data=2020-13-45"), "nothing in the table agrees with data=2020-13-45"),
        (("feddure", "1", "--set", "seed=1"), "seed cannot be set for a whole table"),
        (("feddure", "1", "--set", "=1"), "'=1' is not key=value"),
        (("feddure", "1", "--seeds", "9" * 5000), "Invalid value for '--seeds'"),
    ],
)
def test_odd_tables(words: tuple[str, ...], said: str, fallow_cli: Any) -> None:
    assert fallow_cli("table", *words).sentence.startswith(said)


GRID = {"own": "A", "rows": {"A": {"method": "fedavg"}}, "cells": {"digits": {"iid": {"clients": 3}}}}
WRONG = [5, 0.5, True, "word", [], [1], ["a"], [[]], {"a": 1}, {"a": {"b": 1}}, {1: 2}, {"a": None}, {None: {None: None}}, "x\0y", b"x"]
NAMED = ["inherit", "by", "own", "statistic", "seeds", "rows", "cells", "readings", "missing", "method", "reading", "labels", "image", "augment", "setting", "data"]


@pytest.mark.parametrize("name", [*NAMED, 1, None, True, 0.5])
def test_recipes_with_wrong_types(name: Any, fallow_cli: Any, tmp_path: Path) -> None:
    """Every kind of value under every name that a recipe may have: its keys are printed, or a sentence."""
    good, path = {"method": "fedavg", "data": "digits"}, tmp_path / "r.yaml"
    for value in WRONG:
        row = {"A": {"method": "fedavg", name: value}}
        for keys in (good | {name: value}, GRID | {name: value}, GRID | {"rows": row}, GRID | {"cells": {"digits": {"iid": {name: value}}}}):
            path.write_text(yaml.safe_dump(keys))
            told = fallow_cli("run", "r.yaml", "--help")
            assert told.code in (0, 2), (keys, told.err)
            if told.code == 2:
                assert told.sentence


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1: 2", "the recipe r.yaml has a key 1; a key is a word, such as rounds."),
        ("by: 3", "the recipe r.yaml has by: 3; write by: [data, partition], a list of keys."),
        ("readings: 3", "the recipe r.yaml has readings: 3; write readings: {reading: {key: value}}."),
        ("inherit: [a]", "the recipe r.yaml has inherit: ['a']; write inherit: the name of a recipe, or a path."),
        ("inherit: r.yaml", "the recipe r.yaml inherits from itself"),
        ("cells: {a: {b: {rows: 3}}}", "the recipe r.yaml has cells: {'a': {'b': {'rows': 3}}}; write cells: {data: {setting: {key: value}}}."),
        ("{cells: {}, seeds: 1000000000}", "the recipe r.yaml has seeds: 1000000000; write seeds: a count from 1 to 10000."),
        ("{cells: {}, own: B, rows: {A: {}}}", "the table's recipe says own: B; own is one of its rows: A."),
    ],
)
def test_what_is_said_about_a_recipe(text: str, said: str, fallow_cli: Any, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(text)
    assert fallow_cli("run", "r.yaml").sentence.startswith(said)


NAMES = ["x[/y]", "a[bold]b", "[red]", ":smile:", "tab\there", "two\nlines", "\x1b[31mred", "caf\udce9", "[link=x]y[/link]", "100%"]


@pytest.mark.parametrize("name", [n for n in NAMES if "/" not in n])
def test_names_are_printed_as_they_are(name: str, fallow_cli: Any) -> None:
    """What steers a terminal and what is no character is written out; the rest is left alone."""
    told = fallow_cli("run", *WORDS, "--name", name)
    assert told.code == 0
    plain = name.encode("utf-8", "backslashreplace").decode()
    for written, control in (("\\x1b", "\x1b"), ("\\n", "\n"), ("\\t", "\t")):
        plain = plain.replace(control, written)
    assert told.out.endswith(f"run: runs/{plain}\n")
    assert fallow_cli("resume", f"runs/{name}").code == 0
    assert fallow_cli("report", f"runs/{name}", "-o", f"{name}.html").code == 0
    assert fallow_cli("compare", f"runs/{name}").code == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_sentence_has_one_line(name: str, fallow_cli: Any) -> None:
    for words in (("resume", name), ("report", name), ("list", name), ("figure", name, "a", "-o", "b.png"), ("run", name), ("table", name, name), (name,)):
        assert fallow_cli(*words).sentence


def test_what_the_encoding_lacks_is_written_out() -> None:
    raw = io.BytesIO()
    text = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    Speaker(file=text).say("5 ± 1 \udce9 [b]")
    assert raw.getvalue() == b"5 \\xb1 1 \\udce9 [b]\n"


@pytest.mark.parametrize("how", ["| true", "> /dev/full", ">&-", "2>&- | true"])
def test_an_output_that_takes_nothing(how: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m fallow list methods {how}; echo ${{PIPESTATUS[0]}} >&3"
    ended = subprocess.run(["bash", "-c", f"exec 3>&1; {command}"], capture_output=True, text=True, cwd=tmp_path)
    assert "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr, ended.stderr
    assert ended.stdout.strip() == ("0" if how == ">&-" else "2")
    assert ended.stderr.count("\n") == (how in ("| true", "> /dev/full"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EIO, "Input/output error"), "the machine refused to read or write (Input/output error); "),
        (OSError(errno.ESTALE, "Stale file handle", "a[b]"), "a[b] cannot be read or written (Stale file handle); "),
        (OSError("strange"), "the machine refused to read or write (strange); "),
        (MemoryError(), "the memory of this machine is not enough for that; "),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "the memory of this machine"),
        (RuntimeError("can't start new thread"), "this machine lets no more processes and threads begin; "),
        (RecursionError(), "something that was given is nested too deeply; "),
    ],
)
def test_the_safety_net(error: Exception, said: str, fallow_cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fallow import listing

    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(listing, "rows", fails)
    assert fallow_cli("list", "methods").sentence.startswith(said)
    with pytest.raises(type(error)):
        fallow_cli("--debug", "list", "methods")
    fallow_cli("list", "methods", "--no-time")  # the flag is not kept


def test_a_bug_is_a_traceback(fallow_cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fallow import listing

    monkeypatch.setattr(listing, "rows", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fallow_cli("list", "methods")


def test_what_is_shown_of_a_value_is_short() -> None:
    bomb: Any = ["x" * 50] * 10
    for _ in range(30):
        bomb = [bomb] * 10
    assert len(shown(bomb)) <= 200 and len(shown("y" * 10**6)) <= 200
    assert shown(1.5) == "1.5" and shown(["a"]) == "['a']" and shown("a") == "a"
    with pytest.raises(UserError) as told:
        config.validate(config.Config, {"data": bomb})
    assert len(str(told.value)) < 400




@pytest.mark.parametrize("word", ["data=folder:~nouser/a,b", "data=csv:~nouser/a,b.csv", "method=~nouser/a,b.py:X,fixmatch", "model=~nouser/a,b.py:X,small-cnn"])
def test_homes_of_nobody_among_several_values(word: str, fallow_cli: Any) -> None:
    assert "begins with the home of a user who is not known" in fallow_cli("run", word, "--dry-run").sentence


@pytest.mark.parametrize("word", ["method=[[fedavg],[fixmatch]]", "method=[1,2]", "model=[[a],[b]]", "data=[[a],[b]]", "partition=[[a]]", "augment.strong=[[a]]"])
def test_lists_of_what_has_names(word: str, fallow_cli: Any) -> None:
    assert fallow_cli("run", word, "--dry-run").sentence
