"""The page: one HTML file with styles, scripts and data inside, which asks nothing of the network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from datetime import date
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from fallow import __version__, disk, targets
from fallow.paths import user_path
from fallow.report import payload
from fallow.runs import finding
from fallow.said import warn

SCRIPTS = ("base.js", "runs.js", "lines.js", "pictures.js", "sections.js", "warnings.js", "tables.js", "curves.js", "classes.js", "scores.js", "nodes.js", "start.js")


def write(paths: Sequence[str | Path], out: str | Path, force: bool = False) -> tuple[Path, int]:
    """Writes the page about these runs; where it lies, and of how many runs it is."""
    out = targets.file(user_path(out), "report", force)
    runs = finding.found(paths)
    data = payload.payload(runs)
    for sentence in data["left_out"]:
        warn(sentence)
    text = page(data | {"made": date.today().isoformat()})
    disk.write(out, text, "choose another file with -o")
    return out, len(runs)


def page(data: dict[str, Any]) -> str:
    """The page that shows `data`; with `live` in it, it asks its own server for news."""
    live = bool(data.get("live"))
    early = _asset("theme.js")
    script = "\n".join([_asset("uplot.min.js"), "(() => {", '"use strict";', *map(_asset, SCRIPTS), "})();"])
    parts = {
        "title": html.escape("Fallow: " + ", ".join(dict.fromkeys(g["method"] for g in data["groups"]))),
        "policy": html.escape(_policy([early, script], live)),
        "style": _asset("uplot.min.css") + "\n" + _asset("page.css"),
        "early": early,
        "script": script,
        "licence": _asset("uplot-LICENSE.txt").strip(),
        "data": embedded({"version": __version__, "live": live} | data),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def embedded(data: Any) -> str:
    """JSON that can stand inside a script element, whatever names it holds."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(scripts: list[str], live: bool) -> str:
    """Only these scripts run, and nothing is asked for; a live page may ask its own server."""
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts]
    asked = "'self'" if live else "'none'"
    return f"default-src 'none'; script-src {' '.join(hashes)}; style-src 'unsafe-inline'; img-src data:; connect-src {asked}"


@cache
def _asset(name: str) -> str:
    return (resources.files("fallow.report") / "assets" / name).read_text(encoding="utf-8")
