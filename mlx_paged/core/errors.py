"""Errors of the block bookkeeping: each of them is a mistake in the calling program.

Running out of blocks is not an error but a value, ``None``, because it drives preemption. A message
opens with the name of the operation and gives the numbers.
"""

from __future__ import annotations


class BlockError(Exception):
    """Base of every error that ``mlx_paged.core`` raises."""


class DoubleFreeError(BlockError):
    """A block without a reference, or a table that was freed before, is freed again."""


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
    """A request that a block table can't meet: a token beyond its capacity, a trim beyond its
    length, a negative count, computed blocks that have no place in it.
    """


class IntegrityError(BlockError):
    """The bookkeeping contradicts itself, which is a bug in ``mlx_paged.core``. The message prints
    the sum that failed.
    """
