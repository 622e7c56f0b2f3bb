"""The nets: counts, names, initialisation, and what each must not change."""

from __future__ import annotations

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fallow import models
from fallow.errors import UserError
from fallow.models.cnn import SmallCNN, adaptive_by_choice, max_by_choice, pool2_by_choice
from fallow.models.resnet import ResNet9
from fallow.models.wrn import Block

SIDES = (8, 28, 32, 64, 96)


def on_paper(name, classes, channels, norm=None):
    with torch.device("meta"):
        return models.build(name, classes, channels, norm)


def count(net, kind=nn.Module):
    layers = [m for m in net.modules() if isinstance(m, kind)]
    return sum(p.numel() for m in layers for p in m.parameters(recurse=False))


def buffers(net):
    return sum(b.numel() for b in net.buffers())


# counts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "widen, classes, total, conv, norm, linear",
    [
        (2, 10, 1_467_610, 1_462_704, 3_616, 1_290),
        (2, 100, 1_479_220, 1_462_704, 3_616, 12_900),
        (8, 10, 23_354_842, 23_335_344, 14_368, 5_130),
        (8, 100, 23_401_012, 23_335_344, 14_368, 51_300),
    ],
)
def test_wrn_counts(widen, classes, total, conv, norm, linear):
    net = on_paper(f"wrn-28-{widen}", classes, 3)
    assert count(net) == total
    assert (count(net, nn.Conv2d), count(net, nn.BatchNorm2d), count(net, nn.Linear)) == (conv, norm, linear)
    assert len(list(net.parameters())) == 80 and len(net.state_dict()) == 155
    assert sum(p.dim() == 4 for p in net.parameters()) == 28
    assert buffers(net) == norm + 25  # means and variances, a counter per layer


@pytest.mark.parametrize("widen, wide", [(2, (16, 32, 64, 128)), (8, (16, 128, 256, 512))])
def test_wrn_norms_in_order(widen, wide):
    net = on_paper(f"wrn-28-{widen}", 10, 3)
    found = [m.num_features for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    a, b, c, d = wide
    assert found == [a, b] + [b] * 6 + [b, c] + [c] * 6 + [c, d] + [d] * 6 + [d]


@pytest.mark.parametrize(
    "widen, expected",
    [
        (2, [14_432] + [18_560] * 3 + [57_536] + [73_984] * 3 + [229_760] + [295_424] * 3),
        (8, [168_224] + [295_424] * 3 + [918_272] + [1_180_672] * 3 + [3_671_552] + [4_720_640] * 3),
    ],
)
def test_wrn_counts_per_block(widen, expected):
    blocks = [m for m in on_paper(f"wrn-28-{widen}", 10, 3).modules() if isinstance(m, Block)]
    assert [count(b) for b in blocks] == expected


def test_wrn_sides_of_the_maps_and_parameter_order():
    net, sides = models.build("wrn-28-2", 10, 3), []
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.register_forward_hook(lambda m, args, y: sides.append(args[0].shape[2]))
    net(torch.zeros(1, 3, 32, 32))
    assert sides == [32] * 9 + [16] * 8 + [8] * 8
    keys = [k for k, _ in net.named_parameters()]
    assert keys[0] == "conv.weight" and keys[-4:] == ["norm.weight", "norm.bias", "head.weight", "head.bias"]
    block = ["norm1.weight", "norm1.bias", "conv1.weight", "norm2.weight", "norm2.bias", "conv2.weight"]
    assert keys[1:8] == [f"group1.0.{k}" for k in [*block, "shortcut.weight"]]
    assert keys[8:14] == [f"group1.1.{k}" for k in block]


@pytest.mark.parametrize(
    "kind, expected",
    [
        ({"norm": "bn"}, (6_575_370, 6_621_540, 6_672_840, 6_574_218, 6_620_388)),
        ({"norm": "gn"}, (6_575_370, 6_621_540, 6_672_840, 6_574_218, 6_620_388)),
        ({"norm": "none"}, (6_570_890, 6_617_060, 6_668_360, 6_569_738, 6_615_908)),
        (
            {"norm": "none", "conv_bias": False, "linear_bias": False},
            (6_568_640, 6_614_720, 6_665_920, 6_567_488, 6_613_568),
        ),
        ({"norm": "bn", "conv_bias": False}, (6_573_130, 6_619_300, 6_670_600, 6_571_978, 6_618_148)),
    ],
)
def test_resnet9_counts(kind, expected):
    with torch.device("meta"):
        nets = [ResNet9(d, c, **kind) for c, d in ((3, 10), (3, 100), (3, 200), (1, 10), (1, 100))]
    assert tuple(count(n) for n in nets) == expected
    assert buffers(nets[0]) == (4_488 if kind["norm"] == "bn" else 0)


def test_fedmatch_has_no_biases():
    """6,568,640 numbers for each summand, 26,274,560 bytes."""
    net = on_paper("resnet9:fedmatch", 10, 3)
    assert count(net) == 6_568_640 and not any("bias" in name for name, _ in net.named_parameters())


def test_resnet9_names():
    places = ["prep", "layer1_head", "layer1_residual.0", "layer1_residual.1", "layer2", "layer3_head"]
    places += ["layer3_residual.0", "layer3_residual.1"]
    norm = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    keys = [f"{p}.{k}" for p in places for k in ["0.weight", "0.bias", *[f"1.{n}" for n in norm]]]
    net = on_paper("resnet9", 10, 3)
    assert list(net.state_dict()) == [*keys, "linear.weight", "linear.bias"]
    assert [count(getattr(net, p)) for p in ("prep", "layer1_head", "layer1_residual", "layer2", "layer3_head")] == [
        *(1_920, 74_112, 295_680, 295_680, 1_181_184)
    ]


@pytest.mark.parametrize(
    "norm, expected, state",
    [
        ("bn", (11_173_962, 11_220_132, 11_191_791), 9_620),
        ("gn", (11_173_962, 11_220_132, 11_191_791), 0),
        ("none", (11_164_362, 11_210_532, 11_182_191), 0),
    ],
)
def test_resnet18_counts(norm, expected, state):
    nets = [on_paper("resnet18", d, c, norm) for c, d in ((3, 10), (3, 100), (1, 47))]
    assert tuple(count(n) for n in nets) == expected and buffers(nets[0]) == state
    if norm == "bn":
        assert sum(isinstance(m, nn.BatchNorm2d) for m in nets[0].modules()) == 20
        blocks = [count(b) for s in (1, 2, 3, 4) for b in getattr(nets[0], f"stage{s}")]
        assert blocks == [73_984, 73_984, 230_144, 295_424, 919_040, 1_180_672, 3_673_088, 4_720_640]


@pytest.mark.parametrize("name", ["emnist-cnn", "emnist-cnn:rgd"])
def test_emnist_cnn_counts(name):
    assert [count(on_paper(name, d, 1)) for d in (10, 47, 62)] == [1_199_882, 1_204_655, 1_206_590]
    assert [count(on_paper(name, d, 1, "gn")) for d in (47, 62)] == [1_204_847, 1_206_782]


@pytest.mark.parametrize(
    "norm, expected, state",
    [
        ("bn", (94_186, 94_762, 98_959, 100_894, 106_372), 451),
        ("gn", (94_186, 94_762, 98_959, 100_894, 106_372), 0),
        ("none", (93_962, 94_538, 98_735, 100_670, 106_148), 0),
    ],
)
def test_small_cnn_counts(norm, expected, state):
    nets = [on_paper("small-cnn", d, c, norm) for c, d in ((1, 10), (3, 10), (1, 47), (1, 62), (3, 100))]
    assert tuple(count(n) for n in nets) == expected and buffers(nets[0]) == state


def test_vgg11_counts():
    net = on_paper("vgg11", 10, 3)
    assert count(net) == count(on_paper("vgg11", 10, 3, "gn")) == 11_653_770
    assert count(net.body) == 9_225_984


@pytest.mark.parametrize(
    "name, classes, channels, side, expected",
    [
        ("wrn-28-2", 10, 3, 32, 214_353_152),
        ("wrn-28-2", 100, 3, 32, 214_353_152 + 11_520),
        ("wrn-28-8", 10, 3, 32, 3_360_084_992),
        ("resnet9", 10, 3, 32, 379_261_952),
        ("small-cnn", 10, 1, 8, 0.61e6),
        ("small-cnn", 10, 1, 28, 7.45e6),
        ("small-cnn", 10, 1, 32, 9.73e6),
    ],
)
def test_multiply_adds_per_image(name, classes, channels, side, expected):
    net, found = on_paper(name, classes, channels), []
    for m in net.modules():
        if isinstance(m, (nn.Conv2d, nn.Linear)):
            m.register_forward_hook(lambda m, args, y: found.append(m.weight.numel() * y[0, 0].numel()))
    net(torch.empty(1, channels, side, side, device="meta"))
    assert sum(found) == pytest.approx(expected, rel=0 if isinstance(expected, int) else 0.01)


# shapes, default norms, initialisation --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in models.names() if n != "wrn-28-8"])
@torch.no_grad()
def test_every_side_gives_logits(name):
    net = models.build(name, 7, 1).eval()
    for side in SIDES if name != "simple-cnn" else SIDES[2:]:
        x = torch.randn(2, 1, side, side)
        assert net(x).shape == (2, 7)
    assert torch.equal(net(x), net.head(net.features(x)))


@pytest.mark.parametrize("name", models.names())
def test_every_norm_builds_and_shares_parameter_names(name):
    nets = {n: on_paper(name, 10, 3, n) for n in models.NORMS}
    shapes = {n: {k: p.shape for k, p in net.named_parameters()} for n, net in nets.items()}
    assert shapes["bn"] == shapes["gn"] == shapes["sbn"] == shapes["bn-batch"]
    assert buffers(nets["gn"]) == buffers(nets["none"]) == 0 < buffers(nets["sbn"])
    default = on_paper(name, 10, 3)
    assert list(default.state_dict()) == list(nets[models.default_norm(name)].state_dict())


def test_default_norms():
    expected = {"small-cnn": "gn", "resnet9": "bn", "resnet18": "bn", "wrn-28-2": "bn", "wrn-28-8": "bn"}
    assert expected.items() <= {n: models.default_norm(n) for n in models.names()}.items()
    assert models.default_norm("emnist-cnn") == models.default_norm("emnist-cnn:rgd") == "none"


def test_group_counts():
    of = lambda name: {m.num_groups for m in on_paper(name, 10, 3, "gn").modules() if isinstance(m, nn.GroupNorm)}
    assert of("resnet9") == of("resnet18") == of("emnist-cnn:rgd") == {32}
    assert of("small-cnn") == of("emnist-cnn") == of("wrn-28-2") == {8}


@pytest.mark.parametrize("name", ["wrn-28-2", "small-cnn"])
def test_he_initialisation(name):
    torch.manual_seed(0)
    net = models.build(name, 10, 3, "none")
    for m in net.modules():
        if isinstance(m, nn.Conv2d):
            kh, kw = m.kernel_size
            expected, n = math.sqrt(2 / (kh * kw * m.out_channels)), m.weight.numel()
            assert m.weight.std().item() == pytest.approx(expected, rel=4 / math.sqrt(2 * n))
            assert abs(m.weight.mean().item()) < 4 * expected / math.sqrt(n)
            assert m.bias is None or not m.bias.any()
    bound = 1 / math.sqrt(net.head.in_features)
    assert 0.98 * bound < net.head.weight.abs().max() <= bound and not net.head.bias.any()


@pytest.mark.parametrize("name", ["resnet9", "emnist-cnn"])
def test_torch_default_initialisation(name):
    torch.manual_seed(0)
    for m in models.build(name, 10, 3).modules():
        if isinstance(m, (nn.Conv2d, nn.Linear)):
            bound = 1 / math.sqrt(m.weight[0].numel())
            assert 0.95 * bound < m.weight.abs().max() <= bound and m.bias.abs().max() <= bound
            assert m.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
        if isinstance(m, nn.BatchNorm2d):
            assert (m.weight == 1).all() and not m.bias.any() and (m.running_var == 1).all() and m.eps == 1e-5
            assert m.momentum == 0.1


# invariants -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images():
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_wrn_does_not_depend_on_the_order_of_its_batch(images):
    net = models.build("wrn-28-2", 10, 3)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.allclose(net(images)[order], net(images[order]), atol=1e-4)


@torch.no_grad()
def test_wrn_convolutions_see_activations(images):
    net, lowest = models.build("wrn-28-2", 10, 3), []
    for name, m in net.named_modules():
        if isinstance(m, nn.Conv2d) and name != "conv":
            m.register_forward_hook(lambda m, args, y: lowest.append(args[0].min().item()))
    net(images)
    assert len(lowest) == 27 and min(lowest) >= 0


@pytest.mark.parametrize("place", ["conv", "group1.0.conv1", "group2.0.conv1", "group3.3.conv1"])
@torch.no_grad()
def test_wrn_scale_before_a_norm_does_not_matter(images, place):
    net = models.build("wrn-28-2", 10, 3).double()
    x = images.double()
    before = net(x)
    net.get_submodule(place).weight.mul_(2)
    assert torch.allclose(net(x), before, atol=1e-3) and not torch.equal(net(x), before)


@torch.no_grad()
def test_wrn_doubling_the_second_convolution_does_matter(images):
    net = models.build("wrn-28-2", 10, 3)
    before = net(images)
    net.group2[1].conv2.weight.mul_(2)
    assert not torch.allclose(net(images), before, atol=1e-3)


@torch.no_grad()
def test_resnet9_ends_in_max_pooling_by_4(images):
    net = models.build("resnet9", 10, 3).eval()
    x = net.layer1_head(net.prep(images))
    x = x + net.layer1_residual(x)
    x = net.layer3_head(net.layer2(x))
    x = x + net.layer3_residual(x)
    assert x.shape == (4, 512, 4, 4)
    assert torch.equal(net(images), net.linear(F.max_pool2d(x, 4).flatten(1)))


@pytest.mark.parametrize("branch, width", [("layer1_residual", 128), ("layer3_residual", 512)])
@torch.no_grad()
def test_resnet9_silenced_branch_adds_nothing(branch, width):
    net = models.build("resnet9", 10, 3)
    conv, norm = getattr(net, branch)[1][0], getattr(net, branch)[1][1]
    for t in (conv.weight, conv.bias, norm.bias):
        t.zero_()
    assert not getattr(net, branch)(torch.randn(4, width, 4, 4)).any()


@torch.no_grad()
def test_resnet9_bn_weights_load_into_gn():
    bn, gn = models.build("resnet9", 10, 3), models.build("resnet9", 10, 3, "gn")
    missing, unexpected = gn.load_state_dict(bn.state_dict(), strict=False)
    assert not missing and all("running" in k or "tracked" in k for k in unexpected)


@pytest.mark.parametrize("name", ["resnet9", "small-cnn"])
@pytest.mark.parametrize("norm, train, depends", [("bn", True, True), ("bn", False, False), ("gn", True, False), ("none", True, False)])  # fmt: skip
@torch.no_grad()
def test_who_depends_on_the_rest_of_the_batch(name, norm, train, depends, images):
    net = models.build(name, 10, 3, norm).train(train)
    other = torch.cat([images[:1], 2 * images[1:] + 1])
    assert torch.allclose(net(images)[0], net(other)[0], atol=1e-5) != depends


@torch.no_grad()
def test_conv_bias_before_a_norm(images):
    bn, gn = models.build("resnet9", 10, 3), models.build("resnet9", 10, 3, "gn")
    before = bn(images)
    bn.layer2[0].bias.add_(3)
    assert torch.allclose(bn(images), before, atol=1e-4)
    before = gn(images)
    gn.layer2[0].bias.add_(torch.arange(256.0) / 64)
    assert not torch.allclose(gn(images), before, atol=1e-2)


def test_emnist_cnn_of_rgd_drops_whole_channels_before_the_activation():
    net = models.build("emnist-cnn:rgd", 47, 1)
    assert [type(m) for m in net.modules() if "Dropout" in type(m).__name__] == [nn.Dropout2d]
    reddi = models.build("emnist-cnn", 47, 1)
    assert [m.p for m in reddi.modules() if type(m) is nn.Dropout] == [0.25, 0.5]
    net.load_state_dict(reddi.state_dict())
    x = torch.randn(3, 1, 28, 28)
    assert torch.allclose(net.eval()(x), reddi.eval()(x), atol=1e-6)  # without dropout pooling and ReLU commute


# pooling that needs no scatter ----------------------------------------------------------------------------------------


def same_values_and_gradients(one, other, x, exact=True):
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    ya, yb = one(a), other(b)
    g = torch.randn(ya.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(3))
    ya.backward(g), yb.backward(g)
    assert torch.equal(ya, yb)
    assert torch.equal(a.grad, b.grad) if exact else torch.allclose(a.grad, b.grad, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 3, 7, 9), (1, 2, 5, 4)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pooling_by_choice_is_torchs_also_in_ties(shape, layout):
    x = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(2)).double().contiguous(memory_format=layout)
    for ceil in (False, True):
        same_values_and_gradients(lambda t: F.max_pool2d(t, 2, ceil_mode=ceil), lambda t: pool2_by_choice(t, ceil), x)
    same_values_and_gradients(lambda t: F.max_pool2d(t, shape[2:]).flatten(1), lambda t: max_by_choice(t.flatten(2)), x)
    for side in (3, 12):
        same_values_and_gradients(
            lambda t: F.adaptive_max_pool2d(t, side), lambda t: adaptive_by_choice(t, side), x, exact=False
        )


def test_pooling_by_choice_passes_nan_on():
    x = torch.zeros(1, 1, 4, 4)
    x[0, 0, 0, 0] = x[0, 0, 3, 2] = torch.nan
    assert torch.equal(pool2_by_choice(x).isnan(), F.max_pool2d(x, 2).isnan())
    assert max_by_choice(x.flatten(2)).isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["resnet9", "small-cnn", "emnist-cnn", "vgg11"])
def test_gradients_are_deterministic_on_cuda(name):
    def gradients():
        net.zero_grad()
        net(x).square().sum().backward()
        return [p.grad.clone() for p in net.parameters()]

    net = models.build(name, 10, 3, "gn").cuda().to(memory_format=torch.channels_last)
    models.adopt(net).stats = "running"
    x = torch.randn(16, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    plain = gradients()
    torch.use_deterministic_algorithms(True)
    try:
        first, second = gradients(), gradients()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, first, second))
    assert all(torch.allclose(a, b, rtol=1e-2, atol=1e-3 * a.abs().max().item()) for a, b in zip(plain, first))


# names and models of one's own ----------------------------------------------------------------------------------------

OWN = """
from torch import nn

class Net(nn.Module):
    def __init__(self, classes, channels):
        super().__init__()
        self.linear = nn.Linear(channels * 64, classes)
    def forward(self, x):
        return self.linear(x.flatten(1))

class Fixed(Net):
    def __init__(self):
        super().__init__(3, 1)

class Normed(Net):
    def __init__(self, classes, norm="bn", **others):
        super().__init__(classes, **others)
        self.norm = norm

class Odd(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes, 1)

def number(classes):
    return classes
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "my_nets_of_fallow.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize("where", ["my_nets_of_fallow", "./my_nets_of_fallow.py"])
def test_model_of_ones_own(own, where):
    assert models.build(f"{where}:Net", 5, 2, size=8)(torch.zeros(1, 2, 8, 8)).shape == (1, 5)
    assert models.build(f"{where}:Fixed", 5, 2).linear.out_features == 3
    assert models.build(f"{where}:Normed", 5, 1, "gn").norm == "gn"
    assert models.build(f"{where}:Normed", 5, 1).norm == "bn"
    assert models.build(f"{where}:Net", 5, 1, "sbn").linear.out_features == 5


@pytest.mark.parametrize(
    "name, norm, said",
    [
        ("resnet-9", None, "did you mean 'resnet9'"),
        ("emnist-cnn:rdg", None, "did you mean 'emnist-cnn:rgd'"),
        ("transformer", None, "known are"),
        ("resnet9", "bn-bach", "did you mean 'bn-batch'"),
        ("no_such_package.nets:Net", None, "no module 'no_such_package.nets'"),
        ("./no_such.py:Net", None, "no file"),
        ("./my_nets_of_fallow.py:Nett", None, "did you mean 'Net'"),
        ("./my_nets_of_fallow.py:Odd", None, "num_classes"),
        ("./my_nets_of_fallow.py:number", None, "torch.nn.Module"),
        ("./my_nets_of_fallow.py:Net", "gn", "takes no norm"),
    ],
)
def test_mistakes_are_told_in_a_sentence(own, name, norm, said):
    with pytest.raises(UserError) as error:
        models.build(name, 10, 3, norm)
    assert said in str(error.value)


def test_sizes_and_widths_that_cannot_work():
    with pytest.raises(UserError, match="at least 8 pixels"):
        models.build("resnet9", 10, 3, size=4)
    with pytest.raises(UserError, match="groups"):
        SmallCNN(10, 3, "gn", widths=(12, 24, 48), groups=8)
