"""What lies in `results/` and `bench/` is what the code makes of it."""

from __future__ import annotations

import pickle
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import checks, five, results
from fallow.cli import app
from fallow.errors import UserError
from fallow.recipes.reading import recipe
from fallow.runs.settings import differences, resolve
from fallow.tables.grids import Grids
from fallow.tables.lines import read
from fallow.trees import parse_pairs, read_yaml

RESULTS = Path(__file__).parents[1] / "results"


@pytest.mark.parametrize("data", five.DATA)
@pytest.mark.parametrize("method", five.METHODS)
def test_a_reference_differs_from_its_method_in_nothing_it_can_share(data: str, method: str) -> None:
    ours, reference = (resolve({}, five.Cell(data, method, r, 0).keys())[1] for r in (False, True))
    for key in ("labels", "label_count", "partition", "unlabelled_partition", "clients", "model", "norm", "rounds", "steps"):
        assert getattr(ours, key) == getattr(reference, key), key
    for key in ("epochs", "server_steps", "batch", "optimizer", "lr", "schedule", "clip", "clip_value", "momentum"):
        assert getattr(ours, key) == getattr(reference, key), key
    assert (reference.method, reference.average, reference.labeller, reference.debias) == ("fedavg", "mean", None, False)


def test_the_committed_tables_are_those_of_the_committed_runs() -> None:
    page = (RESULTS / "README.md").read_text()
    assert (results.page(RESULTS) == page), "run `python -m bench.results`"


def test_a_table_from_the_committed_files_says_what_its_star_means() -> None:
    words = ["table", "feddure", "1", "--from", str(RESULTS), "--only", "data=cifar10", "--only", "method=FedDure"]
    said = {n: CliRunner().invoke(app, [*words, "--only", f"setting={n}"]).stdout for n in ("cifar10 iid,dir", "cifar10 dir,dir")}
    assert ["* within one standard deviation" in text for text in said.values()] == [True, False]
    assert "+0.20 *" in said["cifar10 iid,dir"]


@pytest.mark.parametrize("std", [None, 0.3, 2.5])
def test_what_counts_as_within(std: float | None) -> None:
    """1.5 points or the paper's std, whichever is more; better than that is another word."""
    close = 2.5 if std == 2.5 else 1.5
    given = (-close - 0.01, -close, 0.0, close, close + 0.01)
    assert [results.verdict(apart, std) for apart in given] == ["**no**", "yes", "yes", "yes", "above"]


def test_the_commands_of_the_tables_make_those_runs() -> None:
    """Each printed command has the settings of the first run of its line."""
    seen = 0
    for place in (RESULTS, *(RESULTS / "readings").iterdir()):
        for paper, table in results.tables(place):
            grids = Grids(paper, table)
            for line in read(grids, place):
                for path, seed in [*zip(line.runs, line.seeds)][:1]:
                    _, run, name, *pairs = shlex.split(results.command(grids, line.entry, path, seed).strip("`"))
                    assert run == "run"
                    made = resolve(recipe(name), parse_pairs([*pairs, f"seed={seed}"]))[1].model_dump(mode="json")
                    assert not differences(read_yaml(path / "config.yaml"), made), path
                    seen += 1
    assert seen > 15


def test_a_users_error_can_cross_processes() -> None:
    error = pickle.loads(pickle.dumps(UserError("this is wrong", "do that")))
    assert isinstance(error, UserError) and str(error) == "this is wrong; do that."


def test_two_trees_are_timed_round_by_round() -> None:
    """A tree beside itself: each of its rounds is counted once."""
    keys = {"data": "digits", "device": "cpu", "clients": 2, "steps": 1, "label_count": 20, "rounds": 9}
    one = checks.Tree(Path(__file__).parents[1], "digits", keys)
    try:
        times = [one.round() for _ in range(2)]
    finally:
        one.end()
    assert all(wall > 0 and cpu > 0 for wall, cpu in times)
    pairs = [(1.0, 1.0), (2.0, 4.0), (2.0, 2.0)], [(1.1, 1.0), (2.0, 4.2), (2.2, 2.04)]
    said = checks.ratios(*pairs)
    assert "2.0000 before, 2.0000 now, +10.00 %" in said[0] and "+2.00 %" in said[1]
