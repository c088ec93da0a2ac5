"""The demo model is what its card says: a small Qwen3 that recalls, copies and counts, with an
exact tokenizer.
"""

from __future__ import annotations

import json

import pytest
from mlx.utils import tree_flatten

from mlx_paged import demo_model_path, generate, load

TEXTS = [
    "",
    " ",
    "  two  spaces  ",
    "\n\nlines\n",
    "4821 and -7",
    "na\u00efve caf\u00e9",
    "\u65e5\u672c\u8a9e",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "tab\tand \x00 null",
]


@pytest.fixture(scope="module")
def demo():
    return load(demo_model_path())


def ask(demo: tuple, *turns: str) -> str:
    """The answer to the last turn; the turns before it are answered by the model, too."""
    model, tokenizer = demo
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        messages.append(
            {"role": "assistant", "content": generate(model, tokenizer, prompt, max_tokens=300)}
        )
    return messages[-1]["content"]


def test_it_is_a_small_real_qwen3(demo: tuple):
    model, _ = demo
    num_parameters = sum(weight.size for _, weight in tree_flatten(model.parameters()))
    assert 1_000_000 <= num_parameters <= 4_000_000
    args = model.args
    assert args.num_attention_heads > args.num_key_value_heads > 1 and args.tie_word_embeddings
    assert sum(file.stat().st_size for file in demo_model_path().iterdir()) < 8_000_000


def test_its_card_states_the_accuracy_it_was_measured_at():
    card = (demo_model_path() / "README.md").read_text()
    measured = json.loads((demo_model_path() / "accuracy.json").read_text())
    assert measured["recall"]["256"] >= 0.95
    assert (
        f"{measured['recall']['1000']:.1%}" in card and f"{measured['recall']['256']:.1%}" in card
    )


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_its_tokenizer_gives_back_every_text(demo: tuple, text: str):
    _, tokenizer = demo
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens) == text
    detokenizer = tokenizer.detokenizer
    detokenizer.reset()
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == text


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_its_sentencepiece_model_and_its_tokenizer_json_agree(demo: tuple, text: str):
    import sentencepiece

    _, tokenizer = demo
    pieces = sentencepiece.SentencePieceProcessor(
        model_file=str(demo_model_path() / "tokenizer.model")
    )
    assert tokenizer.encode(text, add_special_tokens=False) == pieces.encode(text)


def test_its_template_only_ever_appends(demo: tuple):
    _, tokenizer = demo
    messages = [{"role": "system", "content": "Be brief."}]
    rendered = ""
    for n in range(3):
        messages.append({"role": "user", "content": f"question {n}"})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert prompt.startswith(rendered)
        messages.append({"role": "assistant", "content": f" answer {n} "})
        rendered = prompt + f" answer {n} "


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (("The code of apple is 4821. What is the code of apple?",), "The code of apple is 4821."),
        (
            (
                "The code of apple is 4821.",
                "The code of stone is 905.",
                "What is the code of apple?",
            ),
            "The code of apple is 4821.",
        ),
        (("My name is Tom.", "Hello!", "What is my name?"), "Your name is Tom."),
        (("Repeat: red 7 blue 9 green",), "red 7 blue 9 green"),
        (("What is 17 + 25?",), "17 + 25 = 42"),
        (("Count from 20 to 60.",), " ".join(str(n) for n in range(20, 61))),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_it_recalls_copies_adds_and_counts(demo: tuple, turns: tuple[str, ...], expected: str):
    assert ask(demo, *turns) == expected
