"""What is written to a folder: it is counted over processes and restarts, and can be limited."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.block_stores import UNIT, found, header, named, open_store, payload_of, put, put_chain

from mlx_paged.block_store import CacheFolder, catalogue
from mlx_paged.core.tier import ANSWERS, BlockHeader
from mlx_paged.errors import ArgumentError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds since 1970, which a test may set."""
    now = [1_000_000_000.0]
    monkeypatch.setattr(catalogue.time, "time", lambda: now[0])
    return now


def test_what_is_written_is_counted_and_what_is_there_already_is_not(tmp_path: Path):
    store = open_store(tmp_path, num_blocks=3)
    put_chain(store, *"abcde")
    put_chain(store, *"abcde")  # Two of them were evicted, and two more for them.
    answer = BlockHeader(named("answer") + b"\xfe\xff", None, (1, 2), 0, ANSWERS)
    assert store.store(answer, b"1") and store.store(answer, b"2" * 5000)
    num_blocks = store.stats().num_written
    assert store.stats().nbytes_written == (num_blocks + 1 + 2) * UNIT
    store.close()
    assert CacheFolder(tmp_path).written().nbytes == store.stats().nbytes_written


def test_sums_survive_restarts_and_are_of_the_last_day(tmp_path: Path, clock: list[float]):
    began = clock[0]
    for name in "abcd":
        store = open_store(tmp_path)
        put(store, name)
        store.close()
        clock[0] += 10 * 3600
    sums = CacheFolder(tmp_path).written()
    assert (sums.nbytes, sums.nbytes_last_day, sums.since) == (4 * UNIT, 2 * UNIT, began)
    clock[0] = began + 15 * 3600  # If a clock is set back, hours in the future don't count.
    assert CacheFolder(tmp_path).written().nbytes_last_day == UNIT


def test_several_processes_add_to_the_same_sums(tmp_path: Path):
    program = (
        "import sys; from pathlib import Path; from helpers.block_stores import *\n"
        "store = open_store(Path(sys.argv[1]))\n"
        "for number in range(20): put(store, f'{sys.argv[2]} {number}'); store._written.update()\n"
    )
    tests = Path(__file__).parents[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(number)],
            env={"PYTHONPATH": f"{tests}:{tests.parent}"},
        )
        for number in range(4)
    ]
    assert [process.wait(60) for process in processes] == [0] * 4
    assert CacheFolder(tmp_path).written().nbytes == 80 * UNIT


def test_a_killed_process_loses_only_what_it_wrote_in_the_last_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue, "_SECONDS_BETWEEN_UPDATES", 0.0)
    store = open_store(tmp_path)
    put_chain(store, *"abc")
    monkeypatch.setattr(catalogue, "_SECONDS_BETWEEN_UPDATES", 3600.0)
    put(store, "d")
    # As another process sees it that begins after this one was killed.
    assert CacheFolder(tmp_path).written().nbytes == 3 * UNIT
    store.close()
    assert CacheFolder(tmp_path).written().nbytes == 4 * UNIT


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"nbytes": 1}',
        b'{"nbytes": -1, "since": 1, "hours": {}}',
        b'{"nbytes": 1.5, "since": 1, "hours": {}}',
        b'{"nbytes": 1, "since": "x", "hours": {}}',
        b'{"nbytes": 1, "since": 1, "hours": {"x": 1}}',
        b'{"nbytes": 1, "since": 1, "hours": {"1": "x"}}',
        None,
    ],
)
def test_a_damaged_file_costs_only_the_sums(tmp_path: Path, content: bytes | None):
    store = open_store(tmp_path)
    if content is None:
        (tmp_path / "written.json" / "below").mkdir(parents=True)
    else:
        (tmp_path / "written.json").write_bytes(content)
    store = open_store(tmp_path, max_nbytes_a_day=10 * UNIT)
    put_chain(store, *"ab")
    assert store._written.now().nbytes_last_day == 2 * UNIT
    store.close()
    assert found(open_store(tmp_path), "ab") == "ab" and store.failure is None
    if content is not None:
        assert json.loads((tmp_path / "written.json").read_bytes())["nbytes"] == 2 * UNIT


def test_a_limit_of_a_day_first_asks_for_a_second_use_and_then_stops_writing(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(catalogue, "_SECONDS_BETWEEN_UPDATES", 0.0)
    store = open_store(tmp_path, max_nbytes_a_day=f"{6 * UNIT}/day")
    uses = []
    with pytest.warns(UserWarning, match="cache_dir_writes allows .24,576 bytes.") as caught:
        for name in "abcdefgh":
            uses.append(store.min_uses)
            put(store, name)
    assert uses[:6] == [1, 1, 1, 2, 2, 2] and uses[6] > 2 and len(caught) == 1
    assert found(store, "abcdefgh") == "abcdef" and store.stats().num_dropped == 2
    assert store.failure is None
    # The limit is one of all processes, and of any 24 hours.
    store.close()
    store = open_store(tmp_path, max_nbytes_a_day=6 * UNIT)
    clock[0] += 24 * 3600
    assert not put(store, "g")
    clock[0] += 3600
    store.maintain()
    assert store.min_uses == 1 and put(store, "g")


def test_a_process_finds_out_what_others_have_written(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(catalogue, "_SECONDS_BETWEEN_UPDATES", 0.0)
    one, other = (open_store(tmp_path, max_nbytes_a_day=4 * UNIT) for _ in range(2))
    put_chain(one, *"abcd")
    other.maintain()
    assert other.min_uses > 2 and not put(other, "e")


@pytest.mark.parametrize("limit", ["5G", "5G/week", 0, -1, True, 1.5, "x/day"])
def test_a_limit_is_bytes_per_day(tmp_path: Path, limit: object):
    with pytest.raises(ArgumentError, match="cache_dir_writes must be bytes per day") as error:
        open_store(tmp_path, max_nbytes_a_day=limit)
    assert error.value.argument == "cache_dir_writes"


def test_without_a_limit_each_block_is_stored_at_once(tmp_path: Path):
    store = open_store(tmp_path)
    assert all(store.store(header(name), payload_of(named(name))) for name in "abcdefgh")
    assert store.min_uses == 1
