"""ProxyFL: the classifier's rows stand for their classes, are tuned at the server and contrasted with at clients."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fallow.config import key
from fallow.keys.section import Keys
from fallow.methods.base import Batch, Found, Held, Message, Method, Net, NetHandle, Party, Plan, Server, Slot, Update, Updates, Value
from fallow.methods.parts import proxies
from fallow.methods.parts.averaging import mean
from fallow.methods.parts.batching import full_batches, refuse_sets, walk, walks
from fallow.methods.parts.fitting import Facts, common
from fallow.methods.parts.labelling import one_hot
from fallow.methods.parts.losses import cross_entropy, masked_mean, smoothed_kl


class ProxyParty(Party):
    heads: NetHandle
    prior: Tensor
    counts: Tensor


class ProxySlot(Slot):
    teacher: NetHandle  # the model as it was received
    heads: NetHandle  # f, with g among its weights
    prior: Tensor  # pi
    counts: Tensor


class Columns(Batch):
    counted: Tensor  # 1 in the last epoch


class ProxyFL(Method[ProxySlot, ProxyParty, Columns]):
    """Unsure samples learn from all classes they may be of; the server moves each class's proxy to the clients' own.

    "ProxyFL: A Proxy-Guided Framework for Federated Semi-Supervised Learning", CVPR 2026. GPT is `merge`, ICPL the contrast in `step`.
    """

    paper = "Chen and Wang, CVPR 2026"
    sends = "model and two layers; up also class counts, down the class prior"
    scenarios = {"clients", "some"}
    labels_how = "labels by the received model where either that or the net in training is sure"
    defaults = {
        "epochs": 5, "batch": 128, "unlabelled_batch": "ratio:2", "lr": 0.1, "nesterov": False, "weight_decay": 1e-4,
        "weights": "uniform",
    }  # fmt: skip
    readings = {
        "paper": {
            "sure": "received", "candidates": "label", "unsure_weights": "local", "contrast_over": "apart", "heads": False,
            "tune_anchor": "server", "tune_margin": 0.0, "prior_from": "clients", "prior_ema": 0.0,
        },
        "released": {"optimizer_state": "travel"},
    }  # fmt: skip

    class Options(Method.Options):
        threshold: float = key(0.95, "confidence a pseudo-label needs", "tau", ge=0)
        weight: float = key(1.0, "of the unlabelled loss", ge=0)
        proxy_weight: float = key(1.0, "of the contrastive loss (ICPL)", ge=0)
        sure: Literal["either", "received"] = key("either", "whose confidence counts: the received or the local model's, or the received one's, which must be above the threshold")
        candidates: Literal["received", "label"] = key("received", "classes of a labelled sample: as the received model sees it, or its label")
        unsure_weights: Literal["received", "local"] = key("received", "whose probabilities weigh the proxies of an unsure sample (Eq. 6: local)")
        contrast_over: Literal["all", "apart"] = key("all", "contrastive loss: one mean, or one of the sure and one of the unsure (Eq. 8)")
        heads: bool = key(True, "features and proxies through a linear layer each before they are compared")
        tune_epochs: int = key(100, "passes over the clients' proxies at the server (GPT)", "Q", ge=0)
        tune_lr: float = key(0.005, "its rate", gt=0)
        tune_batch: int = key(4, "its batch", ge=1)
        tune_margin: float = key(100.0, "largest margin: by how much farther its own proxy seems; 0: none (Eq. 2)", "mu", ge=0)
        tune_anchor: proxies.Anchor = key("client", "a client's proxy among the server's, or the server's among a client's (Eq. 2)")
        prior_from: Literal["counts", "clients"] = key("counts", "class prior: of all labels together, or the mean of the clients' (Eq. 5)")
        prior_ema: float = key(0.99, "what the old class prior weighs", ge=0, lt=1)

        def refuse(self) -> None:
            super().refuse()
            refuse_sets(self)

    o: Options

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        return super().automatic(facts) | common(facts) | {"threshold": facts.threshold}

    def holds(self) -> Held:
        held: Held = {"model": Net(), "teacher": Net(start="model", train=False)}
        if self.o.heads:
            held["heads"] = Net(proxies.Heads, fits=True, autocast=False)
        return held | {"prior": Value(self.classes, start=1 / self.classes), "counts": Value(self.classes)}

    def start(self, server: Server) -> None:
        super().start(server)
        server["prior"] = server.model.groups["parameters"].new_full((self.classes,), 1 / self.classes)
        if self.o.heads:
            server["heads"] = server.initial("heads")

    def down(self, server: Server, client: int) -> Message:
        return super().down(server, client) | {name: server[name] for name in ("prior", "heads") if name in server}

    def begin(self, party: ProxyParty) -> dict[str, Tensor]:
        party.prior.copy_(party.received["prior"])
        return {}

    def plan(self, party: ProxyParty, found: Found) -> Plan:
        """SAGE's; labels are counted in the last epoch."""
        epochs, plan = walks(party), Plan()
        counted = (np.arange(sum(epochs)) >= sum(epochs) - walk(party)).astype(np.float32)
        for steps in epochs:
            x, u = full_batches(party, steps, "labelled", ("weak", "strong"))
            plan, counted = plan + Plan(x=x, u=u, counted=counted[:steps]), counted[steps:]
        return plan

    def step(self, s: ProxySlot, b: Columns) -> None:
        (zx, zw, zs), h = s.model.together_with_features(b.x.labelled, b.u.weak, b.u.strong)      # one batch for BN
        with torch.no_grad():
            gx, gw = s.teacher.together(b.x.labelled, b.u.weak, stats="running")
        loss: Tensor | float = cross_entropy(zx, b.x.y) if b.x else 0.0
        when: Tensor | None = None
        counts: Tensor | float = one_hot(b.x.y, zx).sum(0) if b.x else 0.0
        if b.u:
            received, local = gw.softmax(1), zw.detach().softmax(1)
            label, confidence = received.argmax(1), received.amax(1)
            if self.o.sure == "either":
                confidence = torch.maximum(confidence, local.amax(1))
            used = self.passes(confidence)
            loss = loss + self.o.weight * masked_mean(smoothed_kl(one_hot(label, local), zs), used)       # L_u
            when = None if b.x or self.o.proxy_weight else used.any()
            if self.o.proxy_weight:
                loss = loss + self.o.proxy_weight * self.icpl(s, b, h, gx, received, local, used)
            counts = counts + (one_hot(label, local) * used[:, None]).sum(0)
            s.judge(b.u, label, used, confidence=confidence)
        s.descend(loss, when=when)
        s.counts.add_(b.counted * counts)
        s.log(loss=loss)

    def passes(self, confidence: Tensor) -> Tensor:
        """Reaches tau, or, as the paper prints it, is above it."""
        return confidence > self.o.threshold if self.o.sure == "received" else confidence >= self.o.threshold

    def icpl(self, s: ProxySlot, b: Columns, h: list[Tensor], gx: Tensor, received: Tensor, local: Tensor, used: Tensor) -> Tensor:
        """Eqs. 6 to 8: each unlabelled view near the proxies of its classes, apart from rows that are of none of them."""
        p, sure = received.repeat(2, 1), used.repeat(2)
        pull = p if self.o.unsure_weights == "received" else local.repeat(2, 1)
        if b.x:
            of_x = one_hot(b.x.y, p) if self.o.candidates == "label" else gx.softmax(1)
            p, pull, sure = torch.cat([of_x, p]), torch.cat([of_x, pull]), torch.cat([self.passes(of_x.amax(1)), sure])
        likeliest = one_hot(p.argmax(1), p)
        candidates = torch.where(sure[:, None], likeliest > 0, p > s.prior)                        # xi
        weights = torch.where(sure[:, None], likeliest, pull * candidates)
        features, rows = torch.cat([part for part in h if part is not None]), s.model.weights[s.model.head]
        if self.o.heads:
            features, rows = s.heads(features), rows @ s.heads.weights["proxies.weight"].T
        each = proxies.contrast(proxies.unit(features), proxies.unit(rows), candidates, weights)[-2 * len(used) :]
        if self.o.contrast_over == "all":
            return each.mean()
        both = used.repeat(2)
        return masked_mean(each, both, "selected") + masked_mean(each, ~both, "selected")          # Eq. 8

    def end(self, party: ProxyParty) -> Update | None:
        update = super().end(party)
        if update is not None:
            update["counts"] = party.counts
            if self.o.heads:
                update["heads"] = party.heads.state
        return update

    def merge(self, server: Server, updates: Updates) -> None:
        super().merge(server, updates)
        if self.o.heads:
            server["heads"] = mean(updates, "heads")
        server["prior"] = self.prior(server["prior"], torch.stack([u["counts"] for u in updates]))
        if self.o.tune_epochs:
            o, model, sent = self.o, server.model.clone(), torch.stack([u["model"][server.head] for u in updates])
            rows = model[server.head]
            rows.copy_(proxies.tuned(sent, rows, server.rng("tune"), o.tune_epochs, o.tune_lr, o.tune_batch, o.tune_margin, o.tune_anchor))
            server["model"] = model

    def prior(self, old: Tensor, counts: Tensor) -> Tensor:
        """pi from what the clients counted, a row each; without any label it stays."""
        counts = counts.double().cpu().clamp_min(0)
        if self.o.prior_from == "clients":
            counts = counts[counts.sum(1) > 0]
            counts = counts / counts.sum(1, keepdim=True)
        total = counts.sum()
        if not total > 0:
            return old
        return (self.o.prior_ema * old.double().cpu() + (1 - self.o.prior_ema) * counts.sum(0) / total).to(old)
