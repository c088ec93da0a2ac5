"""The new part of an output since the last report (``RequestOutputKind.DELTA``)."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from mlx_paged.request import CompletionOutput, RequestOutput

T = TypeVar("T")


class ReportedLength(NamedTuple):
    """How much of a completion its reader has received."""

    num_tokens: int
    num_characters: int
    is_finished: bool


NOTHING_REPORTED = ReportedLength(0, 0, False)


def new_part(
    output: RequestOutput, handed_over: Iterable[ReportedLength]
) -> tuple[RequestOutput, list[ReportedLength]]:
    """The new parts of completions, and how much of each completion the reader then has.

    The last output has all completions, so that it says how each of them ended.

    Args:
        handed_over: how much of each completion the reader has received.
    """
    lengths = [_length_of(completion) for completion in output.outputs]
    part = copy.copy(output)
    part.outputs = [
        _part_after(before, completion)
        for completion, before, now in zip(output.outputs, handed_over, lengths, strict=True)
        if output.finished or before != now
    ]
    return part, lengths


def merge_parts(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Join two consecutive parts of an output. Changes ``first``."""
    merged = {completion.index: completion for completion in first.outputs}
    for completion in second.outputs:
        earlier = merged.get(completion.index)
        if earlier is not None:
            completion = copy.copy(completion)
            completion.text = earlier.text + completion.text
            completion.token_ids = _joined(earlier.token_ids, completion.token_ids)
            if completion.logprobs is not None:
                completion.logprobs = _joined(earlier.logprobs or [], completion.logprobs)
        merged[completion.index] = completion
    result = copy.copy(second)
    result.outputs = [merged[index] for index in sorted(merged)]
    return result


def _joined(first: list[T], second: list[T]) -> list[T]:
    first += second  # In place, so that many parts take linear time; nothing else refers to it.
    return first


def _length_of(completion: CompletionOutput) -> ReportedLength:
    return ReportedLength(
        len(completion.token_ids), len(completion.text), completion.finish_reason is not None
    )


def _part_after(before: ReportedLength, completion: CompletionOutput) -> CompletionOutput:
    part = copy.copy(completion)
    part.text = completion.text[before.num_characters :]
    part.token_ids = completion.token_ids[before.num_tokens :]
    if completion.logprobs is not None:
        part.logprobs = completion.logprobs[before.num_tokens :]
    return part
