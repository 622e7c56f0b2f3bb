"""The cases by group: each prepares a folder, names the command that is given in it, and says what must not have changed."""

from __future__ import annotations

import gzip
import io
import pickle
import random
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from conftest import TINY, rows
from PIL import Image

import fallow
from attack import mutate
from fallow.config import takes
from fallow.methods import REGISTERED, find
from fallow.names import recipes as bundled

KEYS = {**TINY, "method": "fixmatch", "rounds": 3, "optimizer_state": "keep", "threshold": 0.1}
QUICK = ["clients=2", "active=2", "steps=1", "rounds=1", "batch=4", "device=cpu", "model=small-cnn", "labels=all", "method=fedavg"]


@dataclass
class Case:
    words: list[str]
    told: list[str] = field(default_factory=list)  # what was done to the files
    check: Callable[[], str | None] = lambda: None  # after exit code 0: what is wrong with the result


class Base:
    """What all cases start from: a finished run, the same one stopped, its predictions, data files."""

    def __init__(self, place: Path):
        self.place = place
        self.done = fallow.run(out=place, name="done", **KEYS).path
        self.cut = fallow.run(out=place, name="cut", stop_after=2, **KEYS).path
        self.images = place / "images"
        self.images.mkdir()
        noise = np.random.default_rng(0)
        for i in range(4):
            Image.fromarray(noise.integers(0, 256, (8, 8), np.uint8)).save(self.images / f"{i}.png")
        from fallow.export.predict import predict

        self.predicted = predict(self.done, self.images, place / "predicted.csv").path.read_text()
        self.weights = (self.done / "model.safetensors").read_bytes()
        self.rows = rows(self.done)


# -- run folders -------------------------------------------------------------------------------------------------------
def folders(base: Base, here: Path, r: random.Random) -> Case:
    run, kind = here / "run", r.choice(["cut", "cut", "done"])
    shutil.copytree(base.cut if kind == "cut" else base.done, run)
    touched, told = set(), [kind]
    for _ in range(r.choice([1, 1, 1, 2, 4])):
        name, what = mutate.folder_damaged(run, r)
        touched.update(name.split(", "))
        told.append(f"{name}: {what}")
    trusted = not touched & {"config.yaml", "summary.json"}  # who edits the settings, or what a run came to, wants them so
    command = r.choice(["resume", "resume", "resume", "predict", "export", "report", "compare", "figure"])

    def resumed() -> str | None:
        if (run / "model.safetensors").read_bytes() != base.weights:
            return "other weights"
        return None if rows(run) == base.rows else "other metrics"

    def predicted() -> str | None:
        return None if kind == "cut" or (here / "p.csv").read_text() == base.predicted else "other predictions"

    def exported() -> str | None:
        return None if kind == "cut" or (here / "out" / "model.safetensors").read_bytes() == base.weights else "other weights"

    words, check = {
        "resume": (["resume", "run", "-q"], resumed),
        "predict": (["predict", "run", str(base.images), "-q", "-o", "p.csv"], predicted),
        "export": (["export", "run", "-o", "out", "--format", "safetensors"], exported),
        "report": (["report", "run"], None),
        "compare": (["compare", "run", str(base.done)], None),
        "figure": (["figure", "accuracy", "run", str(base.done), "-o", "f.png"], None),
    }[command]
    return Case(words, told, check if check and trusted else lambda: None)


# -- recipes -----------------------------------------------------------------------------------------------------------
PLAIN = """
method: fixmatch
data: digits
labels: clients
label_per_class: 2
clients: 5
image: {normalise: none, size: 8}
augment: {labelled: weak, strong: ra-mc}
partition: "dirichlet:0.5"
readings: {paper: {threshold: 0.9}}
"""
TABLE = """
inherit: demo
own: Ours
by: [data, clients]
statistic: best
seeds: 2
rows:
  Theirs: {method: fedavg}
  Ours: {method: fixmatch, threshold: 0.6}
  Gone: {missing: true}
cells:
  digits:
    few: &few {clients: 3}
    many: {<<: *few, clients: 9, rows: {Ours: {readings: {paper: {threshold: 0.9}}, threshold: 0.5}}}
"""


def recipes(base: Base, here: Path, r: random.Random) -> Case:
    known = [p.read_text() for p in bundled().values()]
    text, told = r.choice([PLAIN, PLAIN, TABLE, TABLE, TABLE, r.choice(known)]), []
    for _ in range(r.choice([1, 1, 2, 3])):
        try:
            keys = yaml.safe_load(text)
        except Exception:
            keys = None
        if r.random() < 0.6 and isinstance(keys, dict):
            new, what = mutate.edited(keys, r)
            text = yaml.safe_dump(new, allow_unicode=True)
        else:
            text, what = mutate.text_damaged(text, r)
        told.append(what)
    (here / "r.yaml").write_text(text, errors="backslashreplace")
    more = r.choice([[], [], ["setting=few"], ["setting=many", "method=Theirs"], ["clients=3"], ["reading=paper"]])
    command = r.choice([["run", "--help"], ["run", "--help"], ["split", "--picture", "p.png"], ["run", *QUICK, "data=few-digits", "label_count=20", "-q"], ["run", "--dry-run"], ["table", "--from", "."]])
    return Case([command[0], "r.yaml", *(more if command[0] != "table" else []), *command[1:]], [*told, text])


# -- data files --------------------------------------------------------------------------------------------------------
def _npz(here: Path, r: random.Random) -> tuple[str, list[Path]]:
    noise = np.random.default_rng(r.randrange(4))
    arrays: dict[str, Any] = {"images": noise.integers(0, 256, (40, 8, 8), np.uint8), "labels": np.arange(40) % 4}
    arrays |= {"test_images": arrays["images"][:8], "test_labels": arrays["labels"][:8]} if r.random() < 0.5 else {}
    if r.random() < 0.6:
        name, a = r.choice([*arrays.items()])
        arrays[name] = r.choice([
            lambda: a.astype("f4"), lambda: a.astype("f8") * np.nan, lambda: a.astype(str), lambda: a[:0], lambda: a[:1], lambda: a.reshape(-1),
            lambda: a.astype("c8"), lambda: a.astype("i8") - 5, lambda: a.astype("u8") + 2**63, lambda: np.full(a.shape, 2**32 - 1, "u4"), lambda: a > 0,
            lambda: a.astype("i8") * 10**9, lambda: a.astype("M8[s]"), lambda: np.array(a.tolist(), object), lambda: np.array(5), lambda: a.astype("S3"),
        ])()  # fmt: skip
    if r.random() < 0.2:
        arrays[r.choice(["clients", "x", "class_names", "images2", "a/b"])] = r.choice([np.arange(40), np.array(["a"] * 40), np.zeros((0,))])
    np.savez(here / "d.npz", **arrays)
    return "numpy:d.npz", [here / "d.npz"]


def _idx(here: Path, r: random.Random) -> tuple[str, list[Path]]:
    folder, out, zipped = here / "mnist", [], r.random() < 0.5
    folder.mkdir()
    for part, count in (("train", 40), ("t10k", 8)):
        for kind, array in (("images-idx3", np.zeros((count, 28, 28), np.uint8)), ("labels-idx1", (np.arange(count) % 10).astype(np.uint8))):
            shape = [r.choice([0, 1, 2**31, 2**32 - 1]) if r.random() < 0.05 else n for n in array.shape]
            data = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *shape) + array.tobytes()
            path = folder / f"{part}-{kind}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(data) if zipped else data)
            out.append(path)
    return "mnist", out


def _cifar(here: Path, r: random.Random) -> tuple[str, list[Path]]:
    python = r.random() < 0.7
    folder, out = here / ("cifar-10-batches-py" if python else "cifar-10-batches-bin"), []
    folder.mkdir()
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        images, labels = np.zeros((4, 3072), np.uint8), [0, 1, 2, 3]
        path = folder / (name if python else f"{name}.bin")
        if python:
            batch: dict[Any, Any] = {b"data": images, b"labels": labels}
            if r.random() < 0.05:
                batch[r.choice([b"data", b"labels"])] = r.choice([1, None, [], ["x"], [2**70] * 4, np.zeros((4, 3072)), np.zeros(4, object), {}])
            path.write_bytes(pickle.dumps(batch, protocol=2))
        else:
            path.write_bytes(np.concatenate([np.array(labels, np.uint8)[:, None], images], 1).tobytes())
        out.append(path)
    return "cifar10", out


def _png(r: random.Random) -> bytes:
    mode = r.choice(["L", "L", "L", "RGB", "RGBA", "P", "1", "I;16", "CMYK", "LA"])
    file, size = io.BytesIO(), r.choice([(8, 8), (8, 8), (8, 8), (9, 7), (1, 1)])
    Image.new(mode, size).save(file, "TIFF" if mode == "CMYK" else "PNG")
    return file.getvalue()


def _csv(here: Path, r: random.Random) -> tuple[str, list[Path]]:
    lines = ["file,label,split"]
    for i in range(12):
        (here / f"{i}.png").write_bytes(_png(r))
        lines.append(f"{i}.png,{'ab'[i % 2]},{'test' if i > 8 else 'train'}")
    if r.random() < 0.5:
        at = r.randrange(len(lines))
        lines[at] = r.choice(["", ",", ",,,,", '"', "~nouser/x.png,a,train", "/dev/zero,a,train", ".,a,train", "a\0b,c,train", "x" * 200_000, "0.png,,train", "0.png,a", "0.png,a,x"])
    (here / "d.csv").write_text("\n".join(lines))
    return "csv:d.csv", [here / "d.csv", *(here / f"{i}.png" for i in range(3))]


def _folder(here: Path, r: random.Random) -> tuple[str, list[Path]]:
    out = []
    for i in range(12):
        path = here / "d" / r.choice(["a", "b"]) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_png(r))
        out.append(path)
    return "folder:d", out


def _sites(here: Path, r: random.Random) -> tuple[str, list[Path]]:
    out = []
    for i in range(24):
        path = here / "s" / r.choice(["", "", "", "train", "test"]) / r.choice(["north", "south"]) / r.choice(["a", "b", "unlabelled", "test", "unlabeled"]) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_png(r))
        out.append(path)
    return r.choice(["folder:s", "s"]), out


def data(base: Base, here: Path, r: random.Random) -> Case:
    name, files = r.choice([_npz, _npz, _idx, _cifar, _csv, _folder, _sites])(here, r)
    told = [name]
    if r.random() < 0.75:
        path = r.choice(files)
        new, what = mutate.damaged(path.read_bytes(), r)
        path.write_bytes(new)
        told.append(f"{path.name}: {what}")
    elif r.random() < 0.3:
        what = mutate.folder_damaged(files[0].parent, r)
        told.append(": ".join(what))
    more = r.choice([[], [], ["image.size=16", "image.fit=resize"], ["image.channels=3"], ["labels=clients", "label_per_class=1"]])
    if r.random() < 0.25:
        return Case(["check", name, "data_dir=.", *r.choice([[], ["layout=sites"], ["--skip-bad"]])], told)
    return Case(["run", f"data={name}", "data_dir=.", *QUICK, "image.size=32", *more, *r.choice([[], ["--skip-bad"]]), "-q"], told)


# -- words -------------------------------------------------------------------------------------------------------------
ODD = [
    "", " ", "0", "1", "-1", "3", "0.5", "-0.0", "1e300", "1e39", "1e-300", "nan", ".nan", ".inf", "-.inf", "1e400", "9" * 5000, "0x" + "f" * 5000, "99999999999999999999",
    "9223372036854775807", "1:30", "0x10", "0o7", "1_0", "²", "true", "no", "null", "~", "[", "]", "[" * 500, "{", "}", "{a: b}", "{1: 2}", "[1, 2]", "[a]", "[[]]", "&a [*a]", "*a",
    "!!int x", "!!bool x", "!!timestamp x", "!!binary x", "!!set {a}", "!!python/object:os.system x", "2020-13-45", "2020-12-24", "? ", "- -", "|", ">", "%", "@", "`", "'", '"', "''",
    '"\\0"', '"\\ud800"', "\udcff", "caf\udce9", "é", "\u202e", "\x1b[31m", "a\nb", "\t", "\r", "[bold]", "[/x]", ":smile:", "%s", "{0}", "../..", "/", ".", "..", "/dev/null", "/dev/full", "/nonexistent/x", "~nouser",
    "~nouser/x", ":X", ".x:Y", "..:Y", "x.py:Y", "a:b:c", "os:system", ":", "-", "--", "--help", "auto", "full", "none", "match-steps", "ratio:3", "ratio:²", "equal", "iid", "iid:", "iid:x=1",
    "dirichlet:0.5", "dirichlet:nan", "dirichlet:1e-300", "dirichlet:1e300", "shards:0", "shards:99999999999", "classes:-1", "natural", "cosine,warmup=nan", "cosine-7-16,turns=1e300",
    "constant,x=1", "cosine,horizon=0", "cpu", "cuda:99999999999999", "small-cnn", "resnet9", "fixmatch", "semifl", "digits", "numpy:", "folder:", "csv:x", "numpy:/dev/null", "folder:/dev", "demo", "feddure/base",
    "x" * 300, "x" * 10_000, "a.b.c", "a=b", "=", "runs", "done", "images", "r.yaml",
]  # fmt: skip
LONG = re.compile(r"steps|epochs|rounds|passes|samples|clients|batch|wait|warm|size|every|lr$")  # by which a run may honestly take for ever
LARGE = re.compile(r"^[0-9_]{4,}$|^0x|^1e")
COUNTS = ["0", "1", "2", "3", "7", "100", "2147483648", "9007199254740993", "4611686018427387904"]
NUMBERS = ["0", "1e-300", "1e-9", "0.1", "0.5", "0.999999", "1", "2.5", "1e6", "1e30", "3e38"]
TEXTS = {
    "partition": ["iid", "iid:spread", "iid:stratified", "dirichlet-equal:0.5", "dirichlet-capped:1e-9", "dirichlet-client:1e30", "dirichlet-client:1e-300", "dirichlet-capped:1e300", "dirichlet-capped:0.3,min_size=5", "shards:2", "shards:1000", "skew:0.4", "skew:1", "class-pairs", "batch-non-iid", "natural"],
    "schedule": ["constant", "cosine", "cosine-7-16", "cosine,warmup=5", "cosine,horizon=1e-300", "cosine,floor=1e30", "cosine-7-16,turns=1e300,by=step", "cosine,warmup=-1"],
    "unlabelled_batch": ["1", "full", "equal", "ratio:2", "ratio:999999999", "match-steps", "match-steps:floor"],
    "model": ["small-cnn", "emnist-cnn", "emnist-cnn:rgd", "resnet9"], "labelled": ["weak", "strong", "plain", "ra-mc"],
}  # fmt: skip


def known(method: str) -> dict[str, str]:
    """A method's keys, those of sections too, and what each takes."""
    out = {}
    for name, f in find(method).Options.model_fields.items():
        inside = getattr(type(f.default), "model_fields", None)
        out |= {f"{name}.{n}": takes(g.annotation) for n, g in inside.items()} if inside else {name: takes(f.annotation)}
    return {n: t for n, t in out.items() if n not in ("compile", "track", "method", "data", "capture", "fused")}


KNOWN = {method: known(method) for method in REGISTERED}
NAMES = sorted({name for names in KNOWN.values() for name in names})
FIGURES = ["accuracy", "labels", "labellers", "partition", "bias", "diversity", "classes"]


def pair(r: random.Random) -> str:
    """Any key with any value."""
    name = r.choice(NAMES) if r.random() < 0.9 else r.choice(ODD)
    return f"{name}={r.choice([v for v in ODD if not (LONG.search(name) and LARGE.search(v))])}"


def fitting(r: random.Random, method: str) -> str:
    """A key of a method with a value of its kind, ordinary or extreme."""
    name, kinds = r.choice([*KNOWN[method].items()])
    values = [w for w in kinds.split(" | ") if w not in ("whole number", "number", "text", "a list")]
    values += COUNTS if "whole number" in kinds else NUMBERS if "number" in kinds else []
    values += next((v for n, v in TEXTS.items() if n in name), ["none", "auto"]) if "text" in kinds else []
    values += ["classes,prior", "labels", "diversity"] if "a list" in kinds else []
    return f"{name}={r.choice([v for v in values if not (LONG.search(name) and LARGE.search(v))] or ['1'])}"


def words(base: Base, here: Path, r: random.Random) -> Case:
    shutil.copytree(base.done, here / "done")
    shutil.copytree(base.done, here / "longer")
    shutil.copytree(base.images, here / "images")
    (here / "r.yaml").write_text(PLAIN)
    odd = lambda *usual: r.choice(usual) if usual and r.random() < 0.75 else r.choice(ODD)
    pairs = [pair(r) for _ in range(r.choice([1, 1, 2, 3]))]
    method = r.choice([*REGISTERED])
    fit = [f"method={method}", *(["labels=server", "label_count=20"] if "server" in find(method).scenarios else ["labels=clients", "label_count=20"])]
    fit += [fitting(r, method) for _ in range(r.choice([1, 2, 3, 5]))]
    flags = [r.choice(["--out", "--name", "--data-dir", "--stop-after", "--quiet", "-o", "--help", "-x"]), odd()] if r.random() < 0.1 else []
    picture = ["--picture", odd("p.png", "p.svg", "done", "done/config.yaml")]
    choices: list[list[str]] = [
        *[["run", *QUICK, "data=few-digits", *fit, "-q"]] * 6,
        ["split", *QUICK, "data=few-digits", *fit, "--picture", "p.png"],
        ["run", *QUICK, "data=few-digits", "label_count=20", *pairs, "-q"],
        ["run", *QUICK, "data=few-digits", *pairs, f"--name={odd('x')}", f"--out={odd('runs', 'done')}", "-q"],
        ["run", "--help", *pairs],
        ["run", odd("demo", "r.yaml", "feddure/table1"), "--help", *pairs],
        ["split", "data=few-digits", *pairs, *picture],
        ["split", "data=few-digits", "label_count=20", *picture, "--save", odd("f.npz", "done/federation.npz", "images/0.png")],
        ["table", odd("feddure", "semifl"), odd("1", "base"), "--only", odd(pair(r)), "--from", odd("done", ".")],
        ["table", "feddure", "1", f"--only={pair(r)}", f"--set={pair(r)}", "--from", ".", "--out", odd("t", "done")],
        ["report", odd("done", "."), "-o", odd("page.html", "done/config.yaml", "images/0.png", "done")],
        ["predict", odd("done"), odd("images", "done"), "-q", "-o", odd("p.csv", "done/summary.json", "r.yaml"), f"--batch={odd('1', '2')}", f"--device={odd('cpu')}"],
        ["export", odd("done"), "-o", odd("out", "done", "images", "done/keep"), "--format", odd("safetensors")],
        ["figure", odd(*FIGURES), odd("done"), "-o", odd("f.png", "f.svg", "done/f.pdf", "images/0.png"), f"--width={odd('3.5')}", f"--names={odd('a')}", f"--parts={odd('x')}"],
        ["compare", odd("done"), odd("done", "images")],
        ["compare", odd("done"), *r.choice([["-o", odd("t.md", "t.csv", "t.tex", "done/config.yaml", "images/0.png")], ["--format", odd("md", "csv", "tex")]]), f"--rows={odd('method', 'lr')}", f"--columns={odd('data')}", f"--against={odd('FixMatch')}"],
        ["compare", "done", odd("done", "longer"), f"--statistic={odd('last', 'best', 'scores.test.macro_f1', 'seconds')}", f"--scores={odd('auroc', 'macro_f1,x')}"],
        ["check", odd("images", "folder:images", "few-digits", "done"), *([pair(r)] if r.random() < 0.5 else []), *picture],
        ["resume", odd("longer"), f"rounds={odd('4', '3', '1')}", "-q"],
        ["run", *QUICK, "data=few-digits", "label_count=20", *pairs, "--dry-run"],
        ["run", *QUICK, "data=few-digits", f"{r.choice(NAMES)}={odd('1', 'x')},{odd('2', '0.5')}", f"seed={odd('0,1', '0,0', ',')}", "--stop-after", "1"],
        ["predict", odd("done"), odd("images/0.png", "done/config.yaml"), "-q"],
        ["cache"],
        ["list", odd("methods", "datasets", "models", "partitions", "recipes", "views", "figures"), "--no-time", f"--data-dir={odd('.')}"],
        ["resume", odd("done"), f"--stop-after={odd('1')}"],
        [odd("run", "list", "watch"), odd("--help"), odd()],
    ]  # fmt: skip
    chosen = [*r.choice(choices), *flags]
    if chosen[0] == "watch" and not {"--help"} & set(chosen):
        chosen = ["watch", "/nonexistent/run"]  # it would serve
    before = everything(here)

    def kept() -> str | None:
        """A run and what is not Fallow's stay as they were."""
        now = everything(here)
        lost = [name for name, content in before.items() if now.get(name) != content and not name.startswith("longer/")]
        return f"{lost} changed" if lost and "--force" not in chosen else None

    return Case(chosen, [], kept)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock"}


GROUPS: dict[str, Callable[[Base, Path, random.Random], Case]] = {"folders": folders, "recipes": recipes, "data": data, "words": words}
