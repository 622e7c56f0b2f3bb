"""Flower's side of the server: one ServerApp for all methods, whose run-config names the folder of the run to carry out."""

from __future__ import annotations

import sys
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fallow.errors import UserError
from fallow.flower.deployed import carry_out
from fallow.flower.exchange import FlowerExchange

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    def watch(event: str, what: object) -> None:
        if event == "round":
            print(f"round {what['round']} is done", flush=True)  # type: ignore[index]

    def tell(sentence: str) -> None:
        print(sentence, flush=True)

    try:
        carry_out(Path(str(context.run_config["folder"])), FlowerExchange(grid), tell, watch)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        raise
