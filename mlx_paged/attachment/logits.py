"""The logits of a call, ``[batch, length, vocab_size]``, most of which are never read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_paged.attachment.steps import Run

# From token ids [batch, length] to logits [batch, length, vocab_size], without a cache.
Recompute = Callable[[mx.array], mx.array]


class Logits(mx.array):
    """Logits whose last column was computed. ``logits[:, -1]`` and its like read that column only;
    any other use evaluates all columns.
    """

    last_column: mx.array  # [batch, 1, vocab_size]

    def __getitem__(self, index: Any) -> mx.array:
        if isinstance(index, tuple) and len(index) > 1:
            row, column, *rest = index
            shifted = _in_last_column(column, self.shape[1])
            if shifted is not None and isinstance(row, int | slice):
                return self.last_column[(row, shifted, *rest)]
        return super().__getitem__(index)


def _in_last_column(index: object, length: int) -> int | slice | None:
    """The index into the last column alone; ``None`` if the index selects other columns."""
    if isinstance(index, int):
        return 0 if index in (-1, length - 1) else None
    if isinstance(index, slice) and index.indices(length) == (length - 1, length, 1):
        return slice(None)
    return None


def unpack(
    logits: mx.array,  # [num_rows, vocab_size], of the last num_logit_rows of each run
    runs: Sequence[Run],
    shape: tuple[int, int],  # [batch, length] of the call
    recompute: Recompute,
) -> mx.array:
    """The logits of a call.

    Rows that were not computed, of prompts and of prefix hits, are a lazy graph of the model
    without a cache over all tokens of their sequences. It references no slab and costs nothing
    until it is read, which mlx-lm does not do. Columns of padding are 0.

    Returns:
        ``[batch, length, vocab_size]``
    """
    batch_size, length = shape
    # The computed rows on the flattened [batch, length] axis
    places = [
        run.row * length + column
        for run in runs
        for column in range(run.end - run.num_logit_rows, run.end)
    ]
    if len(places) == batch_size * length:
        return logits.reshape(batch_size, length, -1)
    vocab_size = logits.shape[-1]
    if all(run.num_logit_rows == run.num_tokens for run in runs):
        rows = mx.zeros((batch_size * length, vocab_size), logits.dtype)
    else:
        rows = _recomputed(runs, shape, recompute).astype(logits.dtype).reshape(-1, vocab_size)
    rows[mx.array(places, dtype=mx.int32)] = logits
    full = rows.reshape(batch_size, length, vocab_size)
    if [run.end for run in runs] != [length] * batch_size:
        return full
    ends, end = [], 0
    for run in runs:
        end += run.num_logit_rows
        ends.append(end - 1)
    lazy = Logits(full)
    lazy.last_column = logits[mx.array(ends, dtype=mx.int32)][:, None]
    return lazy


def _recomputed(runs: Sequence[Run], shape: tuple[int, int], recompute: Recompute) -> mx.array:
    """``[batch, length, vocab_size]`` with the logits of the runs' tokens, and 0 elsewhere."""
    batch_size, length = shape
    token_ids = [run.sequence.state.tokens.read() for run in runs]
    longest = max(map(len, token_ids))
    # Attention is causal, so padding at the end does not change the logits before it.
    padded = [[*ids, *[0] * (longest - len(ids))] for ids in token_ids]
    positions = [[0] * length for _ in range(batch_size)]
    sources = [[0] for _ in range(batch_size)]
    is_token = [[False] * length for _ in range(batch_size)]
    for index, (run, ids) in enumerate(zip(runs, token_ids, strict=True)):
        sources[run.row] = [index]
        positions[run.row][run.begin : run.end] = range(len(ids) - run.num_tokens, len(ids))
        is_token[run.row][run.begin : run.end] = [True] * run.num_tokens
    logits = recompute(mx.array(padded, dtype=mx.int32))
    chosen = logits[mx.array(sources), mx.array(positions)]
    return mx.where(mx.array(is_token)[..., None], chosen, 0)
