"""``batch_generate`` with mlx-lm's signature: many prompts on one engine, one response for all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Unpack, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchResponse
from mlx_lm.generate_utils import BatchStats

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.input_processor import Prompt, as_tokenizer, split_prompts
from mlx_paged.engine.request import Completion
from mlx_paged.errors import ArgumentError
from mlx_paged.generation import OneShotEngine, Tokenizer
from mlx_paged.options.argument_values import AT_LEAST_1, BOOL, is_sequence
from mlx_paged.options.config import DEFAULT_MAX_NUM_BATCHED_TOKENS, SchedulerConfig
from mlx_paged.options.engine_options import OneShotOptions
from mlx_paged.options.foreign_arguments import refuse_unknown
from mlx_paged.options.sampling_params import LogitsProcessor, Sampler, SamplingParams
from mlx_paged.request import RequestOutput

_OWN_CACHE = "an engine shares the K/V of common prefixes automatically; leave it out"


class BatchOptions(OneShotOptions, total=False):
    """The keyword arguments of :func:`batch_generate`: those of mlx-lm's ``BatchGenerator``, and of
    an engine.
    """

    draft_model: Module | None
    sampler: Sampler | None
    logits_processors: Sequence[LogitsProcessor] | None
    completion_batch_size: int
    prefill_step_size: int


def batch_generate(
    model: Module,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    prompt_caches: None = None,
    max_tokens: int | Sequence[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    **options: Unpack[BatchOptions],
) -> BatchResponse:
    """Complete prompts as one batch; as ``mlx_lm.batch_generate``, with its response.

    Args:
        prompts: as for :meth:`LLM.generate`; mlx-lm accepts only token ids.
        prompt_caches, return_prompt_caches: refused. Common prefixes are shared automatically.
        max_tokens: of each answer, or one number for each prompt; -1 is no limit.
        verbose: print the progress and statistics.
        return_token_ids: return the tokens of each answer, without the end of sequence.
        return_logprobs: return the log-probability that each of these tokens was drawn with: after
            the processors, before the sampler.
        sampler: log-probabilities ``[1, vocab_size]`` to a token ``[1]``; greedy by default.
        logits_processors: each maps (tokens so far, logits ``[1, vocab_size]``) to new logits.
        completion_batch_size: the most answers that run at once (default: 32).
        prefill_step_size: prompt tokens per step (default: 2048).
        options: ``kv``, ``block_size``, ``kv_cache_bytes``, ``backend``, ``max_model_len``,
            ``cache_dir`` and others of :class:`Engine`.

    Returns:
        mlx-lm's response. In its ``stats``, ``prompt_tokens`` counts those that were computed, and
        ``prompt_time`` is the duration of the steps until each prompt has a token, in seconds.

    Raises:
        ValueError: an argument of the wrong type or out of its range.
        TypeError: an unknown argument; the message says what to use instead.
        PromptTooLongError: a prompt leaves no room for an answer.
        Exception: the error of a prompt, such as of its logits processor. mlx-lm's response can't
            hold errors; the outputs of :meth:`LLM.generate` can.
    """
    refuse_unknown(batch_generate, options, BatchOptions.__annotations__)
    for name, is_given in (
        ("prompt_caches", prompt_caches is not None),
        ("return_prompt_caches", return_prompt_caches is not False),
    ):
        if is_given:
            raise ArgumentError(f"[batch_generate] {name} is not supported: {_OWN_CACHE}", name)
    for name, value in (
        ("verbose", verbose),
        ("return_token_ids", return_token_ids),
        ("return_logprobs", return_logprobs),
    ):
        BOOL.check("batch_generate", name, value)
    batch = _Batch(
        model, tokenizer, split_prompts(prompts), max_tokens, return_logprobs, {**options}
    )

    def respond() -> tuple[list[str], dict[str, Any], list[list[int]], list[list[float]] | None]:
        with closing(batch.engine):
            stats = batch.run(verbose)
        answers = batch.answers()
        texts = [batch.tokenizer.decode(token_ids) for token_ids in answers]
        return texts, vars(stats), answers, batch.logprobs(answers) if return_logprobs else None

    texts, stats, answers, logprobs = batch.engine.share(respond)
    token_ids = answers if return_token_ids else None
    return BatchResponse(texts, BatchStats(**stats), None, token_ids, logprobs)


class _Batch:
    """The requests of a call, and their engine."""

    def __init__(
        self,
        model: Module,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        max_tokens: object,
        wants_logprobs: bool,
        options: dict[str, Any],
    ):
        self.tokenizer = as_tokenizer(tokenizer)
        limits = _one_for_each(max_tokens, len(prompts))
        sampler, processors = options.pop("sampler", None), options.pop("logits_processors", None)
        step_size = options.pop("prefill_step_size", DEFAULT_MAX_NUM_BATCHED_TOKENS)
        batch_size = options.pop("completion_batch_size", 32)
        if processors is None:
            processors = ()
        shared = SamplingParams(sampler=sampler, logits_processors=processors, detokenize=False)
        logprobs = 0 if wants_logprobs and not shared.logits_processors else None
        params = [shared.clone(max_tokens=limit, logprobs=logprobs) for limit in limits]
        step_size = AT_LEAST_1.check("batch_generate", "prefill_step_size", step_size)
        batch_size = AT_LEAST_1.check("batch_generate", "completion_batch_size", batch_size)
        num_seqs = min(batch_size, max(1, len(prompts)))
        self.engine = OneShotEngine(
            model,
            self.tokenizer,
            max_num_seqs=num_seqs,
            # A step holds a token of each answer that runs.
            max_num_batched_tokens=max(step_size, num_seqs),
            max_num_mixed_tokens=max(SchedulerConfig.max_num_mixed_tokens, num_seqs),
            **options,
        )
        self._requests = list(zip(prompts, params, strict=True))
        self._outputs: dict[str, RequestOutput] = {}
        # The engine's own log-probabilities are computed before the processors.
        self._logprobs: _Logprobs | None = None
        if wants_logprobs and shared.logits_processors:
            self._logprobs = _Logprobs(self.engine)

    def run(self, is_verbose: bool) -> BatchStats:
        for index, (prompt, params) in enumerate(self._requests):
            self.engine.add_request(str(index), prompt, params)
        num_requests = len(self._requests)
        stats = BatchStats()
        started: set[str] = set()
        num_finished = 0
        begin = time.perf_counter()
        while self.engine.has_unfinished_requests():
            has_prompts = len(started) < num_requests
            step_begin = time.perf_counter()
            outputs = self.engine.step()
            for output in outputs:
                self._take(output)
                started.add(output.request_id)
                num_finished += output.finished
            seconds = time.perf_counter() - step_begin
            stats.generation_steps += bool(outputs)
            if has_prompts:
                stats.prompt_time += seconds
            else:
                stats.decode_time += seconds
            if is_verbose and outputs:
                done = f"[batch_generate] Finished {num_finished}/{num_requests}"
                print(done, end="\r", flush=True)
        stats.wall_time = time.perf_counter() - begin
        stats.peak_memory = mx.get_peak_memory() / 1e9
        for output in self._outputs.values():
            stats.prompt_tokens += len(output.prompt_token_ids) - output.num_cached_tokens
            stats.generation_tokens += len(output.outputs[0].token_ids)
        if is_verbose:
            print(
                f"\n[batch_generate] Prompt: {stats.prompt_tokens} tokens, "
                f"{stats.prompt_tps:.3f} tokens-per-sec\n"
                f"[batch_generate] Generation: {stats.generation_tokens} tokens, "
                f"{stats.generation_tps:.3f} tokens-per-sec\n"
                f"[batch_generate] Peak memory: {stats.peak_memory:.3f} GB"
            )
        return stats

    def answers(self) -> list[list[int]]:
        """The tokens of each answer, without the one that ended it."""
        completions = [self._outputs[str(index)].outputs[0] for index in range(len(self._requests))]
        return [
            completion.token_ids[:-1]
            if completion.finish_reason == "stop"
            else completion.token_ids
            for completion in completions
        ]

    def logprobs(self, answers: Sequence[Sequence[int]]) -> list[list[float]]:
        """The log-probability that each token of the answers was drawn with."""
        results: list[list[float]] = []
        for index, answer in enumerate(answers):
            if self._logprobs is not None:
                results.append(self._logprobs.of(str(index))[: len(answer)])
                continue
            entries = self._outputs[str(index)].outputs[0].logprobs or ()
            pairs = zip(answer, entries, strict=False)  # The answer lacks the token that ended it.
            results.append([entry[token].logprob for token, entry in pairs])
        return results

    def _take(self, output: RequestOutput) -> None:
        output.raise_if_failed()
        self._outputs[output.request_id] = output
        if self._logprobs is not None:
            self._logprobs.take(output)


class _Logprobs:
    """The log-probability of each token, computed from the row of logits it was drawn from."""

    def __init__(self, engine: Engine):
        self._logprobs: dict[str, list[float]] = {}
        self._rows: dict[tuple[str, int], mx.array] = {}  # by request and number of the token
        engine.read_rows(self._read)

    def of(self, request_id: str) -> list[float]:
        """The log-probabilities of a request's tokens so far."""
        return self._logprobs.get(request_id, [])

    def take(self, output: RequestOutput) -> None:
        """Process the new tokens of an output."""
        known = self._logprobs.setdefault(output.request_id, [])
        token_ids = output.outputs[0].token_ids
        for place in range(len(known), len(token_ids)):
            row = self._rows.pop((output.request_id, place + 1)).astype(mx.float32)
            logprob = row[token_ids[place] : token_ids[place] + 1] - mx.logsumexp(row)
            known += cast(list[float], logprob.tolist())

    def _read(self, completion: Completion, number: int, row: mx.array) -> None:
        mx.async_eval(row)  # in the thread that created it
        self._rows[completion.request_id, number] = row


def _one_for_each(max_tokens: object, num_prompts: int) -> list[Any]:
    if not is_sequence(max_tokens):
        return [max_tokens] * num_prompts
    if len(max_tokens) != num_prompts:
        raise ArgumentError(
            f"[batch_generate] {len(max_tokens)} max_tokens for {num_prompts} prompts; give one "
            "for each",
            "max_tokens",
        )
    return list(max_tokens)
