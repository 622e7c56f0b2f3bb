"""docs/own-method.md: its list of parts is complete, and the method in it runs."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest
import torch
from conftest import HERE
from torch import Tensor

from fallow.engine.feed import Batch, Part
from fallow.methods.parts.losses import cross_entropy
from fallow.methods.parts.sharpness import ascent
from fallow.runs.trial import tried

PAGE = (HERE.parent / "docs" / "own-method.md").read_text()
PARTS = HERE.parent / "fallow" / "methods" / "parts"


@pytest.mark.parametrize("module", ["losses", "labelling", "batching", "averaging", "grouping", "dma", "thresholds", "heads", "sharpness"])
def test_every_part_is_listed_with_its_arguments(module: str) -> None:
    listed = PAGE[PAGE.index("## Losses and parts") : PAGE.index("## Five rules")]
    for node in ast.parse((PARTS / f"{module}.py").read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert re.search(rf"`{node.name}[(`]", listed), f"{module}.{node.name} is not in docs/own-method.md"
            called = re.search(rf"`{node.name}\(([^`]*)\)`", listed)
            if called and isinstance(node, ast.FunctionDef):
                words = [w.partition("=")[0].strip() for w in called[1].split(",")]
                known = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)] + ["**columns"]
                assert set(words) <= set(known), f"{module}.{node.name} takes {known}, not {words}"
    gone = set(re.findall(r"`([a-z_]+)\(", listed)) - {
        n.name for file in PARTS.glob("*.py") for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef)
    }
    assert not gone, f"there is no {gone}"


class Linear:
    """A net and its slot, which keep the gradient that they go down."""

    def __init__(self, weight: Tensor):
        self.weights, self.model, self.weight = {"weight": weight.requires_grad_()}, self, weight

    def __call__(self, x: Tensor, weights: dict[str, Tensor] | None = None, stats: str = "update") -> Tensor:
        return x @ (weights or self.weights)["weight"].T

    def gradient(self, loss: Tensor, net: Linear) -> dict[str, Tensor]:
        return {"weight": torch.autograd.grad(loss, self.weight)[0]}

    def descend(self, loss: Tensor) -> None:
        self.down = torch.autograd.grad(loss, self.weight)[0]


def test_the_sharpness_aware_step_goes_down_from_nearby() -> None:
    [lines] = re.findall(r"\n((?:        .*ascent.*|        up = .*|        s\.descend\(cross_entropy\(near.*)(?:\n        .*)*)\n\n## Five", PAGE)
    g = torch.Generator().manual_seed(0)
    x, w, y = torch.randn(6, 4, generator=g, dtype=torch.float64), torch.randn(3, 4, generator=g, dtype=torch.float64), torch.arange(6) % 3
    s = Linear(w.clone())
    exec(textwrap.dedent(lines), {"s": s, "b": Batch({"x": Part({"labelled": x, "y": y})}, {}), "ascent": ascent, "cross_entropy": cross_entropy})

    def slope(w: Tensor) -> Tensor:
        return ((x @ w.T).softmax(1) - torch.nn.functional.one_hot(y, 3)).T @ x / 6

    size = w.abs() + 0.01
    there = w + 0.1 * size**2 * slope(w) / (size * slope(w)).norm()
    assert torch.allclose(s.down, slope(there), atol=1e-12) and not torch.allclose(s.down, slope(w), atol=1e-3)


def test_the_method_that_builds_an_update_passes_its_checks(tmp_path: Path) -> None:
    start = PAGE.index("    from fallow import Method, Net, Value\n")
    code = textwrap.dedent(PAGE[start : PAGE.index("## Where things are")])
    (tmp_path / "sure.py").write_text(code)
    trial = tried(f"{tmp_path}/sure.py:Sure", {"labels": "some"})
    assert trial.sentences == []
