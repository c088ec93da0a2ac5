"""Which blocks and states go to disk and when, without arrays: a state is a text, and the disk is a
set.
"""

from __future__ import annotations

import pytest
from helpers.completions import new_completion

from mlx_paged.core import (
    BlockPool,
    Checkpoint,
    Checkpoints,
    group_hashes,
    hash_token_blocks,
    state_key,
)
from mlx_paged.core.tier import STATES, BlockHeader
from mlx_paged.engine.request import Completion
from mlx_paged.engine.storing import unsaved
from mlx_paged.engine.storing.unsaved import Unsaved, num_tokens_per_state

SIZE = 4
# A state weighs as much as 6 tokens of K/V, so 12 of them outweigh it.
WORTH = num_tokens_per_state(600, 100)
# A worth that no state in these tests has.
NEVER = 10_000


class Engine:
    """Leaves a state where a request is told to, and keeps what is to be written."""

    def __init__(self, worth: int = WORTH, num_checkpoints: int = 50, needs_blocks: bool = True):
        self.checkpoints = Checkpoints(num_checkpoints)
        self.disk: set[bytes] = set()
        groups = range(1 if needs_blocks else 0)
        self.unsaved = Unsaved(
            BlockPool(2, SIZE), groups, lambda key: key in self.disk, self.checkpoints, worth
        )

    def ask(self, tokens: list[int], num_prompt_tokens: int, *ends: int) -> list[int]:
        """A request that begins with the longest state there is and leaves others after these
        numbers of tokens; after how many tokens states were written.
        """
        request = new_completion("a", tokens)
        request.num_prompt_tokens = num_prompt_tokens
        request.block_hashes = hash_token_blocks(tokens, SIZE)
        found = [each for each in request.block_hashes if each in self.checkpoints]
        if found:
            self.checkpoints.use(self.checkpoints.get(found[-1]))
        for end in ends:
            self.checkpoints.put(Checkpoint(request.block_hashes[end // SIZE - 1], f"at {end}"))
        self.unsaved.note_states(request, 0, len(request.block_hashes))
        written = self.taken()
        self.disk |= {header.block_hash for header in written}
        return [header.first_token + len(header.token_ids) for header in written]

    def left(self) -> list[int]:
        return [header.first_token + len(header.token_ids) for header in self.left_headers()]

    def left_headers(self) -> list[BlockHeader]:
        self.unsaved.add_last()
        return self.taken()

    def taken(self) -> list[BlockHeader]:
        headers = self.unsaved.headers()
        self.unsaved.clear()
        return headers


def tokens(num_tokens: int, seed: int = 0) -> list[int]:
    return [100 * seed + number for number in range(num_tokens)]


# Blocks


def new_unsaved(stored: set[bytes], num_groups: int = 1) -> Unsaved:
    return Unsaved(BlockPool(2, SIZE), range(num_groups), stored.__contains__)


def request_of(num_tokens: int, num_cached_tokens: int = 0) -> Completion:
    completion = new_completion("a", tokens(num_tokens))
    completion.block_hashes = hash_token_blocks(tokens(num_tokens), SIZE)
    completion.request.num_cached_tokens = num_cached_tokens
    return completion


def test_each_full_block_is_saved_once_in_each_group_unless_it_is_stored():
    request = request_of(14)
    hashes = {group: group_hashes(request.block_hashes, group) for group in range(2)}
    noted = new_unsaved({hashes[0][0]}, num_groups=2)
    assert noted.note(request, 2, min_uses=1) == [[hashes[0][0]]]
    expected = [
        BlockHeader(hashes[0][1], hashes[0][0], (4, 5, 6, 7), 4, 0),
        BlockHeader(hashes[1][0], None, (0, 1, 2, 3), 0, 1),
        BlockHeader(hashes[1][1], hashes[1][0], (4, 5, 6, 7), 4, 1),
    ]
    assert noted.headers() == expected
    noted.clear()
    assert noted.note(request, 2, min_uses=1) == []
    assert noted.note(request, 3, min_uses=1) == []
    assert [each.first_token for each in noted.headers()] == [8, 8]


def test_near_the_limit_of_a_day_only_blocks_that_were_found_in_memory_are_saved():
    for min_uses, expected in ((1, [0, 4, 8]), (2, [0]), (3, [])):
        noted = new_unsaved(set())
        noted.note(request_of(12, num_cached_tokens=4), 3, min_uses)
        assert [each.first_token for each in noted.headers()] == expected


def test_blocks_that_are_too_many_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unsaved, "MAX_UNSAVED_BLOCKS", 2)
    noted = new_unsaved(set())
    noted.note(request_of(20), 5, min_uses=1)
    assert [each.first_token for each in noted.headers()] == [0, 4] and noted.num_dropped == 3


# States


def test_a_state_is_written_when_the_kv_since_the_last_one_outweigh_it():
    engine = Engine()
    written = [engine.ask(tokens(end), end, end) for end in range(4, 52, 4)]
    assert written == [[], [], [12], [], [], [24], [], [], [36], [], [], [48]]
    # In one prompt, too.
    assert Engine().ask(tokens(60), 60, 8, 16, 20, 28, 32, 60) == [16, 28, 60]


def test_a_header_says_which_state_it_is_and_what_it_needs():
    engine = Engine()
    engine.ask(tokens(8), 8, 8)
    [header] = engine.left_headers()
    block_hash = hash_token_blocks(tokens(8), SIZE)[1]
    assert header.block_hash == state_key(block_hash) and header.parent_hash == block_hash
    assert (header.token_ids, header.first_token, header.group) == ((4, 5, 6, 7), 4, STATES)
    without_kv = Engine(NEVER, needs_blocks=False)
    without_kv.ask(tokens(8), 8, 8)
    [header] = without_kv.left_headers()
    assert header.parent_hash is None


def test_what_is_left_at_the_end_is_what_no_later_prompt_has_gone_past():
    engine = Engine(NEVER)
    engine.ask(tokens(16), 8, 8, 16)
    assert engine.left() == [16, 8], "the prompt's end and the answer's"
    engine = Engine(NEVER)
    engine.ask(tokens(16), 8, 8, 16)
    engine.ask(tokens(32), 24, 24, 32)
    engine.ask(tokens(20, seed=3), 20, 20)
    assert engine.left() == [20, 32, 24]


def test_a_state_that_two_prompts_go_on_from_is_written_though_they_have_gone_past():
    engine = Engine(NEVER)
    shared = tokens(8)
    found = [engine.ask([*shared, *tokens(8, seed)], 16, 16) for seed in range(2, 4)]
    engine.checkpoints.put(Checkpoint(hash_token_blocks(shared, SIZE)[1], "shared"))
    found += [engine.ask([*shared, *tokens(8, seed)], 16, 16) for seed in range(4, 7)]
    assert found == [[], [], [], [8], []]


def test_a_state_that_was_dropped_or_removed_is_written_again():
    engine = Engine()
    assert engine.ask(tokens(24), 24, 24) == [24]
    assert engine.ask(tokens(28), 28) == []
    engine.disk.clear()
    assert engine.ask(tokens(28), 28) == [24]
    engine.disk.clear()
    assert engine.left() == [24]


def test_foreign_states_are_never_written_and_do_not_count_as_written():
    engine = Engine()
    hashes = hash_token_blocks(tokens(32), SIZE)
    for end in (12, 24):
        engine.checkpoints.put(Checkpoint(hashes[end // SIZE - 1], "of a file", is_foreign=True))
    assert engine.ask(tokens(24), 24) == [] and engine.left() == []
    # Though prompts share it.
    assert [engine.ask(tokens(12 + more), 12 + more) for more in (1, 2, 3)] == [[]] * 3
    # A state that was computed here is worth all tokens before it.
    assert engine.ask(tokens(32), 32, 32) == [32]
    # What was computed here before the file came has left memory meanwhile.
    engine = Engine(NEVER)
    engine.ask(tokens(24), 24, 24)
    [header] = engine.left_headers()
    assert engine.unsaved.find(header) == Checkpoint(hashes[5], "at 24")
    engine.checkpoints.clear()
    engine.checkpoints.put(Checkpoint(hashes[5], "of a file", is_foreign=True))
    assert engine.left() == []
    assert engine.unsaved.find(header) == Checkpoint(hashes[5], "of a file", is_foreign=True)


def test_a_state_is_worth_the_kv_that_weigh_twice_as_much():
    assert WORTH == 12
    assert num_tokens_per_state(154_000_000, 65_536) == 4_700  # a 27B
    assert num_tokens_per_state(1, 100) == 1
    assert num_tokens_per_state(600, 0) == 4096


def test_a_prompt_that_leaves_out_the_answer_before_it_has_gone_past_that_one_too():
    engine = Engine(NEVER)
    engine.ask(tokens(16), 8, 8, 16)  # an answer with reasoning
    other = [*tokens(8), *tokens(12, seed=4)]
    engine.ask(other, 20, 20)
    assert engine.left() == [20]


def evictions(engine: Engine) -> list[tuple[str, bool]]:
    """Filled with what leaves memory, and whether it is written."""
    found: list[tuple[str, bool]] = []

    def tell(checkpoint: Checkpoint) -> None:
        header = engine.unsaved.take_evicted(checkpoint)
        if header is not None:
            engine.disk.add(header.block_hash)
        found.append((checkpoint.content, header is not None))

    engine.checkpoints.on_eviction = tell
    return found


def test_of_states_that_leave_memory_those_are_written_that_nothing_has_gone_past():
    engine = Engine(40, num_checkpoints=2)
    evicted = evictions(engine)
    for end in (8, 16, 24):
        engine.ask(tokens(end), end, end)
    engine.ask(tokens(12, seed=1), 12, 12)
    engine.ask(tokens(20, seed=2), 20, 20)
    engine.ask(tokens(20, seed=3), 20, 20)
    # The last one is worth 12 tokens, which is less than half of what one is worth in memory.
    assert evicted == [("at 8", False), ("at 16", False), ("at 24", True), ("at 12", False)]
