"""Records what openai-harmony 0.0.8 makes of random answers of gpt-oss, in ``harmony.json``.

    pip install openai-harmony
    python tests/golden/make_harmony_messages.py

It needs the vocabulary ``o200k_base``, which the library loads from the network or from the folder
that ``TIKTOKEN_ENCODINGS_BASE`` names. Messages also spell marks out, which are text then.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TEXTS = (
    "I need the weather.", "Step 1.\n\nStep 2: 東京 ☕", " spaces around ", "", '{"a": 1}',
    "A call ends with <|call|>, a message with <|end|>.", "<|channel|>final<|message|>no",
    "<|start|>assistant to=functions.read", "`to=functions.read`",
)  # fmt: skip
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {}, {"path": "a"}, {"path": "<|call|> and <|end|>", "limit": 3}, {"path": "é\n\t\"q\" \\ {}"},
    {"nested": {"list": [1, 2.5, None, True, {"x": "}"}]}}, {"path": "<|start|>assistant"},
)  # fmt: skip


def random_answer(rng: random.Random) -> list[tuple[str, bool]]:
    """Pieces of text, and whether each is a control token."""
    parts: list[tuple[str, bool]] = []
    count = rng.randrange(1, 5)
    for number in range(count):
        if number:
            parts += [("<|start|>", True), ("assistant", False)]
        kind = rng.choice(["analysis", "commentary", "final", "call", "call"])
        if kind != "call":
            parts += [("<|channel|>", True), (kind, False), ("<|message|>", True)]
            parts.append((rng.choice(TEXTS), False))
            end = "<|end|>"
        else:
            to = f" to=functions.{rng.choice(['read', 'get_weather', 'files.list'])}"
            is_role = rng.random() < 0.5
            channel = rng.choice(["commentary", "commentary", "analysis"])
            parts += [(to, False)] * is_role
            parts += [("<|channel|>", True), (channel + ("" if is_role else to), False)]
            if rng.random() < 0.7:
                parts += [(" ", False), ("<|constrain|>", True), ("json", False)]
            parts += [("<|message|>", True), (json.dumps(rng.choice(ARGUMENTS)), False)]
            end = "<|call|>"
        if number < count - 1 or rng.random() < 0.3:
            parts.append((end, True))
    return [part for part in parts if part[0]]


def main() -> None:
    from openai_harmony import (
        HarmonyEncodingName,
        Role,
        StreamableParser,
        load_harmony_encoding,
    )

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    rng, cases = random.Random(0), []
    while len(cases) < 200:
        parts = random_answer(rng)
        parser = StreamableParser(encoding, role=Role.ASSISTANT)
        for text, is_mark in parts:
            allowed = {text} if is_mark else set()
            for token in encoding.encode(text, allowed_special=allowed, disallowed_special=()):
                parser.process(token)
        messages = [
            [message.channel, message.recipient, "".join(part.text for part in message.content)]
            for message in parser.messages
        ]
        if parser.current_channel is not None:
            messages.append(
                [parser.current_channel, parser.current_recipient, parser.current_content]
            )
        cases.append({"parts": parts, "messages": messages})
    text = "[\n" + ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases) + "\n]\n"
    (HERE / "harmony.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
