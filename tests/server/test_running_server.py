"""The server of the tests runs, and answers can be dictated."""

from __future__ import annotations

import asyncio
import urllib.request

from mlx_paged import SamplingParams
from mlx_paged.server.generations import Generation


def test_the_server_answers(server_url):
    with urllib.request.urlopen(f"{server_url}/health") as response:
        assert response.status == 200


def test_a_dictated_answer_is_what_the_engine_says(service, script):
    script("One two three.", "<|im_start|>é")
    tokens = service.tokenizer.encode("<|im_start|>user\nHello!<|im_end|>\n")

    async def ask():
        answer = await service.start(Generation(tokens, SamplingParams(n=2, seed=1)))
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
