"""Conversations that come back begin with the tokens that were generated."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.agent_models import pieces_of

from mlx_paged.answers.conversation_encoder import ConversationEncoder
from mlx_paged.answers.dialect import AnswerFormat
from mlx_paged.answers.template_traits import KEEPS_REASONING
from mlx_paged.request import CompletionOutput
from mlx_paged.server.kept_answers import keep_answer
from mlx_paged.server.program import setup_arg_parser, template_options

QUESTION = {"role": "user", "content": "What is there?"}
AGAIN = {"role": "user", "content": "And else?"}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "Nothing."}


@pytest.fixture
def tokenizer(shared_agent_service):
    return shared_agent_service.tokenizer


class Conversation:
    """A conversation whose answers are dictated, as a server and a client have it."""

    def __init__(self, tokenizer, kept: ConversationEncoder, **options: Any):
        self.tokenizer = tokenizer
        self.kept = kept
        self.options = options
        self.messages: list[dict[str, Any]] = [QUESTION]

    def prompt(self, *more: dict[str, Any]):
        self.messages += more
        return self.kept.encode(self.tokenizer, self.messages, self.options)

    def answer(self, text: str, message: dict[str, Any], **completion: Any) -> list[int]:
        """Generate a text, of which the client sends back a message; returns all tokens."""
        prompt = self.prompt()
        # One character after another, as no tokenizer would encode it.
        tokens = [
            token
            for piece in pieces_of(text, 1)
            for token in self.tokenizer.encode(piece, add_special_tokens=False)
        ]
        answer_format = AnswerFormat.of(self.tokenizer, prompt.text, self.options.get("tools", ()))
        eos = self.tokenizer.eos_token_id
        whole = {"finish_reason": "stop", "token_ids": [*tokens, eos], **completion}
        completion = CompletionOutput(0, **whole)
        keep_answer(self.kept, self.tokenizer, prompt, answer_format, completion)
        self.messages.append({"role": "assistant", **message})
        return prompt.token_ids + tokens


def begins_with(prompt, tokens: list[int]) -> bool:
    return prompt.token_ids[: len(tokens)] == tokens


def plain(tokenizer, messages, **options) -> list[int]:
    """What the template makes of the messages, without anything that was kept."""
    return ConversationEncoder(0).encode(tokenizer, messages, options).token_ids


def tool_call(arguments: Any, name: str = "read") -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {}}}]
CALL = '<tool_call>\n{"name": "read", "arguments": %s}\n</tool_call>'


def test_a_text_comes_back_as_the_tokens_that_were_generated(tokenizer):
    chat = Conversation(tokenizer, ConversationEncoder())
    tokens = chat.answer("There is nothing.", {"content": "There is nothing."})
    prompt = chat.prompt(AGAIN)
    assert begins_with(prompt, tokens)
    assert tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == prompt.text
    assert prompt.token_ids != plain(tokenizer, chat.messages)
    # And so do the next turns, which go on from this one.
    tokens = chat.answer("No.", {"content": " No.\n"})
    assert begins_with(chat.prompt(AGAIN), tokens)


def test_reasoning_and_calls_come_back_as_they_were_generated(tokenizer):
    chat = Conversation(tokenizer, ConversationEncoder(), tools=TOOLS)
    arguments = '{"path":"a","limit":2.0, "b": "\\u00e9"}'
    text = f"<think>\nso\n</think>\n\nI look.\n{CALL % arguments}"
    # JavaScript writes 2.0 as 2.
    sent = {"path": "a", "limit": 2, "b": "é"}
    tokens = chat.answer(text, {"content": "I look.", "tool_calls": [tool_call(sent)]})
    prompt = chat.prompt(RESULT)
    assert begins_with(prompt, tokens)
    assert arguments in tokenizer.decode(prompt.token_ids)
    assert "<think>\nso\n</think>" in prompt.text


def test_answers_without_reasoning_come_back_behind_the_empty_marks_of_their_prompt(tokenizer):
    chat = Conversation(tokenizer, ConversationEncoder(), tools=TOOLS, enable_thinking=False)
    pair = tokenizer.encode("<think>\n\n</think>\n\n", add_special_tokens=False)
    for turn in range(3):
        sent = {"path": str(turn)}
        text = f"I look.\n{CALL % json.dumps(sent)}"
        tokens = chat.answer(text, {"content": "I look.", "tool_calls": [tool_call(sent)]})
        prompt = chat.prompt(RESULT)
        assert begins_with(prompt, tokens)
        # The template writes the marks before the next answer only; the tokens have all of them.
        assert prompt.text.count("<think>") == 1
        text = tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        assert text.count(tokenizer.decode(pair)) == turn + 2
    # With thinking on, what the model was asked is another prompt, of the same history.
    chat.options = {"tools": TOOLS}
    assert begins_with(chat.prompt(AGAIN), tokens)


def test_reasoning_that_the_template_leaves_out_is_left_out(tokenizer):
    chat = Conversation(tokenizer, ConversationEncoder(), tools=TOOLS)
    text = f"<think>\nso\n</think>\n\n{CALL % '{}'}"
    chat.answer(text, {"content": "", "tool_calls": [tool_call({})]})
    tokens = chat.answer("Nothing.", {"content": "Nothing."})
    chat.messages.insert(2, RESULT)
    prompt = chat.prompt(AGAIN)
    assert "so" not in prompt.text
    assert prompt.token_ids == plain(tokenizer, chat.messages, tools=TOOLS)
    assert not begins_with(prompt, tokens)


def test_a_template_that_keeps_reasoning_is_asked_to_by_a_flag(tokenizer):
    args = setup_arg_parser("x").parse_args(["--keep-reasoning"])
    chat = Conversation(tokenizer, ConversationEncoder(), tools=TOOLS, **template_options(args))
    text = f"<think>\nso\n</think>\n\n{CALL % '{}'}"
    chat.answer(text, {"content": "", "tool_calls": [tool_call({})]})
    chat.prompt(RESULT)
    tokens = chat.answer("<think>\nyes\n</think>\n\nNo.", {"content": "No."})
    assert begins_with(chat.prompt(AGAIN), tokens)
    # What is said of a variable counts more.
    said = ["--keep-reasoning", "--chat-template-args", '{"clear_thinking": true}']
    args = setup_arg_parser("x").parse_args(said)
    assert template_options(args) == {**KEEPS_REASONING, "clear_thinking": True}


@pytest.mark.parametrize(
    "message",
    [
        {"content": "There is something."},
        {"content": "There is nothing.", "reasoning_content": "other"},
        {"content": "There is nothing.", "tool_calls": [tool_call({})]},
    ],
)
def test_an_answer_that_comes_back_changed_is_what_the_client_says(tokenizer, message):
    chat = Conversation(tokenizer, ConversationEncoder())
    chat.answer("<think>\nso\n</think>\n\nThere is nothing.", message)
    prompt = chat.prompt(RESULT)
    assert prompt.token_ids == plain(tokenizer, chat.messages)


def test_an_answer_to_another_conversation_is_not_used(tokenizer):
    kept = ConversationEncoder()
    chat = Conversation(tokenizer, kept)
    chat.answer("<think>\nso\n</think>\n\nYes.", {"content": "Yes."})
    other = Conversation(tokenizer, kept)
    other.messages = [AGAIN, chat.messages[1], RESULT]
    assert "so" not in other.prompt().text
    # The same messages behind other tools: the reasoning is the same, the tokens begin elsewhere.
    chat.options = {"tools": TOOLS}
    prompt = chat.prompt(RESULT)
    assert "so" in prompt.text and prompt.before is None


@pytest.mark.parametrize(
    "completion",
    [
        {"finish_reason": "abort"},
        {"finish_reason": "error"},
        {"finish_reason": "stop", "stop_reason": "END"},
    ],
)
def test_an_answer_that_ended_otherwise_is_not_kept(tokenizer, completion):
    kept = ConversationEncoder()
    Conversation(tokenizer, kept).answer("There.", {"content": "There."}, **completion)
    assert len(kept) == 0


def test_an_answer_that_max_tokens_ended_goes_on_from_its_tokens(tokenizer):
    chat = Conversation(tokenizer, ConversationEncoder())
    tokens = tokenizer.encode("There is not", add_special_tokens=False)
    before = chat.prompt().token_ids
    chat.answer("", {"content": "There is not"}, finish_reason="length", token_ids=tokens)
    prompt = chat.prompt(AGAIN)
    assert begins_with(prompt, [*before, *tokens, tokenizer.eos_token_id])


def test_calls_that_were_left_out_do_not_come_back(tokenizer):
    chat = Conversation(tokenizer, ConversationEncoder(), tools=TOOLS)
    text = f"{CALL % '{}'}\n{CALL % json.dumps({'a': 1})}"
    chat.answer(text, {"content": "", "tool_calls": [tool_call({})]})
    assert chat.prompt(RESULT).token_ids == plain(tokenizer, chat.messages, tools=TOOLS)


def test_the_answers_that_nobody_came_back_to_go_first(tokenizer):
    kept = ConversationEncoder()
    chats = [Conversation(tokenizer, kept) for _ in range(3)]
    tokens = []
    for index, chat in enumerate(chats):
        chat.messages = [{"role": "user", "content": f"Question {index}"}]
        tokens.append(chat.answer(f"Answer {index}. " * 3, {"content": f"Answer {index}. " * 3}))
        chats[0].prompt()  # comes back
        kept.max_tokens = 2 * kept.num_tokens if index == 0 else kept.max_tokens
    assert len(kept) == 2
    pairs = zip(chats, tokens, strict=True)
    assert [begins_with(chat.prompt(AGAIN), each) for chat, each in pairs] == [True, False, True]


def test_a_conversation_holds_each_of_its_tokens_once(tokenizer):
    kept = ConversationEncoder()
    chat = Conversation(tokenizer, kept)
    for index in range(5):
        tokens = chat.answer(f"Answer {index}.", {"content": f"Answer {index}."})
        chat.prompt(AGAIN)
    assert kept.num_tokens == len(tokens)


def test_an_answer_that_ends_with_half_a_call_is_not_kept(tokenizer):
    for call, is_kept in ((CALL % '{"a": 1}', True), ((CALL % '{"a": 1}')[:-20], False)):
        chat = Conversation(tokenizer, ConversationEncoder(), tools=TOOLS)
        text = f"I look.\n{call}"
        calls = [tool_call({"a": 1})] if is_kept else []
        message = {"content": "I look.", "tool_calls": calls}
        tokens = chat.answer(text, message, finish_reason="length")
        assert begins_with(chat.prompt(AGAIN), tokens) is is_kept
