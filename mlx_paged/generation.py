"""Generate text: ``generate`` and ``stream_generate`` with mlx-lm's signatures, on a basic or a paged cache."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.cache import KVCache
from mlx_paged.engine.model_runner import ModelRunner, make_kv_cache
from mlx_paged.engine.prompts import check_token_ids, encode_prompt
from mlx_paged.engine.session import PREFILL_STEP_SIZE, Session
from mlx_paged.engine.text_stream import TextStream
from mlx_paged.memory import wired_limit
from mlx_paged.sampling import Sampler, make_sampler

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


@dataclass
class GenerationResponse:
    """One piece of an answer; mlx-lm's fields, plus what the cache did.

    Args:
        text: the next piece of text, whole characters only; may be empty.
        token: the token it came from.
        logprobs: ``[vocab_size]``, log-probabilities that the token was sampled from; ``None`` from an engine.
        from_draft: always False; there is no draft model here.
        prompt_tokens: tokens in the prompt.
        prompt_tps: prompt tokens computed (reused ones not counted) per second.
        generation_tokens: tokens generated so far.
        generation_tps: of these, per second, after the first.
        peak_memory: peak memory used so far, in GB (1e9 bytes).
        finish_reason: ``"stop"``, ``"length"`` (``max_tokens`` reached, or the K/V budget used up), ``None`` before.
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
    is_last: bool  # max_tokens reached, or no room for the K/V of another token
    cached_tokens: int


def generate_step(
    prompt: Sequence[int] | mx.array,
    model: nn.Module,
    *,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: list[LogitsProcessor] | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    **cache_options: Any,
) -> Generator[tuple[int, mx.array], None, None]:
    """Yield one token and its log-probabilities ``[vocab_size]`` after the other; as mlx-lm's ``generate_step``.

    Args:
        prompt: token ids, at least one.
        max_tokens: stop after so many; -1 goes on until the K/V budget is used up.
        sampler: log-probabilities ``[1, vocab_size]`` to a token ``[1]``; greedy by default.
        logits_processors: each maps (tokens so far, logits ``[1, vocab_size]``) to new logits.
        prefill_step_size: prompt tokens per step.
        prompt_progress_callback: called with the prompt tokens done so far and their total.
        cache_options: either ``session``, a conversation to go on with: the prompt is then the *whole* conversation,
            and what it shares with the session's tokens is not computed again. Or what a cache is made from:
            ``kv`` ("paged" or "basic"), ``block_size``, ``kv_cache_bytes``, ``backend``; see
            :func:`mlx_paged.engine.model_runner.make_kv_cache`.

    Raises:
        ValueError: an empty prompt, a token id that the model does not have, or a bad setting.
        PromptTooLongError: the budget can't hold the prompt.
    """
    session = open_session(model, **cache_options)
    for step in _generate_tokens(
        prompt, session, max_tokens, sampler, logits_processors, prefill_step_size, prompt_progress_callback
    ):
        yield step.token, step.logprobs


def stream_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: str | Sequence[int] | mx.array,
    max_tokens: int = 256,
    *,
    sampler: Sampler | None = None,
    logits_processors: list[LogitsProcessor] | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    **cache_options: Any,
) -> Generator[GenerationResponse, None, None]:
    """Yield the answer to ``prompt`` piece by piece; as ``mlx_lm.stream_generate``.

    Args:
        prompt: text, or token ids (what ``tokenizer.apply_chat_template`` returns).
        Others, and errors raised: see :func:`generate_step`.
    """
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    if isinstance(prompt, str):
        prompt = encode_prompt(tokenizer, prompt)
    session = open_session(model, **cache_options)
    stream = TextStream(tokenizer)
    num_shown = 0
    clock = ResponseClock(len(prompt))
    with wired_limit(model):
        steps = _generate_tokens(
            prompt, session, max_tokens, sampler, logits_processors, prefill_step_size, prompt_progress_callback
        )
        for num_generated, step in enumerate(steps, 1):
            clock.note_token()
            if step.token in tokenizer.eos_token_ids:
                finish_reason = "stop"
            else:
                stream.add(step.token)
                finish_reason = "length" if step.is_last else None
            if finish_reason is not None:
                stream.finish()
            text, num_shown = stream.text[num_shown:], len(stream.text)
            yield clock.response(
                text, step.token, step.logprobs, num_generated, finish_reason, step.cached_tokens, session.cache
            )
            if finish_reason is not None:
                return


def generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: str | Sequence[int],
    verbose: bool = False,
    **kwargs: Any,
) -> str:
    """The whole answer to ``prompt``; as ``mlx_lm.generate``.

    Args:
        verbose: print the text as it is made, and the figures behind it.
        kwargs: see :func:`stream_generate`.
    """
    text = ""
    if verbose:
        print("=" * 10)
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if verbose:
        print()
        print("=" * 10)
        print(
            f"Prompt: {response.prompt_tokens} tokens ({response.cached_tokens} reused), "
            f"{response.prompt_tps:.3f} tokens-per-sec"
        )
        print(f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec")
        print(f"Peak memory: {response.peak_memory:.3f} GB, K/V: {response.kv_bytes / 1e6:.1f} MB")
    return text


def open_session(
    model: nn.Module,
    session: Session | None = None,
    kv: str = "paged",
    block_size: int = 16,
    kv_cache_bytes: str | int | None = None,
    backend: str = "auto",
) -> Session:
    """``session`` if there is one, else a new one on a cache of its own; errors as ``make_kv_cache``."""
    if session is not None:
        return session
    cache = make_kv_cache(model, kv, block_size=block_size, kv_cache_bytes=kv_cache_bytes, backend=backend)
    return Session(ModelRunner(model, cache))


def _generate_tokens(
    prompt: Sequence[int] | mx.array,
    session: Session,
    max_tokens: int,
    sampler: Sampler | None,
    logits_processors: list[LogitsProcessor] | None,
    prefill_step_size: int,
    progress: Callable[[int, int], None] | None,
) -> Generator[TokenStep, None, None]:
    if max_tokens == 0 or max_tokens < -1:
        raise ValueError(f"[generate] max_tokens must be positive, or -1 for no limit, got {max_tokens}")
    tokens = prompt.tolist() if isinstance(prompt, mx.array) else list(prompt)
    check_token_ids(tokens, session.runner.model.args.vocab_size)
    sampler = sampler or make_sampler()

    def head(logits: mx.array) -> tuple[mx.array, mx.array]:
        for processor in logits_processors or ():
            logits = processor(mx.array(tokens), logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return sampler(logprobs), logprobs[0]

    (sampled, logprobs), num_cached = session.prefill(tokens, head, prefill_step_size, progress)
    for num_generated in itertools.count(1):
        token = sampled.item()
        has_room = session.cache.max_seq_len(session.seq) > len(session.tokens)
        is_last = num_generated == max_tokens or not has_room
        yield TokenStep(token, logprobs, is_last, num_cached)
        if is_last:
            return
        tokens.append(token)
        sampled, logprobs = session.decode(token, head)
