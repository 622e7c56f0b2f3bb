"""Learning-rate schedules: worked numbers of every kind."""

import math

import pytest

from fallow.errors import UserError
from fallow.schedule import Schedule

EPOCH, T = 1024, 16  # FedRGD's epoch in steps, and the steps of one of its rounds


def at(text, epoch, rounds=300 * EPOCH // T):
    """The factor `epoch` epochs of 1,024 steps into a run of rounds of T steps."""
    step = round(epoch * EPOCH)
    return Schedule.parse(text).factor(step // T, step % T, T, rounds)


def cosine(t, rounds=800, text="cosine"):
    return 0.03 * Schedule.parse(text).factor(t, 0, 5, rounds)


def test_semifls_cosine_over_rounds():
    for t, rate in {1: 0.03, 2: 0.0299998843, 100: 0.0288806280, 401: 0.015, 600: 0.0044351320}.items():
        assert cosine(t - 1) == pytest.approx(rate, abs=5e-11)
    assert cosine(798) == pytest.approx(4.6263533e-7, rel=1e-7)
    assert cosine(799) == pytest.approx(1.1565928e-7, rel=1e-7)
    assert cosine(99, rounds=100, text="cosine,horizon=800") == pytest.approx(0.0288806280, abs=5e-11)


def test_feddbs_cosine_over_rounds():
    assert cosine(0) == 0.03
    assert cosine(400) == pytest.approx(0.015)
    assert cosine(799) == pytest.approx(1.157e-7, rel=5e-4)


def test_it_is_constant_within_a_round():
    schedule = Schedule.parse("cosine")
    assert len({schedule.factor(7, k, 5, 20) for k in range(5)}) == 1


def test_the_central_references():
    supervised = Schedule.parse("cosine")  # lr 0.1, 400 epochs to 0: 1/2 half way
    assert [supervised.factor(r, 0, 1, 400) for r in (0, 200, 400)] == pytest.approx([1, 0.5, 0])
    fixmatch, steps = Schedule.parse("cosine-7-16"), 2**20
    factors = [fixmatch.factor(r, 0, steps // 64, 64) for r in (0, 32, 64)]
    assert factors == pytest.approx([1, 0.773010453362737, 0.19509032201612833], abs=1e-14)


def test_fedrgd_on_cifar_as_printed():
    text = "cosine-7-16,warmup=5120,turns=2.3,floor=1e-4"
    assert at(text, 0) == 0
    assert at(text, 2.5) == 0.5
    assert at(text, 5) == 1
    assert at(text, 69.0) > 1e-4 and at(text, 69.2) == 1e-4
    assert at(text, 197.3) == 1e-4 and at(text, 197.5) > 1e-4
    assert at(text, 300) == pytest.approx(0.588, abs=5e-4)


def test_fedrgd_on_cifar_as_released_falls_once():
    text = "cosine-7-16,warmup=5120,horizon=1048576,turns=2.286218,floor=1e-5"
    for epoch, factor in {50: 0.950, 100: 0.784, 150: 0.522, 200: 0.195}.items():
        assert at(text, epoch) == pytest.approx(factor, abs=5e-4)
        as_fixmatch = math.cos(7 * math.pi / 16 * (epoch * EPOCH - 5120) / (204800 - 5120))
        assert at(text, epoch) == pytest.approx(as_fixmatch, abs=1e-5)
    assert at(text, 227.85) > 1e-5 and at(text, 227.87) == 1e-5 == at(text, 300)


def test_the_released_number_of_turns():
    for warmup, turns in ((5120, 2.286218), (75, 2.240660), (0, 2.24)):
        assert turns == pytest.approx(7 / 16 * (1024**2 - warmup) / (200 * 1024 - warmup), abs=5e-7)


def test_fedrgd_on_svhn_revives():
    rounds = 40 * EPOCH // T
    text = "cosine-7-16,warmup=5120,turns=2.286218,floor=1e-5"
    for epoch, factor in {5: 1, 10: 0.518, 30: 0.406, 36: 0.997, 40: 0.622}.items():
        assert at(text, epoch, rounds) == pytest.approx(factor, abs=5e-4)
    assert at(text, 12.65, rounds) > 1e-5 and at(text, 12.67, rounds) == 1e-5
    assert at(text, 27.95, rounds) == 1e-5 and at(text, 27.97, rounds) > 1e-5


def test_fedrgd_on_emnist():
    rounds = 100 * EPOCH // T
    for text in ("cosine-7-16", "cosine-7-16,turns=0.4375,floor=1e-6"):
        for epoch, factor in {0: 1, 25: 0.9415, 50: 0.7730, 75: 0.5141, 100: 0.1951}.items():
            assert at(text, epoch, rounds) == pytest.approx(factor, abs=5e-5)


def test_fedrgds_self_training_hardly_falls():
    text = "cosine-7-16,horizon=1048576,turns=2.24,floor=1e-5"
    assert Schedule.parse(text).factor(0, 300 * 81, 16, 1) == pytest.approx(0.987, abs=5e-4)


def test_fedrgds_table_2():
    text = "cosine-7-16,warmup=75,horizon=15360,turns=2.24066,floor=1e-5"
    server = Schedule.parse(text)
    assert server.factor(0, 0, 5, 600) == 0
    assert server.factor(7, 2, 5, 600) == pytest.approx(37 / 75)
    assert server.factor(15, 0, 5, 600) == 1
    assert server.factor(600, 0, 5, 600) == pytest.approx(0.222, abs=5e-4)
    assert server.factor(640, 0, 5, 600) == pytest.approx(0.131, abs=5e-4)
    clients = Schedule.parse(text.replace("15360", "3000"))
    assert clients.factor(300, 0, 5, 600) == 1e-5  # 1,500 of 3,000 steps: on the floor
    assert clients.factor(600, 0, 5, 600) > 0.5  # and risen again at the end


def test_constant_with_and_without_warm_up():
    assert Schedule.parse("constant").factor(3, 1, 5, 10) == 1
    warm = Schedule.parse("constant,warmup=4")
    assert [warm.factor(r, 0, 5, 10) for r in (0, 2, 4, 9)] == [0, 0.5, 1, 1]


@pytest.mark.parametrize("text", ["cosinus", "cosine,speed=2", "cosine,warmup=", "cosine,by=day", "cosine,warmup=x"])
def test_a_schedule_that_is_not_known_is_a_users_error(text):
    with pytest.raises(UserError):
        Schedule.parse(text)
