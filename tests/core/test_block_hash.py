"""Hashes name content: the same everywhere, and different for whatever makes K/V different."""

import hashlib
import itertools
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_paged.core import extend_block_hashes, hash_block_tokens, hash_token_blocks

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=20)
extra_key = st.recursive(
    st.none() | st.integers() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)
extra_keys = st.lists(extra_key, max_size=3).map(tuple)


def typed(value):
    """A value that is equal only to itself: 1 == True == 1.0, but their types differ."""
    return tuple(map(typed, value)) if isinstance(value, tuple) else (type(value), value)


def test_a_hash_is_these_bytes_for_ever():
    # Written out by hand from the layout in block_hash.py: a change here invalidates every snapshot
    # on disk.
    def u64(n):
        return n.to_bytes(8, "little")

    first = hashlib.sha256(
        b"mlx_paged.block.v1\0" + b"\x00" + u64(2) + u64(7) + u64(300) + b"t" + u64(0)
    ).digest()
    second = hashlib.sha256(
        b"mlx_paged.block.v1\0" + b"\x01" + u64(32) + first + u64(1) + u64(9) + b"t" + u64(4)
        + b"s" + u64(4) + b"lora" + b"i" + u64(1) + b"\x05"
        + b"n" + b"t" + u64(1) + b"b" + u64(1) + b"x",
    ).digest()  # fmt: skip
    assert hash_block_tokens(None, [7, 300]) == first
    assert hash_block_tokens(first, (9,), ("lora", 5, None, (b"x",))) == second


def test_a_hash_is_the_same_in_another_process_with_another_hash_seed():
    program = (
        "from mlx_paged.core import hash_token_blocks; "
        "print(hash_token_blocks(range(40), 16, ('a', 1))[-1].hex())"
    )
    here = hash_token_blocks(range(40), 16, ("a", 1))[-1].hex()
    path = os.pathsep.join(filter(None, sys.path))
    for seed in "1", "2":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        there = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, check=True
        )
        assert there.stdout.decode().strip() == here


def test_only_full_blocks_are_hashed():
    assert [len(hash_token_blocks(list(range(n)), 16)) for n in (0, 1, 15, 16, 17, 32, 500)] == [
        0,
        0,
        0,
        1,
        1,
        2,
        31,
    ]


def test_each_block_is_hashed_with_its_parent():
    first = hash_block_tokens(None, [1, 2], ("salt",))
    second = hash_block_tokens(first, [3, 4], ("salt",))
    assert hash_token_blocks([1, 2, 3, 4, 5], 2, ("salt",)) == [first, second]
    assert second != hash_block_tokens(None, [3, 4], ("salt",))


def test_a_token_changes_its_block_and_all_after_it():
    before = hash_token_blocks([1, 2, 3, 4, 5, 6], 2)
    after = hash_token_blocks([1, 2, 3, 9, 5, 6], 2)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False]


def test_keys_that_look_alike_have_different_hashes():
    lookalikes = [
        (), (None,), (1,), ("1",), (b"1",), ((1,),), (((1,),),), ("",), (b"",), (0,), (-1,), (255,),
        (256,), (-256,), (1, 1), (1, (1,)), ((1,), 1), ((1, 1),), ("ab", "c"), ("a", "bc"),
        ("abc",), ("a", None), (None, "a"), ((),),
        ((), ()), (((),),), ("n",), ("\ud800",), (2**64,), (2**64 + 1,), (2**200,),
    ]  # fmt: skip
    assert len({hash_block_tokens(None, [1, 2], keys) for keys in lookalikes}) == len(lookalikes)


def test_parent_and_tokens_and_keys_do_not_run_into_each_other():
    root = hash_block_tokens(None, [])
    variants = [
        (None, [0]),
        (None, [0, 0]),
        (b"", [0]),
        (b"\0", [0]),
        (root, []),
        (root, [0]),
        (None, [-1]),
    ]
    assert len({hash_block_tokens(parent, ids) for parent, ids in variants}) == len(variants)


@given(st.lists(st.tuples(tokens, extra_keys), min_size=2, max_size=6))
def test_two_hashes_are_equal_exactly_when_tokens_and_keys_are(contents):
    for (ids_a, keys_a), (ids_b, keys_b) in itertools.combinations(contents, 2):
        same_hash = hash_block_tokens(None, ids_a, keys_a) == hash_block_tokens(None, ids_b, keys_b)
        assert same_hash == (ids_a == ids_b and typed(keys_a) == typed(keys_b))


@given(tokens, st.integers(1, 5), extra_keys, st.lists(st.integers(0, 20), max_size=5))
def test_extending_step_by_step_gives_the_same_list_as_at_once(ids, block_size, keys, cuts):
    hashes = []
    added = [
        extend_block_hashes(hashes, ids[:cut], block_size, keys)
        for cut in [*sorted(cuts), len(ids)]
    ]
    assert hashes == hash_token_blocks(ids, block_size, keys)
    assert sum(added) == len(hashes)


def test_extending_hashes_only_the_new_blocks():
    hashes = [b"taken as right"]
    assert extend_block_hashes(hashes, [1, 2, 3, 4, 5], 2) == 1
    assert hashes == [b"taken as right", hash_block_tokens(b"taken as right", [3, 4])]


def test_more_hashes_than_full_blocks_are_refused():
    with pytest.raises(
        ValueError, match=r"extend_block_hashes: 2 hashes for 3 tokens, which fill 1 blocks of 2"
    ):
        extend_block_hashes(hash_token_blocks([1, 2, 3, 4], 2), [1, 2, 3], 2)


def test_a_block_size_below_one_is_refused():
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        hash_token_blocks([1], 0)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (True, "bool"),
        (1.0, "float"),
        ([1], "list"),
        ({}, "dict"),
        (bytearray(b"x"), "bytearray"),
        ((1, [2]), "list"),
    ],
)
def test_an_extra_key_of_another_type_is_refused_by_name(key, kind):
    with pytest.raises(
        TypeError, match=rf"hash_block_tokens: extra key .* is a {kind}; use str, int, bytes"
    ):
        hash_block_tokens(None, [1], (key,))


@pytest.mark.parametrize("keys", ["salt", ["salt"], None])
def test_extra_keys_must_be_a_tuple(keys):
    with pytest.raises(TypeError, match=f"extra_keys must be a tuple, got {type(keys).__name__}"):
        hash_token_blocks([1], 1, keys)


@pytest.mark.parametrize("token", ["1", 1.5, None, 2**63])
def test_a_token_that_is_no_64_bit_integer_is_refused(token):
    with pytest.raises(TypeError, match="hash_block_tokens: token ids must be integers"):
        hash_block_tokens(None, [token])
