"""``check_stop``: whether a token is the last one of an answer."""

from __future__ import annotations

from collections.abc import Collection

from mlx_paged.request import Request, StopReason


def check_stop(
    request: Request, token_id: int, eos_token_ids: Collection[int], max_num_tokens: int
) -> tuple[str, StopReason] | None:
    """Why a request ends with the token that was appended last, as its ``finish_reason`` and
    ``stop_reason``; ``None`` while it goes on. (vLLM's name.)

    Nothing but ``max_num_tokens`` and ``max_tokens`` ends the first ``min_tokens`` tokens. The end
    of sequence counts before a stop token, and that before a stop sequence.

    Args:
        max_num_tokens: of prompt and answer.
    """
    params, num_tokens = request.params, len(request.token_ids)
    num_output_tokens = num_tokens - request.num_prompt_tokens
    if num_output_tokens > params.min_tokens:
        if token_id in eos_token_ids and not params.ignore_eos:
            return "stop", None
        if token_id in params.stop_token_ids:
            return "stop", token_id
        if params.stop_sequences and (sequence := _ending_sequence(request)) is not None:
            return "stop", sequence
    if num_output_tokens == params.max_tokens or num_tokens >= max_num_tokens:
        return "length", None
    return None


def _ending_sequence(request: Request) -> tuple[int, ...] | None:
    """The stop sequence that the answer ends with; the longest, if there are several."""
    for sequence in request.params.stop_sequences:
        length = len(sequence)
        if length <= request.num_output_tokens and sequence == tuple(request.token_ids[-length:]):
            return sequence
    return None
