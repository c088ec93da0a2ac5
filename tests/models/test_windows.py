"""Layers with windows of their own, and windows with sinks for any model, against the definition:
token by token, with nothing evicted and positions counted among what is seen.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from helpers.engine_runs import CONFIG, ask, greedy, make_engine
from helpers.fast_lane import mostly_slow
from helpers.qwen3_helpers import SCALINGS, all_logits, chunks, float32_tolerance, max_error
from helpers.streaming_reference import everything, sliding, streamed_logits, streaming
from mlx.utils import tree_map
from paged_testing.integrity import check_manager

from mlx_paged import make_kv_cache
from mlx_paged.cache import Sequences, layer_groups
from mlx_paged.engine.engine import Engine
from mlx_paged.errors import ArgumentError
from mlx_paged.models import qwen3

TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, CONFIG["vocab_size"], 230)]


@cache
def model_with(**changes) -> qwen3.Model:
    """All callers share its weights, which must not be changed."""
    mx.random.seed(11)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG | changes))
    mx.eval(model.parameters())
    return model


def windowed_layers(num_layers: int, num_full: int, window: int) -> qwen3.Model:
    return model_with(
        num_hidden_layers=num_layers,
        use_sliding_window=True,
        sliding_window=window,
        max_window_layers=num_full,
    )


def assert_as_defined(model: qwen3.Model, actual: np.ndarray, expected: np.ndarray) -> None:
    tolerance = float32_tolerance(model.args, len(expected), expected)
    assert max_error(actual, expected) < tolerance
    # What is left out would show.
    full = streamed_logits(model, TOKENS[: len(expected)], everything)
    assert max_error(full[-20:], expected[-20:]) > 10 * tolerance


@mostly_slow("sizes", [[1] * 119, [50, 1, 7, 30], []], quick=(1,))
@mostly_slow(
    ("num_layers", "num_full", "window"),
    [(2, 0, 21), (4, 2, 16), (3, 2, 5), (3, 1, 40)],
    quick=(1,),
)
def test_layers_with_windows_see_them(num_layers, num_full, window, sizes):
    model = windowed_layers(num_layers, num_full, window)
    seqs = Sequences(make_kv_cache(model, block_size=8, kv_cache_bytes="200blocks"))
    tokens = TOKENS[:120]
    actual = all_logits(model, seqs, [{"a": chunk} for chunk in chunks(tokens, *sizes)])["a"]
    sees = [everything] * num_full + [sliding(window)] * (num_layers - num_full)
    expected = streamed_logits(model, tokens, sees, restarts_positions=False)
    assert_as_defined(model, actual, expected)
    check_manager(seqs.manager)


@pytest.mark.parametrize("kind", ["paged", "basic"])
def test_both_caches_agree_on_windows(kind):
    model = windowed_layers(4, 2, 16)
    seqs = Sequences(make_kv_cache(model, kind, block_size=8, kv_cache_bytes="200blocks"))
    actual = all_logits(model, seqs, [{"a": chunk} for chunk in chunks(TOKENS, 50, 3, 1, 80)])["a"]
    sees = [everything] * 2 + [sliding(16)] * 2
    expected = streamed_logits(model, TOKENS, sees, restarts_positions=False)
    assert_as_defined(model, actual, expected)


def test_what_left_the_window_of_a_group_is_free_at_once():
    model = windowed_layers(4, 2, 16)
    seqs = Sequences(make_kv_cache(model, block_size=8, kv_cache_bytes="200blocks"))
    held = []
    for count in range(1, 100):
        all_logits(model, seqs, [{"a": TOKENS[count : count + 1]}])
        held.append([len(table) for table in seqs.manager.groups["a"]])
        assert seqs.cache.pool.num_used_blocks == sum(held[-1])
    # All tokens in two layers, and the last 16 in two: those before the next token are 15.
    assert held[-1] == [13, 3]
    assert max(windowed for _, windowed in held) == 3
    assert [group.layers for group in seqs.cache.config.groups] == [(0, 1), (2, 3)]
    # A block is one group's: two layers wide, not four.
    assert len(seqs.cache._slabs) == 2
    assert seqs.cache.config.nbytes_per_block == 8 * seqs.cache.config.nbytes_per_token // 2


@mostly_slow("longest", [1, 5, 1000], quick=(1,))
@mostly_slow(
    ("window", "num_sinks", "block_size"),
    [(32, 8, 8), (40, 0, 8), (64, 16, 16), (17, 3, 8)],
    quick=(0, 3),
)
@mostly_slow("dtype", [mx.float32, mx.bfloat16])
def test_a_window_with_sinks_is_streaming_llm(window, num_sinks, block_size, longest, dtype):
    model = model_with()
    exact = streamed_logits_of(window, num_sinks, block_size, model)
    if dtype != mx.float32:
        weights = tree_map(lambda weight: weight.astype(dtype), model.parameters())
        model = qwen3.Model(model.args)
        model.update(weights)
    seqs = Sequences(
        make_kv_cache(
            model,
            block_size=block_size,
            kv_cache_bytes="40blocks",
            window=window,
            num_sink_tokens=num_sinks,
        )
    )
    parts, done, most = [], 0, 0
    while done < len(TOKENS):
        num_new = min(longest, seqs.manager.max_run("a"), len(TOKENS) - done)
        parts.append(all_logits(model, seqs, [{"a": TOKENS[done : done + num_new]}])["a"])
        done += num_new
        most = max(most, seqs.cache.pool.num_used_blocks)
        check_manager(seqs.manager)
    actual = np.concatenate(parts)
    if dtype == mx.float32:
        assert_as_defined(model, actual, exact)
    else:
        # bfloat16 has 8 bits, and some 20 roundings lie on the way to a logit.
        assert np.abs(actual - exact).max() < 0.04 * np.abs(exact).max()
    retention = seqs.cache.config.groups[0].retention
    held = retention.max_num_held(len(TOKENS))
    assert most == held // block_size < len(TOKENS) // block_size


def streamed_logits_of(window, num_sinks, block_size, model) -> np.ndarray:
    def rounded(number: int) -> int:
        return -(-number // block_size) * block_size

    stride = max(window // 4 // block_size, 1) * block_size
    return streamed_logits(model, TOKENS, streaming(rounded(window), rounded(num_sinks), stride))


def test_windows_with_sinks_and_windows_of_layers_go_together():
    model = windowed_layers(4, 2, 16)
    seqs = Sequences(
        make_kv_cache(model, block_size=8, kv_cache_bytes="60blocks", window=32, num_sink_tokens=8)
    )
    parts, done = [], 0
    for length in itertools.cycle([1, 7, 100]):
        num_new = min(length, seqs.manager.max_run("a"), len(TOKENS) - done)
        if not num_new:
            break
        parts.append(all_logits(model, seqs, [{"a": TOKENS[done : done + num_new]}])["a"])
        done += num_new
    sees = [streaming(32, 8, 8)] * 2 + [sliding(16)] * 2
    expected = streamed_logits(model, TOKENS, sees)
    assert_as_defined(model, np.concatenate(parts), expected)


def test_rotating_keys_adds_positions():
    for kind in ("none", "linear", "yarn", "llama3"):
        model = model_with.__wrapped__(rope_scaling=SCALINGS[kind])
        rope = model.layers[1].self_attn.rope
        keys = mx.random.normal((7, 2, 1, 16))
        here, there = (rope(keys, offset=offset).squeeze(2) for offset in (3, 203))
        moved = model.rotate_keys(1, here, 200)
        assert mx.abs(moved - there).max().item() < 1e-4
        assert mx.abs(here - there).max().item() > 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "basic", "window": 64}, "window=64 needs the paged cache"),
        ({"num_sink_tokens": 4}, "num_sink_tokens has no effect without a window"),
        ({"window": 0}, "window must be a whole number, at least 1, got 0"),
        ({"window": "64"}, "window must be a whole number"),
        ({"window": 64, "num_sink_tokens": -1}, "num_sink_tokens must be a whole number, at least"),
        ({"window": 1024}, "attend to 1296 tokens, .* context length is 1024"),
    ],
)
def test_windows_that_can_not_be_are_refused_by_name(options, message):
    model = model_with(max_position_embeddings=1024)
    with pytest.raises(ArgumentError, match=message):
        make_kv_cache(model, kv_cache_bytes="2M", **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": True}, "sliding_window in config.json must be .*got None"),
        ({"layer_types": ["full_attention"]}, "layer_types .* each of 2 layers"),
        ({"layer_types": ["full_attention", "banded"]}, "layer_types .*got 'banded'"),
        ({"layer_types": ["sliding_attention"] * 2}, "use_sliding_window is not set"),
        ({"max_window_layers": -1}, "max_window_layers .* at least 0, got -1"),
    ],
)
def test_windows_in_a_config_that_can_not_be_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        qwen3.ModelArgs.from_dict(CONFIG | changes)


def test_layer_types_say_which_layers_have_windows():
    args = qwen3.ModelArgs.from_dict(
        CONFIG
        | {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    )
    assert args.windows == [9, None]
    assert replace(args, layer_types=None, max_window_layers=1).windows == [None, 9]
    assert replace(args, layer_types=None).windows == [None, None]


@mostly_slow("num_full", [2, 1], quick=(1,))
def test_positions_start_over_and_no_token_changes(monkeypatch, num_full):
    monkeypatch.setattr(layer_groups, "POSITION_WRAP", 24)
    model = windowed_layers(2, num_full, 12)
    seqs = Sequences(
        make_kv_cache(model, block_size=8, kv_cache_bytes="60blocks", window=32, num_sink_tokens=8)
    )
    seen, parts, done = [], [], 0
    for length in itertools.cycle([1, 7, 100]):
        num_new = min(length, seqs.manager.max_run("a"), len(TOKENS) - done)
        if not num_new:
            break
        with seqs.step({"a": num_new}) as step:
            rows = model(mx.array(TOKENS[done : done + num_new]), seqs.cache.layers)
            mx.eval(rows, seqs.cache.arrays)
            seen += step.positions.tolist()
        parts.append(np.array(rows))
        done += num_new
        check_manager(seqs.manager)
    sees = [streaming(32, 8, 8)] * num_full + [sliding(12)] * (2 - num_full)
    assert_as_defined(model, np.concatenate(parts), streamed_logits(model, TOKENS, sees))
    assert max(seen) < 32 + 8 + 8 + 24 < len(TOKENS)


@pytest.mark.slow
def test_what_was_computed_before_positions_started_over_is_not_found_behind_it(monkeypatch):
    monkeypatch.setattr(layer_groups, "POSITION_WRAP", 64)
    model = model_with()

    def engine() -> Engine:
        return make_engine(
            model, block_size=8, window=32, num_sink_tokens=8, kv_cache_bytes="400blocks"
        )

    hits = {}
    for end in range(64, 200, 8):
        request = {"a": (TOKENS[: end + 25], greedy(30))}
        warm = engine()
        # It ends before its own positions would start over.
        ask(warm, {"first": (TOKENS[:end], greedy(1))})
        assert ask(warm, request) == ask(engine(), request)
        hits[end] = warm.stats().num_hit_tokens
    # Positions start over at 104 and at 168 tokens. What was computed before is found before, and
    # what a sequence rotates in place is lost.
    expected = {end: end for end in hits} | {104: 96, 168: 160}
    expected |= dict.fromkeys((112, 120, 128), 72) | dict.fromkeys((176, 184, 192), 136)
    assert hits == expected
