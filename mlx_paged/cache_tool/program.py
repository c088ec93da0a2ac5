"""The tool as a program: from its arguments to what it prints and the exit status."""

from __future__ import annotations

from mlx_paged.cache_tool import verbs
from mlx_paged.cache_tool.command_line import setup_arg_parser
from mlx_paged.command_line.parser import error_line
from mlx_paged.standard_streams import (
    OutputLostError,
    discard_output,
    finish_output,
    open_closed_streams,
    say,
)

_FLAGS = {"cache_dir": "DIR", "tokenizer_path": "--tokenizer"}


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run the tool and return its exit status.

    That is 0, 1 when output was lost or ``verify`` found bad files, 2 for the user's mistakes, or
    130 when Ctrl-C ended it.

    Args:
        argv: the arguments, without the program's name; those of this process by default.
        prog: the program's name in help and errors.
    """
    open_closed_streams()
    parser = setup_arg_parser(prog)
    name = parser.prog
    try:
        try:
            args = parser.parse_args(argv)
        except SystemExit as end:  # --help and --version, too
            return finish_output(end.code if isinstance(end.code, int) else 2, parser.prog)
        name = f"{parser.prog} {args.verb}"
        return verbs.VERBS[args.verb](args)
    except OutputLostError as error:
        discard_output()
        say(f"{name}: error: {error}")
        return 1
    except ValueError as error:  # the user's mistake
        say(f"{name}: error: {error_line(error, _FLAGS)}")
        return 2
    except KeyboardInterrupt:
        say("")
        return 130
    except BrokenPipeError:
        # The reader of our output left (| head): nothing more to say, and nowhere to say it.
        discard_output()
        return 1
