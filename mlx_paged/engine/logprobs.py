"""Log-probabilities of sampled tokens, of the most likely tokens, and of the tokens of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import mlx.core as mx

from mlx_paged.engine.batch import Scheduled
from mlx_paged.engine.request import Completion
from mlx_paged.request import Logprob


class LogprobReport(NamedTuple):
    """Log-probabilities for the requests that have requested them, in their order."""

    chosen: mx.array  # [num_wanted], of the sampled token or of the prompt's token
    ranks: mx.array  # [num_wanted], of the same token
    top_ids: mx.array  # [num_wanted, num_top], the most likely tokens in any order
    top: mx.array  # [num_wanted, num_top], of the most likely tokens


def log_softmax(logits: mx.array) -> mx.array:
    """``[num_rows, vocab_size]`` float32."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def report_logprobs(
    logits: mx.array,  # [num_rows, vocab_size]
    tokens: mx.array,  # [num_rows]
    num_top: int,
) -> LogprobReport:
    """The log-probabilities of a token in each row, and of the ``num_top`` most likely ones."""
    logprobs = log_softmax(logits)
    chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)
    ranks = 1 + (logprobs > chosen).sum(axis=-1)
    most = min(num_top, logprobs.shape[-1])
    top_ids = mx.argpartition(-logprobs, kth=max(most - 1, 0), axis=-1)[:, :most]
    return LogprobReport(
        chosen[:, 0], ranks, top_ids, mx.take_along_axis(logprobs, top_ids, axis=-1)
    )


def read_report(
    report: LogprobReport, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[dict[int, Logprob]]:
    """For each row of a report, log-probabilities by rank, then by token id, followed by that of
    the row's own token unless it is among the most likely ones.
    """
    results: list[dict[int, Logprob]] = []
    for token, count, own, own_rank, top_ids, top in zip(
        token_ids,
        num_top,
        cast(list[float], report.chosen.tolist()),
        cast(list[int], report.ranks.tolist()),
        cast(list[list[int]], report.top_ids.tolist()),
        cast(list[list[float]], report.top.tolist()),
        strict=True,
    ):
        best = sorted(zip(top, top_ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
        row = {
            top_token: Logprob(logprob, rank)
            for rank, (logprob, top_token) in enumerate(best[:count], 1)
        }
        row.setdefault(token, Logprob(own, own_rank))
        results.append(row)
    return results


class ScoredPrompt(NamedTuple):
    """The next tokens of a prompt and their log-probabilities, launched and not waited for."""

    completion: Completion
    token_ids: Sequence[int]  # [num_scored_rows]
    report: LogprobReport

    def read(self) -> list[dict[int, Logprob]]:
        """For each token, its own log-probability and those of the most likely tokens there."""
        count = self.completion.request.params.prompt_logprobs or 0
        return read_report(self.report, self.token_ids, [count] * len(self.token_ids))


def score_prompts(
    logits: mx.array,  # [num_rows, vocab_size], of a step
    scheduled: Iterable[Scheduled],
) -> list[ScoredPrompt]:
    """Launch the computation of the log-probabilities that requests of a step need for prompts."""
    scored: list[ScoredPrompt] = []
    first_row = 0
    for part in scheduled:
        completion, num_rows = part.completion, part.num_scored_rows
        if num_rows and not completion.is_finished:
            # The logits of a row are for the token after it.
            first = part.start + part.num_new_tokens - part.num_logit_rows + 1
            token_ids = completion.token_ids[first : first + num_rows]
            report = report_logprobs(
                logits[first_row : first_row + num_rows],
                mx.array(token_ids, dtype=mx.int32),
                completion.request.params.prompt_logprobs or 0,
            )
            mx.async_eval(report)
            scored.append(ScoredPrompt(completion, token_ids, report))
        first_row += part.num_logit_rows
    return scored
