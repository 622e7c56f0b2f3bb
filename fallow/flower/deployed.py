"""A deployed run: the same settings, rounds and folder as a simulated one, with clients that are nodes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import chdir
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fallow import config as configuration
from fallow import disk, models, own
from fallow.config import Config, dump
from fallow.data.readers.common import ImageSet
from fallow.data.sources import Source
from fallow.engine.kit import Declared
from fallow.engine.policies import STATIC, policy_of
from fallow.errors import UserError
from fallow.flower import share as shares
from fallow.flower.away import Away
from fallow.flower.nodes import Exchange, Nodes
from fallow.flower.roster import Roster
from fallow.flower.share import Share
from fallow.flower.terms import Terms
from fallow.methods import find, is_own
from fallow.methods.base import Method
from fallow.recipes.reading import recipe
from fallow.runs import Run, Watcher, automatic
from fallow.runs import origin as origins
from fallow.runs.folder import Busy, RunFolder
from fallow.runs.nodes import ORDER
from fallow.runs.origin import Origin
from fallow.runs.result import Result
from fallow.runs.settings import are_fitted, resolve, stored
from fallow.trees import merge, read_yaml

ENDED = "ended.json"  # how a deployed run came to its end
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Order:
    """What a deployed run is to be, in its folder from the start."""

    recipe: str | None
    keys: dict[str, Any]
    terms: dict[str, Any]
    server: str  # the YAML of the server's own data
    clients: int
    run: str  # tells this run's messages from any other's
    started_in: str  # relative paths count from here

    @staticmethod
    def read(folder: Path) -> Order:
        try:
            return Order(**json.loads(disk.read(folder / ORDER, "start the run anew")))
        except (ValueError, TypeError):
            raise UserError(f"{folder / ORDER} is damaged", "start the run anew") from None


def begin(out: Path, name: str, recipe_name: str | None, keys: Mapping[str, Any], terms: Mapping[str, Any], server: Path, clients: int) -> Path:
    """A new run's folder with its order; nothing is run yet."""
    folder = RunFolder.new(out, name)
    order = Order(recipe_name, dict(keys), dict(terms), str(server.absolute()), clients, secrets.token_hex(8), str(Path.cwd()))
    disk.write(folder.path / ORDER, json.dumps(asdict(order), indent=1) + "\n")
    return folder.path


def carry_out(path: Path, exchange: Exchange, tell: Tell = print, watch: Watcher | None = None, stop_after: int | None = None) -> Result:
    """Runs what a folder's order says, or goes on with it from its last checkpoint."""
    folder = RunFolder(path)
    try:
        order = Order.read(path)
        with folder.locked(), chdir(order.started_in):
            disk.remove(path / ENDED)
            terms = configuration.validate(Terms, order.terms)
            at_work = _resumed(folder, order, terms, exchange, tell) if folder.config.exists() else _begun(folder, order, terms, exchange, tell)
            result = at_work.go(stop_after, watch)
    except Busy:  # another process is at it, and says how it ends
        raise
    except UserError as e:
        disk.write(path / ENDED, json.dumps({"ok": False, "cause": e.cause, "remedy": e.remedy}))
        raise
    disk.write(path / ENDED, json.dumps({"ok": True}))
    return result


def _begun(folder: RunFolder, order: Order, terms: Terms, exchange: Exchange, tell: Tell) -> Run:
    method, options, fit = settings_of(order)
    options, share = _server_share(options, order)
    source = source_of(options, share)
    check(options, terms)
    roster = Roster(exchange, about_code(order, options, source), order.clients, tell)
    roster.wait(order.clients, terms.node_timeout)
    counts = [roster.info[client]["samples"] for client in range(order.clients)]
    held = shares.named(share, source.classes, options.labels).holding
    at_server = held if options.labels == "server" else type(held)(held.labelled[:0], held.unlabelled[:0])
    federation = Away.made(at_server, counts, source.train.labels.numpy(), {"labels": options.labels, "seed": options.seed_of("split")})
    if fit:
        options = automatic.fitted(method, options, automatic.given(options), source, federation)
    origin = Origin.of(options, method, source)
    origin.write(folder.path)
    federation.save(folder.federation, source.train.labels.numpy(), source.classes)
    disk.write(folder.config, dump(options))
    disk.write(folder.metrics, "")
    folder.begin()
    return _at_work(folder, order, terms, exchange, tell, roster, method, options, source, federation, origin)


def _resumed(folder: RunFolder, order: Order, terms: Terms, exchange: Exchange, tell: Tell) -> Run:
    method, options = stored(folder.config)
    folder.check_begun()
    _, share = _server_share(options, order)
    source = source_of(options, share)
    origin = Origin.read(folder.path)
    if origin is not None:
        origin.check_code(options, folder.path, False)
        origin.check_data(source, False)
    federation = Away.load(folder.federation)
    roster = Roster(exchange, about_code(order, options, source), order.clients, tell)
    roster.wait(terms.least(order.clients), terms.node_timeout)
    for client, info in sorted(roster.info.items()):
        had = {"labelled": len(federation.clients[client].labelled), "unlabelled": len(federation.clients[client].unlabelled)}
        if info["samples"] != had:
            raise UserError(f"client {client} holds {info['samples']} now and held {had} when the run was begun", "put its old data back, or start a new run")
    at_work = _at_work(folder, order, terms, exchange, tell, roster, method, options, source, federation, origin)
    at_work.restore()
    return at_work


def _at_work(
    folder: RunFolder, order: Order, terms: Terms, exchange: Exchange, tell: Tell, roster: Roster, method: type[Method], options: Config,
    source: Source, federation: Away, origin: Origin | None,
) -> Run:  # fmt: skip
    about = about_code(order, options, source) | {"declared": asdict(Declared.of(options, source, federation))}

    def away(simulation: Any, executor: Any, keep: Any) -> Nodes:
        from fallow.engine.questions import Questions

        return Nodes(
            simulation, executor, keep, exchange=exchange, roster=roster, terms=terms, about=about, folder=folder.path,
            ask_here=lambda question, requests, **more: _asked_here(Questions(simulation), question, requests, more), tell=tell,
        )  # fmt: skip

    at_work = Run(folder, method, options, source, federation, origin, away)
    at_work.federated.server.more = terms.over_select
    return at_work


def _asked_here(questions: Any, question: str, requests: list[Any], more: dict[str, Any]) -> list[Any]:
    from fallow.engine.party import Job

    return questions.ask([r if isinstance(r, Job) else Job(**vars(r)) for r in requests], question, **more)


# -- settings ----------------------------------------------------------------------------------------------------------
def settings_of(order: Order) -> tuple[type[Method], Config, bool]:
    """The method, the settings, and whether those that nobody gave are to be fitted to the data."""
    given = dict(order.keys)
    name = order.recipe
    if name and (folder := Path(name)).is_dir() and (folder / "config.yaml").is_file():
        name = str(folder / "config.yaml")
    if name and name.endswith(".yaml") and "version" in (keys := read_yaml(name)):  # a simulated run's
        keys.pop("version")
        for what, named in (("method", is_own), ("model", models.is_own)):
            if what not in given and named(str(keys.get(what))):
                own.check(str(keys[what]), what, f"the run {name}", False)
        method = find(str(given.get("method", keys.get("method"))))
        return method, _declared_clients(method, merge(keys, given), order), False
    base = recipe(name) if name else {}
    method, options = resolve(base, given)
    said = options.model_dump(exclude_unset=True)
    return method, _declared_clients(method, said, order), are_fitted(base, given)


def _declared_clients(method: type[Method], keys: dict[str, Any], order: Order) -> Config:
    if keys.get("clients", order.clients) != order.clients:
        raise UserError(f"clients={keys['clients']}, but the federation has {order.clients} nodes", "leave clients out, or make the federation anew")
    return configuration.validate(method.Options, keys | {"clients": order.clients})


def check(o: Config, terms: Terms) -> None:
    """Refuses what needs data that lie at nodes."""
    if policy_of(o.norm, o.statistics) is STATIC and o.sbn != "federated" and o.sbn_data != "server":
        raise UserError(f"sbn={o.sbn} reads the clients' images, which stay on their nodes", "use sbn=federated, or sbn_data=server")
    if terms.over_select and o.average == "grouped":
        raise UserError("over_select draws more clients than average=grouped has places for", "leave one of them out")
    if o.validation is not None:
        raise UserError("validation= holds out labels that lie on nodes", "leave it out; the server's test set is tested on")


def _server_share(options: Config, order: Order) -> tuple[Config, Share]:
    image = options.image
    share = shares.read(Path(order.server), image.size, image.fit, image.channels)
    if share.test is None or not len(share.test):
        raise UserError(f"{order.server} names no test set", "a server needs one: a folder, a .csv, or an .npz with test_images, test_labels and classes")
    return options, share


def source_of(options: Config, share: Share) -> Source:
    """The server's own samples and test set, as a run's data."""
    assert share.test is not None
    classes = share.classes or tuple(map(str, range(1 + int(share.test.labels.max()))))
    images = share.images if len(share.images) else torch.zeros(0, *share.test.images.shape[1:], dtype=torch.uint8)
    train = ImageSet(images, torch.from_numpy(share.labels.copy()))
    return Source(str(share.about.get("name", options.data)), classes, train, share.test, bool(share.about.get("flip", True)))


# -- what nodes are told -----------------------------------------------------------------------------------------------
def about_code(order: Order, options: Config, source: Source) -> dict[str, Any]:
    found = origins.located(options, Path.cwd())
    code = {what: own.find(name, what).digests for what, name in origins.own_code(found).items()}
    return {
        "run": order.run, "options": options.model_dump(mode="json", exclude={"data_dir", "track"}), "classes": list(source.classes),
        "versions": origins.versions(), "code": code,
    }  # fmt: skip
