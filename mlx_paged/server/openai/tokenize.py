"""``POST /tokenize`` and ``POST /detokenize``, as vLLM has them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_paged.server.callers import user_of
from mlx_paged.server.chat_jobs import ChatJob, prepare
from mlx_paged.server.fair_threads import Work
from mlx_paged.server.fields import Fields
from mlx_paged.server.generations import api_error
from mlx_paged.server.openai.chat import read_template_options
from mlx_paged.server.openai.messages import read_messages, read_tools
from mlx_paged.server.openai.options import read_model
from mlx_paged.server.sampling_fields import MAX_TOKEN_IDS
from mlx_paged.server.service import Service
from mlx_paged.token_ids import check_token_ids


async def tokenize(request: Request, fields: Fields) -> Response:
    """The tokens of a text, or of a conversation as the chat template writes it."""
    service: Service = request.app.state.service
    token_ids, names = await service.run_in_tokenizer_pool(
        user_of(request), _tokens, request, fields
    )
    return JSONResponse(
        {
            "count": len(token_ids),
            "max_model_len": service.max_model_len,
            "tokens": token_ids,
            "token_strs": names,
        }
    )


def _tokens(work: Work, request: Request, fields: Fields) -> tuple[list[int], list[str] | None]:
    """The token ids that a body asks for, and what they are called if it asks for that."""
    service: Service = request.app.state.service
    read_model(fields, service)
    has_names = fields.boolean("return_token_strs", False)
    if fields.has("messages"):
        token_ids = _conversation(work, request, fields)
    else:
        text = fields.text("prompt")
        adds = fields.boolean("add_special_tokens", True)
        fields.refuse_rest()
        service.length_limit(work).check(text)
        token_ids = service.tokenizer.encode(text, add_special_tokens=adds)
    return token_ids, service.tokenizer.convert_ids_to_tokens(token_ids) if has_names else None


def _conversation(work: Work, request: Request, fields: Fields) -> list[int]:
    service: Service = request.app.state.service
    job = ChatJob(
        messages=read_messages(fields),
        params=service.default_params,
        tools=read_tools(fields),
        template_options=read_template_options(fields),
    )
    fields.only("add_special_tokens", False)
    fields.refuse_rest()
    generation, _ = prepare(work, service, job)
    return generation.prompt_token_ids


async def detokenize(request: Request, fields: Fields) -> Response:
    """The text of tokens."""
    service: Service = request.app.state.service
    text = await service.run_in_tokenizer_pool(user_of(request), _text, service, fields)
    return JSONResponse({"prompt": text})


def _text(work: Work, service: Service, fields: Fields) -> str:
    """The text of the tokens in a body."""
    read_model(fields, service)
    fields.items("tokens")
    token_ids = fields.integers("tokens", MAX_TOKEN_IDS)
    fields.refuse_rest()
    try:
        checked = check_token_ids(token_ids, len(service.tokenizer), "tokens")
    except ValueError as error:
        raise api_error(error) from error
    return str(service.tokenizer.decode(checked))
