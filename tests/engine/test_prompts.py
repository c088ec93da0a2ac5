"""Prompts: every form that means token ids is read, and everything else is refused in one line."""

from __future__ import annotations

import array
from collections import UserDict, deque
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.engine.input_processor import read_prompt, split_prompts

VOCAB_SIZE = 50
BOS = "<s>"


class Letters:
    """A tokenizer of capital letters, A is 0; with a beginning of sequence, 40."""

    bos_token = BOS

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if "!" in text:
            raise LookupError("no such\nletter: !")
        letters = [
            40 if letter == BOS else ord(letter) - ord("A") for letter in text.removeprefix(BOS)
        ]
        return [40] * (add_special_tokens or text.startswith(BOS)) + letters


def read(prompt: object, tokenizer: Any = None) -> tuple[str | None, list[int]]:
    return read_prompt(prompt, tokenizer or Letters(), VOCAB_SIZE)


@pytest.mark.parametrize(
    "form",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        deque([1, 2, 3]),
        array.array("l", [1, 2, 3]),
        np.array([1, 2, 3], dtype=np.uint8),
        np.array([1, 2, 3], dtype=np.int64),
        np.array([1, 2, 3], dtype=object),
        mx.array([1, 2, 3]),
        mx.array([0, 1, 2], dtype=mx.uint16) + 1,
        [np.int32(1), np.uint64(2), mx.array(3)],
        list(mx.array([1, 2, 3])),
        {"prompt_token_ids": [1, 2, 3]},
        {"prompt_token_ids": mx.array([1, 2, 3])},
        {"prompt_token_ids": [1, 2, 3], "prompt": None, "multi_modal_data": None},
        UserDict(prompt_token_ids=(1, 2, 3)),
    ],
    ids=repr,
)
def test_token_ids_of_every_form_are_pythons_integers(form: object):
    text, token_ids = read(form)
    assert text is None and token_ids == [1, 2, 3]
    assert {type(token) for token in token_ids} == {int}


@pytest.mark.parametrize(
    "form", ["BCD", {"prompt": "BCD"}, {"prompt": "BCD", "prompt_token_ids": None}], ids=repr
)
def test_a_text_is_encoded_with_special_tokens_unless_it_begins_with_them(form: object):
    assert read(form) == ("BCD", [40, 1, 2, 3])
    assert read(BOS + "BCD") == (BOS + "BCD", [40, 1, 2, 3])


def test_of_a_text_and_token_ids_the_ids_are_the_prompt_and_the_text_is_kept():
    assert read({"prompt": "any text", "prompt_token_ids": [7]}) == ("any text", [7])


def test_what_is_read_is_a_copy():
    token_ids = [1, 2]
    assert read(token_ids)[1] is not token_ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (b"BCD", "a prompt is text or token ids, got bytes as prompt"),
        (bytearray(b"BCD"), "a prompt is text or token ids, got bytearray as prompt"),
        (memoryview(b"BCD"), "a prompt is text or token ids, got memoryview as prompt"),
        ({1, 2}, "a prompt is text or token ids, got set as prompt"),
        (frozenset([1]), "a prompt is text or token ids, got frozenset as prompt"),
        (iter([1, 2]), "a prompt is text or token ids, got list_iterator as prompt"),
        ({}, "got dict with keys [] as prompt; a dict has 'prompt' (text) or 'prompt_token_ids'"),
        (
            {"input_ids": [1], "attention_mask": [1]},
            "got dict with keys ['input_ids', 'attention_mask'] as prompt",
        ),
        ({"prompt": "A", "multi_modal_data": {}}, "prompt['multi_modal_data'] is not supported"),
        (
            {"prompt": "A", "cache_salt": "s"},
            "prompt['cache_salt'] is not supported, only text and token ids are; give",
        ),
        ({"prompt": [1, 2]}, "prompt['prompt'] must be text, got list"),
        ({"prompt_token_ids": "BCD"}, "prompt['prompt_token_ids'] must be token ids, got str"),
        (
            {"prompt_token_ids": {"prompt": "A"}},
            "prompt['prompt_token_ids'] must be token ids, got dict",
        ),
        ({"prompt_token_ids": b"BCD"}, "a prompt is text or token ids, got bytes"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ([], "the prompt is empty; give at least one token as prompt"),
        (np.array([], dtype=np.int64), "the prompt is empty"),
        ([1, True], "token ids are integers, got True (bool) as prompt[1]"),
        ([1, np.True_], f"token ids are integers, got {np.True_!r} (bool"),
        ([1, 2.0], "token ids are integers, got 2.0 (float) as prompt[1]"),
        ([1, "2"], "token ids are integers, got '2' (str) as prompt[1]"),
        ([[1, 2]], "token ids are integers, got [1, 2] (list) as prompt[0]"),
        ([None], "token ids are integers, got None (NoneType) as prompt[0]"),
        (
            [mx.array([1])],
            "token ids are integers, got array([1], dtype=int32) (array) as prompt[0]",
        ),
        (np.array([1.0, 2.0]), "token ids are integers, got 1.0 (float) as prompt[0]"),
        (mx.array([True]), "token ids are integers, got True (bool) as prompt[0]"),
        (mx.array(7), "prompt is an array of shape (); token ids have one dimension"),
        (
            np.array([[1, 2]]),
            "prompt is an array of shape (1, 2); token ids have one dimension, such as prompt[0]",
        ),
        (
            [1, VOCAB_SIZE],
            "token id 50 is outside the model's vocabulary of 50, given as prompt[1]",
        ),
        ([-1], "token id -1 is outside"),
        ([10**30], "token id 1000000000000000000000000000000 is outside"),
        (range(10**15), "token id 50 is outside the model's vocabulary of 50, given as prompt[50]"),
        ("A\ud800B", "prompt is not valid Unicode: '\\ud800' at position 1 is half a character"),
        ("what!", "the tokenizer can't encode prompt: LookupError: no such letter: !"),
        ("~~~", "token id 61 is outside the model's vocabulary of 50"),
    ],
    ids=lambda value: ascii(value)[:40] if isinstance(value, str) else type(value).__name__,
)
def test_anything_else_is_refused_in_one_line_that_names_the_argument(prompt: object, message: str):
    with pytest.raises(ValueError) as refusal:
        read(prompt)
    text = str(refusal.value)
    assert text.startswith("[prompt] ") and message in text and "\n" not in text and len(text) < 300


def test_the_name_of_the_argument_is_the_callers():
    with pytest.raises(ValueError, match=r"got None \(NoneType\) as prompts\[3\]\[1\]"):
        read_prompt([1, None], None, VOCAB_SIZE, name="prompts[3]")


def test_a_text_needs_a_tokenizer():
    with pytest.raises(
        ValueError, match="a text prompt needs a tokenizer; give token ids as prompt"
    ):
        read_prompt("BCD", None, VOCAB_SIZE)


def test_an_array_of_mlx_that_can_not_be_evaluated_is_refused():
    unreadable = SimpleNamespace(ndim=1, shape=(2,), tolist=lambda: 1 // 0)
    with pytest.raises(
        ValueError, match="prompt is an array that can't be read: ZeroDivisionError"
    ) as refusal:
        read(unreadable)
    assert isinstance(refusal.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("AB", ["AB"]),
        ({"prompt": "AB"}, [{"prompt": "AB"}]),
        ({}, [{}]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [(1, 2)]),
        (range(2), [range(2)]),
        ([np.int64(1)], [[1]]),
        ([1.5], [[1.5]]),
        ([True, "A"], [[True, "A"]]),
        (mx.array([1, 2]), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array(["A", "B"]), ["A", "B"]),
        (["A", [1], {"prompt": "B"}, None], ["A", [1], {"prompt": "B"}, None]),
        ([[1, 2], 3], [[1, 2], 3]),
        (("A", "B"), ["A", "B"]),
        ([], []),
        ((), []),
    ],
    ids=repr,
)
def test_one_prompt_and_several_are_told_apart_by_the_first_element(
    prompts: object, expected: list
):
    assert split_prompts(prompts) == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (
            None,
            "prompts must be a prompt (text, token ids or a dict) or a list of prompts, got "
            "NoneType",
        ),
        (7, "got int"),
        (b"AB", "got bytes"),
        ({"A", "B"}, "got set"),
        ((prompt for prompt in ("A", "B")), "got generator"),
        (
            mx.zeros((1, 2, 3), dtype=mx.int32),
            "prompts is an array of shape (1, 2, 3); give one dimension",
        ),
        (np.array(7), "prompts is an array of shape ()"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_list_of_prompts_is_refused(prompts: object, message: str):
    with pytest.raises(ValueError) as refusal:
        split_prompts(prompts)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)
