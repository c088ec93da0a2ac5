"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import Response

from mlx_paged.engine.input_processor import MAX_PROMPT_TOKENS, encode_prompt
from mlx_paged.options.argument_values import check_token_ids
from mlx_paged.request import RequestOutput
from mlx_paged.server.errors import ApiError, api_error
from mlx_paged.server.fields import TokenIds, first_given
from mlx_paged.server.generations import CompletionState, Generation, Usage
from mlx_paged.server.openai.answers import (
    CompletionLogprobs,
    OpenAIRenderer,
    prompt_logprobs,
    usage_of,
)
from mlx_paged.server.openai.chat import OpenAIFields
from mlx_paged.server.prompt_threads import Work
from mlx_paged.server.routes import RequestContext
from mlx_paged.server.schemas import OneOf, refused
from mlx_paged.server.service import Service

MAX_PROMPTS = 1024
MAX_CHOICES = 1024  # prompts times completions
DEFAULT_MAX_TOKENS = 16  # OpenAI's


Prompt = Annotated[str | TokenIds, OneOf()]
_Several = Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class CompletionRequest(OpenAIFields):
    """The body of ``POST /v1/completions``."""

    prompt: Annotated[str | TokenIds | _Several, OneOf()]
    max_tokens: int | None = None
    echo: bool = False
    logprobs: int | None = None
    suffix: Literal[""] | None = None
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts: texts and token ids."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)

    def num_tokens(self, service: Service) -> int:
        """The maximum number of tokens of an answer."""
        number = first_given(self.max_tokens, service.max_tokens)
        return DEFAULT_MAX_TOKENS if number is None else number


async def completions(context: RequestContext[CompletionRequest]) -> Response:
    """The completions of prompts, as one object or as events."""
    body, generations = await context.run_in_tokenizer_pool(partial(_prepare, context))
    return await context.respond(CompletionsRenderer(context, body, *generations))


def _prepare(
    context: RequestContext[CompletionRequest], work: Work
) -> tuple[CompletionRequest, list[Generation]]:
    """The body, and a generation for each of its prompts."""
    body, service = context.read_body(), context.service
    prompts, generation = read_completions(body, service)
    generation = context.for_user(generation)
    encoded = encode_all(work, service, prompts, body.add_special_tokens)
    return body, [replace(generation, prompt_token_ids=token_ids) for token_ids in encoded]


def read_completions(
    request: CompletionRequest, service: Service
) -> tuple[list[Prompt], Generation]:
    """The prompts of the body, and the generation for each, still without its tokens."""
    request.check(service)
    prompts = request.prompts
    max_tokens = request.num_tokens(service)
    values: dict[str, Any] = {
        "logprobs": request.logprobs,
        # The engine generates at least one token.
        "max_tokens": 1 if request.echo and max_tokens == 0 else max_tokens,
    }
    if request.echo and request.logprobs is not None:
        values["prompt_logprobs"] = request.logprobs
    generation = request.generation(service, request.structured(), **values)
    params = generation.params
    if len(prompts) * params.n > MAX_CHOICES:
        raise refused("n", f"times {len(prompts)} prompts is more than {MAX_CHOICES:,}")
    if request.stream and params.prompt_logprobs is not None and not request.echo:
        raise refused("prompt_logprobs", "can't be streamed")
    return prompts, generation


def encode_all(
    work: Work, service: Service, prompts: list[Prompt], adds_special_tokens: bool
) -> list[list[int]]:
    """Encode the prompts. This is slow for long ones, so call it with
    :meth:`Service.run_in_tokenizer_pool`.

    Args:
        adds_special_tokens: add special tokens to texts, unless these begin with them.

    Raises:
        ApiError: a prompt can't be encoded, or the prompts are too long together; 400.
        PromptTooLongError: a prompt is too long to be encoded.
        CancelledWorkError: the client has disconnected.
    """
    is_one = len(prompts) == 1
    limit = service.length_limit(work)
    encoded: list[list[int]] = []
    num_tokens = 0
    for index, prompt in enumerate(prompts):
        work.check()
        name = "prompt" if is_one else f"prompt[{index}]"
        try:
            if isinstance(prompt, str):
                limit.check(prompt)
            encoded.append(_encode(service, prompt, name, adds_special_tokens))
        except ValueError as error:
            raise ApiError(400, api_error(error).message, param=name) from error
        num_tokens += len(encoded[-1])
        if num_tokens > MAX_PROMPT_TOKENS and not is_one:
            raise ApiError(
                400,
                f"the prompts have more than {MAX_PROMPT_TOKENS:,} tokens together; send fewer "
                "per request",
                param=name,
            )
    return encoded


def _encode(service: Service, prompt: Prompt, name: str, adds_special_tokens: bool) -> list[int]:
    if not isinstance(prompt, str):
        return check_token_ids(prompt, service.engine.engine.runner.vocab_size, name)
    if adds_special_tokens:
        return encode_prompt(service.tokenizer, prompt, name)
    return list(service.tokenizer.encode(prompt, add_special_tokens=False))


class CompletionsRenderer(OpenAIRenderer[CompletionRequest]):
    """Renders the completions of all prompts; the choices are ordered by prompt."""

    prefix, kind, kind_of_chunk = "cmpl", "text_completion", "text_completion"

    @cached_property
    def _logprobs(self) -> dict[int, CompletionLogprobs]:
        """The log-probabilities of each choice, which know where its text has got to."""
        return {}

    @property
    def _has_answer(self) -> bool:
        return self.body.num_tokens(self.context.service) != 0

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        return map(self.chunk, self._pieces(prompt_index, output))

    def whole(self, *outputs: RequestOutput) -> dict[str, Any]:
        choices = []
        for prompt_index, output in enumerate(outputs):
            for piece in self._pieces(prompt_index, output):
                if output.prompt_logprobs is not None:
                    piece["prompt_logprobs"] = prompt_logprobs(self.names, output.prompt_logprobs)
                choices.append(piece)
        return {**self.head, "choices": choices, "usage": self.usage()}

    def _pieces(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The choices for a part of the answer to a prompt."""
        for completion, part in self.states[prompt_index].parts(output):
            completion.read(part)
            yield self._piece(prompt_index, completion, output)

    def _piece(
        self, prompt_index: int, completion: CompletionState, output: RequestOutput
    ) -> dict[str, Any]:
        """The choice for a part. The first one contains the echo of the prompt."""
        body, has_answer, part = self.body, self._has_answer, completion.part
        index = prompt_index * self.params.n + completion.index
        text, token_ids, entries = "", [], []
        is_first = completion.num_parts == 1
        if is_first and body.echo:
            text = self._prompt_text(prompt_index)
            token_ids = list(output.prompt_token_ids)
            entries = list(output.prompt_logprobs or [])
        if has_answer:
            text += part.text
            token_ids += part.token_ids
            entries += part.logprobs or []
        is_finished = part.finish_reason is not None
        piece: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason if is_finished else None,
        }
        if self.params.logprobs is not None:
            if index not in self._logprobs:
                self._logprobs[index] = CompletionLogprobs(self.names, self.params.logprobs)
            piece["logprobs"] = self._logprobs[index].of(token_ids, entries)
        if body.return_token_ids:
            piece["token_ids"] = part.token_ids if has_answer else []
            piece["prompt_token_ids"] = output.prompt_token_ids if is_first else None
        return piece

    def _prompt_text(self, prompt_index: int) -> str:
        prompt = self.body.prompts[prompt_index]
        if isinstance(prompt, str):
            return prompt
        token_ids = self.generations[prompt_index].prompt_token_ids
        return str(self.context.service.tokenizer.decode(token_ids))

    def usage(self) -> dict[str, Any]:
        whole = sum((state.usage for state in self.states), Usage())
        num_output_tokens = whole.num_output_tokens if self._has_answer else 0
        num_prompt_tokens = sum(len(each.prompt_token_ids) for each in self.generations)
        return usage_of(
            replace(whole, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens)
        )
