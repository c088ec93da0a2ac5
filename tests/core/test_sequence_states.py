"""States of sequences and checkpoints, with texts in the place of arrays."""

from __future__ import annotations

import pytest

from mlx_paged.core import (
    BlockHash,
    BlockPool,
    BlockTableError,
    KVCacheManager,
    SequenceState,
    SequenceStates,
    hash_token_blocks,
)
from mlx_paged.core.sequence_states import Checkpoint

SIZE = 4


class Model:
    """Runs requests on a manager, and leaves in their states which tokens it has seen."""

    def __init__(self, num_checkpoints: int, num_blocks: int = 40):
        self.states = SequenceStates(num_checkpoints)
        pool = BlockPool(num_blocks, SIZE)
        self.manager = KVCacheManager(pool, states=self.states)

    @property
    def num_checkpoints(self) -> int:
        return len(self.states._checkpoints)

    def hashes(self, text: str) -> list[BlockHash]:
        return hash_token_blocks(list(map(ord, text)), SIZE)

    def run(self, seq: str, text: str, until: int, hashed: int | None = None) -> int:
        """Compute a sequence up to a token; returns how many of its tokens were hit.

        Args:
            hashed: of how many tokens the hashes are known already.
        """
        manager = self.manager
        hashes = self.hashes(text[: until if hashed is None else hashed])
        num_hit = 0
        if seq in manager.tables:
            begin = manager.num_tokens(seq)
            assert manager.allocate_slots(seq, until - begin) is not None
        else:
            computed = manager.get_computed_blocks(self.hashes(text), len(text))
            begin = num_hit = computed.num_tokens
            assert manager.allocate_slots(seq, until - begin, computed) is not None
        manager.cache_blocks(seq, hashes)
        assert self.states.get(seq, begin) == (text[:begin] or None), "the state of its tokens"
        end = until // SIZE * SIZE
        at_block_ends = {}
        if end > begin:
            at_block_ends[seq] = SequenceState(end, text[:end]), end - begin == 1
        newest = {seq: SequenceState(until, text[:until])}
        manager.put_states(self.states, newest, at_block_ends)
        manager.check_integrity()
        return num_hit


def test_a_hit_ends_where_a_state_was_kept():
    model = Model(num_checkpoints=4)
    text = "abcdefghijklmnopqrstuvwxyz"
    model.run("a", text, 14)
    model.run("a", text, 22)
    assert model.num_checkpoints == 2
    # All blocks are there, and states behind the third and the fifth.
    assert model.run("b", text, 24) == 20
    assert model.run("c", text[:19], 19) == 12
    assert model.run("d", text[:12] + "others", 18) == 12
    assert model.run("e", text[:9] + "others", 15) == 0


def test_a_state_needs_its_blocks_and_blocks_their_state():
    model = Model(num_checkpoints=4, num_blocks=1 + 6)
    model.run("a", "abcdefghij", 10)
    model.manager.free("a")
    model.run("b", "ABCDEFGHIJKLMNOPQRSTUVWX", 24)  # takes all blocks
    model.manager.free("b")
    assert model.num_checkpoints == 2
    assert model.run("c", "abcdefghij", 10) == 0
    model.manager.free("c")
    model.states.clear_checkpoints()
    assert model.run("d", "abcdefghij", 10) == 0


def test_the_least_recently_used_checkpoint_goes_first():
    model = Model(num_checkpoints=2)
    texts = ["aaaaaaaa.", "bbbbbbbb.", "cccccccc."]
    model.run("0", texts[0], 9)
    model.run("1", texts[1], 9)
    assert model.run("again", texts[0], 9) == 8
    model.run("2", texts[2], 9)
    assert [model.run(f"{text}?", text, 9) for text in (texts[0], texts[2])] == [8, 8]
    assert model.run("gone", texts[1], 9) == 0


def test_decodes_of_a_sequence_leave_one_checkpoint_besides_that_of_the_prompt():
    model = Model(num_checkpoints=9)
    text = "abcdefghijklmnopqrstuvwxyz"
    model.run("a", text, 6)
    for until in range(7, 22):
        model.run("a", text, until)
    assert model.num_checkpoints == 2
    assert model.run("b", text, 26) == 20
    assert model.run("c", text[:15], 15) == 4


def test_a_state_after_an_unread_token_is_kept_when_its_block_is_known():
    """One step ahead, a block is hashed after the step that filled it was launched."""
    model = Model(num_checkpoints=9)
    text = "abcdefghijklmnopqrstuvwxyz"
    model.run("a", text, 7)
    model.run("a", text, 8, hashed=7)
    assert model.num_checkpoints == 1
    model.manager.cache_blocks("a", model.hashes(text[:8]))
    model.manager.free("a")
    assert model.run("b", text, 26) == 8
    # One whose token never came is forgotten with its sequence.
    model.run("c", "ABCDEFGHIJKL", 7)
    model.run("c", "ABCDEFGHIJKL", 8, hashed=7)
    model.manager.free("c")
    assert model.run("d", "ABCDEFGHIJKL", 12) == 4


def test_a_step_that_failed_leaves_no_checkpoint():
    model = Model(num_checkpoints=9)
    model.run("a", "abcdefghij", 10)
    model.manager.evict_blocks(model.manager.tables["a"].block_ids)
    model.manager.free("a")
    assert model.num_checkpoints == 0
    assert model.run("a", "abcdefghij", 10) == 0


def test_forks_share_a_state_and_go_on_from_it_alone():
    model = Model(num_checkpoints=0)
    model.run("a", "abcdefgh", 6)
    model.manager.fork("a", "b")
    model.run("a", "abcdefgh", 8)
    model.run("b", "abcdefxy", 7)
    assert model.states.get("a", 8) == "abcdefgh"
    assert model.states.get("b", 7) == "abcdefx"
    model.manager.free("a")
    model.manager.free("b")
    assert len(model.states) == model.num_checkpoints == 0


def test_a_state_is_of_so_many_tokens_and_no_others():
    model = Model(num_checkpoints=0)
    model.run("a", "abcdefgh", 6)
    with pytest.raises(BlockTableError, match=r"has one of 6 tokens, and not the state of 5"):
        model.states.get("a", 5)
    with pytest.raises(BlockTableError, match=r"'b' has none, and not the state of 5 tokens"):
        model.states.get("b", 5)
    with pytest.raises(BlockTableError, match=r"state of 6 tokens, which can't be cut to 5"):
        model.manager.trim("a", 5)
    assert model.manager.num_tokens("a") == 6
    model.manager.trim("a", 0)
    model.run("a", "xyz", 3)


def test_states_that_are_reset_are_forgotten_with_all_that_waits_for_a_name():
    states = SequenceStates(num_checkpoints=2)
    states.put({"a": SequenceState(5, "state")})
    states.begin("b", 4, Checkpoint(b"hash", "checkpoint"))
    states.offer("a", SequenceState(4, "offered"), is_decoded=False)
    states.reset()
    assert len(states) == len(states._checkpoints) == len(states._pending) == 0
    assert states.longest([b"hash"], 1) == 0
    assert states.num_checkpoints == 2


def test_a_cache_that_is_reset_hits_nothing():
    model = Model(num_checkpoints=3)
    model.run("a", "abcdefghij", 10)
    assert not model.manager.reset_prefix_cache()
    assert model.num_checkpoints == 1
    model.manager.free("a")
    assert model.manager.reset_prefix_cache()
    assert model.num_checkpoints == 0
