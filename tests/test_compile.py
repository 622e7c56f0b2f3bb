"""`compile=true`: the same numbers through torch.compile, one compiled function for every slot's net."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_methods import settings

import fallow
from fallow import models
from fallow.engine import nets
from fallow.engine.simulation import Simulation
from fallow.errors import UserError
from fallow.methods.base import Net
from fallow.runs import prepare

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler")


def two_passes(net: nets.NetHandle, x: torch.Tensor) -> list[torch.Tensor]:
    """Logits of a training pass, the statistics it leaves, its gradient, and logits by these statistics."""
    net.begin_step()
    z = net(x)
    grads = net.combine(torch.autograd.grad(z.square().mean(), net.leaves, allow_unused=True))
    return [z, net.flat.groups["statistics"].clone(), *grads, net(x, stats="running")]


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_compiled_passes_are_the_same_for_every_net(half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch traces them; what it makes of them in C++ or Triton is in the slow test and those of the GPU."""
    from torch._dynamo.utils import counters

    traced = torch.compile(nets.forward, backend="aot_eager")
    monkeypatch.setattr(nets, "compiler", lambda: traced)
    x = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    counters.clear()
    autocast = (lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False)) if half else None
    for seed in (0, 1):
        torch.manual_seed(seed)
        plain = nets.NetHandle(models.build("small-cnn", 10, 3, norm="bn", size=16), torch.device("cpu"), autocast=autocast)
        own = nets.NetHandle(models.build("small-cnn", 10, 3, norm="bn", size=16), torch.device("cpu"), autocast=autocast)
        own.load(plain.flat.clone())
        own.compile = True
        for a, b in zip(two_passes(plain, x), two_passes(own, x), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nets, "compiler", pytest.fail)  # given weights are those of a virtual step
            torch.testing.assert_close(own(x, weights=own.weights, stats="batch"), plain(x, weights=plain.weights, stats="batch"))
        if not seed:
            made = counters["stats"]["unique_graphs"]
    assert made > 0 and counters["stats"]["unique_graphs"] == made  # none for the second net


def test_many_variants_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch itself stops at eight and goes on uncompiled; batches joined in ten ways are ten variants."""
    from torch._dynamo.utils import counters

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile(function, backend="aot_eager"))
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    nets.compiler.cache_clear()
    torch._dynamo.reset()
    net = nets.NetHandle(models.build("small-cnn", 10, 1, norm="bn", size=8), torch.device("cpu"))
    net.compile = True
    counters.clear()
    for n in range(2, 12):
        net(torch.zeros(13, 1, 8, 8), parts=(n, 13 - n))
    nets.compiler.cache_clear()
    assert counters["stats"]["unique_graphs"] == 10


@pytest.mark.slow
@needs_compiler
def test_a_compiled_run_learns_alike(tmp_path: Path) -> None:
    keys = settings("fixmatch", "clients")
    runs = [fallow.run(out=tmp_path, **keys, compile=c).path for c in (False, True)]
    one, other = (load_file(path / "model.safetensors") for path in runs)
    assert any(not torch.equal(one[k], other[k]) for k in one)  # it was not the same path
    for k in one:
        torch.testing.assert_close(other[k], one[k], rtol=1e-3, atol=1e-4)


def test_what_is_differentiated_twice_is_not_compiled() -> None:
    method, options, source, federation = prepare(None, settings("feddure", "clients", compile=True))
    kit = Simulation(options, method(options, len(source.classes)), source, federation).kit
    assert kit.net().compile and not kit.net().modes.fused
    assert not kit.net(Net(autocast=False)).compile and kit.net(Net(autocast=False)).modes.fused
    assert {n: kit.net(s).compile for n, s in kit.held.items() if isinstance(s, Net)} == {"model": True, "creg": False, "freg": False}


def test_says_what_torch_could_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> object:
        def call(*args: object) -> None:
            raise torch._dynamo.exc.TorchDynamoException("No working C++ compiler found\nand more")

        return call

    monkeypatch.setattr(nets, "compiler", fails)
    net = nets.NetHandle(models.build("small-cnn", 10, 3, norm="bn", size=16), torch.device("cpu"))
    net.compile = True
    with pytest.raises(UserError, match=r"torch.compile failed \(.*No working C\+\+ compiler found\); use compile=false"):
        net(torch.zeros(2, 3, 16, 16))
