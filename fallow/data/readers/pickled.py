"""CIFAR's pickles without an unpickler: a reader of just the instructions and objects that those files hold.

Nothing named in a file is looked up or called. A name is compared with the few that CIFAR's files have, and what they
would make is made here: a dict of text, whole numbers, lists of them, and one array of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

CODECS = ("_codecs", "encode")
NDARRAY, DTYPE = ("numpy", "ndarray"), ("numpy", "dtype")
RECONSTRUCT = (("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"))
KNOWN = {CODECS, NDARRAY, DTYPE, *RECONSTRUCT}
INSTRUCTIONS = 100_000  # allowed in any file, and one more for each hundred bytes: an image has 3072 and about ten


class Refused(ValueError):
    """The file is no pickle such as CIFAR's."""


class Name(tuple[str, str]):
    """What a file calls a function or a class; never the thing itself."""


class Bytes:
    """numpy's dtype of unsigned bytes, the only one there is here."""


class Array:
    """An array that the file has begun; `pixels` come with its state."""

    pixels: np.ndarray | None = None


MARK = object()


def parsed(content: bytes) -> Any:
    """What the pickle holds."""
    return _Reader(content).value()


class _Reader:
    def __init__(self, content: bytes):
        self.content, self.at = content, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.made = 0  # bytes that instructions have copied, each of which may be named again and again

    def value(self) -> Any:
        for _ in range(INSTRUCTIONS + len(self.content) // 100):
            code = self._take(1)[0]
            if code == STOP:
                return self._pop()
            step = STEPS.get(code)
            if step is None:
                raise Refused(f"it has the instruction {code:#04x}, which no CIFAR file has")
            step(self)
        raise Refused("it has more instructions than any CIFAR file")

    def _take(self, count: int) -> bytes:
        start, self.at = self.at, self.at + count
        if self.at > len(self.content):
            raise Refused("it ends in the middle")
        return self.content[start : self.at]

    def _number(self, count: int, signed: bool = False) -> int:
        return int.from_bytes(self._take(count), "little", signed=signed)

    def _line(self) -> str:
        end = self.content.find(b"\n", self.at, self.at + 256)
        if end < 0:
            raise Refused("it ends in the middle")
        return self._take(end + 1 - self.at)[:-1].decode("ascii")

    def _pop(self) -> Any:
        if not self.stack or self.stack[-1] is MARK:
            raise Refused("an instruction has nothing to work on")
        return self.stack.pop()

    def _pops(self, count: int) -> tuple[Any, ...]:
        return tuple(self._pop() for _ in range(count))[::-1]

    def _marked(self) -> list[Any]:
        """All above the last mark."""
        for at in range(len(self.stack) - 1, -1, -1):
            if self.stack[at] is MARK:
                found = self.stack[at + 1 :]
                del self.stack[at:]
                return found
        raise Refused("an instruction has nothing to work on")

    def _push(self, value: Any) -> None:
        self.stack.append(value)

    def _put(self, key: int) -> None:
        value = self._pop()
        self.memo[key] = value
        self._push(value)

    def _get(self, key: int) -> None:
        if key not in self.memo:
            raise Refused("it names an object that it has not made")
        self._push(self.memo[key])

    def _proto(self) -> None:
        if (protocol := self._take(1)[0]) > 5:
            raise Refused(f"it is a pickle of protocol {protocol}")

    def _name(self, module: Any, name: Any) -> None:
        if (module, name) not in KNOWN:
            raise Refused(f"it asks for {module}.{name}, which no CIFAR file does")
        self._push(Name((module, name)))

    def _stack_name(self) -> None:
        module, name = self._pops(2)
        if type(module) is not str or type(name) is not str:
            raise Refused("it asks for a thing without a name")
        self._name(module, name)

    def _append(self, values: list[Any]) -> None:
        _expect(type(into := self._pop()) is list, "it adds to what is no list")
        into += values
        self._push(into)

    def _set(self, pairs: list[Any]) -> None:
        _expect(type(into := self._pop()) is dict and len(pairs) % 2 == 0, "it adds to what is no dict")
        for key, value in zip(pairs[::2], pairs[1::2]):
            _expect(type(key) in (str, bytes), "it has a key that is no text")
            into[key] = value
        self._push(into)

    def _reduce(self) -> None:
        name, given = self._pops(2)
        _expect(type(name) is Name and type(given) is tuple, "it calls what is no function")
        if name == CODECS:
            self._push(self._latin1(given))
        elif name == DTYPE:
            _expect(len(given) == 3 and _text(given[0]) in ("u1", "|u1"), "its array is not of unsigned bytes")
            self._push(Bytes())
        else:
            _expect(name in RECONSTRUCT and len(given) == 3 and type(given[0]) is Name and given[0] == NDARRAY, "it calls what no CIFAR file does")
            self._push(Array())

    def _latin1(self, given: tuple[Any, ...]) -> bytes:
        _expect(len(given) == 2 and type(given[0]) is str and given[1] == "latin1", "it asks for another encoding than latin1")
        self.made += len(given[0])
        _expect(self.made <= len(self.content), "it makes more bytes than it has")
        return given[0].encode("latin1")

    def _build(self) -> None:
        made, state = self._pops(2)
        if type(made) is Bytes:
            _expect(type(state) is tuple and len(state) >= 5, "its dtype is no plain one")
            _expect(_text(state[1]) in ("|", "=", "<") and state[2:5] == (None, None, None), "its dtype is no plain one")
        else:
            _expect(type(made) is Array and made.pixels is None, "it changes what no CIFAR file does")
            made.pixels = _pixels(state)
        self._push(made)


def _pixels(state: Any) -> np.ndarray:
    """An array of numpy's own state (version, shape, dtype, whether columns come first, bytes), every part of it checked."""
    _expect(type(state) is tuple and len(state) == 5, "its array is not as numpy writes it")
    _, shape, kind, columns_first, raw = state
    _expect(type(kind) is Bytes and type(raw) is bytes and type(columns_first) in (bool, int), "its array is not of unsigned bytes")
    _expect(type(shape) is tuple and len(shape) <= 4 and all(type(n) is int and n >= 0 for n in shape), "its array has no shape")
    _expect(math.prod(shape) == len(raw), "its array has another count of bytes than its shape promises")
    return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if columns_first else "C")


def _expect(right: bool, why: str) -> None:
    if not right:
        raise Refused(why)


def _text(value: Any) -> Any:
    return value.decode("latin1") if type(value) is bytes else value


STOP = ord(".")
STEPS: dict[int, Callable[[_Reader], None]] = {
    0x80: _Reader._proto,
    0x95: lambda r: _expect(r._number(8) <= len(r.content), "it ends in the middle"),  # a frame
    ord("K"): lambda r: r._push(r._take(1)[0]),
    ord("M"): lambda r: r._push(r._number(2)),
    ord("J"): lambda r: r._push(r._number(4, signed=True)),
    ord("q"): lambda r: r._put(r._take(1)[0]),
    ord("r"): lambda r: r._put(r._number(4)),
    0x94: lambda r: r._put(len(r.memo)),
    ord("h"): lambda r: r._get(r._take(1)[0]),
    ord("j"): lambda r: r._get(r._number(4)),
    ord("U"): lambda r: r._push(r._take(r._take(1)[0])),  # Python 2's text, which is bytes
    ord("T"): lambda r: r._push(r._take(r._number(4))),
    ord("C"): lambda r: r._push(r._take(r._take(1)[0])),
    ord("B"): lambda r: r._push(r._take(r._number(4))),
    ord("X"): lambda r: r._push(r._take(r._number(4)).decode()),
    0x8C: lambda r: r._push(r._take(r._take(1)[0]).decode()),
    ord("N"): lambda r: r._push(None),
    0x88: lambda r: r._push(True),
    0x89: lambda r: r._push(False),
    ord("("): lambda r: r._push(MARK),
    ord(")"): lambda r: r._push(()),
    ord("]"): lambda r: r._push([]),
    ord("}"): lambda r: r._push({}),
    ord("t"): lambda r: r._push(tuple(r._marked())),
    0x85: lambda r: r._push(r._pops(1)),
    0x86: lambda r: r._push(r._pops(2)),
    0x87: lambda r: r._push(r._pops(3)),
    ord("a"): lambda r: r._append([r._pop()]),
    ord("e"): lambda r: r._append(r._marked()),
    ord("s"): lambda r: r._set([*r._pops(2)]),
    ord("u"): lambda r: r._set(r._marked()),
    ord("c"): lambda r: r._name(r._line(), r._line()),
    0x93: _Reader._stack_name,
    ord("R"): _Reader._reduce,
    ord("b"): _Reader._build,
}
