"""What ``mlx-paged cache`` does with stored answers: it counts, checks and removes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.block_entries import BLOCK_SIZE, answer_key, put

from mlx_paged.block_store import CacheFolder
from mlx_paged.core.block_hash import hash_token_blocks
from mlx_paged.core.tier import ANSWERS

LONG, FORK, OTHER = list(range(70)), [*range(40), *range(200, 230)], list(range(300, 340))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    put(tmp_path, LONG, answers=(20, 35, 70))
    put(tmp_path, FORK, answers=(20, 35, 60))
    put(tmp_path, OTHER, answers=(35,))
    return tmp_path


def left(folder: Path) -> list[bytes]:
    entries = CacheFolder(folder).entries()
    return [entry.block_hash for entry in entries if entry.group == ANSWERS]


def test_ls_and_size_count_answers_apart_from_blocks(folder: Path, cache):
    status, out, _ = cache("ls", folder)
    heading, *lines = out.splitlines()
    assert heading.startswith("demo (") and ": 3 prefixes, 8 blocks of 16, 128 tokens, " in heading
    assert status == 0 and heading.endswith(", 5 answers, 53 kB") and len(lines) == 5
    status, out, _ = cache("size", folder, "--json")
    size = json.loads(out)
    (model,) = size["models"]
    assert status == 0
    assert (size["num_files"], model["num_blocks"], model["num_answers"]) == (13, 8, 5)
    assert size["nbytes"] == model["nbytes"] == 13 * 4096


def test_verify_checks_answers(folder: Path, cache):
    path = next(folder.rglob("*feff.kv"))
    path.write_bytes(path.read_bytes()[:-1])
    status, out, _ = cache("verify", folder, "--delete")
    assert status == 1 and "13 files" in out and len(left(folder)) == 4
    assert cache("verify", folder)[0] == 0


def test_removing_a_prefix_removes_the_answers_with_its_tokens_only(folder: Path, cache):
    # The line of blocks 2 and 3 of LONG, from token 32 on.
    assert cache("rm", folder, hash_token_blocks(LONG, BLOCK_SIZE)[-1].hex())[0] == 0
    # The answer after 35 tokens is of both conversations, and has three tokens of that block.
    kept = [FORK[:20], FORK[:60], OTHER[:35]]
    assert set(left(folder)) == {answer_key(tokens) for tokens in kept}


def test_removing_the_common_beginning_removes_the_answers_of_all_that_follows(folder: Path, cache):
    assert cache("rm", folder, hash_token_blocks(LONG, BLOCK_SIZE)[0].hex())[0] == 0
    assert left(folder) == [answer_key(OTHER[:35])]


@pytest.mark.parametrize("choice", [["--all"], ["--model", "demo"], ["--older-than", "0.001s"]])
def test_removing_all_removes_answers_too(folder: Path, cache, choice: list[str]):
    assert cache("rm", folder, *choice)[0] == 0
    assert CacheFolder(folder).entries() == []


def test_a_folder_of_answers_alone_is_listed(tmp_path: Path, cache):
    put(tmp_path, [1], answers=(1,))
    status, out, _ = cache("ls", tmp_path)
    assert status == 0 and "0 blocks of 16, 0 tokens, 1 answer, 4.1 kB" in out
