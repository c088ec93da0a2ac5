"""Requests to the engine and its answers. Imports no MLX; the names are vLLM's."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias, overload

from mlx_paged.domains import Domain, or_none, whole
from mlx_paged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mlx_paged.core import BlockHash
    from mlx_paged.engine.compiled_grammar import CompiledGrammar
    from mlx_paged.engine.prefix_report import PrefixReport
    from mlx_paged.reasoning import ReasoningLimit

MAX_PRIORITY = 2**31 - 1

SeqId = Hashable
StopReason: TypeAlias = int | str | tuple[int, ...] | None


def _read_text(value: object) -> str | None:
    # Block hashes take exactly str: a subclass may be refused, or differ from an equal text.
    return str.__str__(value) if isinstance(value, str) else None


REQUEST_ID = Domain("a text", _read_text)
PRIORITY = whole(-MAX_PRIORITY, MAX_PRIORITY)
_CACHE_SALT = or_none(Domain("a text that is not empty", lambda salt: _read_text(salt) or None))


def check_cache_salt(cache_salt: object) -> str | None:
    """The salt as a ``str``. Raises ``ArgumentError`` unless it is ``None`` or a text that is not
    empty.
    """
    salt: str | None = _CACHE_SALT.check("engine", "cache_salt", cache_salt)
    return salt


PENDING_TOKEN = -1
"""Stands in ``token_ids`` for the token that a step samples, while the next step is planned."""


class TokenRules(NamedTuple):
    """What a request's parameters require of tokens, in the ids of its model and tokenizer."""

    eos_token_ids: frozenset[int] = frozenset()  # of those that the model has
    bad_words: tuple[tuple[int, ...], ...] = ()  # each at least one token
    grammar: CompiledGrammar | None = None  # what the answer has to be
    reasoning: ReasoningLimit | None = None  # how long it may reason


NO_RULES = TokenRules()


class ModuleState:
    """What one module keeps of a request between two steps. Each module derives a class of its own
    and reads that class only, so that requests don't depend on the modules that work on them.
    """

    __slots__ = ()


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again, after it ran
    FINISHED = "finished"


class Request:
    """One sequence on its way through the engine: a completion of a prompt, with its tokens and how
    many of them are computed.

    There is no prefill phase and no decode phase: the remaining work is ``num_tokens -
    num_computed_tokens``. A request for n completions begins as one sequence and is forked when its
    prompt is computed.

    Attributes:
        seq_id: the sequence's name in the cache: the request's id and the index of the completion.
        token_ids: prompt and answer; :data:`PENDING_TOKEN` may be the last one.
        num_computed_tokens: how many of them have K/V, or will have them after the current step.
        block_hashes: the hashes of the full blocks, as far as they were computed.
        cache_salt: requests with different salts never share K/V.
        no_store: none of its blocks is written to disk.
        num_cached_tokens: prompt tokens that were in the prefix cache when the request first ran;
            of these, ``num_read_tokens`` had come from disk for it.
        num_saved_blocks: full blocks that a tier on disk has taken note of.
        first_scheduled_time: when a step took it on for the first time; before that, its
            ``arrival_time``.
        prefix_report: why these were not more, where the scheduler remembers past sequences.
        order: the place in the queue, assigned by the scheduler on arrival; the lowest runs first,
            the highest is preempted first.
        num_preemptions: how often it had to wait again; after some times it makes way for no more
            urgent one.
        num_drafted_tokens: drafts that were verified, and of these accepted:
            ``num_accepted_tokens``.
        num_unscored_tokens: prompt tokens whose log-probabilities are wanted and not read yet; they
            are the last ones.
        sampling_state: what the sampler keeps between two tokens.
        draft_state: what the drafter keeps between two steps.
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
        "status",
        "stop_reason",
        "token_ids",
        "token_rules",
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
        # Log-probabilities of a prompt's tokens, if they are wanted. The first one has none.
        is_scored = params.prompt_logprobs is not None
        self.num_unscored_tokens = self.num_prompt_tokens - 1 if is_scored else 0
        self.seed = seed
        self.priority = priority
        self.cache_salt = cache_salt
        self.no_store = no_store
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
        """How many sequences this is, or will be when its prompt is computed."""
        is_whole = self.index == 0 and len(self.token_ids) == self.num_prompt_tokens
        return self.params.n if is_whole else 1

    @property
    def awaits_token(self) -> bool:
        """Whether its last token is sampled and not read yet."""
        return self.token_ids[-1] == PENDING_TOKEN

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def num_scored_rows(self, start: int, end: int) -> int:
        """Of how many of the tokens ``start : end`` the logits are those of a prompt token that is
        not scored yet. A row's logits are of the token after it.
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
        """The token that it awaits does not come."""
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
            index=index,
            token_rules=self.token_rules,
        )
        child.num_prompt_tokens = self.num_prompt_tokens
        child.num_unscored_tokens = 0  # The prompt is the parent's.
        child.arrival_time = self.arrival_time
        child.first_scheduled_time = self.first_scheduled_time
        child.order = (*self.order[:2], index)
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
    """A token's log-probability at one position, its rank there (1: the most likely), its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


class CallableBool(int):
    """A bool that may be called, too. In vLLM, ``finished`` is an attribute of a
    ``RequestOutput`` and a method of a ``CompletionOutput``; here both are either.
    """

    def __call__(self) -> bool:
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))

    __str__ = __repr__


class _Finished:
    """A field of an output, False by default, that is read as a :class:`CallableBool`."""

    @overload
    def __get__(self, output: None, kind: type) -> bool: ...
    @overload
    def __get__(self, output: RequestOutput, kind: type) -> CallableBool: ...
    def __get__(self, output: RequestOutput | None, kind: type) -> bool | CallableBool:
        return False if output is None else vars(output)["finished"]

    def __set__(self, output: RequestOutput, is_finished: bool) -> None:
        vars(output)["finished"] = CallableBool(bool(is_finished))


class _Copied:
    """Copied field by field, in a third of the time that ``copy.copy`` takes for other objects:
    outputs are copied for each token.
    """

    def __copy__(self) -> Self:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied


@dataclass
class CompletionOutput(_Copied):
    """One completion of a request, as far as it has been generated.

    Args:
        text: whole characters only; text that may begin a stop text is held back until that is
            decided.
        cumulative_logprob: the sum over the tokens, if ``logprobs`` were requested.
        logprobs: for each token, those of the most likely tokens and its own.
        num_drafted_tokens: drafts of its tokens that were verified, and of these accepted:
            ``num_accepted_tokens``.
        finish_reason: ``"stop"`` (end of sequence, stop token or stop text), ``"length"``
            (``max_tokens``, or the K/V budget), ``"abort"``, ``"error"``, or ``None`` while it
            continues.
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
        num_read_tokens: of these, the tokens whose K/V were read from disk for this request.
        prefix_report: why these were not more; only with the engine's ``num_history_tokens``.
        finished: whether all completions have ended; as an attribute and as a method.
        error: what failed the request or some of its completions. One rule holds for all calls:
            where a prompt has failed, its error is raised (:meth:`raise_if_failed`), and the call
            ends. Outputs of several prompts hold errors where the call asks for that
            (``raise_on_error=False``), and those of :meth:`Engine.step` always do: its requests
            belong to different readers.
        time_to_first_token: seconds from the request's arrival; ``None`` until there is a token.
        prompt_logprobs: for each prompt token, as far as they are computed, those of the most
            likely tokens at its place and its own; ``None`` for the first one. ``None`` where none
            were asked for.
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
        """Raise what failed the request. Where some of its completions did not fail, they are an
        answer, and nothing is raised.
        """
        has_failed = all(completion.finish_reason == "error" for completion in self.outputs)
        if self.error is not None and has_failed:
            raise self.error
