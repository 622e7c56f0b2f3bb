"""`fallow resume NAME rounds=40`: a run that is stopped or finished gets more rounds.

Its settings change, by intent: origin.json notes after which round, and the checksums of the settings before and after, so that
what was sealed before is still known for the run's own. Written first the note, then config.yaml: a kill between leaves the old run.
"""

from __future__ import annotations

import re
from typing import Any

from fallow import disk, trees
from fallow.config import Config
from fallow.errors import UserError
from fallow.keys.section import MOST
from fallow.runs.folder import RunFolder
from fallow.runs.origin import Origin
from fallow.runs.settings import EDITABLE, keys_sha256, stated
from fallow.schedule import Schedule


def prolonged(folder: RunFolder, rounds: Any) -> str:
    """Gives the run that many rounds in all; a sentence about what comes of it, or none where it has them."""
    if type(rounds) is not int or not 1 <= rounds <= MOST:
        raise UserError(f"rounds={trees.shown(rounds)} is no count of rounds", "give a whole number, such as rounds=40")
    with folder.locked():
        options, origin = stated(folder.config), Origin.read(folder.path)
        was, done = options.rounds, folder.committed()
        if rounds == was:
            return ""
        if rounds < was:
            raise UserError(f"the run {folder.path} has {was} rounds, and can be made longer only", "use --stop-after to end it earlier")
        if origin is None or (not done and folder.summary.exists()):
            raise UserError(f"{folder.path} keeps no record of its rounds, so it cannot be made longer", "start a new run with more rounds")
        folder.check_settings()
        origin.check_settings(options, EDITABLE)
        text = folder.config.read_text()
        longer, count = re.subn(r"(?m)^rounds: \d+$", f"rounds: {rounds}", text)
        if count != 1:
            raise UserError(f"{folder.config} does not say `rounds: {was}` on a line", "restore it from a copy, or start a new run")
        keys = trees.read_yaml(folder.config)
        digests = [keys_sha256(keys), keys_sha256(keys | {"rounds": rounds})]
        origin.note({"after_round": done, "rounds": [was, rounds], "config": digests}, folder.path)
        disk.write(folder.config, longer)
    return f"{was} rounds become {rounds}; {done} are done{_told(options, done, rounds)}"


def _told(options: Config, done: int, rounds: int) -> str:
    """Whether the end is that of a run that had these rounds from its beginning."""
    if not done:
        return ""
    schedule = Schedule.parse(options.schedule)
    turns = getattr(options, "tsa", "none")
    if schedule.kind != "constant" and schedule.horizon is None:
        before, after = (options.lr * schedule.factor(done, 0, 1, total) for total in (options.rounds, rounds))
        why = f"schedule={options.schedule} is over all rounds, and from here on it is that of {rounds} (lr {after:.3g}, where it was {before:.3g})"
    elif turns != "none":
        why = f"tsa={turns} is over all rounds, and from here on it is that of {rounds}"
    elif options.server_turn.endswith("+last") and done == options.rounds:
        why = f"the last turn of the server (server_turn={options.server_turn}) was made already, and is made again at the end"
    else:
        return f", and the end is that of a run with rounds={rounds} from its beginning"
    return f"; {why}, so the end is not that of a run with rounds={rounds} from its beginning"
