"""The basic KV cache: contiguous K/V per sequence and layer, growing as in mlx-lm's ``KVCache``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_paged.cache.base import KVCache, KVCacheStats, SeqId
from mlx_paged.config import KVCacheConfig
from mlx_paged.errors import CacheFullError

GROWTH_STEP = 256  # tokens, as in mlx-lm's KVCache


@dataclass(slots=True, eq=False)
class _Sequence:
    """Per layer ``[1, num_kv_heads, capacity, head_dim]``; empty lists before the first token."""

    keys: list[mx.array] = field(default_factory=list)
    values: list[mx.array] = field(default_factory=list)
    length: int = 0
    capacity: int = 0


class BasicKVCache(KVCache):
    """Contiguous K/V per sequence: the fastest for one short stream, and the yardstick for the
    paged cache.

    Args:
        config: shape and budget (in tokens: ``config.num_slots``).
        backend: accepted for symmetry; attention is always MLX's own SDPA.
    """

    kind = "basic"

    def __init__(self, config: KVCacheConfig, backend: str = "auto"):
        super().__init__(config)
        self._sequences: dict[SeqId, _Sequence] = {}
        self._step: list[tuple[_Sequence, int, int]] = []  # sequence, length before, new tokens
        self._new_seqs: list[SeqId] = []

    # Steps

    def _begin_step(self, num_new_tokens: Mapping[SeqId, int]) -> None:
        sequences = {seq: self._sequences.get(seq) or _Sequence() for seq in num_new_tokens}
        lengths = {
            seq: sequence.length + num_new_tokens[seq] for seq, sequence in sequences.items()
        }
        spare = self._make_room(lengths)
        for seq, sequence in sequences.items():
            if lengths[seq] > sequence.capacity:
                # Round up to the growth step as far as the budget allows.
                extra = min(-lengths[seq] % GROWTH_STEP, spare)
                spare -= extra
                self._set_capacity(sequence, lengths[seq] + extra)
        self._new_seqs = [seq for seq in sequences if seq not in self._sequences]
        self._sequences.update(sequences)
        self._step = [
            (sequence, sequence.length, num_new_tokens[seq]) for seq, sequence in sequences.items()
        ]

    def _make_room(self, lengths: dict[SeqId, int]) -> int:
        """Tokens left of the budget when these sequences have these lengths; if need be, nobody
        keeps unused rows.
        """
        capacities = {seq: sequence.capacity for seq, sequence in self._sequences.items()}
        held = {seq: sequence.length for seq, sequence in self._sequences.items()}
        rounded_up = capacities | {
            seq: max(n, capacities.get(seq, 0)) for seq, n in lengths.items()
        }
        spare = self.config.num_slots - sum(rounded_up.values())
        if spare >= 0:
            return spare
        spare = self.config.num_slots - sum((held | lengths).values())
        if spare < 0:
            needed = sum(lengths.values())
            raise CacheFullError(
                f"[basic cache] the step needs room for {needed} tokens, the budget holds {self.config.num_slots} and "
                f"{self.config.num_slots - spare - needed} are taken by other sequences; raise kv_cache_bytes or "
                f"free a sequence"
            )
        for sequence in self._sequences.values():
            self._set_capacity(sequence, sequence.length)
        return spare

    def _set_capacity(self, sequence: _Sequence, capacity: int) -> None:
        config = self.config
        length = sequence.length
        extra = mx.zeros((1, config.num_kv_heads, capacity - length, config.head_dim), self.dtype)
        for arrays in (sequence.keys, sequence.values):
            held = [[array[..., :length, :]] for array in arrays] or [[]] * config.num_layers
            arrays[:] = [mx.concatenate([*rows, extra], axis=2) for rows in held]
        sequence.capacity = capacity

    def _commit_step(self) -> None:
        for sequence, start, num_new in self._step:
            sequence.length = start + num_new
        self._close_step()

    def _abort_step(self) -> None:
        for seq in self._new_seqs:
            del self._sequences[seq]
        self._close_step()

    def _close_step(self) -> None:
        self._step, self._new_seqs = [], []

    def update(self, layer: int, k: mx.array, v: mx.array) -> None:
        row = 0
        for sequence, start, num_new in self._open_step():
            end = start + num_new
            rows = slice(row, row + num_new)
            sequence.keys[layer][:, :, start:end] = k[rows].swapaxes(0, 1).astype(self.dtype)
            sequence.values[layer][:, :, start:end] = v[rows].swapaxes(0, 1).astype(self.dtype)
            row += num_new

    def update_and_attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scale: float
    ) -> mx.array:
        self.update(layer, k, v)
        outputs = []
        row = 0
        only_last = q.shape[0] < k.shape[0]
        for sequence, start, num_new in self._open_step():
            end = start + num_new
            num_new = 1 if only_last else num_new
            out = mx.fast.scaled_dot_product_attention(
                q[row : row + num_new].swapaxes(0, 1)[None].astype(self.dtype),
                sequence.keys[layer][:, :, :end],
                sequence.values[layer][:, :, :end],
                scale=scale,
                mask=None if num_new == 1 else "causal",
            )
            outputs.append(out[0].swapaxes(0, 1))
            row += num_new
        return (outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)).astype(q.dtype)

    def _open_step(self) -> list[tuple[_Sequence, int, int]]:
        if not self._step:
            raise RuntimeError("[basic cache] no step is open; use `with cache.step(...)`")
        return self._step

    # Sequences

    def seq_len(self, seq: SeqId) -> int:
        sequence = self._sequences.get(seq)
        return 0 if sequence is None else sequence.length

    @property
    def seqs(self) -> list[SeqId]:
        return list(self._sequences)

    def trim(self, seq: SeqId, length: int) -> None:
        self._check_trim(seq, length)
        self._sequences[seq].length = length

    def free(self, seq: SeqId) -> None:
        if seq not in self._sequences:
            raise self._missing(seq)
        del self._sequences[seq]

    def fork(self, seq: SeqId, new_seq: SeqId) -> None:
        self._check_fork(seq, new_seq)
        source = self._sequences[seq]
        self._make_room({new_seq: source.length})
        length = source.length
        # Views of the same memory: whoever writes first gets a copy from MLX.
        self._sequences[new_seq] = _Sequence(
            [keys[..., :length, :] for keys in source.keys],
            [values[..., :length, :] for values in source.values],
            length,
            capacity=length,
        )

    def materialize(self, seq: SeqId, layer: int) -> tuple[mx.array, mx.array]:
        if seq not in self._sequences:
            raise self._missing(seq)
        sequence = self._sequences[seq]
        keys, values = sequence.keys[layer], sequence.values[layer]
        return self._detach(keys[0, :, : sequence.length]), self._detach(
            values[0, :, : sequence.length]
        )

    @property
    def arrays(self) -> list[mx.array]:
        return [array for s in self._sequences.values() for array in (*s.keys, *s.values)]

    def stats(self) -> KVCacheStats:
        num_tokens = sum(s.length for s in self._sequences.values())
        capacity = sum(s.capacity for s in self._sequences.values())
        return KVCacheStats(
            num_seqs=len(self._sequences),
            num_tokens=num_tokens,
            nbytes_used=num_tokens * self.config.nbytes_per_token,
            nbytes_held=capacity * self.config.nbytes_per_token,
        )

    def max_seq_len(self, seq: SeqId) -> int:
        return self.config.num_slots - sum(
            s.length for other, s in self._sequences.items() if other != seq
        )
