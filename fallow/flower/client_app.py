"""Flower's side of a node: hands each message to the Node and sends what it answers. One for all methods."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fallow.flower.exchange import from_records, to_records
from fallow.flower.node import Node

app = ClientApp()


@cache
def node_of(folder: str) -> Node:
    return Node(Path(folder))


def _answered(message: Message, context: Context) -> Message:
    answer = node_of(str(context.node_config["folder"])).answer(from_records(message.content))
    return Message(to_records(answer), reply_to=message)


@app.query("who")
def who(message: Message, context: Context) -> Message:
    return _answered(message, context)


@app.query("ask")
def ask(message: Message, context: Context) -> Message:
    return _answered(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    return _answered(message, context)
