"""``generate``, ``stream_generate`` and ``generate_step`` with mlx-lm's signatures, on an engine
for one request.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.block_store.worker import SECONDS_AT_EXIT
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.input_processor import Prompt, as_tokenizer
from mlx_paged.engine.request import Completion
from mlx_paged.engine.thread import EngineThread, ForkedError, wait_until_idle
from mlx_paged.options.argument_values import AT_LEAST_1, BOOL, TokenIds, matching
from mlx_paged.options.config import DEFAULT_MAX_NUM_BATCHED_TOKENS
from mlx_paged.options.engine_options import OneShotOptions
from mlx_paged.options.foreign_arguments import refuse_unknown
from mlx_paged.options.sampling_params import LogitsProcessor, Sampler, SamplingParams
from mlx_paged.request import NO_DRAFTS, CompletionOutput, SpecDecodingStats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokenizer: TypeAlias = "TokenizerWrapper | PreTrainedTokenizerBase"
Progress: TypeAlias = Callable[[int, int], None]


@dataclass
class GenerationResponse:
    """One piece of an answer: mlx-lm's fields, and statistics of the cache and of drafts.

    Args:
        text: the next piece of text, whole characters only; may be empty.
        token: the token it came from.
        logprobs: ``[vocab_size]``, the log-probabilities that the token was sampled from; ``None``
            in a chat.
        from_draft: whether the token was an accepted draft.
        prompt_tokens: tokens in the prompt.
        prompt_tps: prompt tokens computed (reused ones not counted) per second.
        generation_tokens: tokens generated so far.
        generation_tps: tokens generated per second, after the first.
        peak_memory: peak memory used so far, in GB (1e9 bytes).
        finish_reason: ``"stop"``, ``"length"`` (``max_tokens`` or ``max_model_len`` is reached, or
            the K/V budget is used up), or ``None`` before the last piece.
        cached_tokens: prompt tokens whose K/V were reused.
        read_tokens: the number of these whose K/V were read from disk.
        kv_bytes: bytes that are allocated for K/V.
        time_to_first_token: seconds from the call to the first token.
        spec_decoding: how many drafts were verified and accepted so far.
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
    spec_decoding: SpecDecodingStats = NO_DRAFTS
    read_tokens: int = 0


class _Options(OneShotOptions, total=False):
    draft_model: Module | None
    sampler: Sampler | None
    logits_processors: Sequence[LogitsProcessor] | None
    prefill_step_size: int
    prompt_progress_callback: Progress | None


class GenerationOptions(_Options, total=False):
    """The keyword arguments of :func:`generate_step`."""

    max_tokens: int


def generate_step(
    prompt: TokenIds, model: Module, **options: Unpack[GenerationOptions]
) -> Generator[tuple[int, mx.array], None, None]:
    """Yield each token with its log-probabilities ``[vocab_size]``, as mlx-lm's ``generate_step``;
    it does not stop at the end of sequence.

    Args:
        prompt: token ids, at least one.
        max_tokens: stop after this number of tokens (default: 256); -1 continues until the context
            or the K/V budget is used up.
        sampler: log-probabilities ``[1, vocab_size]`` to a token ``[1]``; greedy by default.
        logits_processors: each maps (tokens so far, logits ``[1, vocab_size]``) to new logits.
        prefill_step_size: prompt tokens per step (default: 2048).
        prompt_progress_callback: called with the prompt tokens done so far and their total.
        options: other options of :class:`Engine`: those of its K/V cache, ``max_model_len``,
            ``draft_model`` and ``num_draft_tokens``, ``cache_dir`` with its size and duration, and
            ``wired_limit``. Drafts do not change the tokens, with any sampler.

    Raises:
        ValueError: an argument of the wrong type or out of its range, an empty prompt, or a token
            id outside the vocabulary; all at the call. While it runs: a sampler or processor
            that returns something else.
        TypeError: an unknown argument; the message says what to use instead.
        PromptTooLongError: the prompt leaves no room for an answer within ``max_model_len``, or
            exceeds the budget; at the call.
    """
    refuse_unknown(generate_step, options, GenerationOptions.__annotations__)
    responses = _stream(model, None, prompt, **options)
    return ((response.token, logprobs) for response, logprobs in responses)


def stream_generate(
    model: Module,
    tokenizer: Tokenizer,
    prompt: Prompt,
    max_tokens: int = 256,
    **options: Unpack[_Options],
) -> Generator[GenerationResponse, None, None]:
    """Yield the answer to ``prompt`` piece by piece; as ``mlx_lm.stream_generate``.

    Args:
        tokenizer: as :func:`mlx_paged.load` returns it, or one of transformers.
        prompt: text, or token ids (what ``tokenizer.apply_chat_template`` returns).

    Other arguments, and the errors raised, are those of :func:`generate_step`.
    """
    refuse_unknown(stream_generate, options, _Options.__annotations__)
    responses = _stream(model, as_tokenizer(tokenizer), prompt, max_tokens=max_tokens, **options)
    return (dataclasses.replace(response, logprobs=logprobs) for response, logprobs in responses)


def generate(
    model: Module,
    tokenizer: Tokenizer,
    prompt: Prompt,
    verbose: bool = False,
    **options: Unpack[GenerationOptions],
) -> str:
    """The whole answer to ``prompt``; as ``mlx_lm.generate``.

    Args:
        verbose: print the text as it is generated, and then statistics.

    Other arguments, and the errors raised, are those of :func:`generate_step`.
    """
    refuse_unknown(generate, options, GenerationOptions.__annotations__)
    BOOL.check("generate", "verbose", verbose)
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
            f"{response.prompt_tps:.3f} tokens-per-sec\n"
            f"Generation: {response.generation_tokens} tokens, "
            f"{response.generation_tps:.3f} tokens-per-sec\n"
            f"Peak memory: {response.peak_memory:.3f} GB, K/V: {response.kv_bytes / 1e6:.1f} MB"
        )
    return text


def stream_request(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    progress: Progress | None = None,
) -> Generator[GenerationResponse, None, None]:
    """Run the only request of an engine, and yield its answer piece by piece.

    Closing the generator ends the request.

    Args:
        progress: called with the prompt tokens done so far and their total.

    Raises:
        ValueError, PromptTooLongError: as :meth:`Engine.add_request`, at the call.
        Exception: the request's error, such as of its logits processor.
    """
    request_id = f"stream-{next(_request_ids)}"
    start = time.perf_counter()
    engine.add_request(request_id, prompt, params)
    return _responses(engine, request_id, start, progress)


_request_ids = itertools.count()


def _responses(
    engine: Engine, request_id: str, start: float, progress: Progress | None
) -> Generator[GenerationResponse, None, None]:
    first_token = 0.0
    num_shown = num_tokens = num_accepted = 0
    try:
        is_finished = False
        while not is_finished:
            if progress is not None and not first_token:
                progress(*engine.prompt_progress(request_id))
            for output in engine.step():
                is_finished = bool(output.finished)
                output.raise_if_failed()
                now, answer = time.perf_counter(), output.outputs[0]
                num_prompt_tokens = len(output.prompt_token_ids)
                num_generated = len(answer.token_ids)
                text = _as_mlx_lm(engine, answer)
                if not first_token:
                    first_token = now
                    if progress is not None:
                        progress(num_prompt_tokens, num_prompt_tokens)
                num_computed = num_prompt_tokens - output.num_cached_tokens
                decode_time = now - first_token
                newest = GenerationResponse(
                    text=text[num_shown:],
                    token=answer.token_ids[-1],
                    logprobs=None,
                    from_draft=num_generated - num_tokens
                    == answer.spec_decoding.num_accepted_tokens - num_accepted,
                    prompt_tokens=num_prompt_tokens,
                    prompt_tps=num_computed / (first_token - start),
                    generation_tokens=num_generated,
                    generation_tps=(num_generated - 1) / decode_time if decode_time else 0.0,
                    peak_memory=mx.get_peak_memory() / 1e9,
                    finish_reason=answer.finish_reason,
                    cached_tokens=output.num_cached_tokens,
                    kv_bytes=engine.cache.nbytes_held,
                    time_to_first_token=first_token - start,
                    spec_decoding=answer.spec_decoding,
                    read_tokens=output.num_read_tokens,
                )
                # The accepted drafts of the step come before it. All their text is in the newest
                # response.
                for number in range(num_tokens + 1, num_generated):
                    yield dataclasses.replace(
                        newest,
                        text="",
                        token=answer.token_ids[number - 1],
                        from_draft=True,
                        generation_tokens=number,
                        finish_reason=None,
                    )
                yield newest
                num_shown, num_tokens = len(text), num_generated
                num_accepted = answer.spec_decoding.num_accepted_tokens
    finally:
        engine.drop([request_id])


def _as_mlx_lm(engine: Engine, answer: CompletionOutput) -> str:
    """The text so far, without the space that mlx-lm's detokenizers leave out."""
    token_texts = engine.input_processor.token_texts
    if token_texts is None:
        return answer.text
    return token_texts.without_first_space(answer.text, answer.token_ids)


class OneShotEngine(Engine):
    """The engine of a single call. It runs in a thread that an earlier call has left, if there is
    one, and leaves it to the next call when it is closed.
    """

    _new_thread = EngineThread.shared

    def close(self, timeout: float = SECONDS_AT_EXIT) -> bool:
        """As :meth:`Engine.close`; in a forked child there is nothing to do."""
        is_busy = self.thread.is_interrupted
        try:
            return super().close(timeout)
        except ForkedError:
            return True
        finally:
            released = self._release_thread()
            if not is_busy:
                wait_until_idle(released)


class _StreamLogprobs:
    """Keeps the log-probabilities that the tokens of an engine's only request were drawn from."""

    def __init__(self, engine: Engine):
        self._logprobs: dict[int, mx.array] = {}  # by the number of the token, from 1
        engine.read_rows(self._read)

    def _read(self, completion: Completion, number: int, row: mx.array) -> None:
        logprobs = row - mx.logsumexp(row)  # as in mlx-lm, in this dtype
        mx.async_eval(logprobs)
        self._logprobs[number] = logprobs

    def pop(self, number: int) -> mx.array:
        """``[vocab_size]`` of a token. A step with drafts stores those of several tokens."""
        return self._logprobs.pop(number)


def _stream(
    model: Module,
    tokenizer: TokenizerWrapper | None,
    prompt: Prompt,
    *,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    prefill_step_size: int = DEFAULT_MAX_NUM_BATCHED_TOKENS,
    prompt_progress_callback: Progress | None = None,
    draft_model: Module | None = None,
    **engine_options: Unpack[OneShotOptions],
) -> Generator[tuple[GenerationResponse, mx.array], None, None]:
    """The responses, each with the log-probabilities its token was drawn from."""
    step_size = AT_LEAST_1.check("generate", "prefill_step_size", prefill_step_size)
    progress = prompt_progress_callback
    if progress is not None:
        function = matching("a function of 2 numbers", callable)
        function.check("generate", "prompt_progress_callback", progress)
    params = SamplingParams(
        max_tokens=max_tokens,
        sampler=sampler,
        logits_processors=() if logits_processors is None else logits_processors,
        ignore_eos=tokenizer is None,
        skip_special_tokens=False,  # as in mlx-lm
    )
    # For a single request, prefix caching is only of use with blocks on disk.
    engine = OneShotEngine(
        model,
        tokenizer,
        max_num_seqs=1,
        max_num_batched_tokens=step_size,
        enable_prefix_caching=engine_options.get("cache_dir") is not None,
        draft_model=draft_model,
        **engine_options,
    )
    logprobs = _StreamLogprobs(engine)
    if engine.ranks.size == 1:
        return _on_engine(engine, stream_request(engine, prompt, params, progress), logprobs)
    started: list[Generator[GenerationResponse, None, None]] = []
    # An error at the call is raised on all ranks.
    engine.share(lambda: started.append(stream_request(engine, prompt, params, progress)))
    return _on_all_ranks(engine, started, logprobs)


def _on_engine(
    engine: Engine, responses: Generator[GenerationResponse, None, None], logprobs: _StreamLogprobs
) -> Generator[tuple[GenerationResponse, mx.array], None, None]:
    """The responses of an engine, which is closed after them."""
    try:
        with closing(responses):
            for response in responses:
                yield response, logprobs.pop(response.generation_tokens)
    finally:
        engine.close()


def _on_all_ranks(
    engine: Engine,
    started: list[Generator[GenerationResponse, None, None]],  # empty, except on rank 0
    logprobs: _StreamLogprobs,
) -> Generator[tuple[GenerationResponse, mx.array], None, None]:
    """The responses of rank 0 on every rank; log-probabilities are ``None`` on other ranks."""

    def next_one() -> dict[str, Any] | None:
        response = next(started[0], None)
        return None if response is None else vars(response)

    try:
        while (fields := engine.share(next_one)) is not None:
            response = GenerationResponse(**fields)
            row: Any = logprobs.pop(response.generation_tokens) if started else None
            yield response, row
    finally:
        # All ranks run the same script, so they leave a loop early at the same response.
        engine.share(lambda: started[0].close())
