"""Commands of a federation on real nodes: federation init, up, run, status, down; node start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fallow.cli.app import app, console, words_of
from fallow.cli.commands import Commands
from fallow.cli.printing import print_result
from fallow.errors import UserError

federation = typer.Typer(cls=Commands, no_args_is_help=True, help="A federation on real nodes, from the server's machine: init, up, run, status, down.")
node = typer.Typer(cls=Commands, no_args_is_help=True, help="A node of a federation, on its own machine: start.")
app.add_typer(federation, name="federation")
app.add_typer(node, name="node")
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The federation's folder.")]


def _opened(folder: Path) -> Any:
    _check()
    from fallow.flower.federation import Federation

    return Federation(folder, console.say)


def _check() -> None:
    """Before anything is imported that Flower brings."""
    from fallow.flower import needed

    needed.check()


@federation.command()
def init(
    folder: Folder,
    clients: Annotated[int, typer.Option(help="How many nodes.", min=1)] = 3,
    host: Annotated[str, typer.Option(help="Name or address by which nodes reach the server.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Port by which nodes reach it (default: 443; on this machine alone a free one).")] = None,
    share: Annotated[str | None, typer.Option(metavar="RUN", help="Give server and nodes what they hold in this simulated run.")] = None,
) -> None:
    """Make a federation's folder: authority, certificate, keys, and a folder for each node to copy to its machine."""
    _check()
    from fallow.flower.federation import Federation

    made = Federation.init(folder, clients, host, port, tell=console.say)
    if share:
        made.share(Path(share))
    console.say(f"federation of {clients} nodes in {made.folder}; ca.key and server.key never leave it")
    for client in range(clients):
        console.say(f"node {client}: copy {made.node_folder(client)} to its machine, name its images in node.yaml, then `fallow node start node-{client}` there")


@federation.command()
def up(
    folder: Folder,
    here: Annotated[bool, typer.Option("--here", help="Start all nodes on this machine, too, to try it out.")] = False,
) -> None:
    """Start the server, and let the nodes' keys in."""
    fed = _opened(folder)
    fed.up(here)
    where = "and its nodes are up" if here else f"is up; nodes reach it at {fed.host}:{fed.port}"
    console.say(f"the federation {where}")


@federation.command("run")
def run_(
    folder: Folder,
    words: Annotated[list[str] | None, typer.Argument(metavar="[RECIPE|RUN] [KEY=VALUE]...", show_default=False)] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run's folder.")] = None,
    resume: Annotated[str | None, typer.Option(metavar="NAME", help="Go on with this run from its last checkpoint.")] = None,
) -> None:
    """Train on the nodes.

    RECIPE may be the folder of a simulated run, whose settings are then taken. Ends with 0 only if the run has finished.
    """
    fed = _opened(folder)
    from fallow.flower import running
    from fallow.runs.result import Result

    recipe, keys = words_of(words, runs=True)
    if resume:
        if recipe:
            raise UserError(f"{recipe} is given with --resume", "leave one of them out")
        running.check_up(fed)
        path = fed.folder / "runs" / resume
        running.with_terms(path, keys)
    else:
        path = running.begin(fed, recipe, keys, name)
    console.say(f"run {path}")
    running.go(fed, path, console.say)
    print_result(Result(path))


@federation.command()
def status(folder: Folder) -> None:
    """What is up, which nodes are online, and how runs stand."""
    fed = _opened(folder)
    from fallow.flower import standing

    for line in standing.lines(fed):
        console.say(line)


@federation.command()
def down(folder: Folder) -> None:
    """Stop runs, nodes of this machine and the server, each by its process id."""
    fed = _opened(folder)
    fed.down()
    console.say("the federation is down")


@node.command()
def start(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The node's folder, copied from the server.")]) -> None:
    """Join the federation, and stay until stopped."""
    _check()
    from fallow.flower import starting

    starting.keep_up(folder, console.say)


inspect = typer.Typer(cls=Commands, no_args_is_help=True, help="Look into a method before it runs on nodes: traffic.")
app.add_typer(inspect, name="inspect")


@inspect.command()
def traffic(
    method: Annotated[str, typer.Argument(metavar="METHOD")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", show_default=False)] = None,
) -> None:
    """List each tensor that travels between server and nodes, its size, and what it may disclose."""
    from fallow.flower.traffic import overheard

    found = overheard(method, words_of([f"method={method}", *(words or [])])[1])
    rows = [("way", "message", "tensor", "type", "shape", "bytes", "may disclose")]
    console.rows([*rows, *((i.way, i.kind, i.name, i.type, "x".join(map(str, i.shape)), f"{i.bytes:,}", i.discloses) for i in found)])
