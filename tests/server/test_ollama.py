"""Ollama's API, asked as its clients do. The npm and PyPI clients themselves are run by
``tools/client_lab``.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from helpers.servers import HttpAnswer, ask, client_of

from mlx_paged import StructuredOutputsParams
from mlx_paged.server.errors import ApiError
from mlx_paged.server.ollama.answers import ROUTES
from mlx_paged.server.ollama.body import GenerateRequest, OllamaChatRequest
from mlx_paged.server.ollama.listing import REFUSED
from mlx_paged.server.service import Service
from mlx_paged.server.settings import read_api_keys

CHAT, GENERATE = "/api/chat", "/api/generate"
USER = [{"role": "user", "content": "What is there?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
ANSWER = (
    "<think>\nIt is\nthere.\n</think>\n\nI look.\n<tool_call>\n"
    '{"name": "read", "arguments": {"path": "é</tool_call>"}}\n</tool_call>\n<tool_call>\n'
    '{"name": "read", "arguments": {}}\n</tool_call>'
)
BUDGET = 16000  # tokens that the K/V budget of the agent's server holds
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def lines_of(answer: HttpAnswer) -> list[dict[str, Any]]:
    assert (answer.status, answer.headers["content-type"]) == (200, "application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


# Answers


def test_a_stream_has_lines_of_thinking_text_and_calls_and_one_of_the_end(agent):
    agent.script(ANSWER)
    body = {"model": "demo:latest", "messages": USER, "tools": [TOOL]}
    *lines, last = lines_of(ask(agent.url, CHAT, body))
    assert {line["model"] for line in [*lines, last]} == {"demo:latest"}
    assert all(line["message"]["role"] == "assistant" and not line["done"] for line in lines)
    for line in [*lines, last]:
        assert datetime.fromisoformat(line["created_at"]).tzinfo is not None
    messages = [line["message"] for line in lines]
    assert "".join(each.get("thinking", "") for each in messages) == "It is\nthere."
    assert "".join(each["content"] for each in messages) == "I look."
    # Zed reads one call of a line.
    calls = [call for each in messages if "tool_calls" in each for [call] in [each["tool_calls"]]]
    assert [call["function"] for call in calls] == [
        {"index": 0, "name": "read", "arguments": {"path": "é</tool_call>"}},
        {"index": 1, "name": "read", "arguments": {}},
    ]
    assert len({call["id"] for call in calls}) == 2
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert last["prompt_eval_count"] > 10 and last["eval_count"] > 10
    assert all(isinstance(last[name], int) and last[name] > 0 for name in DURATIONS)
    total, *parts = (last[name] for name in DURATIONS)
    assert total >= sum(parts)


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_a_whole_answer_says_what_its_stream_says(agent, path):
    answers = []
    for is_streamed in (True, False):
        agent.script("<think>\nSo.\n</think>\n\nIt is two.")
        body = {"messages": USER, "prompt": "What is there?", "stream": is_streamed}
        answer = ask(agent.url, path, {**body, "options": {"num_predict": 40}})
        answers.append(lines_of(answer) if is_streamed else [answer.body])
    lines, [whole] = answers
    parts = [line.get("message", line) for line in lines]
    said = whole.get("message", whole)
    for name in ("thinking", "response" if path == GENERATE else "content"):
        assert "".join(each.get(name, "") for each in parts) == said[name] != ""
    end = lines[-1]
    assert (
        (whole["done"], whole["done_reason"]) == (end["done"], end["done_reason"]) == (True, "stop")
    )
    assert end["prompt_eval_count"] == whole["prompt_eval_count"]
    assert end["eval_count"] == whole["eval_count"]


def test_results_of_tools_need_no_ids_and_continue_from_the_kept_answer(agent, monkeypatch):
    agent.script(ANSWER)
    body = {"messages": USER, "tools": [TOOL], "stream": False}
    message = ask(agent.url, CHAT, body).body["message"]
    for call in message["tool_calls"]:
        del call["id"]
    results = [{"role": "tool", "tool_name": "read", "content": said} for said in ("one", "two")]
    prompts = []
    generate = agent.service.engine.generate

    def noted(prompt, *arguments, **options):
        prompts.append(agent.service.tokenizer.decode(prompt["prompt_token_ids"]))
        return generate(prompt, *arguments, **options)

    monkeypatch.setattr(agent.service.engine, "generate", noted)
    agent.script("Both.")
    answer = ask(agent.url, CHAT, {**body, "messages": [*USER, message, *results]})
    assert answer.body["message"]["content"] == "Both."
    assert ANSWER in prompts[0]
    assert prompts[0].index("tool\none") < prompts[0].index("tool\ntwo")


def test_a_prompt_is_a_question_unless_it_is_raw(client, server_url, service):
    options = {"num_predict": 4}
    question = {"system": "Be brief.", "prompt": "What is 17 + 25?", "stream": False}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 17 + 25?"},
    ]
    generated = ask(server_url, GENERATE, {**question, "options": options}).body
    chat = ask(server_url, CHAT, {"messages": messages, "stream": False, "options": options}).body
    assert generated["response"] == chat["message"]["content"]
    assert generated["prompt_eval_count"] == chat["prompt_eval_count"]
    assert (generated["done_reason"], generated["eval_count"]) == ("length", 4)
    raw = ask(
        server_url, GENERATE, {"prompt": "1 2 3", "raw": True, "stream": False, "options": options}
    ).body
    completion = client.completions.create(model="demo", prompt="1 2 3", max_tokens=4)
    assert raw["response"] == completion.choices[0].text
    assert raw["prompt_eval_count"] == completion.usage.prompt_tokens


def test_an_answer_continues_the_last_message_of_the_assistant(server_url, service):
    started = [
        {"role": "user", "content": "What is 17 + 25?"},
        {"role": "assistant", "content": "17"},
    ]
    bodies = [{"messages": messages, "stream": False, "options": {"num_predict": 6}}
              for messages in (started[:1], started)]  # fmt: skip
    whole, rest = (ask(server_url, CHAT, body).body["message"]["content"] for body in bodies)
    assert whole.startswith("17") and f"17{rest}".startswith(whole)


@pytest.mark.parametrize(("path", "content"), [(CHAT, "message"), (GENERATE, "response")])
def test_nothing_is_asked_where_only_the_model_is_to_be_loaded(server_url, service, path, content):
    before = service.engine.stats().num_prompt_tokens
    for body in ({"model": "demo"}, {"model": "demo", "keep_alive": 0, "stream": True}):
        answer = ask(server_url, path, body)
        assert (answer.status, answer.body["done"], answer.body["done_reason"]) == (
            200,
            True,
            "load",
        )
        assert content in answer.body
    assert service.engine.stats().num_prompt_tokens == before


def test_logprobs_come_with_the_tokens(server_url, service):
    body = {"messages": USER, "logprobs": True, "top_logprobs": 2, "options": {"num_predict": 4}}
    whole = ask(server_url, CHAT, {**body, "stream": False}).body
    assert [set(each) for each in whole["logprobs"]] == [
        {"token", "logprob", "bytes", "top_logprobs"}
    ] * 4
    assert all(len(each["top_logprobs"]) == 2 for each in whole["logprobs"])
    lines = lines_of(ask(server_url, CHAT, body))
    assert [each for line in lines for each in line.get("logprobs", ())] == whole["logprobs"]


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {"const": 1}}}])
def test_an_answer_keeps_to_its_format(server_url, service, form):
    body = {"messages": USER, "format": form, "stream": False, "options": {"num_predict": 200}}
    answer = ask(server_url, CHAT, body).body
    assert answer["message"]["content"].startswith("{")


# Fields


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"num_predict": 5.0, "top_k": 40.0, "repeat_penalty": 1.1, "seed": 7, "stop": ["a"]},
            {"max_tokens": 5, "top_k": 40, "repetition_penalty": 1.1, "seed": 7, "stop": ("a",)},
        ),
        ({"num_predict": -1, "seed": -1}, {"max_tokens": None, "seed": None}),
        ({"num_predict": -2, "top_p": None}, {"max_tokens": None, "top_p": 1.0}),
        (
            {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.2, "temperature": 2},
            {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.2, "temperature": 2.0},
        ),
        ({"num_ctx": 8192, "mirostat": 1, "num_gpu": 99, "anything": {}}, {"max_tokens": 11}),
    ],
)
def test_options_are_sampling_parameters_or_ignored(shared_service: Service, options, expected):
    service = replace(shared_service, max_tokens=11)
    params = GenerateRequest.read({"prompt": "a", "options": options}).generation(service).params
    assert {name: getattr(params, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("think", "options"),
    [
        (None, {}),
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}),
        ("max", {"enable_thinking": True, "reasoning_effort": "max"}),
    ],
)
def test_thinking_is_a_variable_of_the_template(think, options):
    assert OllamaChatRequest.read({"think": think}).template_options() == options


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("", None),
        (None, None),
        ("json", StructuredOutputsParams(json_object=True)),
        ({"type": "object"}, StructuredOutputsParams(json={"type": "object"})),
    ],
)
def test_a_format_is_a_word_or_a_schema(shared_service: Service, form, expected):
    generation = OllamaChatRequest.read({"format": form}).generation(shared_service)
    assert generation.params.structured_outputs == expected


IMAGE = {**USER[0], "images": ["aGk="]}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (CHAT, {"model": "other", "messages": USER}, 404, "there is no model 'other'"),
        (CHAT, {"messages": USER, "think": True}, 400, "'demo' does not support thinking"),
        (CHAT, {"messages": USER, "think": "much"}, 400, "think is not supported, got 'much'"),
        (CHAT, {"messages": USER, "tools": [TOOL]}, 400, "'demo' does not support tools"),
        (CHAT, {"messages": [IMAGE]}, 400, "messages[0].images can't be read"),
        (CHAT, {"messages": USER, "format": "xml"}, 400, "format must be 'json' or a JSON schema"),
        (CHAT, {"messages": USER, "options": {"top_p": 7}}, 400, "options.top_p must be"),
        (CHAT, {"messages": USER, "options": {"top_k": 1.5}}, 400, "options.top_k must be a whole"),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs must"),
        (CHAT, {"messages": [{"role": "robot"}]}, 400, "messages[0].role must be"),
        (CHAT, b"{", 400, "not valid JSON"),
        (GENERATE, {"prompt": "a", "images": ["aGk="]}, 400, "images is not supported"),
        (GENERATE, {"prompt": "a", "context": [1]}, 400, "send the conversation to /api/chat"),
        (GENERATE, {"prompt": "a", "suffix": "b"}, 400, "suffix is not supported"),
        (GENERATE, {"prompt": "a", "template": "b"}, 400, "--chat-template"),
        (GENERATE, {"prompt": "a", "raw": True, "system": "b"}, 400, "raw can't be combined"),
        ("/api/show", {"model": "other"}, 404, "there is no model 'other'"),
        ("/api/nothing", {}, 404, "Not Found"),
        *((path, {"model": "demo"}, 501, "is not supported; ") for path in REFUSED),
    ],
)
def test_an_error_is_one_text_of_what_is_wrong(server_url, service, path, body, status, words):
    answer = ask(server_url, path, body, REFUSED.get(path))
    assert answer.status == status
    assert list(answer.body) == ["error"] and words in answer.body["error"]


def test_images_of_earlier_messages_are_a_line_of_text():
    body = OllamaChatRequest.read({"messages": [IMAGE, *USER]})
    assert body.messages[0].as_message() == {
        "role": "user",
        "content": "What is there?\n[images are left out: this model reads text only]",
    }


# Names, keys and what is counted


def test_the_tag_of_the_latest_is_none_for_all_protocols(shared_service: Service):
    client = client_of(replace(shared_service, model_names=("a/b", "c:latest")))
    names = [model["name"] for model in client.get("/api/tags").json()["models"]]
    assert names == ["a/b:latest", "c:latest"]
    for name in ("a/b", *names, "c"):
        assert client.get(f"/v1/models/{name}").status_code == 200
        assert client.post("/api/show", json={"name": name}).status_code == 200
    assert client.get("/v1/models/a/b:4b").status_code == 404


def test_keys_and_hosts_are_checked_on_every_path_but_that_of_the_page(shared_service: Service):
    settings = replace(shared_service.settings, api_keys=read_api_keys(["alice A", "bob B"]))
    client = client_of(shared_service, settings)
    assert client.head("/").status_code == 200
    for route in ROUTES:
        method = "POST" if "POST" in route.methods else next(iter(route.methods - {"HEAD"}))
        refusal = client.request(method, route.path)
        assert refusal.status_code == 401 and "no API key" in refusal.json()["error"]
        strange = client.request(method, route.path, headers={"host": "evil.example"})
        assert strange.status_code == 421 and isinstance(strange.json()["error"], str)
    text = client.get("/metrics", headers={"x-api-key": "A"}).text
    assert 'requests_total{method="POST",path="/api/chat",status="401"} 1.0' in text


# What clients read: each of these is done as their sources do it.


def test_copilot_finds_a_model_that_calls_tools(agent):
    version = ask(agent.url, "/api/version").body["version"]
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]
    [model] = ask(agent.url, "/api/tags").body["models"]
    shown = ask(agent.url, "/api/show", {"model": model["model"]}).body
    info = shown["model_info"]
    assert info[f"{info['general.architecture']}.context_length"] == BUDGET
    assert info["general.basename"] == model["model"] == "demo:latest"
    assert {"completion", "tools", "thinking"} == set(shown["capabilities"])
    agent.script("Hello.")
    # It then speaks OpenAI's protocol, with the name of the model as it was listed.
    body = {"model": model["model"], "messages": USER, "stream": True, "max_tokens": 100}
    assert ask(agent.url, "/v1/chat/completions", body).status == 200


def test_zed_lists_shows_and_streams(agent):
    [model] = ask(agent.url, "/api/tags").body["models"]
    texts = [model["name"], model["modified_at"], model["digest"]]
    details = model["details"]
    names = ("format", "family", "parameter_size", "quantization_level")
    assert all(isinstance(each, str) for each in (*texts, *(details[name] for name in names)))
    assert model["size"] > 0 and details["families"] == [details["family"]] == ["qwen3"]
    agent.script("<think>\nSo.\n</think>\n\nYes.")
    body = {
        "model": "demo:latest",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Look."},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "read", "arguments": {"path": "a"}}}],
                "thinking": None,
            },
            {"role": "tool", "tool_name": "read", "content": "it says: b"},
        ],
        "stream": True,
        "keep_alive": -1,
        "options": {"num_ctx": 16384, "num_predict": None, "stop": [], "temperature": 1.0},
        "tools": [TOOL],
        "think": True,
    }
    *_, last = lines_of(ask(agent.url, CHAT, body))
    assert last["done_reason"] == "stop" and last["prompt_eval_count"] and last["eval_count"]


def test_open_webui_verifies_merges_and_chats(agent):
    version = ask(agent.url, "/api/version").body["version"]
    assert re.sub(r"^v|-.*", "", version).replace(".", "").isdigit()
    [loaded] = ask(agent.url, "/api/ps").body["models"]
    [listed] = ask(agent.url, "/api/tags").body["models"]
    assert loaded["name"] == listed["name"] == listed["model"]
    assert int(datetime.fromisoformat(loaded["expires_at"]).timestamp()) > 0
    assert loaded["size_vram"] >= listed["size"] > 0 and loaded["context_length"] == BUDGET
    agent.script("Yes.")
    call = {"index": 0, "id": "call_1", "function": {"name": "read", "arguments": {"path": "a"}}}
    body = {
        "model": "demo:latest",
        "messages": [
            {"role": "user", "content": "Look.", "images": []},
            {"role": "assistant", "tool_calls": [call], "content": ""},
            {"role": "tool", "content": "it says: b", "tool_call_id": "call_1"},
        ],
        "stream": True,
        "options": {"temperature": 0.7, "num_ctx": 4096, "mirostat": 0, "repeat_last_n": 64},
        "metadata": {"chat_id": "c"},
        "num_predict": 100,
        "keep_alive": "5m",
    }
    *_, last = lines_of(ask(agent.url, CHAT, body))
    assert last["eval_count"] / last["eval_duration"] > 0
    # What it sends so that a model is unloaded.
    unload = {"model": "demo:latest", "keep_alive": 0, "prompt": ""}
    assert ask(agent.url, GENERATE, unload).body["done"] is True


def test_other_fields_of_older_clients_are_ignored():
    body = GenerateRequest.read({"prompt": "a", "width": 8, "suffix": "", "context": []})
    assert not body.is_empty
    with pytest.raises(ApiError, match="prompt must be a text"):
        GenerateRequest.read({"prompt": 5})
