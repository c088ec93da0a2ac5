"""The K/V of a saved conversation, in a file beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mlx_paged.chat.conversation import Conversation

SUFFIX = ".safetensors"


class SavedKV(NamedTuple):
    """How much was saved where."""

    name: str  # of the file, in the conversation's folder
    num_tokens: int
    nbytes: int

    def __str__(self) -> str:
        return f"K/V of {self.num_tokens:,} tokens in {self.name}, {self.nbytes / 1e6:.1f} MB"


def save_kv(conversation: Conversation, file: Path) -> SavedKV:
    """Write the K/V of a conversation that was saved to ``file``.

    Raises:
        ValueError: there are none that could be saved, or they can't be written.
    """
    kv_file = file.with_name(file.name + SUFFIX)
    num_tokens = conversation.save_kv(kv_file)
    return SavedKV(kv_file.name, num_tokens, kv_file.stat().st_size)
