"""Engines with a tier on disk that are killed at random moments, while others answer.

Each prompt has one right answer, that of an engine without a folder.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from mlx_paged import SamplingParams
from mlx_paged.block_store import CacheFolder
from mlx_paged.engine.engine import Engine
from mlx_paged.loading import demo_model_path, load
from paged_testing.killed_processes import Actor, Kills, Log
from paged_testing.killed_writers import nbytes_of_files, num_unfinished

NUM_PROMPTS = 40
NUM_NEW_TOKENS = 6
LIMIT = 3 << 20  # bytes of the folder: a third of what all prompts take
# Less than a few prompts take, so that most of what is found comes from disk.
OPTIONS: dict[str, Any] = {"block_size": 8, "kv_cache_bytes": "96blocks", "max_num_seqs": 4}


def prompt_of(number: int) -> list[int]:
    """Token ids: one of four beginnings, and an end of its own."""
    common, own = random.Random(number % 4), random.Random(100 + number)
    return [
        *(common.randrange(3, 1000) for _ in range(96 + 40 * (number % 4))),
        *(own.randrange(3, 1000) for _ in range(own.randint(1, 60))),
    ]


def answer(log: Log, stop: Path, folder: Path, right: list[list[int]], seed: int) -> None:
    """Answer random prompts, several at once, until killed."""
    source = random.Random(seed)
    log.say("opens")
    engine = _engine(cache_dir=folder, cache_dir_size=LIMIT)
    while not stop.exists():
        log.say("answers")
        _answer_some(log, engine, source.sample(range(NUM_PROMPTS), source.randint(1, 5)), right)
        if source.random() < 0.2:
            log.say("forgets")
            engine.reset_prefix_cache()
    log.say("closes")
    engine.close()


def answer_all(log: Log, stop: Path, folder: Path, right: list[list[int]], seed: int) -> None:
    """Start on a folder and answer every prompt; say what is left there."""
    engine = _engine(cache_dir=folder, cache_dir_size=LIMIT)
    numbers = random.Random(seed).sample(range(NUM_PROMPTS), NUM_PROMPTS)
    _answer_some(log, engine, numbers, right)
    engine.close()
    for file in CacheFolder(folder).verify():
        if file.problem is not None:
            log.say("bad", file.path, file.problem)
    log.say("left", nbytes_of_files(folder), num_unfinished(folder))


def answer_without(log: Log, stop: Path, folder: Path, seed: int) -> None:
    """Say the right answers."""
    engine = _engine()
    log.say("right", [_answers(engine, [number])[number][0] for number in range(NUM_PROMPTS)])


def _engine(**options: Any) -> Engine:
    model, tokenizer = load(demo_model_path())
    return Engine(model, tokenizer, **OPTIONS, **options)


def _answers(engine: Engine, numbers: list[int]) -> dict[int, tuple[list[int], int]]:
    """The tokens of prompts' answers, and how many tokens of each prompt came from disk."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    for number in numbers:
        engine.add_request(str(number), prompt_of(number), params)
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                tokens = list(output.outputs[0].token_ids)
                found[int(output.request_id)] = tokens, output.num_read_tokens
    return found


def _answer_some(log: Log, engine: Engine, numbers: list[int], right: list[list[int]]) -> None:
    answers = _answers(engine, numbers)
    for number in numbers:
        tokens, _ = answers[number]
        if tokens != right[number]:
            log.say("wrong", number, tokens, right[number])
    num_read_tokens = sum(num_read for _, num_read in answers.values())
    log.say("counts", {"answers": len(numbers), "prompt tokens from disk": num_read_tokens})
    tier = engine.stats().disk_tier
    if tier is not None and tier.failure is not None:
        log.say("failure", tier.failure)


class EngineKills(Kills):
    """Two engines on one folder that are killed, and a third that answers meanwhile.

    Args:
        folder: empty.
        longest, seed: see :class:`Kills`.
    """

    def __init__(self, folder: Path, seed: int = 0, longest: float = 0.8):
        super().__init__(folder, longest, seed)
        self._right: list[list[int]] = []
        self.play(answer_without)

    def start_readers(self) -> list[Actor]:
        return [self.start(answer, self._right)]

    def fill_up(self) -> None:
        while len(self.at_work) < 2:
            self.at_work.append(self.start(answer, self._right))

    def look(self) -> None:
        self.play(answer_all, self._right)

    def note(self, what: str, facts: list[Any]) -> None:
        if what == "right":
            self._right = facts[0]
        elif what == "left":
            nbytes, num_unfinished = facts
            counts = self.findings.counts
            counts["most bytes afterwards"] = max(counts["most bytes afterwards"], nbytes)
            if nbytes > LIMIT:
                self.findings.problems.append(f"{nbytes} bytes, the limit is {LIMIT}")
            if num_unfinished:
                self.findings.problems.append(f"{num_unfinished} unfinished files are left")
