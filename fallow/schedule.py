"""Learning-rate schedules: pure functions of (round, step, steps of the round), so nothing of them is ever saved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from fallow.errors import UserError, suggest

KINDS = ("constant", "cosine", "cosine-7-16")


@dataclass(frozen=True)
class Schedule:
    kind: str
    by: str
    warmup: float
    horizon: float | None
    turns: float
    floor: float

    @staticmethod
    @cache  # every client asks in every round
    def parse(text: str) -> Schedule:
        """`cosine`, `cosine-7-16,warmup=75,horizon=15360,turns=2.24066,floor=1e-5`."""
        kind, *words = text.split(",")
        if kind not in KINDS:
            raise UserError(f"schedule={text!r} is not known", suggest(kind, KINDS))
        given: dict[str, str] = {}
        for word in words:
            name, _, value = word.partition("=")
            if name not in ("by", "warmup", "horizon", "turns", "floor") or not value:
                raise UserError(f"schedule option {word!r} is not known", "use by=, warmup=, horizon=, turns=, floor=")
            given[name] = value
        by = given.get("by", "step" if kind == "cosine-7-16" else "round")
        if by not in ("round", "step"):
            raise UserError(f"schedule option by={by!r} is not known", "use by=round or by=step")
        try:
            numbers = {n: float(v) for n, v in given.items() if n != "by"}
            if not all(math.isfinite(n) for n in numbers.values()):
                raise ValueError
        except ValueError:
            raise UserError(f"schedule={text!r} has an option that is no number", "write for example warmup=5") from None
        if not all(abs(v) <= 1e15 for v in numbers.values()):  # not NaN either
            raise UserError(f"schedule={text!r} has an option that is too large", "write for example warmup=5")
        return Schedule(
            kind,
            by,
            numbers.get("warmup", 0.0),
            numbers.get("horizon"),
            numbers.get("turns", 7 / 16 if kind == "cosine-7-16" else 0.5),
            numbers.get("floor", 0.0),
        )

    def factor(self, round: int, step: int, steps: int, rounds: int) -> float:
        """What the learning rate is multiplied by. Cosine: (1 + cos(pi t)) / 2; 7-16: cos(2 pi turns/2 t)."""
        now = round if self.by == "round" else round * steps + step
        horizon = self.horizon or (rounds if self.by == "round" else rounds * steps)
        if now < self.warmup:
            return now / self.warmup
        share = (now - self.warmup) / max(1e-12, horizon - self.warmup)
        if self.kind == "constant":
            return 1.0
        if self.kind == "cosine":
            return max(self.floor, 0.5 * (1 + math.cos(math.pi * min(1.0, share))))
        return max(self.floor, math.cos(math.pi * self.turns * share))
