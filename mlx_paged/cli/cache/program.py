"""``mlx-paged cache`` as a program: its verbs, their flags and their JSON."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from mlx_paged.block_store import (
    BlockName,
    CacheFolder,
    Entry,
    FolderSize,
    PrefixBlock,
    PrefixTree,
    Removed,
    read_trees,
)
from mlx_paged.cli.cache.listing import (
    SHOWN_DIGITS,
    ListStyle,
    TextOf,
    counted,
    in_bytes,
    list_trees,
    load_text_of,
    model_heading,
    num_unique_digits,
    pinned_by,
    show_prefix,
    token_ids,
)
from mlx_paged.cli.program import Parser, run_program
from mlx_paged.cli.streams import write
from mlx_paged.core.tier import BlockHeader
from mlx_paged.errors import ArgumentError, one_line, shown
from mlx_paged.options.config import DURATION, NBYTES

_FLAGS = {"cache_dir": "DIR", "tokenizer_path": "--tokenizer"}
_LINES_AT_ONCE = 1000
_MIN_DIGITS = 4  # as in git
_MAX_CANDIDATES = 5
_HASH = re.compile(rf"[0-9a-fA-F]{{{_MIN_DIGITS},64}}")


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

    def add(run: Callable[[argparse.Namespace], int], what: str) -> Parser:
        description = f"{what[0].upper()}{what[1:]}."
        verb = subparsers.add_parser(run.__name__[1:], help=what, description=description)
        verb.set_defaults(run=run)
        verb.add_argument("folder", metavar="DIR", type=Path, help="the folder of the cache")
        return verb

    ls = add(_ls, "list the contents of the folder, as trees of shared prefixes")
    show = add(_show, "show one prefix in detail")
    pin = add(_pin, "keep prefixes, whatever the folder's limit")
    unpin = add(_unpin, "allow prefixes to be evicted again")
    rm = add(_rm, "remove prefixes: the named lines of ls, and those under them")
    verify = add(_verify, "read all files, and list the bad ones")
    size = add(_size, "show how many bytes the folder takes, for each model")
    hash_help = "the first digits of a block's hash, as ls shows them"
    for verb, nargs in ((show, None), (pin, "+"), (unpin, "*"), (rm, "*")):
        verb.add_argument("hash", metavar="HASH", nargs=nargs, help=hash_help)
    for verb in (ls, show):
        verb.add_argument(
            "--tokenizer",
            metavar="FOLDER",
            help="also show the text: folder or Hugging Face repo of the model's tokenizer, or "
            "demo for that of the bundled model",
        )
    unpin.add_argument("--all", action="store_true", help="unpin everything")
    rm.add_argument("--all", action="store_true", help="remove everything")
    unused = "remove blocks that were not used for this long: 30d, 12h, 90s"
    rm.add_value("--older-than", DURATION, unused, metavar="AGE")
    least = "remove the least recently used blocks until at most this is left: 10G"
    rm.add_value("--shrink-to", NBYTES, least)
    size.add_value("--limit", NBYTES, "compare the size with this limit: 20G, 512M")
    rm.add_argument("--pinned", action="store_true", help="also remove pinned blocks")
    verify.add_argument("--delete", action="store_true", help="remove bad files")
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


# The verbs. Each returns the exit status.


def _ls(args: argparse.Namespace) -> int:
    folder, trees = _open(args)
    text_of = load_text_of(folder, args.tokenizer)
    if args.json:
        print_json({"models": [_as_json(tree) | {"runs": _runs(tree, text_of)} for tree in trees]})
    else:
        print_lines(list_trees(trees, ListStyle.of_stdout(text_of)) if trees else ["no blocks"])
    return 0


def _show(args: argparse.Namespace) -> int:
    folder, trees = _open(args)
    tree, block = find(args.hash, trees)
    text_of = load_text_of(folder, args.tokenizer)
    if not args.json:
        print_lines(show_prefix(tree, block, set(folder.pins()), ListStyle.of_stdout(text_of)))
        return 0
    path, described = block.path(), _as_json(tree)
    shown = {
        "hash": block.hash,
        "fingerprint": described["fingerprint"],
        "depends_on": described["depends_on"],
        "first_token": path[0].first_token,
        "end_token": block.end_token,
        "token_ids": token_ids(folder, path),
        "nbytes": sum(each.nbytes for each in path),
        "num_prefixes": block.num_prefixes,
        "blocks": [_same(each, *_BLOCK_FIELDS) for each in path],
        "continued_by": [each.hash for each in block.after],
    }
    print_json(shown if text_of is None else shown | {"text": text_of(path)})
    return 0


def _pin(args: argparse.Namespace) -> int:
    folder, trees = _open(args)
    # All hashes are looked up before the first block is pinned.
    for _, block in [find(text, trees) for text in args.hash]:
        entries = [*block.entries, *_state_before(block)]
        if not all(folder.pin(*entry.name) for entry in entries):
            raise ArgumentError(f"{_short(block)} has just gone from the folder", "hash")
        nbytes = in_bytes(sum(each.nbytes for each in block.path()))
        print_lines([f"pinned {_short(block)}: {counted(block.end_token, 'token')}, {nbytes}"])
    return 0


def _unpin(args: argparse.Namespace) -> int:
    if bool(args.hash) == args.all:
        raise ArgumentError("give either HASH or --all", "hash")
    folder, trees = _open(args)
    pins = set(folder.pins())
    if args.all:
        digests = {tree.digest for tree in trees}
        # A pin may outlive its block, and so its tree.
        of_them = [pin for pin in pins if pin[0] in digests or args.model is None]
        for pin in of_them:
            folder.unpin(*pin)
        print_lines([f"removed {counted(len(of_them), 'pin')}"])
    for _, block in [find(text, trees) for text in args.hash]:
        holders, name = pinned_by(block, pins), _short(block)
        names = ", ".join(map(_short, holders))
        if holders and block not in holders:
            raise ArgumentError(f"{name} is kept by the pin of {names}; unpin that", "hash")
        for entry in (*block.entries, *_state_before(block, without_pins=pins)):
            folder.unpin(*entry.name)
        still = f"; the pin of {_short(holders[1])} keeps it" if len(holders) > 1 else ""
        print_lines([f"unpinned {name}{still}" if holders else f"{name} has no pin"])
    return 0


def _state_before(block: PrefixBlock, without_pins: Collection[BlockName] = ()) -> list[Entry]:
    """The state that a prefix needs besides that of its last block: if that has none, a recurrent
    model can continue only from the last state before it.

    Args:
        without_pins: returns no state that another block with one of these pins needs.
    """
    last = block.last_state()
    if last is None or last is block or last.state is None:
        return []
    others = (each for each in (last, *last.below()) if each.entries[0].name in without_pins)
    is_needed = any(each is not block and each.last_state() is last for each in others)
    return [] if is_needed else [last.state]


def _rm(args: argparse.Namespace) -> int:
    _check_choice(args)
    if args.shrink_to is not None:
        folder = CacheFolder(args.folder)
        size, left = folder.shrink(args.shrink_to), folder.size().nbytes
        more = "; pinned blocks are kept" if left > args.shrink_to else ""
        print_lines([f"removed {_in_words(size)}; {in_bytes(left)} are left{more}"])
        return 0
    folder, trees = _open(args)
    if args.hash:
        found = [_under(*find(text, trees), folder) for text in args.hash]
    else:
        before = math.inf if args.older_than is None else time.time() - args.older_than
        found = [_unused_since(tree, before) for tree in trees]
    named = list({each.name: each for entries in found for each in entries}.values())
    chosen = [entry.name for entry in named if args.pinned or not entry.is_pinned]
    removed, num_kept = folder.remove(chosen), len(named) - len(chosen)
    kept = f"; {num_kept:,} pinned ones are kept (see --pinned)" if num_kept else ""
    print_lines([*_left(removed), f"removed {_in_words(removed)}{kept}"])
    return 1 if removed.left else 0


def _check_choice(args: argparse.Namespace) -> None:
    """Check the flags of ``rm``.

    Raises:
        ArgumentError: they name nothing, or contradict one another.
    """
    given = {"HASH": args.hash or None, "--all": args.all or None}
    given |= {"--older-than": args.older_than, "--shrink-to": args.shrink_to}
    ways = [name for name, value in given.items() if value is not None]
    if len(ways) > 1:
        names = " and ".join(ways)
        raise ArgumentError(f"{names} each say what to remove; give one of them", "hash")
    if not ways and args.model is None:
        raise ArgumentError(f"say what to remove: --model, {', '.join(given)}", "hash")
    if args.shrink_to is not None and (args.model is not None or args.pinned):
        raise ArgumentError(
            "--shrink-to removes the least recently used blocks of all models except for pinned "
            "ones; it can't be combined with --model or --pinned",
            "shrink_to",
        )


def _under(tree: PrefixTree, named: PrefixBlock, folder: CacheFolder) -> list[Entry]:
    """The line of ``ls`` that contains a block, those under it, and the answers there. A block
    can't be used without its ancestors.
    """
    blocks = named.alone()
    files = [each for block in blocks for each in block.entries]
    if all(each.is_pinned for each in files):
        return files
    return files + _answers_with(folder, tree, blocks[0])


def _answers_with(folder: CacheFolder, tree: PrefixTree, block: PrefixBlock) -> list[Entry]:
    """The stored answers with a token of this block, after the same tokens before it."""
    path = block.path()
    tokens = dict(enumerate(token_ids(folder, path), path[0].first_token))
    headers = {each.block_hash: folder.header(*each.name) for each in tree.answers}

    def is_within(part: BlockHeader | None) -> bool:
        if part is None or part.first_token + len(part.token_ids) <= block.first_token:
            return False
        while all(
            tokens.get(place, token) == token
            for place, token in enumerate(part.token_ids, part.first_token)
        ):
            before = headers.get(part.parent_hash) if part.parent_hash else None
            if before is None or before.first_token >= part.first_token:
                return True
            part = before
        return False

    return [each for each in tree.answers if is_within(headers[each.block_hash])]


def _unused_since(tree: PrefixTree, before: float) -> list[Entry]:
    """The files of a tree that were not used since a time, in seconds since 1970."""
    old = [block for block in tree.blocks.values() if block.last_use < before]
    others = (*tree.answers, *tree.other_versions)
    entries = [entry for block in old for entry in block.entries]
    return entries + [entry for entry in others if entry.last_used < before]


def _verify(args: argparse.Namespace) -> int:
    """The exit status is 1 if there were bad files, even if they are gone now."""
    folder, files = CacheFolder(args.folder), []
    for file in folder.verify():
        files.append(file)
        if file.problem is not None and not args.json:
            print_lines([f"{file.path}: {file.problem}"])
    bad, nbytes = [file for file in files if file.problem is not None], sum(f.nbytes for f in files)
    names = [(file.digest, file.block_hash) for file in bad if file.block_hash is not None]
    removed = folder.remove(names if args.delete else ())
    if args.json:
        print_json(
            {
                "num_files": len(files),
                "nbytes": nbytes,
                "bad": [_same(file, "path", "nbytes", "problem") for file in bad],
                "were_deleted": args.delete and not removed.left and len(names) == len(bad),
                "num_deleted": removed.num_blocks,
                "left": [{"path": path, "problem": why} for path, why in removed.left.items()],
            }
        )
    else:
        gone = f", {removed.num_blocks:,} of them removed" if bad and args.delete else ""
        good = f"{counted(len(files), 'file')}, {in_bytes(nbytes)}, read and checked"
        print_lines([*_left(removed), f"{good}: {len(bad):,} bad{gone}"])
    return 1 if bad else 0


def _size(args: argparse.Namespace) -> int:
    folder, trees = _open(args)
    held, written, limit = folder.size(), folder.written(), args.limit
    if args.json:
        sizes = {"nbytes": held.nbytes, "num_files": held.num_blocks, "limit": limit}
        models = [_as_json(tree) for tree in trees]
        by_all = _same(written, "nbytes", "nbytes_last_day", "since")
        print_json(sizes | {"written": by_all, "models": models})
        return 0
    against, since = "", time.strftime("%Y-%m-%d", time.localtime(written.since))
    if limit is not None and held.nbytes > limit:
        against = f", {in_bytes(held.nbytes - limit)} above the limit of {in_bytes(limit)}"
    elif limit is not None:
        against = f", {held.nbytes / limit:.0%} of the limit of {in_bytes(limit)}"
    last_day, all_days = in_bytes(written.nbytes_last_day), in_bytes(written.nbytes)
    lines = [
        _in_words(held) + against,
        f"written: {last_day} in the last 24 hours, {all_days} since {since}",
    ]
    print_lines(itertools.chain(lines, (f"  {model_heading(tree)}" for tree in trees)))
    return 0


def _open(args: argparse.Namespace) -> tuple[CacheFolder, list[PrefixTree]]:
    """The folder, and the trees of the requested models."""
    folder = CacheFolder(args.folder)
    return folder, of_model(read_trees(folder), args.model)


# What a user names: any unique beginning of a hash names a block, as in git.


def of_model(trees: Sequence[PrefixTree], name: str | None) -> list[PrefixTree]:
    """The trees of one model, or all if ``name`` is ``None``.

    Args:
        name: the model's name, its part after the last ``/``, or the first digits of a fingerprint.

    Raises:
        ArgumentError: the folder has no such model.
    """
    if name is None:
        return list(trees)
    is_digest = len(name) >= _MIN_DIGITS
    found = [
        tree
        for tree in trees
        if name in (tree.name, tree.name.rpartition("/")[2])
        or (is_digest and tree.digest.startswith(name.lower()))
    ]
    if not found:
        known = ", ".join(dict.fromkeys(tree.name for tree in trees))
        held = f"it holds {one_line(known)}" if known else "it is empty"
        raise ArgumentError(
            f"--model {shown(name)}: the folder has no blocks of it; {held}", "model"
        )
    return found


def find(text: str, trees: Sequence[PrefixTree]) -> tuple[PrefixTree, PrefixBlock]:
    """The one block whose hash begins with ``text``, and its tree.

    Raises:
        ArgumentError: there is none, or more than one.
    """
    if not _HASH.fullmatch(text):
        form = f"a hash is {_MIN_DIGITS} to 64 hex digits, got {shown(text)}"
        raise ArgumentError(f"{form}; ls shows those in the folder", "hash")
    pairs = [(tree, block) for tree in trees for block in tree.blocks.values()]
    found = [pair for pair in pairs if pair[1].hash.startswith(text.lower())]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ArgumentError(f"there is no block whose hash begins with {text}", "hash")
    hashes = {block.hash for _, block in found}
    num_digits = num_unique_digits(hashes)
    candidates = ", ".join(
        f"{block.hash[:num_digits]} ({block.end_token:,} tokens of {tree.name}, "
        f"{tree.digest[:SHOWN_DIGITS]})"
        for tree, block in found[:_MAX_CANDIDATES]
    )
    num_more = len(found) - _MAX_CANDIDATES
    more = f", and {num_more:,} more" if num_more > 0 else ""
    # A hash does not depend on the model: two models given the same tokens share it.
    way_out = "; say which with --model" if len(hashes) == 1 else ""
    raise ArgumentError(f"{text} is ambiguous: {candidates}{more}{way_out}", "hash")


# The output


def print_lines(lines: Iterable[str]) -> None:
    """Write lines as they come; raises :class:`OutputLostError`."""
    lines = iter(lines)
    while some := [f"{line}\n" for line in itertools.islice(lines, _LINES_AT_ONCE)]:
        write("".join(some))


def _left(removed: Removed) -> list[str]:
    return [f"{path}: {why}" for path, why in removed.left.items()]


def _in_words(size: FolderSize) -> str:
    return f"{counted(size.num_blocks, 'file')}, {in_bytes(size.nbytes)}"


def _short(block: PrefixBlock) -> str:
    return block.hash[:SHOWN_DIGITS]


# The output with --json. Hashes are complete and in hex, times are seconds since 1970, sizes are
# bytes. Programs depend on the names of the fields.


_RUN_FIELDS = (
    *("hash", "parent_hash", "first_token", "end_token", "is_cut_off", "num_blocks", "num_states"),
    *("nbytes", "last_used", "num_prefixes", "is_pinned"),
)
_BLOCK_FIELDS = (
    *("hash", "first_token", "end_token", "nbytes", "groups", "has_state", "created", "last_used"),
    *("num_prefixes", "is_pinned", "expires"),
)


def print_json(value: Any) -> None:
    write(json.dumps(value, indent=2) + "\n")


def _as_json(tree: PrefixTree) -> dict[str, Any]:
    """A model, and the totals of its blocks."""
    known = tree.fingerprint
    return {
        "fingerprint": tree.digest,
        "depends_on": None if known is None else dataclasses.asdict(known),
        "is_outdated": tree.is_outdated,
        "num_prefixes": tree.num_leaves,
        "num_blocks": len(tree.blocks),
        "num_tokens": tree.num_tokens,
        "num_states": tree.num_states,
        "num_answers": len(tree.answers),
        "nbytes": tree.nbytes,
        "num_files_of_other_versions": len(tree.other_versions),
        "nbytes_of_other_versions": sum(entry.nbytes for entry in tree.other_versions),
    }


def _runs(tree: PrefixTree, text_of: TextOf | None) -> list[dict[str, Any]]:
    runs = [(run, _same(run, *_RUN_FIELDS)) for run in tree.runs()]
    if text_of is None:
        return [described for _, described in runs]
    return [described | {"text": text_of(run.blocks)} for run, described in runs]


def _same(of: object, *names: str) -> dict[str, Any]:
    """Fields that are named as the attributes whose values they have."""
    return {name: getattr(of, name) for name in names}
