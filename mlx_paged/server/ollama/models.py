"""What Ollama's API says of the model of a server: ``/api/tags``, ``/api/ps``, ``/api/show``."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import get_total_parameters
from starlette.responses import JSONResponse, Response

from mlx_paged.loading.pooling import read_embedder
from mlx_paged.models.kv_cache import num_tokens_held, weight_nbytes
from mlx_paged.models.language_model import LanguageModel, model_type_of
from mlx_paged.models.mlx_lm import check_model
from mlx_paged.server.fields import ModelFields
from mlx_paged.server.ollama import listing
from mlx_paged.server.ollama.body import OPTIONS, capabilities_of
from mlx_paged.server.prompt_threads import Work
from mlx_paged.server.routes import RequestContext
from mlx_paged.server.schemas import Body, Repeated
from mlx_paged.server.service import Service


class ShowRequest(Repeated, ModelFields):
    """The body of ``POST /api/show``. Older clients call the model ``name``."""

    name: str | None = None

    def model_name(self, service: Service) -> str:
        model = self.name if self.model is None else self.model
        return ModelFields(model=model).model_name(service)


async def version(context: RequestContext[Body]) -> Response:
    """The version of Ollama whose API this is."""
    return JSONResponse({"version": listing.VERSION})


async def tags(context: RequestContext[Body]) -> Response:
    """The models, in Ollama's form."""
    service = context.service
    description = await context.run_in_tokenizer_pool(lambda _: describe(service))
    return JSONResponse({"models": listing.entries(service.all_names, description)})


async def loaded(context: RequestContext[Body]) -> Response:
    """The loaded models, in Ollama's form, with their memory."""
    service = context.service
    description = await context.run_in_tokenizer_pool(lambda _: describe(service))
    nbytes = description["size"] + service.engine.stats().nbytes_held
    memory = {
        "size": nbytes,
        "size_vram": nbytes,
        "expires_at": listing.FOREVER,
        "context_length": description["context_length"],
    }
    found = listing.entries(service.all_names, description)
    return JSONResponse({"models": [{**entry, **memory} for entry in found]})


async def show(context: RequestContext[ShowRequest]) -> Response:
    """What a model is and can do, in Ollama's form."""
    service = context.service

    def shown(_: Work) -> dict[str, Any]:
        return listing.shown(context.read_body().model_name(service), describe(service))

    return JSONResponse(await context.run_in_tokenizer_pool(shown))


async def refuse(context: RequestContext[Body]) -> NoReturn:
    """Refused: the error says what to use instead."""
    listing.refuse(context.request.url.path)


def describe(service: Service) -> dict[str, Any]:
    """What is said of the model of a server under all of its names."""
    engine = service.engine.engine
    held = num_tokens_held(engine.cache, engine.manager)
    return description_of(
        check_model(engine.model),
        service.tokenizer,
        service.defaults,
        context_length=min(service.max_model_len or sys.maxsize, held),
        task=service.settings.task,
    )


def description_of(
    model: LanguageModel,
    tokenizer: TokenizerWrapper,
    defaults: Mapping[str, Any],
    context_length: int,
    task: str | None = None,
) -> dict[str, Any]:
    """What is said of a model, whose weights are not needed.

    Args:
        defaults: of sampling parameters.
        context_length: the tokens that a prompt and its answer may have: as many as the model takes
            and the K/V budget holds.
        task: as of :class:`ServerSettings`.
    """
    nbytes, num_parameters = weight_nbytes(model), get_total_parameters(model)
    kind, billions = model_type_of(model), num_parameters / 1e9
    is_gguf = model.path is not None and model.path.suffix == ".gguf"
    parameters = [f"{name:<30} {defaults[param]}" for name, param in OPTIONS.items()
                  if param in defaults]  # fmt: skip
    width, modified = model.hidden_row_size, 0
    if model.path is not None:
        with suppress(OSError):
            modified = int(model.path.stat().st_mtime)
    return {
        "modified_at": listing.timestamp(modified),
        "size": nbytes,
        "digest": hashlib.sha256(f"{model.name} {num_parameters} {nbytes}".encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": "gguf" if is_gguf else "safetensors",
            "family": kind,
            "families": [kind],
            "parameter_size": f"{billions:.1f}B" if billions >= 1 else f"{billions * 1000:.1f}M",
            "quantization_level": f"{8 * nbytes / num_parameters:.3g} bits",
        },
        "context_length": context_length,
        "capabilities": _capabilities(model, tokenizer, task),
        "parameters": "\n".join(parameters),
        "template": str(tokenizer.chat_template or ""),
        "model_info": {
            "general.architecture": kind,
            "general.parameter_count": num_parameters,
            f"{kind}.context_length": context_length,
            f"{kind}.block_count": model.num_layers,
            **({f"{kind}.embedding_length": width} if width else {}),
        },
    }


def _capabilities(model: LanguageModel, tokenizer: TokenizerWrapper, task: str | None) -> list[str]:
    """What a model can do, in Ollama's words."""
    try:
        is_embedder = read_embedder(model, tokenizer).is_declared
    except ValueError:
        is_embedder = False
    if is_embedder:
        return ["embedding"]
    return [*capabilities_of(tokenizer), *(["embedding"] if task == "embed" else [])]
