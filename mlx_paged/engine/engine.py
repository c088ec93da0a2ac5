"""`Engine`: many requests on one model and one paged cache, step by step. ``LLM`` and
``AsyncEngine`` wrap it.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar, Unpack

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.argument_values import as_integer, check_integer
from mlx_paged.cache import SwappedKV
from mlx_paged.config import KVBudget, SchedulerConfig
from mlx_paged.core import KVCacheManagerStats, hash_token_blocks
from mlx_paged.engine.model_runner import ModelRunner
from mlx_paged.engine.options import SchedulerOptions
from mlx_paged.engine.prompts import Prompt, as_tokenizer, read_prompt
from mlx_paged.engine.request_state import RequestState
from mlx_paged.engine.sampler import SampledToken, Sampler
from mlx_paged.engine.scheduler import Scheduler, extra_hash_keys
from mlx_paged.engine.scheduler_output import SchedulerOutput
from mlx_paged.engine.swap_space import SwapSpace
from mlx_paged.errors import forget_frames, request_error
from mlx_paged.foreign_arguments import argument_names, refuses_unknown_arguments
from mlx_paged.models.context_length import context_limit
from mlx_paged.models.kv_cache import make_kv_cache
from mlx_paged.models.language_model import check_model
from mlx_paged.request import (
    Request,
    RequestOutput,
    SamplingParams,
    check_cache_salt,
    check_priority,
    check_request_id,
)

T = TypeVar("T")

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


def engine_option_names() -> frozenset[str]:
    """The names of all settings that an :class:`Engine` takes."""
    return argument_names(Engine) | argument_names(SchedulerConfig)


class Engine:
    """Runs requests together: they share a model, a pool of K/V blocks and the K/V of equal
    beginnings.

        engine = Engine(model, tokenizer, kv_cache_bytes="2G")
        engine.add_request("a", "Once upon a time", SamplingParams(max_tokens=100))
        while engine.has_unfinished_requests():
            for output in engine.step():
                print(output.request_id, output.outputs[0].text)

    ``add_request`` and ``abort`` may be called from any thread at any time, also while a step runs.
    Steps themselves are one thread's: MLX keeps its streams by thread.

    Args:
        model: Qwen3 as :func:`mlx_paged.load` returns it.
        tokenizer: for text prompts, text out, stop texts and the end of sequence; ``None`` is token
            ids only.
        block_size: tokens per K/V block: 8, 16, 32 or 64.
        kv_cache_bytes: the K/V budget, as :meth:`KVBudget.parse` reads it; by default a share of
            the machine's memory. A limit, no allocation.
        backend: ``"auto"``, ``"reference"`` or ``"metal"``.
        swap_bytes: host memory for the K/V of preempted requests, on top of the budget, in the same
            notation; by default an eighth of it, 0 never swaps.
        seed: of the seeds of requests that have none; by default fresh ones.
        max_model_len: the most tokens that a prompt and its answer have together; by default the
            context that the model was made for
            (:func:`mlx_paged.models.context_length.context_length`), which is also the most.
        scheduler_options: fields of :class:`SchedulerConfig`: ``max_num_seqs``,
            ``max_num_batched_tokens``, ``enable_prefix_caching``, ``watermark``,
            ``priority_steps``.

    Raises:
        ValueError: a setting out of its range, or a budget that holds no block.
        TypeError: an argument that there is not; the message says what to use.
    """

    @refuses_unknown_arguments("engine", also=lambda: argument_names(SchedulerConfig))
    def __init__(
        self,
        model: Module,
        tokenizer: TokenizerWrapper | None = None,
        *,
        block_size: int = 16,
        kv_cache_bytes: str | int | None = None,
        backend: str = "auto",
        swap_bytes: str | int | None = None,
        seed: int | None = None,
        max_model_len: int | None = None,
        **scheduler_options: Unpack[SchedulerOptions],
    ):
        self.max_model_len = context_limit(check_model(model).args, max_model_len)
        config = SchedulerConfig(max_model_len=self.max_model_len, **scheduler_options)
        if tokenizer is not None:
            tokenizer = as_tokenizer(tokenizer)
        if seed is not None:
            seed = check_integer("engine", "seed", seed)
        # Whoever steps may do so in another thread, which can't evaluate what this one left lazy.
        # Not only parameters: frequencies of RoPE, for one.
        mx.eval([leaf for leaf in dict(tree_flatten(model)).values() if isinstance(leaf, mx.array)])
        self.model = model
        self.tokenizer = tokenizer
        self.cache = make_kv_cache(
            model, "paged", block_size=block_size, kv_cache_bytes=kv_cache_bytes, backend=backend
        )
        self.runner = ModelRunner(model, self.cache)
        self.sampler = Sampler()
        self.swap_space: SwapSpace[SwappedKV] = SwapSpace(self._num_swap_tokens(swap_bytes))
        eos_token_ids: Iterable[int] = () if tokenizer is None else tokenizer.eos_token_ids
        self.scheduler = Scheduler(self.cache, config, frozenset(eos_token_ids), self.swap_space)
        self._seeds = random.Random(seed)
        # The requests that are not reported as finished yet. Threads share this table, the inbox
        # and the flags of a state without a lock: each of their changes is a single operation, and
        # their order does not matter.
        self._states: dict[str, RequestState] = {}
        # What other threads ask for goes through the inbox, which is emptied whenever no step runs.
        self._inbox: deque[Callable[[], None]] = deque()
        self._news: dict[str, None] = {}  # ids of requests to report, in order
        # Requests from a failed step and the length each had reached; each is retried alone up to
        # there.
        self._suspects: deque[tuple[Request, int]] = deque()
        # Held by the thread that changes anything below the inbox. Wherever it is taken, `with` and
        # its body stand on one line: so no line of ours begins while the lock is held and nothing
        # would release it.
        self._step_lock = threading.Lock()
        self._changing_thread: int | None = None
        # True while the bookkeeping changes. Whoever finds it True was not the one who set it: an
        # interrupt cut a change in the middle.
        self._is_torn = False

    def _num_swap_tokens(self, swap_bytes: str | int | None) -> int:
        config = self.cache.config
        if swap_bytes is None:
            return int(config.num_slots * DEFAULT_SWAP_SHARE)
        if as_integer(swap_bytes) == 0 or (
            isinstance(swap_bytes, str) and swap_bytes.strip() == "0"
        ):
            return 0
        budget = KVBudget.parse(swap_bytes)
        if budget.num_blocks is not None:
            return budget.num_blocks * config.block_size
        return (budget.nbytes or 0) // config.nbytes_per_token

    # From any thread

    @refuses_unknown_arguments("request")
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
            prompt: text, token ids, or vLLM's dicts ``{"prompt": text}`` and ``{"prompt_token_ids":
                ids}``.
            params: how to sample; greedy by default.
            priority: lower runs earlier, as in vLLM; see :class:`Scheduler` for how much.
            cache_salt: only requests with the same salt share K/V.

        Raises:
            ValueError: an empty prompt, a token id that the model does not have, a request id that
                is in use, or parameters that can't be met.
            PromptTooLongError: the budget can't hold the prompt, ever; with the sum.
        """
        request_id = check_request_id(request_id)
        priority, cache_salt = check_priority(priority), check_cache_salt(cache_salt)
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"[engine] params must be SamplingParams, got {type(params).__name__}")
        if params.stop and self.tokenizer is None:
            raise ValueError("[engine] stop texts need a tokenizer; use stop_token_ids")
        text, token_ids = read_prompt(prompt, self.tokenizer, self.runner.vocab_size)
        seed = self._seeds.getrandbits(63) if params.seed is None else int(params.seed)
        request = Request(
            request_id, token_ids, params, seed=seed, priority=priority, cache_salt=cache_salt
        )
        self.scheduler.check(request)
        state = RequestState(request, text, self.tokenizer)
        if self._states.setdefault(request_id, state) is not state:
            raise ValueError(f"[engine] request {request_id!r} exists already")
        self._inbox.append(partial(self.scheduler.add, request))
        self._read_inbox_if_idle()

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is, and give its blocks back: at once, or when the step that
        runs is done.

        Its output comes with the next step, with finish reason ``"abort"``. One that is unknown or
        done is left alone."""
        state = self._states.get(check_request_id(request_id))
        if state is not None:
            self._ask_to_abort(state)
            self._read_inbox_if_idle()

    def abort_all(self) -> None:
        """Abort every request that is there."""
        for state in list(self._states.values()):
            self._ask_to_abort(state)
        self._read_inbox_if_idle()

    def num_computed_tokens(self, request_id: str) -> int:
        """How many of a request's tokens have K/V: the progress of a long prompt. 0 while it waits."""
        state = self._states.get(check_request_id(request_id))
        return 0 if state is None else state.requests[0].num_computed_tokens

    def cached_block_ids(
        self, token_ids: Sequence[int], cache_salt: str | None = None
    ) -> list[int]:
        """The blocks that hold the K/V of these tokens' beginning now, as far as they are in the
        prefix cache.
        """
        block_hashes = hash_token_blocks(
            token_ids, self.cache.config.block_size, extra_hash_keys(cache_salt)
        )
        computed = self.cache.manager.get_computed_blocks(block_hashes, len(token_ids) + 1)
        return [block.block_id for block in computed.blocks]

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has anything to do or to report."""
        return bool(self._states)

    # The thread that steps

    def step(self) -> list[RequestOutput]:
        """Run one step and report the requests it brought on: each a live object, which grows with
        further steps.
        """
        self._refuse_reentry("step")
        with self._step_lock: outputs = self._changed(self._step)  # noqa: E701  # fmt: skip
        self._read_inbox_if_idle()
        return self._handed_over(outputs)

    def shrink(self) -> int:
        """Give back K/V memory that no running request needs; returns the bytes. What is cached
        there is forgotten.
        """
        self._refuse_reentry("shrink")
        with self._step_lock: return self._changed(self.cache.shrink)  # noqa: E701  # fmt: skip

    def reset_prefix_cache(self) -> bool:
        """Forget all cached K/V; False, and nothing has changed, while requests run."""
        self._refuse_reentry("reset_prefix_cache")
        with self._step_lock: return self._changed(lambda: self.cache.manager.reset_prefix_cache())  # noqa: E701  # fmt: skip

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

    def _refuse_reentry(self, name: str) -> None:
        if self._step_lock.locked() and self._changing_thread == threading.get_ident():
            raise RuntimeError(
                f"[engine] {name} was called from inside a step; only add_request and abort may be"
            )

    def _read_inbox_if_idle(self) -> None:
        # A thread that steps reads the inbox once more when it is done, so nothing stays in it. If
        # another thread begins to step just now, this one waits for that step.
        while (self._inbox or self._is_torn) and not self._step_lock.locked():
            with self._step_lock: self._changed(self._read_inbox)  # noqa: E701  # fmt: skip

    def _changed(self, change: Callable[[], T]) -> T:
        """Make a change of the bookkeeping, and know if it is cut. With the lock."""
        self._changing_thread = threading.get_ident()
        try:
            if self._is_torn:
                self._repair()
            self._is_torn = True
            result = change()
            self._is_torn = False
            return result
        finally:
            self._changing_thread = None

    def _repair(self) -> None:
        """Begin again from what no interrupt tears: the requests, and what was reported of each.

        Cached K/V are lost, and what runs is computed again.
        """
        self.cache.reset()
        self._suspects.clear()
        states = list(self._states.values())
        self.scheduler.restart([request for state in states for request in state.restore()])
        for state in states:
            if state.is_aborted:
                self._abort(state)
        self._news = {state.output.request_id: None for state in states if state.output.finished}

    def _read_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _ask_to_abort(self, state: RequestState) -> None:
        # The state and not its id: no request of the same id that comes later.
        state.is_aborted = True
        self._inbox.append(partial(self._abort, state))

    def _abort(self, state: RequestState) -> None:
        for request in state.requests:
            self._finish(request, "abort")

    def _step(self) -> list[RequestOutput]:
        self._read_inbox()
        self._run_step()
        self._read_inbox()
        if not self.scheduler.requests and not self._news:
            self._pick_up_lost()
        return self._take_news()

    def _pick_up_lost(self) -> None:
        """Take on requests that an interrupt kept from the inbox, and those that it kept from being
        reported.
        """
        for state in list(self._states.values()):
            for request in state.requests:
                self.scheduler.add(request)
            if state.is_aborted:
                self._abort(state)
            if state.output.finished:
                self._report(state.requests[0])

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
        requests, rows = self._completions(output)
        try:
            results = self.runner.execute(
                output, lambda logits: self.sampler.sample(logits, rows, requests), self.swap_space
            )
        except Exception as error:
            suspects = [(request, request.num_computed_tokens) for request in output.requests]
            self._take_back(output)
            if len(suspects) > 1:
                self._suspects.extend(suspects)
            else:
                self._finish(output.requests[0], "error", error)
        except BaseException:
            self._take_back(output)
            self._is_torn = False
            raise
        else:
            self._append_tokens(requests, results or [])

    def _take_back(self, output: SchedulerOutput) -> None:
        """The step did not happen."""
        self.scheduler.discard(output)
        self.cache.close_step()
        try:
            # What it wrote is not needed, but the slabs hang on it, and another thread could not
            # evaluate them.
            mx.eval(self.cache.arrays)
        except Exception:
            # Nor can this one: without new slabs, every later step would fail.
            self._repair()

    def _next_suspect(self) -> Request | None:
        while self._suspects:
            request, num_tokens = self._suspects[0]
            if not request.is_finished and request.num_computed_tokens < num_tokens:
                return request
            self._suspects.popleft()
        return None

    def _completions(self, output: SchedulerOutput) -> tuple[list[Request], list[int]]:
        """The requests that get a token in this step, further completions included, and the row of
        logits of each.
        """
        requests: list[Request] = []
        rows: list[int] = []
        row = itertools.count()
        for request in output.requests:
            if request.num_computed_tokens == request.num_tokens:
                completions = [request, *map(request.fork, range(1, request.num_seqs))]
                requests += completions
                rows += [next(row)] * len(completions)
        return requests, rows

    def _append_tokens(
        self, requests: Sequence[Request], results: Sequence[SampledToken | Exception]
    ) -> None:
        for request in requests:
            if request.seq_id not in self.scheduler.requests:
                state = self._states[request.request_id]
                self.scheduler.add_fork(state.requests[0], request)
                state.requests.append(request)
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
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the panics of tokenizers in Rust are no Exception
            # The tokenizer's, and nobody else's; also where this token was the last one.
            forget_frames(error, "In a step of the engine")
            self.scheduler.finish(request, "error")
            request.finish_reason, request.stop_reason, request.error = (
                "error",
                None,
                request_error(error),
            )
        if stop_text is not None:
            self.scheduler.finish(request, "stop")
            # Where this token was the last one, too, the text counts.
            request.finish_reason, request.stop_reason = "stop", stop_text
        self._report(request)

    def _finish(self, request: Request, reason: str, error: Exception | None = None) -> None:
        if not request.is_finished:
            if error is not None:
                forget_frames(error, "In a step of the engine")
            self.scheduler.finish(request, reason, error=error)
            self._report(request)

    def _report(self, request: Request) -> None:
        if request.is_finished:
            self._states[request.request_id].finish(request)
        self._news[request.request_id] = None

    def _take_news(self) -> list[RequestOutput]:
        states = [
            self._states[request_id] for request_id in self._news if request_id in self._states
        ]
        for state in states:
            state.note_reported()
        # Those that are finished are reported again if an interrupt comes before they are handed
        # over.
        self._news = {state.output.request_id: None for state in states if state.output.finished}
        return [state.output for state in states]

    def _handed_over(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Forget the requests that are finished, and return the outputs: an interrupt comes before
        both or after.
        """
        finished = [output.request_id for output in outputs if output.finished]
        for request_id in finished:
            self._news.pop(request_id, None)
        # One call without a line of Python in it, and on the line that returns.
        deque(map(self._states.pop, finished, itertools.repeat(None)), maxlen=0); return outputs  # noqa: E702  # fmt: skip
