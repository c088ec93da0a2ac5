"""``Engine``: many requests on one model and one KV cache, step by step."""

from __future__ import annotations

import contextlib
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import TypeVar, Unpack

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.block_store.writer import SECONDS_AT_EXIT
from mlx_paged.cache import ContiguousKVCache
from mlx_paged.config import DEFAULT_KV
from mlx_paged.core import KVCacheManager, SequenceStates, hash_token_blocks
from mlx_paged.distributed import RanksError
from mlx_paged.domains import BOOL
from mlx_paged.engine.disk_tier import DiskTier, open_disk_tier
from mlx_paged.engine.draft_model import DraftModel
from mlx_paged.engine.draft_options import (
    check_draft_model,
    num_parameters_of,
    speculation_of,
)
from mlx_paged.engine.fit import warn_unless_it_fits
from mlx_paged.engine.following import FollowingLoop, share
from mlx_paged.engine.grammar import GrammarCompiler
from mlx_paged.engine.held_prompts import HeldPrompt, check_begins_with_held
from mlx_paged.engine.joining import check_steps_are_alike, join_ranks, least_budget, replicas_of
from mlx_paged.engine.latencies import Latencies
from mlx_paged.engine.model_runner import ModelRunner
from mlx_paged.engine.options import (
    checked_options,
    passed_on_names,
    split_options,
    tier_of,
)
from mlx_paged.engine.prefix_history import PrefixHistory
from mlx_paged.engine.prompts import Prompt, as_tokenizer, read_prompt
from mlx_paged.engine.recurrent_state import check_speculation, room_for_states
from mlx_paged.engine.replicas import Call
from mlx_paged.engine.reports import Reports
from mlx_paged.engine.request_state import RequestState
from mlx_paged.engine.scheduler import Scheduler, extra_hash_keys
from mlx_paged.engine.snapshots import Prefix, Snapshots
from mlx_paged.engine.stats import EngineStats
from mlx_paged.engine.steps import RowReader, Steps
from mlx_paged.engine.swap_space import SwapSpace, num_swap_blocks
from mlx_paged.engine.token_rules import read_token_rules, special_token_ids
from mlx_paged.engine.token_texts import TokenTexts
from mlx_paged.engine.view import EngineView, view_of
from mlx_paged.engine_options import EngineOptions
from mlx_paged.errors import ArgumentError
from mlx_paged.foreign_arguments import argument_names, refuses_unknown_arguments
from mlx_paged.memory import hold_wired_limit, read_wired_limit
from mlx_paged.models.context_length import context_length, context_limit
from mlx_paged.models.identity import identities_of
from mlx_paged.models.kv_cache import kv_budget, make_kv_cache, weight_nbytes
from mlx_paged.models.language_model import check_model
from mlx_paged.models.traffic import sent_bytes_per_token
from mlx_paged.request import (
    PRIORITY,
    REQUEST_ID,
    Request,
    RequestOutput,
    TokenRules,
    check_cache_salt,
)
from mlx_paged.sampling_params import SamplingParams

T = TypeVar("T")


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
        model: as :func:`mlx_paged.load` returns it.
        tokenizer: for text prompts, text out, stop texts and the end of sequence; ``None`` is token
            ids only.
        draft_model: a small model of the same vocabulary that makes the drafts.
        options: keyword arguments of :class:`EngineOptions`, of which each says what it does.

    Raises:
        ValueError: a setting out of its range, or a budget that holds no block.
        TypeError: an unknown argument; the message says what to use instead.
    """

    @refuses_unknown_arguments("engine", also=passed_on_names)
    def __init__(
        self,
        model: Module,
        tokenizer: TokenizerWrapper | None = None,
        *,
        draft_model: Module | None = None,
        **options: Unpack[EngineOptions],
    ):
        # What stays with each rank, and need not be alike.
        wired_limit = options.pop("wired_limit", None)
        own = {"seed": options.pop("seed", None), "run_ahead": options.pop("run_ahead", None)}
        seed, run_ahead = checked_options("engine", own).values()
        max_model_len, swap_bytes = options.get("max_model_len"), options.get("swap_bytes")
        checked, kv = check_model(model), options.get("kv", DEFAULT_KV)
        window = options.get("window")
        self.max_model_len = context_limit(checked.args, max_model_len, window)
        draft = check_draft_model(draft_model, checked, kv)
        cache_options, config = split_options(options, self.max_model_len, draft is not None)
        check_speculation(checked, draft, config.num_draft_tokens)
        tier = tier_of(options, config, checked)
        if tokenizer is not None:
            tokenizer = as_tokenizer(tokenizer)
        wired_nbytes = read_wired_limit(wired_limit)
        self.ranks = join_ranks(
            checked,
            tokenizer,
            {
                **options,
                "draft_model": draft,
                "max_model_len": self.max_model_len,
                "swap_bytes": swap_bytes,
            },
        )
        if self.ranks is not None:
            cache_options["kv_cache_bytes"] = least_budget(
                self.ranks, cache_options.get("kv_cache_bytes"), checked
            )
        # Steps may be another thread's, which can't evaluate what this one left lazy: parameters,
        # and frequencies of RoPE, which are none.
        for each in (model, draft or ()):
            leaves = dict(tree_flatten(each)).values()
            mx.eval([leaf for leaf in leaves if isinstance(leaf, mx.array)])
        self._sent_bytes_per_token = sent_bytes_per_token(checked)
        self.model = model
        self.tokenizer = tokenizer
        room = None
        if checked.state_nbytes:
            budget = kv_budget(cache_options.get("kv_cache_bytes"), model)
            room = room_for_states(checked, config, budget)
            config = replace(config, max_num_seqs=room.max_num_seqs)
            cache_options["kv_cache_bytes"] = room.kv_cache_bytes
        self.cache = make_kv_cache(model, kv, draft_model=draft_model, **cache_options)
        states = None if room is None else SequenceStates(room.num_checkpoints)
        self.manager = KVCacheManager(self.cache.pool, self.cache.config.retentions, states)
        self.run_ahead = self.cache.can_run_ahead if run_ahead is None else run_ahead
        num_parameters = num_parameters_of(model)
        # All weights are read for it: once, and only if it is asked for.
        identities = cache(lambda: identities_of(checked, draft))
        self.disk_tier: DiskTier | None = None
        if tier is not None:
            self.disk_tier = open_disk_tier(tier, self.cache, identities, num_parameters)
            # With its cache it lives as long as this engine. Python's end closes it.
            weakref.finalize(self, self.disk_tier.let_go).atexit = False
        self.swap_space = SwapSpace(
            num_swap_blocks(swap_bytes, self.cache, num_parameters),
            -(-self.cache.config.state_nbytes // self.cache.config.nbytes_per_block),
        )
        drafter = None if draft is None else DraftModel(draft, self.cache, self.manager)
        self.runner = ModelRunner(model, self.cache, self.manager, self.swap_space, drafter)
        if self.ranks is not None:
            check_steps_are_alike(self.ranks, self.cache, self.run_ahead)
            self.cache.all_can = self.ranks.all_can
            # The first replay of a trace is held against a decode that is built. A rank where that
            # differs would compute other sums from then on than those where it does not.
            self.runner.compiled_decode = None
        eos_token_ids: Iterable[int] = () if tokenizer is None else tokenizer.eos_token_ids
        speculation = speculation_of(config.num_draft_tokens, checked, drafter, self.run_ahead)
        self.scheduler = Scheduler(
            self.manager,
            self.cache,
            config,
            frozenset(eos_token_ids),
            self.swap_space,
            speculation,
            self.disk_tier,
            None if window is not None else context_length(checked.args),
            self.cache if isinstance(self.cache, ContiguousKVCache) else None,
        )
        warn_unless_it_fits(
            weight_nbytes(model, draft_model),
            self.cache,
            self.manager,
            self.max_model_len,
            has_default_budget=options.get("kv_cache_bytes") is None,
        )
        self._snapshots = Snapshots(
            model,
            identities,
            self.cache,
            self.manager,
            draft is not None,
            config.enable_prefix_caching,
            self.ranks,
        )
        self.latencies = Latencies(self.max_model_len)
        self.token_texts = None if self.tokenizer is None else TokenTexts(self.tokenizer)
        self._special_token_ids = special_token_ids(tokenizer)
        self._grammars = GrammarCompiler(tokenizer, self.runner.vocab_size)
        self._seeds = random.Random(seed)
        self._reports = Reports(self.latencies)
        self._steps = Steps(
            self.runner,
            self.scheduler,
            self._reports,
            self.latencies,
            self.run_ahead,
            replicas_of(self.ranks, self.run_ahead),
            self.disk_tier,
        )
        # What other threads ask for goes through the inbox, which is emptied whenever no step runs.
        self._inbox: deque[Callable[[], None]] = deque()
        # Held by the thread that changes the scheduler, the cache or a state. Wherever it is taken,
        # ``with`` and its body stand on one line, so that no interrupt can come between two lines
        # of ours while the lock is held and nothing would release it.
        self._step_lock = threading.Lock()
        self._changing_thread: int | None = None
        self._release_wired_limit = hold_wired_limit(wired_nbytes)
        weakref.finalize(self, self._release_wired_limit).atexit = False
        self.stepping_thread: int | None = None
        """The thread that alone empties the inbox, where it steps whenever there is something to
        do, so that no other one ever waits for a step; ``None`` lets any thread.
        """

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
        no_store: bool = False,
        token_rules: TokenRules | None = None,
    ) -> None:
        """Queue a request; the next steps work on it.

        Args:
            prompt: text, token ids, or vLLM's dicts ``{"prompt": text}`` and ``{"prompt_token_ids":
                ids}``.
            params: how to sample; greedy by default.
            priority: orders the queue, lower first, as in vLLM; see :class:`Scheduler` for how
                much. It interrupts no running request.
            cache_salt: only requests with the same salt share K/V.
            no_store: write none of its K/V to ``cache_dir``; what lies there is still used.
            token_rules: what :meth:`prepare` returned for these parameters. By default they are
                prepared here.

        Raises:
            ValueError: an empty prompt, a token id that the model does not have, a request id that
                is in use, or parameters that can't be met.
            PromptTooLongError: the budget can never hold the prompt; the message has the numbers.
        """
        self._refuse_on_followers("add_request")
        request_id = REQUEST_ID.check("engine", "request_id", request_id)
        priority = PRIORITY.check("engine", "priority", priority)
        cache_salt = check_cache_salt(cache_salt)
        no_store = BOOL.check("engine", "no_store", no_store)
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ArgumentError(
                f"[engine] params must be SamplingParams, got {type(params).__name__}"
            )
        if token_rules is None:
            token_rules = self.prepare(params)
        text, token_ids = read_prompt(prompt, self.tokenizer, self.runner.vocab_size)
        if num_held := self.swap_space.num_held_tokens(cache_salt):
            check_begins_with_held(token_ids, num_held, params)
            no_store = True  # Nobody would find it.
        seed = self._seeds.getrandbits(63) if params.seed is None else int(params.seed)
        request = Request(
            request_id,
            token_ids,
            params,
            seed=seed,
            priority=priority,
            cache_salt=cache_salt,
            no_store=no_store,
            token_rules=token_rules,
        )
        self.scheduler.check(request)
        state = RequestState(request, text, self.token_texts, self._special_token_ids)
        if self._reports.states.setdefault(request_id, state) is not state:
            raise ArgumentError(f"[engine] request {request_id!r} exists already")
        self._inbox.append(partial(self._steps.add, state))
        self._read_inbox_if_idle()

    def prepare(self, params: SamplingParams) -> TokenRules:
        """Do what may take long of ``add_request`` with these parameters, and return what it takes
        as ``token_rules``: check their token ids, encode their words and compile their grammar.

        Raises:
            ArgumentError: as :meth:`add_request`.
        """
        token_rules = read_token_rules(params, self.tokenizer, self.runner.vocab_size)
        if params.structured_outputs is None:
            return token_rules
        return token_rules._replace(grammar=self._grammars.compile(params.structured_outputs))

    def check_structured_outputs(self) -> None:
        """Raise ``ArgumentError`` where no request can have ``structured_outputs``: without
        llguidance, or without a tokenizer that it can read.
        """
        self._grammars.read_vocabulary()

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is, and give its blocks back: at once, or when the step that
        runs is done.

        Its output comes with the next step, with finish reason ``"abort"``. One that is unknown or
        done is left alone.
        """
        state = self._reports.states.get(REQUEST_ID.check("engine", "request_id", request_id))
        if state is not None:
            self._ask_to_abort(state)
            self._read_inbox_if_idle()

    def abort_all(self) -> None:
        """Abort every request that is there."""
        for state in list(self._reports.states.values()):
            self._ask_to_abort(state)
        self._read_inbox_if_idle()

    def prompt_progress(self, request_id: str) -> tuple[int, int]:
        """How many tokens of a request's prompt have K/V, and how many it has; 0 while it waits."""
        state = self._reports.states.get(REQUEST_ID.check("engine", "request_id", request_id))
        if state is None:
            return 0, 0
        request = state.requests[0]
        starts = [
            part.start
            for step in list(self._steps.in_flight)
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
        computed = self.manager.get_computed_blocks(block_hashes, len(token_ids) + 1)
        return [block.block_id for block in computed.blocks]

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has something to do or to report."""
        return bool(self._reports.states)

    # The thread that steps

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the outputs that changed. Those that have the answer so far grow
        with further steps.
        """
        self._refuse_on_followers("step")
        self._refuse_reentry("step")
        with self._step_lock: states = self._step()  # noqa: E701  # fmt: skip
        self._read_inbox_if_idle()
        return self._reports.hand_over(states)

    def read_rows(self, reader: RowReader | None) -> None:
        """Have ``reader`` called with the row of logits behind each token that is appended from now
        on, in the thread that steps; ``None`` ends it.

        Args:
            reader: called with the :class:`Request`, the number of the token in its answer, from 1,
                and the logits ``[vocab_size]`` that it was drawn from: after penalties, masks and
                the request's processors, before temperature, filters and its sampler. Must not
                raise. After an interrupt, a token may come twice. On rank 0 alone.
        """
        self._steps.row_reader = reader

    @property
    def prefix_history(self) -> PrefixHistory:
        """Why the prefix cache did not hold more of the last prompts."""
        return self.scheduler.prefix_history

    def shrink(self) -> int:
        """Give back K/V memory that no running request needs; returns the bytes. What is cached
        there is forgotten.
        """
        self._refuse_reentry("shrink")
        shrink = partial(self._on_all_ranks, "shrink", self._shrink)
        with self._step_lock: return self._changed(shrink)  # noqa: E701  # fmt: skip

    def reset_prefix_cache(self) -> bool:
        """Forget all cached K/V; False, and nothing has changed, while requests run."""
        self._refuse_reentry("reset_prefix_cache")
        reset = partial(self._on_all_ranks, "reset_prefix_cache", self.scheduler.reset_prefix_cache)
        with self._step_lock: return self._changed(reset)  # noqa: E701  # fmt: skip

    def save_snapshot(
        self, path: str | Path, token_ids: Sequence[int], *, cache_salt: str | None = None
    ) -> int:
        """Write the K/V of a conversation to a file; returns of how many of its tokens. Arguments
        and errors: :meth:`Snapshots.save`.
        """
        return self._read(partial(self._snapshots.save, path, token_ids, cache_salt))

    def load_snapshot(self, path: str | Path, *, cache_salt: str | None = None) -> list[int]:
        """Put the K/V of a file into the prefix cache; returns its token ids. Requests whose
        prompts begin with them find them. Arguments and errors: :meth:`Snapshots.open`.
        """
        return self._put(self._snapshots.open(path, cache_salt))

    def export_prompt_cache(
        self,
        path: str | Path,
        token_ids: Sequence[int],
        *,
        cache_salt: str | None = None,
        model_name: str | None = None,
    ) -> int:
        """Write the K/V of a conversation as mlx-lm's own prompt cache; returns of how many of its
        tokens. The rest of them is mlx-lm's prompt. Arguments and errors:
        :meth:`Snapshots.export_prompt_cache`.
        """
        export = self._snapshots.export_prompt_cache
        return self._read(partial(export, path, token_ids, cache_salt, model_name))

    def import_prompt_cache(
        self,
        path: str | Path,
        token_ids: Sequence[int] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[int]:
        """Put the K/V of a prompt cache of mlx-lm's into the prefix cache; returns its token ids.
        Arguments and errors: :meth:`Snapshots.open_prompt_cache`.
        """
        return self._put(self._snapshots.open_prompt_cache(path, token_ids, cache_salt))

    def hold_prompt_cache(self, path: str | Path) -> HeldPrompt:
        """Hold the K/V of a prompt cache of mlx-lm's that does not say its tokens, for requests
        that begin with ``held.token_ids`` and have ``held.cache_salt``. They stay in host memory as
        long as the engine. Errors: :meth:`Snapshots.hold_prompt_cache`.
        """
        return self._snapshots.hold_prompt_cache(path, self.swap_space)

    def _read(self, call: Callable[[], T]) -> T:
        """Call what reads K/V, between two steps: an interrupt tears nothing in it."""
        self._refuse_reentry("a snapshot")
        with self._step_lock: self._changed(self._steps.process_output); return call()  # noqa: E701, E702  # fmt: skip

    def _put(self, prefix: Prefix) -> list[int]:
        """Put K/V into the prefix cache, between two steps."""
        self._refuse_reentry("a snapshot")
        put = partial(self._snapshots.put, self._steps.process_output, prefix)
        with self._step_lock: error = self._changed(put)  # noqa: E701  # fmt: skip
        if error is not None:
            raise error
        return prefix.token_ids

    def save_more(self) -> bool:
        """Copy more blocks out to ``cache_dir``, while no request runs; whether some are left that
        had to wait for the disk. Steps do so by themselves.
        """
        if self.disk_tier is None:
            return False
        self._refuse_reentry("save_more")
        with self._step_lock: return self._changed(self.disk_tier.save_more)  # noqa: E701  # fmt: skip

    def close(self, timeout: float = SECONDS_AT_EXIT) -> bool:
        """Write to ``cache_dir`` what is to be kept, for ``timeout`` seconds at most, and use it no
        more; whether all was written. No memory stays wired for this engine. Without it, the end of
        the engine or of Python does this.
        """
        self._release_wired_limit()
        if self.disk_tier is None:
            return True
        self._refuse_reentry("close")
        close = partial(self.disk_tier.close, timeout)
        with self._step_lock: return self._changed(close)  # noqa: E701  # fmt: skip

    def stats(self) -> EngineStats:
        """What is held, running and waiting; from any thread."""
        latencies = self.latencies
        return EngineStats(
            **asdict(self.manager.stats()),
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_preemptions=self.scheduler.num_preemptions,
            num_drafted_tokens=self.scheduler.num_drafted_tokens,
            num_accepted_tokens=self.scheduler.num_accepted_tokens,
            num_prompt_tokens=int(latencies.prompt_tokens.sum),
            num_cached_prompt_tokens=latencies.num_cached_prompt_tokens,
            num_read_prompt_tokens=latencies.num_read_prompt_tokens,
            num_generation_tokens=latencies.num_generation_tokens,
            num_finished=dict(latencies.num_finished),
            num_steps=latencies.iteration_tokens.count,
            busy_seconds=latencies.busy_seconds,
            num_swapped_tokens=self.swap_space.num_used_tokens,
            nbytes_held=self.cache.nbytes_held,
            nbytes_budget=self.cache.config.nbytes,
            nbytes_sent=self._nbytes_sent(),
            disk_tier=None if self.disk_tier is None else self.disk_tier.stats(),
        )

    def view(self) -> EngineView:
        """The pool, block by block, and the requests; from any thread. It takes a millisecond for
        some 15,000 blocks.
        """
        return view_of(self.manager, self._reports.states)

    # Several ranks

    def share(self, call: Callable[[], T]) -> T:
        """What ``call`` returns on rank 0, on every rank. It is called there alone; the other ranks
        take part in the steps that it runs, and raise what it raises.

        Raises:
            RanksError: on the other ranks, if rank 0 ends before it returns.
        """
        if self.ranks is None:
            return call()
        if self.ranks.is_leader:
            return share(self.ranks, call)
        following = FollowingLoop(
            self.ranks,
            self._steps,
            self.scheduler,
            self._reports,
            self.token_texts,
            self._special_token_ids,
            {"shrink": self._shrink, "reset_prefix_cache": self.scheduler.reset_prefix_cache},
        )
        shared = following.run()
        if shared.error is not None:
            raise shared.error
        value: T = shared.value
        return value

    def follow(self) -> None:
        """On a rank other than 0: take part in the steps of rank 0 until that ends."""
        with contextlib.suppress(RanksError):
            while True:
                self.share(lambda: None)

    def _refuse_on_followers(self, name: str) -> None:
        if self.ranks is not None and not self.ranks.is_leader:
            raise RuntimeError(
                f"[engine] {name} is for rank 0, and this is rank {self.ranks.rank}, which follows "
                "it: call follow or share here"
            )

    def _on_all_ranks(self, name: str, call: Callable[[], T]) -> T:
        if self.ranks is not None and self.ranks.is_leader:
            self.ranks.tell(Call(name))
        return call()

    def _nbytes_sent(self) -> int:
        if self.ranks is None:
            return 0
        num_tokens = int(self.latencies.iteration_tokens.sum)
        return self.ranks.num_sent_bytes + num_tokens * self._sent_bytes_per_token

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
        while (self._inbox or self._steps.is_torn) and not self._step_lock.locked():
            with self._step_lock: self._changed(self._read_inbox)  # noqa: E701  # fmt: skip

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Change the bookkeeping, with the lock."""
        self._changing_thread = threading.get_ident()
        try:
            with self._steps.change():
                yield
        finally:
            self._changing_thread = None

    def _changed(self, change: Callable[[], T]) -> T:
        with self._change():
            return change()

    def _read_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _ask_to_abort(self, state: RequestState) -> None:
        # The state and not its id: a later request may have the same id.
        state.is_aborted = True
        self._inbox.append(partial(self._steps.abort, state))

    def _shrink(self) -> int:
        self._steps.process_output()  # It may write to the memory that is given back.
        return self.cache.shrink()

    def _step(self) -> list[RequestState]:
        begin = time.perf_counter()
        with self._change():
            self._read_inbox()
            self._steps.run()
            self._read_inbox()
            if not self.scheduler.requests and not self._reports:
                self._steps.pick_up_lost()
            states = self._reports.take()
            self.latencies.busy_seconds += time.perf_counter() - begin
            return states
