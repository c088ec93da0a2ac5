"""The bytes of single tokens, whatever way a vocabulary is written in."""

from __future__ import annotations

import pytest
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    TokenizerWrapper,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_paged import demo_model_path, load
from mlx_paged.engine.token_texts import TokenTexts

TEXT = " Once upon\ta tíme, 東京 — 🙂 <b>\n\x7f"


def byte_level_tokenizer(detokenizer=BPEStreamingDetokenizer):
    """A tokenizer in GPT-2's alphabet: each byte is a token, and a few words are."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["on", "Ġu", "Ġt"]
    vocabulary = {name: number for number, name in enumerate([*alphabet, *words])}
    merges = [("o", "n"), ("Ġ", "u"), ("Ġ", "t")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end of Ġtext|>")
    return TokenizerWrapper(fast, detokenizer)


def test_the_bytes_of_a_byte_level_vocabulary_are_those_of_the_text():
    tokenizer = byte_level_tokenizer()
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    texts = TokenTexts(tokenizer)
    assert b"".join(map(texts.bytes_of, tokens)) == TEXT.encode()
    assert any(texts.text_of(token) == "\ufffd" for token in tokens)
    # A special token is written as it is, though the alphabet has its characters.
    assert texts.text_of(tokenizer.eos_token_id) == "<|end of Ġtext|>"
    assert len({texts.bytes_of(token) for token in range(256)}) == 256


def test_the_bytes_of_a_sentencepiece_vocabulary_are_those_of_the_text():
    _, tokenizer = load(demo_model_path())
    texts = TokenTexts(tokenizer)
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(map(texts.bytes_of, tokens)).decode() == TEXT
    assert texts.text_of(tokenizer.eos_token_id) == "<|im_end|>"


def test_another_vocabulary_is_decoded_token_by_token():
    tokenizer = byte_level_tokenizer(NaiveStreamingDetokenizer)
    texts = TokenTexts(tokenizer)
    tokens = tokenizer.encode(" Once upon", add_special_tokens=False)
    assert b"".join(map(texts.bytes_of, tokens)) == b" Once upon"


@pytest.mark.parametrize("token", [10**6, 2**40])
def test_a_token_that_the_tokenizer_does_not_have_has_no_bytes(token):
    assert TokenTexts(byte_level_tokenizer()).bytes_of(token) == b""
