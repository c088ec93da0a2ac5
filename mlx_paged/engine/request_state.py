"""`RequestState`: what the user gets of a request, as its completions' tokens come."""

from __future__ import annotations

import time

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.engine.sampler import SampledToken
from mlx_paged.engine.text_stream import TextStream
from mlx_paged.request import CompletionOutput, Logprob, Request, RequestOutput


class RequestState:
    """A user's request: the sequences that work on it, the text of each, and the output they make together.

    Attributes:
        requests: one at first; one per completion when the prompt is computed.
        output: grows with every token.
    """

    def __init__(self, request: Request, prompt: str | None, tokenizer: TokenizerWrapper | None):
        num_completions = request.params.n
        self.requests = [request]
        self._tokenizer = tokenizer
        self._streams = [TextStream(tokenizer, request.params.stop) for _ in range(num_completions) if tokenizer]
        self.output = RequestOutput(
            request.request_id,
            prompt,
            list(request.token_ids),
            [CompletionOutput(index) for index in range(num_completions)],
        )

    def add_token(self, request: Request, sampled: SampledToken) -> str | None:
        """Take the newest token of a completion; returns the stop text that it completed, if any."""
        output, completion = self.output, self.output.outputs[request.index]
        if output.time_to_first_token is None:
            output.time_to_first_token = time.perf_counter() - request.arrival_time
            output.num_cached_tokens = request.num_cached_tokens
        completion.token_ids.append(sampled.token_id)
        if sampled.logprobs is not None:
            self._add_logprobs(completion, sampled)
        # The token that ended it has no text.
        if not self._streams or (request.is_finished and request.finish_reason == "stop"):
            return None
        stream = self._streams[request.index]
        stop_text = stream.add(sampled.token_id)
        completion.text = stream.text
        return stop_text

    def finish(self, request: Request) -> None:
        """A completion came to its end, or the whole request before it had more than one."""
        output = self.output
        completions = [output.outputs[request.index]] if len(self.requests) > 1 else output.outputs
        for completion in completions:
            stop_text = None
            if self._streams:
                stop_text = self._streams[completion.index].finish()
                completion.text = self._streams[completion.index].text
            if stop_text is None:
                completion.finish_reason, completion.stop_reason = request.finish_reason, request.stop_reason
            else:
                completion.finish_reason, completion.stop_reason = "stop", stop_text
        output.error = output.error or request.error
        output.finished = all(completion.finished for completion in output.outputs)

    def _add_logprobs(self, completion: CompletionOutput, sampled: SampledToken) -> None:
        decode = self._tokenizer.decode if self._tokenizer else lambda token_ids: None
        logprobs = {
            token_id: Logprob(entry.logprob, entry.rank, decode([token_id]))
            for token_id, entry in sampled.logprobs.items()
        }
        if completion.logprobs is None:
            completion.logprobs, completion.cumulative_logprob = [], 0.0
        completion.logprobs.append(logprobs)
        completion.cumulative_logprob += logprobs[sampled.token_id].logprob
