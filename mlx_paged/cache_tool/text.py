"""The text of blocks, with a tokenizer that the user gives; and text that a terminal can be shown.

Loading a tokenizer imports mlx-lm, and with it MLX, so that happens here alone and on demand.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from mlx_paged.block_store import CacheFolder
from mlx_paged.cache_tool.prefixes import PrefixBlock

TextOf: TypeAlias = Callable[[Sequence[PrefixBlock]], str]
"""Blocks that follow one another to the text of their tokens."""

# What a user's prompt holds must not move the cursor or set the terminal's title.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}
_IN_A_LINE = _CONTROLS | {ord("\n"): "\\n", ord("\t"): "\\t", ord("\r"): "\\r"}
_IN_LINES = _CONTROLS | {ord("\n"): "\n", ord("\t"): "\t"}


def token_ids(folder: CacheFolder, blocks: Iterable[PrefixBlock]) -> list[int]:
    """The tokens of blocks that follow one another, up to one that is gone by now."""
    found: list[int] = []
    for block in blocks:
        entry = block.entries[0]
        header = folder.header(entry.digest, entry.block_hash)
        if header is None:
            break
        found += header.token_ids
    return found


def load_text_of(folder: CacheFolder, tokenizer: str) -> TextOf:
    """What turns the blocks of a folder into text.

    Args:
        tokenizer: a folder, the id of a repository on the hub, or ``demo``.

    Raises:
        LoadError: there is none, or it is broken.
    """
    from mlx_paged.loading.folder import find_tokenizer
    from mlx_paged.loading.tokenizer import read_tokenizer

    loaded = read_tokenizer(find_tokenizer(tokenizer), None, None)

    def text_of(blocks: Sequence[PrefixBlock]) -> str:
        try:
            return str(loaded.decode(token_ids(folder, blocks)))
        except Exception:
            # A tokenizer that is not the model's may lack tokens, and fails in ways of its own.
            return "\ufffd"

    return text_of


def in_a_line(text: str, width: int) -> str:
    """The beginning of a text on one line of at most ``width`` columns of a terminal."""
    clean = text[: 4 * width].translate(_IN_A_LINE)
    used = num_fit = 0  # characters that leave a column for the ellipsis
    for index, character in enumerate(clean):
        used += _columns(character)
        if used > width:
            return clean[:num_fit] + "…" if width > 0 else ""
        if used < width:
            num_fit = index + 1
    return clean


def in_lines(text: str) -> str:
    """A text of several lines without what would change the terminal."""
    return text.translate(_IN_LINES)


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
