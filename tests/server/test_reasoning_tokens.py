"""How many tokens of an answer are reasoning, however the answer is cut into parts."""

from __future__ import annotations

import pytest

from mlx_paged.reasoning import ReasoningMarks, ReasoningTokens

MARKS = ReasoningMarks("<", ">", (7, 8), (9,))  # a mark of two tokens, as some models have


@pytest.mark.parametrize(
    ("tokens", "is_thinking", "count"),
    [
        ([1, 2, 3], False, 0),
        ([7, 8, 1, 2, 9, 3], False, 5),
        ([7, 8, 1, 2], False, 4),  # broken off
        ([1, 2, 9, 3], True, 3),
        ([9, 3], True, 1),
        ([7, 1, 8, 9], False, 0),
        ([9, 1, 7, 8, 9, 4], False, 3),
        ([7, 8, 9, 1, 7, 8, 2, 9], False, 7),
        ([1, 7, 8], True, 3),  # a mark that opens what is open
    ],
)
def test_tokens_between_marks_are_counted_with_the_marks(tokens, is_thinking, count):
    for size in range(1, len(tokens) + 1):
        counter = ReasoningTokens(MARKS, is_thinking)
        for begin in range(0, len(tokens), size):
            counter.add(tokens[begin : begin + size])
        assert counter.count == count


def test_a_model_without_marks_has_no_reasoning():
    counter = ReasoningTokens(None)
    counter.add([1, 2, 3])
    assert counter.count == 0
