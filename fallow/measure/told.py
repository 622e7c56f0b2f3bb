"""Scores in words, for a terminal and a model card; torch is not needed to say them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = {
    "balanced_accuracy": "balanced accuracy", "macro_f1": "macro F1", "auroc": "AUROC", "calibration_error": "calibration error",
}  # fmt: skip
PERCENT = {"accuracy", "balanced_accuracy", "calibration_error", "last", "best"}


def valued(name: str, value: float) -> str:
    """A score as people write it.

    >>> valued("accuracy", 0.91234), valued("macro_f1", 0.91234)
    ('91.23 %', '0.912')
    """
    return f"{100 * value:.2f} %" if name in PERCENT else f"{value:.3f}"


def of_summary(summary: Mapping[str, Any], name: str) -> Any:
    """What a summary has under a name: `last`, `validation.best` of a section, `macro_f1` or `sites.of` of the scores.

    >>> of_summary({"last": 0.5, "scores": {"test": {"auroc": 0.9}}}, "auroc")
    0.9
    """
    for whole in (name, f"scores.{name}", f"scores.test.{name}"):
        found: Any = summary
        for part in whole.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is not None:
            return found
    return None


def listed(found: Mapping[str, Any]) -> str:
    """The scores that are one number; one without a value is left out."""
    return ", ".join(f"{words} {valued(name, found[name])}" for name, words in NAMES.items() if found.get(name) is not None)


def sentences(summary: Mapping[str, Any]) -> list[str]:
    """What a run's summary says beyond its accuracy."""
    found, best = summary.get("scores") or {}, summary.get("validation")
    told = [listed(found["test"])] if found.get("test") else []
    if held := found.get("validation"):
        told.append(f"validation accuracy {valued('accuracy', held['accuracy'])} on {held['samples']:,} images ({listed(held)})")
    return told + ([best_round(best)] if best else [])


def best_round(best: Mapping[str, Any]) -> str:
    """What the validation set chose, and what the test set says of it."""
    test = best["test"]["accuracy"]
    said = "" if test is None else f"; test accuracy there {valued('accuracy', test)}"
    return f"best round by validation: {best['best_round']}, {valued('accuracy', best['best'])}{said} (best.safetensors)"
