"""A run from its settings to its result: begin, go on, resume."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from fallow import config as configuration
from fallow import disk
from fallow.config import Config
from fallow.data.federate import Federation, Spec, federate, labels_sha256
from fallow.data.given import source_of
from fallow.data.sharing import federate_with_shared
from fallow.data.sources import Source
from fallow.data.validation import hold_out
from fallow.engine import ranks
from fallow.engine.clients import Clients, Executor
from fallow.engine.debug import Debug
from fallow.engine.eager import Eager
from fallow.engine.evaluating import best_round, in_full
from fallow.engine.hooks import watched
from fallow.engine.inspecting import inspect
from fallow.engine.keep import Keep
from fallow.engine.kit import Declared, Kit
from fallow.engine.ranks import RankLost, Ranks
from fallow.engine.round import Federated
from fallow.engine.simulation import Simulation
from fallow.engine.slots import Slots
from fallow.errors import UserError
from fallow.methods import find
from fallow.methods.base import Method
from fallow.recipes.reading import recipe
from fallow.runs import automatic, longer
from fallow.runs import origin as origins
from fallow.runs.data import Reading, completed, load_source, named, opened_source, sized
from fallow.runs.folder import RunFolder
from fallow.runs.interrupts import Interrupts, Stopped
from fallow.runs.manifest import RESTORE
from fallow.runs.nodes import ORDER
from fallow.runs.onlookers import watching
from fallow.runs.origin import Origin
from fallow.runs.result import Result
from fallow.runs.settings import EDITABLE, are_fitted, config_hash, resolve, stated, stored
from fallow.runs.tracking import Tracking
from fallow.runs.tracking import check as check_trackers
from fallow.runs.warned import Health, facts

RecipeName = str | Mapping[str, Any] | None  # or a recipe's keys themselves
FEDERATION = {"data", *Spec.__dataclass_fields__} - {"seed"}
Seam = Callable[[Simulation, Executor, Keep], Clients]
Watcher = Callable[[str, Any], None]  # called with ("start", run), ("round", row), ("warning", finding), ("end", summary)


def executor_for(simulation: Simulation, compared: dict[str, Any] | None = None) -> Executor:
    """Slots with captured steps on CUDA, threads on CPU; `capture=false` is the plain reference on either.

    Where torchrun started several processes, rank 0 shares the work with the others; they have what is `compared`.
    """
    kit, rank = simulation.kit, ranks.number()
    captured = kit.device.type == "cuda" and kit.options.capture
    own: Executor = (Debug if kit.debug else Slots if captured else Eager)(simulation)
    if rank or ranks.count() == 1:
        return own
    federation = {name: torch.tensor(array) for name, array in simulation.federation.arrays().items()}
    compared = compared or origins.for_ranks(kit.options, simulation.source)
    begin = {"options": kit.options.model_dump(mode="json"), "federation": federation, "origin": compared}
    return Ranks(simulation, own, begin)


def _together(lead: Callable[[], Result], source: Source | None) -> Result:
    """Rank 0 leads a run; the others do their share of its work until it is done, and then have the same result."""
    if ranks.count() == 1:
        return lead()
    if ranks.number():
        return Result(Path(ranks.serve(lambda begin: _built(begin, source))))
    post = ranks.post()
    try:
        result = lead()
    except BaseException:
        with suppress(UserError):
            post.dismiss(None)
        raise
    post.dismiss(str(result.path))
    return result


def _built(begin: dict[str, Any], source: Source | None) -> tuple[Kit, Executor]:
    """What the run that rank 0 began is worked with here."""
    common = {k: v for k, v in begin["options"].items() if k in Config.model_fields}
    origins.check_rank_code(configuration.validate(Config, common), begin["origin"])
    method = find(begin["options"]["method"])
    options = configuration.validate(method.Options, begin["options"])
    source = load_source(options, source)
    origins.check_rank_data(source, begin["origin"])
    federation = Federation.of({name: tensor.numpy() for name, tensor in begin["federation"].items()})
    simulation = _simulation(options, method, source, federation)
    return simulation.kit, executor_for(simulation)


def _simulation(options: Config, method: type[Method], source: Source, federation: Federation) -> Simulation:
    kind = method.algorithm(options)
    kind = watched(kind) if options.backend == "debug" else kind
    return Simulation(options, kind(options, len(source.classes)), source, federation)


class Run:
    """A run at work in its folder."""

    def __init__(
        self, folder: RunFolder, method: type[Method], options: Config, source: Source, federation: Federation, origin: Origin | None = None,
        away: Seam | None = None,
    ):  # fmt: skip
        """`away` makes the seam to clients who are elsewhere; without it they are simulated here."""
        self.folder, self.options, self.source, self.federation = folder, options, source, federation
        found = origins.located(options, Path(origin.started_in)) if origin else options
        self.simulation = _simulation(found, method, source, federation)
        self.kit = self.simulation.kit
        self.layouts = self.kit.layouts()
        keep = Keep(folder.kept, options.keep_memory * 2**30, self.layouts, self.kit.device)
        executor = executor_for(self.simulation)
        self.federated = Federated(self.simulation, executor, keep, away(self.simulation, executor, keep) if away else None)
        self.done = 0
        self.health = Health(folder.path, facts(self.simulation), [])

    def restore(self) -> None:
        found = self.folder.restore(self.layouts, self.kit.device)
        if found is not None:
            origins.check_model(self.federated.server.entries.get("model"), found.entries.get("model"), self.folder.path)
            self.done, self.federated.server.entries = found.round, found.entries
            self.federated.validation.best = found.best
            self.federated.keep.restore(found.keep, found.records, self.folder.needed())

    def go(self, stop_after: int | None = None, watch: Watcher | None = None) -> Result:
        """Rounds until the end, or until `stop_after` (from 1); commits as it goes."""
        o, watch = self.options, watch or (lambda *_: None)
        stop = min(stop_after or o.rounds, o.rounds)
        self.health = Health(self.folder.path, self.health.facts, self.folder.rows())
        watch("start", self)
        committed, whole = self.done, True
        terminated = RankLost("another rank has ended, or the run was told to stop") if ranks.count() > 1 else None
        with Interrupts(terminated) as interrupts:
            self.federated.finishing = interrupts.hold
            try:
                while self.done < stop:
                    started = time.perf_counter()
                    row = self.federated.round(self.done)
                    row["seconds"]["round"] = round(time.perf_counter() - started, 4)
                    whole = False  # until its row is written, the state is a round ahead of the metrics
                    self.folder.append(row)
                    self.done, whole = self.done + 1, True
                    if self.done % o.checkpoint_every == 0 or self.done == stop:
                        self.commit()
                        committed = self.done
                    watch("round", row)
                    for finding in self.health.take(row):
                        watch("warning", finding)
                    interrupts.release()  # a sentence that is cut in two would swallow those after it
            except BaseException as end:
                interrupts.hold()
                expected = isinstance(end, KeyboardInterrupt | Stopped | RankLost)
                with nullcontext() if expected else suppress(UserError, RuntimeError):  # the disk or memory may be what failed
                    if committed < self.done and whole and self.federated.whole:
                        self.commit()
                    self._conclude("interrupted" if expected else "failed")
                if isinstance(end, RankLost):
                    kept = f"the rounds up to {self.done} are kept, go on with `fallow resume {self.folder.path}`, with torchrun or without"
                    raise UserError(f"{end.cause} (in round {self.done + 1})", kept) from None
                raise
        summary = self._conclude("finished" if self.done == o.rounds else "stopped")
        watch("end", summary)
        return Result(self.folder.path)

    def commit(self) -> None:
        keep = self.federated.keep
        index = keep.commit()
        best = self.federated.validation.best
        self.folder.commit(self.done, self.federated.server.entries, index, self.layouts, keep.digests(), best)
        keep.clean(*self.folder.needed())

    def _conclude(self, status: str) -> dict[str, Any]:
        rows, o = self.folder.rows(), self.options
        scores = [(r["accuracy"], r["round"]) for r in rows if r["accuracy"] is not None]
        best = max(scores, key=lambda s: (s[0], -s[1]), default=(None, None))
        seconds = sum(r["seconds"]["round"] for r in rows)
        tail = [s for s, _ in scores[-10:]]
        validated = self.folder.write_best(self.federated.validation.best)
        summary = {
            "status": status,
            "last": scores[-1][0] if scores else None,
            "best": best[0],
            "best_round": best[1],
            "mean_last_10": sum(tail) / len(tail) if tail else None,
            "scores": in_full(self.federated) if self.done and status in ("finished", "stopped") else None,
            **({"validation": best_round(validated, rows)} if validated else {}),
            "rounds": self.done,
            "seconds": round(seconds, 3),
            "seconds_per_round": round(seconds / max(1, len(rows)), 4),
            "seed": o.seed,
            "method": o.method,
            "data": o.data,
            "classes": self.kit.classes,
            "channels": self.source.channels,
            "size": self.source.size,
            "class_names": list(self.source.classes),
            "decoded": list(self.source.decoded or self.source.train.images.shape[1:]),
            "skipped": self.source.skipped,
            "fingerprint": self.federation.fingerprint,
            "config_hash": config_hash(o),
            "device": _device_name(self.kit.device),
            "versions": {"fallow": _version(), "torch": torch.__version__, "python": platform.python_version()},
            "commit": commit(),
            "warnings": self.health.end(rows),
        }
        if self.done:
            self.folder.write_model(self.federated.model())
        self.folder.write_summary(summary)
        self.folder.write_manifest()
        return summary


def make_federation(options: Config, source: Source) -> Federation:
    spec = Spec(**{f: getattr(options, f) for f in Spec.__dataclass_fields__} | {"seed": options.seed_of("split")})
    labels = source.train.labels.numpy()
    data = labels, len(source.classes), spec
    if beta := getattr(options, "share_beta", 0.0):
        federation = federate_with_shared(*data, beta, getattr(options, "share_alpha", 1.0), source.train.clients)
    else:
        federation = federate(*data, source.train.clients)
    return hold_out(federation, labels, options.validation, spec.seed) if options.validation else federation


def _save(federation: Federation, path: Path, source: Source) -> None:
    with disk.errors_as_user_errors(path):
        federation.save(path, source.train.labels.numpy(), source.classes)


def base_of(recipe_name: RecipeName, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a recipe; without one, and without a word on data and federation, those of the newcomer's run."""
    if isinstance(recipe_name, Mapping):
        return dict(recipe_name)
    plain = recipe_name is None and not FEDERATION & set(given)
    return recipe(recipe_name or "default") if recipe_name or plain else {}


def prepare(
    recipe_name: RecipeName, given: dict[str, Any], source: Source | None = None, download: bool = False, trust: bool = False,
    watch: Watcher | None = None,
) -> tuple[type[Method], Config, Source, Federation]:  # fmt: skip
    """Settings, data and federation of a run, complete, without running it; images are decoded when all else has been checked."""
    given = dict(given)
    if isinstance(given.get("data"), Source):
        source = given.pop("data")
    if source is not None:
        given.setdefault("data", source.name)
    base = base_of(recipe_name, given)
    fit = are_fitted(base, given)
    method, options = resolve(base, given, trust)
    options = options if source else named(options)
    options, told = sized(options, download) if fit and source is None else (options, [])
    opened = opened_source(options, source, download)
    complete, federation = _settled(method, options, fit, opened)
    reading = Reading(watch, complete, opened, told)
    if opened.later is None:
        return method, complete, opened, federation
    Kit(complete, method(complete, len(opened.classes)), Declared.of(complete, opened, federation)).initial()  # complains now, not after the decoding
    source = reading.whole(options)
    complete, federation = _settled(method, options, fit, source)
    return method, complete, source, federation


def _settled(method: type[Method], options: Config, fit: bool, source: Source) -> tuple[Config, Federation]:
    """The settings with what the data says, and the federation that they make."""
    said = automatic.given(options)
    options = completed(method, options, source)
    federation = make_federation(options, source)
    if fit:
        options = automatic.fitted(method, options, said, source, federation)
    return options, federation


def run(
    recipe: RecipeName = None,
    *,
    out: str | Path = "runs",
    name: str | None = None,
    stop_after: int | None = None,
    download: bool = False,
    test: Any = None,
    classes: Sequence[str] | int | None = None,
    quiet: bool | None = None,
    watch: Watcher | None = None,
    trust: bool = False,
    **keys: Any,
) -> Result:
    """Trains a federation and gives its Result. Keys are those of the command line.

    >>> import fallow
    >>> result = fallow.run(method="fedavg", data="digits", clients=4, label_count=200, rounds=2, out="runs")
    >>> result
    Result('runs/fedavg-digits-seed0': fedavg on digits, ... % after round 2)

    `data` may also be a torch Dataset whose items are (image, label), or a pair of arrays (images, labels); `test` is
    then the same of the test set (default: a fifth of each class is held out) and `classes` the classes' names or how
    many they are (default: as the data set or its labels say). A section takes a dict: `augment={"flip": "never"}`.

    `quiet=True` shows no progress, `quiet=False` always does; by default it is shown on a terminal and in a notebook.
    `watch` is called with ("start", run), then ("round", row of metrics) after each round and ("warning", finding) where
    something shows that the run does not learn, then ("end", summary); before all that, where one's own image files are read,
    with ("data", sentence) and with ("reading", (images decoded, images in all)).
    `trust=True` lets code run that a recipe names.
    """
    _check_stop(stop_after)
    if "progress" in keys:
        raise UserError("progress is no key of a run", "write quiet=True to see none of it, quiet=False to see it everywhere")
    if (source := source_of(keys.get("data"), test, classes)) is not None:
        keys["data"] = source
    with watching(quiet, watch) as told:
        return _together(lambda: _run(recipe, keys, Path(out), name, stop_after, download, told, trust), source)


def _run(
    recipe: RecipeName, keys: dict[str, Any], out: Path, name: str | None, stop_after: int | None, download: bool,
    watch: Watcher | None, trust: bool,
) -> Result:  # fmt: skip
    method, options, source, federation = prepare(recipe, keys, download=download, trust=trust, watch=watch)
    check_trackers(options.track)
    plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in f"{options.method}-{options.data}-seed{options.seed}")
    folder = RunFolder.new(out, name or plain.strip("-").lower()[-80:])
    with folder.locked():
        try:
            origin = Origin.of(options, method, source)
            origin.write(folder.path)
            disk.write(folder.config, configuration.dump(options))
            _save(federation, folder.federation, source)
            disk.write(folder.metrics, "")
            folder.begin()
            at_work = Run(folder, method, options, source, federation, origin)
            inspect(at_work.federated)
        except BaseException:
            folder.remove()  # nothing was run, so nothing stays behind
            raise
        return _tracked(at_work, stop_after, watch)


def resume(
    path: str | Path, *, rounds: int | None = None, stop_after: int | None = None, source: Any = None, test: Any = None, classes: Sequence[str] | int | None = None,
    quiet: bool | None = None, watch: Watcher | None = None, trust: bool = False, anyway: bool = False,
) -> Result:  # fmt: skip
    """Goes on with a run that was stopped, at whatever moment, to the same end as if it had not been.

    >>> import fallow
    >>> begun = fallow.run(method="fedavg", clients=4, label_count=200, rounds=3, stop_after=1, name="cut")
    >>> fallow.resume("runs/cut").summary["status"]
    'finished'
    >>> len(fallow.resume("runs/cut", rounds=5).metrics)
    5

    `rounds` makes a run longer, a finished one too; a schedule over all rounds is from then on that of the new number.
    A run on data that were given as a Python object needs them again: `source`, with `test` and `classes` as in `run`.
    `quiet` and `watch` are those of `run`. `trust=True` lets code run that the folder names and that this user has never
    named himself. `anyway=True` goes on with data or own code that are not those the run was begun with.
    """
    _check_stop(stop_after)
    source = source_of(source, test, classes)
    with watching(quiet, watch) as told:
        return _together(lambda: _resume(Path(path), rounds, stop_after, source, told, trust, anyway), source)


def _resume(
    path: Path, rounds: int | None, stop_after: int | None, source: Source | None, watch: Watcher | None, trust: bool, anyway: bool
) -> Result:
    folder = RunFolder.existing(_found(path))
    if (folder.path / ORDER).exists():
        raise UserError(f"the run {folder.path} has its clients on nodes", f"go on with `fallow federation run DIR --resume {folder.path.name}`")
    if rounds is not None and (sentence := longer.prolonged(folder, rounds)) and watch:
        watch("note", sentence)
    told = stated(folder.config)
    if folder.finished(told.rounds):
        return Result(folder.path)
    origin, differs = _origin(folder), []
    found = origins.located(told, Path(origin.started_in)) if origin else told
    if origin:
        origin.check_settings(told, EDITABLE)
        differs += origin.check_code(found, folder.path, anyway)
    method, options = stored(folder.config, trust)
    check_trackers(options.track)
    with folder.locked():
        noted = folder.check_begun()
        source = Reading(watch, found, opened_source(found, source)).whole(found)
        if origin:
            differs += origin.check_data(source, anyway)
        if folder.federation.is_file():
            federation = Federation.load(folder.federation)
            if not differs:
                _check_data(federation, source)
        else:
            federation = make_federation(options, source)
            _save(federation, folder.federation, source)
            folder.check_fixed(noted, made=True)
        at_work = Run(folder, method, options, source, federation, origin)
        at_work.restore()
        if origin:
            origin.taken_anyway(at_work.done, differs, folder.path)
        return _tracked(at_work, stop_after, watch)


def _origin(folder: RunFolder) -> Origin | None:
    """What the run was made from; only a run of an older version has no word of it."""
    origin = Origin.read(folder.path)
    if origin is None and folder.manifest.exists() and not folder.is_export():
        raise UserError(f"{folder.path / 'origin.json'} is missing", RESTORE)
    return origin


def _tracked(at_work: Run, stop_after: int | None, watch: Watcher | None) -> Result:
    """Goes, and has the run's trackers told of it."""
    o = at_work.options
    about = o.model_dump(mode="json", exclude={"track", "data_dir"}) | {
        "config_hash": config_hash(o), "fingerprint": at_work.federation.fingerprint,
    }  # fmt: skip
    with Tracking(at_work.folder.path, o.track, about) as tracking:

        def both(event: str, what: Any) -> None:
            if watch:
                watch(event, what)
            tracking(event, what)

        return at_work.go(stop_after, both)


def _check_data(federation: Federation, source: Source) -> None:
    """The data must be those the federation was made of."""
    labels = source.train.labels.numpy()
    spec = federation.spec
    if spec.get("samples") != len(labels) or spec.get("labels_sha256") != labels_sha256(labels):
        raise UserError(
            f"the data set {source.name} is not the one this run was begun with", "put the old files back, or start a new run"
        )


def _check_stop(stop_after: int | None) -> None:
    if stop_after is not None and stop_after < 1:
        raise UserError(f"--stop-after {stop_after} is not a round", "rounds count from 1")


def load_result(path: str | Path, trust: bool = False) -> Result:
    """The result of a run's folder, or of an export's.

    >>> import fallow
    >>> done = fallow.run(method="fedavg", clients=4, label_count=200, rounds=2, name="done")
    >>> fallow.load("runs/done").accuracy == done.accuracy
    True

    `trust=True` lets a model run whose code this user has never named himself.
    """
    return Result(RunFolder.existing(_found(Path(path))).path, trust)


def _found(path: Path) -> Path:
    return path if path.exists() or len(path.parts) > 1 or not (Path("runs") / path).exists() else Path("runs") / path


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _version() -> str:
    from fallow import __version__

    return __version__


def commit() -> str | None:
    """The code's commit; a copy without its repository is told by FALLOW_COMMIT."""
    root, told = Path(__file__).resolve().parents[2], os.environ.get("FALLOW_COMMIT")
    if told or not (root / ".git").exists():
        return told
    try:
        return subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except OSError:
        return None
