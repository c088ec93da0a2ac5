"""Completions without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_paged.engine.request import Completion, Request
from mlx_paged.options.sampling_params import SamplingParams
from mlx_paged.request import CompletionOutput


def new_completion(
    name: str,
    prompt: Sequence[int],
    params: SamplingParams | None = None,
    *,
    index: int = 0,
    **options: Any,
) -> Completion:
    """The first completion of a new request, or one with another index; options are those of
    `Request`.
    """
    request = Request(name, prompt, params or SamplingParams(), **options)
    if not index:
        return request.completions[0]
    request.output.outputs = [CompletionOutput(each) for each in range(index + 1)]
    return Completion(request, index)
