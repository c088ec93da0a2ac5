"""``mlx-paged`` and ``python -m mlx_paged``: list the commands, or run one of them."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from mlx_paged import __version__
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
  chat        chat with a model in the terminal; {prog} chat --help lists its flags
  serve       serve a model over the OpenAI and Anthropic APIs
  fit         tell whether a model fits on this machine, before it is downloaded or loaded
  list        list the models on this machine, and whether they fit
  cache       inspect and maintain a folder of K/V blocks (--cache-dir)

  --help, -h  show this help
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
    kind = "option" if command.startswith("-") else "command"
    say(f"{prog}: error: unknown {kind} {command!r}; commands: {', '.join(COMMANDS)} (see --help)")
    return 2


# The module and the function of each command.
COMMANDS = {
    "chat": ("mlx_paged.chat", "main"),
    "serve": ("mlx_paged.server", "main"),
    "fit": ("mlx_paged.fit", "main"),
    "list": ("mlx_paged.fit", "main_of_list"),
    "cache": ("mlx_paged.cache_tool", "main"),
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
