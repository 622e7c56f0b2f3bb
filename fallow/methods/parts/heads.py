"""A model's last layer: its place, its width, and a second one on the same features."""

from __future__ import annotations

import torch
from torch import nn

from fallow import models
from fallow.config import Config
from fallow.errors import UserError
from fallow.methods.state import Layout, State


def last_layer(layout: Layout, classes: int) -> list[str]:
    """The weights and biases of the last layer that has a row for each class."""
    rows = [e for e in layout.entries if e.group == "parameters" and e.shape[:1] == (classes,)]
    heavy = [e.name for e in rows if len(e.shape) > 1]
    if not heavy:
        raise UserError("this model has no last layer with a row for each class", "use another model, or another method")
    owner = heavy[-1].rpartition(".")[0]
    return [e.name for e in rows if e.name.rpartition(".")[0] == owner]


def second_head(o: Config, classes: int, outputs: int) -> nn.Module:
    """A linear layer with so many outputs, for the features that the run's model has."""
    with torch.device("meta"):
        layout = Layout.of(models.build(o.model, classes, 3, norm=o.norm))
    width = next(e.shape[1] for e in layout.entries if e.name in last_layer(layout, classes) and len(e.shape) > 1)
    return nn.Linear(width, outputs)


def in_place_of_the_last(weights: dict[str, torch.Tensor], state: State, head: dict[str, torch.Tensor], classes: int) -> dict[str, torch.Tensor]:
    """A model's weights with another head, to call it with."""
    return weights | {name: head[name.rpartition(".")[2]] for name in last_layer(state.layout, classes)}
