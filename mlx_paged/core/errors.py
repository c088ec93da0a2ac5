"""Errors of the block bookkeeping: every one of them is a mistake in the calling program.

Running out of blocks is not among them: that is a value (`None`), because it drives preemption.
Each message opens with the name of the operation and says the numbers."""

from __future__ import annotations


class BlockError(Exception):
    """Base of every error raised by `mlx_paged.core`."""


class DoubleFreeError(BlockError):
    """A block that nobody holds, or a table that was freed before, is freed (again)."""


class ForeignBlockError(BlockError):
    """A block id out of range, or a block object of another pool. Also known as: invalid block,
    invalid id.
    """


class FrozenBlockError(BlockError):
    """A write to a block that is full, hashed or shared. Also known as: already finalized."""


class UseAfterFreeError(BlockError):
    """A freed table is used, or a free block that holds nothing cached is touched or hashed."""


class BlockTableError(BlockError):
    """A bad range in a block table: a token beyond its capacity, a trim beyond its length, a
    negative count.
    """


class IntegrityError(BlockError):
    """`check_integrity` found bookkeeping that contradicts itself: a bug in here. The message
    prints the failed sum.
    """
