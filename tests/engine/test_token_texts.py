"""The bytes of single tokens, whatever way a vocabulary is written in."""

from __future__ import annotations

from functools import partial

import pytest
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_paged import demo_model_path, load
from mlx_paged.engine.text_stream import TokenTexts

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


def sentence_piece_tokenizer(detokenizer=NaiveStreamingDetokenizer):
    """A vocabulary like Gemma's: runs of spaces are added tokens, and each byte is a token."""
    pieces = ["<unk>", "▁", "a", "▁a", "f", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE(
        {piece: number for number, piece in enumerate(pieces)},
        [("▁", "a")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens([AddedToken("▁" * number, normalized=True) for number in range(2, 32)])
    tokenizer.add_special_tokens(["<end▁of▁turn>"])
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer), detokenizer)


def streamed(texts, tokens):
    detokenizer = texts.detokenizer()
    return "".join(map(detokenizer.add, tokens)) + detokenizer.finish()


@pytest.mark.parametrize(
    "detokenizer", [NaiveStreamingDetokenizer, partial(SPMStreamingDetokenizer, trim_space=False)]
)
def test_runs_of_spaces_that_are_added_tokens_are_spaces(detokenizer):
    tokenizer = sentence_piece_tokenizer(detokenizer)
    texts = TokenTexts(tokenizer)
    text = "f\n    a  a 東京" + " " * 31 + "a"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    run = tokenizer.convert_tokens_to_ids("▁" * 4)
    assert run in tokens
    assert (texts.bytes_of(run), streamed(texts, tokens), texts.decode(tokens)) == (
        b"    ",
        text,
        text,
    )


def test_a_byte_level_vocabulary_under_a_decoder_of_sentencepiece_is_read_by_its_letters():
    """As Mistral's conversions of Tekken have it; their own decoder leaves "Ġ" in the text."""
    tokenizer = byte_level_tokenizer(SPMStreamingDetokenizer)
    backend = tokenizer._tokenizer.backend_tokenizer
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    assert "Ġ" in tokenizer.decode(tokens)
    texts = TokenTexts(tokenizer)
    assert streamed(texts, tokens) == texts.decode(tokens) == TEXT


def test_a_letter_of_gpt_2_in_a_sentencepiece_vocabulary_is_that_letter():
    """Gemma's vocabulary has a token "ĉ"."""
    tokenizer = sentence_piece_tokenizer()
    tokenizer._tokenizer.add_tokens(["ĉ", "Ġ"])
    texts = TokenTexts(tokenizer)
    tokens = tokenizer.encode("a ĉ Ġ", add_special_tokens=False)
    assert streamed(texts, tokens) == "a ĉ Ġ"


@pytest.mark.parametrize(
    ("decoder", "whole"),
    [
        (decoders.Metaspace(), "a  f"),  # strips the first space, if the word after it is first
        (decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]), "▁a▁▁f"),
        (decoders.WordPiece(), "▁a ▁ ▁ f"),
        (decoders.Sequence([decoders.Replace("a", "aa"), decoders.ByteFallback(), decoders.Fuse()]),
         "▁aa▁▁f"),
    ],
)  # fmt: skip
def test_a_decoder_that_the_vocabulary_does_not_explain_is_asked_itself(decoder, whole):
    tokenizer = sentence_piece_tokenizer()
    tokenizer._tokenizer.backend_tokenizer.decoder = decoder
    texts = TokenTexts(tokenizer)
    tokens = [tokenizer.convert_tokens_to_ids(name) for name in ("▁a", "▁", "▁", "f")]
    before = tokenizer.encode("f", add_special_tokens=False)
    detokenizer = texts.detokenizer(before)
    text = "".join(map(detokenizer.add, tokens)) + detokenizer.finish()
    assert texts.decode(tokens) == whole
    assert text == texts.decode(before + tokens)[len(texts.decode(before)) :]


@pytest.mark.parametrize("token", [10**6, 2**40])
def test_a_token_that_the_tokenizer_does_not_have_has_no_bytes(token):
    assert TokenTexts(byte_level_tokenizer()).bytes_of(token) == b""
