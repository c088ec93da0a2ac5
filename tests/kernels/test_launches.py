"""How many launches a layer of a step takes, in every format: built in Python, and replayed."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import mlx.core as mx
import pytest
from helpers.fast_lane import mostly_slow
from paged_testing.lazy_metal import fused_operations, lazy_metal

from mlx_paged.cache import KVCacheConfig, LayerSpec, PagedKVCache, Sequences
from mlx_paged.cache.layer import LayerKV
from mlx_paged.cache.open_decode import DecodeArrays
from mlx_paged.engine.compiled_decode import traced_layers
from mlx_paged.ops import KVFormat
from mlx_paged.options.config import KVBits

# Few heads, whose parts of a row have fewer than eight elements.
NUM_LAYERS, NUM_KV_HEADS, NUM_HEADS, HEAD_DIM = 3, 1, 4, 64
FORMATS = {
    "dense": KVFormat.dense("bfloat16"),
    **{
        f"K{bits.key}V{bits.value}": KVFormat.quantised(bits, HEAD_DIM, HEAD_DIM, "bfloat16")
        for bits in (KVBits(8, 8), KVBits(8, 4), KVBits(4, 8), KVBits(4, 4))
    },
}
each_format = pytest.mark.parametrize("name", FORMATS)
# Primitives that only say how an array lies in memory.
VIEWS = {"Reshape", "Transpose", "ExpandDims", "Squeeze", "Broadcast", "Slice", "Split", "Flatten"}


@pytest.fixture(autouse=True)
def stand_ins() -> Iterator[None]:
    """Each kernel call, of ours and of ``mx.fast``, is one primitive, ``Depends``."""
    with lazy_metal(), fused_operations():
        yield


def launches(outputs: Sequence[mx.array]) -> Counter[str]:
    """Of the graph behind lazy arrays."""
    dot = io.StringIO()
    mx.export_to_dot(dot, *outputs)
    names = re.findall(r'label ?= ?"(\w+)"[^\n]*shape ?= ?rectangle', dot.getvalue())
    assert names, dot.getvalue()
    return Counter(name for name in names if name not in VIEWS)


def sequences(name: str, batch: int, context: int) -> Sequences:
    """With an evaluated history."""
    spec = LayerSpec(NUM_KV_HEADS, HEAD_DIM, HEAD_DIM, format=FORMATS[name], num_heads=NUM_HEADS)
    config = KVCacheConfig((spec,) * NUM_LAYERS, 16, num_blocks=700)
    seqs = Sequences(PagedKVCache(config, "metal"))
    rows = [mx.zeros((context, NUM_KV_HEADS, HEAD_DIM), mx.bfloat16)] * NUM_LAYERS
    for seq in range(batch):
        seqs.append(str(seq), rows, rows)
    mx.eval(seqs.cache.arrays)
    return seqs


def inputs(num_tokens: int) -> tuple[mx.array, mx.array, mx.array]:
    shapes = [(num_tokens, heads, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
    arrays = tuple(mx.zeros(shape, mx.bfloat16) for shape in shapes)
    mx.eval(arrays)
    return arrays


def attend(layers: Sequence[LayerKV], qkv: tuple[mx.array, ...]) -> list[mx.array]:
    q, k, v = qkv
    outs = [layer.update_and_attend(q, k, v, scale=0.125) for layer in layers]
    return [*outs, *(layer.kv.fence for layer in layers)]


@each_format
@mostly_slow("batch", [1, 32])
@pytest.mark.parametrize(("context", "merges"), [(40, 0), (300, 1)], ids=["whole", "merged"])
def test_a_decode_takes_one_launch_more_where_rows_are_encoded(name, batch, context, merges):
    seqs, qkv = sequences(name, batch, context), inputs(batch)
    with seqs.step({str(seq): 1 for seq in range(batch)}):
        outputs = attend(seqs.cache.layers, qkv)
        built = launches(outputs)
        mx.eval(outputs)
    per_layer = 1 + merges + (name != "dense")
    assert built == {"Depends": per_layer * NUM_LAYERS}

    with seqs.step({str(seq): 1 for seq in range(batch)}):
        decode = seqs.cache.open_decode()
        assert decode is not None
        shape, arrays, *_ = decode
        replay = mx.compile(
            lambda *arrays: attend(traced_layers(seqs.cache, shape, DecodeArrays(*arrays)), qkv)
        )
        assert launches(replay(*arrays)) == built


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("bits", [None, KVBits(8, 8), KVBits(8, 4)], ids=["dense", "K8V8", "K8V4"])
def test_a_decode_on_latents_takes_one_launch_more_where_they_are_encoded(bits, batch):
    form = FORMATS["dense"] if bits is None else KVFormat.quantised(bits, 512, 64, "bfloat16")
    spec = LayerSpec(1, 512, 64, format=form, num_heads=4, holds_latents=True)
    seqs = Sequences(PagedKVCache(KVCacheConfig((spec,), 16, num_blocks=120), "metal"))
    latents, rope_keys = (mx.zeros((40, 1, width), mx.bfloat16) for width in (512, 64))
    for seq in range(batch):
        seqs.append(str(seq), latents[None], rope_keys[None])
    q = mx.zeros((batch, 4, 576), mx.bfloat16)
    mx.eval(q, seqs.cache.arrays)
    step = {str(seq): 1 for seq in range(batch)}
    expected = {"Depends": 1 + (bits is not None)}

    def attend(layers: Sequence[LayerKV]) -> list[mx.array]:
        (layer,) = layers
        rows = latents[:batch], rope_keys[:batch]
        return [layer.update_and_attend_latents(q, *rows), layer.kv.fence]

    with seqs.step(step):
        outputs = attend(seqs.cache.layers)
        assert launches(outputs) == expected
        mx.eval(outputs)
    with seqs.step(step):
        decode = seqs.cache.open_decode()
        assert decode is not None
        shape, arrays, *_ = decode
        replay = mx.compile(
            lambda *arrays: attend(traced_layers(seqs.cache, shape, DecodeArrays(*arrays)))
        )
        assert launches(replay(*arrays)) == expected


@each_format
def test_a_chunk_takes_as_many_launches_in_every_format(name):
    seqs, qkv = sequences(name, 1, 40), inputs(20)
    with seqs.step({"0": 20}):
        found = launches(attend(seqs.cache.layers, qkv))
    # Rows are written, or encoded and written; all are gathered, as numbers; and MLX attends.
    assert found == {"Depends": 3 * NUM_LAYERS}


@each_format
def test_a_layer_that_attends_for_its_last_rows_takes_one_launch_more_to_rotate_them(name):
    seqs, (q, k, v) = sequences(name, 1, 40), inputs(20)
    layer = seqs.cache.layers[0]
    with seqs.step({"0": 20}):
        layer.update(k, v)
        written = launches([layer.kv.fence])
        layer.attend(q, scale=0.125)
        found = launches([layer.kv.fence])
    assert written == {"Depends": 1}
    assert found == {"Depends": 2 + FORMATS[name].rotates_keys}
