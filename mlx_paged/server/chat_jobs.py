"""``ChatJob``: a conversation to answer, independent of the protocol, and its generation."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mlx_paged.answers.conversation_encoder import Prompt
from mlx_paged.answers.dialect import AnswerFormat, Dialect, ToolChoice
from mlx_paged.answers.formats import JSON_LIST
from mlx_paged.answers.template_traits import TemplateTraits
from mlx_paged.answers.tool_grammar import Tool, ToolGrammar, grammar_of_calls, reasoning_before
from mlx_paged.engine.input_processor import special_token_ids
from mlx_paged.errors import ArgumentError, ChatTemplateError
from mlx_paged.options.sampling_declarations import StructuredOutputsParams
from mlx_paged.options.sampling_params import RequestOutputKind
from mlx_paged.request import CompletionOutput
from mlx_paged.server.errors import ApiError, api_error
from mlx_paged.server.fields import make_params
from mlx_paged.server.generations import Generation
from mlx_paged.server.kept_answers import keep_answer, upcoming_tokens
from mlx_paged.server.prompt_threads import Work
from mlx_paged.server.service import Service


@dataclass(frozen=True)
class ChatJob:
    """A conversation to answer.

    Args:
        messages: in the form that chat templates take: a role, a text as content, and for the
            assistant ``tool_calls`` whose arguments are objects, not JSON texts.
        generation: what is asked of the engine, still without the prompt and its answer's format.
        tool_choice: ``"none"``, ``"auto"``, ``"required"``, or the name of the tool to call.
        parallel_tool_calls: whether an answer may contain several calls.
        template_options: variables of the chat template.
    """

    messages: list[dict[str, Any]]
    generation: Generation
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    template_options: dict[str, Any] = field(default_factory=dict)


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
    asked, tokenizer, dialect = job.generation, service.tokenizer, Dialect.of(service.tokenizer)
    options = {**service.template_options, **job.template_options}
    if job.tools and (job.tool_choice != "none" or TemplateTraits.of(tokenizer).shows_tools):
        options["tools"] = [tool.form for tool in job.tools]
    encode = partial(service.kept_answers.encode, tokenizer, cache_salt=asked.answer_salt)
    try:
        check = service.length_limit(work).check
        prompt = encode(job.messages, options, check_length=check)
    except ChatTemplateError as error:
        raise ApiError(400, str(error), param=error.argument) from error
    fields = {"grammar": "tools", "structured_outputs": "tool_choice", **asked.fields}
    requested = asked.params.structured_outputs
    choice = job.tool_choice if job.tools else "none"
    try:
        calls = grammar_of_calls(job.tools, dialect, choice, job.parallel_tool_calls, requested)
    except ArgumentError as error:
        raise api_error(error, fields) from error
    structured = requested if calls is None else calls.structured_outputs
    if structured is not None:
        structured = replace(structured, **reasoning_before(dialect, prompt.text, calls))
    answer_format = _format_of(service, job, prompt, calls)
    values = {
        "output_kind": RequestOutputKind.DELTA,
        "structured_outputs": structured,
        **({} if structured else _limits_of_calls(dialect, job)),
    }

    def keep(completion: CompletionOutput) -> None:
        """Keep a finished answer; if it has no calls, prefill the prompt of the next question."""
        message = keep_answer(
            service.kept_answers, tokenizer, prompt, answer_format, completion, asked.no_store
        )
        if message is None or message["tool_calls"] or service.settings.no_idle_prefill:
            return
        computed = [*prompt.token_ids, *completion.token_ids]

        def encode_question(question: str) -> list[int]:
            messages = [*job.messages, message, {"role": "user", "content": question}]
            return encode(messages, options).token_ids

        upcoming = partial(upcoming_tokens, encode_question, computed)
        service.idle_prefill.expect(prompt.key, upcoming, asked.options)

    def parts() -> dict[str, StructuredOutputsParams]:
        """What the grammar of an answer that calls tools is made of, by the client's fields."""
        found = {} if calls is None else calls.parts()
        if calls is not None and requested is not None:
            found[fields["structured_outputs"]] = requested
        return found

    return replace(
        asked,
        prompt_token_ids=prompt.token_ids,
        params=make_params(asked.params, values, fields),
        answer_format=answer_format,
        # A continued message comes back together with its beginning, so it is not kept.
        when_finished=None if options.get("continue_final_message", False) else keep,
        fields=fields,
        parts=parts,
    )


def _limits_of_calls(dialect: Dialect, job: ChatJob) -> dict[str, Any]:
    """Sampling parameters that prevent unwanted calls, if the model's marks are single tokens."""
    if not job.tools or dialect.calls is None:
        return {}
    params = job.generation.params
    if job.tool_choice == "none":
        start = dialect.token_of(dialect.calls.start)
        none = {} if start is None else {start: -math.inf}
        return {"logit_bias": {**params.logit_bias, **none}}
    if not job.parallel_tool_calls and (end := dialect.call_end_token) is not None:
        # The answer ends after its first call.
        return {"stop_token_ids": (*params.stop_token_ids, end)}
    return {}


def _format_of(
    service: Service, job: ChatJob, prompt: Prompt, calls: ToolGrammar | None
) -> AnswerFormat:
    tokenizer, texts = service.tokenizer, service.token_texts
    tools = [tool.form for tool in job.tools if job.tool_choice != "none"]
    if tools and job.tool_choice == "auto" and Dialect.of(tokenizer).calls is None:
        raise ApiError(
            400,
            "this model can't call tools: its format of calls is unknown; leave the tools out, or "
            "send tool_choice 'required'",
            param="tools",
        )
    skips_special = job.generation.params.skip_special_tokens
    found = AnswerFormat.of(tokenizer, prompt.text, tools, None if job.parallel_tool_calls else 1)
    return replace(
        found,
        calls=JSON_LIST if calls is not None and calls.is_json else found.calls,
        hides_special=skips_special,
        detokenizer=partial(texts.detokenizer, prompt.token_ids),
        skipped=special_token_ids(tokenizer) if skips_special else frozenset(),
    )


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call in the history, parsed into an object as chat templates take it. Text
    that is not a JSON object, for example of a truncated answer, is passed to the model as it is.
    """
    # Some clients send "" for a function without parameters.
    value = object_of(text) if text.strip() else {}
    return {"arguments": text} if value is None else value


def object_of(text: str) -> dict[str, Any] | None:
    """A JSON object; ``None`` if the text is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
