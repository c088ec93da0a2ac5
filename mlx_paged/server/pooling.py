"""``POST /v1/embeddings`` as OpenAI has it; ``/v1/rerank`` as Jina, Cohere and vLLM have it, and
vLLM's ``/v1/score``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from starlette.responses import JSONResponse, Response

from mlx_paged.engine.input_processor import MAX_PROMPT_TOKENS
from mlx_paged.engine.options import RequestOptions
from mlx_paged.engine.request import NO_SAMPLING
from mlx_paged.errors import PromptTooLongError, prompt_beyond_context
from mlx_paged.loading.pooling import score_of
from mlx_paged.options.argument_values import check_token_ids
from mlx_paged.options.sampling_params import PoolingParams
from mlx_paged.request import RequestOutput
from mlx_paged.server.errors import ApiError, api_error
from mlx_paged.server.fields import ModelFields, TokenIds, adapter_of
from mlx_paged.server.generations import Generation
from mlx_paged.server.prompt_threads import Work
from mlx_paged.server.routes import ApiRoute, RequestContext
from mlx_paged.server.schemas import Filled, OneOf, Repeated, refused
from mlx_paged.server.service import Service

MAX_INPUTS = 2048  # of a request, as in OpenAI's API
# The texts that are encoded before those that are cut have this many characters for each token.
_MAX_TOKEN_LEN = 64

_Tokens = Annotated[TokenIds, Field(min_length=1)]
_Input = Annotated[Filled | _Tokens, OneOf()]
_Inputs = Annotated[list[_Input], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
_Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


class PoolingFields(ModelFields):
    """The fields of all requests that generate no tokens."""

    priority: int = 0
    cache_salt: Filled | None = None
    user: Any = None  # Without effect, as in chat.

    def options(self, service: Service) -> RequestOptions:
        """The corresponding options of a request to the engine."""
        return {
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "adapter": adapter_of(self.model_name(service), service),
        }


class EmbeddingRequest(PoolingFields):
    """The body of ``POST /v1/embeddings``. ``prompt_name`` is sentence-transformers'."""

    input: Annotated[Filled | _Tokens | _Inputs, OneOf()]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    prompt_name: str | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        """The inputs: texts and token ids."""
        given: Any = self.input
        return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


class Document(Repeated):
    place = "documents[]"
    text: str


class RerankRequest(PoolingFields):
    """The body of ``POST /v1/rerank``. A ``top_n`` of 0 is all documents, as in vLLM."""

    query: Filled
    documents: Annotated[
        list[Annotated[str | Document, OneOf()]],
        Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True),
    ]
    top_n: Annotated[int, Field(ge=0)] = 0
    return_documents: bool = True
    instruction: Filled | None = None


class ScoreRequest(PoolingFields):
    """The body of ``POST /v1/score``: one text for all others, or one for each."""

    text_1: Annotated[Filled | _Texts, OneOf()]
    text_2: Annotated[Filled | _Texts, OneOf()]
    instruction: Filled | None = None


async def embeddings(context: RequestContext[EmbeddingRequest]) -> Response:
    """The embeddings of texts, by a model that was made for that."""

    def read(work: Work) -> tuple[EmbeddingRequest, list[Generation]]:
        body = context.read_body()
        return body, read_inputs(
            work,
            context,
            body.inputs,
            dimensions=body.dimensions,
            prompt_name=body.prompt_name,
            options=body.options(context.service),
        )

    body, generations = await context.run_in_tokenizer_pool(read)
    outputs = await context.service.pooled(generations, context.request_id)
    whole = partial(_embeddings_body, context, body, outputs)
    content = await context.run_in_tokenizer_pool(lambda _: whole())
    return Response(content, media_type="application/json")


def read_inputs(
    work: Work,
    context: RequestContext[Any],
    inputs: Sequence[str | list[int]],
    *,
    dimensions: int | None = None,
    prompt_name: str | None = None,
    truncates: bool = False,
    options: RequestOptions | None = None,
) -> list[Generation]:
    """What is asked of the engine for each input of a request for embeddings, which
    :meth:`Service.pooled` then returns as ``RequestOutput.pooled``. Call it with
    :meth:`RequestContext.run_in_tokenizer_pool`.

    Args:
        inputs: texts and token ids, at least one.
        dimensions: of the embeddings; ``None`` for all.
        prompt_name: as of :meth:`Embedder.text_before`.
        truncates: cut inputs that are too long, instead of refusing them. The end token that the
            tokenizer has appended stays.
        options: the engine's, still without the user.

    Raises:
        ApiError: the model was not made for embeddings, or an input is invalid; 400.
        PromptTooLongError: a text is too long to be encoded.
        CancelledWorkError: the client has disconnected.
    """
    service, max_len = context.service, context.service.max_model_len
    limit = service.length_limit(work)
    encoded: dict[str, list[int]] = {}
    try:
        embedder = service.embedder
        pooling = embedder.params(dimensions)
        before = embedder.text_before(prompt_name)
    except ValueError as error:
        raise api_error(error) from error
    for index, given in enumerate(inputs):
        work.check()
        name = "input" if len(inputs) == 1 else f"input[{index}]"
        try:
            if isinstance(given, str):
                if truncates and max_len is not None:
                    given = given[: _MAX_TOKEN_LEN * max_len]
                else:
                    limit.check(given)
                token_ids = embedder.encode(given, before, name)
            else:
                token_ids = check_token_ids(given, service.engine.engine.runner.vocab_size, name)
        except (ValueError, PromptTooLongError) as error:
            raise _refusal_of(name, error) from error
        if truncates and max_len is not None and len(token_ids) > max_len:
            num_ends = int(isinstance(given, str) and embedder.ends_texts)
            token_ids = token_ids[: max_len - num_ends] + token_ids[len(token_ids) - num_ends :]
        encoded[name] = token_ids
    _check_lengths(service, encoded)
    return [_generation(context, each, pooling, options) for each in encoded.values()]


def _generation(
    context: RequestContext[Any],
    token_ids: list[int],
    pooling: PoolingParams,
    options: RequestOptions | None,
) -> Generation:
    return context.for_user(Generation(token_ids, NO_SAMPLING, options or {}, pooling=pooling))


def _check_lengths(service: Service, encoded: Mapping[str, Sequence[int]]) -> None:
    """Refuse prompts that are too long before any of them is computed.

    Args:
        encoded: the tokens of the prompts by their places in the body.

    Raises:
        ApiError: one exceeds the context, or all together are too many; 400.
    """
    max_len, num_tokens = service.max_model_len, 0
    context_length = service.engine.engine.scheduler.context_length
    for name, token_ids in encoded.items():
        if max_len is not None and len(token_ids) > max_len:
            error = prompt_beyond_context(len(token_ids), max_len, context_length, has_answer=False)
            raise _refusal_of(name, error)
        num_tokens += len(token_ids)
        if num_tokens > MAX_PROMPT_TOKENS and len(encoded) > 1:
            words = f"is one too many: all have more than {MAX_PROMPT_TOKENS:,} tokens together"
            raise refused(name, f"{words}; send fewer per request")


def _refusal_of(name: str, error: Exception) -> ApiError:
    refusal = api_error(error)
    return ApiError(400, refusal.message, name, refusal.code)


def _embeddings_body(
    context: RequestContext[Any], body: EmbeddingRequest, outputs: Sequence[RequestOutput]
) -> bytes:
    """The answer."""
    entries = []
    for index, output in enumerate(outputs):
        embedding: Any = output.pooled
        if body.encoding_format == "base64":
            embedding = base64.b64encode(np.array(embedding, "<f4").tobytes()).decode()
        entries.append(json.dumps({"object": "embedding", "index": index, "embedding": embedding}))
    head = {
        "object": "list",
        "model": body.model_name(context.service),
        "usage": usage_of(outputs),
    }
    return with_entries(head, "data", entries)


def with_entries(head: Mapping[str, Any], name: str, entries: Sequence[str]) -> bytes:
    """A JSON object with the fields of ``head`` and a list of values, each of which was written by
    itself: one call for all embeddings would hold the GIL for a second.
    """
    return f'{json.dumps(head)[:-1]}, "{name}": [{", ".join(entries)}]}}'.encode()


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    """The numbers of tokens, all of which are of prompts."""
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


async def rerank(context: RequestContext[RerankRequest]) -> Response:
    """Documents, the best answers to a query first, by Qwen3-Reranker."""

    def read(work: Work) -> tuple[RerankRequest, list[Generation]]:
        body = context.read_body()
        texts = [each if isinstance(each, str) else each.text for each in body.documents]
        fields = {"queries": "query", "documents": "documents"}
        return body, _read_pairs(work, context, body, body.query, texts, body.instruction, fields)

    body, generations = await context.run_in_tokenizer_pool(read)
    outputs = await context.service.pooled(generations, context.request_id)
    scores = [score_of(output.pooled or ()) for output in outputs]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[dict[str, Any]] = []
    for index in best[: body.top_n or None]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if body.return_documents:
            document = body.documents[index]
            text = document if isinstance(document, str) else document.text
            result["document"] = {"text": text}
        results.append(result)
    return JSONResponse(
        {
            "id": f"rerank-{context.request_id}",
            "model": body.model_name(context.service),
            "usage": usage_of(outputs),
            "results": results,
        }
    )


async def score(context: RequestContext[ScoreRequest]) -> Response:
    """How well texts answer other texts, by Qwen3-Reranker."""

    def read(work: Work) -> tuple[ScoreRequest, list[Generation]]:
        body = context.read_body()
        fields = {"queries": "text_1", "documents": "text_2"}
        return body, _read_pairs(
            work, context, body, body.text_1, body.text_2, body.instruction, fields
        )

    body, generations = await context.run_in_tokenizer_pool(read)
    outputs = await context.service.pooled(generations, context.request_id)
    return JSONResponse(
        {
            "id": f"score-{context.request_id}",
            "object": "list",
            "created": context.service.created,
            "model": body.model_name(context.service),
            "data": [
                {"index": index, "object": "score", "score": score_of(output.pooled or ())}
                for index, output in enumerate(outputs)
            ],
            "usage": usage_of(outputs),
        }
    )


def _read_pairs(
    work: Work,
    context: RequestContext[Any],
    body: PoolingFields,
    queries: str | list[str],
    documents: str | list[str],
    instruction: str | None,
    fields: Mapping[str, str],
) -> list[Generation]:
    """What is asked of the engine for each document.

    Args:
        fields: the client's fields by the names of arguments.
    """
    service = context.service
    options = body.options(service)
    limit = service.length_limit(work)
    for given in (queries, documents):
        for text in [given] if isinstance(given, str) else given:
            limit.check(text)
    try:
        requests = service.reranker.requests(queries, documents, instruction)
    except ValueError as error:
        raise api_error(error, fields) from error
    work.check()
    place = fields["documents"]
    _check_lengths(
        service, {f"{place}[{index}]": token_ids for index, (token_ids, _) in enumerate(requests)}
    )
    return [_generation(context, *each, options) for each in requests]


ROUTES = [
    *(ApiRoute(path, embeddings, EmbeddingRequest) for path in ("/v1/embeddings", "/embeddings")),
    # Jina's, Cohere's, and that of clients whose base URL has the version.
    *(ApiRoute(path, rerank, RerankRequest) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
    *(ApiRoute(path, score, ScoreRequest) for path in ("/v1/score", "/score")),
]
