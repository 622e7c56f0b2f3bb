"""EASGD and Overlap Local-SGD: every client keeps a model of its own, which the server's pulls back."""

from __future__ import annotations

from typing import Literal

from fallow.config import key
from fallow.errors import UserError
from fallow.keys.section import Keys
from fallow.methods.base import Batch, Held, Message, Method, Net, NetHandle, Party, Server, Slot, Update, Updates
from fallow.methods.parts.averaging import mean
from fallow.methods.parts.fitting import LONGER, ROUNDS, Facts
from fallow.methods.parts.losses import cross_entropy


class OwnSlot(Slot):
    personal: NetHandle


class OwnParty(Party):
    personal: NetHandle


class EASGD(Method[OwnSlot, OwnParty, Batch]):
    """A spring ties each client's own model to the server's.  Zhang, Choromanska and LeCun, NeurIPS 2015.

    The server's model is the centre z, `server_lr` its moving rate b; with C active clients each is pulled by b/C.
    """

    paper = "Zhang et al., NeurIPS 2015"
    group = "supervised"
    keeps = "own model, optimiser state"
    scenarios = {"clients", "some", "all"}
    labels_how = "makes no pseudo-labels"
    defaults = {"server_lr": 0.9, "weights": "uniform", "optimizer_state": "keep", "statistics": "static", "weight_decay": 1e-4}

    class Options(Method.Options):
        def refuse(self) -> None:
            super().refuse()
            if self.prox:
                raise UserError(f"{self.method} has a pull of its own, so prox={self.prox:g} has no place", "leave prox out")
            if self.server_lr > 1:
                raise UserError(f"server_lr={self.server_lr:g} pulls the server's model past the clients' mean", "use server_lr=1 or less")

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        """An exchange brings a client's model only alpha of the way to the others: exchanges are more, with as many steps in all."""
        fitted = super().automatic(facts)
        if facts.given & {"rounds", "steps"} or fitted.get("steps") is None:
            return fitted
        more = max(1.0, min(facts.o.active_count / facts.o.server_lr, ROUNDS * LONGER / facts.rounds))
        return fitted | {"rounds": round(more * facts.rounds), "steps": max(1, round(facts.steps / more))}

    def holds(self) -> Held:
        return {"personal": Net(keep=True, start="initial")}                             # x_k, z at first

    def supervised(self, s: OwnSlot, b: Batch) -> None:
        loss = cross_entropy(s.personal(b.x.labelled), b.x.y)
        s.descend(loss)
        s.log(loss=loss)

    @property
    def pull(self) -> float:
        """alpha."""
        return self.o.server_lr / self.o.active_count

    def end(self, party: OwnParty) -> Update | None:
        if not party.made:
            return None
        x = party.personal.state.clone()                                                 # both sides move by the old x_k and z
        party.personal.load(x.lerp(party.received["model"], self.pull).only("parameters"))  # x_k - alpha (x_k - z)
        return Update(model=x)

    def merge(self, server: Server, updates: Updates) -> None:
        average, there = mean(updates), len(updates) / self.o.active_count
        z = server.model.only(*average.groups)                                           # statistics made for the old z are not the new one's
        server.move(z.lerp(average, there).having(average, "statistics"))                # z + alpha sum_k (x_k - z)


class OverlapSGD(EASGD):
    """Clients are pulled to an anchor that is one exchange old, so that nobody waits for it.  Wang, Liang and Joshi, ICASSP 2020."""

    paper = "Wang et al., ICASSP 2020"
    defaults = {"server_lr": 1.0, "server_momentum": 0.7}
    readings = {"paper": {}, "released": {"anchor_momentum_scale": "lr"}}

    class Options(EASGD.Options):
        pullback: float = key(0.6, "how far a client's model goes back to the anchor", "alpha", ge=0, le=1)
        anchor_momentum_scale: Literal["constant", "lr"] = key(
            "constant", "the anchor's momentum stays as it is, or shrinks and grows with the learning rate, as in the released code"
        )
        evaluate: Literal["anchor", "local-mean"] = key("anchor", "the server's model, which is tested and stored: the anchor, or the mean of the clients'")

    o: Options

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        """`pullback` brings models together, whatever their number."""
        return super(EASGD, cls).automatic(facts)

    def start(self, server: Server) -> None:
        super().start(server)
        if self.o.evaluate == "local-mean":
            server["anchor"] = server.model

    def down(self, server: Server, client: int) -> Message:
        return {"model": server["anchor"] if self.o.evaluate == "local-mean" else server.model}

    def end(self, party: OwnParty) -> Update | None:
        if not party.made:
            return None
        back = party.personal.state.lerp(party.received["model"], self.o.pullback)       # x_k <- (1 - alpha) x_k + alpha z
        party.personal.load(back.only("parameters"))
        return Update(model=back)

    def merge(self, server: Server, updates: Updates) -> None:
        if self.o.anchor_momentum_scale == "lr" and "momentum" in server:
            now, before = server.rate(server.round), server.rate(server.round - 1)
            server["momentum"] = server["momentum"] * (now / before if before else 1.0)  # a warm-up's first rate is 0
        x = mean(updates)
        server.move(x, base=server["anchor"] if self.o.evaluate == "local-mean" else None)   # v <- beta v + (mean_k x_k - z);  z <- z + v
        if self.o.evaluate == "local-mean":
            server["anchor"], server["model"] = server.model, x
