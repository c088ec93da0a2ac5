"""The prefix index finds the first block of a hash, and the next one when it is gone."""

from hypothesis import given
from hypothesis import strategies as st

from mlx_paged.core import KVCacheBlock, PrefixIndex


def make(*hashes):
    blocks = [
        KVCacheBlock(block_id, block_hash=block_hash) for block_id, block_hash in enumerate(hashes)
    ]
    index = PrefixIndex()
    for block in blocks:
        index.add(block)
    return blocks, index


def pairs(index):
    found = [(block_hash, block.block_id) for block_hash, block in index]
    assert index.num_blocks == len(found)
    return found


def test_a_miss_is_none_and_a_hit_is_the_block():
    blocks, index = make(b"a", b"b")
    assert (index.get(b"a"), index.get(b"b"), index.get(b"c")) == (blocks[0], blocks[1], None)


def test_of_two_blocks_with_one_hash_the_first_is_found():
    blocks, index = make(b"a", b"a", b"a")
    assert index.get(b"a") is blocks[0]
    assert pairs(index) == [(b"a", 0), (b"a", 1), (b"a", 2)]


def test_foreign_blocks_are_found_and_can_not_be_stored():
    blocks, index = make(b"a", b"a", b"a", b"b")
    assert index.get_storable(b"a") is blocks[0]
    blocks[0].is_foreign = blocks[3].is_foreign = True
    assert (index.get(b"a"), index.get_storable(b"a")) == (blocks[0], blocks[1])
    blocks[1].is_foreign = True
    assert index.get_storable(b"a") is blocks[2]
    assert (index.get(b"b"), index.get_storable(b"b")) == (blocks[3], None)
    assert index.get_storable(b"c") is None


def test_when_the_first_goes_the_next_is_found():
    blocks, index = make(b"a", b"a", b"a")
    for gone, found in [(0, 1), (1, 2)]:
        index.remove(blocks[gone])
        assert index.get(b"a") is blocks[found]
    index.remove(blocks[2])
    assert (index.get(b"a"), pairs(index)) == (None, [])


def test_when_a_duplicate_goes_the_first_stays():
    blocks, index = make(b"a", b"a")
    index.remove(blocks[1])
    assert index.get(b"a") is blocks[0]
    assert pairs(index) == [(b"a", 0)]


def test_a_block_may_leave_and_enter_again_behind_the_others():
    blocks, index = make(b"a", b"a")
    index.remove(blocks[0])
    index.add(blocks[0])
    assert pairs(index) == [(b"a", 1), (b"a", 0)]


def test_clear_forgets_duplicates_too():
    blocks, index = make(b"a", b"a", b"b")
    index.clear()
    assert (index.get(b"a"), pairs(index)) == (None, [])
    index.add(blocks[0])
    assert pairs(index) == [(b"a", 0)]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5))))
def test_any_sequence_of_entering_and_leaving_agrees_with_a_list(steps):
    blocks = [KVCacheBlock(block_id, block_hash=b"ab"[block_id % 2 :][:1]) for block_id in range(6)]
    index, model = PrefixIndex(), []
    for enters, block_id in steps:
        block = blocks[block_id]
        if enters and block not in model:
            index.add(block)
            model.append(block)
        elif not enters and block in model:
            index.remove(block)
            model.remove(block)
        for block_hash in b"a", b"b":
            expected = [other for other in model if other.block_hash == block_hash]
            assert [other for other_hash, other in index if other_hash == block_hash] == expected
            assert index.get(block_hash) is (expected[0] if expected else None)
        assert index.num_blocks == len(model)
