"""The fields that chat and completions share, but for sampling."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

import mlx_paged
from mlx_paged.errors import shown
from mlx_paged.server.answers.state import Usage
from mlx_paged.server.callers import request_id_of
from mlx_paged.server.errors import ApiError
from mlx_paged.server.fields import Fields
from mlx_paged.server.service import Service

_MAX_NAME_LEN = 256  # of a model, by which each event of an answer calls it
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

# They say nothing about the answer: whose request it is, where a cache of other servers may look
# for it, and for how long it may be kept, which nothing is here.
_WITHOUT_EFFECT = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
ADVICE = {
    "functions": "send tools",
    "function_call": "send tool_choice",
    "max_output_tokens": "send max_tokens",
    "adapters": "start a server with --adapter-path",
    "draft_model": "start a server with a draft model",
    "chat_template": "start the server with --chat-template",
}


@dataclass(frozen=True)
class Options:
    """What the client wants to hear.

    Args:
        model: the name by which it asks.
        request_id: its own, if it gives one.
        is_streamed: by events.
        has_usage: a stream ends with the numbers of tokens.
        has_usage_always: and has those so far in each event.
        has_token_ids: the answer comes as token ids, too.
        has_tokens_as_ids: logprobs name tokens ``"token_id:17"``, which is never ambiguous.
    """

    model: str
    request_id: str | None = None
    is_streamed: bool = False
    has_usage: bool = False
    has_usage_always: bool = False
    has_token_ids: bool = False
    has_tokens_as_ids: bool = False


def read_options(fields: Fields, service: Service) -> Options:
    """What the body says beside its prompt and sampling.

    Raises:
        ApiError: 404 for an unknown model, and else 400.
    """
    is_streamed = fields.boolean("stream", False)
    has_usage = has_usage_always = False
    if fields.has("stream_options"):
        if not is_streamed:
            raise fields.error("stream_options", "is given, and stream is not true")
        stream_options = fields.child("stream_options")
        has_usage = stream_options.boolean("include_usage", False)
        has_usage_always = stream_options.boolean("continuous_usage_stats", False) and has_usage
        stream_options.accept("include_obfuscation")
        stream_options.refuse_rest()
    request_id = fields.text("request_id", None)
    if request_id is not None and not _REQUEST_ID.fullmatch(request_id):
        raise fields.error("request_id", "must be 1 to 128 letters, digits and ._:-")
    fields.accept(*_WITHOUT_EFFECT)
    fields.only("store", False)
    fields.only("service_tier", "auto", "default")
    return Options(
        read_model(fields, service),
        request_id,
        is_streamed,
        has_usage,
        has_usage_always,
        fields.boolean("return_token_ids", False),
        fields.boolean("return_tokens_as_token_ids", False),
    )


def read_model(fields: Fields, service: Service) -> str:
    """The name of the model that is asked for.

    Raises:
        ApiError: there is no such model; 404.
    """
    name = fields.text("model", service.model_names[0])
    check_model_name(name, service)
    return name


def check_model_name(name: str, service: Service) -> None:
    """Raise unless the server has a model of this name.

    Raises:
        ApiError: there is no such model; 404.
    """
    is_taken = service.takes_any_name and len(name) <= _MAX_NAME_LEN
    if name not in service.model_names and not is_taken:
        names = ", ".join(map(shown, service.model_names))
        text = f"there is no model {shown(name)}; this server has {names}"
        raise ApiError(404, text, param="model", code="model_not_found")


def read_no_store(fields: Fields) -> bool:
    """Whether nothing of the request is written to disk: the body says so, or its
    ``prompt_cache_retention``, which is OpenAI's word for it.
    """
    is_in_memory = fields.raw("prompt_cache_retention") == "in_memory"
    is_fresh = not fields.boolean("cache_prompt", True)
    return fields.boolean("no_store", False) or is_in_memory or is_fresh


def read_cache_salt(fields: Fields) -> str | None:
    """The salt of the body; one that no other request has, if nothing cached is to be used:
    ``cache_prompt`` is llama.cpp's word for it.
    """
    salt = fields.text("cache_salt", None)
    if salt == "":
        raise fields.error("cache_salt", "must not be empty")
    return salt if fields.boolean("cache_prompt", True) else uuid.uuid4().hex


def read_max_tokens(fields: Fields, *names: str, default: int | None) -> int | None:
    """The most tokens of an answer: the first of these fields that says it."""
    values = [fields.integer(name) for name in names if fields.has(name)]
    return values[0] if values else default


@dataclass(frozen=True)
class Head:
    """What each object of an answer begins with."""

    request_id: str
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request, options: Options, prefix: str, kind: str) -> Head:
        """The head of the answer to a request.

        Args:
            prefix: of the answer's id.
            kind: of object.
        """
        request_id = request_id_of(request, options.request_id)
        values = {
            "id": f"{prefix}-{request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": options.model,
            "system_fingerprint": f"mlx_paged-{mlx_paged.__version__}",
        }
        return cls(request_id, values)


def usage_of(usage: Usage) -> dict[str, Any]:
    """How many tokens were read and written."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def usage_with_reasoning(usage: Usage) -> dict[str, Any]:
    """The same, and how many of the tokens are reasoning."""
    details = {"reasoning_tokens": usage.num_reasoning_tokens}
    return {**usage_of(usage), "completion_tokens_details": details}
