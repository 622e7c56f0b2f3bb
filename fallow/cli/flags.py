"""Keys written as flags (`--rounds 3`, `--rounds=3`) are taken as what they mean, `rounds=3`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fallow.errors import UserError, close

COMMANDS = ("run", "split", "resume")  # that take keys


def understood(words: Sequence[str], command: Any) -> list[str]:
    """The words of a command line, keys that were written as flags as `key=value` in their places; `help run` as `run --help`."""
    if words and words[0] == "help":
        return [*words[1:], "--help"]
    at = next((i for i, word in enumerate(words) if not word.startswith("-")), len(words))
    name = words[at] if at < len(words) else ""
    if name not in COMMANDS:
        return list(words)
    flags: dict[str, bool] = {flag: bool(option.is_flag) for option in command.commands[name].params for flag in option.opts if flag.startswith("-")}
    flags["--help"] = True
    out, rest = list(words[: at + 1]), list(words[at + 1 :])
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag in flags or not flag.startswith("--"):
            out.append(word)
            if not equals and not flags.get(flag, True) and rest:
                out.append(rest.pop(0))  # the flag's value
            continue
        key = flag[2:].replace("-", "_")
        if not _is_key(key):
            raise UserError(f"there is no flag or key {flag}", _nearest(flag, flags, name))
        if equals:
            out.append(f"{key}={value}")
        elif rest and "=" not in rest[0] and not rest[0].startswith("--"):
            out.append(f"{key}={rest.pop(0)}")
        elif _is_switch(key):
            out.append(f"{key}=true")
        else:
            raise UserError(f"{flag} has no value", f"write {key}=VALUE")
    return out


def _nearest(flag: str, flags: Iterable[str], command: str) -> str:
    from fallow.config import Config

    known = [f"--{name.replace('_', '-')}" for kind in (Config, *_methods()) for name in kind.model_fields]
    near = close(flag, [*flags, *known])
    return f"did you mean {near}?" if near else f"`fallow {command} --help` lists those there are"


def _is_key(name: str) -> bool:
    from fallow.config import Config

    return name == "defaults" or name.partition(".")[0] in Config.model_fields or any(name in kind.model_fields for kind in _methods())


def _is_switch(name: str) -> bool:
    from fallow.config import Config, takes

    kinds = [kind for kind in ([Config] if name in Config.model_fields else _methods()) if name in kind.model_fields]
    return any("true" in takes(kind.model_fields[name].annotation) for kind in kinds)


def _methods() -> list[Any]:
    from fallow.methods import REGISTERED, find

    return [find(name).Options for name in REGISTERED]
