"""``Engine``: many requests on one model and one KV cache, step by step."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar, Unpack

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.argument_values import check_integer
from mlx_paged.cache import SwappedKV
from mlx_paged.config import DEFAULT_KV
from mlx_paged.core import KVCacheManagerStats, hash_token_blocks
from mlx_paged.engine.batch import Batch, Scheduled
from mlx_paged.engine.deltas import Told, new_part, nothing_told
from mlx_paged.engine.draft_model import DraftModel
from mlx_paged.engine.draft_options import (
    check_draft_model,
    num_parameters_of,
    speculation_of,
)
from mlx_paged.engine.grammar import GrammarCompiler
from mlx_paged.engine.latencies import Latencies
from mlx_paged.engine.model_runner import ModelRunner, StepInFlight
from mlx_paged.engine.options import PassedOnOptions, passed_on_names, split_options
from mlx_paged.engine.prefix_history import PrefixHistory
from mlx_paged.engine.prompt_logprobs import score_prompts
from mlx_paged.engine.prompts import Prompt, as_tokenizer, read_prompt
from mlx_paged.engine.request_state import RequestState
from mlx_paged.engine.sampler import NO_TOKENS, SampledToken, sample, state_of
from mlx_paged.engine.scheduler import Scheduler, extra_hash_keys
from mlx_paged.engine.swap_space import SwapSpace, num_swap_tokens
from mlx_paged.engine.token_rules import read_token_rules, special_token_ids
from mlx_paged.engine.view import EngineView, view_of
from mlx_paged.errors import ArgumentError, forget_frames, request_error, shown
from mlx_paged.foreign_arguments import argument_names, refuses_unknown_arguments
from mlx_paged.models.context_length import context_limit
from mlx_paged.models.kv_cache import make_kv_cache
from mlx_paged.models.language_model import check_model
from mlx_paged.request import (
    Request,
    RequestOutput,
    check_cache_salt,
    check_priority,
    check_request_id,
)
from mlx_paged.sampling_params import RequestOutputKind, SamplingParams

T = TypeVar("T")


@dataclass(frozen=True)
class EngineStats(KVCacheManagerStats):
    """What the engine holds, and did since it was made; memory in bytes."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_drafted_tokens: int  # drafts that were verified
    num_accepted_tokens: int  # of these
    num_prompt_tokens: int  # of requests that got a first token
    num_cached_prompt_tokens: int  # of these
    num_generation_tokens: int
    num_finished: Mapping[str, int]  # completions, by finish reason
    num_steps: int
    busy_seconds: float  # spent in steps
    num_swapped_tokens: int  # in host memory now
    nbytes_held: int  # allocated for K/V now
    nbytes_budget: int


def engine_option_names() -> frozenset[str]:
    """The names of all settings that an :class:`Engine` takes."""
    return argument_names(Engine) | passed_on_names()


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
        swap_bytes: host memory for the K/V of preempted requests, on top of the budget, in the same
            notation; 0 never swaps. By default an eighth of the budget, if copying a token's K/V
            takes less than computing them (:func:`is_swapping_cheaper`).
        seed: of the seeds of requests that have none; by default fresh ones.
        max_model_len: the most tokens that a prompt and its answer have together; by default the
            context that the model was made for
            (:func:`mlx_paged.models.context_length.context_length`), which is also the most.
        run_ahead: whether a step is launched before the tokens of the one before are read, so that
            the device does not wait for Python (vLLM: ``async_scheduling``). The tokens are the
            same. By default where the cache allows it without copies: on Metal.
        options: of the K/V cache, and fields of :class:`SchedulerConfig` (``max_num_seqs``,
            ``max_num_batched_tokens``, ``max_num_mixed_tokens``, ``enable_prefix_caching``,
            ``watermark``, ``priority_steps``, ``num_draft_tokens``, ``num_history_tokens``). Those
            of the cache are

            - ``kv``: ``"paged"``, or ``"basic"`` for contiguous K/V per sequence.
            - ``block_size``: tokens per K/V block: 8, 16, 32 or 64.
            - ``kv_cache_bytes``: the K/V budget, as :meth:`KVBudget.parse` reads it; by default a
              share of the machine's memory. A limit, no allocation.
            - ``kv_format``: the bits that K and V are quantised to as they are written: ``8``,
              ``4``, or ``"K:8,V:4"``; ``"paged"`` only. By default they are stored as they are.
            - ``backend``: ``"auto"``, ``"reference"`` or ``"metal"``.
            - ``window``: keep the last ``window`` tokens of each sequence and its first ones, so
              that it goes on without end in bounded memory (:class:`StreamingWindow`). There is
              then no context limit but ``max_model_len``. All tokens by default.
            - ``num_sink_tokens``: how many of the first tokens stay beside a window; 4 by default.
            - ``draft_model``: a small model of the same vocabulary that makes the drafts, in the
              place of what followed when a request's last tokens came before. Its K/V count in the
              budget.

    Raises:
        ValueError: a setting out of its range, or a budget that holds no block.
        TypeError: an argument that there is not; the message says what to use.
    """

    @refuses_unknown_arguments("engine", also=passed_on_names)
    def __init__(
        self,
        model: Module,
        tokenizer: TokenizerWrapper | None = None,
        *,
        swap_bytes: str | int | None = None,
        seed: int | None = None,
        max_model_len: int | None = None,
        run_ahead: bool | None = None,
        **options: Unpack[PassedOnOptions],
    ):
        checked, kv = check_model(model), options.get("kv", DEFAULT_KV)
        self.max_model_len = context_limit(checked.args, max_model_len, options.get("window"))
        draft_model = check_draft_model(options.get("draft_model"), checked, kv)
        cache_options, config = split_options(options, self.max_model_len)
        if tokenizer is not None:
            tokenizer = as_tokenizer(tokenizer)
        if seed is not None:
            seed = check_integer("engine", "seed", seed)
        if not isinstance(run_ahead, bool | None):
            raise ArgumentError(
                f"[engine] run_ahead must be True, False or None, got {shown(run_ahead)}",
                "run_ahead",
            )
        # Steps may be another thread's, which can't evaluate what this one left lazy: parameters,
        # and frequencies of RoPE, which are none.
        for each in (model, draft_model or ()):
            leaves = dict(tree_flatten(each)).values()
            mx.eval([leaf for leaf in leaves if isinstance(leaf, mx.array)])
        self.model = model
        self.tokenizer = tokenizer
        self.cache = make_kv_cache(model, kv, **cache_options)
        num_parameters = num_parameters_of(model)
        self.swap_space: SwapSpace[SwappedKV] = SwapSpace(
            num_swap_tokens(swap_bytes, self.cache, num_parameters)
        )
        drafter = None if draft_model is None else DraftModel(draft_model, self.cache)
        self.runner = ModelRunner(model, self.cache, self.swap_space, drafter)
        self.run_ahead = self.cache.can_run_ahead if run_ahead is None else run_ahead
        eos_token_ids: Iterable[int] = () if tokenizer is None else tokenizer.eos_token_ids
        speculation = speculation_of(config.num_draft_tokens, checked, drafter, self.run_ahead)
        self.scheduler = Scheduler(
            self.cache, config, frozenset(eos_token_ids), self.swap_space, speculation
        )
        self.latencies = Latencies(self.max_model_len)
        self._special_token_ids = special_token_ids(tokenizer)
        self._grammars = GrammarCompiler(tokenizer, self.runner.vocab_size)
        self._seeds = random.Random(seed)
        # The requests that are not reported as finished yet. Threads share this table, the inbox
        # and the flags of a state without a lock: each of their changes is a single operation, and
        # their order does not matter.
        self._states: dict[str, RequestState] = {}
        # What the reader knows of a request that hands over only what is new.
        self._told: dict[str, list[Told]] = {}
        # What other threads ask for goes through the inbox, which is emptied whenever no step runs.
        self._inbox: deque[Callable[[], None]] = deque()
        self._to_report: dict[str, None] = {}  # ids of requests, in order
        # At most one between two steps: launched, sampled, and not read.
        self._in_flight: deque[StepInFlight] = deque()
        # Requests from a failed step and the length each had reached; each is retried alone.
        self._suspects: deque[tuple[Request, int]] = deque()
        # Held by the thread that changes the scheduler, the cache or a state. Wherever it is taken,
        # ``with`` and its body stand on one line, so that no interrupt can come between two lines
        # of ours while the lock is held and nothing would release it.
        self._step_lock = threading.Lock()
        self._changing_thread: int | None = None
        self.stepping_thread: int | None = None
        """The thread that alone empties the inbox, where it steps whenever there is something to
        do, so that no other one ever waits for a step; ``None`` lets any thread.
        """
        # True while the bookkeeping changes. A thread that takes the lock and finds it True knows
        # that an interrupt cut a change in the middle.
        self._is_torn = False

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
            PromptTooLongError: the budget can never hold the prompt; the message has the numbers.
        """
        request_id = check_request_id(request_id)
        priority, cache_salt = check_priority(priority), check_cache_salt(cache_salt)
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"[engine] params must be SamplingParams, got {type(params).__name__}")
        token_rules = read_token_rules(params, self.tokenizer, self.runner.vocab_size)
        text, token_ids = read_prompt(prompt, self.tokenizer, self.runner.vocab_size)
        if params.structured_outputs is not None:
            grammar = self._grammars.compile(params.structured_outputs)
            token_rules = token_rules._replace(grammar=grammar)
        seed = self._seeds.getrandbits(63) if params.seed is None else int(params.seed)
        request = Request(
            request_id,
            token_ids,
            params,
            seed=seed,
            priority=priority,
            cache_salt=cache_salt,
            token_rules=token_rules,
        )
        self.scheduler.check(request)
        state = RequestState(request, text, self.tokenizer, self._special_token_ids)
        if self._states.setdefault(request_id, state) is not state:
            raise ValueError(f"[engine] request {request_id!r} exists already")
        self._inbox.append(partial(self.scheduler.add, request))
        self._read_inbox_if_idle()

    def prepare(self, params: SamplingParams) -> None:
        """Do what takes long of ``add_request`` with these parameters, so that it is fast when it
        is called: compile their ``structured_outputs``.

        Raises:
            ArgumentError: as :meth:`add_request`.
        """
        if params.structured_outputs is not None:
            self._grammars.compile(params.structured_outputs)

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is, and give its blocks back: at once, or when the step that
        runs is done.

        Its output comes with the next step, with finish reason ``"abort"``. One that is unknown or
        done is left alone.
        """
        state = self._states.get(check_request_id(request_id))
        if state is not None:
            self._ask_to_abort(state)
            self._read_inbox_if_idle()

    def abort_all(self) -> None:
        """Abort every request that is there."""
        for state in list(self._states.values()):
            self._ask_to_abort(state)
        self._read_inbox_if_idle()

    def prompt_progress(self, request_id: str) -> tuple[int, int]:
        """How many tokens of a request's prompt have K/V, and how many it has; 0 while it waits."""
        state = self._states.get(check_request_id(request_id))
        if state is None:
            return 0, 0
        request = state.requests[0]
        starts = [
            part.start
            for step in list(self._in_flight)
            for part in step.batch.scheduled
            if part.request is request
        ]
        num_computed = min(request.num_computed_tokens, request.num_prompt_tokens, *starts)
        return num_computed, request.num_prompt_tokens

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
        """Whether :meth:`step` has something to do or to report."""
        return bool(self._states)

    # The thread that steps

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the outputs that changed. Those that have the answer so far grow
        with further steps.
        """
        self._refuse_reentry("step")
        with self._step_lock: outputs = self._step()  # noqa: E701  # fmt: skip
        self._read_inbox_if_idle()
        return self._handed_over(outputs)

    @property
    def prefix_history(self) -> PrefixHistory:
        """Why the prefix cache did not hold more of the last prompts."""
        return self.scheduler.prefix_history

    def shrink(self) -> int:
        """Give back K/V memory that no running request needs; returns the bytes. What is cached
        there is forgotten.
        """
        self._refuse_reentry("shrink")
        with self._step_lock: return self._changed(self._shrink)  # noqa: E701  # fmt: skip

    def reset_prefix_cache(self) -> bool:
        """Forget all cached K/V; False, and nothing has changed, while requests run."""
        self._refuse_reentry("reset_prefix_cache")
        reset = self.cache.manager.reset_prefix_cache
        with self._step_lock: return self._changed(reset)  # noqa: E701  # fmt: skip

    def stats(self) -> EngineStats:
        """What is held, running and waiting; from any thread."""
        latencies = self.latencies
        return EngineStats(
            **asdict(self.cache.manager.stats()),
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_preemptions=self.scheduler.num_preemptions,
            num_drafted_tokens=self.scheduler.num_drafted_tokens,
            num_accepted_tokens=self.scheduler.num_accepted_tokens,
            num_prompt_tokens=int(latencies.prompt_tokens.sum),
            num_cached_prompt_tokens=latencies.num_cached_prompt_tokens,
            num_generation_tokens=latencies.num_generation_tokens,
            num_finished=dict(latencies.num_finished),
            num_steps=latencies.iteration_tokens.count,
            busy_seconds=latencies.busy_seconds,
            num_swapped_tokens=self.swap_space.num_used_tokens,
            nbytes_held=self.cache.nbytes_held,
            nbytes_budget=self.cache.config.nbytes,
        )

    def view(self) -> EngineView:
        """The pool, block by block, and the requests; from any thread. It takes a millisecond for
        some 15,000 blocks.
        """
        return view_of(self.cache.manager, self._states)

    # Inside

    def _refuse_reentry(self, name: str) -> None:
        if self._step_lock.locked() and self._changing_thread == threading.get_ident():
            raise RuntimeError(
                f"[engine] {name} was called from inside a step; only add_request and abort may be"
            )

    def _read_inbox_if_idle(self) -> None:
        # A thread that steps reads the inbox once more when it is done, so nothing stays in it. If
        # another thread begins to step just now, this one waits for that step.
        if self.stepping_thread not in (None, threading.get_ident()):
            return
        while (self._inbox or self._is_torn) and not self._step_lock.locked():
            with self._step_lock: self._changed(self._read_inbox)  # noqa: E701  # fmt: skip

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Change the bookkeeping, with the lock; what an interrupt cut is repaired first."""
        self._changing_thread = threading.get_ident()
        try:
            if self._is_torn:
                self._repair()
            self._is_torn = True
            yield
            self._is_torn = False
        finally:
            self._changing_thread = None

    def _changed(self, change: Callable[[], T]) -> T:
        with self._change():
            return change()

    def _repair(self) -> None:
        """Start over from what no interrupt can tear: the requests, and what was reported of each.

        Cached K/V are lost, and what runs is computed again.
        """
        self.cache.reset()
        self._in_flight.clear()
        self._suspects.clear()
        states = list(self._states.values())
        self.scheduler.restart([request for state in states for request in state.restore()])
        for state in states:
            if state.is_aborted:
                self._abort(state)
        self._to_report = {
            state.output.request_id: None for state in states if state.output.finished
        }

    def _read_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _ask_to_abort(self, state: RequestState) -> None:
        # The state and not its id: a later request may have the same id.
        state.is_aborted = True
        self._inbox.append(partial(self._abort, state))

    def _shrink(self) -> int:
        self._land()  # It may write to the memory that is given back.
        return self.cache.shrink()

    def _abort(self, state: RequestState) -> None:
        for request in state.requests:
            self._finish(request, "abort")

    def _step(self) -> list[RequestOutput]:
        begin = time.perf_counter()
        with self._change():
            self._read_inbox()
            steps = self._in_flight
            if not steps:
                self._launch(self.scheduler.schedule(only=self._next_suspect()))
                self._sample()
            if steps and self._may_launch_ahead(steps[0]):
                self._launch(self.scheduler.schedule_ahead(steps[0].sampled.requests))
            self._land()
            self._sample()
            if steps and all(request.is_finished for request in steps[0].batch.requests):
                self._land()  # Nobody asks for it any more.
            self._read_inbox()
            if not self.scheduler.requests and not self._to_report:
                self._pick_up_lost()
            return self._take_reports(begin)

    def _may_launch_ahead(self, step: StepInFlight) -> bool:
        """Whether the next step is planned before this one is read."""
        return (
            self.run_ahead
            and not self._suspects
            and not step.batch.drafted
            and not self.scheduler.expects_drafts()
        )

    def _launch(self, batch: Batch | None) -> None:
        """Begin to compute a step, behind the one in flight if there is one."""
        if batch is None:
            return
        for request in batch.finished:
            self._report(request)
        for request in batch.begun:
            request.first_scheduled_time = time.perf_counter()
        if not batch.scheduled:
            # Nobody will copy what was to be swapped out, and a suspect had no room.
            self.scheduler.discard(batch)
            if self._suspects:
                self._suspects.popleft()
            return
        awaited = self._in_flight[0].sampled if self._in_flight else NO_TOKENS
        step = StepInFlight(batch)
        self._in_flight.append(step)
        with self._device_work():
            step.logits = self.runner.launch(batch, awaited)

    def _sample(self) -> None:
        """Begin to sample the tokens of the newest step, from tokens that are known."""
        if not self._in_flight:
            return
        step = self._in_flight[-1]
        rows, requests, num_before = self._completions(step.batch)
        with self._device_work():
            step.sampled = sample(step.logits, rows, requests, num_before)
            step.scored = score_prompts(step.logits, step.batch.scheduled)
        for request in step.sampled.requests:
            if request.seq_id not in self.scheduler.requests:
                state = self._states[request.request_id]
                self.scheduler.add_fork(state.requests[0], request)
                state.requests.append(request)
                step.forks.append(request)

    def _land(self) -> None:
        """Wait for the oldest step in flight, and append its tokens."""
        if not self._in_flight:
            return
        step = self._in_flight[0]
        with self._device_work():
            results = step.sampled.read()
            scores = [(prompt.request, prompt.read()) for prompt in step.scored]
            # A chunk of a prompt has no tokens to wait for. What no step follows leaves nothing
            # lazy: another thread could not evaluate it, and a reader in flight would make each
            # donated write copy a slab.
            mx.eval(step.logits, self.cache.arrays if len(self._in_flight) == 1 else ())
        if not self._in_flight:
            return  # It failed.
        drafted = step.batch.drafted
        if drafted and not self._verify(step, drafted, results):
            return
        self._in_flight.popleft()
        self.latencies.iteration_tokens.observe(step.batch.num_tokens)
        for request, entries in scores:
            if not request.is_finished:
                self._states[request.request_id].add_prompt_logprobs(request, entries)
        verified = {part.request for part in drafted}
        for request, result in zip(step.sampled.requests, results, strict=True):
            if request not in verified:
                self._take(request, result)

    def _verify(
        self,
        step: StepInFlight,
        drafted: Sequence[Scheduled],
        results: Sequence[SampledToken | Exception],
    ) -> bool:
        """Append the tokens of requests with drafts, as far as they go on with them; False if the
        step failed meanwhile.

        What reads the tokens before it (penalties, processors, samplers of the request's own) is
        drawn token by token, when these are known.
        """
        known: dict[Request, list[SampledToken | Exception]] = {}
        for request, result in zip(step.sampled.requests, results, strict=True):
            known.setdefault(request, []).append(result)
        for part in drafted:
            request, num_accepted = part.request, 0
            if request.is_finished:
                continue  # Since it was launched.
            drawn, drafts = known[request], self.scheduler.speculation.made(part)
            self.scheduler.begin_verification(part)
            for number in range(part.num_logit_rows):
                if number == len(drawn):
                    row = step.first_row_of(part) + number
                    with self._device_work():
                        drawn += sample(step.logits, [row], [request]).read()
                    if not self._in_flight:
                        return False
                result = drawn[number]
                is_accepted = (
                    number < len(drafts)
                    and isinstance(result, SampledToken)
                    and result.token_id == drafts[number]
                )
                if is_accepted:
                    self.scheduler.accept_draft(request)
                    num_accepted += 1
                self._take(request, result)
                if not is_accepted or request.is_finished:
                    break
            self.scheduler.end_verification(part, num_accepted)
        return True

    def _take(self, request: Request, result: SampledToken | Exception) -> None:
        if isinstance(result, SampledToken):
            self._append(request, result)
        else:
            self._finish(request, "error", result)

    @contextmanager
    def _device_work(self) -> Iterator[None]:
        """Run a part of a step that changes no bookkeeping. If it raises, no step in flight
        happened.
        """
        try:
            yield
        except Exception as error:
            self._blame(error)
        except BaseException:
            self._take_back()
            self._is_torn = False
            raise

    def _pick_up_lost(self) -> None:
        """Take on requests that an interrupt kept from the inbox, or from being reported."""
        for state in list(self._states.values()):
            for request in state.requests:
                self.scheduler.add(request)
            if state.is_aborted:
                self._abort(state)
            if state.output.finished:
                self._report(state.requests[0])

    def _blame(self, error: Exception) -> None:
        """Fail a request that ran alone; run several again one by one, to see which fails. One that
        ran with drafts, which it did not ask for, runs again without.
        """
        steps = list(self._in_flight)
        suspects = {
            request: request.num_computed_tokens
            for step in steps
            for request in step.batch.requests
            if not request.is_finished
        }
        self._take_back()
        if len(steps) == len(suspects) == 1 and not steps[0].batch.drafted:
            self._finish(steps[0].batch.requests[0], "error", error)
        else:
            self._suspects.extend(suspects.items())

    def _take_back(self) -> None:
        """Undo the steps in flight, the newest first."""
        while self._in_flight:
            step = self._in_flight.pop()
            for request in step.sampled.requests:
                self.scheduler.forget_token(request)
            for fork in step.forks:
                if not fork.is_finished:
                    self.scheduler.finish(fork, "abort")
                    self._states[fork.request_id].requests.remove(fork)
            self.scheduler.discard(step.batch)
        self.cache.close_step()
        try:
            # What it wrote is not needed, but the slabs depend on it, and another thread could not
            # evaluate them.
            mx.eval(self.cache.arrays)
        except Exception:
            # This thread can't either: without new slabs, every later step would fail.
            self._repair()

    def _next_suspect(self) -> Request | None:
        while self._suspects:
            request, num_tokens = self._suspects[0]
            if not request.is_finished and request.num_computed_tokens < num_tokens:
                return request
            self._suspects.popleft()
        return None

    def _completions(self, batch: Batch) -> tuple[list[int], list[Request], list[int]]:
        """The row of logits and the request of each token that this step samples, and how many
        drafts stand before it.

        A request for several completions is forked when its prompt is computed; they share a row.
        """
        rows: list[int] = []
        requests: list[Request] = []
        num_before: list[int] = []
        first_row = 0
        for part in batch.scheduled:
            request, num_rows = part.request, part.num_logit_rows - part.num_scored_rows
            first_row += part.num_scored_rows
            if num_rows and not request.is_finished:
                if num_rows > 1 and state_of(request, self.runner.vocab_size).draws_rows_together:
                    rows += range(first_row, first_row + num_rows)
                    requests += [request] * num_rows
                    num_before += range(num_rows)
                else:
                    rows += [first_row] * request.num_seqs
                    requests += [request, *map(request.fork, range(1, request.num_seqs))]
                    num_before += [0] * request.num_seqs
            first_row += num_rows
        return rows, requests, num_before

    def _append(self, request: Request, sampled: SampledToken) -> None:
        if request.is_finished:
            return  # Since it was sampled.
        ahead = self._in_flight[0].batch if self._in_flight else None
        self.scheduler.append_token(request, sampled.token_id, ahead)
        stop_text = None
        try:
            stop_text = self._states[request.request_id].add_token(request, sampled)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the panics of tokenizers in Rust are no Exception
            # It fails its own request, even where this token was the last one.
            forget_frames(error, "In a step of the engine")
            self.scheduler.finish(request, "error")
            request.finish_reason, request.stop_reason = "error", None
            request.error = request_error(error)
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
        self._to_report[request.request_id] = None

    def _take_reports(self, begin: float) -> list[RequestOutput]:
        states = [self._states[name] for name in self._to_report if name in self._states]
        now = time.perf_counter()
        self.latencies.busy_seconds += now - begin
        for state in states:
            state.note_reported(self.latencies, now)
        # Finished requests are reported again if an interrupt comes before they are handed over.
        self._to_report = {
            state.output.request_id: None for state in states if state.output.finished
        }
        return [state.output for state in states]

    def _handed_over(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Forget the finished requests and return the outputs: an interrupt comes before both or
        after.
        """
        finished = [output.request_id for output in outputs if output.finished]
        for request_id in finished:
            self._to_report.pop(request_id, None)
        handed_over, told = self._by_kind(outputs)
        # Calls without a line of Python in them, and on the line that returns.
        changes = itertools.chain(
            map(self._told.__setitem__, told, told.values()),
            map(self._told.pop, finished, itertools.repeat(None)),
            map(self._states.pop, finished, itertools.repeat(None)),
        )
        deque(changes, maxlen=0); return handed_over  # noqa: E702  # fmt: skip

    def _by_kind(
        self, outputs: list[RequestOutput]
    ) -> tuple[list[RequestOutput], dict[str, list[Told]]]:
        """The outputs as each request wants them, and what the readers of those that want only
        what is new know then. Changes nothing.
        """
        told: dict[str, list[Told]] = {}
        wanted: list[RequestOutput] = []
        for output in outputs:
            kind = self._states[output.request_id].output_kind
            if kind is RequestOutputKind.CUMULATIVE:
                wanted.append(output)
            elif kind is RequestOutputKind.DELTA:
                name = output.request_id
                part, told[name] = new_part(output, self._told.get(name) or nothing_told(output))
                wanted.append(part)
            elif output.finished:
                wanted.append(output)
        return wanted, told
