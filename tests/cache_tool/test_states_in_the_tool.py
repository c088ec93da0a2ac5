"""What ``mlx-paged cache`` says of recurrent states, and what a pin of a prefix keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers.block_entries import BLOCK_SIZE, NOW, entry, hash_of, put, tree_of

from mlx_paged.block_store import CacheFolder, Entry, Fingerprint
from mlx_paged.cli.cache.listing import ListStyle, list_trees, show_prefix
from mlx_paged.core.block_hash import hash_token_blocks
from mlx_paged.core.prefix_lookup import state_key
from mlx_paged.core.tier import STATES

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


def pinned(folder: Path) -> list[tuple[int, bool]]:
    """End and kind of all files that stay."""
    return sorted(
        (each.first_token + each.num_tokens, each.group == STATES)
        for each in CacheFolder(folder).entries()
        if each.is_pinned
    )


def test_show_says_after_which_tokens_a_model_can_go_on(cache, tmp_path: Path):
    block_hash = put(tmp_path, FIRST, HYBRID, states=(48, 80))
    other = put(tmp_path, SECOND, HYBRID)
    _, out, _ = cache("show", tmp_path, block_hash)
    facts = dict(line.split(maxsplit=1) for line in out.split("\n\n")[0].splitlines())
    assert facts["states"] == "1 layer, after 48, 80 tokens"
    assert facts["K/V"] == "float32, 1 layer"
    assert "states      1 layer, none, so no hit ends in it" in cache("show", tmp_path, other)[1]

    def read(*words: object) -> Any:
        status, out, _ = cache(*words, "--json")
        assert status == 0
        return json.loads(out)

    blocks = read("show", tmp_path, block_hash)["blocks"]
    assert [each["has_state"] for each in blocks] == [False, False, True, False, True]
    assert all(each["groups"] == [0] for each in blocks)
    (model,) = read("size", tmp_path)["models"]
    assert (model["num_states"], model["num_blocks"]) == (2, 7)
    assert read("verify", tmp_path)["num_files"] == 9


def test_a_pin_keeps_the_state_that_its_prefix_needs(cache, tmp_path: Path):
    first = put(tmp_path, FIRST, HYBRID, states=(32, 48))
    second = put(tmp_path, SECOND, HYBRID)
    third = put(tmp_path, [*SECOND, *range(300, 316)], HYBRID)
    assert cache("pin", tmp_path, first)[0] == 0
    kv = [(end, False) for end in range(16, 96, 16)]
    assert pinned(tmp_path) == sorted([*kv, (48, True)])
    assert cache("pin", tmp_path, second, third)[0] == 0
    assert (32, True) in pinned(tmp_path) and (64, False) in pinned(tmp_path)
    assert cache("unpin", tmp_path, third)[0] == 0
    assert (32, True) in pinned(tmp_path), "the second one needs it"
    assert cache("unpin", tmp_path, second)[0] == 0
    assert pinned(tmp_path) == sorted([*kv, (48, True)])
    assert cache("unpin", tmp_path, first)[0] == 0
    assert pinned(tmp_path) == []


def test_a_damaged_state_is_found_and_a_removed_block_takes_its_state_along(cache, tmp_path: Path):
    block_hash = put(tmp_path, FIRST, HYBRID, states=(48, 80))
    key = state_key(hash_token_blocks(FIRST, BLOCK_SIZE)[2]).hex()
    (file,) = tmp_path.glob(f"blocks/*/*/{key}.kv")
    file.write_bytes(file.read_bytes()[:-1])
    status, out, _ = cache("verify", tmp_path, "--delete")
    assert status == 1 and f"{key}.kv: " in out and not file.exists()
    assert cache("rm", tmp_path, block_hash)[0] == 0
    assert CacheFolder(tmp_path).entries() == []


def test_show_of_a_made_up_tree_without_states_has_no_line_of_them():
    tree = tree_of(entry("a"))
    block = tree.blocks[hash_of("a")]
    assert not any(
        line.startswith("states") for line in show_prefix(tree, block, (), ListStyle(NOW))
    )
