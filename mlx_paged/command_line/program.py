"""``run_program``: runs a program from its arguments to its exit status."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from mlx_paged.command_line.parser import error_line
from mlx_paged.standard_streams import (
    OutputLostError,
    discard_output,
    finish_output,
    open_closed_streams,
    say,
)


def run_program(
    parser: argparse.ArgumentParser,
    argv: list[str] | None,
    run: Callable[[argparse.Namespace], int],
    flags: Mapping[str, str],
    lost: int = 1,
    mistakes: tuple[type[Exception], ...] = (ValueError,),
) -> int:
    """Run a program and return its exit status: that of ``run``, 2 for the user's mistakes, 130
    when Ctrl-C ended it, or ``lost`` when its output was lost. Each error is a line on stderr.

    Args:
        argv: the arguments, without the program's name; those of this process by default.
        run: called with the parsed arguments; a ``verb`` among them is part of the program's name.
        flags: the flag for each argument of the library that an error may name.
        mistakes: the errors that are the user's mistakes. Others are raised.
    """
    open_closed_streams()
    name = parser.prog
    try:
        try:
            args = parser.parse_args(argv)
        except SystemExit as end:  # --help and --version, too
            return finish_output(end.code if isinstance(end.code, int) else 2, parser.prog)
        name = " ".join([parser.prog, *filter(None, [getattr(args, "verb", None)])])
        return run(args)
    except OutputLostError as error:
        discard_output()
        say(f"{name}: error: {error}")
        return lost
    except mistakes as error:
        say(f"{name}: error: {error_line(error, flags)}")
        return 2
    except KeyboardInterrupt:
        say("")
        return 130
    except BrokenPipeError:
        # The reader of the output has left (| head).
        discard_output()
        return lost
