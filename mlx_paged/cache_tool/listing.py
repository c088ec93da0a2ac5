"""``ls``: the contents of a folder, with one line for each run of blocks without a fork."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlx_paged.cache_tool.amounts import counted, in_bytes, in_short
from mlx_paged.cache_tool.prefixes import PrefixTree, Run
from mlx_paged.cache_tool.selection import SHOWN_DIGITS, num_unique_digits
from mlx_paged.cache_tool.text import TextOf, in_a_line

# "prefixes" counts the prefixes that contain all blocks of the line.
_TITLES = ("hash", "tokens", "bytes", "used", "prefixes", "", "text")
_TO_THE_RIGHT = {"bytes", "used", "prefixes"}
_GAP = "  "
_MAX_TEXT = 200  # columns, if the output is not a terminal
_TEXT_BLOCKS = 16  # of a run: more than fit in a line
_CUT_OFF = "…"
OUTDATED = "of an earlier version of mlx_paged and no longer used"


@dataclass(frozen=True)
class Look:
    """How lists are drawn.

    Args:
        now: seconds since 1970.
        width: columns of the terminal; ``None`` if the output is not one.
        is_ascii: whether the output is limited to ASCII.
        text_of: makes the text of blocks; ``None`` to show none.
    """

    now: float
    width: int | None = None
    is_ascii: bool = False
    text_of: TextOf | None = None

    @classmethod
    def of_stdout(cls, text_of: TextOf | None) -> Look:
        """The look of lists on this process's stdout."""
        stdout, width = sys.stdout, None
        if stdout is not None and stdout.isatty():
            width = shutil.get_terminal_size().columns
        try:
            "├─│└…".encode(getattr(stdout, "encoding", None) or "ascii")
        except (UnicodeEncodeError, LookupError):
            return cls(time.time(), width, True, text_of)
        return cls(time.time(), width, False, text_of)

    def rails(self, run: Run) -> str:
        """The lines of the tree before a run."""
        if run.level == 0:
            return ""
        through, fork, corner = ("|  ", "|- ", "`- ") if self.is_ascii else ("│  ", "├─ ", "└─ ")
        drawn = run.siblings_follow
        num_hidden = run.level - len(drawn)
        hidden = f"+{num_hidden} " if num_hidden else ""
        above = "".join(through if follows else "   " for follows in drawn[:-1])
        return hidden + above + (fork if drawn[-1] else corner)


def list_trees(trees: Sequence[PrefixTree], look: Look) -> Iterator[str]:
    """The lines of ``ls``."""
    num_digits = num_unique_digits(block_hash for tree in trees for block_hash in tree.blocks)
    for number, tree in enumerate(trees):
        if number:
            yield ""
        yield model_heading(tree)
        if tree.other_versions:
            nbytes = in_bytes(sum(entry.nbytes for entry in tree.other_versions))
            files = counted(len(tree.other_versions), "file")
            yield f"and {files} in the format of another version, {nbytes}"
        yield from list_runs(list(tree.runs()), num_digits, look)


def list_runs(runs: Sequence[Run], num_digits: int, look: Look) -> Iterator[str]:
    """A table of runs, with a line of titles; nothing if there are none."""
    if not runs:
        return
    rows = [_TITLES[:-1], *(_cells(run, num_digits, look) for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # The text takes the rest of the line.
    used = sum(widths) + len(_GAP) * len(widths)
    room = _MAX_TEXT if look.width is None else max(0, look.width - used)
    texts = [""] * len(rows)
    if look.text_of is not None:
        texts = [_TITLES[-1], *(look.text_of(run.blocks[:_TEXT_BLOCKS]) for run in runs)]
    for row, text in zip(rows, texts, strict=True):
        cells = [
            cell.rjust(width) if title in _TO_THE_RIGHT else cell.ljust(width)
            for title, cell, width in zip(_TITLES, row, widths, strict=False)
        ]
        yield _GAP.join([*cells, in_a_line(text, room)]).rstrip()
    if any(run.is_cut_off for run in runs):
        yield f"{_CUT_OFF} the preceding blocks are not in the folder"


def model_heading(tree: PrefixTree) -> str:
    """A model, and the totals of its blocks."""
    known = tree.fingerprint
    kv_format = "" if known is None else f", K/V {in_a_line(known.kv_format, _MAX_TEXT)}"
    block_size = "" if known is None else f" of {known.block_size}"
    states = f", {counted(tree.num_states, 'state')}" if tree.num_states else ""
    outdated = f"; {OUTDATED}" if tree.is_outdated else ""
    answers = f", {counted(len(tree.answers), 'answer')}" if tree.answers else ""
    return (
        f"{in_a_line(tree.name, _MAX_TEXT)} ({tree.digest[:SHOWN_DIGITS]}{kv_format}): "
        f"{counted(tree.num_leaves, 'prefix', 'prefixes')}, "
        f"{counted(len(tree.blocks), 'block')}{block_size}, "
        f"{counted(tree.num_tokens, 'token')}{states}{answers}, {in_bytes(tree.nbytes)}{outdated}"
    )


def _cells(run: Run, num_digits: int, look: Look) -> tuple[str, ...]:
    mark = f"{_CUT_OFF} " if run.is_cut_off else ""
    marks = ["pinned"] if run.is_pinned else []
    if run.num_states:
        marks.append(counted(run.num_states, "state"))
    return (
        look.rails(run) + mark + run.last.block_hash.hex()[:num_digits],
        f"{run.first_token:,}-{run.end_token:,}",
        in_bytes(run.nbytes),
        in_short(max(0.0, look.now - run.last_used)),
        f"{run.num_prefixes:,}",
        ", ".join(marks),
    )
