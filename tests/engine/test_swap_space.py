"""When it pays to swap, and who has how much room in host memory."""

from __future__ import annotations

import pytest

from mlx_paged.engine.swap_space import SwapSpace


def measured(copy: float | None, compute: float | None, num_tokens: int = 100) -> SwapSpace:
    """A space whose engine took so many seconds per token."""
    space: SwapSpace = SwapSpace(num_tokens)
    if copy is not None:
        space.note_copied(10, 10 * copy)
    if compute is not None:
        space.note_computed(10, 10 * compute)
    return space


@pytest.mark.parametrize(
    ("copy", "compute", "is_cheaper"),
    [
        (1.0, 2.5, True),  # 2 * 1 < 2.5: out and in again
        (1.0, 2.0, False),
        (1.0, 1.5, False),
        (0.0, 1.0, True),
        (None, 1.0, True),  # the first one measures it
        (None, None, False),  # nothing is known of computing
        (1.0, None, False),
    ],
)
def test_what_is_copied_out_and_in_faster_than_computed_is_swapped(copy, compute, is_cheaper: bool):
    assert measured(copy, compute).take_place("a", 50) == is_cheaper
    assert measured(copy, compute).take_place("a", 1) == is_cheaper


def test_the_rule_takes_means_over_tokens_not_over_measurements():
    space: SwapSpace = SwapSpace(100)
    space.note_computed(1, 100.0)
    space.note_computed(99, 0.0)  # 1 second per token
    space.note_copied(1, 49.0)
    space.note_copied(99, 0.0)  # 0.49
    assert space.take_place("a", 1)
    space.note_copied(1, 100.0)  # 1.48
    assert not space.take_place("b", 1)


def test_only_what_fits_beside_the_others_has_a_place():
    space = measured(None, 1.0, num_tokens=10)
    assert not space.take_place("a", 11)
    assert space.take_place("a", 6)
    assert not space.take_place("b", 5)
    assert space.take_place("b", 4)
    assert not space.take_place("c", 1)
    assert (space.num_used_tokens, space.num_tokens_of("a"), space.num_tokens_of("b")) == (10, 6, 4)
    assert space.num_tokens_of("c") == 0
    space.give_back("a")
    assert (space.num_used_tokens, space.num_tokens_of("a")) == (4, 0)
    assert space.take_place("c", 6)


def test_a_space_of_no_tokens_never_swaps():
    assert not measured(None, 1.0, num_tokens=0).take_place("a", 1)


def test_a_refused_sequence_has_no_place():
    space = measured(1.0, 1.0)
    assert not space.take_place("a", 5)
    assert (space.num_tokens_of("a"), space.num_used_tokens) == (0, 0)


def test_contents_are_kept_until_their_place_is_given_back():
    space = measured(None, 1.0)
    first, second = object(), object()
    assert space.take_place("a", 5) and space.take_place("b", 6)
    space.put("a", first)
    space.put("b", second)
    assert space.get("a") is first and space.get("b") is second
    space.give_back("a")
    with pytest.raises(KeyError):
        space.get("a")
    assert space.get("b") is second
    space.give_back("a")  # a second time, and one that was never there
    space.give_back("c")
    assert space.num_used_tokens == 6
