"""Whatever the disk does, requests get their tokens; a failure is said once, damage is a miss, and
a disk that works again is used again.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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

from mlx_paged import AsyncEngine
from mlx_paged.block_store import store
from mlx_paged.block_store.block_files import BlockFiles
from mlx_paged.engine import build
from mlx_paged.engine.engine import Engine
from mlx_paged.errors import ArgumentError
from mlx_paged.models import qwen3

PARAMS = greedy(3)


def texts_of(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught]


def ask_many(engine: Engine, model: qwen3.Model, seeds: range) -> None:
    """Requests whose tokens are looked at, each of which leaves blocks."""
    for seed in seeds:
        tokens = prompt(40, seed=seed)
        output = answer(engine, tokens, PARAMS)
        assert output.outputs[0].token_ids == ask_alone(model, tokens, PARAMS)
        flush(engine)


def raises(number: int) -> Callable[..., Any]:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    "number",
    [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE],
    ids=errno.errorcode.__getitem__,
)
def test_a_disk_that_takes_nothing_more_is_said_once_and_left_alone_until_it_works_again(
    model: qwen3.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    monkeypatch.setattr(store, "_FIRST_RETRY_SECONDS", 3600.0)
    monkeypatch.setattr(store, "_MAX_RETRY_SECONDS", 3600.0)
    engine = make_engine(model, cache_dir=tmp_path)
    ask_many(engine, model, range(2))
    num_files = len(block_files(tmp_path))
    assert num_files == 4
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monkeypatch.setattr(BlockFiles, "write", raises(number))
        ask_many(engine, model, range(2, 5))
        monkeypatch.undo()
        # It is not tried again so soon, and what lies there is not looked for either.
        ask_many(engine, model, range(5, 7))
    (text,) = texts_of(caught)
    assert str(tmp_path) in text and os.strerror(number) in text and "\n" not in text
    assert "from now on K/V are kept in memory only" in text
    # A full disk is first given room.
    assert len(block_files(tmp_path)) == (num_files if number != errno.ENOSPC else 2)
    assert tier_stats(engine).failure is not None
    engine.disk_tier.store._retry_at = 0.0
    engine.disk_tier.store.maintain()
    with pytest.warns(UserWarning, match="the disk works again, and K/V are kept there") as caught:
        ask_many(engine, model, range(7, 9))
        # Blocks of the time of the failure that are still in memory are written now.
        ask_many(engine, model, range(2, 5))
    assert len(texts_of(list(caught))) == 1 and tier_stats(engine).failure is None
    assert len(block_files(tmp_path)) == (num_files if number != errno.ENOSPC else 2) + 2 * 5


def test_a_process_with_too_many_open_files_goes_on_when_it_has_fewer(
    model: qwen3.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = make_engine(model, cache_dir=tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        monkeypatch.setattr(BlockFiles, "write", raises(errno.EMFILE))
        ask_many(engine, model, range(2))
        monkeypatch.undo()
        assert (len(block_files(tmp_path)), tier_stats(engine).num_dropped_blocks) == (0, 4)
        ask_many(engine, model, range(2, 4))
    assert len(block_files(tmp_path)) == 4 and not caught


@pytest.mark.parametrize("way", ["is removed", "becomes a file", "becomes a dangling link"])
def test_a_folder_that_goes_away_is_said_at_most_once(model: qwen3.Model, tmp_path: Path, way: str):
    folder = tmp_path / "kv"
    engine = make_engine(model, cache_dir=folder)
    ask_many(engine, model, range(2))
    shutil.rmtree(folder)
    if way == "becomes a file":
        folder.write_text("mine")
    elif way == "becomes a dangling link":
        folder.symlink_to(tmp_path / "nowhere")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ask_many(engine, model, range(2, 6))
        engine.manager.reset_prefix_cache()
        ask_many(engine, model, range(2, 6))
    (text,) = texts_of(caught)
    assert str(folder) in text and "from now on K/V are kept in memory only" in text
    assert way != "becomes a file" or folder.read_text() == "mine"
    assert engine.close(60) in (True, False)


def test_garbage_is_a_miss_and_is_replaced(model: qwen3.Model, tmp_path: Path):
    rng = random.Random(5)
    tokens = [*prompt(150, seed=1), 3]
    expected = ask_alone(model, tokens, PARAMS)
    with tiered(model, tmp_path) as engine:
        answer(engine, tokens, PARAMS)
    whole = {file: file.read_bytes() for file in block_files(tmp_path)}
    assert len(whole) == 9
    files = list(whole)

    def flipped(data: bytes) -> bytes:
        place = rng.randrange(len(data))
        return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]

    damages: list[Callable[[bytes], bytes]] = [
        flipped,
        lambda data: data[: rng.randrange(len(data))],
        lambda data: b"",
        lambda data: data + b"x",
        lambda data: rng.randbytes(len(data)),
        lambda data: whole[rng.choice([file for file in files if whole[file] != data])],
    ]
    for number in range(6):
        damaged = rng.sample(files, rng.choice([1, 1, 2, 5]))
        for file in damaged:
            file.write_bytes(damages[number % len(damages)](whole[file]))
        with tiered(model, tmp_path) as engine:
            output = answer(engine, tokens, PARAMS)
            assert output.outputs[0].token_ids == expected
            assert output.num_read_tokens < 144
            # What comes after the first miss is not looked at.
            assert 1 <= tier_stats(engine).num_corrupt_blocks <= len(damaged)
            assert tier_stats(engine).failure is None
        if len(damaged) == 1:
            with tiered(model, tmp_path) as engine:
                assert answer(engine, tokens, PARAMS).num_read_tokens == 144, "it was written again"
        for file, data in whole.items():
            file.write_bytes(data)


def test_a_folder_that_cannot_be_used_is_refused_at_the_start(model: qwen3.Model, tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "kv", "/proc/nothing/kv"):
        with pytest.raises(ArgumentError) as refusal:
            make_engine(model, cache_dir=folder)
        assert refusal.value.argument == "cache_dir"
        assert str(folder) in str(refusal.value) and "\n" not in str(refusal.value)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_failure_under_way_reaches_no_reader_of_an_async_engine(
    model: qwen3.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(BlockFiles, "write", raises(errno.ENOSPC))
    with (
        warnings.catch_warnings(record=True) as caught,
        AsyncEngine(model, kv_cache_bytes="100blocks", cache_dir=tmp_path) as engine,
    ):
        warnings.simplefilter("always")
        for seed in range(4):
            tokens = prompt(60, seed=seed)
            *_, output = engine.stream(tokens, PARAMS)
            assert output.outputs[0].token_ids == ask_alone(model, tokens, PARAMS)
            flush(engine.engine)
        assert engine.stopped() is None
    assert len(texts_of(caught)) == 1


def test_warnings_that_are_errors_end_no_engine(
    model: qwen3.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As with python -W error."""
    engine = make_engine(model, cache_dir=tmp_path)
    monkeypatch.setattr(BlockFiles, "write", raises(errno.ENOSPC))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ask_many(engine, model, range(3))


def test_an_abort_while_blocks_are_read_leaves_nothing_behind(
    model: qwen3.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tokens = [*prompt(150, seed=1), 3]
    with tiered(model, tmp_path) as engine:
        answer(engine, tokens, PARAMS)
    may_read = threading.Event()
    get = store.BlockStore.load

    def slow(self: store.BlockStore, block_hash: bytes) -> bytes | None:
        assert may_read.wait(60)
        return get(self, block_hash)

    monkeypatch.setattr(store.BlockStore, "load", slow)
    engine = make_engine(model, cache_dir=tmp_path)
    engine.add_request("gone", tokens, PARAMS)
    engine.step()
    assert engine.stats().num_waiting == 1, "it waits for the disk"
    # Others are not kept waiting by it.
    engine.add_request("other", prompt(20), PARAMS)
    finished = [output.request_id for _ in range(10) for output in engine.step() if output.finished]
    assert finished == ["other"]
    engine.abort("gone")
    outputs = run(engine)
    assert outputs["gone"].outputs[0].finish_reason == "abort"
    assert_nothing_held(engine)
    may_read.set()
    output = answer(engine, tokens, PARAMS)
    assert output.outputs[0].token_ids == ask_alone(model, tokens, PARAMS)
    assert_nothing_held(engine)
    assert engine.close(60)


@pytest.fixture
def stuck_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that takes nothing while the event is cleared; a minute later it does, whatever
    happens.
    """
    moves_on = threading.Event()
    moves_on.set()
    timer = threading.Timer(60, moves_on.set)
    timer.start()
    write = BlockFiles.write

    def wait_and_write(*args: Any) -> None:
        moves_on.wait()
        write(*args)

    monkeypatch.setattr(BlockFiles, "write", wait_and_write)
    yield moves_on
    moves_on.set()
    timer.cancel()


def test_the_end_of_an_engine_does_not_wait_for_ever(
    model: qwen3.Model, tmp_path: Path, stuck_disk: threading.Event
):
    engine = make_engine(model, cache_dir=tmp_path)
    stuck_disk.clear()
    answer(engine, prompt(60), PARAMS)
    assert not engine.close(0.2) and not stuck_disk.is_set()
    output = answer(engine, prompt(60), PARAMS)
    assert output.outputs[0].token_ids == ask_alone(model, prompt(60), PARAMS)


def test_an_engine_that_is_dropped_in_an_event_loop_waits_for_no_disk(
    model: qwen3.Model, tmp_path: Path, stuck_disk: threading.Event
):
    engine = Engine(model, kv_cache_bytes="100blocks", cache_dir=tmp_path)
    stuck_disk.clear()
    answer(engine, prompt(60), PARAMS)
    assert engine.disk_tier is not None
    writer, engines = engine.disk_tier._worker._writer, [engine]
    del engine

    async def drop() -> None:
        engines.clear()
        gc.collect()

    loop = threading.Thread(target=asyncio.run, args=(drop(),))
    loop.start()
    loop.join(5)
    assert not loop.is_alive() and writer.is_alive() and not stuck_disk.is_set()
    stuck_disk.set()
    writer.join(60)
    # What was dropped lies there all the same.
    with tiered(model, tmp_path) as again:
        assert answer(again, prompt(60), PARAMS).num_read_tokens == 48


def test_an_engine_that_can_not_be_built_leaves_no_thread_of_its_tier(
    model: qwen3.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any) -> None:
        raise MemoryError("no space")

    before = set(threading.enumerate())
    monkeypatch.setattr(build, "Latencies", fail)
    with pytest.raises(MemoryError, match="no space"):
        make_engine(model, cache_dir=tmp_path)
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert set(threading.enumerate()) <= before


@pytest.mark.slow
def test_what_the_queue_had_no_room_for_is_written_before_the_interpreter_ends(tmp_path: Path):
    script = f"""
import sys, weakref
weakref.finalize(sys, print)  # as other packages do: it decides what comes first at the end
sys.path[:0] = {sys.path!r}
from helpers.engine_runs import tiny_models
from helpers.engine_runs import greedy, make_engine, prompt, run
engine = make_engine(tiny_models()[0], cache_dir={str(tmp_path)!r}, kv_cache_bytes="60blocks")
engine.add_request("a", prompt(40 * 16 + 1), greedy(1))
run(engine)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert len(block_files(tmp_path)) == 40


def test_ctrl_c_ends_the_wait_for_the_disk(
    model: qwen3.Model, tmp_path: Path, stuck_disk: threading.Event
):
    engine = make_engine(model, cache_dir=tmp_path)
    stuck_disk.clear()
    answer(engine, prompt(60), PARAMS)
    main_thread = threading.main_thread().ident
    interrupt = threading.Timer(0.5, signal.pthread_kill, [main_thread, signal.SIGINT])
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        engine.close(1000)
    interrupt.join()
    assert engine.close(1000) and not stuck_disk.is_set(), "it does not wait again"
