"""What a model is worth: its scores on the test set, in brief at each test, in full at a run's end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fallow.measure import scores

if TYPE_CHECKING:
    from fallow.engine.round import Federated


def in_full(federated: Federated) -> dict[str, Any]:
    """All scores of the server's model as it is now."""
    logits = federated.test_logits(federated.model())
    return {"test": scores.full(logits, federated.world.test_labels)}
