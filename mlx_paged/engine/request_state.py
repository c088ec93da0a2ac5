"""``RequestState``: the output of a request, which grows with its completions' tokens."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from mlx_paged.engine.latencies import Latencies, RequestTimes
from mlx_paged.engine.sampler import SampledToken
from mlx_paged.engine.text_stream import TextStream
from mlx_paged.engine.token_texts import TokenTexts
from mlx_paged.request import CompletionOutput, Logprob, Request, RequestOutput

NOTHING_REPORTED = (0, False)


class RequestState:
    """A user's request: the sequences that work on it, the text of each, and the output they make
    together.

    Attributes:
        requests: one at first; one per completion when the prompt is computed.
        output: grows with every token.
        output_kind: what its reader gets of it.
        is_aborted: its end was asked for.
    """

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        texts: TokenTexts | None,
        special_token_ids: Collection[int] = (),
    ):
        num_completions = request.params.n
        self.requests = [request]
        self.output_kind = request.params.output_kind
        self.is_aborted = False
        self._texts = texts if request.params.detokenize else None
        self._skipped = special_token_ids if request.params.skip_special_tokens else ()
        self._streams = (
            []
            if self._texts is None
            else [self._new_stream(self._texts) for _ in range(num_completions)]
        )
        # How many tokens of each completion the user has seen, and whether it was finished.
        self._reported = [NOTHING_REPORTED] * num_completions
        self._times = RequestTimes(num_completions)
        self.output = RequestOutput(
            request.request_id,
            prompt,
            list(request.token_ids),
            [CompletionOutput(index) for index in range(num_completions)],
            prompt_logprobs=_first_prompt_logprobs(request),
        )

    def add_token(self, request: Request, sampled: SampledToken) -> str | None:
        """Take the newest token of a completion; returns the stop text that it completed."""
        output, completion = self.output, self.output.outputs[request.index]
        if output.time_to_first_token is None:
            output.time_to_first_token = time.perf_counter() - request.arrival_time
            output.num_cached_tokens = request.num_cached_tokens
            output.num_read_tokens = request.num_read_tokens
            output.prefix_report = request.prefix_report
        completion.token_ids.append(sampled.token_id)
        completion.num_drafted_tokens = request.num_drafted_tokens
        completion.num_accepted_tokens = request.num_accepted_tokens
        if sampled.logprobs is not None:
            self._add_logprobs(completion, sampled.token_id, sampled.logprobs)
        if not self._streams:
            return None
        is_stop = request.is_finished and request.finish_reason == "stop"
        # The token that ended it has no text, unless the user wants to see it.
        if is_stop and not request.params.include_stop_str_in_output:
            return None
        stream = self._streams[request.index]
        stop_text = stream.add(sampled.token_id)
        completion.text = stream.text
        return stop_text

    def add_prompt_logprobs(
        self, request: Request, entries: Sequence[Mapping[int, Logprob]]
    ) -> None:
        """Take the log-probabilities of the next tokens of the prompt."""
        known = self.output.prompt_logprobs or ()
        # A new list, since outputs that were handed out must not grow.
        self.output.prompt_logprobs = [*known, *map(self._with_texts, entries)]
        request.num_unscored_tokens -= len(entries)

    def finish(self, request: Request) -> None:
        """Note the end of a completion, or of the request before it was forked."""
        output = self.output
        completions = [output.outputs[request.index]] if len(self.requests) > 1 else output.outputs
        for completion in completions:
            stop_text = None
            if self._streams:
                stop_text = self._streams[completion.index].finish(_num_left_out(request))
                completion.text = self._streams[completion.index].text
            if stop_text is None:
                completion.finish_reason, completion.stop_reason = (
                    request.finish_reason,
                    request.stop_reason,
                )
            else:
                completion.finish_reason, completion.stop_reason = "stop", stop_text
        output.error = output.error or request.error
        output.finished = all(completion.finished for completion in output.outputs)

    def note_reported(self, latencies: Latencies, now: float) -> None:
        """Note that the user gets the output as it is now, which must stay true from here on."""
        completions, request, times = self.output.outputs, self.requests[0], self._times
        reported = []
        for completion in completions:
            reported.append((len(completion.token_ids), completion.finish_reason is not None))
        self._reported = reported
        for completion in completions:
            latencies.observe(request, completion, times, now)

    def restore(self) -> list[Request]:
        """Forget what was not reported yet, after an interrupt cut a change of it in the middle.

        Tokens that are forgotten come again and are the same. Returns the requests that have to go
        on: they hold nothing, and wait.
        """
        if self._reported[0] == NOTHING_REPORTED:
            # The first tokens of all completions come in one step. Forks wait for it, too.
            del self.requests[1:]
            self.output.prompt_logprobs = _first_prompt_logprobs(self.requests[0])
        unfinished = []
        for index, (num_tokens, is_finished) in enumerate(self._reported):
            if is_finished:
                continue
            self._restore_completion(index, num_tokens)
            if index < len(self.requests):
                self.requests[index].restart(num_tokens)
                unfinished.append(self.requests[index])
        self.output.finished = not unfinished
        if unfinished:
            self.output.error = next(
                (request.error for request in self.requests if request.error), None
            )
        return unfinished

    def _restore_completion(self, index: int, num_tokens: int) -> None:
        cut = self.output.outputs[index]
        whole = CompletionOutput(
            index,
            token_ids=cut.token_ids[:num_tokens],
            num_drafted_tokens=cut.num_drafted_tokens,
            num_accepted_tokens=cut.num_accepted_tokens,
        )
        if num_tokens and cut.logprobs is not None:
            whole.logprobs = cut.logprobs[:num_tokens]
            entries = zip(whole.logprobs, whole.token_ids, strict=True)
            whole.cumulative_logprob = sum(logprobs[token].logprob for logprobs, token in entries)
        if self._texts is not None:
            stream = self._streams[index] = self._new_stream(self._texts)
            for token_id in whole.token_ids:
                stream.add(token_id)
            whole.text = stream.text
        self.output.outputs[index] = whole

    def _new_stream(self, texts: TokenTexts) -> TextStream:
        params = self.requests[0].params
        includes_stop = params.include_stop_str_in_output
        return TextStream(
            texts,
            params.stop,
            prompt_token_ids=self.requests[0].token_ids[: self.requests[0].num_prompt_tokens],
            stop_sequences=() if includes_stop else params.stop_sequences,
            min_tokens=params.min_tokens,
            includes_stop=includes_stop,
            skipped_token_ids=self._skipped,
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
        return None if self._texts is None else self._texts.decode([token_id])


def _first_prompt_logprobs(request: Request) -> list[dict[int, Logprob] | None] | None:
    return None if request.params.prompt_logprobs is None else [None]


def _num_left_out(request: Request) -> int:
    """How many tokens of an answer's text belong to the stop sequence that ended it: all of its
    tokens but the last, which never came into the text.
    """
    reason = request.stop_reason
    if not isinstance(reason, tuple) or request.params.include_stop_str_in_output:
        return 0
    return len(reason) - 1
