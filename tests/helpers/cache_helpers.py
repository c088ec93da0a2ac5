"""Random K/V rows for small caches, and what a cache must hold after taking them."""

from __future__ import annotations

from contextlib import AbstractContextManager

import mlx.core as mx
import numpy as np

from mlx_paged.cache import ContiguousKVCache, KVCacheConfig, PagedKVCache, Sequences
from mlx_paged.core import ComputedBlocks, SequenceTables
from mlx_paged.core.computed_blocks import NOTHING_COMPUTED
from mlx_paged.engine.engine import Engine
from mlx_paged.ops import AttentionMetadata

KINDS = {"basic": ContiguousKVCache, "paged": PagedKVCache}


def uniform(**change: object) -> KVCacheConfig:
    shape = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 8, "block_size": 8, "num_blocks": 40}
    return KVCacheConfig.uniform(**shape | change)


CONFIG = uniform()


def rows(
    num_tokens: int, seed: int = 0, config: KVCacheConfig = CONFIG
) -> tuple[mx.array, mx.array]:
    """Random K and V rows, ``[num_layers, num_tokens, num_kv_heads, head_dim]`` each."""
    rng = np.random.default_rng(seed)
    spec = config.layers[0]
    shape = (len(config.layers), num_tokens, spec.num_kv_heads, spec.key_dim)
    return mx.array(rng.standard_normal(shape, dtype=np.float32)), mx.array(
        rng.standard_normal(shape, dtype=np.float32)
    )


def assert_holds(seqs: Sequences, seq: object, k: mx.array, v: mx.array) -> None:
    """The cache's dense K/V of ``seq`` are exactly these rows, in every layer."""
    assert seqs.seq_len(seq) == k.shape[1]
    for layer in range(len(seqs.cache.layers)):
        keys, values = seqs.materialize(seq, layer)
        np.testing.assert_array_equal(np.array(keys), np.array(k[layer].swapaxes(0, 1)))
        np.testing.assert_array_equal(np.array(values), np.array(v[layer].swapaxes(0, 1)))


def scheduled_step(
    seqs: Sequences, num_new_tokens: dict[str, int], **options: object
) -> AbstractContextManager[AttentionMetadata]:
    """A step of sequences whose slots are allocated, as a scheduler opens it."""
    tables = [seqs.manager.groups[seq] for seq in num_new_tokens]
    return seqs.cache.open_step(tables, list(num_new_tokens.values()), **options)


def sequences_of(engine: Engine) -> Sequences:
    """The sequences of an engine, to look into them."""
    seqs = Sequences(engine.cache)
    seqs.manager = engine.manager
    return seqs


def stored_parts(seqs: Sequences, seq: object) -> list[np.ndarray]:
    """What a cache has of a sequence, bit for bit: all parts of all layers, as bytes."""
    arrays = []
    for index, layer in enumerate(seqs.cache.layers):
        table = seqs.manager.groups[seq][seqs.cache.config.group_of(index)]
        for parts in layer.stored_rows(table):
            arrays += [np.array(mx.contiguous(part).view(mx.uint8)) for part in parts]
    return arrays


def copy_rows(old: Sequences, seq: object, new: Sequences, new_seq: object) -> None:
    """Append to a sequence what another one has, in a cache of any kind, block size and format."""
    layers = [old.materialize(seq, layer) for layer in range(len(old.cache.layers))]
    k, v = ([rows.swapaxes(0, 1) for rows in side] for side in zip(*layers, strict=True))
    new.append(new_seq, k, v)


def swapped_out(seqs: Sequences, seq: str) -> tuple[SequenceTables, list[list[bytes]]]:
    """What is kept of a sequence that is swapped out."""
    held, block_ids = seqs.manager.describe(seq)
    return held, [seqs.cache.read_blocks(group, ids) for group, ids in enumerate(block_ids)]


def swap_in(
    seqs: Sequences,
    seq: str,
    swapped: tuple[SequenceTables, list[list[bytes]]],
    hit: ComputedBlocks = NOTHING_COMPUTED,
    num_new_tokens: int = 1,
) -> None:
    """Let a sequence go on with what was kept, as a scheduler does: with slots for new tokens."""
    held, contents = swapped
    computed = seqs.manager.resumed(held, hit)
    assert seqs.manager.allocate_slots(seq, num_new_tokens, computed) == []
    for group, indices, block_ids in seqs.manager.take_loads(seq):
        seqs.cache.write_blocks(group, block_ids, [contents[group][index] for index in indices])
    for group, shift in seqs.manager.take_key_shifts(seq):
        seqs.cache.shift_keys(group, shift)
