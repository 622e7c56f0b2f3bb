"""Who makes pseudo-labels, and what their bias is divided by."""

from __future__ import annotations

from typing import Literal

from fallow.keys.section import Section, key

Labeller = Literal["current", "received", "received-each", "local-ema"]


class LabellingKeys(Section):
    labeller: Labeller | None = key(None, "who makes pseudo-labels: the net in training, the model as received (once a round, or for each batch), or a kept average (default: the method's own way)")
    debias: bool = key(False, "divide predictions by the party's mean prediction before labelling (DPL)")
    app_u_source: Literal["round-start", "running"] = key("round-start", "debias: the mean prediction stays for the round, or follows the batches that are labelled")
    app_u_momentum: float = key(0.5, "what the mean prediction weighs against a pass over the samples (FedDB: against a step)", "gamma", ge=0, le=1)
    labeller_ema: float = key(0.7, "local-ema: what the kept labeller weighs against the received model", "mu", ge=0, le=1)
    labeller_decay: float = key(0.999, "local-ema: decay at each step", ge=0, le=1)
