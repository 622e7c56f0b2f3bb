"""A trained model as a graph that needs no Fallow: torch.export, ONNX."""

from __future__ import annotations

import importlib.util
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import torch
from torch.export import Dim, ExportedProgram

from fallow.errors import UserError, first_line
from fallow.export.inputs import FromPixels


def program(model: FromPixels, shape: tuple[int, int, int], fewest: int = 1) -> ExportedProgram:
    """The graph from uint8 images [N, C, H, W] to logits, for any number of images from `fewest` upwards."""
    example = torch.zeros(fewest + 2, *shape, dtype=torch.uint8)
    with _quiet():
        try:
            return torch.export.export(model.eval(), (example,), dynamic_shapes=({0: Dim("images", min=fewest)},), strict=False)
        except Exception as error:  # a model of one's own may do what no graph can hold
            raise UserError(f"torch.export cannot trace this model ({first_line(error)})", "take --format safetensors") from error


def torch_export(traced: ExportedProgram) -> bytes:
    file = io.BytesIO()
    with _quiet():
        torch.export.save(traced, file)
    return file.getvalue()


def onnx(traced: ExportedProgram) -> bytes:
    """The same graph in ONNX, opset as torch has it; input `images`, output `logits`."""
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"ONNX needs the package {missing[0]}, which is not installed", "install fallow[onnx], or choose another --format")
    with _quiet():
        try:
            made = torch.onnx.export(traced, dynamo=True, input_names=["images"], output_names=["logits"], verbose=False)
        except Exception as error:
            why = first_line(error.__cause__ or error)
            raise UserError(f"torch cannot write this model as ONNX ({why})", "take --format torch-export") from error
    assert made is not None
    return made.model_proto.SerializeToString()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' talk about themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
