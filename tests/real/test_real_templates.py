"""Chat templates of some seventy real models: what a conversation says is in its prompt, or the
conversation is refused by the place of the message.
"""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from paged_testing.registry_files import TOKENIZERS, require
from transformers.utils.chat_template_utils import render_jinja_template

from mlx_paged.answers.formats import format_named
from mlx_paged.answers.template_traits import (
    TemplateTraits,
    UnsayableError,
    calls_as_text,
    find_traits,
)

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds things.",
        "parameters": {
            "type": "object",
            "properties": {"thing": {"type": "string", "description": "What to find."}},
            "required": ["thing"],
        },
    },
}


def templates() -> dict[str, str]:
    found = {file.stem: file.read_text() for file in sorted(require("llama.cpp").glob("*.jinja"))}
    for name in TOKENIZERS:
        config = json.loads((require(name) / "tokenizer_config.json").read_text())
        if isinstance(config.get("chat_template"), str):
            found[f"{name} (tokenizer)"] = config["chat_template"]
    return found


def render(template: str, messages, options=None) -> str:
    options = {"add_generation_prompt": True, **TOKENS, **(options or {})}
    tools = options.pop("tools", None)
    [text], _ = render_jinja_template([list(messages)], tools, chat_template=template, **options)
    return text


def said(role: str, word: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": f"word{word}", **more}


def call(number: int, call_id: str | None) -> dict[str, Any]:
    function = {"name": "find", "arguments": {"thing": f"wordthing{number}"}}
    made = {"type": "function", "function": function}
    return made if call_id is None else {**made, "id": call_id}


def calls(*ids: str | None, text: str = "") -> list[dict[str, Any]]:
    made = [call(number, call_id) for number, call_id in enumerate(ids)]
    answer = {"role": "assistant", "content": text, "tool_calls": made}
    results = [
        said("tool", f"result{number}", **({} if call_id is None else {"tool_call_id": call_id}))
        for number, call_id in enumerate(ids)
    ]
    return [answer, *results]


QUESTION, ANSWER, AGAIN = said("user", "one"), said("assistant", "two"), said("user", "three")
CONVERSATIONS = {
    "plain": [QUESTION, ANSWER, AGAIN],
    "system": [said("system", "be"), QUESTION, ANSWER, AGAIN],
    "two systems": [said("system", "be"), said("system", "brief"), QUESTION],
    "system in the middle": [QUESTION, ANSWER, said("system", "hurry"), AGAIN],
    "system at the end": [QUESTION, ANSWER, AGAIN, said("system", "hurry")],
    "two questions": [QUESTION, AGAIN],
    "three questions, later": [QUESTION, ANSWER, AGAIN, said("user", "four"), said("user", "five")],
    "two answers": [QUESTION, ANSWER, said("assistant", "more"), AGAIN],
    "a call": [QUESTION, *calls("call_1")],
    "a call and an answer": [QUESTION, *calls("call_1"), ANSWER, AGAIN],
    "a call without an id": [QUESTION, *calls(None), ANSWER, AGAIN],
    "two calls": [QUESTION, *calls("call_1", "call_2"), ANSWER, AGAIN],
    "text beside a call": [QUESTION, *calls("call_1", text="wordtext"), ANSWER, AGAIN],
    "two rounds": [
        said("system", "be"), QUESTION, *calls("a", text="wordfirst"),
        *calls("b", "c", text="wordsecond"),
        ANSWER, AGAIN, said("user", "four"),
    ],
}  # fmt: skip
WITH_CALLS = {kind for kind, messages in CONVERSATIONS.items() if "tool_calls" in str(messages)}
# Templates that write no calls, or that call methods which the sandbox of transformers refuses.
NO_CALLS = {
    "HuggingFaceTB-SmolLM3-3B", "Kimi-K2-Instruct", "Kimi-K2-Thinking", "gemini (tokenizer)",
    "gemma3 (tokenizer)", "google-gemma-2-2b-it", "llama-cpp-deepseek-r1", "llama-cpp-rwkv-world",
    "llama3 (tokenizer)", "llama3_1 (tokenizer)", "microsoft-Phi-3.5-mini-instruct",
}  # fmt: skip
# Templates that take calls as a part of the content, and the format in which their models write.
AS_CONTENT = {
    "LFM2-8B-A1B": "pythonic",
    "LFM2.5-Instruct": "pythonic",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
}
# It asks for a variable that only its own program sets.
BROKEN = {"fireworks-ai-llama-3-firefunction-v2"}


def words_of(messages: list[dict[str, Any]]) -> set[str]:
    return set(re.findall(r"word\w+", json.dumps(messages)))


def outcome(
    template: str, traits: TemplateTraits, messages: list[dict[str, Any]], call_format: str = ""
) -> str:
    """``written``, ``refused``, or the words that are missing."""
    options = {"tools": [TOOL]} if traits.shows_tools else {}
    try:
        write_calls = calls_as_text(format_named(call_format))
        text = render(template, traits.adapt(messages, write_calls), options)
    except UnsayableError as error:
        assert re.match(r"messages\[\d+\] has ", str(error))
        return "refused"
    missing = sorted(word for word in words_of(messages) if word not in text)
    return f"lost: {missing}" if missing else "written"


@pytest.mark.timeout(300)
def test_nothing_of_a_conversation_is_lost_without_a_word():
    outcomes: dict[str, dict[str, str]] = {}
    for name, template in templates().items():
        traits = find_traits(partial(render, template))
        for kind, messages in CONVERSATIONS.items():
            try:
                result = outcome(template, traits, messages, AS_CONTENT.get(name, ""))
            except TemplateError as error:
                result = f"template: {error}"
            outcomes.setdefault(name, {})[kind] = result
    written = dict.fromkeys(CONVERSATIONS, "written")
    expected = {
        name: written | (dict.fromkeys(WITH_CALLS, "refused") if name in NO_CALLS else {})
        for name in outcomes.keys() - BROKEN
    }
    assert {name: outcomes[name] for name in expected} == expected
    assert len(expected) > 60 and expected.keys() > NO_CALLS
    assert set(outcomes.pop(*BROKEN).values()) == {"template: 'functions' is undefined"}
