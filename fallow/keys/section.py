"""A key and what it may be; keys in sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from fallow.errors import UserError, suggest

MOST = 10**9  # of anything that is counted
LARGEST = 1e38  # what float32 holds


Keys: TypeAlias = dict[str, Any]  # of the configuration, and their values


def key(default: Any, meaning: str, symbol: str = "", **limits: Any) -> Any:
    """A key of the configuration: default, meaning, the paper's symbol, limits (`ge=0`, ...).

    >>> from fallow import Method, key
    >>> class Sharp(Method):
    ...     class Options(Method.Options):
    ...         sharpness: float = key(0.1, "weight of the entropy", "beta", ge=0)
    >>> Sharp.Options().sharpness
    0.1
    """
    return Field(default, description=meaning, json_schema_extra={"symbol": symbol} if symbol else None, **limits)


def with_defaults(kind: type[S], defaults: Mapping[str, Any]) -> type[S]:
    """The same keys, some with another default; a section's by their names in it."""
    fields: dict[str, Any] = {}
    for name, value in defaults.items():
        if name not in kind.model_fields:
            raise UserError(f"there is no key {name!r} to have another default", suggest(name, list(kind.model_fields)))
        old = kind.model_fields[name]
        if isinstance(old.default, Section):
            if not isinstance(value, Mapping):
                raise UserError(f"{name} is a section", "give its keys and their other defaults, as a dict")
            section = with_defaults(type(old.default), value)
            fields[name] = (section, Field(section(), description=old.description))
            continue
        limited = Annotated[(old.annotation, *old.metadata)] if old.metadata else old.annotation  # type: ignore[valid-type]
        fields[name] = (limited, Field(value, description=old.description, json_schema_extra=old.json_schema_extra))
    return create_model(kind.__name__, __base__=kind, __module__=kind.__module__, **fields)


def listed(value: Any) -> Any:
    """`a,b` as a list, as one types it; none as an empty one."""
    return [w.strip() for w in value.split(",") if w.strip()] if isinstance(value, str) else () if value is None else value


S = TypeVar("S", bound="Section")


class Section(BaseModel):
    """Some keys. A key whose default is a section has the section's keys behind a dot."""

    prefix: ClassVar[str] = ""
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), validate_default=False, allow_inf_nan=False)

    @model_validator(mode="after")
    def _not_endless(self) -> Section:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, int) and value > MOST and not name.endswith("seed"):
                raise UserError(f"{self.prefix}{name} is larger than {MOST:,}", "give a smaller count")
        return self
