"""The fields that chat and completions share, but for sampling."""

from __future__ import annotations

import re
import uuid
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from mlx_paged.errors import shown
from mlx_paged.server.errors import ApiError
from mlx_paged.server.grammars.response_format import FormatFields
from mlx_paged.server.sampling_fields import SamplingFields
from mlx_paged.server.schemas import Body, fixed, refused, wrong
from mlx_paged.server.service import Service

_MAX_NAME_LEN = 256  # of a model, by which each event of an answer calls it
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def _check_request_id(text: str) -> str:
    if not _REQUEST_ID.fullmatch(text):
        raise wrong("must be 1 to 128 letters, digits and ._:-")
    return text


class ModelFields(Body):
    """The field that all bodies have."""

    model: str | None = None

    def model_name(self, service: Service) -> str:
        """The name of the model that is asked for."""
        name = service.model_names[0] if self.model is None else self.model
        check_model_name(name, service)
        return name


class CacheFields(Body):
    """Who shares cached K/V with a request, how soon it runs, and what is kept of it."""

    priority: int = 0
    cache_salt: str | None = None
    no_store: bool = False
    # llama.cpp's: whether anything that is cached may be used.
    cache_prompt: bool = True
    # OpenAI's: for how long others would keep it. "in_memory" is not on disk, here neither.
    prompt_cache_retention: Any = None

    def job_fields(self) -> dict[str, Any]:
        """These as :class:`~mlx_paged.server.chat_jobs.ChatJob` has them."""
        if self.cache_salt == "":
            raise refused("cache_salt", "must not be empty")
        is_in_memory = self.prompt_cache_retention == "in_memory"
        return {
            "priority": self.priority,
            # A salt that no other request has.
            "cache_salt": self.cache_salt if self.cache_prompt else uuid.uuid4().hex,
            "no_store": self.no_store or is_in_memory or not self.cache_prompt,
        }


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def effort_options(effort: Effort | None) -> dict[str, Any]:
    """The variables of the chat template that an effort sets: ``reasoning_effort``, which some
    templates know; ``"none"`` turns thinking off, and all others turn it on.
    """
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


class StreamOptions(Body):
    include_obfuscation: Any = None


class UsageOptions(StreamOptions):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class OpenAIFields(ModelFields, CacheFields, FormatFields, SamplingFields):
    """What chat and completions share."""

    stream: bool = False
    stream_options: UsageOptions | None = None
    request_id: Annotated[str, AfterValidator(_check_request_id)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    # They say nothing about the answer: whose request it is, and where a cache of other servers may
    # look for it.
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    store: Annotated[Any, fixed(False)] = None
    service_tier: Annotated[Any, fixed("auto", "default")] = None

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_usage_always(self) -> bool:
        """Whether each event of it has those so far, too."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    def check(self, service: Service) -> None:
        """Check what all of these bodies say about their model and the stream."""
        self.model_name(service)
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "is given, and stream is not true")


def check_model_name(name: str, service: Service) -> None:
    """Raise unless the server has a model of this name."""
    is_taken = service.takes_any_name and len(name) <= _MAX_NAME_LEN
    if name not in service.model_names and not is_taken:
        names = ", ".join(map(shown, service.model_names))
        text = f"there is no model {shown(name)}; this server has {names}"
        raise ApiError(404, text, param="model", code="model_not_found")


def first_given(*values: int | None) -> int | None:
    """The first value that is not ``None``."""
    return next((value for value in values if value is not None), None)
