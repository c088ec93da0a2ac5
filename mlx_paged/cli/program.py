"""What all programs have in common: a parser with errors of one line that name flags, exit
statuses, and imports in less time. Does not import MLX.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from mlx_paged import __version__
from mlx_paged.cli.streams import OutputLostError, give_up_output, prepare_streams, say, write
from mlx_paged.errors import one_line
from mlx_paged.options.argument_values import Domain
from mlx_paged.options.foreign_arguments import INSTEAD

_MAX_ERROR = 2000  # characters
_UNKNOWN = "unrecognized arguments: "  # argparse's words
_DASHES_AS_VALUE = re.compile(r"(--[^=]+)=--|(-[a-zA-Z])=?--")


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, exits with status 2, and advises which
    flag to use instead of another project's. It accepts no abbreviated flags.

    Args:
        flags: the flags by argument of the library, or by another project's name for it. The
            program may lack some.
        options: of :class:`argparse.ArgumentParser`.

    Attributes:
        report: called with the text of each error of the program, in addition to the line.
    """

    def __init__(self, *, flags: Mapping[str, str] | None = None, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **options)
        self.report: Callable[[str], object] = lambda text: None
        self._flags = flags or {}

    def add_value(self, flag: str, domain: Domain[Any], help: str, **options: Any) -> None:
        """Add a flag whose value is one of a domain; ``options`` of ``add_argument``."""
        options = {"metavar": "N", "help": help, **options}
        self.add_argument(flag, type=domain.read_flag, **options)

    def add_version(self) -> None:
        """Add ``--version``, which comes last in the help."""
        version = f"mlx_paged {__version__}"
        self.add_argument(
            "--version", action="version", version=version, help="the version of mlx_paged"
        )

    def words_of(self, name: str, value: object) -> list[str]:
        """The words that give the flag of this name a value of a configuration file: a list for a
        flag that may be given several times, ``true`` and ``false`` for one without a value.
        """
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, list):
            return [word for each in value for word in self.words_of(name, each)]
        if isinstance(value, bool):
            no = f"--no-{flag.removeprefix('--')}"
            is_left_out = not value and flag in self._option_string_actions
            return [flag] if not is_left_out else [no] if no in self._option_string_actions else []
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        return [f"{flag}={text}"]

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        for word in words[: words.index("--")] if "--" in words else words:
            # Python 3.11 takes such a value for the end of the options, and returns an empty list.
            if flag := _DASHES_AS_VALUE.fullmatch(word):
                self.error(f"argument {flag[1] or flag[2]}: the value can't be '--'")
        return super().parse_known_args(words, namespace)

    def _advice(self, word: str) -> str:
        """What to use instead of another project's flag."""
        name = word.split("=")[0].lstrip("-").replace("-", "_")
        ours = INSTEAD.get(name, "")
        flag = self._flags.get(name) or self._flags.get(ours)
        if flag in self._option_string_actions:
            return f"; use {flag}"
        is_advice = bool(ours) and not ours.isidentifier()
        return f"; {ours}" if is_advice and word.startswith("--") else ""

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse would ignore an error, such as a full disk.
        if file is sys.stdout:
            write(message)
        else:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        if message.startswith(_UNKNOWN):
            message += self._advice(message.removeprefix(_UNKNOWN).partition(" ")[0])
        # The values in the message are the user's, and may contain line breaks.
        message = one_line(message, _MAX_ERROR)
        self.report(message)
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


class _HelpFormatter(argparse.HelpFormatter):
    """Breaks no words, such as names of models and files, in a narrow terminal."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        words = " ".join(text.split())
        return textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False)


def error_line(error: BaseException, flags: Mapping[str, str]) -> str:
    """The text of an error on one line. If it is about an argument, flags replace arguments in it.

    Args:
        flags: the flags by argument of the library.
    """
    text = one_line(error, _MAX_ERROR)
    argument = getattr(error, "argument", None)
    if argument not in flags:
        return text
    # A name without "_" may be an ordinary word, so it is replaced only if the error is about it.
    names = [name for name in flags if name == argument or "_" in name]
    return re.sub(rf"\b({'|'.join(names)})\b", lambda match: flags[match[1]], text)


def run_program(
    parser: Parser,
    argv: list[str] | None,
    run: Callable[[argparse.Namespace], int],
    flags: Mapping[str, str],
    lost: int = 1,
) -> int:
    """Run a program and return its exit status: that of ``run``, 2 for the user's mistakes, 130
    when Ctrl-C ended it, or ``lost`` when its output was lost. Each error is a line on stderr. The
    user's mistakes are ``ValueError`` and ``RuntimeError``; other errors are raised.

    Args:
        argv: the arguments, without the program's name; those of this process by default.
        run: called with the parsed arguments; a ``verb`` among them is part of the program's name.
        flags: the flag for each argument of the library that an error may name.
    """
    prepare_streams()
    name = parser.prog
    try:
        try:
            args = parser.parse_args(argv)
            name = f"{name} {getattr(args, 'verb', '')}".rstrip()
            return run(args)
        except SystemExit as end:  # --help and --version, too
            return end.code if isinstance(end.code, int) else 2
        except (ValueError, RuntimeError) as error:
            text = error_line(error, flags)
            parser.report(text)
            say(f"{name}: error: {text}")
            return 2
        except KeyboardInterrupt:
            parser.report("interrupted")
            say("")
            return 130
    except OutputLostError as error:
        give_up_output(name, error)
        return lost


def is_follower() -> bool:
    """Whether ``mlx.launch`` started this process to follow rank 0, which alone talks to the
    user.
    """
    return os.environ.get("MLX_RANK", "0") != "0"


# MLX, mlx-lm, transformers and the libraries of the server are 1,100 modules with 200,000 objects
# that are never freed. Python's garbage collector scans them while they are imported, and in each
# full collection from then on: a tenth of the CPU time of a start. Twice as much goes into the two
# scans that transformers makes of its own files.


def import_first(*names: str) -> None:
    """Import modules without garbage collection, and exempt their objects from it (``gc.freeze``).

    If MLX is imported already, as when a program is called from another one, this does nothing: the
    other program's objects must remain collectable, and the modules are imported where they are
    used.
    """
    if "mlx.core" in sys.modules:
        return
    gc.disable()
    try:
        import_transformers()
        for name in names:
            import_module(name)
        gc.freeze()
    finally:
        gc.enable()


def import_transformers() -> None:
    """Import ``transformers`` and ``transformers.models``, each of which reads 3,300 source files
    to list their contents: 170 ms of CPU time. Here the second import reuses the first one's list.

    transformers caches it, too (``lru_cache``), but for 128 folders, and it has 550.
    """
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # as mlx-lm does before it imports it
    import transformers
    from transformers.utils import import_utils

    search = getattr(import_utils, "create_import_structure_from_path", None)
    if search is None:  # another version
        return
    root = Path(str(transformers.__file__)).parent / "models"
    found = search(root)  # cached: this was the last search of the first import

    def known(path: str | Path) -> object:
        return found if Path(path) == root / "__init__.py" else search(path)

    import_utils.create_import_structure_from_path = known
    try:
        import_module("transformers.models")
    finally:
        import_utils.create_import_structure_from_path = search
