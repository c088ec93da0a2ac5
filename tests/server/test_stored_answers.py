"""Answers that are stored beside the blocks: conversations continue after a restart, a kill, and in
another process.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.agent_models import make_agent_model
from helpers.block_stores import block_files, make_older, open_store
from helpers.server_programs import running
from helpers.servers import ScriptedEngine, make_service, serving, wait_until
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.answers.conversation_encoder import ConversationEncoder, StoredAnswers
from mlx_paged.answers.dialect import AnswerFormat
from mlx_paged.block_store import BlockStore, CacheFolder
from mlx_paged.core.tier import ANSWERS, BlockHeader
from mlx_paged.request import CompletionOutput
from mlx_paged.server.app import App
from mlx_paged.server.kept_answers import keep_answer

QUESTION = {"role": "user", "content": "What is there?"}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "Nothing."}
CALL = {"id": "1", "type": "function", "function": {"name": "read", "arguments": {}}}
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {}}}]
SENT = {"role": "assistant", "content": "", "tool_calls": [CALL]}  # without its reasoning


class OnDisk:
    """A store of blocks as a tier of answers, which writes at once."""

    def __init__(self, store: BlockStore):
        self.store = store

    def has_answer(self, key: bytes) -> bool:
        return self.store.has(key)

    def load_answer(self, key: bytes) -> bytes | None:
        return self.store.load(key)

    def keep_answer(self, header: BlockHeader, content: bytes) -> None:
        self.store.store(header, content)

    def note_answers_used(self, keys: Sequence[bytes]) -> None:
        self.store.note_used(keys)


class Process:
    """One that keeps answers in a folder; another one with the same folder has nothing in memory.

    Args:
        options: of the store.
    """

    def __init__(self, tokenizer: TokenizerWrapper, folder: Path, **options: Any):
        self.tokenizer = tokenizer
        self.store = open_store(folder, **options)
        self.kept = ConversationEncoder()
        self.tier = OnDisk(self.store)
        self.kept.stored = StoredAnswers(self.tier, tokenizer)

    def prompt(self, messages: Sequence[dict[str, Any]], salt: str | None = None):
        return self.kept.encode(self.tokenizer, messages, {"tools": TOOLS}, salt)

    def answer(
        self,
        messages: list[dict[str, Any]],
        reasoning: str,
        *,
        salt: str | None = None,
        **keep: Any,
    ) -> list[int]:
        """Answer with a call, whose message and result are added; returns all tokens."""
        text = f"<think>\n{reasoning}\n</think>\n\n"
        text += '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>'
        # One character after another, as no tokenizer would encode it, but for the marks.
        tokens = [
            token
            for piece in re.findall(r"</?(?:think|tool_call)>|[^<]", text)
            for token in self.tokenizer.encode(piece, add_special_tokens=False)
        ]
        prompt = self.prompt(messages, salt)
        answer_format = AnswerFormat.of(self.tokenizer, prompt.text, TOOLS)
        ended = [*tokens, self.tokenizer.eos_token_id]
        completion = CompletionOutput(0, finish_reason="stop", token_ids=ended)
        keep_answer(self.kept, self.tokenizer, prompt, answer_format, completion, **keep)
        messages += [SENT, RESULT]
        return prompt.token_ids + tokens


@pytest.fixture
def tokenizer(shared_agent_service):
    return shared_agent_service.tokenizer


def begins_with(prompt, tokens: list[int]) -> bool:
    return prompt.token_ids[: len(tokens)] == tokens


def talk(process: Process, num_turns: int = 3, **keep: Any) -> tuple[list[dict[str, Any]], Any]:
    """A conversation, and its tokens after each answer."""
    messages = [QUESTION]
    tokens = [process.answer(messages, f"turn {turn} " * 5, **keep) for turn in range(num_turns)]
    return messages, tokens


def test_another_process_continues_from_the_tokens_that_were_generated(tokenizer, tmp_path: Path):
    first = Process(tokenizer, tmp_path)
    messages, tokens = talk(first)
    second = Process(tokenizer, tmp_path)
    prompt = second.prompt(messages)
    assert begins_with(prompt, tokens[-1]) and prompt.text.count("turn 1") == 5
    assert prompt.token_ids == first.prompt(messages).token_ids
    # A further turn there is found here, where the conversation was.
    more = second.answer(messages, "turn 3 " * 5)
    assert begins_with(Process(tokenizer, tmp_path).prompt(messages), more)
    # Each token is stored once, although there are four files.
    entries = CacheFolder(tmp_path).entries()
    assert [entry.group for entry in entries] == [ANSWERS] * 4
    assert sum(entry.num_tokens for entry in entries) == len(more)


def test_other_salts_vocabularies_models_and_conversations_find_nothing(tokenizer, tmp_path: Path):
    messages, tokens = talk(Process(tokenizer, tmp_path), salt="one")
    assert begins_with(Process(tokenizer, tmp_path).prompt(messages, "one"), tokens[-1])
    for salt in ("other", "", None):
        assert Process(tokenizer, tmp_path).prompt(messages, salt).answers == ()
    assert Process(tokenizer, tmp_path, model="other").prompt(messages, "one").answers == ()
    asked = [{"role": "user", "content": "What else?"}, *messages[1:]]
    assert Process(tokenizer, tmp_path).prompt(asked, "one").answers == ()
    other = TokenizerWrapper(tokenizer._tokenizer, eos_token_ids=[1, 2])
    assert Process(other, tmp_path).prompt(messages, "one").answers == ()


def test_names_of_files_hold_no_text_and_no_key_that_could_be_guessed_from_it(
    tokenizer, tmp_path: Path
):
    first = Process(tokenizer, tmp_path)
    messages, _ = talk(first)
    keys = [answer.key.hex()[:32] for answer in first.prompt(messages).answers]
    names = [path.name for path in block_files(tmp_path)]
    assert len(names) == 3 and all(name.endswith("feff.kv") for name in names)
    assert not any(key in name for key in keys for name in names)


def test_an_answer_without_store_and_those_after_it_are_kept_in_memory_only(
    tokenizer, tmp_path: Path
):
    first = Process(tokenizer, tmp_path)
    messages, tokens = talk(first, 1)
    num_files = len(block_files(tmp_path))
    tokens.append(first.answer(messages, "secret", no_store=True))
    tokens.append(first.answer(messages, "after it"))
    assert begins_with(first.prompt(messages), tokens[-1])
    assert len(block_files(tmp_path)) == num_files == 1
    prompt = Process(tokenizer, tmp_path).prompt(messages)
    assert "secret" not in prompt.text and "after it" not in prompt.text
    assert begins_with(prompt, tokens[0])


def test_the_last_of_two_answers_to_the_same_conversation_counts(tokenizer, tmp_path: Path):
    first = Process(tokenizer, tmp_path)
    for reasoning in ("first", "second", "second"):
        messages = [QUESTION]
        tokens = first.answer(messages, reasoning)
    after = first.answer(messages, "after the second")
    assert len(block_files(tmp_path)) == 2 and first.store.stats().num_blocks == 2
    prompt = Process(tokenizer, tmp_path).prompt(messages)
    assert begins_with(prompt, after) and after[: len(tokens)] == tokens
    # What continued from an answer that was replaced since is not used with the new one.
    first.answer([QUESTION], "third")
    prompt = Process(tokenizer, tmp_path).prompt(messages)
    assert "third" in prompt.text and "after the second" not in prompt.text
    assert len(prompt.answers) == 1


def test_an_answer_whose_predecessor_is_gone_is_stored_whole(tokenizer, tmp_path: Path):
    first = Process(tokenizer, tmp_path)
    messages, _ = talk(first, 2)
    shutil.rmtree(first.store.files.path_of(first.store.fingerprint.digest))
    tokens = first.answer(messages, "and on")
    prompt = Process(tokenizer, tmp_path).prompt(messages)
    # The first two are gone, and with them their reasoning, so the text differs there.
    assert [answer.num_tokens for answer in prompt.answers] == [len(tokens)]
    first.answer([QUESTION], "turn 0 " * 5)
    first.answer(messages[:3], "turn 1 " * 5)
    assert begins_with(Process(tokenizer, tmp_path).prompt(messages), tokens)


def damaged(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content))
    kind = rng.randrange(3)
    if kind == 0:
        return (
            content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
        )
    return content[:place] if kind == 1 else content + rng.randbytes(9)


def test_damage_is_a_miss_and_the_conversation_goes_on(tokenizer, tmp_path: Path):
    rng = random.Random(7)
    messages, tokens = talk(Process(tokenizer, tmp_path / "whole"))
    for number in range(40):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        file = rng.choice(block_files(folder))
        file.write_bytes(damaged(file.read_bytes(), rng))
        process = Process(tokenizer, folder)
        prompt = process.prompt(messages)
        assert len(prompt.answers) < 3
        assert prompt.before is None or begins_with(prompt, tokens[len(prompt.answers) - 1])
        assert process.store.failure is None
        told = list(messages)
        more = process.answer(told, "and on")
        again = Process(tokenizer, folder).prompt(told)
        assert begins_with(again, more)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}\n",
        b"[]\nabcd",
        b"\xff\n",
        json.dumps({"version": 2}).encode() + b"\n",
        json.dumps(
            {"version": 1, "said": [1, 2, []], "beginnings": [], "before": None, "digest": ""}
        ).encode()
        + b"\n",
        json.dumps(
            {"version": 1, "said": ["", "", []], "beginnings": [], "before": None, "digest": "00"}
        ).encode()
        + b"\nabcd",
    ],
)
def test_any_content_of_a_tier_of_ones_own_is_a_miss(tokenizer, tmp_path: Path, content: bytes):
    process = Process(tokenizer, tmp_path)
    messages, _ = talk(process)
    again = Process(tokenizer, tmp_path)
    again.tier.load_answer = lambda key: content
    assert again.prompt(messages).answers == ()


def test_answers_expire_and_are_evicted_from_the_end_of_a_conversation(tokenizer, tmp_path: Path):
    first = Process(tokenizer, tmp_path, num_blocks=4)
    messages, tokens = talk(first, 4)
    other, _ = talk(first, 2, salt="other")
    process = Process(tokenizer, tmp_path)
    assert process.prompt(other, "other").before is not None
    # Of the older conversation the last two answers had to go.
    prompt = process.prompt(messages)
    assert len(prompt.answers) == 2 and begins_with(prompt, tokens[1])
    process = Process(tokenizer, tmp_path, ttl=0.001)
    time.sleep(0.01)
    assert process.prompt(messages).answers == ()


def test_a_conversation_that_continues_keeps_its_first_answers(tokenizer, tmp_path: Path):
    process = Process(tokenizer, tmp_path)
    messages, _ = talk(process, 2)
    for file in block_files(tmp_path):
        make_older(file, 1000)
    process.answer(messages, "and on")
    process.store.maintain()
    assert min(file.stat().st_mtime for file in block_files(tmp_path)) > time.time() - 100


SCRIPTED = """
import json, sys
sys.path[:0] = {path}
from helpers.servers import ScriptedEngine
from mlx_paged.engine import async_engine

class Engine(ScriptedEngine):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        tokenizer = arguments[1]
        for text in json.loads({texts!r}):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            self.scripts.append([*tokens, tokenizer.eos_token_id])

async_engine.AsyncEngine = Engine
"""


def answer_of(turn: int) -> str:
    rng, words = (
        random.Random(turn),
        ["the", "a", "code", "of", "pear", "apple", "is", "one", "two"],
    )
    thought = " ".join(rng.choice(words) for _ in range(150))
    return (
        f"<think>\n{thought}\n</think>\n\n"
        '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>'
    )


class Agent:
    """A client that sends no reasoning back."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = [QUESTION]

    def turn(self, url: str) -> tuple[int, int]:
        """One more turn; returns the tokens of its prompt, and how many had to be computed."""
        body = {"model": "model", "messages": self.messages, "tools": TOOLS, "max_tokens": 2000}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        told, usage = answer.json()["choices"][0]["message"], answer.json()["usage"]
        told.pop("reasoning_content", None)
        told.pop("reasoning", None)
        self.messages += [told, {**RESULT, "tool_call_id": told["tool_calls"][0]["id"]}]
        num_prompt = usage["prompt_tokens"]
        return num_prompt, num_prompt - usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_client_that_drops_reasoning_computes_no_more_after_kill_9(tmp_path: Path):
    model, folder = make_agent_model(tmp_path / "model"), tmp_path / "kv"
    flags = ["--model", str(model), "--cache-dir", str(folder), "--no-idle-prefill"]
    path = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tools")]
    agent = Agent()

    def scripted(turns: range) -> str:
        return SCRIPTED.format(path=path, texts=json.dumps([answer_of(turn) for turn in turns]))

    with running(*flags, patch=scripted(range(4))) as program:
        computed = [agent.turn(program.url)[1] for _ in range(4)]
        wait_until(lambda: is_written(program.url))
        program.signal(signal.SIGKILL)
        program.process.wait(60)
    with running(*flags, patch=scripted(range(4, 6))) as program:
        (num_prompt, num_computed), (_, num_next) = agent.turn(program.url), agent.turn(program.url)
    assert num_prompt > 700
    # As much as before, and at most a block more, that was not full.
    assert num_computed <= computed[-1] + 16 and num_next <= computed[-1] + 16
    names = [file.name for file in block_files(folder)]
    assert sum(name.endswith("feff.kv") for name in names) == 6


def is_written(url: str) -> bool:
    """Whether nothing was written for a while."""
    metric = 'mlx_paged:disk_cache_block_events_total{engine="0",event="written"'

    def written() -> list[str]:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        return [line for line in lines if line.startswith(metric)]

    before = written()
    time.sleep(0.5)
    return before == written() != []


def test_a_service_stores_answers_beside_its_blocks_for_each_user(tmp_path: Path):
    model, folder = make_agent_model(tmp_path / "model"), tmp_path / "kv"
    url = "/v1/chat/completions"
    for number in range(2):
        service = make_service(model, cache_dir=folder)
        tokens = service.tokenizer.encode(answer_of(0), add_special_tokens=False)
        assert isinstance(service.engine, ScriptedEngine)
        service.engine.scripts.append([*tokens, service.tokenizer.eos_token_id])
        with service.engine, serving(App(service)) as address:
            body = {"messages": [QUESTION], "tools": TOOLS, "max_tokens": 500}
            extra = {"no_store": True} if number == 0 else {}
            told = httpx.post(f"{address}{url}", json=body | extra, timeout=60)
            assert told.status_code == 200
        names = [file.name for file in block_files(folder)]
        assert sum(name.endswith("feff.kv") for name in names) == number
        assert bool(names) == (number == 1)
