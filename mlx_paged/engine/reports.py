"""``Reports``: the outputs of requests, and which of them have to be reported; ``Latencies``:
histograms of the durations and token counts of what was reported. Pure Python.

The metrics and the bounds of their buckets are those of vLLM's v1.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from mlx_paged.engine.request import Completion, Request
from mlx_paged.options.sampling_params import RequestOutputKind
from mlx_paged.request import RequestOutput

FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
NUM_BOUNDS = (1, 2, 5, 10, 20)
STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
UNLIMITED_MODEL_LEN = 1_000_000  # the last bucket if requests have no limit
FINISH_REASONS = ("stop", "length", "abort", "error")
ANSWERED = ("stop", "length")


class Histogram:
    """The number of observations per bucket, and their sum. Only one thread may observe; any thread
    may read.

    Args:
        bounds: the upper bound of each bucket, ascending; one more bucket has all larger values.
        name: of the metric.
        help: what is observed, in a sentence.

    Attributes:
        counts: observations by bucket, one more than there are bounds.
        sum: of all observations.
    """

    __slots__ = ("bounds", "counts", "help", "name", "sum")

    def __init__(self, bounds: Sequence[float], name: str = "", help: str = ""):
        self.bounds = tuple(bounds)
        self.name, self.help = name, help
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """The number of observations."""
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, once or ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Latencies:
    """Histograms and counters over all requests of an engine; seconds of ``time.perf_counter``.

    A request is observed when its tokens are reported, with one reading of the clock per step.
    Tokens that a failed step takes back were not reported, so they are not observed. Metrics of
    prompts count once per request, metrics of answers once per completion.

    Args:
        max_model_len: the most tokens of a request, if there is a limit; the last bucket of
            numbers of tokens.

    Attributes:
        histograms: all of them; each is also an attribute, with a description. Times and lengths of
            completions count those with finish reason ``stop`` or ``length``. Preemptions count as
            prefill and decode. Several tokens of one step, by drafts, share its time.
        num_steps: that were read.
        num_generation_tokens: of all completions, including running ones.
        num_cached_prompt_tokens: of all requests that got a first token.
        num_read_prompt_tokens: of these, read from disk.
        num_finished: completions by finish reason.
        busy_seconds: spent in steps.
    """

    def __init__(self, max_model_len: int | None):
        token_bounds = tuple(one_two_five(max_model_len or UNLIMITED_MODEL_LEN))
        self.histograms: list[Histogram] = []
        add = self._add
        self.time_to_first_token = add(
            "vllm:time_to_first_token_seconds",
            "From a request's arrival to its first token, or to its embedding or score.",
            FIRST_TOKEN_BOUNDS,
        )
        self.inter_token_latency = add(
            "vllm:inter_token_latency_seconds",
            "From a token to the next one of the same completion.",
            INTER_TOKEN_BOUNDS,
        )
        self.time_per_output_token = add(
            "vllm:request_time_per_output_token_seconds",
            "Mean time of a completion's tokens after its first.",
            INTER_TOKEN_BOUNDS,
        )
        self.e2e_latency = add(
            "vllm:e2e_request_latency_seconds",
            "From a request's arrival to the end of a completion.",
            REQUEST_BOUNDS,
        )
        self.queue_time = add(
            "vllm:request_queue_time_seconds",
            "From a request's arrival to its first step.",
            REQUEST_BOUNDS,
        )
        self.inference_time = add(
            "vllm:request_inference_time_seconds",
            "From a request's first step to a completion's last token.",
            REQUEST_BOUNDS,
        )
        self.prefill_time = add(
            "vllm:request_prefill_time_seconds",
            "From a request's first step to its first token.",
            REQUEST_BOUNDS,
        )
        self.decode_time = add(
            "vllm:request_decode_time_seconds",
            "From a completion's first token to its last.",
            REQUEST_BOUNDS,
        )
        self.prompt_tokens = add(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", token_bounds
        )
        self.prefill_computed_tokens = add(
            "vllm:request_prefill_kv_computed_tokens",
            "Of these, those whose K/V were not cached.",
            token_bounds,
        )
        self.generation_tokens = add(
            "vllm:request_generation_tokens", "Generated tokens of a completion.", token_bounds
        )
        self.max_generation_tokens = add(
            "vllm:request_max_num_generation_tokens",
            "Generated tokens of a request's longest completion.",
            token_bounds,
        )
        self.params_n = add(
            "vllm:request_params_n", "Completions that a request asks for.", NUM_BOUNDS
        )
        self.params_max_tokens = add(
            "vllm:request_params_max_tokens",
            "Tokens that a completion may have, where its request says so.",
            token_bounds,
        )
        self.iteration_tokens = add(
            "vllm:iteration_tokens_total",
            "Tokens of a step: those that it computed, and each completion's first.",
            STEP_BOUNDS,
        )
        self.num_steps = 0
        self._step_tokens: list[int] = []  # of the steps since the last report
        self._num_first_tokens = 0  # since then
        self.num_generation_tokens = 0
        self.num_cached_prompt_tokens = 0
        self.num_read_prompt_tokens = 0
        self.num_finished: dict[str, int] = dict.fromkeys(FINISH_REASONS, 0)
        self.busy_seconds = 0.0

    def _add(self, name: str, help: str, bounds: Sequence[float]) -> Histogram:
        histogram = Histogram(bounds, name, help)
        self.histograms.append(histogram)
        return histogram

    def note_step(self, num_tokens: int) -> None:
        """Count a step that computed ``num_tokens`` tokens."""
        self.num_steps += 1
        self._step_tokens.append(num_tokens)

    def observe(self, requests: Iterable[Request], now: float) -> None:
        """Observe what is new in the outputs of these requests, and mark it as reported."""
        num_new_tokens = num_first_tokens = 0
        num_by_latency: dict[float, int] = {}  # tokens of a step share a few
        begun: list[Request] = []
        ended: dict[Request, list[Completion]] = {}
        for request in requests:
            for completion in request.completions:
                output, num_before = completion.output, completion.num_reported_tokens
                num_tokens, time_before = len(output.token_ids), completion.last_token_time
                if output.finish_reason is not None and not completion.is_end_reported:
                    # Before the ``continue`` below.
                    completion.is_end_reported = True
                    ended.setdefault(request, []).append(completion)
                if num_tokens > num_before:
                    completion.num_reported_tokens = num_tokens
                    completion.last_token_time = now
                    num_new = num_tokens - num_before
                    num_new_tokens += num_new
                    if num_before:
                        latency = (now - time_before) / num_new
                        num_by_latency[latency] = num_by_latency.get(latency, 0) + num_new
                        continue
                    num_first_tokens += 1
                    if request.first_token_time is None:
                        request.first_token_time = now
                        begun.append(request)
        self.num_generation_tokens += num_new_tokens
        self._num_first_tokens += num_first_tokens
        for latency, times in num_by_latency.items():
            self.inter_token_latency.observe(latency, times)
        for request in begun:
            self._observe_prompt(request, now)
        for request, completions in ended.items():
            self._observe_ends(request, completions, now)

    def observe_steps(self) -> None:
        """Observe the steps since the last report, after all of their tokens are reported."""
        if self._step_tokens:
            self._step_tokens[-1] += self._num_first_tokens
            self._num_first_tokens = 0
            for num_tokens in self._step_tokens:
                self.iteration_tokens.observe(num_tokens)
            self._step_tokens.clear()

    def _observe_prompt(self, request: Request, now: float) -> None:
        begin = request.first_scheduled_time
        self.time_to_first_token.observe(now - request.arrival_time)
        self.queue_time.observe(begin - request.arrival_time)
        self.prefill_time.observe(now - begin)
        self.prompt_tokens.observe(len(request.prompt_token_ids))
        self.prefill_computed_tokens.observe(
            len(request.prompt_token_ids) - request.num_cached_tokens
        )
        self.params_n.observe(request.params.n)
        if request.params.max_tokens is not None:
            self.params_max_tokens.observe(request.params.max_tokens)
        self.num_cached_prompt_tokens += request.num_cached_tokens
        self.num_read_prompt_tokens += request.num_read_tokens

    def _observe_ends(
        self, request: Request, completions: Iterable[Completion], now: float
    ) -> None:
        if request.output.pooled is not None:  # In the place of tokens.
            request.first_token_time = request.completions[0].last_token_time = now
            self._observe_prompt(request, now)
        for completion in completions:
            reason = completion.output.finish_reason or ""
            self.num_finished[reason] = self.num_finished.get(reason, 0) + 1
            if reason in ANSWERED and request.first_token_time is not None:
                self.e2e_latency.observe(now - request.arrival_time)
                last, num_tokens = completion.last_token_time, completion.num_reported_tokens
                self.inference_time.observe(last - request.first_scheduled_time)
                if request.pooling is not None:
                    continue
                decode_time = last - request.first_token_time
                self.decode_time.observe(decode_time)
                self.generation_tokens.observe(num_tokens)
                if num_tokens > 1:
                    self.time_per_output_token.observe(decode_time / (num_tokens - 1))
        all_ended = all(completion.is_end_reported for completion in request.completions)
        if all_ended and request.first_token_time is not None and request.pooling is None:
            most = max(completion.num_reported_tokens for completion in request.completions)
            self.max_generation_tokens.observe(most)


def one_two_five(most: int) -> Iterator[int]:
    """1, 2, 5, 10, 20, 50 and so on, up to ``most``."""
    scale = 1
    while scale <= most:
        yield from (digit * scale for digit in (1, 2, 5) if digit * scale <= most)
        scale *= 10


class Reports:
    """The requests whose end is not reported yet, and which of them have changed.

    Attributes:
        requests: by id. Any thread may add an entry, in a single operation that needs no
            lock; only the engine's thread removes them.
    """

    def __init__(self, latencies: Latencies):
        self.requests: dict[str, Request] = {}
        self._latencies = latencies
        self._news: dict[str, None] = {}  # ids of requests, in order
        self._num_taken_on = 0

    def new_requests(self) -> Sequence[Request]:
        """The requests that were added since the last call, in order."""
        num_new = len(self.requests) - self._num_taken_on
        if not num_new:
            return ()
        # Another thread may have added more since then; dicts keep their order.
        new = list(self.requests.values())[self._num_taken_on :]
        self._num_taken_on += len(new)
        return new

    def note(self, completion: Completion) -> None:
        """Mark a completion as changed."""
        if completion.is_finished:
            completion.end_output()
        self._news[completion.request.request_id] = None

    def drop(self, request: Request) -> None:
        """Forget a finished request without reporting it."""
        name = request.request_id
        if self.requests.get(name) is request:
            self._latencies.observe([request], time.perf_counter())
            self._news.pop(name, None)
            self._forget(name)

    def report(self) -> list[RequestOutput]:
        """The changed outputs, by the ``output_kind`` of each request. Forgets finished ones."""
        requests = [self.requests[name] for name in self._news]
        self._news.clear()
        outputs: list[RequestOutput] = []
        for request in requests:
            output, kind = request.output, request.params.output_kind
            if kind is RequestOutputKind.DELTA:
                outputs.append(request.new_part())
            elif output.finished or kind is RequestOutputKind.CUMULATIVE:
                outputs.append(output)
            if output.finished:
                self._forget(request.request_id)
        self._latencies.observe(requests, time.perf_counter())
        self._latencies.observe_steps()
        return outputs

    def _forget(self, name: str) -> None:
        del self.requests[name]
        self._num_taken_on -= 1
