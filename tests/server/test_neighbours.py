"""What one user asks for costs the others little: long work is cut in pieces, bounded, and done in
threads that are shared fairly. The times are measured by benchmarks/serving/neighbours.py.
"""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import openai
import pytest
from helpers.fast_lane import mostly_slow
from helpers.servers import RawClient, ask, serving, wait_until
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mlx_paged.answers.conversation_encoder import ConversationEncoder
from mlx_paged.engine import input_processor
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.input_processor import PIECE_LEN, LengthLimit
from mlx_paged.errors import PromptTooLongError
from mlx_paged.server.app import App
from mlx_paged.server.errors import ApiError
from mlx_paged.server.fields import MAX_STOPS_LEN, MAX_WORDS_LEN, SamplingFields
from mlx_paged.server.openai import answers
from mlx_paged.server.openai import chat as openai_chat
from mlx_paged.server.prompt_threads import Work
from mlx_paged.server.schemas import MAX_CHILDREN
from mlx_paged.server.service import MAX_PREPARING_OF_USER, Service

LONG = "a" * 2**21
THREADS = "mlx_paged prompts"
TOOL = {"type": "function", "function": {"name": "add"}}


class SpiedTokenizer:
    """A tokenizer that notes how long each text is that it encodes, and in which thread."""

    def __init__(self, tokenizer: Any):
        self._inner = tokenizer
        self.lengths: list[int] = []
        self.threads: set[str] = set()
        self.go_on = threading.Event()
        self.go_on.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, text: str, **options: Any) -> Any:
        self.lengths.append(len(text))
        self.threads.add(threading.current_thread().name)
        assert self.go_on.wait(20)
        return self._inner.encode(text, **options)


@pytest.fixture
def spied(service: Service) -> Service:
    tokenizer: Any = SpiedTokenizer(service.tokenizer)
    return replace(service, tokenizer=tokenizer, kept_answers=ConversationEncoder())


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


REQUESTS = [
    ("/v1/chat/completions", {"messages": user(LONG)}),
    ("/v1/chat/completions", {"messages": user("a" * 1000) * 2000}),
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/completions", {"prompt": ["One", LONG]}),
    ("/v1/messages", {"messages": user(LONG), "max_tokens": 3, "model": "demo"}),
    ("/v1/messages/count_tokens", {"messages": user(LONG), "model": "demo"}),
    ("/v1/responses", {"input": LONG}),
    ("/api/chat", {"messages": user(LONG)}),
    ("/api/generate", {"prompt": LONG, "raw": True}),
    ("/tokenize", {"prompt": LONG}),
    ("/tokenize", {"messages": user(LONG)}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=lambda value: str(value)[:40])
def test_a_text_of_too_many_tokens_is_never_encoded_whole_nor_on_the_event_loop(
    spied: Service, path: str, body: dict[str, Any]
):
    with serving(App(spied)) as url:
        answer = ask(url, path, body)
    assert answer.status == 400
    error = answer.body["error"]
    assert (error if path.startswith("/api") else error["message"]) == (
        "prompt is too long: a prompt of more than 5120 tokens leaves no room for an answer: "
        "prompt and answer have at most 4096 tokens together; the model was made for no more; "
        "shorten the prompt"
    )
    if "/messages" not in path and not path.startswith("/api"):
        assert error["code"] == "context_length_exceeded"
    tokenizer: Any = spied.tokenizer
    assert max(tokenizer.lengths) <= PIECE_LEN and sum(tokenizer.lengths) <= 2 * PIECE_LEN
    assert all(name.startswith(THREADS) for name in tokenizer.threads)


@mostly_slow("num_words", [60, 520])
def test_a_text_that_may_fit_is_encoded_whole(client, service, monkeypatch, num_words: int):
    monkeypatch.setattr(input_processor, "PIECE_LEN", 1000)
    text = "the end of the story " * num_words
    num_tokens = len(service.tokenizer.encode(text))
    ask_for = partial(client.completions.create, model="demo", prompt=text, max_tokens=1)
    if num_tokens < 4096:
        assert ask_for().usage.prompt_tokens == num_tokens
    else:
        assert num_tokens < 5120
        with pytest.raises(openai.BadRequestError, match=f"a prompt of {num_tokens} tokens"):
            ask_for()


def test_counting_ends_when_the_client_leaves(spied: Service, monkeypatch: pytest.MonkeyPatch):
    tokenizer: Any = spied.tokenizer
    cancelled = threading.Event()
    cancel = Work.cancel

    def spied_cancel(work: Work) -> None:
        cancel(work)
        cancelled.set()

    monkeypatch.setattr(Work, "cancel", spied_cancel)
    monkeypatch.setattr(input_processor, "PIECE_LEN", 16)
    tokenizer.go_on.clear()
    with serving(App(spied)) as url:
        client = RawClient(url, "/v1/completions", {"prompt": "the end " * 200})
        wait_until(lambda: tokenizer.lengths == [16])
        client.leave()
        assert cancelled.wait(20)
        tokenizer.go_on.set()
        wait_until(lambda: spied._threads._turns["-"]._value == MAX_PREPARING_OF_USER)
    assert tokenizer.lengths == [16]


@pytest.fixture(scope="module")
def byte_level() -> TokenizerWrapper:
    """A byte-level BPE whose tokens of one letter are as long as 64 of them."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    draws = random.Random(0)
    words = ["".join(draws.choices("abcdefghi", k=draws.randint(1, 9))) for _ in range(200)]
    texts = [" ".join(draws.choices(words, k=30)) for _ in range(200)] + ["a" * 64] * 50
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=600,
            initial_alphabet=byte_level.alphabet(),
            special_tokens=["<|end|>"],
            show_progress=False,
        ),
    )
    return TokenizerWrapper(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    )


@mostly_slow("kind", ["words", "one letter", "one word", "two letters", "not ASCII"])
def test_no_text_that_fits_is_refused_for_its_cuts(byte_level: TokenizerWrapper, kind: str):
    draws = random.Random(1)
    text = {
        "words": " ".join(
            "".join(draws.choices("abcdefghi", k=draws.randint(1, 9))) for _ in range(30_000)
        ),
        "one letter": "a" * 200_000,
        "one word": "".join(draws.choices("abcdefghi", k=200_000)),
        "two letters": "ab" * 100_000,
        "not ASCII": "".join(draws.choices("äöü€😀 ", k=70_000)),
    }[kind]
    assert len(text) > 4 * PIECE_LEN
    num_tokens = len(byte_level.encode(text, add_special_tokens=False))
    LengthLimit(byte_level, num_tokens, None, lambda: None).check(text)
    # What is half as long again as the limit is refused.
    with pytest.raises(PromptTooLongError, match=f"more than {num_tokens * 2 // 3 * 5 // 4} "):
        LengthLimit(byte_level, num_tokens * 2 // 3, None, lambda: None).check(text)
    with pytest.raises(PromptTooLongError):
        LengthLimit(byte_level, num_tokens, None, lambda: None).check(text, num_tokens)


def test_without_a_context_there_is_a_limit_all_the_same(
    byte_level: TokenizerWrapper, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(input_processor, "MAX_PROMPT_TOKENS", 1000)
    limit = LengthLimit(byte_level, None, None, lambda: None)
    with pytest.raises(PromptTooLongError, match="more than 1,250 tokens; the server accepts"):
        limit.check("b c " * PIECE_LEN)


def test_prompts_have_a_limit_together(server_url, service, monkeypatch):
    monkeypatch.setattr("mlx_paged.server.openai.completions.MAX_PROMPT_TOKENS", 1000)
    answer = ask(server_url, "/v1/completions", {"prompt": [[5] * 400] * 3, "max_tokens": 1})
    assert answer.status == 400
    assert answer.body["error"] == {
        "message": "the prompts have more than 1,000 tokens together; send fewer per request",
        "type": "invalid_request_error",
        "param": "prompt[2]",
        "code": None,
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": user("a") * (MAX_CHILDREN + 1)}, "messages has 8,193 entries, but"),
        (
            {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL] * (MAX_CHILDREN + 1)},
            "tools has 8,193 entries, but at most 8,192 are allowed",
        ),
        (
            {"messages": user("a"), "bad_words": ["b" * 1000] * 66},
            "bad_words has 66,000 characters, but at most 65,536 are allowed",
        ),
        (
            {"messages": user("a"), "stop": "b" * 20_000},
            "stop has 20,000 characters, but at most 16,384 are allowed",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_take_long_to_read_is_refused_by_name(server_url, service, body, message):
    answer = ask(server_url, "/v1/chat/completions", body)
    assert answer.status == 400
    assert answer.body["error"]["message"].startswith(message)


def test_as_much_as_is_allowed_is_read(service: Service):
    body = openai_chat.ChatRequest.read({"messages": user("a") * MAX_CHILDREN})
    messages = openai_chat.read_messages(body.messages)
    assert len(messages) == MAX_CHILDREN
    words, stop = ["b" * (MAX_WORDS_LEN // 4)] * 4, "c" * MAX_STOPS_LEN
    fields = SamplingFields.read({"bad_words": words, "stop": stop})
    params = fields.sampling(service.default_params)
    assert (params.bad_words, params.stop) == (tuple(words), (stop,))
    with pytest.raises(ApiError, match="bad_words has 65,537 characters"):
        SamplingFields.read({"bad_words": [*words, "b"]})


def test_bodies_are_read_and_words_and_grammars_prepared_off_the_event_loop(
    server_url: str, service: Service, monkeypatch: pytest.MonkeyPatch
):
    seen: list[tuple[str, str]] = []
    read, prepare = openai_chat.read_chat, Engine.prepare

    def spied_read(*arguments: Any) -> Any:
        seen.append(("read", threading.current_thread().name.rpartition("_")[0]))
        return read(*arguments)

    def spied_prepare(*arguments: Any) -> Any:
        seen.append(("prepare", threading.current_thread().name.rpartition("_")[0]))
        return prepare(*arguments)

    monkeypatch.setattr(answers, "read_chat", spied_read)
    monkeypatch.setattr(Engine, "prepare", spied_prepare)
    for more in ({"bad_words": ["no"]}, {"guided_regex": "[a-z]+"}):
        body = {"messages": user("Hello"), "max_tokens": 2, **more}
        assert ask(server_url, "/v1/chat/completions", body).status == 200
    assert seen == [
        ("read", THREADS),
        ("prepare", THREADS),
        ("read", THREADS),
        ("prepare", "mlx_paged grammars"),
    ]
