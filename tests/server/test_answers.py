"""Answers are told apart, in all of mlx-lm's formats and however they are cut."""

from __future__ import annotations

import importlib
import itertools
import json
import pkgutil
from dataclasses import replace
from functools import partial

import mlx_lm.tool_parsers
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_paged.model_dialect import ToolFormat
from mlx_paged.reasoning import ReasoningMarks
from mlx_paged.request import CompletionOutput
from mlx_paged.server.answers.events import Event, ToolCall
from mlx_paged.server.answers.reader import AnswerFormat, AnswerReader, Reading, read_answer
from mlx_paged.server.answers.tool_arguments import ArgumentsScanner
from mlx_paged.server.answers.tools import JSON_LIST

Text, Reasoning, Arguments = (partial(Event, kind) for kind in ("text", "reasoning", "call"))

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "read",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}},
            },
        },
    },
)
READ = ("read", {"path": "a b.py", "limit": 3})
TWICE = [READ, ("read", {"path": "c"})]

# What a model writes between, and with, the marks of each format; and the calls that these are.
SAMPLES = {
    "json_tools": (
        '<tool_call>\n{"name": "read", "arguments": {"path": "a b.py", "limit": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "read", "arguments": {"path": "c"}}\n</tool_call>',
        TWICE,
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=read>\n<parameter=path>\na b.py\n</parameter>\n"
        "<parameter=limit>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=read>\n<parameter=path>\nc\n</parameter>\n</function>\n</tool_call>",
        TWICE,
    ),
    "glm47": (
        "<tool_call>read<arg_key>path</arg_key><arg_value>a b.py</arg_value>"
        "<arg_key>limit</arg_key><arg_value>3</arg_value></tool_call>",
        [READ],
    ),
    "laguna": (
        "<tool_call>read<arg_key>path</arg_key><arg_value>a b.py</arg_value>"
        "<arg_key>limit</arg_key><arg_value>3</arg_value></tool_call>",
        [READ],
    ),
    "longcat": (
        "<longcat_tool_call>read<longcat_arg_key>path</longcat_arg_key>"
        "<longcat_arg_value>a b.py</longcat_arg_value><longcat_arg_key>limit</longcat_arg_key>"
        "<longcat_arg_value>3</longcat_arg_value></longcat_tool_call>",
        [READ],
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.read:0"
        '<|tool_call_argument_begin|>{"path": "a b.py", "limit": 3}<|tool_call_end|>'
        '<|tool_call_begin|>functions.read:1<|tool_call_argument_begin|>{"path": "c"}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        TWICE,
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="read" index="1"<|sep|>'
        '<|open|>argument key="path" type="string"<|sep|>a b.py<|close|>argument<|sep|>'
        '<|open|>argument key="limit" type="number"<|sep|>3<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="read" index="2"<|sep|>'
        '<|open|>json type="object"<|sep|>{"path": "c"}<|close|>json<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        TWICE,
    ),
    "mistral": (
        '[TOOL_CALLS]read[ARGS]{"path": "a b.py", "limit": 3}read[ARGS]{"path": "c"}',
        TWICE,
    ),
    "function_gemma": (
        "<start_function_call>call:read{path:<escape>a b.py<escape>,limit:3}<end_function_call>",
        [READ],
    ),
    "gemma4": (
        '<|tool_call>call:read{path:<|"|>a b.py<|"|>,limit:3}<tool_call|>',
        [READ],
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="read">\n<parameter name="path">a b.py</parameter>\n'
        '<parameter name="limit">3</parameter>\n</invoke>\n<invoke name="read">\n'
        '<parameter name="path">c</parameter>\n</invoke>\n</minimax:tool_call>',
        TWICE,
    ),
    "minicpm5": (
        '<function name="read"><param name="path">a b.py</param><param name="limit">3</param>'
        '</function><function name="read"><param name="path">c</param></function>',
        TWICE,
    ),
    "muse_spark": (
        '<atem:function_calls><atem:invoke name="read"><atem:parameter name="path">a b.py'
        '</atem:parameter><atem:parameter name="limit">3</atem:parameter></atem:invoke>'
        '<atem:invoke name="read"><atem:parameter name="path">c</atem:parameter></atem:invoke>'
        "</atem:function_calls>",
        TWICE,
    ),
    "pythonic": (
        '<|tool_call_start|>[read(path="a b.py", limit=3), read(path="c")]<|tool_call_end|>',
        TWICE,
    ),
}  # fmt: skip


# Those of this mlx-lm; each has a sample.
FORMATS = sorted(each.name for each in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__))


def tool_format(name: str) -> ToolFormat:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    return ToolFormat(name, module.tool_call_start, module.tool_call_end, module.parse_tool_call)


def answer_format(name: str = "json_tools", **changes) -> AnswerFormat:
    whole = AnswerFormat(
        ReasoningMarks("<think>", "</think>"),
        tools=TOOLS,
        tool_format=tool_format(name),
        hidden=("<|end|>",),
    )
    return replace(whole, **changes)


def ended(finish_reason: str) -> CompletionOutput:
    return CompletionOutput(0, finish_reason=finish_reason)


def events_of(form: AnswerFormat, pieces: list[str], finish_reason: str = "stop") -> list[Event]:
    reader = AnswerReader(form)
    events = [event for piece in pieces for event in reader.add(piece)]
    events = merged(events + reader.finish(ended(finish_reason)))
    assert reader.num_tool_calls == sum(event.call is not None for event in events)
    # Ids are drawn.
    return [event._replace(call=event.call and replace(event.call, call_id="")) for event in events]


def merged(events: list[Event]) -> list[Event]:
    """The same events, with neighbours of one kind in one piece; a call begins a piece."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if last and last.kind == event.kind and event.call is last.call is None:
            result[-1] = event._replace(text=last.text + event.text)
        else:
            result.append(event)
    return result


def cut(text: str, places: set[int]) -> list[str]:
    edges = [0, *sorted(place for place in places if place < len(text)), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(edges)]


def calls_of(reading: Reading) -> list[tuple[str, dict]]:
    return [(name, json.loads(arguments)) for name, arguments in reading.calls]


def test_there_is_a_sample_of_every_format():
    assert set(FORMATS) <= set(SAMPLES)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_however_it_is_cut(name):
    sample, calls = SAMPLES[name]
    text = f"<think>\nIt is there.\n</think>\n\nI look.\n{sample}"
    form = answer_format(name)
    whole = events_of(form, [text])
    assert whole[:2] == [Reasoning("It is there."), Text("I look.")]
    assert calls_of(read_answer(form, text)) == calls
    assert [event.call.index for event in whole if event.call] == list(range(len(calls)))
    assert events_of(form, list(text)) == whole
    for place in range(len(text)):
        assert events_of(form, cut(text, {place})) == whole


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_broken_off_is_never_a_call_of_something_else(name):
    sample, calls = SAMPLES[name]
    form = answer_format(name)
    for length in range(len(form.tool_format.start), len(sample)):
        reading = read_answer(form, sample[:length], ended("length"))
        whole = []
        for called, arguments in reading.calls:
            try:
                whole.append((called, json.loads(arguments)))
            except ValueError:  # of the format whose arguments come as they are written
                assert (name, arguments) == ("json_tools", reading.calls[-1][1])
        assert whole == calls[: len(whole)]
        assert whole or reading.calls or reading.text == sample[:length]


def test_without_tools_a_call_is_text_and_without_marks_everything_is():
    sample = f" {SAMPLES['json_tools'][0]} "
    assert events_of(answer_format(tools=(), tool_format=None), [sample]) == [Text(sample)]
    text = " <think>a</think> <|end|> "
    assert events_of(AnswerFormat(), list(text)) == [Text(text)]


@pytest.mark.parametrize(
    ("text", "is_thinking", "events"),
    [
        ("<think>\n\n</think>\n\nHello!\n", False, [Text("Hello!\n")]),
        ("so\n</think>\n\n    indented", True, [Reasoning("so"), Text("    indented")]),
        ("never closed \n", True, [Reasoning("never closed")]),
        ("a <think> in the text", False, [Text("a <think> in the text")]),
        (" a</think> b ", False, [Text(" a</think> b ")]),
        ("<think>a<|end|>b</think>c <|end|>d<|end|>", False, [Reasoning("ab"), Text("c d")]),
        ("<think><tool_call>no call</tool_call>", False,
         [Reasoning("<tool_call>no call</tool_call>")]),
        ('<think>a<tool_call>{"name": "read", "arguments": {}}</tool_call>b</think>c', False,
         [Reasoning("a"), Event("call", call=ToolCall(0, "", "read")), Arguments("{}"),
          Reasoning("b"), Text("c")]),
    ],
)  # fmt: skip
def test_reasoning(text, is_thinking, events):
    form = answer_format(is_thinking=is_thinking)
    assert events_of(form, [text]) == events
    assert events_of(form, list(text)) == events


CALL = '<tool_call>{"name": "read", "arguments": %s}</tool_call>'


@pytest.mark.parametrize(
    ("text", "reading"),
    [
        # Around and between calls.
        ("a " + CALL % "{}" + " b " + CALL % "{}" + "\n", ("ab", ["{}", "{}"])),
        # Other ways to write JSON.
        ('<tool_call>{"arguments": {"a": 1}, "name": "read"}</tool_call>', ("", ['{"a": 1}'])),
        ('<tool_call>{"name": "read"}</tool_call>', ("", ["{}"])),
        ('<tool_call>{"name": "read", "arguments": "{\\"a\\": 1}"}</tool_call>',
         ("", ['{"a": 1}'])),
        ('<tool_call>[{"name": "read", "arguments": {}}, {"name": "read", "arguments": {}}]'
         "</tool_call>", ("", ["{}", "{}"])),
        ('<tool_call>{"name": "read", "arguments": {"a": 1}, "id": "x"}\n'
         '{"name": "read", "parameters": {}}</tool_call>', ("", ['{"a": 1}', "{}"])),
        # Within strings nothing is a mark.
        (CALL % '{"a": "</tool_call>\\"}"}', ("", ['{"a": "</tool_call>\\"}"}'])),
        # What is put right.
        (CALL % '{"a": "x\ny\\d", "b": [True, None,],}', ("", ['{"a": "x\\ny\\\\d", '
                                                               '"b": [true, null]}'])),
        ('<tool_call>{"name": "read", "arguments": {"a": [1</tool_call>b', ("b", ['{"a": [1]}'])),
        ('<tool_call>{"name": "read", "arguments": {"a": {}', ("", ['{"a": {}}'])),
        # What is not: it comes as it is.
        (CALL % "{'a': 1}" + "b", ("b", ["{'a': 1}}"])),
        ("<tool_call>nothing</tool_call>b", ("<tool_call>nothing</tool_call>b", [])),
        ("<tool_call></tool_call>", ("<tool_call></tool_call>", [])),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>',
         ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', [])),
        ('<tool_call>{"name": "read", "arguments": [1]}</tool_call>',
         ('<tool_call>{"name": "read", "arguments": [1]}</tool_call>', [])),
    ],
)  # fmt: skip
def test_calls_in_json(text, reading):
    form = answer_format()
    said, arguments = reading
    expected = Reading("", said, tuple(("read", each) for each in arguments))
    assert read_answer(form, text) == expected
    whole = events_of(form, [text])
    for place in range(len(text)):
        assert events_of(form, cut(text, {place, place + 1})) == whole


def test_arguments_in_json_come_as_they_are_written_and_the_name_before_them():
    reader = AnswerReader(answer_format())
    text = CALL % '{"path": "src/main.py"}'
    num_told = [
        sum(event.kind == "call" and not event.call for event in reader.add(character))
        for character in text
    ]
    assert sum(num_told) >= len('{"path": "src/main.py"}') - 1


def test_an_unknown_tool_is_called_and_the_log_says_so_without_a_word_of_the_answer(caplog):
    reading = read_answer(answer_format(), '<tool_call>{"name": "secret"}</tool_call>')
    assert reading.calls == (("secret", "{}"),)
    read_answer(answer_format(), "<tool_call>secret</tool_call>")
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "secret" not in caplog.text


def test_no_more_calls_than_may_be():
    text = SAMPLES["kimi_k2"][0]
    assert calls_of(read_answer(answer_format("kimi_k2", max_calls=1), text)) == [READ]
    text = SAMPLES["json_tools"][0] + "b"
    assert read_answer(answer_format(max_calls=1), text).text == "b"


def test_an_answer_may_be_a_list_of_calls():
    form = answer_format(tool_format=JSON_LIST, is_calls=True)
    calls = '[{"name": "read", "arguments": {"a": "<think>"}}, {"name": "read", "arguments": {}}]'
    text = f"<think>so</think>\n\n{calls}"
    whole = events_of(form, [text])
    assert [(event.kind, event.call is not None) for event in whole] == [
        ("reasoning", False), ("call", True), ("call", False), ("call", True), ("call", False),
    ]  # fmt: skip
    assert events_of(form, list(text)) == whole
    assert events_of(form, list(calls)) == whole[1:]


def test_a_response_format_of_the_tokenizers_own_is_read():
    # Muse Spark's messages have headers, which say for whom they are.
    template = pytest.importorskip(
        "mlx_lm.chat_templates.muse_spark", reason="this mlx-lm has no response formats"
    )
    transitions = template.RESPONSE_FORMAT["transitions"]
    form = AnswerFormat(
        tools=TOOLS,
        tool_format=tool_format("muse_spark"),
        hidden=("<|eot|>",),
        marks=tuple((state, tuple(edges)) for state, edges in transitions.items()),
        initial_state=template.RESPONSE_FORMAT["initial_state"],
    )
    sample, calls = SAMPLES["muse_spark"]
    text = (
        "to=self<|message|>It is there.<|eom|><|header|>to=user<|message|>I look.<|eom|>"
        f"<|header|>to=tools{sample}<|eot|>"
    )
    whole = events_of(form, [text])
    assert whole[:2] == [Reasoning("It is there."), Text("I look.")]
    assert calls_of(read_answer(form, text)) == calls
    assert events_of(form, list(text)) == whole


MARKS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|end|>", "\n", " ", "<", "\\", '"',
    '{"name": "read", "arguments": ', '{"a": ', "1", "true", "[", "]", "{", "}", ",", "é",
]  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from(MARKS), max_size=25).map("".join),
    st.sets(st.integers(0, 200)),
    st.booleans(),
    st.sampled_from(["stop", "length"]),
)
@example('<tool_call>{"name": "read", "arguments": {"a": 1<', set(), False, "stop")
def test_the_events_of_any_answer_are_the_same_however_it_is_cut(
    text, places, is_thinking, finish_reason
):
    form = answer_format(is_thinking=is_thinking)
    whole = events_of(form, [text], finish_reason)
    assert events_of(form, cut(text, places), finish_reason) == whole
    assert events_of(form, list(text), finish_reason) == whole


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(
    st.dictionaries(st.text(), JSON, max_size=4),
    st.booleans(),
    st.sampled_from([None, 2]),
    st.sets(st.integers(0, 300)),
    st.text(max_size=3),
)
def test_any_object_is_given_on_as_it_is_written(value, is_ascii, indent, places, behind):
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    scanner = ArgumentsScanner()
    told = ""
    pieces = cut(text + behind, places)
    while pieces and not scanner.is_done:
        told += scanner.add(pieces.pop(0))
    assert told == text
    assert scanner.rest + "".join(pieces) == behind


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.text(), JSON, max_size=4), st.integers(0, 400))
def test_an_object_that_lacks_brackets_is_closed_and_one_that_lacks_more_is_not(value, length):
    text = json.dumps(value)[:length]
    scanner = ArgumentsScanner()
    told = scanner.add(text)
    closing = scanner.close()
    assert value == {} or closing is None or told + closing
    if closing is not None:
        json.loads(told + closing)
