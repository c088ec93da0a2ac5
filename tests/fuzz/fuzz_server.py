"""Requests to the server with odd values in any of their fields: each is answered, or refused with
a status of 4xx and a line that says why.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import json
import random
import string
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from fuzzing import Case, Defect
from helpers.pooling_folders import end_texts, reranker_folder
from helpers.servers import is_idle, running_service, wait_until

from mlx_paged.server.service import Service

SECONDS = 30.0  # that an answer may take on a busy machine

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "count": {"type": "integer"}},
            "required": ["word"],
        },
    },
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "The code of apple is 4821."},
    {"role": "assistant", "content": "OK"},
    {"role": "user", "content": [{"type": "text", "text": "What is the code of apple?"}]},
]
CHAT = {
    "model": "demo", "messages": MESSAGES, "max_tokens": 4, "temperature": 0.5, "top_p": 0.9,
    "n": 1, "stop": ["x"], "seed": 1, "presence_penalty": 0.1, "frequency_penalty": 0.1,
    "logit_bias": {"5": 1}, "logprobs": True, "top_logprobs": 2, "stream": False,
    "stream_options": {"include_usage": True}, "tools": [TOOL], "tool_choice": "none",
    "parallel_tool_calls": True, "response_format": {"type": "text"}, "user": "u",
    "max_completion_tokens": 4, "top_k": 5, "min_p": 0.1, "cache_salt": "s", "priority": 0,
    "no_store": True,
    "repetition_penalty": 1.1, "min_tokens": 1, "stop_token_ids": [7], "ignore_eos": False,
    "skip_special_tokens": True, "include_stop_str_in_output": False, "bad_words": ["no"],
    "chat_template_kwargs": {}, "reasoning_effort": "low", "metadata": {}, "store": False,
    "guided_json": SCHEMA, "guided_regex": "a+", "guided_choice": ["a", "b"], "echo": False,
    "allowed_token_ids": [5, 6], "prompt_logprobs": 1, "add_generation_prompt": True,
    "continue_final_message": False,
}  # fmt: skip
# Of completions; they have no conversation.
CHAT_ALONE = (
    "messages", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort",
    "max_completion_tokens", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message",
)  # fmt: skip
# One alone of these keeps an answer to a form.
FORMS = ("response_format", "guided_json", "guided_regex", "guided_choice", "tools", "text")
# A field, and what it needs beside it.
NEEDS = {
    "top_logprobs": "logprobs", "stream_options": "stream", "tool_choice": "tools",
    "parallel_tool_calls": "tools",
    # Nothing says how the demo model would write a call.
    "tools": "tool_choice",
}  # fmt: skip
# What may leave an answer no token beside a form, or contradict it.
CONFLICTS: tuple[dict[str, Any], ...] = (
    {"ignore_eos": True}, {"allowed_token_ids": [5, 6]}, {"min_tokens": 4},
    {"bad_words": ["a", "b", "{", "1"]}, {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
    {"guided_choice": ["a", "b"]}, {"guided_json": SCHEMA}, {"response_format": {"type": "text"}},
)  # fmt: skip
# What is refused by name, whatever it says.
REFUSED = {"functions": [{"name": "f"}], "suffix": "x", "previous_response_id": "resp_1", "junk": 1}
# For each path: a body of which required fields are always there, and others are drawn.
BODIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/v1/chat/completions": (CHAT, ("model", "messages", "max_tokens")),
    "/v1/completions": (
        {
            **{name: value for name, value in CHAT.items() if name not in CHAT_ALONE},
            "prompt": "1 2 3",
            "logprobs": 2,
            "best_of": 1,
        },
        ("model", "prompt", "max_tokens"),
    ),
    "/v1/messages": (
        {
            "model": "demo",
            "max_tokens": 4,
            "messages": MESSAGES[1:],
            "system": "Be brief.",
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "stop_sequences": ["x"],
            "stream": False,
            "metadata": {"user_id": "u"},
            "thinking": {"type": "disabled"},
            "tools": [{"name": "look_up", "input_schema": TOOL["function"]["parameters"]}],
            "tool_choice": {"type": "none"},
            "service_tier": "auto",
        },
        ("model", "messages", "max_tokens"),
    ),
    "/v1/messages/count_tokens": (
        {"model": "demo", "messages": MESSAGES[1:], "system": "Be brief."},
        ("model", "messages"),
    ),
    "/v1/responses": (
        {
            "model": "demo",
            "input": "What is the code of apple?",
            "instructions": "Be brief.",
            "max_output_tokens": 4,
            "temperature": 0.5,
            "top_p": 0.9,
            "stream": False,
            "store": False,
            "tools": [{"type": "function", **TOOL["function"]}],
            "tool_choice": "none",
            "parallel_tool_calls": True,
            "metadata": {},
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
            "truncation": "disabled",
            "include": [],
        },
        ("model", "input", "max_output_tokens"),
    ),
    "/api/chat": (
        {
            "model": "demo:latest",
            "messages": [{"role": "user", "content": "What is the code of apple?"}],
            "options": {"num_predict": 4, "top_k": 5, "stop": ["x"], "seed": -1, "num_ctx": 64},
            "stream": False,
            "format": SCHEMA,
            "think": False,
            "tools": [],
            "keep_alive": "5m",
            "logprobs": True,
            "top_logprobs": 2,
        },
        ("model", "messages", "options"),
    ),
    "/api/generate": (
        {
            "model": "demo",
            "prompt": "What is the code of apple?",
            "options": {"num_predict": 4, "temperature": 0.5, "repeat_penalty": 1.1},
            "system": "Be brief.",
            "stream": True,
            "format": "json",
            "images": [],
        },
        ("model", "prompt", "options"),
    ),
    "/v1/embeddings": (
        {
            "model": "demo",
            "input": ["The code of apple is 4821.", [5, 6, 7]],
            "encoding_format": "base64",
            "dimensions": 16,
            "prompt_name": "",
            "priority": 1,
            "cache_salt": "s",
            "user": "u",
        },
        ("input",),
    ),
    "/v1/rerank": (
        {
            "model": "demo",
            "query": "Who?",
            "documents": ["Tom.", {"text": "Ben.", "id": 3}],
            "top_n": 1,
            "return_documents": False,
            "instruction": "Find it",
        },
        ("query", "documents"),
    ),
    "/v1/score": (
        {"model": "demo", "text_1": "Who?", "text_2": ["Tom.", "Ben."], "instruction": "Find it"},
        ("text_1", "text_2"),
    ),
    "/tokenize": (
        {"model": "demo", "prompt": "1 2", "add_special_tokens": True},
        ("prompt",),
    ),
    "/detokenize": ({"model": "demo", "tokens": [5, 6]}, ("tokens",)),
}

JUNK: tuple[Callable[[random.Random], Any], ...] = (
    lambda rng: None,
    lambda rng: rng.choice([True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**63, 10**40, -(2**63)]),
    lambda rng: rng.choice([0.0, 0.5, -0.5, 1.5, 1e308, 1e-300]),
    lambda rng: rng.choice(["", "x", "auto", "required", "\x00", "é\n", "\U0001f34e", "null"]),
    lambda rng: "a" * rng.choice([100, 5000]),
    lambda rng: "".join(rng.choices(string.printable, k=rng.randint(1, 30))),
    lambda rng: [],
    lambda rng: {},
    lambda rng: [None],
    lambda rng: ["a", 1, {}],
    lambda rng: [[1], [2, 3]],
    lambda rng: {"type": rng.choice(["text", "json_object", "json_schema", "function", "x", 3])},
    lambda rng: {"role": "user", "content": "x"},
    lambda rng: {"name": "look_up"},
    lambda rng: {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    lambda rng: {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "no"}}},
    lambda rng: functools.reduce(lambda inner, _: [inner], range(200), 1),
    lambda rng: [1] * 5000,
)


def server_case(rng: random.Random) -> Case:
    """A request in which some values are odd; one in ten is as it should be."""
    server()  # Its threads are not the case's.
    path = rng.choice(list(BODIES))
    body: Any = good_body(rng, path)
    is_good = rng.random() < 0.1
    names = [*BODIES[path][0], *REFUSED]
    if not is_good and "guided_json" in BODIES[path][0] and rng.random() < 0.3:
        for conflict in rng.sample(CONFLICTS, rng.choice([1, 2, 3])):
            body |= copy.deepcopy(conflict)
    for _ in range(0 if is_good else rng.choice([0, 1, 1, 2, 3])):
        body = mutated(rng, body, names)
    content = json.dumps(body).encode() if is_good else as_bytes(rng, body)
    ignores = path.startswith("/api/")  # what it does not know, as Ollama does
    has_refused = isinstance(body, dict) and any(body.get(name) is not None for name in REFUSED)
    must_refuse = has_refused and not ignores
    expected = "good" if is_good else "refused" if must_refuse else "any"
    return Case(f"POST {path} {content[:300]!r}", lambda: check(path, content, expected))


def good_body(rng: random.Random, path: str) -> dict[str, Any]:
    """A body that is taken: all that is required, and some of what may be there."""
    fields, required = BODIES[path]
    drawn = [name for name in fields if name in required or rng.random() < 0.15]
    forms = [name for name in drawn if name in FORMS]
    for name in forms[1:]:
        drawn.remove(name)
    drawn += [name for name in ("stream",) if name in fields and rng.random() < 0.3]
    body = {name: copy.deepcopy(fields[name]) for name in drawn}
    if "stream" in fields:
        body["stream"] = rng.random() < 0.3
    if {"guided_json", "guided_regex", "guided_choice", "response_format"} & body.keys():
        body.pop("allowed_token_ids", None)  # They leave nothing together.
        body.pop("ignore_eos", None)
    if body.get("stream"):
        body.pop("prompt_logprobs", None)
    for name, needed in NEEDS.items():
        if not body.get(needed):
            body.pop(name, None)
    return body


def mutated(rng: random.Random, body: Any, names: list[str]) -> Any:
    """The body with an odd value in the place of a field, or of something inside one."""
    if rng.random() < 0.02 or not isinstance(body, dict):
        return rng.choice(JUNK)(rng)
    name = rng.choice(names if rng.random() < 0.6 or not body else list(body))
    place, key = body, name
    while rng.random() < 0.6:
        inner = place.get(key) if isinstance(place, dict) else place[key]
        if isinstance(inner, dict) and inner:
            place, key = inner, rng.choice(list(inner))
        elif isinstance(inner, list) and inner:
            place, key = inner, rng.randrange(len(inner))
        else:
            break
    if isinstance(place, dict) and rng.random() < 0.2:
        place.pop(key, None)
    elif key in REFUSED:
        place[key] = copy.deepcopy(REFUSED[key])
    else:
        place[key] = copy.deepcopy(rng.choice(JUNK)(rng))
    return body


def as_bytes(rng: random.Random, body: Any) -> bytes:
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5)
    content = text.encode("utf-8", "surrogatepass")
    odd = rng.random()
    if odd < 0.01:
        return content[: rng.randint(0, len(content))]
    if odd < 0.02:
        return content.replace(b'"', b"'", 3)
    if odd < 0.03:
        return bytes(rng.randbytes(40))
    if odd < 0.04:
        return content.replace(b"4", b"NaN", 1)
    return content


def check(path: str, content: bytes, expected: str) -> None:
    """Raises ``Defect`` unless the answer is one that a client can use, and ``ValueError`` with its
    words if that is a refusal.

    Args:
        expected: ``"good"`` must be answered, ``"refused"`` must not, ``"any"`` may be.
    """
    _, client = server()
    headers = {"content-type": "application/json"}
    with client.stream("POST", path, content=content, headers=headers) as response:
        text = response.read().decode()
    check_idle()
    status, kind = response.status_code, response.headers.get("content-type", "")
    if status == 200:
        check_answer(text, kind)
        if expected == "refused":
            raise Defect("a field that can't be honoured was ignored")
    elif not 400 <= status < 500 or expected == "good":
        raise Defect(f"status {status}: {text[:500]}")
    else:
        error = json.loads(text)["error"]
        message = error if isinstance(error, str) else error["message"]
        raise ValueError(f"[server] {message}")


def check_answer(text: str, kind: str) -> None:
    if kind.startswith("application/json"):
        json.loads(text)
        return
    is_lines = kind.startswith("application/x-ndjson")
    events = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    events = text.splitlines() if is_lines else events
    if not events:
        raise Defect("a stream without events")
    for event in events:
        error = None if event == "[DONE]" else json.loads(event).get("error")
        if error and is_lines:
            raise ValueError(f"[server] {error}")
        if error and error.get("param"):  # Only an answer shows that fields leave it no token.
            raise ValueError(f"[server] {error['message']}")
        if error:
            raise Defect(f"an error in the stream: {event[:500]}")


@functools.cache
def server() -> tuple[Service, httpx.Client]:
    """A server of its own with a small pool, and a client for it. Its model also gives embeddings
    and scores.
    """
    stack = contextlib.ExitStack()
    folder = reranker_folder(Path(stack.enter_context(tempfile.TemporaryDirectory())))
    end_texts(folder)
    service, url = stack.enter_context(
        running_service(folder, kv_cache_bytes="64blocks", max_model_len=512, max_num_seqs=8)
    )
    client = stack.enter_context(httpx.Client(base_url=url, timeout=SECONDS))
    # Its threads are there from now on.
    for form in ({}, {"guided_choice": ["a", "b"]}):
        body = {name: CHAT[name] for name in ("model", "messages", "max_tokens")} | form
        client.post("/v1/chat/completions", json=body).raise_for_status()
    atexit.register(stack.close)
    return service, client


def check_idle() -> None:
    """When cases are over, the server has nothing left of them."""
    service, client = server()
    wait_until(lambda: is_idle(service))
    client.get("/health").raise_for_status()
