"""A copy of Fallow that stops itself, once, at a moment that somebody has armed: what is to be killed there can be, and nothing of Fallow knows of it.

A moment is armed by a file of its name; who reaches it gives the file its process id as a suffix and stops itself (SIGSTOP).
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import fallow

PAUSES = '''"""Written by bench/pauses.py."""
import os
import signal

ARMED = {armed!r}


def reached(moment):
    try:
        os.rename(f"{{ARMED}}/{{moment}}", f"{{ARMED}}/{{moment}}.{{os.getpid()}}")
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGSTOP)


def hook(owner, name, when, moment, counts=lambda *_: True, call=1):
    """Before or after a call of a function: of those that count, the one with this number in its process."""
    usual, calls = getattr(owner, name), [0]

    def called(*args, **kwargs):
        calls[0] += bool(mine := counts(*args))
        now = mine and calls[0] == call
        if now and when == "before":
            reached(moment)
        found = usual(*args, **kwargs)
        if now and when == "after":
            reached(moment)
        return found

    setattr(owner, name, called)
'''
ROUND = 2  # from 1
VICTIM = 1
NODE = {  # as `hook` has them: whose function, when, what counts
    "begins-to-train": ("Workplace", "train", "before", f"lambda place, job: (job.party, job.round) == ({VICTIM}, {ROUND - 1})"),
    "has-trained": ("Workplace", "train", "after", f"lambda place, job: (job.party, job.round) == ({VICTIM}, {ROUND - 1})"),
    "writes": ("os", "replace", "before", f"lambda a, b: '/node-{VICTIM}/state/' in str(b) and str(b).rpartition('/')[2].startswith('{ROUND}-')"),
    "has-named": ("disk", "sync", "before", f"lambda p: '/node-{VICTIM}/state/' in str(p) and any(f.name.startswith('{ROUND}-') for f in p.iterdir())"),
    "has-kept": ("Records", "write", "after", f"lambda r, record, number, needed: (r.folder.name, number) == ('{VICTIM}', {ROUND})"),
}
CARRIER = {"sends-its-answer": ("sys.modules[__name__]", "push_message", "before", "lambda client, message, context: sends()")}
SERVER = {
    "before-it-sends": ("FlowerExchange", "send", "before", "lambda e, orders, kind, patience: kind == 'train'", ROUND),
    "has-sent": ("FlowerExchange", "send", "after", "lambda e, orders, kind, patience: kind == 'train'", ROUND),
    "second-answer": ("checks", "reply", "after", f"lambda tree, client, number, *_: number == {ROUND - 1}", 2),
    "has-merged": ("Nodes", "settle", "before", f"lambda n, number: number == {ROUND}"),
    "between-rounds": ("Nodes", "settle", "after", f"lambda n, number: number == {ROUND - 1}"),
    "in-effect": ("Nodes", "settle", "after", f"lambda n, number: number == {ROUND}"),
    "writes-its-checkpoint": ("Path", "rename", "before", f"lambda a, b: str(b).endswith('/{ROUND}')"),
    "has-its-checkpoint": ("Run", "commit", "after", f"lambda run: run.done == {ROUND}"),
}
IMPORTS = {
    "node": "import os\n\nfrom fallow import disk\n",
    "porter": f"""import json
import sys

usual_from_records, at = from_records, {{}}


def from_records(records):
    found = usual_from_records(records)
    at["round"] = next((shape["value"] for key, shape in json.loads(found.head)["tree"].get("dict", ()) if key == "round"), None)
    return found


def sends():
    return sys.argv[-1].rstrip("/").endswith("node-{VICTIM}") and at["round"] == {ROUND - 1}
""",
    "server_app": "from pathlib import Path\n\nfrom fallow.flower import checks\nfrom fallow.flower.nodes import Nodes\nfrom fallow.runs import Run\n",
}


class Pauses:
    """The copy in `folder`, to be put on PYTHONPATH."""

    def __init__(self, folder: Path):
        self.folder, self.armed = folder, folder / "armed"
        shutil.copytree(Path(fallow.__file__).parent, folder / "fallow", ignore=shutil.ignore_patterns("__pycache__"))
        self.armed.mkdir()
        (folder / "fallow_pauses.py").write_text(PAUSES.format(armed=str(self.armed)))
        for module, moments in (("node", NODE), ("porter", CARRIER), ("server_app", SERVER)):
            lines = [IMPORTS[module], "from fallow_pauses import hook\n"]
            for moment, (owner, name, when, counts, *call) in moments.items():
                lines.append(f"hook({owner}, {name!r}, {when!r}, {moment!r}, {counts}, {call[0] if call else 1})")
            with (folder / "fallow" / "flower" / f"{module}.py").open("a") as file:
                file.write("\n\n" + "\n".join(lines) + "\n")

    def arm(self, moment: str) -> None:
        for old in self.armed.iterdir():
            old.unlink()
        (self.armed / moment).touch()

    def also(self, moment: str) -> None:
        (self.armed / moment).touch()

    def wait(self, moment: str, patience: float = 400.0) -> int:
        """The process that stands at a moment."""
        until = time.monotonic() + patience
        while time.monotonic() < until:
            for file in self.armed.glob(f"{moment}.*"):
                return int(file.suffix[1:])
            time.sleep(0.1)
        raise TimeoutError(f"nobody came to the moment {moment}")

    def go_on(self, pid: int) -> None:
        os.kill(pid, signal.SIGCONT)
