"""``POST /v1/completions``: texts that go on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import WithJsonSchema
from starlette.responses import JSONResponse, Response

from mlx_paged.engine.prompts import encode_prompt
from mlx_paged.errors import shown
from mlx_paged.request import CompletionOutput, RequestOutput
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.server.answers.state import AnswerState, Usage
from mlx_paged.server.context import RequestContext
from mlx_paged.server.errors import ApiError
from mlx_paged.server.fair_threads import Work
from mlx_paged.server.generations import Answer, Generation, api_error, parts_of
from mlx_paged.server.http.sse import DONE, EventStream, event
from mlx_paged.server.openai.logprobs import CompletionLogprobs, TokenNames, prompt_logprobs
from mlx_paged.server.openai.options import Head, OpenAIFields, Options, first_given, usage_of
from mlx_paged.server.prompt_length import MAX_PROMPT_TOKENS
from mlx_paged.server.sampling_fields import MAX_TOKEN_IDS
from mlx_paged.server.schemas import Fixed, OneOf, refused
from mlx_paged.server.service import Service
from mlx_paged.token_ids import check_token_ids

MAX_PROMPTS = 1024
MAX_CHOICES = 1024  # prompts times completions
DEFAULT_MAX_TOKENS = 16  # OpenAI's

Prompt = str | tuple[int, ...]


_TOKEN_IDS = {"type": "array", "items": {"type": "integer"}, "maxItems": MAX_TOKEN_IDS}
_PROMPT = {"anyOf": [{"type": "string"}, {**_TOKEN_IDS, "minItems": 1}]}
_PROMPTS = {"type": "array", "items": _PROMPT, "minItems": 1, "maxItems": MAX_PROMPTS}


class CompletionRequest(OpenAIFields):
    """The body of ``POST /v1/completions``."""

    # A text, token ids, or a list of either.
    prompt: Annotated[str | list[Any], OneOf(), WithJsonSchema({"anyOf": [_PROMPT, _PROMPTS]})]
    max_tokens: int | None = None
    echo: bool = False
    logprobs: int | None = None
    suffix: Annotated[Any, Fixed("")] = None
    add_special_tokens: bool = True


@dataclass(frozen=True)
class CompletionBody:
    """A body of completions, read.

    Args:
        prompts: texts or token ids.
        params: of each prompt.
        adds_special_tokens: to texts, unless they begin with them.
        echoes: whether an answer begins with its prompt.
        has_answer: whether more than the prompt is wanted.
    """

    prompts: list[Prompt]
    params: SamplingParams
    options: Options
    adds_special_tokens: bool = True
    echoes: bool = False
    has_answer: bool = True
    priority: int = 0
    cache_salt: str | None = None
    no_store: bool = False


async def completions(context: RequestContext[CompletionRequest]) -> Response:
    """How the prompts go on, whole or in parts."""
    service, user = context.service, context.user
    body, encoded = await service.run_in_tokenizer_pool(user, _prepared, context)
    salt = context.cache_salt(body.cache_salt)
    no_store = context.no_store(body.no_store)
    generations = [
        Generation(token_ids, body.params, body.priority, salt, no_store, user=user)
        for token_ids in encoded
    ]
    head = Head.of(context.request_id, body.options, "cmpl", "text_completion")
    renderer = CompletionsRenderer(head.values, service, body, encoded)
    if not body.options.is_streamed:
        outputs = await service.whole(generations, head.request_id)
        return JSONResponse(renderer.whole(outputs))
    answers = await service.start_all(generations, head.request_id)
    return EventStream(renderer.events(answers), *answers)


def _prepared(
    work: Work, context: RequestContext[CompletionRequest]
) -> tuple[CompletionBody, list[list[int]]]:
    """The body, and the tokens of its prompts."""
    body = read_completions(context.read_body(), context.service)
    return body, encode_all(work, context.service, body)


def read_completions(request: CompletionRequest, service: Service) -> CompletionBody:
    """Everything that the body says.

    Raises:
        ApiError: the first thing that is wrong; 404 for an unknown model, and else 400.
    """
    options = request.options(service)
    prompts = read_prompts(request.prompt)
    max_tokens = first_given(request.max_tokens, service.max_tokens, DEFAULT_MAX_TOKENS)
    values: dict[str, Any] = {
        "logprobs": request.logprobs,
        "structured_outputs": request.structured(),
        # The engine makes a token in any case.
        "max_tokens": 1 if request.echo and max_tokens == 0 else max_tokens,
    }
    if request.echo and request.logprobs is not None:
        values["prompt_logprobs"] = request.logprobs
    params = request.sampling(service.default_params, **values)
    if len(prompts) * params.n > MAX_CHOICES:
        raise refused("n", f"times {len(prompts)} prompts is more than {MAX_CHOICES:,}")
    if options.is_streamed and params.prompt_logprobs is not None and not request.echo:
        raise refused("prompt_logprobs", "can't be streamed")
    return CompletionBody(
        prompts,
        params,
        options,
        adds_special_tokens=request.add_special_tokens,
        echoes=request.echo,
        has_answer=max_tokens != 0,
        **request.job_fields(),
    )


def read_prompts(prompt: str | list[Any]) -> list[Prompt]:
    """The prompts: a text, token ids, or a list of either.

    Raises:
        ApiError: something else, by its place; 400.
    """
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(value, int) for value in prompt):
        return [_token_ids(prompt, "prompt")]
    if not 0 < len(prompt) <= MAX_PROMPTS:
        raise refused("prompt", f"has {len(prompt):,} entries, and may have 1 to {MAX_PROMPTS:,}")
    prompts: list[Prompt] = []
    for index, value in enumerate(prompt):
        place = f"prompt[{index}]"
        if isinstance(value, list):
            prompts.append(_token_ids(value, place))
        elif isinstance(value, str):
            prompts.append(value)
        else:
            raise refused(place, f"must be a text or token ids, got {shown(value)}")
    return prompts


def _token_ids(values: list[Any], place: str) -> tuple[int, ...]:
    if len(values) > MAX_TOKEN_IDS:
        raise refused(place, f"has {len(values):,} entries, and {MAX_TOKEN_IDS:,} are the most")
    for index, value in enumerate(values):
        if type(value) is not int:
            raise refused(f"{place}[{index}]", f"must be a whole number, got {shown(value)}")
    return tuple(values)


def encode_all(work: Work, service: Service, body: CompletionBody) -> list[list[int]]:
    """The tokens of the prompts. It takes long for long prompts, so call it with
    :meth:`Service.run_in_tokenizer_pool`.

    Raises:
        ApiError: a prompt that can't be encoded, or prompts that are too long together; 400.
        PromptTooLongError: a prompt is too long to be encoded.
        CancelledWorkError: the client has left.
    """
    is_one = len(body.prompts) == 1
    limit = service.length_limit(work)
    encoded: list[list[int]] = []
    num_tokens = 0
    for index, prompt in enumerate(body.prompts):
        work.check()
        name = "prompt" if is_one else f"prompt[{index}]"
        try:
            if isinstance(prompt, str):
                limit.check(prompt)
            encoded.append(_encoded(service, body, prompt, name))
        except ValueError as error:
            raise ApiError(400, api_error(error).message, param=name) from error
        num_tokens += len(encoded[-1])
        if num_tokens > MAX_PROMPT_TOKENS and not is_one:
            raise ApiError(
                400,
                f"the prompts have more than {MAX_PROMPT_TOKENS:,} tokens together; send fewer "
                "in a request",
                param=name,
            )
    return encoded


def _encoded(service: Service, body: CompletionBody, prompt: Prompt, name: str) -> list[int]:
    if not isinstance(prompt, str):
        return check_token_ids(prompt, service.engine.engine.runner.vocab_size, name)
    if body.adds_special_tokens:
        return encode_prompt(service.tokenizer, prompt, name)
    return list(service.tokenizer.encode(prompt, add_special_tokens=False))


class CompletionsRenderer:
    """Writes the completions of all prompts. Those of the first prompt come first in the order of
    choices.
    """

    def __init__(
        self,
        head: Mapping[str, Any],
        service: Service,
        body: CompletionBody,
        prompts: list[list[int]],
    ):
        self._head = head
        self._body = body
        self._names = TokenNames(service.token_texts, body.options.has_tokens_as_ids)
        self._tokenizer = service.tokenizer
        self._prompts = prompts
        self._states = [AnswerState() for _ in prompts]
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by the choice

    async def events(self, answers: list[Answer]) -> AsyncGenerator[bytes, None]:
        """The events of a stream."""
        options = self._body.options
        async for prompt_index, output in parts_of(answers):
            for piece in self._pieces(prompt_index, output):
                chunk = {**self._head, "choices": [piece]}
                if options.has_usage:
                    chunk["usage"] = self._usage() if options.has_usage_always else None
                yield event(chunk)
        if options.has_usage:
            yield event({**self._head, "choices": [], "usage": self._usage()})
        yield DONE

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """All completions as one object."""
        choices = []
        for prompt_index, output in enumerate(outputs):
            for piece in self._pieces(prompt_index, output):
                if output.prompt_logprobs is not None:
                    piece["prompt_logprobs"] = prompt_logprobs(self._names, output.prompt_logprobs)
                choices.append(piece)
        return {**self._head, "choices": choices, "usage": self._usage()}

    def _pieces(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The choices that a part of the answer to a prompt makes."""
        for completion, part in self._states[prompt_index].parts(output):
            is_first = not completion.has_begun
            completion.count(part)
            index = prompt_index * self._body.params.n + completion.index
            yield self._piece(index, prompt_index if is_first else None, part, output)

    def _piece(
        self, index: int, prompt_index: int | None, part: CompletionOutput, output: RequestOutput
    ) -> dict[str, Any]:
        """The choice of a part; the first one, which has a prompt's index, has what is echoed."""
        body = self._body
        text, token_ids, entries = "", [], []
        if prompt_index is not None and body.echoes:
            text = self._prompt_text(prompt_index)
            token_ids = list(output.prompt_token_ids)
            entries = list(output.prompt_logprobs or [])
        if body.has_answer:
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
        if body.params.logprobs is not None:
            if index not in self._logprobs:
                self._logprobs[index] = CompletionLogprobs(self._names, body.params.logprobs)
            piece["logprobs"] = self._logprobs[index].of(token_ids, entries)
        if body.options.has_token_ids:
            piece["token_ids"] = part.token_ids if body.has_answer else []
            is_first = prompt_index is not None
            piece["prompt_token_ids"] = output.prompt_token_ids if is_first else None
        return piece

    def _prompt_text(self, prompt_index: int) -> str:
        prompt = self._body.prompts[prompt_index]
        if isinstance(prompt, str):
            return prompt
        text: str = self._tokenizer.decode(list(prompt))
        return text

    def _usage(self) -> dict[str, Any]:
        """The tokens so far, of all prompts from the start."""
        whole = sum((state.usage for state in self._states), Usage())
        num_output_tokens = whole.num_output_tokens if self._body.has_answer else 0
        return usage_of(
            replace(
                whole,
                num_prompt_tokens=sum(map(len, self._prompts)),
                num_output_tokens=num_output_tokens,
            )
        )
