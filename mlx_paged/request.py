"""Requests to the engine and its answers. Imports no MLX; the names are vLLM's."""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from mlx_paged.errors import shown
from mlx_paged.foreign_arguments import constructor_refuses_unknown_arguments

if TYPE_CHECKING:
    import mlx.core as mx

    from mlx_paged.core import BlockHash

MAX_LOGPROBS = 20
MAX_COMPLETIONS = 16384  # of one request, as in vLLM
MAX_PRIORITY = 2**31 - 1

# (token ids so far, logits [1, vocab_size]) to logits of the same shape; as in mlx-lm.
LogitsProcessor: TypeAlias = "Callable[[mx.array, mx.array], mx.array]"
# Log-probabilities [1, vocab_size] to a token id [1]; as in mlx-lm.
Sampler: TypeAlias = "Callable[[mx.array], mx.array]"
SeqId = Hashable


@constructor_refuses_unknown_arguments("params")
@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends. The names are vLLM's, the defaults mlx-lm's:
    greedy, 256 tokens.

    Args:
        n: completions of the prompt, 1 to 16,384; the prompt is computed once, and each completion
            has its own draws.
        temperature: 0 takes the most likely token and ignores top_p, top_k and min_p.
        top_p: keep the most likely tokens that together reach this probability, above 0; 1 keeps
            all.
        top_k: keep this many of the most likely tokens; 0 keeps all.
        min_p: keep tokens at least this likely, relative to the most likely one; 0 keeps all.
        seed: the seed of this request's draws, which then do not depend on other requests; ``None``
            takes a fresh one.
        repetition_penalty: above 1, tokens of prompt and answer become less likely (Keskar et al.
            2019); 1 is off.
        presence_penalty: subtracted from the logits of tokens that occur in the answer; 0 is off.
        frequency_penalty: the same, once for each occurrence; 0 is off.
        logit_bias: added to the logits of these token ids.
        stop: end before the first of these texts.
        stop_token_ids: end at the first of these tokens, whose text is left out.
        ignore_eos: continue after the model's end-of-sequence tokens.
        max_tokens: end after this many tokens; -1 continues until the K/V budget is used up.
        logprobs: report the log-probabilities of the sampled token and of this many of the most
            likely ones, 0 to 20. They are those of the model's own logits, before penalties and
            temperature. ``None`` reports none.
        logits_processors: as mlx-lm's: each maps (token ids so far ``[num_tokens]``, logits ``[1,
            vocab_size]``) to new logits, after the penalties. One that raises fails its request and
            no other.
        sampler: a function as mlx-lm's, which takes log-probabilities ``[1, vocab_size]`` after the
            processors and returns a token ``[1]``. It replaces temperature, filters and seed.

    Raises:
        ValueError: a value out of its range, named.
    """

    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int = 256
    logprobs: int | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    sampler: Sampler | None = None

    def __post_init__(self) -> None:
        # A string is one stop text, not a sequence of letters.
        self._normalise("stop", tuple, (self.stop,) if isinstance(self.stop, str) else self.stop)
        self._normalise("stop_token_ids", tuple, self.stop_token_ids)
        self._normalise("logits_processors", tuple, self.logits_processors)
        self._normalise("logit_bias", dict, self.logit_bias)
        for name, is_in_range, what in (
            ("temperature", lambda value: value >= 0, "a number, at least 0"),
            ("top_p", lambda value: 0 < value <= 1, "a number above 0, at most 1"),
            ("min_p", lambda value: 0 <= value <= 1, "a number within 0..1"),
            ("repetition_penalty", lambda value: value > 0, "a number above 0"),
            ("presence_penalty", lambda value: True, "a number"),
            ("frequency_penalty", lambda value: True, "a number"),
        ):
            value = getattr(self, name)
            _check(name, value, _is_number(value) and is_in_range(value), what)
        _check(
            "n",
            self.n,
            _is_whole(self.n) and 1 <= self.n <= MAX_COMPLETIONS,
            f"within 1..{MAX_COMPLETIONS}",
        )
        _check(
            "top_k",
            self.top_k,
            _is_whole(self.top_k) and self.top_k >= 0,
            "a whole number, at least 0",
        )
        _check(
            "seed", self.seed, self.seed is None or _is_whole(self.seed), "a whole number or None"
        )
        for token, bias in self.logit_bias.items():
            is_right = _is_whole(token) and token >= 0 and (_is_number(bias) or bias == -math.inf)
            _check(
                "logit_bias", {token: bias}, is_right, "a mapping of token ids to numbers, or -inf"
            )
        for text in self.stop:
            _check("stop", text, isinstance(text, str) and text != "", "texts that are not empty")
        for token in self.stop_token_ids:
            _check("stop_token_ids", token, _is_whole(token) and token >= 0, "token ids")
        limit = self.max_tokens
        _check(
            "max_tokens",
            limit,
            _is_whole(limit) and (limit == -1 or limit >= 1),
            "at least 1, or -1 for no limit",
        )
        count = self.logprobs
        is_right = count is None or (_is_whole(count) and 0 <= count <= MAX_LOGPROBS)
        _check("logprobs", count, is_right, f"within 0..{MAX_LOGPROBS}, or None")
        for processor in self.logits_processors:
            _check("logits_processors", processor, callable(processor), "functions")
        is_right = self.sampler is None or callable(self.sampler)
        _check("sampler", self.sampler, is_right, "a function, such as make_sampler(...), or None")

    def _normalise(self, name: str, kind: type, value: object) -> None:
        try:
            value = kind(() if value is None else value)
        except Exception:
            # A value of any type may come in, and its __iter__ may raise anything.
            _check(name, value, False, "a mapping" if kind is dict else "a sequence")
        object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def _is_whole(value: object) -> TypeGuard[int]:
    # The guard says int: to a type checker, numbers.Integral has no comparison, and a numpy integer
    # is not one.
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _check(name: str, value: object, is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(f"[sampling_params] {name} must be {what}, got {shown(value)}")


def check_request_id(request_id: object) -> str:
    """Return the id as a ``str``. Raises ``ValueError`` unless it is a text."""
    if not isinstance(request_id, str):
        raise ValueError(f"[engine] request_id must be a text, got {shown(request_id)}")
    return str.__str__(request_id)


def check_priority(priority: object) -> int:
    """Return the priority as an ``int``. Raises ``ValueError`` unless it is a whole number of at
    most 31 bits.
    """
    if not _is_whole(priority) or abs(int(priority)) > MAX_PRIORITY:
        raise ValueError(
            f"[engine] priority must be a whole number within -{MAX_PRIORITY}..{MAX_PRIORITY}, "
            f"got {shown(priority)}"
        )
    return int(priority)


def check_cache_salt(cache_salt: object) -> str | None:
    """Return the salt as a ``str``. Raises ``ValueError`` unless it is ``None`` or a text that is
    not empty.
    """
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise ValueError(
            f"[engine] cache_salt must be a text that is not empty, or None, "
            f"got {shown(cache_salt)}"
        )
    # Block hashes take exactly str: a subclass may be refused, or differ from an equal text.
    return None if cache_salt is None else str.__str__(cache_salt)


PENDING_TOKEN = -1
"""Stands in ``token_ids`` for the token that a step samples, while the next step is planned."""


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
        num_cached_tokens: prompt tokens that were in the prefix cache when the request first ran.
        order: the place in the queue, assigned by the scheduler on arrival; the lowest runs first,
            the highest is preempted first.
        num_drafted_tokens: drafts that were verified, and of these accepted:
            ``num_accepted_tokens``.
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
        "index",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_drafted_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "order",
        "params",
        "priority",
        "request_id",
        "sampling_state",
        "seed",
        "seq_id",
        "status",
        "stop_reason",
        "token_ids",
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
        index: int = 0,
    ):
        self.request_id = request_id
        self.index = index
        self.seq_id: SeqId = (request_id, index)
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.params = params
        self.seed = seed
        self.priority = priority
        self.cache_salt = cache_salt
        self.arrival_time = time.perf_counter()
        self.order: tuple[int, ...] = ()
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.block_hashes: list[BlockHash] = []
        self.status = RequestStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: Exception | None = None
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0
        self.sampling_state: Any = None  # the sampler knows its type
        self.draft_state: Any = None  # the drafter knows its type

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
        return self.params.n if self.index == 0 and self.num_output_tokens == 0 else 1

    @property
    def awaits_token(self) -> bool:
        """Whether its last token is sampled and not read yet."""
        return self.token_ids[-1] == PENDING_TOKEN

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def fork(self, index: int) -> Request:
        """Another completion of the same prompt, which begins with the tokens of this one."""
        child = Request(
            self.request_id,
            self.token_ids,
            self.params,
            seed=self.seed,
            priority=self.priority,
            cache_salt=self.cache_salt,
            index=index,
        )
        child.num_prompt_tokens = self.num_prompt_tokens
        child.arrival_time = self.arrival_time
        child.order = (*self.order[:2], index)
        child.num_computed_tokens = self.num_computed_tokens
        child.num_cached_tokens = self.num_cached_tokens
        child.block_hashes = list(self.block_hashes)
        child.status = self.status
        return child

    def restart(self, num_output_tokens: int) -> None:
        """Keep the first tokens of the answer and forget everything else, as if no step had run.

        The same tokens will be sampled again, since a draw depends only on seed and position.
        """
        del self.token_ids[self.num_prompt_tokens + num_output_tokens :]
        self.num_computed_tokens = 0
        self.block_hashes = []
        self.sampling_state = self.draft_state = None
        self.status = RequestStatus.PREEMPTED if num_output_tokens else RequestStatus.WAITING
        self.finish_reason = self.stop_reason = self.error = None

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


@dataclass
class CompletionOutput:
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
        stop_reason: the stop text or token id that ended it; ``None`` for the end of sequence.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request's answer, as far as it has been generated.

    Args:
        prompt: the text, if the prompt was given as text.
        outputs: the ``n`` completions, in order.
        num_cached_tokens: prompt tokens whose K/V were found in the prefix cache.
        error: the error that failed the request, if any.
        time_to_first_token: seconds from the request's arrival; ``None`` until there is a token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    error: Exception | None = None
    time_to_first_token: float | None = None
