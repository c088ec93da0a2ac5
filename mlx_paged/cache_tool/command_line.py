"""The verbs of ``mlx-paged cache`` and their flags. No MLX here."""

from __future__ import annotations

import argparse
from pathlib import Path

from mlx_paged.command_line import parser
from mlx_paged.config import DURATION, NBYTES

_HASH_HELP = "the first digits of a block's hash, as ls shows them"


def setup_arg_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The argument parser of the tool, for a program of this name."""
    tool = parser.Parser(
        prog=prog or "python -m mlx_paged cache",
        description="Look into a folder of K/V blocks (--cache-dir of chat and serve), and "
        "maintain it. Engines may use the folder meanwhile.",
    )
    tool.add_version()
    verbs = tool.add_subparsers(dest="verb", metavar="VERB", required=True)
    ls = _add(verbs, "ls", "list what the folder holds, as trees of shared prefixes")
    show = _add(verbs, "show", "show one prefix in detail")
    show.add_argument("hash", metavar="HASH", help=_HASH_HELP)
    for reader in (ls, show):
        reader.add_argument(
            "--tokenizer",
            metavar="FOLDER",
            help="show the text, too: folder or Hugging Face repo of the model's tokenizer, or "
            "demo for that of the bundled model",
        )
    pin = _add(verbs, "pin", "keep prefixes, whatever the folder's limit")
    unpin = _add(verbs, "unpin", "let the limit evict prefixes again")
    rm = _add(verbs, "rm", "remove prefixes: the lines of ls that are named, and those under them")
    for changer, how_many in ((pin, "+"), (unpin, "*"), (rm, "*")):
        changer.add_argument("hash", metavar="HASH", nargs=how_many, help=_HASH_HELP)
    unpin.add_argument("--all", action="store_true", help="unpin all that is pinned")
    _add_choices_of_rm(rm)
    verify = _add(verbs, "verify", "read every file, and say which ones are bad")
    verify.add_argument("--delete", action="store_true", help="remove the bad ones")
    size = _add(verbs, "size", "say how many bytes the folder holds, for each model")
    size.add_argument(
        "--limit",
        type=NBYTES.read_flag,
        metavar="N",
        help="compare them with this limit: 20G, 512M",
    )
    for verb in (ls, show, pin, unpin, rm, size):
        verb.add_argument(
            "--model",
            metavar="NAME",
            help="only blocks of this model: its name as ls has it, the end of that after a /, "
            "or the first digits of its fingerprint",
        )
    for verb in (ls, show, verify, size):
        verb.add_argument("--json", action="store_true", help="print JSON")
    return tool


def _add_choices_of_rm(rm: argparse.ArgumentParser) -> None:
    rm.add_argument("--all", action="store_true", help="remove all")
    rm.add_argument(
        "--older-than",
        type=DURATION.read_flag,
        metavar="AGE",
        help="remove what was last used longer ago than this: 30d, 12h, 90s",
    )
    rm.add_argument(
        "--shrink-to",
        type=NBYTES.read_flag,
        metavar="N",
        help="remove what was least recently used, until no more than this is left: 10G",
    )
    rm.add_argument("--pinned", action="store_true", help="remove pinned blocks, too")


def _add(
    verbs: argparse._SubParsersAction[parser.Parser], name: str, what: str
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    verb.add_argument("folder", metavar="DIR", type=Path, help="the folder of the cache")
    return verb
