"""Who holds what: the federation as index lists, its counts, its fingerprint, its file, its table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fallow import disk
from fallow.data.dealing import EMPTY, Ints
from fallow.data.readers.arrays import BROKEN, check_members
from fallow.data.skews import skew
from fallow.errors import UserError
from fallow.limits import check_room
from fallow.paths import is_special

UNREADABLE = (OSError, AttributeError, *BROKEN)


@dataclass(frozen=True, eq=False, slots=True)
class Holding:
    """A party's samples: indices into the training set, in the order emitted."""

    labelled: Ints
    unlabelled: Ints
    unused: int = 0  # unlabelled samples of its own that `unlabelled_ratio` leaves out
    validation: Ints = field(default_factory=lambda: EMPTY)  # labelled, held out of training


@dataclass(frozen=True, eq=False)
class Federation:
    """Who holds what. `server.labelled` is empty where the labels are at clients."""

    server: Holding
    clients: tuple[Holding, ...]
    dropped: Ints
    names: tuple[str, ...]
    spec: dict[str, Any]
    tries: int = 1

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the server's list, each client's two in client order and the dropped, as little-endian int64.

        Each list is preceded by its length: without it, iid over 5 and over 10 clients would have one fingerprint. Where
        labels are held out for validation, the lists of these follow.
        """
        digest = hashlib.sha256()
        held = [part for client in self.clients for part in (client.labelled, client.unlabelled)]
        validation = [party.validation for party in (self.server, *self.clients)] if self.validates else []
        for indices in (self.server.labelled, *held, self.dropped, *validation):
            digest.update(np.array(len(indices), "<i8").tobytes() + indices.astype("<i8").tobytes())
        return digest.hexdigest()

    @cached_property
    def validates(self) -> bool:
        """Whether labels are held out for validation."""
        return any(len(party.validation) for party in (self.server, *self.clients))

    @cached_property
    def most_unlabelled(self) -> int:
        """The largest number of unlabelled samples that a client has."""
        return max((len(client.unlabelled) for client in self.clients), default=0)

    @cached_property
    def uneven(self) -> bool:
        """Whether clients have different numbers of labels, so that whole labelled sets are of many sizes."""
        return len({len(client.labelled) for client in self.clients if len(client.labelled)}) > 1

    def counts(self, labels: Ints, classes: int) -> dict[str, Ints]:
        """[clients, classes] of both lists; samples without a known label are not counted."""
        return {
            side: np.stack([_tally(np.asarray(labels)[getattr(client, side)], classes) for client in self.clients])
            for side in ("labelled", "unlabelled")
        }

    def arrays(self) -> dict[str, Any]:
        """All of it as a few arrays, for a file or another process."""
        return {
            "server": self.server.labelled,
            "dropped": self.dropped,
            **_packed("labelled", [client.labelled for client in self.clients]),
            **_packed("unlabelled", [client.unlabelled for client in self.clients]),
            "unused": np.array([client.unused for client in self.clients], np.int64),
            **(_packed("validation", [party.validation for party in (self.server, *self.clients)]) if self.validates else {}),
            "about": np.frombuffer(json.dumps(self._about()).encode(), np.uint8),
        }

    @staticmethod
    def of(arrays: Mapping[str, Any]) -> Federation:
        """What `arrays` gave; ValueError where its fingerprint does not agree."""
        about = json.loads(arrays["about"].tobytes())
        labelled, unlabelled = _unpacked(arrays, "labelled"), _unpacked(arrays, "unlabelled")
        unused = arrays["unused"].tolist() if "unused" in arrays else [0] * len(labelled)  # older files have none
        at_server, *validation = _unpacked(arrays, "validation") if "validation" in arrays else [EMPTY] * (1 + len(labelled))
        clients = tuple(Holding(*held) for held in zip(labelled, unlabelled, unused, validation, strict=True))
        server, names = Holding(arrays["server"], EMPTY, validation=at_server), tuple(about["names"])
        federation = Federation(server, clients, arrays["dropped"], names, about["spec"], about["tries"])
        if federation.fingerprint != about["fingerprint"] or len(names) != len(clients):
            raise ValueError("fingerprint")
        return federation

    def save(self, path: Path | str, labels: Ints | None = None, classes: Sequence[str] = ()) -> None:
        """Writes one .npz: whole or not at all. With the training labels it also holds everyone's classes, see `ClassCounts`."""
        path, held = Path(path), {} if labels is None else ClassCounts.of(self, labels, classes).arrays()
        with disk.replacing(path) as file:
            np.savez_compressed(file, **self.arrays(), **held)  # type: ignore[arg-type]

    def _about(self) -> dict[str, Any]:
        return {"names": self.names, "spec": self.spec, "tries": self.tries, "fingerprint": self.fingerprint}

    @staticmethod
    def load(path: Path | str) -> Federation:
        """Reads what `save` wrote and checks its fingerprint."""
        damaged = UserError(f"the federation file {path} is damaged", "restore it, or delete it and make it again")
        if is_special(path):
            raise damaged
        try:
            check_members(Path(path))
            with np.load(path, allow_pickle=False) as file:
                return Federation.of(file)
        except FileNotFoundError:
            raise UserError(f"there is no federation file {path}", "check the path, or make it first") from None
        except UNREADABLE:
            raise damaged from None


class ClassCounts(NamedTuple):
    """How many samples of each class everyone holds; where some labels are unknown, the last class is `unknown`."""

    clients: tuple[str, ...]
    classes: tuple[str, ...]
    server: Ints  # [classes]
    labelled: Ints  # [clients, classes]
    unlabelled: Ints

    @staticmethod
    def of(federation: Federation, labels: Ints, classes: Sequence[str]) -> ClassCounts:
        labels, names = np.asarray(labels), tuple(classes)
        if (labels < 0).any():
            labels, names = np.where(labels < 0, len(names), labels), (*names, "unknown")
        sides = federation.counts(labels, len(names))
        server = _tally(labels[federation.server.labelled], len(names))
        return ClassCounts(federation.names, names, server, sides["labelled"], sides["unlabelled"])

    def arrays(self) -> dict[str, Any]:
        names = np.frombuffer(json.dumps(self.classes).encode(), np.uint8)
        return {"classes": names, "held_server": self.server, "held": np.stack([self.labelled, self.unlabelled])}

    @staticmethod
    def load(path: Path | str) -> tuple[ClassCounts, str]:
        """What `Federation.save` wrote, and its fingerprint; of a file without labels the sizes, as one class `samples`."""
        federation = Federation.load(path)
        try:
            with np.load(path, allow_pickle=False) as file:
                if "held" not in file:
                    check_room(8 * _end(federation), f"counting the samples of {path}")
                    return ClassCounts.of(federation, np.zeros(_end(federation), np.int64), ["samples"]), federation.fingerprint
                classes = tuple(json.loads(file["classes"].tobytes()))
                labelled, unlabelled = file["held"]
                held = ClassCounts(federation.names, classes, file["held_server"], labelled, unlabelled)
            if not labelled.shape == unlabelled.shape == (len(federation.clients), len(classes)) or held.server.shape != (len(classes),):
                raise ValueError("held")
        except UNREADABLE:
            raise UserError(f"the federation file {path} is damaged", "restore it, or delete it and make it again") from None
        return held, federation.fingerprint


def _end(federation: Federation) -> int:
    """One more than the largest sample that anyone holds."""
    parts = [federation.server.labelled, *(part for c in federation.clients for part in (c.labelled, c.unlabelled))]
    return max((int(part.max()) + 1 for part in parts if len(part)), default=0)


def _tally(labels: Ints, classes: int) -> Ints:
    return np.bincount(labels[labels >= 0], minlength=classes)


def _packed(name: str, lists: Sequence[Ints]) -> dict[str, Ints]:
    return {name: np.concatenate([EMPTY, *lists]), f"{name}_sizes": np.array([len(part) for part in lists], np.int64)}


def _unpacked(file: Any, name: str) -> list[Ints]:
    flat, sizes = file[name], file[f"{name}_sizes"]
    if sizes.sum() != len(flat):
        raise ValueError(name)
    return np.split(flat, np.cumsum(sizes)[:-1])


class Table(NamedTuple):
    """What a terminal or a report prints about a federation."""

    rows: list[dict[str, Any]]  # client, labelled, unlabelled, classes, labelled_classes, largest, share
    summary: dict[str, Any]


def measured(counts: Ints) -> float | None:
    """R over the clients that hold a sample with a known label; None where there are fewer than two of them."""
    counts = counts[counts.sum(1) > 0]
    return skew(counts) if len(counts) > 1 else None


def table(federation: Federation, labels: Ints, class_names: Sequence[str]) -> Table:
    """One row per client, and the whole in a few numbers."""
    sides = federation.counts(labels, len(class_names))
    both = sides["labelled"] + sides["unlabelled"]
    if federation.spec.get("labelled_as_unlabelled") is True:
        both = sides["unlabelled"]
    rows = []
    for i, (name, client) in enumerate(zip(federation.names, federation.clients)):
        top, known = int(both[i].argmax()), int(both[i].sum())
        rows.append(
            {
                "client": name,
                "labelled": len(client.labelled),
                "unlabelled": len(client.unlabelled),
                **({"validation": len(client.validation)} if federation.validates else {}),
                "classes": int((both[i] > 0).sum()),
                "labelled_classes": int((sides["labelled"][i] > 0).sum()),
                "largest": class_names[top] if known else None,
                "share": round(both[i][top] / known, 4) if known else None,
            }
        )
    summary: dict[str, Any] = {
        "clients": len(rows),
        "server_labelled": len(federation.server.labelled),
        "dropped": len(federation.dropped),
        "tries": federation.tries,
        "fingerprint": federation.fingerprint,
        "classes_per_client": float(np.mean([row["classes"] for row in rows])),
    }
    if federation.validates:
        summary["validation_total"] = len(federation.server.validation) + sum(len(client.validation) for client in federation.clients)
    for side in ("labelled", "unlabelled"):
        sizes = np.array([row[side] for row in rows])
        summary[f"r_{side}"] = measured(sides[side])
        summary[f"{side}_total"] = int(sizes.sum())
        summary[f"{side}_sizes"] = (int(sizes.min()), float(np.median(sizes)), int(sizes.max()))
    return Table(rows, summary)
