"""The prompt caches that an attached model makes, with the interface of mlx-lm's K/V caches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import mlx.core as mx

from mlx_paged.attachment.sequences import CachedSequence, CachedSequences
from mlx_paged.attachment.steps import Run
from mlx_paged.errors import ArgumentError, shown


class NotSaved:
    """The state of a prompt cache, with which mlx-lm's ``save_prompt_cache`` fails with this text
    in its message.
    """

    def __repr__(self) -> str:
        return (
            "the K/V of an attached model are in shared blocks; to save them for "
            "load_prompt_cache, call export_prompt_cache(path, prompt_cache) of the object that "
            "attach() returned"
        )


class _Cache:
    """What the prompt caches of all layers have in common."""

    def make_mask(self, *args: object, **kwargs: object) -> NoReturn:
        self._refuse_parts()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> NoReturn:
        self._refuse_parts()

    def keys_and_values(self) -> NoReturn:
        self._refuse_parts()

    def _refuse_parts(self) -> NoReturn:
        raise RuntimeError(
            "[attach] this prompt cache works only with the whole attached model, not with a part "
            "of it and not after it was detached"
        )

    @property
    def to_quantized(self) -> NoReturn:
        # mlx-lm looks for this attribute in each step with kv_bits.
        raise ArgumentError(
            "[attach] kv_bits can't be combined with an attached model; quantise its K/V with "
            "attach(model, kv_format=8)",
            "kv_bits",
        )

    @classmethod
    def from_state(cls, state: object) -> NoReturn:
        raise ArgumentError(f"[attach] {NotSaved()}", "prompt_cache")


class FollowingCache(_Cache):
    """An entry for a further layer: a prompt cache has one per layer, as in mlx-lm. The primary,
    which is the first entry, does everything for all layers.
    """

    def __init__(self, primary: PromptCache | None = None):
        self.primary = primary  # known from the first call of the model

    @property
    def offset(self) -> int | mx.array:
        return self._known_primary.offset

    def size(self) -> int:
        return self._known_primary.size()

    def empty(self) -> bool:
        return self._known_primary.empty()

    @property
    def _known_primary(self) -> PromptCache:
        if self.primary is None:
            raise RuntimeError(
                "[attach] use the first entry of the prompt cache: it has all layers"
            )
        return self.primary

    # The primary counts and changes all layers.

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def state(self) -> list[object]:
        return []

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        return n

    def filter(self, batch_indices: object) -> None: ...

    def extend(self, other: FollowingCache) -> None: ...

    def prepare(self, **kwargs: object) -> None: ...

    def finalize(self) -> None: ...

    def extract(self, idx: int) -> FollowingCache:
        return FollowingCache()

    @classmethod
    def merge(cls, caches: Iterable[FollowingCache]) -> FollowingCache:
        return cls()


class PromptCache(_Cache):
    """The sequences of a call, one per row: mlx-lm's ``KVCache`` and ``BatchKVCache`` in one.

    Everything that copies (``copy.deepcopy``, ``merge``, ``extract``, ``extend``) forks sequences,
    so that no two prompt caches share one.

    Args:
        rows: empty before the first call, which determines their number.
        is_batch: whether rows may differ in length.
    """

    def __init__(
        self,
        sequences: CachedSequences,
        rows: Sequence[CachedSequence] = (),
        is_batch: bool = False,
    ):
        self.sequences = sequences
        self.rows = list(rows)
        self._is_batch = is_batch
        # Of the next columns in each row: the number of padding, then of tokens; None for all.
        self._left_padding = [0] * len(self.rows)
        self._lengths: list[int] | None = None

    # What a call needs

    def runs(self, batch_size: int, length: int) -> list[Run]:
        """The tokens of ``[batch_size, length]`` that are not padding, for each row that has any.

        Raises:
            ArgumentError: another batch size than that of the cache.
        """
        if not self.rows and not self._is_batch:
            self.rows = [self.sequences.new() for _ in range(batch_size)]
            self._left_padding = [0] * batch_size
        if batch_size != len(self.rows):
            raise ArgumentError(
                f"[attach] {batch_size} rows of tokens for a prompt cache of {len(self.rows)} "
                "sequences",
                "cache",
            )
        runs = []
        for row, sequence in enumerate(self.rows):
            begin = min(self._left_padding[row], length)
            num_left = length - begin
            end = begin + (num_left if self._lengths is None else min(self._lengths[row], num_left))
            if end > begin:
                runs.append(Run(sequence, row, begin, end))
        return runs

    def advance(self, length: int) -> None:
        """Count the columns of a finished call of ``length`` as consumed."""
        skipped = [min(padding, length) for padding in self._left_padding]
        if self._lengths is not None:
            pairs = zip(self._lengths, skipped, strict=True)
            self._lengths = [max(0, left + skip - length) for left, skip in pairs]
        pairs = zip(self._left_padding, skipped, strict=True)
        self._left_padding = [padding - skip for padding, skip in pairs]

    # mlx-lm's protocol

    @property
    def offset(self) -> int | mx.array:
        """The number of tokens held; for a batch, ``[batch] int32``."""
        lengths = [sequence.num_tokens for sequence in self.rows]
        return mx.array(lengths, dtype=mx.int32) if self._is_batch else max(lengths, default=0)

    def size(self) -> int:
        return max([sequence.num_tokens for sequence in self.rows], default=0)

    def empty(self) -> bool:
        return self.size() == 0

    @property
    def nbytes(self) -> int:
        """Bytes of its blocks in all layers; shared blocks count for each holder."""
        with self.sequences.lock:
            groups = self.sequences.held.manager.groups
            tables = [groups.get(row.state.seq_id, ()) for row in self.rows]
            num_blocks = sum(len(table) for of_row in tables for table in of_row)
            return num_blocks * self.sequences.cache.config.nbytes_per_block

    @property
    def state(self) -> list[object]:
        """Evaluates all K/V, which is what mlx-lm reads it for. The result references no slab,
        because the next write would copy a slab that is referenced.
        """
        with self.sequences.lock:
            mx.eval(self.sequences.cache.arrays)
        return [NotSaved()]

    def is_trimmable(self) -> bool:
        """True, even for a full window: tokens that have left it are recomputed."""
        return True

    def trim(self, n: int) -> int:
        num_trimmed = min(n, self.size())
        for sequence in self.rows:
            sequence.trim(max(0, sequence.num_tokens - num_trimmed))
        return num_trimmed

    def __deepcopy__(self, memo: dict[int, Any]) -> PromptCache:
        copied = PromptCache(
            self.sequences, [sequence.fork() for sequence in self.rows], self._is_batch
        )
        copied._left_padding = list(self._left_padding)
        copied._lengths = None if self._lengths is None else list(self._lengths)
        return copied

    # Batches

    @classmethod
    def merge(cls, caches: Sequence[PromptCache]) -> PromptCache:
        """A batch of the sequences of several caches, which stay as they are."""
        rows = [sequence.fork() for cache in caches for sequence in cache._one_row()]
        return cls(caches[0].sequences, rows, is_batch=True)

    def _one_row(self) -> list[CachedSequence]:
        return self.rows or [self.sequences.new()]

    def extract(self, idx: int) -> PromptCache:
        """A copy of one sequence of a batch."""
        return PromptCache(self.sequences, [self.rows[idx].fork()])

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep only the sequences of these rows, in this order."""
        kept = batch_indices.tolist() if isinstance(batch_indices, mx.array) else batch_indices
        indices = [int(index) for index in kept]  # type: ignore[arg-type, union-attr]
        self.rows = [self.rows[index] for index in indices]
        self._left_padding = [self._left_padding[index] for index in indices]
        if self._lengths is not None:
            self._lengths = [self._lengths[index] for index in indices]

    def extend(self, other: PromptCache) -> None:
        """Add the sequences of another batch after these."""
        if not isinstance(other, PromptCache) or other.sequences is not self.sequences:
            raise ArgumentError(
                f"[attach] a batch of an attached model can't be extended by {shown(other)}",
                "other",
            )
        if self._lengths is not None or other._lengths is not None:
            raise ArgumentError("[attach] call finalize() before extend()", "other")
        self.rows += [sequence.fork() for sequence in other.rows]
        self._left_padding += other._left_padding

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Declare which of the next columns are padding.

        Args:
            left_padding: per row, the number of columns before its tokens.
            lengths: per row, the number of tokens; required with ``right_padding``.
        """
        for name, counts in (("left_padding", left_padding), ("lengths", lengths)):
            if counts is not None and len(counts) != len(self.rows):
                raise ArgumentError(
                    f"[attach] {name} must have one entry for each of {len(self.rows)} sequences, "
                    f"got {shown(counts)}",
                    name,
                )
        if left_padding is not None:
            self._left_padding = [int(count) for count in left_padding]
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise ArgumentError("[attach] right_padding requires lengths", "lengths")
            self._lengths = [int(count) for count in lengths]

    def finalize(self) -> None:
        """Declare that none of the next columns is padding."""
        self._left_padding = [0] * len(self.rows)
        self._lengths = None
