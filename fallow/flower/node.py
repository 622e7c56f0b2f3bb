"""A node: one client on its own machine. It answers orders, one at a time, and knows nothing of how they come.

Its folder has node.yaml (share.py), and state/RUN/CLIENT with what the client keeps (records.py).
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from fallow.engine.party import Job, Outcome
from fallow.errors import UserError
from fallow.flower.folder import settings
from fallow.flower.messages import VERSION, Tree, Unreadable, packed, unpacked
from fallow.flower.parcel import Parcel
from fallow.flower.records import Records
from fallow.flower.thin import thinned, whole
from fallow.flower.workplace import Unfit, Workplace, check_code, options_of, share_of
from fallow.runs.origin import versions


class Node:
    def __init__(self, folder: Path):
        self.folder = folder
        keys = settings(folder / "node.yaml")
        if keys.get("client") is None:
            raise UserError(f"{folder / 'node.yaml'} does not say which client this node is", "write `client: NUMBER`, from 0")
        self.client: int = keys["client"]
        self.device: str | None = keys.get("device")
        self._about = ""  # of the run it was last asked about
        self._place: Workplace | None = None

    def answer(self, order: Parcel) -> Parcel:
        """What a message comes to. Whatever fails here is told in words that say nothing of the data."""
        try:
            return self._answer(json.loads(order.about), order)
        except Unfit as e:
            print(f"error: {e}", file=sys.stderr, flush=True)
            return self._refusal("its data do not fit the run", "its own log says why")
        except UserError as e:
            return self._refusal(e.cause, e.remedy)
        except Unreadable as e:
            return self._refusal(f"a message cannot be read: {e}", "use one version of Fallow everywhere")
        except Exception as e:
            traceback.print_exc()
            return self._refusal(f"the node failed with a {type(e).__name__}", "look into the node's own log")

    def _refusal(self, cause: str, remedy: str) -> Parcel:
        print(f"refused: {cause}; {remedy}", file=sys.stderr, flush=True)
        return packed({"refused": [cause, remedy]}, {})

    def _answer(self, about: Tree, order: Parcel) -> Parcel:
        if "declared" not in about and (why := unpacked(order, {}).get("tell")):
            print(f"the server refuses this node: {why}", file=sys.stderr, flush=True)
            return packed({}, {})
        check_code(about, self.folder)
        if "declared" not in about:
            return packed(self._who(about), {})
        if self._place is None or self._about != order.about:
            self._place, self._about = Workplace(about, self.folder, self.client, self.device), order.about
        place = self._place
        tree = unpacked(order, place.layouts, place.device)
        if tree["client"] != self.client:
            raise UserError(f"a message for client {tree['client']} came to client {self.client}", "give every node its own client in node.yaml")
        if tree["until"] < time.time():
            raise UserError(f"the message of round {tree['round'] + 1} came after the round's time", "raise round_timeout, or compare the clocks")
        started = time.perf_counter()
        records = Records(self.folder / "state" / about["run"] / str(self.client), place.layouts, place.device)
        record = records.read(tree["kept"])
        job = Job(self.client, tree["round"], whole(tree["message"], record.values()), 0, record)
        if tree["do"] == "ask":
            found: Tree = {"question": tree["question"], "answer": place.ask(tree["question"], job, tree["about"])}
        else:
            outcome = place.train(job)
            records.write(job.record | outcome.record, tree["round"] + 1, tree["needed"])
            found = {"reply": told(outcome)}
        seconds = round(time.perf_counter() - started, 4)
        head = {"run": about["run"], "client": self.client, "round": tree["round"], "versions": versions(), "seconds": seconds}
        return packed(head | found, place.layouts)

    def _who(self, about: Tree) -> Tree:
        """What the server must know of this node before the first round: counts, and nothing of any one sample."""
        _, options = options_of(about["options"], self.folder, self.device)
        share = share_of(self.folder, options, tuple(about["classes"]))
        return {"client": self.client, "protocol": VERSION, "versions": versions(), "samples": share.counts}


def told(outcome: Outcome) -> dict[str, Any]:
    """A reply as it travels: without what the client keeps."""
    entries = None if outcome.update is None else outcome.update.entries
    return {k: v for k, v in vars(outcome).items() if k != "record"} | {"update": thinned(entries), "samples": vars(outcome.samples)}
