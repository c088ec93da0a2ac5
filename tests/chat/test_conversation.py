"""Turns keep the K/V of what the template did not change, and the prompt is always what the
template says.
"""

from __future__ import annotations

import pytest
from paged_testing.integrity import check_scheduler

from mlx_paged import Engine, SamplingParams, demo_model_path, load
from mlx_paged.answers.conversation_encoder import Prompt
from mlx_paged.cli.chat.conversation import Conversation
from mlx_paged.errors import ChatTemplateError

# As Qwen3's: reasoning is left out of earlier turns, and enable_thinking=False puts an empty one
# before the answer.
FORGETFUL_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{% endif %}"
)


@pytest.fixture
def model_and_tokenizer():
    return load(demo_model_path())


def converse(
    model_and_tokenizer, kind: str = "paged", budget: str = "100blocks", **options
) -> Conversation:
    model, tokenizer = model_and_tokenizer
    engine = Engine(model, tokenizer, kv=kind, kv_cache_bytes=budget)
    return Conversation(engine, tokenizer, **options)


def ask_again(conversation: Conversation, text: str | None = None, **options):
    assert conversation.last_turn is not None
    before, last = conversation.last_turn
    return list(conversation.ask(last if text is None else text, before=before, **options))


def ask(conversation: Conversation, text: str, max_tokens: int = 30):
    responses = list(conversation.ask(text, SamplingParams(max_tokens=max_tokens)))
    return "".join(r.text for r in responses), responses[-1]


@pytest.mark.parametrize("kind", ["basic", "paged"])
def test_each_turn_reuses_all_before_it_and_answers_as_a_fresh_conversation_would(
    model_and_tokenizer, kind: str
):
    warm = converse(model_and_tokenizer, kind)
    for text in (
        "My name is Tom.",
        "The code of apple is 4821.",
        "What is my name?",
        "What is the code of apple?",
    ):
        held = len(warm.tokens)
        reused = held // 16 * 16  # whole blocks
        cold = converse(model_and_tokenizer, kind)
        cold.messages = list(warm.messages)
        answer, last = ask(warm, text)
        expected, fresh = ask(cold, text)
        assert (answer, last.cached_tokens, fresh.cached_tokens) == (expected, reused, 0)
    assert [m["role"] for m in warm.messages] == ["user", "assistant"] * 4


def test_a_template_that_rewrites_history_is_followed_and_only_the_rewritten_rest_is_new(
    model_and_tokenizer,
):
    model_and_tokenizer[1]._tokenizer.chat_template = FORGETFUL_TEMPLATE
    conversation = converse(model_and_tokenizer)
    ask(conversation, "hello")
    conversation.messages[-1]["content"] = "<think>long reasoning</think>Hi!"
    rendered = conversation.encode(conversation.messages).token_ids
    assert "reasoning" not in model_and_tokenizer[1].decode(rendered)
    first_turn = len(conversation.tokens)
    _, last = ask(conversation, "again")
    assert 0 < last.cached_tokens < first_turn


def test_an_answer_that_is_asked_for_again_follows_the_tokens_of_the_turns_before_it(
    model_and_tokenizer, monkeypatch: pytest.MonkeyPatch
):
    conversation, prompts = converse(model_and_tokenizer), list[Prompt]()
    encode = conversation.encode

    def noted(messages: list[dict]) -> Prompt:
        prompts.append(encode(messages))
        return prompts[-1]

    monkeypatch.setattr(conversation, "encode", noted)
    ask(conversation, "hello", max_tokens=8)
    first = list(conversation.tokens)
    ask(conversation, "again", max_tokens=8)
    for text in (None, "and again"):
        ask_again(conversation, text, params=SamplingParams(max_tokens=8))
        assert prompts[-1].before.all_token_ids() == first
        assert conversation.tokens[: len(first)] == first


def test_no_thinking_reaches_the_template(model_and_tokenizer):
    model_and_tokenizer[1]._tokenizer.chat_template = FORGETFUL_TEMPLATE
    prompts = {}
    message = {"role": "user", "content": "hi"}
    for thinks in (True, False):
        options = {"enable_thinking": thinks}
        conversation = converse(model_and_tokenizer, template_options=options)
        prompts[thinks] = model_and_tokenizer[1].decode(conversation.encode([message]).token_ids)
    assert prompts[False] == prompts[True] + "<think></think>"


def test_an_answer_that_is_not_read_to_its_end_stays_as_far_as_it_came(model_and_tokenizer):
    conversation = converse(model_and_tokenizer)
    answer = conversation.ask("Count from 5 to 60.", SamplingParams(max_tokens=100))
    pieces = [next(answer).text for _ in range(5)]
    answer.close()
    assert conversation.messages == [
        {"role": "user", "content": "Count from 5 to 60."},
        {"role": "assistant", "content": "".join(pieces)},
    ]
    held = len(conversation.tokens)
    assert ask(conversation, "hello")[1].cached_tokens == held // 16 * 16 > 0


def test_a_turn_that_can_not_begin_leaves_the_conversation_as_it_was(model_and_tokenizer):
    conversation = converse(model_and_tokenizer, budget="6blocks", system_prompt="Be brief.")
    ask(conversation, "hello", max_tokens=5)
    messages, tokens = list(conversation.messages), list(conversation.tokens)
    for text in ("word " * 200, "  \n"):
        with pytest.raises((ValueError, RuntimeError)):
            ask(conversation, text)
    assert (conversation.messages, conversation.tokens) == (messages, tokens)
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    assert conversation.engine.manager.stats().num_used_blocks == 0


def test_a_tokenizer_without_a_chat_template_is_refused(model_and_tokenizer):
    model_and_tokenizer[1].has_chat_template = False
    with pytest.raises(ValueError, match="no chat template"):
        converse(model_and_tokenizer)


@pytest.mark.parametrize("kind", ["basic", "paged"])
def test_a_branch_answers_as_the_conversation_would_and_neither_sees_the_other(
    model_and_tokenizer, kind: str
):
    conversation = converse(model_and_tokenizer, kind)
    ask(conversation, "The code of apple is 4821.")
    branch = conversation.fork()
    assert branch.messages == conversation.messages and branch.tokens == conversation.tokens
    ask(branch, "The code of pear is 1234.")
    straight = converse(model_and_tokenizer, kind)
    for text in ("The code of apple is 4821.", "What is the code of apple?"):
        expected, _ = ask(straight, text)
    assert (
        ask(conversation, "What is the code of apple?")[0]
        == expected
        == "The code of apple is 4821."
    )
    assert ask(branch, "What is the code of pear?")[0] == "The code of pear is 1234."
    assert [len(conversation.messages), len(branch.messages)] == [4, 6]


def test_conversations_of_one_engine_share_the_blocks_of_their_system_prompt(model_and_tokenizer):
    engine = Engine(*model_and_tokenizer, kv_cache_bytes="100blocks")
    system_prompt = (
        "The code of apple is 4821. The code of pear is 1234. My name is Tom. The code of fig is "
        "7777."
    )
    conversations = [
        Conversation(engine, model_and_tokenizer[1], system_prompt=system_prompt) for _ in range(3)
    ]
    answers = [
        ask(conversation, f"What is {i} + 1?") for i, conversation in enumerate(conversations, 11)
    ]
    num_shared = len(engine.tokenizer.encode(system_prompt)) // 16
    assert [last.cached_tokens >= 16 * num_shared > 0 for _, last in answers] == [False, True, True]
    tables = [engine.cached_block_ids(conversation.tokens) for conversation in conversations]
    assert all(table[:num_shared] == tables[0][:num_shared] for table in tables)
    assert len(set().union(*tables)) <= sum(map(len, tables)) - 2 * num_shared


def test_an_answer_that_is_closed_leaves_nothing_running(model_and_tokenizer):
    conversation = converse(model_and_tokenizer)
    answer = conversation.ask("Count from 5 to 60.")
    next(answer)
    answer.close()
    engine = conversation.engine
    assert not engine.has_unfinished_requests() and engine.stats().num_used_blocks == 0
    check_scheduler(engine.scheduler)


def test_the_content_of_a_message_may_be_text_parts_and_nothing_else(model_and_tokenizer):
    conversation = converse(model_and_tokenizer)
    parts = ["My name ", {"type": "text", "text": "is Tom."}]
    list(conversation.ask(parts))
    assert conversation.messages[0] == {"role": "user", "content": "My name is Tom."}
    conversation.messages[0]["content"] = parts
    assert ask(conversation, "What is my name?")[0] == "Your name is Tom."
    messages = list(conversation.messages)
    for wrong, named in (
        (None, "None"),
        (7, "7"),
        ([{"type": "image_url"}], "'image_url'"),
        ("a\ud800", "surrogate"),
    ):
        with pytest.raises(ChatTemplateError, match=named):
            ask(conversation, wrong)
    assert conversation.messages == messages


def test_a_turn_that_the_template_refuses_leaves_the_conversation_as_it_was(model_and_tokenizer):
    conversation = converse(model_and_tokenizer)
    ask(conversation, "My name is Tom.")
    messages = list(conversation.messages)
    template = model_and_tokenizer[1].chat_template
    model_and_tokenizer[1].chat_template = "{{ raise_exception('no') }}"
    for try_it in (
        lambda: ask(conversation, "What is my name?"),
        lambda: ask_again(conversation),
        lambda: conversation.set_system_prompt("Be brief."),
        lambda: conversation.load_messages([{"role": "user", "content": "x"}]),
    ):
        with pytest.raises(ChatTemplateError, match="refuses the messages: no"):
            try_it()
        assert conversation.messages == messages
    model_and_tokenizer[1].chat_template = template
    assert ask(conversation, "What is my name?")[0] == "Your name is Tom."


@pytest.mark.parametrize("kind", ["basic", "paged"])
def test_an_answer_again_reuses_its_prompt_and_is_the_answer_of_a_fresh_conversation(
    model_and_tokenizer, kind: str
):
    conversation = converse(model_and_tokenizer, kind)
    ask(conversation, "My name is Tom.")
    expected, last = ask(conversation, "What is my name?")
    responses = ask_again(conversation, params=SamplingParams(max_tokens=30))
    assert "".join(r.text for r in responses) == expected
    assert responses[-1].cached_tokens > last.prompt_tokens - 17 and len(conversation.messages) == 4
    edited = ask_again(conversation, "What is 3 + 4?", params=SamplingParams(max_tokens=30))
    assert "".join(r.text for r in edited) == "3 + 4 = 7"
    assert conversation.last_turn[1] == "What is 3 + 4?" and len(conversation.messages) == 4


def test_an_answer_again_that_is_stopped_before_it_begins_keeps_the_old_one(model_and_tokenizer):
    conversation = converse(model_and_tokenizer)
    ask(conversation, "My name is Tom.")
    messages = list(conversation.messages)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask_again(conversation, "What is 3 + 4?", progress=stop)
    assert conversation.messages == messages


@pytest.mark.parametrize(
    ("ending", "opens"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)]
)
def test_a_prompt_that_opens_reasoning_is_known(model_and_tokenizer, ending: str, opens: bool):
    tokenizer = model_and_tokenizer[1]
    tokenizer.chat_template = FORGETFUL_TEMPLATE + "{# <think></think> #}" + ending
    conversation = converse(model_and_tokenizer)
    ask(conversation, "hello", max_tokens=2)
    assert conversation.answer_format.is_thinking is opens
