"""Messages become the text of a prompt, or one clear line that says what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_paged import demo_model_path, load
from mlx_paged.answers.chat_template import (
    encode_chat,
    normalise_messages,
    render_chat,
)
from mlx_paged.errors import ChatTemplateError

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def tokenizer() -> Any:
    return load(demo_model_path())[1]


def test_a_conversation_is_written_by_the_template_and_its_tokens_are_those_of_the_text(tokenizer):
    text = render_chat(tokenizer, HELLO, {})
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert encode_chat(tokenizer, HELLO, {}) == (
        text,
        tokenizer.encode(text, add_special_tokens=False),
    )
    assert (
        render_chat(tokenizer, HELLO, {"add_generation_prompt": False})
        == "<|im_start|>user\nhello<|im_end|>\n"
    )


def test_options_reach_the_template(tokenizer):
    tokenizer.chat_template = "{{ messages[0].content }} {{ mood }}"
    assert render_chat(tokenizer, HELLO, {"mood": "calm"}) == "hello calm"


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{{ raise_exception('only\nusers') }}", "refuses the messages: only users"),
        ("{{ messages[0].content + 1 }}", "fails: TypeError: "),
        ("{{ nothing.at_all.there }}", "fails: UndefinedError: "),
        ("{{ 1 // 0 }}", "fails: ZeroDivisionError: "),
        ("{% for m in messages %}", "fails: TemplateSyntaxError: "),
        ("{{ messages.append(1) }}", "fails: SecurityError: "),
    ],
)
def test_a_template_that_raises_is_one_clear_line(tokenizer, template: str, line: str):
    tokenizer.chat_template = template
    with pytest.raises(ChatTemplateError) as raised:
        render_chat(tokenizer, HELLO, {})
    assert str(raised.value).startswith(f"[chat template] the model's chat template {line}")
    assert "\n" not in str(raised.value)


def test_the_message_of_a_template_is_cut_to_a_line_that_can_be_read(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no ' * 1000) }}"
    with pytest.raises(ChatTemplateError) as raised:
        render_chat(tokenizer, HELLO, {})
    assert str(raised.value).endswith("...") and len(str(raised.value)) < 400


def test_a_tokenizer_without_a_template_is_refused(tokenizer):
    tokenizer.has_chat_template = False
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        render_chat(tokenizer, HELLO, {})


def test_text_parts_are_joined_and_other_keys_are_left_alone():
    parts = ["a", {"type": "text", "text": "b"}, {"type": "text", "text": "c\n"}]
    messages = [{"role": "user", "content": parts, "name": "Tom"}, {"role": "user", "content": ""}]
    assert normalise_messages(messages) == [
        {"role": "user", "content": "abc\n", "name": "Tom"},
        {"role": "user", "content": ""},
    ]
    assert messages[0]["content"] is parts


def test_content_may_be_missing_only_where_there_are_tool_calls():
    calls = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
    for message in (
        {"role": "assistant", "tool_calls": calls},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ):
        assert normalise_messages([message]) == [
            {"role": "assistant", "content": "", "tool_calls": calls}
        ]


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        ([], "[chat] messages is empty; give at least one message"),
        ("hello", "[chat] messages must be a list of messages, got str"),
        (HELLO[0], "[chat] messages must be a list of messages, got dict"),
        (None, "[chat] messages must be a list of messages, got NoneType"),
        (["hello"], "[chat] messages[0] must be a mapping with a role and a content, got str"),
        (
            [{"content": "x"}],
            "[chat] the role of messages[0] must be a text such as 'user', got None",
        ),
        (
            [{"role": 3, "content": "x"}],
            "[chat] the role of messages[0] must be a text such as 'user', got 3",
        ),
        ([*HELLO, {"role": "user"}], "[chat] messages[1] has no content"),
        (
            [{"role": "user", "content": None}],
            "[chat] the content of messages[0] must be a text or a list of text parts, got None",
        ),
        (
            [{"role": "user", "content": 7}],
            "[chat] the content of messages[0] must be a text or a list of text parts, got 7",
        ),
        (
            [{"role": "user", "content": b"hi"}],
            "[chat] the content of messages[0] must be a text or a list of text parts, got b'hi'",
        ),
        (
            [{"role": "user", "content": ["a", {"type": "image_url", "image_url": {"url": "x"}}]}],
            "[chat] part 1 of messages[0] is of type 'image_url'; only parts of type 'text' are "
            "supported",
        ),
        (
            [{"role": "user", "content": [1]}],
            "[chat] part 0 of messages[0] must be a text part, got 1",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": None}]}],
            "[chat] the text of part 0 of messages[0] must be a text, got None",
        ),
        (
            [{"role": "user", "content": "a\udcff"}],
            "[chat] the content of messages[0] has a lone surrogate at character 1, which is not "
            "text",
        ),
    ],
)
def test_what_is_no_message_is_refused_by_name(messages: Any, line: str):
    with pytest.raises(ChatTemplateError) as raised:
        normalise_messages(messages)
    assert str(raised.value) == line
