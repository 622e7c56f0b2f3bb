"""Keys of other methods: on the command line, and in a recipe that is run with another method."""

from __future__ import annotations

from pathlib import Path

import pytest

from fallow.errors import UserError
from fallow.methods import REGISTERED, find
from fallow.recipes.reading import recipe
from fallow.runs.settings import resolve


def having(key: str) -> str:
    """The methods that have a key, as a sentence lists them."""
    names = [name for name in REGISTERED if key in find(name).Options.model_fields]
    return f"{', '.join(names[:-1])} and {names[-1]}"


WORDS = [
    ({"threshold": 0.5}, "method fedavg has no key 'threshold'; leave it out, " + having("threshold") + " have it."),
    ({"mixup": 1}, "method fedavg has no key 'mixup'; leave it out, " + having("mixup") + " have it."),
    ({"freg_hidden": 1}, "method fedavg has no key 'freg_hidden'; leave it out, feddure has it."),
    ({"weight": 1}, "leave it out, " + having("weight") + " have it (or do you mean 'weights'?)."),
    ({"thresold": 1}, "there is no key 'thresold'; if 'threshold' is meant: " + having("threshold") + " have it, fedavg has not."),
    ({"weigts": 1}, "there is no key 'weigts'; did you mean 'weights'?"),
    ({"zzz": 1}, "there is no key 'zzz'; `fallow run method=fedavg --help` lists those there are."),
]


@pytest.mark.parametrize("keys,sentence", WORDS, ids=lambda v: str(next(iter(v))) if isinstance(v, dict) else "")
def test_it_is_said_who_has_a_key(keys: dict[str, float], sentence: str) -> None:
    for recipe_keys, given in (({}, {"method": "fedavg"} | keys), ({"method": "fedavg"} | keys, {})):  # one's own recipe must be right, too
        with pytest.raises(UserError) as told:
            resolve(recipe_keys, given)
        assert str(told.value).endswith(sentence)


def test_a_recipe_goes_with_another_method(tmp_path: Path) -> None:
    """Without the keys that only its own method has; a mistyped one is a mistake with any."""
    path = tmp_path / "mine.yaml"
    path.write_text("data: digits\nmethod: fixmatch\nthreshold: 0.6\nlr: 0.2\n")
    o = resolve(recipe(str(path)), {"method": "fedavg"})[1]
    assert (o.method, o.lr) == ("fedavg", 0.2) and not hasattr(o, "threshold")
    assert resolve(recipe(str(path)), {"method": "uda"})[1].threshold == 0.6  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="method fedavg has no key 'threshold'"):
        resolve(recipe(str(path)), {"method": "fedavg", "threshold": 0.7})
    path.write_text("method: fixmatch\nthresold: 0.6\n")
    with pytest.raises(UserError, match="if 'threshold' is meant"):
        resolve(recipe(str(path)), {"method": "fedavg"})


def test_a_table_goes_with_a_method_that_has_no_row() -> None:
    words = {"method": "feddb", "data": "svhn", "label_ratio": 0.05, "partition": "dirichlet-equal:0.1"}
    assert resolve(recipe("fedloke/table4"), words)[1].method == "feddb"
