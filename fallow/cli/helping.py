"""`fallow run --help`: flags and keys, in sections, no wider than the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection, Iterator
from typing import Any

from fallow.config import Config, Section, described
from fallow.methods.parts.fitting import fits

Row = tuple[str, str, str, str, str]  # key, default, symbol, what it takes, meaning
STARTS = {  # the first key of each section, in the order of fallow/config.py
    "method": "Method and seeds",
    "data": "Data and model",
    "labels": "Federation",
    "rounds": "Training",
    "weights": "Server",
    "labeller": "Parts: labelling, averaging",
    "device": "Device",
    "eval_every": "Testing, checkpoints, measuring",
}
WIDEST, KEY, DEFAULT = 100, 23, 11  # characters


def sections(rows: list[Row]) -> dict[str, list[Row]]:
    """Common keys by section."""
    found: dict[str, list[Row]] = {title: [] for title in STARTS.values()}
    homes, title = {}, ""
    for name in Config.model_fields:
        title = STARTS.get(name, title)
        homes[name] = "Server" if name.startswith("server_") and title == "Training" else title
    for row in rows:
        found[homes[row[0].partition(".")[0]]].append(row)
    return found


def width() -> int:
    return min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)


def run(command: Any, method: type, name: str) -> str:
    """The whole help of `fallow run` for a method."""
    about = " ".join((method.__doc__ or "").strip().partition("\n\n")[0].split())
    wide = width()
    lines = ["usage: fallow run [RECIPE] [KEY=VALUE]... [FLAG]...", "", *_paragraphs(command.help, wide)]
    lines += ["Flags", *_flags(command, wide), ""]
    lines += _filled(f"Keys of method {name} ({about})", wide)
    lines += _filled("What is fitted follows from the data, unless it is given; with defaults=paper it is the paper's.", wide)
    rows = list(_rows(getattr(method, "Options", Config), fits(method)))
    own = [row for row in rows if row[0].partition(".")[0] not in Config.model_fields]
    groups = {"Its own": own} if own else {}
    for title, group in (groups | sections([row for row in rows if row not in own])).items():
        lines += ["", title, *_columns(group, wide)]
    return "\n".join(lines)


def _paragraphs(text: str, wide: int) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        yield from (*_filled(" ".join(paragraph.split()), wide), "")


def _rows(options: type[Config], fitted: Collection[str] = ()) -> Iterator[Row]:
    """Keys with those of sections in their place."""
    for row in described(options):
        default = options.model_fields[row[0]].default
        if isinstance(default, Section):
            yield from ((f"{row[0]}.{part}", *rest) for part, *rest in described(type(default)))  # type: ignore[misc, arg-type]
        elif row[0] in fitted:
            name, paper, symbol, takes, meaning = row
            yield name, "fitted", symbol, takes, f"{meaning} (paper: {paper or 'none'})"
        else:
            yield row


def _flags(command: Any, wide: int) -> Iterator[str]:
    shown = []
    for option in command.params:
        if option.opts[0].startswith("-"):
            value = "" if option.is_flag else f" {(option.metavar or option.name).upper().replace('_', '-')}"
            shown.append((", ".join(option.opts) + value, option.help or ""))
    indent = max(len(flag) for flag, _ in shown) + 4
    for flag, meaning in shown:
        yield from _filled(meaning, wide, f"  {flag}".ljust(indent), indent)


def _columns(rows: list[Row], wide: int) -> Iterator[str]:
    for name, shown, symbol, takes, meaning in rows:
        default = "" if shown == "()" else shown
        takes = "" if takes in ("text", "a list") else takes.replace(" (", " ").removesuffix(")")
        notes = "; ".join(filter(None, [symbol, takes, f"default {default}" if len(default) > DEFAULT else ""]))
        start = f"  {name} ".ljust(KEY + 2) + ("" if len(default) > DEFAULT else default).ljust(DEFAULT + 2)
        yield from _filled(meaning + (f" [{notes}]" if notes else ""), wide, start, KEY + DEFAULT + 4)


def _filled(text: str, wide: int, start: str = "", indent: int = 0) -> list[str]:
    return textwrap.wrap(text, wide, initial_indent=start, subsequent_indent=" " * indent, break_on_hyphens=False) or [start.rstrip()]
