"""The fields that chat and completions share, except for sampling."""

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

_MAX_NAME_LEN = 256  # of a model; each event of a stream contains it
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def _check_request_id(text: str) -> str:
    if not _REQUEST_ID.fullmatch(text):
        raise wrong("must be 1 to 128 letters, digits and ._:-")
    return text


class ModelFields(Body):
    """The field ``model`` of all bodies."""

    model: str | None = None

    def model_name(self, service: Service) -> str:
        """The requested model, or the first one."""
        name = service.model_names[0] if self.model is None else self.model
        check_model_name(name, service)
        return name


class CacheFields(Body):
    """Priority, and the use of the prefix cache and the disk."""

    priority: int = 0
    cache_salt: str | None = None
    no_store: bool = False
    # llama.cpp's: whether the prefix cache is used.
    cache_prompt: bool = True
    # OpenAI's: how long K/V are cached. "in_memory" means not on disk.
    prompt_cache_retention: Any = None

    def job_fields(self) -> dict[str, Any]:
        """The corresponding fields of :class:`~mlx_paged.server.chat_jobs.ChatJob`."""
        if self.cache_salt == "":
            raise refused("cache_salt", "must not be empty")
        is_in_memory = self.prompt_cache_retention == "in_memory"
        return {
            "priority": self.priority,
            # A unique salt, so that nothing is shared.
            "cache_salt": self.cache_salt if self.cache_prompt else uuid.uuid4().hex,
            "no_store": self.no_store or is_in_memory or not self.cache_prompt,
        }


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def effort_options(effort: Effort | None) -> dict[str, Any]:
    """The variables of the chat template for an effort: ``reasoning_effort``, which some templates
    use, and ``enable_thinking``, which is false for ``"none"`` only.
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
    """The fields that chat and completions share."""

    stream: bool = False
    stream_options: UsageOptions | None = None
    request_id: Annotated[str, AfterValidator(_check_request_id)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    # Without effect: they identify the user, or help other servers to find a cache.
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    store: Annotated[Any, fixed(False)] = None
    service_tier: Annotated[Any, fixed("auto", "default")] = None

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_usage_always(self) -> bool:
        """Whether each event also contains the usage so far."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    def check(self, service: Service) -> None:
        """Check the model and the options of the stream."""
        self.model_name(service)
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "is given, but stream is not true")


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
