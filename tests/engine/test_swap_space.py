"""Whether swapping pays, and which sequence has how much room in host memory."""

from __future__ import annotations

import pytest

from mlx_paged.engine.swap_space import SwapSpace, is_swapping_cheaper


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


def test_a_sequence_has_room_if_it_fits_beside_the_others():
    space: SwapSpace = SwapSpace(10)
    assert not space.reserve("a", 11)
    assert space.reserve("a", 6)
    assert not space.reserve("b", 5)
    assert space.reserve("b", 4)
    assert not space.reserve("c", 1)
    assert (space.num_used_tokens, space.num_tokens_of("a"), space.num_tokens_of("b")) == (10, 6, 4)
    assert space.num_tokens_of("c") == 0
    space.release("a")
    assert (space.num_used_tokens, space.num_tokens_of("a")) == (4, 0)
    assert space.reserve("c", 6)


def test_a_space_of_no_tokens_never_swaps():
    assert not SwapSpace(0).reserve("a", 1)


def test_contents_are_kept_until_they_are_released():
    space: SwapSpace = SwapSpace(100)
    first, second = object(), object()
    assert space.reserve("a", 5) and space.reserve("b", 6)
    space.put("a", first)
    space.put("b", second)
    assert space.get("a") is first and space.get("b") is second
    space.release("a")
    with pytest.raises(KeyError):
        space.get("a")
    assert space.get("b") is second
    space.release("a")  # a second time, and one that was never there
    space.release("c")
    assert space.num_used_tokens == 6
