"""Other clients' models as helpers: who helps whom, by what their models answer to an image of noise (FedMatch)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fallow.methods.interface import Server
from fallow.methods.state import State

MEAN, SPREAD = 125.0, 125.0  # of the noise, in levels from 0 to 255


def noise(server: Server) -> Tensor:
    """An image of Gaussian noise, drawn anew wherever it leaves 0 to 255."""
    rng, shape = server.rng("probe"), (1, *server.image_shape)
    image = rng.normal(MEAN, SPREAD, shape)
    while (outside := (image < 0) | (image > 255)).any():
        image = np.where(outside, rng.normal(MEAN, SPREAD, shape), image)
    return torch.from_numpy(image.round().astype(np.uint8))


def embedded(server: Server, model: State) -> Tensor:
    """What a model says of the noise: its embedding among the clients'."""
    return server.predict(model, server["probe"]).softmax(1)[0]


def nearest(embeddings: Mapping[int, Tensor], client: int, count: int) -> list[int]:
    """The clients whose embeddings are next to this one's, at most `count`; of equal ones the one known longer."""
    others = [k for k in embeddings if k != client]
    if not others or not count:
        return []
    distances = torch.stack([(embeddings[k] - embeddings[client]).double().norm() for k in others])
    return [others[i] for i in distances.argsort(stable=True)[:count].tolist()]
