"""``mlx-paged cache`` as a program: its verbs and their flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from mlx_paged.cache_tool import verbs
from mlx_paged.command_line.program import Parser, run_program
from mlx_paged.config import DURATION, NBYTES

_FLAGS = {"cache_dir": "DIR", "tokenizer_path": "--tokenizer"}
_HASH_HELP = "the first digits of a block's hash, as ls shows them"


def setup_arg_parser(prog: str | None = None) -> Parser:
    """The argument parser of the tool, for a program of this name. The namespace's ``run`` is the
    function of the verb.
    """
    tool = Parser(
        prog=prog or "python -m mlx_paged cache",
        description="Inspect and maintain a folder of K/V blocks (--cache-dir of chat and serve). "
        "Engines may use the folder at the same time.",
    )
    tool.add_version()
    subparsers = tool.add_subparsers(dest="verb", metavar="VERB", required=True)
    ls = _add(subparsers, verbs.ls, "list the contents of the folder, as trees of shared prefixes")
    show = _add(subparsers, verbs.show, "show one prefix in detail")
    show.add_argument("hash", metavar="HASH", help=_HASH_HELP)
    for reader in (ls, show):
        reader.add_argument(
            "--tokenizer",
            metavar="FOLDER",
            help="also show the text: folder or Hugging Face repo of the model's tokenizer, or "
            "demo for that of the bundled model",
        )
    pin = _add(subparsers, verbs.pin, "keep prefixes, whatever the folder's limit")
    unpin = _add(subparsers, verbs.unpin, "allow prefixes to be evicted again")
    rm = _add(subparsers, verbs.rm, "remove prefixes: the named lines of ls, and those under them")
    for changer, how_many in ((pin, "+"), (unpin, "*"), (rm, "*")):
        changer.add_argument("hash", metavar="HASH", nargs=how_many, help=_HASH_HELP)
    unpin.add_argument("--all", action="store_true", help="unpin everything")
    _add_choices_of_rm(rm)
    verify = _add(subparsers, verbs.verify, "read all files, and list the bad ones")
    verify.add_argument("--delete", action="store_true", help="remove bad files")
    size = _add(subparsers, verbs.size, "show how many bytes the folder takes, for each model")
    size.add_argument(
        "--limit",
        type=NBYTES.read_flag,
        metavar="N",
        help="compare the size with this limit: 20G, 512M",
    )
    for verb in (ls, show, pin, unpin, rm, size):
        verb.add_argument(
            "--model",
            metavar="NAME",
            help="only blocks of this model: its name as shown by ls, its part after the last /, "
            "or the first digits of its fingerprint",
        )
    for verb in (ls, show, verify, size):
        verb.add_argument("--json", action="store_true", help="print JSON")
    return tool


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run the tool and return its exit status: 0, 1 when output was lost, ``verify`` found bad
    files or ``rm`` could not remove some, 2 for invalid arguments, or 130 for Ctrl-C.

    Args:
        argv: the arguments, without the program's name; those of this process by default.
        prog: the program's name in help and errors.
    """
    return run_program(setup_arg_parser(prog), argv, lambda args: args.run(args), _FLAGS)


def _add_choices_of_rm(rm: argparse.ArgumentParser) -> None:
    rm.add_argument("--all", action="store_true", help="remove everything")
    rm.add_argument(
        "--older-than",
        type=DURATION.read_flag,
        metavar="AGE",
        help="remove blocks that were not used for this long: 30d, 12h, 90s",
    )
    rm.add_argument(
        "--shrink-to",
        type=NBYTES.read_flag,
        metavar="N",
        help="remove the least recently used blocks until at most this is left: 10G",
    )
    rm.add_argument("--pinned", action="store_true", help="also remove pinned blocks")


def _add(
    subparsers: argparse._SubParsersAction[Parser],
    run: Callable[[argparse.Namespace], int],
    what: str,
) -> argparse.ArgumentParser:
    description = f"{what[0].upper()}{what[1:]}."
    verb = subparsers.add_parser(run.__name__, help=what, description=description)
    verb.set_defaults(run=run)
    verb.add_argument("folder", metavar="DIR", type=Path, help="the folder of the cache")
    return verb
