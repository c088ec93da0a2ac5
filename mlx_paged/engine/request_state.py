"""``RequestState``: the output of a request, which grows with each token."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from mlx_paged.engine.deltas import NOTHING_REPORTED
from mlx_paged.engine.sampler import SampledToken
from mlx_paged.engine.text_stream import TextStream
from mlx_paged.engine.token_texts import TokenTexts
from mlx_paged.request import CompletionOutput, Logprob, Request, RequestOutput


class Completion:
    """One completion of a request, and how much of it was reported.

    Attributes:
        output: grows with every token.
        stream: makes its text; ``None`` if no text is wanted.
        num_reported_tokens: the number of tokens that were reported.
        last_token_time: when the last of these was reported; seconds of ``time.perf_counter``.
        is_end_reported: whether its end was reported.
        handed_over: how much its reader has received, for ``RequestOutputKind.DELTA``.
    """

    __slots__ = (
        "handed_over",
        "is_end_reported",
        "last_token_time",
        "num_reported_tokens",
        "output",
        "stream",
    )

    def __init__(self, index: int, stream: TextStream | None):
        self.output = CompletionOutput(index)
        self.stream = stream
        self.num_reported_tokens = 0
        self.last_token_time = 0.0
        self.is_end_reported = False
        self.handed_over = NOTHING_REPORTED


class RequestState:
    """A user's request: its sequences and their common output.

    Attributes:
        requests: one at first; one per completion after the prompt is computed.
        completions: all of them, from the start.
        output: with the outputs of all completions.
        output_kind: which part of it the reader gets.
        first_token_time: when its first token was reported; ``None`` before that.
    """

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        texts: TokenTexts | None,
        special_token_ids: Collection[int] = (),
    ):
        self.requests = [request]
        self.output_kind = request.params.output_kind
        self._texts = texts if request.params.detokenize else None
        self._skipped = special_token_ids if request.params.skip_special_tokens else ()
        self.output = RequestOutput(request.request_id, prompt, list(request.token_ids), [])
        self.first_token_time: float | None = None
        self.completions = [
            Completion(index, self._new_stream()) for index in range(request.params.n)
        ]
        self.output.outputs = [completion.output for completion in self.completions]
        self.output.prompt_logprobs = None if request.params.prompt_logprobs is None else [None]

    def add_token(self, request: Request, sampled: SampledToken) -> str | None:
        """Add a token to a completion; returns the stop text that it completed, if any."""
        completion = self.completions[request.index]
        output, stream = completion.output, completion.stream
        if self.output.time_to_first_token is None:
            self._note_first_token(request)
        output.token_ids.append(sampled.token_id)
        output.num_drafted_tokens = request.num_drafted_tokens
        output.num_accepted_tokens = request.num_accepted_tokens
        if sampled.logprobs is not None:
            self._add_logprobs(output, sampled.token_id, sampled.logprobs)
        if stream is None:
            return None
        # The stop token is left out of the text, unless the user wants it.
        if request.finish_reason == "stop" and not request.params.include_stop_str_in_output:
            return None
        stop_text = stream.add(sampled.token_id)
        output.text = stream.text
        return stop_text

    def _note_first_token(self, request: Request) -> None:
        output = self.output
        output.time_to_first_token = time.perf_counter() - request.arrival_time
        output.num_cached_tokens = request.num_cached_tokens
        output.num_read_tokens = request.num_read_tokens
        output.prefix_report = request.prefix_report

    def add_prompt_logprobs(
        self, request: Request, entries: Sequence[Mapping[int, Logprob]]
    ) -> None:
        """Add the log-probabilities of the next tokens of the prompt."""
        known = self.output.prompt_logprobs or ()
        # A new list, because outputs that were reported must not change.
        self.output.prompt_logprobs = [*known, *map(self._with_texts, entries)]
        request.num_unscored_tokens -= len(entries)

    def finish(self, request: Request) -> None:
        """End a completion, or all of them if the request was not forked yet."""
        is_forked = len(self.requests) > 1
        for completion in [self.completions[request.index]] if is_forked else self.completions:
            output, stream, stop_text = completion.output, completion.stream, None
            if stream is not None:
                stop_text = stream.finish(_num_left_out(request))
                output.text = stream.text
            if stop_text is None:
                output.finish_reason, output.stop_reason = (
                    request.finish_reason,
                    request.stop_reason,
                )
            else:
                output.finish_reason, output.stop_reason = "stop", stop_text
        self.output.error = self.output.error or request.error
        self.output.finished = all(output.finished for output in self.output.outputs)

    def _new_stream(self) -> TextStream | None:
        if self._texts is None:
            return None
        params = self.requests[0].params
        includes_stop = params.include_stop_str_in_output
        return TextStream(
            self._texts,
            params.stop,
            prompt_token_ids=self.requests[0].token_ids[: self.requests[0].num_prompt_tokens],
            stop_sequences=() if includes_stop else params.stop_sequences,
            min_tokens=params.min_tokens,
            includes_stop=includes_stop,
            skipped_token_ids=self._skipped,
            answer_format=self.requests[0].token_rules.answer_format,
        )

    def _add_logprobs(
        self, completion: CompletionOutput, token_id: int, entries: Mapping[int, Logprob]
    ) -> None:
        if completion.logprobs is None:
            completion.logprobs = []
        completion.logprobs.append(self._with_texts(entries))
        completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + entries[
            token_id
        ].logprob

    def _with_texts(self, entries: Mapping[int, Logprob]) -> dict[int, Logprob]:
        return {
            token: Logprob(entry.logprob, entry.rank, self._text_of(token))
            for token, entry in entries.items()
        }

    def _text_of(self, token_id: int) -> str | None:
        return None if self._texts is None else self._texts.text_of(token_id)


def _num_left_out(request: Request) -> int:
    """How many tokens of an answer's text belong to the stop sequence that ended it: all but the
    last one, which was not added to the text.
    """
    reason = request.stop_reason
    if not isinstance(reason, tuple) or request.params.include_stop_str_in_output:
        return 0
    return len(reason) - 1
