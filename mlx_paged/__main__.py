"""``mlx-paged`` and ``python -m mlx_paged``: list the commands, or run one of them."""

from __future__ import annotations

import shlex
import sys
from importlib import import_module
from pathlib import Path

from mlx_paged import __version__
from mlx_paged.errors import harmless, shown
from mlx_paged.standard_streams import (
    OutputLostError,
    discard_output,
    open_closed_streams,
    say,
    write,
)

HELP = """\
usage: {prog} COMMAND ...

Run language models with a paged K/V cache.

commands:
  chat        chat with a model in the terminal: chat MODEL, or chat MODEL "MESSAGE"
  serve       serve a model over the OpenAI and Anthropic APIs: serve MODEL
  fit         tell whether a model fits on this machine, before it is downloaded or loaded
  list        list the models on this machine, and whether they fit
  cache       inspect and maintain a folder of K/V blocks (--cache-dir)

  --help, -h  show this help; {prog} chat --help lists the flags of a command
  --version   the version of mlx_paged"""


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status: 2 for a command that does not exist."""
    open_closed_streams()
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    prog = _name_as_called()
    if command in COMMANDS:
        module, name = COMMANDS[command]
        status: int = getattr(import_module(module), name)(rest, f"{prog} {command}")
        return status
    if command in ("--help", "-h", "help"):
        return _print(HELP.format(prog=prog), prog)
    if command == "--version":
        return _print(f"mlx_paged {__version__}", prog)
    if command in ELSEWHERE:
        typed = ELSEWHERE[command].format(
            prog=prog, rest=" ".join(map(shlex.quote, rest)) or "MODEL"
        )
        say(f"{prog}: error: there is no command {command}; {harmless(typed)}")
        return 2
    kind = "option" if command.startswith("-") else "command"
    say(
        f"{prog}: error: unknown {kind} {shown(command)}; commands: {', '.join(COMMANDS)} "
        "(see --help)"
    )
    return 2


# The module and the function of each command.
COMMANDS = {
    "chat": ("mlx_paged.chat", "main"),
    "serve": ("mlx_paged.server", "main"),
    "fit": ("mlx_paged.fit", "main"),
    "list": ("mlx_paged.fit", "main_of_list"),
    "cache": ("mlx_paged.cache_tool", "main"),
}


# What to type in the place of other projects' commands.
ELSEWHERE = {
    **dict.fromkeys(("run", "generate"), "type {prog} chat {rest}"),
    "server": "type {prog} serve {rest}",
    "pull": "type hf download {rest}; chat --model and serve download what they need, too",
    **dict.fromkeys(("ls", "models"), "type {prog} list"),
    "ps": "type curl http://127.0.0.1:8000/v1/models, which a server answers while it runs",
    "stop": "a server ends with Ctrl-C, or with kill and its process id",
    "rm": "type hf cache rm model/REPO; {prog} list lists the models",
    "show": "type {prog} fit {rest}",
}


def _print(text: str, prog: str) -> int:
    try:
        write(text + "\n")
    except OutputLostError as error:
        discard_output()
        say(f"{prog}: error: {error}")
        return 1
    except BrokenPipeError:
        discard_output()
        return 1
    return 0


def _name_as_called() -> str:
    name = Path(sys.argv[0]).name
    return name if name == "mlx-paged" else "python -m mlx_paged"


if __name__ == "__main__":
    sys.exit(main())
