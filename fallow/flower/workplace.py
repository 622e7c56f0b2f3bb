"""Where a node does its client's part of a round: the client's data, nets and draws, and nothing of anybody else's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fallow import config as configuration
from fallow import own
from fallow.config import Config
from fallow.engine.eager import Eager
from fallow.engine.kit import Declared, Kit
from fallow.engine.party import Job, Outcome
from fallow.engine.questions import Questions
from fallow.engine.site import Site, Sites
from fallow.errors import UserError
from fallow.flower import share as shares
from fallow.flower.share import Share
from fallow.methods import find, is_own
from fallow.methods.base import Method
from fallow.runs.origin import versions

HERE: dict[str, Any] = {"device": "auto", "slots": 1, "data_dir": None, "track": ()}  # what each machine decides for itself


def options_of(keys: dict[str, Any], folder: Path, device: str | None) -> tuple[Any, Config]:
    """The method and the run's settings, as they are on this machine; files of a method of one's own lie in the node's folder."""
    keys = keys | HERE | {"device": device or "auto"}
    for what in ("method", "model"):
        if ":" in str(keys.get(what)) and own.is_file(str(keys[what]).rpartition(":")[0]):
            keys[what] = own.located(keys[what], folder)
    if is_own(str(keys["method"])):
        own.named(keys["method"], "method")
    method = find(str(keys["method"]))
    return method, configuration.validate(method.Options, keys)


def check_code(about: dict[str, Any], folder: Path) -> None:
    """Before any of it is run: this node has the server's Fallow, and its file of a method or a model of one's own."""
    for name, version in versions().items():
        told = about["versions"].get(name)
        if name != "Python" and told != version:
            raise UserError(f"this node has {name} {version}, and the server {told}", "install the same version on every machine")
    for what, digests in about["code"].items():
        name = about["options"][what]
        found = own.find(own.located(name, folder), what).digests
        if found != digests:
            raise UserError(f"this node has another {what} {name} than the server", f"put the server's file into {folder}")


class Unfit(UserError):
    """What is wrong with a node's own data: names of files and classes, which stay there."""


def share_of(folder: Path, options: Config, classes: tuple[str, ...]) -> Share:
    image = options.image
    try:
        return shares.named(shares.read(folder / "node.yaml", image.size, image.fit, image.channels), classes, options.labels)
    except UserError as e:
        raise Unfit(e.cause, e.remedy) from None


class Workplace:
    """One client of one run, ready to work."""

    def __init__(self, about: dict[str, Any], folder: Path, client: int, device: str | None):
        method, self.options = options_of(about["options"], folder, device)
        self.share = share_of(folder, self.options, tuple(about["classes"]))
        check_shape(self.share, about["declared"])
        sites = _sites(about, method, self.options, self.share, client)
        self.layouts, self.device = sites.kit.layouts(), sites.kit.device
        self._executor, self._questions = Eager(sites), Questions(sites)

    def train(self, job: Job) -> Outcome:
        return self._executor.run([job])[0]

    def ask(self, question: str, job: Job, about: dict[str, Any]) -> Any:
        return self._questions.ask([job], question, **about)[0]


def check_shape(share: Share, declared: dict[str, Any]) -> None:
    """A node's images must be what the model of the run takes."""
    channels, height, width = share.images.shape[1:]
    wanted = declared["channels"], declared["size"], declared["size"]
    if len(share.images) and (channels, height, width) != wanted:
        told = f"this node's images are {channels}x{height}x{width}, and the run's {wanted[0]}x{wanted[1]}x{wanted[2]}"
        raise UserError(told, "set image.size and image.channels for the run, which bring both to one shape")


def _sites(about: dict[str, Any], method: type[Method], options: Config, share: Share, client: int) -> Sites:
    declared = Declared.read(about["declared"])
    kit = Kit(options, method.algorithm(options)(options, declared.classes), declared)
    images = share.images if len(share.images) else torch.zeros(0, declared.channels, declared.size, declared.size, dtype=torch.uint8)
    known = torch.from_numpy(share.labels).to(kit.device)
    return Sites(kit, {client: Site(kit, client, share.holding, images.to(kit.device), share.labels, known)})
