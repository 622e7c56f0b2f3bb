"""Writes docs/keys.md from the code: `python docs/make_keys.py`. tests/test_docs.py asks that the two agree."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fallow.cli import helping
from fallow.config import KINDS, Config, Section, described, validate
from fallow.methods import REGISTERED, find
from fallow.methods.base import Method

PAGE = Path(__file__).with_name("keys.md")
SCENARIOS = ("server", "clients", "some", "all")

HEAD = """# Keys

<!-- Made by docs/make_keys.py from fallow/config.py and the methods; do not edit. -->

Every setting of a run is a key: `key=value` on the command line, `key: value` in a recipe, `key=value` in
`fallow.run(...)`. A dot reaches into a section (`augment.strong=ra-mc`; in Python `augment={"strong": "ra-mc"}`). Values
are YAML; `key=null` takes a value back to "none". A misspelt key is refused with the nearest one that exists.

How much is trained and how fast (`rounds`, `steps`, batches, `lr`, `schedule`, `clip`, thresholds, ramps) is [fitted to the data](defaults.md) where
nobody gives it; the defaults of this page are then those of `defaults=paper`. What comes later wins: the defaults of this page, the method's own, its defaults for a label scenario, the `reading`, the
recipe, the command line. `config.yaml` of a run has the complete result. `fallow run method=NAME --help` prints the keys
of a method, one's own (`FILE.py:Class`) too. An empty default means "none", or what the meaning says.

How to write `partition` is in [federations](federations.md), views in [augmentation](augmentation.md), models in
[models](models.md), data in [data](data.md), `labeller` to `dma_floor` in [parts](methods/parts.md), `device` to
`checkpoint_every` in [runs](runs.md), `measure` and what follows it in [measure](measure.md).
"""

METHODS = """## Methods

What a method adds to the common keys, and common keys whose default it changes. Keys with a default "for `labels=`" or
"for `reading=`" have it only there.
"""


def page() -> str:
    """The whole page."""
    blocks = [HEAD, *common()]
    for section in sections():
        default = Config.model_fields[section].default
        rows = [(f"{section}.{name}", *rest) for name, *rest in described(type(default))]
        blocks.append(f"## Section `{section}`\n\n{table(rows, type(default))}")
    blocks.append(METHODS)
    blocks += [of_method(name, find(name)) for name in REGISTERED]
    return "\n".join(blocks)


def sections() -> list[str]:
    return [name for name, field in Config.model_fields.items() if isinstance(field.default, Section)]


def common() -> list[str]:
    """A table per section of common keys."""
    return [f"## {title}\n\n{table(rows, Config)}" for title, rows in helping.sections(described(Config)).items()]


def of_method(name: str, method: type[Method]) -> str:
    """A method's own keys, its changed defaults, and those of scenarios and readings."""
    own, options = described(method.Options, own_only=True), method.Options
    first = " ".join((method.__doc__ or "").split("\n\n")[0].split())
    scenarios = ", ".join(f"`{s}`" for s in SCENARIOS if s in method.scenarios)
    parts = [f"### `{name}`\n", f"{first} Labels at: {scenarios}.\n"]
    if own:
        parts.append(table(own, options))
    changed = {name: default(options, name) for name in Config.model_fields if default(options, name) != default(Config, name)}
    if changed:
        parts.append("Common keys with another default: " + pairs({k: other(v, default(Config, k)) for k, v in changed.items()}) + ".\n")
    else:
        parts.append("No common key has another default.\n")
    if norm := validate(options, {"model": "wrn-28-2"}).norm:
        parts.append(f"For models with batch norm: `norm={norm}`.\n")
    for labels in (s for s in SCENARIOS if s in method.scenarios):
        if given := method.scenario_defaults(labels):
            parts.append(f"For `labels={labels}`: {pairs(given)}.\n")
    for reading, given in method.readings.items():
        parts.append(f"For `reading={reading}`: {pairs(given) if given else 'nothing differs from `recommended`'}.\n")
    return "\n".join(parts)


def default(kind: type[BaseModel], name: str) -> Any:
    return kind.model_fields[name].default


def other(value: Any, usual: Any) -> Any:
    """A default; of a section the keys whose default is another."""
    return {k: v for k, v in value if v != getattr(usual, k)} if isinstance(value, Section) else value


def pairs(keys: dict[str, Any], prefix: str = "") -> str:
    """Keys as one would type them."""
    out = []
    for name, value in keys.items():
        if isinstance(value, dict):
            out.append(pairs(value, f"{prefix}{name}."))
        else:
            shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            out.append(f"`{prefix}{name}={shown}`")
    return ", ".join(out)


def table(rows: Iterable[tuple[str, ...]], kind: type[BaseModel]) -> str:
    lines = ["| key | default | symbol | takes | meaning |", "|---|---|---|---|---|"]
    for name, shown, symbol, takes, meaning in rows:
        if isinstance(kind.model_fields[name.rpartition(".")[2]].default, Section):
            shown, takes = "", f"[a section](#section-{name})"
        else:
            shown, takes = code(shown if shown != "()" else ""), words(takes)
        cells = (f"`{name}`", shown, symbol, takes, meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def words(takes: str) -> str:
    """Values as code, kinds of value as they are."""
    takes, bracket, limits = takes.partition(" (")
    kinds = [w if w in KINDS.values() else code(w) for w in takes.split(" | ")]
    listed = " ".join(kinds) if all(w.startswith("`") for w in kinds) else ", ".join(kinds)
    return listed + bracket + limits


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
