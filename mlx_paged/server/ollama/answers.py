"""Ollama's ``POST /api/chat`` and ``/api/generate``: answers as one object or as lines of JSON; and
``/api/embed`` and ``/api/embeddings``.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterable
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response

from mlx_paged.request import CompletionOutput, RequestOutput
from mlx_paged.server.chat_jobs import object_of
from mlx_paged.server.fields import adapter_of
from mlx_paged.server.generations import Answer, AnswerBlock, BlockEvent, Generation, parts_of
from mlx_paged.server.http.sse import LineStream
from mlx_paged.server.ollama import models
from mlx_paged.server.ollama.body import (
    EmbeddingFields,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    OllamaChatRequest,
    OllamaFields,
)
from mlx_paged.server.ollama.listing import REFUSED, timestamp
from mlx_paged.server.openai.answers import TokenNames, chat_logprobs
from mlx_paged.server.pooling import read_inputs, with_entries
from mlx_paged.server.prompt_threads import Work
from mlx_paged.server.routes import ApiRoute, Renderer, RequestContext


async def answer(context: RequestContext[OllamaFields]) -> Response:
    """The answer to a conversation or a prompt, as one object or as lines of JSON."""
    body, generations = await context.run_in_tokenizer_pool(partial(_prepare, context))
    renderer = OllamaRenderer(context, body, *generations)
    if body.is_empty:
        return JSONResponse({**renderer.line(), "done": True, "done_reason": "load"})
    return await context.respond(renderer)


def _prepare(
    context: RequestContext[OllamaFields], work: Work
) -> tuple[OllamaFields, list[Generation]]:
    """The body and its generation; none if nothing is asked."""
    body, service = context.read_body(), context.service
    body.check(service)
    generation = context.for_user(body.generation(service))
    return body, [] if body.is_empty else [body.prepare(work, service, generation)]


class OllamaRenderer(Renderer[OllamaFields]):
    """Renders an answer."""

    stream_class = LineStream

    def whole(self, *outputs: RequestOutput) -> dict[str, Any]:
        [output] = outputs
        [(completion, part)] = self.states[0].parts(output)
        completion.read(part)
        whole = {**self.line(completion.blocks), **self._end(output, completion.finish_reason)}
        return {**whole, **self._logprobs(part)}

    async def events(self, *answers: Answer) -> AsyncGenerator[bytes, None]:
        async for _, output in parts_of(answers):
            for completion, part in self.states[0].parts(output):
                events = map(_new, completion.read(part))
                lines = [self.line([block]) for block in events if block is not None]
                logprobs = self._logprobs(part)
                if logprobs and part.token_ids:
                    # Tokens that do not complete any text yet have a line, too.
                    lines = lines or [self.line()]
                    lines[0] |= logprobs
                for each in lines:
                    yield LineStream.encode(each)
                if completion.finish_reason is not None:
                    end = self._end(output, completion.finish_reason)
                    yield LineStream.encode({**self.line(), **end})

    def line(self, blocks: Iterable[AnswerBlock] = ()) -> dict[str, Any]:
        """An object with the text, the reasoning and the calls of some blocks."""
        content, thinking, calls = "", "", []
        for block in blocks:
            call, arguments = block.call, object_of(block.text) if block.call else None
            if call is not None and arguments is not None:
                function = {"index": call.index, "name": call.name, "arguments": arguments}
                calls.append({"id": call.call_id, "function": function})
            elif call is not None:
                # Python reads no integer of more than 4,300 digits.
                content += f"{call.name} {block.text}"
            elif block.kind == "reasoning":
                thinking += block.text
            else:
                content += block.text
        found = {"thinking": thinking, "tool_calls": calls}
        others = {name: value for name, value in found.items() if value}
        said: dict[str, Any] = {"response": content, **others}
        if isinstance(self.body, OllamaChatRequest):
            said = {"message": {"role": "assistant", "content": content, **others}}
        return {"model": self.model, "created_at": timestamp(time.time()), **said, "done": False}

    def _end(self, output: RequestOutput, finish_reason: str | None) -> dict[str, Any]:
        """The fields of the last line. Durations are in nanoseconds; ``load_duration`` is what the
        request waited in the engine's queue.
        """
        usage, waited = self.states[0].usage, output.queue_time or 0.0
        seconds = {
            "total_duration": time.perf_counter() - self.context.start,
            "load_duration": waited,
            "prompt_eval_duration": (output.time_to_first_token or 0.0) - waited,
            "eval_duration": output.decode_time,
        }
        return {
            "done": True,
            "done_reason": "length" if finish_reason == "length" else "stop",
            "prompt_eval_count": usage.num_prompt_tokens,
            "eval_count": usage.num_output_tokens,
            **{name: round(1e9 * each) for name, each in seconds.items()},
        }

    def _logprobs(self, part: CompletionOutput) -> dict[str, Any]:
        """The log-probabilities of a part, if requested."""
        if not self.body.logprobs:
            return {}
        names = TokenNames(self.context.service.token_texts)
        return {"logprobs": chat_logprobs(names, part, self.body.top_logprobs)}


def _new(each: BlockEvent) -> AnswerBlock | None:
    """What an event adds to an answer, if it adds something: a text, or a call once it is whole."""
    what, block, text = each
    if block.call is not None:
        return block if what == "end" else None
    return AnswerBlock(block.index, block.kind, None, [text]) if what == "delta" else None


async def embed(context: RequestContext[EmbeddingFields]) -> Response:
    """The embeddings of texts, in Ollama's form."""

    def read(work: Work) -> tuple[EmbeddingFields, list[Generation]]:
        body = context.read_body()
        adapter = adapter_of(body.model_name(context.service), context.service)
        options: Any = {
            "dimensions": body.dimensions or None,
            "truncates": body.truncate,
            "options": {"adapter": adapter},
        }
        return body, read_inputs(work, context, body.inputs, **options) if body.inputs else []

    body, generations = await context.run_in_tokenizer_pool(read)
    outputs: list[RequestOutput] = []
    if generations:
        outputs = await context.service.pooled(generations, context.request_id)
    if isinstance(body, EmbeddingsRequest):
        return JSONResponse({"embedding": outputs[0].pooled if outputs else []})
    end = {
        "model": body.model_name(context.service),
        "total_duration": round(1e9 * (time.perf_counter() - context.start)),
        "load_duration": round(1e9 * max((each.queue_time or 0.0 for each in outputs), default=0)),
        "prompt_eval_count": sum(len(each.prompt_token_ids) for each in outputs),
    }
    entries = await context.run_in_tokenizer_pool(
        lambda _: [json.dumps(each.pooled) for each in outputs]
    )
    return Response(with_entries(end, "embeddings", entries), media_type="application/json")


ROUTES = [
    ApiRoute("/api/version", models.version),
    ApiRoute("/api/tags", models.tags),
    ApiRoute("/api/ps", models.loaded),
    ApiRoute("/api/show", models.show, models.ShowRequest),
    ApiRoute("/api/chat", answer, OllamaChatRequest),
    ApiRoute("/api/generate", answer, GenerateRequest),
    ApiRoute("/api/embed", embed, EmbedRequest),
    ApiRoute("/api/embeddings", embed, EmbeddingsRequest),
    *(ApiRoute(path, models.refuse, methods=(method,)) for path, method in REFUSED.items()),
]
