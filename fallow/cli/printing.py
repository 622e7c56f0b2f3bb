"""What several commands print alike: a run's result, a comparison."""

from __future__ import annotations

from typing import Any

from fallow.cli.app import console, silent


def print_result(result: Any, quiet: bool = False) -> None:
    from fallow.measure import told
    from fallow.runs import warned

    if silent:
        return
    s = result.summary
    if s["last"] is not None:
        console.say(
            f"accuracy {100 * s['last']:.2f} % after round {s['rounds']} (best {100 * s['best']:.2f} % in round {s['best_round']})"
        )
    for sentence in [] if quiet else told.sentences(s):
        console.say(sentence)
    for sentence in warned.sentences(s):
        console.warn(sentence)
    if s["status"] != "finished":
        console.say(f"stopped after round {s['rounds']}; go on with: fallow resume {result.path}")
    console.say(f"run: {result.path}")


def print_forecast(jobs: Any, settled: Any) -> None:
    """What these runs would be, of which none is made."""
    from fallow.runs import forecast

    with console.status("reading the data, measuring how fast this machine trains"):
        found = forecast.foresee(jobs, settled)
    console.rows(forecast.rows(found))
    for line in forecast.lines(found):
        console.say(line)


def print_comparison(found: Any) -> None:
    from fallow.report import written

    console.say(found.caption())
    console.rows(written.printed(found))
    if gaps := written.differences(found):
        console.print()
        console.rows(gaps)
    for sentence in found.below():
        console.say(sentence.replace("Marked", "Marked *", 1))
