"""What a run came to: scores, settings, model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fallow.config import Config
from fallow.errors import UserError
from fallow.runs import origin as origins
from fallow.runs.folder import Row, RunFolder
from fallow.runs.settings import stated


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    path: Path
    trust: bool = False  # a model of one's own in a folder from elsewhere may run

    @property
    def summary(self) -> dict[str, Any]:
        try:
            return RunFolder(self.path).read_summary()
        except FileNotFoundError:
            raise UserError(
                f"the run {self.path} has not ended", f"wait for it, or continue it with `fallow resume {self.path}` if it was cut"
            ) from None
        except ValueError:
            cause = f"the summary of the run {self.path} is damaged"
            raise UserError(cause, f"delete it and write it anew with `fallow resume {self.path}`") from None

    @property
    def metrics(self) -> list[Row]:
        """A row per round."""
        return RunFolder.existing(self.path).rows()

    @property
    def accuracy(self) -> float:
        """Test accuracy after the last round."""
        return self.summary["last"]

    @property
    def config(self) -> Config:
        """Its settings; a method of one's own is not looked at for them."""
        RunFolder(self.path).check_settings()
        return stated(self.path / "config.yaml")

    def model(self) -> torch.nn.Module:
        """The trained model, ready for inference."""
        from safetensors import SafetensorError
        from safetensors.torch import load as load_tensors

        from fallow import models, own

        o = self.config
        summary = self.summary
        weights = self.path / "model.safetensors"
        if not weights.is_file():
            raise UserError(f"{self.path} has no weights", "give the folder of the run itself; thinned results have none")
        name = origins.model_name(self.path, o)
        if models.is_own(name):
            own.check(name, "model", f"the run {self.path}", self.trust)
        net = models.build(name, summary["classes"], summary["channels"], norm=o.norm, size=summary["size"])
        try:
            tensors = load_tensors(RunFolder(self.path).verified(weights.name, needs_manifest=True))
        except SafetensorError:
            raise UserError(f"{weights} is damaged", "restore the file, or run it again") from None
        for norm in (m for m in net.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)):
            if not any(name.endswith("running_mean") for name in tensors):  # statistics=batch: a batch's own, as evaluated
                norm.track_running_stats = False
                norm.running_mean = norm.running_var = norm.num_batches_tracked = None
        missing, _ = net.load_state_dict(tensors, strict=False)
        if lost := set(missing) & {name for name, _ in net.named_parameters()}:  # buffers stay as the model makes them
            raise UserError(f"{weights} has no {min(lost)}", "restore the file and the model's code, or run it again")
        return net.eval()
