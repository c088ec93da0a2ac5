"""Put tasks together into conversations of a wanted length, and render them as the chat template
does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate

import tasks
import words
from tasks import Memory, Turn

# How often each task is the next turn. The first lesson is mostly recall, which takes longest to
# form; the second keeps it and brings the others up; the third exercises those that need the most
# examples.
SHARES: dict[str, dict[str, float]] = {
    "recall": {
        "ask": 0.40,
        "tell": 0.08,
        "copy": 0.12,
        "sequence": 0.09,
        "count": 0.04,
        "numbered": 0.02,
        "arithmetic": 0.09,
        "index": 0.03,
        "dialogue": 0.05,
        "not told": 0.02,
        "unknown": 0.06,
    },
    "everything": {
        "ask": 0.12,
        "tell": 0.08,
        "copy": 0.08,
        "sequence": 0.16,
        "count": 0.09,
        "numbered": 0.06,
        "arithmetic": 0.22,
        "index": 0.06,
        "dialogue": 0.05,
        "not told": 0.03,
        "unknown": 0.05,
    },
    "practice": {
        "ask": 0.08,
        "tell": 0.06,
        "copy": 0.16,
        "sequence": 0.18,
        "count": 0.07,
        "numbered": 0.04,
        "arithmetic": 0.27,
        "index": 0.06,
        "dialogue": 0.03,
        "not told": 0.02,
        "unknown": 0.03,
    },
}

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


def render_prompt(user: str, system: str | None = None) -> str:
    """The text of one more turn, up to the place where the answer starts."""
    head = f"{IM_START}system\n{system}{IM_END}\n" if system else ""
    return f"{head}{IM_START}user\n{user}{IM_END}\n{IM_START}assistant\n"


def render_answer(answer: str) -> tuple[str, str]:
    """The answer with its end mark, which the model has to produce, and the newline that the
    template adds.
    """
    return answer + IM_END, "\n"


def fact_block(rng: random.Random, memory: Memory, room: int, asked: bool) -> Turn:
    """Facts and filler that take about `room` tokens."""
    fill = rng.choice([0.0, 0.3, 0.6, 0.9])
    pieces = max(1, int(room / rng.choice([13, 14, 16])))
    make = tasks.tell_and_ask if asked else tasks.tell
    return make(rng, memory, pieces=pieces, fill=fill)


def next_turn(
    rng: random.Random, memory: Memory, room: int, lesson: str, copying: float = 0.0
) -> Turn:
    """Choose the next turn of a training conversation that has `room` tokens left.

    `copying` is an additional share of copying turns.
    """
    if rng.random() < copying:
        return tasks.copy(rng)
    kind = rng.random()
    ends = accumulate(SHARES[lesson].values())
    task = next(
        (name for name, end in zip(SHARES[lesson], ends, strict=True) if kind < round(end, 6)),
        "unknown",
    )
    if task == "ask" and memory.facts:
        return tasks.ask(rng, memory)
    if task in ("ask", "tell"):
        pieces = rng.choice([1, 1, 1, 2, 3])
        return (tasks.tell if rng.random() < 0.5 else tasks.tell_and_ask)(
            rng, memory, pieces=pieces, fill=0.2
        )
    if task == "count":
        return tasks.count(rng, numbers=how_many(rng, 3, 20, min(150, room // 4), usual_share=0.7))
    if task == "numbered":
        return tasks.numbered(
            rng, numbers=how_many(rng, 2, 12, min(60, room // 6), usual_share=0.6)
        )
    if task == "not told":
        return tasks.ask_unknown(rng, memory)
    plain = {
        "copy": tasks.copy,
        "sequence": tasks.sequence,
        "arithmetic": tasks.arithmetic,
        "index": tasks.index,
        "dialogue": tasks.dialogue,
        "unknown": tasks.unknown,
    }
    return plain[task](rng)


def how_many(rng: random.Random, least: int, usual: int, most: int, usual_share: float) -> int:
    """How long an answer gets: mostly up to `usual`, sometimes as much as there is room for."""
    if rng.random() < usual_share or most <= usual:
        return rng.randint(least, usual)
    return rng.randint(usual, most)


def conversation(
    rng: random.Random,
    room: int,
    length_of: Callable[[str], int],
    lesson: str = "recall",
    copying: float = 0.0,
) -> tuple[str | None, list[Turn]]:
    """A conversation of at most `room` tokens: a system prompt or None, and its turns.

    Many conversations open with a block of facts that fills much of the room, so that the questions
    reach far back; the others are short turns of all kinds.
    """
    system = rng.choice(words.SYSTEM_PROMPTS) if rng.random() < 0.3 else None
    room -= length_of(render_prompt("", system)) if system else 0
    memory, turns = Memory(), []
    opening = 0.5 if lesson == "recall" else (0.15 if room < 400 else 0.7)
    if rng.random() < opening * (1 - copying):
        for _ in range(8):
            trial = Memory()
            turn = fact_block(
                rng, trial, int((room - 60) * rng.uniform(0.3, 0.95)), asked=rng.random() < 0.5
            )
            used = turn_length(turn, length_of)
            if used <= room:
                memory, room = trial, room - used
                turns.append(turn)
                # Questions right after the block: these reach back the farthest.
                for _ in range(rng.randint(1, 6)):
                    turn = tasks.ask(rng, memory)
                    if (used := turn_length(turn, length_of)) <= room:
                        turns.append(turn)
                        room -= used
                break
    misses = 0
    while room > 16 and misses < 6:
        taken, known = set(memory.taken), len(memory.facts)
        turn = next_turn(rng, memory, room, lesson, copying)
        used = turn_length(turn, length_of)
        if used > room:
            # The turn does not fit: forget what it told, and try another.
            memory.taken, misses = taken, misses + 1
            del memory.facts[known:]
            continue
        turns.append(turn)
        room -= used
    return system, turns


def turn_length(turn: Turn, length_of: Callable[[str], int]) -> int:
    """How many tokens a turn takes in the rendered conversation."""
    return length_of(render_prompt(turn.user) + turn.answer) + 2


def training_text(seed: int, characters: int) -> list[str]:
    """Plain lines of the generated conversations, for the tokenizer to be trained on."""
    rng = random.Random(f"tokenizer:{seed}")
    lines: list[str] = []
    total = 0
    while total < characters:
        _, turns = conversation(rng, 300, lambda text: len(text) // 3)
        for turn in turns:
            for line in f"{turn.user}\n{turn.answer}".split("\n"):
                lines.append(line)
                total += len(line)
    # Single words, so that most of the listed ones become one piece.
    for word in words.NOUNS + words.COLORS + words.NAMES + words.CITIES:
        lines += [f"is {word}"] * 150
    return lines
