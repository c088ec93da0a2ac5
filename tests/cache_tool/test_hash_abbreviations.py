"""Blocks and models by the beginnings of their hashes and the ends of their names."""

from __future__ import annotations

import dataclasses

import pytest
from helpers.block_entries import DEMO, entries, entry, hash_of

from mlx_paged.block_store.prefixes import as_trees
from mlx_paged.cli.cache.program import find, of_model
from mlx_paged.errors import ArgumentError

OTHER = dataclasses.replace(DEMO, model="other content", model_name="owner/Other-4bit")
FINGERPRINTS = {DEMO.digest: DEMO, OTHER.digest: OTHER}


def trees_of(*blocks):
    return as_trees(FINGERPRINTS, blocks)


def test_any_beginning_that_is_unique_names_a_block():
    trees = trees_of(*entries("abc"))
    digits = hash_of("ab").hex()
    for text in (digits[:4], digits[:9].upper(), digits):
        assert find(text, trees)[1].block_hash == hash_of("ab")


@pytest.mark.parametrize("text", ["", "abc", "wxyz", "0" * 65, "../../etc", "12 34"])
def test_what_is_no_beginning_of_a_hash_is_refused(text: str):
    with pytest.raises(ArgumentError, match="4 to 64 hex digits, got '"):
        find(text, trees_of(*entries("abc")))


def test_a_hash_that_is_not_there_is_refused():
    with pytest.raises(ArgumentError, match="no block whose hash begins with 00000000"):
        find("00000000", trees_of(*entries("abc")))


def test_an_ambiguous_hash_is_refused_with_its_candidates():
    same = [
        entry("a", block_hash=bytes([1, 2, 3, 4, last]) + b"\0" * 27, first_token=16 * last)
        for last in range(8)
    ]
    with pytest.raises(ArgumentError) as caught:
        find("01020304", trees_of(*same))
    message = str(caught.value)
    first = f"0102030400 (16 tokens of demo, {DEMO.digest[:8]})"
    assert message.startswith(f"01020304 is ambiguous: {first}, ")
    assert message.endswith(", and 3 more")
    assert find("0102030405", trees_of(*same))[1].first_token == 80


def test_the_same_hash_of_two_models_is_told_apart_by_the_model():
    trees = trees_of(entry("a"), entry("a", OTHER))
    text = hash_of("a").hex()
    with pytest.raises(ArgumentError, match=r"ambiguous: .*; say which with --model"):
        find(text, trees)
    (tree,) = of_model(trees, "Other-4bit")
    assert find(text, [tree])[0] is tree


@pytest.mark.parametrize("name", ["owner/Other-4bit", "Other-4bit", OTHER.digest, OTHER.digest[:4]])
def test_a_model_has_several_names(name: str):
    trees = trees_of(entry("a"), entry("a", OTHER))
    assert [tree.digest for tree in of_model(trees, name)] == [OTHER.digest]


def test_a_model_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ArgumentError, match=r"--model 'Qwen': .*; it holds demo, owner/Other-4bit"):
        of_model(trees_of(entry("a"), entry("a", OTHER)), "Qwen")
    with pytest.raises(ArgumentError, match="it is empty"):
        of_model([], "Qwen")
