"""States of sequences and checkpoints, with texts in the place of arrays."""

from __future__ import annotations

import pytest
from paged_testing.integrity import check_manager

from mlx_paged.core import (
    AbsentBlock,
    BlockHash,
    BlockPool,
    BlockTableError,
    Checkpoint,
    Checkpoints,
    Cut,
    KVCacheManager,
    SequenceState,
    SequenceStates,
    hash_token_blocks,
    state_key,
)
from mlx_paged.core.checkpoints import EVERYWHERE, MANY
from mlx_paged.core.tier import STATES

SIZE = 4


class Model:
    """Runs requests on a manager, and leaves in their states which tokens it has seen."""

    def __init__(self, num_checkpoints: int, num_blocks: int = 40):
        self.states = SequenceStates(num_checkpoints)
        pool = BlockPool(num_blocks, SIZE)
        self.manager = KVCacheManager(pool, states=self.states)

    @property
    def num_checkpoints(self) -> int:
        return len(self.states.checkpoints)

    def hashes(self, text: str) -> list[BlockHash]:
        return hash_token_blocks(list(map(ord, text)), SIZE)

    def run(
        self,
        seq: str,
        text: str,
        until: int,
        hashed: int | None = None,
        prompt: int | None = None,
        num_drafts: int = 0,
    ) -> int:
        """Compute a sequence up to a token; returns how many of its tokens were hit.

        Args:
            hashed: of how many tokens the hashes are known already.
            prompt: of how many tokens the prompt is; as many as run first by default.
            num_drafts: of its tokens, the last ones.
        """
        manager = self.manager
        hashes = self.hashes(text[: until - num_drafts if hashed is None else hashed])
        num_hit = 0
        if seq in manager.tables:
            begin = manager.num_tokens(seq)
            assert manager.allocate_slots(seq, until - begin) is not None
        else:
            asked = text[: until if prompt is None else prompt]
            computed = manager.get_computed_blocks(self.hashes(asked), len(asked))
            begin = num_hit = computed.num_tokens
            assert manager.allocate_slots(seq, until - begin, computed) is not None
        manager.cache_blocks(seq, hashes)
        assert self.states.get(seq, begin) == (text[:begin] or None), "the state of its tokens"
        cuts = self.states.cuts(seq, begin, until - num_drafts, SIZE)
        newest = {seq: SequenceState(until, text[:until])}
        at_block_ends = {seq: [(cut, text[: cut.num_tokens]) for cut in cuts]}
        before = {seq: SequenceState(begin, text[:begin])} if num_drafts else {}
        self.states.end_step(newest, at_block_ends, manager.tables, before)
        check_manager(manager)
        return num_hit


TEXT = "abcdefghijklmnopqrstuvwxyz"


def test_with_few_checkpoints_a_hit_ends_where_a_prompt_did():
    model = Model(num_checkpoints=4)
    model.run("a", TEXT, 10, prompt=14)
    model.run("a", TEXT, 14)
    for until in range(15, 23):
        model.run("a", TEXT, until)
    assert model.num_checkpoints == 1
    # All blocks are there, and a state after the third.
    assert model.run("b", TEXT, 24) == 12
    assert model.run("c", TEXT[:12] + "others", 18) == 12
    assert model.run("d", TEXT[:9] + "others", 15) == 0
    assert model.run("e", TEXT[:9] + "again", 14) == 0


def test_with_many_checkpoints_a_hit_ends_at_answers_and_where_prompts_part():
    model = Model(num_checkpoints=MANY)
    model.run("a", TEXT, 10, prompt=14)
    model.run("a", TEXT, 14)
    for until in range(15, 23):
        model.run("a", TEXT, until)
    assert model.num_checkpoints == 2  # of each answer the newest one
    assert model.run("b", TEXT, 24) == 20
    # Its K/V are there up to the end of a block at which no prompt ended. It leaves a state there.
    assert model.run("c", TEXT[:9] + "others", 15) == 0
    assert model.run("d", TEXT[:9] + "again", 14) == 8
    # In steps of any length.
    model.run("e", TEXT[:17] + "other", 14, prompt=22)
    model.run("e", TEXT[:17] + "other", 22)
    assert model.run("f", TEXT[:17] + "again", 22) == 16


def test_with_room_for_very_many_there_is_one_every_512_tokens():
    model = Model(num_checkpoints=EVERYWHERE, num_blocks=1000)
    text = "".join(chr(33 + (7 * i * i) % 90) for i in range(2000))
    model.run("a", text, 700, prompt=1500)
    model.run("a", text, 1500)
    assert model.num_checkpoints == 3
    assert model.run("b", text[:1100] + "!" * 20, 1120) == 1024


def test_a_state_needs_its_blocks_and_blocks_their_state():
    model = Model(num_checkpoints=4, num_blocks=1 + 6)
    model.run("a", "abcdefghij", 10)
    model.manager.free("a")
    model.run("b", "ABCDEFGHIJKLMNOPQRSTUVWX", 24)  # takes all blocks
    model.manager.free("b")
    assert model.num_checkpoints == 2
    assert model.run("c", "abcdefghij", 10) == 0
    model.manager.free("c")
    model.states.checkpoints.clear()
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


def test_a_checkpoint_that_a_later_prompt_has_gone_on_from_goes_before_older_ones():
    model = Model(num_checkpoints=2)
    model.run("other", "ABCDEFGH", 8)
    model.run("a", TEXT, 8)
    assert model.run("a2", TEXT, 16) == 8  # its end supersedes that of a
    assert model.run("other2", "ABCDEFGHI", 9) == 8
    assert model.run("a3", TEXT, 20) == 16
    # A second conversation that goes on from the same one keeps it from then on.
    model = Model(num_checkpoints=3)
    model.run("a", TEXT, 8)
    assert model.run("b", TEXT[:8] + "first one", 17) == 8
    assert model.run("c", TEXT[:8] + "another on", 18) == 8
    model.run("d", "ABCDEFGH", 8)
    assert model.run("e", TEXT[:8] + "a third", 15) == 8


def test_of_many_the_one_whose_loss_costs_least_goes_first():
    kept = Checkpoints(MANY)
    for number in range(MANY):
        kept.put(Checkpoint(named(number), number), num_lost_tokens=100 + number)
    kept.use(kept.get(named(0)))  # 200 tokens by its hit
    kept.put(Checkpoint(named(100), "new"), num_lost_tokens=500)
    assert named(1) not in kept and named(0) in kept and len(kept) == MANY
    # What is new begins at the worth of what went last, so that old ones go in the end.
    kept.put(Checkpoint(named(101), "new"), num_lost_tokens=2)
    assert named(2) not in kept
    kept.supersede(named(100))
    kept.put(Checkpoint(named(102), "new"), num_lost_tokens=500)
    assert named(100) not in kept
    # Where prompts go different ways, one that went on supersedes nothing.
    kept.put(Checkpoint(named(102), "new"), is_junction=True)
    kept.supersede(named(102))
    kept.put(Checkpoint(named(103), "new"), num_lost_tokens=500)
    assert named(102) in kept


def named(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(4, "little"))


def test_a_state_after_an_unread_token_is_kept_when_its_block_is_known():
    """One step ahead, a block is hashed after the step that filled it was launched."""
    model = Model(num_checkpoints=MANY)
    model.run("a", TEXT, 7)
    model.run("a", TEXT, 8, hashed=7)
    assert model.num_checkpoints == 1
    model.manager.cache_blocks("a", model.hashes(TEXT[:8]))
    model.manager.free("a")
    assert model.run("b", TEXT, 26) == 8
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
    with pytest.raises(BlockTableError, match=r"has no state of 5 tokens, only one of 6"):
        model.states.get("a", 5)
    with pytest.raises(BlockTableError, match=r"'b' has no state of 5 tokens$"):
        model.states.get("b", 5)
    with pytest.raises(BlockTableError, match=r"state of 6 tokens, which can't be cut to 5"):
        model.manager.trim("a", 5)
    assert model.manager.num_tokens("a") == 6
    model.manager.trim("a", 0)
    model.run("a", "xyz", 3)


def test_drafts_are_kept_as_a_whole_or_not_at_all():
    model = Model(num_checkpoints=MANY)
    manager = model.manager
    model.run("a", "abcdef", 6)
    # One more token and two drafts, which end a block: they leave no checkpoint.
    model.run("a", "abcdefghi", 9, num_drafts=2)
    assert model.num_checkpoints == 1, "that of its prompt"
    assert manager.trim("a", 8) == manager.num_tokens("a") == 6
    # Its newest state is of nothing after these again, and drafts are verified once.
    with pytest.raises(BlockTableError, match=r"state of 6 tokens, which can't be cut to 5"):
        manager.trim("a", 5)
    # The token and the right draft again, and two drafts: all of them stay.
    model.run("a", "abcdefgHIJ", 10, num_drafts=2)
    assert manager.trim("a", 10) == manager.num_tokens("a") == 10
    assert model.states.get("a", 10) == "abcdefgHIJ"
    with pytest.raises(BlockTableError, match=r"state of 10 tokens, which can't be cut to 6"):
        manager.trim("a", 6)
    # What falls back to no state at all begins again.
    model.run("b", "xyz", 3, num_drafts=1)
    assert manager.trim("b", 2) == manager.num_tokens("b") == 0
    model.run("b", "xyw", 3)
    manager.free("a")
    manager.free("b")
    assert len(model.states) == 0


def test_states_that_are_reset_are_forgotten_with_all_that_waits_for_a_name():
    states = SequenceStates(num_checkpoints=2)
    states.put({"a": SequenceState(5, "state")})
    states.begin("b", 4, Checkpoint(named(1), "checkpoint"), 9, 4)
    states.offer("a", Cut(4), "offered")
    states.reset()
    assert len(states) == len(states.checkpoints) == len(states._pending) == 0
    assert named(1) not in states.checkpoints
    assert states.checkpoints.num_checkpoints == 2


def test_a_cache_that_is_reset_hits_nothing():
    model = Model(num_checkpoints=3)
    model.run("a", "abcdefghij", 10)
    assert not model.manager.reset_prefix_cache()
    assert model.num_checkpoints == 1
    model.manager.free("a")
    assert model.manager.reset_prefix_cache()
    assert model.num_checkpoints == 0


def test_a_state_that_is_elsewhere_is_asked_for_first_and_makes_a_longer_prefix():
    model = Model(num_checkpoints=2)
    text = "abcdefghijkl"
    hashes = model.hashes(text)
    there = {*hashes, state_key(hashes[1])}
    absent = model.manager.absent_blocks(hashes, 12, there.__contains__)
    assert absent == [
        AbsentBlock(STATES, state_key(hashes[1]), 8),
        AbsentBlock(0, hashes[0]),
        AbsentBlock(0, hashes[1]),
    ]
    # Without the state no block is asked for, and with it in memory it is not asked for.
    assert model.manager.absent_blocks(hashes, 12, set(hashes).__contains__) == []
    model.states.checkpoints.put(Checkpoint(hashes[1], "abcdefgh"))
    absent = model.manager.absent_blocks(hashes, 12, there.__contains__)
    assert absent == [AbsentBlock(0, hashes[0]), AbsentBlock(0, hashes[1])]


def test_a_checkpoint_is_shared_when_a_second_prompt_goes_on_from_it():
    checkpoints = Checkpoints(4)
    checkpoints.put(Checkpoint(named(1), "end"))
    checkpoints.put(Checkpoint(named(2), "junction"), is_junction=True)
    found = []
    for _ in range(3):
        found.append([checkpoints.is_shared(named(number)) for number in (1, 2, 3)])
        for number in (1, 2):
            checkpoints.use(checkpoints.get(named(number)))
    assert found == [[False, False, False], [False, True, False], [True, True, False]]


def test_a_checkpoint_that_goes_for_another_is_told_before_it_has_gone():
    checkpoints, told = Checkpoints(2), []

    def tell(checkpoint: Checkpoint) -> None:
        told.append((checkpoint.content, checkpoint.block_hash in checkpoints))

    checkpoints.on_eviction = tell
    for number in range(4):
        checkpoints.put(Checkpoint(named(number), number))
    checkpoints.remove([named(3)])
    checkpoints.clear()
    assert told == [(0, True), (1, True)]
