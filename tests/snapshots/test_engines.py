"""Warm from a file = warm from memory = cold, whatever the cache is like."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from helpers.engine_runs import greedy, make_engine, prompt, run
from helpers.ranks import FakeGroup
from helpers.windowed_models import KINDS as WINDOWS
from helpers.windowed_models import model_and_options
from paged_testing.integrity import check_manager, check_scheduler

from mlx_paged import AsyncEngine, Engine
from mlx_paged.cache import CacheFullError, Sequences
from mlx_paged.distributed import Ranks
from mlx_paged.errors import ArgumentError
from mlx_paged.models import qwen3
from mlx_paged.request import RequestOutput
from mlx_paged.snapshots import SnapshotError, load_snapshot, save_snapshot

SLOW = pytest.mark.slow


def answer(engine: Engine, token_ids: list[int], **options: Any) -> RequestOutput:
    engine.add_request("a", token_ids, greedy(20), **options)
    return run(engine)["a"]


def tokens_of(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


@pytest.mark.parametrize(
    "num_tokens", [pytest.param(17, marks=SLOW), pytest.param(48, marks=SLOW), 75]
)
@pytest.mark.parametrize(
    "options", [{}, {"block_size": 8, "max_num_batched_tokens": 32, "max_num_seqs": 4}]
)
def test_a_conversation_goes_on_from_a_file(
    model: qwen3.Model, tmp_path: Path, options: dict[str, Any], num_tokens: int
):
    old, new, cold = (make_engine(model, **options) for _ in range(3))
    first = prompt(num_tokens)
    told = [*first, *tokens_of(answer(old, first))]
    block_size = old.cache.config.block_size
    # The last token was sampled and not computed.
    num_saved = old.save_snapshot(tmp_path / "a", told)
    assert num_saved == (len(told) - 1) // block_size * block_size
    answer(new, prompt(30, seed=4))
    assert new.load_snapshot(tmp_path / "a") == told[:num_saved]
    assert len(new.cached_block_ids(told)) == num_saved // block_size
    check_manager(new.manager)
    goes_on = [*told, *prompt(9, seed=5)]
    outputs = [answer(engine, goes_on) for engine in (new, old, cold)]
    assert tokens_of(outputs[0]) == tokens_of(outputs[1]) == tokens_of(outputs[2])
    assert [output.num_cached_tokens for output in outputs] == [num_saved, num_saved, 0]


@pytest.mark.parametrize("kv_format", [8, 4, "K:8,V:4"])
def test_a_conversation_of_quantised_kv_goes_on_from_a_file(
    wide_model: qwen3.Model, tmp_path: Path, kv_format: str | int
):
    old, new, cold = (make_engine(wide_model, kv_format=kv_format) for _ in range(3))
    told = prompt(70)
    answer(old, told)
    num_saved = old.save_snapshot(tmp_path / "a", told)
    assert new.load_snapshot(tmp_path / "a") == told[:num_saved]
    outputs = [answer(engine, told) for engine in (new, old, cold)]
    assert tokens_of(outputs[0]) == tokens_of(outputs[1]) == tokens_of(outputs[2])
    assert [output.num_cached_tokens for output in outputs] == [64, 64, 0]


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize("num_tokens", [pytest.param(40, marks=SLOW), 123])
def test_a_conversation_that_has_left_its_window_goes_on_from_a_file(
    tmp_path: Path, kind: str, num_tokens: int
):
    model, options = model_and_options(kind)
    old, new, cold = (make_engine(model, **options) for _ in range(3))
    told = prompt(num_tokens)
    answer(old, told)
    num_saved = old.save_snapshot(tmp_path / "a", told)
    assert num_saved == num_tokens // 8 * 8
    assert new.load_snapshot(tmp_path / "a") == told[:num_saved]
    check_manager(new.manager)
    outputs = [answer(engine, [*told, 3, 4]) for engine in (new, old, cold)]
    assert tokens_of(outputs[0]) == tokens_of(outputs[1]) == tokens_of(outputs[2])
    assert [output.num_cached_tokens for output in outputs] == [num_saved, num_saved, 0]
    # Another window keeps other tokens.
    if "window" in options:
        other = make_engine(model, **options | {"window": 96})
        with pytest.raises(SnapshotError, match="has another window than this cache: "):
            other.load_snapshot(tmp_path / "a")


def test_what_is_there_already_is_not_written_again(model: qwen3.Model, tmp_path: Path):
    old, new = make_engine(model), make_engine(model, kv_cache_bytes="8blocks")
    told = prompt(100)
    answer(old, told)
    assert old.save_snapshot(tmp_path / "a", told) == 96
    answer(new, told[:40])  # two blocks of it, and two more of its answer
    kept = new.cached_block_ids(told)
    assert len(kept) == 2 and new.cache.pool.num_cached_blocks == 3
    new.load_snapshot(tmp_path / "a")
    assert new.cached_block_ids(told)[:2] == kept and len(new.cached_block_ids(told)) == 6
    assert new.cache.pool.num_cached_blocks == 7
    # Once more: nothing is written, and the oldest goes first.
    new.load_snapshot(tmp_path / "a")
    assert new.cache.pool.num_cached_blocks == 7
    answer(new, prompt(40, seed=3))
    assert len(new.cached_block_ids(told)) >= 4
    check_manager(new.manager)


def test_files_of_caches_and_of_engines_are_alike(model: qwen3.Model, tmp_path: Path):
    engine = make_engine(model)
    told = prompt(53)
    answer(engine, told)
    engine.save_snapshot(tmp_path / "a", told)
    seqs = Sequences(make_engine(model).cache)
    assert load_snapshot(tmp_path / "a", model, seqs, "s") == told[:48]
    # A partly filled block at the end is left out by an engine.
    rows = mx.random.normal((2, 5, 2, 16))
    seqs.append("s", rows, rows)
    save_snapshot(tmp_path / "b", model, seqs, "s", told)
    new = make_engine(model)
    assert new.load_snapshot(tmp_path / "b") == told
    assert tokens_of(answer(new, told)) == tokens_of(answer(engine, told))


def test_a_salt_keeps_what_was_loaded_apart(model: qwen3.Model, tmp_path: Path):
    engine, told = make_engine(model), prompt(40)
    answer(engine, told, cache_salt="mine")
    with pytest.raises(ArgumentError, match="no K/V of these 40 tokens are in the prefix cache"):
        engine.save_snapshot(tmp_path / "a", told)
    assert engine.save_snapshot(tmp_path / "a", told, cache_salt="mine") == 32
    new = make_engine(model)
    new.load_snapshot(tmp_path / "a", cache_salt="theirs")
    assert answer(new, told).num_cached_tokens == 0
    assert answer(new, told, cache_salt="mine").num_cached_tokens == 0
    assert answer(new, told, cache_salt="theirs").num_cached_tokens == 32


@pytest.mark.parametrize("run_ahead", [False, True])
def test_requests_that_run_meanwhile_have_the_same_tokens(
    model: qwen3.Model, tmp_path: Path, run_ahead: bool
):
    engine, told = make_engine(model, run_ahead=run_ahead), prompt(64)
    expected = tokens_of(answer(make_engine(model), told))
    answer(engine, told[:40])
    engine.add_request("b", told, greedy(20))
    outputs = []
    for number in range(10):
        outputs += engine.step()
        if number in (0, 3, 7):
            assert engine.save_snapshot(tmp_path / "a", told) >= 48
            engine.load_snapshot(tmp_path / "a", cache_salt=str(number))
            check_scheduler(engine.scheduler)
    outputs += run(engine).values()
    assert outputs[-1].request_id == "b" and tokens_of(outputs[-1]) == expected


def test_a_file_that_does_not_fit_changes_nothing(model: qwen3.Model, tmp_path: Path):
    old, new = make_engine(model), make_engine(model, kv_cache_bytes="8blocks")
    told, other = prompt(100), prompt(50, seed=2)
    answer(old, told)
    old.save_snapshot(tmp_path / "a", told)
    expected = tokens_of(answer(make_engine(model), other))
    new.add_request("b", other, greedy(20))
    new.step()
    with pytest.raises(
        CacheFullError, match="of 96 tokens needs 6 more blocks of 16, and 4 of the budget's 8 are"
    ):
        new.load_snapshot(tmp_path / "a")
    check_scheduler(new.scheduler)
    assert tokens_of(run(new)["b"]) == expected
    assert new.load_snapshot(tmp_path / "a") == told[:96]


@pytest.mark.parametrize("change", ["unlinked", "truncated"])
def test_a_file_that_goes_while_it_is_read_changes_nothing(
    model: qwen3.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
):
    old, new, told = make_engine(model), make_engine(model), prompt(60)
    answer(old, told)
    old.save_snapshot(tmp_path / "a", told)
    real_open = new.snapshots.open

    def opened(path: Path, *owner: Any) -> Any:
        file = real_open(path, *owner)
        if change == "unlinked":
            path.unlink()
        else:
            os.truncate(path, 5000)
        return file

    monkeypatch.setattr(new.snapshots, "open", opened)
    if change == "unlinked":  # It is open, and what was verified is what is read.
        assert new.load_snapshot(tmp_path / "a") == told[:48]
        assert len(new.cached_block_ids(told)) == 3
        return
    with pytest.raises(SnapshotError, match="was truncated while it was read"):
        new.load_snapshot(tmp_path / "a")
    assert new.cached_block_ids(told) == [] and new.cache.pool.num_used_blocks == 0
    check_manager(new.manager)
    assert tokens_of(answer(new, told)) == tokens_of(answer(old, told))


def test_a_file_is_loaded_to_its_end_when_ctrl_c_ends_the_wait_for_it(
    model: qwen3.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    old, new, told = make_engine(model), make_engine(model), prompt(60)
    expected = tokens_of(answer(old, told))
    old.save_snapshot(tmp_path / "a", told)
    write, go_on = new.cache.write_blocks, threading.Event()

    def slow(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert go_on.wait(60)
        write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(new.cache, "write_blocks", slow)
        with pytest.raises(KeyboardInterrupt):
            new.load_snapshot(tmp_path / "a")
        go_on.set()
        assert len(new.cached_block_ids(told)) >= 3
    assert tokens_of(answer(new, told)) == expected
    check_scheduler(new.scheduler)


def test_any_thread_may_save_and_load(model: qwen3.Model, tmp_path: Path):
    told = prompt(60)
    expected = tokens_of(answer(make_engine(model), told))
    failures: list[BaseException] = []
    with AsyncEngine(model, kv_cache_bytes="100blocks") as engine:
        list(engine.stream(told, greedy(4)))

        def save_and_load(number: int) -> None:
            try:
                for _ in range(3):
                    engine.save_snapshot(tmp_path / str(number), told)
                    engine.load_snapshot(tmp_path / str(number), cache_salt=str(number))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=save_and_load, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            assert tokens_of(list(engine.stream(told, greedy(20)))[-1]) == expected
        for thread in threads:
            thread.join()
        assert failures == []
        salted = list(engine.stream(told, greedy(20), cache_salt="1"))[-1]
    assert salted.num_cached_tokens == 48 and tokens_of(salted) == expected


def test_what_has_no_kv_to_save_is_refused_by_name(model: qwen3.Model, tmp_path: Path):
    engine = make_engine(model, enable_prefix_caching=False)
    for call in (lambda: engine.save_snapshot(tmp_path / "a", [1]),
                 lambda: engine.load_snapshot(tmp_path / "a")):  # fmt: skip
        with pytest.raises(ArgumentError, match="need enable_prefix_caching") as caught:
            call()
        assert caught.value.argument == "enable_prefix_caching"
    split = make_engine(model)
    split.snapshots._ranks = Ranks(FakeGroup(2))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="snapshots can't be combined with several ranks"):
        split.save_snapshot(tmp_path / "a", [1])
    with pytest.raises(ArgumentError, match="token_ids must be a list"):
        make_engine(model).save_snapshot(tmp_path / "a", "text")
    with pytest.raises(ValueError, match="cache_salt must be a text"):
        make_engine(model).save_snapshot(tmp_path / "a", [1] * 20, cache_salt=5)


def test_a_basic_cache_refuses_snapshots_and_prompt_caches_by_name(
    model: qwen3.Model, tmp_path: Path
):
    engine, told, file = make_engine(model, kv="basic"), prompt(40), tmp_path / "a"
    answer(engine, told)
    for refused in (
        lambda: engine.save_snapshot(file, told),
        lambda: engine.load_snapshot(file),
        lambda: engine.export_prompt_cache(file, told),
        lambda: engine.import_prompt_cache(file, told),
    ):
        with pytest.raises(ArgumentError, match="need blocks, which kv='basic' does not") as caught:
            refused()
        assert caught.value.argument == "kv"
    assert not file.exists()
