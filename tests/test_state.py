"""States: three groups, arithmetic, means; and trees of them on their way to a file."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from fallow.engine.nets import NetHandle
from fallow.engine.pack import apart, pack, size, unpack
from fallow.methods.base import Update
from fallow.methods.parts.averaging import mean
from fallow.methods.state import Layout, State


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4))


def state(seed: int = 0, counted: int = 0) -> State:
    module = net(seed)
    module[1].running_mean.normal_()
    module[1].num_batches_tracked.fill_(counted)
    return State.of(module)


def same(a: State, b: State) -> bool:
    return a.groups.keys() == b.groups.keys() and all(torch.equal(a.groups[g], b.groups[g]) for g in a.groups)


def test_groups_and_names() -> None:
    s, module = state(), net()
    assert set(s.groups) == {"parameters", "statistics", "counters"}
    assert s.layout.names("statistics") == ["1.running_mean", "1.running_var"] and s.layout.names("counters") == ["1.num_batches_tracked"]
    for name, tensor in module.named_parameters():
        assert torch.equal(s[name], tensor) and s[name].shape == tensor.shape
    assert set(s.tensors()) == set(module.state_dict())
    assert "parameters" in s and "parameters" not in s.only("statistics")
    with pytest.raises(KeyError):
        s.only("parameters")["1.running_mean"]
    assert s.layout == Layout.of(net(5)) and s.layout != Layout.of(nn.Linear(2, 2))
    assert "parameters" in repr(s)


def test_it_is_a_copy_and_its_tensors_are_views() -> None:
    module = net()
    s = State.of(module)
    with torch.no_grad():
        module[3].bias.add_(1)
    assert not torch.equal(s["3.bias"], module[3].bias)
    s["3.bias"].fill_(7)
    assert (s.tensors()["3.bias"] == 7).all()
    other = s.clone()
    other["3.bias"].fill_(8)
    assert (s["3.bias"] == 7).all()


def test_a_net_follows_its_flat_state() -> None:
    module = net()
    x = torch.randn(2, 2, 4, 4)
    expected = net(1).eval()(x)
    handle = NetHandle(module, torch.device("cpu"))
    handle.load(State.of(net(1)))
    torch.testing.assert_close(handle(x, stats="running"), expected)
    fast = NetHandle(net(2), torch.device("cpu"))
    before = fast.flat.clone()
    fast.follow(handle, 0.75)
    torch.testing.assert_close(fast.flat.groups["parameters"], before.groups["parameters"] * 0.75 + handle.flat.groups["parameters"] * 0.25)
    assert torch.equal(fast.flat.groups["statistics"], handle.flat.groups["statistics"])


def test_arithmetic() -> None:
    a, b = state(0, counted=3), state(1, counted=9)
    for found, wanted in (
        (a + b, lambda x, y: x + y), (a - b, lambda x, y: x - y), (a * 0.5, lambda x, _: x * 0.5), (a.lerp(b, 0.25), lambda x, y: 0.75 * x + 0.25 * y),
    ):  # fmt: skip
        for g in ("parameters", "statistics"):
            torch.testing.assert_close(found.groups[g], wanted(a.groups[g], b.groups[g]))
        assert found["1.num_batches_tracked"].item() == 3  # counters stay the left one's
    assert same(a.lerp(b, 0.0), a)
    slim = b.only("parameters")
    assert torch.equal((a + slim).groups["statistics"], a.groups["statistics"])
    assert same(a.having(b, "statistics").only("statistics"), b.only("statistics"))
    assert "statistics" not in a.having(None, "statistics") and "statistics" not in a.having(slim, "statistics")


def test_bytes() -> None:
    s, module = state(), net()
    assert s.nbytes == size(s) == sum(t.numel() * t.element_size() for t in module.state_dict().values())
    assert size({"a": s, "b": [torch.zeros(3), 5]}) == s.nbytes + 12


def test_means() -> None:
    states = [state(k, counted=k) for k in range(4)]
    weights = [1.0, 2.0, 3.5, 0.25]
    found = mean(states, weights=weights)
    for g in ("parameters", "statistics"):
        exact = sum(w * s.groups[g].double() for w, s in zip(weights, states)) / sum(weights)
        assert (found.groups[g].double() - exact).abs().max() <= 2**-24 * exact.abs().max()  # rounded once
        assert found.groups[g].dtype == torch.float32
    assert found["1.num_batches_tracked"].item() == 3  # the maximum
    updates = [Update(model=s) for s in states]
    for u, w in zip(updates, weights):
        u.weight = w
    assert same(mean(updates), found)
    assert same(mean([states[0]] * 3), states[0])  # 17.1
    assert same(mean([states[0]] * 3, weights=[0.1, 0.7, 5.0]), states[0])
    torch.testing.assert_close(mean(states[::-1]).groups["parameters"], mean(states).groups["parameters"])
    assert mean([torch.tensor([1.0]), torch.tensor([4.0])], weights=[2, 1]).tolist() == [2.0]


def test_a_mean_is_exact_where_float32_is_not() -> None:
    values = [torch.tensor([v]) for v in (1e8, 1.0, -1e8, 1.0)]
    assert mean(values).item() == 0.5


def test_packing() -> None:
    s, tensor = state(2, counted=4), torch.arange(6).view(2, 3)
    tree = {"model": s, "slim": s.only("parameters"), "list": [tensor, {"x": 1.5}], "n": 3, "none": None, "word": "a", 5: tensor}
    layouts = {"model": s.layout, "other": Layout.of(nn.Linear(1, 1))}
    shape, tensors = pack(tree, layouts)
    back = unpack(shape, tensors, layouts, "cpu")
    assert list(back) == list(tree) and same(back["model"], s) and same(back["slim"], s.only("parameters"))
    assert torch.equal(back["list"][0], tensor) and back["list"][1] == {"x": 1.5} and back["n"] == 3 and back["none"] is None
    assert torch.equal(back[5], tensor)


def test_one_state_under_two_names_is_stored_twice() -> None:
    s, row = state(2), torch.arange(6).view(2, 3)
    _, tensors = pack({"model": s, "residual": s, "rows": [row, row[1]]}, {"model": s.layout})
    back = load(save(apart(tensors)))
    assert len(back) == len(tensors) and all(torch.equal(back[name], t) for name, t in tensors.items())
