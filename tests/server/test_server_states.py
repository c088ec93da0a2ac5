"""A server with a recurrent model on a folder of K/V and states, restarted in the middle of a
conversation.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.hybrid_folders import make_hybrid_folder
from helpers.recurrent_agents import states_in
from helpers.server_programs import Program, running


def turn(program: Program, messages: list[dict[str, str]], **fields: Any) -> tuple[str, int, int]:
    """The answer, the number of prompt tokens, and how many of them were found."""
    body = {"messages": messages, "max_tokens": 24, "temperature": 0, **fields}
    answer = httpx.post(f"{program.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    usage = reply["usage"]
    found = usage["prompt_tokens_details"]["cached_tokens"]
    return reply["choices"][0]["message"]["content"], usage["prompt_tokens"], found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "end"),
    [
        ("qwen3_next", signal.SIGTERM),
        ("mamba2", signal.SIGTERM),
        ("lfm2", signal.SIGKILL),
    ],
)
def test_a_server_that_starts_again_goes_on_with_the_conversation(
    tmp_path: Path, architecture: str, end: signal.Signals
):
    model = str(make_hybrid_folder(tmp_path / "model", architecture))
    folder = tmp_path / "kv"
    flags = ("--model", model, "--block-size", "8", "--cache-dir", str(folder))
    text = "You are a helpful assistant. The code of apple is 4821. " * 4
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "Hello."}]
    with running(*flags) as program:
        for number in range(4):
            text, _, _ = turn(program, messages)
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": f"And number {number}? Say it in one word."},
            ]
        in_memory = turn(program, messages, no_store=True)
        program.signal(end)
        program.process.wait(60)
    with running(*flags) as program:
        from_disk = turn(program, messages)
        program.signal(signal.SIGTERM)
        assert program.end() == 0
    assert states_in(folder)
    assert from_disk[:2] == in_memory[:2]
    assert in_memory[2] > 0
    if end == signal.SIGTERM:
        assert from_disk == in_memory
    else:
        assert from_disk[2] <= in_memory[2], "what was not written yet is lost"
