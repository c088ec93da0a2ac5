"""What the servers of mlx-lm and llama.cpp are tested with, as far as it applies here."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from helpers.servers import ask, running_service, wait_until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hello!"}]


@pytest.mark.parametrize(("path", "like"), [("/ping", "/health"), ("/models", "/v1/models")])
def test_paths_of_other_servers_are_answered_as_our_own(server_url, service, path, like):
    assert ask(server_url, path).body == ask(server_url, like).body


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip"])
def test_a_body_in_a_content_encoding_is_refused_by_its_status(server_url, service, encoding):
    answer = httpx.post(
        f"{server_url}{CHAT}", content=b"\x1f\x8b", headers={"Content-Encoding": encoding}
    )
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
    assert repr(encoding) in answer.json()["error"]["message"]


# mlx-lm: tests/test_server.py


def test_mlx_lm_completions_with_a_seed_are_the_same_twice(server_url, service):
    body = {
        "model": "demo",
        "prompt": "Once upon a time",
        "max_tokens": 10,
        "temperature": 0.5,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "seed": 999,
        "stop": "stop sequence",
    }
    first, second = (ask(server_url, TEXT, body) for _ in range(2))
    assert first.status == 200 and {"id", "choices", "usage"} <= first.body.keys()
    assert first.body["choices"] == second.body["choices"]


def test_mlx_lm_repetition_context_size_is_refused_by_name(server_url, service):
    answer = ask(server_url, TEXT, {"prompt": "a", "repetition_context_size": 20})
    assert (answer.status, answer.body["error"]["param"]) == (400, "repetition_context_size")


def test_mlx_lm_chat_with_fragments_of_content(server_url, service):
    contents = ["You are a helpful assistant.", "Hello!"]
    plain, fragments = (
        ask(
            server_url,
            CHAT,
            {
                "max_tokens": 10,
                "messages": [
                    {"role": role, "content": form(content)}
                    for role, content in zip(("system", "user"), contents, strict=True)
                ],
            },
        ).body
        for form in (str, lambda text: [{"type": "text", "text": text}])
    )
    assert plain["choices"] == fragments["choices"]
    assert plain["usage"]["prompt_tokens"] == fragments["usage"]["prompt_tokens"]


def test_mlx_lm_chat_with_a_call_whose_content_is_null(server_url, agent_url):
    function = {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    messages = [
        {"role": "user", "content": "what is 2+3?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "id": "123", "function": function}],
        },
        {"role": "tool", "content": "5", "tool_call_id": "123"},
    ]
    body = {"max_tokens": 10, "messages": messages}
    answer = ask(agent_url, CHAT, body)
    assert answer.status == 200 and answer.body["choices"]
    # mlx-lm renders a template that leaves the call out.
    refusal = ask(server_url, CHAT, body)
    assert (refusal.status, refusal.body["error"]["param"]) == (400, "messages")
    assert "messages[1] has calls of tools" in refusal.body["error"]["message"]


def test_mlx_lm_a_prompt_that_begins_like_another_uses_its_cache(server_url, service):
    start = "Tell me a story about the towns by the river and about everybody who lives there, " * 2

    def cached(end):
        messages = [{"role": "user", "content": start + end}]
        usage = ask(server_url, CHAT, {"max_tokens": 5, "messages": messages}).body["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached("and")
    assert cached("and the dragons.") > 0


def test_mlx_lm_every_chunk_but_the_usage_has_one_choice_with_a_delta(server_url, service):
    body = {"max_tokens": 10, "messages": USER, "stream": True}
    lines = [line for line in ask(server_url, CHAT, body).text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert all(len(chunk["choices"]) == 1 and "delta" in chunk["choices"][0] for chunk in chunks)


# llama.cpp: tools/server/tests/unit


def test_llama_cpp_roles_come_first_and_ends_have_no_content(client):
    stream = client.chat.completions.create(
        model="demo",
        messages=USER,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    ids = set()
    for index, chunk in enumerate(stream):
        ids.add(chunk.id)
        assert chunk.system_fingerprint and chunk.model == "demo"
        if not chunk.choices:
            assert chunk.usage.completion_tokens == 8
            continue
        [choice] = chunk.choices
        assert choice.delta.role == ("assistant" if index == 0 else None)
        if choice.finish_reason:
            assert choice.finish_reason == "length" and choice.delta.content is None
    assert len(ids) == 1


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "string",
        [123],
        [{}],
        [{"role": 123}],
        [{"role": "system", "content": 123}],
        [{"content": "hello"}],
        [{"role": "system", "content": "test"}, {}],
    ],
)
def test_llama_cpp_what_is_no_conversation_is_an_error(server_url, service, messages):
    answer = ask(server_url, CHAT, {"messages": messages})
    assert answer.status == 400 and answer.body["error"]["message"]


@pytest.mark.parametrize(
    ("response_format", "is_valid"),
    [
        ({"type": "json_schema", "json_schema": {"schema": {"const": "foooooo"}}}, '"foooooo"'),
        ({"type": "json_object"}, None),
        ({"type": "sound"}, False),
        ({"type": "json_schema", "json_schema": {"schema": 123}}, False),
        ({"type": "json_schema", "json_schema": {"schema": {"type": 123}}}, False),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "hiccup"}}}, False),
    ],
)
def test_llama_cpp_response_formats(server_url, service, response_format, is_valid):
    body = {"max_tokens": 20, "messages": USER, "response_format": response_format}
    answer = ask(server_url, CHAT, body)
    if is_valid is False:
        assert answer.status == 400 and answer.body["error"]["message"]
        return
    content = answer.body["choices"][0]["message"]["content"]
    assert content == is_valid or (is_valid is None and content.startswith("{"))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_llama_cpp_the_tokens_of_logprobs_are_the_text(client, is_streamed):
    fields = {"model": "demo", "messages": USER, "max_tokens": 5, "logprobs": True}
    answer = client.chat.completions.create(top_logprobs=10, stream=is_streamed, **fields)
    if is_streamed:
        choices = [choice for chunk in answer for choice in chunk.choices]
        text = "".join(choice.delta.content or "" for choice in choices)
        tokens = [token for each in choices if each.logprobs for token in each.logprobs.content]
    else:
        text, tokens = answer.choices[0].message.content, answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens).strip() == text.strip()
    for token in tokens:
        assert token.logprob <= 0 and token.bytes and len(token.top_logprobs) == 10


def test_llama_cpp_tokens_with_a_bias_against_them_do_not_come(client, server_url):
    free = client.completions.create(model="demo", prompt="Hello", max_tokens=32)
    tokens = ask(server_url, "/tokenize", {"prompt": free.choices[0].text}).body["tokens"]
    bias = {str(token): -100 for token in tokens}
    other = client.completions.create(
        model="demo", prompt="Hello", max_tokens=32, logit_bias=bias,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert not set(other.to_dict()["choices"][0]["token_ids"]) & set(tokens)


def test_llama_cpp_streams_and_whole_answers_are_the_same(client):
    fields = {"model": "demo", "prompt": "I believe the meaning of life is", "max_tokens": 8}
    whole = client.completions.create(**fields).choices[0].text
    assert (
        "".join(chunk.choices[0].text for chunk in client.completions.create(stream=True, **fields))
        == whole
    )


def test_llama_cpp_a_stop_that_is_cut_into_tokens_is_not_shown(client):
    free = client.completions.create(model="demo", prompt="Count from 5 to 30.", max_tokens=40)
    stop = free.choices[0].text[10:16]
    stream = client.completions.create(
        model="demo", prompt="Count from 5 to 30.", max_tokens=40, stop=[stop], stream=True
    )
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == free.choices[0].text[: free.choices[0].text.index(stop)]


def test_llama_cpp_one_seed_gives_one_answer_and_others_give_others(client):
    def text(seed):
        return (
            client.completions.create(
                model="demo", prompt="I believe", max_tokens=16, temperature=1.5, seed=seed
            )
            .choices[0]
            .text
        )

    assert len({text(42) for _ in range(3)}) == 1
    assert len({text(seed) for seed in range(4)}) > 1


def test_llama_cpp_a_prompt_beyond_the_context_is_an_error_with_the_sum(client):
    prompt = "I believe the meaning of life is " * 1000
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt=prompt)
    assert caught.value.code == "context_length_exceeded"
    assert "at most 4096 tokens" in str(caught.value)


def test_llama_cpp_answers_end_where_the_context_does():
    with running_service(max_model_len=64) as (_, url):
        body = {"prompt": [5] * 50, "max_tokens": 100, "ignore_eos": True}
        answer = ask(url, TEXT, body).body
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 64
        assert ask(url, "/v1/models").body["data"][0]["max_model_len"] == 64


def test_llama_cpp_more_requests_than_slots_are_all_answered(server_url, service):
    bodies = [
        {"prompt": f"Write text {number}.", "seed": 42, "temperature": 1.0, "max_tokens": 12}
        for number in range(12)
    ]
    with ThreadPoolExecutor(12) as threads:
        together = list(threads.map(lambda body: ask(server_url, TEXT, body), bodies))
    assert [each.status for each in together] == [200] * 12
    assert [each.body["choices"] for each in together] == [
        ask(server_url, TEXT, body).body["choices"] for body in bodies
    ]


def test_llama_cpp_tokens_come_back_as_the_text(server_url, service):
    for text in ("What is the capital of France ?", "ä 🙂\n\ttab", "\x00"):
        tokens = ask(server_url, "/tokenize", {"prompt": text}).body["tokens"]
        assert ask(server_url, "/detokenize", {"tokens": tokens}).body["prompt"] == text


def test_llama_cpp_paths_and_methods_that_there_are_not(server_url, service):
    for path, body, method, status in (
        ("/v1/nothing", None, "GET", 404),
        ("/v1/nothing", {}, "POST", 404),
        (CHAT, None, "GET", 405),
        ("/v1/models", {}, "POST", 405),
        ("/health", {}, "DELETE", 405),
    ):
        answer = ask(server_url, path, body, method)
        assert answer.status == status
        assert answer.body["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"a"', b"5", b"\xff\xfe", b'{"prompt": "\\ud800"}',
     b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": 1e999}',
     b'{"a":' * 100_000, b'{"\\ud800": 1, "prompt": "a"}'],
    ids=range(12),
)  # fmt: skip
def test_llama_cpp_what_is_no_body_is_an_error(server_url, service, body):
    answer = ask(server_url, TEXT, body)
    assert answer.status == 400
    assert answer.body["error"]["type"] == "invalid_request_error"
    assert len(answer.body["error"]["message"]) < 300


def test_llama_cpp_a_request_that_is_broken_off_frees_its_place(server_url, service):
    with pytest.raises(openai.APITimeoutError):
        openai.OpenAI(
            base_url=f"{server_url}/v1", api_key="none", max_retries=0, timeout=0.2
        ).completions.create(
            model="demo", prompt="Long", max_tokens=4000, extra_body={"ignore_eos": True}
        )
    wait_until(lambda: service.engine.stats().num_running == 0, seconds=5)
