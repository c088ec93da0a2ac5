"""What is new in an output since its reader got the one before (``RequestOutputKind.DELTA``)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from mlx_paged.request import CompletionOutput, RequestOutput

T = TypeVar("T")


class Told(NamedTuple):
    """How much of a completion its reader knows."""

    num_tokens: int = 0
    num_characters: int = 0
    is_finished: bool = False


def nothing_told(output: RequestOutput) -> list[Told]:
    """What the reader of a new request knows of each of its completions."""
    return [Told()] * len(output.outputs)


def new_part(output: RequestOutput, told: Sequence[Told]) -> tuple[RequestOutput, list[Told]]:
    """The completions in which something is new, cut down to that, and what is known with them.

    The last output has all completions, so that how each of them ended stands in one place.
    """
    part = copy.copy(output)
    known = [_all_of(completion) for completion in output.outputs]
    part.outputs = [
        _new_part_of(completion, before)
        for completion, before, now in zip(output.outputs, told, known, strict=True)
        if output.finished or before != now
    ]
    return part, known


def merge_parts(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two parts of an output that follow one another, as one. ``first`` is changed."""
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
    first += second  # The earlier part is nobody's else, so that a long wait stays linear.
    return first


def _all_of(completion: CompletionOutput) -> Told:
    return Told(
        len(completion.token_ids), len(completion.text), completion.finish_reason is not None
    )


def _new_part_of(completion: CompletionOutput, told: Told) -> CompletionOutput:
    part = copy.copy(completion)
    part.text = completion.text[told.num_characters :]
    part.token_ids = completion.token_ids[told.num_tokens :]
    if completion.logprobs is not None:
        part.logprobs = completion.logprobs[told.num_tokens :]
    return part
