"""Log-probabilities of the tokens of prompts, from the rows of logits that a step has for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_paged.engine.batch import Scheduled
from mlx_paged.engine.sampler import LogprobReport, read_report, report_logprobs
from mlx_paged.request import Logprob, Request


class ScoredPrompt(NamedTuple):
    """The next tokens of a prompt and their log-probabilities, launched and not waited for."""

    request: Request
    token_ids: Sequence[int]  # [num_scored_rows]
    report: LogprobReport

    def read(self) -> list[dict[int, Logprob]]:
        """For each token, its own log-probability and those of the most likely tokens there."""
        count = self.request.params.prompt_logprobs or 0
        return read_report(self.report, self.token_ids, [count] * len(self.token_ids))


def score_prompts(
    logits: mx.array,  # [num_rows, vocab_size], of a step
    scheduled: Iterable[Scheduled],
) -> list[ScoredPrompt]:
    """Launch the log-probabilities that a step has to give for prompts."""
    scored: list[ScoredPrompt] = []
    first_row = 0
    for part in scheduled:
        request, num_rows = part.request, part.num_scored_rows
        if num_rows and not request.is_finished:
            # The logits of a row are those of the token after it.
            first = part.start + part.num_new_tokens - part.num_logit_rows + 1
            token_ids = request.token_ids[first : first + num_rows]
            report = report_logprobs(
                logits[first_row : first_row + num_rows],
                mx.array(token_ids, dtype=mx.int32),
                request.params.prompt_logprobs or 0,
            )
            mx.async_eval(report)
            scored.append(ScoredPrompt(request, token_ids, report))
        first_row += part.num_logit_rows
    return scored
