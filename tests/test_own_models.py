"""Models of one's own whose result would silently be another's: refused before the first round, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import TINY

import fallow
from fallow.errors import UserError

HEAD = """
import numpy as np
import sys
import torch
from torch import nn
class Base(nn.Module):
    def __init__(self, classes, channels):
        super().__init__()
        self.n = channels * 64
        self.last = nn.Linear(self.n, classes)
        self.more()
    def more(self): ...
    def forward(self, x):
        return self.last(x.flatten(1))
class Net(Base):
"""
LEARNT = "more = lambda self: self.register_buffer('m', torch.zeros(self.n){more})\n    def forward(self, x):\n        x = x.flatten(1)\n"
TRAINED = "        if self.training:\n            {learn}\n            return self.last(x - x.mean(0))\n        return self.last(x - self.{name})"
MODELS = {
    "a buffer assigned anew": (LEARNT.format(more="") + TRAINED.format(learn="self.m = self.m + x.detach().mean(0)", name="m"), "assigns its buffer 'm' anew in a pass"),
    "a buffer that is not kept": (LEARNT.format(more=", persistent=False") + TRAINED.format(learn="self.m.add_(x.detach().mean(0))", name="m"), "has more than its State holds"),
    "a plain attribute": ("h = 0.0\n    def forward(self, x):\n        x = x.flatten(1)\n" + TRAINED.format(learn="self.h = x.detach().mean(0)", name="h"), "has more than its State holds"),
    "weights that are no parameters": ("def more(self): self.w = torch.randn(self.n)\n    def forward(self, x): return self.last(x.flatten(1) * self.w)", "has more than its State holds"),
    "layers in a list": ("def more(self): self.layers = [nn.Linear(self.n, self.n)]\n    def forward(self, x): return self.last(self.layers[0](x.flatten(1)))", "has more than its State holds"),
    "weights drawn by numpy": ("def more(self): self.last.weight.data.copy_(torch.from_numpy(np.random.rand(10, self.n)))", "draws its first weights by other means than torch"),
    "a mask": ("def more(self): self.register_buffer('keep', torch.ones(self.n) > 0)\n    def forward(self, x): return self.last(x.flatten(1) * ~self.keep)", "has a buffer 'keep' of bool"),
    "bytes": ("def more(self): self.register_buffer('keep', torch.zeros(self.n, dtype=torch.uint8))", "has a buffer 'keep' of uint8"),
    "complex weights": ("def more(self): self.w = nn.Parameter(torch.ones(self.n) * 1j)\n    def forward(self, x): return self.last((x.flatten(1) * self.w).abs())", "has complex numbers in 'w'"),
    "a buffer of two names": ("def more(self):\n        self.a, self.b, m = nn.Module(), nn.Module(), torch.zeros(3)\n        self.a.register_buffer('m', m)\n        self.b.register_buffer('m', m)", "has one buffer under two names, 'a.m' and 'b.m'"),
    "a frozen layer": ("def more(self): self.last.bias.requires_grad = False", "does not train its parameter 'last.bias'"),
    "a lazy layer": ("def more(self): self.last = nn.LazyLinear(10)", "has a lazy layer, of which 'last.weight' has no size yet"),
    "no parameters": ("def more(self): self.last = nn.Identity()", "has no parameters"),
    "too many logits": ("def more(self): self.last = nn.Linear(self.n, 13)", "makes a tensor of shape (4, 13) of 4 images; let it return their logits, a tensor of shape (4, 10)"),
    "a tuple": ("def forward(self, x): return super().forward(x), 1", "makes a tuple of 4 images"),
    "a batch as one": ("def forward(self, x): return super().forward(x).mean(0)", "makes a tensor of shape (10,) of 4 images"),
    "images changed in place": ("def forward(self, x): return super().forward(x.mul_(0.5))", "changes the images that it is given in place"),
    "own dropout": ("def forward(self, x): return super().forward(x * (torch.rand(()) > 0.5))", "draws random numbers that are torch's own"),
    "an exception": ("def forward(self, x): raise KeyError('lost')", "line 16 of own.py fails (KeyError: 'lost')"),
    "an exit": ("def forward(self, x): sys.exit(0)", "line 16 of own.py fails (SystemExit: 0)"),
}  # fmt: skip


def run(text: str, **more: Any) -> Any:
    Path("own.py").write_text(f"{HEAD}    {text}\n")
    return fallow.run(out="runs", **TINY | {"method": "fedavg", "labels": "clients", "model": "own.py:Net"} | more)


@pytest.mark.parametrize("name", MODELS)
def test_refused_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, said = MODELS[name]
    with pytest.raises(UserError) as told:
        run(text)
    assert said in str(told.value), told.value
    assert not list(Path("runs").iterdir()), "nothing was run"


GOOD = {
    "a mask that is not kept": "def more(self): self.register_buffer('keep', torch.ones(self.n) > 0, persistent=False)\n    def forward(self, x): return self.last(x.flatten(1) * self.keep)",
    "spectral norm": "def more(self): self.last = nn.utils.parametrizations.spectral_norm(self.last)",
    "batch norm": "def more(self): self.norm = nn.BatchNorm2d(1)\n    def forward(self, x): return super().forward(self.norm(x))",
    "tied weights": "def more(self):\n        self.other = nn.Linear(self.n, 10)\n        self.other.weight = self.last.weight\n    def forward(self, x): return super().forward(x) + self.other(x.flatten(1))",
    "a buffer changed in place": LEARNT.format(more="") + TRAINED.format(learn="self.m.copy_(x.detach().mean(0))", name="m"),
}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("statistics", ["average", "static"])
def test_others_are_taken(name: str, statistics: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(GOOD[name], rounds=1, statistics=statistics).summary["status"] == "finished"
