"""What ``mlx-paged cache`` says of recurrent states, and what a pin of a prefix keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.block_entries import BLOCK_SIZE, NOW, entry, hash_of, tree_of

from mlx_paged.__main__ import main
from mlx_paged.block_store import BlockStore, CacheFolder, Entry, Fingerprint
from mlx_paged.cli.cache.listing import ListStyle, list_trees, show_prefix
from mlx_paged.core.block_hash import hash_token_blocks
from mlx_paged.core.prefix_lookup import state_key
from mlx_paged.core.tier import STATES, BlockHeader

HYBRID = Fingerprint(
    "content", "hybrid", ("group 0: 2 heads", "state 0: float32 [4]"), "float32", BLOCK_SIZE, "1"
)
FIRST, SECOND = list(range(80)), [*range(32), *range(200, 232)]


def state(prefix: str, is_alone: bool = False) -> Entry:
    """The state after the last block of a prefix."""
    block_hash = hash_of(prefix)
    key = block_hash + STATES.to_bytes(2, "little")
    parent = None if is_alone else block_hash
    return entry(prefix, block_hash=key, parent_hash=parent, group=STATES)


def test_ls_counts_states_and_a_prefix_has_them_beside_its_blocks():
    blocks = [entry("a"), entry("ab"), entry("abc"), entry("abd"), state("ab"), state("abd")]
    tree = tree_of(*blocks)
    assert (len(tree.blocks), tree.num_states, tree.num_tokens) == (4, 2, 4 * BLOCK_SIZE)
    heading, _, *lines = list_trees([tree], ListStyle(NOW))
    assert heading.endswith("2 prefixes, 4 blocks of 16, 64 tokens, 2 states, 6.0 MB")
    ends = {line.split()[-1] for line in lines if "state" in line}
    assert len(lines) == 3 and ends == {"state"}
    assert sorted(run.num_states for run in tree.runs()) == [0, 1, 1]
    last = tree.blocks[hash_of("abc")].last_state()
    assert last is not None and last.block_hash == hash_of("ab")
    assert tree.blocks[hash_of("a")].last_state() is None


def test_states_of_a_model_without_kv_lack_nothing():
    tree = tree_of(state("abc", is_alone=True), state("abcdef", is_alone=True))
    assert [(run.first_token, run.is_cut_off) for run in tree.runs()] == [(32, False), (80, False)]
    lonely = tree_of(entry("abc"), state("abcd"))
    assert all(run.is_cut_off for run in lonely.runs() if run.first_token == 32)


def put(folder: Path, tokens: list[int], *ends: int) -> str:
    """Blocks of a sequence, and states where these numbers of tokens end; the last hash in hex."""
    store = BlockStore(folder, 1 << 30, HYBRID)
    hashes = hash_token_blocks(tokens, BLOCK_SIZE)
    for index, block_hash in enumerate(hashes):
        start = index * BLOCK_SIZE
        part = tuple(tokens[start : start + BLOCK_SIZE])
        parent = hashes[index - 1] if index else None
        assert store.store(BlockHeader(block_hash, parent, part, start), b"K/V")
        if start + BLOCK_SIZE in ends:
            key = state_key(block_hash)
            assert store.store(BlockHeader(key, block_hash, part, start, STATES), b"state" * 99)
    store.maintain()
    store.close()
    return hashes[-1].hex()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def tool(*words: object) -> tuple[int, str]:
        status = main(["cache", *map(str, words)])
        return status, capsys.readouterr().out

    return tool


def read(run: Any, *words: object) -> Any:
    status, out = run(*words, "--json")
    assert status == 0
    return json.loads(out)


def pinned(folder: Path) -> list[tuple[int, bool]]:
    """End and kind of all files that stay."""
    return sorted(
        (each.first_token + each.num_tokens, each.group == STATES)
        for each in CacheFolder(folder).entries()
        if each.is_pinned
    )


def test_show_says_after_which_tokens_a_model_can_go_on(run, tmp_path: Path):
    block_hash, other = put(tmp_path, FIRST, 48, 80), put(tmp_path, SECOND)
    _, out = run("show", tmp_path, block_hash)
    facts = dict(line.split(maxsplit=1) for line in out.split("\n\n")[0].splitlines())
    assert facts["states"] == "1 layer, after 48, 80 tokens"
    assert facts["K/V"] == "float32, 1 layer"
    assert "states      1 layer, none, so no hit ends in it" in run("show", tmp_path, other)[1]
    blocks = read(run, "show", tmp_path, block_hash)["blocks"]
    assert [each["has_state"] for each in blocks] == [False, False, True, False, True]
    assert all(each["groups"] == [0] for each in blocks)
    (model,) = read(run, "size", tmp_path)["models"]
    assert (model["num_states"], model["num_blocks"]) == (2, 7)
    assert read(run, "verify", tmp_path)["num_files"] == 9


def test_a_pin_keeps_the_state_that_its_prefix_needs(run, tmp_path: Path):
    first, second = put(tmp_path, FIRST, 32, 48), put(tmp_path, SECOND)
    third = put(tmp_path, [*SECOND, *range(300, 316)])
    assert run("pin", tmp_path, first)[0] == 0
    kv = [(end, False) for end in range(16, 96, 16)]
    assert pinned(tmp_path) == sorted([*kv, (48, True)])
    assert run("pin", tmp_path, second, third)[0] == 0
    assert (32, True) in pinned(tmp_path) and (64, False) in pinned(tmp_path)
    assert run("unpin", tmp_path, third)[0] == 0
    assert (32, True) in pinned(tmp_path), "the second one needs it"
    assert run("unpin", tmp_path, second)[0] == 0
    assert pinned(tmp_path) == sorted([*kv, (48, True)])
    assert run("unpin", tmp_path, first)[0] == 0
    assert pinned(tmp_path) == []


def test_a_damaged_state_is_found_and_a_removed_block_takes_its_state_along(run, tmp_path: Path):
    block_hash = put(tmp_path, FIRST, 48, 80)
    key = state_key(hash_token_blocks(FIRST, BLOCK_SIZE)[2]).hex()
    (file,) = tmp_path.glob(f"blocks/*/*/{key}.kv")
    file.write_bytes(file.read_bytes()[:-1])
    status, out = run("verify", tmp_path, "--delete")
    assert status == 1 and f"{key}.kv: " in out and not file.exists()
    assert run("rm", tmp_path, block_hash)[0] == 0
    assert CacheFolder(tmp_path).entries() == []


def test_show_of_a_made_up_tree_without_states_has_no_line_of_them():
    tree = tree_of(entry("a"))
    block = tree.blocks[hash_of("a")]
    assert not any(
        line.startswith("states") for line in show_prefix(tree, block, (), ListStyle(NOW))
    )
