"""Which states go to disk and when, without arrays: a state is a text, and the disk is a set."""

from __future__ import annotations

from helpers.completions import new_completion

from mlx_paged.core import BlockHash, Checkpoint, Checkpoints, hash_token_blocks, state_key
from mlx_paged.core.tier import STATES
from mlx_paged.engine.disk_states import DiskStates, num_tokens_per_state

SIZE = 4
# A state weighs as much as 6 tokens of K/V, so 12 of them outweigh it.
WORTH = num_tokens_per_state(600, 100)
# A worth that no state in these tests has.
NEVER = 10_000


class Engine:
    """Leaves a state where a request is told to, and keeps what is to be written."""

    def __init__(self, worth: int = WORTH, num_checkpoints: int = 50, needs_blocks: bool = True):
        self.checkpoints = Checkpoints(num_checkpoints)
        self.states = DiskStates(self.checkpoints, SIZE, worth, needs_blocks)
        self.disk: set[BlockHash] = set()

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
        num_blocks = len(request.block_hashes)
        written = list(self.states.note(request, 0, num_blocks, self.disk.__contains__))
        self.disk |= {BlockHash(header.block_hash) for header in written}
        return [header.first_token + len(header.token_ids) for header in written]

    def left(self) -> list[int]:
        headers = self.states.left(self.disk.__contains__)
        return [header.first_token + len(header.token_ids) for header in headers]


def tokens(num_tokens: int, seed: int = 0) -> list[int]:
    return [100 * seed + number for number in range(num_tokens)]


def test_a_state_is_written_when_the_kv_since_the_last_one_outweigh_it():
    engine = Engine()
    written = [engine.ask(tokens(end), end, end) for end in range(4, 52, 4)]
    assert written == [[], [], [12], [], [], [24], [], [], [36], [], [], [48]]
    # In one prompt, too.
    assert Engine().ask(tokens(60), 60, 8, 16, 20, 28, 32, 60) == [16, 28, 60]


def test_a_header_says_which_state_it_is_and_what_it_needs():
    engine = Engine()
    engine.ask(tokens(8), 8, 8)
    [header] = engine.states.left(lambda key: False)
    block_hash = hash_token_blocks(tokens(8), SIZE)[1]
    assert header.block_hash == state_key(block_hash) and header.parent_hash == block_hash
    assert (header.token_ids, header.first_token, header.group) == ((4, 5, 6, 7), 4, STATES)
    without_kv = Engine(NEVER, needs_blocks=False)
    without_kv.ask(tokens(8), 8, 8)
    [header] = without_kv.states.left(lambda key: False)
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
    [header] = engine.states.left(lambda key: False)
    assert engine.states.in_memory(header) == Checkpoint(hashes[5], "at 24")
    engine.checkpoints.clear()
    engine.checkpoints.put(Checkpoint(hashes[5], "of a file", is_foreign=True))
    assert engine.left() == [] and engine.states.in_memory(header) is None


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
        written = list(engine.states.evicted(checkpoint.block_hash, engine.disk.__contains__))
        engine.disk |= {BlockHash(header.block_hash) for header in written}
        found.append((checkpoint.content, bool(written)))

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
