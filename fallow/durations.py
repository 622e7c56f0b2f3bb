"""Times in words."""

from __future__ import annotations


def format_duration(s: float) -> str:
    """A time in words, to two digits.

    >>> [format_duration(s) for s in (4.2, 50, 100, 5400, 90_000, 3e6)]
    ['4.2 s', '50 s', '1.7 min', '1.5 h', '25 h', '35 days']
    """
    for unit, size, limit in (("s", 1, 90), ("min", 60, 90), ("h", 3600, 36), ("days", 86_400, float("inf"))):
        if s < limit * size:
            value = s / size
            return f"{value:.1f} {unit}" if value < 9.5 else f"{float(f'{value:.2g}'):g} {unit}"
    raise ValueError(s)


def span(shortest: float, longest: float) -> str:
    """From one time to another.

    >>> span(60, 60), span(3600 * 2, 3600 * 5), span(3000, 7200)
    ('60 s', '2.0 to 5.0 h', '50 min to 2.0 h')
    """
    low, high = format_duration(shortest), format_duration(longest)
    if low == high:
        return low
    return f"{low.split()[0] if low.split()[1] == high.split()[1] else low} to {high}"
