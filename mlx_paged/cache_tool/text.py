"""The text of blocks, by a tokenizer that the user gives, and text that is safe for a terminal.

Loading a tokenizer imports mlx-lm, and with it MLX, so it happens only here and on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from rich.cells import cell_len, set_cell_size

from mlx_paged.block_store import CacheFolder
from mlx_paged.cache_tool.prefixes import PrefixBlock
from mlx_paged.errors import CONTROLS, REVERSING

TextOf: TypeAlias = Callable[[Sequence[PrefixBlock]], str]
"""Returns the text of consecutive blocks."""

# A prompt must not be able to move the cursor or set the terminal's title.
# Halves of characters, which JSON may contain, can't be printed.
_REPLACED = {code: "\ufffd" for code in (*CONTROLS, *REVERSING, *range(0xD800, 0xE000))}
_IN_A_LINE = _REPLACED | {ord("\n"): "\\n", ord("\t"): "\\t", ord("\r"): "\\r"}
_IN_LINES = _REPLACED | {ord("\n"): "\n", ord("\t"): "\t"}


def token_ids(folder: CacheFolder, blocks: Iterable[PrefixBlock]) -> list[int]:
    """The tokens of consecutive blocks, up to the first that has been removed."""
    found: list[int] = []
    for block in blocks:
        entry = block.entries[0]
        header = folder.header(entry.digest, entry.block_hash)
        if header is None:
            break
        found += header.token_ids
    return found


def load_text_of(folder: CacheFolder, tokenizer: str) -> TextOf:
    """A function that returns the text of blocks of a folder.

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
            # The tokenizer of another model may lack tokens, and raise anything.
            return "\ufffd"

    return text_of


def in_a_line(text: str, width: int) -> str:
    """The beginning of a text, on one line of at most ``width`` columns of a terminal."""
    clean = text[: 4 * width].translate(_IN_A_LINE)
    if cell_len(clean) <= width:
        return clean
    return set_cell_size(clean, width - 1) + "…"


def in_lines(text: str) -> str:
    """A text of several lines, without control characters."""
    return text.translate(_IN_LINES)
