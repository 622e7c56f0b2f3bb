"""Mutations, each drawn from a generator: of bytes, of values in JSON and YAML, of files in a folder."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import yaml

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 3, 0.5, -0.0, 1e300, 2**31, 2**63, 10**30, float("nan"), float("inf"), "", " ", "x", "nan", "0", "é",
    "caf\udce9", "\0", "\x1b[31m", "a\nb", "[/x]", "../..", "~nouser", "2020-13-45", "constructor", [], [1], ["a"], [[[]]], {}, {"a": 1}, {"": None}, {1: 2},
]  # fmt: skip
TOKENS = [":", "-", "[", "]", "{", "}", "&a ", "*a", "<<: *a", "!!int x", "!!python/object:os.system x", "|", ">", "'", '"', "\t", "\0", "?", "#", "%", "@", "`", "2020-13-45", "1e400", "[[[[[[[[", "\ufeff"]


def damaged(data: bytes, r: random.Random) -> tuple[bytes, str]:
    """One of the ways in which bytes go wrong."""
    at = r.randrange(len(data)) if data else 0
    how = r.choice(["flip", "flip", "truncate", "extend", "zeros", "cut", "twice", "empty", "noise"])
    if how == "flip" and data:
        bit = r.randrange(8)
        return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], f"bit {bit} of byte {at} flipped"
    if how == "truncate":
        return data[:at], f"cut at byte {at}"
    if how == "extend":
        return data + r.randbytes(r.choice([1, 8, 1000])), "extended"
    if how == "zeros":
        return data[:at] + bytes(min(64, len(data) - at)) + data[at + 64 :], f"64 zeros at {at}"
    if how == "cut":
        return data[:at] + data[at + r.randrange(1, 100) :], f"some bytes gone at {at}"
    if how == "twice":
        return data + data, "written twice"
    if how == "empty":
        return b"", "emptied"
    return data[:at] + r.randbytes(4) + data[at + 4 :], f"4 bytes of noise at {at}"


def edited(value: Any, r: random.Random) -> tuple[Any, str]:
    """The same nested value with one place changed, removed or renamed."""
    value = copy.deepcopy(value)
    places = [*_places(value)]
    if not places:
        new = r.choice(ODD)
        return new, f"whole: {new!r}"
    inside, name = r.choice(places)
    how = r.choice(["odd", "odd", "odd", "remove", "rename", "exchange"])
    if how == "remove":
        del inside[name]
        return value, f"{name!r} removed"
    if how == "rename" and isinstance(inside, dict):
        new = r.choice(["x", "", 1, None, "rounds", "constructor"])
        inside[new] = inside.pop(name)
        return value, f"{name!r} renamed to {new!r}"
    if how == "exchange":
        other, there = r.choice(places)
        inside[name], other[there] = copy.deepcopy(other[there]), copy.deepcopy(inside[name])
        return value, f"{name!r} and {there!r} exchanged"
    inside[name] = r.choice(ODD)
    return value, f"{name!r} = {inside[name]!r}"


def _places(value: Any) -> Any:
    names = [*value] if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for name in names:
        yield value, name
        yield from _places(value[name])


def text_damaged(text: str, r: random.Random) -> tuple[str, str]:
    lines = text.splitlines()
    at = r.randrange(len(lines)) if lines else 0
    how = r.choice(["token", "token", "drop", "twice", "indent", "join"])
    if how == "token" or not lines:
        token, place = r.choice(TOKENS), r.randrange(len(text) + 1)
        return text[:place] + token + text[place:], f"{token!r} at {place}"
    if how == "drop":
        del lines[at]
    elif how == "twice":
        lines.insert(at, lines[at])
    elif how == "indent":
        lines[at] = " " * r.randrange(1, 5) + lines[at]
    else:
        lines[at : at + 2] = [" ".join(lines[at : at + 2])]
    return "\n".join(lines), f"line {at + 1}: {how}"


def values_damaged(path: Path, r: random.Random) -> str:
    """A value inside a JSON, JSON lines or YAML file is edited."""
    if path.suffix == ".jsonl":
        lines = path.read_text(errors="replace").splitlines()
        if not lines:
            return "nothing"
        at = r.randrange(len(lines))
        how = r.choice(["edit", "edit", "drop", "twice", "swap"])
        if how == "edit":
            new, what = edited(json.loads(lines[at]), r)
            lines[at] = json.dumps(new)
            how = what
        elif how == "drop":
            del lines[at]
        elif how == "twice":
            lines.insert(at, lines[at])
        else:
            lines[0], lines[at] = lines[at], lines[0]
        path.write_text("".join(line + "\n" for line in lines))
        return f"line {at + 1}: {how}"
    read, write = (json.loads, json.dumps) if path.suffix == ".json" else (yaml.safe_load, yaml.safe_dump)
    try:
        new, what = edited(read(path.read_text(errors="replace")), r)
    except (ValueError, yaml.YAMLError):  # an earlier mutation has damaged it already
        path.write_bytes(b"")
        return "emptied"
    path.write_text(write(new), errors="backslashreplace")
    return what


def folder_damaged(folder: Path, r: random.Random) -> tuple[str, str]:
    """One file of a folder, by its path within: damaged, edited, gone, exchanged with another, or something else in its place."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    path, other = r.choice(files), r.choice(files)
    name = str(path.relative_to(folder))
    how = r.choice(["bytes", "bytes", "bytes", "values", "values", "delete", "exchange", "folder", "pipe", "add"])
    if how == "values" and path.suffix in (".json", ".jsonl", ".yaml"):
        return name, values_damaged(path, r)
    if how == "delete":
        path.unlink()
        return name, "deleted"
    if how == "exchange":
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        other.write_bytes(one)
        return f"{name}, {other.relative_to(folder)}", "exchanged"
    if how == "folder":
        path.unlink()
        path.mkdir()
        return name, "a folder instead"
    if how == "pipe":
        path.unlink()
        os.mkfifo(path)
        return name, "a pipe instead"
    if how == "add":
        new = path.parent / r.choice(["²", "99", ".x.part", "x" * 200, "0", "-1", "caf\udce9", "7", "seed-1"])
        if r.random() < 0.5:
            shutil.copy(path, new)
        elif not new.exists():
            new.mkdir()
        return str(new.relative_to(folder)), "added"
    data, what = damaged(path.read_bytes(), r)
    path.write_bytes(data)
    return name, what
