"""Flower itself, which only a deployed federation needs."""

from __future__ import annotations

from importlib import metadata

from fallow.errors import UserError

WANTED = "1.41."  # the same on all machines: a database of a newer one is not read by an older one


def check() -> None:
    try:
        found = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise UserError("Flower is not installed, which carries the messages of a deployed federation", 'install it with `pip install "fallow[flower]"`') from None
    if not found.startswith(WANTED):
        raise UserError(f"Flower is {found} here, and Fallow is made for {WANTED}*", 'install it with `pip install "fallow[flower]"`')
