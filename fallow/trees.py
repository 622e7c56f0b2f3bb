"""Keys in sections, as nested mappings: read from words and YAML files, merged, made flat, shown in a sentence."""

from __future__ import annotations

import copy
import math
import reprlib
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from fallow.errors import UserError
from fallow.paths import open_plain
from fallow.yamls import LENGTH, safe_yaml, why_not


def parse_pairs(pairs: Iterable[str]) -> dict[str, Any]:
    """`key=value` words of the command line; a dot reaches into a section; values are YAML."""
    out: dict[str, Any] = {}
    before = ""
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            blank = f", or quotes around a value with blanks: {shlex.quote(f'{before} {pair}')}" if before and name else ""
            raise UserError(f"{pair!r} is not key=value", f"write for example rounds=10{blank}")
        before = pair
        quoted = text.startswith(("'", '"'))
        value = _typed(text, quoted)
        node = out
        *path, last = name.split(".")
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise UserError(f"{part!r} is given both whole and in parts", "use one of the two forms")
        node[last] = value if quoted else _number(value)
    return out


def _typed(text: str, quoted: bool) -> Any:
    """What YAML makes of a word; the word itself where that is no plain value (a date, bytes) or YAML stumbles over it."""
    try:
        value = safe_yaml(text) if text else None
    except yaml.YAMLError:
        return text
    plain = value is None or isinstance(value, bool | int | float | str | list | dict)
    return text if not plain or (isinstance(value, str) and text != value and not quoted) else value


def _number(value: Any) -> Any:
    if isinstance(value, str):  # YAML 1.1 reads 1e-4 as text
        try:
            number = float(value)
        except ValueError:
            return value
        return value if math.isinf(number) and "inf" not in value.lower() else number  # 5000 digits stay what was typed
    return value


def read_yaml(path: Any) -> dict[str, Any]:
    """A mapping from a YAML file, or one sentence why not."""
    try:
        with open_plain(path) as f:
            value = safe_yaml(f.read(LENGTH + 1).decode("utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}", "check the path") from None
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path} cannot be read ({e})", "check the file and its permissions") from None
    except yaml.YAMLError as e:
        raise UserError(f"{path} is not valid YAML{why_not(e)}", "mend the file; keys look like `rounds: 10`") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no keys", "write one `key: value` per line")
    return value


def shown(value: Any) -> str:
    """A value for a sentence: as it is typed, and not longer than one reads."""
    try:
        text = value if isinstance(value, str) else _SHORT.repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:90]} ... {text[-90:]}"


_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = _SHORT.maxdict = 8
_SHORT.maxstring = _SHORT.maxother = 120


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Later layers win; sections are merged key by key."""
    out: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            if isinstance(value, Mapping) and isinstance(out.get(name), dict):
                out[name] = merge(out[name], value)
            else:
                out[name] = copy.deepcopy(value)
    return out


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keys as they are typed, `augment.strong`, and their values."""
    out: dict[str, Any] = {}
    for name, value in tree.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return out
