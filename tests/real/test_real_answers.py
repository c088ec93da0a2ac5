"""Answers in the tokens of real vocabularies, in which marks are control tokens."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from paged_testing.registry_files import require

from mlx_paged.answers.dialect import AnswerFormat, Dialect
from mlx_paged.answers.reader import read_answer
from mlx_paged.answers.tokens import TokenPlaces
from mlx_paged.engine.input_processor import special_token_ids
from mlx_paged.engine.text_stream import token_texts_of
from mlx_paged.loading.tokenizer import read_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
BIG = 1234567890123456789
QWEN_CALL = '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>'
HARMONY_CALL = (
    "<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant<|channel|>commentary "
    "to=functions.get_weather <|constrain|>json<|message|>%s<|call|>"
)
DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    "```json\n%s\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)


class Case(NamedTuple):
    answer: str
    reasoning: str = ""
    text: str = ""
    arguments: str | None = None
    prompt: str = ""


# By the tokenizer, with the name of its format; reading a vocabulary takes longer than all of them.
CASES = {
    ("qwen3", "json_tools"): [
        Case(
            "<think>\nI may use <tool_call> later\n</think>\n\nIt is sunny.",
            "I may use <tool_call> later",
            "It is sunny.",
        ),
        Case(
            "<think>\nhm\n</think>\n\nOne moment.\n"
            + QWEN_CALL % f'{{"city": "Par<tool_call>is", "days": {BIG}}}',
            "hm",
            "One moment.",
            f'{{"city": "Par<tool_call>is", "days": {BIG}}}',
        ),
        Case(f"```\n{QWEN_CALL % '{}'}\n```", text=f"```\n{QWEN_CALL % '{}'}\n```"),
    ],
    ("gptoss", "harmony"): [
        Case(
            HARMONY_CALL % '{"city": "Paris", "days": 3}',
            "I need it.",
            arguments='{"city": "Paris", "days": 3}',
            prompt="<|start|>assistant",
        ),
        Case(
            "<|channel|>final<|message|>It is <|weird|> sunny.<|return|>",
            text="It is <|weird|> sunny.",
            prompt="<|start|>assistant",
        ),
    ],
    ("deepseek_v3", "deepseek_v3"): [
        Case(
            "Let me see." + DEEPSEEK_CALL % '{"city": "Paris"}',
            text="Let me see.",
            arguments='{"city": "Paris"}',
        ),
    ],
}


@pytest.mark.parametrize(("name", "calls"), CASES)
def test_the_format_of_a_real_tokenizer_is_found_and_answers_in_its_tokens_are_read(name, calls):
    tokenizer = read_tokenizer(require(name), None, None)
    found = Dialect.of(tokenizer).calls
    assert found is not None and found.name == calls
    for case in CASES[name, calls]:
        form = AnswerFormat.of(tokenizer, case.prompt, TOOLS)
        detokenizer = token_texts_of(tokenizer).detokenizer()
        places = TokenPlaces(form.marks.characters, detokenizer, special_token_ids(tokenizer))
        token_ids = tokenizer.encode(case.answer, add_special_tokens=False)
        text = "".join(map(places.add, token_ids)) + detokenizer.finish()
        arguments = () if case.arguments is None else (("get_weather", case.arguments),)
        assert tuple(read_answer(form, text)) == (case.reasoning, case.text, arguments)
