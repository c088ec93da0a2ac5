"""The tasks the demo model learns: each function makes one question and its one right answer.

Every task breaks visibly when a KV cache is wrong: it needs values from far back (recall), from
every position in order (copying, sequences), or both. A task's answer is a function of the
conversation, so greedy decoding can be checked by string equality.

Training and evaluation never share a prompt: what makes a prompt specific (the fact, the items, the
pair of numbers) is hashed, and one in eight is held out.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import words

HELD_OUT_ONE_IN = 8


@dataclass(frozen=True)
class Turn:
    """One user message, the answer to it, and the task it belongs to."""

    user: str
    answer: str
    task: str


@dataclass
class Memory:
    """What the user has told so far in this conversation: question -> answer, and the names already
    taken.
    """

    facts: list[tuple[list[str], str]] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)


def is_held_out(*parts: object) -> bool:
    """Whether the thing made of these parts belongs to evaluation rather than training."""
    return zlib.crc32("|".join(map(str, parts)).encode()) % HELD_OUT_ONE_IN == 0


def draw(rng: random.Random, held_out: bool, make: Callable[[], tuple]) -> tuple:
    """Draw from `make` until the result is on the wanted side of the train/evaluation split."""
    while True:
        parts = make()
        if is_held_out(*parts) == held_out:
            return parts


def pseudo_word(rng: random.Random) -> str:
    """A word that is in no list, so that the model does not rely on knowing its words."""
    return "".join(rng.choice(words.SYLLABLES) for _ in range(rng.randint(2, 4)))


def filler(rng: random.Random) -> str:
    """A sentence that holds nothing to remember."""
    return (
        f"The {rng.choice(words.ADJECTIVES)} {rng.choice(words.ANIMALS)} {rng.choice(words.VERBS)} "
        f"{rng.choice(words.PREPOSITIONS)} the {rng.choice(words.PLACES)}"
        + (f" {rng.choice(words.TIMES)}." if rng.random() < 0.4 else ".")
    )


# --- facts and recall
# -------------------------------------------------------------------------------------------------


def fact_value(rng: random.Random, kind: str) -> str:
    """A value of the given kind, as text."""
    if kind == "mixed":
        kind = rng.choice(["code", "noun"])
    if kind == "code":
        return "".join(rng.choice("0123456789") for _ in range(rng.choice([3, 4, 4, 4, 5])))
    if kind == "number":
        return str(rng.randint(1, 99))
    source = {
        "color": words.COLORS,
        "name": words.NAMES,
        "city": words.CITIES,
        "noun": words.NOUNS,
    }[kind]
    return rng.choice(source)


def keyed_fact(
    rng: random.Random, memory: Memory, held_out: bool, attribute: str | None = None
) -> str:
    """State "the <attribute> of <key> is <value>" and remember how to ask for it."""

    def make() -> tuple[str, str, str]:
        name = attribute or (rng.choice(list(words.ATTRIBUTES)) if rng.random() < 0.6 else "code")
        key = rng.choice(words.NOUNS) if rng.random() < 0.85 else pseudo_word(rng)
        if rng.random() < 0.05:
            key = "my " + key
        return name, key, fact_value(rng, words.ATTRIBUTES[name])

    while True:
        name, key, value = draw(rng, held_out, make)
        if f"{name} of {key}" not in memory.taken:
            break
    memory.taken.add(f"{name} of {key}")
    heard = key.replace("my ", "your ")
    questions = [f"What is the {name} of {key}?"] * 4 + [
        f"Tell me the {name} of {key}.",
        f"What was the {name} of {key}?",
        f"Do you know the {name} of {key}?",
        f"And the {name} of {key}?",
        f"what is the {name} of {key}",
        f"{name} of {key}?",
    ]
    memory.facts.append((questions, f"The {name} of {heard} is {value}."))
    lead = rng.choice(["The"] * 6 + ["Remember that the", "Remember: the", "Note that the", "the"])
    return f"{lead} {name} of {key} is {value}."


def listed_or_made_up(rng: random.Random, names: list[str], share_listed: float) -> str:
    """One of the names, or, with the rest of the probability, a name that nobody has."""
    return rng.choice(names) if rng.random() < share_listed else pseudo_word(rng).capitalize()


def draw_single_fact(rng: random.Random) -> tuple[str, str, str]:
    """The shape of a fact without a key, what it is about, and its value."""
    shape = rng.choice(["thing", "thing", "name", "pet", "pet", "city", "favorite", "age"])
    what = {
        "thing": lambda: rng.choice(list(words.THINGS)),
        "pet": lambda: rng.choice(words.PETS),
        "favorite": lambda: rng.choice(["color", "number", "city", "word"]),
    }.get(shape, lambda: "")()
    kind = {
        "thing": words.THINGS.get(what, ""),
        "favorite": {"color": "color", "number": "number", "city": "city", "word": "noun"}.get(
            what, ""
        ),
        "city": "city",
        "age": "number",
    }.get(shape, "")
    if shape == "pet":
        value = listed_or_made_up(rng, words.PET_NAMES + words.NAMES, 0.8)
    elif shape == "name":
        value = listed_or_made_up(rng, words.NAMES, 0.7)
    else:
        value = fact_value(rng, kind)
    return shape, what, value


def single_fact(rng: random.Random, memory: Memory, held_out: bool) -> str:
    """State a fact without a key, such as "The secret word is lemon." or "My name is Anna."."""
    while True:
        shape, what, value = draw(rng, held_out, lambda: draw_single_fact(rng))
        if f"{shape} {what}" not in memory.taken:
            break
    memory.taken.add(f"{shape} {what}")
    if shape == "thing":
        questions = [f"What is the {what}?"] * 3 + [f"Tell me the {what}.", f"What was the {what}?"]
        said, answer = f"The {what} is {value}.", f"The {what} is {value}."
    elif shape == "name":
        questions = ["What is my name?"] * 3 + [
            "Do you know my name?",
            "Who am I?",
            "what is my name",
            "Say my name.",
        ]
        said = rng.choice(
            [
                "My name is {}.",
                "My name is {}.",
                "I am {}.",
                "Hello, my name is {}.",
                "Hi, I am {}.",
            ]
        )
        said, answer = said.format(value), f"Your name is {value}."
    elif shape == "pet":
        questions = [f"What is my {what} called?"] * 2 + [
            f"What is the name of my {what}?",
            f"Who is my {what}?",
        ]
        said = rng.choice([f"My {what} is called {value}.", f"I have a {what} called {value}."])
        answer = f"Your {what} is called {value}."
    elif shape == "city":
        questions = ["Where do I live?"] * 2 + [
            "In which city do I live?",
            "What city do I live in?",
        ]
        said, answer = f"I live in {value}.", f"You live in {value}."
    elif shape == "favorite":
        questions = [f"What is my favorite {what}?"] * 2 + [
            f"Which {what} do I like best?",
            f"Tell me my favorite {what}.",
        ]
        said, answer = f"My favorite {what} is {value}.", f"Your favorite {what} is {value}."
    else:
        questions = ["How old am I?"] * 2 + ["What is my age?", "Do you know how old I am?"]
        said, answer = f"I am {value} years old.", f"You are {value} years old."
    memory.facts.append((questions, answer))
    return said


def any_fact(rng: random.Random, memory: Memory, held_out: bool) -> str:
    """A fact of either shape; facts without a key are few, so they run out and stay a minority."""
    if rng.random() < 0.25 and len(memory.taken) < 12:
        return single_fact(rng, memory, held_out)
    return keyed_fact(rng, memory, held_out)


def tell(
    rng: random.Random, memory: Memory, held_out: bool = False, pieces: int = 1, fill: float = 0.0
) -> Turn:
    """State facts, with filler sentences between them; the questions come in later turns."""
    # One place is a fact in any case; the others by chance.
    sure = rng.randrange(pieces)
    said = [
        filler(rng) if rng.random() < fill and place != sure else any_fact(rng, memory, held_out)
        for place in range(pieces)
    ]
    return Turn(rng.choice([" ", " ", "\n"]).join(said), words.REMEMBER_ANSWER, "tell")


def ask(rng: random.Random, memory: Memory, position: float | None = None) -> Turn:
    """Ask for a fact told before; `position` 0.0 is the oldest, 1.0 the newest, None any."""
    where = rng.random() if position is None else position
    questions, answer = memory.facts[min(int(where * len(memory.facts)), len(memory.facts) - 1)]
    return Turn(rng.choice(questions), answer, "recall")


def tell_and_ask(
    rng: random.Random, memory: Memory, held_out: bool = False, pieces: int = 1, fill: float = 0.0
) -> Turn:
    """State facts and ask for one of them in the same message."""
    before = len(memory.facts)
    said = tell(rng, memory, held_out, pieces, fill).user
    questions, answer = rng.choice(memory.facts[before:])
    return Turn(said + rng.choice([" ", " ", "\n"]) + rng.choice(questions), answer, "recall")


def ask_unknown(rng: random.Random, memory: Memory, held_out: bool = False) -> Turn:
    """Ask for a fact that was not told: the right answer says so instead of making one up."""
    if rng.random() < 0.15 and "name " not in memory.taken:
        return Turn(
            rng.choice(["What is my name?", "Do you know my name?"]),
            "I do not know your name.",
            "not told",
        )
    while True:
        name = rng.choice(list(words.ATTRIBUTES))
        key = rng.choice(words.NOUNS) if rng.random() < 0.5 else rng.choice(words.TOPICS)
        if f"{name} of {key}" not in memory.taken:
            break
    return Turn(f"What is the {name} of {key}?", f"I do not know the {name} of {key}.", "not told")


# --- copying, sequences, arithmetic
# -----------------------------------------------------------------------------------


def copy(rng: random.Random, held_out: bool = False, items: int | None = None) -> Turn:
    """Repeat up to 40 words and numbers, a sentence, or any string."""
    count = items or min(rng.randint(1, 10) if rng.random() < 0.7 else rng.randint(10, 40), 40)

    def item(style: int) -> str:
        if style == 1 or (style == 2 and rng.random() < 0.4):
            return str(rng.randint(0, 99) if rng.random() < 0.9 else rng.randint(100, 9999))
        pools = [words.NOUNS, words.COLORS, words.NAMES, words.ANIMALS, words.ADJECTIVES]
        return rng.choice(rng.choice(pools)) if rng.random() < 0.92 else pseudo_word(rng)

    def make() -> tuple[str]:
        kind = rng.random()
        if items is None and kind < 0.08:
            return (" ".join(filler(rng) for _ in range(rng.randint(1, 3))),)
        if items is None and kind < 0.12:
            return (any_text(rng),)
        style = rng.randint(0, 2)
        return (" ".join(item(style) for _ in range(count)),)

    (text,) = draw(rng, held_out, make)
    lead = rng.choice(
        ["Repeat: ", "Repeat: ", "Repeat: ", "Repeat after me: ", "Say: ", "Copy: ", "repeat: "]
    )
    return Turn(lead + text, text, "copy")


def any_text(rng: random.Random) -> str:
    """A short string of random characters, so that the byte pieces are trained too."""
    ranges = [
        (33, 126),
        (0xC0, 0x17F),
        (0x391, 0x3C9),
        (0x430, 0x44F),
        (0x4E00, 0x4FFF),
        (0x1F600, 0x1F640),
    ]
    low, high = rng.choice(ranges)
    return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 8)))


def index(rng: random.Random, held_out: bool = False) -> Turn:
    """Name the n-th or the last word of a list."""
    (text,) = draw(
        rng,
        held_out,
        lambda: (" ".join(rng.sample(words.NOUNS + words.COLORS, rng.randint(2, 7))),),
    )
    listed = text.split()
    where = rng.randrange(min(len(listed), len(words.ORDINALS)))
    name = words.ORDINALS[where]
    if rng.random() < 0.25:
        where, name = len(listed) - 1, "last"
    question = rng.choice(
        ["What is the {} word of: {}", "What is the {} word: {}", "Tell me the {} word of: {}"]
    )
    return Turn(question.format(name, text), listed[where], "index")


def sequence(rng: random.Random, held_out: bool = False) -> Turn:
    """Continue numbers with a constant step, letters, days, months or a repeating pattern."""
    kind = rng.random()
    if kind < 0.5:

        def make() -> tuple[int, int, int]:
            return (
                rng.randint(0, 150),
                rng.choice([1, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 10]),
                rng.choice([1, 1, -1]),
            )

        shown = rng.randint(3, 6)
        while True:
            start, step, sign = draw(rng, held_out, make)
            if start + sign * step * (shown + 4) >= 0:
                break
        values = [str(start + sign * step * i) for i in range(shown + 5)]
    elif kind < 0.7:
        ring = rng.choice([words.LETTERS, words.LETTERS, words.DAYS, words.MONTHS])
        shown = rng.randint(2, 6)
        start = rng.randrange(len(ring) if ring is not words.LETTERS else 26 - shown - 5)
        values = [ring[(start + i) % len(ring)] for i in range(shown + 5)]
    else:
        period = rng.randint(2, 4)

        def pattern() -> tuple[str, ...]:
            pool = rng.choice(
                [words.COLORS, words.NOUNS, words.LETTERS, [str(n) for n in range(30)]]
            )
            return tuple(rng.sample(pool, period))

        unit = draw(rng, held_out, pattern)
        shown = 2 * period + rng.randint(0, period)
        values = [unit[i % period] for i in range(shown + 6)]
    lead = rng.choice(["Continue: ", "Continue: ", "Continue: ", "What comes next: ", "Go on: "])
    return Turn(lead + " ".join(values[:shown]), " ".join(values[shown:]), "sequence")


def count(rng: random.Random, held_out: bool = False, numbers: int | None = None) -> Turn:
    """Count from one number to another, up, down or in steps, saying about `numbers` of them."""
    many = numbers or rng.randint(4, 20)

    def make() -> tuple[int, int, int]:
        kind = rng.random()
        if kind < 0.6:
            first = rng.choice([1, 1, rng.randint(0, 100)])
            return first, first + many, 1
        if kind < 0.8:
            last = rng.choice([1, 0, rng.randint(0, 60)])
            return last + many, last, -1
        step = rng.choice([2, 3, 5, 10])
        first = step * rng.randint(0, 4)
        return first, first + step * min(many, 30), step

    first, last, step = draw(rng, held_out, make)
    said = " ".join(str(n) for n in range(first, last + (1 if step > 0 else -1), step))
    if step == 1:
        question = rng.choice(
            [
                "Count from {} to {}.",
                "Count from {} to {}.",
                "count from {} to {}",
                "Count {} to {}.",
            ]
        )
        if first == 1 and rng.random() < 0.2:
            return Turn(f"Count to {last}.", said, "count")
    elif step == -1:
        question = rng.choice(["Count down from {} to {}.", "Count from {} to {}."])
    else:
        question = rng.choice(
            [
                "Count from {} to {} in steps of " + f"{step}.",
                "Count from {} to {} " + f"by {step}.",
            ]
        )
    return Turn(question.format(first, last), said, "count")


def numbered(rng: random.Random, held_out: bool = False, numbers: int | None = None) -> Turn:
    """Write a word many times, each with its number: an answer that shows where it went wrong."""
    many = numbers or rng.randint(2, 12)
    (word, times) = draw(
        rng, held_out, lambda: (rng.choice(words.NOUNS + words.COLORS), many + rng.randint(0, 3))
    )
    question = rng.choice(
        ["Write {} {} times with numbers.", "Number {} up to {}.", "Number {} from 1 to {}."]
    )
    return Turn(
        question.format(word, times),
        " ".join(f"{i} {word}" for i in range(1, times + 1)),
        "numbered list",
    )


def arithmetic(rng: random.Random, held_out: bool = False) -> Turn:
    """Add or subtract numbers of one and two digits; differences are never negative."""
    limit = 9 if rng.random() < 0.25 else 99

    def make() -> tuple[int, str, int]:
        first, second, sign = rng.randint(0, limit), rng.randint(0, limit), rng.choice("++-")
        return (
            (max(first, second), sign, min(first, second)) if sign == "-" else (first, sign, second)
        )

    first, sign, second = draw(rng, held_out, make)
    value = first + second if sign == "+" else first - second
    spoken = "plus" if sign == "+" else "minus"
    question = rng.choice(
        [
            f"What is {first} {sign} {second}?",
            f"What is {first} {sign} {second}?",
            f"{first} {sign} {second}",
            f"{first} {sign} {second} =",
            f"What is {first} {spoken} {second}?",
            f"How much is {first} {sign} {second}?",
            f"Add {first} and {second}." if sign == "+" else f"Subtract {second} from {first}.",
        ]
    )
    return Turn(question, f"{first} {sign} {second} = {value}", "arithmetic")


# --- dialogue
# ------------------------------------------------------------------------------------------


def dialogue(rng: random.Random) -> Turn:
    """Greetings, thanks and questions about the model itself."""
    questions, answer = rng.choice(words.DIALOGUE)
    return Turn(rng.choice(questions), answer, "dialogue")


def unknown(rng: random.Random, held_out: bool = False) -> Turn:
    """Anything outside the tasks: the right answer is to say so."""

    def topic() -> str:
        kind = rng.random()
        if kind < 0.7:
            return rng.choice(words.TOPICS)
        if kind < 0.85:
            return rng.choice(["a ", "the ", ""]) + rng.choice(words.NOUNS)
        return " ".join(pseudo_word(rng) for _ in range(rng.randint(1, 2)))

    def make() -> tuple[str]:
        kind = rng.random()
        if kind < 0.75:
            text = rng.choice(words.UNKNOWN_TEMPLATES).format(t=topic(), u=topic())
        elif kind < 0.85:
            text = " ".join(pseudo_word(rng) for _ in range(rng.randint(1, 6)))
        elif kind < 0.92:
            text = any_text(rng)
        else:
            mixed = (
                words.TOPICS
                + words.ADJECTIVES
                + words.VERBS
                + words.PREPOSITIONS
                + ["what", "why", "I", "you", "is"]
            )
            text = " ".join(rng.choice(mixed) for _ in range(rng.randint(2, 8))) + rng.choice(
                [".", "?", ""]
            )
        if rng.random() < 0.2:
            text = text[:1].lower() + text[1:]
        return (text,)

    (text,) = draw(rng, held_out, make)
    return Turn(text, words.UNKNOWN_ANSWER, "unknown")
