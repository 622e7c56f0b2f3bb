"""An average of the weights over steps (EMA), which is what is tested; central methods have it, FixMatch on request."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from fallow.config import key
from fallow.errors import UserError
from fallow.keys.section import Keys
from fallow.methods.base import B, Held, Message, Method, Net, NetHandle, P, Party, S, Server, Slot, Update, Updates, Value
from fallow.methods.interface import Number
from fallow.methods.parts.averaging import mean
from fallow.methods.parts.fitting import Facts, common

CENTRAL: Keys = {
    "clients": 1, "labelled_as_unlabelled": True, "batch": 64, "rounds": 1024, "steps": 1024, "epochs": None, "schedule": "cosine-7-16",
    "weight_decay": 5e-4, "decayed": "weights", "optimizer_state": "keep", "weight_ema": 0.999,
}  # fmt: skip


class AveragedSlot(Slot):
    ema: NetHandle
    ema_steps: Tensor  # of weight_ema_warmup: how many steps the average has followed


class AveragedParty(Party):
    ema: NetHandle


class Averaged(Method[S, P, B]):
    """`model` is trained, `ema` follows it; at the server and in messages they are `trained` and `model`, what is tested."""

    class Options(Method.Options):
        weight_ema: float = key(0.0, "what is tested is an average of the weights, which keeps so much of itself at each step; 0: the weights", ge=0, lt=1)

        weight_ema_warmup: bool = key(False, "after k steps that average keeps no more than 1 - 1/k of itself, so that few first weights are in it")

        def refuse(self) -> None:
            super().refuse()
            if self.weight_ema_warmup and not self.weight_ema:
                raise UserError("weight_ema_warmup=true, but weight_ema=0 makes no average", "set weight_ema, or leave weight_ema_warmup out")
            if self.weight_ema and self.average != "mean":
                cause = f"{self.method} tests an average of the weights (weight_ema={self.weight_ema:g}), so average={self.average} has no place"
                raise UserError(cause, "use average=mean, or weight_ema=0 where it may be")
            if self.weight_ema and (self.server_lr != 1 or self.server_momentum):
                cause = f"the server's rate and momentum move what is trained, and weight_ema={self.weight_ema:g} has another model tested"
                raise UserError(cause, "use server_lr=1 server_momentum=0")

    o: Options

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        """A central method's settings are those of a long run; its average goes over the last twentieth of the steps."""
        if not cls.Options.model_fields["weight_ema"].default:
            return super().automatic(facts)
        return super().automatic(facts) | common(facts) | {"weight_ema": round(min(0.999, max(0.5, 1 - 20 / (facts.rounds * facts.steps))), 4)}

    def holds(self) -> Held:
        if not self.o.weight_ema:
            return super().holds()
        steps: Held = {"ema_steps": Value(keep=True)} if self.o.weight_ema_warmup else {}
        return {"model": Net(start="trained"), "ema": Net(start="model", train=False), **steps}

    def start(self, server: Server) -> None:
        super().start(server)
        if self.o.weight_ema:
            server["trained"] = server.model

    def down(self, server: Server, client: int) -> Message:
        return super().down(server, client) | ({"trained": server["trained"]} if self.o.weight_ema else {})

    def descend(self, s: S, loss: Number, when: Tensor | None = None) -> None:
        s.descend(loss, when=when)
        if self.o.weight_ema:
            self.follow(cast(AveragedSlot, s), s.model)
        s.log(loss=loss)

    def follow(self, s: AveragedSlot, model: NetHandle) -> None:
        """The average, after a step of the model."""
        if not self.o.weight_ema_warmup:
            return s.ema.follow(model, self.o.weight_ema)
        s.ema_steps.add_(1)
        return s.ema.follow(model, (1 - 1 / s.ema_steps).clamp_max(self.o.weight_ema))

    def end(self, party: P) -> Update | None:
        update = super().end(party)
        if update is not None and self.o.weight_ema:
            update["trained"], update["model"] = update["model"], cast(AveragedParty, party).ema.state
        return update

    def merge(self, server: Server, updates: Updates) -> None:
        super().merge(server, updates)
        if self.o.weight_ema:
            server["trained"] = mean(updates, "trained", self.averager.weights(updates))
