"""``mlx-paged`` and ``python -m mlx_paged``: list the commands, or run one of them."""

from __future__ import annotations

import os
import shlex
import sys
from importlib import import_module
from pathlib import Path

from mlx_paged import __version__
from mlx_paged.cli.completion import complete
from mlx_paged.cli.streams import OutputLostError, give_up_output, prepare_streams, say, write
from mlx_paged.errors import shown

HELP = """\
usage: {prog} COMMAND ...

Run language models with a paged K/V cache.

commands:
  chat        chat with a model in the terminal: chat MODEL, or chat MODEL "MESSAGE"
  serve       serve a model over the OpenAI and Anthropic APIs: serve MODEL
  fit         tell whether a model fits on this machine, before it is downloaded or loaded
  list        list the models on this machine, and whether they fit
  pull        download a model, or the rest of it
  rm          remove a downloaded model
  ps          list the models of a running server
  stop        have a server of several models unload one
  cache       inspect and maintain a folder of K/V blocks (--cache-dir)
  service     have the system run a server: service install [flags of serve]
  completion  print what completes these commands: completion bash, zsh or fish

  --help, -h  show this help; {prog} chat --help lists the flags of a command
  --version   the version of mlx_paged"""


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status: 2 for a command that does not exist."""
    prepare_streams()
    if "_ARGCOMPLETE" in os.environ:
        complete(COMMANDS)
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    called = Path(sys.argv[0]).name
    prog = called if called == "mlx-paged" else "python -m mlx_paged"
    if command in COMMANDS:
        module, name, _ = COMMANDS[command]
        status: int = getattr(import_module(module), name)(rest, f"{prog} {command}")
        return status
    texts = {"--version": f"mlx_paged {__version__}"}
    texts |= dict.fromkeys(("--help", "-h", "help"), HELP.format(prog=prog))
    if command in texts:
        try:
            write(f"{texts[command]}\n")
            return 0
        except OutputLostError as error:
            give_up_output(prog, error)
            return 1
    kind = "option" if command.startswith("-") else "command"
    why = f"unknown {kind} {shown(command)}; commands: {', '.join(COMMANDS)} (see --help)"
    if command in ELSEWHERE:
        instead = ELSEWHERE[command].format(prog=prog, rest=shlex.join(rest) or "MODEL")
        why = f"there is no command {command}; {instead}"
    say(f"{prog}: error: {why}")
    return 2


# For each command its module, its function, and the one that makes its parser.
COMMANDS = {
    "chat": ("mlx_paged.cli.chat.program", "main", "setup_arg_parser"),
    "serve": ("mlx_paged.router.program", "main", "setup_arg_parser"),
    "fit": ("mlx_paged.cli.fit.program", "main", "setup_arg_parser"),
    "list": ("mlx_paged.cli.fit.program", "main_of_list", "setup_list_parser"),
    "pull": ("mlx_paged.cli.models", "main_of_pull", "setup_pull_parser"),
    "rm": ("mlx_paged.cli.models", "main_of_rm", "setup_rm_parser"),
    "ps": ("mlx_paged.router.client", "main_of_ps", "setup_ps_parser"),
    "stop": ("mlx_paged.router.client", "main_of_stop", "setup_stop_parser"),
    "cache": ("mlx_paged.cli.cache.program", "main", "setup_arg_parser"),
    "service": ("mlx_paged.router.system_service", "main", "setup_service_parser"),
    "completion": ("mlx_paged.cli.completion", "main", "setup_arg_parser"),
}


# What to type in the place of other projects' commands.
ELSEWHERE = {
    **dict.fromkeys(("run", "generate"), "type {prog} chat {rest}"),
    "server": "type {prog} serve {rest}",
    **dict.fromkeys(("download", "get"), "type {prog} pull {rest}"),
    **dict.fromkeys(("ls", "models"), "type {prog} list"),
    **dict.fromkeys(("remove", "delete"), "type {prog} rm {rest}"),
    "show": "type {prog} fit {rest}",
}


if __name__ == "__main__":
    sys.exit(main())
