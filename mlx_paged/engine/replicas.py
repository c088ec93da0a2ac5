"""What the ranks of a model tell each other about an engine's steps.

Every rank has an engine with a scheduler of its own. Given the same requests in the same order and
the same tokens, schedulers do the same: they look at no clock, and at no memory but the pool's. So
rank 0, the leader, sends the others the requests and the aborts as it takes them on, says when a
step begins, and what it gave. Followers draw no tokens: they need neither the functions of a
request nor its grammar.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import mlx.core as mx

from mlx_paged.distributed import Ranks
from mlx_paged.engine.logprobs import score_prompts
from mlx_paged.engine.model_runner import StepInFlight
from mlx_paged.engine.request_state import RequestState
from mlx_paged.engine.sampler import SampledToken, SampledTokens, sample
from mlx_paged.engine.scheduler import Scheduler
from mlx_paged.errors import one_line, words_for_all
from mlx_paged.request import Logprob, Request, SeqId
from mlx_paged.sampling_params import SamplingParams

Results: TypeAlias = "list[SampledToken | Exception]"
# Of prompts whose tokens were scored, those of the next tokens.
Scores: TypeAlias = "list[tuple[Request, list[dict[int, Logprob]]]]"


class NewRequest(NamedTuple):
    """A request is taken on."""

    request_id: str
    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    seed: int
    priority: int
    cache_salt: str | None
    no_store: bool


class Abort(NamedTuple):
    request_id: str


class Call(NamedTuple):
    """A method of the engine is called, without arguments."""

    name: str


class Step(NamedTuple):
    """A step begins, and this is the state of the scheduler before it."""

    state: tuple[int, ...]


class Given(NamedTuple):
    """What the oldest step in flight gave."""

    results: Results
    scores: list[tuple[SeqId, list[dict[int, Logprob]]]]


class Value(NamedTuple):
    """What a call on the leader returned, or raised."""

    value: Any
    error: BaseException | None = None


def state_of_scheduler(scheduler: Scheduler) -> tuple[int, ...]:
    """Numbers that differ soon if two schedulers do."""
    pool = scheduler.manager.pool
    return (
        scheduler.num_steps,
        len(scheduler.running),
        len(scheduler.waiting),
        sum(request.num_computed_tokens for request in scheduler.running),
        sum(len(request.token_ids) for request in scheduler.running),
        pool.num_blocks,
        pool.num_free_blocks,
        scheduler.swap_space.num_used_tokens,
    )


class Replicas(Protocol):
    """What an engine's steps say to the other ranks, and hear from them."""

    def add(self, state: RequestState) -> None:
        """A request is taken on."""

    def abort(self, state: RequestState) -> None:
        """A request is ended from outside."""

    def begin_step(self, scheduler: Scheduler) -> None:
        """A step begins."""

    def sample(
        self,
        logits: mx.array,  # [num_rows, vocab_size]
        rows: Sequence[int],
        requests: Sequence[Request],
        num_before: Sequence[int] | None = None,
    ) -> SampledTokens:
        """As :func:`mlx_paged.engine.sampler.sample`."""
        ...

    def score(self, step: StepInFlight) -> None:
        """Launch the log-probabilities of prompts that a step gives."""

    def read(self, step: StepInFlight) -> tuple[Results, Scores]:
        """Wait for what a step gives: tokens, and log-probabilities of prompts."""
        ...

    def read_more(self, sampled: SampledTokens) -> Results:
        """Wait for further tokens of a step."""
        ...

    def failed(self, error: BaseException) -> None:
        """A step raised in the middle, or an interrupt left the bookkeeping torn."""


class OneProcess:
    """Nobody else has a part of the model."""

    def add(self, state: RequestState) -> None:
        pass

    def abort(self, state: RequestState) -> None:
        pass

    def begin_step(self, scheduler: Scheduler) -> None:
        pass

    def sample(
        self,
        logits: mx.array,
        rows: Sequence[int],
        requests: Sequence[Request],
        num_before: Sequence[int] | None = None,
    ) -> SampledTokens:
        return sample(logits, rows, requests, num_before)

    def score(self, step: StepInFlight) -> None:
        step.scored = score_prompts(step.logits, step.batch.scheduled)

    def read(self, step: StepInFlight) -> tuple[Results, Scores]:
        results = step.sampled.read()
        return results, [(prompt.request, prompt.read()) for prompt in step.scored]

    def read_more(self, sampled: SampledTokens) -> Results:
        return sampled.read()

    def failed(self, error: BaseException) -> None:
        pass


class Leader(OneProcess):
    """Rank 0: it decides, and says so.

    Args:
        run_ahead: whether steps are launched before the tokens of the one before are read. These
            then travel in MLX's graph, too.
    """

    def __init__(self, ranks: Ranks, run_ahead: bool):
        self._ranks = ranks
        self._run_ahead = run_ahead

    def add(self, state: RequestState) -> None:
        request = state.requests[0]
        self._ranks.tell(
            NewRequest(
                request.request_id,
                state.output.prompt,
                request.token_ids,
                _without_functions(request.params),
                request.seed,
                request.priority,
                request.cache_salt,
                request.no_store,
            )
        )

    def abort(self, state: RequestState) -> None:
        # Another request may have this id by now.
        if not all(request.is_finished for request in state.requests):
            self._ranks.tell(Abort(state.output.request_id))

    def begin_step(self, scheduler: Scheduler) -> None:
        self._ranks.tell(Step(state_of_scheduler(scheduler)))

    def sample(
        self,
        logits: mx.array,
        rows: Sequence[int],
        requests: Sequence[Request],
        num_before: Sequence[int] | None = None,
    ) -> SampledTokens:
        sampled = super().sample(logits, rows, requests, num_before)
        if not self._run_ahead or not requests:
            return sampled
        return dataclasses.replace(sampled, token_ids=_shared(sampled.token_ids, self._ranks))

    def read(self, step: StepInFlight) -> tuple[Results, Scores]:
        results, scores = super().read(step)
        named = [(request.seq_id, entries) for request, entries in scores]
        self._ranks.tell(Given(list(map(_portable, results)), named))
        return results, scores

    def read_more(self, sampled: SampledTokens) -> Results:
        results = super().read_more(sampled)
        self._ranks.tell(Given(list(map(_portable, results)), []))
        return results

    def failed(self, error: BaseException) -> None:
        self._ranks.fail(_failure(error), error)


class Follower(OneProcess):
    """Any other rank: it computes its share, and takes the tokens that the leader draws.

    What the leader says between steps is for :func:`mlx_paged.engine.following.follow`.
    """

    def __init__(self, ranks: Ranks, run_ahead: bool):
        self._ranks = ranks
        self._run_ahead = run_ahead

    def sample(
        self,
        logits: mx.array,
        rows: Sequence[int],
        requests: Sequence[Request],
        num_before: Sequence[int] | None = None,
    ) -> SampledTokens:
        token_ids = mx.zeros((len(requests),), dtype=mx.int32)
        if self._run_ahead and requests:
            token_ids = _shared(token_ids, self._ranks)
        return SampledTokens(requests, (), token_ids)

    def score(self, step: StepInFlight) -> None:
        pass

    def read(self, step: StepInFlight) -> tuple[Results, Scores]:
        given = self._given()
        request_of = {request.seq_id: request for request in step.batch.requests}
        return given.results, [(request_of[name], entries) for name, entries in given.scores]

    def read_more(self, sampled: SampledTokens) -> Results:
        return self._given().results

    def failed(self, error: BaseException) -> None:
        self._ranks.fail(_failure(error), error)

    def _given(self) -> Given:
        given = self._ranks.hear()
        if not isinstance(given, Given):
            raise RuntimeError(f"expected what a step gave, heard {type(given).__name__}")
        return given


def _failure(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "was interrupted in the middle of a step"
    return f"failed in a step: {words_for_all(error)}"


def _shared(token_ids: mx.array, ranks: Ranks) -> mx.array:
    """The leader's tokens, on every rank; launched, and not waited for. Followers give zeros."""
    shared = mx.distributed.all_sum(token_ids, group=ranks.group)
    mx.async_eval(shared)
    return shared


def _portable(result: SampledToken | Exception) -> SampledToken | Exception:
    return portable_error(result) if isinstance(result, Exception) else result


def portable_error(error: Exception) -> Exception:
    """The error itself if another process can read it, and else its words."""
    with contextlib.suppress(Exception):
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    return RuntimeError(one_line(error))


def _without_functions(params: SamplingParams) -> SamplingParams:
    """The parameters with stand-ins for functions, which are called on rank 0 alone."""
    if params.sampler is None and not params.logits_processors:
        return params
    return params.clone(
        sampler=None if params.sampler is None else _stand_in,
        logits_processors=[_stand_in] * len(params.logits_processors),
    )


def _stand_in(*arguments: object) -> Any:
    raise RuntimeError("[ranks] functions of a request are called on rank 0")
