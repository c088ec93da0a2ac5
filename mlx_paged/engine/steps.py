"""``Steps``: launches an engine's steps, reads their tokens, and rolls back those that fail."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import mlx.core as mx

from mlx_paged.core.tier import LostBlockError
from mlx_paged.distributed import Ranks, RanksError, as_json, from_json
from mlx_paged.engine.model_runner import ModelRunner, PooledRow, StepInFlight
from mlx_paged.engine.reports import Latencies, Reports
from mlx_paged.engine.request import Completion, Request, SampledToken
from mlx_paged.engine.sampling.sampler import (
    NO_TOKENS,
    SampledTokens,
    sample,
    score_prompts,
    state_of,
)
from mlx_paged.engine.scheduling.batch import Batch, Scheduled
from mlx_paged.engine.scheduling.scheduler import Scheduler
from mlx_paged.engine.scheduling.step_budget import Budgets, TokenBudgets
from mlx_paged.engine.speculation.speculation import Drafter
from mlx_paged.engine.storing.tier_cache import TierCache
from mlx_paged.errors import forget_frames, request_error

# Called with a completion, the number of a token in its answer, from 1, and the row of logits
# ``[vocab_size]`` that the token was sampled from, as in ``SampledTokens.rows``.
RowReader: TypeAlias = Callable[[Completion, int, mx.array], None]

# How long a step without other work waits for blocks to be read. Other calls wait meanwhile.
READ_SECONDS = 0.05
# How long a lower budget waits for the blocks that it evicts to be written.
SAVE_SECONDS = 5.0


class Steps:
    """The steps of an engine, of which at most one is in flight between two calls: launched,
    sampled, and not read.

    A failed step is rolled back, and its requests are retried one at a time to find the one that
    causes the failure.

    Args:
        run_ahead: whether a step is launched before the tokens of the previous one are read.
        budgets: chooses the token budgets of steps.
        ranks: rank 0 sends them what they have to replay.
        tier_cache: keeps full blocks in a tier, if given.

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
        ranks: Ranks,
        tier_cache: TierCache | None = None,
    ):
        self.row_reader: RowReader | None = None
        self.in_flight: deque[StepInFlight] = deque()
        self._runner = runner
        self._scheduler = scheduler
        self._reports = reports
        self._latencies = latencies
        self._run_ahead = run_ahead
        self.budgets = budgets
        self._ranks = ranks
        self._tier_cache = tier_cache
        # Requests of a failed step, and how many tokens of each were computed.
        self._to_retry_alone: deque[tuple[Completion, int]] = deque()

    def run(self, budgets: TokenBudgets | None = None) -> None:
        """Run one step: read the oldest step in flight, after launching the next one if possible.

        Args:
            budgets: those of rank 0, on a rank that follows it.
        """
        begin = time.perf_counter()
        self.add_new()
        steps, tier = self.in_flight, self._tier_cache
        if budgets is None:
            planned = self._scheduler
            budgets = self.budgets.begin_step(
                planned.num_steps, planned.running, bool(planned.waiting), bool(steps)
            )
        self._ranks.lead("step", lambda: [*budgets, *self._state()])
        if tier is not None:
            tier.poll(is_busy=bool(self._scheduler.running))
        if not steps:
            only = self._next_to_retry()
            self._runner.release_states()
            self._launch(self._scheduler.schedule(only, budgets))
            self._sample()
            if tier is not None and not steps:
                tier.wait(READ_SECONDS)
        if steps and self._may_launch_ahead(steps[0]):
            awaited = steps[0].sampled.completions
            self._launch(self._scheduler.schedule_ahead(awaited, budgets))
        self.process_output()
        self._sample()
        if steps and all(completion.is_finished for completion in steps[0].batch.completions):
            self.process_output()  # No request needs it any more.
        self._latencies.busy_seconds += time.perf_counter() - begin

    def add_new(self) -> None:
        """Hand the requests that were added since the last call to the scheduler."""
        for request in self._reports.new_requests():
            self._ranks.lead("add", partial(as_json, request.arguments))
            self._scheduler.add(request)

    def abort(self, request: Request) -> None:
        """Abort a request."""
        # Another request may already have the id of a finished one.
        if not all(completion.is_finished for completion in request.completions):
            self._ranks.lead("abort", lambda: request.request_id)
        for completion in list(request.completions):
            self._finish(completion, "abort")

    def shrink(self) -> int:
        """Free K/V memory that no running request needs; returns the number of bytes."""
        self._ranks.lead("shrink")
        self.process_output()  # A step in flight may write to that memory.
        return self._runner.cache.shrink()

    def set_budget(self, nbytes: int) -> int:
        """Change the budget of K/V and recurrent states (:meth:`Scheduler.set_budget`)."""
        self._ranks.lead("set_budget", lambda: nbytes)
        self.process_output()
        self.add_new()
        if self._tier_cache is not None:
            self._tier_cache.save_all(SAVE_SECONDS)  # before blocks are evicted
        return self._scheduler.set_budget(nbytes)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached K/V. While requests run, changes nothing and returns False."""
        self._ranks.lead("reset_prefix_cache")
        return self._scheduler.reset_prefix_cache()

    def replays(
        self, with_texts: Callable[[Request], Request]
    ) -> dict[str, Callable[[Any], object]]:
        """What a follower does with each message of rank 0, by its kind.

        Args:
            with_texts: gives a request what makes the texts of its completions.
        """

        def add(value: Any) -> None:
            request = with_texts(Request.from_arguments(from_json(value)))
            self._reports.requests[request.request_id] = request
            self.add_new()

        def step(numbers: list[int]) -> None:
            prefill_budget, mixed_budget, *leaders_state = numbers
            state = self._state()
            if state != leaders_state:
                raise RanksError(
                    f"its scheduler differs from that of rank 0 before step {leaders_state[0]}: "
                    f"{tuple(state)}, not {tuple(leaders_state)}"
                )
            self.run(TokenBudgets(prefill_budget, mixed_budget))
            self._reports.report()

        return {
            "add": add,
            "abort": lambda request_id: self.abort(self._reports.requests[request_id]),
            "step": step,
            "shrink": lambda _: self.shrink(),
            "set_budget": self.set_budget,
            "reset_prefix_cache": lambda _: self.reset_prefix_cache(),
        }

    def num_computed_tokens(self, completion: Completion) -> int:
        """The computed tokens of a request, without those of steps in flight; from any thread."""
        starts = (
            part.start
            for step in list(self.in_flight)
            for part in step.batch.scheduled
            if part.completion is completion
        )
        return min((completion.num_computed_tokens, *starts))

    def _may_launch_ahead(self, step: StepInFlight) -> bool:
        """Whether the next step is planned before this one is read. With drafts it is not, because
        drafts need the previous tokens.
        """
        scheduler = self._scheduler
        return (
            self._run_ahead
            and not self._to_retry_alone
            and not step.batch.drafted
            and not scheduler.speculation.is_likely(scheduler.running)
        )

    def _launch(self, batch: Batch | None) -> None:
        """Launch a step, after the one in flight if there is one."""
        if batch is None:
            return
        for completion in batch.finished:
            self._reports.note(completion)
        for completion in batch.begun:
            completion.request.first_scheduled_time = time.perf_counter()
        if not batch.scheduled:
            # The planned swap-outs are dropped, and a request to retry does not fit.
            self._scheduler.discard(batch)
            if self._to_retry_alone:
                self._to_retry_alone.popleft()
            return
        awaited = self.in_flight[0].sampled if self.in_flight else NO_TOKENS
        step = StepInFlight(batch)
        self.in_flight.append(step)
        with self._device_work(), self._runner.matmul.running():
            step.logits, step.pooled = self._runner.launch(batch, awaited)

    def _sample(self) -> None:
        """Launch the sampling of the newest step, whose previous tokens are known by now."""
        if not self.in_flight:
            return
        step = self.in_flight[-1]
        rows, completions, num_before, readers = self._completions(step.batch)
        with self._device_work():
            sampled = self._sampler(step.logits, rows, completions, num_before, readers)
            step.sampled = self._shared(sampled)
            step.scored = score_prompts(step.logits, step.batch.scheduled)
        known = self._scheduler.completions
        for completion in step.sampled.completions:
            if completion.seq_id not in known:
                self._scheduler.add_fork(completion)
                step.forks.append(completion)

    def process_output(self) -> None:
        """Wait for the oldest step in flight, and append its tokens."""
        if not self.in_flight:
            return
        step = self.in_flight[0]
        with self._device_work():
            results = self._read(step.sampled)
            scores = [(completion, report.read()) for completion, report in step.scored]
            # A chunk of a prompt has no tokens to wait for. The last step in flight leaves nothing
            # lazy: with a pending read of a slab, the next write would copy it.
            rows = [pooled.row for pooled in step.pooled] or step.logits
            mx.eval(rows, self._runner.cache.arrays if len(self.in_flight) == 1 else ())
        if not self.in_flight:
            return  # The step failed.
        num_tokens = step.batch.num_tokens
        self.budgets.end_step(step.batch, num_tokens)
        drafted = step.batch.drafted
        if drafted and not self._verify(step, drafted, results):
            return
        self.in_flight.popleft()
        self._latencies.note_step(num_tokens)
        for completion, entries in scores:
            if not completion.is_finished:
                completion.request.add_prompt_logprobs(entries)
        for pooled in step.pooled:
            self._end_pooled(pooled)
        verified = {part.completion for part in drafted}
        sampled = step.sampled
        for entry, (completion, result) in enumerate(
            zip(sampled.completions, results, strict=True)
        ):
            if completion not in verified:
                self._append(completion, result, sampled, entry)
        if self._tier_cache is not None:
            self._tier_cache.save(step.batch, [later.batch for later in self.in_flight])

    @property
    def _sampler(self) -> Callable[..., SampledTokens]:
        return sample if self._ranks.is_leader else sample_nothing

    def _shared(self, sampled: SampledTokens) -> SampledTokens:
        """The tokens, which followers have from rank 0 before they are read."""
        if self._ranks.size == 1 or not self._run_ahead or not sampled.completions:
            return sampled
        # The next step is launched before these tokens are read, so they also travel in the graph.
        token_ids = mx.distributed.all_sum(sampled.token_ids, group=self._ranks.group)
        mx.async_eval(token_ids)
        return dataclasses.replace(sampled, token_ids=token_ids)

    def _read(self, sampled: SampledTokens) -> list[SampledToken | Exception]:
        """Wait for the tokens; an exception stands for a request that failed."""
        if not self._ranks.is_leader:
            _, drawn = self._ranks.receive("drawn")
            return [
                RuntimeError("[ranks] failed on rank 0") if token is None else SampledToken(token)
                for token in drawn
            ]
        results = sampled.read()
        self._ranks.lead(
            "drawn",
            lambda: [None if isinstance(each, Exception) else each.token_id for each in results],
        )
        return results

    def _state(self) -> list[int]:
        """Numbers that soon differ if the schedulers of two ranks have diverged."""
        scheduler, pool = self._scheduler, self._scheduler.manager.pool
        return [
            scheduler.num_steps,
            len(scheduler.running),
            len(scheduler.waiting),
            sum(completion.num_computed_tokens for completion in scheduler.running),
            sum(len(completion.token_ids) for completion in scheduler.running),
            pool.num_blocks,
            pool.num_free_blocks,
            scheduler.swap_space.num_used_tokens,
        ]

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
        known: dict[Completion, list[SampledToken | Exception]] = {}
        for completion, result in zip(step.sampled.completions, results, strict=True):
            known.setdefault(completion, []).append(result)
        for part in drafted:
            completion, num_accepted, num_rejected = part.completion, 0, 0
            if completion.is_finished:
                continue  # Since it was launched.
            drawn, drafts = known[completion], self._scheduler.speculation.drafter.drafts_of(part)
            sampled, first_entry = step.sampled, step.sampled.completions.index(completion)
            verification = self._scheduler.verification
            verification.begin(part)
            for number in range(part.num_logit_rows):
                if number == len(drawn):
                    before = step.batch.scheduled[: step.batch.scheduled.index(part)]
                    row = sum(each.num_logit_rows for each in before) + number
                    with self._device_work():
                        sampled = self._shared(self._sampler(step.logits, [row], [completion]))
                        drawn += self._read(sampled)
                    first_entry = -number
                    if not self.in_flight:
                        verification.count(completion, num_accepted, num_accepted)
                        return False
                result = drawn[number]
                token = result.token_id if isinstance(result, SampledToken) else None
                is_accepted = number < len(drafts) and token == drafts[number]
                if is_accepted:
                    verification.accept(completion)
                    num_accepted += 1
                elif token is not None:
                    num_rejected = len(drafts) - num_accepted
                self._append(completion, result, sampled, first_entry + number)
                if not is_accepted or completion.is_finished:
                    break
            # Drafts after an accepted end of the answer, or after a failure, were not verified.
            num_drafts = num_accepted + num_rejected
            verification.count(completion, num_drafts, num_accepted)
            verification.end(completion)
            self._scheduler.speculation.drafter.note(completion, num_drafts, num_accepted)
        return True

    @contextmanager
    def _device_work(self) -> Iterator[None]:
        """Run a part of a step that changes no bookkeeping. If it raises, all steps in flight are
        rolled back.
        """
        try:
            yield
        except Exception as error:
            self._ranks.fail(error)
            self._isolate_failure(error)
        except BaseException as error:
            # The caller's own model or function raised it, so it is raised there.
            self._ranks.fail(error)
            self._roll_back()
            raise

    def _isolate_failure(self, error: Exception) -> None:
        """Fail a request that ran alone; retry several one by one, to find the one that fails. A
        request that ran with drafts is retried without them. If swapped-out blocks were lost, no
        request is at fault: all of the step wait again, and have no blocks to swap in any more.
        """
        steps = list(self.in_flight)
        completions = {
            completion: completion.num_computed_tokens
            for step in steps
            for completion in step.batch.completions
            if not completion.is_finished
        }
        self._roll_back()
        if isinstance(error, LostBlockError):
            return
        if len(steps) == len(completions) == 1 and not steps[0].batch.drafted:
            self._finish(steps[0].batch.completions[0], "error", error)
        else:
            self._to_retry_alone.extend(completions.items())

    def _roll_back(self) -> None:
        """Roll back the steps in flight, the newest first."""
        while self.in_flight:
            step = self.in_flight.pop()
            for completion in step.sampled.completions:
                if completion.awaits_token:
                    completion.token_ids.pop()
            for fork in step.forks:
                if not fork.is_finished:
                    self._scheduler.finish(fork, "abort")
                    fork.request.completions.remove(fork)
            self._scheduler.discard(step.batch)
        self._runner.cache.close_step()
        try:
            # What they wrote is not needed, but the slabs depend on it.
            mx.eval(self._runner.cache.arrays)
        except Exception:
            # With these slabs, every later step would fail, too.
            self._runner.cache.reset()
            self._scheduler.start_over()

    def _next_to_retry(self) -> Completion | None:
        while self._to_retry_alone:
            completion, num_tokens = self._to_retry_alone[0]
            if not completion.is_finished and completion.num_computed_tokens < num_tokens:
                return completion
            self._to_retry_alone.popleft()
        return None

    def _completions(
        self, batch: Batch
    ) -> tuple[list[int], list[Completion], list[int], list[Callable[[], Sequence[int]]]]:
        """The row of logits and the request of each token that this step samples, the number of
        drafts before it, and what reads them.

        A request for several completions is forked when its prompt is computed; they share a row.
        """
        rows: list[int] = []
        completions: list[Completion] = []
        num_before: list[int] = []
        readers: list[Callable[[], Sequence[int]]] = []
        drafter, first_row = self._scheduler.speculation.drafter, 0
        for part in batch.scheduled:
            completion, num_rows = part.completion, part.num_logit_rows - part.num_scored_rows
            first_row += part.num_scored_rows
            is_pooled = completion.request.pooling is not None
            if num_rows and not is_pooled and not completion.is_finished:
                if (
                    num_rows > 1
                    and state_of(completion, self._runner.vocab_size).draws_rows_together
                ):
                    rows += range(first_row, first_row + num_rows)
                    completions += [completion] * num_rows
                    num_before += range(num_rows)
                    readers += [partial(_first_drafts, drafter, part, n) for n in range(num_rows)]
                else:
                    forks = [completion.fork(index) for index in range(1, completion.num_seqs)]
                    for each in (completion, *forks):
                        rows.append(first_row)
                        completions.append(each)
                        num_before.append(0)
                        readers.append(tuple)
            first_row += num_rows
        return rows, completions, num_before, readers

    def _append(
        self,
        completion: Completion,
        result: SampledToken | Exception,
        sampled: SampledTokens,
        entry: int,
    ) -> None:
        """Append a token to a request, or fail the request: ``result`` is that of this entry of
        ``sampled``.
        """
        if completion.is_finished:
            return  # finished since it was sampled
        if isinstance(result, Exception):
            self._finish(completion, "error", result)
            return
        if self.row_reader is not None and sampled.rows is not None:
            number = len(completion.output.token_ids) + 1
            self.row_reader(completion, number, sampled.rows[entry])
        ahead = self.in_flight[0].batch if self.in_flight else None
        self._scheduler.append_token(completion, result.token_id, ahead)
        stop_text = None
        try:
            stop_text = completion.add_token(result)
        except BaseException as error:  # A panic in Rust's tokenizers is not an Exception.
            # It fails the request, even if this token was the last one.
            forget_frames(error, "In a step of the engine")
            self._scheduler.finish(completion, "error")
            completion.finish_reason, completion.stop_reason = "error", None
            completion.error = request_error(error)
        if stop_text is not None:
            self._scheduler.finish(completion, "stop")
            # The stop text takes precedence if this token was also the last one.
            completion.finish_reason, completion.stop_reason = "stop", stop_text
        self._reports.note(completion)

    def _end_pooled(self, pooled: PooledRow) -> None:
        """End a request with what it is answered with, or with the error of that."""
        completion = pooled.completion
        if completion.is_finished:
            return  # finished since the step was launched
        try:
            numbers = pooled.read()
        except ValueError as error:
            self._finish(completion, "error", error)
        else:
            completion.request.begin_output()
            completion.request.output.pooled = numbers
            self._finish(completion, "stop")

    def _finish(self, completion: Completion, reason: str, error: Exception | None = None) -> None:
        if not completion.is_finished:
            if error is not None:
                forget_frames(error, "In a step of the engine")
            self._scheduler.finish(completion, reason, error=error)
            self._reports.note(completion)


def _first_drafts(drafter: Drafter, part: Scheduled, count: int) -> Sequence[int]:
    """The first drafts of a part of a step, once they are computed."""
    return drafter.drafts_of(part)[:count] if count else ()


def sample_nothing(
    logits: mx.array,  # [num_rows, vocab_size]
    rows: Sequence[int],
    completions: Sequence[Completion],
    num_before: Sequence[int] | None = None,
    readers: Sequence[Callable[[], Sequence[int]]] = (),
) -> SampledTokens:
    """In place of :func:`mlx_paged.engine.sampling.sampler.sample` on a follower, which gets the
    tokens of rank 0.
    """
    return SampledTokens(completions, mx.zeros((len(completions),), dtype=mx.int32))
