"""Fallow: federated semi-supervised learning.

One model over many clients, when almost none of the data has labels.

>>> import fallow
>>> result = fallow.run(method="fixmatch", clients=4, label_count=200, rounds=2)
>>> result
Result('runs/fixmatch-digits-seed0': fixmatch on digits, ... % after round 2)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # queues to a GPU; of its 8, slots' streams would share some

__version__ = "0.1.0"
__all__ = ["Method", "Net", "Plan", "Result", "Update", "UserError", "Value", "key", "load", "resume", "run"]

if TYPE_CHECKING:
    from fallow.config import key
    from fallow.errors import UserError
    from fallow.methods.base import Method, Net, Plan, Update, Value
    from fallow.runs import Result, resume, run
    from fallow.runs import load_result as load

_HOMES = {
    "run": "fallow.runs", "resume": "fallow.runs", "Result": "fallow.runs", "load": "fallow.runs",
    "Method": "fallow.methods.base", "Net": "fallow.methods.base", "Value": "fallow.methods.base",
    "Plan": "fallow.methods.base", "Update": "fallow.methods.base", "UserError": "fallow.errors", "key": "fallow.config",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used, so that `import fallow` is light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fallow' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), "load_result" if name == "load" else name)


def __dir__() -> list[str]:
    """The public names too, which are not there before they are used."""
    return sorted({*globals(), *__all__})
