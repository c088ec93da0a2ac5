"""``OpenAIRenderer``: the common part of the answers of chat and completions."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import mlx_paged
from mlx_paged.request import RequestOutput
from mlx_paged.server.answers.state import Usage
from mlx_paged.server.context import RequestContext
from mlx_paged.server.generations import Answer, parts_of
from mlx_paged.server.http.sse import DONE, event
from mlx_paged.server.openai.logprobs import TokenNames
from mlx_paged.server.openai.options import OpenAIFields


class OpenAIRenderer(ABC):
    """Renders the answer to a request.

    Args:
        prefix: the beginning of the answer's id.
        kind: the field ``object`` of the answer or of its chunks.

    Attributes:
        request_id: the id in the body, or else the id of the request.
    """

    def __init__(self, context: RequestContext[Any], body: OpenAIFields, prefix: str, kind: str):
        self.is_streamed = body.stream
        self.request_id = body.request_id or context.request_id
        self.head = {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": body.model_name(context.service),
            "system_fingerprint": f"mlx_paged-{mlx_paged.__version__}",
        }
        self.names = TokenNames(context.service.token_texts, body.return_tokens_as_token_ids)
        self._has_usage, self._has_usage_always = body.has_usage, body.has_usage_always

    @abstractmethod
    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The chunks for a part of the answer to a prompt."""

    @abstractmethod
    def usage(self) -> dict[str, Any]:
        """The usage so far."""

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """The chunk for a choice."""
        chunk = {**self.head, "choices": [choice]}
        if self._has_usage:
            chunk["usage"] = self.usage() if self._has_usage_always else None
        return chunk

    async def events(self, *answers: Answer) -> AsyncGenerator[bytes, None]:
        """The events of a stream."""
        async for prompt_index, output in parts_of(answers):
            for chunk in self.chunks(prompt_index, output):
                yield event(chunk)
        if self._has_usage:
            yield event({**self.head, "choices": [], "usage": self.usage()})
        yield DONE


def usage_of(usage: Usage) -> dict[str, Any]:
    """The fields of ``usage`` that chat and completions share."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }
