"""What a run came to: scores, settings, model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fallow.config import Config
from fallow.errors import UserError
from fallow.runs import origin as origins
from fallow.runs import portrait
from fallow.runs.folder import RunFolder
from fallow.runs.metrics import Row
from fallow.runs.settings import stated

if TYPE_CHECKING:
    from fallow.export.labelling import Predictions


@dataclass(frozen=True)
class Result:
    """What a run came to: `.accuracy`, `.metrics`, `.summary`, `.config`, `.model()`, `.predict(...)`, `.plot()`.

    >>> import fallow
    >>> result = fallow.run(method="fedavg", clients=4, label_count=200, rounds=2)
    >>> result.summary["status"], result.config.clients, len(result.metrics)
    ('finished', 4, 2)

    In a notebook it shows itself: scores, curve, settings, where it lies.
    """

    path: Path
    trust: bool = False  # a model of one's own in a folder from elsewhere may run

    def __repr__(self) -> str:
        return portrait.line(self)

    def _repr_html_(self) -> str:
        return portrait.card(self)

    @property
    def summary(self) -> dict[str, Any]:
        """What summary.json says: scores, sizes, classes, versions."""
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
        """A dict per round, in order; `pandas.DataFrame(result.metrics)` is a table of them."""
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

    def plot(self, column: str = "accuracy", ax: Any = None) -> Any:
        """Draws a column of the metrics over rounds on `ax`, a matplotlib axis (default: of a new figure); returns the axis."""
        return portrait.plot(self, column, ax)

    def predict(self, images: Any, *, device: str = "auto", batch: int | None = None, best: bool = False) -> Predictions:
        """Labels images: uint8 arrays or tensors (one, [N, H, W], [N, C, H, W] or [N, H, W, C]), Pillow images, paths, or a list
        of such. They go through what the run's own images went through, as in `fallow predict`; `best` as in `model`.

        >>> import fallow
        >>> from fallow.data import sources
        >>> result = fallow.run(method="fedavg", data="digits", clients=4, label_count=200, rounds=2)
        >>> found = result.predict(sources.load("digits").test.images[:3])
        >>> len(found.labels), found.probabilities.shape
        (3, (3, 10))
        """
        from fallow.export.labelling import label

        return label(self, images, device, batch, best)

    def weights(self, best: bool = False) -> Path:
        """The file of the model after the last round, or after the best one by validation."""
        path = RunFolder(self.path).best if best else RunFolder(self.path).model
        if path.is_file():
            return path
        if best and (self.path / "model.safetensors").is_file():
            raise UserError(f"{self.path} kept no best round", "run it with validation=0.1, which holds labels out to find it")
        raise UserError(f"{self.path} has no weights", "give the folder of the run itself; thinned results have none")

    def model(self, best: bool = False) -> torch.nn.Module:
        """The trained model, ready for inference; `best`: as it was after the best round by validation."""
        from safetensors import SafetensorError
        from safetensors.torch import load as load_tensors

        from fallow import models, own

        o = self.config
        summary = self.summary
        weights = self.weights(best)
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
