"""``TokenMask``: the tokens that a request may not sample, applied to a whole batch at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

from mlx_paged.engine.request import Completion

# The last tokens of sequences that must not be completed, by the tokens before them.
_Ends = dict[tuple[int, ...], list[int]]


class TokenMask:
    """The tokens that a request may not sample next.

    The constant part is an array that is made once. The part that depends on the answer (bad words
    of several tokens, and stops before ``min_tokens``) is computed for each token.

    Attributes:
        disallowed: ``[vocab_size] bool``, the complement of ``allowed_token_ids``, evaluated;
            ``None`` without it.
    """

    def __init__(self, completion: Completion, vocab_size: int):
        params, rules = completion.request.params, completion.request.token_rules
        self.disallowed: mx.array | None = None
        if params.allowed_token_ids is not None:
            self.disallowed = mx.ones(vocab_size, dtype=mx.bool_)
            self.disallowed[mx.array([int(token) for token in params.allowed_token_ids])] = False
            mx.eval(self.disallowed)  # No lazy array is kept.
        self._min_tokens = params.min_tokens
        self._bad, self._bad_ends = _split(rules.bad_words)
        stops = [stop for stop in params.stop_token_ids if not isinstance(stop, tuple)]
        self._stops = [int(stop) for stop in {*stops, *rules.eos_token_ids}]  # type: ignore[arg-type]
        self._stop_ends = _split(params.stop_sequences)[1]

    def banned(self, completion: Completion) -> list[int]:
        """The tokens that are banned at this position, besides those that are never allowed."""
        answer, num_tokens = completion.token_ids, completion.num_output_tokens
        banned = self._bad
        if self._bad_ends:
            banned = banned + _ends_of(self._bad_ends, answer, num_tokens)
        if num_tokens < self._min_tokens:
            banned = banned + self._stops + _ends_of(self._stop_ends, answer, num_tokens)
        return banned


def needs_mask(completion: Completion) -> bool:
    params = completion.request.params
    return params.allowed_token_ids is not None or params.min_tokens > 0 or bool(params.bad_words)


def mask_tokens(
    logits: mx.array,  # [num_completions, vocab_size], may be modified
    completions: Sequence[Completion],
    masks: Sequence[TokenMask | None],
) -> mx.array:
    """The logits with -inf for banned tokens."""
    allowing: list[int] = []
    disallowed: list[mx.array] = []
    rows: list[int] = []
    columns: list[int] = []
    for entry, mask in enumerate(masks):
        if mask is None:
            continue
        if mask.disallowed is not None:
            allowing.append(entry)
            disallowed.append(mask.disallowed)
        banned = mask.banned(completions[entry])
        rows += [entry] * len(banned)
        columns += banned
    if allowing:
        stacked = mx.stack(disallowed)
        if len(allowing) == len(masks):
            logits = mx.where(stacked, -mx.inf, logits)
        else:
            chosen = mx.array(allowing)
            logits[chosen] = mx.where(stacked, -mx.inf, logits[chosen])
    if columns:
        logits[mx.array(rows), mx.array(columns)] = -mx.inf
    return logits


def allow_tokens(
    logits: mx.array,  # [num_completions, vocab_size]
    entries: list[int],  # [num_masked]
    allowed: np.ndarray,  # [num_masked, vocab_size] bool
) -> mx.array:
    """The logits with -inf for the tokens that these entries don't allow, as a new array."""
    if len(entries) == logits.shape[0]:
        return mx.where(mx.array(allowed), logits, -mx.inf)
    chosen = mx.array(entries)
    rows = mx.where(mx.array(allowed), logits[chosen], -mx.inf)
    logits = mx.array(logits)
    logits[chosen] = rows
    return logits


def _split(sequences: Iterable[Sequence[int]]) -> tuple[list[int], _Ends]:
    """The single tokens, and the last tokens of longer sequences by the tokens before them."""
    single: list[int] = []
    ends: _Ends = {}
    for *begin, last in sequences:
        if begin:
            ends.setdefault(tuple(begin), []).append(last)
        else:
            single.append(last)
    return single, ends


def _ends_of(ends: _Ends, token_ids: Sequence[int], num_output_tokens: int) -> list[int]:
    """The tokens that would complete a sequence at the end of the answer."""
    found: list[int] = []
    for length in sorted({len(begin) for begin in ends}):
        if length <= num_output_tokens:
            found += ends.get(tuple(token_ids[-length:]), ())
    return found
