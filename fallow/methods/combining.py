"""Which combinations of parts make sense: the keys `labeller`, `debias` and `average` are honoured, or refused with a reason."""

from __future__ import annotations

from fallow.config import Config
from fallow.errors import UserError
from fallow.methods.base import Method
from fallow.methods.parts.averaged import Averaged
from fallow.methods.parts.averagers import AVERAGERS


def check(kind: type[Method], o: Config) -> None:
    """Raises a UserError where a method cannot have these settings."""
    _labelling(kind, o)
    _averaging(kind, o)
    o.refuse()


def _labelling(kind: type[Method], o: Config) -> None:
    how = f"{o.method} {kind.labels_how}"
    if o.labeller is not None and not kind.labellers:
        raise UserError(f"{how}, so labeller={o.labeller} has no place", "leave labeller out")
    if o.debias and not kind.labellers:
        raise UserError(f"{how}, so debias=true has no place", "leave debias out")
    if o.app_u_source == "running" and "current" not in kind.labellers:
        raise UserError(f"{how}, so app_u_source=running has no place", "leave app_u_source out")
    if o.app_u_source == "running" and not (o.debias and o.labeller == "current"):
        raise UserError("app_u_source=running follows the batches that a net in training labels and debias corrects", "use it with debias=true labeller=current")
    if o.debias and o.labels == "all":
        raise UserError("labels=all leaves nothing to label, so debias=true has no place", "leave debias out")
    if kind.labellers and o.labeller not in kind.labellers:
        given = "null" if o.labeller is None else o.labeller
        raise UserError(f"{how}, so labeller={given} has no place", f"use labeller={' or '.join(sorted(kind.labellers))}")
    return None


def _averaging(kind: type[Method], o: Config) -> None:
    if o.average == "mean":
        return None
    if kind.merge not in (Method.merge, Averaged.merge):
        raise UserError(f"{o.method} merges updates in its own way, so average={o.average} has no place", "leave average out")
    return AVERAGERS[o.average].refuse(o)
