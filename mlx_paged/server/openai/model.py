"""``GET /v1/models``, and vLLM's ``POST /tokenize`` and ``/detokenize``."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import Field
from starlette.responses import JSONResponse, Response

from mlx_paged.options.argument_values import check_token_ids
from mlx_paged.server.chat_jobs import ChatJob, prepare
from mlx_paged.server.errors import api_error
from mlx_paged.server.fields import ModelFields, TokenIds, check_model_name
from mlx_paged.server.generations import Generation
from mlx_paged.server.openai.chat import (
    ChatTool,
    Conversation,
    TemplateFields,
    read_messages,
    read_tools,
)
from mlx_paged.server.openai.completions import encode_all
from mlx_paged.server.prompt_threads import Work
from mlx_paged.server.routes import RequestContext
from mlx_paged.server.schemas import Body, Children, refused
from mlx_paged.server.service import Service


async def models(context: RequestContext[Body]) -> Response:
    """The names that clients may use."""
    service = context.service
    data = [_model(name, service) for name in service.model_names]
    return JSONResponse({"object": "list", "data": data})


async def model(context: RequestContext[Body]) -> Response:
    """One of the names that clients may use."""
    service = context.service
    name = context.request.path_params["name"]
    check_model_name(name, service)
    return JSONResponse(_model(name, service))


def _model(name: str, service: Service) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "mlx_paged",
        "root": service.model_names[0],
        "parent": None,
        "max_model_len": service.max_model_len,
    }


class TokenizeRequest(ModelFields, TemplateFields):
    """The body of ``POST /tokenize``: a prompt, or a conversation."""

    prompt: str | None = None
    messages: Conversation | None = None
    tools: Children[ChatTool] = Field(default_factory=list)
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    def check(self) -> None:
        """Check that the fields belong together."""
        if self.prompt is None and self.messages is None:
            raise refused("prompt", "is missing")
        if self.prompt is not None:
            for name in sorted(self.model_fields_set & _OF_CONVERSATIONS):
                raise refused(name, "can't be combined with prompt")
        elif self.add_special_tokens:
            raise refused("add_special_tokens", "can't be combined with messages")


_OF_CONVERSATIONS = {"messages", "tools", *TemplateFields.model_fields}


class DetokenizeRequest(ModelFields):
    """The body of ``POST /detokenize``."""

    tokens: TokenIds


async def tokenize(context: RequestContext[TokenizeRequest]) -> Response:
    """The tokens of a text, or of a conversation as the chat template writes it."""
    token_ids, names = await context.run_in_tokenizer_pool(partial(_tokens, context))
    return JSONResponse(
        {
            "count": len(token_ids),
            "max_model_len": context.service.max_model_len,
            "tokens": token_ids,
            "token_strs": names,
        }
    )


def _tokens(
    context: RequestContext[TokenizeRequest], work: Work
) -> tuple[list[int], list[str] | None]:
    """The token ids of a text or a conversation, and their names if requested."""
    service, body = context.service, context.read_body()
    body.model_name(service)
    body.check()
    tokenizer = service.tokenizer
    if body.prompt is not None:
        adds_special_tokens = body.add_special_tokens is not False
        [token_ids] = encode_all(work, service, [body.prompt], adds_special_tokens)
    else:
        job = ChatJob(
            messages=read_messages(body.messages or ()),
            generation=Generation([], service.default_params),
            tools=read_tools(body.tools),
            template_options=body.template_options(),
        )
        token_ids = prepare(work, service, job).prompt_token_ids
    return token_ids, tokenizer.convert_ids_to_tokens(token_ids) if body.return_token_strs else None


async def detokenize(context: RequestContext[DetokenizeRequest]) -> Response:
    """The text of tokens."""
    text = await context.run_in_tokenizer_pool(partial(_text, context))
    return JSONResponse({"prompt": text})


def _text(context: RequestContext[DetokenizeRequest], work: Work) -> str:
    service, body = context.service, context.read_body()
    body.model_name(service)
    try:
        checked = check_token_ids(body.tokens, len(service.tokenizer), "tokens")
    except ValueError as error:
        raise api_error(error) from error
    return str(service.tokenizer.decode(checked))
