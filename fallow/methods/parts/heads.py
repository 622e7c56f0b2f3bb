"""A second last layer on the features of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from fallow.methods.interface import NetHandle
from fallow.models.heads import head_of


def last_layer(head: str, names: Iterable[str]) -> list[str]:
    """The names of all weights and biases of the layer whose weight is `head`."""
    owner = head.rpartition(".")[0]
    return [name for name in names if name.rpartition(".")[0] == owner]


def second_head(model: nn.Module, outputs: int) -> nn.Module:
    """A linear layer with so many outputs, for the features of this model."""
    return nn.Linear(model.get_parameter(head_of(model)).shape[1], outputs)


def in_place_of_the_last(net: NetHandle, head: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A net's weights with another head, to call it with."""
    return net.weights | {name: head[name.rpartition(".")[2]] for name in last_layer(net.head, net.weights)}
