"""Completions of plain texts, asked for with OpenAI's client."""

from __future__ import annotations

import json
import shutil

import openai
import pytest
from helpers.servers import running_service

from mlx_paged import SamplingParams, demo_model_path

TEXT = "The code of apple is 4821. The code of lemon is 957. The code of"
OTHER = "One two three"


def complete(client, prompt=TEXT, **fields):
    return client.completions.create(model="demo", prompt=prompt, **fields)


def direct(service, prompt, **params):
    """What the engine itself answers."""
    prompt = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    *_, output = service.engine.stream(prompt, SamplingParams(**{"max_tokens": 16, **params}))
    return output


def streamed(chunks):
    """Text, end and logprobs of each choice."""
    texts, ends, logprobs = {}, {}, {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            assert choice.index not in ends
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
            for name, values in (choice.logprobs.to_dict() if choice.logprobs else {}).items():
                logprobs.setdefault(choice.index, {}).setdefault(name, []).extend(values)
    return texts, ends, logprobs


def bytes_of(service, tokens):
    return b"".join(map(service.token_texts.bytes_of, tokens))


def test_a_text_goes_on_as_the_engine_says(client, service):
    answer = complete(client)
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion"
    expected = direct(service, TEXT)
    [choice] = answer.choices
    assert choice.finish_reason == expected.outputs[0].finish_reason
    assert choice.text.encode() == bytes_of(service, expected.outputs[0].token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids) == 16
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_the_space_between_a_prompt_and_its_answer_is_there(client, script):
    script("<|im_start|>")  # a token that begins no word comes as it is
    assert complete(client, extra_body={"skip_special_tokens": False}).choices[0].text == (
        "<|im_start|>"
    )
    answer = complete(client, "The code of apple is", echo=True, max_tokens=1)
    assert answer.choices[0].text.startswith("The code of apple is ")


def test_prompts_come_in_every_form_and_choices_in_their_order(client, service):
    tokens = [service.tokenizer.encode(text) for text in (TEXT, OTHER)]
    single, other = (complete(client, each).choices[0].text for each in (TEXT, OTHER))
    assert single != other
    forms = {
        "texts": [TEXT, OTHER],
        "token ids": tokens,
        "mixed": [tokens[0], OTHER],
    }
    for name, prompt in forms.items():
        answer = complete(client, prompt)
        assert [choice.text for choice in answer.choices] == [single, other], name
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.usage.prompt_tokens == sum(map(len, tokens))
        texts, ends, _ = streamed(complete(client, prompt, stream=True))
        assert texts == {0: single, 1: other} and set(ends) == {0, 1}
    assert complete(client, tokens[0]).choices[0].text == single


def test_prompts_times_completions(client, service):
    fields = {"n": 3, "temperature": 1.2, "seed": 5, "max_tokens": 8}
    answer = complete(client, [TEXT, OTHER], **fields)
    texts, _, _ = streamed(complete(client, [TEXT, OTHER], stream=True, **fields))
    assert [choice.text for choice in answer.choices] == [texts[index] for index in range(6)]
    assert [text for _, text in sorted(texts.items())] == [
        completion.text
        for prompt in (TEXT, OTHER)
        for completion in direct(service, prompt, **fields).outputs
    ]


def test_logprobs_in_the_shape_of_completions(client, service):
    answer = complete(client, logprobs=3, max_tokens=6)
    expected = direct(service, TEXT, logprobs=3, max_tokens=6).outputs[0]
    [choice] = answer.choices
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset == [
        len("".join(logprobs.tokens[:place])) for place in range(len(logprobs.tokens))
    ]
    assert logprobs.token_logprobs == pytest.approx(
        [
            entry[token].logprob
            for token, entry in zip(expected.token_ids, expected.logprobs, strict=True)
        ],
        abs=1e-4,
    )
    for token, top, logprob in zip(
        logprobs.tokens, logprobs.top_logprobs, logprobs.token_logprobs, strict=True
    ):
        assert top[token] == logprob and 3 <= len(top) <= 4
    _, _, parts = streamed(complete(client, logprobs=3, max_tokens=6, stream=True))
    whole = logprobs.to_dict()
    assert {name: parts[0][name] for name in ("tokens", "text_offset")} == {
        name: whole[name] for name in ("tokens", "text_offset")
    }


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_echo_has_the_prompt_and_its_logprobs(client, service, is_streamed):
    fields = {"echo": True, "logprobs": 1, "max_tokens": 4}
    expected = direct(service, TEXT, prompt_logprobs=1, logprobs=1, max_tokens=4)
    tokens = expected.prompt_token_ids + expected.outputs[0].token_ids
    if is_streamed:
        texts, _, parts = streamed(complete(client, stream=True, **fields))
        text, logprobs = texts[0], parts[0]
    else:
        [choice] = complete(client, **fields).choices
        text, logprobs = choice.text, choice.logprobs.to_dict()
    assert text.encode() == TEXT.encode() + bytes_of(service, expected.outputs[0].token_ids)
    assert logprobs["tokens"] == [service.token_texts.text_of(token) for token in tokens]
    assert logprobs["token_logprobs"][0] is None
    entries = [*expected.prompt_logprobs[1:], *expected.outputs[0].logprobs]
    assert logprobs["token_logprobs"][1:] == pytest.approx(
        [entry[token].logprob for token, entry in zip(tokens[1:], entries, strict=True)], abs=1e-4
    )
    assert logprobs["text_offset"][len(expected.prompt_token_ids)] == len(TEXT)


def test_only_the_prompt_can_be_asked_for(client):
    answer = complete(client, echo=True, logprobs=0, max_tokens=0)
    assert answer.choices[0].text == TEXT
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.prompt_tokens
    assert answer.usage.completion_tokens == 0
    assert answer.choices[0].finish_reason == "length"


def test_prompt_logprobs_as_vllm_has_them(client, service):
    answer = complete(client, extra_body={"prompt_logprobs": 0, "return_token_ids": True})
    [choice] = answer.to_dict()["choices"]
    tokens = service.tokenizer.encode(TEXT)
    assert choice["prompt_token_ids"] == tokens
    assert [next(iter(entry or [None])) for entry in choice["prompt_logprobs"]] == [
        None,
        *map(str, tokens[1:]),
    ]
    assert len(choice["token_ids"]) == 16


def test_a_stop_ends_a_text_and_is_named(client, service):
    [choice] = complete(client, stop=[" of"], max_tokens=40).choices
    assert choice.finish_reason == "stop" and " of" not in choice.text
    assert choice.to_dict()["stop_reason"] == " of"


def test_a_stream_ends_with_its_usage(client):
    *chunks, last = complete(client, [TEXT, OTHER], stream=True,
                             stream_options={"include_usage": True})  # fmt: skip
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == [] and last.usage.completion_tokens == 32
    assert last.usage.prompt_tokens == complete(client, [TEXT, OTHER]).usage.prompt_tokens


@pytest.mark.parametrize(
    ("prompt", "param"),
    [([5, 10**6], "prompt"), ([[5], [6, 7, 10**6]], "prompt[1]"), ([[-5], "a"], "prompt[0]")],
)
def test_tokens_that_the_model_does_not_have_are_refused_by_their_place(client, prompt, param):
    with pytest.raises(openai.BadRequestError, match="outside the model's vocabulary") as caught:
        complete(client, prompt)
    assert caught.value.param == param


@pytest.mark.parametrize("prompt", ["", [[5], []]])
def test_an_empty_prompt_is_refused(client, prompt):
    with pytest.raises(openai.BadRequestError, match="the prompt is empty"):
        complete(client, prompt)


@pytest.fixture(scope="module")
def trimming(tmp_path_factory: pytest.TempPathFactory):
    """The demo model with a tokenizer that leaves out the space that a text begins with, as those
    of Llama 2 and Mistral do, and a client of its server.
    """
    folder = tmp_path_factory.mktemp("models") / "trimming"
    shutil.copytree(demo_model_path(), folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    file.write_text(json.dumps(content))
    with running_service(folder) as (service, url):
        yield service, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("text", [" upon a\0time", "  upon", " ", "upon"])
def test_an_answer_is_what_the_tokenizer_decodes_behind_the_prompt(trimming, text, is_stream):
    service, client = trimming
    tokenizer = service.tokenizer
    tokens = tokenizer.encode(text, add_special_tokens=False)
    before = tokenizer.encode("Once")
    assert tokenizer.decode([*before, *tokens])[len("Once") :] == text
    fields = {"max_tokens": len(tokens), "stream": is_stream, "extra_body": {"ignore_eos": True}}
    service.engine.scripts += [tokens, tokens]
    answer = complete(client, "Once", **fields)
    choices = [each.choices[0] for each in answer] if is_stream else answer.choices
    assert "".join(choice.text for choice in choices) == text
    messages = [{"role": "user", "content": "Once"}]
    chat = client.chat.completions.create(model="demo", messages=messages, **fields)
    said = (
        [each.choices[0].delta.content or "" for each in chat]
        if is_stream
        else [chat.choices[0].message.content]
    )
    assert "".join(said) == text
