"""Reasoning, text and calls are told apart: where marks begin and end, however an answer is cut."""

from __future__ import annotations

import importlib
import itertools
import json
import pkgutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx_lm.tool_parsers
import pytest
from helpers.call_writers import TOKENS, WRITERS
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_paged.answers import code_spans, cursor
from mlx_paged.answers import reader as reader_module
from mlx_paged.answers.dialect import PLAIN, AnswerFormat, Dialect
from mlx_paged.answers.events import Event, ToolCall
from mlx_paged.answers.formats import JSON_LIST, REASONING, format_named
from mlx_paged.answers.reader import AnswerReader, Reading, read_answer
from mlx_paged.request import CompletionOutput

Text, Reasoning = (partial(Event, kind) for kind in ("text", "reasoning"))
PATH = {"type": "object", "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}}}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": PATH}}
    for name in ("read", "list")
)
IDS = {text: (index, False) for index, text in enumerate(TOKENS)}
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
CODER = "<tool_call>\n<function=read>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>"
READ = ("read", {"path": "a"})


def form(
    name: str = "json_tools", start: str = "<think>", *, has_tokens: bool = True, **more: Any
) -> AnswerFormat:
    reasoning = next((each for each in REASONING if each.start == start), None)
    dialect = Dialect.of_tokens(format_named(name), reasoning, IDS if has_tokens else {})
    return replace(AnswerFormat.for_prompt(dialect, "", TOOLS), **more)


def ended(finish_reason: str = "stop") -> CompletionOutput:
    return CompletionOutput(0, finish_reason=finish_reason)


def events_of(answer_format: AnswerFormat, pieces: list[str], reason: str = "stop") -> list[Event]:
    """The events, with neighbours of one kind in one piece and no ids, which are drawn."""
    reader = AnswerReader(answer_format)
    events = [event for piece in pieces for event in reader.add(piece)]
    result: list[Event] = []
    for event in events + reader.finish(ended(reason)):
        last = result[-1] if result else None
        if last is not None and last.kind == event.kind != "call":
            result[-1] = event._replace(text=last.text + event.text)
        else:
            result.append(event._replace(call=event.call and replace(event.call, call_id="")))
    assert reader.num_tool_calls >= sum(event.kind == "call" for event in result)
    return result


def cut(text: str, places: set[int]) -> list[str]:
    edges = [0, *sorted(place for place in places if place < len(text)), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(edges)]


def said(
    answer_format: AnswerFormat, text: str, reason: str = "stop"
) -> tuple[str, str, list[Any]]:
    """What an answer says, which is the same for every cut in two and for single characters. Marks
    of the format in the text are its control tokens, if it has some.
    """
    text = answer_format.marks.encode(text)
    whole = events_of(answer_format, [text], reason)
    assert events_of(answer_format, list(text), reason) == whole
    for place in range(len(text)):
        assert events_of(answer_format, cut(text, {place}), reason) == whole
    reading = read_answer(answer_format, text, ended(reason))
    calls = [(name, json.loads(arguments)) for name, arguments in reading.calls]
    return reading.reasoning, reading.text, calls


def test_the_table_has_every_format_that_mlx_lm_reads():
    names = {each.name for each in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)}
    for name in names:
        module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
        found = format_named(name)
        assert found is not None, name
        assert found.start in ("", module.tool_call_start) and found.end in (
            "",
            module.tool_call_end,
        )


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_call_that_is_broken_off_is_neither_a_call_nor_text(writer, has_tokens):
    name = writer.partition(",")[0]
    calls = [("read", {"path": "a b.py", "limit": 3}), ("list", {"path": "</think>"})]
    start = "<|channel|>analysis<|message|>" if name == "harmony" else "<think>"
    answer_format = form(name, start, has_tokens=has_tokens)
    text = answer_format.marks.encode(WRITERS[writer](calls))
    begin = len(answer_format.marks.encode(format_named(name).start))
    seen = set()
    for length in range(max(begin, 12), len(text)):
        reading = read_answer(answer_format, text[:length], ended("length"))
        found = [(name, json.loads(arguments)) for name, arguments in reading.calls]
        assert found == calls[: len(found)]
        seen.add(len(found))
        if has_tokens:
            assert (reading.text, reading.reasoning) == ("", ""), text[:length]
    assert min(seen) == 0


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("json_tools", "I look.\n<tool_c", "I look."),
        ("json_tools", "a <", "a <"),
        ("json_tools", "a <b", "a <b"),
        ("qwen3_coder", "I look.\n<function", "I look."),
        ("deepseek_v3_2", "I look.\n\n<｜DSML｜func", "I look."),
        ("llama3", '{"type": "circle", "radius": 1', '{"type": "circle", "radius": 1'),
        ("llama3", '{"name": "Bob", "age', '{"name": "Bob", "age'),
        ("llama4", "[see", "[see"),
    ],
)
def test_half_a_mark_at_the_end_of_a_truncated_answer_is_no_text(name, text, expected):
    has_tokens = name not in ("json_tools", "qwen3_coder")
    answer_format = form(name, has_tokens=has_tokens)
    reading = read_answer(answer_format, answer_format.marks.encode(text), ended("length"))
    assert (reading.text.rstrip("\n"), reading.calls) == (expected, ())
    assert read_answer(answer_format, answer_format.marks.encode(text)).text == text


def test_without_tools_a_call_is_text_and_without_marks_everything_is():
    sample = f" {CALL} "
    plain = AnswerFormat(form().dialect)
    assert said(plain, sample) == ("", sample, [])
    hidden = AnswerFormat(replace(form().dialect, special=frozenset(TOKENS)))
    assert said(hidden, "a<tool_call>b") == ("", "ab", [])
    assert said(replace(hidden, hides_special=False), "a<tool_call>b")[1] == "a<tool_call>b"
    text = " <think>a</think> <|end|> "
    assert events_of(PLAIN, list(text)) == [Text(text)]


@pytest.mark.parametrize(
    ("text", "is_thinking", "expected"),
    [
        ("<think>\n\n</think>\n\nHello!\n", False, ("", "Hello!\n")),
        ("so\n</think>\n\n    indented", True, ("so", "    indented")),
        ("never closed \n", True, ("never closed", "")),
        ("<think>a</think>b<think>c</think>d", False, ("ac", "bd")),
        ("<think>a</think>\n<think>b</think>\nc", False, ("ab", "c")),
        ("<think>so</think>a", True, ("so", "a")),  # opened by the prompt and again
        ("a `<think>` tag, a `</think>` tag", False, ("", "a `<think>` tag, a `</think>` tag")),
        ("Hello</think> world", False, ("", "Hello world")),
        ("<think>I may use <tool_call> later</think>It is sunny.", False,
         ("I may use <tool_call> later", "It is sunny.")),
        ("<think><tool_call>no call</tool_call>", False, ("<tool_call>no call</tool_call>", "")),
    ],
)  # fmt: skip
def test_reasoning(text, is_thinking, expected):
    assert said(form(is_thinking=is_thinking), text) == (*expected, [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think>b", ("a", "b")),
        ("a <think> in the text", ("", "a <think> in the text")),
        (" a</think> b ", ("", " a</think> b ")),
    ],
)
def test_reasoning_that_is_spelled_out_begins_the_answer(text, expected):
    assert said(form(has_tokens=False), text) == (*expected, [])
    # Where the vocabulary has the tokens, spelled out marks are text.
    assert events_of(form(), [text]) == events_of(form(), list(text)) == [Text(text)]


@pytest.mark.parametrize("call", [CALL, f"{CALL}\n{CALL}"])
def test_a_call_within_reasoning_counts_if_the_reasoning_never_closes(call):
    calls = [READ] * call.count("<tool_call>")
    assert said(form(), f"<think>I need it.\n{call}") == ("I need it.", "", calls)
    assert said(form(), f"<think>I need it.\n{call}", "length") == ("I need it.", "", calls)
    draft = f"Maybe {call} then."
    assert said(form(), f"<think>{draft}</think>It is sunny.") == (draft, "It is sunny.", [])
    assert said(form(), f"<think>{draft}</think>{CALL}") == (draft, "", [READ])
    # Broken off in the middle of a thought, it is no more than a draft.
    assert said(form(), f"<think>{draft} Or", "length")[2] == []
    assert said(form(), f"<think>x\n{call}\n<tool_call>\n{{", "length") == ("x", "", calls)


def test_a_draft_is_held_within_a_bound(monkeypatch):
    monkeypatch.setattr(code_spans, "MAX_HELD_CHARACTERS", 50)
    monkeypatch.setattr(cursor, "MAX_PIECE_CHARACTERS", 10)
    reader = AnswerReader(form())
    text = form().marks.encode(f"<think>{CALL} ") + "and so on " * 20
    told = "".join(event.text for piece in text for event in reader.add(piece))
    assert told.startswith(CALL) and len(told) > 200


def test_reasoning_that_ends_within_a_call_is_not_held_for_long(monkeypatch):
    monkeypatch.setattr(reader_module, "MAX_QUOTED_CHARACTERS", 40)
    monkeypatch.setattr(cursor, "MAX_PIECE_CHARACTERS", 10)
    text = '<think>so<tool_call>{"name": "read", "arguments": {"path": "a</think>It is sunny. '
    reader, marks = AnswerReader(form()), form().marks
    told = [event for piece in marks.encode(text) + "x" * 300 for event in reader.add(piece)]
    assert "".join(event.text for event in told if event.kind == "text").startswith("It is sunny.")
    half = '<tool_call>{"name": "read", "arguments": {"path": "a'
    assert said(form(), f"<think>so{half}</think>It is sunny.") == (f"so{half}", "It is sunny.", [])
    # An argument may quote the mark.
    call = ("read", {"path": "</think>"})
    assert said(form(), "<think>so" + WRITERS["json_tools"]([call])) == ("so", "", [call])


@pytest.mark.parametrize(
    "text",
    [
        f"You write `{CALL.replace(chr(10), '')}` for it.",
        f"Two ``{CALL}`` ticks.",
        f"So:\n```\n{CALL}\n```\nIs that clear?",
        f"~~~json\n{CALL}\n~~~",
        f'He wrote "{CALL}" twice.',
        f"“{CALL}”",
        "Use the <tool_call> and </tool_call> tags.",
        'A <tool_call>{"name"</tool_call> is none.',
        "<tool_call>not valid json</tool_call>",
        "<tool_call></tool_call>  x",
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "read", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "read", "arguments": {"a": [1</tool_call> b',
        "<tool_call>{'a': 1}</tool_call>",
        '<tool_call>{"name": "read"} is how it begins.',
        '  {"name": "read", "arguments": {"path": "a"}}\n',
    ],
)
def test_what_is_no_call_is_given_back_as_it_is(text):
    assert said(form(), text) == ("", text, [])
    assert said(form(has_tokens=False), text) == ("", text, [])


@pytest.mark.parametrize(
    ("text", "expected", "num_calls"),
    [
        (f"a {CALL} b {CALL}\n", "a  b", 2),
        (f"before{CALL}after", "beforeafter", 1),
        (f"I look.\n\n{CALL}\n\n{CALL}\n", "I look.", 2),
        (f"\n\n{CALL}\nand", "and", 1),
        (f"a `tick: {CALL}", "a `tick:", 1),  # never closed
        (f"`a` and `b`\n{CALL}", "`a` and `b`", 1),
        (f"```\nx\n```\n{CALL}", "```\nx\n```", 1),
        (f"It's {CALL}", "It's", 1),
    ],
)
def test_text_around_calls_keeps_its_white_space(text, expected, num_calls):
    assert said(form(), text) == ("", expected, [READ] * num_calls)
    assert said(form(has_tokens=False), text) == ("", expected, [READ] * num_calls)


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "read"}', [{"a": 1}]),
        ('{"name": "read"}', [{}]),
        ('{"name": "read", "arguments": null}', [{}]),
        ('{"name": "read", "arguments": "{\\"a\\": 1}"}', [{"a": 1}]),
        ('{"type": "function", "function": {"name": "read", "arguments": {}}}', [{}]),
        ('[{"name": "read", "arguments": {}}, {"name": "read", "arguments": {}}]', [{}, {}]),
        ('{"name": "read", "arguments": {"a": 1}, "id": "x"}\n{"name": "read", "parameters": {}}',
         [{"a": 1}, {}]),
        ('{"name": "read", "arguments": {"a": "</tool_call>\\"}"}}', [{"a": '</tool_call>"}'}]),
        ('{"name": "read", "arguments": {"a": "x\ny\\d", "b": [True, None,],}}',
         [{"a": "x\ny\\d", "b": [True, None]}]),
        ('{"name": "read", "arguments": {"a": NaN, "b": 007, "c": .5}}',
         [{"a": "NaN", "b": 7, "c": 0.5}]),
        ('{"name": "read", "arguments": {"a": 1, "a": 2}}', [{"a": 2}]),
        ("{\"name\": \"read\", \"arguments\": {'it\\'s': 'a \"b\"'}}", [{"it's": 'a "b"'}]),
        ('{"name": "read", "arguments": {"a": "\\u00e9\\ud83d\\ude00"}}', [{"a": "é😀"}]),
        ('{"name": "read", "arguments": {"a": 1}', [{"a": 1}]),  # the last brace is missing
        ('{"name": "read", "arguments": {"a": 1}}}', [{"a": 1}]),  # one too many
    ],
)  # fmt: skip
def test_calls_in_json_are_read_as_models_write_them(body, arguments):
    expected = [("read", each) for each in arguments]
    assert said(form(), f"<tool_call>\n{body}\n</tool_call>b") == ("", "b", expected)
    assert said(form(), f"<tool_call>{body}") == ("", "", expected)  # the model left out the mark


def test_integers_stay_exact_at_any_size():
    digits = "9" * 5000
    text = f'<tool_call>{{"name": "read", "arguments": {{"limit": {digits}}}}}</tool_call>'
    [(_, arguments)] = read_answer(form(), form().marks.encode(text)).calls
    assert arguments == f'{{"limit": {digits}}}'
    text = CODER.replace("=path", "=limit").replace("\na\n", f"\n{digits}\n")
    coder = form("qwen3_coder")
    [(_, arguments)] = read_answer(coder, coder.marks.encode(text)).calls
    assert arguments == f'{{"limit": {digits}}}'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (CODER, [READ]),
        (CODER.removeprefix("<tool_call>\n"), [READ]),
        (CODER.removesuffix("\n</tool_call>"), [READ]),
        (CODER.replace("read", "unknown"), None),
        ("<tool_call>\n<function=read> is how a call begins", None),
        ("Call <function=read> or <function=list>.", None),
        (CODER.replace("</parameter>\n", ""), [READ]),
        (CODER.replace("</parameter>\n", "<parameter=limit>\n3\n</parameter>\n"),
         [("read", {"path": "a", "limit": 3})]),
    ],
)  # fmt: skip
def test_calls_in_tags_have_the_name_of_a_tool(text, calls):
    expected = ("", text, []) if calls is None else ("", "", calls)
    assert said(form("qwen3_coder"), text) == expected
    assert said(form("qwen3_coder", has_tokens=False), text) == expected


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("llama3", '{"name": "read", "parameters": {"path": "a"}}', [READ]),
        ("llama3", 'So: {"name": "read", "parameters": {"path": "a"}}', None),
        ("llama3", '{"name": "read", "parameters": {"path": "a"}} calls it', None),
        ("llama3", '{"name": "Bob", "parameters": {}}', None),
        ("llama3", '{"name": "Bob", "age": 3', None),
        ("llama3", '{"name": "read", "parameters": {"path": "a"}}\n{"name": "read", '
         '"parameters": {"path": "a"}}', [READ, READ]),
        ("llama3", '{"type": "function", "name": "read", "parameters": {"path": "a"}}', [READ]),
        ("llama3", "<|python_tag|>print(1)", None),
        ("qwen3_coder", CALL, [READ]),
        ("glm47", CALL, [READ]),
        ("json_tools", CALL.replace('"', "'"), [READ]),
        ("phi4", "Use functools.partial, or functools[0].", None),
        ("llama4", "[read(path='a')]", [READ]),
        ("llama4", "[read(path='a')] calls it", None),
        ("llama4", "[1, 2]", None),
        ("llama4", "[see below](read)", None),
        ("pythonic", "<|tool_call_start|>[read('a', 3)]<|tool_call_end|>",
         [("read", {"path": "a", "limit": 3})]),
        ("pythonic", "<|tool_call_start|>[read(path=a b)]<|tool_call_end|>",
         [("read", {"path": "a b"})]),
        ("mistral", '[TOOL_CALLS]read[CALL_ID]a1B2c3D4e[ARGS]{"path": "a"}', [READ]),
        ("mistral", '[TOOL_CALLS]read{"path": "a"}', [READ]),
        ("mistral", '[TOOL_CALLS]read[ARGS]{"path": "a"}read[ARGS]{"path": "a"}', [READ, READ]),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>", []),
        ("glm47", "<tool_call>list</tool_call>", [("list", {})]),
        ("glm47", "<tool_call>tag</tool_call>", None),
        ("gemma4", "<|tool_call>call:read{path:a b}<tool_call|>", [("read", {"path": "a b"})]),
        ("gemma4", "<|tool_call>call:read now<tool_call|>", None),
        ("command", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "read", '
         '"parameters": {"path": "a"}}]<|END_ACTION|>', [READ]),
    ],
)  # fmt: skip
def test_heads_of_calls(name, text, calls):
    expected = ("", text, []) if calls is None else ("", "", calls)
    assert said(form(name), text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Hi ",
         ("So.", "Hi ", [])),
        ("<|channel|>final<|message|>", ("", "", [])),
        ("<|channel|>commentary to=functions.read <|constrain|>json<|message|>{\"path\": \"a\"}",
         ("", "", [READ])),
        ("<|channel|>commentary to=functions.read<|message|>oops<|call|>", ("", "oops", [])),
        ("<|channel|>commentary to=python<|message|>print(1)", ("", "", [])),
        ('<|channel|>commentary to=read<|message|>{"path": "a"}', ("", "", [READ])),
        ('<|channel|>final <|constrain|>json<|message|>{"a": 1}', ("", '{"a": 1}', [])),
        ("<|channel|>final {\"a\": 1}", ("", ' {"a": 1}', [])),
    ],
)  # fmt: skip
def test_messages_of_harmony(text, expected):
    answer_format = form("harmony", "<|channel|>analysis<|message|>")
    assert said(answer_format, text) == expected


def test_the_prompt_may_have_begun_a_message_of_harmonys():
    dialect = form("harmony", "<|channel|>analysis<|message|>").dialect
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>I"
    answer_format = AnswerFormat.for_prompt(dialect, prompt, TOOLS)
    assert said(answer_format, " am.") == ("", " am.", [])


def test_an_unknown_tool_is_called_and_the_log_says_so_without_a_word_of_the_answer(caplog):
    text = form().marks.encode('<tool_call>{"name": "secret"}</tool_call>')
    assert read_answer(form(), text).calls == (("secret", "{}"),)
    read_answer(form(), text.replace("name", "nothing"))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "secret" not in caplog.text


def test_no_more_calls_than_may_be():
    assert said(form(max_calls=1), f"{CALL}{CALL}b") == ("", "b", [READ])


def test_an_answer_may_be_a_list_of_calls():
    calls = '[{"name": "read", "arguments": {"a": "<think>"}}, {"name": "read", "arguments": {}}]'
    expected = [("read", {"a": "<think>"}), ("read", {})]
    assert said(form(calls=JSON_LIST), f"<think>so</think>\n\n{calls}") == ("so", "", expected)
    assert said(form(calls=JSON_LIST), calls) == ("", "", expected)


def test_a_response_format_of_the_tokenizers_own_is_read():
    # Muse Spark's messages have headers, which say for whom they are.
    template = pytest.importorskip(
        "mlx_lm.chat_templates.muse_spark", reason="this mlx-lm has no response formats"
    )
    transitions = template.RESPONSE_FORMAT["transitions"]
    dialect = Dialect.of_tokens(
        format_named("muse_spark"),
        None,
        {},
        transitions=tuple((state, tuple(edges)) for state, edges in transitions.items()),
        initial_state=template.RESPONSE_FORMAT["initial_state"],
    )
    call = WRITERS["muse_spark"]([READ])
    text = (
        "to=self<|message|>It is there.<|eom|><|header|>to=user<|message|>I look.<|eom|>"
        f"<|header|>to=tools{call}"
    )
    answer_format = AnswerFormat.for_prompt(dialect, "", TOOLS)
    assert said(answer_format, text) == ("It is there.", "I look.", [READ])


def test_events_come_as_soon_as_they_are_certain():
    reader, marks = AnswerReader(form()), form().marks
    assert reader.add("I look") == [Text("I look")]
    for character in marks.encode(f"\n{CALL}")[:-1]:
        assert reader.add(character) == []
        assert not reader.is_text or character == "\n"
    [event] = reader.add(marks.encode("</tool_call>"))
    assert event.call == ToolCall(0, event.call.call_id, "read")
    assert json.loads(event.text) == {"path": "a"} and reader.is_text


PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=read>", "</function>", "\n",
    "<parameter=path>", "</parameter>", " ", "<", "\\", '"', '{"name": "read", "arguments": ',
    '{"a": ', "1", "true", "[", "]", "{", "}", ",", "é", "`", "```\n", CALL, CODER, "read(",
    "call:", "<|channel|>final", "<|message|>", "<|end|>", "[TOOL_CALLS]", "[ARGS]", "<arg_key>",
]  # fmt: skip


@settings(deadline=None, max_examples=400)
@given(
    st.lists(st.tuples(st.sampled_from(PIECES), st.booleans()), max_size=25),
    st.sets(st.integers(0, 200)),
    st.booleans(),
    st.sampled_from(["stop", "length"]),
    st.sampled_from(
        ["json_tools", "qwen3_coder", "glm47", "mistral", "gemma4", "llama3", "llama4", "harmony"]
    ),
    st.booleans(),
)
@example([('<tool_call>{"name": "read", "arguments": {"a": 1<', False)], set(), False, "stop",
         "json_tools", False)  # fmt: skip
def test_any_answer_is_read_the_same_however_it_is_cut(
    parts, places, is_thinking, reason, name, has_tokens
):
    start = "<|channel|>analysis<|message|>" if name == "harmony" else "<think>"
    answer_format = form(name, start, has_tokens=has_tokens)
    answer_format = replace(answer_format, is_thinking=is_thinking and name != "harmony")
    marks = answer_format.marks
    text = "".join(marks.encode(part) if is_mark else part for part, is_mark in parts)
    whole = events_of(answer_format, [text], reason)
    assert events_of(answer_format, cut(text, places), reason) == whole
    assert events_of(answer_format, list(text), reason) == whole
    shown = "".join(event.text for event in whole)
    assert not any("\ud800" <= character <= "\udfff" for character in shown)


def test_a_reading_names_its_parts():
    reading = read_answer(form(), form().marks.encode(f"<think>a</think>b{CALL}"))
    assert reading == Reading("a", "b", (("read", '{"path": "a"}'),))
    assert events_of(form(), [form().marks.encode("<think>a</think>b")]) == [
        Reasoning("a"), Text("b"),
    ]  # fmt: skip


def test_harmony_is_read_as_openais_library_reads_it():
    """200 random answers, recorded by ``tests/golden/make_harmony_messages.py``."""
    path = Path(__file__).parent.parent / "golden" / "harmony.json"
    answer_format = form("harmony", "<|channel|>analysis<|message|>")
    cases = json.loads(path.read_text(encoding="utf-8"))
    assert len(cases) == 200
    for case in cases:
        expected: dict[str, Any] = {"reasoning": "", "text": "", "calls": []}
        for channel, recipient, content in case["messages"]:
            if (recipient or "").startswith("functions."):
                name = recipient.removeprefix("functions.")
                expected["calls"].append((name, json.loads(content)))
            else:
                expected["reasoning" if channel == "analysis" else "text"] += content
        pieces = [
            answer_format.marks.encode(text) if is_mark else text for text, is_mark in case["parts"]
        ]
        whole = read_answer(answer_format, "".join(pieces))
        calls = [(name, json.loads(arguments)) for name, arguments in whole.calls]
        assert (whole.reasoning, whole.text, calls) == tuple(expected.values()), case
        letters = events_of(answer_format, list("".join(pieces)))
        assert letters == events_of(answer_format, ["".join(pieces)])
