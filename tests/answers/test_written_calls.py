"""Calls that are written in a format are read as they were, in every format, for all kinds of
values, and however the text is cut.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from helpers.call_writers import TOKENS, WRITERS
from helpers.fast_lane import mostly_slow

from mlx_paged.answers import code_spans
from mlx_paged.answers import reader as reader_module
from mlx_paged.answers.dialect import AnswerFormat, Dialect, marks_of
from mlx_paged.answers.formats import FORMATS, REASONING, format_named
from mlx_paged.answers.reader import AnswerReader
from mlx_paged.answers.template_traits import calls_as_text
from mlx_paged.request import CompletionOutput

STRING, ANY = {"type": "string"}, {"type": ["object", "array", "null"]}
# The values of each class, and the schema of their parameter.
VALUES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "plain text": (STRING, ["Paris", "a b, c: d; e = f"]),
    "empty text": (STRING, [""]),
    "white space": (
        STRING,
        [" ", "\n", "  two  spaces  ", "\n\n    if x:\n        y\n\n", "\tq\t"],
    ),
    "unicode": (STRING, ["Zürich ☕ 東京", "👩‍💻 🇨🇭 e\u0301", "مرحبا", "\u2028\u00a0\ufeff"]),
    "quotes": (STRING, ['say "hi"', "it's", "\\", "C:\\new\\table", '\\"', "'''", '"""', "`x`"]),
    "code": (
        STRING,
        ['def f(x):\n    return {"a": [x, "b"]}  # <b> & </b>\n', "{", "}]", "a[0] = {}"],
    ),
    "JSON as a text": (STRING, ['{"name": "x", "arguments": {"a": 1}}', "[1, 2", "{}", '"a"']),
    "what looks like a number": (STRING, ["007", "1e5", "-3", "true", "null", "NaN", "1_000"]),
    "dates": (STRING, ["2026-11-27", "2026-11-27T23:59:59Z", "12:30"]),
    "integers": ({"type": "integer"}, [0, 3, -17, 1_000_000]),
    "huge integers": ({"type": "integer"}, [2**53 + 1, -(10**30), int("9" * 600)]),
    "numbers": ({"type": "number"}, [0.5, -2.25, 1e-05, 1e21, 3]),
    "truth values": ({"type": "boolean"}, [True, False]),
    "null": ({"type": ["integer", "null"]}, [None, 4]),
    "objects": ({"type": "object"}, [{}, {"a": {"b": [1, {"c": None}]}, "key with space": "x"}]),
    "lists": ({"type": "array"}, [[], [[], [1, "two", None, True]], [{"a": "b"}, -0.5]]),
    "choices": ({"enum": ["red", "dark blue", 3, None]}, ["dark blue", 3, None]),
}
KEYS = ("text", "a_b", "_x", "key-1", "a.b", "two words")
NAMES = ("read", "get-weather", "files.read", "f_2")


@cache
def dialect(name: str, *, has_tokens: bool) -> Dialect:
    calls = format_named(name)
    start = "<|channel|>analysis<|message|>" if name == "harmony" else "<think>"
    reasoning = next(each for each in REASONING if each.start == start)
    tokens = {text: (index, True) for index, text in enumerate(TOKENS)}
    return Dialect.of_tokens(calls, reasoning, tokens if has_tokens else {})


def tools_of(schemas: dict[str, Any]) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": schemas}
    return [
        {"type": "function", "function": {"name": name, "parameters": parameters}} for name in NAMES
    ]


def read(form: AnswerFormat, pieces: list[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    reader, texts = AnswerReader(form), {"reasoning": "", "text": ""}
    calls: list[tuple[str, Any]] = []
    for part in [*(CompletionOutput(0, piece) for piece in pieces),
                 CompletionOutput(0, finish_reason="stop")]:  # fmt: skip
        for kind, text, call in reader.read(part):
            assert not re.search("[\ud800-\udfff]", text)
            if call is not None:
                assert call.index == len(calls)
                calls.append((call.name, json.loads(text)))
            else:
                texts[kind] += text
    return texts["reasoning"], texts["text"], calls


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def encoded(form: AnswerFormat, writer: str, calls: list[Any], spelled_out: list[str]) -> str:
    """The text of calls, whose marks are control tokens except within these texts."""
    placeholders = {text: f"\ue000{index}\ue001" for index, text in enumerate(spelled_out)}

    def hide(value: Any) -> Any:
        if isinstance(value, str):
            return placeholders.get(value, value)
        return value

    hidden = [(name, {key: hide(each) for key, each in values.items()}) for name, values in calls]
    text = form.marks.encode(WRITERS[writer](hidden))
    is_json = json.dumps("\\") in WRITERS[writer]([("f", {"a": "\\"})])
    for original, placeholder in placeholders.items():
        shown = json.dumps(original, ensure_ascii=False)[1:-1] if is_json else original
        text = text.replace(placeholder, shown)
    return text


def check(form: AnswerFormat, text: str, calls: list[Any], rng: random.Random) -> None:
    whole = read(form, [text])
    assert whole == ("", "", calls), text
    for pieces in (list(text), cut(text, rng), cut(text, rng)):
        assert read(form, pieces) == whole, text


def random_calls(kind: str, rng: random.Random, keys: tuple[str, ...]) -> tuple[Any, list[Any]]:
    schema, values = VALUES[kind]
    schemas = dict.fromkeys(keys, schema)
    calls = [
        (rng.choice(NAMES), {key: rng.choice(values) for key in rng.sample(keys, k)})
        for k in rng.sample(range(4), rng.randrange(1, 4))
    ]
    return tools_of(schemas), calls


@mostly_slow("kind", VALUES, quick=(0, 2, 4, 10, 14))
@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_written_is_read(writer, kind):
    name, rng = writer.partition(",")[0], random.Random(f"{writer} {kind}")
    # A tag can't hold every key.
    is_tagged = not isinstance(format_named(name).shape, str)
    keys = KEYS[:5] if is_tagged or "llama4" in writer or name == "pythonic" else KEYS
    for _ in range(12):
        tools, calls = random_calls(kind, rng, keys)
        for has_tokens in (True, False):
            form = AnswerFormat.for_prompt(dialect(name, has_tokens=has_tokens), "", tools)
            check(form, form.marks.encode(WRITERS[writer](calls)), calls, rng)


def marks_in(name: str) -> list[str]:
    """The marks of a format, as a text may quote them."""
    found = [re.sub(r"\{\w+\}", "x", mark) for mark in marks_of(format_named(name)) if mark.strip()]
    return sorted({*found, "<think>", "</think>"})


@mostly_slow("writer", WRITERS, quick=(0, 1, 2, 9, 14, 18, 20, 29))
def test_each_mark_in_an_argument_is_text(writer):
    name, rng = writer.partition(",")[0], random.Random(writer)
    tools = tools_of({"text": STRING, "path": STRING})
    quote = format_named(name).quote
    for mark in marks_in(name):
        for text in (mark, f"a {mark} b", f"{mark}\n", f"x\n{mark}\ny", f"`{mark}`"):
            calls = [("read", {"path": "a", "text": text}), ("f_2", {"text": text, "path": text})]
            for has_tokens in (True, False):
                form = AnswerFormat.for_prompt(dialect(name, has_tokens=has_tokens), "", tools)
                if has_tokens:
                    check(form, encoded(form, writer, calls, [text]), calls, rng)
                # A text can't quote what closes it, unless it is spelled out.
                if mark != quote or quote == '"':
                    check(form, form.marks.encode(WRITERS[writer](calls)), calls, rng)


def test_there_is_a_writer_of_every_format():
    assert {each.name for each in FORMATS} == {writer.partition(",")[0] for writer in WRITERS}


FRAGMENTS = (
    " ", "\n", "text", "`", "```\n", "\n```\n", '"', "'", "{", "}", "[", "]", ",", "é", "call:",
    "<", "read", '{"name"', "a b", "</", "functools",
)  # fmt: skip


def random_answer(form: AnswerFormat, rng: random.Random) -> str:
    """Calls, halves of calls, marks and text in a random order, some marks spelled out."""
    calls = form.calls
    writer = rng.choice([each for each in WRITERS if each.partition(",")[0] == calls.name])
    marks = [re.sub(r"\{\w+\}", "read", mark) for mark in marks_of(calls) if mark.strip()]
    marks += [form.dialect.reasoning.start, form.dialect.reasoning.end]
    arguments = {"path": rng.choice(["a", 'x"}', *marks])}
    whole = WRITERS[writer]([("read", arguments), ("f_2", {})][: rng.randrange(1, 3)])
    half = rng.randrange(len(whole))
    parts = [
        rng.choice([whole, whole, whole[:half], whole[half:], rng.choice(marks), *FRAGMENTS[:9],
                    rng.choice(FRAGMENTS)])
        for _ in range(rng.randrange(1, 10))
    ]  # fmt: skip
    return "".join(form.marks.encode(part) if rng.random() < 0.8 else part for part in parts)


@mostly_slow("name", [each.name for each in FORMATS], quick=(0, 4, 7, 13))
def test_random_answers_are_read_the_same_however_they_are_cut(name, monkeypatch):
    rng, tools = random.Random(name), tools_of({"path": STRING})
    for number in range(150):
        monkeypatch.setattr(code_spans, "MAX_HELD_CHARACTERS", rng.choice([40, 32_768]))
        monkeypatch.setattr(reader_module, "MAX_QUOTED_CHARACTERS", rng.choice([20, 4_096]))
        form = AnswerFormat.for_prompt(dialect(name, has_tokens=number % 3 > 0), "", tools)
        form = replace(form, is_thinking=name != "harmony" and rng.random() < 0.3)
        text, reason = random_answer(form, rng), rng.choice(["stop", "length"])
        whole = pieces_of(form, [text], reason)
        for pieces in (list(text), cut(text, rng), cut(text, rng)):
            assert pieces_of(form, pieces, reason) == whole, form.marks.decode(text)


def pieces_of(form: AnswerFormat, pieces: list[str], reason: str) -> list[tuple[str, str]]:
    """The kinds and texts of an answer; neighbours of one kind are joined."""
    reader, found = AnswerReader(form), list[tuple[str, str]]()
    events = [event for piece in pieces for event in reader.add(piece)]
    for kind, text, _ in events + reader.finish(CompletionOutput(0, finish_reason=reason)):
        assert not re.search("[\ud800-\udfff]", text)
        if found and found[-1][0] == kind != "call":
            found[-1] = kind, found[-1][1] + text
        else:
            found.append((kind, text))
    return found


@pytest.mark.parametrize("name", ["json_tools", "granite", "command", "pythonic"])
def test_calls_that_a_template_takes_as_content_are_read_as_they_were(name):
    """Templates of Granite 3 and LFM2 write no calls themselves."""
    write, rng = calls_as_text(format_named(name)), random.Random(name)
    assert write is not None
    for kind in VALUES:
        tools, calls = random_calls(kind, rng, KEYS[:3])
        messages = [{"function": {"name": called, "arguments": values}} for called, values in calls]
        form = AnswerFormat.for_prompt(dialect(name, has_tokens=True), "", tools)
        check(form, form.marks.encode(write(messages)), calls, rng)


def test_other_formats_are_not_written_as_content():
    for form in (None, *FORMATS):
        is_written = form is not None and bool(form.start) and form.shape in ("json", "python")
        assert (calls_as_text(form) is not None) == is_written
