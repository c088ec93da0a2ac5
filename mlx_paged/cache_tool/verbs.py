"""The verbs of the tool. Each returns the exit status."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Collection, Iterable
from typing import Any

from mlx_paged.block_store import BlockName, CacheFolder, Entry, FolderSize, Removed
from mlx_paged.cache_tool import as_json
from mlx_paged.cache_tool.amounts import counted, in_bytes
from mlx_paged.cache_tool.detail import pinned_by, show_prefix
from mlx_paged.cache_tool.listing import Look, list_trees, model_heading
from mlx_paged.cache_tool.prefixes import PrefixBlock, PrefixTree, read_trees
from mlx_paged.cache_tool.removals import check_choice, choose
from mlx_paged.cache_tool.selection import SHOWN_DIGITS, find, of_model
from mlx_paged.cache_tool.text import load_text_of
from mlx_paged.errors import ArgumentError
from mlx_paged.standard_streams import write

_LINES_AT_ONCE = 1000


def ls(args: argparse.Namespace) -> int:
    folder, trees = _open(args)
    text_of = load_text_of(folder, args.tokenizer) if args.tokenizer else None
    if args.json:
        models = [
            as_json.model(tree)
            | {"runs": [as_json.line(tree, run, text_of) for run in tree.runs()]}
            for tree in trees
        ]
        print_json({"models": models})
    else:
        print_lines(list_trees(trees, Look.of_stdout(text_of)) if trees else ["no blocks"])
    return 0


def show(args: argparse.Namespace) -> int:
    folder, trees = _open(args)
    tree, block = find(args.hash, trees)
    text_of = load_text_of(folder, args.tokenizer) if args.tokenizer else None
    if args.json:
        print_json(as_json.prefix(folder, tree, block, text_of))
    else:
        print_lines(show_prefix(tree, block, set(folder.pins()), Look.of_stdout(text_of)))
    return 0


def pin(args: argparse.Namespace) -> int:
    folder, trees = _open(args)
    # All hashes are looked up before the first block is pinned.
    for tree, block in [find(text, trees) for text in args.hash]:
        entries = [*block.entries, *_state_before(tree, block)]
        if not all(folder.pin(entry.digest, entry.block_hash) for entry in entries):
            raise ArgumentError(f"{_short(block)} has just gone from the folder", "hash")
        nbytes = in_bytes(sum(each.nbytes for each in tree.path_to(block)))
        print_lines([f"pinned {_short(block)}: {counted(block.end_token, 'token')}, {nbytes}"])
    return 0


def unpin(args: argparse.Namespace) -> int:
    if bool(args.hash) == args.all:
        raise ArgumentError("give either HASH or --all", "hash")
    folder, trees = _open(args)
    pins = set(folder.pins())
    if args.all:
        digests = {tree.digest for tree in trees}
        # A pin may outlive its block, and so its tree.
        of_them = [pin for pin in pins if pin[0] in digests or args.model is None]
        for digest, block_hash in of_them:
            folder.unpin(digest, block_hash)
        print_lines([f"removed {counted(len(of_them), 'pin')}"])
        return 0
    for tree, block in [find(text, trees) for text in args.hash]:
        holders = pinned_by(tree, block, pins)
        if holders and block not in holders:
            names = ", ".join(map(_short, holders))
            raise ArgumentError(
                f"{_short(block)} is kept by the pin of {names}; unpin that", "hash"
            )
        entries = [*block.entries, *_state_before(tree, block, without_pins=pins)]
        for entry in entries:
            folder.unpin(entry.digest, entry.block_hash)
        still = f"; the pin of {_short(holders[1])} keeps it" if len(holders) > 1 else ""
        print_lines(
            [f"unpinned {_short(block)}{still}" if holders else f"{_short(block)} has no pin"]
        )
    return 0


def _state_before(
    tree: PrefixTree, block: PrefixBlock, without_pins: Collection[BlockName] = ()
) -> list[Entry]:
    """The state that a prefix needs besides that of its last block: if that has none, a recurrent
    model can continue only from the last state before it.

    Args:
        without_pins: returns no state that another block with one of these pins needs.
    """
    last = tree.last_state(block)
    if last is None or last is block or last.state is None:
        return []
    others = (each for each in (last, *tree.below(last)) if each.entries[0].name in without_pins)
    is_needed = any(each is not block and tree.last_state(each) is last for each in others)
    return [] if is_needed else [last.state]


def rm(args: argparse.Namespace) -> int:
    check_choice(args)
    folder = CacheFolder(args.folder)
    if args.shrink_to is not None:
        removed = folder.shrink(args.shrink_to)
        left = folder.size().nbytes
        more = "; pinned blocks are kept" if left > args.shrink_to else ""
        print_lines([f"removed {_in_words(removed)}; {in_bytes(left)} are left{more}"])
        return 0
    removal = choose(args, folder, of_model(read_trees(folder), args.model), time.time())
    removed = folder.remove((entry.digest, entry.block_hash) for entry in removal.entries)
    kept = f"; {removal.num_kept:,} pinned ones are kept (see --pinned)" if removal.num_kept else ""
    print_lines(_left(removed))
    print_lines([f"removed {_in_words(removed)}{kept}"])
    return 1 if removed.left else 0


def verify(args: argparse.Namespace) -> int:
    """The exit status is 1 if there were bad files, even if they are gone now."""
    folder = CacheFolder(args.folder)
    bad, num_files, nbytes = [], 0, 0
    for file in folder.verify():
        num_files += 1
        nbytes += file.nbytes
        if file.problem is not None:
            bad.append(file)
            if not args.json:
                print_lines([f"{file.path}: {file.problem}"])
    removed = Removed(0, 0)
    if args.delete:
        removed = folder.remove(
            (file.digest, file.block_hash) for file in bad if file.block_hash is not None
        )
    if args.json:
        print_json(as_json.checked(bad, num_files, nbytes, args.delete, removed))
    else:
        print_lines(_left(removed))
        gone = f", {removed.num_blocks:,} of them removed" if bad and args.delete else ""
        good = f"{counted(num_files, 'file')}, {in_bytes(nbytes)}, read and checked"
        print_lines([f"{good}: {len(bad):,} bad{gone}"])
    return 1 if bad else 0


def size(args: argparse.Namespace) -> int:
    folder, trees = _open(args)
    held, written = folder.size(), folder.written()
    if args.json:
        models = [as_json.model(tree) for tree in trees]
        print_json(
            {
                "nbytes": held.nbytes,
                "num_files": held.num_blocks,
                "limit": args.limit,
                "written": written._asdict(),
                "models": models,
            }
        )
        return 0
    since = time.strftime("%Y-%m-%d", time.localtime(written.since))
    print_lines(
        [
            _in_words(held) + _against(args.limit, held.nbytes),
            f"written: {in_bytes(written.nbytes_last_day)} in the last 24 hours, "
            f"{in_bytes(written.nbytes)} since {since}",
        ]
    )
    print_lines(f"  {model_heading(tree)}" for tree in trees)
    return 0


def _open(args: argparse.Namespace) -> tuple[CacheFolder, list[PrefixTree]]:
    """The folder, and the trees of the requested models."""
    folder = CacheFolder(args.folder)
    return folder, of_model(read_trees(folder), args.model)


def print_lines(lines: Iterable[str]) -> None:
    """Write lines as they come; raises :class:`OutputLostError` or ``BrokenPipeError``."""
    waiting: list[str] = []
    for line in lines:
        waiting.append(line + "\n")
        if len(waiting) == _LINES_AT_ONCE:
            write("".join(waiting))
            waiting.clear()
    write("".join(waiting))


def print_json(value: Any) -> None:
    write(json.dumps(value, indent=2) + "\n")


def _left(removed: Removed) -> list[str]:
    return [f"{path}: {why}" for path, why in removed.left.items()]


def _against(limit: int | None, nbytes: int) -> str:
    if limit is None:
        return ""
    if nbytes > limit:
        return f", {in_bytes(nbytes - limit)} above the limit of {in_bytes(limit)}"
    return f", {nbytes / limit:.0%} of the limit of {in_bytes(limit)}"


def _in_words(size: FolderSize) -> str:
    return f"{counted(size.num_blocks, 'file')}, {in_bytes(size.nbytes)}"


def _short(block: PrefixBlock) -> str:
    return block.block_hash.hex()[:SHOWN_DIGITS]
