"""The one error a user ever sees: what is wrong, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake of the user's, or of the machine's, told in one sentence: cause, then remedy.

    >>> import fallow
    >>> try:
    ...     fallow.run(method="fixmach")
    ... except fallow.UserError as error:
    ...     print(error.cause, "/", error.remedy)
    there is no method 'fixmach' / did you mean 'fixmatch'?
    """

    def __init__(self, cause: str, remedy: str):
        self.cause, self.remedy = _printable(cause).rstrip(". "), _printable(remedy).rstrip(". ")
        super().__init__(f"{self.cause}; {self.remedy}" + ("" if self.remedy.endswith("?") else "."))

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str]]:
        return UserError, (self.cause, self.remedy)  # it may come from another process


def _printable(text: str) -> str:
    """File names may hold bytes that are no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def first_line(error: BaseException) -> str:
    """What an error says, as part of a sentence.

    >>> first_line(ValueError("too large.\\n  in line 3")), first_line(KeyError())
    ('too large', 'KeyError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(". ")


def suggest(word: str, known: Iterable[str]) -> str:
    """The remedy for a name that is not known: the nearest one, those that begin with it, or all of them.

    >>> suggest("fixmach", ["fixmatch", "fedavg"]), suggest("dirichlet", ["iid", "dirichlet-capped", "dirichlet-equal"])
    ("did you mean 'fixmatch'?", "did you mean 'dirichlet-capped' or 'dirichlet-equal'?")
    """
    known = sorted(known)
    near = close(word, known)
    return f"did you mean {near}?" if near else "known are " + ", ".join(known)


def close(word: str, known: Iterable[str]) -> str:
    """The names that may be meant, with `or` between them: one a slip away, those that begin with the word, or the nearest; else empty."""
    known = list(dict.fromkeys(known))
    longer = [name for name in known if len(word) > 2 and name.startswith(word)]
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.85)
    near = near or (longer if 0 < len(longer) <= AT_MOST else difflib.get_close_matches(word, known, n=1, cutoff=0.6))
    *others, last = [repr(name) for name in near] or [""]
    return f"{', '.join(others)} or {last}" if others else last


AT_MOST = 6  # names that a question offers
