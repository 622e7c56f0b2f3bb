"""A comparison as text: for a terminal, Markdown, LaTeX (booktabs) and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from fallow import disk, targets
from fallow.errors import UserError
from fallow.report.comparison import Comparison

COLUMNS = ("row", "column", "statistic", "mean", "std", "n", "seeds", "best", "difference", "p")
MADE = "Fallow compare"


def printed(c: Comparison) -> list[tuple[str, ...]]:
    """A title row and the rows below it, the best marked with a star; differences beneath."""
    best, heads = c.best(), [", ".join(head) for head in c.columns]
    title = ("", *heads)
    body = []
    for row, name in enumerate(c.rows):
        cells = []
        for column in range(len(heads)):
            at = (row, column)
            cells.append(_both(c.shown(at) + (" *" if at in best else ""), c.published.get(at)))
        body.append((name, *cells))
    return [title, *body]


def _both(ours: str, published: str | None) -> str:
    return " ".join(filter(None, [ours, f"[{published}]" if published else ""]))


def differences(c: Comparison) -> list[tuple[str, ...]]:
    """The same for the differences; nothing where there are none."""
    found = c.differences()
    if not found:
        return []
    heads = [", ".join(head) for head in c.columns]
    rows = [row for row in range(len(c.rows)) if any(at[0] == row for at in found)]
    body = [(c.rows[row], *[str(found.get((row, column), "")) for column in range(len(heads))]) for row in rows]
    return [(f"less {c.rows[c.against]}", *heads), *body]


def markdown(c: Comparison) -> str:
    best = c.best()
    title, *body = printed(c)
    for row, cells in enumerate(body):
        texts = [(_md(c.shown((row, i))), c.published.get((row, i))) for i in range(len(cells) - 1)]
        body[row] = (_md(cells[0]), *[_both(f"**{text}**" if (row, i) in best else text, given) for i, (text, given) in enumerate(texts)])
    parts = [f"{c.caption()}.", _pipes([tuple(map(_md, title)), *body])]
    if gaps := differences(c):
        parts.append(_pipes([tuple(map(_md, line)) for line in gaps]))
    return "\n\n".join([*parts, *map(_md, c.below()), f"<!-- {MADE} -->"]) + "\n"


def _pipes(lines: Sequence[tuple[str, ...]]) -> str:
    title, *body = lines
    rule = ("---", *["---:"] * (len(title) - 1))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (title, rule, *body))


def _md(text: str) -> str:
    return re.sub(r"([\\|*_`<\[])", r"\\\1", text)


def latex(c: Comparison) -> str:
    """A tabular for the booktabs package; settings that neighbours share stand above both."""
    best, width = c.best(), len(c.columns)
    lines = []
    for row, name in enumerate(c.rows):
        cells = []
        for column in range(width):
            at = (row, column)
            text, given = tex(c.shown(at)), c.published.get(at)
            cells.append(_both(f"\\textbf{{{text}}}" if at in best else text, given and tex(given)))
        guard = "{}" if name[:1] in ("[", "*") else ""  # after the line above they would be an argument of its end
        lines.append(" & ".join([guard + tex(name), *cells]) + r" \\")
    about = [f"{MADE}; needs \\usepackage{{booktabs}}", f"{c.caption()}.", *c.below()]
    gaps = [f"{line[0]}: {', '.join(f'{head} {gap}' for head, gap in zip(found[0][1:], line[1:]) if gap)}" for found in [differences(c)] for line in found[1:]]
    comments = [f"% {_one_line(text)}" for text in [*about, *gaps]]
    spec = "l" + "r" * width
    return "\n".join([*comments, f"\\begin{{tabular}}{{{spec}}}", r"\toprule", *_head(c), r"\midrule", *lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _head(c: Comparison) -> list[str]:
    """A line for each key that tells columns apart; in all but the last neighbours that agree are one."""
    lines, depth = [], len(c.columns[0])
    for level in range(depth):
        spans: list[tuple[str, int]] = []
        for column, head in enumerate(c.columns):
            text = head[level]
            joins = level < depth - 1 and spans and c.columns[column - 1][: level + 1] == head[: level + 1]
            spans = [*spans[:-1], (text, spans[-1][1] + 1)] if joins else [*spans, (text, 1)]
        first = "method" if level == depth - 1 else ""
        cells = [tex(text) if count == 1 and level == depth - 1 else f"\\multicolumn{{{count}}}{{c}}{{{tex(text)}}}" for text, count in spans]
        lines.append(" & ".join([first, *cells]) + r" \\")
        if level < depth - 1:
            at, rules = 2, []
            for _, count in spans:
                rules.append(f"\\cmidrule(lr){{{at}-{at + count - 1}}}")
                at += count
            lines.append("".join(rules))
    return lines


TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$", "…": r"\ldots{}", "−": r"$-$",
}  # fmt: skip


def tex(text: str) -> str:
    """A text as LaTeX prints it.

    >>> tex("a_b & 5 % ± {x}")
    'a\\\\_b \\\\& 5 \\\\% $\\\\pm$ \\\\{x\\\\}'
    """
    return "".join(TEX.get(letter, letter if letter.isprintable() else " ") for letter in text)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def table(c: Comparison) -> str:
    """CSV, a line for each cell."""
    text = io.StringIO()
    write = csv.writer(text, lineterminator="\n").writerow
    write(COLUMNS)
    best, gaps = c.best(), c.differences()
    for (row, column), entry in sorted(c.cells.items()):
        gap = gaps.get((row, column))
        write((
            c.rows[row], ", ".join(c.columns[column]), c.statistic, f"{entry.mean:.4f}", "" if entry.std is None else f"{entry.std:.4f}", entry.n,
            " ".join(map(str, sorted(entry.values))), str((row, column) in best).lower(), "" if gap is None else f"{gap.mean:.4f}",
            "" if gap is None or gap.p is None else f"{gap.p:.6g}",
        ))  # fmt: skip
    return text.getvalue()


FORMATS: dict[str, Callable[[Comparison], str]] = {"md": markdown, "csv": table, "tex": latex}


def format_of(name: str | None, out: Path | None) -> str | None:
    """The format that is named, or that a file's name ends in."""
    if name is None and out is None:
        return None
    word = (name or str(out and out.suffix)).lower().lstrip(".")
    word = {"markdown": "md", "latex": "tex"}.get(word, word)
    if word not in FORMATS:
        what = f"there is no format {name!r}" if name else f"a table cannot be written as {out and out.name!r}"
        raise UserError(what, f"choose one with --format: {', '.join(FORMATS)}" if name else "end the name in .md, .csv or .tex, or say --format")
    return word


def write(text: str, path: Path, force: bool = False) -> None:
    targets.file(path, "compare", force)
    disk.write(path, text, "choose another with -o")
