"""What the key `measure` asks for, as columns of a round's metrics. It reads; nothing of the run depends on it."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fallow.data.holdings import measured
from fallow.engine.clients import SERVER, Reply, Request
from fallow.measure import diversity
from fallow.measure.prior import bias, class_accuracy, js, share
from fallow.methods.base import Net
from fallow.methods.state import State

if TYPE_CHECKING:
    from fallow.engine.round import Federated

Row = dict[str, Any]


class Measuring:
    """Measures a round that has been carried out, before it takes effect."""

    def __init__(self, federated: Federated):
        self.f, self.simulation, self.kit, self.o = federated, federated.simulation, federated.kit, federated.o

    def due(self, number: int) -> bool:
        return bool(self.o.measure) and ((number + 1) % self.o.measure_every == 0 or number + 1 == self.o.rounds)

    def row(self, requests: list[Request], replies: list[Reply]) -> Row:
        """The columns; `requests` are what the round's parties were sent, `replies` what they made of it."""
        out, wanted = Row(), self.o.measure
        if "diversity" in wanted:
            out |= self._diversity(requests, replies)
        if wanted == ("diversity",):
            return out
        whole = self.f.model()
        if "classes" in wanted:
            out["class_accuracy"] = self._by_class(whole)
        if "prior" in wanted:
            out |= self._prior(whole, replies)
        if "labels" in wanted:
            out |= self._labels(whole)
        return out

    def _by_class(self, state: State) -> list[float | None]:
        return class_accuracy(self.f.test_logits(state), self.simulation.test_labels, self.kit.classes)

    # -- prior bias (FedDB, Figs. 1 and 3) -------------------------------------------------------------------------------
    def _prior(self, whole: State, replies: list[Reply]) -> Row:
        """Divergences of the bias: from even, from the labelled classes, from APP-U; of the model and of each local one."""
        clients = sorted((r for r in replies if r.party > SERVER), key=lambda r: r.party)
        everywhere, of_whole = {r.party: whole for r in clients}, self._by_class(whole)
        local = {r.party: self.f.model(r.update["model"]) for r in clients if r.update is not None}
        by_class = {client: self._by_class(state) for client, state in local.items()}
        found = self._divergences(everywhere, dict.fromkeys(everywhere, of_whole))
        found |= {f"{name}_local": values for name, values in self._divergences(local, by_class).items()}
        return {
            "prior_js": {name: sum(v) / len(v) for name, v in found.items() if v},
            "prior_js_min": {name: min(v) for name, v in found.items() if v},
            "prior_js_max": {name: max(v) for name, v in found.items() if v},
            "class_accuracy_clients": {str(client): accuracy for client, accuracy in by_class.items()},
        }

    def _divergences(self, models: dict[int, State], by_class: dict[int, list[float | None]]) -> dict[str, list[float]]:
        """By client, of the model it has: `bias`, `labels`, `appu`."""
        requests = [Request(client, self.f.server.round, {"model": state}) for client, state in models.items()]
        out: dict[str, list[float]] = {"bias": [], "labels": [], "appu": []}
        for client, appu in zip(models, self.f.clients.ask("mean_prediction", requests)):
            b, counts = bias(by_class[client]), self._labelled[client]
            out["bias"].append(js(b, share(torch.ones(self.kit.classes))))
            if counts.sum():
                out["labels"].append(js(b, share(counts)))
            if appu is not None:
                out["appu"].append(js(b, appu))
        return out

    @cached_property
    def _labelled(self) -> Tensor:
        return torch.from_numpy(self.simulation.federation.counts(self.simulation.labels, self.kit.classes)["labelled"])

    # -- gradient diversity (FedRGD) -------------------------------------------------------------------------------------
    def _diversity(self, requests: list[Request], replies: list[Reply]) -> Row:
        """Of a server with replicas the first counts."""
        sent = {r.party: r for r in requests if r.party >= SERVER}
        answers = self.f.clients.ask("gradient", sent.values())
        gradients = {party: g for party, g in zip(sent, answers) if g is not None}
        updates = {r.party: r.update["model"] - sent[r.party].message["model"] for r in replies if r.party in sent and r.update is not None}
        left = set() if self.o.diversity_norms else diversity.norm_parameters(self.kit.net().module)
        vectors = [{party: diversity.vector(v, left) for party, v in of.items()} for of in (gradients, updates)]
        found = self._per_group(*vectors) if self.o.diversity_scope == "per-group" else self._global(*vectors)
        return {"diversity": {k: v if math.isfinite(v) else None for k, v in found.items()}, "R": self._skew}

    def _global(self, gradients: dict[int, Tensor], updates: dict[int, Tensor]) -> dict[str, float]:
        own = (gradients[SERVER], updates[SERVER]) if SERVER in gradients and SERVER in updates else None
        users = [[v for party, v in of.items() if party > SERVER] for of in (gradients, updates)]
        return diversity.every(users[0], users[1], own, self.o.diversity_scale)

    def _per_group(self, gradients: dict[int, Tensor], updates: dict[int, Tensor]) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, of in (("gradient", gradients), ("update", updates)):
            groups: dict[int, list[Tensor]] = {}
            for party in (p for p in of if p > SERVER):
                groups.setdefault(self.kit.method.averager.group(self.f.server, party), []).append(of[party])
            if groups:
                found |= {f"{name}/users/{form}": diversity.per_group(list(groups.values()), form) for form in diversity.FORMS}
        return found

    @cached_property
    def _skew(self) -> float | None:
        """R of all clients' classes, those of hidden labels too."""
        sides = self.simulation.federation.counts(self.simulation.labels, self.kit.classes)
        both = sides["unlabelled"] if self.o.labelled_as_unlabelled is True else sides["labelled"] + sides["unlabelled"]
        return measured(both)

    # -- who labels rightly (FedLoKe, Fig. 4) ----------------------------------------------------------------------------
    def _labels(self, whole: State) -> Row:
        """Of all clients' unlabelled samples, by the model and by a net that the client keeps; means over clients."""
        kept = [n for n, spec in self.kit.held.items() if isinstance(spec, Net) and spec.keep and spec.make is None][:1]
        everyone = (Request(client, self.f.server.round, {"model": whole}) for client in range(self.o.clients))
        answers = self.f.clients.ask("label_accuracies", everyone, after=True, nets=("model", *kept))
        found = [a for a in answers if a is not None]
        means = np.mean(found, axis=0).tolist() if found else [None]
        return {"label_accuracy_local": means[1] if kept and found else None, "label_accuracy_global": means[0]}
