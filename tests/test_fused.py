"""The fused kernels, norms and optimisers, equal the plain ones (`make test-gpu`)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fallow.config import Config
from fallow.engine import kernels
from fallow.engine.optim import Optimizer, clip_
from fallow.models import fused
from fallow.models.norms import Chain, GroupNorm, adopt, masked_batch_norm_plain

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 4e-2}
CASES = [
    (16, 8, (5,), 1), (24, 5, (3, 4), 1), (32, 32, (10, 10), 1), (128, 8, (9, 9), 1), (3, 1, (1,), 1),
    (32, 32, (250,), 1), (64, 16, (448, 37), 1), (512, 4, (32,), 1), (64, 32, (1,) * 6, 2), (512, 4, (1,) * 5, 16),
    (64, 48, (1,) * 3, 2),
]  # fmt: skip


def reference(x: Tensor, w: Tensor, b: Tensor, sizes: tuple[int, ...], relu: bool, rows: Tensor | None, pooled: int) -> Tensor:
    if pooled > 1:
        y = F.group_norm(x, x.shape[1] // pooled, w, b, 1e-5)
    else:
        kept = torch.ones(len(x), dtype=torch.bool, device=x.device) if rows is None else rows
        y = torch.cat([masked_batch_norm_plain(p, w, b, r, 1e-5)[0] for p, r in zip(x.split(sizes), kept.split(sizes))])
    return F.relu(y) if relu else y


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("channels", "side", "sizes", "pooled"), CASES)
def test_equals_plain(
    dtype: torch.dtype, relu: bool, masked: bool, channels: int, side: int, sizes: tuple[int, ...], pooled: int
) -> None:
    if masked and pooled > 1:
        pytest.skip("group norm has no rows to leave out")
    g = torch.Generator("cuda").manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, device="cuda", generator=g)
    n = sum(sizes)
    x = (2 * draw(n, channels, side, side) + 5).to(dtype).contiguous(memory_format=torch.channels_last)
    w, b, grad = draw(channels), draw(channels), draw(n, channels, side, side).to(dtype)
    rows = torch.rand(n, device="cuda", generator=g) < 0.6 if masked else None
    ours = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, w, b)]
    theirs = [t.detach().double().requires_grad_() for t in (x, w, b)]
    y, _ = fused.norm(*ours, sizes, 1e-5, relu, rows, pooled)
    expected = reference(*theirs, sizes, relu, rows, pooled)
    limit = TOLERANCE[dtype]
    assert y.dtype == dtype
    assert (y.double() - expected).abs().max() < limit * (1 + expected.abs().max()) / 4
    y.backward(grad)
    expected.backward(grad.double())
    for mine, other in zip((t.grad for t in ours), theirs):
        assert mine is not None and other.grad is not None
        assert (mine.double() - other.grad).abs().max() < limit * (1 + other.grad.abs().max())


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_follow_part_after_part(momentum: float | None) -> None:
    x = torch.randn(7, 24, 5, 5, device="cuda").contiguous(memory_format=torch.channels_last)
    theirs = nn.BatchNorm2d(24, momentum=momentum).cuda()
    theirs(x[:3]), theirs(x[3:])
    ours = nn.BatchNorm2d(24, momentum=momentum).cuda()
    modes = adopt(ours)
    with modes.using(parts=(3, 4)):
        ours(x)
    assert int(ours.num_batches_tracked) == 2
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=1e-6)


def test_a_batch_without_rows_moves_nothing() -> None:
    x = torch.full((4, 8, 3, 3), torch.nan, device="cuda").contiguous(memory_format=torch.channels_last)
    norm = nn.BatchNorm2d(8).cuda()
    nn.init.normal_(norm.bias)
    modes = adopt(norm)
    with modes.using(rows=torch.zeros(4, dtype=torch.bool, device="cuda")):
        y = norm(x)
    assert torch.equal(y, norm.bias.view(1, -1, 1, 1).expand_as(y))
    assert int(norm.num_batches_tracked) == 0 and not norm.running_mean.any()


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(16), nn.GroupNorm(8, 16)])
def test_second_derivatives(norm: nn.Module) -> None:
    torch.manual_seed(0)
    net = Chain(nn.Conv2d(3, 16, 3, bias=False), norm, nn.ReLU(), nn.Conv2d(16, 4, 3)).cuda().to(memory_format=torch.channels_last)
    modes = adopt(net)
    x = torch.randn(6, 3, 8, 8, device="cuda").contiguous(memory_format=torch.channels_last)

    def twice(plain: bool) -> list[Tensor]:
        modes.fused = not plain
        loss = net(x).square().mean()
        params = list(net.parameters())
        first = torch.autograd.grad(loss, params, create_graph=True)
        return list(torch.autograd.grad(sum(f.square().sum() for f in first), params))

    if isinstance(norm, GroupNorm):
        assert norm.modes is modes
    torch.backends.cudnn.allow_tf32 = False
    for mine, other in zip(twice(False), twice(True)):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("clip_value", [None, 0.1])
@pytest.mark.parametrize("when", [None, True, False])
def test_optimizer_step(optimizer: str, nesterov: bool, clip: float | None, clip_value: float | None, when: bool | None) -> None:
    torch.manual_seed(0)
    o = Config(optimizer=optimizer, momentum=0.9, nesterov=nesterov, weight_decay=5e-4, clip=clip, clip_value=clip_value)
    start = torch.randn(20_000, device="cuda")
    plain, ours = start.clone(), start.clone()
    one, two = Optimizer(o, plain), Optimizer(o, ours)
    lr, prox = torch.tensor(0.1, device="cuda"), torch.tensor(0.01, device="cuda")
    moved = None if when is None else torch.tensor(when, device="cuda")
    for _ in range(3):
        heavy = [torch.randn(15_000, device="cuda").bfloat16() for _ in range(2)]
        rest = torch.randn(5_000, device="cuda")
        g = torch.cat([heavy[0].float() + heavy[1].float(), rest]) + prox * (plain - start)
        one.step(plain, clip_(g, clip, clip_value), lr, moved)
        kernels.step(two, ours, heavy, rest, lr, moved, (prox, start))
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=2e-6)
    for name, t in one.tensors.items():
        torch.testing.assert_close(two.tensors[name], t, rtol=1e-5, atol=2e-6)


def test_a_bias_before_batch_norm_is_left_out() -> None:
    """Output, gradients and running statistics as with it; its own gradient is 0."""
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False
    net = Chain(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3)).cuda().to(memory_format=torch.channels_last)
    modes = adopt(net)
    x = torch.randn(6, 3, 8, 8, device="cuda").contiguous(memory_format=torch.channels_last)

    def once(fused_kernels: bool) -> tuple[Tensor, list[Tensor | None], Tensor]:
        modes.fused = fused_kernels
        net[1].reset_running_stats()
        y = net(x)
        grads = torch.autograd.grad(y.square().mean(), list(net.parameters()), allow_unused=True)
        return y, list(grads), net[1].running_mean.clone()

    (ya, ga, ma), (yb, gb, mb) = once(True), once(False)
    torch.testing.assert_close(ya, yb, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ma, mb, rtol=1e-4, atol=1e-6)
    assert ga[1] is None and gb[1] is not None and gb[1].abs().max() < 1e-6
    for a, b in zip(ga[2:], gb[2:]):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
