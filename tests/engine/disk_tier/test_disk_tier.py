"""What a tier on disk copies out, when, and what it brings back: step by step, on one engine."""

from __future__ import annotations

import importlib.metadata
import warnings
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from helpers.engine_runs import (
    CONFIG,
    ask_alone,
    greedy,
    livelier_model,
    make_engine,
    prompt,
    run,
    tiny_models,
)
from paged_testing.integrity import check_scheduler

from mlx_paged.block_store import CacheFolder
from mlx_paged.core import hash_token_blocks
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.scheduling.batch import Batch
from mlx_paged.engine.storing import unsaved
from mlx_paged.engine.storing.tier_cache import TierCache
from mlx_paged.models import identity
from mlx_paged.models.identity import fingerprint_of, model_identity
from mlx_paged.models.kv_cache import is_reading_cheaper, make_kv_cache
from mlx_paged.ops.reference import ReferenceBackend

BLOCK_SIZE = 16
pytestmark = pytest.mark.usefixtures("run_ahead")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_models()[0]


def open_engine(model: nn.Module, folder: Path, **options: Any) -> Engine:
    return make_engine(model, cache_dir=folder, **options)


def tier_of(engine: Engine) -> TierCache:
    assert engine.disk_tier is not None
    return engine.disk_tier


def ask(
    engine: Engine, name: str, token_ids: list[int], max_tokens: int = 5, **request: Any
) -> Any:
    engine.add_request(name, token_ids, greedy(max_tokens), **request)
    return run(engine)[name]


def flushed(engine: Engine) -> TierCache:
    tier = tier_of(engine)
    while tier.save_more():
        tier._worker.flush(10)
    assert tier._worker.flush(10)
    return tier


def stored_tokens(folder: Path) -> set[tuple[int, ...]]:
    folders = CacheFolder(folder)
    headers = [folders.header(each.digest, each.block_hash) for each in folders.entries()]
    return {header.token_ids for header in headers if header is not None}


def cold_answer(model: nn.Module, folder: Path) -> list[int]:
    """What an engine answers whose blocks lie in the folder then."""
    engine = open_engine(model, folder)
    tokens: list[int] = ask(engine, "a", prompt(40)).outputs[0].token_ids
    assert engine.close()
    return tokens


def test_all_full_blocks_of_prompt_and_answer_are_kept_and_found_by_another_engine(
    model: nn.Module, tmp_path: Path
) -> None:
    token_ids = prompt(40)
    engine = open_engine(model, tmp_path)
    cold = ask(engine, "a", token_ids, max_tokens=30)
    answered = [*token_ids, *cold.outputs[0].token_ids]
    tier = flushed(engine)
    num_full = (len(answered) - 1) // BLOCK_SIZE
    hashes = hash_token_blocks(answered, BLOCK_SIZE)[:num_full]
    assert all(map(tier.has, hashes))
    assert engine.close()
    other = open_engine(model, tmp_path)
    warm = ask(other, "b", token_ids, max_tokens=30)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert (warm.num_cached_tokens, warm.num_read_tokens) == (32, 32)
    next_turn = [*answered, *prompt(9, seed=3)]
    later = ask(open_engine(model, tmp_path), "c", next_turn)
    assert later.num_read_tokens == num_full * BLOCK_SIZE
    assert later.outputs[0].token_ids == ask_alone(model, next_turn, greedy(5))


def test_what_is_in_memory_is_not_read(model: nn.Module, tmp_path: Path) -> None:
    engine = open_engine(model, tmp_path)
    ask(engine, "a", prompt(40))
    again = ask(engine, "b", prompt(40))
    assert (again.num_cached_tokens, again.num_read_tokens) == (32, 0)
    assert flushed(engine).stats().num_read_blocks == 0


def test_evicted_blocks_come_back(model: nn.Module, tmp_path: Path) -> None:
    engine = open_engine(model, tmp_path)
    cold = ask(engine, "a", prompt(40))
    flushed(engine)
    assert engine.reset_prefix_cache()
    warm = ask(engine, "b", prompt(40))
    assert warm.num_read_tokens == 32
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    check_scheduler(engine.scheduler)


def test_a_request_that_must_not_be_stored_leaves_nothing_and_others_fill_the_gap(
    model: nn.Module, tmp_path: Path
) -> None:
    engine = open_engine(model, tmp_path)
    secret = ask(engine, "a", prompt(40), no_store=True, max_tokens=30)
    flushed(engine)
    assert stored_tokens(tmp_path) == set()
    again = ask(engine, "b", prompt(40))
    assert again.num_cached_tokens == 32
    flushed(engine)
    expected = {tuple(prompt(40)[start : start + BLOCK_SIZE]) for start in (0, 16)}
    assert stored_tokens(tmp_path) == expected, "the answer that must not be stored is not there"
    assert secret.outputs[0].token_ids[:5] == again.outputs[0].token_ids


def test_what_has_no_room_in_the_queue_is_kept_by_later_steps(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(model, tmp_path)
    tier = tier_of(engine)
    has_room = tier._worker.has_room
    answers = [True, True, False]
    monkeypatch.setattr(
        tier._worker, "has_room", lambda n: answers.pop(0) if answers else has_room(n)
    )
    ask(engine, "a", prompt(100), max_tokens=1)
    assert engine.save_more() in (True, False)
    flushed(engine)
    assert len(stored_tokens(tmp_path)) == 6
    assert tier.stats().num_dropped_blocks == 0


def test_a_disk_that_is_behind_forever_drops_and_never_blocks(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsaved, "MAX_UNSAVED_BLOCKS", 4)
    engine = open_engine(model, tmp_path)
    monkeypatch.setattr(tier_of(engine)._worker, "has_room", lambda n: False)
    out = ask(engine, "a", prompt(100))
    assert out.outputs[0].token_ids == ask_alone(model, prompt(100), greedy(5))
    assert engine.save_more()
    assert tier_of(engine).stats().num_dropped_blocks == 2
    assert not engine.close(timeout=0.1)


def test_blocks_that_are_evicted_before_they_are_copied_are_not_missed(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(model, tmp_path)
    writer = tier_of(engine)._worker
    with monkeypatch.context() as patch:
        patch.setattr(writer, "has_room", lambda n: False)
        ask(engine, "a", prompt(40))
    assert engine.reset_prefix_cache()
    assert not engine.save_more()
    flushed(engine)
    assert stored_tokens(tmp_path) == set()


def test_blocks_that_a_step_in_flight_computes_are_copied_after_it(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the hashes of blocks that are due, which were evicted before they were copied."""
    engine = open_engine(model, tmp_path)
    tier = tier_of(engine)
    with monkeypatch.context() as patch:
        patch.setattr(tier._worker, "has_room", lambda n: False)
        ask(engine, "a", prompt(40), max_tokens=1)
    due = tier._unsaved.headers()
    assert engine.reset_prefix_cache() and len(due) == 2
    engine.add_request("b", prompt(40), greedy(5))
    batch = engine.scheduler.schedule()
    assert batch is not None and batch.new_block_ids
    tier.save(Batch(), [batch])
    assert tier._unsaved.headers() == due
    # The step fails: nothing of it was written.
    engine.scheduler.discard(batch)
    flushed(engine)
    assert stored_tokens(tmp_path) == set()
    assert run(engine)["b"].outputs[0].token_ids == ask_alone(model, prompt(40), greedy(5))
    flushed(engine)
    assert len(stored_tokens(tmp_path)) == 2


def test_a_step_that_fails_leaves_nothing_on_disk(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(model, tmp_path)

    def broken(*args: Any) -> Any:
        raise RuntimeError("no step")

    monkeypatch.setattr(engine.runner, "model", broken)
    engine.runner.compiled_decode = None
    assert ask(engine, "a", prompt(40)).error is not None
    flushed(engine)
    assert stored_tokens(tmp_path) == set()


def test_an_interrupt_leaves_an_engine_that_finds_what_is_on_disk(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = cold_answer(model, tmp_path)
    engine = open_engine(model, tmp_path)
    with monkeypatch.context() as patch:

        def interrupted(*args: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(engine.cache, "write_blocks", interrupted)
        engine.add_request("b", prompt(40), greedy(5))
        with pytest.raises(KeyboardInterrupt):
            run(engine)
    out = run(engine)["b"]
    assert out.outputs[0].token_ids == cold
    check_scheduler(engine.scheduler)
    assert engine.stats().num_used_blocks == 0


def test_a_cache_that_can_not_take_blocks_goes_on_without(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = cold_answer(model, tmp_path)
    engine = open_engine(model, tmp_path)

    def refuses(*args: Any) -> None:
        raise RuntimeError("[malloc] no memory")

    monkeypatch.setattr(engine.cache, "write_blocks", refuses)
    with pytest.warns(UserWarning, match="no memory") as said:
        out = ask(engine, "b", prompt(40))
        ask(engine, "c", prompt(40, seed=1))
    assert len(said) == 1
    assert out.outputs[0].token_ids == cold
    assert out.num_cached_tokens == 0
    check_scheduler(engine.scheduler)


def test_a_block_of_another_size_is_a_miss(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = cold_answer(model, tmp_path)
    engine = open_engine(model, tmp_path)
    store = tier_of(engine).store
    get = store.load
    monkeypatch.setattr(store, "load", lambda name: (get(name) or b"")[:-1])
    out = ask(engine, "b", prompt(40))
    assert out.num_cached_tokens == 0
    assert out.outputs[0].token_ids == cold


def test_a_closed_engine_goes_on_without_its_folder(model: nn.Module, tmp_path: Path) -> None:
    engine = open_engine(model, tmp_path)
    assert engine.close()
    assert engine.close(), "twice does no harm"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ask(engine, "a", prompt(40))
    assert stored_tokens(tmp_path) == set()
    assert engine.stats().disk_tier.failure is None


def test_the_fingerprint_tells_apart_what_must_not_meet(model: nn.Module) -> None:
    def digest(of: nn.Module = model, **options: Any) -> str:
        cache = make_kv_cache(of, "paged", kv_cache_bytes="10blocks", **options)
        return fingerprint_of(cache, [model_identity(of)]).digest

    other = livelier_model(CONFIG)
    wide = livelier_model({**CONFIG, "head_dim": 64})
    digests = [
        digest(),
        digest(block_size=8),
        digest(window=64),
        digest(window=64, num_sink_tokens=20),
        digest(other),
        digest(wide),
        digest(wide, kv_format=8),
        digest(wide, kv_format=4),
        digest(wide, kv_format="K:8,V:4"),
    ]
    assert len(set(digests)) == len(digests)
    assert digest() == digests[0]
    bigger = make_kv_cache(model, "paged", kv_cache_bytes="99blocks")
    assert fingerprint_of(bigger, [model_identity(model)]).digest == digests[0]


def test_blocks_of_another_version_of_mlx_or_another_backend_are_not_used(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask_again() -> tuple[int, str]:
        """How many tokens of a prompt were found, and what its K/V were computed with."""
        engine = open_engine(model, tmp_path)
        num_found = ask(engine, "a", prompt(40)).num_cached_tokens
        engine.close()
        return num_found, tier_of(engine).store.fingerprint.code

    version = importlib.metadata.version("mlx")
    assert ask_again() == (0, f"mlx_paged 3, mlx {version}, reference backend on a cpu")
    with monkeypatch.context() as later:
        later.setattr(identity, "version", lambda name: "99.0")
        assert ask_again() == (0, "mlx_paged 3, mlx 99.0, reference backend on a cpu")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(ReferenceBackend, "name", "metal")
        assert ask_again() == (0, f"mlx_paged 3, mlx {version}, metal backend on a cpu")
    assert ask_again()[0] == 32
    assert len(list(tmp_path.glob("blocks/*"))) == 3


def test_the_rule_for_preempted_requests_knows_sizes_alone() -> None:
    kv_nbytes_per_token = 28 * 2 * 8 * 128 * 2
    assert is_reading_cheaper(600_000_000, kv_nbytes_per_token)
    assert not is_reading_cheaper(10_000_000, kv_nbytes_per_token)
