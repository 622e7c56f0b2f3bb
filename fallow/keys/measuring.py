"""What else is measured, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from fallow.keys.section import Section, key, listed

Measure = Literal["classes", "prior", "diversity", "labels"]


class MeasuringKeys(Section):
    measure: Annotated[tuple[Measure, ...], BeforeValidator(listed)] = key((), "what else to measure, a list: classes, prior, diversity, labels")
    measure_every: int = key(1, "rounds between such measurements; the last is always measured", ge=1)
    diversity_scale: Literal["paper", "times-n"] = key("paper", "gradient diversity as printed, or times n where squared, as FedRGD's figures")
    diversity_scope: Literal["global", "per-group"] = key("global", "over all parties, or within each group (average=grouped) and averaged")
    diversity_norms: bool = key(True, "norm layers' parameters count in gradient diversity")
