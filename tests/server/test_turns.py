"""A turn computes what is new, and no more: the shapes that opencode and codex send, in two
questions with a loop of tools each.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from helpers.agent_models import make_agent_model
from helpers.fast_lane import mostly_slow
from helpers.servers import ask, is_idle, running_service, serving, wait_until

from mlx_paged.request import MAX_PRIORITY, CompletionOutput, RequestOutput
from mlx_paged.server import kept_answers
from mlx_paged.server.app import App
from mlx_paged.server.kept_answers import PAUSE, PIECE_LEN, IdlePrefill
from mlx_paged.server.settings import ServerSettings

MOST_BEYOND = 200  # tokens that a turn computes beyond what the client has added
NUM_CALLS = 1
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
WRITE = {"name": "write", "description": "Write a file.", "parameters": PARAMETERS}
QUESTIONS = ["What is in the files?", "And what is missing?"]
RESULT = "1: def main():\n2:     return 0"


def written(thinks: bool, number: int) -> str:
    """What the model writes: a call, or at the end an answer."""
    reasoning = f"<think>\n{'This may say more. ' * 3}{number}\n</think>\n\n" if thinks else ""
    if number == NUM_CALLS:
        return f"{reasoning}There is nothing else."
    text = "x = 1; " * 50  # of six tokens each
    call = json.dumps({"name": "write", "arguments": {"path": f"{number}", "text": text}})
    return f"{reasoning}I write.\n<tool_call>\n{call}\n</tool_call>"


# Each client yields how many tokens of a turn were computed, and how many it has added.
Turn = tuple[int, int]


def opencode(agent: Any, thinks: bool, sends_reasoning: bool) -> Iterator[Turn]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"Be brief. {uuid.uuid4()}"}]
    for question in QUESTIONS:
        new: list[dict[str, Any]] = [{"role": "user", "content": question}]
        while new:
            messages += new
            stream = agent.openai.chat.completions.create(
                model="demo",
                messages=messages,
                tools=[{"type": "function", "function": WRITE}],
                tool_choice="auto",
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"enable_thinking": thinks},
            )
            answer: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
            calls: list[dict[str, Any]] = []
            usage = None
            for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    answer["content"] += choice.delta.content or ""
                    answer["reasoning_content"] += getattr(
                        choice.delta, "reasoning_content", None
                    ) or ""  # fmt: skip
                    for call in choice.delta.tool_calls or ():
                        if call.id:
                            function = {"name": call.function.name, "arguments": ""}
                            calls.append({"id": call.id, "type": "function", "function": function})
                        calls[-1]["function"]["arguments"] += call.function.arguments
            cached = usage.prompt_tokens_details.cached_tokens
            yield usage.prompt_tokens - cached, num_tokens(agent, new)
            if not sends_reasoning:
                del answer["reasoning_content"]
            messages.append({**answer, **({"tool_calls": calls} if calls else {})})
            new = [
                {"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in calls
            ]


def codex(agent: Any, thinks: bool, sends_reasoning: bool) -> Iterator[Turn]:
    items: list[dict[str, Any]] = []
    instructions = f"Be brief. {uuid.uuid4()}"
    for question in QUESTIONS:
        content = [{"type": "input_text", "text": question}]
        new: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": content}]
        while new:
            items += new
            stream = agent.openai.responses.create(
                model="demo",
                instructions=instructions,
                input=items,
                tools=[{"type": "function", "strict": False, **WRITE}],
                tool_choice="auto",
                parallel_tool_calls=False,
                reasoning={"effort": "medium" if thinks else "none"},
                store=False,
                stream=True,
                include=["reasoning.encrypted_content"] if sends_reasoning else [],
                prompt_cache_key="a",
            )
            [response] = [each.response for each in stream if each.type == "response.completed"]
            usage = response.usage
            cached = usage.input_tokens_details.cached_tokens
            yield usage.input_tokens - cached, num_tokens(agent, new)
            told = [item.model_dump(exclude_none=True) for item in response.output]
            items += [each for each in told if sends_reasoning or each["type"] != "reasoning"]
            new = [
                {"type": "function_call_output", "call_id": each["call_id"], "output": RESULT}
                for each in told
                if each["type"] == "function_call"
            ]


def num_tokens(agent: Any, new: list[dict[str, Any]]) -> int:
    """Of what a client has added."""
    texts = [each.get("output") or each["content"] for each in new]
    texts = [each if isinstance(each, str) else each[0]["text"] for each in texts]
    return sum(len(agent.service.tokenizer.encode(text)) for text in texts)


@mostly_slow(
    ("client", "thinks", "sends_reasoning"),
    [
        (opencode, True, False),
        (opencode, True, True),
        (opencode, False, False),
        (codex, True, True),
        (codex, True, False),
    ],
    quick=(2,),
)
def test_a_turn_computes_what_is_new(agent, client, thinks: bool, sends_reasoning: bool):
    turns = client(agent, thinks, sends_reasoning)
    beyond = []
    for number in [*range(NUM_CALLS + 1)] * len(QUESTIONS):
        agent.script(written(thinks, number), pieces=3)
        num_computed, num_new = next(turns)
        beyond.append(num_computed - num_new)
        wait_until(lambda: is_idle(agent.service), 60)
    # Nothing was there before the first one.
    assert max(beyond[1:]) <= MOST_BEYOND
    assert next(turns, None) is None


@pytest.mark.slow
def test_without_the_idle_time_the_question_after_a_loop_computes_it_again(agent, monkeypatch):
    monkeypatch.setitem(agent.service.__dict__, "settings", ServerSettings(no_idle_prefill=True))
    beyond = []
    turns = opencode(agent, True, False)
    for number in [*range(NUM_CALLS + 1), 0]:
        agent.script(written(True, number), pieces=3)
        num_computed, num_new = next(turns)
        beyond.append(num_computed - num_new)
    assert max(beyond[1:-1]) <= MOST_BEYOND < beyond[-1]
    turns.close()


def test_a_history_is_computed_ahead_in_pieces_without_its_reasoning(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_answers, "PIECE_LEN", 70)
    with running_service(make_agent_model(tmp_path / "agent")) as (service, url):
        generate, ahead = service.engine.generate, []

        def noted(prompt: Any, params: Any, **options: Any) -> Any:
            if options["priority"] == MAX_PRIORITY:
                ahead.append(prompt["prompt_token_ids"])
            return generate(prompt, params, **options)

        service.engine.generate = noted
        script = f"<think>\nWell.\n</think>\n\n{'It is all there. ' * 20}"
        tokens = service.tokenizer.encode(script, add_special_tokens=False)
        service.engine.scripts.append([*tokens, service.tokenizer.eos_token_id])
        messages = [{"role": "user", "content": "What is there?"}]
        body = {"messages": messages, "max_tokens": len(tokens) + 1}
        answer = ask(url, "/v1/chat/completions", body).body["choices"][0]["message"]
        wait_until(lambda: is_idle(service), 60)
        assert [len(piece) // 70 for piece in ahead] == [1, 2, 2]
        assert all(later[: len(piece)] == piece for piece, later in pairwise(ahead))
        text = service.tokenizer.decode(ahead[-1], skip_special_tokens=False)
        assert "Well" not in text and text.endswith("<|im_end|>\n<|im_start|>user\n")
        messages += [{"role": "assistant", "content": answer["content"]}]
        messages += [{"role": "user", "content": "And else?"}]
        usage = ask(url, "/v1/chat/completions", {"messages": messages, "max_tokens": 1}).body
        cached = usage["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > len(ahead[-1]) - 17
        wait_until(lambda: is_idle(service), 60)


class PausedEngine:
    """Ends what is generated when it is told to."""

    def __init__(self) -> None:
        self.engine = self
        self.is_busy = False
        self.asked: list[int] = []  # the lengths of prompts
        self.ended: asyncio.Queue[str] = asyncio.Queue()

    def has_unfinished_requests(self) -> bool:
        return self.is_busy

    async def generate(self, prompt: Any, params: Any, **options: Any) -> Any:
        self.asked.append(len(prompt["prompt_token_ids"]))
        completion = CompletionOutput(0, finish_reason=await self.ended.get())
        yield RequestOutput("a", None, [], [completion])

    def abort(self, request_id: str) -> None:
        self.ended.put_nowait("abort")


def test_what_is_computed_ahead_is_given_up_when_a_request_comes_and_goes_on_after_it():
    async def run(user: str, encode: Any) -> Any:
        return encode()

    async def main() -> None:
        engine = PausedEngine()
        prefill = IdlePrefill(engine, run)  # type: ignore[arg-type]
        tokens = [1] * (2 * PIECE_LEN + 100)

        def expect(key: bytes, num_known: int = 0) -> None:
            prefill.expect(key, lambda: (tokens, num_known), {"user": "a"})

        async def until(lengths: list[int]) -> None:
            while engine.asked != lengths:
                await asyncio.sleep(0.01)

        prefill.pause()  # Nothing is computed yet.
        expect(b"a")
        await until([PIECE_LEN])
        engine.is_busy = True
        prefill.pause()
        await asyncio.sleep(3 * PAUSE)
        assert engine.asked == [PIECE_LEN] and not prefill.is_done
        engine.is_busy = False
        await until([PIECE_LEN] * 2)
        expect(b"b", len(tokens) - 1)  # not worth it
        for _ in range(3):
            engine.ended.put_nowait("length")
        while not prefill.is_done:
            await asyncio.sleep(0.01)
        assert engine.asked == [PIECE_LEN, PIECE_LEN, 2 * PIECE_LEN, len(tokens)]

    asyncio.run(main())


def test_a_server_may_be_told_not_to_compute_ahead(shared_agent_service):
    service = replace(shared_agent_service, settings=ServerSettings(no_idle_prefill=True))
    with serving(App(service)) as url:
        tokens = service.tokenizer.encode("<think>\nWell.\n</think>\n\nYes.")
        service.engine.scripts.append([*tokens, service.tokenizer.eos_token_id])
        ask(url, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Yes?"}]})
        assert service.idle_prefill.is_done
