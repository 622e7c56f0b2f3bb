"""The settings of a run: typed keys with meanings, and suggestions for misspelt ones.

`Config` holds the keys that every run has; those of parts stand in fallow/keys/. A method's `Options` derive from it, add the
method's own keys and may give common keys other defaults, so one flat object is the whole setting of a run.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ValidationError, model_validator

from fallow.errors import UserError, suggest
from fallow.keys.averaging import AveragingKeys
from fallow.keys.labelling import LabellingKeys
from fallow.keys.measuring import MeasuringKeys
from fallow.keys.section import LARGEST, S, Section, key, listed
from fallow.keys.statistics import StatisticsKeys
from fallow.trees import shown

VERSION = 1  # of the stored config; a change of meaning counts up

Labels = Literal["server", "clients", "some", "all"]
Turn = Literal["before", "after", "beside", "before+last", "after+last"]
Kept = Literal["reset", "keep", "travel"]
Weights = Literal["samples", "labelled", "uniform", "half"]
Reading = Literal["recommended", "paper", "released"]
Tracker = Literal["tensorboard", "wandb", "mlflow"]


class Image(Section):
    prefix = "image."
    size: int | None = key(None, "side in pixels the images are brought to", ge=4)
    fit: Literal["pad", "resize", "crop"] = key("pad", "how: zero-pad, resize, or crop (the centre, resized)")
    channels: int | None = key(None, "1 (grey) or 3 (colour)", ge=1, le=3)
    normalise: str | None = key(None, "normalisation preset, `none` for /255 only")


class Augment(Section):
    prefix = "augment."
    labelled: str = key("weak", "view of labelled images")
    weak: str = key("weak", "the weak view")
    strong: str = key("ra-mc", "the strong view")
    cutout: int | Literal["auto", "none"] = key("auto", "side of the final cutout in pixels")
    flip: Literal["auto", "always", "never"] = key("auto", "mirror images (auto: not digits and letters)")
    draws: Literal["sample", "batch"] = key("sample", "one draw per sample, or one for a whole batch")

    @model_validator(mode="after")
    def _size(self) -> Augment:
        if isinstance(self.cutout, int) and self.cutout < 1:
            raise UserError(f"augment.cutout={self.cutout} is not a positive count", "give 1 or more, or none")
        return self


class RunKeys(Section):
    method: str = key("fixmatch", "the method: a name, or FILE.py:Class")
    reading: Reading = key("recommended", "which side to take where paper and authors' code disagree")
    seed: int = key(0, "every random draw follows from it", ge=0)
    split_seed: int | None = key(None, "of the split and the choice of labels alone (default: seed)", ge=0)
    active_seed: int | None = key(None, "of which clients take part in each round alone (default: seed)", ge=0)


class DataKeys(Section):
    data: str = key("digits", "the data set, or the path of a folder of images, a .csv or an .npz")
    data_dir: str | None = key(None, "where the data sets lie (default: FALLOW_DATA, else ~/.cache/fallow)")
    layout: Literal["auto", "classes", "sites"] = key("auto", "folders of one's own images: a folder per class, or per site with one per class in it")
    skip_bad: bool = key(False, "go on without files of one's own that cannot be read")
    image: Image = key(Image(), "how images are brought to the model")
    augment: Augment = key(Augment(), "what fills the views `labelled weak strong`")
    model: str = key("small-cnn", "the model: a name, or FILE.py:Class")
    norm: Literal["bn", "bn-batch", "sbn", "gn", "none"] | None = key(None, "normalisation layers (default: the model's)")


class FederationKeys(Section):
    labels: Labels = key("clients", "who has labels: the server, every client, some clients, or all of the data")
    label_count: int | None = key(None, "labels in the whole federation", ge=1)
    label_ratio: float | None = key(None, "share of each client's samples that is labelled", gt=0, le=1)
    label_per_class: int | None = key(None, "labels per class and client (labels at the server: per class)", ge=1)
    label_balance: Literal["balanced", "random"] | None = key(None, "labels balanced over classes, or at random (default: balanced; with label_ratio at random)")
    label_pick: Literal["random", "first"] = key("random", "which samples are labelled: at random, or the first")
    labelled_clients: float | None = key(None, "how many clients have labels where labels=some: a count or a share", gt=0)
    labelled_pick: Literal["random", "cover"] = key("random", "labels=some: which clients have labels; cover: those that hold every class, of sizes nearest the mean")
    validation: float | None = key(None, "labels held out of training, to test on and to keep the best round by: a share below 1, or a count", gt=0)
    labelled_as_unlabelled: bool | Literal["alias"] = key(False, "labelled samples also serve as unlabelled ones; alias: an indexing bug of FedDB's release, reproduced: the unlabelled samples at the same positions")
    unlabelled_ratio: float = key(1.0, "share of the unlabelled samples that is used", ge=0, le=1)
    clients: int = key(10, "how many clients the federation has, 1 or more", "M", ge=1)
    active: float | None = key(None, "clients that take part in a round: a count, or a share below 1 (default: all)", "S", gt=0)
    partition: str = key("iid", "how labelled data (and by default unlabelled data) is split over clients")
    unlabelled_partition: str | None = key(None, "how unlabelled data is split (default: like `partition`)")


class TrainingKeys(Section):
    rounds: int = key(30, "how many rounds the run has, 1 or more", "T", ge=1)
    warmup_rounds: int = key(0, "rounds at the start in which only parties with labels train", ge=0)
    epochs: float | None = key(1, "passes over its data a client makes in a round", "E", gt=0, le=1e6)
    steps: int | Literal["match-unlabelled"] | None = key(None, "steps a client makes in a round, instead of `epochs`")
    batch: int | Literal["full"] = key(32, "labelled batch", "B")
    unlabelled_batch: int | str = key("match-steps", "unlabelled batch: a count, match-steps[:floor], equal, ratio:N, full")
    server_epochs: float | None = key(None, "the server's epochs (default: as clients)", gt=0, le=1e6)
    server_steps: int | None = key(None, "the server's steps (default: as clients)", ge=1)
    server_batch: int | None = key(None, "the server's batch (default: as clients)", ge=1)

    optimizer: Literal["sgd", "adam"] = key("sgd", "local optimiser")
    lr: float = key(0.03, "local learning rate", "eta", gt=0)
    momentum: float = key(0.9, "of SGD; beta1 of Adam", ge=0, lt=1)
    nesterov: bool = key(True, "Nesterov momentum")
    weight_decay: float = key(0.0, "pull of parameters towards 0, in the gradient", ge=0, le=LARGEST)
    decayed: Literal["all", "weights"] = key("all", "which parameters that pulls: all, or only those of two axes and more (neither biases nor norm layers')")
    clip: float | None = key(None, "largest norm of a gradient", gt=0, le=LARGEST)
    clip_value: float | None = key(None, "largest absolute entry of a gradient", gt=0, le=LARGEST)
    prox: float = key(0.0, "pull towards the received model (FedProx)", "mu", ge=0, le=LARGEST)
    prox_mode: Literal["gradient", "decoupled"] = key("gradient", "pull inside the gradient, or after the optimiser")
    schedule: str = key("constant", "constant | cosine | cosine-7-16, options after commas")
    optimizer_state: Kept = key("reset", "local optimiser state: new each round, kept at the client, or travelling")


class ServerKeys(Section):
    weights: Weights = key("samples", "what a client weighs in the mean")
    server_turn: Turn = key("beside", "when a server with labels trains")
    server_optimizer_state: Literal["keep", "reset"] = key("keep", "optimiser state of a server that trains: kept, or new each round")
    server_lr: float = key(1.0, "the server's step towards the mean", gt=0)
    server_momentum: float = key(0.0, "the server's momentum", ge=0, lt=1)
    average_base: Literal["distributed", "trained"] = key("distributed", "server_turn=beside: what server momentum starts from")


class DeviceKeys(Section):
    device: str = key("auto", "cpu, cuda, cuda:N, or auto")
    precision: Literal["auto", "fp32", "tf32", "bf16"] = key("auto", "auto: bf16 on CUDA, fp32 on CPU")
    slots: int | Literal["auto"] = key("auto", "parties that train at once")
    backend: Literal["auto", "debug"] = key("auto", "how parties' work is done; debug: one after the other, with what hooks give and what steps make looked at")
    capture: bool = key(True, "replay captured steps and predictions on CUDA")
    compile: bool = key(False, "torch.compile the models' passes, in place of our kernels for norm and ReLU; the first rounds wait for it")
    fused: bool = key(True, "norm with ReLU, and the optimiser, in kernels of our own on CUDA; false: torch's")
    deterministic: bool = key(False, "exactly repeatable on CUDA (CPU always is)")
    keep_memory: float = key(4.0, "GiB of the device's memory for what clients keep; the rest goes to disk", ge=0, le=1e9)
    view_memory: float = key(1.0, "GiB for views made ahead", gt=0, le=1e9)


class TestingKeys(Section):
    eval_every: int = key(1, "rounds between evaluations", ge=1)
    eval_batch: int = key(250, "images per evaluation batch", ge=1)
    checkpoint_every: int = key(1, "rounds between checkpoints", ge=1)
    rank_timeout: float = key(600.0, "seconds after which a silent process of torchrun's is given up", gt=0)
    track: Annotated[tuple[Tracker, ...], BeforeValidator(listed)] = key((), "where each round is logged too, a list: tensorboard, wandb, mlflow")


class Config(
    MeasuringKeys, TestingKeys, DeviceKeys, AveragingKeys, LabellingKeys, StatisticsKeys, ServerKeys, TrainingKeys, FederationKeys, DataKeys, RunKeys
):  # pydantic lists the last base's keys first
    def refuse(self) -> None:
        """Raises a UserError where a method's settings make no sense together."""

    @model_validator(mode="after")
    def _counts(self) -> Config:
        if self.active is not None and self.active >= 1 and self.active != int(self.active):
            raise UserError(f"active={self.active:g} is neither a count nor a share", "give a whole number, or one below 1")
        if self.validation is not None and self.validation >= 1 and self.validation != int(self.validation):
            raise UserError(f"validation={self.validation:g} is neither a count nor a share", "give a whole number, or one below 1")
        for name in ("batch", "steps", "unlabelled_batch", "slots", "sbn_passes"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise UserError(f"{name}={value} is not a positive count", "give 1 or more")
        if self.epochs is None and self.steps is None:
            raise UserError("neither epochs nor steps says how much a client trains", "give one of them")
        _check_unlabelled(self.unlabelled_batch, self.batch)
        if self.active is not None and self.active > self.clients:
            raise UserError(f"active={self.active:g} is more than clients={self.clients}", "lower active or raise clients")
        if self.labelled_clients is not None and self.labels != "some":
            raise UserError(f"labelled_clients={self.labelled_clients:g}, but labels={self.labels}", "use labels=some, or leave it out")
        if self.diversity_scope == "per-group" and self.average != "grouped":
            raise UserError(f"diversity_scope=per-group, but average={self.average} makes no groups", "use average=grouped")
        if sum(v is not None for v in (self.label_count, self.label_ratio, self.label_per_class)) > 1:
            raise UserError("labels are counted in more than one way", "give one of label_count, label_ratio and label_per_class")
        return self

    def seed_of(self, part: Literal["split", "active"]) -> int:
        own = self.split_seed if part == "split" else self.active_seed
        return self.seed if own is None else own

    @property
    def active_count(self) -> int:
        """How many clients take part in a round (a share is rounded up)."""
        if self.active is None:
            return self.clients
        return int(self.active) if self.active >= 1 else max(1, math.ceil(self.active * self.clients - 1e-9))


def _check_unlabelled(size: int | str, batch: int | str) -> None:
    if isinstance(size, int) or size in ("full", "match-steps", "match-steps:floor"):
        return
    word, _, times = size.partition(":")
    if not (size == "equal" or (word == "ratio" and re.fullmatch("0*[1-9][0-9]{0,8}", times))):
        raise UserError(f"unlabelled_batch={size} is not known", "use a count, match-steps, match-steps:floor, equal, ratio:N or full")
    if batch == "full":
        raise UserError(f"unlabelled_batch={size} is a multiple of a batch that is full", "use unlabelled_batch=full, or a count for batch")


def validate(kind: type[S], values: Mapping[str, Any]) -> S:
    """Typed settings, or one sentence that names the key, what was given and what to do."""
    known = _known(kind, values)
    try:
        return kind(**known)
    except ValidationError as e:
        first = e.errors()[0]
        path = [str(p) for p in first["loc"]]
        section = path[0] in kind.model_fields and isinstance(kind.model_fields[path[0]].default, Section)
        name = ".".join(path[: 2 if section else 1])
        field = kind.model_fields.get(path[0])
        if section and field is not None:
            field = type(field.default).model_fields.get(path[1])
        wanted = " or ".join(dict.fromkeys(_wanted(x) for x in e.errors() if x["loc"][: 2 if section else 1] == first["loc"][: 2 if section else 1]))
        remedy = f"give {wanted}" + (f" ({name} means: {field.description})" if field and field.description else "")
        given = first.get("input")
        raise UserError(f"{name}={shown(given)} is not allowed", remedy) from None


def _wanted(error: Any) -> str:
    """What a key takes, in words, by what pydantic found wrong."""
    kind, limit = error["type"], error.get("ctx", {})
    if kind == "greater_than":
        return f"a number above {limit['gt']:g}"
    if kind == "greater_than_equal":
        return f"{limit['ge']:g} or more"
    if kind == "less_than":
        return f"a number below {limit['lt']:g}"
    if kind == "less_than_equal":
        return f"at most {limit['le']:g}"
    if kind == "literal_error":
        return limit["expected"].replace("'", "")
    for start, word in (("int", "a whole number"), ("float", "a number"), ("finite", "a finite number"), ("bool", "true or false"), ("string", "text"), ("tuple", "a list")):
        if kind.startswith(start):
            return word
    return str(error["msg"])


def _known(kind: type[BaseModel], values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values, if there are keys of these names; `true` for a key that is no switch as text, since pydantic takes it for 1."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise UserError(f"there is no key {prefix}{shown(name)}", "a key is a word, such as rounds")
        if name not in kind.model_fields:
            raise UserError(f"there is no key {shown(repr(prefix + name))}", suggest(prefix + name, [prefix + n for n in kind.model_fields]))
        _check_size(prefix + name, value)
        annotation = kind.model_fields[name].annotation
        if isinstance(annotation, type) and issubclass(annotation, Section):
            if not isinstance(value, Mapping):
                said = repr(value) if isinstance(value, str) else value
                raise UserError(f"{name} is a section, not {shown(said)}", f"write {name}.KEY=VALUE")
            value = _known(annotation, value, f"{name}.")
        elif isinstance(value, bool) and "true" not in takes(annotation):
            value = str(value).lower()
        out[name] = value
    return out


HOLDS = {int: 2**63 - 1, float: 3e38}  # of 64 bits; of 32 bits


def _check_size(name: str, value: Any) -> None:
    """Refuses what no machine number holds and no path can have, before anybody computes with it."""
    most = HOLDS.get(type(value))
    if most is not None and most < abs(value) != math.inf:
        raise UserError(f"{name}={shown(value)} is not allowed", f"give a number between -{most:g} and {most:g}")
    if isinstance(value, str) and "\0" in value:
        raise UserError(f"{name}={shown(value)} has a NUL character in it", "leave it out")


def dump(config: Config) -> str:
    """The complete configuration as YAML."""
    return yaml.safe_dump({"version": VERSION, **config.model_dump(mode="json")}, sort_keys=False, allow_unicode=True)


KINDS = {int: "whole number", float: "number", str: "text", tuple: "a list", list: "a list"}


def takes(annotation: Any) -> str:
    """What a key takes, by its type: values, and kinds of value, with bars between them."""
    annotation = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    kinds = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    words: list[str] = []
    for kind in kinds:
        if get_origin(kind) is Annotated:
            words.append(takes(kind))
        elif get_origin(kind) is Literal:
            words += [str(value) for value in get_args(kind)]
        elif kind is bool:
            words += ["true", "false"]
        elif kind is not type(None):
            words.append(KINDS.get(get_origin(kind) or kind, "a section"))
    return " | ".join(words)


SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def limits(field: Any) -> str:
    """A number's bounds, in brackets."""
    found = [f"{sign} {getattr(limit, name):g}" for limit in field.metadata for name, sign in SIGNS.items() if hasattr(limit, name)]
    return f" ({', '.join(found)})" if found else ""


def described(kind: type[Config], own_only: bool = False) -> list[tuple[str, str, str, str, str]]:
    """(key, default, symbol, what it takes, meaning) of each key, a method's own first."""
    rows = []
    for name, field in kind.model_fields.items():
        own = name not in Config.model_fields
        if own_only and not own:
            continue
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        default = field.default
        shown = "" if default is None else "…" if isinstance(default, BaseModel) else str(default).lower() if isinstance(default, bool) else str(default)
        rows.append((not own, (name, shown, str(extra.get("symbol", "")), takes(field.annotation) + limits(field), field.description or "")))
    return [row for _, row in sorted(rows, key=lambda r: r[0])]
