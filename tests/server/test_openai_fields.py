"""What a body says: each field is honoured, has no effect on purpose, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from mlx_paged.options.sampling_declarations import SAMPLING_PARAMS
from mlx_paged.options.sampling_params import SamplingParams
from mlx_paged.server.anthropic.messages import MessagesRequest
from mlx_paged.server.chat_jobs import arguments_of
from mlx_paged.server.errors import ApiError
from mlx_paged.server.openai.chat import ChatRequest, read_chat
from mlx_paged.server.openai.completions import CompletionRequest, read_completions
from mlx_paged.server.responses.body import ResponsesRequest, read_responses_body

USER = {"role": "user", "content": "Hello!"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        "strict": True,
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def chat(service, **body):
    return read_chat(ChatRequest.read({"messages": [USER], **body}), service)


def completion(service, **body):
    return read_completions(CompletionRequest.read({"prompt": "Hello", **body}), service)


def effect(service, **body):
    """All that a body says: what the engine is asked for, and what the answer is written from."""
    if "prompt" in body:
        request = CompletionRequest.read(body)
        asked = read_completions(request, service)
    else:
        request = ChatRequest.read({"messages": [USER], **body})
        asked = read_chat(request, service)
    written_from = {"stream", "stream_options", "return_token_ids", "echo", "add_special_tokens"}
    return asked, request.model_dump(include=written_from)


def refused(read, service, **body):
    with pytest.raises(ApiError) as caught:
        read(service, **body)
    assert caught.value.status in (400, 404)
    assert "\n" not in caught.value.message
    return caught.value


# Values that differ from what happens anyway, for every field of OpenAI's client.
CHAT_VALUES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Other"}],
    "model": "demo",
    "audio": {"format": "wav", "voice": "ash"},
    "frequency_penalty": 0.5,
    "function_call": "auto",
    "functions": [{"name": "add", "parameters": {}}],
    "logit_bias": {"5": 1.5},
    "logprobs": True,
    "max_completion_tokens": 5,
    "max_tokens": 5,
    "metadata": {"a": "b"},
    "modalities": ["text", "audio"],
    "moderation": {"model": "a"},
    "n": 2,
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "a"},
    "presence_penalty": 0.5,
    "prompt_cache_key": "a",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "response_format": {"type": "text"},
    "safety_identifier": "a",
    "seed": 7,
    "service_tier": "flex",
    "stop": ["a", "b"],
    "store": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.7,
    "tool_choice": "none",
    "tools": [TOOL],
    "top_logprobs": 3,
    "top_p": 0.5,
    "user": "a",
    "verbosity": "low",
    "web_search_options": {},
}
COMPLETION_VALUES: dict[str, Any] = {
    **{
        name: CHAT_VALUES[name]
        for name in (
            "model", "frequency_penalty", "logit_bias", "max_tokens", "n", "presence_penalty",
            "seed", "stop", "stream", "stream_options", "temperature", "top_p", "user",
        )
    },
    "prompt": "Other",
    "best_of": 3,
    "echo": True,
    "logprobs": 2,
    "suffix": "a",
}  # fmt: skip
CHAT_WITHOUT_EFFECT = {
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "user",
}
CHAT_REFUSED = {
    "audio",
    "function_call",
    "functions",
    "modalities",
    "moderation",
    "prediction",
    "prompt_cache_options",
    "service_tier",
    "store",
    "verbosity",
    "web_search_options",
}
NEEDS = {"top_logprobs": {"logprobs": True}, "stream_options": {"stream": True}}


# Of each sampling parameter that the server reads as it is; the others are the protocols' to write.
SAMPLING_VALUES: dict[str, Any] = {
    "n": 2,
    "temperature": 0.7,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "xtc_special_tokens": [1],
    "seed": 7,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1.5},
    "allowed_token_ids": [1, 2],
    "bad_words": ["a"],
    "stop": ["a"],
    "stop_token_ids": [3],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 2,
    "prompt_logprobs": 2,
    "skip_special_tokens": False,
    "thinking_token_budget": 5,
}
WRITTEN_BY_PROTOCOLS = {"max_tokens", "logprobs", "structured_outputs"}
OF_THE_LIBRARY_ALONE = {"detokenize", "logits_processors", "sampler", "output_kind"}


def test_no_sampling_parameter_is_forgotten():
    others = SAMPLING_PARAMS.keys() - SAMPLING_VALUES.keys()
    assert others == WRITTEN_BY_PROTOCOLS | OF_THE_LIBRARY_ALONE
    assert {name for name, each in SAMPLING_PARAMS.items() if each.wire} == SAMPLING_VALUES.keys()
    page = (Path(__file__).parents[2] / "docs/guide/server/openai.md").read_text()
    assert [name for name in SAMPLING_VALUES if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", SAMPLING_VALUES)
def test_every_sampling_parameter_is_a_field_of_openais_endpoints(shared_service, name):
    value = SAMPLING_VALUES[name]
    given = {5: 1.5} if name == "logit_bias" else value
    expected = getattr(SamplingParams(**{name: given}), name)
    params = [
        chat(shared_service, **{name: value}).generation.params,
        completion(shared_service, **{name: value})[1].params,
    ]
    if name not in ("n", "prompt_logprobs"):  # Responses have neither.
        body = ResponsesRequest.read({"input": "Hello", name: value})
        params.append(read_responses_body(body, shared_service).generation.params)
    assert [getattr(each, name) for each in params] == [expected] * len(params)


@pytest.mark.parametrize("name", sorted(CHAT_VALUES))
def test_every_field_of_openais_chat_is_honoured_or_refused_by_name(shared_service, name):
    needs = NEEDS.get(name, {})
    body = {**needs, name: CHAT_VALUES[name]}
    if name in CHAT_REFUSED:
        assert refused(chat, shared_service, **body).param == name
        return
    before, after = effect(shared_service, **needs), effect(shared_service, **body)
    has_no_effect = name in CHAT_WITHOUT_EFFECT or name in ("model", "response_format")
    assert (before == after) == has_no_effect


@pytest.mark.parametrize("name", sorted(COMPLETION_VALUES))
def test_every_field_of_openais_completions_is_honoured_or_refused_by_name(shared_service, name):
    needs = NEEDS.get(name, {})
    body = {**needs, name: COMPLETION_VALUES[name]}
    if name in ("best_of", "suffix"):
        assert refused(completion, shared_service, **body).param == name
        return
    before, after = (
        effect(shared_service, **{"prompt": "Hello", **each}) for each in (needs, body)
    )
    assert (before == after) == (name in ("user", "model"))


def test_no_field_of_openais_client_is_forgotten():
    chat_fields = set(get_type_hints(chat_create_params.CompletionCreateParamsBase)) | {"stream"}
    assert chat_fields <= set(CHAT_VALUES)
    fields = set(get_type_hints(completion_create_params.CompletionCreateParamsBase)) | {"stream"}
    assert fields <= set(COMPLETION_VALUES)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"colour": 1}, "colour"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"documents": []}, "documents"),
        ({"mm_processor_kwargs": {}}, "mm_processor_kwargs"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"echo": True}, "echo"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"adapters": "a"}, "adapters"),
        ({"draft_model": "a"}, "draft_model"),
        ({"role_mapping": {}}, "role_mapping"),
        ({"repetition_context_size": 20}, "repetition_context_size"),
        ({"best_of": 2}, "best_of"),
        ({"n": 200}, "n"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.0}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": "a"}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "a"}}, "logit_bias.1"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": {}}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [[1]]}, "stop_token_ids[0]"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [1]}, "bad_words[0]"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"colour": 1}}, "stream_options.colour"),
        ({"stream": True, "stream_options": 5}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"priority": "high"}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"no_store": "yes"}, "no_store"),
        ({"no_store": 1}, "no_store"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"model": "other"}, "model"),
        ({"model": 5}, "model"),
        ({"model": ""}, "model"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"chat_template": "a"}}, "chat_template_kwargs.chat_template"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"response_format": {"type": "sound"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "add"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice.function.name",
        ),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)  # fmt: skip
def test_chat_refuses_by_name(shared_service, body, param):
    assert refused(chat, shared_service, **body).param == param


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("Hello", "messages"),
        ([], "messages"),
        ([5], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "king", "content": "a"}], "messages[0].role"),
        ([{"role": "function", "content": "a", "name": "b"}], "messages[0].role"),
        ([{"role": "user", "content": "a", "name": 5}], "messages[0].name"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
            "messages[0].content[0].type",
        ),
        (
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        ([{"role": "assistant", "content": "", "function_call": {}}], "messages[0].function_call"),
        ([{"role": "tool", "content": "a", "tool_call_id": 5}], "messages[0].tool_call_id"),
    ],
)
def test_messages_are_refused_by_their_place(shared_service, messages, param):
    assert refused(chat, shared_service, messages=messages).param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 11}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"prompt_embeds": "a"}, "prompt_embeds"),
        ({"tools": [TOOL]}, "tools"),
        ({"suffix": "a"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_completions_refuse_by_name(shared_service, body, param):
    assert refused(completion, shared_service, **body).param == param


@pytest.mark.parametrize(
    "body",
    [
        {"best_of": 2, "n": 2},
        {"use_beam_search": False, "length_penalty": 1.0},
        {"store": False, "service_tier": "auto", "modalities": ["text"], "verbosity": "medium"},
        {"stop": None, "tools": None, "temperature": None, "stream": None},
        {"tools": [], "tool_choice": "auto"},
        {"tools": [], "tool_choice": "none"},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
    ],
)
def test_what_says_nothing_new_is_accepted(shared_service, body):
    assert chat(shared_service, **body)


def test_messages_become_what_templates_take(shared_service):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, "short."]},
        {"role": "user", "content": "Add.", "name": "nora"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [CALL, {"function": {"name": "now", "arguments": ""}, "index": 1}],
            "reasoning_content": "Hm.",
            "annotations": [],
            "refusal": None,
            "audio": None,
            "function_call": None,
        },
        {"role": "tool", "content": [{"type": "text", "text": "1"}], "tool_call_id": "call_1"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    assert chat(shared_service, messages=messages).messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Add.", "name": "nora"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": "add", "arguments": {"a": 1}},
                    "id": "call_1",
                },
                {"type": "function", "function": {"name": "now", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "1", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "No."},
    ]


@pytest.mark.parametrize("tools", [True, 3, "x", {}, {"type": "function"}])
def test_tools_that_are_no_list_are_refused_by_name(tools):
    with pytest.raises(ApiError, match="tools must be a list"):
        ChatRequest.read({"messages": [USER], "tools": tools})


@pytest.mark.parametrize(
    "text, arguments",
    [
        ("", {}),
        (" ", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": ', {"arguments": '{"a": '}),
        ("[]", {"arguments": "[]"}),
        ("[" * 5000, {"arguments": "[" * 5000}),
    ],
)
def test_a_call_that_was_broken_off_comes_back_as_the_model_wrote_it(text, arguments):
    assert arguments_of(text) == arguments


def test_arguments_keep_their_order(shared_service):
    arguments = '{"z": 1, "a": {"y": 2, "b": 3}}'
    call = {"function": {"name": "add", "arguments": arguments}}
    [message] = chat(
        shared_service, messages=[{"role": "assistant", "tool_calls": [call]}]
    ).messages
    assert json.dumps(message["tool_calls"][0]["function"]["arguments"]) == arguments


def test_tools_and_their_choice(shared_service):
    other = {"type": "function", "function": {"name": "sub"}}
    job = chat(shared_service, tools=[TOOL, other])
    assert [tool.form for tool in job.tools] == [TOOL, other]
    assert (job.tool_choice, job.parallel_tool_calls) == ("auto", True)
    choice = {"type": "function", "function": {"name": "sub"}}
    job = chat(shared_service, tools=[TOOL, other], tool_choice=choice, parallel_tool_calls=False)
    assert (job.tool_choice, job.parallel_tool_calls) == ("sub", False)


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high", "enable_thinking": True}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        (
            {"chat_template_kwargs": {"enable_thinking": False, "a": [1]},
             "reasoning_effort": "low"},
            {"reasoning_effort": "low", "enable_thinking": False, "a": [1]},
        ),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        (
            {"continue_final_message": True},
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
    ],
)  # fmt: skip
def test_variables_of_the_template(shared_service, body, options):
    assert chat(shared_service, **body).template_options == options


def test_the_newer_name_of_max_tokens_counts(shared_service):
    params = chat(shared_service, max_tokens=5, max_completion_tokens=7).generation.params
    assert params.max_tokens == 7
    assert chat(shared_service).generation.params.max_tokens is None
    assert completion(shared_service)[1].params.max_tokens == 16


@pytest.mark.parametrize(
    ("body", "name", "advice"),
    [
        (ChatRequest, "functions", "send tools"),
        (ChatRequest, "function_call", "send tool_choice"),
        (ChatRequest, "max_output_tokens", "send max_tokens"),
        (ChatRequest, "repeat_penalty", "send repetition_penalty"),
        (ChatRequest, "adapters", "start the server with --adapter, and send its name as model"),
        (ChatRequest, "colour", "leave it out"),
        (CompletionRequest, "messages", "send prompt"),
        (CompletionRequest, "reasoning_effort", "leave it out"),
        (ResponsesRequest, "messages", "send input"),
        (ResponsesRequest, "max_tokens", "send max_output_tokens"),
        (ResponsesRequest, "response_format", "send text.format"),
        (ResponsesRequest, "reasoning_effort", "send reasoning.effort"),
        (MessagesRequest, "stop", "send stop_sequences"),
        (MessagesRequest, "max_tokens_to_sample", "send max_tokens"),
        (MessagesRequest, "container", "containers run on Anthropic's servers; leave it out"),
    ],
)
def test_what_others_call_otherwise_is_refused_with_the_name_that_it_has_here(body, name, advice):
    known = {"messages": [USER], "prompt": "a", "input": "a", "max_tokens": 5}
    required = {each for each, field in body.model_fields.items() if field.is_required()}
    with pytest.raises(ApiError) as caught:
        body.read({each: known[each] for each in required} | {name: "x"})
    assert caught.value.message == f"{name} is not supported; {advice}"
