"""``Request``: what a user asked for; ``Completion``: one of the answers to it, as the engine runs
it. Pure Python, no arrays.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mlx_paged.options.sampling_params import PoolingParams, RequestOutputKind, SamplingParams
from mlx_paged.request import (
    CompletionOutput,
    Logprob,
    PrefixReport,
    RequestOutput,
    SeqId,
    StopReason,
)

if TYPE_CHECKING:
    from mlx_paged.answers.dialect import AnswerFormat
    from mlx_paged.answers.tokens import ReasoningLimit
    from mlx_paged.core import BlockHash
    from mlx_paged.engine.sampling.grammar import CompiledGrammar
    from mlx_paged.engine.speculation.draft_record import DraftRecord
    from mlx_paged.engine.text_stream import TextStream, TokenTexts
    from mlx_paged.models.adapters import Adapter

T = TypeVar("T")

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
# Of a request with ``PoolingParams``, which generates nothing.
NO_SAMPLING = SamplingParams(
    max_tokens=None, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)


class SampledToken(NamedTuple):
    """A token and, if requested, its log-probability and those of the most likely tokens."""

    token_id: int
    logprobs: dict[int, Logprob] | None = None


class Share:
    """What a user has of a scheduler, for
    :class:`~mlx_paged.engine.scheduling.request_queues.RequestQueues`.

    Args:
        number: in the order in which users came; decides between equal users.
        work: what was done for the user so far.

    Attributes:
        rank: among the users, in the current step: the completions of the lowest one come first.
        num_running: running completions.
        waiting: waiting completions, in their order.
    """

    __slots__ = ("num_running", "number", "rank", "user", "waiting", "work")

    def __init__(self, user: str | None, number: int = 0, work: int = 0):
        self.user = user
        self.number = number
        self.work = work
        self.rank = self.num_running = 0
        self.waiting: list[Completion] = []

    @property
    def is_active(self) -> bool:
        """Whether the user has requests."""
        return bool(self.num_running or self.waiting)


_ARGUMENTS = (
    *("request_id", "prompt_token_ids", "params", "seed"),
    *("priority", "cache_salt", "no_store", "user"),
)


class Request:
    """What a user asked for, and what its completions have in common.

    Attributes:
        cache_salt: requests with different salts never share K/V.
        no_store: whether its blocks are kept from being written to disk.
        user: users have fair shares of the engine; ``None`` is one of them.
        adapter: that it runs with; ``None`` for the model alone.
        pooling: what it is answered with when its prompt is computed; ``None`` if tokens are
            generated.
        share: that of its user, assigned by the scheduler on arrival.
        texts: of the tokenizer's tokens; ``None`` if no text is wanted.
        streams: make the text of each completion; empty if none is wanted.
        completions: one at first, which is forked when the prompt is computed. ``n`` after that.
        output: the reader's, which grows with each token; it has all completions from the start.
        first_scheduled_time: when it was first scheduled; before that, its ``arrival_time``.
        first_token_time: when its first token was reported; ``None`` before that.
        num_cached_tokens: prompt tokens found in the prefix cache when the request first ran;
            ``num_read_tokens`` of them were read from disk for it.
        prefix_report: why no more tokens were cached, if the scheduler keeps past sequences.
    """

    __slots__ = (
        "adapter",
        "arrival_time",
        "cache_salt",
        "completions",
        "first_scheduled_time",
        "first_token_time",
        "no_store",
        "num_cached_tokens",
        "num_read_tokens",
        "output",
        "params",
        "pooling",
        "prefix_report",
        "priority",
        "prompt_token_ids",
        "request_id",
        "seed",
        "share",
        "streams",
        "texts",
        "token_rules",
        "user",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | PoolingParams,
        *,
        seed: int = 0,
        priority: int = 0,
        cache_salt: str | None = None,
        no_store: bool = False,
        user: str | None = None,
        token_rules: TokenRules = NO_RULES,
        prompt: str | None = None,
    ):
        self.request_id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        self.pooling = params if isinstance(params, PoolingParams) else None
        self.params = params = NO_SAMPLING if isinstance(params, PoolingParams) else params
        self.seed = seed
        self.priority = priority
        self.cache_salt = cache_salt
        self.no_store = no_store
        self.user = user
        self.adapter: Adapter | None = None
        self.token_rules = token_rules
        self.share = Share(user)
        self.arrival_time = self.first_scheduled_time = time.perf_counter()
        self.first_token_time: float | None = None
        self.num_cached_tokens = self.num_read_tokens = 0
        self.prefix_report: PrefixReport | None = None
        self.texts: TokenTexts | None = None
        self.streams: Sequence[TextStream] = ()
        outputs = [CompletionOutput(index) for index in range(params.n)]
        self.output = RequestOutput(request_id, prompt, list(self.prompt_token_ids), outputs)
        # The first token has no log-probability.
        self.output.prompt_logprobs = None if params.prompt_logprobs is None else [None]
        self.completions = [Completion(self, 0)]

    @property
    def arguments(self) -> list[object]:
        """Everything that plans depend on; another rank makes the same request from it."""
        given = {name: getattr(self, name) for name in _ARGUMENTS}
        return list({**given, "params": self.pooling or self.params}.values())

    @classmethod
    def from_arguments(cls, arguments: Sequence[Any]) -> Request:
        """A request with these :attr:`arguments`."""
        return cls(**dict(zip(_ARGUMENTS, arguments, strict=True)))

    @property
    def is_embedded(self) -> bool:
        """Whether it is answered with the embedding of its prompt."""
        return self.pooling is not None and self.pooling.is_embedding

    def begin_output(self) -> None:
        """Its first token, or what is pooled, is there."""
        self.output.time_to_first_token = time.perf_counter() - self.arrival_time
        self.output.queue_time = self.first_scheduled_time - self.arrival_time
        self.output.num_cached_tokens = self.num_cached_tokens
        self.output.num_read_tokens = self.num_read_tokens
        self.output.prefix_report = self.prefix_report

    def add_prompt_logprobs(self, entries: Sequence[Mapping[int, Logprob]]) -> None:
        """Add the log-probabilities of the next tokens of the prompt."""
        known = self.output.prompt_logprobs or ()
        # A new list, because outputs that were reported must not change.
        self.output.prompt_logprobs = [*known, *map(self.with_texts, entries)]
        self.completions[0].num_unscored_tokens -= len(entries)

    def with_texts(self, entries: Mapping[int, Logprob]) -> dict[int, Logprob]:
        """The log-probabilities with the texts of their tokens."""
        texts = self.texts
        return {
            token: Logprob(
                entry.logprob, entry.rank, None if texts is None else texts.text_of(token)
            )
            for token, entry in entries.items()
        }

    def new_part(self) -> RequestOutput:
        """What is new in the output since it was last reported (``RequestOutputKind.DELTA``). The
        last part has all completions, so that it says how each of them ended.
        """
        part = copy.copy(self.output)
        part.outputs = [
            completion.new_part()
            for completion in self.completions
            if part.finished or completion.has_news()
        ]
        return part


class CompletionStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again
    FINISHED = "finished"


class Completion:
    """One completion of a request, with its tokens and the number of those that are computed: the
    scheduler's unit, a sequence in the cache.

    There is no prefill phase and no decode phase: the remaining work is ``num_tokens -
    num_computed_tokens``.

    Attributes:
        seq_id: identifies it in the cache: request id and index.
        token_ids: prompt and answer; :data:`PENDING_TOKEN` may be the last one.
        num_computed_tokens: how many of them have K/V, or will have them after the current step.
        num_unscored_tokens: the last prompt tokens, whose requested log-probabilities are not read
            yet.
        block_hashes: the hashes of the full blocks, as far as they were computed.
        num_saved_blocks: full blocks that were passed to a tier on disk.
        order: the position in the queue, assigned by the scheduler on arrival; the lowest runs
            first, the highest is preempted first.
        num_preemptions: how often it was preempted; after a number of times, more urgent requests
            no longer preempt it.
        sampling_state: the sampler's state between two tokens.
        draft_record: how its drafts have fared; ``None`` before the first were considered.
        draft_state: the drafter's state between two steps.
        output: the reader's, which grows with each token.
        num_reported_tokens, num_reported_characters: how much of the output was reported.
        last_token_time: when the last token was reported; seconds of ``time.perf_counter``.
        is_end_reported: whether its end was reported.
    """

    __slots__ = (
        "block_hashes",
        "draft_record",
        "draft_state",
        "error",
        "finish_reason",
        "index",
        "is_end_reported",
        "last_token_time",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_reported_characters",
        "num_reported_tokens",
        "num_saved_blocks",
        "num_unscored_tokens",
        "order",
        "output",
        "request",
        "sampling_state",
        "seq_id",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, request: Request, index: int):
        self.request = request
        self.index = index
        self.seq_id: SeqId = (request.request_id, index)
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = self.num_saved_blocks = self.num_preemptions = 0
        # Log-probabilities of the prompt's tokens are those of the first completion.
        is_scored = request.params.prompt_logprobs is not None and not index
        self.num_unscored_tokens = self.num_prompt_tokens - 1 if is_scored else 0
        self.block_hashes: list[BlockHash] = []
        self.order: tuple[int, ...] = ()
        self.status = CompletionStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: StopReason = None
        self.error: Exception | None = None
        self.sampling_state: object = None
        self.draft_record: DraftRecord | None = None
        self.draft_state: object = None
        self.output = request.output.outputs[index]
        self.num_reported_tokens = self.num_reported_characters = 0
        self.last_token_time = 0.0
        self.is_end_reported = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

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
        """The number of completions that this is, or will be when its prompt is computed."""
        is_whole = self.index == 0 and len(self.token_ids) == self.num_prompt_tokens
        return self.request.params.n if is_whole else 1

    @property
    def awaits_token(self) -> bool:
        """Whether its last token is pending: sampled, but not read yet."""
        return self.token_ids[-1] == PENDING_TOKEN

    @property
    def is_finished(self) -> bool:
        return self.status is CompletionStatus.FINISHED

    def num_scored_rows(self, start: int, end: int) -> int:
        """The number of rows ``start : end`` whose logits score a prompt token that is not scored
        yet. A row's logits score the token after it.
        """
        num_scored = self.num_prompt_tokens - 1 - self.num_unscored_tokens
        return max(0, min(end, self.num_prompt_tokens - 1) - max(start, num_scored))

    def ending_sequence(self) -> tuple[int, ...] | None:
        """The stop sequence that the answer ends with; the longest, if there are several."""
        for sequence in self.request.params.stop_sequences:
            length = len(sequence)
            if length <= self.num_output_tokens and sequence == tuple(self.token_ids[-length:]):
                return sequence
        return None

    def fork(self, index: int) -> Completion:
        """Another completion of the same prompt, which begins with the tokens of this one. It is
        not in ``request.completions`` yet.
        """
        child = Completion(self.request, index)
        child.token_ids = list(self.token_ids)
        child.order = (*self.order[:2], index)
        child.num_computed_tokens = self.num_computed_tokens
        child.block_hashes = list(self.block_hashes)
        child.status = self.status
        return child

    # Its output

    def add_token(self, sampled: SampledToken) -> str | None:
        """Add a token to the output; returns the stop text that it completed, if any."""
        request, output, whole = self.request, self.output, self.request.output
        if whole.time_to_first_token is None:
            request.begin_output()
        else:
            seconds = time.perf_counter() - request.arrival_time
            whole.decode_time = seconds - whole.time_to_first_token
        output.token_ids.append(sampled.token_id)
        if sampled.logprobs is not None:
            output.logprobs = output.logprobs or []
            output.logprobs.append(request.with_texts(sampled.logprobs))
            logprob = sampled.logprobs[sampled.token_id].logprob
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + logprob
        # The stop token is left out of the text, unless the user wants it.
        if not request.streams or (
            self.finish_reason == "stop" and not request.params.include_stop_str_in_output
        ):
            return None
        stream = request.streams[self.index]
        stop_text = stream.add(sampled.token_id)
        output.text = stream.text
        return stop_text

    def end_output(self) -> None:
        """End the output of a finished completion, and those that it was not forked into yet."""
        request, reasons = self.request, (self.finish_reason, self.stop_reason)
        # Tokens of the text that belong to the stop sequence: its last one was not added.
        num_left_out = 0
        if isinstance(self.stop_reason, tuple) and not request.params.include_stop_str_in_output:
            num_left_out = len(self.stop_reason) - 1
        ending = [self]
        if len(request.completions) == 1:
            ending += [self.fork(index) for index in range(1, request.params.n)]
            request.completions = ending
        for each in ending:
            output, stop_text = each.output, None
            if request.streams:
                stream = request.streams[each.index]
                stop_text = stream.finish(num_left_out)
                output.text = stream.text
            output.finish_reason, output.stop_reason = (
                reasons if stop_text is None else ("stop", stop_text)
            )
        request.output.error = request.output.error or self.error
        request.output.finished = all(each.finished for each in request.output.outputs)

    def has_news(self) -> bool:
        """Whether the output has changed since it was last reported."""
        output = self.output
        return (
            len(output.token_ids) != self.num_reported_tokens
            or len(output.text) != self.num_reported_characters
            or (output.finish_reason is not None) != self.is_end_reported
        )

    def new_part(self) -> CompletionOutput:
        """What is new in the output since it was last reported."""
        part, num_tokens = copy.copy(self.output), self.num_reported_tokens
        part.text = part.text[self.num_reported_characters :]
        part.token_ids = part.token_ids[num_tokens:]
        if part.logprobs is not None:
            part.logprobs = part.logprobs[num_tokens:]
        self.num_reported_characters = len(self.output.text)
        return part

    def __repr__(self) -> str:
        return (
            f"Completion({self.request_id!r}, {self.index}, {self.status.value}, "
            f"{self.num_computed_tokens} of {self.num_tokens} tokens computed)"
        )


def merge_parts(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Join two consecutive parts of an output. Changes ``first``."""
    merged = {completion.index: completion for completion in first.outputs}
    for completion in second.outputs:
        earlier = merged.get(completion.index)
        if earlier is not None:
            completion = copy.copy(completion)
            completion.text = earlier.text + completion.text
            completion.token_ids = _joined(earlier.token_ids, completion.token_ids)
            if completion.logprobs is not None:
                completion.logprobs = _joined(earlier.logprobs or [], completion.logprobs)
        merged[completion.index] = completion
    result = copy.copy(second)
    result.outputs = [merged[index] for index in sorted(merged)]
    return result


def _joined(first: list[T], second: list[T]) -> list[T]:
    first += second  # In place, so that many parts take linear time; nothing else refers to it.
    return first
