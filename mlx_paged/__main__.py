"""``mlx-paged`` and ``python -m mlx_paged``: lists the programs, and runs one of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
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
  serve       serve a model to clients of the APIs of OpenAI and Anthropic
  fit         say whether a model fits into this machine, before it is downloaded or read
  list        list the models on this machine, and whether they fit
  cache       look into a folder of K/V blocks (--cache-dir) and maintain it

  --help, -h  this text
  --version   the version of mlx_paged"""


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status: 2 for a command that does not exist."""
    open_closed_streams()
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    prog = _name_as_called()
    if command in COMMANDS:
        return COMMANDS[command](rest, f"{prog} {command}")
    if command in ("--help", "-h", "help"):
        return _print(HELP.format(prog=prog), prog)
    if command == "--version":
        return _print(f"mlx_paged {__version__}", prog)
    kind = "option" if command.startswith("-") else "command"
    say(f"{prog}: error: unknown {kind} {command!r}; commands: {', '.join(COMMANDS)} (see --help)")
    return 2


def _chat(argv: list[str], prog: str) -> int:
    from mlx_paged.chat import main as chat

    return chat(argv, prog)


def _cache(argv: list[str], prog: str) -> int:
    from mlx_paged.cache_tool import main as cache

    return cache(argv, prog)


def _fit(argv: list[str], prog: str) -> int:
    from mlx_paged.fit import main as fit

    return fit(argv, prog)


def _list(argv: list[str], prog: str) -> int:
    from mlx_paged.fit import main_of_list

    return main_of_list(argv, prog)


def _serve(argv: list[str], prog: str) -> int:
    from mlx_paged.server import main as serve

    return serve(argv, prog)


COMMANDS: dict[str, Callable[[list[str], str], int]] = {
    "chat": _chat,
    "serve": _serve,
    "fit": _fit,
    "list": _list,
    "cache": _cache,
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
