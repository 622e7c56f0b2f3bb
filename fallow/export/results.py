"""The model card's words on how good a model is: overall, by class, by site."""

from __future__ import annotations

from typing import Any

from fallow.measure import told
from fallow.runs import Result

ROWS = 30  # of a table that a reader goes through


def measured(result: Result, best: bool) -> list[dict[str, Any]]:
    """For the card's front: what the test set says of these weights, by the names that others use."""
    names = {"accuracy": "accuracy", "balanced_accuracy": "balanced_accuracy", "macro_f1": "f1", "auroc": "roc_auc"}
    found = of_test(result, best)
    more = {"macro_f1": {"name": "macro F1"}, "auroc": {"name": "AUROC, one against the others, macro"}}
    return [{"type": kind, "value": round(found[name], 6)} | more.get(name, {}) for name, kind in names.items() if found.get(name) is not None]


def of_test(result: Result, best: bool) -> dict[str, Any]:
    """The scores on the test set of the weights after the last round, or after the best one by validation."""
    s = result.summary
    if best:
        return s["validation"]["test"]
    return (s.get("scores") or {}).get("test") or {"accuracy": s["last"]}


def words(result: Result, best: bool, data: str) -> str:
    """The section on accuracy."""
    s = result.summary
    if s["last"] is None:
        return "## Accuracy\n\nThis run has not been tested."
    parts = [_chosen(s, data) if best else _last(result, data)]
    if listed := told.listed(of_test(result, best)):
        parts.append(f"On the test set: {listed}.")
    if not best and (found := s.get("scores") or {}):
        parts += [_by_class(found["test"], s["class_names"]), _by_site(found.get("sites"))]
    return "## Accuracy\n\n" + "\n\n".join(p for p in parts if p)


ONE = "One run with one seed; nothing is known about other data."


def _last(result: Result, data: str) -> str:
    s = result.summary
    tested = [r["round"] for r in result.metrics if r.get("accuracy") is not None]
    at = tested[-1] if tested else s["rounds"]
    text = f"{100 * s['last']:.2f} % of the test set of `{data}`, after round {at}"
    if at != s["rounds"]:
        text += f" (the weights are those of round {s['rounds']}, which was not tested)"
    best = f"Best round of the run, whose weights these are not: {100 * s['best']:.2f} % (round {s['best_round']})."
    return f"{text}." + (f" {best}" if s["best_round"] != at else "") + f" {ONE}"


def _chosen(s: dict[str, Any], data: str) -> str:
    v = s["validation"]
    test = v["test"]["accuracy"]
    on_test = "which was not tested" if test is None else f"with {100 * test:.2f} % of the test set of `{data}`"
    return (
        f"The weights are those of round {v['best_round']}, {on_test}: the best of {s['rounds']} rounds on labels held out of "
        f"training ({100 * v['best']:.2f} % of them), so the test set had no part in the choice. After the last round the test "
        f"accuracy was {100 * s['last']:.2f} %. {ONE}"
    )


def _by_class(test: dict[str, Any], names: list[str]) -> str:
    found = [(name, accuracy) for name, accuracy in zip(names, test["class_accuracy"]) if accuracy is not None]
    if len(found) > ROWS:
        low = min(found, key=lambda pair: pair[1])
        return f"The lowest accuracy of a class is {100 * low[1]:.2f} % (`{low[0]}`); `summary.json` has all, and the confusions."
    lines = "\n".join(f"| {_name(name)} | {100 * accuracy:.2f} |" for name, accuracy in found)
    return f"| class | accuracy, % |\n|---|---|\n{lines}"


def _name(text: str) -> str:
    """A name that can stand in a table."""
    return "`" + text.replace("|", "\\|") + "`"


def _by_site(sites: dict[str, Any] | None) -> str:
    if not sites or len(sites["names"]) > ROWS:
        return ""
    where = "test images" if sites["of"] == "test" else "labels held out of training"
    rows = zip(sites["names"], sites["samples"], sites["accuracy"])
    lines = "\n".join(f"| {_name(name)} | {count} | {100 * accuracy:.2f} |" for name, count, accuracy in rows if accuracy is not None)
    return f"| site | {where} | accuracy, % |\n|---|---|---|\n{lines}"
