"""What ``ls`` and ``show`` print: a line for each run of blocks without a fork, and one prefix in
detail.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.cells import cell_len, set_cell_size

from mlx_paged.block_store import BlockName, BlockRun, CacheFolder, PrefixBlock, PrefixTree
from mlx_paged.block_store.prefixes import run_from, runs_of
from mlx_paged.core.block_hash import HASH_NBYTES
from mlx_paged.errors import CONTROLS, REVERSING

TextOf: TypeAlias = Callable[[Sequence[PrefixBlock]], str]
"""Returns the text of consecutive blocks."""

SHOWN_DIGITS = 8  # of a hash, unless more are needed
# "prefixes" counts the prefixes that contain all blocks of the line.
_TITLES = ("hash", "tokens", "bytes", "used", "prefixes", "")
_ALIGNED = ("<", "<", ">", ">", ">", "<")
_GAP = "  "
_MAX_TEXT = 200  # columns, if the output is not a terminal
_MAX_FACT = 1000  # columns
_TEXT_BLOCKS = 16  # of a run: more than fit in a line
_CUT_OFF = "…"
_OUTDATED = "of an earlier version of mlx_paged and no longer used"
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))  # seconds
# A prompt must not be able to move the cursor or set the terminal's title.
# Halves of characters, which JSON may contain, can't be printed.
_REPLACED = {code: "\ufffd" for code in (*CONTROLS, *REVERSING, *range(0xD800, 0xE000))}
_IN_A_LINE = _REPLACED | {ord("\n"): "\\n", ord("\t"): "\\t", ord("\r"): "\\r"}
_IN_LINES = _REPLACED | {ord("\n"): "\n", ord("\t"): "\t"}


@dataclass(frozen=True)
class ListStyle:
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
    def of_stdout(cls, text_of: TextOf | None) -> ListStyle:
        """The style of lists on this process's stdout."""
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        encoding = getattr(sys.stdout, "encoding", None) or "ascii"
        is_ascii = b"?" in "├─│└…".encode(encoding, "replace")
        return cls(time.time(), width, is_ascii, text_of)

    def rails(self, run: BlockRun) -> str:
        """The lines of the tree before a run."""
        if run.level == 0:
            return ""
        through, fork, corner = ("|  ", "|- ", "`- ") if self.is_ascii else ("│  ", "├─ ", "└─ ")
        drawn = run.siblings_follow
        num_hidden = run.level - len(drawn)
        hidden = f"+{num_hidden} " if num_hidden else ""
        above = "".join(through if follows else "   " for follows in drawn[:-1])
        return hidden + above + (fork if drawn[-1] else corner)


def list_trees(trees: Sequence[PrefixTree], style: ListStyle) -> Iterator[str]:
    """The lines of ``ls``."""
    num_digits = num_unique_digits(each.hash for tree in trees for each in tree.blocks.values())
    for number, tree in enumerate(trees):
        if number:
            yield ""
        yield model_heading(tree)
        if tree.other_versions:
            nbytes = in_bytes(sum(entry.nbytes for entry in tree.other_versions))
            files = counted(len(tree.other_versions), "file")
            yield f"and {files} in the format of another version, {nbytes}"
        yield from list_runs(list(tree.runs()), num_digits, style)


def list_runs(runs: Sequence[BlockRun], num_digits: int, style: ListStyle) -> Iterator[str]:
    """A table of runs, with a line of titles; nothing if there are none."""
    if not runs:
        return
    rows = [_TITLES, *(_cells(run, num_digits, style) for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # The text takes the rest of the line.
    used = sum(widths) + len(_GAP) * len(widths)
    room = _MAX_TEXT if style.width is None else max(0, style.width - used)
    texts = [""] * len(rows)
    if style.text_of is not None:
        texts = ["text", *(style.text_of(run.blocks[:_TEXT_BLOCKS]) for run in runs)]
    for row, text in zip(rows, texts, strict=True):
        columns = zip(row, _ALIGNED, widths, strict=True)
        cells = [f"{cell:{aligned}{width}}" for cell, aligned, width in columns]
        yield _GAP.join([*cells, in_a_line(text, room)]).rstrip()
    if any(run.is_cut_off for run in runs):
        yield f"{_CUT_OFF} the preceding blocks are not in the folder"


def _cells(run: BlockRun, num_digits: int, style: ListStyle) -> tuple[str, ...]:
    mark = f"{_CUT_OFF} " if run.is_cut_off else ""
    states = counted(run.num_states, "state") if run.num_states else ""
    return (
        style.rails(run) + mark + run.hash[:num_digits],
        f"{run.first_token:,}-{run.end_token:,}",
        in_bytes(run.nbytes),
        in_short(max(0.0, style.now - run.last_used)),
        f"{run.num_prefixes:,}",
        ", ".join(filter(None, ["pinned" * run.is_pinned, states])),
    )


def model_heading(tree: PrefixTree) -> str:
    """A model, and the totals of its blocks."""
    known, kv_format, block_size = tree.fingerprint, "", ""
    if known is not None:
        kv_format = f", K/V {in_a_line(known.kv_format, _MAX_TEXT)}"
        block_size = f" of {known.block_size}"
    totals = [
        counted(tree.num_leaves, "prefix", "prefixes"),
        counted(len(tree.blocks), "block") + block_size,
        counted(tree.num_tokens, "token"),
        counted(tree.num_states, "state") * bool(tree.num_states),
        counted(len(tree.answers), "answer") * bool(tree.answers),
        in_bytes(tree.nbytes) + f"; {_OUTDATED}" * tree.is_outdated,
    ]
    name = in_a_line(tree.name, _MAX_TEXT)
    return f"{name} ({tree.digest[:SHOWN_DIGITS]}{kv_format}): {', '.join(filter(None, totals))}"


def show_prefix(
    tree: PrefixTree, block: PrefixBlock, pins: Collection[BlockName], style: ListStyle
) -> Iterator[str]:
    """The lines of ``show`` for the prefix that ends with ``block``.

    Args:
        pins: all pins of the folder.
    """
    path = block.path()
    num_digits = num_unique_digits(each.hash for each in tree.blocks.values())
    holders = [each.hash[:num_digits] for each in pinned_by(block, pins)]
    for name, fact in _facts(tree, path, ", ".join(holders), style.now).items():
        yield f"{name:<12}{in_a_line(fact, _MAX_FACT)}"
    after = [BlockRun(run_from(child)) for child in block.after]
    for title, runs in (("its parts", list(runs_of(path))), ("what continues it", after)):
        if runs:
            yield from ("", title, *list_runs(runs, num_digits, style))
    if style.text_of is not None:
        yield from ("", in_lines(style.text_of(path)))


def pinned_by(block: PrefixBlock, pins: Collection[BlockName]) -> list[PrefixBlock]:
    """The blocks whose pins keep a block: itself or its successors."""
    blocks = [block, *(block.below() if block.is_pinned else ())]
    return [each for each in blocks if each.entries[0].name in pins]


def _facts(
    tree: PrefixTree, path: Sequence[PrefixBlock], holders: str, now: float
) -> dict[str, str]:
    block, known = path[-1], tree.fingerprint
    before = f" (those before {path[0].first_token:,} are gone)" if path[0].first_token else ""
    num_files = sum(len(each.entries) for each in path)
    facts = {"hash": block.hash, "model": tree.name, "fingerprint": tree.digest}
    if known is not None:
        num_states = sum(layer.startswith("state ") for layer in known.layers)
        facts["content"] = known.model
        facts["code"] = known.code + f" ({_OUTDATED})" * tree.is_outdated
        num_layers = len(known.layers) - num_states
        facts["K/V"] = f"{known.kv_format}, {counted(num_layers, 'layer')}"
        if num_states:
            places = [f"{each.end_token:,}" for each in path if each.has_state]
            after = f"after {', '.join(places)} tokens" if places else "none, so no hit ends in it"
            facts["states"] = f"{counted(num_states, 'layer')}, {after}"
    pinned = f"yes, by the pin of {holders}" if holders else "yes" if block.is_pinned else "no"
    return facts | {
        "tokens": f"{block.end_token:,} in {counted(len(path), 'block')}{before}",
        "bytes": f"{in_bytes(sum(each.nbytes for each in path))} in {counted(num_files, 'file')}",
        "prefixes": f"{block.num_prefixes:,} go through it, of {tree.num_leaves:,} of the model",
        "created": in_full(block.created, now),
        "used": in_full(block.last_used, now),
        "pinned": pinned,
        "expires": "never" if block.expires is None else in_full(block.expires, now),
    }


def num_unique_digits(hashes: Iterable[str]) -> int:
    """How many digits distinguish these hashes, in hex; at least 8."""
    hashes = set(hashes)
    lengths = range(SHOWN_DIGITS, 2 * HASH_NBYTES + 1)
    return next(n for n in lengths if len({each[:n] for each in hashes}) == len(hashes))


# Sizes, times and ages


def in_bytes(nbytes: int) -> str:
    """A number of bytes, in a decimal unit: ``0 B``, ``512 B``, ``1.8 MB``, ``20 GB``."""
    value, unit = float(nbytes), 0
    # 999.5 kB would be printed as 1000 kB.
    while value >= 999.5 and unit < len(_BYTE_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.{int(unit > 0 and value < 9.95)}f} {_BYTE_UNITS[unit]}"


def in_short(seconds: float) -> str:
    """A duration in its largest unit, rounded down: ``0 s``, ``59 s``, ``3 min``, ``47 h``."""
    for length, unit in _AGES:
        # Hours and days begin at two: "119 min" is more precise than "1 h".
        if seconds >= (2 * length if length > 60 else length):
            return f"{int(seconds // length)} {unit}"
    return "0 s"


def in_full(moment: float, now: float) -> str:
    """A time, as local date and time, and its distance from now."""
    try:
        date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    except (OverflowError, ValueError, OSError):
        date = f"{moment:g} s after 1970"  # a file with an invalid time
    apart = in_short(abs(moment - now))
    return f"{date} (in {apart})" if moment > now else f"{date} ({apart} ago)"


def counted(number: int, thing: str, things: str = "") -> str:
    """``1 block``, ``1,024 blocks``; ``things`` is the plural if it isn't made with an s."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


# The text of blocks, by a tokenizer that the user gives, and text that is safe for a terminal


def token_ids(folder: CacheFolder, blocks: Iterable[PrefixBlock]) -> list[int]:
    """The tokens of consecutive blocks, up to the first that has been removed."""
    found: list[int] = []
    for block in blocks:
        header = folder.header(*block.entries[0].name)
        if header is None:
            break
        found += header.token_ids
    return found


def load_text_of(folder: CacheFolder, tokenizer: str | None) -> TextOf | None:
    """A function that returns the text of blocks of a folder; ``None`` without a tokenizer.

    Args:
        tokenizer: a folder, the id of a repository on the hub, or ``demo``. Loading it imports
            mlx-lm, and with it MLX.

    Raises:
        LoadError: there is none, or it is broken.
    """
    if not tokenizer:
        return None
    from mlx_paged.loading.folder import find_tokenizer
    from mlx_paged.loading.tokenizer import read_tokenizer

    loaded = read_tokenizer(find_tokenizer(tokenizer), None, None)

    def text_of(blocks: Sequence[PrefixBlock]) -> str:
        try:
            return str(loaded.decode(token_ids(folder, blocks)))
        except Exception:
            # The tokenizer of another model may lack tokens, and raise anything.
            return "\ufffd"

    return text_of


def in_a_line(text: str, width: int) -> str:
    """The beginning of a text, on one line of at most ``width`` columns of a terminal."""
    clean = text[: 4 * width].translate(_IN_A_LINE)
    return clean if cell_len(clean) <= width else set_cell_size(clean, width - 1) + "…"


def in_lines(text: str) -> str:
    """A text of several lines, without control characters."""
    return text.translate(_IN_LINES)
