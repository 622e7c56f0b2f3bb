"""An average of the weights over steps (EMA), which is what is tested; central methods have it, FixMatch on request."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fallow.config import key
from fallow.methods.base import Method, Net, Update, Updates, Value
from fallow.methods.parts.averaging import mean
from fallow.methods.parts.fitting import Facts, common

CENTRAL: dict[str, Any] = {
    "clients": 1, "labelled_as_unlabelled": True, "batch": 64, "rounds": 1024, "steps": 1024, "epochs": None, "schedule": "cosine-7-16",
    "weight_decay": 5e-4, "optimizer_state": "keep", "ema": 0.999,
}  # fmt: skip


class Averaged(Method):
    """`model` is trained, `ema` follows it; at the server and in messages they are `trained` and `model`, what is tested."""

    class Options(Method.Options):
        ema: float = key(0.0, "what is tested is an average of the weights, which keeps so much of itself at each step; 0: the weights", ge=0, lt=1)

    @classmethod
    def automatic(cls, facts: Facts) -> dict[str, Any]:
        """A central method's settings are those of a long run; its average goes over the last twentieth of the steps."""
        if not cls.Options.model_fields["ema"].default:
            return super().automatic(facts)
        return super().automatic(facts) | common(facts) | {"ema": round(min(0.999, max(0.0, 1 - 20 / (facts.rounds * facts.steps))), 4)}

    def holds(self) -> dict[str, Net | Value]:
        return {"model": Net(start="trained"), "ema": Net(start="model", train=False)} if self.o.ema else super().holds()

    def start(self, server: Any) -> None:
        super().start(server)
        if self.o.ema:
            server["trained"] = server.model

    def down(self, server: Any, client: int) -> dict[str, Any]:
        return super().down(server, client) | ({"trained": server["trained"]} if self.o.ema else {})

    def descend(self, s: Any, loss: Any, when: Tensor | None = None) -> None:
        s.descend(loss, when=when)
        if self.o.ema:
            s.ema.follow(s.model, self.o.ema)
        s.log(loss=loss)

    def end(self, party: Any) -> Update | None:
        update = super().end(party)
        if update is not None and self.o.ema:
            update["trained"], update["model"] = update["model"], party.ema.state
        return update

    def merge(self, server: Any, updates: Updates) -> None:
        super().merge(server, updates)
        if self.o.ema:
            server["trained"] = mean(updates, "trained", self.averager.weights(updates))
