"""Tokens of texts and conversations, and what says how the server is."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import openai
import pytest
from helpers.servers import ask, make_service, running_service, serving
from tokenizers import processors

import mlx_paged
from mlx_paged.answers.chat_template import encode_chat
from mlx_paged.server.app import App
from mlx_paged.server.settings import ServerSettings

TEXT = "Hello é, how are you?"


USER = {"role": "user", "content": "Hello"}


def post(server_url, path, **body):
    answer = ask(server_url, path, body)
    return answer.status, answer.body


def test_a_text_becomes_tokens_and_a_text_again(server_url, service):
    tokens = service.tokenizer.encode(TEXT)
    status, body = post(server_url, "/tokenize", prompt=TEXT, model="demo")
    assert (status, body) == (
        200,
        {"count": len(tokens), "max_model_len": 4096, "tokens": tokens, "token_strs": None},
    )
    assert post(server_url, "/detokenize", tokens=tokens) == (200, {"prompt": TEXT})
    assert post(server_url, "/detokenize", tokens=[]) == (200, {"prompt": ""})


def test_tokens_have_names(server_url, service):
    _, body = post(server_url, "/tokenize", prompt="é", return_token_strs=True,
                   add_special_tokens=False)  # fmt: skip
    assert body["token_strs"] == service.tokenizer.convert_ids_to_tokens(body["tokens"])
    assert "<0xC3>" in body["token_strs"]


@pytest.mark.parametrize("begins_answer", [True, False])
def test_a_conversation_becomes_the_tokens_that_chat_reads(server_url, service, begins_answer):
    messages = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
    _, body = post(server_url, "/tokenize", messages=messages, add_generation_prompt=begins_answer)
    options = {"add_generation_prompt": begins_answer}
    assert body["tokens"] == encode_chat(service.tokenizer, messages, options)[1]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "messages"),
        ("/tokenize", {"prompt": "a", "enable_thinking": True}, "enable_thinking"),
        ("/tokenize", {"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "colour": 1}, "colour"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "12"}, "tokens"),
        ("/detokenize", {"tokens": [1, "2"]}, "tokens[1]"),
        ("/detokenize", {"tokens": [10**9]}, None),
        ("/detokenize", {"tokens": [-1]}, None),
    ],
)
def test_what_is_no_text_and_no_token_is_refused_by_name(server_url, service, path, body, param):
    status, answer = post(server_url, path, **body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert answer["error"]["type"] == "invalid_request_error"


def test_models_are_listed_and_found_by_name(client, service):
    [model] = client.models.list().data
    assert (model.id, model.object, model.created) == ("demo", "model", service.created)
    assert model.to_dict()["max_model_len"] == 4096
    assert client.models.retrieve("demo") == model
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'") as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_a_model_of_a_hub_has_a_slash_in_its_name():
    with (
        running_service(model_names=("hub/a-model",)) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        assert client.models.retrieve("hub/a-model").id == "hub/a-model"


def test_the_server_says_its_version_and_that_it_lives(server_url):
    assert ask(server_url, "/version").body == {"version": mlx_paged.__version__}
    assert ask(server_url, "/health").status == 200


def test_the_server_is_ill_while_a_step_hangs(monkeypatch):
    service = replace(make_service(), settings=ServerSettings(step_timeout=30.0))
    engine, now = service.engine, [1000.0]
    step, begun, go_on = engine.engine.step, threading.Event(), threading.Event()

    def hangs():
        begun.set()
        assert go_on.wait(20)
        return step()

    monkeypatch.setattr(engine._loop, "clock", lambda: now[0])
    hello = {"prompt": "Hello", "max_tokens": 2, "ignore_eos": True}
    with service.engine, serving(App(service)) as url:
        # The first steps compile, and may take long.
        monkeypatch.setattr(engine.engine, "step", hangs)
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(ask, url, "/v1/completions", hello)
            assert begun.wait(20)
            now[0] += 500
            assert ask(url, "/health").status == 200
            go_on.set()
            assert asked.result(20).status == 200
            begun.clear()
            go_on.clear()
            asked = thread.submit(ask, url, "/v1/completions", hello)
            assert begun.wait(20)
            now[0] += 30
            assert ask(url, "/health").status == 200
            now[0] += 1
            answer = ask(url, "/health")
            assert (answer.status, answer.body["error"]["code"]) == (503, "step_hangs")
            assert answer.body["error"]["message"] == (
                "a step of the engine has been running for 31 seconds, and --step-timeout is 30; "
                "if it does not end, restart the server"
            )
            go_on.set()
            assert asked.result(20).status == 200
            assert ask(url, "/health").status == 200


def test_the_server_is_ill_once_its_engine_has_stopped():
    with running_service() as (service, url):
        service.engine.shutdown()
        assert ask(url, "/health").status == 503
        answer = ask(url, "/v1/completions", {"prompt": "a"})
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) > 0
        assert answer.body["error"]["message"] == "the engine stopped; retry later"


def test_a_text_that_begins_with_bos_gets_no_second_one_as_in_a_completion():
    """The demo model's tokenizer adds none; a Llama's does."""
    with running_service() as (service, url):
        tokenizer = service.tokenizer._tokenizer
        tokenizer.bos_token = bos = tokenizer.eos_token
        bos_id = tokenizer.convert_tokens_to_ids(bos)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, bos_id)]
        )
        for text in ("Hello", f"{bos}Hello"):
            status, body = post(url, "/tokenize", prompt=text)
            assert (status, body["tokens"].count(bos_id)) == (200, 1)
            completion = ask(url, "/v1/completions", {"prompt": text, "max_tokens": 1}).body
            assert completion["usage"]["prompt_tokens"] == body["count"]
        assert post(url, "/tokenize", prompt="\ud800")[0] == 400
