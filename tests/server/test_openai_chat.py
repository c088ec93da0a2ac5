"""Chat completions, asked for with OpenAI's client."""

from __future__ import annotations

import asyncio
import math

import openai
import pytest
from helpers.fast_lane import mostly_slow
from helpers.servers import running_service

from mlx_paged import SamplingParams
from mlx_paged.answers.chat_template import encode_chat

SUM = [{"role": "user", "content": "What is 27 + 15?"}]
LIST = [{"role": "user", "content": "Count from 5 to 30."}]


def ask(client, messages=SUM, **fields):
    return client.chat.completions.create(model="demo", messages=messages, **fields)


def direct(service, messages, **params):
    """What the engine itself answers."""
    _, tokens = encode_chat(service.tokenizer, messages, {})
    params = SamplingParams(**{"max_tokens": None, **params})
    *_, output = service.engine.stream({"prompt_token_ids": tokens}, params)
    return output


def streamed(chunks):
    """The message of each choice, its end, and the other things that its chunks had."""
    texts, ends, logprobs, roles = {}, {}, {}, {}
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.delta.role:
                assert choice.index not in roles
                roles[choice.index] = choice.delta.role
            assert choice.index not in ends, "a chunk after the end"
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.logprobs is not None:
                logprobs.setdefault(choice.index, []).extend(choice.logprobs.content)
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert set(roles) == set(texts) == set(ends) and set(roles.values()) == {"assistant"}
    return texts, ends, logprobs


def test_an_answer_has_everything_that_clients_look_at(client, service):
    answer = ask(client)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "demo")
    assert abs(answer.created - service.created) < 3600
    assert answer.system_fingerprint.startswith("mlx_paged-")
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert choice.message.role == "assistant"
    assert choice.message.content == "27 + 15 = 42"
    assert choice.message.tool_calls is None and choice.message.refusal is None
    expected = direct(service, SUM)
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_a_stream_begins_with_the_role_and_ends_with_the_reason_and_the_usage(client):
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    first, *middle, end, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert all(chunk.choices[0].delta.role is None for chunk in middle)
    assert "".join(chunk.choices[0].delta.content for chunk in middle) == "27 + 15 = 42"
    assert end.choices[0].finish_reason == "stop" and end.choices[0].delta.content is None
    assert usage.choices == []
    assert usage.usage.to_dict() | {"prompt_tokens_details": 0} == ask(client).usage.to_dict() | {
        "prompt_tokens_details": 0
    }
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_usage_comes_only_if_asked_for_and_with_each_chunk_if_that_is_asked_for(client):
    assert all(chunk.usage is None and chunk.choices for chunk in ask(client, stream=True))
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens for chunk in ask(client, stream=True, stream_options=options)
    ]
    assert counts == sorted(counts) and counts[0] <= 1 and counts[-1] == 11


@mostly_slow(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 1.2, "seed": 4, "top_p": 0.9},
        {"temperature": 0.8, "seed": 5, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 1.0, "seed": 6, "top_k": 5, "min_p": 0.05, "repetition_penalty": 1.2},
        {"temperature": 1.5, "seed": 7, "n": 3},
        {"temperature": 1.0, "seed": 8, "xtc_probability": 0.5, "xtc_threshold": 0.1},
        {"logit_bias": {"958": -50}, "min_tokens": 12, "ignore_eos": True},
        {"stop": ["12"], "include_stop_str_in_output": True},
        {"stop": "12", "seed": 1},
        {"stop_token_ids": [330], "bad_words": ["9"]},
        {"allowed_token_ids": [200, 950, 951, 952], "skip_special_tokens": False},
    ],
    ids=lambda params: ",".join(params),
    quick=(0, 4, 7),
)
def test_answers_are_those_of_the_engine_streamed_or_not(client, service, params):
    standard = {"temperature", "seed", "top_p", "presence_penalty", "frequency_penalty", "n"}
    standard |= {"logit_bias", "stop"}
    params = {"max_tokens": 24, **params}
    named = {name: value for name, value in params.items() if name in standard}
    named["extra_body"] = {name: params[name] for name in params if name not in standard}
    own = dict(params)
    if "logit_bias" in own:
        own["logit_bias"] = {int(token): bias for token, bias in own["logit_bias"].items()}
    expected = direct(service, LIST, logprobs=2, **own)
    answer = ask(client, LIST, logprobs=True, top_logprobs=2, **named)
    texts, ends, logprobs = streamed(
        ask(client, LIST, logprobs=True, top_logprobs=2, stream=True, **named)
    )
    for choice, completion in zip(answer.choices, expected.outputs, strict=True):
        assert choice.message.content == texts[choice.index] == completion.text
        assert choice.finish_reason == ends[choice.index] == completion.finish_reason
        entries = choice.logprobs.content
        assert [entry.logprob for entry in entries] == pytest.approx(
            [
                entry[token].logprob
                for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
            ],
            abs=1e-4,
        )
        assert [entry.token for entry in entries] == [
            entry.token for entry in logprobs[choice.index]
        ]


def test_the_defaults_are_the_models_own_and_max_tokens_is_what_the_context_leaves(service):
    assert service.default_params.temperature == 0
    assert service.default_params.max_tokens is None


def test_logprobs_have_the_bytes_of_tokens_and_the_most_likely_others(client, script):
    script("é!")
    answer = ask(client, logprobs=True, top_logprobs=4)
    content = answer.choices[0].logprobs.content
    assert answer.choices[0].message.content == "é!"
    joined = bytes(byte for entry in content for byte in entry.bytes)
    assert joined.decode() == "é!<|im_end|>"
    halves = [entry for entry in content if entry.bytes in ([0xC3], [0xA9])]
    assert [entry.token for entry in halves] == ["�", "�"]
    for entry in content:
        assert len(entry.top_logprobs) == 4
        likely = [each.logprob for each in entry.top_logprobs]
        assert likely == sorted(likely, reverse=True) and max(likely) >= entry.logprob
        assert math.isfinite(entry.logprob)
    assert all(
        entry.top_logprobs == [] for entry in ask(client, logprobs=True).choices[0].logprobs.content
    )


def test_logprobs_of_tokens_without_text_come_in_the_stream_all_the_same(client, script):
    script("éé")
    _, _, logprobs = streamed(ask(client, stream=True, logprobs=True))
    assert bytes(byte for entry in logprobs[0] for byte in entry.bytes) == "éé<|im_end|>".encode()


def test_several_completions_are_told_apart_in_the_stream(client):
    fields = {"n": 4, "temperature": 1.3, "seed": 11, "max_tokens": 20}
    whole = ask(client, LIST, **fields)
    texts, _, _ = streamed(ask(client, LIST, stream=True, **fields))
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [texts[index] for index in range(4)] == [
        choice.message.content for choice in whole.choices
    ]
    assert len(set(texts.values())) > 1
    assert whole.usage.completion_tokens > 40


def test_token_ids_and_prompt_logprobs_as_vllm_has_them(client, service):
    extra = {"return_token_ids": True, "prompt_logprobs": 1, "return_tokens_as_token_ids": True}
    answer = ask(client, logprobs=True, extra_body=extra).to_dict()
    expected = direct(service, SUM, prompt_logprobs=1)
    assert answer["prompt_token_ids"] == expected.prompt_token_ids
    assert answer["choices"][0]["token_ids"] == expected.outputs[0].token_ids
    assert answer["choices"][0]["logprobs"]["content"][0]["token"] == (
        f"token_id:{expected.outputs[0].token_ids[0]}"
    )
    first, *others = answer["prompt_logprobs"]
    assert first is None and len(others) == len(expected.prompt_token_ids) - 1
    for token, ours, theirs in zip(
        expected.prompt_token_ids[1:], others, expected.prompt_logprobs[1:], strict=True
    ):
        assert ours[str(token)]["logprob"] == pytest.approx(theirs[token].logprob, abs=1e-4)
        assert ours[str(token)]["rank"] == theirs[token].rank
    chunks = list(ask(client, stream=True, extra_body={"return_token_ids": True}))
    tokens = [
        token for chunk in chunks for token in chunk.to_dict()["choices"][0].get("token_ids", [])
    ]
    assert tokens == expected.outputs[0].token_ids
    assert chunks[0].to_dict()["prompt_token_ids"] == expected.prompt_token_ids
    assert all("prompt_token_ids" not in chunk.to_dict() for chunk in chunks[1:])


def test_content_comes_as_parts_and_developers_are_systems(client, service):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "27 + 15?"}]
    assert ask(client, [{"role": "user", "content": parts}]).choices[0].message.content == (
        "27 + 15 = 42"
    )
    plain = [{"role": "system", "content": "Be short."}, *SUM]
    developer = [{"role": "developer", "content": "Be short."}, *SUM]
    extra = {"return_token_ids": True}
    first, second = (
        ask(client, messages, extra_body=extra).to_dict()["prompt_token_ids"]
        for messages in (plain, developer)
    )
    assert first == second == encode_chat(service.tokenizer, plain, {})[1]


def test_an_answer_that_was_begun_is_continued(client):
    messages = [*SUM, {"role": "assistant", "content": "27 + 15"}]
    extra = {"continue_final_message": True}
    assert ask(client, messages, extra_body=extra).choices[0].message.content.strip() == "= 42"


def test_the_second_turn_finds_the_first_in_the_cache(client):
    messages = [{"role": "user", "content": "The code of grape is 5511. " * 8}]
    first = ask(client, messages, max_tokens=40)
    messages += [first.choices[0].message.to_dict(), {"role": "user", "content": "Say it."}]
    second = ask(client, messages, max_tokens=40)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached % 16 == 0
    assert cached >= first.usage.prompt_tokens + first.usage.completion_tokens - 32


def test_prompts_with_another_salt_are_not_found(client):
    messages = [{"role": "user", "content": "A text that is long enough for some blocks. " * 4}]

    def cached(salt):
        answer = ask(client, messages, max_tokens=1, extra_body={"cache_salt": salt})
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached("one"), cached("two")] == [0, 0]
    assert cached("one") == cached("two") > 0


def test_a_prompt_may_be_computed_afresh(client):
    messages = [{"role": "user", "content": "Another text that is long enough for blocks. " * 4}]

    def cached(**extra):
        answer = ask(client, messages, max_tokens=1, extra_body=extra)
        return answer.usage.prompt_tokens_details.cached_tokens

    fresh = {"cache_prompt": False, "cache_salt": "one"}
    assert [cached(**fresh), cached(**fresh), cached(cache_salt="one")] == [0, 0, 0]
    assert cached(cache_prompt=True, cache_salt="one") > 0


def test_many_clients_are_answered_at_once_as_each_alone(server_url, service):
    prompts = [f"Count from {number} to {number + 20}." for number in range(24)]

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{server_url}/v1", api_key="none") as client:

            async def one(number):
                messages = [{"role": "user", "content": prompts[number]}]
                if number % 2:
                    answer = await ask(client, messages, max_tokens=16)
                    return answer.choices[0].message.content
                stream = await ask(client, messages, max_tokens=16, stream=True)
                return streamed([chunk async for chunk in stream])[0][0]

            return await asyncio.gather(*map(one, range(24)))

    expected = [
        direct(service, [{"role": "user", "content": prompt}], max_tokens=16).outputs[0].text
        for prompt in prompts
    ]
    assert asyncio.run(ask_all()) == expected


def test_a_model_may_have_several_names():
    with (
        running_service(model_names=("one", "two")) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert [model.id for model in client.models.list()] == ["one", "two"]
        answers = [
            client.chat.completions.create(model=name, messages=SUM) for name in ("one", "two")
        ]
        assert [answer.model for answer in answers] == ["one", "two"]


def test_a_model_may_have_any_name():
    with (
        running_service(model_names=("one",), takes_any_name=True) as (_, url),
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,  # without /v1
    ):
        assert [model.id for model in client.models.list()] == ["one"]
        assert client.models.retrieve("gpt-5").id == "gpt-5"
        answer = client.chat.completions.create(model="gpt-5", messages=SUM)
        assert answer.model == "gpt-5"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="a" * 257, messages=SUM)
