"""Decodes at a constant batch and prompts in constant chunks make no array that MLX's cache of
freed buffers has not had: nothing is allocated, and so nothing is given back, however long an
engine runs.

Kernels are stand-ins here that allocate what kernels do and compute nothing; the buffers are those
of MLX's cache for the CPU, which takes a freed one by the rule that it has on Metal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from paged_testing import lazy_metal
from paged_testing.lazy_metal import fused_operations

from mlx_paged.engine.engine import Engine
from mlx_paged.models import qwen3
from mlx_paged.ops import attention_plan
from mlx_paged.options.sampling_params import SamplingParams

NUM_SEQS, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 4, 2, 32
SIZES = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "intermediate_size": 128,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-6,
    "vocab_size": 101,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "rope_theta": 1e4,
}
# How far Python runs ahead of the device differs from run to run, and so how many of the same
# buffers are in use at the same time.
SLACK = 48 * 1024


@pytest.fixture(scope="module")
def model() -> nn.Module:
    model: nn.Module = qwen3.Model(qwen3.ModelArgs.from_dict(SIZES))
    mx.eval(model.parameters())
    return model


@pytest.fixture(autouse=True)
def metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Metal's stand-ins, and a cache of buffers that never gives one back by itself."""
    # Those that are kept for speed would hide what a kernel allocates.
    monkeypatch.setattr(lazy_metal, "_zeros", mx.zeros)
    before = mx.set_cache_limit(2**30)
    with lazy_metal.lazy_metal(), fused_operations():
        yield
    mx.set_cache_limit(before)
    mx.clear_cache()


def obtained() -> int:
    """Bytes that MLX has from the system: as long as it gives none back, only an array for which it
    has no buffer adds to them.
    """
    return mx.get_active_memory() + mx.get_cache_memory()


def make_engine(model: nn.Module, **options: Any) -> Engine:
    return Engine(
        model, None, kv_cache_bytes="400blocks", preallocate=True, max_num_seqs=NUM_SEQS, **options
    )


def grown_in_decodes(engine: Engine, num_warm_up: int, num_steps: int, **params: Any) -> int:
    """What MLX obtains from the system for ``num_steps`` decodes of as many sequences, after
    ``num_warm_up``.
    """
    for seq in range(NUM_SEQS):
        sampling = SamplingParams(max_tokens=2000, ignore_eos=True, **params)
        engine.add_request(str(seq), [seq + 1] * (20 + 7 * seq), sampling)
    for _ in range(num_warm_up):
        engine.step()
    mx.synchronize()
    before = obtained()
    for _ in range(num_steps):
        engine.step()
    mx.synchronize()
    assert len(engine.scheduler.running) == NUM_SEQS
    return obtained() - before


def grown_in_prompts(engine: Engine, lengths: list[int]) -> int:
    """What MLX obtains from the system for prompts of these lengths, one after another, after as
    many that warm up.
    """
    obtained_before = 0
    for turn in range(2):
        mx.synchronize()
        obtained_before = obtained()
        for number, length in enumerate(lengths):
            prompt = [turn + 1, number + 1] * (length // 2)
            engine.add_request("a", prompt, SamplingParams(max_tokens=1))
            while engine.has_unfinished_requests():
                engine.step()
    mx.synchronize()
    return obtained() - obtained_before


def partials_nbytes(first: int, last: int) -> int:
    """Of the partials that decodes leave whose contexts grow from ``first`` to ``last`` tokens, in
    all sizes that they come in: those of three layers before the first ones are freed.
    """
    size_of = attention_plan.partition_sizes(NUM_KV_HEADS)
    sizes = {
        attention_plan.num_records(NUM_SEQS * -(-length // size_of[length.bit_length()]))
        for length in range(first, last)
    }
    return 3 * sum(size * NUM_HEADS * (HEAD_DIM + 4) * 4 for size in sizes)


each_format = pytest.mark.parametrize(
    "kv_format", [None, *(pytest.param(bits, marks=pytest.mark.slow) for bits in (8, 4, "K:8,V:4"))]
)


@each_format
def test_hundreds_of_decodes_allocate_nothing_but_partials_of_longer_contexts(
    model: nn.Module, kv_format: Any
):
    engine = make_engine(model, kv_format=kv_format)
    grown = grown_in_decodes(engine, 300, 400)
    assert grown <= partials_nbytes(300, 800) + SLACK


def test_hundreds_of_decodes_in_a_window_allocate_nothing(model: nn.Module):
    assert grown_in_decodes(make_engine(model, window=64), 200, 400) <= SLACK


def test_partials_of_every_length_would_be_seen(model: nn.Module, monkeypatch: pytest.MonkeyPatch):
    allowed = partials_nbytes(300, 700) + SLACK
    monkeypatch.setattr(attention_plan, "num_records", lambda count: count)
    assert grown_in_decodes(make_engine(model), 300, 300) > allowed


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 1, "top_p": 0.9, "min_p": 0.05, "top_k": 20},
        {"logprobs": 3},
        {"repetition_penalty": 1.2},
    ],
    ids=lambda params: list(params)[-1],
)
def test_nor_does_sampling(model: nn.Module, params: dict[str, Any]):
    engine = make_engine(model, window=64)
    assert grown_in_decodes(engine, 200, 400, **params) <= SLACK


@each_format
def test_prompts_in_constant_chunks_allocate_nothing(model: nn.Module, kv_format: Any):
    engine = make_engine(model, kv_format=kv_format, max_num_batched_tokens=64)
    assert grown_in_prompts(engine, [640] * 4) <= SLACK
