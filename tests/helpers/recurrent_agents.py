"""An agent's conversation with a tiny recurrent model, and what it leaves in a folder."""

from __future__ import annotations

from pathlib import Path

from helpers.adapted_models import greedy_answer
from helpers.disk_tiers import block_files
from helpers.engine_runs import answer, greedy, prompt
from mlx_paged.block_store import CacheFolder, Entry
from mlx_paged.core.tier import STATES
from mlx_paged.engine.engine import Engine

BLOCK_SIZE = 8
NUM_ANSWERED = 6
NUM_NEW = 11  # tokens of the result of a tool


class Agent:
    """A conversation of which each turn has all before it, its answer, and the result of a tool.

    Args:
        name: of the model.
        seed: of all tokens but those of the system's prompt.
    """

    def __init__(self, name: str, num_system: int = 60, seed: int = 0):
        self.name, self.seed = name, seed
        self.tokens = prompt(num_system, 1)
        self.num_turns = 0

    def turn(self, engine: Engine) -> int:
        """Ask, and check the answer against mlx-lm's; how many prompt tokens were computed."""
        output = answer(engine, self.tokens, greedy(NUM_ANSWERED))
        answered = output.outputs[0].token_ids
        assert answered == greedy_answer(self.name, self.tokens, NUM_ANSWERED)
        num_computed = len(self.tokens) - output.num_cached_tokens
        self.num_turns += 1
        new = prompt(NUM_NEW, 1000 * self.seed + 100 + self.num_turns)
        self.tokens = [*self.tokens, *answered, *new]
        return num_computed


def states_in(folder: Path) -> dict[int, Path]:
    """The files of states, by the number of tokens that they are after."""
    files = {file.stem: file for file in block_files(folder)}
    return {
        each.first_token + each.num_tokens: files[each.block_hash.hex()]
        for each in entries_of(folder)
        if each.group == STATES
    }


def kv_in(folder: Path) -> dict[int, Path]:
    """The files of K/V, by the place behind their last token."""
    files = {file.stem: file for file in block_files(folder)}
    return {
        each.first_token + each.num_tokens: files[each.block_hash.hex()]
        for each in entries_of(folder)
        if each.group != STATES
    }


def entries_of(folder: Path) -> list[Entry]:
    return CacheFolder(folder).entries()
