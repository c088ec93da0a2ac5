"""``POST /v1/completions``: texts that go on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_paged.engine.prompts import encode_prompt
from mlx_paged.errors import shown
from mlx_paged.request import CompletionOutput, RequestOutput
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.server.answers.state import AnswerState, Usage
from mlx_paged.server.callers import cache_salt_of, no_store_of, user_of
from mlx_paged.server.errors import ApiError
from mlx_paged.server.fair_threads import Work
from mlx_paged.server.fields import Fields
from mlx_paged.server.generations import Answer, Generation, api_error, parts_of
from mlx_paged.server.grammars.response_format import read_structured_outputs
from mlx_paged.server.http.sse import DONE, EventStream, event
from mlx_paged.server.openai.logprobs import CompletionLogprobs, TokenNames, prompt_logprobs
from mlx_paged.server.openai.options import (
    ADVICE,
    Head,
    Options,
    read_cache_salt,
    read_max_tokens,
    read_no_store,
    read_options,
    usage_of,
)
from mlx_paged.server.prompt_length import MAX_PROMPT_TOKENS
from mlx_paged.server.sampling_fields import MAX_TOKEN_IDS, read_sampling
from mlx_paged.server.service import Service
from mlx_paged.token_ids import check_token_ids

MAX_PROMPTS = 1024
MAX_CHOICES = 1024  # prompts times completions
DEFAULT_MAX_TOKENS = 16  # OpenAI's

Prompt = str | tuple[int, ...]


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


async def completions(request: Request, fields: Fields) -> Response:
    """How the prompts go on, whole or in parts."""
    service: Service = request.app.state.service
    user = user_of(request)
    body, encoded = await service.run_in_tokenizer_pool(user, _prepared, service, fields)
    salt = cache_salt_of(request, body.cache_salt)
    no_store = no_store_of(request, body.no_store)
    generations = [
        Generation(token_ids, body.params, body.priority, salt, no_store, user=user)
        for token_ids in encoded
    ]
    head = Head.of(request, body.options, "cmpl", "text_completion")
    renderer = CompletionsRenderer(head.values, service, body, encoded)
    if not body.options.is_streamed:
        outputs = await service.whole(generations, head.request_id)
        return JSONResponse(renderer.whole(outputs))
    answers = await service.start_all(generations, head.request_id)
    return EventStream(renderer.events(answers), *answers)


def _prepared(
    work: Work, service: Service, fields: Fields
) -> tuple[CompletionBody, list[list[int]]]:
    """The body, and the tokens of its prompts."""
    body = read_completions(fields, service)
    return body, encode_all(work, service, body)


def read_completions(fields: Fields, service: Service) -> CompletionBody:
    """Everything that the body says.

    Raises:
        ApiError: the first thing that is wrong, and every field that can't be honoured, by name.
    """
    options = read_options(fields, service)
    prompts = read_prompts(fields)
    echoes = fields.boolean("echo", False)
    num_logprobs = fields.integer("logprobs", None)
    default = DEFAULT_MAX_TOKENS if service.max_tokens is None else service.max_tokens
    max_tokens = read_max_tokens(fields, "max_tokens", default=default)
    fields.only("suffix", "")
    values: dict[str, Any] = {
        "logprobs": num_logprobs,
        "structured_outputs": read_structured_outputs(fields),
    }
    if echoes and num_logprobs is not None:
        values["prompt_logprobs"] = num_logprobs
    # The engine makes a token in any case.
    values["max_tokens"] = 1 if echoes and max_tokens == 0 else max_tokens
    params = read_sampling(fields, service.default_params, **values)
    if len(prompts) * params.n > MAX_CHOICES:
        raise fields.error("n", f"times {len(prompts)} prompts is more than {MAX_CHOICES:,}")
    if options.is_streamed and params.prompt_logprobs is not None and not echoes:
        raise fields.error("prompt_logprobs", "can't be streamed")
    body = CompletionBody(
        prompts,
        params,
        options,
        adds_special_tokens=fields.boolean("add_special_tokens", True),
        echoes=echoes,
        has_answer=max_tokens != 0,
        priority=fields.integer("priority", 0),
        cache_salt=read_cache_salt(fields),
        no_store=read_no_store(fields),
    )
    fields.refuse_rest(ADVICE)
    return body


def read_prompts(fields: Fields) -> list[Prompt]:
    """The prompts: a text, token ids, or a list of either."""
    prompt = fields.raw("prompt")
    if isinstance(prompt, str):
        return [prompt]
    values = fields.items("prompt")
    if values and all(isinstance(value, int) for value in values):
        return [fields.integers("prompt", MAX_TOKEN_IDS)]
    if not 0 < len(values) <= MAX_PROMPTS:
        raise fields.error(
            "prompt", f"has {len(values):,} entries, and may have 1 to {MAX_PROMPTS:,}"
        )
    prompts: list[Prompt] = []
    for index, value in enumerate(values):
        name = f"prompt[{index}]"
        if isinstance(value, list):
            prompts.append(Fields({name: value}).integers(name, MAX_TOKEN_IDS))
        elif isinstance(value, str):
            prompts.append(value)
        else:
            raise fields.error(name, f"must be a text or token ids, got {shown(value)}")
    return prompts


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
