"""FedMatch: weights in two summands, one for labels and one for the rest; other clients' models help to label."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fallow.config import Augment, key
from fallow.data.samples import Stream
from fallow.errors import UserError
from fallow.keys.section import Keys
from fallow.methods.base import Batch, Found, Held, Message, Method, Net, NetHandle, Plan, Server, State, Update, Updates, Value
from fallow.methods.parts import helping, labelling, plateau
from fallow.methods.parts.averaging import mean
from fallow.methods.parts.batching import paired
from fallow.methods.parts.dma import mean_prediction
from fallow.methods.parts.fitting import CLIP, USUAL, Facts
from fallow.methods.parts.labelling import LabellerPart, LabellerParty, LabellerSlot
from fallow.methods.parts.losses import ce, cross_entropy, kl, masked_mean
from fallow.methods.parts.plateau import Plateau, PlateauParty
from fallow.methods.parts.summands import Weights, by_fan_in, decomposed, differing, fixed, numbers, total
from fallow.methods.plan import StepFunction
from fallow.methods.sparse import Sparse, cut, kept

LEAST = 1e-7  # Keras clips probabilities to it
WEIGHTS = ("sigma", "psi")
STEADY = 0.2  # largest lr times lambda_l2 of fitted rates: psi then goes less than half of its way to sigma in a step
ALONE = 100  # unlabelled images of a step where a client has no labelled ones to go with


class Apart(LabellerSlot):
    sigma: NetHandle
    psi: NetHandle
    sent_sigma: NetHandle  # of several epochs: as they came
    sent_psi: NetHandle


class ApartParty(PlateauParty, LabellerParty):
    sigma: NetHandle
    psi: NetHandle
    helping: Tensor  # 1 for each place that has a helper


class Helped(LabellerPart):
    votes: Tensor  # [n, H, 2 C]: the helpers' probabilities, and one-hot what they vote for


class Columns(Batch):
    u: Helped
    epoch_ends: Tensor  # 1 at the last step of each epoch but the last


class FedMatch(Method[Apart, ApartParty, Columns]):
    """Every weight is sigma + psi: labels move sigma, unlabelled images psi.  Jeong et al., ICLR 2021.

    `model` holds what is no weight: batch norm's statistics of the sum.
    """

    paper = "Jeong et al., ICLR 2021"
    keeps = "how far its learning rate fell"
    sends = "sigma and psi, up what changed; down also helpers' psi"
    scenarios = {"server", "clients", "some"}
    labellers = {"current"}
    labels_how = "labels with the net in training, and helpers vote"
    defaults = {
        "labeller": "current", "lr": 1e-3, "momentum": 0.0, "nesterov": False, "weights": "uniform", "server_turn": "before",
    }  # fmt: skip
    readings = {
        "paper": {"threshold": 0.85, "weight_decay": 1e-4, "helper_hold": True},
        "released": {"order": "slices", "probabilities": "clipped", "server_psi": "thresholded", "first_weights": "fan-in"},
    }

    class Options(Plateau):
        threshold: float = key(0.75, "confidence a pseudo-label needs, of the local model", "tau", ge=0)
        lambda_s: float = key(10.0, "of the labelled loss", "lambda_s", ge=0)
        lambda_i: float = key(0.01, "of the consistency with helpers", "lambda_ICC", ge=0)
        lambda_a: float = key(0.01, "of the loss on agreed labels", "lambda_ICC", ge=0)
        lambda_l2: float = key(10.0, "pull of psi towards sigma", "lambda_L2", ge=0)
        lambda_l1: float = key(1e-4, "pull of psi towards 0 (labels at the server: 1e-5)", "lambda_L1", ge=0)
        l1_threshold: float = key(5e-6, "size up to which a number of psi counts as 0 (labels at the server: 1e-5)", ge=0)
        delta_threshold: float = key(5e-5, "change of a number up to which it is not sent (labels at the server: 1e-5)", ge=0)
        first_weights: Literal["model", "fan-in"] = key("model", "sigma's first weights: the model's own, or truncated normal ones by fan-in")
        psi_factor: float = key(0.2, "psi's first weights as a share of sigma's", ge=0)
        helpers: int = key(2, "other clients whose psi a client is sent", "H", ge=0, le=100)
        helper_every: int = key(10, "rounds between helpers", ge=1)
        helper_hold: bool = key(False, "a client keeps the helpers that it was sent last, and uses them in every round")
        agreement_tie: Literal["lowest", "local"] = key("lowest", "which class wins of those with as many votes")
        debias_helpers: bool = key(False, "debias: helpers' votes, too, each by its own mean prediction")
        keep_between: Literal["none", "reference", "sparse"] = key(
            "none", "a client's weights between its rounds: none; to measure what would have to be sent; to be sent only that"
        )
        order: Literal["shuffled", "slices"] = key("shuffled", "batches: shuffled each pass, or the same slices of the stored order for ever")
        probabilities: Literal["exact", "clipped"] = key("exact", "the unlabelled losses from logits, or from probabilities clipped at 1e-7")
        server_psi: Literal["whole", "thresholded"] = key("whole", "psi while the server trains: as it is, or as it is tested")

        def refuse(self) -> None:
            super().refuse()
            if self.statistics == "static" or self.norm == "sbn":
                cause = "fedmatch sends two summands, of which neither has statistics of its own, so statistics=static has no place"
                raise UserError(cause, "use statistics=average or batch")
            if self.server_momentum or self.server_lr != 1:
                cause = "fedmatch takes plain means of sigma and of psi, so server_momentum and server_lr have no place"
                raise UserError(cause, "use server_momentum=0 server_lr=1")
            if self.prox:
                raise UserError(f"fedmatch trains two summands and no `model`, so prox={self.prox:g} has no place", "leave prox out")
            if self.optimizer == "sgd" and self.lr * self.lambda_l2 >= 0.5:
                cause = f"lr={self.lr:g} with lambda_l2={self.lambda_l2:g} throws psi past sigma at each step"
                raise UserError(cause, f"use lr below {0.5 / self.lambda_l2:g}, or a smaller lambda_l2")
            if unfit := sorted({"prior", "diversity"} & set(self.measure)):
                cause = f"measure={unfit[0]} goes by the model that each client sends, and fedmatch sends two summands"
                raise UserError(cause, f"leave {unfit[0]} out")

    o: Options

    @classmethod
    def scenario_defaults(cls, labels: str) -> Keys:
        views: Keys = {"augment": {"labelled": "plain", "weak": "plain", "strong": "ra-fedmatch"}}
        if labels != "server":
            return views | {"batch": 10}
        return views | {"batch": 100, "lambda_l1": 1e-5, "l1_threshold": 1e-5, "delta_threshold": 1e-5, "lr_patience": 20}

    @classmethod
    def automatic(cls, facts: Facts) -> Keys:
        """lambda_s multiplies the labelled gradient: everybody's rate is divided by it, and their bound multiplied.

        The rate is that of momentum, since the pull of psi to sigma would overshoot at the rate that is for none. Views are
        everybody's: labelled images are moved, and strong views, which batch norm sees as often as weak ones, are milder.
        """
        o, rate = facts.o, facts.having(momentum=USUAL).lr
        assert isinstance(o, FedMatch.Options)
        times = max(1.0, o.lambda_s)
        if o.optimizer == "sgd":  # Adam's steps do not go by the gradient's size
            rate = float(f"{min(rate / times, STEADY / max(STEADY, o.lambda_l2)):.3g}")
        fitted = super().automatic(facts) | {
            "batch": facts.batch, "threshold": facts.threshold, "augment": Augment().model_dump(include={"labelled", "weak", "strong"}),
            "momentum": USUAL, "lr": rate, "clip": CLIP * times,
        }  # fmt: skip
        held_out = facts.o.validation is not None and facts.o.lr_rule == "validation"  # type: ignore[attr-defined]
        return fitted | ({"schedule": "constant"} if held_out or facts.o.lr_rule == "training" else {})  # type: ignore[attr-defined]

    def holds(self) -> Held:
        stays = self.o.keep_between == "sparse"
        held: Held = {"model": Net(train=False), "sigma": Net(keep=stays, autocast=False), "psi": Net(keep=stays, autocast=False)}
        if self.o.helper_hold:
            held |= {f"helper{j}": Net(keep=True, train=False, start="psi") for j in range(self.o.helpers)}
            held["helping"] = Value(max(1, self.o.helpers), keep=True)
        if self.several:
            held |= {f"sent_{name}": Net(train=False, start=name) for name in WEIGHTS}
        return held | plateau.holds(self.o) | labelling.holds(self.o, self.classes)

    @property
    def epochs(self) -> int:
        return math.ceil(self.o.epochs or 1) if self.o.steps is None else 1

    @property
    def several(self) -> bool:
        """Whether a client makes more than one epoch."""
        return self.epochs > 1

    # -- the server ----------------------------------------------------------------------------------------------------
    def start(self, server: Server) -> None:
        super().start(server)
        sigma = server.model.only("parameters")
        server["sigma"] = sigma if self.o.first_weights == "model" else by_fan_in(sigma, server.rng("sigma"))
        server["psi"] = decomposed(server["sigma"], self.o.psi_factor)
        server["model"] = server.model.having(self.tested(server["sigma"], server["psi"]), "parameters")
        server["probe"], server["embeddings"] = helping.noise(server), {}

    def down(self, server: Server, client: int) -> Message:
        message = self.as_sent(server, client)
        message["model"] = server.model.only("statistics", "counters")
        for j, k in enumerate(self.helpers_of(server, client)):
            message[f"helper{j}"] = self.patched(server, client, "psi", server.pool[k]["psi"])
        return message

    def helpers_of(self, server: Server, client: int) -> list[int]:
        """Who helps a client in this round."""
        due = (server.round + 1) % self.o.helper_every == 0 and client in server["embeddings"]
        return helping.nearest(server["embeddings"], client, self.o.helpers) if due else []

    def as_sent(self, server: Server, client: int) -> Message:
        """sigma and psi as this client gets them."""
        return {name: self.patched(server, client, name, server[name]) for name in WEIGHTS}

    def patched(self, server: Server, client: int, name: str, new: State) -> State:
        """`keep_between=sparse`: what has hardly changed stays as the client has it, and is not sent."""
        if self.o.keep_between != "sparse" or client not in server.pool:
            return new
        has = server.pool[client][name]
        return Sparse(cut(new, has, self.o.delta_threshold, self.o.l1_threshold if name == "psi" else 0.0, both=True), has)

    def merge(self, server: Server, updates: Updates) -> None:
        self.measure(server, updates)
        known = {}
        for u in updates.clients:
            client = u.client
            assert client is not None
            theirs = {name: u.get(name) or self.as_sent(server, client)[name] for name in WEIGHTS}
            server.pool[client] = theirs if self.o.keep_between != "none" else {"psi": theirs["psi"]}
            theta = u.get("sigma", server["sigma"]) + theirs["psi"]
            known[client] = helping.embedded(server, server.model.having(theta, "parameters"))
        server["embeddings"] = server["embeddings"] | known
        for name in WEIGHTS:
            if sent := [u for u in updates if name in u]:
                server[name] = mean(sent, name)
        statistics = mean(updates.clients or updates, "model").groups
        whole = self.tested(server["sigma"], server["psi"])
        server["model"] = State(whole.layout, statistics | whole.groups)

    def measure(self, server: Server, updates: Updates) -> None:
        """Numbers that travel, as shares of one dense copy: up, and down where `keep_between` has something to compare with."""
        if ups := [float(sum(u[n].changed.sum() for n in WEIGHTS if n in u)) / numbers(server["sigma"]) for u in updates.clients]:
            server.log(share_up=sum(ups) / len(ups))
        if self.o.keep_between == "none":
            return
        downs = []
        for client in server.active:
            if client not in server.pool:
                downs.append(2.0)
                continue
            has, o = server.pool[client], self.o
            zero = {"sigma": 0.0, "psi": o.l1_threshold}
            count = sum(differing(server[n], has[n], o.delta_threshold, zero[n]).sum() for n in WEIGHTS)
            for psi in (server.pool[k]["psi"] for k in self.helpers_of(server, client)):
                count = count + (differing(psi, has["psi"], o.delta_threshold, o.l1_threshold) & (psi.groups["parameters"].abs() > o.l1_threshold)).sum()
            downs.append(float(count) / numbers(server["sigma"]))
        server.log(share_down=sum(downs) / len(downs))

    def tested(self, sigma: State, psi: State) -> State:
        """The weights of validation and test: small numbers of psi count as 0."""
        return sigma + psi.map(lambda t: kept(t, self.o.l1_threshold))

    # -- a party -------------------------------------------------------------------------------------------------------
    def begin(self, party: ApartParty) -> dict[str, Tensor]:
        for name in WEIGHTS:
            getattr(party, name).load(party.received[name])  # a client that keeps its own is sent what else it needs
        theta = (party.received["sigma"] + party.received["psi"]).only("parameters")
        party.model.load(theta)
        labelling.begin(self.o, party)
        found = {"falls": party.falls} if self.o.lr_rule != "constant" else {}
        helpers = self.helping(party)
        if helpers and len(party.unlabelled):
            found["votes"] = torch.stack([self.opinion(party, h) for h in helpers], 1)
            if self.o.helper_hold:
                found["votes"] = found["votes"] * party.helping[:, None]
        return found

    def helping(self, party: ApartParty) -> list[State]:
        """The helpers' weights: their psi on the sigma that was received."""
        received = party.received
        sent = [received[name] for j in range(self.o.helpers) if (name := f"helper{j}") in received]
        if self.o.helper_hold:
            nets = [getattr(party, f"helper{j}") for j in range(self.o.helpers)]
            if sent:
                for j, (net, psi) in enumerate(zip(nets, sent)):
                    net.load(psi)
                    party.helping[j].fill_(1.0)
                party.helping[len(sent) :].zero_()
            sent = [net.state for net in nets]
        return [self.whole(party, received["sigma"] + psi) for psi in sent]

    def whole(self, party: ApartParty, theta: State) -> State:
        """Weights with the party's statistics."""
        return party.model.state.having(theta, "parameters")

    def opinion(self, party: ApartParty, helper: State) -> Tensor:
        """What a helper says of all unlabelled images: its probabilities, and behind them one-hot its vote [n, 2 C]."""
        z = party.predict(helper, party.unlabelled, "weak")
        said = labelling.debiased(z, mean_prediction(z)) if self.o.debias and self.o.debias_helpers else z
        return torch.cat([z.softmax(1), labelling.one_hot(said.argmax(1), self.classes)], 1)

    def plan(self, party: ApartParty, found: Found) -> Plan:
        o, votes = self.o, found.get("votes")
        alone = o.labels != "server" and not len(party.labelled) and isinstance(o.unlabelled_batch, str) and o.unlabelled_batch.startswith("match")
        x, u = paired(party, "labelled", ("weak", "strong"), ALONE if alone else None, votes=votes)
        lr = plateau.rate(o, float(found["falls"])) if plateau.judges(o, party) is not None else None
        if party.is_server:
            step = self.supervised if o.server_psi == "whole" else self.supervised_thresholded
        else:
            step = self.step if votes is None else self.step_with_helpers
        plan = Plan(step, x=x, u=u) if o.order == "shuffled" else self.slices(step, party, x, u)
        return (plan if party.is_server or not self.several else self.in_epochs(plan)).having(lr=lr)

    def in_epochs(self, plan: Plan) -> Plan:
        """With the column `epoch_ends`; of the last epoch `end` takes care."""
        steps, out = len(plan), Plan()
        for segment in plan.segments:
            part, made = Plan(), np.arange(len(out) + 1, len(out) + len(segment) + 1)
            part.segments = (segment,)
            out = out + part.having(epoch_ends=(made % (steps // self.epochs) == 0) & (made < steps))
        return out

    def slices(self, step: StepFunction, party: ApartParty, x: Stream, u: Stream) -> Plan:
        """The released loader: consecutive slices, as many as round(n / batch), anew in each epoch."""
        x, u = (replace(stream, shuffle=False, epochs=None) for stream in (x, u))
        if party.steps is not None:
            return Plan(step, x=replace(x, steps=party.steps), u=replace(u, steps=party.steps))
        drives = x if x else u
        size = drives.size if isinstance(drives.size, int) else len(drives.samples)
        steps = max(1, round(len(drives.samples) / size))
        once = Plan(step, x=replace(x, steps=steps), u=replace(u, steps=steps))
        return sum((once for _ in range(math.ceil(party.epochs or 1))), Plan())

    # -- a step ----------------------------------------------------------------------------------------------------------
    def step(self, s: Apart, b: Columns) -> None:
        """Without helpers: the local model alone says what an image is."""
        self.both(s, b, None)

    def step_with_helpers(self, s: Apart, b: Columns) -> None:
        self.both(s, b, b.u.votes)

    def both(self, s: Apart, b: Columns, votes: Tensor | None) -> None:
        if b.x:
            self.supervised(s, b)
        if b.u:
            self.unsupervised(s, b, votes)
        if self.several:
            self.cut_back(s, b)

    def cut_back(self, s: Apart, b: Columns) -> None:
        """At an epoch's end: numbers that have hardly changed are again those that came."""
        for net, sent, zero in ((s.sigma, s.sent_sigma, 0.0), (s.psi, s.sent_psi, self.o.l1_threshold)):
            own = net.state.only("parameters")
            back = cut(own, sent.state.only("parameters"), self.o.delta_threshold, zero).groups
            net.load(State(own.layout, {group: torch.where(b.epoch_ends > 0, back[group], t) for group, t in own.groups.items()}))

    def supervised(self, s: Apart, b: Columns) -> None:
        self.learn_labels(s, b, fixed(s.psi))

    def supervised_thresholded(self, s: Apart, b: Columns) -> None:
        self.learn_labels(s, b, {name: kept(p, self.o.l1_threshold) for name, p in fixed(s.psi).items()})

    def learn_labels(self, s: Apart, b: Columns, psi: Weights) -> None:
        """L_s(sigma) = lambda_s CE(y, p_{sigma + psi*}(x)): sigma moves, psi takes part."""
        z = s.model(b.x.labelled, weights=total(s.sigma.weights, psi))
        loss = self.o.lambda_s * cross_entropy(z, b.x.y)
        s.descend(loss, s.sigma)
        s.log(loss=loss)

    def unsupervised(self, s: Apart, b: Columns, votes: Tensor | None) -> None:
        """L_u(psi) = lambda_i ICC + lambda_a CE_u + lambda_L1 |psi| + lambda_L2 |sigma* - psi|^2: psi moves, sigma takes part."""
        o, C, sigma, psi = self.o, self.classes, fixed(s.sigma), s.psi.weights
        zw = s.model(b.u.weak, weights=total(sigma, psi))
        confidence, label = labelling.logits(o, s, b.u, zw).softmax(1).max(1)
        sure, icc = confidence >= o.threshold, zw.new_zeros(())                    # K
        if votes is not None:
            said, cast = votes[..., :C], votes[..., C:]
            label = self.agreed(label, cast)
            there = (said.sum(2) > 0.5).to(zw.dtype)                               # a place without a helper is all 0
            apart = self.divergence(said.flatten(0, 1), zw[:, None].expand_as(said).flatten(0, 1))
            each = (apart.view(there.shape) * there).sum(1) / there.sum(1).clamp_min(1)
            icc = masked_mean(each, sure, "selected")                              # mean_j KL(p_hj || p_local)
        zs = s.model(b.u.strong, weights=total(sigma, psi))
        ce_u = masked_mean(self.surprise(zs, label), sure, "selected")
        loss = o.lambda_i * icc + o.lambda_a * ce_u + self.penalty(sigma, psi)
        s.descend(loss, s.psi)
        s.judge(b.u, label, sure, confidence=confidence)
        seen = o.lambda_i * icc + o.lambda_a * ce_u
        s.log(unlabelled_loss=seen, **({} if b.x else {"loss": seen}))

    def agreed(self, own: Tensor, cast: Tensor) -> Tensor:
        """The class with the most of the local model's vote and the helpers' [n, H, C]; argmax alone may take any of equal counts."""
        lower = torch.arange(self.classes, device=own.device) / (4 * self.classes)
        counts = labelling.one_hot(own, self.classes) + cast.sum(1) - lower
        if self.o.agreement_tie == "local":
            counts = counts + 0.5 * labelling.one_hot(own, self.classes)
        return counts.argmax(1)

    def penalty(self, sigma: Weights, psi: Weights) -> Tensor:
        """Sums, not means; without biases and norm layers' parameters, which psi has none of at the start."""
        pairs = [(sigma[name], p) for name, p in psi.items() if p.dim() > 1]
        l1 = torch.stack([p.abs().sum() for _, p in pairs]).sum()
        l2 = torch.stack([(c - p).square().sum() for c, p in pairs]).sum()
        return self.o.lambda_l1 * l1 + self.o.lambda_l2 * l2

    def divergence(self, target: Tensor, z: Tensor) -> Tensor:
        if self.o.probabilities == "exact":
            return kl(target, z)
        p, q = (t.clamp(LEAST, 1.0) for t in (target, z.softmax(1)))
        return (p * (p / q).log()).sum(1)

    def surprise(self, z: Tensor, label: Tensor) -> Tensor:
        if self.o.probabilities == "exact":
            return ce(z, label)
        return -z.softmax(1).gather(1, label[:, None])[:, 0].clamp(LEAST, 1 - LEAST).log()

    def end(self, party: ApartParty) -> Update | None:
        if not party.made:
            return None
        sigma, psi = (getattr(party, name).state.only("parameters") for name in WEIGHTS)
        theta = self.tested(sigma, psi)
        samples = plateau.judges(self.o, party)
        if samples is not None:
            z = party.predict(self.whole(party, theta), samples)
            plateau.observe(self.o, party, cross_entropy(z, torch.from_numpy(samples.y).to(z.device)))
        if party.is_server:
            return Update(sigma=sigma, model=self.whole(party, theta))
        o, received, up = self.o, party.received, {}
        both = o.labels == "clients"  # a summand that was not trained counts as it came
        if both or len(party.labelled):
            up["sigma"] = cut(sigma, received["sigma"], o.delta_threshold)
        if both or len(party.unlabelled):
            up["psi"] = cut(psi, received["psi"], o.delta_threshold, o.l1_threshold)
        for name, state in up.items():
            getattr(party, name).load(state)  # what stays here is what the server has
        sent: Message = {name: Sparse(state, received[name]) for name, state in up.items()}
        return Update(model=party.model.state.only("statistics", "counters"), **sent)
