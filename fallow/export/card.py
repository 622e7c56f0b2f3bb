"""The model card: what a model is, what it was trained on and how, what came out, how it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fallow import models
from fallow.data.holdings import Federation
from fallow.engine.policies import policy_of
from fallow.export import results
from fallow.export.inputs import Inputs, by_batch
from fallow.methods import find, is_own
from fallow.runs import Result
from fallow.runs.folder import RunFolder
from fallow.runs.origin import Origin

GRAPHS = {"model.pt2": "torch.export", "model.onnx": "ONNX"}


def card(result: Result, files: list[str], best: bool = False) -> str:
    """README.md in the form of a Hugging Face model card."""
    parts = [_title(result), _files(result, files), _preprocessing(result, files), _use(result, files), _training(result), results.words(result, best, data_name(result)), _again(result)]
    return _front(result, best) + "\n" + "\n\n".join(parts) + "\n"


def data_name(result: Result) -> str:
    """The data set's name; of one's own files without the folders they lie in."""
    kind, colon, rest = result.summary["data"].partition(":")
    return f"{kind}:{Path(rest).name}" if colon and "/" in rest else result.summary["data"]


def _method_name(result: Result) -> str:
    return _method(result)[0]


def _method(result: Result) -> tuple[str, str]:
    """The method's name and paper; one's own is not run for that."""
    name = result.config.method
    if is_own(name):
        origin = Origin.read(result.path)
        return (origin.method["name"], origin.method["paper"]) if origin else (name.rpartition(":")[2], "")
    return find(name).__name__, find(name).paper


def _front(result: Result, best: bool) -> str:
    data, measured = data_name(result), results.measured(result, best)
    task = {"type": "image-classification"}
    about = {
        "library_name": "fallow",
        "pipeline_tag": "image-classification",
        "tags": ["federated-learning", "semi-supervised-learning", result.config.method.rpartition(":")[2].lower()],
        "metrics": [m["type"] for m in measured] or ["accuracy"],
        "model-index": [{
            "name": f"{_method_name(result)} on {data}",
            "results": [{"task": task, "dataset": {"name": data, "type": data}, "metrics": measured}],
        }],
    }  # fmt: skip
    return f"---\n{yaml.safe_dump(about, sort_keys=False, allow_unicode=True)}---\n"


def _title(result: Result) -> str:
    s, o = result.summary, result.config
    names = s["class_names"]
    shown = ", ".join(names) if len(names) <= 20 else ", ".join([*names[:20], "..."])
    what = f"An image classifier ({o.model}, {len(names)} classes) trained over {o.clients} clients with {_method_name(result)}"
    paper = f" ({_method(result)[1]})" if _method(result)[1] else ""
    return (
        f"# {_method_name(result)} on {data_name(result)}\n\n{what}{paper} by Fallow {s['versions']['fallow']}, "
        f"federated semi-supervised learning.\n\nClasses, in the order of the outputs: {shown}"
        + (" (all of them in `summary.json`)." if len(names) > 20 else ".")
    )


def _files(result: Result, files: list[str]) -> str:
    lines = ["## Files", "", "| file | |", "|---|---|"]
    lines.append("| `model.safetensors` | the weights, float32, by the names of Fallow's model; no normalisation in it |")
    for name in files[1:]:
        lines.append(f"| `{name}` | {GRAPHS[name]}: a graph from 8-bit pixels to logits, normalisation in it |")
    lines.append("| `config.yaml`, `summary.json` | every setting of the run, and what it came to |")
    return "\n".join(lines)


def _preprocessing(result: Result, files: list[str]) -> str:
    inputs = Inputs.of(result)
    c, h, w = inputs.shape
    steps = [*inputs.words(), f"laid out as uint8 [N, {c}, {h}, {w}]"]
    normal = f"x = (pixels / 255 - {_numbers(inputs.mean)}) / {_numbers(inputs.std)}"
    where = "The graphs begin with it, so they are given the pixels as they are." if files[1:] else "Fallow's model is given x."
    listed = "\n".join(f"{n}. {step}" for n, step in enumerate(steps, 1))
    return f"## Preprocessing\n\n{listed}\n\nThen, per channel, `{normal}`. {where} Output: logits [N, {result.summary['classes']}]; softmax gives probabilities."


def _use(result: Result, files: list[str]) -> str:
    inputs = Inputs.of(result)
    shape = ", ".join(map(str, inputs.shape))
    blocks = ["## Use"]
    if "model.pt2" in files:
        blocks.append(f'''In plain torch, `images` being uint8 [N, {shape}]:

```python
import torch

model = torch.export.load("model.pt2").module()
with torch.no_grad():
    probabilities = model(images).softmax(1)
```''')
    if "model.onnx" in files:
        blocks.append('''In ONNX Runtime:

```python
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
logits = session.run(["logits"], {"images": images.numpy()})[0]
```''')
    blocks.append(f'''In Fallow, from this folder:

```python
import fallow
import torch

model = fallow.load(".").model()
mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in ({list(inputs.mean)}, {list(inputs.std)}))
with torch.no_grad():
    probabilities = model((images.float() / 255 - mean) / std).softmax(1)
```

or, for a folder of image files, `fallow predict . FOLDER -o predictions.csv`, which does the preprocessing too.''')
    if result.config.model not in models.names():
        blocks.append(f"For this Fallow needs the file of the model, `{result.config.model}`, which is not in this folder.")
    if by_batch(result.model()):
        blocks.append(
            f"**Give images together.** The model has no running statistics (`statistics=batch`): batch norm uses those of the "
            f"batch it is given, and it was tested in batches of {result.config.eval_batch}, in file order. An image's output "
            f"depends on the others of its batch, and a single image's is worth little."
        )
    return "\n\n".join(blocks)


def _training(result: Result) -> str:
    o, s = result.config, result.summary
    rows = [
        ("data", f"`{data_name(result)}`, {_held(result)}"),
        ("labels", f"`labels={o.labels}`" + _label_count(o)),
        ("clients", f"{o.clients}, {o.active_count} a round, partition `{o.partition}`" + (f", unlabelled `{o.unlabelled_partition}`" if o.unlabelled_partition else "")),
        ("method", f"`{o.method}`" + (f", {_method(result)[1]}" if _method(result)[1] else "") + f", reading `{o.reading}`"),
        ("model", f"`{o.model}`, {_norm(o)}"),
        ("rounds", f"{s['rounds']} of {o.rounds} ({s['status']})"),
        ("local work", f"{f'{o.steps} steps' if o.steps else f'{o.epochs:g} epochs'}, batch {o.batch}, {o.optimizer}, lr {o.lr:g}, schedule `{o.schedule}`"),
        ("seed", str(o.seed) + "".join(f", {k}={v}" for k in ("split_seed", "active_seed") if (v := getattr(o, k)) is not None)),
        ("device", f"{s['device']}, torch {s['versions']['torch']}"),
    ]  # fmt: skip
    return "## Training\n\n| | |\n|---|---|\n" + "\n".join(f"| {a} | {b} |" for a, b in rows)


def _held(result: Result) -> str:
    """How many images of which kind, where the federation is there."""
    path = result.path / "federation.npz"
    if not path.is_file():
        return f"{result.summary['classes']} classes"
    RunFolder(result.path).verified(path.name)
    f = Federation.load(path)
    labelled = sum(len(c.labelled) for c in f.clients) + len(f.server.labelled)
    unlabelled = sum(len(c.unlabelled) for c in f.clients)
    held = sum(len(party.validation) for party in (f.server, *f.clients))
    also = f", {held:,} labelled ones held out for validation" if held else ""
    return f"{labelled:,} labelled and {unlabelled:,} unlabelled training images{also}"


def _norm(o: Any) -> str:
    norm = o.norm or models.default_norm(o.model) or "its own"
    statistics = f", its statistics `{policy_of(norm, o.statistics).name}`" if norm in ("bn", "bn-batch", "sbn") else ""
    return f"norm `{norm}`{statistics}"


def _label_count(o: Any) -> str:
    given = [f"`{k}={v}`" for k in ("label_count", "label_ratio", "label_per_class") if (v := getattr(o, k)) is not None]
    return f", {given[0]}" if given else ""


def _again(result: Result) -> str:
    s = result.summary
    commit = f", commit {s['commit']}" if s.get("commit") else ""
    return (
        "## To have it again\n\n"
        f"Fallow {s['versions']['fallow']}{commit}, `config.yaml`; config hash `{s['config_hash']}` (equal for runs that must give "
        f"equal results on one kind of device), federation fingerprint `{s['fingerprint']}` (who held which image)."
    )


def _numbers(values: tuple[float, ...]) -> str:
    return repr(values[0]) if len(set(values)) == 1 else str(list(values))
