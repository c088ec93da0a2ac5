"""``SamplingState``: what the sampler keeps of a completion between two tokens: its filters, its
penalties, the tokens that it may not sample, where it is in its grammar, and how much of its
thinking budget is left.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_top_k, apply_top_p

from mlx_paged.answers.tokens import ReasoningLimit
from mlx_paged.engine.request import Completion
from mlx_paged.engine.sampling.grammar import CompiledGrammar, matcher_error
from mlx_paged.errors import StructuredOutputError, request_error
from mlx_paged.options.sampling_declarations import SAMPLING_PARAMS
from mlx_paged.options.sampling_params import SamplingParams

# Models break the line after their reasoning; this many tokens of line breaks are allowed.
MAX_LINE_BREAKS = 2
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


class GrammarState:
    """The state of an answer in its grammar. Tokens are only appended, and each is read once."""

    def __init__(self, grammar: CompiledGrammar):
        self.vocabulary = grammar.vocabulary
        self._begin_after = grammar.begin_after
        self._reasoning_start = grammar.reasoning_start
        self._matcher = grammar.matcher.deep_copy()
        self._num_read = 0  # tokens of the answer
        self._is_structured = not grammar.begin_after
        self._num_free_breaks = 0  # that may still come before the structure

    def fill_mask(
        self, completion: Completion, mask: np.ndarray, drafts: Sequence[int] = ()
    ) -> None:
        """Fill the mask of the tokens that may come next.

        Args:
            mask: ``[num_words] uint32``, one bit per token, the lowest first.
            drafts: tokens that may follow the request's own: the mask is of what comes after them.

        Raises:
            StructuredOutputError: the answer has left its grammar, or the grammar is too complex.
        """
        self._read_new_tokens(completion)
        if not drafts:
            return self._fill(mask)
        ahead = copy(self)
        ahead._matcher = self._matcher.deep_copy()  # in a microsecond
        ahead._read_new_tokens(completion, drafts)
        ahead._fill(mask)

    def forced_tokens(self, completion: Completion) -> list[int]:
        """The next tokens as far as the grammar allows only one at each place. Raises nothing."""
        try:
            self._read_new_tokens(completion)
            if not self._is_structured or self._num_free_breaks:
                return []
            return self._matcher.compute_ff_tokens()
        except BaseException:  # Panics of Rust are not Exceptions. The next mask raises it again.
            return []

    def num_allowed(self, completion: Completion, drafts: list[int]) -> int:
        """How many of these tokens may come next, up to the first that may not; all of them before
        the structure begins. Raises nothing.
        """
        try:
            self._read_new_tokens(completion)
            if not self._is_structured or self._num_free_breaks:
                return len(drafts)
            return self._matcher.validate_tokens(drafts)
        except BaseException:
            return 0

    def _fill(self, mask: np.ndarray) -> None:
        num_tokens, start = self._num_read, self._reasoning_start
        is_opening = not self._is_structured and num_tokens < len(start)
        if self._is_structured or (is_opening and num_tokens == 0):
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._check("can't go on")
        else:
            mask[:] = 0 if is_opening else self.vocabulary.unstructured
        more = [start[num_tokens]] if is_opening else []
        if self._num_free_breaks:
            more += self.vocabulary.line_breaks
        for token in more:
            word, bit = divmod(token, 32)
            mask[word] |= np.uint32(1 << bit)

    def _read_new_tokens(self, completion: Completion, drafts: Sequence[int] = ()) -> None:
        if self._is_structured:
            tokens = completion.token_ids[completion.num_prompt_tokens + self._num_read :]
            tokens += drafts
        else:
            tokens = self._find_structure([*completion.output_token_ids, *drafts], self._num_read)
        if self._num_free_breaks:
            tokens = self._without_breaks(tokens)
        if tokens and not self._matcher.consume_tokens(tokens):
            self._check("left its grammar")
        self._num_read = completion.num_output_tokens + len(drafts)

    def _find_structure(self, answer: list[int], num_read: int) -> list[int]:
        """The tokens of the structure, which begins after the reasoning."""
        start, end = self._reasoning_start, self._begin_after
        if tuple(answer[: len(start)]) != start[: len(answer)]:
            self._is_structured = True
            return answer
        for place in range(max(num_read + 1, len(start) + len(end)), len(answer) + 1):
            if tuple(answer[place - len(end) : place]) == end:
                self._is_structured = True
                self._num_free_breaks = MAX_LINE_BREAKS
                return answer[place:]
        return []

    def _without_breaks(self, tokens: list[int]) -> list[int]:
        """The tokens of the structure after leading line breaks."""
        for number, token in enumerate(tokens):
            if not self._num_free_breaks or token not in self.vocabulary.line_breaks:
                self._num_free_breaks = 0
                return tokens[number:]
            self._num_free_breaks -= 1
        return []

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            raise StructuredOutputError(
                f"[structured_outputs] the answer {what}: {matcher_error(self._matcher)}"
            )


def fill_masks(
    states: Sequence[GrammarState],
    completions: Sequence[Completion],
    drafts: Sequence[Sequence[int]] = (),
) -> tuple[np.ndarray, dict[int, Exception]]:
    """The tokens that may come next, ``[num_completions, vocab_size] bool``, and errors by entry. A
    failed request may have any token.

    Args:
        drafts: ``[num_completions]``, what comes before these tokens after the request's own ones;
            empty for none.
    """
    vocabulary = states[0].vocabulary
    words = np.empty((len(states), vocabulary.num_words), np.uint32)
    failed: dict[int, Exception] = {}
    for entry, (state, completion) in enumerate(zip(states, completions, strict=True)):
        try:
            state.fill_mask(completion, words[entry], drafts[entry] if drafts else ())
        except BaseException as error:  # Panics of Rust are not Exceptions.
            failed[entry] = request_error(error)
            words[entry] = vocabulary.unstructured
    # Unpacking 150,000 bits takes 8 us here, and each operation on the device takes as much.
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return bits[:, : vocabulary.vocab_size].view(np.bool_), failed


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


class ThinkingBudget:
    """The state of an answer's reasoning. Tokens are only appended, and each is read once."""

    def __init__(self, limit: ReasoningLimit):
        self._limit = limit
        self._reader = limit.new_reader()
        self._num_read = 0  # tokens of the answer
        self._is_forcing = False  # the tokens of the end, of which some have come

    def forced_token(self, completion: Completion) -> int | None:
        """The token that has to come next; ``None`` if any may."""
        self._reader.add(completion.token_ids[completion.num_prompt_tokens + self._num_read :])
        self._num_read = completion.num_output_tokens
        end, reader = self._limit.end_token_ids, self._reader
        is_used_up = reader.is_reasoning and reader.num_within >= self._limit.num_tokens
        if is_used_up or self._is_forcing:
            for length in range(min(len(end) - 1, self._num_read), 0, -1):
                if tuple(completion.token_ids[-length:]) == end[:length]:
                    return end[length]  # The mark has begun.
        # The first of several tokens may end the reasoning; the others follow all the same.
        self._is_forcing = is_used_up
        return end[0] if is_used_up else None


def force_tokens(
    logits: mx.array,  # [num_completions, vocab_size]
    completions: Sequence[Completion],
    budgets: Sequence[ThinkingBudget | None],  # [num_completions]
) -> mx.array:
    """The logits with -inf for all but the forced token of each request that has one, as a new
    array.
    """
    forced = {
        entry: token
        for entry, (completion, budget) in enumerate(zip(completions, budgets, strict=True))
        if budget is not None and (token := budget.forced_token(completion)) is not None
    }
    if not forced:
        return logits
    rows = np.full((len(forced), logits.shape[-1]), -np.inf, np.float32)
    rows[np.arange(len(forced)), list(forced.values())] = 0
    logits = mx.array(logits)
    logits[mx.array(list(forced))] = mx.array(rows).astype(logits.dtype)
    return logits


# Penalties and temperatures are at most this, and top_p at least its inverse, so that all products
# are finite in float32: a scale of 0 would turn filtered tokens into NaN.
HUGE = 1e30
# Without these settings, a draw depends only on its row of logits, its position and, with a
# grammar, the drafts before it.
_CROSS_ROW_DEFAULTS = [
    (name, getattr(SamplingParams(), name))
    for name, param in SAMPLING_PARAMS.items()
    if not param.per_row and name != "structured_outputs"
]
COLDEST = 1e-6  # the least temperature: log-probabilities over a lower one overflow float32


class SamplingState:
    """A request's state in the sampler between two tokens.

    Tokens are only ever appended to a request, so each is read once, and no step iterates over the
    context.

    Attributes:
        params: of the request.
        group: requests of a group are sampled in one call; ``None`` is greedy. For each of
            ``FILTERS`` it has whether the request uses it or, if that has to be the same in the
            group, its value.
        scale: 1 / temperature.
        token_ids: the distinct tokens of the request.
        counts: how often the answer contains each of them.
        mask: the tokens that can't be sampled; ``None`` if there are none.
        grammar: the state of the answer in its grammar; ``None`` if it has none.
        thinking_budget: the state of its reasoning; ``None`` if that has no limit.
        draws_rows_together: whether a token may be sampled before the preceding ones are known.
    """

    def __init__(self, completion: Completion, vocab_size: int):
        self.params = params = completion.request.params
        self.group: tuple[float, ...] | None = None
        if not params.is_greedy:
            self.group = tuple(each.of_group(params) for each in FILTERS)
        self.scale = 1 / min(max(float(params.temperature), COLDEST), HUGE)
        self.bias: tuple[np.ndarray, np.ndarray] | None = None  # token ids, biases
        if params.logit_bias:
            with np.errstate(over="ignore"):
                biases = np.array(list(params.logit_bias.values()), np.float64).astype(np.float32)
            self.bias = np.array(list(params.logit_bias), np.int32), biases
        self.mask = TokenMask(completion, vocab_size) if needs_mask(completion) else None
        compiled = completion.request.token_rules.grammar
        self.grammar = None if compiled is None else GrammarState(compiled)
        limit = completion.request.token_rules.reasoning
        self.thinking_budget = None if limit is None else ThinkingBudget(limit)
        self.may_leave_nothing = bool(
            params.logit_bias or params.logits_processors or self.mask is not None
        )
        self.penalties: tuple[float, float, float] | None = None
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        if penalties != (1, 0, 0):
            factor = min(max(params.repetition_penalty, 1 / HUGE), HUGE)
            frequency, presence = (min(max(penalty, -HUGE), HUGE) for penalty in penalties[1:])
            self.penalties = factor, frequency, presence
        self.is_plain = (
            params.sampler is None
            and self.group is None
            and self.penalties is None
            and params.logprobs is None
            and self.grammar is None
            and self.thinking_budget is None
            and not self.may_leave_nothing
        )
        self.draws_rows_together = all(
            getattr(params, name) == default for name, default in _CROSS_ROW_DEFAULTS
        )
        # Only the seed has a variable width, so the bytes of all triples are distinct.
        seed, index = int(completion.request.seed), completion.index
        seed_bytes = seed.to_bytes(seed.bit_length() // 8 + 1, "little", signed=True)
        self.key = blake2b(seed_bytes + index.to_bytes(8, "little"), digest_size=8)
        # Only the repetition penalty depends on the prompt.
        self.num_read = 0 if params.repetition_penalty != 1 else completion.num_prompt_tokens
        self.token_ids = array("i")
        self.counts = array("i")
        self.index_of: dict[int, int] = {}

    def read_new_tokens(self, completion: Completion) -> None:
        for position in range(self.num_read, completion.num_tokens):
            token = completion.token_ids[position]
            index = self.index_of.setdefault(token, len(self.token_ids))
            if index == len(self.token_ids):
                self.token_ids.append(token)
                self.counts.append(0)
            self.counts[index] += position >= completion.num_prompt_tokens
        self.num_read = completion.num_tokens

    def xtc_threshold(self, position: int) -> float:
        """The threshold of XTC at a position of the answer; infinite if the random decision there
        is not to apply it.
        """
        # mlx-lm decides on the device. These bits are as random, and need no operation there.
        key = self.key.copy()
        key.update(position.to_bytes(8, "little") + b"xtc")
        coin = int.from_bytes(key.digest(), "little") / 2**64
        is_applied = coin < self.params.xtc_probability
        return float(self.params.xtc_threshold) if is_applied else math.inf

    def draw_key(self, position: int) -> bytes:
        """8 bytes that depend only on the request's seed, its index and the position in its
        answer.
        """
        key = self.key.copy()
        key.update(position.to_bytes(8, "little"))
        return key.digest()


Drawn: TypeAlias = tuple[SamplingState, int]  # a request, and the position of the drawn token


class Filter(NamedTuple):
    """A filter of log-probabilities ``[num_requests, vocab_size]``.

    Attributes:
        of_group: what requests that are sampled in one call have in common: whether they use the
            filter, or its value; 0 is off.
        apply: called with the log-probabilities, the requests and ``of_group``.
    """

    of_group: Callable[[SamplingParams], float]
    apply: Callable[[mx.array, Sequence[Drawn], float], mx.array]


# Settings are arrays ``[num_requests, 1]`` where mlx-lm's filters take them: mlx-lm compiles its
# filters, and compiling a kernel for each new value would stall all requests.


def _column(drawn: Sequence[Drawn], value: Callable[[SamplingParams], float]) -> mx.array:
    return mx.array([[float(value(state.params))] for state, _ in drawn], dtype=mx.float32)


def _keep_top_p(logprobs: mx.array, drawn: Sequence[Drawn], _: float) -> mx.array:
    top_p = _column(drawn, lambda params: max(params.top_p, 1 / HUGE))
    return apply_top_p(logprobs, top_p)  # type: ignore[arg-type]  # an array


def _keep_min_p(logprobs: mx.array, drawn: Sequence[Drawn], _: float) -> mx.array:
    log_min_p = _column(drawn, lambda params: math.log(params.min_p))
    least = logprobs.max(axis=-1, keepdims=True) + log_min_p  # mlx-lm's apply_min_p takes no array
    return mx.where(logprobs < least, -mx.inf, logprobs)


def _exclude_top_choices(logprobs: mx.array, drawn: Sequence[Drawn], _: float) -> mx.array:
    """mlx-lm's ``apply_xtc`` after the random decision for each row: remove the tokens above the
    threshold, except for the least likely of them and special tokens.
    """
    # Infinity leaves a row unchanged.
    thresholds = mx.array([[state.xtc_threshold(position)] for state, position in drawn])
    probabilities = mx.softmax(logprobs, axis=-1)
    above = mx.where(probabilities > thresholds, probabilities, mx.inf)
    is_removed = probabilities > above.min(axis=-1, keepdims=True)
    spared = [
        (row, token)
        for row, (state, _) in enumerate(drawn)
        for token in state.params.xtc_special_tokens
    ]
    if spared:
        rows, tokens = zip(*spared, strict=True)
        is_removed[mx.array(rows), mx.array(tokens)] = False
    return mx.where(is_removed, -mx.inf, logprobs)


def _keep_top_k(logprobs: mx.array, drawn: Sequence[Drawn], top_k: float) -> mx.array:
    is_less = top_k < logprobs.shape[-1]
    return apply_top_k(logprobs, int(top_k)) if is_less else logprobs


# In the order of mlx-lm's ``make_sampler``.
FILTERS = (
    Filter(lambda params: params.top_p < 1, _keep_top_p),
    Filter(lambda params: params.min_p > 0, _keep_min_p),
    Filter(lambda params: params.xtc_probability > 0, _exclude_top_choices),
    Filter(lambda params: max(params.top_k, 0), _keep_top_k),
)


def filter_logprobs(
    logprobs: mx.array,  # [num_requests, vocab_size]
    drawn: Sequence[Drawn],  # [num_requests], of one group
) -> mx.array:
    """Apply the filters of a group like mlx-lm's ``make_sampler``, the temperature last."""
    for each, value in zip(FILTERS, drawn[0][0].group or (), strict=True):
        if value:
            logprobs = each.apply(logprobs, drawn, value)
    return logprobs * mx.array([[state.scale] for state, _ in drawn], dtype=mx.float32)
