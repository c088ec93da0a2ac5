"""The dialect of a model is found by mlx-lm's parser, its chat template, or its vocabulary."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged import demo_model_path, load
from mlx_paged.answers.dialect import AnswerFormat, Dialect
from mlx_paged.answers.reader import read_answer


def tokenizer_of(template: str = "", tokens: tuple[str, ...] = (), **wrapped: Any) -> Any:
    inner = load(demo_model_path())[1]._tokenizer
    inner.chat_template = template or None
    inner.add_tokens(list(tokens), special_tokens=True)
    return TokenizerWrapper(inner, **wrapped)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<minimax:tool_call>", "minimax_m2"),
        ("<|tool_call> <tool_call|>", "gemma4"),
        ("<tool_call><arg_key>", "glm47"),
        ("<tool_call>\n<function=", "qwen3_coder"),
        ("<tool_call>", "json_tools"),
        ("[TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜> ```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v3_1"),
        ("<｜DSML｜function_calls>", "deepseek_v3_2"),
        ("<｜DSML｜tool_calls>", "deepseek_v4"),
        ("<｜DSML｜ calls>", "deepseek_v4_1"),
        ("<|tool_call|> <|/tool_call|>", "phi4"),
        ("<|tool_call|>", "granite"),
        ("Hello", None),
    ],
)
def test_the_chat_template_names_the_format(template, name):
    calls = Dialect.of(tokenizer_of(template)).calls
    assert (calls and calls.name) == name


@pytest.mark.parametrize(
    ("tokens", "name", "reasoning"),
    [
        (("<|channel|>", "<|message|>", "<|call|>", "<|return|>"), "harmony",
         "<|channel|>analysis<|message|>"),
        (("<|python_tag|>",), "llama3", None),
        (("<|python_start|>", "<|python_end|>"), "llama4", None),
        (("<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>"),
         "command", "<|START_THINKING|>"),
        (("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"), "mistral", "[THINK]"),
        (("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"), "kimi_k3",
         "<|open|>think<|sep|>"),
        (("<think>", "</think>"), None, "<think>"),
        ((), None, None),
    ],
)  # fmt: skip
def test_the_vocabulary_names_the_format(tokens, name, reasoning):
    dialect = Dialect.of(tokenizer_of(tokens=tokens))
    assert (dialect.calls and dialect.calls.name) == name
    assert (dialect.reasoning and dialect.reasoning.start) == reasoning
    # Each token is a mark, and only those.
    assert dialect.marks.token_ids.keys() == set(tokens)


def test_the_parser_that_mlx_lm_has_found_names_the_format():
    parser = importlib.import_module("mlx_lm.tool_parsers.longcat")
    marks = {"tool_call_start": parser.tool_call_start, "tool_call_end": parser.tool_call_end}
    found = tokenizer_of("<tool_call>", tool_parser=parser.parse_tool_call, **marks)
    assert Dialect.of(found).calls.name == "longcat"


def test_the_prompt_opens_or_closes_reasoning():
    tokenizer = tokenizer_of(tokens=("<think>", "</think>"))
    for prompt, is_thinking in (("Hi<think>\n", True), ("Hi<think>\n\n</think>\n", False)):
        assert AnswerFormat.of(tokenizer, prompt).is_thinking is is_thinking
    dialect = Dialect.of(tokenizer)
    assert dialect.without_empty_pair("Hi<think>\n\n</think>\n\n") == "Hi"
    assert dialect.without_empty_pair("Hi<think>\na</think>") is None


def test_a_family_may_begin_its_answers_in_reasoning():
    """MiniMax M2's mark that closes reasoning comes alone, whatever the prompt ends with."""
    marks = ("<think>", "</think>")
    template = "<minimax:tool_call>{{ tools }}"
    tokenizer = tokenizer_of(template, tokens=marks)
    answer_format = AnswerFormat.of(tokenizer, "Hi")
    text = answer_format.marks.encode("It asks.</think>\n\nHello!")
    assert read_answer(answer_format, text)[:2] == ("It asks.", "Hello!")
    assert not AnswerFormat.of(tokenizer, "Hi<think></think>").is_thinking
    assert not AnswerFormat.of(tokenizer_of(tokens=marks), "Hi").is_thinking


def test_marks_that_a_template_alone_knows_are_text():
    dialect = Dialect.of(tokenizer_of("<think>{{ reasoning }}</think>"))
    assert dialect.reasoning is not None and dialect.marks.token_ids == {}
