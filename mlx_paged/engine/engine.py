"""``Engine``: many requests on one model and one KV cache, step by step."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias, TypeVar, Unpack

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.block_store.worker import SECONDS_AT_EXIT
from mlx_paged.core import hash_token_blocks
from mlx_paged.distributed import RanksError, as_json
from mlx_paged.engine.build import build
from mlx_paged.engine.input_processor import InputProcessor, Prompt
from mlx_paged.engine.options import split_own_options
from mlx_paged.engine.request import Request, TokenRules
from mlx_paged.engine.scheduling.prefix_cache import PrefixHistory, extra_hash_keys
from mlx_paged.engine.scheduling.step_budget import ChosenBudgets
from mlx_paged.engine.stats import EngineStats, EngineView, stats_of, view_of
from mlx_paged.engine.steps import RowReader
from mlx_paged.engine.storing.snapshots import Prefix
from mlx_paged.engine.thread import (
    EngineCall,
    EngineThread,
    ForkedError,
    random_key,
    run_in_engine_thread,
)
from mlx_paged.errors import REMOVED, AdapterError, ArgumentError, EngineStoppedError
from mlx_paged.models.adapters import Adapter, AdapterFiles
from mlx_paged.models.language_model import model_type_of
from mlx_paged.models.memory import acquire_cache_limit, acquire_wired_limit, read_wired_limit
from mlx_paged.options.argument_values import AT_LEAST_0
from mlx_paged.options.engine_options import EngineOptions
from mlx_paged.options.foreign_arguments import NoOptions, refuse_unknown
from mlx_paged.options.sampling_params import PoolingParams, SamplingParams
from mlx_paged.request import NAME, REQUEST_ID, RequestOutput

T = TypeVar("T")

# What a step in the engine's thread leaves to its caller: the call that makes its outputs, unless
# they are made, and the random key if functions of requests may have drawn.
_Stepped: TypeAlias = tuple[EngineCall[None] | None, int | None]


class Engine:
    """Runs requests together: they share a model, a pool of K/V blocks and the K/V of common
    prefixes::

        engine = Engine(model, tokenizer, kv_cache_bytes="2G")
        engine.add_request("a", "Once upon a time", SamplingParams(max_tokens=100))
        while engine.has_unfinished_requests():
            for output in engine.step():
                print(output.request_id, output.outputs[0].text)

    Steps and everything else that touches K/V run in the engine's own thread, one after another,
    while the caller waits; so Ctrl-C ends the wait at once and interrupts no step. Any thread may
    call. ``add_request`` and ``abort`` never wait for a step.

    Args:
        model: as :func:`mlx_paged.load` returns it.
        tokenizer: for text prompts, text output, stop texts and the end of sequence; with ``None``
            there are only token ids.
        draft_model: a small model with the same vocabulary, or a head of ``model``, that makes the
            drafts (``mlx_paged.loading.load_draft_model``).
        options: keyword arguments, documented in :class:`EngineOptions`.

    Raises:
        ValueError: a setting is out of its range, or the budget holds no block.
        TypeError: an argument is unknown; the message says what to use instead.
    """

    _new_thread: ClassVar[Callable[..., EngineThread]] = EngineThread

    def __init__(
        self,
        model: Module,
        tokenizer: TokenizerWrapper | None = None,
        *,
        draft_model: Module | None = None,
        **options: Unpack[EngineOptions],
    ):
        refuse_unknown(Engine, options, EngineOptions.__annotations__)
        own, options = split_own_options(options)
        wired_nbytes = read_wired_limit(own.wired_limit)
        _evaluate_arrays(model, draft_model)
        parts = run_in_engine_thread(partial(build, model, tokenizer, draft_model, options, own))
        self.model, self.tokenizer, self.max_model_len = model, parts.tokenizer, parts.max_model_len
        self.ranks, self.run_ahead = parts.ranks, parts.run_ahead
        self.cache, self.manager, self.runner = parts.cache, parts.manager, parts.runner
        self.disk_tier, self.swap_space = parts.disk_tier, parts.swap_space
        self.scheduler, self.steps, self.reports = parts.scheduler, parts.steps, parts.reports
        self.snapshots, self.latencies = parts.snapshots, parts.latencies
        self.adapters = parts.adapters
        self.nbytes_activations = parts.nbytes_activations
        self.input_processor = InputProcessor(self.tokenizer, self.runner.model, own.seed)
        decode = self.runner.compiled_decode
        self.thread = self._new_thread(forget=None if decode is None else decode.forget_traces)
        self._interrupted_step: EngineCall[_Stepped] | None = None  # its wait was interrupted
        self._ready: list[RequestOutput] = []
        self._calls_functions = False
        self._releases = [
            acquire_wired_limit(wired_nbytes),
            acquire_cache_limit(self.nbytes_activations),
            self.runner.matmul.acquire(),
        ]
        # These end with the engine; at the end of Python they do so by themselves.
        self._release_thread = weakref.finalize(self, self.thread.release)
        endings = [] if self.disk_tier is None else [self.disk_tier.finish]
        others = [weakref.finalize(self, end) for end in (*self._releases, *endings)]
        for finalizer in (self._release_thread, *others):
            finalizer.atexit = False
        if self.disk_tier is not None:
            self.disk_tier.is_in_use = self.thread.is_alive
        while self.adapters.first:
            self._load_adapter(self.adapters.first.pop(0))

    def __repr__(self) -> str:
        model, scheduler = self.runner.model, self.scheduler
        return (
            f"{type(self).__name__}({model.name or model_type_of(model)}, {self.cache!r}, "
            f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting)"
        )

    # Type checkers assume that a class with a __getattr__ has every attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if f"Engine.{name}" in REMOVED:
                text = f"Engine.{name} was removed: {REMOVED[f'Engine.{name}']}"
            raise AttributeError(text, name=name, obj=self)

    # From any thread

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        no_store: bool = False,
        user: str | None = None,
        adapter: str | None = None,
        token_rules: TokenRules | None = None,
        **unknown: Unpack[NoOptions],
    ) -> None:
        """Queue a request; the next steps work on it.

        Args:
            prompt: text, token ids, or vLLM's dicts ``{"prompt": text}`` and ``{"prompt_token_ids":
                ids}``.
            params: how to sample; greedy by default. With ``PoolingParams``, the answer is an
                embedding or logits of the prompt (``RequestOutput.pooled``). It is computed in the
                same steps as other requests, and its K/V are neither stored nor left in the prefix
                cache, apart from ``num_shared_tokens``.
            priority: lower runs first among the requests of a user, as in vLLM, and preempts
                running requests; for the order see ``priority_steps``.
            cache_salt: only requests with the same salt share K/V.
            no_store: write none of its K/V to ``cache_dir``; stored blocks are still used.
            user: whose request this is. Users have fair shares of the engine, however many requests
                each has. Requests without one are those of one user.
            adapter: the name of an adapter, of ``adapters`` or :meth:`load_adapter`; ``None`` for
                the model alone. If others have taken its place, it is loaded again.
            token_rules: what :meth:`prepare` returned for these parameters. By default they are
                prepared here.

        Raises:
            ValueError: the prompt is empty, a token id is not in the vocabulary, the request id is
                in use, there is no such adapter or no room for it now, the parameters can't be
                satisfied, or the model gives no embeddings.
            PromptTooLongError: the budget can never hold the prompt; the message has the numbers.
        """
        if unknown:
            refuse_unknown(Engine.add_request, unknown)
        self._refuse_on_followers("add_request")
        self.thread.check()
        while True:
            request = self.input_processor.process(
                request_id,
                prompt,
                params,
                priority=priority,
                cache_salt=cache_salt,
                no_store=no_store,
                user=user,
                adapter=self.have_adapter(adapter),
                token_rules=token_rules,
            )
            self.scheduler.check(request)
            if request.params.sampler is not None or request.params.logits_processors:
                self._calls_functions = True
            if (registered := self._register(request)) is not None:
                break
        if registered is not request:
            raise ArgumentError(f"[engine] request {request_id!r} exists already")
        adding = self.thread.submit(self.steps.add_new, "add_request")
        if adding.is_next:
            adding.result()

    def _register(self, request: Request) -> Request | None:
        """Register a request unless its id is in use; returns the one that has it, or ``None`` if
        another adapter has taken the place of the request's meanwhile.
        """
        with self.adapters.lock:
            if not self.adapters.is_loaded(request.adapter):
                return None
            # A single operation, so an interrupt comes before or after it.
            return self.reports.requests.setdefault(request.request_id, request)

    def prepare(self, params: SamplingParams) -> TokenRules:
        """Do the slow part of ``add_request`` for these parameters: check their token ids, encode
        their words and compile their grammar. Returns its argument ``token_rules``.

        Raises:
            ArgumentError: as :meth:`add_request`.
        """
        return self.input_processor.prepare(params)

    def abort(self, request_id: str) -> None:
        """End a request and free its blocks: at once, or after the step that runs.

        The next step returns its output, with finish reason ``"abort"``. A request that is unknown
        or finished is ignored.
        """
        request = self.reports.requests.get(REQUEST_ID.check("engine", "request_id", request_id))
        if request is not None:
            self._abort([request])

    def abort_all(self) -> None:
        """Abort all requests."""
        self._abort(list(self.reports.requests.values()))

    def drop(self, request_ids: Iterable[str]) -> None:
        """Abort requests without a last output, because their readers are gone."""
        self._interrupted_step = None  # Its caller does not wait any more.
        dropped = dict.fromkeys(request_ids)
        requests = [each for name in dropped if (each := self.reports.requests.get(name))]

        def drop() -> None:
            for request in requests:
                self.reports.drop(request)
            # Outputs of a wait that was interrupted.
            self._ready[:] = [each for each in self._ready if each.request_id not in dropped]

        with contextlib.suppress(ForkedError):
            self._abort(requests, drop)

    def prompt_progress(self, request_id: str) -> tuple[int, int]:
        """How many tokens of a request's prompt are computed, and its length; zeros for an unknown
        request.
        """
        request = self.reports.requests.get(REQUEST_ID.check("engine", "request_id", request_id))
        if request is None:
            return 0, 0
        num_prompt_tokens = len(request.prompt_token_ids)
        num_computed_tokens = self.steps.num_computed_tokens(request.completions[0])
        return min(num_computed_tokens, num_prompt_tokens), num_prompt_tokens

    def cached_block_ids(
        self,
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> list[int]:
        """The ids of the cached blocks that hold the longest prefix of these tokens."""
        extra_keys = extra_hash_keys(cache_salt, self.have_adapter(adapter))
        block_hashes = hash_token_blocks(token_ids, self.cache.config.block_size, extra_keys)
        find = partial(self.manager.get_computed_blocks, block_hashes, len(token_ids) + 1)
        return [block.block_id for block in self.thread.call(find).blocks]

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has something to do or to report."""
        return bool(self.reports.requests or self._ready)

    # In the engine's thread, while the caller waits

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the outputs that changed. Cumulative outputs grow with further
        steps.

        An interrupt ends the wait, but not the step, whose outputs are returned by the next call.
        If that finds the step still running, it continues the wait, and a second interrupt stops
        the engine.

        Raises:
            EngineStoppedError: a step failed so that the engine can't continue, or did not end when
                it was interrupted twice.
            ForkedError: this process was forked from the one in which the engine was made.
        """
        self._refuse_on_followers("step")
        call, self._interrupted_step = self._interrupted_step, None
        if self.thread.is_current:
            self.thread.call(self.steps.run, "step")
            self.thread.run_queued()
            self.thread.call(self._report, "step")
        else:
            if call is None or call.is_done:
                key = random_key() if self._calls_functions else None
                call = self.thread.submit(partial(self._step, key), "step")
            try:
                report, key = call.result()
            except KeyboardInterrupt:
                self._interrupted_step = call
                raise
            if key is not None:
                mx.random.seed(key)
            if report is not None:
                report.result()
        # Nothing is called here, so an interrupt comes before or after this line.
        outputs, self._ready = self._ready, []
        return outputs

    def read_rows(self, reader: RowReader | None) -> None:
        """From now on, call ``reader`` in the engine's thread with the row of logits of each token
        that is appended; ``None`` ends it.

        Args:
            reader: called with the ``Completion``, the number of the token in its answer, from 1,
                and the logits ``[vocab_size]`` that it was sampled from: after penalties, masks and
                the request's processors, before temperature, filters and its sampler. Must not
                raise. After an interrupt, it may get a token twice. On rank 0 only.
        """
        self.steps.row_reader = reader

    @property
    def token_budgets(self) -> list[ChosenBudgets]:
        """The budgets of past steps, the oldest first, each with the step in which it began: with
        ``prefill_step_seconds`` and ``mixed_step_seconds`` those that were chosen by the clock, of
        which the last 16,384 changes are kept. An engine with these ``token_budgets`` computes the
        same requests, added at the same steps, in the same steps.
        """
        return self.steps.budgets.chosen

    @property
    def prefix_history(self) -> PrefixHistory:
        """Why more of the last prompts was not in the prefix cache."""
        return self.scheduler.prefix_history

    def shrink(self) -> int:
        """Free K/V memory that no running request needs, with the blocks that are cached there;
        returns the number of bytes.
        """
        return self.thread.call(self.steps.shrink, "shrink")

    def set_budget(self, nbytes: int) -> int:
        """Change the budget of K/V and recurrent states, to at most the ``kv_cache_bytes`` that the
        engine was made with; returns what it is then. Cached K/V beyond it are evicted, the least
        recently used first. While there are unfinished requests, it is only raised.

        Args:
            nbytes: the new budget in bytes; too few are replaced by what holds one block.
        """
        nbytes = AT_LEAST_0.check("engine", "nbytes", nbytes)
        return self.thread.call(partial(self.steps.set_budget, nbytes), "set_budget")

    def reset_prefix_cache(self) -> bool:
        """Forget all cached K/V. While requests run, changes nothing and returns False."""
        return self.thread.call(self.steps.reset_prefix_cache, "reset_prefix_cache")

    def load_adapter(self, name: str, folder: str | Path) -> Adapter:
        """Load a LoRA adapter from its folder, for requests that choose it by its name. If
        ``max_adapters`` are loaded, it takes the place of the least recently used one that no
        request uses, which the next request for it loads again.

        Raises:
            AdapterError: the folder can't be read, is of another kind than LoRA, or does not fit
                the model; or there is one of this name already. Nothing was loaded.
            AdaptersInUseError: requests use ``max_adapters`` others. Nothing was loaded.
        """
        files = self.adapters.read(name, folder)
        self.adapters.add(files)
        try:
            return self._load_adapter(files)
        except BaseException:
            with contextlib.suppress(AdapterError):  # Another thread has unloaded it.
                self.adapters.unload(name)
            raise

    def have_adapter(self, name: str | None) -> Adapter | None:
        """The adapter of this name, loaded again if others have taken its place; ``None`` for
        ``None``.

        Raises:
            AdapterError: there is none of this name, or its files can't be read any more or have
                changed.
            AdaptersInUseError: requests use ``max_adapters`` others.
        """
        name = NAME.check("engine", "adapter", name)
        if name is None:
            return None
        return self.adapters.find(name) or self._load_adapter(self.adapters.read_again(name))

    def unload_adapter(self, name: str) -> None:
        """Refuse further requests for an adapter; those that use it continue, and its memory is
        used for another one when they have ended.

        Raises:
            AdapterError: there is none of this name.
        """
        self.adapters.unload(name)

    def _load_adapter(self, files: AdapterFiles) -> Adapter:
        def used() -> list[Adapter | None]:
            return [request.adapter for request in list(self.reports.requests.values())]

        return self.thread.call(partial(self.adapters.load, files, used))

    def save_snapshot(
        self,
        path: str | Path,
        token_ids: Sequence[int],
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> int:
        """Write the K/V of a conversation to a file; returns the number of its tokens that were
        saved. Arguments and errors: :meth:`Snapshots.save`.
        """
        found = self.have_adapter(adapter)
        return self._read(partial(self.snapshots.save, path, token_ids, cache_salt, found))

    def load_snapshot(
        self, path: str | Path, *, cache_salt: str | None = None, adapter: str | None = None
    ) -> list[int]:
        """Load the K/V of a file into the prefix cache, for requests whose prompts begin with its
        tokens; returns their ids. Arguments and errors: :meth:`Snapshots.open`.
        """
        return self._put(self.snapshots.open(path, cache_salt, self.have_adapter(adapter)))

    def export_prompt_cache(
        self,
        path: str | Path,
        token_ids: Sequence[int],
        *,
        cache_salt: str | None = None,
        model_name: str | None = None,
    ) -> int:
        """Write the K/V of a conversation as a prompt cache of mlx-lm; returns the number of its
        tokens that were saved. mlx-lm's prompt is the rest of them. Arguments and errors:
        :meth:`Snapshots.export_prompt_cache`.
        """
        export = self.snapshots.export_prompt_cache
        return self._read(partial(export, path, token_ids, cache_salt, model_name))

    def import_prompt_cache(
        self,
        path: str | Path,
        token_ids: Sequence[int] | None = None,
        *,
        cache_salt: str | None = None,
        allow_other_model: bool = False,
    ) -> list[int]:
        """Load the K/V of a prompt cache of mlx-lm into the prefix cache; returns its token ids.
        Arguments and errors: :meth:`Snapshots.open_prompt_cache`.
        """
        opened = self.snapshots.open_prompt_cache
        return self._put(opened(path, token_ids, cache_salt, allow_other_model))

    def _read(self, read: Callable[[], T]) -> T:
        """Call a function that reads K/V, between two steps. Its errors stop no engine."""

        def run() -> T:
            self.thread.call(self.steps.process_output, "a snapshot")
            return read()

        return self.thread.call(run)

    def _put(self, prefix: Prefix) -> list[int]:
        """Load K/V into the prefix cache, between two steps."""
        put = partial(self.snapshots.put, self.steps.process_output, prefix)
        error = self.thread.call(put, "a snapshot")
        if error is not None:
            raise error
        return prefix.token_ids

    def save_more(self) -> bool:
        """Copy more blocks to ``cache_dir`` while no request runs, as steps do by themselves.
        Returns whether some are left because the disk is too slow.
        """
        tier = self.disk_tier
        return tier is not None and self.thread.call(tier.save_more, "save_more")

    def close(self, timeout: float = SECONDS_AT_EXIT) -> bool:
        """Write the remaining blocks to ``cache_dir``, for at most ``timeout`` seconds, and stop
        using it; returns whether all were written. Restores MLX's limits of wired memory and freed
        buffers, and the classes of the model's linear layers, so that further steps multiply with
        MLX's own matmul. Without a call, the end of the engine or of Python does the same.
        """
        self.thread.check_process()
        for release in self._releases:
            release()
        decode = self.runner.compiled_decode
        if self.runner.matmul.is_used and decode is not None:
            self._done_between_steps(decode.forget_traces, timeout)
        if self.disk_tier is None:
            return True
        return self.disk_tier.close(timeout, self._done_between_steps)

    def stats(self) -> EngineStats:
        """Memory, requests and counters; from any thread."""
        return stats_of(
            self.scheduler,
            self.cache,
            self.latencies,
            self.disk_tier,
            self.nbytes_activations,
            self.runner.matmul,
        )

    def view(self) -> EngineView:
        """The pool, block by block, and the requests; from any thread. 15,000 blocks take 1 ms."""
        return view_of(self.manager, self.reports.requests)

    # Several ranks

    def share(self, call: Callable[[], T]) -> T:
        """Run ``call`` on rank 0; the other ranks take part in its steps. Every rank returns its
        result, or raises its error.

        Raises:
            RanksError: on the other ranks, if rank 0 ends before the call returns.
        """
        ranks = self.ranks
        if ranks.size == 1:
            return call()
        if not ranks.is_leader:
            replays = self.steps.replays(self.input_processor.with_texts)
            following = self.thread.submit(partial(ranks.follow, replays))
            # Ctrl-C in a terminal reaches all ranks of this machine, and rank 0 handles it.
            following.wait_uninterrupted()
            followed: T = following.result()
            return followed
        try:
            value = call()
            result = as_json(value)
        except BaseException as error:
            # An interrupt does not wait for the current step: it is sent after that.
            run = self.thread.call if isinstance(error, Exception) else self.thread.submit
            run(partial(ranks.send, "result", as_json(error)))
            raise
        self.thread.call(partial(ranks.send, "result", result))
        return value

    def follow(self) -> None:
        """On a rank other than 0: take part in the steps of rank 0 until that ends."""
        with contextlib.suppress(RanksError):
            while True:
                self.share(lambda: None)

    def _refuse_on_followers(self, name: str) -> None:
        if not self.ranks.is_leader:
            raise RuntimeError(
                f"[engine] {name} is for rank 0, and this is rank {self.ranks.rank}, which follows "
                "it: call follow or share here"
            )

    # Inside

    def _done_between_steps(self, change: Callable[[], None], timeout: float) -> bool:
        """Make a change within ``timeout`` seconds; returns whether it was made. Does not wait for
        a step that an interrupt has stopped the caller from waiting for.
        """
        if self.thread.is_current:
            self.thread.call(change, "close")
            return True
        if not self.thread.is_interrupted:
            with contextlib.suppress(EngineStoppedError, TimeoutError):
                self.thread.submit(change, "close").result(timeout)
                return True
        return False

    def _abort(self, requests: Sequence[Request], then: Callable[[], None] | None = None) -> None:
        self.thread.check_process()

        def abort() -> None:
            self.steps.add_new()
            for request in requests:
                self.steps.abort(request)
            if then is not None:
                then()

        with contextlib.suppress(EngineStoppedError):
            aborting = self.thread.submit(abort, "abort")
            if aborting.is_next:
                aborting.result()

    def _step(self, key: int | None) -> _Stepped:
        """Run a step. If something was asked for meanwhile, its outputs are made after that.

        Args:
            key: the random key of the caller, if functions of requests may draw.
        """
        if key is not None:
            mx.random.seed(key)
        self.steps.run()
        key = None if key is None else random_key()
        if self.thread.has_queued:
            return self.thread.submit(self._report, "step"), key
        self._report()
        return None, key

    def _report(self) -> None:
        begin = time.perf_counter()
        outputs = self.reports.report()
        self.latencies.busy_seconds += time.perf_counter() - begin
        if self._ready:
            # Outputs of an interrupted wait, without those that have changed again.
            known = set(map(id, outputs))
            outputs = [*(each for each in self._ready if id(each) not in known), *outputs]
        self._ready = outputs


def _evaluate_arrays(*trees: Module | None) -> None:
    """Evaluate the arrays of modules: parameters, and others such as the frequencies of RoPE. Other
    values are ignored; they are checked later.
    """
    for tree in trees:
        if isinstance(tree, Module):
            leaves = dict(tree_flatten(tree)).values()
            mx.eval([leaf for leaf in leaves if isinstance(leaf, mx.array)])
