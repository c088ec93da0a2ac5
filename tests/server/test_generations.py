"""Generations on a service: places in the queue, several at once, and what errors become."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from contextlib import contextmanager
from dataclasses import replace

import anthropic
import openai
import pytest
from helpers.servers import ask, is_idle, make_service, running_service, serving, wait_until

from mlx_paged import SamplingParams
from mlx_paged.errors import (
    ArgumentError,
    CacheFullError,
    ChatTemplateError,
    EngineStoppedError,
    PromptTooLongError,
)
from mlx_paged.options.sampling_params import RequestOutputKind
from mlx_paged.server.app import App
from mlx_paged.server.errors import ApiError, api_error
from mlx_paged.server.generations import Generation, parts_of

DELTA = RequestOutputKind.DELTA


class Places:
    """A queue limit that counts."""

    def __init__(self, limit=100):
        self.limit = limit
        self.num_held = 0

    @contextmanager
    def admit(self, num_seqs=1, user="-"):
        if self.num_held + num_seqs > self.limit:
            raise ApiError(503, "full", headers={"Retry-After": "7"})
        self.num_held += num_seqs
        try:
            yield
        finally:
            self.num_held -= num_seqs


def generation(text="One two three", **params):
    tokens = list(text.encode()[:40])
    return Generation(tokens, SamplingParams(**{"max_tokens": 5, "output_kind": DELTA, **params}))


def test_places_are_held_until_an_answer_ends_whatever_way(service):
    places = Places()
    limited = replace(service, admit=places.admit)

    async def main():
        answer = (await limited.start_all([generation(n=3)]))[0]
        assert places.num_held == 3
        assert [part async for part in answer][-1].finished
        assert places.num_held == 0
        await answer.aclose()
        answer = (await limited.start_all([generation(max_tokens=1000)]))[0]
        assert places.num_held == 1
        await answer.aclose()
        assert places.num_held == 0
        with pytest.raises(ApiError):
            (await limited.start_all([Generation([], SamplingParams())]))[0]
        assert places.num_held == 0
        task = asyncio.create_task(limited.start_all([generation(max_tokens=1000)]))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert places.num_held == 0
        await limited.whole([generation(), generation("Two")])
        assert places.num_held == 0

    asyncio.run(main())


def test_several_generations_start_together_or_not_at_all(service):
    places = Places(limit=3)
    limited = replace(service, admit=places.admit)

    async def main():
        long = generation(max_tokens=2000, ignore_eos=True)
        with pytest.raises(ApiError, match="full"):
            await limited.start_all([long] * 4)
        assert places.num_held == 0
        with pytest.raises(ApiError, match="outside the model's vocabulary"):
            await limited.start_all([long, Generation([10**6], SamplingParams())])
        assert places.num_held == 0

    asyncio.run(main())
    wait_until(lambda: is_idle(service))


def test_parts_of_several_answers_are_those_of_each(service):
    generations = [generation(text, max_tokens=9) for text in ("One", "Two two", "Three three")]

    async def joined(answers):
        tokens = {}
        async for index, part in parts_of(answers):
            for completion in part.outputs:
                tokens.setdefault(index, []).extend(completion.token_ids)
        return tokens

    async def main():
        together = await joined(await service.start_all(generations))
        alone = [await joined([(await service.start_all([each]))[0]]) for each in generations]
        assert together == {index: tokens[0] for index, tokens in enumerate(alone)}
        whole = await service.whole(generations)
        assert [output.outputs[0].token_ids for output in whole] == [
            together[index] for index in range(3)
        ]

    asyncio.run(main())


def test_an_answer_that_begins_late_begins_all_the_same():
    with running_service() as (service, _):
        impatient = replace(service, first_part_seconds=0.0)

        async def main():
            answer = (await impatient.start_all([generation()]))[0]
            tokens = [token async for part in answer for token in part.outputs[0].token_ids]
            assert len(tokens) == 5
            unread = (await impatient.start_all([generation(max_tokens=1000)]))[0]
            await unread.aclose()
            service.engine.generate = late
            failing = (await impatient.start_all([generation()]))[0]
            with pytest.raises(ApiError, match="too late"):
                await anext(failing)

        async def late(*arguments, **options):
            await asyncio.sleep(0.05)
            raise ArgumentError("too late")
            yield

        asyncio.run(main())
        wait_until(lambda: is_idle(service))


def test_a_full_queue_is_503_with_a_time_to_come_back():
    service = replace(make_service(), admit=Places(limit=0).admit)
    with service.engine, serving(App(service)) as url:
        answer = ask(url, "/v1/completions", {"prompt": "a"})
        assert (answer.status, answer.headers["retry-after"]) == (503, "7")
        assert answer.body["error"]["type"] == "overloaded_error"


def test_an_answer_that_the_server_ends_is_an_error_and_no_short_answer():
    with running_service() as (service, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        fields = {"model": "demo", "prompt": "a", "max_tokens": 3000}
        fields["extra_body"] = {"ignore_eos": True}
        stream = client.completions.create(stream=True, **fields)
        next(iter(stream))
        service.engine.abort_all()
        with pytest.raises(openai.APIError, match="the server aborted this answer") as caught:
            list(stream)
        assert caught.value.body["code"] == "aborted"

        async def whole():
            async with openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0
            ) as client:
                task = asyncio.create_task(client.completions.create(**fields))
                while service.engine.stats().num_running == 0:
                    await asyncio.sleep(0.01)
                service.engine.abort_all()
                await task

        with pytest.raises(openai.InternalServerError, match="the server aborted this answer"):
            asyncio.run(whole())
        client.close()


def test_a_request_that_fails_fails_alone():
    with running_service() as (service, url):
        generate = service.engine.generate

        def broken(tokens, logits):
            raise ValueError("the secret of others")

        def spoilt(prompt, params, **options):
            if params.seed == 13:
                params = params.clone(logits_processors=[broken])
            return generate(prompt, params, **options)

        service.engine.generate = spoilt
        body = {"prompt": "a", "max_tokens": 3}
        odd = [{"seed": 13}, {"seed": 13, "stream": True}, {"seed": 13, "prompt": ["a", "b"]}]
        good, *bad = (ask(url, "/v1/completions", {**body, **each}) for each in ({}, *odd))
        assert [each.status for each in (good, *bad)] == [200, 500, 500, 500]
        for each in bad:
            # Where it was raised, and not what it says, which may quote a text.
            assert re.search(
                r"the request failed: ValueError at server/test_generations\.py:\d+\"", each.text
            )
            assert "secret" not in each.text
        assert ask(url, "/v1/completions", body).body["choices"] == good.body["choices"]
        wait_until(lambda: is_idle(service))


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (ApiError(418, "a"), 418, None, None),
        (PromptTooLongError("[context] too many"), 400, "context_length_exceeded", None),
        (EngineStoppedError("[engine] over"), 503, None, None),
        (ArgumentError("[sampling_params] wrong", "top_p"), 400, None, "top_p"),
        (ArgumentError("[prompt] wrong"), 400, None, None),
        (ChatTemplateError("[chat] wrong"), 400, None, None),
        (ValueError("[reshape] wrong"), 500, None, None),
        (CacheFullError("[kv cache] full"), 500, None, None),
        (RuntimeError("broken\nin two"), 500, None, None),
    ],
)
def test_what_errors_become(error, status, code, param):
    said = api_error(error)
    assert (said.status, said.code, said.param) == (status, code, param)
    assert not said.message.startswith("[") and "\n" not in said.message


def ask_openai(client, kind):
    hello = {"model": "demo", "stream": True}
    messages = [{"role": "user", "content": "Hello"}]
    if kind == "chat":
        return client.chat.completions.create(messages=messages, max_tokens=500, **hello)
    if kind == "completions":
        return client.completions.create(prompt="Hello", max_tokens=500, **hello)
    return client.responses.create(input="Hello", max_output_tokens=500, **hello)


@pytest.mark.parametrize("kind", ["chat", "completions", "responses", "messages"])
def test_clients_raise_their_own_error_when_the_engine_fails_in_a_stream(kind, monkeypatch):
    with running_service() as (service, url):
        step, numbers = service.engine.engine.step, itertools.count()
        has_begun = threading.Event()

        def fails():
            if next(numbers) == 4:
                has_begun.wait(30)  # The client reads the stream by then.
                raise RuntimeError("the device is gone")
            return step()

        monkeypatch.setattr(service.engine.engine, "step", fails)
        seen = []
        if kind == "messages":
            error_kind, client = (
                anthropic.APIError,
                anthropic.Anthropic(base_url=url, api_key="none"),
            )
            messages = [{"role": "user", "content": "Hello"}]
            stream = client.messages.create(
                model="demo", messages=messages, max_tokens=500, stream=True
            )
        else:
            error_kind = openai.APIError
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            stream = ask_openai(client, kind)
        with client, pytest.raises(error_kind, match="it stopped") as raised:
            for each in stream:
                seen.append(each)
                has_begun.set()
        assert not isinstance(
            raised.value, (openai.APIConnectionError, anthropic.APIConnectionError)
        )
        assert len(seen) > 1
        if kind == "responses":
            assert (seen[-1].type, seen[-1].response.status) == ("response.failed", "failed")
