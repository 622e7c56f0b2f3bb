"""YAML from anywhere, bounded: aliases, depth, length and numbers that would take the machine's time or memory."""

from __future__ import annotations

from typing import Any

import yaml

LENGTH = 4 << 20  # characters
NODES = 100_000  # after aliases are expanded
DEPTH = 50
DIGITS = 1000
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class Loader(yaml.SafeLoader):
    """Counts what it composes, an alias as often as all that it stands for; an alias of something unfinished is refused."""

    def __init__(self, text: str):
        super().__init__(text)
        self.depth = self.count = 0
        self.sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.depth >= DEPTH:
            raise self._refusal(f"more than {DEPTH} levels inside each other")
        alias, before = self.check_event(yaml.AliasEvent), self.count
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        if alias and id(node) not in self.sizes:
            raise self._refusal("an alias of what it stands in")
        self.count += self.sizes[id(node)] if alias else 1
        self.sizes[id(node)] = self.count - before
        if self.count > NODES:
            raise self._refusal(f"more than {NODES:,} values, aliases counted as what they stand for")
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        self._check_once(node)
        return super().construct_mapping(node, deep)

    def _check_once(self, node: Any) -> None:
        """YAML itself takes the last of two keys of one name and loses the other in silence."""
        seen = set()
        for key, _ in getattr(node, "value", ()) if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"a second key {key.value[:80]!r}", key.start_mark)
            seen.add((key.tag, getattr(key, "value", None)) if isinstance(key, yaml.ScalarNode) else id(key))

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        if node.tag in NUMBERS and len(node.value) > DIGITS:  # of 1:59:59 Python would make a number in quadratic time
            raise yaml.constructor.ConstructorError(None, None, f"a number of more than {DIGITS:,} digits", node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
            # a date of month 13, `!!int x`
            raise yaml.constructor.ConstructorError(None, None, "a value that cannot be read", node.start_mark) from error

    def _refusal(self, why: str) -> yaml.YAMLError:
        return yaml.composer.ComposerError(None, None, why, self.peek_event().start_mark)


def safe_yaml(text: str) -> Any:
    """The value of a YAML text; yaml.YAMLError where it is none, or too much."""
    if len(text) > LENGTH:
        raise yaml.YAMLError(f"more than {LENGTH >> 20} MiB")
    loader = Loader(text)
    try:
        return loader.get_single_data()
    except RecursionError:
        raise yaml.YAMLError("too many levels inside each other") from None
    finally:
        loader.dispose()


def why_not(error: yaml.YAMLError) -> str:
    """Where and why a text is no YAML, in words."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    ours = type(error) is yaml.YAMLError or str(problem).startswith(("more than", "an alias", "a value", "a number", "a second key"))
    return (f" in line {mark.line + 1}" if mark else "") + (f" ({problem})" if ours else "")
