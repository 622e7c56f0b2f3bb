"""Adopted batch norm and dropout: torch's where torch has the behaviour, the rows alone where it has not."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from fallow import models
from fallow.models import Modes, adopt
from fallow.models.norms import BatchNorm, masked_batch_norm, masked_batch_norm_plain


def net_and_twin(name="resnet9", norm="bn"):
    torch.manual_seed(0)
    net = models.build(name, 10, 3, norm)
    twin = copy.deepcopy(net)
    return net, adopt(net), twin


def toy(momentum=0.1):
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU(), nn.Conv2d(4, 3, 2), nn.BatchNorm2d(3, momentum=momentum)  # fmt: skip
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(27, 5), nn.BatchNorm1d(5, momentum=momentum)).double()


def batch(n, seed=1):
    return torch.randn(n, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def same_state(a, b, **tolerance):
    assert list(a.state_dict()) == list(b.state_dict())
    for k, v in a.state_dict().items():
        assert torch.allclose(v, b.state_dict()[k], **tolerance) if tolerance else torch.equal(v, b.state_dict()[k]), k


# what torch does ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet9", "wrn-28-2"])
def test_adopted_equals_torch_bit_for_bit(name):
    net, modes, twin = net_and_twin(name)
    same_state(net, twin)
    for seed in (1, 2):
        x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
        y, z = net(x), twin(x)
        assert torch.equal(y, z)
        y.square().sum().backward(), z.square().sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(net.parameters(), twin.parameters()))
    same_state(net, twin)
    modes.stats = "running"
    assert torch.equal(net(x), twin.eval()(x))
    same_state(net, twin)


def test_adopt_keeps_identity_kind_and_hooks():
    net = toy()
    before, seen = list(net), []
    net[1].register_forward_hook(lambda *_: seen.append(1))
    modes = adopt(net)
    assert all(a is b for a, b in zip(before, net)) and isinstance(net[1], nn.BatchNorm2d)
    assert all(m.modes is modes for m in net if isinstance(m, BatchNorm))
    net(batch(3))
    assert seen and adopt(net) is modes


def test_a_deep_copy_has_modes_of_its_own():
    net = toy()
    modes = adopt(net)
    other = copy.deepcopy(net)
    assert adopt(other) is not modes and adopt(other) is other[1].modes is other[4].modes
    adopt(other).stats = "batch"
    other(batch(3)), net(batch(3))
    assert (other[1].num_batches_tracked, net[1].num_batches_tracked) == (0, 1)


@pytest.mark.parametrize("known", [True, False])
def test_batch_leaves_running_statistics_alone_and_running_without_any_is_batch(known):
    net, modes, twin = net_and_twin("small-cnn", "bn")
    x = torch.randn(4, 3, 8, 8)
    modes.stats = "batch"
    y = net(x)
    same_state(net, twin)
    assert torch.equal(y, twin(x))
    modes.stats, modes.has_running = "running", known
    assert torch.equal(net(x), y) != known  # eval without running buffers is train mode


def test_without_tracking_update_is_batch():
    net, modes, twin = net_and_twin("small-cnn", "bn")
    modes.updates_running = False
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(net(x), twin(x))
    assert all(
        not m.num_batches_tracked and (m.running_var == 1).all() for m in net.modules() if isinstance(m, BatchNorm)
    )


def test_layers_built_without_buffers_use_the_batch():
    net = nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False))
    modes, x = adopt(net), torch.randn(4, 2, 3, 3)
    expected = F.batch_norm(x, None, None, net[0].weight, net[0].bias, True)
    for stats in ("update", "batch", "running"):
        with modes.using(stats=stats):
            assert torch.equal(net(x), expected)


def test_cumulative_average_is_torchs():
    net, twin = toy(None), toy(None)
    modes = adopt(net)
    for seed in range(4):
        assert torch.equal(net(batch(3, seed)), twin(batch(3, seed)))
    same_state(net, twin, rtol=1e-12, atol=1e-12)
    assert modes.stats == "update" and net[1].num_batches_tracked == 4


def test_using_puts_back():
    modes = Modes()
    with pytest.raises(RuntimeError), modes.using(stats="running", parts=(1, 2)):
        assert modes.parts == (1, 2)
        raise RuntimeError
    assert modes == Modes(key=modes.key)


def test_one_position_has_variance_0():
    net = nn.Sequential(nn.BatchNorm2d(3))
    adopt(net)
    with torch.no_grad():
        net[0].bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    y = net(torch.full((1, 3, 1, 1), 7.0))
    assert y.flatten().tolist() == [1, 2, 3]
    assert torch.allclose(net[0].running_mean, torch.tensor(0.7)) and torch.allclose(
        net[0].running_var, torch.tensor(0.9)
    )


# second derivatives ---------------------------------------------------------------------------------------------------


def curvature(net, x):
    """A gradient of a gradient, as FedDure takes through a virtual step."""
    weights = dict(net.named_parameters())
    loss = functional_call(net, weights, (x,)).square().sum()
    grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    virtual = {k: w - 0.1 * g for (k, w), g in zip(weights.items(), grads)}
    return torch.autograd.grad(functional_call(net, virtual, (x,)).tanh().sum(), list(weights.values()))


def test_second_derivatives_equal_torchs():
    net, twin = toy(), toy()
    adopt(net)
    for a, b in zip(curvature(net, batch(4)), curvature(twin, batch(4))):
        assert torch.equal(a, b)
    same_state(net, twin)


def test_second_derivatives_with_rows_left_out():
    net, twin = toy(), toy()
    modes, (keep, x) = adopt(net), (torch.tensor([1, 0, 1, 1, 0], dtype=torch.bool), batch(5))
    final = net[-1]
    net[-1] = nn.Sequential(final, Select(keep))
    modes.rows = keep
    for a, b in zip(curvature(net, x), curvature(twin, x[keep])):
        assert torch.allclose(a, b, atol=1e-10)


class Select(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.keep = keep

    def forward(self, x):
        return x[self.keep]


# rows -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, None])
def test_rows_left_out_equal_the_others_alone(momentum):
    net, twin = toy(momentum), toy(momentum)
    modes = adopt(net)
    for seed in (1, 2, 3):
        keep = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool).roll(seed)
        x = batch(6, seed)
        x[~keep] *= 100
        here, there = x.clone().requires_grad_(), x[keep].clone().requires_grad_()
        modes.rows = keep
        y, z = net(here), twin(there)
        assert torch.allclose(y[keep], z, atol=1e-10) and y.isfinite().all()
        y[keep].tanh().sum().backward(), z.tanh().sum().backward()
        assert torch.allclose(here.grad[keep], there.grad, atol=1e-10) and not here.grad[~keep].any()
    for p, q in zip(net.parameters(), twin.parameters()):
        assert torch.allclose(p.grad, q.grad, atol=1e-10)
    same_state(net, twin, rtol=1e-10, atol=1e-10)


def test_no_row_left_changes_nothing_and_stays_finite():
    net, modes, twin = net_and_twin("wrn-28-2")
    modes.rows = torch.zeros(2, dtype=torch.bool)
    y = net(1e3 * torch.randn(2, 3, 8, 8))
    y.sum().backward()
    assert y.isfinite().all() and all(p.grad.isfinite().all() for p in net.parameters())
    same_state(net, twin)


def test_all_rows_are_plain_batch_norm():
    x, w, b = torch.randn(6, 4, 5, 5), torch.randn(4), torch.randn(4)
    y, mean, var, n = masked_batch_norm(x, w, b, torch.ones(6, dtype=torch.bool), 1e-5)
    assert torch.allclose(y, F.batch_norm(x, None, None, w, b, True), atol=1e-5)
    assert torch.allclose(mean, x.mean((0, 2, 3)), atol=1e-6) and n == 150
    assert torch.allclose(var, x.var((0, 2, 3), correction=0), atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 2, 2, 3), (4, 2, 2, 2, 2)])
@pytest.mark.parametrize("affine", ["both", "weight", "none"])
def test_masked_gradients(shape, affine):
    torch.manual_seed(4)
    rows = torch.tensor([1, 0, 1, 1, 0], dtype=torch.bool)[: shape[0]]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    w = None if affine == "none" else torch.randn(shape[1], dtype=torch.float64, requires_grad=True)
    b = torch.randn(shape[1], dtype=torch.float64, requires_grad=True) if affine == "both" else None
    given = [t for t in (x, w, b) if t is not None]
    out = lambda f: lambda *t: f(t[0], w if w is None else t[1], b if b is None else t[2], rows, 1e-5)[0][rows]
    assert torch.autograd.gradcheck(out(masked_batch_norm), given)
    assert torch.autograd.gradgradcheck(out(masked_batch_norm), given)
    fast = masked_batch_norm(x, w, b, rows, 1e-5)
    plain = masked_batch_norm_plain(x, w, b, rows, 1e-5)
    assert all(torch.allclose(f, p, atol=1e-12) for f, p in zip(fast, plain))
    g = torch.randn(shape, dtype=torch.float64)  # also where rows are left out: they take none
    for one, other in zip(torch.autograd.grad(fast[0], given, g), torch.autograd.grad(plain[0], given, g)):
        assert torch.allclose(one, other, atol=1e-12)


def test_masked_norm_is_accurate_far_from_zero_and_under_autocast():
    x = torch.randn(8, 3, 4, 4) + 1000
    rows = torch.arange(8) < 5
    y = masked_batch_norm(x, None, None, rows, 1e-5)[0][rows].double()
    exact = F.batch_norm(x[rows].double(), None, None, training=True)
    assert (y - exact).abs().max() < 1e-3
    half = x.bfloat16() - 1000
    with torch.autocast("cpu", torch.bfloat16):
        y, mean, _, _ = masked_batch_norm(half, torch.ones(3), torch.zeros(3), rows, 1e-5)
    assert y.dtype == torch.bfloat16 and mean.dtype == torch.float32
    assert torch.allclose(y[rows].float(), F.batch_norm(half[rows].float(), None, None, training=True), atol=0.05)


def test_masked_norm_reads_nothing_back():
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoHostReads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "masked_select"), func
            assert "bernoulli" not in func.name() and "rand" not in func.name(), func
            return func(*args, **(kwargs or {}))

    for momentum in (0.1, None):
        net = nn.Sequential(toy(momentum), nn.Dropout(0.5))
        modes, x = adopt(net), batch(5)
        rows = torch.tensor([1, 0, 1, 1, 0], dtype=torch.bool)
        with NoHostReads():
            for fields in ({}, {"rows": rows}, {"parts": (2, 3)}, {"parts": (2, 3), "rows": rows}):
                with modes.using(**fields):
                    net(x).sum().backward()


# parts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("rows", [None, torch.tensor([1, 1, 0, 1, 0, 1, 1], dtype=torch.bool)])
def test_parts_equal_separate_calls(momentum, rows):
    net, twin = toy(momentum), toy(momentum)
    modes, other, x = adopt(net), adopt(twin), batch(7)
    with modes.using(parts=(4, 3), rows=rows):
        y = net(x)
    z = []
    for part in (slice(0, 4), slice(4, 7)):
        with other.using(rows=None if rows is None else rows[part]):
            z.append(twin(x[part]))
    assert torch.allclose(y, torch.cat(z), rtol=0, atol=1e-12)
    y.tanh().sum().backward(), torch.cat(z).tanh().sum().backward()
    for p, q in zip(net.parameters(), twin.parameters()):
        assert torch.allclose(p.grad, q.grad, atol=1e-12)
    same_state(net, twin, rtol=1e-12, atol=1e-12)
    assert net[1].num_batches_tracked == 2


# dropout --------------------------------------------------------------------------------------------------------------


def masks(layers, x=None):
    net = nn.Sequential(*layers)
    modes = adopt(net)
    modes.key.fill_(17)
    return net, modes, torch.ones(64, 16, 8, 8) if x is None else x


@pytest.mark.parametrize("p", [0.05, 0.25, 0.5, 0.9])
def test_dropout_rate_and_scale(p):
    net, _, x = masks([nn.Dropout(p)])
    y = net(x)
    assert (y == 0).float().mean().item() == pytest.approx(p, abs=4 * (p * (1 - p) / x.numel()) ** 0.5)
    assert torch.allclose(y[y != 0], torch.tensor(1 / (1 - p)))


def test_dropout_of_nothing_and_of_everything():
    net, _, x = masks([nn.Dropout(0.0)])
    assert net(x) is x
    net, _, x = masks([nn.Dropout(1.0)])
    assert not net(x).any()


@pytest.mark.parametrize("layer, shape", [(nn.Dropout1d, (9, 64, 5)), (nn.Dropout2d, (9, 64, 4, 4)), (nn.Dropout3d, (9, 64, 2, 2, 2))])  # fmt: skip
def test_channel_dropout_takes_whole_channels(layer, shape):
    net, _, x = masks([layer(0.25)], torch.ones(shape))
    y = net(x).flatten(2)
    assert (y == y[..., :1]).all() and 0.15 < (y[..., 0] == 0).float().mean() < 0.35


def test_dropout_masks_differ_by_key_layer_and_call_and_repeat_with_the_key():
    net, modes, x = masks([nn.Dropout(0.5), nn.Dropout(0.5)])
    differ = lambda a, b: 0.4 < ((a == 0) != (b == 0)).float().mean() < 0.6
    first, second = net[0](x), net[0](x)
    modes.begin_step()
    assert torch.equal(net[0](x), first) and torch.equal(net[0](x), second)
    modes.begin_step()
    other_layer = net[1](x)
    modes.begin_step()
    modes.key.fill_(18)
    other_key = net[0](x)
    for a in (second, other_layer, other_key):
        assert differ(a, first)
    assert differ(second, other_layer)
    rows = first.flatten(1) == 0
    assert (rows.float().mean(1) - 0.5).abs().max() < 0.1  # no row, channel or pixel is favoured
    assert ((first == 0).float().mean((0, 2, 3)) - 0.5).abs().max() < 0.1


def test_dropout_is_off_in_running_and_uses_no_generator():
    net, modes, x = masks([nn.Conv2d(16, 4, 3), nn.Dropout(0.5), nn.Dropout2d(0.3)])
    state = torch.get_rng_state()
    net(x)
    assert torch.equal(torch.get_rng_state(), state)
    modes.stats = "running"
    assert torch.equal(net(x), net[0](x)) and modes.calls == 2


def test_dropout_does_not_depend_on_memory_layout_or_dtype():
    net, modes, x = masks([nn.Dropout(0.5)])
    first = net(x)
    for other in (x.contiguous(memory_format=torch.channels_last), x.bfloat16()):
        modes.begin_step()
        assert torch.equal(net(other).float(), first)


def test_dropout_gradient_follows_the_mask():
    net, _, x = masks([nn.Dropout(0.5)], torch.ones(4, 8, requires_grad=True))
    y = net(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


# CUDA -----------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-4), (torch.bfloat16, 0.06)])
def test_masked_norm_on_cuda_equals_the_reference(layout, dtype, atol):
    torch.manual_seed(0)
    rows = torch.rand(64, device="cuda") < 0.7
    x = torch.randn(64, 32, 16, 16, device="cuda").to(memory_format=layout).to(dtype)
    w, b = torch.randn(32, device="cuda"), torch.randn(32, device="cuda")
    g = torch.randn_like(x) * rows.view(-1, 1, 1, 1)
    found = []
    for f in (masked_batch_norm, masked_batch_norm_plain):
        given = [t.clone().requires_grad_() for t in (x, w, b)]
        y = f(*given, rows, 1e-5)[0]
        found.append([y, *torch.autograd.grad(y, given, g)])
    for i, (one, other) in enumerate(zip(*found)):
        assert torch.allclose(one, other, atol=atol * (100 if i > 1 else 1), rtol=atol)
    assert found[0][0].is_contiguous(memory_format=layout)


@pytest.mark.gpu
def test_adopted_net_can_be_captured_and_dropout_equals_cpu():
    net = models.build("emnist-cnn", 10, 1, "bn").cuda()
    modes = adopt(net)
    modes.key = torch.tensor(5, device="cuda")
    rows = torch.arange(8, device="cuda") < 6
    x = torch.randn(8, 1, 28, 28, device="cuda")

    def step():
        modes.begin_step()
        with modes.using(rows=rows):
            return net(x)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = step()
    results = []
    for key in (5, 6, 5):
        modes.key.fill_(key)
        graph.replay()
        results.append(y.clone())
    assert torch.equal(results[0], results[2]) and not torch.equal(results[0], results[1])
    drop = nn.Sequential(nn.Dropout(0.5))
    adopt(drop)
    here = drop(torch.ones(999))
    adopt(drop).begin_step()
    assert torch.equal(here, drop(torch.ones(999, device="cuda")).cpu())
