"""``Steps``: launches an engine's steps, reads their tokens, and rolls back those that fail."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import mlx.core as mx

from mlx_paged.core.tier import LostBlockError
from mlx_paged.engine.batch import Batch, Scheduled
from mlx_paged.engine.disk_tier import DiskTier
from mlx_paged.engine.latencies import Latencies
from mlx_paged.engine.logprobs import score_prompts
from mlx_paged.engine.model_runner import ModelRunner, StepInFlight
from mlx_paged.engine.replicas import Replicas, state_of_scheduler
from mlx_paged.engine.reports import Reports
from mlx_paged.engine.request_state import RequestState
from mlx_paged.engine.sampler import NO_TOKENS, SampledToken, SampledTokens, state_of
from mlx_paged.engine.scheduler import Scheduler
from mlx_paged.engine.shared_values import as_json
from mlx_paged.engine.step_budget import Budgets, TokenBudgets
from mlx_paged.errors import forget_frames, request_error
from mlx_paged.request import Request

# Called with a request, the number of a token in its answer, from 1, and the row of logits
# ``[vocab_size]`` that the token was sampled from, as in ``SampledTokens.rows``.
RowReader: TypeAlias = Callable[[Request, int, mx.array], None]

# How long a step without other work waits for blocks to be read. Other calls wait meanwhile.
READ_SECONDS = 0.05


class Steps:
    """The steps of an engine, of which at most one is in flight between two calls: launched,
    sampled, and not read.

    A failed step is rolled back, and its requests are retried one at a time to find the one that
    causes the failure.

    Args:
        run_ahead: whether a step is launched before the tokens of the previous one are read.
        budgets: chooses the token budgets of steps.
        replicas: samples the tokens, and keeps the other ranks in step.
        disk_tier: keeps full blocks on disk, if given.

    Attributes:
        budgets: as given.
        row_reader: gets the row of logits of each token before the token is appended, again after
            a rollback. Must not change anything or raise.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        reports: Reports,
        latencies: Latencies,
        run_ahead: bool,
        budgets: Budgets,
        replicas: Replicas,
        disk_tier: DiskTier | None = None,
    ):
        self.row_reader: RowReader | None = None
        self.in_flight: deque[StepInFlight] = deque()
        self._runner = runner
        self._scheduler = scheduler
        self._reports = reports
        self._latencies = latencies
        self._run_ahead = run_ahead
        self.budgets = budgets
        self._replicas = replicas
        self._disk_tier = disk_tier
        # Requests of a failed step, and how many tokens of each were computed.
        self._retry_alone: deque[tuple[Request, int]] = deque()

    def run(self, budgets: TokenBudgets | None = None) -> None:
        """Run one step: read the oldest step in flight, after launching the next one if possible.

        Args:
            budgets: those of rank 0, on a rank that follows it.
        """
        steps, tier = self.in_flight, self._disk_tier
        if budgets is None:
            planned = self._scheduler
            budgets = self.budgets.begin_step(
                planned.num_steps, planned.running, bool(planned.waiting), bool(steps)
            )
        self._replicas.tell("step", lambda: [*budgets, *state_of_scheduler(self._scheduler)])
        if tier is not None:
            tier.bring_back(is_busy=bool(self._scheduler.running))
        if not steps:
            only = self._next_to_retry()
            self._runner.release_states()
            self._launch(self._scheduler.schedule(only, budgets))
            self._sample()
            if tier is not None and not steps:
                tier.wait(READ_SECONDS)
        if steps and self._may_launch_ahead(steps[0]):
            awaited = steps[0].sampled.requests
            self._launch(self._scheduler.schedule_ahead(awaited, budgets))
        self.process_output()
        self._sample()
        if steps and all(request.is_finished for request in steps[0].batch.requests):
            self.process_output()  # No request needs it any more.

    def add_new(self) -> None:
        """Hand the requests that were added since the last call to the scheduler."""
        for state in self._reports.new_states():
            request = state.requests[0]
            self._replicas.tell("add", partial(as_json, request))
            self._scheduler.add(request)

    def abort(self, state: RequestState) -> None:
        """Abort a request."""
        # Another request may already have the id of a finished one.
        if not all(request.is_finished for request in state.requests):
            self._replicas.tell("abort", lambda: state.output.request_id)
        for request in state.requests:
            self._finish(request, "abort")

    def shrink(self) -> int:
        """Free K/V memory that no running request needs; returns the number of bytes."""
        self._replicas.tell("shrink")
        self.process_output()  # A step in flight may write to that memory.
        return self._runner.cache.shrink()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached K/V. While requests run, changes nothing and returns False."""
        self._replicas.tell("reset_prefix_cache")
        return self._scheduler.reset_prefix_cache()

    def num_computed_tokens(self, request: Request) -> int:
        """The computed tokens of a request, without those of steps in flight; from any thread."""
        starts = (
            part.start
            for step in list(self.in_flight)
            for part in step.batch.scheduled
            if part.request is request
        )
        return min((request.num_computed_tokens, *starts))

    def _may_launch_ahead(self, step: StepInFlight) -> bool:
        """Whether the next step is planned before this one is read. With drafts it is not, because
        drafts need the previous tokens.
        """
        scheduler = self._scheduler
        return (
            self._run_ahead
            and not self._retry_alone
            and not step.batch.drafted
            and not scheduler.speculation.is_likely(scheduler.running)
        )

    def _launch(self, batch: Batch | None) -> None:
        """Launch a step, after the one in flight if there is one."""
        if batch is None:
            return
        for request in batch.finished:
            self._reports.note(request)
        for request in batch.begun:
            request.first_scheduled_time = time.perf_counter()
        if not batch.scheduled:
            # The planned swap-outs are dropped, and a request to retry does not fit.
            self._scheduler.discard(batch)
            if self._retry_alone:
                self._retry_alone.popleft()
            return
        awaited = self.in_flight[0].sampled if self.in_flight else NO_TOKENS
        step = StepInFlight(batch)
        self.in_flight.append(step)
        with self._device_work():
            step.logits = self._runner.launch(batch, awaited)

    def _sample(self) -> None:
        """Launch the sampling of the newest step, whose previous tokens are known by now."""
        if not self.in_flight:
            return
        step = self.in_flight[-1]
        rows, requests, num_before = self._completions(step.batch)
        with self._device_work():
            step.sampled = self._replicas.sample(step.logits, rows, requests, num_before)
            step.scored = score_prompts(step.logits, step.batch.scheduled)
        known = self._scheduler.requests
        for request in step.sampled.requests:
            if request.seq_id not in known:
                state = self._reports.states[request.request_id]
                self._scheduler.add_fork(state.requests[0], request)
                state.requests.append(request)
                step.forks.append(request)

    def process_output(self) -> None:
        """Wait for the oldest step in flight, and append its tokens."""
        if not self.in_flight:
            return
        step = self.in_flight[0]
        with self._device_work():
            results = self._replicas.read(step.sampled)
            scores = [(prompt.request, prompt.read()) for prompt in step.scored]
            # A chunk of a prompt has no tokens to wait for. The last step in flight leaves nothing
            # lazy: with a pending read of a slab, the next write would copy it.
            mx.eval(step.logits, self._runner.cache.arrays if len(self.in_flight) == 1 else ())
        if not self.in_flight:
            return  # The step failed.
        num_tokens = step.batch.num_tokens
        self.budgets.end_step(step.batch, num_tokens)
        drafted = step.batch.drafted
        if drafted and not self._verify(step, drafted, results):
            return
        self.in_flight.popleft()
        self._latencies.note_step(num_tokens)
        for request, entries in scores:
            if not request.is_finished:
                self._reports.states[request.request_id].add_prompt_logprobs(request, entries)
        verified = {part.request for part in drafted}
        sampled = step.sampled
        for entry, (request, result) in enumerate(zip(sampled.requests, results, strict=True)):
            if request not in verified:
                self._append(request, result, sampled, entry)
        if self._disk_tier is not None:
            self._disk_tier.note(step.batch, [later.batch for later in self.in_flight])

    def _verify(
        self,
        step: StepInFlight,
        drafted: Sequence[Scheduled],
        results: Sequence[SampledToken | Exception],
    ) -> bool:
        """Append the accepted tokens of requests with drafts, and the token after them; False if
        the step failed meanwhile.

        Where sampling reads the previous tokens (penalties, logits processors, custom samplers),
        tokens are sampled one by one.
        """
        known: dict[Request, list[SampledToken | Exception]] = {}
        for request, result in zip(step.sampled.requests, results, strict=True):
            known.setdefault(request, []).append(result)
        for part in drafted:
            request, num_accepted = part.request, 0
            if request.is_finished:
                continue  # Since it was launched.
            drawn, drafts = known[request], self._scheduler.speculation.drafter.made(part)
            sampled, first_entry = step.sampled, step.sampled.requests.index(request)
            verification = self._scheduler.verification
            verification.begin(part)
            for number in range(part.num_logit_rows):
                if number == len(drawn):
                    row = step.first_row_of(part) + number
                    with self._device_work():
                        sampled = self._replicas.sample(step.logits, [row], [request])
                        drawn += self._replicas.read(sampled)
                    first_entry = -number
                    if not self.in_flight:
                        return False
                result = drawn[number]
                is_accepted = (
                    number < len(drafts)
                    and isinstance(result, SampledToken)
                    and result.token_id == drafts[number]
                )
                if is_accepted:
                    verification.accept(request)
                    num_accepted += 1
                self._append(request, result, sampled, first_entry + number)
                if not is_accepted or request.is_finished:
                    break
            verification.end(request)
            self._scheduler.speculation.drafter.note(
                request, len(part.draft_token_ids), num_accepted
            )
        return True

    @contextmanager
    def _device_work(self) -> Iterator[None]:
        """Run a part of a step that changes no bookkeeping. If it raises, all steps in flight are
        rolled back.
        """
        try:
            yield
        except Exception as error:
            self._replicas.failed(error)
            self._isolate_failure(error)
        except BaseException as error:
            # The caller's own model or function raised it, so it is raised there.
            self._replicas.failed(error)
            self._roll_back()
            raise

    def _isolate_failure(self, error: Exception) -> None:
        """Fail a request that ran alone; retry several one by one, to find the one that fails. A
        request that ran with drafts is retried without them. If swapped-out blocks were lost, no
        request is at fault: all of the step wait again, and have no blocks to swap in any more.
        """
        steps = list(self.in_flight)
        requests = {
            request: request.num_computed_tokens
            for step in steps
            for request in step.batch.requests
            if not request.is_finished
        }
        self._roll_back()
        if isinstance(error, LostBlockError):
            return
        if len(steps) == len(requests) == 1 and not steps[0].batch.drafted:
            self._finish(steps[0].batch.requests[0], "error", error)
        else:
            self._retry_alone.extend(requests.items())

    def _roll_back(self) -> None:
        """Roll back the steps in flight, the newest first."""
        while self.in_flight:
            step = self.in_flight.pop()
            for request in step.sampled.requests:
                request.forget_awaited_token()
            for fork in step.forks:
                if not fork.is_finished:
                    self._scheduler.finish(fork, "abort")
                    self._reports.states[fork.request_id].requests.remove(fork)
            self._scheduler.discard(step.batch)
        self._runner.cache.close_step()
        try:
            # What they wrote is not needed, but the slabs depend on it.
            mx.eval(self._runner.cache.arrays)
        except Exception:
            # With these slabs, every later step would fail, too.
            self._runner.cache.reset()
            self._scheduler.start_over()

    def _next_to_retry(self) -> Request | None:
        while self._retry_alone:
            request, num_tokens = self._retry_alone[0]
            if not request.is_finished and request.num_computed_tokens < num_tokens:
                return request
            self._retry_alone.popleft()
        return None

    def _completions(self, batch: Batch) -> tuple[list[int], list[Request], list[int]]:
        """The row of logits and the request of each token that this step samples, and the number
        of drafts before it.

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
                if num_rows > 1 and state_of(request, self._runner.vocab_size).draws_rows_together:
                    rows += range(first_row, first_row + num_rows)
                    requests += [request] * num_rows
                    num_before += range(num_rows)
                else:
                    forks = [request.fork(index) for index in range(1, request.num_seqs)]
                    for each in (request, *forks):
                        rows.append(first_row)
                        requests.append(each)
                        num_before.append(0)
            first_row += num_rows
        return rows, requests, num_before

    def _append(
        self,
        request: Request,
        result: SampledToken | Exception,
        sampled: SampledTokens,
        entry: int,
    ) -> None:
        """Append a token to a request, or fail the request: ``result`` is that of this entry of
        ``sampled``.
        """
        if request.is_finished:
            return  # finished since it was sampled
        if isinstance(result, Exception):
            self._finish(request, "error", result)
            return
        state = self._reports.states[request.request_id]
        if self.row_reader is not None and sampled.rows is not None:
            number = len(state.completions[request.index].output.token_ids) + 1
            self.row_reader(request, number, sampled.rows[entry])
        ahead = self.in_flight[0].batch if self.in_flight else None
        self._scheduler.append_token(request, result.token_id, ahead)
        stop_text = None
        try:
            stop_text = state.add_token(request, result)
        except BaseException as error:  # A panic in Rust's tokenizers is not an Exception.
            # It fails the request, even if this token was the last one.
            forget_frames(error, "In a step of the engine")
            self._scheduler.finish(request, "error")
            request.finish_reason, request.stop_reason = "error", None
            request.error = request_error(error)
        if stop_text is not None:
            self._scheduler.finish(request, "stop")
            # The stop text takes precedence if this token was also the last one.
            request.finish_reason, request.stop_reason = "stop", stop_text
        self._reports.note(request)

    def _finish(self, request: Request, reason: str, error: Exception | None = None) -> None:
        if not request.is_finished:
            if error is not None:
                forget_frames(error, "In a step of the engine")
            self._scheduler.finish(request, reason, error=error)
            self._reports.note(request)
