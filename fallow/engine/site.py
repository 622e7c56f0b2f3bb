"""A site: all that a party's code may touch. A simulation has those of all parties in one process, a node has its own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fallow.data.holdings import Holding
from fallow.data.samples import Samples
from fallow.engine.clients import SERVER
from fallow.engine.kit import Kit


class Site:
    """One party's samples, and the kit that it works with."""

    def __init__(self, kit: Kit, party: int, holding: Holding, images: Tensor, labels: np.ndarray, truth: Tensor | None = None):
        """`holding` has rows of `images` (uint8, on the device) and of `labels`: its own ones on a node, in a simulation everybody's.

        `truth` are the labels that a simulation hides from methods, by the same rows; a node knows none.
        """
        self.kit, self.party = kit, party
        self.labelled = Samples.of(holding.labelled, labels[holding.labelled])
        self.unlabelled = Samples.of(holding.unlabelled)
        self.validation = Samples.of(holding.validation, labels[holding.validation])  # not to train on
        self.unused = holding.unused  # how many unlabelled samples `unlabelled_ratio` leaves out
        self._images, self._truth = images, truth

    @property
    def is_server(self) -> bool:
        return self.party <= SERVER

    @property
    def rows(self) -> np.ndarray:
        """Of all its samples to train on; one that is labelled and serves as unlabelled, too, comes once."""
        labelled, unlabelled = self.labelled.rows, self.unlabelled.rows
        return np.concatenate([labelled, unlabelled[~np.isin(unlabelled, labelled)]])

    def view(self, role: str, rows: np.ndarray, keys: Tensor) -> Tensor:
        return self.kit.view(role, self._images.index_select(0, self.kit.put(rows)), keys)

    def plain(self, rows: np.ndarray) -> Tensor:
        return self.view("plain", rows, torch.zeros(len(rows), dtype=torch.int64))

    def truth(self, rows: np.ndarray) -> Tensor | None:
        """Hidden labels, to judge pseudo-labels by; -1 where nobody knows one."""
        return None if self._truth is None else self._truth[self.kit.put(rows)]


class Sites:
    """The sites of the parties whose work is done in this process."""

    def __init__(self, kit: Kit, sites: Mapping[int, Site]):
        self.kit, self._sites = kit, sites

    def site(self, party: int) -> Site:
        return self._sites[party]
