"""The list of commands in `fallow --help`: each with its whole first sentence, wrapped where it is long."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class Commands(TyperGroup):
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [(name, " ".join((c.help or "").partition("\n\n")[0].split())) for name, c in commands.items() if c is not None and not c.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
