"""The server of the tests runs, and answers can be dictated."""

from __future__ import annotations

import asyncio
import urllib.request
from contextlib import closing
from http.client import HTTPConnection
from urllib.parse import urlsplit

from mlx_paged import SamplingParams
from mlx_paged.server.generations import Generation


def test_the_server_answers(server_url):
    with urllib.request.urlopen(f"{server_url}/health") as response:
        assert response.status == 200


def test_a_dictated_answer_is_what_the_engine_says(service, script):
    script("One two three.", "<|im_start|>é")
    tokens = service.tokenizer.encode("<|im_start|>user\nHello!<|im_end|>\n")

    async def ask():
        answer = (await service.start_all([Generation(tokens, SamplingParams(n=2, seed=1))]))[0]
        try:
            async for output in answer:
                last = output
            return last
        finally:
            await answer.aclose()

    output = asyncio.run(ask())
    assert [completion.text for completion in output.outputs] == ["One two three."] * 2
    assert {completion.finish_reason for completion in output.outputs} == {"stop"}
    assert asyncio.run(ask()).outputs[0].text == "é"


def test_json_that_is_too_deep_is_refused_and_the_connection_lives(server_url):
    address = urlsplit(server_url)
    connection = HTTPConnection(address.hostname, address.port, timeout=60)
    with closing(connection):
        for body in (b"[" * 9000, b"[" * 90_000):  # read by the loop's thread, and by another one
            connection.request("POST", "/v1/completions", body)
            response = connection.getresponse()
            assert response.status == 400
            assert b"nested deeper than 64" in response.read()
