"""``GET /v1/models``, and vLLM's ``POST /tokenize``, ``/detokenize``, ``/v1/load_lora_adapter`` and
``/v1/unload_lora_adapter``.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import JSONResponse, PlainTextResponse, Response

from mlx_paged.errors import AdapterError, AdaptersInUseError, shown, system_reason, without_room
from mlx_paged.options.argument_values import check_token_ids
from mlx_paged.server.chat_jobs import ChatJob, prepare
from mlx_paged.server.errors import ApiError, api_error
from mlx_paged.server.fields import (
    MAX_NAME_LEN,
    ModelFields,
    TokenIds,
    adapter_of,
    check_model_name,
)
from mlx_paged.server.generations import Generation
from mlx_paged.server.http.access import check_admin
from mlx_paged.server.http.logs import logger
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
from mlx_paged.server.schemas import Body, Children, Filled, only, refused
from mlx_paged.server.service import Service


async def models(context: RequestContext[Body]) -> Response:
    """The names that clients may use."""
    service = context.service
    data = [_model(name, service) for name in service.all_names]
    return JSONResponse({"object": "list", "data": data})


async def model(context: RequestContext[Body]) -> Response:
    """One of the names that clients may use."""
    service = context.service
    name = context.request.path_params["name"]
    check_model_name(name, service)
    return JSONResponse(_model(name, service))


def _model(name: str, service: Service) -> dict[str, Any]:
    """A model, or an adapter, whose ``parent`` is the model, in OpenAI's form."""
    base, adapter = service.model_names[0], adapter_of(name, service)
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "mlx_paged",
        "root": adapter or base,
        "parent": None if adapter is None else base,
        "max_model_len": service.max_model_len,
    }


class LoadAdapterRequest(Body):
    """The body of ``POST /v1/load_lora_adapter``."""

    lora_name: Annotated[Filled, Field(max_length=MAX_NAME_LEN)]
    lora_path: Filled
    load_inplace: Annotated[
        Any, only(False, way_out="unload the adapter first, or use another name")
    ] = False


class UnloadAdapterRequest(Body):
    """The body of ``POST /v1/unload_lora_adapter``."""

    lora_name: Filled
    lora_int_id: Any = None  # vLLM's number of the adapter, which it ignores, too


async def load_adapter(context: RequestContext[LoadAdapterRequest]) -> Response:
    """Load a LoRA adapter from a folder below ``--adapters-dir``."""
    check_admin(context.principal, "an adapter", "to load or unload it")
    service, body = context.service, context.read_body()
    name = body.lora_name
    folder = _adapter_folder(service.settings.adapters_dir, body.lora_path)
    if name in service.model_names:
        raise ApiError(400, f"{shown(name)} is the name of the model", param="lora_name")
    try:
        await asyncio.to_thread(service.engine.load_adapter, name, folder)
    except AdaptersInUseError as error:
        raise api_error(error) from error
    except AdapterError as error:
        raise ApiError(400, without_room(str(error)), param="lora_path") from error
    except Exception as error:
        raise api_error(error) from error
    logger.info("the adapter %s was loaded", shown(name))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_adapter(context: RequestContext[UnloadAdapterRequest]) -> Response:
    """Unload a LoRA adapter; requests that use it continue."""
    check_admin(context.principal, "an adapter", "to load or unload it")
    name = context.read_body().lora_name
    try:
        context.service.engine.unload_adapter(name)
    except AdapterError as error:
        raise ApiError(404, without_room(str(error)), param="lora_name") from error
    logger.info("the adapter %s was unloaded", shown(name))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _adapter_folder(below: str | None, path: str) -> Path:
    """The folder of an adapter, links followed.

    Raises:
        ApiError: there is none, or it or one of its files is not below ``--adapters-dir``.
    """
    if below is None:
        raise ApiError(
            403,
            "adapters are loaded from below --adapters-dir, and this server has none",
            code="adapters_dir_needed",
        )
    root = Path(below).resolve()
    try:
        folder = (root / path).resolve()
        is_inside = folder.is_relative_to(root) and folder != root
        if is_inside and folder.is_dir():
            files = [each.resolve() for each in folder.iterdir()]
            if all(each.parent == folder for each in files):
                return folder
        elif is_inside:
            raise ApiError(404, f"no adapter found in {shown(path)}", param="lora_path")
    except (OSError, ValueError, RuntimeError) as error:
        what = f"lora_path {shown(path)} can't be read: {system_reason(error)}"
        raise ApiError(400, what, param="lora_path") from error
    what = f"lora_path {shown(path)} is not a folder below --adapters-dir, or has links out of it"
    raise ApiError(400, what, param="lora_path")


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
