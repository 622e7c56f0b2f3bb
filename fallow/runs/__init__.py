"""A run from its settings to its result: begin, go on, resume."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fallow import config as configuration
from fallow import disk, launched
from fallow.config import Config
from fallow.data.federate import Federation, labels_sha256
from fallow.data.given import source_of
from fallow.data.sources import Source
from fallow.engine import ranks
from fallow.engine.clients import Executor
from fallow.engine.inspecting import inspect
from fallow.engine.kit import Kit
from fallow.errors import UserError
from fallow.methods import REGISTERED, find
from fallow.runs import arguments, longer
from fallow.runs import origin as origins
from fallow.runs.at_work import Run, executor_for, simulation_of
from fallow.runs.data import Reading, load_source, opened_source
from fallow.runs.finding import run_path
from fallow.runs.folder import RunFolder
from fallow.runs.manifest import RESTORE
from fallow.runs.nodes import ORDER
from fallow.runs.onlookers import watching
from fallow.runs.origin import Origin
from fallow.runs.preparing import RecipeName, Watcher, make_federation, prepare
from fallow.runs.result import Result
from fallow.runs.settings import EDITABLE, config_hash, stated, stored
from fallow.runs.tracking import Tracking
from fallow.runs.tracking import check as check_trackers
from fallow.trees import shown


def _together(lead: Callable[[], Result], source: Source | None) -> Result:
    """Rank 0 leads a run; the others do their share of its work until it is done, and then have the same result."""
    if launched.count() == 1:
        return lead()
    if launched.rank():
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
    simulation = simulation_of(options, method, source, federation)
    return simulation.kit, executor_for(simulation)


def _save(federation: Federation, path: Path, source: Source) -> None:
    with disk.errors_as_user_errors(path):
        federation.save(path, source.train.labels.numpy(), source.classes)


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
    stop_after, out, name, recipe = arguments.rounds("--stop-after", stop_after), arguments.folder("out", out), arguments.name_of_run(name), arguments.recipe(recipe)
    if "progress" in keys:
        raise UserError("progress is no key of a run", "write quiet=True to see none of it, quiet=False to see it everywhere")
    if watch is not None and not callable(watch):
        raise UserError(f"watch={watch!r} is no function", "give one that takes (event, what), or leave it out")
    if isinstance(keys.get("data"), os.PathLike):
        keys["data"] = os.fspath(keys["data"])
    _check_single(keys)
    if (source := source_of(keys.get("data"), test, classes)) is not None:
        keys["data"] = source
    with watching(quiet, watch) as told:
        return _together(lambda: _run(recipe, keys, out, name, stop_after, download, told, trust), source)


def _check_single(keys: dict[str, Any]) -> None:
    """Several values of a key are a grid, which the command line makes."""
    for key, value in keys.items():
        field = Config.model_fields.get(key)
        single = field is not None and key != "data" and not {"a list", "a section"} & set(configuration.takes(field.annotation).split(" | "))
        listed = single and isinstance(value, list | tuple | set) and len(value) > 1
        if listed or (isinstance(value, str) and "," in value and (key == "seed" or (key == "method" and _are_methods(value.split(","))))):
            words = value if isinstance(value, str) else ",".join(map(str, value))
            raise UserError(f"{key}={shown(words)} are several values, and fallow.run makes one run", f"call it for each, or type `fallow run {key}={shown(words)}`")


def _are_methods(names: list[str]) -> bool:
    """A row of a paper's table may have a comma in its name."""
    return all(name.strip() in REGISTERED or ":" in name for name in names)


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
    stop_after, path = arguments.rounds("--stop-after", stop_after), arguments.folder("path", path)
    source = source_of(source, test, classes)
    with watching(quiet, watch) as told:
        return _together(lambda: _resume(path, rounds, stop_after, source, told, trust, anyway), source)


def _resume(
    path: Path, rounds: int | None, stop_after: int | None, source: Source | None, watch: Watcher | None, trust: bool, anyway: bool
) -> Result:
    folder = RunFolder.existing(run_path(path))
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


def load_result(path: str | Path, trust: bool = False) -> Result:
    """The result of a run's folder, or of an export's.

    >>> import fallow
    >>> done = fallow.run(method="fedavg", clients=4, label_count=200, rounds=2, name="done")
    >>> fallow.load("runs/done").accuracy == done.accuracy
    True

    `trust=True` lets a model run whose code this user has never named himself.
    """
    return Result(RunFolder.existing(run_path(arguments.folder("path", path))).path, trust)
