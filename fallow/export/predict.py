"""`fallow predict`: a run's model labels the images of a folder and writes a CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fallow import disk, targets
from fallow.data.readers.folders import image_files
from fallow.data.readers.images import in_threads
from fallow.errors import UserError
from fallow.export.inputs import FromPixels, Inputs, by_batch
from fallow.machine import cores, device_of, spread
from fallow.models import adopt
from fallow.paths import shown, user_path
from fallow.runs import Result, load_result

Tell = Callable[[int, int], None]  # called with (files done, files in all)
Read = tuple[str, Tensor | str]  # a file's name, and its pixels or why there are none


@dataclass(frozen=True)
class Predicted:
    """What came of a folder."""

    path: Path  # the CSV
    images: int
    unreadable: list[str]  # file names, as in the CSV
    by_batch: bool  # predictions depend on which images share a batch


class Predictor:
    """A run's model, called as the run was tested: same preprocessing, same batch size, same policy for batch norm."""

    def __init__(self, result: Result, device: str = "auto", batch: int | None = None, best: bool = False):
        self.inputs, self.device = Inputs.of(result), device_of(device)
        self.classes: list[str] = result.summary["class_names"]
        self.batch = batch or result.config.eval_batch
        net = result.model(best)
        self.by_batch = by_batch(net)
        adopt(net).stats = "running"  # without running statistics: a batch's own, of one image too
        self.net = FromPixels(net, self.inputs).to(self.device)
        if self.device.type == "cpu":
            torch.set_num_threads(1)  # as in a run: batches side by side instead
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Probabilities [N, classes] of uint8 images [N, C, H, W], all in one batch."""
        x = self.net.normalised(images.to(self.device)).contiguous(memory_format=torch.channels_last)
        return self.net.net(x).float().softmax(1).cpu()

    def batches(self, images: Sequence[Tensor]) -> Tensor:
        """The same of any number of images, in batches, side by side on a CPU's cores."""
        parts = [torch.stack(list(images[i : i + self.batch])) for i in range(0, len(images), self.batch)]
        return torch.cat(spread(self, parts, cores() if self.device.type == "cpu" else 1))


def predict(
    run: str | Path,
    folder: str | Path,
    out: str | Path = "predictions.csv",
    *,
    probabilities: bool = False,
    batch: int | None = None,
    device: str = "auto",
    tell: Tell = lambda done, count: None,
    force: bool = False,
    trust: bool = False,
    best: bool = False,
) -> Predicted:
    """Labels every image below `folder`, in order of name, and writes file, label, confidence, error.

    A file that cannot be read has its reason under `error` and no label. `probabilities` adds a column per class.
    `best` takes the weights of the best round by validation in the place of the last round's.
    Only a few batches are in memory at a time. `trust` lets a model run whose code this user has never named himself.
    """
    folder, out = user_path(folder), targets.file(user_path(out), "predict", force)
    result = load_result(run, trust)
    if batch is not None and batch < 1:
        raise UserError(f"--batch {batch} is not a count of images", "give 1 or more")
    files = _files(folder)
    predictor = Predictor(result, device, batch, best)
    unreadable: list[str] = []
    with disk.errors_as_user_errors(out, "choose another with -o"), disk.replacing(out) as file:
        text = io.TextIOWrapper(file, newline="", encoding="utf-8", errors="backslashreplace", write_through=True)
        write = csv.writer(text, lineterminator="\n").writerow
        write(["file", "label", "confidence", *([f"p_{c}" for c in predictor.classes] if probabilities else []), "error"])
        for row in _rows(predictor, files, folder, probabilities, tell):
            write(row)
            if row[-1]:
                unreadable.append(row[0])
        text.detach()  # the file is not its to close
    if len(unreadable) == len(files):
        raise UserError(f"none of the {len(files)} images below {folder} can be read", f"see the column error of {out}")
    return Predicted(out, len(files), unreadable, predictor.by_batch)


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", "give the path of a folder of images")
    try:
        files = image_files(folder)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror})", "change its permissions") from None
    if not files:
        raise UserError(f"{folder} holds no images", "put PNG, JPEG or other image files there, in folders or not")
    return files


def _rows(predictor: Predictor, files: list[Path], folder: Path, every: bool, tell: Tell) -> Iterator[list[Any]]:
    """The CSV's rows, in the files' order; an unreadable file takes no place in a batch."""
    chunk = predictor.batch * cores()
    waiting: list[Read] = []
    done = images = 0
    for item in _reading(predictor.inputs, files, folder, chunk):
        waiting.append(item)
        images += isinstance(item[1], Tensor)
        if images == chunk:
            yield from _labelled(predictor, waiting, every)
            done, images, waiting = done + len(waiting), 0, []
            tell(done, len(files))
    yield from _labelled(predictor, waiting, every)
    tell(len(files), len(files))


def _reading(inputs: Inputs, files: list[Path], folder: Path, ahead: int) -> Iterator[Read]:
    """The files one by one, so many of them read at a time."""

    def read(path: Path) -> Read:
        name = shown(path.relative_to(folder).as_posix())
        try:
            return name, inputs.read(path)
        except UserError as error:
            return name, error.cause.removeprefix(f"{shown(path)} ")
        except OSError as error:
            return name, f"cannot be read ({error.strerror or error})"

    for start in range(0, len(files), ahead):
        yield from in_threads(read, files[start : start + ahead])


def _labelled(predictor: Predictor, items: list[Read], every: bool) -> Iterator[list[Any]]:
    classes, images = predictor.classes, [image for _, image in items if isinstance(image, Tensor)]
    found = iter(predictor.batches(images) if images else ())
    for name, image in items:
        if isinstance(image, str):
            yield [name, "", "", *([""] * len(classes) if every else []), image]
            continue
        p = next(found)
        best = int(p.argmax())
        yield [name, classes[best], f"{p[best]:.6f}", *([f"{v:.6f}" for v in p.tolist()] if every else []), ""]
