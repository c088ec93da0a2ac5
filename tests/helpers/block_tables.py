"""What tests ask of block tables beside their own verbs."""

from __future__ import annotations

from typing import NamedTuple

from mlx_paged.core import BlockCopy, BlockTable


class TokenSlot(NamedTuple):
    """Where the next token goes, and what must be copied before it is written there."""

    slot: int
    copies: list[BlockCopy]


def append_token_slot(table: BlockTable) -> TokenSlot | None:
    """Append a token; its slot, or None when out of blocks."""
    copies = table.append_token()
    if copies is None:
        return None
    return TokenSlot(table.slot_mapping(table.num_tokens - 1, 1)[0], copies)
