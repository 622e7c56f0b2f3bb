"""Which combinations of parts make sense: the keys `labeller`, `debias` and `average` are honoured, or refused with a reason."""

from __future__ import annotations

from typing import Any

from fallow.methods.base import AVERAGERS, Method
from fallow.methods.parts.averaged import Averaged


def refused(kind: type[Method], o: Any) -> str | None:
    """Why a method cannot have these settings: one sentence, its remedy after a semicolon."""
    return _labelling(kind, o) or _averaging(kind, o) or _tested(o) or kind.refuse(o)


def _labelling(kind: type[Method], o: Any) -> str | None:
    how = f"{o.method} {kind.labels_how}"
    if o.labeller is not None and not kind.labellers:
        return f"{how}, so labeller={o.labeller} has no place; leave labeller out"
    if o.debias and not kind.labellers:
        return f"{how}, so debias=true has no place; leave debias out"
    if o.app_u_source == "running" and "current" not in kind.labellers:
        return f"{how}, so app_u_source=running has no place; leave app_u_source out"
    if o.app_u_source == "running" and not (o.debias and o.labeller == "current"):
        return "app_u_source=running follows the batches that a net in training labels and debias corrects; use it with debias=true labeller=current"
    if o.debias and o.labels == "all":
        return "labels=all leaves nothing to label, so debias=true has no place; leave debias out"
    if kind.labellers and o.labeller not in kind.labellers:
        given = "null" if o.labeller is None else o.labeller
        return f"{how}, so labeller={given} has no place; use labeller={' or '.join(sorted(kind.labellers))}"
    return None


def _tested(o: Any) -> str | None:
    if getattr(o, "ema", 0) and (o.server_lr != 1 or o.server_momentum):
        return f"the server's rate and momentum move what is trained, and ema={o.ema:g} has another model tested; use server_lr=1 server_momentum=0"
    return None


def _averaging(kind: type[Method], o: Any) -> str | None:
    if o.average == "mean":
        return None
    if getattr(o, "ema", 0):
        return f"{o.method} tests an average of the weights (ema={o.ema:g}), so average={o.average} has no place; use average=mean, or ema=0 where it may be"
    if kind.merge not in (Method.merge, Averaged.merge):
        return f"{o.method} merges updates in its own way, so average={o.average} has no place; leave average out"
    return AVERAGERS[o.average].refuse(o)
