"""Sample the next token of each request from one batch of logits, and score tokens of prompts.

The token of a request depends on its own logits, tokens and parameters, never on the rest of the
batch: each draw has its own key, and an error in a request's settings fails only that request. The
order is vLLM's: logit bias, repetition, frequency and presence penalty, the request's own
processors; then mlx-lm's filters and temperature. Masks and grammars are applied after the
penalties, so that no bias can bring back a banned token. The thinking budget is applied last.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np

from mlx_paged.engine.request import Completion, SampledToken
from mlx_paged.engine.sampling.sampling_state import (
    SamplingState,
    allow_tokens,
    fill_masks,
    filter_logprobs,
    force_tokens,
    mask_tokens,
)
from mlx_paged.engine.scheduling.batch import Scheduled
from mlx_paged.errors import ArgumentError, RequestError, request_error
from mlx_paged.ops.metadata import rounded_up
from mlx_paged.options.argument_values import kind_of
from mlx_paged.options.sampling_declarations import MAX_LOGPROBS
from mlx_paged.request import Logprob

FLOAT32_MAX = float(np.finfo(np.float32).max)


class LogprobReport(NamedTuple):
    """The log-probabilities of a token in each row of logits and of the most likely tokens there,
    launched and not waited for.
    """

    tokens: mx.array  # [num_rows]
    chosen: mx.array  # [num_rows], the log-probabilities of these tokens
    ranks: mx.array  # [num_rows], of these tokens
    top_ids: mx.array  # [num_rows, num_top], the most likely tokens in any order
    top: mx.array  # [num_rows, num_top], their log-probabilities
    num_wanted: Sequence[int]  # [num_rows], how many of the most likely tokens are read

    def read(self) -> list[dict[int, Logprob]]:
        """For each row, log-probabilities by rank, then by token id, followed by that of the row's
        own token unless it is among the most likely ones.
        """
        results: list[dict[int, Logprob]] = []
        columns = [cast(list[Any], column.tolist()) for column in self[:-1]]
        for token, own, own_rank, top_ids, top, count in zip(
            *columns, self.num_wanted, strict=True
        ):
            best = sorted(zip(top, top_ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
            row = {
                top_token: Logprob(logprob, rank)
                for rank, (logprob, top_token) in enumerate(best[:count], 1)
            }
            row.setdefault(token, Logprob(own, own_rank))
            results.append(row)
        return results


def report_logprobs(
    logits: mx.array,  # [num_rows, vocab_size], the model's own
    tokens: mx.array,  # [num_rows]
    num_wanted: Sequence[int],  # [num_rows]
) -> LogprobReport:
    """The log-probabilities of a token in each row, and of the most likely tokens there."""
    logprobs = log_softmax(logits)
    chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)
    ranks = 1 + (logprobs > chosen).sum(axis=-1)
    # The same number for all rows: which of equally likely tokens are among the first must not
    # depend on what other requests want.
    num_top = min(MAX_LOGPROBS if any(num_wanted) else 0, logprobs.shape[-1])
    top_ids = mx.argpartition(-logprobs, kth=max(num_top - 1, 0), axis=-1)[:, :num_top]
    top = mx.take_along_axis(logprobs, top_ids, axis=-1)
    return LogprobReport(tokens, chosen[:, 0], ranks, top_ids, top, num_wanted)


def log_softmax(logits: mx.array) -> mx.array:
    """``[num_rows, vocab_size]`` float32."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def score_prompts(
    logits: mx.array,  # [num_rows, vocab_size], of a step
    scheduled: Iterable[Scheduled],
) -> list[tuple[Completion, LogprobReport]]:
    """Launch the computation of the log-probabilities that requests of a step need for the next
    tokens of their prompts.
    """
    scored: list[tuple[Completion, LogprobReport]] = []
    first_row = 0
    for part in scheduled:
        completion, num_rows = part.completion, part.num_scored_rows
        if num_rows and not completion.is_finished:
            # The logits of a row are for the token after it.
            first = part.start + part.num_new_tokens - part.num_logit_rows + 1
            tokens = mx.array(completion.token_ids[first : first + num_rows], dtype=mx.int32)
            count = completion.request.params.prompt_logprobs or 0
            rows = logits[first_row : first_row + num_rows]
            report = report_logprobs(rows, tokens, [count] * num_rows)
            mx.async_eval(report)
            scored.append((completion, report))
        first_row += part.num_logit_rows
    return scored


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """The next token of each request, launched and not waited for.

    Attributes:
        token_ids: ``[num_completions] int32``, within the vocabulary even after an error.
        failed: errors that are already known, by entry.
        may_have_none: entries whose settings may exclude all tokens.
        peaks: ``[len(may_have_none)]``, their highest logits.
        drawn: tokens from the requests' own samplers, by entry: ``[1]`` integers, not checked yet.
        report: of the requests with ``logprobs``, in their order.
        rows: ``[num_completions, vocab_size]``, the logits that the tokens were sampled from: after
            penalties, masks and processors, before temperature, filters and samplers. ``None`` if
            nothing was sampled.
        positions: of the tokens in the answers, where settings may exclude all tokens.
    """

    completions: Sequence[Completion]
    token_ids: mx.array
    failed: dict[int, Exception] = field(default_factory=dict)
    may_have_none: Sequence[int] = ()
    peaks: mx.array | None = None
    drawn: dict[int, mx.array] = field(default_factory=dict)
    report: LogprobReport | None = None
    rows: mx.array | None = None
    positions: Sequence[int] = ()

    def read(self) -> list[SampledToken | Exception]:
        """Wait for the tokens. An exception in place of a token fails its request."""
        if not self.completions:
            return []
        token_ids, failed = cast(list[int], self.token_ids.tolist()), self.failed
        if self.peaks is not None:
            peaks = cast(list[float], self.peaks.tolist())
            for entry, peak in zip(self.may_have_none, peaks, strict=True):
                if not peak > -np.inf:  # also for NaN
                    error = _no_token(self.completions[entry], self.positions[entry], peak)
                    failed.setdefault(entry, error)
        for entry, drawn in self.drawn.items():
            (token,) = cast(list[int], drawn.tolist())
            assert self.rows is not None
            if not 0 <= token < self.rows.shape[-1]:
                # An embedding would accept any number without an error.
                error = ValueError(
                    f"[sampler] the sampler chose token {token}, outside the model's vocabulary of "
                    f"{self.rows.shape[-1]}"
                )
                failed.setdefault(entry, error)
        if not failed and self.report is None:
            return list(map(SampledToken, token_ids))
        logprobs: dict[int, dict[int, Logprob]] = {}
        if self.report is not None:
            entries = entries_with_logprobs(self.completions)
            logprobs = dict(zip(entries, self.report.read(), strict=True))
        return [
            failed[entry] if entry in failed else SampledToken(token, logprobs.get(entry))
            for entry, token in enumerate(token_ids)
        ]


NO_TOKENS = SampledTokens((), mx.array([], dtype=mx.int32))


def sample(
    logits: mx.array,  # [num_rows, vocab_size]
    rows: Sequence[int],  # [num_completions]
    completions: Sequence[Completion],
    num_before: Sequence[int] | None = None,  # [num_completions]
    readers: Sequence[Callable[[], Sequence[int]]] = (),  # [num_completions]
) -> SampledTokens:
    """Launch the sampling of each request's next token from its row of logits.

    Several requests may share a row. A request may have several entries, to verify its drafts:
    ``num_before`` is the number of drafts before each sampled token, 0 by default, and ``readers``
    read these drafts, which only a grammar needs. The state of a
    request between two tokens is its ``sampling_state``. The request's own functions are called
    here, and wait for the device if they read numbers.
    """
    if not completions:
        return NO_TOKENS
    num_rows, vocab_size = logits.shape
    states = [state_of(completion, vocab_size) for completion in completions]
    rows = list(rows)
    if rows != list(range(num_rows)):
        logits = logits[mx.array(rows, dtype=mx.int32)]
    if all([state.is_plain for state in states]):  # A generator takes twice as long.
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        sampled = SampledTokens(completions, tokens, rows=logits)
    else:
        positions = [completion.num_output_tokens for completion in completions]
        if num_before is not None:
            positions = list(map(operator.add, positions, num_before))
        sampled = _draw_with_settings(logits, completions, states, positions, readers)
    mx.async_eval(sampled.token_ids, sampled.peaks, sampled.report, sampled.drawn)
    return sampled


def draw_drafts(
    logits: mx.array,  # [num_completions, vocab_size], of a draft model
    completions: Sequence[Completion],
    num_before: int,
    readers: Sequence[Callable[[], Sequence[int]]] = (),  # [num_completions]
) -> mx.array:
    """Drafts ``[num_completions] int32``, each sampled with the key and settings that will be used
    for the completion's own token at that position.

    Penalties and banned tokens follow from the known tokens, and the request's own functions are
    not called: they would count the calls.

    Args:
        num_before: drafts of each before these ones.
        readers: read them, which only a grammar needs.
    """
    states = [state_of(completion, logits.shape[-1]) for completion in completions]
    positions = [completion.num_output_tokens + num_before for completion in completions]
    logits = _adjust(logits, completions, states)
    logits = _keep_to_grammars(logits, completions, states, {}, readers)
    if num_before == 0:
        logits = force_tokens(logits, completions, [state.thinking_budget for state in states])
    return _draw(logits, states, positions).astype(mx.int32)


def state_of(completion: Completion, vocab_size: int) -> SamplingState:
    """The sampling state of a request, created at its first token."""
    state = completion.sampling_state
    if not isinstance(state, SamplingState):
        state = completion.sampling_state = SamplingState(completion, vocab_size)
    return state


def _draw_with_settings(
    logits: mx.array,  # [num_completions, vocab_size]
    completions: Sequence[Completion],
    states: Sequence[SamplingState],
    positions: Sequence[int],  # [num_completions], of the tokens in the answers
    readers: Sequence[Callable[[], Sequence[int]]],  # [num_completions]
) -> SampledTokens:
    failed: dict[int, Exception] = {}
    changed = [entry for entry, state in enumerate(states) if state.may_leave_nothing]
    processed, peaks = _adjust(logits, completions, states), None
    processed = _keep_to_grammars(processed, completions, states, failed, readers)
    if changed:
        processed, peaks = _run_processors(processed, completions, changed, failed)
    processed = force_tokens(processed, completions, [state.thinking_budget for state in states])
    tokens = _draw(processed, states, positions).astype(mx.int32)
    drawn = _run_samplers(processed, tokens, completions, states, failed, logits.dtype)
    report = _report_logprobs(logits, tokens, completions)
    return SampledTokens(
        completions, tokens, failed, changed, peaks, drawn, report, processed, positions
    )


def _adjust(
    logits: mx.array, completions: Sequence[Completion], states: Sequence[SamplingState]
) -> mx.array:
    """The logits after biases, penalties and masks, in float32; unchanged if no request has any."""
    if all(state.penalties is None and not state.may_leave_nothing for state in states):
        return logits
    logits = logits.astype(mx.float32)
    biased = [(entry, *state.bias) for entry, state in enumerate(states) if state.bias is not None]
    if biased:
        entries, token_ids, biases = zip(*biased, strict=True)
        rows = mx.array(np.repeat(entries, [len(ids) for ids in token_ids]))
        logits = logits.at[rows, mx.array(np.concatenate(token_ids))].add(
            mx.array(np.concatenate(biases))
        )

    logits = _penalise(logits, completions, states)
    return mask_tokens(logits, completions, [state.mask for state in states])


def _keep_to_grammars(
    logits: mx.array,
    completions: Sequence[Completion],
    states: Sequence[SamplingState],
    failed: dict[int, Exception],
    readers: Sequence[Callable[[], Sequence[int]]] = (),  # [num_completions]
) -> mx.array:
    """The logits with -inf for tokens outside a request's grammar. Errors of grammars are put into
    ``failed``.

    Args:
        readers: of the drafts before each row; none by default.
    """
    entries = [entry for entry, state in enumerate(states) if state.grammar is not None]
    if not entries:
        return logits
    grammars = [state.grammar for state in states if state.grammar is not None]
    drafts = [readers[entry]() for entry in entries] if readers else []
    allowed, errors = fill_masks(grammars, [completions[entry] for entry in entries], drafts)
    failed.update({entries[index]: error for index, error in errors.items()})
    return allow_tokens(logits, entries, allowed)


def _penalise(
    logits: mx.array, completions: Sequence[Completion], states: Sequence[SamplingState]
) -> mx.array:
    penalised = [entry for entry, state in enumerate(states) if state.penalties is not None]
    for entry in penalised:
        states[entry].read_new_tokens(completions[entry])
    lengths = [len(states[entry].token_ids) for entry in penalised]
    if not any(lengths):
        return logits
    # Padded with duplicates, which set the same values, so that sizes repeat while answers grow.
    pairs = np.arange(rounded_up(sum(lengths), 4)) % sum(lengths)
    rows = mx.array(np.repeat(penalised, lengths)[pairs])
    columns = mx.array(np.concatenate([states[entry].token_ids for entry in penalised])[pairs])
    counts = mx.array(np.concatenate([states[entry].counts for entry in penalised])[pairs])
    table = np.array([state.penalties or (1, 0, 0) for state in states], np.float32)
    repetition, frequency, presence = mx.array(table)[rows].T
    chosen = logits[rows, columns]
    chosen = mx.where(chosen > 0, chosen / repetition, chosen * repetition)
    logits[rows, columns] = chosen - frequency * counts - presence * (counts > 0)
    return logits


def _run_processors(
    logits: mx.array,
    completions: Sequence[Completion],
    entries: list[int],
    failed: dict[int, Exception],
) -> tuple[mx.array, mx.array]:
    """The logits after these requests' own processors, and the highest of each request. Errors are
    put into ``failed``.
    """
    processed: dict[int, mx.array] = {}
    for entry in entries:
        if completions[entry].request.params.logits_processors and entry not in failed:
            mx.eval(logits)  # outside the try: an error of the model is not the processor's
            try:
                processed[entry] = _process(completions[entry], logits[entry : entry + 1])
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                failed[entry] = request_error(lazy_array_error(error))
    if processed:
        logits[mx.array(list(processed))] = mx.concatenate(list(processed.values()))
    # An infinite logit would make the probabilities NaN. Clipped, it gets all of the probability.
    if len(entries) == len(completions):
        logits = mx.minimum(logits, FLOAT32_MAX)
        return logits, logits.max(axis=-1)
    chosen = mx.array(entries)
    rows = mx.minimum(logits[chosen], FLOAT32_MAX)
    logits[chosen] = rows
    return logits, rows.max(axis=-1)


def _run_samplers(
    logits: mx.array,
    tokens: mx.array,
    completions: Sequence[Completion],
    states: Sequence[SamplingState],
    failed: dict[int, Exception],
    dtype: mx.Dtype,
) -> dict[int, mx.array]:
    """Replace ``tokens`` of requests with their own samplers, and return these tokens by entry.
    Errors are put into ``failed``.

    Args:
        dtype: of the model's logits, in which a row is passed on unless its own request has
            changed it.
    """
    drawn: dict[int, mx.array] = {}
    last_token = logits.shape[-1] - 1
    for entry, completion in enumerate(completions):
        sampler = completion.request.params.sampler
        if sampler is None or entry in failed:
            continue
        row = logits[entry : entry + 1]
        if states[entry].penalties is None and not states[entry].may_leave_nothing:
            row = row.astype(dtype)  # Exact: others have made it float32.
        logprobs = row - mx.logsumexp(row, axis=-1, keepdims=True)  # as in mlx-lm, in this dtype
        is_first = not completion.num_output_tokens
        if len(completions) > 1 or is_first:
            mx.eval(logprobs)  # outside the try: an error of the model is not the sampler's
        try:
            sampled = _check_sampled(sampler(logprobs))
            if is_first:
                mx.eval(sampled)  # A lazy array of another thread raises here.
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failed[entry] = request_error(lazy_array_error(error))
        else:
            drawn[entry] = sampled
            # The next step may embed it before it is read and checked.
            tokens[entry] = mx.clip(drawn[entry], 0, last_token)[0]
    return drawn


def _no_token(completion: Completion, position: int, peak: float) -> ValueError:
    params = completion.request.params
    excluding = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "min_tokens": params.min_tokens > position,
        "logit_bias": -math.inf in params.logit_bias.values(),
        "structured_outputs": params.structured_outputs is not None,
    }
    names = [name for name, excludes in excluding.items() if excludes]
    if names and peak == -math.inf and not params.logits_processors:
        place = f"as token {position + 1} of the answer"
        verb = "together allow" if len(names) > 1 else "allows"
        text = f"[sampler] {' and '.join(names)} {verb} no token {place}"
        return ArgumentError(text, names[0])
    return ValueError(
        f"[sampler] the logits of {completion.request_id!r} allow no token: all are -inf, or NaN; "
        "see its structured_outputs, min_tokens, logit_bias, logits_processors, allowed_token_ids "
        "and bad_words"
    )


def _check_sampled(sampled: object) -> mx.array:
    """``[1]`` integers; raises ``ValueError`` for anything else."""
    if not isinstance(sampled, mx.array):
        raise ValueError(f"[sampler] a sampler returns an array, got {kind_of(sampled)}")
    if sampled.shape != (1,) or not mx.issubdtype(sampled.dtype, mx.integer):
        raise ValueError(
            f"[sampler] a sampler returns integers of shape (1,), got {sampled.dtype} of shape "
            f"{tuple(sampled.shape)}"
        )
    return sampled.astype(mx.int64)


def _process(completion: Completion, row: mx.array) -> mx.array:
    """``row`` ``[1, vocab_size]`` after the request's own processors, evaluated so that errors are
    raised here.
    """
    shape, tokens = row.shape, mx.array(completion.token_ids)
    for processor in completion.request.params.logits_processors:
        row = processor(tokens, row)
        is_array = isinstance(row, mx.array)
        if not (is_array and row.shape == shape and mx.issubdtype(row.dtype, mx.floating)):
            name = getattr(processor, "__name__", type(processor).__name__)
            got = f"{row.dtype} of shape {row.shape}" if is_array else type(row).__name__
            raise ValueError(
                f"[sampler] logits processor {name} must return floats of shape {shape}, got {got}"
            )
    row = row.astype(mx.float32)
    mx.eval(row)
    return row


def _draw(
    logits: mx.array,  # [num_completions, vocab_size]
    states: Sequence[SamplingState],
    positions: Sequence[int],  # [num_completions]
) -> mx.array:
    """Token ids ``[num_completions]``, sampled in one call for each group of requests."""
    groups: dict[tuple[float, ...] | None, list[int]] = {}
    for entry, state in enumerate(states):
        groups.setdefault(state.group, []).append(entry)
    parts = []
    for group, entries in groups.items():
        rows = logits if len(groups) == 1 else logits[mx.array(entries)]
        if group is None:
            parts.append(mx.argmax(rows, axis=-1))
            continue
        drawn = [(states[entry], positions[entry]) for entry in entries]
        keys = b"".join([state.draw_key(position) for state, position in drawn])
        rows = filter_logprobs(log_softmax(rows), drawn)
        parts.append(_categorical(mx.array(np.frombuffer(keys, "<u4").reshape(-1, 2)), rows))
    if len(parts) == 1:
        return parts[0]
    return mx.concatenate(parts)[mx.array(np.argsort(np.concatenate(list(groups.values()))))]


_categorical = mx.vmap(lambda key, row: mx.random.categorical(row, key=key))


def _report_logprobs(
    logits: mx.array,  # [num_completions, vocab_size], the model's own
    tokens: mx.array,  # [num_completions]
    completions: Sequence[Completion],
) -> LogprobReport | None:
    """The report for the requests with ``logprobs``; ``None`` if there are none."""
    entries = entries_with_logprobs(completions)
    if not entries:
        return None
    if len(entries) < len(completions):
        logits, tokens = logits[mx.array(entries)], tokens[mx.array(entries)]
    wanted = [completions[entry].request.params.logprobs or 0 for entry in entries]
    return report_logprobs(logits, tokens, wanted)


def entries_with_logprobs(completions: Sequence[Completion]) -> list[int]:
    return [
        entry
        for entry, completion in enumerate(completions)
        if completion.request.params.logprobs is not None
    ]


def lazy_array_error(error: BaseException) -> BaseException:
    """The error of a request's function; for a lazy array of another thread one that says what to
    do.
    """
    if not (isinstance(error, RuntimeError) and "There is no Stream" in str(error)):
        return error
    wrapped = RequestError(
        f"[engine] a sampler or logits processor uses a lazy array of another thread ({error}); "
        "call mx.eval on its arrays before the request is added"
    )
    wrapped.__cause__ = error
    return wrapped
