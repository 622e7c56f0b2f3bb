"""`fallow export`: a run's model as weights, as graphs that need no Fallow, and with a card that tells what it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fallow import disk, targets
from fallow.errors import UserError, suggest
from fallow.export import formats
from fallow.export.card import card
from fallow.export.inputs import FromPixels, Inputs, by_batch
from fallow.runs import Result, load_result
from fallow.runs.folder import RunFolder
from fallow.runs.manifest import seal
from fallow.runs.metrics import laid_out

FORMATS = ("safetensors", "torch-export", "onnx")
FILES = {"safetensors": "model.safetensors", "torch-export": "model.pt2", "onnx": "model.onnx"}


@dataclass(frozen=True)
class Exported:
    path: Path
    files: list[str]
    left_out: list[str]  # sentences about formats that `all` could not have


def export(run: str | Path, out: str | Path | None = None, format: str = "all", force: bool = False, *, trust: bool = False, best: bool = False) -> Exported:
    """Writes weights, model card, settings and summary to a folder (default: RUN/export), and graphs by `format`.

    `all` is every format that this machine and this model can have. The folder can be given to `fallow.load` and
    `fallow predict` in the run's place. `trust` lets a model run whose code this user has never named himself; `best` takes
    the weights of the best round by validation in the place of the last round's.
    """
    if format not in (*FORMATS, "all"):
        raise UserError(f"there is no format {format!r}", suggest(format, [*FORMATS, "all"]))
    result = load_result(run, trust)
    target = Path(out) if out else result.path / "export"
    if target.resolve() == result.path.resolve():
        raise UserError(f"{target} is the run itself", "choose another folder with -o")
    targets.folder(target, "export", ("README.md", "config.yaml", "summary.json", *FILES.values()), force)
    graphs, left_out = _graphs(result, format, best)
    folder = RunFolder(result.path)
    weights, summary = folder.verified(result.weights(best).name), folder.verified("summary.json")
    if best:
        summary = (laid_out(result.summary | {"exported_round": result.summary["validation"]["best_round"]}) + "\n").encode()
    settings = re.sub(r"(?m)^data_dir: .*$", "data_dir: null", disk.read(result.path / "config.yaml").decode())
    names = ["model.safetensors", *(FILES[g] for g in graphs)]
    with disk.errors_as_user_errors(target, "choose another folder with -o"):
        target.mkdir(parents=True, exist_ok=True)
    contents: dict[str, bytes | str] = {"README.md": card(result, names, best)}  # first: by it the folder is known as an export
    contents |= {"model.safetensors": weights, "config.yaml": settings, "summary.json": summary}
    contents |= {FILES[name]: data for name, data in graphs.items()}
    for name, data in contents.items():
        disk.write(target / name, data)
    seal(target, contents)
    return Exported(target, list(contents), left_out)


def _graphs(result: Result, format: str, best: bool) -> tuple[dict[str, bytes], list[str]]:
    """The bytes of each graph that was asked for; of `all` those that can be had, and why not the others."""
    inputs, net = Inputs.of(result), result.model(best)
    if format == "safetensors":
        return {}, []
    made: dict[str, bytes] = {}
    left_out: list[str] = []
    try:
        traced = formats.program(FromPixels(net, inputs), inputs.shape, fewest=2 if by_batch(net) else 1)
    except UserError as error:
        if format != "all":
            raise
        return {}, [f"no graph was written: {error.cause}"]
    for name, write in (("torch-export", formats.torch_export), ("onnx", formats.onnx)):
        if format not in (name, "all"):
            continue
        try:
            made[name] = write(traced)
        except UserError as error:
            if format != "all":
                raise
            left_out.append(f"{FILES[name]} was not written: {error.cause}")
    return made, left_out
