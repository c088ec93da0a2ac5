"""What every KV cache does, whatever lies behind it: the protocol between a model, its runner and
its K/V.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx

from mlx_paged.config import KVCacheConfig

SeqId = Hashable
# The key of a mapping that a caller hands in. Mapping is invariant in its keys: with SeqId for
# them, a type checker would refuse a dict[str, int].
AnySeqId: TypeAlias = Any


class CacheFullError(RuntimeError):
    """The budget can't hold what a step would add, and nothing was changed.

    Attributes:
        argument: the argument that the message advises to raise.
    """

    argument = "kv_cache_bytes"


class PromptTooLongError(CacheFullError):
    """The budget or the context can't hold a prompt, and nothing was changed."""


def prompt_too_long(num_tokens: int, block_size: int, num_blocks: int) -> PromptTooLongError:
    return PromptTooLongError(
        f"[paged cache] a prompt of {num_tokens} tokens needs {-(-num_tokens // block_size)} "
        f"blocks of {block_size}, the budget holds {num_blocks}; raise kv_cache_bytes or shorten the prompt"
    )


def prompt_beyond_context(num_tokens: int, max_model_len: int) -> PromptTooLongError:
    error = PromptTooLongError(
        f"[context] a prompt of {num_tokens} tokens leaves no room for an answer: prompt and "
        f"answer have at most {max_model_len} tokens together; shorten the prompt or raise "
        "max_model_len"
    )
    error.argument = "max_model_len"
    return error


@dataclass(frozen=True, eq=False)
class Step:
    """The packed inputs of one step: new tokens of all its sequences behind one another."""

    positions: mx.array  # [num_tokens] int32, of each new token in its sequence
    last_rows: (
        mx.array
    )  # [num_seqs] int32, the row of each sequence's last new token (vLLM: logits_indices)
    num_tokens: int

    @classmethod
    def build(cls, starts: Sequence[int], counts: Sequence[int]) -> Step:
        """Of sequences with so many tokens before the step, and so many new ones."""
        positions: list[int] = []
        for start, n in zip(starts, counts, strict=True):
            positions += range(start, start + n)
        last_rows = [end - 1 for end in itertools.accumulate(counts)]
        return cls(mx.array(positions), mx.array(last_rows), len(positions))


@dataclass(frozen=True, eq=False)
class KVSnapshot:
    """One sequence's dense K and V in all layers, independent of the cache it came from."""

    keys: mx.array  # [num_layers, num_kv_heads, num_tokens, head_dim]
    values: mx.array  # the same

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[2]


@dataclass(frozen=True)
class KVCacheStats:
    """What a cache holds now. Blocks are 0 for a cache that has none."""

    num_seqs: int
    num_tokens: int
    nbytes_used: int  # K/V of the tokens held
    nbytes_held: int  # K/V memory allocated for them
    blocks_used: int = 0
    num_blocks: int = 0  # the budget


class KVCache(ABC):
    """K/V of several sequences in all layers of a model.

    A sequence is any hashable id; it begins with the first step that names it and ends with
    :meth:`free`. A step adds tokens to some sequences::

        with cache.step({"a": 1, "b": 17}) as step:          # one decode and a prompt of 17, packed: 18 rows
            logits = model(tokens, step.positions, cache)    # each layer calls cache.update_and_attend(...)
            mx.eval(logits, cache.arrays)                    # evaluate a step before the next one is built

    If the body raises, the step did not happen.
    """

    kind: str

    def __init__(self, config: KVCacheConfig):
        self.config = config
        self.dtype: mx.Dtype = getattr(mx, config.dtype)
        self._in_step = False

    # Steps

    @contextmanager
    def step(self, num_new_tokens: Mapping[AnySeqId, int]) -> Iterator[Step]:
        """Room for so many new tokens of each sequence, in the mapping's order; their lengths grow
        when the body is done.

        Raises:
            CacheFullError: the budget can't hold them; nothing was changed.
            ValueError: no sequence, or a sequence without a new token.
            RuntimeError: another step of this cache is open.
        """
        if self._in_step:
            raise RuntimeError(
                f"[{self.kind} cache] a step is open already; finish it before the next one"
            )
        if not num_new_tokens:
            raise ValueError(f"[{self.kind} cache] a step needs at least one sequence")
        for seq, num_new in num_new_tokens.items():
            if num_new < 1:
                raise ValueError(
                    f"[{self.kind} cache] sequence {seq!r}: a step adds at least 1 token, got {num_new}"
                )
        counts = list(num_new_tokens.values())
        starts = [self.seq_len(seq) for seq in num_new_tokens]
        self._begin_step(num_new_tokens)
        self._in_step = True
        try:
            yield Step.build(starts, counts)
        except BaseException:
            self._abort_step()
            raise
        else:
            self._commit_step()
        finally:
            self._in_step = False

    @abstractmethod
    def _begin_step(self, num_new_tokens: Mapping[SeqId, int]) -> None:
        """Make room, or raise CacheFullError and change nothing."""

    @abstractmethod
    def _commit_step(self) -> None:
        """The open step's tokens are in the cache now."""

    @abstractmethod
    def _abort_step(self) -> None:
        """Forget the open step; sequences are as they were before it."""

    @abstractmethod
    def update(self, layer: int, k: mx.array, v: mx.array) -> None:
        """Write the open step's rows of one layer, ``[num_tokens, num_kv_heads, head_dim]`` each."""

    @abstractmethod
    def update_and_attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scale: float
    ) -> mx.array:
        """Write the open step's K/V rows of ``layer``, then attend: causal within each sequence.

        Args:
            q: ``[num_tokens, num_heads, head_dim]``, rotated; or ``[num_seqs, ...]``, of each
                sequence's last new token only.
            k, v: ``[num_tokens, num_kv_heads, head_dim]``; cast to the cache's dtype.
            scale: of the scores, usually ``head_dim ** -0.5``.

        Returns:
            The shape and dtype of ``q``.
        """

    # Sequences

    @abstractmethod
    def seq_len(self, seq: SeqId) -> int:
        """Tokens held of a sequence; 0 when there is no such sequence."""

    @property
    @abstractmethod
    def seqs(self) -> list[SeqId]:
        """The sequences held, oldest first."""

    @abstractmethod
    def trim(self, seq: SeqId, length: int) -> None:
        """Forget a sequence's tokens from position ``length`` on (``trim_to``, after speculation or
        an edited turn).

        Raises:
            KeyError: no such sequence.
            ValueError: ``length`` is negative or beyond the sequence.
        """

    @abstractmethod
    def free(self, seq: SeqId) -> None:
        """Forget a sequence; raises ``KeyError`` when there is no such sequence."""

    @abstractmethod
    def fork(self, seq: SeqId, new_seq: SeqId) -> None:
        """A second sequence with the same tokens, sharing their K/V until one of the two writes.

        Raises:
            KeyError: no such sequence.
            ValueError: ``new_seq`` exists.
            CacheFullError: a basic cache counts the copy that the first write will make, and it
                doesn't fit.
        """

    @abstractmethod
    def materialize(self, seq: SeqId, layer: int) -> tuple[mx.array, mx.array]:
        """Dense K and V of one layer, ``[num_kv_heads, num_tokens, head_dim]`` each; ``KeyError``
        if not there.
        """

    @property
    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """What has to be evaluated for every write so far to have happened."""

    @abstractmethod
    def stats(self) -> KVCacheStats: ...

    @abstractmethod
    def max_seq_len(self, seq: SeqId) -> int:
        """The length to which a sequence, held already or not, could grow if the others stay as
        they are.
        """

    def append(self, seq: SeqId, k: mx.array, v: mx.array) -> None:
        """Append rows of one or more tokens in all layers: ``[num_layers, num_tokens, num_kv_heads,
        head_dim]`` each.

        ``push_row`` elsewhere. A model appends through :meth:`update_and_attend` instead.

        Raises:
            ValueError: a shape that doesn't fit the cache.
            CacheFullError: the budget can't hold them; nothing was changed.
        """
        config = self.config
        expected = (
            config.num_layers,
            k.shape[1] if k.ndim == 4 else 1,
            config.num_kv_heads,
            config.head_dim,
        )
        if k.shape != expected or v.shape != expected:
            raise ValueError(
                f"[{self.kind} cache] append: expected [num_layers, num_tokens, num_kv_heads, head_dim] = "
                f"[{config.num_layers}, *, {config.num_kv_heads}, {config.head_dim}], got {list(k.shape)} and "
                f"{list(v.shape)}"
            )
        with self.step({seq: k.shape[1]}):
            for layer in range(config.num_layers):
                self.update(layer, k[layer], v[layer])
            mx.eval(self.arrays)

    def set_prompt(self, seq: SeqId, k: mx.array, v: mx.array) -> None:
        """Make these rows the whole sequence, in place of what it held; shapes and errors as
        :meth:`append`.

        ``set_prefill`` elsewhere.
        """
        if seq in self.seqs:
            self.free(seq)
        self.append(seq, k, v)

    def snapshot(self, seq: SeqId) -> KVSnapshot:
        """A sequence's K/V, evaluated and independent of this cache; ``KeyError`` when there is no
        such sequence.
        """
        layers = [self.materialize(seq, layer) for layer in range(self.config.num_layers)]
        snapshot = KVSnapshot(mx.stack([k for k, _ in layers]), mx.stack([v for _, v in layers]))
        mx.eval(snapshot.keys, snapshot.values)
        return snapshot

    def restore(self, seq: SeqId, snapshot: KVSnapshot) -> None:
        """Make ``seq`` hold a snapshot, of a cache of either kind; errors as :meth:`append`."""
        self.set_prompt(seq, snapshot.keys.swapaxes(1, 2), snapshot.values.swapaxes(1, 2))

    @staticmethod
    def _detach(view: mx.array) -> mx.array:
        """An evaluated copy: a view that stays alive would make the next write copy the whole array
        behind it.
        """
        # The product is exact and, unlike mx.contiguous, never shares the memory of a view that is
        # contiguous already.
        copy = view * 1
        mx.eval(copy)
        return copy

    def shrink(self) -> int:
        """Give back memory that no sequence needs; returns how many bytes. A copy of what stays is
        the price.

        Raises:
            RuntimeError: a step is open.
        """
        if self._in_step:
            raise RuntimeError(f"[{self.kind} cache] a step is open; shrink after it")
        return 0

    def _missing(self, seq: SeqId) -> KeyError:
        return KeyError(f"[{self.kind} cache] no sequence {seq!r}; it holds {self.seqs}")

    def _check_fork(self, seq: SeqId, new_seq: SeqId) -> None:
        if seq not in self.seqs:
            raise self._missing(seq)
        if new_seq in self.seqs:
            raise ValueError(f"[{self.kind} cache] fork: sequence {new_seq!r} exists already")

    def _check_trim(self, seq: SeqId, length: int) -> None:
        if seq not in self.seqs:
            raise self._missing(seq)
        if not 0 <= length <= self.seq_len(seq):
            raise ValueError(
                f"[{self.kind} cache] trim: length {length} must be within 0..{self.seq_len(seq)}"
            )
