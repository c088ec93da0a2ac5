"""What is written and what is not: no_store, salts, names, rights, limits, durations and pins; and
several processes on one folder.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.disk_tiers import block_files, flush, tier_stats, tiered
from helpers.engine_runs import (
    answer,
    ask_alone,
    assert_nothing_held,
    greedy,
    make_engine,
    prompt,
    run,
)

from mlx_paged import LLM, batch_generate, demo_model_path, generate, load, stream_generate
from mlx_paged.block_store import CacheFolder
from mlx_paged.models import qwen3
from mlx_paged.options.sampling_params import SamplingParams

PREFIX = prompt(96, seed=1)
PARAMS = greedy(3)


# What is written


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_with_no_store_leaves_nothing_and_finds_what_others_left(
    model: qwen3.Model, tmp_path: Path, n: int
):
    params = SamplingParams(n=n, max_tokens=40, temperature=1.0, seed=3)
    with tiered(model, tmp_path) as engine:
        answer(engine, PREFIX, params, no_store=True)
    assert block_files(tmp_path) == []
    with tiered(model, tmp_path) as engine:
        answer(engine, PREFIX, PARAMS)
    left = block_files(tmp_path)
    assert len(left) == 6
    with tiered(model, tmp_path) as engine:
        output = answer(engine, [*PREFIX, *prompt(50)], params, no_store=True)
        assert output.num_read_tokens == 96
    assert block_files(tmp_path) == left


def test_preempted_requests_with_no_store_leave_nothing(model: qwen3.Model, tmp_path: Path):
    with tiered(
        model, tmp_path, kv_cache_bytes="10blocks", swap_bytes=0, watermark=0.0, max_num_seqs=4
    ) as engine:
        assert engine.disk_tier is not None
        engine.disk_tier.saves_preempted = True
        for number in range(4):
            engine.add_request(str(number), prompt(30, seed=number), greedy(60), no_store=True)
        outputs = run(engine)
        assert engine.stats().num_preemptions > 0
    assert block_files(tmp_path) == []
    for number in range(4):
        tokens = outputs[str(number)].outputs[0].token_ids
        assert tokens == ask_alone(model, prompt(30, seed=number), greedy(60))


def test_preempted_requests_come_back_from_disk_where_host_memory_is_short(
    model: qwen3.Model, tmp_path: Path
):
    with tiered(
        model, tmp_path, kv_cache_bytes="10blocks", swap_bytes=0, watermark=0.0, max_num_seqs=4
    ) as engine:
        assert engine.disk_tier is not None
        assert not engine.disk_tier.saves_preempted, "computing is cheaper on so small a model"
        engine.disk_tier.saves_preempted = True
        for number in range(4):
            engine.add_request(str(number), prompt(30, seed=number), greedy(60))
        # Steps on so small a model are faster than any disk.
        outputs = run(engine, lambda: flush(engine))
        assert engine.stats().num_preemptions > 0 < tier_stats(engine).num_read_tokens
        # It was not there when they first ran.
        assert engine.stats().num_read_prompt_tokens == 0
    for number in range(4):
        tokens = outputs[str(number)].outputs[0].token_ids
        assert tokens == ask_alone(model, prompt(30, seed=number), greedy(60))


def test_requests_of_different_salts_find_nothing_of_each_others(
    model: qwen3.Model, tmp_path: Path
):
    salts = (None, "a", "b")
    for salt in salts:
        with tiered(model, tmp_path) as engine:
            output = answer(engine, PREFIX, PARAMS, cache_salt=salt)
            assert output.num_cached_tokens == 0
    assert len(block_files(tmp_path)) == 3 * 6
    for salt in salts:
        with tiered(model, tmp_path) as engine:
            output = answer(engine, PREFIX, PARAMS, cache_salt=salt)
            assert output.num_read_tokens == 80


def test_files_are_their_owners_alone_and_names_hold_hashes(model: qwen3.Model, tmp_path: Path):
    folder = tmp_path / "a" / "kv"
    before = os.umask(0)
    try:
        with tiered(model, folder) as engine:
            answer(engine, PREFIX, PARAMS, cache_salt="a secret salt")
    finally:
        os.umask(before)
    paths = [folder, *folder.rglob("*")]
    for path in paths:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode & 0o077 == 0, f"{path} can be read by others: {mode:o}"
    assert b"a secret salt" not in b"".join(p.read_bytes() for p in paths if p.is_file())
    for file in block_files(folder):
        assert set(file.stem) <= set("0123456789abcdef")


def test_functions_with_an_engine_of_their_own_find_what_the_last_call_left(tmp_path: Path):
    model, tokenizer = load(demo_model_path())
    text = "The code of apple is 4821. The code of pear is 1234. What is the code of apple?"
    options: dict[str, Any] = {"cache_dir": tmp_path, "kv_cache_bytes": "200blocks"}
    expected = generate(model, tokenizer, text, max_tokens=8, kv_cache_bytes="200blocks")
    assert generate(model, tokenizer, text, max_tokens=8, **options) == expected
    *_, last = stream_generate(model, tokenizer, text, max_tokens=8, **options)
    assert 0 < last.read_tokens == last.cached_tokens
    batch = batch_generate(model, tokenizer, [text], max_tokens=8, **options)
    assert batch.texts == [expected.removesuffix(tokenizer.eos_token)]
    computed = last.prompt_tokens - last.cached_tokens
    assert batch.stats.prompt_tokens == computed
    llm = LLM(model, tokenizer, **options)
    (output,) = llm.generate(text, SamplingParams(max_tokens=8), no_store=True)
    assert output.num_read_tokens == last.read_tokens


# Limits


def test_a_limit_is_kept_and_the_least_recently_used_leave(model: qwen3.Model, tmp_path: Path):
    with tiered(model, tmp_path, cache_dir_size="40K") as engine:
        for seed in range(6):
            answer(engine, prompt(60, seed=seed), PARAMS)
            engine.save_more()
    nbytes = sum(-(-file.stat().st_size // 4096) * 4096 for file in block_files(tmp_path))
    assert 0 < nbytes <= 40 * 2**10
    with tiered(model, tmp_path, cache_dir_size="40K") as engine:
        assert answer(engine, [*prompt(60, seed=5), 1], PARAMS).num_read_tokens == 48
        assert answer(engine, [*prompt(60, seed=0), 1], PARAMS).num_read_tokens == 0


def test_what_is_not_used_for_long_is_no_longer_found(model: qwen3.Model, tmp_path: Path):
    with tiered(model, tmp_path, cache_dir_ttl="1h") as engine:
        answer(engine, PREFIX, PARAMS)
    with tiered(model, tmp_path, cache_dir_ttl="1h") as engine:
        assert answer(engine, PREFIX, PARAMS).num_read_tokens == 80
    two_hours_ago = time.time() - 7200
    for file in block_files(tmp_path):
        os.utime(file, (two_hours_ago, two_hours_ago))
    with tiered(model, tmp_path, cache_dir_ttl="1h") as engine:
        output = answer(engine, PREFIX, PARAMS)
        assert output.num_read_tokens == 0
        assert output.outputs[0].token_ids == ask_alone(model, PREFIX, PARAMS)
    with tiered(model, tmp_path, cache_dir_ttl="1h") as engine:
        assert answer(engine, PREFIX, PARAMS).num_read_tokens == 80


def test_pinned_blocks_outlive_every_limit(model: qwen3.Model, tmp_path: Path):
    with tiered(model, tmp_path) as engine:
        answer(engine, PREFIX, PARAMS)
    folder = CacheFolder(tmp_path)
    last = max(folder.entries(), key=lambda entry: entry.first_token)
    folder.pin(last.digest, last.block_hash)
    with tiered(model, tmp_path, cache_dir_size="40K") as engine:
        for seed in range(2, 8):
            answer(engine, prompt(60, seed=seed), PARAMS)
    with tiered(model, tmp_path, cache_dir_size="40K") as engine:
        assert answer(engine, [*PREFIX, 1], PARAMS).num_read_tokens == 96


# Several at once

PROGRAM = """
import json, sys
from helpers.engine_runs import tiny_models
from helpers.engine_runs import greedy, make_engine, prompt, run
engine = make_engine(tiny_models()[0], cache_dir=sys.argv[1], cache_dir_size=sys.argv[2])
answers, num_read = {}, 0
for round in range(int(sys.argv[4])):
    for seed in json.loads(sys.argv[3]):
        tokens = [*prompt(64, seed=1), *prompt(40, seed=seed)]
        engine.add_request(str(seed), tokens, greedy(3))
    for name, output in run(engine).items():
        answers[name] = output.outputs[0].token_ids
        num_read += output.num_read_tokens
    engine.reset_prefix_cache()
stats = engine.stats().disk_tier
print(json.dumps([answers, num_read, engine.close(60), stats.num_corrupt_blocks, stats.failure]))
"""


def start(folder: Path, limit: str, seeds: list[int], rounds: int) -> subprocess.Popen[str]:
    tests = Path(__file__).parents[2]
    paths = [str(tests), str(tests.parent), str(tests.parent / "tools")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    argv = [sys.executable, "-c", PROGRAM, str(folder), limit, json.dumps(seeds), str(rounds)]
    return subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def result_of(process: subprocess.Popen[str]) -> list[Any]:
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0 and not error, error
    result: list[Any] = json.loads(out)
    return result


def test_another_process_finds_what_this_one_left(model: qwen3.Model, tmp_path: Path):
    tokens = [*prompt(64, seed=1), *prompt(40, seed=9)]
    with tiered(model, tmp_path) as engine:
        answer(engine, tokens, PARAMS)
    answers, num_read, is_complete, num_corrupt, failure = result_of(start(tmp_path, "1G", [9], 1))
    assert answers == {"9": ask_alone(model, tokens, PARAMS)}
    assert (num_read, is_complete, num_corrupt, failure) == (96, True, 0, None)


@pytest.mark.slow
def test_processes_that_write_read_and_evict_at_once_give_the_right_tokens(
    model: qwen3.Model, tmp_path: Path
):
    """A limit that holds a part of what they write, and beginnings that they share."""
    processes = [
        start(tmp_path, "200K", np.roll(range(2, 12), 3 * shift).tolist(), 4) for shift in range(2)
    ]
    expected = {
        str(seed): ask_alone(model, [*prompt(64, seed=1), *prompt(40, seed=seed)], PARAMS)
        for seed in range(2, 12)
    }
    num_read = 0
    for process in processes:
        answers, num_read_here, _, num_corrupt, failure = result_of(process)
        assert answers == expected
        assert num_corrupt == 0 and failure is None
        num_read += num_read_here
    assert num_read > 0


def test_two_engines_of_one_process_share_a_folder(model: qwen3.Model, tmp_path: Path):
    first, second = (make_engine(model, cache_dir=tmp_path) for _ in range(2))
    for seed in range(4):
        tokens = [*PREFIX, *prompt(20, seed=seed)]
        one = answer(first if seed % 2 else second, tokens, PARAMS)
        flush(first)
        flush(second)
        other = answer(second if seed % 2 else first, tokens, PARAMS)
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert other.num_read_tokens == (112 if seed == 0 else 16)
    for engine in (first, second):
        assert engine.close(60)
        assert_nothing_held(engine)


def test_near_the_limit_of_writes_a_block_is_written_when_a_second_request_uses_it(
    model: qwen3.Model, tmp_path: Path
):
    shared, first, second = prompt(64, seed=1), prompt(48, seed=2), prompt(48, seed=3)
    engine = make_engine(model, cache_dir=tmp_path / "all")
    answer(engine, [*shared, 1], greedy(2))
    flush(engine)
    (nbytes,) = {-(-file.stat().st_size // 4096) * 4096 for file in block_files(tmp_path / "all")}

    engine = make_engine(model, cache_dir=tmp_path / "few", cache_dir_writes=10 * nbytes)

    def written(tokens: list[int]) -> int:
        answer(engine, tokens, greedy(2))
        flush(engine)
        assert tier_stats(engine).nbytes_written == nbytes * len(block_files(tmp_path / "few"))
        return len(block_files(tmp_path / "few"))

    assert written(prompt(80, seed=4)) == 5, "half of the day's bytes are used for what is new"
    assert written([*shared, *first]) == 5, "new blocks wait for a second use"
    assert written([*shared, *second]) == 9, "which the common beginning has now"
    with pytest.warns(UserWarning, match="as cache_dir_writes allows"):
        assert written([*shared, *second, 1]) == 10, "one more fits, and the rest does not"
    assert tier_stats(engine).failure is None and tier_stats(engine).num_dropped_blocks > 0
    assert engine.close(60)
    engine = make_engine(model, cache_dir=tmp_path / "few", cache_dir_writes=10 * nbytes)
    assert answer(engine, [*shared, 1], greedy(2)).num_read_tokens == 64
    answer(engine, prompt(64, seed=9), greedy(2))
    flush(engine)
    assert len(block_files(tmp_path / "few")) == 10, "the day is not over after a restart"
    assert engine.close(60)
