"""The command line: parse, call, print; no logic. The commands are in the order of the help."""

from fallow.cli import training, looking, comparing, using, deploying  # isort: skip  # noqa: F401
from fallow.cli.app import app
from fallow.cli.ending import main

__all__ = ["app", "main"]
