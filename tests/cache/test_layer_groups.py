"""How the layers of models with windows are divided into groups, and what that costs."""

from __future__ import annotations

import mlx.core as mx
import pytest
from helpers.mlx_lm_models import GEMMA3, random_model, stock_tokens
from paged_testing.integrity import check_scheduler

from mlx_paged import Engine, SamplingParams
from mlx_paged.cache import KVCacheConfig, LayerSpec, group_layers
from mlx_paged.cache.layer_groups import CONTEXT
from mlx_paged.core.block_need import BlockNeed
from mlx_paged.models.mlx_lm import adapt

BLOCK_SIZE = 16


def pattern(num_layers: int, window: int, every: int, first: int | None = None) -> list[LayerSpec]:
    """Layers of which every ``every``-th one keeps all tokens, the others a window."""
    first = every - 1 if first is None else first
    return [
        LayerSpec(2, 64, 64, window=None if layer % every == first else window)
        for layer in range(num_layers)
    ]


# As the projects publish them: gemma-3-27b has 62 layers of which 10 keep all tokens.
GEMMA3_27B = pattern(62, 1024, 6)
LAYOUTS = {
    "gemma-3-27b": GEMMA3_27B,
    "gemma-3-12b": pattern(48, 1024, 6),
    "gemma-3-4b": pattern(34, 1024, 6),
    "gemma-3-1b": pattern(26, 512, 6),
    "gpt-oss-20b": pattern(24, 128, 2),
    "gpt-oss-120b": pattern(36, 128, 2),
    "llama-4-scout": pattern(48, 8192, 4),
    "command-r7b": pattern(32, 4096, 4),
    "more layers keep all tokens than a window": pattern(11, 1024, 2, 0),
    "one layer of many keeps all tokens": pattern(30, 1024, 30),
}


def sizes(layers: list[LayerSpec]) -> list[int]:
    return [len(group.layers) for group in group_layers(layers, BLOCK_SIZE)]


def extra(layers: list[LayerSpec], num_tokens: int) -> float:
    """The share of K/V bytes of one sequence that groups take beyond the rows of its layers."""
    groups = group_layers(layers, BLOCK_SIZE)
    config = KVCacheConfig(tuple(layers), BLOCK_SIZE, 1, groups)
    held = BlockNeed(config.retentions, BLOCK_SIZE).max_num_held_blocks(num_tokens)
    rows = [
        -(-group.retention.max_num_held(num_tokens) // BLOCK_SIZE) * config.block_nbytes(index)
        for index, group in enumerate(groups)
    ]
    return held * config.nbytes_per_block / sum(rows) - 1


def test_the_layers_of_gemma_3_27b_that_keep_all_tokens_share_one_group():
    assert sizes(GEMMA3_27B) == [10, 10, 10, 10, 10, 10, 2]
    assert extra(GEMMA3_27B, 131_072) < 0.01


@pytest.mark.parametrize("name", LAYOUTS)
def test_groups_take_a_thirtieth_more_bytes_for_long_contexts_and_a_quarter_for_short_ones(
    name: str,
):
    layers = LAYOUTS[name]
    for num_tokens in (CONTEXT, 131_072, 1_000_000):
        assert extra(layers, num_tokens) <= 1 / 30
    assert extra(layers, 128) <= 1 / 4


def test_equal_numbers_of_both_kinds_are_two_groups_without_padding():
    assert sizes(LAYOUTS["gpt-oss-20b"]) == [12, 12]
    assert sizes(LAYOUTS["gpt-oss-120b"]) == [18, 18]


def test_other_layouts_have_few_groups():
    assert sizes(LAYOUTS["gemma-3-12b"]) == [8] * 6
    assert sizes(LAYOUTS["gemma-3-4b"]) == [5] * 6 + [4]
    assert sizes(LAYOUTS["llama-4-scout"]) == [12] * 4
    assert sizes(LAYOUTS["more layers keep all tokens than a window"]) == [6, 5]


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layer_is_in_one_group_of_layers_that_keep_the_same_tokens(name: str):
    layers = LAYOUTS[name]
    groups = group_layers(layers, BLOCK_SIZE)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(layers)))
    for group in groups:
        assert len({layers[layer].window for layer in group.layers}) == 1
    config = KVCacheConfig(tuple(layers), BLOCK_SIZE, 1, groups)
    assert len(config.slabs) == max(len(group.layers) for group in groups)
    # The first group keeps the most: its table has the prefixes that are found.
    assert groups[0].retention.num_recent_tokens is None


# Of 13 layers two keep all tokens, and the last group has one; of 14 four do, and it has two.
@pytest.mark.parametrize(
    ("num_layers", "every", "expected"),
    [(13, 6, [2] * 6 + [1]), pytest.param(14, 3, [4, 4, 4, 2], marks=pytest.mark.slow)],
)
def test_tokens_are_those_of_mlx_lm_with_a_group_that_is_not_full(
    num_layers: int, every: int, expected: list[int]
):
    config = GEMMA3 | {"num_hidden_layers": num_layers, "sliding_window_pattern": every}
    model = random_model(config)
    prompts = [[5, 9, 200, 17, 33, 4, 90], list(range(40, 95)), [7, 3, 3, 8] * 6]
    engine = Engine(
        adapt(model, config), block_size=8, max_num_seqs=4, max_num_batched_tokens=16, seed=0
    )
    assert [len(group.layers) for group in engine.cache.config.groups] == expected
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    for _ in range(2):  # The second time their beginnings are cached.
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), prompt, params)
        found = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                found[output.request_id] = list(output.outputs[0].token_ids)
            check_scheduler(engine.scheduler)
        for index, prompt in enumerate(prompts):
            assert found[str(index)] == stock_tokens(model, prompt, 12)
    assert engine.stats().num_cached_prompt_tokens > 0
    mx.clear_cache()
