"""Who makes pseudo-labels, and from what: a labeller answers with logits, the method makes targets of them.

`current` is the net in training, anew for every batch; `received` the model as it came, once per round, before any
step; `received-each` the same model, which stays as it came, anew for every batch; `local-ema` a net of the client's
own, fused with the received model at the start of a round and following the net in training after it. With `debias` every answer is divided by the labeller's mean prediction (FedDB's DPL).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fallow.config import Config
from fallow.methods.base import Batch, BatchPart, Held, Net, NetHandle, Party, Slot, Value
from fallow.methods.parts.dma import mean_prediction

ALL = frozenset({"current", "received", "local-ema"})
EACH = ALL | {"received-each"}  # of methods that label batch by batch
NETS = ("local-ema", "received-each")  # held beside the net in training


# -- what a party holds for it, and a batch ----------------------------------------------------------------------------
class LabellerParty(Party):
    labeller: NetHandle  # of `local-ema` and `received-each`
    prior: Tensor  # the labeller's mean prediction
    log_decay_per_sample: Tensor  # of `app_u_source=running`


class LabellerSlot(Slot):
    labeller: NetHandle
    prior: Tensor
    log_decay_per_sample: Tensor


class LabellerPart(BatchPart):
    z: Tensor  # of `received`: its logits


class LabellerBatch(Batch):
    u: LabellerPart


# -- numbers -----------------------------------------------------------------------------------------------------------
def debiased(z: Tensor, prior: Tensor) -> Tensor:
    """Logits whose softmax is (p / prior), normalised.  FedDB, Eq. 14."""
    return z - prior.clamp_min(1e-12).log()


def hard(z: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The likeliest class, and whether its probability reaches the threshold."""
    confidence, label = z.softmax(1).max(1)
    return label, confidence >= threshold


def one_hot(label: Tensor, like: Tensor | int) -> Tensor:
    """Classes as probabilities, or votes; `like` has a column for each class, or is their number."""
    classes, dtype = (like, torch.get_default_dtype()) if isinstance(like, int) else (like.shape[1], like.dtype)
    return (label[:, None] == torch.arange(classes, device=label.device)).to(dtype)


def confidence(z: Tensor) -> Tensor:
    """The probability of the likeliest class: what `hard` compares with the threshold."""
    return z.softmax(1).amax(1)


def weak_logits(party: Party, shuffled: bool = False, size: int = 250) -> Tensor:
    """The received model's logits of all unlabelled samples, one weak view each, in stored order.

    Batches of `size` are cut in stored order, or in a shuffled one: under batch statistics their make-up matters.
    """
    u = party.unlabelled
    if not shuffled:
        return party.predict(party.model, u, "weak", batch=size)
    order, stops = party.rng("labelling").permutation(len(u)), np.cumsum(cuts(len(u), True, size))
    parts = [party.predict(party.model, u.take(rows), "weak", batch=len(rows)) for rows in np.split(order, stops[:-1])]
    back = torch.from_numpy(np.argsort(order)).to(parts[0].device)
    return torch.cat(parts).index_select(0, back)


def cuts(n: int, merge: bool, size: int = 250) -> list[int]:
    """Sizes of inference batches; a rest of fewer than 32 may join the one before."""
    whole, rest = n // size, n % size
    if not rest:
        return [size] * whole
    return [size] * (whole - 1) + [size + rest] if merge and whole and rest < 32 else [size] * whole + [rest]


# -- the labeller, hook by hook ----------------------------------------------------------------------------------------
def holds(o: Config, classes: int) -> Held:
    """What a party holds for labelling; `average=dma` sends the prior, too."""
    held: Held = {}
    if o.labeller == "local-ema":
        held["labeller"] = Net(keep=True, train=False)
    if o.labeller == "received-each":
        held["labeller"] = Net(start="model", train=False)
    if o.debias or o.average == "dma":
        held["prior"] = Value(classes, start=1 / classes)
    if o.app_u_source == "running":
        held["log_decay_per_sample"] = Value(1)
    return held


def begin(o: Config, party: LabellerParty, once: bool = False) -> dict[str, Tensor]:
    """Before the steps: fuses the kept labeller, measures the prior. `received` also answers, for all samples and the round.

    So does the kept labeller if the method labels `once` a round.
    """
    net, answers = party.model, o.labeller == "received" or (once and o.labeller == "local-ema")
    if o.labeller == "local-ema":
        net = party.labeller
        net.load(net.flat.lerp(party.received["model"], 1 - o.labeller_ema))
    if not len(party.unlabelled) or not (o.debias or o.average == "dma" or answers):
        return {}
    z = party.predict(net, party.unlabelled, "weak")
    if o.debias or o.average == "dma":
        party.prior.copy_(mean_prediction(z))
    if o.app_u_source == "running":
        party.log_decay_per_sample.fill_(math.log(o.app_u_momentum) / len(z) if o.app_u_momentum else -math.inf)
    if o.debias:
        z = debiased(z, party.prior)
    return {"z": z} if answers else {}


def logits(o: Config, s: LabellerSlot, u: LabellerPart, z: Tensor | None = None) -> Tensor:
    """The labeller's logits for a batch of unlabelled samples; `z` are those of the net in training, if it has them."""
    if o.labeller == "received":
        return u.z  # debiased at the start of the round
    if o.labeller in NETS or z is None:
        with torch.no_grad():
            z = (s.labeller if o.labeller in NETS else s.model)(u.weak, stats="running", rows=u.rows)
    z = z.detach()
    if not o.debias:
        return z
    out = debiased(z, s.prior)
    if o.app_u_source == "running":
        _move(s, u, z)
    return out


@torch.no_grad()
def _move(s: LabellerSlot, u: LabellerPart, z: Tensor) -> None:
    """The prior follows a batch it has served: by gamma over a pass, so by gamma^(b/N) over b of the N samples."""
    rows = torch.ones(len(z), dtype=torch.bool, device=z.device) if u.rows is None else u.rows
    new = torch.where(rows[:, None], z.softmax(1), 0.0).sum(0) / rows.sum()
    keep = (s.log_decay_per_sample * rows.sum()).exp()
    s.prior.copy_(keep * s.prior + (1 - keep) * new)


def follow(o: Config, s: LabellerSlot) -> None:
    """After a step: the kept labeller follows the net in training."""
    if o.labeller == "local-ema":
        s.labeller.follow(s.model, o.labeller_decay)
