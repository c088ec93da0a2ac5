"""``Service``: what all endpoints share, and how they start generations."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.answers.conversation_encoder import ConversationEncoder, StoredAnswers
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.input_processor import LengthLimit
from mlx_paged.engine.options import RequestOptions
from mlx_paged.engine.request import NO_RULES, TokenRules
from mlx_paged.engine.sampling.grammar import PLACE_IN_GRAMMAR
from mlx_paged.engine.text_stream import TokenTexts, token_texts_of
from mlx_paged.errors import ArgumentError, PromptTooLongError
from mlx_paged.loading.pooling import Embedder, Reranker, read_embedder, read_reranker
from mlx_paged.options.sampling_declarations import KINDS
from mlx_paged.options.sampling_params import RequestOutputKind, SamplingParams
from mlx_paged.request import PrefixReport, RequestOutput
from mlx_paged.server.errors import api_error
from mlx_paged.server.generations import Answer, Generation
from mlx_paged.server.http.logs import count_tokens, log_text, logger
from mlx_paged.server.kept_answers import IdlePrefill, KeptItems
from mlx_paged.server.prompt_threads import PromptThreads, Work
from mlx_paged.server.settings import ServerSettings

T = TypeVar("T")

# Requests that are read and encoded at the same time, in total and for one user. Grammars take
# longer and have their own threads, so that no prompt waits for one.
MAX_PREPARING, MAX_PREPARING_OF_USER = 8, 2
MAX_COMPILING, MAX_COMPILING_OF_USER = 2, 1
# Of each text of a prefix report, from the position on where a prompt differs from the cached one.
NUM_TEXT_TOKENS = 48
DEFAULT_TEMPERATURE = 1.0  # in OpenAI's and Anthropic's APIs


def _no_limit(num_seqs: int, user: str | None) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass(frozen=True)
class Service:
    """What all endpoints share.

    Args:
        engine: runs the generations.
        tokenizer: the model's, with or without a chat template.
        model_names: the names that clients may use; answers contain the first one.
        settings: the server's settings.
        takes_any_name: whether clients may use any other model name, too.
        defaults: sampling parameters from the model's ``generation_config.json`` or from flags.
        max_tokens: the default length limit of an answer; ``None``: the protocol's default, or
            the rest of the context.
        template_options: default variables of the chat template.
        created: when the server started, in seconds since the epoch.
        kept_answers: recent answers, so that continued conversations hit the prefix cache. If the
            engine has a ``cache_dir``, they are stored there, too.
        kept_items: items of recent responses, for clients that refer to them.
        admit: takes a number of sequences and a user, and holds that many places in the queue until
            their request begins; raises an :class:`ApiError` if the queue is full. By default there
            is no limit.
        first_part_seconds: how long a stream waits for its first part before it sends its status,
            so that an early failure can still have an HTTP status.
    """

    engine: AsyncEngine
    tokenizer: TokenizerWrapper
    model_names: tuple[str, ...]
    settings: ServerSettings = field(default_factory=ServerSettings)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    template_options: dict[str, object] = field(default_factory=dict)
    created: int = 0
    kept_answers: ConversationEncoder = field(default_factory=ConversationEncoder)
    kept_items: KeptItems = field(default_factory=KeptItems)
    admit: Callable[[int, str | None], AbstractContextManager[object]] = _no_limit
    first_part_seconds: float = 10.0
    takes_any_name: bool = False

    def __post_init__(self) -> None:
        tier = self.engine.engine.disk_tier
        if tier is not None:
            self.kept_answers.stored = StoredAnswers(tier, self.tokenizer)

    @cached_property
    def embedder(self) -> Embedder:
        """How the model embeds texts.

        Raises:
            ArgumentError: it was not made for embeddings, or can't give them.
        """
        embedder = read_embedder(self.engine.engine.runner.model, self.tokenizer)
        if not embedder.is_declared and self.settings.task != "embed":
            raise ArgumentError(
                f"[embed] {self.model_names[0]} was not made for embeddings; serve a model such as "
                "Qwen3-Embedding, or start the server with --task embed"
            )
        return embedder

    @cached_property
    def reranker(self) -> Reranker:
        """How the model scores documents; raises ``ArgumentError`` if it is not a reranker."""
        is_declared = self.settings.task == "score"
        return read_reranker(self.engine.engine.runner.model, self.tokenizer, is_declared)

    @cached_property
    def _threads(self) -> PromptThreads:
        return PromptThreads("mlx_paged prompts", MAX_PREPARING, MAX_PREPARING_OF_USER)

    @cached_property
    def _grammar_threads(self) -> PromptThreads:
        return PromptThreads("mlx_paged grammars", MAX_COMPILING, MAX_COMPILING_OF_USER)

    @cached_property
    def _numbers(self) -> Iterator[int]:
        return itertools.count()

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of the adapters, which clients may use as models."""
        return tuple(self.engine.engine.adapters.known)

    @property
    def all_names(self) -> tuple[str, ...]:
        """Those of the model and of the adapters."""
        return (*self.model_names, *self.adapter_names)

    @property
    def token_texts(self) -> TokenTexts:
        """The bytes of each token."""
        return token_texts_of(self.tokenizer)

    @property
    def max_model_len(self) -> int | None:
        """The maximum number of tokens of a prompt and its answer; ``None``: no limit."""
        return self.engine.engine.max_model_len

    @property
    def default_params(self) -> SamplingParams:
        """The default sampling parameters: the model's recommendation, or else the defaults of
        OpenAI's and Anthropic's APIs.
        """
        return SamplingParams(
            **{"temperature": DEFAULT_TEMPERATURE, **self.defaults},
            max_tokens=self.max_tokens,
            output_kind=RequestOutputKind.DELTA,
        )

    @cached_property
    def idle_prefill(self) -> IdlePrefill:
        """Computes the next prompts of finished conversations while no request runs."""
        return IdlePrefill(
            self.engine, lambda user, encode: self._threads.run(user, lambda _: encode())
        )

    async def run_in_tokenizer_pool(self, user: str | None, work: Callable[[Work], T]) -> T:
        """Run ``work``, which reads, renders or encodes a request, in one of a few threads that are
        shared fairly between users.

        Raises:
            ApiError: raised by the work, or the request's prompt is too long.
        """
        self.idle_prefill.pause()
        try:
            return await self._threads.run(user, work)
        except PromptTooLongError as error:
            raise api_error(error) from error

    def length_limit(self, work: Work) -> LengthLimit:
        """The length limit for texts that are encoded by ``work``."""
        context_length = self.engine.engine.scheduler.context_length
        return LengthLimit(self.tokenizer, self.max_model_len, context_length, work.check)

    async def start_all(
        self, generations: Sequence[Generation], request_id: str | None = None
    ) -> list[Answer]:
        """Start the generations of a request concurrently; all or none.

        Args:
            generations: at least one, all with the same user and parameters.
            request_id: the id of the client's request.

        Raises:
            ApiError: 400 with the engine's message if the engine refuses the request, 503 if the
                queue is full or the engine has stopped.
        """
        rules = await self._rules_of(generations[0])
        tasks = [
            asyncio.create_task(
                self._start(each, rules, request_id, self.admit(each.params.n, each.user))
            )
            for each in generations
        ]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Answer):
                    await result.aclose()
            raise

    async def _rules_of(self, generation: Generation) -> TokenRules:
        """The token rules of the parameters, for which words are encoded and grammars compiled."""
        params, prepare = generation.params, self.engine.engine.prepare
        threads = self._threads if params.structured_outputs is None else self._grammar_threads
        try:
            if not params.is_slow_to_prepare:
                return prepare(params)
            return await threads.run(generation.user, lambda _: self._prepare(generation))
        except Exception as error:
            raise api_error(error, generation.fields) from error

    def _prepare(self, generation: Generation) -> TokenRules:
        """The token rules. If the grammar is refused, the error is about the part of it that is
        refused alone, if there is one.
        """
        prepare = self.engine.engine.prepare
        try:
            return prepare(generation.params)
        except ArgumentError as error:
            for name, part in generation.parts().items() if error.argument in KINDS else ():
                try:
                    prepare(SamplingParams(structured_outputs=part))
                except ArgumentError as of_part:
                    # The client has not written this grammar, so places in it would be no help.
                    text = PLACE_IN_GRAMMAR.sub("", str(of_part))
                    words = ArgumentError(text, of_part.argument)
                    raise api_error(words, {part.kind: name}) from of_part
            raise

    async def _start(
        self,
        generation: Generation,
        rules: TokenRules,
        request_id: str | None,
        admission: AbstractContextManager[object],
    ) -> Answer:
        """Start a generation, which holds its places in the queue, an admission that is not
        entered yet, until its first part arrives.
        """
        form = generation.answer_format
        rules = rules._replace(answer_format=form if form.has_marks else None)
        options: RequestOptions = {**generation.options, "token_rules": rules}
        with ExitStack() as places:
            places.enter_context(admission)
            self.idle_prefill.pause()
            outputs = self.engine.generate(
                {"prompt_token_ids": generation.prompt_token_ids},
                generation.pooling or generation.params,
                request_id=f"{request_id or 'request'}-{next(self._numbers)}",
                **options,
            )
            log_text("prompt", lambda: self.tokenizer.decode(generation.prompt_token_ids))
            answer = Answer(generation, outputs, places.pop_all(), self._note)
        try:
            await answer.wait(self.first_part_seconds)
        except BaseException:
            await answer.aclose()
            raise
        return answer

    def _note(self, output: RequestOutput, is_first: bool) -> None:
        """Add what a part contains to the log line of its request."""
        num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
        if not is_first:
            count_tokens(answer=num_tokens)
            return
        count_tokens(len(output.prompt_token_ids), output.num_cached_tokens, num_tokens)
        report = output.prefix_report
        if self.settings.log_cache and report is not None:
            logger.info("cache: %s", report.explanation)
            log_text("cache", lambda: self.texts_of(report))

    def texts_of(self, report: PrefixReport) -> dict[str, str]:
        """The texts around the position where a prompt differs from the cached one."""
        token_ids = {
            "before": report.before,
            "cached": report.expected[:NUM_TEXT_TOKENS],
            "prompt": report.found[:NUM_TEXT_TOKENS],
        }
        decode = self.tokenizer.decode
        return {name: decode(list(ids)) if ids else "" for name, ids in token_ids.items()}

    async def whole(
        self, generations: Sequence[Generation], request_id: str | None = None
    ) -> list[RequestOutput]:
        """The complete answers, for requests without streaming. The engine reports only these, so
        no work is done per token.

        Raises:
            ApiError: as for :meth:`start_all`, or an answer was cut short.
        """
        final = [
            replace(each, params=each.params.clone(output_kind=RequestOutputKind.FINAL_ONLY))
            for each in generations
        ]
        answers = await self.start_all(final, request_id)
        try:
            return [await anext(answer) for answer in answers]
        finally:
            for answer in answers:
                await answer.aclose()

    async def pooled(
        self, generations: Sequence[Generation], request_id: str | None = None
    ) -> list[RequestOutput]:
        """The answers to generations with ``PoolingParams``, of which a request may have more than
        may wait. As many as may run at once are in the engine at a time, and they hold their places
        in the queue until all are answered.

        Raises:
            ApiError: as for :meth:`start_all`.
        """
        user = generations[0].user
        num_places = min(len(generations), self.engine.engine.scheduler.config.max_num_seqs)
        turns = asyncio.Semaphore(num_places)

        async def answer_of(generation: Generation) -> RequestOutput:
            async with turns:
                answer = await self._start(generation, NO_RULES, request_id, nullcontext())
                try:
                    return await anext(answer)
                finally:
                    await answer.aclose()

        with self.admit(num_places, user):
            tasks = [asyncio.create_task(answer_of(each)) for each in generations]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
