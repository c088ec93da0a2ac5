"""The free queue keeps an order and lets a block leave from anywhere, at the same small cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_paged.core import BlockError, FreeKVCacheBlockQueue, KVCacheBlock


def make(n):
    blocks = [KVCacheBlock(block_id) for block_id in range(n)]
    return blocks, FreeKVCacheBlockQueue(blocks)


def state(queue):
    """Ids front to back; the way back must be its mirror and the count must agree."""
    ids = [block.block_id for block in queue]
    backwards, block = [], queue._tail.prev_free_block
    while block is not queue._head:
        backwards.append(block.block_id)
        block = block.prev_free_block
    assert backwards == ids[::-1]
    assert queue.num_free_blocks == len(ids)
    return ids


def test_a_new_queue_has_the_blocks_in_the_order_given():
    _, queue = make(4)
    assert state(queue) == [0, 1, 2, 3]
    assert state(FreeKVCacheBlockQueue()) == []


def test_popleft_n_takes_all_or_raises():
    _, queue = make(5)
    assert [block.block_id for block in queue.popleft_n(3)] == [0, 1, 2]
    assert queue.popleft_n(0) == []
    for n in 3, -1:
        with pytest.raises(BlockError, match=rf"popleft_n: {n} blocks requested, 2 are free"):
            queue.popleft_n(n)
    assert state(queue) == [3, 4]
    assert [block.block_id for block in queue.popleft_n(2)] == [3, 4]
    assert (state(queue), queue.first) == ([], None)


def test_append_goes_last_and_prepend_goes_first():
    blocks, queue = make(6)
    queue.popleft_n(6)
    queue.append_n([blocks[2]])
    queue.append_n([blocks[3], blocks[1]])
    queue.prepend_n([blocks[5]])
    queue.prepend_n([blocks[0], blocks[4]])
    assert state(queue) == [0, 4, 5, 2, 3, 1]
    assert queue.first is blocks[0]


def test_a_block_can_be_removed_from_the_front_the_middle_and_the_end():
    blocks, queue = make(5)
    for block_id, left in [(2, [0, 1, 3, 4]), (0, [1, 3, 4]), (4, [1, 3]), (1, [3]), (3, [])]:
        queue.remove(blocks[block_id])
        assert state(queue) == left
        assert (blocks[block_id].prev_free_block, blocks[block_id].next_free_block) == (None, None)


def test_a_block_outside_the_queue_cannot_be_removed():
    blocks, queue = make(3)
    queue.remove(blocks[1])
    with pytest.raises(BlockError, match="remove: block 1 is not in the queue"):
        queue.remove(blocks[1])
    assert state(queue) == [0, 2]


@pytest.mark.parametrize("verb", ["append_n", "prepend_n"])
def test_a_block_in_the_queue_cannot_be_put_in_again(verb):
    blocks, queue = make(3)
    with pytest.raises(
        BlockError, match=rf"FreeKVCacheBlockQueue.{verb}: block 1 is in the queue already"
    ):
        getattr(queue, verb)([blocks[1]])
    assert state(queue) == [0, 1, 2]


def test_an_error_in_the_middle_of_many_leaves_a_whole_queue():
    blocks, queue = make(4)
    queue.remove(blocks[3])
    with pytest.raises(BlockError):
        queue.append_n([blocks[3], blocks[0]])
    assert state(queue) == [0, 1, 2, 3]


def test_blocks_may_be_removed_while_iterating():
    _, queue = make(4)
    for block in queue:
        queue.remove(block)
    assert state(queue) == []


class CountingBlock(KVCacheBlock):
    """Counts every read and write of a link, of any block."""

    touched = 0

    def __getattribute__(self, name):
        CountingBlock.touched += name in ("prev_free_block", "next_free_block")
        return super().__getattribute__(name)

    def __setattr__(self, name, value):
        CountingBlock.touched += name in ("prev_free_block", "next_free_block")
        super().__setattr__(name, value)


@pytest.mark.parametrize("verb", ["remove", "popleft_n", "append_n", "prepend_n"])
def test_a_verb_touches_as_many_links_in_a_queue_of_ten_thousand_as_in_one_of_ten(verb):
    counts = []
    for n in 10, 10_000:
        blocks = [CountingBlock(block_id) for block_id in range(n)]
        queue = FreeKVCacheBlockQueue(blocks)
        spare = CountingBlock(n)
        CountingBlock.touched = 0
        getattr(queue, verb)({"remove": blocks[n // 2], "popleft_n": 1}.get(verb, [spare]))
        counts.append(CountingBlock.touched)
    assert 0 < counts[0] == counts[1] <= 12


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["remove", "append_n", "prepend_n", "popleft_n"]), st.integers(0, 7)
        )
    )
)
def test_any_sequence_of_verbs_agrees_with_a_list(verbs):
    blocks, queue = make(8)
    model = list(range(8))
    for verb, number in verbs:
        if verb == "popleft_n" and number <= len(model):
            assert [block.block_id for block in queue.popleft_n(number)] == model[:number]
            del model[:number]
        elif verb == "remove" and number in model:
            queue.remove(blocks[number])
            model.remove(number)
        elif verb == "append_n" and number not in model:
            queue.append_n([blocks[number]])
            model.append(number)
        elif verb == "prepend_n" and number not in model:
            queue.prepend_n([blocks[number]])
            model.insert(0, number)
        assert state(queue) == model
