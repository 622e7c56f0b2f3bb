"""A run's health while it goes on: what is known of it beforehand, and the file in which a page finds what stands against it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fallow import disk
from fallow.errors import UserError
from fallow.runs.health import Facts, Finding, Row, findings

if TYPE_CHECKING:
    from fallow.engine.simulation import Simulation

FILE = "warnings.json"  # in a run's folder while the run goes on; afterwards its summary has them
LOOKS = 100  # in a run, at most


def facts(simulation: Simulation) -> Facts:
    """What the rules must know of a run that is about to begin."""
    kit, tested = simulation.kit, simulation.test_labels.cpu().numpy()
    counts = np.bincount(tested, minlength=kit.classes)
    held = simulation.federation.counts(simulation.labels, kit.classes)["unlabelled"].sum(0)
    hidden = bool((simulation.labels < 0).any()) or not held.sum()
    key = kit.method.accepts_by
    value = getattr(kit.options, key, None)
    return Facts(
        rounds=kit.options.rounds,
        classes=kit.classes,
        tested=len(tested),
        chance=float(counts.max() / len(tested)),
        share=() if hidden else tuple(float(n) for n in held / held.sum()),
        names=tuple(simulation.source.classes),
        bound=key if isinstance(value, int | float) else None,
        value=value if isinstance(value, int | float) else None,
        lr=kit.options.lr,
    )


class Health:
    """Looks at a run's rows as they come, and says what is new."""

    def __init__(self, folder: Path, known: Facts, rows: list[Row]):
        self.file, self.facts, self.rows = folder / FILE, known, rows
        self.said = {f.kind for f in findings(rows, known)}
        self._written: list[str] = []  # the kinds that the file has

    def take(self, row: Row) -> list[Finding]:
        """What stands against the run since this row, and did not before."""
        self.rows.append(row)
        every = max(1, self.facts.rounds // LOOKS)
        if row["round"] % every and row["round"] != self.facts.rounds:
            return []
        found = findings(self.rows, self.facts)
        self._write(found)
        new = [f for f in found if f.kind not in self.said]
        self.said |= {f.kind for f in new}
        return new

    def _write(self, found: list[Finding]) -> None:
        if (kinds := [f.kind for f in found]) != self._written:
            self._written = kinds
            with suppress(UserError):  # a page that lacks it is no reason to end a run
                disk.write(self.file, json.dumps([f.as_dict() for f in found], indent=1) + "\n")

    def end(self, rows: list[Row]) -> list[Row]:
        """What stands against the run in the end, for its summary."""
        with suppress(OSError):
            self.file.unlink(missing_ok=True)
        return [f.as_dict() for f in findings(rows, self.facts)]


def sentences(summary: dict[str, Any]) -> list[str]:
    """What stands against a run that has ended, with what to try."""
    return [f"{f['sentence']}; {f['remedy']}" for f in _texts(summary.get("warnings"))]


def stored(folder: Path, summary: dict[str, Any], ended: bool) -> list[dict[str, str]]:
    """What a run's folder says against the run: in its summary, or while it goes on in a file of its own."""
    found: Any = summary.get("warnings")
    if not ended:
        try:
            found = json.loads(disk.read(folder / FILE))
        except (UserError, ValueError, RecursionError):
            found = None
    return _texts(found)


def _texts(found: Any) -> list[dict[str, str]]:
    if not isinstance(found, list):
        return []
    texts = [{k: str(f.get(k, "")) for k in ("kind", "sentence", "remedy")} for f in found if isinstance(f, dict)]
    return [f for f in texts if f["sentence"]]
