"""SemiFed: a pseudo-label holds where models of several clients agree on it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fallow.config import key
from fallow.errors import UserError
from fallow.keys.section import Keys
from fallow.methods.base import Batch, BatchPart, Found, Held, Message, Method, Net, Party, Plan, Server, Slot, Updates, Value
from fallow.methods.parts import helping
from fallow.methods.parts.batching import paired
from fallow.methods.parts.fitting import Facts, common
from fallow.methods.parts.labelling import one_hot
from fallow.methods.parts.losses import Reduction, ce, cross_entropy, kl, masked_mean


class Labelling(Slot):
    there: Tensor  # label_time=step: which places for models that label are taken


class Remembering(Party):
    memory: Tensor  # of each unlabelled image the class last agreed on, or -1
    there: Tensor


class Labelled(BatchPart):
    label: Tensor
    agreed: Tensor  # whether it holds


class Columns(Batch):
    u: Labelled
    ramp: Tensor


class SemiFed(Method[Labelling, Remembering, Columns]):
    """Labels from the agreement of the received model and some clients' models, and consistency under strong views.

    Lin et al., arXiv 2108.09412 (2021). There is no code of the authors; what the paper leaves open are options.
    """

    paper = "Lin et al., arXiv 2021"
    sends = "model; down also helpers' models"
    scenarios = {"clients", "some"}
    labels_how = "labels where several clients' models agree"
    defaults = {"batch": 32, "unlabelled_batch": "equal", "lr": 0.01, "momentum": 0.0, "nesterov": False}

    class Options(Method.Options):
        threshold: float = key(0.95, "confidence that each model needs", "tau", ge=0)
        helpers: int = key(2, "other clients' models that a client is sent", "H", ge=0, le=100)
        helper_choice: Literal["random", "nearest", "latest"] = key("random", "which: any, those that answer alike to noise, or those sent up last")
        helper_max_age: int | None = key(None, "rounds after which a client's model helps no more", ge=1)
        agreement: Literal["all", "majority"] = key("all", "a label holds if all models give it and are sure, or if most do")
        min_agree: int = key(2, "majority: models that give the label and are sure", ge=1)
        include_global: bool = key(True, "the received model has a say, too")
        label_view: Literal["plain", "weak"] = key("plain", "the view on which models label")
        label_time: Literal["round", "step"] = key("round", "when: once, before the steps, or at each step, on that step's view")
        label_memory: Literal["none", "sticky"] = key("none", "a label is for a round, or stays until others agree on another one")
        lambda_c: float = key(1.0, "of the consistency", "lambda_c", ge=0)
        lambda_p: float = key(1.0, "of the loss on agreed labels", "lambda_p", ge=0)
        temperature: float = key(1.0, "of the consistency's target", gt=0)
        consistency_stats: Literal["update", "running"] = key("update", "the consistency's target: in train mode, or in eval mode")
        consistency_threshold: float = key(0.0, "confidence that the consistency's target needs", ge=0)
        reduction: Reduction = key("all", "loss on agreed labels: mean over the batch, or over those that hold")
        ramp_rounds: int = key(0, "rounds until both have full weight", ge=0)
        start_round: int = key(1, "rounds at the start in which nobody is sent helpers, and so no label is agreed on", ge=0)

        def refuse(self) -> None:
            super().refuse()
            if self.helper_choice == "nearest" and (self.statistics == "static" or self.norm == "sbn"):
                cause = "helper_choice=nearest asks models as they come up, and with static batch norm they come without statistics"
                raise UserError(cause, "use helper_choice=random or latest, or statistics=average")
            if self.label_time == "step" and self.label_memory == "sticky":
                raise UserError("label_memory=sticky keeps what a round agreed on, and label_time=step agrees anew at each step", "use label_time=round")

    o: Options

    @classmethod
    def scenario_defaults(cls, labels: str) -> Keys:
        return {"augment": {"strong": "ra-torchvision", "cutout": "none"}}

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        return super().automatic(facts) | common(facts) | {"threshold": facts.threshold}

    def holds(self) -> Held:
        more: Held = {"memory": Value("unlabelled", start=-1, keep=True)} if self.o.label_memory == "sticky" else {}
        if self.o.label_time == "step":
            more |= {f"labeller{j}": Net(train=False, start="model") for j in range(self.o.helpers + 1)} | {"there": Value(self.o.helpers + 1)}
        return {"model": Net(), **more}

    # -- the server's pool of clients' models ----------------------------------------------------------------------------
    def start(self, server: Server) -> None:
        super().start(server)
        server["came"] = {}
        if self.o.helper_choice == "nearest":
            server["probe"], server["embeddings"] = helping.noise(server), {}

    def down(self, server: Server, client: int) -> Message:
        message: Message = {"model": server.model}
        if server.round >= self.o.start_round:
            for j, k in enumerate(self.chosen(server, client)):
                message[f"helper{j}"] = server.pool[k]["model"]
        return message

    def chosen(self, server: Server, client: int) -> list[int]:
        """Who helps a client: others that have sent a model, not too long ago."""
        oldest = 0 if self.o.helper_max_age is None else server.round - self.o.helper_max_age
        known = [k for k, came in server["came"].items() if k != client and came >= oldest]
        if self.o.helper_choice == "random":
            return [known[i] for i in server.rng(f"helpers {client}").permutation(len(known))[: self.o.helpers]]
        if self.o.helper_choice == "latest":
            return sorted(known, key=lambda k: (-server["came"][k], k))[: self.o.helpers]
        embeddings = {k: v for k, v in server["embeddings"].items() if k in {client, *known}}
        return helping.nearest(embeddings, client, self.o.helpers) if client in embeddings else []

    def merge(self, server: Server, updates: Updates) -> None:
        for u in updates.clients:
            assert u.client is not None
            server.pool[u.client] = {"model": u["model"]}
            if self.o.helper_choice == "nearest":
                server["embeddings"] = server["embeddings"] | {u.client: helping.embedded(server, u["model"])}
        server["came"] = server["came"] | {u.client: server.round for u in updates.clients}
        super().merge(server, updates)

    # -- a client ------------------------------------------------------------------------------------------------------
    def begin(self, party: Remembering) -> dict[str, Tensor]:
        """Models label all unlabelled images once, each with its own statistics."""
        u, received = party.unlabelled, party.received
        helpers = [received[name] for j in range(self.o.helpers) if (name := f"helper{j}") in received]
        if not len(u) or (self.o.helpers and not helpers):
            return {}
        models = [received["model"], *helpers] if self.o.include_global or not helpers else helpers
        if self.o.label_time == "step":
            for j, model in enumerate(models):
                getattr(party, f"labeller{j}").load(model)
                party.there[j].fill_(1.0)
            return {}
        p = torch.stack([party.predict(m, u, self.o.label_view).softmax(1) for m in models])
        label, agreed, alike = self.agree(p)
        party.log(agreement=alike.to(p.dtype))
        if self.o.label_memory == "sticky":
            old = party.memory[: len(u)]
            old.copy_(torch.where(agreed, label.to(old.dtype), old))
            label, agreed = old.clamp_min(0).long(), old >= 0
        party.judge(u, label, agreed, p.amax(2).amin(0))
        return {"label": label, "agreed": agreed}

    def agree(self, p: Tensor, there: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Of probabilities [models, n, classes]: the label, whether it holds, and whether all models give it, however sure.

        Of places for models only those that are `there` have a say.
        """
        has = (torch.ones_like(p[:, 0, 0]) if there is None else there)[:, None] > 0
        q, c = p.max(2)
        sure = q >= self.o.threshold
        alike = ((c == c[0]) | ~has).all(0) & has.any()
        if self.o.agreement == "all":
            return c[0], alike & (sure | ~has).all(0), alike
        votes = torch.stack([one_hot(each, p) for each in c]) * has[..., None]
        counts = votes.sum(0)
        most, label = counts.max(1)
        alone = (counts == most[:, None]).sum(1) == 1                                 # a tie is no majority
        backed = (votes * sure[..., None]).sum(0).gather(1, label[:, None])[:, 0] >= self.o.min_agree
        return label, alone & backed, alike

    def plan(self, party: Remembering, found: Found) -> Plan:
        n, o = len(party.unlabelled), self.o
        label, agreed = (found[k] if k in found else torch.zeros(n, dtype=kind).numpy() for k, kind in (("label", torch.int64), ("agreed", torch.bool)))
        views = ("weak", "strong", "plain") if o.label_time == "step" and o.label_view == "plain" else ("weak", "strong")
        x, u = paired(party, "labelled", views, label=label, agreed=agreed)
        return Plan(x=x, u=u, ramp=min(1.0, party.round / o.ramp_rounds) if o.ramp_rounds else 1.0)

    def step(self, s: Labelling, b: Columns) -> None:
        """Each pass is a batch of its own for BN."""
        loss: Tensor | float = cross_entropy(s.model(b.x.labelled), b.x.y) if b.x else 0.0                 # L_s
        if b.u:
            with torch.no_grad():
                zw = s.model(b.u.weak, stats=self.o.consistency_stats)
            zs, sure = s.model(b.u.strong), zw.softmax(1).amax(1) >= self.o.consistency_threshold
            L_c = masked_mean(kl((zw / self.o.temperature).softmax(1), zs), sure)
            label, agreed = (b.u.label, b.u.agreed) if self.o.label_time == "round" else self.label_now(s, b)
            L_p = masked_mean(ce(zs, label), agreed, self.o.reduction)
            loss = loss + b.ramp * (self.o.lambda_c * L_c + self.o.lambda_p * L_p)
            s.log(consistency=L_c, agreed_loss=L_p)
        s.descend(loss)
        s.log(loss=loss)

    def label_now(self, s: Labelling, b: Columns) -> tuple[Tensor, Tensor]:
        """What the models that came say of this step's view."""
        x = b.u.plain if self.o.label_view == "plain" else b.u.weak
        with torch.no_grad():
            p = torch.stack([getattr(s, f"labeller{j}")(x, stats="running").softmax(1) for j in range(self.o.helpers + 1)])
        label, agreed, alike = self.agree(p, s.there)
        s.judge(b.u, label, agreed, confidence=torch.where(s.there[:, None] > 0, p.amax(2), 1.0).amin(0))
        s.log(agreement=alike.to(p.dtype))
        return label, agreed
