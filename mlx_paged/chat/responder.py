"""Where a conversation's answers come from: an engine, whose requests share K/V blocks, or a
session of its own.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.cache import KVCache
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.session import PREFILL_STEP_SIZE, Session
from mlx_paged.generation import GenerationResponse, ResponseClock, stream_generate
from mlx_paged.memory import wired_limit
from mlx_paged.request import SamplingParams

Progress = Callable[[int, int], None]
Answer = Generator[GenerationResponse, None, None]


class Responder(ABC):
    """Answers the prompts of one conversation, each of which begins, as a rule, with the one
    before and its answer.
    """

    @property
    @abstractmethod
    def tokens(self) -> list[int]:
        """The last prompt and its answer, as far as they are computed."""

    @property
    @abstractmethod
    def cache(self) -> KVCache: ...

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """The most tokens of a prompt and its answer together."""

    @abstractmethod
    def respond(
        self, prompt: Sequence[int], params: SamplingParams, progress: Progress | None = None
    ) -> Answer:
        """Yield the answer piece by piece; closing the generator ends it where it is.

        Args:
            progress: called with the prompt tokens done so far and their total.

        Raises:
            PromptTooLongError: the budget can't hold the prompt.
        """

    @abstractmethod
    def fork(self) -> Responder:
        """A second one, which goes on from the same tokens and shares their K/V."""

    @abstractmethod
    def close(self) -> None:
        """Forget the tokens; it may be used again."""

    @abstractmethod
    def shrink(self) -> None:
        """Give back the memory that none of its kind needs."""


class EngineResponder(Responder):
    """Each turn is a request of the engine, which finds what it computed before in its prefix
    cache.
    """

    _request_ids = itertools.count()

    def __init__(self, engine: Engine):
        self.engine = engine
        self._tokens: list[int] = []

    @property
    def tokens(self) -> list[int]:
        return self._tokens

    @property
    def cache(self) -> KVCache:
        return self.engine.cache

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    def respond(
        self, prompt: Sequence[int], params: SamplingParams, progress: Progress | None = None
    ) -> Answer:
        engine = self.engine
        clock = ResponseClock(len(prompt))
        request_id = f"turn-{next(self._request_ids)}"
        engine.add_request(request_id, prompt, params)
        num_shown = num_generated = 0
        try:
            with wired_limit(engine.model):
                while True:
                    if progress is not None and not num_generated:
                        progress(engine.num_computed_tokens(request_id), len(prompt))
                    news = [output for output in engine.step() if output.request_id == request_id]
                    if not news:
                        continue
                    output = news[0]
                    if output.error is not None:
                        raise output.error
                    clock.note_token()
                    answer = output.outputs[0]
                    if not num_generated:
                        self._tokens = list(prompt)
                    num_generated = len(answer.token_ids)
                    # The last token was sampled, and not computed.
                    self._tokens += answer.token_ids[len(self._tokens) - len(prompt) : -1]
                    text, num_shown = answer.text[num_shown:], len(answer.text)
                    yield clock.response(
                        text,
                        answer.token_ids[-1],
                        None,
                        num_generated,
                        answer.finish_reason,
                        output.num_cached_tokens,
                        engine.cache,
                    )
                    if output.finished:
                        return
        finally:
            engine.abort(request_id)
            # Nobody asks for the last output of a request that was cut short.
            if engine.has_unfinished_requests():
                engine.step()

    def fork(self) -> EngineResponder:
        branch = EngineResponder(self.engine)
        branch._tokens = list(self._tokens)
        return branch

    def close(self) -> None:
        self._tokens = []

    def shrink(self) -> None:
        self.engine.reset_prefix_cache()
        self.engine.shrink()


class SessionResponder(Responder):
    """A sequence of a cache of either kind, which holds its K/V between the turns."""

    def __init__(
        self,
        session: Session,
        tokenizer: TokenizerWrapper,
        prefill_step_size: int = PREFILL_STEP_SIZE,
    ):
        self.session = session
        self.tokenizer = tokenizer
        self.prefill_step_size = prefill_step_size

    @property
    def cache(self) -> KVCache:
        return self.session.cache

    @property
    def max_model_len(self) -> int:
        return self.session.max_model_len

    @property
    def tokens(self) -> list[int]:
        return self.session.tokens

    def respond(
        self, prompt: Sequence[int], params: SamplingParams, progress: Progress | None = None
    ) -> Answer:
        if params.seed is not None:
            mx.random.seed(params.seed)
        return stream_generate(
            self.session.runner.model,
            self.tokenizer,
            prompt,
            max_tokens=params.max_tokens,
            session=self.session,
            prefill_step_size=self.prefill_step_size,
            prompt_progress_callback=progress,
            sampler=make_sampler(
                params.temperature, params.top_p, params.min_p, top_k=params.top_k
            ),
        )

    def fork(self) -> SessionResponder:
        return SessionResponder(self.session.fork(), self.tokenizer, self.prefill_step_size)

    def close(self) -> None:
        self.session.close()

    def shrink(self) -> None:
        self.session.cache.shrink()
