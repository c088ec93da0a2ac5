"""Errors of the block bookkeeping. Each is a mistake in the calling program.

Running out of blocks is not an error: operations then return ``None``, which drives preemption.
Messages begin with the name of the operation and give the numbers.
"""

from __future__ import annotations


class BlockError(Exception):
    """Base of every error that ``mlx_paged.core`` raises."""


class DoubleFreeError(BlockError):
    """A free block or a freed table is freed again."""


class ForeignBlockError(BlockError):
    """A block id out of range, or a block object of another pool. Also known as: invalid block,
    invalid id.
    """


class FrozenBlockError(BlockError):
    """A write to a block that is hashed or shared, or a second hash for a block. Also known as:
    already finalized.
    """


class UseAfterFreeError(BlockError):
    """A freed table is used, or a free block that holds nothing cached is touched or hashed."""


class BlockTableError(BlockError):
    """An invalid operation on a block table: a token beyond its capacity, a trim beyond its length,
    a negative count, or computed blocks for a table that has blocks already.
    """
