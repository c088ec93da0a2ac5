"""Trees of shared prefixes, out of the entries of a folder in any order."""

from __future__ import annotations

import random

from helpers.block_entries import BLOCK_SIZE, DEMO, NOW, entries, entry, hash_of, tree_of

from mlx_paged.block_store.prefixes import PrefixTree, as_trees, runs_of


def ends(tree: PrefixTree) -> list[tuple[int, int, int]]:
    """First token, end, and number of prefixes of each line of the tree."""
    return [(run.first_token, run.end_token, run.num_prefixes) for run in tree.runs()]


def test_a_run_ends_where_prefixes_fork():
    tree = tree_of(*entries("abcd", "abefg", "abeh"))
    assert sorted(ends(tree)) == [(0, 32, 3), (32, 48, 2), (32, 64, 1), (48, 64, 1), (48, 80, 1)]
    assert (tree.num_leaves, len(tree.blocks), tree.num_tokens) == (3, 8, 8 * BLOCK_SIZE)


def test_a_prefix_that_is_the_beginning_of_another_is_no_fork():
    assert ends(tree_of(*entries("ab", "abcd"))) == [(0, 64, 1)]


def test_random_sequences_make_the_tree_that_their_common_beginnings_say():
    source = random.Random(0)
    for _ in range(50):
        words = {
            "".join(source.choices("abc", k=source.randint(1, 8)))
            for _ in range(source.randint(1, 12))
        }
        blocks = entries(*words)
        source.shuffle(blocks)
        tree = tree_of(*blocks)
        # Counted from the words alone.
        prefixes = {word[:end] for word in words for end in range(1, len(word) + 1)}
        leaves = {p for p in prefixes if not any(o[:-1] == p for o in prefixes)}
        assert {hash_of(prefix) for prefix in prefixes} == set(tree.blocks)
        for prefix in prefixes:
            through = sum(leaf.startswith(prefix) for leaf in leaves)
            assert tree.blocks[hash_of(prefix)].num_prefixes == through
        drawn = [block.block_hash for run in tree.runs() for block in run.blocks]
        assert sorted(drawn) == sorted(tree.blocks), "each block is in one line"
        for word in words:
            path = tree.blocks[hash_of(word)].path()
            assert [b.block_hash for b in path] == [
                hash_of(word[:end]) for end in range(1, len(word) + 1)
            ]
            below = {block.block_hash for block in path[-1].below()}
            assert below == {hash_of(p) for p in prefixes if p.startswith(word) and p != word}


def test_what_was_used_last_comes_first():
    tree = tree_of(entry("a"), entry("ab", age=30.0), entry("ac", age=10.0), entry("ad", age=20.0))
    lines = [run.blocks[-1].block_hash for run in tree.runs()]
    assert lines == [hash_of("a"), hash_of("ac"), hash_of("ad"), hash_of("ab")]


def test_blocks_without_those_before_them_are_roots_of_their_own():
    tree = tree_of(*entries("abcd")[2:], *entries("xy"))
    assert {(run.first_token, run.is_cut_off) for run in tree.runs()} == {(32, True), (0, False)}


def test_a_run_is_pinned_or_it_is_not():
    tree = tree_of(
        entry("a", is_pinned=True), entry("ab", is_pinned=True), entry("abc"), entry("abcd")
    )
    runs = list(tree.runs())
    assert [(run.end_token, run.is_pinned) for run in runs] == [(32, True), (64, False)]
    assert [run.siblings_follow for run in runs] == [(), (False,)]


def test_the_files_of_all_groups_of_layers_are_one_block():
    first, second = entry("a", nbytes=10), entry("a", group=1, nbytes=20, ttl=90.0)
    block = tree_of(second, first).blocks[hash_of("a")]
    assert [each.group for each in block.entries] == [0, 1]
    assert (block.nbytes, block.expires) == (30, NOW - 60 + 90)
    tree = tree_of(*entries("ab"), *entries("ab", group=1))
    assert ends(tree) == [(0, 32, 1)] and tree.num_tokens == 2 * BLOCK_SIZE


def test_headers_that_contradict_each_other_make_no_circle():
    one = entry("ab", parent_hash=hash_of("ac"))
    other = entry("ac", parent_hash=hash_of("ab"))
    tree = tree_of(one, other)
    assert sorted(ends(tree)) == [(16, 32, 1), (16, 32, 1)]
    itself = tree_of(entry("ab", parent_hash=hash_of("ab")))
    assert ends(itself) == [(16, 32, 1)]


def test_a_sequence_with_a_fork_at_each_of_5000_blocks_takes_no_recursion():
    # As turns whose last tokens the chat template writes again leave it behind.
    num_turns = 5000
    trunk = [
        entry("t", block_hash=index.to_bytes(32, "big"), first_token=16 * index,
              parent_hash=(index - 1).to_bytes(32, "big") if index else None)
        for index in range(num_turns)
    ]  # fmt: skip
    tails = [
        entry("t", block_hash=(index + 2**64).to_bytes(32, "big"), first_token=16 * (index + 1),
              parent_hash=index.to_bytes(32, "big"), age=120.0)
        for index in range(num_turns)
    ]  # fmt: skip
    tree = tree_of(*trunk, *tails)
    assert tree.num_leaves == num_turns
    assert max(run.level for run in tree.runs()) == num_turns - 1
    assert len(tree.roots[0].below()) == 2 * num_turns - 1


def test_the_lines_of_a_prefix_are_those_of_the_tree_up_to_its_end():
    tree = tree_of(*entries("abcd", "abefg", "abeh"))
    parts = list(runs_of(tree.blocks[hash_of("abef")].path()))
    assert [(part.first_token, part.end_token, part.num_prefixes) for part in parts] == [
        (0, 32, 3), (32, 48, 2), (48, 64, 1)
    ]  # fmt: skip
    assert not any(part.is_cut_off for part in parts)


def test_a_line_and_all_under_it_are_alone_with_each_of_its_blocks():
    tree = tree_of(*entries("abcd", "abefgh", "abefgi"))

    def alone(prefix: str) -> set[bytes]:
        return {b.block_hash for b in tree.blocks[hash_of(prefix)].alone()}

    assert alone("abc") == alone("abcd") == {hash_of("abc"), hash_of("abcd")}
    fork = {hash_of(p) for p in ("abe", "abef", "abefg", "abefgh", "abefgi")}
    assert alone("abe") == alone("abefg") == fork
    assert alone("abefgh") == {hash_of("abefgh")}
    assert alone("a") == alone("ab") == set(tree.blocks)


def test_a_block_is_as_young_as_what_continues_it():
    tree = tree_of(entry("a", age=900.0), entry("ab", age=50.0), entry("ac", age=70.0))
    first, second, third = (tree.blocks[hash_of(prefix)].last_use for prefix in ("a", "ab", "ac"))
    assert first == second > third


def test_each_fingerprint_has_a_tree_and_files_of_other_versions_are_counted():
    other = entry("a", digest="f" * 32, num_tokens=0, parent_hash=None)
    trees = as_trees({DEMO.digest: DEMO}, [*entries("ab"), other, entry("b", digest="f" * 32)])
    assert [tree.name for tree in trees] == ["an unknown model", "demo"]
    assert trees[0].other_versions == [other] and len(trees[0].blocks) == 1
