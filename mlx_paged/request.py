"""The outputs of requests, with vLLM's names, and checks of what names a request. Does not import
MLX.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from operator import add
from typing import Generic, Literal, NamedTuple, Self, TypeAlias, TypeVar, overload

from mlx_paged.options.argument_values import Domain, or_none, whole

P = TypeVar("P")
MAX_PRIORITY = 2**31 - 1

SeqId = Hashable
StopReason: TypeAlias = int | str | tuple[int, ...] | None


def _read_text(value: object) -> str | None:
    # Block hashes need exactly str: a subclass may be refused, or hash differently.
    return str.__str__(value) if isinstance(value, str) else None


REQUEST_ID = Domain("a text", _read_text)
PRIORITY = whole(-MAX_PRIORITY, MAX_PRIORITY)
# Of a salt, or of a user.
NAME = or_none(Domain("a text that is not empty", lambda text: _read_text(text) or None))


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability at one position, its rank (1 is the most likely), and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


Reason: TypeAlias = Literal["hit", "new", "continued", "changed", "evicted", "pending", "no_state"]
# The end of a sentence about a prompt, by the reason: compared with the longest sequence with the
# same beginning, if there is one.
REASONS: dict[Reason, str] = {
    "hit": "all whole blocks",
    "new": "no previous sequence begins like it",
    "continued": "it goes on where {other} ended, at token {position}",
    "changed": "it left {other} at token {position}: {change}",
    "evicted": "from token {position} on, what {other} computed was evicted; a larger "
    "--kv-cache-bytes keeps more",
    "pending": "from token {position} on, {other} is being computed",
    "no_state": "from token {position} on its K/V are there, and the recurrent state was not kept; "
    "a larger --kv-cache-bytes keeps more",
}
_CHANGES = {
    "inserted": "{found} inserted",
    "removed": "{expected} removed",
    "replaced": "{expected} replaced by {found}",
    "reordered": "{found} in another order",
}


@dataclass(frozen=True)
class PrefixReport:
    """How much of a prompt was cached, and why not more.

    Args:
        reason: one of :data:`REASONS`.
        position: the first token of the prompt that was not cached (``"evicted"``, ``"pending"``,
            ``"no_state"``) or not computed before; the length of the cached prefix for a full hit.
        other_request_id: the request that it is compared with, if there is one.
        before: the last tokens before ``position``.
        expected: the tokens of the other sequence from ``position`` on.
        found: the tokens of the prompt from ``position`` on.
        num_read_tokens: how many of the cached tokens were read from disk for it.
    """

    request_id: str
    cache_salt: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    reason: Reason
    position: int
    other_request_id: str | None = None
    before: Sequence[int] = ()
    expected: Sequence[int] = ()
    found: Sequence[int] = ()
    num_read_tokens: int = 0

    def change(self) -> Change | None:
        """How the prompt differs from the other sequence, if it does. Takes about a millisecond."""
        return change_between(self.expected, self.found) if self.reason == "changed" else None

    @property
    def explanation(self) -> str:
        """Why no more of the prompt was cached, in a sentence that contains none of its text."""
        cached = f"{self.num_cached_tokens:,} of {_tokens(self.num_prompt_tokens)} cached"
        why = REASONS[self.reason]
        if self.num_read_tokens:
            cached += f", {self.num_read_tokens:,} of them on disk"
            why = "the rest is not there" if self.reason == "new" else why
        position = f"{self.position:,}"
        return f"{cached}: " + why.format(
            other=self.other_request_id, position=position, change=self._change_in_words()
        )

    def _change_in_words(self) -> str:
        change = self.change()
        if change is None:
            return ""
        expected, found = change.num_expected, change.num_found
        is_open = max(expected, found) >= max(len(self.expected), len(self.found))
        if is_open and change.kind == "replaced":
            return "all that follows is different"
        return _CHANGES[change.kind].format(expected=_tokens(expected), found=_tokens(found))


def _tokens(number: int) -> str:
    return f"{number:,} token{'' if number == 1 else 's'}"


class Change(NamedTuple):
    """The first difference between two sequences of tokens: ``num_expected`` tokens of one are
    replaced by ``num_found`` of the other. If they are reordered, they are the same on both sides.
    """

    kind: Literal["inserted", "removed", "replaced", "reordered"]
    num_expected: int
    num_found: int


def change_between(expected: Sequence[int], found: Sequence[int]) -> Change:
    """The difference between two sequences whose first tokens differ."""
    reordered = _reordered(expected, found)
    if reordered is not None:
        return reordered
    matcher = SequenceMatcher(None, expected, found, autojunk=False)
    # A few equal tokens may be a coincidence: the difference continues after them.
    same = next(each for each in matcher.get_matching_blocks() if each.size >= 4 or not each.size)
    if not same.a:
        return Change("inserted", same.a, same.b)
    return Change("replaced" if same.b else "removed", same.a, same.b)


def _reordered(expected: Sequence[int], found: Sequence[int]) -> Change | None:
    """The shortest beginnings of both with the same tokens in another order, if there are some."""
    surplus: Counter[int] = Counter()
    num_unequal = 0
    for number, (left, right) in enumerate(zip(expected, found, strict=False), 1):
        for token, step in ((left, 1), (right, -1)):
            before = surplus[token]
            surplus[token] = after = before + step
            num_unequal += (after != 0) - (before != 0)
        if not num_unequal:
            return Change("reordered", number, number)
    return None


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


@dataclass(frozen=True)
class SpecDecodingStats:
    """How many drafts were verified and accepted, by their position among the drafts of a step.

    A rejected draft counts with all drafts after it. Drafts after an accepted one that ends the
    answer are not verified, and don't count.

    Args:
        num_draft_tokens_per_pos: ``[num_positions]``, verified drafts.
        num_accepted_tokens_per_pos: ``[num_positions]``, of these, accepted ones.
    """

    num_draft_tokens_per_pos: tuple[int, ...] = ()
    num_accepted_tokens_per_pos: tuple[int, ...] = ()

    @classmethod
    def of_step(cls, num_draft_tokens: int, num_accepted_tokens: int) -> SpecDecodingStats:
        """One sequence in one step, whose first ``num_accepted_tokens`` drafts were accepted."""
        num_rejected = num_draft_tokens - num_accepted_tokens
        return cls((1,) * num_draft_tokens, (1,) * num_accepted_tokens + (0,) * num_rejected)

    def __add__(self, other: SpecDecodingStats) -> SpecDecodingStats:
        return SpecDecodingStats(
            _sums(self.num_draft_tokens_per_pos, other.num_draft_tokens_per_pos),
            _sums(self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos),
        )

    @property
    def num_drafts(self) -> int:
        """How often drafts were verified: once per sequence and step."""
        return self.num_draft_tokens_per_pos[0] if self.num_draft_tokens_per_pos else 0

    @property
    def num_draft_tokens(self) -> int:
        return sum(self.num_draft_tokens_per_pos)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.num_accepted_tokens_per_pos)

    @property
    def acceptance_rate(self) -> float:
        """The share of drafts that were accepted; 0 without drafts."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)

    @property
    def acceptance_rate_per_pos(self) -> list[float]:
        """``[num_positions]``, the same by position."""
        counts = zip(self.num_accepted_tokens_per_pos, self.num_draft_tokens_per_pos, strict=True)
        return [num_accepted / num_drafts for num_accepted, num_drafts in counts]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens of a sequence per step with drafts: the accepted ones and the one after them."""
        return 1 + self.num_accepted_tokens / max(1, self.num_drafts)


def _sums(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    if len(first) < len(second):
        first, second = second, first
    return (*map(add, first, second), *first[len(second) :])


NO_DRAFTS = SpecDecodingStats()


@dataclass
class CompletionOutput(_Copied):
    """One completion of a request, as far as it has been generated.

    Args:
        text: whole characters only; the end of the text is held back while it may begin a stop
            text.
        cumulative_logprob: the sum over the tokens, if ``logprobs`` were requested.
        logprobs: for each token, those of the most likely tokens and its own.
        spec_decoding: how many drafts were verified and accepted.
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
    spec_decoding: SpecDecodingStats = NO_DRAFTS

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
        time_to_first_token: seconds from the request's arrival to its first token, or to what is
            pooled; ``None`` until there is one. For ``queue_time`` of them it had not run yet.
        decode_time: seconds from the first token to the latest one, of any completion.
        prompt_logprobs: for each prompt token that is computed, the log-probabilities of the most
            likely tokens at its position and its own; ``None`` for the first token. ``None`` if
            they were not requested.
        pooled: the embedding, or the logits, of a request with ``PoolingParams``, once it is
            finished; the completion is empty then. ``None`` for other requests.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: _Finished = _Finished()
    num_cached_tokens: int = 0
    error: Exception | None = None
    time_to_first_token: float | None = None
    queue_time: float | None = None
    decode_time: float = 0.0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prefix_report: PrefixReport | None = None
    num_read_tokens: int = 0
    pooled: list[float] | None = None

    def raise_if_failed(self) -> None:
        """Raise the request's error, unless some of its completions did not fail."""
        has_failed = all(completion.finish_reason == "error" for completion in self.outputs)
        if self.error is not None and has_failed:
            raise self.error


@dataclass(frozen=True)
class EmbeddingOutput:
    """The embedding of a prompt, ``[dimensions]``."""

    embedding: list[float]


@dataclass(frozen=True)
class ScoringOutput:
    """How well a document answers a query, from 0 to 1."""

    score: float


@dataclass(frozen=True)
class PoolingRequestOutput(Generic[P]):
    """The answer to a request that generates no tokens.

    Args:
        outputs: the embedding or the score.
        num_cached_tokens: prompt tokens whose K/V were found in the prefix cache.
        finished: always true; as in vLLM.
    """

    request_id: str
    outputs: P
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
