"""What torchrun's environment says: who is alone, and what cannot be a place among several."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import pytest

from fallow import launched
from fallow.engine import ranks
from fallow.errors import UserError

PLACE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has the environment say this, and nothing else, of processes."""

    def say(**named: str | None) -> None:
        for name in (*PLACE, "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in named.items():
            if value is not None:
                monkeypatch.setenv(name, value)

    return say


def test_a_place_among_several(environment: Any) -> None:
    environment(**PLACE)
    assert (launched.rank(), launched.count(), launched.is_mute(), launched.meeting_place()) == (1, 2, True, ("127.0.0.1", 29500))


@pytest.mark.parametrize("named", [{}, {"RANK": "3"}, {"WORLD_SIZE": "4"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "x"}])
def test_who_is_alone_speaks(named: dict[str, str], environment: Any) -> None:
    environment(**named)
    assert (launched.rank(), launched.count(), launched.is_mute()) == (0, 1, False)


@pytest.mark.parametrize(("named", "said"), [
    ({"MASTER_ADDR": None}, "RANK and WORLD_SIZE say that this is one of 2 processes, and MASTER_ADDR does not say where they meet; start all of them with torchrun"),
    ({"MASTER_PORT": None}, "the environment says MASTER_PORT='', where torchrun would say a whole number from 1 to 65535; "),
    ({"MASTER_PORT": "x"}, "the environment says MASTER_PORT='x'"), ({"MASTER_PORT": "99999"}, "the environment says MASTER_PORT='99999'"),
    ({"WORLD_SIZE": "²"}, "the environment says WORLD_SIZE='²'"), ({"WORLD_SIZE": "0"}, "the environment says WORLD_SIZE='0'"),
    ({"RANK": "2"}, "the environment says RANK='2', where torchrun would say a whole number from 0 to 1; "), ({"RANK": "-1"}, "the environment says RANK='-1'"),
    ({"RANK": ""}, "the environment says RANK=''"),
])  # fmt: skip
def test_what_is_no_place(named: dict[str, Any], said: str, environment: Any) -> None:
    environment(**PLACE | named)
    with pytest.raises(UserError) as error:
        launched.rank()
    assert str(error.value).startswith(said) and not launched.is_mute()


def test_a_wrong_number_of_processes_of_this_machine(environment: Any) -> None:
    environment(LOCAL_WORLD_SIZE="two")
    with pytest.raises(UserError, match="the environment says LOCAL_WORLD_SIZE='two'"):
        launched.of_this_machine()


def test_an_address_where_nobody_is(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "JOINING", 0.1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        for host in ("nowhere.invalid", "127.0.0.1"):
            environment(**PLACE | {"MASTER_ADDR": host, "MASTER_PORT": port})
            with pytest.raises(UserError, match=f"the processes of this run do not meet at {host}:{port} .*; give every process the MASTER_ADDR"):
                ranks.join()


def test_a_leftover_rank_does_not_silence_a_mistake(environment: Any) -> None:
    """It ended with exit code 0 and no word."""
    environment(RANK="3")
    ended = subprocess.run([sys.executable, "-m", "fallow", "run", "data=cifa10"], capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.startswith("error: there is no data set 'cifa10'")
