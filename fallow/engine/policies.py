"""What becomes of batch norm's running statistics: one policy for a whole run, by the keys `statistics` and `norm`."""

from __future__ import annotations

from typing import Any

from fallow.methods.base import Updates
from fallow.methods.state import Layout, State


class Policy:
    """`average`: running statistics move in training, travel, and are averaged as parameters are."""

    name = "average"
    updates_running = True  # running statistics move in training
    has_running = True  # there are some to predict with; else a batch is normalised by its own

    def travels(self, state: State) -> State:
        """What of a model leaves a party."""
        return state if self.updates_running else state.only("parameters")

    def begin(self, model: State, whose: str) -> State:
        """The server's model before a round; `whose` data statistics are made of."""
        return model

    def merge(self, updates: Updates, sent: State) -> None:
        """Before updates are averaged, where the server trains: `sent` is what it had sent."""

    def lacks(self, thing: Any, layout: Layout) -> bool:
        """Whether this is a model of that layout that must have statistics made before it is used."""
        return False


class ServersOwn(Policy):
    """`server`: where the server trains, its statistics take the place of everyone's."""

    name = "server"

    def merge(self, updates: Updates, sent: State) -> None:
        own = updates.server["model"] if updates.server else sent
        for u in updates:
            u.entries["model"] = u["model"].having(own, "statistics")


class Made(Policy):
    """`static`: training leaves them alone; they are made from data for each new model (statistics.py)."""

    name = "static"
    updates_running = False

    def begin(self, model: State, whose: str) -> State:
        return model.only("parameters") if whose == "active" else model  # whoever was there at the last test may not be now

    def lacks(self, thing: Any, layout: Layout) -> bool:
        return isinstance(thing, State) and thing.layout == layout and "statistics" not in thing and dict(layout.sizes)["statistics"] > 0


class OfEachBatch(Policy):
    """`batch`: there never are any."""

    name = "batch"
    updates_running = has_running = False


AVERAGE, STATIC = Policy(), Made()
POLICIES: dict[str, Policy] = {p.name: p for p in (AVERAGE, ServersOwn(), STATIC, OfEachBatch())}
OF_NORM = {"bn-batch": "batch", "sbn": "static"}  # norms that are short for batch norm under a policy


def policy_of(norm: str | None, statistics: str) -> Policy:
    """The policy of a run by its keys."""
    return POLICIES[OF_NORM.get(norm or "", statistics)]
