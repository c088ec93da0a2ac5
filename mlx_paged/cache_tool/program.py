"""The tool as a program: from its arguments to what it prints and the exit status."""

from __future__ import annotations

from mlx_paged.cache_tool import verbs
from mlx_paged.cache_tool.command_line import setup_arg_parser
from mlx_paged.command_line.program import run_program

_FLAGS = {"cache_dir": "DIR", "tokenizer_path": "--tokenizer"}


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run the tool and return its exit status.

    That is 0, 1 when output was lost or ``verify`` found bad files, 2 for the user's mistakes, or
    130 when Ctrl-C ended it.

    Args:
        argv: the arguments, without the program's name; those of this process by default.
        prog: the program's name in help and errors.
    """
    return run_program(
        setup_arg_parser(prog), argv, lambda args: verbs.VERBS[args.verb](args), _FLAGS
    )
