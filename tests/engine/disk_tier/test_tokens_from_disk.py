"""Warm from disk, warm from memory and cold: the same tokens, over random workloads with evictions,
preemptions, aborts, n > 1, drafts, windows, quantised K/V and latents.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from helpers.disk_tiers import block_files, tier_stats, tiered
from helpers.drafting import eager_speculation, looks_up
from helpers.engine_runs import VOCAB_SIZE, answer, ask_alone, greedy, prompt, sampled
from helpers.mlx_lm_models import DEEPSEEK_V3, GPT_OSS, random_model, stock_tokens
from helpers.windowed_models import KINDS, model_and_options
from helpers.workloads import Run, Workload, assert_same
from mlx.utils import tree_map

from mlx_paged.engine.storing import tier_cache
from mlx_paged.models import qwen3
from mlx_paged.models.mlx_lm import adapt

PREFIX = prompt(96, seed=1)


def in_all_ways(workload: Workload, model: Any, folder: Path, **options: Any) -> dict[str, Run]:
    """A workload with no cache, with one in memory alone, and with one on disk too: that of an
    engine that finds nothing there, of a second one, and of a third one whose limit holds so few
    blocks that it evicts most.
    """

    def run(enable_prefix_caching: bool = True, **more: Any) -> Run:
        workload.options["enable_prefix_caching"] = enable_prefix_caching
        result = workload.run(model, **options, **more)
        assert result.engine.close(60)
        return result

    runs = {
        "cold": run(False),
        "memory": run(),
        "first": run(cache_dir=folder),
        "second": run(cache_dir=folder),
    }
    block_nbytes = runs["cold"].engine.cache.config.nbytes_per_block
    runs["small"] = run(cache_dir=folder, cache_dir_size=20 * max(block_nbytes, 4096))
    return runs


def assert_all_alike(runs: dict[str, Run]) -> None:
    for run in runs.values():
        for request_id, output in runs["cold"].outputs.items():
            ours = run.outputs[request_id]
            if all(each.finish_reason != "abort" for each in (*ours.outputs, *output.outputs)):
                assert_same(ours, output)
                continue
            # An abort comes between two steps, and where more is cached these are others.
            for one, other in zip(ours.outputs, output.outputs, strict=True):
                pairs = zip(one.token_ids, other.token_ids, strict=False)
                assert all(mine == theirs for mine, theirs in pairs)


def num_read_tokens(run: Run) -> int:
    return tier_stats(run.engine).num_read_tokens


@pytest.mark.parametrize(
    ("seed", "run_ahead"),
    [
        (0, True),
        *(pytest.param(seed, bool(seed % 2), marks=pytest.mark.slow) for seed in range(1, 4)),
    ],
)
def test_random_workloads_have_the_same_tokens_in_all_ways(
    model: qwen3.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, run_ahead: bool
):
    # Preempted requests come back from disk, though so small a model computes faster.
    monkeypatch.setattr(tier_cache, "is_reading_cheaper", lambda *_: True)
    workload = Workload(seed + 600, 12, VOCAB_SIZE)
    runs = in_all_ways(workload, model, tmp_path / "kv", run_ahead=run_ahead)
    assert_all_alike(runs)
    assert num_read_tokens(runs["second"]) > 0
    stats = runs["second"].engine.stats()
    cached = sum(output.num_cached_tokens for output in runs["second"].outputs.values())
    read = sum(output.num_read_tokens for output in runs["second"].outputs.values())
    assert 0 < read <= cached
    assert (stats.num_read_prompt_tokens, stats.num_cached_prompt_tokens) == (read, cached)


@pytest.mark.slow
def test_drafts_are_verified_against_blocks_from_disk(model: qwen3.Model, tmp_path: Path):
    workload = Workload(620, 10, VOCAB_SIZE)
    speculation = eager_speculation(VOCAB_SIZE, looks_up)
    runs = in_all_ways(workload, model, tmp_path, speculation=speculation)
    assert_all_alike(runs)
    assert num_read_tokens(runs["second"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_windows_have_the_same_tokens_in_all_ways(tmp_path: Path, kind: str):
    model, options = model_and_options(kind)
    workload = Workload(630, 6, model.args.vocab_size)
    own = {name: value for name, value in options.items() if name not in workload.options}
    workload.options |= {"swap_bytes": 0, "kv_cache_bytes": "60blocks"}
    runs = in_all_ways(workload, model, tmp_path, **own)
    assert_all_alike(runs)
    assert num_read_tokens(runs["second"]) > 0


@pytest.mark.parametrize("kv_format", ["8", "K:8,V:4", "4"])
def test_quantised_blocks_come_back_as_they_were(
    kernel_model: qwen3.Model, tmp_path: Path, kv_format: str
):
    """The K/V are rounded once, when they are written into the pool."""
    tokens, params = [*PREFIX, *prompt(9)], greedy(12, logprobs=1)
    options = {"kv_format": kv_format, "kv_cache_bytes": "100blocks"}
    with tiered(kernel_model, tmp_path, **options) as engine:
        cold = answer(engine, tokens, params)
        memory = answer(engine, tokens, params)
    with tiered(kernel_model, tmp_path, **options) as engine:
        disk = answer(engine, tokens, params)
    assert (cold.num_read_tokens, memory.num_read_tokens, disk.num_read_tokens) == (0, 0, 96)
    assert_same(memory, cold)
    # To the last bit: both go on from the same bytes.
    assert disk.outputs[0].logprobs == memory.outputs[0].logprobs


@pytest.mark.parametrize("config", [DEEPSEEK_V3, GPT_OSS], ids=lambda config: config["model_type"])
def test_latents_and_layers_with_windows_give_the_tokens_of_mlx_lm(tmp_path: Path, config: Any):
    stock = random_model(config)
    tokens = [7, 3, 3, 8] * 12
    expected = stock_tokens(stock, tokens, 12)
    num_read = []
    for _ in range(2):
        with tiered(adapt(random_model(config), config), tmp_path, block_size=8) as engine:
            output = answer(engine, tokens, greedy(12, ignore_eos=True))
            assert output.outputs[0].token_ids == expected
            num_read.append(output.num_read_tokens)
    assert num_read == [0, 40]


def test_a_conversation_goes_on_after_a_restart(model: qwen3.Model, tmp_path: Path):
    """Each turn's engine is another one; the answers of earlier turns are found, too."""
    tokens: list[int] = []
    num_read, num_prompt = [], []
    for turn in range(4):
        tokens += prompt(30, seed=turn)
        with tiered(model, tmp_path) as engine:
            output = answer(engine, tokens, greedy(20))
        assert output.outputs[0].token_ids == ask_alone(model, tokens, greedy(20))
        num_read.append(output.num_read_tokens)
        num_prompt.append(len(tokens))
        tokens += output.outputs[0].token_ids
    assert num_prompt == [30, 80, 130, 180]
    # Of 50, 100 and 150 tokens before the turn, the last of which has no K/V.
    assert num_read == [0, 48, 96, 144]


def test_completions_of_one_prompt_share_what_came_from_disk(model: qwen3.Model, tmp_path: Path):
    params = sampled(3, 15, n=3)
    with tiered(model, tmp_path) as engine:
        cold = answer(engine, PREFIX, params)
    with tiered(model, tmp_path) as engine:
        warm = answer(engine, PREFIX, params)
        assert engine.stats().num_read_prompt_tokens == warm.num_read_tokens == 80
    assert_same(warm, cold)


def test_a_prompt_partly_in_memory_reads_the_rest(model: qwen3.Model, tmp_path: Path):
    with tiered(model, tmp_path) as engine:
        answer(engine, [*PREFIX, *prompt(40)], greedy(1))
    with tiered(model, tmp_path) as engine:
        first = answer(engine, [*PREFIX[:48], 5], greedy(1))
        second = answer(engine, [*PREFIX, *prompt(40)], greedy(5))
    assert (first.num_cached_tokens, first.num_read_tokens) == (48, 48)
    assert (second.num_cached_tokens, second.num_read_tokens) == (128, 80)
    tokens = [*PREFIX, *prompt(40)]
    assert second.outputs[0].token_ids == ask_alone(model, tokens, greedy(5))


def test_another_model_format_or_block_size_finds_nothing(model: qwen3.Model, tmp_path: Path):
    options = {"block_size": 16}
    with tiered(model, tmp_path, **options) as engine:
        answer(engine, PREFIX, greedy(1))
    num_files = len(block_files(tmp_path))
    altered = qwen3.Model(model.args)
    altered.update(tree_map(lambda weight: weight + mx.zeros_like(weight), model.parameters()))
    altered.model.layers[-1].mlp.down_proj.weight[0, 0] += 1e-3
    mx.eval(altered.parameters())
    for other, change in ((altered, options), (model, {"block_size": 8})):
        with tiered(other, tmp_path, **change) as engine:
            assert answer(engine, PREFIX, greedy(1)).num_read_tokens == 0
        assert len(block_files(tmp_path)) > num_files, "it keeps its own"
        num_files = len(block_files(tmp_path))
    with tiered(model, tmp_path, **options) as engine:
        assert answer(engine, PREFIX, greedy(1)).num_read_tokens == 80
