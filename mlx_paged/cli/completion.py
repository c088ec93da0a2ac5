"""``mlx-paged completion``: what a shell runs to complete words of the other commands.

The shell asks the program itself, through argcomplete: the parsers that check the flags also
complete them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from importlib import import_module

from mlx_paged.cli.program import Parser, run_program
from mlx_paged.cli.streams import write

SHELLS = ("bash", "zsh", "fish")
PROGRAM = "mlx-paged"
# Flags and positional words whose values are models.
_OF_MODELS = {"model", "models", "draft_model", "name", "words"}


def setup_arg_parser(prog: str | None = None) -> Parser:
    """The argument parser, for a program of this name."""
    parser = Parser(
        prog=prog or "python -m mlx_paged completion",
        description="Print a script for a shell, which then completes commands, flags, their "
        'values and models. bash and zsh: eval "$(mlx-paged completion zsh)" in ~/.zshrc. fish: '
        "mlx-paged completion fish > ~/.config/fish/completions/mlx-paged.fish.",
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.add_version()
    return parser


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run ``mlx-paged completion`` and return its exit status: 0, or 2 for an unknown shell."""

    def run(args: argparse.Namespace) -> int:
        from argcomplete.shell_integration import shellcode

        write(shellcode([PROGRAM], shell=args.shell) + "\n")
        return 0

    return run_program(setup_arg_parser(prog), argv, run, {})


def complete(commands: Mapping[str, tuple[str, str, str]]) -> None:
    """Answer the shell that asks for the rest of a word, and exit.

    Args:
        commands: for each command its module, its function, and the one that makes its parser.
    """
    import argcomplete
    from argcomplete.lexers import split_line

    words = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3]
    command = words[1] if len(words) > 1 else ""
    if command in commands:
        module, _, function = commands[command]
        make: Callable[[str], argparse.ArgumentParser] = getattr(import_module(module), function)
        parser = make(f"{PROGRAM} {command}")
        os.environ["_ARGCOMPLETE"] = "2"  # The parser's own words begin after the command.
        for action in parser._actions:
            if action.dest in _OF_MODELS:
                action.completer = _models  # type: ignore[attr-defined]
    else:
        parser = argparse.ArgumentParser(PROGRAM)
        parser.add_argument("command", choices=[*commands])
    argcomplete.autocomplete(parser)


def _models(prefix: str, **_: object) -> list[str]:
    """The models that begin with a text: those in the hub's cache, the bundled one, and paths."""
    import argcomplete
    from huggingface_hub import constants

    # As loading.folder.local_repositories finds them, without the seconds that MLX's import takes.
    folders = os.scandir(constants.HF_HUB_CACHE) if os.path.isdir(constants.HF_HUB_CACHE) else ()
    names = [
        each.name.removeprefix("models--").replace("--", "/")
        for each in folders
        if each.name.startswith("models--")
    ]
    paths = argcomplete.completers.FilesCompleter()(prefix)
    return [name for name in ["demo", *sorted(names)] if name.startswith(prefix)] + paths
