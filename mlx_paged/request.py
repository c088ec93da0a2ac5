"""Requests to the engine and their outputs, with vLLM's names. Does not import MLX."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias, overload

from mlx_paged.domains import Domain, or_none, whole
from mlx_paged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mlx_paged.answers.dialect import AnswerFormat
    from mlx_paged.answers.tokens import ReasoningLimit
    from mlx_paged.core import BlockHash
    from mlx_paged.engine.compiled_grammar import CompiledGrammar
    from mlx_paged.engine.prefix_report import PrefixReport

MAX_PRIORITY = 2**31 - 1

SeqId = Hashable
StopReason: TypeAlias = int | str | tuple[int, ...] | None


def _read_text(value: object) -> str | None:
    # Block hashes need exactly str: a subclass may be refused, or hash differently.
    return str.__str__(value) if isinstance(value, str) else None


REQUEST_ID = Domain("a text", _read_text)
PRIORITY = whole(-MAX_PRIORITY, MAX_PRIORITY)
_NAME = or_none(Domain("a text that is not empty", lambda text: _read_text(text) or None))


def check_cache_salt(cache_salt: object) -> str | None:
    """The salt as a ``str``. Raises ``ArgumentError`` unless it is ``None`` or a text that is not
    empty.
    """
    salt: str | None = _NAME.check("engine", "cache_salt", cache_salt)
    return salt


def check_user(user: object) -> str | None:
    """The name of a user; errors as :func:`check_cache_salt`."""
    name: str | None = _NAME.check("engine", "user", user)
    return name


PENDING_TOKEN = -1
"""Placeholder in ``token_ids`` for the token of a step in flight, while the next one is planned."""


class TokenRules(NamedTuple):
    """A request's constraints on tokens, in the ids of its model and tokenizer."""

    eos_token_ids: frozenset[int] = frozenset()  # within the model's vocabulary
    bad_words: tuple[tuple[int, ...], ...] = ()  # each at least one token
    grammar: CompiledGrammar | None = None  # of the answer
    reasoning: ReasoningLimit | None = None
    answer_format: AnswerFormat | None = None  # of the marks in its text; None: as it is decoded


NO_RULES = TokenRules()


class ModuleState:
    """The state that a module keeps for a request between two steps. Each module derives its own
    class, so that requests don't depend on the modules that process them.
    """

    __slots__ = ()


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again
    FINISHED = "finished"


class Share:
    """What a user has of a scheduler, for :class:`~mlx_paged.engine.request_queues.FairShares`.

    Args:
        number: in the order in which users came; decides between equal users.
        work: what was done for the user so far.

    Attributes:
        rank: among the users, in the current step: the requests of the lowest one come first.
        num_running: running sequences.
        waiting: waiting requests, in their order.
    """

    __slots__ = ("num_running", "number", "rank", "user", "waiting", "work")

    def __init__(self, user: str | None, number: int = 0, work: int = 0):
        self.user = user
        self.number = number
        self.work = work
        self.rank = self.num_running = 0
        self.waiting: list[Request] = []

    @property
    def is_active(self) -> bool:
        """Whether the user has requests."""
        return bool(self.num_running or self.waiting)

    @property
    def admission_turn(self) -> tuple[int, int, int]:
        """The user for whom it is lowest is the next whose request is admitted: the one of whom the
        fewest sequences run, then the one with the least work.
        """
        return self.num_running, self.work, self.number

    @property
    def step_turn(self) -> tuple[bool, int, int]:
        """The user for whom it is lowest is the first in a step, and has its tokens for prompts:
        one of whom nothing runs yet, then the one with the least work.
        """
        return self.num_running > 0, self.work, self.number


class Request:
    """A sequence in the engine: a completion of a prompt, with its tokens and the number of those
    that are computed.

    There is no prefill phase and no decode phase: the remaining work is ``num_tokens -
    num_computed_tokens``. A request for n completions begins as one sequence and is forked when its
    prompt is computed.

    Attributes:
        seq_id: identifies the sequence in the cache: request id and index of the completion.
        token_ids: prompt and answer; :data:`PENDING_TOKEN` may be the last one.
        num_computed_tokens: how many of them have K/V, or will have them after the current step.
        block_hashes: the hashes of the full blocks, as far as they were computed.
        cache_salt: requests with different salts never share K/V.
        no_store: whether its blocks are kept from being written to disk.
        user: users have fair shares of the engine; ``None`` is one of them.
        share: that of its user, assigned by the scheduler on arrival.
        num_cached_tokens: prompt tokens found in the prefix cache when the request first ran;
            ``num_read_tokens`` of them were read from disk for it.
        num_saved_blocks: full blocks that were passed to a tier on disk.
        first_scheduled_time: when it was first scheduled; before that, its ``arrival_time``.
        prefix_report: why no more tokens were cached, if the scheduler keeps past sequences.
        order: the position in the queue, assigned by the scheduler on arrival; the lowest runs
            first, the highest is preempted first.
        num_preemptions: how often it was preempted; after a number of times, more urgent requests
            no longer preempt it.
        num_drafted_tokens: drafts that were verified; ``num_accepted_tokens`` of them were
            accepted.
        num_unscored_tokens: the last prompt tokens, whose requested log-probabilities are not read
            yet.
        sampling_state: the sampler's state between two tokens.
        draft_state: the drafter's state between two steps.
    """

    __slots__ = (
        "arrival_time",
        "block_hashes",
        "cache_salt",
        "draft_state",
        "error",
        "finish_reason",
        "first_scheduled_time",
        "index",
        "no_store",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_drafted_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_read_tokens",
        "num_saved_blocks",
        "num_unscored_tokens",
        "order",
        "params",
        "prefix_report",
        "priority",
        "request_id",
        "sampling_state",
        "seed",
        "seq_id",
        "share",
        "status",
        "stop_reason",
        "token_ids",
        "token_rules",
        "user",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        priority: int = 0,
        cache_salt: str | None = None,
        no_store: bool = False,
        user: str | None = None,
        index: int = 0,
        token_rules: TokenRules = NO_RULES,
    ):
        self.request_id = request_id
        self.index = index
        self.seq_id: SeqId = (request_id, index)
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.params = params
        self.token_rules = token_rules
        # Log-probabilities of the prompt's tokens, if requested. The first token has none.
        is_scored = params.prompt_logprobs is not None
        self.num_unscored_tokens = self.num_prompt_tokens - 1 if is_scored else 0
        self.seed = seed
        self.priority = priority
        self.cache_salt = cache_salt
        self.no_store = no_store
        self.user = user
        self.share = Share(user)
        self.arrival_time = self.first_scheduled_time = time.perf_counter()
        self.order: tuple[int, ...] = ()
        self.num_computed_tokens = 0
        self.num_cached_tokens = self.num_read_tokens = 0
        self.num_saved_blocks = 0
        self.prefix_report: PrefixReport | None = None
        self.num_preemptions = 0
        self.block_hashes: list[BlockHash] = []
        self.status = RequestStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: StopReason = None
        self.error: Exception | None = None
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0
        self.sampling_state: ModuleState | None = None
        self.draft_state: ModuleState | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_seqs(self) -> int:
        """The number of sequences that this is, or will be when its prompt is computed."""
        is_whole = self.index == 0 and len(self.token_ids) == self.num_prompt_tokens
        return self.params.n if is_whole else 1

    @property
    def awaits_token(self) -> bool:
        """Whether its last token is pending: sampled, but not read yet."""
        return self.token_ids[-1] == PENDING_TOKEN

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def num_scored_rows(self, start: int, end: int) -> int:
        """The number of rows ``start : end`` whose logits score a prompt token that is not scored
        yet. A row's logits score the token after it.
        """
        num_scored = self.num_prompt_tokens - 1 - self.num_unscored_tokens
        return max(0, min(end, self.num_prompt_tokens - 1) - max(start, num_scored))

    def ending_sequence(self) -> tuple[int, ...] | None:
        """The stop sequence that the answer ends with; the longest, if there are several."""
        for sequence in self.params.stop_sequences:
            length = len(sequence)
            if length <= self.num_output_tokens and sequence == tuple(self.token_ids[-length:]):
                return sequence
        return None

    def forget_awaited_token(self) -> None:
        """Drop the pending token, which will not be read."""
        if self.awaits_token:
            self.token_ids.pop()

    def fork(self, index: int) -> Request:
        """Another completion of the same prompt, which begins with the tokens of this one."""
        child = Request(
            self.request_id,
            self.token_ids,
            self.params,
            seed=self.seed,
            priority=self.priority,
            cache_salt=self.cache_salt,
            no_store=self.no_store,
            user=self.user,
            index=index,
            token_rules=self.token_rules,
        )
        child.num_prompt_tokens = self.num_prompt_tokens
        child.num_unscored_tokens = 0  # The prompt is the parent's.
        child.arrival_time = self.arrival_time
        child.first_scheduled_time = self.first_scheduled_time
        child.order = (*self.order[:2], index)
        child.share = self.share
        child.num_computed_tokens = self.num_computed_tokens
        child.num_cached_tokens = self.num_cached_tokens
        child.num_read_tokens = self.num_read_tokens
        child.block_hashes = list(self.block_hashes)
        child.status = self.status
        return child

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.index}, {self.status.value}, "
            f"{self.num_computed_tokens} of {self.num_tokens} tokens computed)"
        )


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability at one position, its rank (1 is the most likely), and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


class CallableBool(int):
    """A bool that can also be called. In vLLM, ``finished`` is an attribute of a
    ``RequestOutput`` and a method of a ``CompletionOutput``; here it is both in either.
    """

    def __call__(self) -> bool:
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))

    __str__ = __repr__


class _Finished:
    """A field of an output, False by default, whose value is a :class:`CallableBool`."""

    @overload
    def __get__(self, output: None, kind: type) -> bool: ...
    @overload
    def __get__(self, output: RequestOutput, kind: type) -> CallableBool: ...
    def __get__(self, output: RequestOutput | None, kind: type) -> bool | CallableBool:
        return False if output is None else vars(output)["finished"]

    def __set__(self, output: RequestOutput, is_finished: bool) -> None:
        vars(output)["finished"] = CallableBool(bool(is_finished))


class _Copied:
    """Copied in a third of the time that ``copy.copy`` takes by default, since outputs are copied
    for each token.
    """

    def __copy__(self) -> Self:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied


@dataclass
class CompletionOutput(_Copied):
    """One completion of a request, as far as it has been generated.

    Args:
        text: whole characters only; the end of the text is held back while it may begin a stop
            text.
        cumulative_logprob: the sum over the tokens, if ``logprobs`` were requested.
        logprobs: for each token, those of the most likely tokens and its own.
        num_drafted_tokens: drafts that were verified; ``num_accepted_tokens`` of them were
            accepted.
        finish_reason: ``"stop"`` (end of sequence, stop token or stop text), ``"length"``
            (``max_tokens``, the context limit or the K/V budget), ``"abort"``, ``"error"``, or
            ``None`` while it continues.
        stop_reason: the stop text, the token id or the sequence of token ids that ended it;
            ``None`` for the end of sequence.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: StopReason = None
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def finished(self) -> CallableBool:
        """Whether it has ended; as an attribute and, as in vLLM, as a method."""
        return CallableBool(self.finish_reason is not None)


@dataclass
class RequestOutput(_Copied):
    """A request's answer, as far as it has been generated.

    Args:
        prompt: the text, if the prompt was given as text.
        outputs: the ``n`` completions, in order.
        num_cached_tokens: prompt tokens whose K/V were found in the prefix cache.
        num_read_tokens: the number of these whose K/V were read from disk for this request.
        prefix_report: why no more were cached; only with the engine's ``num_history_tokens``.
        finished: whether all completions have ended; as an attribute and as a method.
        error: the error of the request, or of some of its completions. Calls raise it
            (:meth:`raise_if_failed`), except those with ``raise_on_error=False``, and
            :meth:`Engine.step`, whose requests belong to different readers.
        time_to_first_token: seconds from the request's arrival; ``None`` until there is a token.
        prompt_logprobs: for each prompt token that is computed, the log-probabilities of the most
            likely tokens at its position and its own; ``None`` for the first token. ``None`` if
            they were not requested.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: _Finished = _Finished()
    num_cached_tokens: int = 0
    error: Exception | None = None
    time_to_first_token: float | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prefix_report: PrefixReport | None = None
    num_read_tokens: int = 0

    def raise_if_failed(self) -> None:
        """Raise the request's error, unless some of its completions did not fail."""
        has_failed = all(completion.finish_reason == "error" for completion in self.outputs)
        if self.error is not None and has_failed:
            raise self.error
