"""What travels between server and nodes: each tensor of a method's messages, its size, and what it may disclose.

Read off the messages themselves, of one round on a few images.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fallow import disk
from fallow.config import dump
from fallow.flower import deployed, share
from fallow.flower.here import Here
from fallow.flower.node import Node
from fallow.flower.parcel import Parcel
from fallow.runs import prepare

EVERYONE = "what the server knows: it speaks of all clients together"
UPDATE = "what the client's samples changed; of few samples parts can be rebuilt from it, and whether one took part"
FEATURES = "means and variances of features over the client's images: colours, contrast, of few images more"
PRIOR = "the mean prediction over the client's unlabelled images: about the shares of its classes"
SAYS = (  # of what comes up, by the tensor's name: the first that fits
    (r"update\..*\.statistics$", FEATURES),
    (r"\.counters$", "how many batches the client made"),
    (r"update\.(prior|app_?u|p)$", PRIOR),
    (r"update\.[^.]+\.(parameters|sparse)$", UPDATE),
    (r"update\.", "what the method makes of the client's samples in `end`: its page says what"),
    (r"optimizers\.", "the gradients of the last steps, mixed; as for the update"),
    (r"logs\..*/counts$", "how many pseudo-labels it made, and of which classes"),
    (r"logs\..*/levels$", "how sure it was of them"),
    (r"logs\.", "a sum over the round's samples, and how many they are"),
    (r"finite$", "whether all its numbers are numbers"),
    (r"^gradient answer", "the gradient over all its samples; as for the update"),
    (r"^mean_prediction answer", PRIOR),
    (r"^moments answer", FEATURES),
)
PLAIN = {"up": "the client's number, how many samples it has and how many of them with labels, steps, seconds, versions", "down": "the round, settings, which record counts"}


@dataclass(frozen=True)
class Item:
    """A tensor that travels; or the words and numbers beside them."""

    way: str  # down or up
    kind: str  # who, train, or a question's name
    name: str
    type: str
    shape: tuple[int, ...]
    bytes: int
    discloses: str


def items(way: str, kind: str, parcel: Parcel) -> list[Item]:
    """What a message is made of: its bytes are those of all items together."""
    head = json.loads(parcel.head)
    kind = next((c[1]["value"] for c in head["tree"].get("dict", ()) if c[0] == "question"), kind)
    places: dict[tuple[Any, ...], list[str]] = {}
    for name, path in _tensors(head["tree"], ""):
        where, shape, start = head["tensors"][path]
        places.setdefault((where, tuple(shape), start), []).append(name)
    width = {name: array.itemsize for name, array in parcel.arrays.items()}
    found = [
        Item(way, kind, " = ".join(names), where, shape, math.prod(shape) * width[where], _says(way, kind, names[0]))
        for (where, shape, _), names in places.items()
    ]  # fmt: skip
    return [*found, Item(way, kind, "numbers and words", "text", (), len(parcel.head.encode()) + len(parcel.about.encode()), PLAIN[way])]


def _says(way: str, kind: str, name: str) -> str:
    if way == "down":
        return EVERYONE
    return next((said for pattern, said in SAYS if re.search(pattern, f"{kind} {name}")), "what the question asks of the client's samples")


def _tensors(shape: Any, name: str) -> Iterator[tuple[str, str]]:
    """The name of each tensor for people, and its path in the message."""
    if "state" in shape:
        yield from ((f"{name}.{group}", f"{shape['at']}.{group}") for group in shape["groups"])
    elif "tensor" in shape:
        yield name, shape["tensor"]
    else:
        for key, child in shape.get("dict") or enumerate(shape.get("list", ())):
            yield from _tensors(child, f"{name}.{key}" if name else str(key))


def overheard(method: str, keys: dict[str, Any]) -> list[Item]:
    """The items of the largest message of each kind, in one round with all that the settings ask for."""
    found: dict[tuple[str, str], list[Item]] = {}

    def heard(way: str, kind: str, parcel: Parcel) -> None:
        made = items(way, kind, parcel)
        place = way, made[0].kind
        if sum(i.bytes for i in made) > sum(i.bytes for i in found.get(place, ())):
            found[place] = made

    with tempfile.TemporaryDirectory(prefix="fallow-traffic-") as folder:
        _round(Path(folder), method, keys, heard)
    return [item for place in sorted(found, key=lambda p: (p[1] != "train", p[1] != "who", p[1], p[0])) for item in found[place]]


def _round(folder: Path, method: str, keys: dict[str, Any], heard: Any) -> None:
    small = {"rounds": 1, "steps": 1, "clients": 3, "sbn": "federated", "device": "cpu", "checkpoint_every": 1}
    _, options, source, federation = prepare(None, small | keys | {"method": method})
    for client in range(options.clients):
        share.write_client(folder / f"node-{client}", client, source, federation)
    share.write_server(folder / "server", source, federation)
    disk.write(folder / "config.yaml", dump(options))
    run = deployed.begin(folder, "run", str(folder / "config.yaml"), {}, {}, folder / "server" / "server.yaml", options.clients)
    nodes = {client: Node(folder / f"node-{client}") for client in range(options.clients)}
    deployed.carry_out(run, Here(nodes, heard), lambda _: None)
