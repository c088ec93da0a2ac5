"""`Engine`: many requests on one model and one paged cache, step by step. ``LLM`` and ``AsyncEngine`` wrap it."""

from __future__ import annotations

import itertools
import random
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.config import KVBudget, SchedulerConfig
from mlx_paged.core import KVCacheManagerStats, hash_token_blocks
from mlx_paged.engine.model_runner import ModelRunner, make_kv_cache
from mlx_paged.engine.prompts import check_token_ids, encode_prompt
from mlx_paged.engine.request_state import RequestState
from mlx_paged.engine.sampler import SampledToken, Sampler
from mlx_paged.engine.scheduler import Scheduler, extra_hash_keys
from mlx_paged.engine.scheduler_output import SchedulerOutput
from mlx_paged.engine.swap_space import SwapSpace
from mlx_paged.request import Request, RequestOutput, SamplingParams

Prompt = str | Sequence[int]

# Of the K/V budget, on top of it: host memory for requests that are swapped out.
DEFAULT_SWAP_SHARE = 1 / 8


@dataclass(frozen=True)
class EngineStats(KVCacheManagerStats):
    """What the engine holds and did; memory in bytes."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_swapped_tokens: int  # in host memory now
    nbytes_held: int  # allocated for K/V now
    nbytes_budget: int


class Engine:
    """Runs requests together: they share a model, a pool of K/V blocks and the K/V of equal beginnings.

        engine = Engine(model, tokenizer, kv_cache_bytes="2G")
        engine.add_request("a", "Once upon a time", SamplingParams(max_tokens=100))
        while engine.has_unfinished_requests():
            for output in engine.step():
                print(output.request_id, output.outputs[0].text)

    ``add_request`` and ``abort`` may be called from any thread at any time, also while a step runs. Steps themselves
    are one thread's: MLX keeps its streams by thread.

    Args:
        model: Qwen3 as :func:`mlx_paged.load` returns it.
        tokenizer: for text prompts, text out, stop texts and the end of sequence; ``None`` is token ids only.
        block_size: tokens per K/V block: 8, 16, 32 or 64.
        kv_cache_bytes: the K/V budget, as :meth:`KVBudget.parse` reads it; by default a share of the machine's memory.
            A limit, no allocation.
        backend: ``"auto"``, ``"reference"`` or ``"metal"``.
        swap_bytes: host memory for the K/V of preempted requests, on top of the budget, in the same notation; by
            default an eighth of it, 0 never swaps.
        seed: of the seeds of requests that have none; by default fresh ones.
        scheduler_options: fields of :class:`SchedulerConfig`: ``max_num_seqs``, ``max_num_batched_tokens``,
            ``enable_prefix_caching``, ``watermark``, ``priority_steps``.

    Raises:
        ValueError: a setting out of its range, or a budget that holds no block.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper | None = None,
        *,
        block_size: int = 16,
        kv_cache_bytes: str | int | None = None,
        backend: str = "auto",
        swap_bytes: str | int | None = None,
        seed: int | None = None,
        **scheduler_options: int | float | bool,
    ):
        config = SchedulerConfig(**scheduler_options)
        if tokenizer is not None and not isinstance(tokenizer, TokenizerWrapper):
            tokenizer = TokenizerWrapper(tokenizer)
        # Whoever steps may do so in another thread, which can't evaluate what this one left lazy. Not only parameters:
        # frequencies of RoPE, for one.
        mx.eval([leaf for _, leaf in tree_flatten(model) if isinstance(leaf, mx.array)])
        self.model = model
        self.tokenizer = tokenizer
        self.cache = make_kv_cache(
            model, "paged", block_size=block_size, kv_cache_bytes=kv_cache_bytes, backend=backend
        )
        self.runner = ModelRunner(model, self.cache)
        self.sampler = Sampler()
        self.swap_space = SwapSpace(self._num_swap_tokens(swap_bytes))
        eos_token_ids = frozenset() if tokenizer is None else frozenset(tokenizer.eos_token_ids)
        self.scheduler = Scheduler(self.cache, config, eos_token_ids, self.swap_space)
        self._seeds = random.Random(seed)
        # Of all requests that are not reported as finished yet. The lock is of this table only, and held for no step.
        self._states: dict[str, RequestState] = {}
        # Reentrant: a reader that the garbage collector finds aborts its request, wherever this thread is.
        self._states_lock = threading.RLock()
        self._news: dict[str, None] = {}  # ids of requests to report, in order
        # What other threads ask for goes through the inbox, which is emptied whenever no step runs.
        self._inbox: deque[Callable[[], None]] = deque()
        self._step_lock = threading.Lock()
        # Of a step that failed, with how far it would have computed each: to be run alone until they are that far.
        self._suspects: deque[tuple[Request, int]] = deque()

    def _num_swap_tokens(self, swap_bytes: str | int | None) -> int:
        config = self.cache.config
        if swap_bytes is None:
            return int(config.num_slots * DEFAULT_SWAP_SHARE)
        if swap_bytes in (0, "0"):
            return 0
        budget = KVBudget.parse(swap_bytes)
        if budget.num_blocks is not None:
            return budget.num_blocks * config.block_size
        return budget.nbytes // config.nbytes_per_token

    # From any thread

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request; the next steps work on it.

        Args:
            prompt: text, or token ids.
            params: how to sample; greedy by default.
            priority: lower runs earlier, as in vLLM; see :class:`Scheduler` for how much.
            cache_salt: only requests with the same salt share K/V.

        Raises:
            ValueError: an empty prompt, a token id that the model does not have, a request id that is in use, or
                parameters that can't be met.
            PromptTooLongError: the budget can't hold the prompt, ever; with the sum.
        """
        params = params or SamplingParams()
        if not isinstance(params, SamplingParams):
            raise ValueError(f"[engine] params must be SamplingParams, got {type(params).__name__}")
        if params.stop and self.tokenizer is None:
            raise ValueError("[engine] stop texts need a tokenizer; use stop_token_ids")
        token_ids = self._token_ids(prompt)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        request = Request(request_id, token_ids, params, seed=seed, priority=priority, cache_salt=cache_salt)
        self.scheduler.check(request)
        state = RequestState(request, prompt if isinstance(prompt, str) else None, self.tokenizer)
        with self._states_lock:
            if request_id in self._states:
                raise ValueError(f"[engine] request {request_id!r} exists already")
            self._states[request_id] = state
            # At once, so that an abort which finds the request comes behind it.
            self._inbox.append(partial(self.scheduler.add, request))
        self._read_inbox_if_idle()

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is, and give its blocks back: at once, or when the step that runs is done.

        Its output comes with the next step, with finish reason ``"abort"``. One that is unknown or done is left alone.
        """
        with self._states_lock:
            state = self._states.get(request_id)
        if state is not None:
            # This one, and none of the same id that comes later.
            self._inbox.append(partial(self._abort, state))
            self._read_inbox_if_idle()

    def abort_all(self) -> None:
        """Abort every request that is there."""
        with self._states_lock:
            request_ids = list(self._states)
        for request_id in request_ids:
            self.abort(request_id)

    def num_computed_tokens(self, request_id: str) -> int:
        """How many of a request's tokens have K/V: the progress of a long prompt. 0 while it waits."""
        state = self._states.get(request_id)
        return 0 if state is None else state.requests[0].num_computed_tokens

    def cached_block_ids(self, token_ids: Sequence[int], cache_salt: str | None = None) -> list[int]:
        """The blocks that hold the K/V of these tokens' beginning now, as far as they are in the prefix cache."""
        block_hashes = hash_token_blocks(token_ids, self.cache.config.block_size, extra_hash_keys(cache_salt))
        computed = self.cache.manager.get_computed_blocks(block_hashes, len(token_ids) + 1)
        return [block.block_id for block in computed.blocks]

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has anything to do or to report."""
        return bool(self._states)

    # The thread that steps

    def step(self) -> list[RequestOutput]:
        """Run one step and report the requests it brought on: each a live object, which grows with further steps."""
        with self._step_lock:
            self._read_inbox()
            self._run_step()
            self._read_inbox()
            outputs = self._take_news()
        self._read_inbox_if_idle()
        return outputs

    def shrink(self) -> int:
        """Give back K/V memory that no running request needs; returns the bytes. What is cached there is forgotten."""
        with self._step_lock:
            return self.cache.shrink()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached K/V; False, and nothing has changed, while requests run."""
        with self._step_lock:
            return self.cache.manager.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """What is held, running and waiting; from any thread."""
        return EngineStats(
            **asdict(self.cache.manager.stats()),
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_preemptions=self.scheduler.num_preemptions,
            num_swapped_tokens=self.swap_space.num_used_tokens,
            nbytes_held=self.cache.stats().nbytes_held,
            nbytes_budget=self.cache.config.nbytes,
        )

    # Inside

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("[engine] a text prompt needs a tokenizer; give token ids")
            token_ids = encode_prompt(self.tokenizer, prompt)
        else:
            token_ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
            if not isinstance(token_ids, Sequence):
                raise ValueError(f"[engine] a prompt is text or token ids, got {type(prompt).__name__}")
        if not token_ids:
            raise ValueError("[engine] the prompt is empty; give at least one token")
        check_token_ids(token_ids, self.model.args.vocab_size)
        return list(token_ids)

    def _read_inbox_if_idle(self) -> None:
        # Whoever holds the lock reads the inbox once more after it is released, so nothing stays in it.
        while self._inbox and self._step_lock.acquire(blocking=False):
            try:
                self._read_inbox()
            finally:
                self._step_lock.release()

    def _read_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _abort(self, state: RequestState) -> None:
        for request in state.requests:
            self._finish(request, "abort")

    def _run_step(self) -> None:
        output = self.scheduler.schedule(only=self._next_suspect())
        for request in output.finished:
            self._report(request)
        if not output.requests:
            # Nobody will copy what was to be swapped out.
            self.scheduler.discard(output)
            if self._suspects:
                # No room for it now.
                self._suspects.popleft()
            return
        try:
            self.runner.execute(output, partial(self._sample, output), self.swap_space)
        except Exception as error:
            suspects = [(request, request.num_computed_tokens) for request in output.requests]
            self.scheduler.discard(output)
            if len(suspects) > 1:
                self._suspects.extend(suspects)
            else:
                self._finish(output.requests[0], "error", error)
            return
        except BaseException:
            self.scheduler.discard(output)
            raise

    def _next_suspect(self) -> Request | None:
        while self._suspects:
            request, num_tokens = self._suspects[0]
            if not request.is_finished and request.num_computed_tokens < num_tokens:
                return request
            self._suspects.popleft()
        return None

    def _sample(self, output: SchedulerOutput, logits: mx.array) -> None:
        """Sample a token for each request that is computed to its end; one for n completions is forked first."""
        requests: list[Request] = []
        rows: list[int] = []
        row = itertools.count()
        for request in output.requests:
            if request.num_computed_tokens == request.num_tokens:
                # Some may be there already, from a step that failed after they came.
                num_completions = len(self._states[request.request_id].requests)
                completions = [request, *map(request.fork, range(num_completions, request.num_seqs))]
                requests += completions
                rows += [next(row)] * len(completions)
        results = self.sampler.sample(logits, rows, requests)
        for request in requests:
            if request.seq_id not in self.scheduler.requests:
                state = self._states[request.request_id]
                self.scheduler.add_fork(state.requests[0], request)
                state.requests.append(request)
                # It has no new tokens of its own, and waits again like the others if the step fails.
                output.requests.append(request)
                output.num_new_tokens.append(0)
        for request, result in zip(requests, results, strict=True):
            if isinstance(result, SampledToken):
                self._append(request, result)
            else:
                self._finish(request, "error", result)

    def _append(self, request: Request, sampled: SampledToken) -> None:
        self.scheduler.append_token(request, sampled.token_id)
        stop_text = None
        try:
            stop_text = self._states[request.request_id].add_token(request, sampled)
        except Exception as error:
            # The tokenizer's, and nobody else's; also where this token was the last one.
            _write_traceback(error)
            self.scheduler.finish(request, "error")
            request.finish_reason, request.stop_reason, request.error = "error", None, error
        if stop_text is not None:
            self.scheduler.finish(request, "stop")
            # Where this token was the last one, too, the text counts.
            request.finish_reason, request.stop_reason = "stop", stop_text
        self._report(request)

    def _finish(self, request: Request, reason: str, error: Exception | None = None) -> None:
        if not request.is_finished:
            if error is not None:
                _write_traceback(error)
            self.scheduler.finish(request, reason, error=error)
            self._report(request)

    def _report(self, request: Request) -> None:
        if request.is_finished:
            self._states[request.request_id].finish(request)
        self._news[request.request_id] = None

    def _take_news(self) -> list[RequestOutput]:
        outputs = [self._states[request_id].output for request_id in self._news]
        self._news.clear()
        with self._states_lock:
            for output in outputs:
                if output.finished:
                    del self._states[output.request_id]
        return outputs


def _write_traceback(error: BaseException) -> None:
    """Make an error's traceback a note of it. As frames it would keep what their variables hold as long as somebody
    keeps the error: logits, graphs that hold whole slabs, the engine itself."""
    link: BaseException | None = error
    while link is not None and link.__traceback__ is not None:
        lines = "".join(traceback.format_tb(link.__traceback__))
        link.__notes__ = [*getattr(link, "__notes__", ()), f"In a step of the engine:\n{lines}"]
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
