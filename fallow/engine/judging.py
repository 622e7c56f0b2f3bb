"""What is counted of pseudo-labels while parties train, and the columns of metrics that these counts become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

COUNTS, LEVELS = "/counts", "/levels"  # ends of the names of such logs; no method's own log has a slash
SHARES = 6  # the first of the counts: judged, accepted, those with a known true label, the right ones; both of all
STEPS = 20  # confidences are counted in steps of 1/20


def levels(device: torch.device) -> Tensor:
    """The confidences at which is counted how many reach them."""
    return torch.arange(STEPS, device=device) / STEPS


def is_counted(name: str) -> bool:
    return name.endswith((COUNTS, LEVELS))


def columns(name: str, values: Sequence[float]) -> dict[str, Any]:
    """The columns of one such log, summed over a round."""
    base, _, kind = name.rpartition("/")
    counts = [int(v) for v in values]
    if not counts[0]:
        return {}
    if f"/{kind}" == LEVELS:
        return {f"{base}_confidences": [a - b for a, b in zip(counts, [*counts[1:], 0])]}
    judged, sure, known_sure, right_sure, known, right = counts[:SHARES]
    out: dict[str, Any] = {f"{base}_ratio": sure / judged, f"{base}_classes": counts[SHARES:]}
    if known_sure:
        out[f"{base}_accuracy"] = right_sure / known_sure
    if known:
        out[f"{base}_accuracy_all"] = right / known
    return out
