"""Generate text: ``generate`` and ``stream_generate`` with mlx-lm's signatures, on a basic or a
paged cache.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypedDict, Unpack

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.argument_values import as_integer, check_callable, check_integer, kind_of
from mlx_paged.cache import KVCache
from mlx_paged.engine.model_runner import ModelRunner
from mlx_paged.engine.prompts import Prompt, TokenIds, as_tokenizer, read_prompt
from mlx_paged.engine.read_array import read_ints
from mlx_paged.engine.session import PREFILL_STEP_SIZE, Session
from mlx_paged.engine.text_stream import TextStream
from mlx_paged.errors import shown
from mlx_paged.foreign_arguments import argument_names, refuses_unknown_arguments
from mlx_paged.memory import wired_limit
from mlx_paged.models.kv_cache import make_kv_cache
from mlx_paged.sampling import Sampler, check_sampled, check_sampled_token, make_sampler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
Tokenizer: TypeAlias = "TokenizerWrapper | PreTrainedTokenizerBase"


@dataclass
class GenerationResponse:
    """One piece of an answer; mlx-lm's fields, plus what the cache did.

    Args:
        text: the next piece of text, whole characters only; may be empty.
        token: the token it came from.
        logprobs: ``[vocab_size]``, log-probabilities that the token was sampled from; ``None`` from
            an engine.
        from_draft: always False; there is no draft model here.
        prompt_tokens: tokens in the prompt.
        prompt_tps: prompt tokens computed (reused ones not counted) per second.
        generation_tokens: tokens generated so far.
        generation_tps: of these, per second, after the first.
        peak_memory: peak memory used so far, in GB (1e9 bytes).
        finish_reason: ``"stop"``, ``"length"`` (``max_tokens`` or ``max_model_len`` is reached, or
            the K/V budget used up), ``None`` before.
        cached_tokens: prompt tokens whose K/V were reused.
        kv_bytes: bytes of memory that the cache holds for K/V now.
        time_to_first_token: seconds from the call to the first token.
    """

    text: str
    token: int
    logprobs: mx.array | None
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None = None
    cached_tokens: int = 0
    kv_bytes: int = 0
    time_to_first_token: float = 0.0


class ResponseClock:
    """The times of one answer, and the responses that report them. Begins with the call."""

    def __init__(self, num_prompt_tokens: int):
        self._num_prompt_tokens = num_prompt_tokens
        self._start = time.perf_counter()
        self._first_token = self._last_token = 0.0

    def note_token(self) -> None:
        """A token has come."""
        self._last_token = time.perf_counter()
        self._first_token = self._first_token or self._last_token

    def response(
        self,
        text: str,
        token: int,
        logprobs: mx.array | None,
        num_generated: int,
        finish_reason: str | None,
        cached_tokens: int,
        cache: KVCache,
    ) -> GenerationResponse:
        """What is known with the token noted last."""
        time_to_first_token = self._first_token - self._start
        decode_time = self._last_token - self._first_token
        return GenerationResponse(
            text=text,
            token=token,
            logprobs=logprobs,
            from_draft=False,
            prompt_tokens=self._num_prompt_tokens,
            prompt_tps=(self._num_prompt_tokens - cached_tokens) / time_to_first_token,
            generation_tokens=num_generated,
            generation_tps=(num_generated - 1) / decode_time if decode_time else 0.0,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish_reason,
            cached_tokens=cached_tokens,
            kv_bytes=cache.stats().nbytes_held,
            time_to_first_token=time_to_first_token,
        )


class TokenStep(NamedTuple):
    """One generated token and what is known with it."""

    token: int
    logprobs: mx.array  # [vocab_size]
    is_last: bool  # max_tokens or max_model_len reached, or no room for the K/V of another token
    cached_tokens: int


@refuses_unknown_arguments("generate")
def generate_step(
    prompt: TokenIds,
    model: Module,
    *,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    session: Session | None = None,
    kv: str = "paged",
    block_size: int = 16,
    kv_cache_bytes: str | int | None = None,
    backend: str = "auto",
    max_model_len: int | None = None,
) -> Generator[tuple[int, mx.array], None, None]:
    """Yield one token and its log-probabilities ``[vocab_size]`` after the other; as mlx-lm's
    ``generate_step``.

    Args:
        prompt: token ids, at least one.
        max_tokens: stop after so many; -1 goes on until the context or the K/V budget is used up.
        sampler: log-probabilities ``[1, vocab_size]`` to a token ``[1]``; greedy by default.
        logits_processors: each maps (tokens so far, logits ``[1, vocab_size]``) to new logits.
        prefill_step_size: prompt tokens per step.
        prompt_progress_callback: called with the prompt tokens done so far and their total.
        session: a conversation to go on with: the prompt is then the *whole* conversation, and what
            it shares with the session's tokens is not computed again. It has a cache and a context
            limit already, so none of the arguments below may be given with it.
        kv, block_size, kv_cache_bytes, backend: what a cache is made from, "paged" or "basic"; see
            :func:`mlx_paged.models.kv_cache.make_kv_cache`.
        max_model_len: the most tokens that prompt and answer have together; by default the context
            that the model was made for.

    Raises:
        ValueError: an argument of the wrong type or out of its range, an empty prompt, or a token
            id that the model does not have; all at the call. While it runs: a sampler or processor
            that returns none of these.
        TypeError: an argument that there is not; the message says what to use.
        PromptTooLongError: the prompt leaves no room for an answer within ``max_model_len`` (at the
            call), or the budget can't hold it.
    """
    session = open_session(model, session, kv, block_size, kv_cache_bytes, backend, max_model_len)
    call = _Call.checked(
        prompt,
        None,
        session,
        max_tokens,
        sampler,
        logits_processors,
        prefill_step_size,
        prompt_progress_callback,
    )
    return _pairs(call)


@refuses_unknown_arguments("generate")
def stream_generate(
    model: Module,
    tokenizer: Tokenizer,
    prompt: Prompt,
    max_tokens: int = 256,
    *,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    session: Session | None = None,
    kv: str = "paged",
    block_size: int = 16,
    kv_cache_bytes: str | int | None = None,
    backend: str = "auto",
    max_model_len: int | None = None,
) -> Generator[GenerationResponse, None, None]:
    """Yield the answer to ``prompt`` piece by piece; as ``mlx_lm.stream_generate``.

    Args:
        tokenizer: as :func:`mlx_paged.load` returns it, or one of transformers.
        prompt: text, or token ids (what ``tokenizer.apply_chat_template`` returns).
        Others, and errors raised: see :func:`generate_step`.
    """
    tokenizer = as_tokenizer(tokenizer)
    session = open_session(model, session, kv, block_size, kv_cache_bytes, backend, max_model_len)
    call = _Call.checked(
        prompt,
        tokenizer,
        session,
        max_tokens,
        sampler,
        logits_processors,
        prefill_step_size,
        prompt_progress_callback,
    )
    return _responses(call, tokenizer)


class GenerationOptions(TypedDict, total=False):
    """The keyword arguments of :func:`stream_generate`."""

    max_tokens: int
    sampler: Sampler | None
    logits_processors: Sequence[LogitsProcessor] | None
    prefill_step_size: int
    prompt_progress_callback: Callable[[int, int], None] | None
    session: Session | None
    kv: str
    block_size: int
    kv_cache_bytes: str | int | None
    backend: str
    max_model_len: int | None


@refuses_unknown_arguments("generate", also=lambda: argument_names(stream_generate))
def generate(
    model: Module,
    tokenizer: Tokenizer,
    prompt: Prompt,
    verbose: bool = False,
    **options: Unpack[GenerationOptions],
) -> str:
    """The whole answer to ``prompt``; as ``mlx_lm.generate``.

    Args:
        verbose: print the text as it is made, and the figures behind it.
        options: see :func:`stream_generate`; errors raised, too.
    """
    if not isinstance(verbose, bool):
        raise ValueError(f"[generate] verbose must be True or False, got {shown(verbose)}")
    text = ""
    response = None
    responses = stream_generate(model, tokenizer, prompt, **options)
    if verbose:
        print("=" * 10)
    for response in responses:
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if verbose and response is not None:
        print()
        print("=" * 10)
        print(
            f"Prompt: {response.prompt_tokens} tokens ({response.cached_tokens} reused), "
            f"{response.prompt_tps:.3f} tokens-per-sec"
        )
        print(
            f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec"
        )
        print(f"Peak memory: {response.peak_memory:.3f} GB, K/V: {response.kv_bytes / 1e6:.1f} MB")
    return text


def open_session(
    model: Module,
    session: Session | None = None,
    kv: str = "paged",
    block_size: int = 16,
    kv_cache_bytes: str | int | None = None,
    backend: str = "auto",
    max_model_len: int | None = None,
) -> Session:
    """``session`` if there is one, else a new one on a cache of its own; errors as
    ``make_kv_cache``.
    """
    if session is None:
        cache = make_kv_cache(
            model, kv, block_size=block_size, kv_cache_bytes=kv_cache_bytes, backend=backend
        )
        return Session(ModelRunner(model, cache), max_model_len=max_model_len)
    if not isinstance(session, Session):
        raise ValueError(f"[generate] session must be a Session, got {kind_of(session)}")
    for name, value, default in (
        ("kv", kv, "paged"),
        ("block_size", block_size, 16),
        ("kv_cache_bytes", kv_cache_bytes, None),
        ("backend", backend, "auto"),
        ("max_model_len", max_model_len, None),
    ):
        if value != default:
            raise ValueError(
                f"[generate] {name}={shown(value)} is a matter of the session; leave it out"
            )
    return session


@dataclass(frozen=True)
class _Call:
    """One answer to be generated, its arguments checked."""

    prompt: list[int]
    session: Session
    max_tokens: int
    sampler: Sampler
    logits_processors: tuple[LogitsProcessor, ...]
    prefill_step_size: int
    progress: Callable[[int, int], None] | None
    clock: ResponseClock

    @classmethod
    def checked(
        cls,
        prompt: object,
        tokenizer: TokenizerWrapper | None,
        session: Session,
        max_tokens: int,
        sampler: Sampler | None,
        logits_processors: Sequence[LogitsProcessor] | None,
        prefill_step_size: int,
        progress: Callable[[int, int], None] | None,
    ) -> _Call:
        limit = as_integer(max_tokens)
        if limit is None or limit == 0 or limit < -1:
            raise ValueError(
                f"[generate] max_tokens must be positive, or -1 for no limit, got {shown(max_tokens)}"
            )
        step_size = check_integer("generate", "prefill_step_size", prefill_step_size, 1)
        if sampler is not None:
            check_callable("generate", "sampler", sampler, "a function, such as make_sampler(...)")
        if progress is not None:
            check_callable(
                "generate", "prompt_progress_callback", progress, "a function of two numbers"
            )
        token_ids = read_prompt(prompt, tokenizer, session.runner.vocab_size).token_ids
        session.check_context(len(token_ids))
        return cls(
            token_ids,
            session,
            limit,
            sampler or make_sampler(),
            _checked_processors(logits_processors),
            step_size,
            progress,
            ResponseClock(len(token_ids)),
        )

    def steps(self) -> Generator[TokenStep, None, None]:
        """The tokens, as they come."""
        session, tokens = self.session, list(self.prompt)
        vocab_size = session.runner.vocab_size

        def head(logits: mx.array) -> tuple[mx.array, mx.array]:
            for processor in self.logits_processors:
                logits = _checked_logits(processor(mx.array(tokens), logits), logits.shape)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            return check_sampled(self.sampler(logprobs), 1), logprobs[0]

        (sampled, logprobs), num_cached = session.prefill(
            tokens, head, self.prefill_step_size, self.progress
        )
        for num_generated in itertools.count(1):
            tokens.append(check_sampled_token(read_ints(sampled)[0], vocab_size))
            has_room = session.cache.max_seq_len(session.seq) >= len(tokens) < session.max_model_len
            is_last = num_generated == self.max_tokens or not has_room
            yield TokenStep(tokens[-1], logprobs, is_last, num_cached)
            if is_last:
                return
            sampled, logprobs = session.decode(tokens[-1], head)


def _pairs(call: _Call) -> Generator[tuple[int, mx.array], None, None]:
    for step in call.steps():
        yield step.token, step.logprobs


def _responses(
    call: _Call, tokenizer: TokenizerWrapper
) -> Generator[GenerationResponse, None, None]:
    session, clock = call.session, call.clock
    stream = TextStream(tokenizer)
    num_shown = 0
    with wired_limit(session.runner.model):
        for num_generated, step in enumerate(call.steps(), 1):
            clock.note_token()
            finish_reason: str | None
            if step.token in tokenizer.eos_token_ids:
                finish_reason = "stop"
            else:
                stream.add(step.token)
                finish_reason = "length" if step.is_last else None
            if finish_reason is not None:
                stream.finish()
            text, num_shown = stream.text[num_shown:], len(stream.text)
            yield clock.response(
                text,
                step.token,
                step.logprobs,
                num_generated,
                finish_reason,
                step.cached_tokens,
                session.cache,
            )
            if finish_reason is not None:
                return


def _checked_processors(processors: object) -> tuple[LogitsProcessor, ...]:
    if processors is None:
        return ()
    if isinstance(processors, (str, bytes)) or not isinstance(processors, Sequence):
        raise ValueError(
            f"[generate] logits_processors must be a list of functions, got {shown(processors)} ({kind_of(processors)})"
        )
    for index, processor in enumerate(processors):
        check_callable(
            "generate", f"logits_processors[{index}]", processor, "a function of tokens and logits"
        )
    return tuple(processors)


def _checked_logits(logits: object, shape: tuple[int, ...]) -> mx.array:
    if not isinstance(logits, mx.array) or logits.shape != shape:
        what = (
            f"an array of shape {logits.shape}" if isinstance(logits, mx.array) else kind_of(logits)
        )
        raise ValueError(
            f"[generate] a logits processor returns logits of shape {shape}, got {what}"
        )
    return logits
