"""``ChatJob``: a conversation to answer, independent of the protocol, and its generation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mlx_paged.answers.chat_template import ChatTemplateError
from mlx_paged.answers.conversation_encoder import Prompt
from mlx_paged.answers.dialect import AnswerFormat, Dialect, ToolChoice
from mlx_paged.answers.formats import JSON_LIST
from mlx_paged.answers.template_traits import TemplateTraits
from mlx_paged.answers.tool_grammar import Tool, ToolGrammar, grammar_of_calls, reasoning_before
from mlx_paged.engine.input_processor import special_token_ids
from mlx_paged.errors import ArgumentError
from mlx_paged.options.sampling_declarations import StructuredOutputsParams
from mlx_paged.options.sampling_params import RequestOutputKind, SamplingParams
from mlx_paged.request import CompletionOutput
from mlx_paged.server.errors import ApiError, api_error
from mlx_paged.server.fields import make_params
from mlx_paged.server.generations import Generation
from mlx_paged.server.kept_answers import Upcoming, keep_answer, upcoming_tokens
from mlx_paged.server.prompt_threads import Work
from mlx_paged.server.service import Service


@dataclass(frozen=True)
class ChatJob:
    """A conversation to answer.

    Args:
        messages: in the form that chat templates take: a role, a text as content, and for the
            assistant ``tool_calls`` whose arguments are objects, not JSON texts.
        params: sampling parameters.
        tool_choice: ``"none"``, ``"auto"``, ``"required"``, or the name of the tool to call.
        parallel_tool_calls: whether an answer may contain several calls.
        template_options: variables of the chat template.
        user: the name of the user.
        fields: as of :class:`Generation`.
    """

    messages: list[dict[str, Any]]
    params: SamplingParams
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    template_options: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    cache_salt: str | None = None
    no_store: bool = False
    user: str = "-"
    fields: Mapping[str, str] = field(default_factory=dict)


def prepare(work: Work, service: Service, job: ChatJob) -> Generation:
    """Render and encode the prompt, and determine how its answers are parsed. This is slow for long
    conversations, so call it with :meth:`Service.run_in_tokenizer_pool`.

    The prompt contains the tools even if ``tool_choice`` is ``"none"``: otherwise it would share no
    prefix with the other turns of the conversation.

    Raises:
        ApiError: the chat template rejects the messages, or the tools or the answer's format can't
            be supported.
        PromptTooLongError: the conversation is too long to be encoded.
        CancelledWorkError: the client has disconnected.
    """
    tokenizer, kept = service.tokenizer, service.kept_answers
    options = {**service.template_options, **job.template_options}
    if job.tools and (job.tool_choice != "none" or TemplateTraits.of(tokenizer).shows_tools):
        options["tools"] = [tool.form for tool in job.tools]
    try:
        check = service.length_limit(work).check
        prompt = kept.encode(tokenizer, job.messages, options, job.cache_salt, check)
    except ChatTemplateError as error:
        raise ApiError(400, str(error), param=error.argument) from error
    dialect = Dialect.of(tokenizer)
    fields = {"grammar": "tools", "structured_outputs": "tool_choice", **job.fields}
    try:
        calls = grammar_of_calls(
            job.tools,
            dialect,
            job.tool_choice if job.tools else "none",
            job.parallel_tool_calls,
            job.params.structured_outputs,
        )
    except ArgumentError as error:
        raise api_error(error, fields) from error
    structured = job.params.structured_outputs if calls is None else calls.structured_outputs
    if structured is not None:
        structured = replace(structured, **reasoning_before(dialect, prompt.text, calls))
    answer_format = _format_of(service, job, prompt)
    if calls is not None and calls.is_json:
        answer_format = replace(answer_format, calls=JSON_LIST)
    values = {
        "output_kind": RequestOutputKind.DELTA,
        "structured_outputs": structured,
        **({} if structured else _limits_of_calls(dialect, job)),
    }
    is_continued = options.get("continue_final_message", False)
    return Generation(
        prompt.token_ids,
        make_params(job.params, values, fields),
        job.priority,
        job.cache_salt,
        job.no_store,
        answer_format,
        # A continued message comes back together with its beginning, so it is not kept.
        None if is_continued else partial(_keep, service, job, options, prompt, answer_format),
        job.user,
        fields,
        partial(_parts_of, calls, job, fields),
    )


def _parts_of(
    calls: ToolGrammar | None, job: ChatJob, fields: Mapping[str, str]
) -> dict[str, StructuredOutputsParams]:
    """What the grammar of an answer that calls tools is made of, by the client's fields."""
    if calls is None:
        return {}
    parts = calls.parts()
    if job.params.structured_outputs is not None:
        parts[fields["structured_outputs"]] = job.params.structured_outputs
    return parts


def _keep(
    service: Service,
    job: ChatJob,
    options: Mapping[str, Any],
    prompt: Prompt,
    answer_format: AnswerFormat,
    completion: CompletionOutput,
) -> None:
    """Keep a finished answer; if it has no calls, prefill the prompt of the next question."""
    kept, tokenizer = service.kept_answers, service.tokenizer
    message = keep_answer(kept, tokenizer, prompt, answer_format, completion, job.no_store)
    if message is None or message["tool_calls"] or service.settings.no_idle_prefill:
        return
    computed, salt = [*prompt.token_ids, *completion.token_ids], job.cache_salt

    def encode(question: str) -> list[int]:
        messages = [*job.messages, message, {"role": "user", "content": question}]
        return kept.encode(tokenizer, messages, options, salt).token_ids

    upcoming = Upcoming(partial(upcoming_tokens, encode, computed), job.user, salt, job.no_store)
    service.idle_prefill.expect(prompt.key, upcoming)


def _limits_of_calls(dialect: Dialect, job: ChatJob) -> dict[str, Any]:
    """Sampling parameters that prevent unwanted calls, if the model's marks are single tokens."""
    if not job.tools or dialect.calls is None:
        return {}
    if job.tool_choice == "none":
        start = dialect.token_of(dialect.calls.start)
        none = {} if start is None else {start: -math.inf}
        return {"logit_bias": {**job.params.logit_bias, **none}}
    if not job.parallel_tool_calls and (end := dialect.call_end_token) is not None:
        # The answer ends after its first call.
        return {"stop_token_ids": (*job.params.stop_token_ids, end)}
    return {}


def _format_of(service: Service, job: ChatJob, prompt: Prompt) -> AnswerFormat:
    tokenizer, texts = service.tokenizer, service.token_texts
    tools = [tool.form for tool in job.tools if job.tool_choice != "none"]
    if tools and job.tool_choice == "auto" and Dialect.of(tokenizer).calls is None:
        raise ApiError(
            400,
            "this model can't call tools: its format of calls is unknown; leave the tools out, or "
            "send tool_choice 'required'",
            param="tools",
        )
    skips_special = job.params.skip_special_tokens
    return replace(
        AnswerFormat.of(tokenizer, prompt.text, tools, None if job.parallel_tool_calls else 1),
        hides_special=skips_special,
        detokenizer=partial(texts.detokenizer, prompt.token_ids),
        skipped=special_token_ids(tokenizer) if skips_special else frozenset(),
    )


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call in the history, parsed into an object as chat templates take it. Text
    that is not a JSON object, for example of a truncated answer, is passed to the model as it is.
    """
    try:
        # Some clients send "" for a function without parameters.
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}
