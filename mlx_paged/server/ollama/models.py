"""What Ollama's API says of the models: ``/api/version``, ``/api/tags``, ``/api/ps`` and
``/api/show``; and the requests that change a store of models, which are refused.
"""

from __future__ import annotations

import hashlib
import sys
from datetime import UTC, datetime
from typing import Any, NoReturn

from mlx_lm.utils import get_total_parameters
from starlette.responses import JSONResponse, Response

from mlx_paged.answers.dialect import Dialect
from mlx_paged.answers.template_traits import TemplateTraits
from mlx_paged.models.kv_cache import num_tokens_held, weight_nbytes
from mlx_paged.models.language_model import model_type_of
from mlx_paged.models.mlx_lm import check_model
from mlx_paged.server.errors import ApiError
from mlx_paged.server.fields import ModelFields
from mlx_paged.server.prompt_threads import Work
from mlx_paged.server.routes import RequestContext
from mlx_paged.server.schemas import Body, Repeated
from mlx_paged.server.service import Service

VERSION = "0.24.0"
"""The version of Ollama whose API this is. Clients refuse older ones than they need, such as
Copilot, which needs 0.6.4.
"""

OPTIONS = {
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    **{
        name: name
        for name in (
            "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty",
            "seed", "stop",
        )
    },
}  # fmt: skip
"""The sampling parameters by the names that they have among the options of a request."""

_FOREVER = "2300-01-01T00:00:00Z"  # when a model expires that stays loaded
_ONLY_ITS_OWN = "this server runs only the model that it was started with; "
_INSTEAD = {
    "pull": f"{_ONLY_ITS_OWN}start one with mlx-paged serve NAME, which downloads what is missing",
    "push": f"{_ONLY_ITS_OWN}upload a model with hf upload",
    "create": f"{_ONLY_ITS_OWN}convert a model with mlx_lm.convert, and serve its folder",
    "copy": f"{_ONLY_ITS_OWN}--served-model-name gives it further names",
    "delete": f"{_ONLY_ITS_OWN}hf cache rm removes what was downloaded",
    **dict.fromkeys(("embed", "embeddings"), "this server computes no embeddings"),
}
REFUSED = [name for name in _INSTEAD if name != "delete"]


class ShowRequest(Repeated, ModelFields):
    """The body of ``POST /api/show``. Older clients call the model ``name``."""

    name: str | None = None

    def model_name(self, service: Service) -> str:
        model = self.name if self.model is None else self.model
        return ModelFields(model=model).model_name(service)


async def version(context: RequestContext[Body]) -> Response:
    """The version of Ollama whose API this is."""
    return JSONResponse({"version": VERSION})


async def tags(context: RequestContext[Body]) -> Response:
    """The models, in Ollama's form."""
    found = await context.run_in_tokenizer_pool(lambda _: _entries(context.service))
    return JSONResponse({"models": found})


async def loaded(context: RequestContext[Body]) -> Response:
    """The loaded models, in Ollama's form, with their memory."""
    service = context.service
    found = await context.run_in_tokenizer_pool(lambda _: _entries(service))
    nbytes_kv = service.engine.stats().nbytes_held
    for each in found:
        each |= {
            "size": each["size"] + nbytes_kv,
            "size_vram": each["size"] + nbytes_kv,
            "expires_at": _FOREVER,
            "context_length": _context_length(service),
        }
    return JSONResponse({"models": found})


async def show(context: RequestContext[ShowRequest]) -> Response:
    """What a model is and can do, in Ollama's form."""

    def described(_: Work) -> dict[str, Any]:
        return _description(context.read_body().model_name(context.service), context.service)

    return JSONResponse(await context.run_in_tokenizer_pool(described))


async def refuse(context: RequestContext[Body]) -> NoReturn:
    """Refused: the error says what to use instead."""
    name = context.request.url.path.rpartition("/")[2]
    raise ApiError(501, _INSTEAD[name])


def timestamp(seconds: float) -> str:
    """A time in seconds since the epoch, as text."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def capabilities_of(service: Service) -> list[str]:
    """What the model can do, in Ollama's words."""
    tokenizer = service.tokenizer
    dialect = Dialect.of(tokenizer)
    calls_tools = dialect.calls is not None and TemplateTraits.of(tokenizer).shows_tools
    others = {"tools": calls_tools, "thinking": dialect.reasoning is not None}
    return ["completion", *(name for name, can in others.items() if can)]


def _entries(service: Service) -> list[dict[str, Any]]:
    """The model by each of its names. A name without a tag gets one, since clients compare them."""
    model = check_model(service.engine.engine.model)
    nbytes, kind = weight_nbytes(model), model_type_of(model)
    num_parameters = get_total_parameters(model)
    is_large = num_parameters >= 1e9
    size = f"{num_parameters / 1e9:.1f}B" if is_large else f"{num_parameters / 1e6:.1f}M"
    details = {
        "parent_model": "",
        "format": "gguf"
        if model.path is not None and model.path.suffix == ".gguf"
        else "safetensors",
        "family": kind,
        "families": [kind],
        "parameter_size": size,
        "quantization_level": f"{8 * nbytes / num_parameters:.3g} bits",
    }
    digest = hashlib.sha256(f"{model.name} {num_parameters} {nbytes}".encode()).hexdigest()
    common = {
        "modified_at": timestamp(service.created),
        "size": nbytes,
        "digest": digest,
        "details": details,
        "capabilities": capabilities_of(service),
    }
    names = [
        name if ":" in name.rpartition("/")[2] else f"{name}:latest" for name in service.model_names
    ]
    return [{"name": name, "model": name, **common} for name in names]


def _description(name: str, service: Service) -> dict[str, Any]:
    """The answer to ``/api/show`` for one of the model's names."""
    model, [entry, *_] = check_model(service.engine.engine.model), _entries(service)
    kind, defaults = model_type_of(model), service.defaults
    parameters = [
        f"{option:<30} {defaults[name]}" for option, name in OPTIONS.items() if name in defaults
    ]
    return {
        "license": "",
        "modelfile": f"FROM {name}\n",
        "parameters": "\n".join(parameters),
        "template": str(service.tokenizer.chat_template or ""),
        "details": entry["details"],
        "model_info": {
            "general.architecture": kind,
            "general.basename": name,  # which Copilot shows
            "general.parameter_count": get_total_parameters(model),
            f"{kind}.context_length": _context_length(service),
            f"{kind}.block_count": model.num_layers,
        },
        "capabilities": entry["capabilities"],
        "modified_at": entry["modified_at"],
    }


def _context_length(service: Service) -> int:
    """The tokens that a prompt and its answer may have: as many as the model takes and the K/V
    budget holds.
    """
    engine = service.engine.engine
    return min(service.max_model_len or sys.maxsize, num_tokens_held(engine.cache, engine.manager))
