"""What ``mlx-paged cache`` does with stored answers: it counts, checks and removes them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.block_entries import BLOCK_SIZE, DEMO

from mlx_paged.__main__ import main
from mlx_paged.block_store import BlockStore, CacheFolder
from mlx_paged.core.block_hash import hash_token_blocks
from mlx_paged.core.tier import ANSWERS, BlockHeader

LONG, FORK, OTHER = list(range(70)), [*range(40), *range(200, 230)], list(range(300, 340))


def answer_key(tokens: list[int]) -> bytes:
    return hashlib.sha256(repr(tokens).encode()).digest() + ANSWERS.to_bytes(2, "little")


def put(store: BlockStore, tokens: list[int], *ends: int) -> str:
    """Blocks of a conversation, and answers where these numbers of tokens end; its last hash."""
    hashes = hash_token_blocks(tokens, BLOCK_SIZE)
    for index, block_hash in enumerate(hashes):
        start = index * BLOCK_SIZE
        parent = hashes[index - 1] if index else None
        part = tuple(tokens[start : start + BLOCK_SIZE])
        assert store.store(BlockHeader(block_hash, parent, part, start), bytes(100))
    parent, start = None, 0
    for end in ends:
        key, part = answer_key(tokens[:end]), tuple(tokens[start:end])
        assert store.store(BlockHeader(key, parent, part, start, ANSWERS), b"an answer")
        parent, start = key, end
    return hashes[-1].hex()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = BlockStore(tmp_path, 1 << 30, DEMO)
    put(store, LONG, 20, 35, 70)
    put(store, FORK, 20, 35, 60)
    put(store, OTHER, 35)
    return tmp_path


def left(folder: Path) -> list[bytes]:
    entries = CacheFolder(folder).entries()
    return [entry.block_hash for entry in entries if entry.group == ANSWERS]


def cache(*args: Any) -> int:
    return main(["cache", *map(str, args)])


def test_ls_and_size_count_answers_apart_from_blocks(folder: Path, capsys):
    assert cache("ls", folder) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.startswith("demo (") and ": 3 prefixes, 8 blocks of 16, 128 tokens, " in heading
    assert heading.endswith(", 5 answers, 53 kB") and len(lines) == 5
    assert cache("size", folder, "--json") == 0
    size = json.loads(capsys.readouterr().out)
    (model,) = size["models"]
    assert (size["num_files"], model["num_blocks"], model["num_answers"]) == (13, 8, 5)
    assert size["nbytes"] == model["nbytes"] == 13 * 4096


def test_verify_checks_answers(folder: Path, capsys):
    path = next(folder.rglob("*feff.kv"))
    path.write_bytes(path.read_bytes()[:-1])
    assert cache("verify", folder, "--delete") == 1
    assert "13 files" in capsys.readouterr().out and len(left(folder)) == 4
    assert cache("verify", folder) == 0


def test_removing_a_prefix_removes_the_answers_with_its_tokens_only(folder: Path):
    # The line of blocks 2 and 3 of LONG, from token 32 on.
    assert cache("rm", folder, hash_token_blocks(LONG, BLOCK_SIZE)[-1].hex()) == 0
    # The answer after 35 tokens is of both conversations, and has three tokens of that block.
    kept = [FORK[:20], FORK[:60], OTHER[:35]]
    assert set(left(folder)) == {answer_key(tokens) for tokens in kept}


def test_removing_the_common_beginning_removes_the_answers_of_all_that_follows(folder: Path):
    assert cache("rm", folder, hash_token_blocks(LONG, BLOCK_SIZE)[0].hex()) == 0
    assert left(folder) == [answer_key(OTHER[:35])]


@pytest.mark.parametrize("choice", [["--all"], ["--model", "demo"], ["--older-than", "0.001s"]])
def test_removing_all_removes_answers_too(folder: Path, choice: list[str]):
    assert cache("rm", folder, *choice) == 0
    assert CacheFolder(folder).entries() == []


def test_a_folder_of_answers_alone_is_listed(tmp_path: Path, capsys):
    store = BlockStore(tmp_path, 1 << 30, DEMO)
    store.store(BlockHeader(answer_key([1]), None, (1,), 0, ANSWERS), b"an answer")
    assert cache("ls", tmp_path) == 0
    assert "0 blocks of 16, 0 tokens, 1 answer, 4.1 kB" in capsys.readouterr().out
