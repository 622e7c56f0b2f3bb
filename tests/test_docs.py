"""The documentation: keys.md is what the code says, links lead somewhere, commands are valid."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE

from fallow.cli.app import words_of
from fallow.methods import REGISTERED
from fallow.recipes.reading import recipe
from fallow.runs import sweep
from fallow.runs.settings import resolve

ROOT = HERE.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
TAKES_A_VALUE = {"--data-dir", "--out", "--name", "--stop-after"}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text_of(page), re.M)
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


def commands(text: str) -> list[list[str]]:
    """The words after `fallow run` of each line that is such a command, flags left out."""
    found = []
    for line in re.findall(r"^ *fallow run(?: .*)?$", text, re.M):
        words = shlex.split(re.split(r" {2,}", line.strip())[0], comments=True)[2:]  # then comes an explanation
        if not any(w.startswith("[") for w in words):  # a synopsis
            flags = {i for i, w in enumerate(words) if w.startswith("--")}
            flags |= {i + 1 for i in flags if words[i] in TAKES_A_VALUE}
            found.append([w for i, w in enumerate(words) if i not in flags])
    return found


def resolved(words: list[str]) -> Any:
    """The settings of a command; of a grid those of its first run, if the others have any."""
    name, keys = words_of(words)
    if grid := sweep.grid(name, keys):
        found = [resolve(recipe(name or "default") if name or "method" not in one else {}, one)[1] for _, one in grid]
        return found[0]
    base = recipe(name) if name else recipe("default") if not keys else {}
    return resolve(base, keys)[1]


def test_keys_are_those_of_the_code() -> None:
    spec = importlib.util.spec_from_file_location("make_keys", DOCS / "make_keys.py")
    assert spec and spec.loader
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert text_of(maker.PAGE) == maker.page(), "run `python docs/make_keys.py`"
    assert all(f"### `{name}`" in maker.page() for name in REGISTERED)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for target in LINK.findall(text_of(page)):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            dead.append(target)
    assert not dead


def test_the_index_has_every_page() -> None:
    linked = {(DOCS / t).resolve() for t in LINK.findall(text_of(DOCS / "index.md"))}
    assert set(DOCS.rglob("*.md")) - {DOCS / "index.md"} <= linked


def test_commands_of_the_readme_are_valid() -> None:
    section = re.search(r"^## Run$(.*?)^## ", text_of(ROOT / "README.md"), re.M | re.S)
    assert section
    found = commands(section[1])
    assert len(found) >= 4
    assert resolved(found[0]).model_dump(include={"data", "clients", "method"}) == {"data": "digits", "clients": 5, "method": "fixmatch"}
    for words in found:
        assert resolved(words).rounds >= 1, words


# the tutorial's commands are run, by test_tutorial.py
@pytest.mark.parametrize("page", sorted({*DOCS.rglob("*.md")} - {DOCS / "tutorial.md"}), ids=lambda p: str(p.relative_to(DOCS)))
def test_commands_of_the_pages_are_valid(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # examples/ is named from there
    for words in commands(text_of(page)):
        assert resolved(words).rounds >= 1, words


def test_the_example_is_explained_as_it_is() -> None:
    """Code in own-method.md and the README is that of examples/my_method.py."""
    example = text_of(ROOT / "examples" / "my_method.py")
    for block in re.findall(r"```python\n(.*?)```", text_of(DOCS / "own-method.md"), re.S):
        assert block in example
    assert example in text_of(ROOT / "README.md")
