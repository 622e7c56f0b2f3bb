"""What stands against runs that are compared: what each says of itself, and runs on labels alone that do better."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fallow.report.reading import Run, readable
from fallow.runs.health import Facts, Finding, findings
from fallow.runs.warned import stored

LABELS_ALONE = ("fedavg", "fedprox")
MOST = 12  # sentences


def against(paths: Iterable[str | Path]) -> list[str]:
    """Sentences, runs of which the same is said together."""
    runs = readable(paths)[0]
    said: dict[str, list[str]] = {}
    for run in runs:
        told = [f"{f['sentence']}; {f['remedy']}" for f in stored(run.path, run.summary, run.status != "running")]
        for sentence in [*told, *map(str, beaten(run, runs))]:
            said.setdefault(sentence, []).append(run.path.name)
    lines = [f"{', '.join(names[:4])}{f' and {len(names) - 4} more' * (len(names) > 4)}: {sentence}" for sentence, names in said.items()]
    return lines[:MOST] + [f"and {len(lines) - MOST} more; `fallow report` shows all"] * (len(lines) > MOST)


def beaten(run: Run, runs: Sequence[Run]) -> Iterator[Finding]:
    """Whether a run on labels alone over the same federation, with the same seed, model and rounds, ended higher."""
    column, of = ("validation_accuracy", "validation") if _last(run, "validation_accuracy") is not None else ("accuracy", "test")
    tested = images(run.summary, of)
    if run.status != "finished" or run.config.get("method") in LABELS_ALONE or not tested:
        return
    for other in runs:
        alike = all(run.config.get(k) == other.config.get(k) for k in ("seed", "model", "rounds", "data"))
        held = run.summary.get("fingerprint") == other.summary.get("fingerprint") is not None
        if other.config.get("method") in LABELS_ALONE and other.status == "finished" and alike and held and other.scores():
            reached = _last(other, column)
            if reached is not None:
                facts = Facts(run.done, int(run.summary.get("classes", 0)), tested, 0.0, labels_alone=(other.path.name, reached))
                yield from (f for f in findings(run.rows, facts) if f.kind == "labels-alone")


def _last(run: Run, column: str) -> float | None:
    return next((row[column] for row in reversed(run.rows) if row.get(column) is not None), None)


def images(summary: dict[str, Any], of: str) -> int:
    """How many images the test set, or the validation set, has."""
    scores = summary.get("scores")
    told = scores.get(of) if isinstance(scores, dict) else None
    samples = told.get("samples") if isinstance(told, dict) else None
    return samples if isinstance(samples, int) else 0
