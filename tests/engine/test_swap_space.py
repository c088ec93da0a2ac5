"""Whether swapping pays, and which sequence has how much room in host memory."""

from __future__ import annotations

import pytest

from mlx_paged.core import SequenceTables, TableState
from mlx_paged.core.tier import BlockHeader
from mlx_paged.engine.scheduling.prefix_cache import SwapSpace
from mlx_paged.models.kv_cache import is_swapping_cheaper


@pytest.mark.parametrize(
    ("num_parameters", "kv_nbytes_per_token", "expected"),
    [
        (600_000_000, 114_688, True),  # Qwen3-0.6B in bfloat16
        (38_000, 1_000, False),  # 2 * 1,000 * 38 operations are worth as much as 2 * 38,000
        (38_001, 1_000, True),
    ],
)
def test_the_rule_knows_sizes_and_no_clock(num_parameters, kv_nbytes_per_token, expected: bool):
    assert is_swapping_cheaper(num_parameters, kv_nbytes_per_token) == expected


def of(num_blocks: int) -> SequenceTables:
    """A sequence in this many blocks of 4, the last of which holds 3 tokens."""
    return SequenceTables([TableState(num_blocks, 0, 4 * num_blocks - 1)])


def test_a_sequence_has_room_if_it_fits_beside_the_others():
    space = SwapSpace(10)
    assert not space.reserve("a", of(11))
    assert space.reserve("a", of(6))
    assert not space.reserve("b", of(5))
    assert space.reserve("b", of(4))
    assert not space.reserve("c", of(1))
    assert (space.num_used_blocks, space.num_used_tokens) == (10, 38)
    assert [space.find(name).num_tokens for name in "ab"] == [23, 15]
    assert space.find("c") is None
    space.release("a")
    assert (space.num_used_blocks, space.find("a")) == (4, None)
    assert space.reserve("c", of(6))


def test_blocks_of_all_groups_and_the_state_count():
    tables = [TableState(3, 0, 12), TableState(2, 1, 8, num_evicted_tokens=4)]
    assert not SwapSpace(8, num_state_blocks=3).reserve("a", SequenceTables(tables))
    space = SwapSpace(9, num_state_blocks=3)
    assert space.reserve("a", SequenceTables(tables))
    assert (space.num_used_blocks, space.num_used_tokens) == (9, 12)


def test_a_space_of_no_blocks_never_swaps():
    assert not SwapSpace(0).reserve("a", of(1))


def stored(space: SwapSpace, name: str, content: bytes) -> list[BlockHeader]:
    """What a space keeps of a sequence, each block with this content."""
    headers = space.headers(name)[0]
    for header in headers:
        space.tier.store(header, content)
    return headers


def contents(space: SwapSpace, headers: list[BlockHeader]) -> set[bytes | None]:
    return {space.tier.load(header.block_hash) for header in headers}


def test_contents_are_kept_until_they_are_released():
    space = SwapSpace(100)
    assert space.reserve("a", of(5)) and space.reserve("b", of(6))
    first, second = stored(space, "a", b"1"), stored(space, "b", b"2")
    assert (len(first), len(second)) == (5, 6)
    assert contents(space, first) == {b"1"} and contents(space, second) == {b"2"}
    space.release("a")
    assert contents(space, first) == {None}
    assert contents(space, second) == {b"2"}
    space.release("a")  # a second time, and one that was never there
    space.release("c")
    assert space.num_used_blocks == 6
    # A name that comes again has other keys: nothing of the old one is found.
    assert space.reserve("a", of(5)) and contents(space, space.headers("a")[0]) == {None}
