"""A soak: requests of every kind come, go and fail at random, and after each step everything has to
add up.

What a request asks for depends on its number and the seed alone, so that any of them can be run
again, alone and undisturbed. `benchmarks/serving/soak.py` is the long one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from mlx_paged.cache import KVCacheConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.scheduling.batch import Batch
from mlx_paged.engine.speculation.speculation import PromptLookup, Speculation
from mlx_paged.options.sampling_params import SamplingParams
from mlx_paged.request import RequestOutput
from paged_testing.integrity import check_scheduler

# More blocks than a cache begins with, and fewer than those who run would like.
DEFAULT_OPTIONS: dict[str, Any] = {
    "block_size": 8,
    "kv_cache_bytes": "100blocks",
    "max_num_seqs": 12,
    "max_num_batched_tokens": 64,
}
NUM_PREFIXES = 6
MAX_PREFIX_LEN, MAX_TAIL_LEN, MAX_NEW_TOKENS = 150, 60, 50

# MLX serves an array from a buffer that it kept, which may be up to two pages larger.
BUFFER_SLACK = 2 * 16384


@dataclass(frozen=True)
class SoakRequest:
    """One request, and what becomes of it.

    Args:
        abort_after: steps after which it is aborted; ``None`` never.
        breaks_at: steps that compute this number of its tokens, or more, fail; ``None`` fails none.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    abort_after: int | None = None
    breaks_at: int | None = None
    priority: int = 0
    cache_salt: str | None = None


class Failure(RuntimeError):
    """What a request of the soak fails with."""


def raises_at(
    num_tokens: int, error: type[Exception] = LookupError
) -> Callable[[mx.array, mx.array], mx.array]:
    """A logits processor that fails when its request has ``num_tokens`` tokens."""

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size == num_tokens:
            raise error(f"at {num_tokens} tokens")
        return logits

    return processor


def make_request(seed: int, number: int, vocab_size: int) -> SoakRequest:
    rng = random.Random(f"{seed} {number}")
    prefix_rng = random.Random(f"{seed} prefix {rng.randrange(NUM_PREFIXES)}")
    prefix = prefix_rng.choices(range(vocab_size), k=MAX_PREFIX_LEN)[
        : rng.choice([0, 1, 16, 48, 100, MAX_PREFIX_LEN])
    ]
    prompt = prefix + rng.choices(range(vocab_size), k=rng.randint(1, MAX_TAIL_LEN))
    fate = rng.random()
    options: dict[str, Any] = {"max_tokens": rng.randint(1, MAX_NEW_TOKENS)}
    if rng.random() < 0.5:
        options |= {"temperature": rng.choice([0.7, 1.0, 1.5]), "seed": rng.randrange(2**40)}
        options |= rng.choice(
            [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"repetition_penalty": 1.2}]
        )
    if rng.random() < 0.2:
        options["n"] = rng.randint(2, 4)
    if rng.random() < 0.2:
        options["stop_token_ids"] = rng.sample(range(vocab_size), 3)
    if rng.random() < 0.1:
        options["logprobs"] = 2
    if fate < 0.05:
        num_tokens = len(prompt) + rng.randrange(options["max_tokens"])
        options["logits_processors"] = [raises_at(num_tokens, Failure)]
    return SoakRequest(
        str(number),
        prompt,
        SamplingParams(**options),
        abort_after=rng.randrange(40) if 0.05 <= fate < 0.2 else None,
        breaks_at=rng.randint(1, len(prompt) + options["max_tokens"])
        if 0.2 <= fate < 0.23
        else None,
        priority=rng.choice([0, 0, 0, 0, -1, 1]),
        cache_salt=rng.choice([None] * 9 + ["salt"]),
    )


def slack_at_rest(config: KVCacheConfig) -> int:
    """What may be allocated besides weights and K/V between two steps: larger buffers, for the
    slabs and one other.
    """
    formats = [spec.format for spec in config.layers]
    num_slabs = sum(form.key.num_parts + form.value.num_parts for form in formats)
    return BUFFER_SLACK * (num_slabs + 1)


def slack_nbytes(model: Any, config: KVCacheConfig, contexts: list[int], num_tokens: int) -> int:
    """What a step may allocate besides weights and budget, at any time: growth, and its own work.

    Args:
        contexts: tokens of each sequence, of which ``num_tokens`` are new, over all.

    Growth copies slab by slab: the slab that is copied and the zeros behind it are at most K and V
        of one layer.
    A step holds activations of one layer: per token the residual stream, queries, keys, values and
    the outputs of attention (each once more, rotated or transposed), and three rows of the MLP;
    plain MLX gathers each context's K and V, and the transposed copy of them, and keeps scores and
    probabilities. Per sequence it has a few rows of logits (penalised, sorted, their indices,
    sums). All in float32, and twice over: MLX starts a layer before it has freed what the one
    before it used.
    """
    args = model.args
    attention = (args.num_attention_heads + args.num_key_value_heads) * args.head_dim
    rows = num_tokens * (4 * args.hidden_size + 4 * attention + 3 * args.intermediate_size)
    gathered = sum(contexts) * 4 * args.num_key_value_heads * args.head_dim
    scores = 2 * num_tokens * args.num_attention_heads * max(contexts, default=0)
    logits = 8 * len(contexts) * args.vocab_size
    activations: int = rows + gathered + scores + logits
    return config.nbytes // len(config.layers) + 2 * 4 * activations


@dataclass
class Soak:
    """Feeds an engine with requests and looks after every step.

    Args:
        num_drafts: that each request tries in each step, whether they pay or not: of the draft
            model in ``engine_options``, else looked up.

    Attributes:
        outputs: the last output of each request that is done.
        counts: of steps, failures, interruptions, finish reasons and so on.
        max_over: the most that was allocated above weights and K/V slabs between two steps.
        max_slack_used: the most that was allocated above weights and budget at any time, as a share
            of the slack.
    """

    model: Any
    seed: int
    max_in_flight: int = 24
    keep_outputs: bool = True
    num_drafts: int = 0
    engine_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Kernels and constants of every way to sample are made at their first use.
        for number in range(20):
            request = make_request(self.seed, number, self.model.args.vocab_size)
            self._run_alone(replace(request, params=replace(request.params, max_tokens=3)))
        mx.synchronize()
        mx.clear_cache()
        # The weights, and whatever else was there before.
        self.base_nbytes = mx.get_active_memory()
        self.engine = Engine(self.model, None, **(DEFAULT_OPTIONS | self.engine_options))
        if self.num_drafts:
            drafter = self.engine.runner.draft_model or PromptLookup()
            self.engine.scheduler.speculation = Speculation(drafter, self.num_drafts)
        self.rng = random.Random(self.seed)
        self.outputs: dict[str, RequestOutput] = {}
        self.counts: Counter[str] = Counter()
        self.in_flight: dict[str, tuple[SoakRequest, int]] = {}  # with the step in which each came
        self.max_over, self.max_slack_used = 0, 0.0
        self._slack = slack_nbytes(self.model, self.engine.cache.config, [], 0)
        self.slack_at_rest = slack_at_rest(self.engine.cache.config)
        self._model_error: BaseException | None = None
        runner: Any = self.engine.runner
        self._launch = runner.launch
        runner.launch = self._launch_or_fail
        runner.model = self._model_or_nonsense

    def _run_alone(self, request: SoakRequest) -> RequestOutput:
        # What a request sees depends on these.
        names = ("block_size", "kv_format", "window", "num_sink_tokens")
        options = DEFAULT_OPTIONS | self.engine_options
        return run_alone(self.model, request, {n: options[n] for n in names if n in options})

    def run(self, first: int, num_requests: int) -> None:
        """Until these requests are done; raises AssertionError at the first thing
        that is wrong.
        """
        numbers = iter(range(first, first + num_requests))
        while True:
            self._add_some(numbers)
            is_idle = not self.in_flight and not self.engine.has_unfinished_requests()
            if is_idle and self._add_one(numbers) is None:
                self.counts["shrunk bytes"] += self.engine.shrink()
                return
            self.step()

    def step(self) -> None:
        for request, step in list(self.in_flight.values()):
            if (
                request.abort_after is not None
                and self.counts["steps"] == step + request.abort_after
            ):
                self.engine.abort(request.request_id)
        mx.reset_peak_memory()
        self.counts["steps"] += 1
        try:
            reported = self.engine.step()
        except KeyboardInterrupt:
            self.counts["interruptions"] += 1
            reported = []
        for output in reported:
            if output.finished:
                self._note_end(output)
        if self.rng.random() < 0.005:
            self.counts["shrunk bytes"] += self.engine.shrink()
        self.check()

    def check(self) -> None:
        check_scheduler(self.engine.scheduler)
        # A step in flight has memory of its own; streams belong to threads.
        self.engine.thread.call(mx.synchronize)
        stats, budget = self.engine.stats(), self.engine.cache.config.nbytes
        assert stats.nbytes_held <= budget
        over = mx.get_active_memory() - self.base_nbytes - stats.nbytes_held
        assert over <= self.slack_at_rest, f"{over} bytes above weights and K/V between two steps"
        peak_over = mx.get_peak_memory() - self.base_nbytes - budget
        slack = self._slack + self.slack_at_rest
        assert peak_over <= slack, (
            f"{peak_over} bytes above weights and budget in a step, {slack} allowed"
        )
        self.max_over = max(self.max_over, over)
        self.max_slack_used = max(self.max_slack_used, peak_over / slack)
        swap_space = self.engine.swap_space
        assert swap_space.num_used_blocks <= swap_space.num_blocks

    def check_end(self) -> None:
        """Nothing is held, the pool is whole, and memory is where it was."""
        engine = self.engine
        check_scheduler(engine.scheduler)
        stats = engine.stats()
        left = (stats.num_requests, stats.num_used_blocks, stats.num_running, stats.num_waiting)
        assert left == (0, 0, 0, 0) and stats.num_swapped_tokens == 0, left
        assert (
            not engine.scheduler.completions
            and not engine.reports.requests
            and not engine.reports._news
            and not engine.steps.in_flight
        )
        assert not engine.swap_space._held and not engine.steps._to_retry_alone
        assert engine.manager.num_free_blocks == stats.num_usable_blocks
        engine.shrink()
        engine.thread.call(mx.synchronize)
        mx.clear_cache()
        held = engine.stats().nbytes_held
        over = mx.get_active_memory() - self.base_nbytes - held
        assert over <= self.slack_at_rest, f"{over} bytes above weights and the {held} bytes of K/V"

    def check_tokens(self, request: SoakRequest) -> None:
        """Compare a request's tokens with those of an engine on which it is alone."""
        output = self.outputs[request.request_id]
        expected = self._run_alone(request)
        for completion, right in zip(output.outputs, expected.outputs, strict=True):
            got = completion.token_ids
            is_cut = completion.finish_reason in ("abort", "error")
            assert got == (right.token_ids[: len(got)] if is_cut else right.token_ids), request
            if not is_cut:
                assert (completion.finish_reason, completion.stop_reason) == (
                    right.finish_reason,
                    right.stop_reason,
                )

    def _add_some(self, numbers: Iterator[int]) -> None:
        # Many clients at times, none at others.
        wanted = self.max_in_flight if self.counts["steps"] % 400 < 300 else 2
        while len(self.in_flight) < wanted and self.rng.random() < 0.4:
            if self._add_one(numbers) is None:
                return

    def _add_one(self, numbers: Iterator[int]) -> SoakRequest | None:
        number = next(numbers, None)
        if number is None:
            return None
        request = make_request(self.seed, number, self.model.args.vocab_size)
        self.engine.add_request(
            request.request_id,
            request.prompt,
            request.params,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        self.in_flight[request.request_id] = request, self.counts["steps"]
        self.counts["requests"] += 1
        return request

    def _note_end(self, output: RequestOutput) -> None:
        request, _ = self.in_flight.pop(output.request_id)
        for completion in output.outputs:
            self.counts[str(completion.finish_reason)] += 1
            self.counts["tokens"] += len(completion.token_ids)
            # A request fails for its own failures only.
            may_fail = bool(request.params.logits_processors) or request.breaks_at is not None
            assert completion.finish_reason != "error" or may_fail, (output.error, request)
            assert completion.finish_reason != "abort" or request.abort_after is not None, request
        self.counts["forked"] += len(output.outputs) - 1
        assert output.error is None or isinstance(output.error, Failure), output.error
        if self.keep_outputs:
            self.outputs[output.request_id] = output

    # Failures

    def _launch_or_fail(self, output: Batch, *args: Any) -> Any:
        breaking = [
            completion
            for completion in output.completions
            for asked, _ in [self.in_flight[completion.request_id]]
            if asked.breaks_at is not None and completion.num_computed_tokens >= asked.breaks_at
        ]
        self._slack = slack_nbytes(
            self.model,
            self.engine.cache.config,
            # Completions that are forked in this step have rows of logits, too.
            [
                part.completion.num_computed_tokens
                for part in output.scheduled
                for _ in range(part.completion.num_seqs + len(part.draft_token_ids))
            ],
            output.num_tokens,
        )
        error: BaseException | None = None
        if breaking:
            self.counts["failed steps"] += 1
            error = Failure(f"{breaking} breaks the step")
        elif self.rng.random() < 0.01:
            error = KeyboardInterrupt()
        if error is not None and self.rng.random() < 0.5:
            raise error
        # The other half fails in the model, after it wrote K/V of other tokens.
        self._model_error = error
        try:
            return self._launch(output, *args)
        finally:
            self._model_error = None

    def _model_or_nonsense(
        self, tokens: mx.array, layers: Any, logit_rows: mx.array | None
    ) -> mx.array:
        if self._model_error is not None:
            tokens = (tokens + 7) % self.model.args.vocab_size
            mx.eval(self.model(tokens, layers, logit_rows), self.engine.cache.arrays)
            raise self._model_error
        logits: mx.array = self.model(tokens, layers, logit_rows)
        return logits


def run_alone(model: Any, request: SoakRequest, options: dict[str, Any]) -> RequestOutput:
    """The output of a request on an engine of its own, which caches nothing."""
    engine = Engine(
        model,
        None,
        kv_cache_bytes="400blocks",
        enable_prefix_caching=False,
        max_num_batched_tokens=512,
        **options,
    )
    engine.add_request(request.request_id, request.prompt, request.params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                return output
    raise AssertionError("the request came to no end")
