"""A result as one sees it: a line, a card for notebooks, a plot."""

from __future__ import annotations

from html import escape
from typing import Any

from fallow.config import Section
from fallow.errors import UserError, suggest
from fallow.runs import warned

SHARES = ("accuracy", "label_ratio", "label_accuracy", "label_accuracy_all")  # shown as percentages
WIDTH, HEIGHT, LEFT, BELOW = 420, 150, 38, 18  # of the curve, in pixels
Row = dict[str, Any]


def line(result: Any) -> str:
    """What it is and where it ended, on one line; where that cannot be read, why not."""
    try:
        s = result.summary
        score = "not tested yet" if s["last"] is None else f"{100 * s['last']:.2f} % after round {s['rounds']}"
        return f"Result({str(result.path)!r}: {s['method']} on {s['data']}, {score}{_unfinished(s)})"
    except UserError as error:
        return f"Result({str(result.path)!r}: {error.cause})"


def _unfinished(summary: Row) -> str:
    return "" if summary["status"] == "finished" else f", {summary['status']}"


def card(result: Any) -> str:
    """HTML for a notebook: scores, curve, the settings that are not the defaults, where it lies."""
    try:
        s, settings, rows = result.summary, changed(result.config), result.metrics
    except UserError as error:
        return f"<div>{escape(str(error))}</div>"
    head = f"<b>{escape(s['method'])}</b> on <b>{escape(s['data'])}</b>"
    if s["last"] is not None:
        head += f": <b>{100 * s['last']:.2f} %</b> after round {s['rounds']} (best {100 * s['best']:.2f} % in round {s['best_round']})"
    against = "".join(f"<div>⚠ {escape(sentence)}</div>" for sentence in warned.sentences(s))
    pairs = " ".join(f"<code>{escape(f'{k}={v}')}</code>" for k, v in settings.items())
    return (
        f'<div style="max-width: 46em; line-height: 1.6">{head}{escape(_unfinished(s))}<br>{against}{curve(rows)}'
        f'<div style="font-size: .9em">{pairs}</div>'
        f'<div style="font-size: .9em; opacity: .75">{escape(str(result.path))} · {s["seconds"]:.0f} s · {escape(str(s.get("device", "")))}</div></div>'
    )


def changed(options: Section) -> dict[str, Any]:
    """The keys with another value than their default, sections with dots."""
    found: dict[str, Any] = {}
    for name, field in type(options).model_fields.items():
        value = getattr(options, name)
        if isinstance(value, Section):
            found |= {f"{name}.{k}": v for k, v in changed(value).items()}
        elif value != field.default and name not in ("method", "data"):
            found[name] = value
    return found


def points(rows: list[Row], column: str) -> list[tuple[int, float]]:
    """(round, value) of each round that has one."""
    return [(row["round"], float(row[column])) for row in rows if isinstance(row.get(column), int | float)]


def curve(rows: list[Row]) -> str:
    """Test accuracy over rounds as a small SVG, in the page's own colour."""
    found = points(rows, "accuracy")
    if len(found) < 2:
        return ""
    rounds, values = [r for r, _ in found], [100 * v for _, v in found]
    low, high = min(values), max(values)
    low, high = (low, high) if high > low else (max(0, low - 1), min(100, low + 1))
    across, up = WIDTH - LEFT - 8, HEIGHT - BELOW - 8

    def at(round: int, value: float) -> str:
        x = LEFT + across * (round - rounds[0]) / (rounds[-1] - rounds[0])
        return f"{x:.1f},{8 + up * (high - value) / (high - low):.1f}"

    def text(x: float, y: float, words: str, anchor: str) -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="11" fill="currentColor">{words}</text>'

    grid = "".join(f'<path d="M{LEFT} {y}h{across}" stroke="currentColor" opacity=".2"/>' for y in (8, 8 + up))
    words = text(LEFT - 5, 12, f"{high:.0f} %", "end") + text(LEFT - 5, 12 + up, f"{low:.0f} %", "end")
    words += text(LEFT, HEIGHT - 3, f"round {rounds[0]}", "start") + text(LEFT + across, HEIGHT - 3, f"{rounds[-1]}", "end")
    path = " ".join(at(r, v) for r, v in zip(rounds, values))
    return (
        f'<svg role="img" aria-label="test accuracy over rounds" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" style="max-width: 100%; height: auto">'
        f'{grid}{words}<polyline points="{path}" fill="none" stroke="#d9730d" stroke-width="2"/></svg>'
    )


def plot(result: Any, column: str, axis: Any) -> Any:
    """A line of a column of the metrics on a matplotlib axis, of a new figure where there is none."""
    rows = result.metrics
    found = points(rows, column) if isinstance(column, str) else []
    if not found:
        known = sorted({name for row in rows for name in row if name != "round" and points(rows, name)})
        raise UserError(f"the run {result.path} has no numbers under {column!r}", suggest(str(column), known))
    if axis is None:
        from matplotlib import pyplot

        axis = pyplot.subplots()[1]
    scale = 100 if column in SHARES else 1
    name = "test accuracy" if column == "accuracy" else column.replace("_", " ")
    axis.plot([r for r, _ in found], [scale * v for _, v in found], label=result.path.name, marker="o" if len(found) == 1 else None)
    axis.set(xlabel="round", ylabel=f"{name} (%)" if scale == 100 else name)
    return axis
