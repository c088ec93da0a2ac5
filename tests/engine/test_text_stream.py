"""The text of a completion is that of its tokens up to the first stop text, however it is cut into
tokens.
"""

from __future__ import annotations

import codecs
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from helpers.fast_lane import mostly_slow
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from mlx_lm.utils import load_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mlx_paged.engine import text_stream
from mlx_paged.engine.input_processor import special_token_ids
from mlx_paged.engine.text_stream import TextStream, TokenTexts
from mlx_paged.loading import demo_model_path

PIECES = ("ab", "ba", "aab", " a", "b ", "  ", "\n\n", "é", "😀a", "你好", "a\n")


def byte_level_bpe() -> PreTrainedTokenizerFast:
    """Token b is the byte b; then tokens of several characters, and one that ends in the middle of
    one.
    """
    letters = bytes_to_unicode()
    pieces = (
        [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in PIECES] + [b"a\xe4"]
    )
    vocab = {"".join(letters[byte] for byte in piece): token for token, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback_spm(*, trim_space: bool) -> PreTrainedTokenizerFast:
    """Token b is the byte b; then tokens of several characters, spaces written as ▁."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {piece.replace(" ", "▁"): token for token, piece in enumerate(PIECES, 256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    strip = [decoders.Strip(" ", 1, 0)] if trim_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {
    "bpe": TokenizerWrapper(byte_level_bpe(), BPEStreamingDetokenizer),
    "bpe-naive": TokenizerWrapper(byte_level_bpe()),
    "spm": TokenizerWrapper(
        byte_fallback_spm(trim_space=False), partial(SPMStreamingDetokenizer, trim_space=False)
    ),
    "spm-trim": TokenizerWrapper(byte_fallback_spm(trim_space=True), SPMStreamingDetokenizer),
    "spm-naive": TokenizerWrapper(byte_fallback_spm(trim_space=False)),
    "spm-trim-naive": TokenizerWrapper(byte_fallback_spm(trim_space=True)),
}
PROMPT = [120]  # x
NUM_TOKENS = 256 + len(PIECES)
# The detokenizers of mlx-lm for each kind of tokenizer are quick, and its naive one with one kind.
of_each_tokenizer = mostly_slow("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS, quick=(0, 3, 4))
many = settings(deadline=None, max_examples=80)

# SPM's tokens write a space as ▁, and U+FFFD is what the tests look for.
any_text = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="▁\ufffd")
    | st.sampled_from("ab \n\0😀é你")
)
# Few letters, so that stop texts are found often, overlap, and nearly begin.
letters = st.sampled_from("aaab \n") | st.sampled_from("é你好😀")
stop_texts = st.lists(st.text(letters, min_size=1, max_size=5), max_size=4)


def byte_tokens(text: str) -> list[int]:
    return list(text.encode())


@st.composite
def texts_as_tokens(draw: st.DrawFn) -> tuple[str, list[int]]:
    """A text, cut into tokens at random: bytes and longer pieces."""
    text = draw(st.text(letters, max_size=25))
    rest, tokens = text.encode(), []
    while rest:
        fitting = [
            token for token, piece in enumerate(PIECES, 256) if rest.startswith(piece.encode())
        ]
        token = draw(st.sampled_from([rest[0], *fitting]))
        tokens.append(token)
        rest = rest[len(PIECES[token - 256].encode()) if token >= 256 else 1 :]
    return text, tokens


def whole_text(tokens: list[int]) -> str:
    """The text of all tokens, from the bytes that they stand for."""
    return data_of(tokens).decode(errors="replace")


def text_so_far(tokens: list[int]) -> str:
    """The same without a character of which only a part is there."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data_of(tokens))


def data_of(tokens: list[int]) -> bytes:
    return b"".join(
        PIECES[token - 256].encode() if token >= 256 else bytes([token]) for token in tokens
    )


def new_stream(tokenizer: TokenizerWrapper, *args: Any, **options: Any) -> TextStream:
    """One after a prompt, without which some tokenizers leave out a space at the beginning."""
    return TextStream(TokenTexts(tokenizer), *args, prompt_token_ids=PROMPT, **options)


def cut_at_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the first begin counts; of those that begin there, the shortest."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    begin, _, stop = min(found)
    return text[:begin], stop


def stream_of(
    tokenizer: TokenizerWrapper, tokens: list[int], stop: list[str]
) -> tuple[list[str], str | None]:
    """The text after each token and at the end; the stop text found."""
    stream = new_stream(tokenizer, stop)
    texts = [""]
    for token in tokens:
        found = stream.add(token)
        texts.append(stream.text)
        if found is not None:
            assert stream.finish() == found
            return [*texts, stream.text], found
    found = stream.finish()
    return [*texts, stream.text], found


def assert_grows(texts: list[str]) -> None:
    assert all(after.startswith(before) for before, after in pairwise(texts))


@of_each_tokenizer
@many
@given(text=any_text)
@example(text="é́ 👩‍👩‍👧 你你\n\n  x ")
def test_the_text_is_whole_and_no_character_is_ever_shown_in_halves(
    tokenizer: TokenizerWrapper, text: str
):
    texts, found = stream_of(tokenizer, byte_tokens(text), [])
    assert (texts[-1], found) == (text, None)
    assert_grows(texts)
    assert not any("\ufffd" in text for text in texts)


@of_each_tokenizer
@many
@given(text=any_text, begin=st.sampled_from(["", " ", "  ", "\0", " \n ", "\n a"]))
def test_the_text_is_what_the_tokenizer_decodes_behind_the_prompt(
    tokenizer: TokenizerWrapper, text: str, begin: str
):
    tokens = byte_tokens(begin + text)
    whole = tokenizer.decode(PROMPT + tokens)
    assert stream_of(tokenizer, tokens, [])[0][-1] == whole[len(tokenizer.decode(PROMPT)) :]


@of_each_tokenizer
@many
@given(text_and_tokens=texts_as_tokens())
@example(text_and_tokens=(" ab", [32, 256]))
@example(text_and_tokens=(" a\nb ", [256 + PIECES.index(" a"), 10, 256 + PIECES.index("b ")]))
def test_the_text_is_what_the_tokenizer_decodes_however_it_is_cut_into_tokens(
    tokenizer: TokenizerWrapper, text_and_tokens: tuple[str, list[int]]
):
    text, tokens = text_and_tokens
    assert stream_of(tokenizer, tokens, [])[0][-1] == text
    assert tokenizer.decode(PROMPT + tokens)[len(tokenizer.decode(PROMPT)) :] == text


@of_each_tokenizer
def test_a_space_at_the_beginning_is_shown_and_can_be_part_of_a_stop_text(
    tokenizer: TokenizerWrapper,
):
    tokens = [256 + PIECES.index(" a"), 98, 99]
    assert stream_of(tokenizer, tokens, []) == (["", " a", " ab", " abc", " abc"], None)
    assert stream_of(tokenizer, tokens, [" a"])[0][-1] == ""


def test_a_prompt_of_tokens_that_the_tokenizer_does_not_have_is_no_hindrance():
    for tokenizer in TOKENIZERS.values():
        stream = TextStream(TokenTexts(tokenizer), prompt_token_ids=[120, 2**40, -1, 10**6])
        stream.add(97)
        assert stream.text == "a"


@of_each_tokenizer
@many
@given(text_and_tokens=texts_as_tokens(), begin=st.sampled_from(["", " ", "  ", "   "]))
@example(text_and_tokens=("  ab", [256 + PIECES.index("  "), 256]), begin="")
def test_mlx_lms_text_is_the_same_without_its_first_space(
    tokenizer: TokenizerWrapper, text_and_tokens: tuple[str, list[int]], begin: str
):
    text, tokens = begin + text_and_tokens[0], byte_tokens(begin) + text_and_tokens[1]
    detokenizer = tokenizer.detokenizer
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert TokenTexts(tokenizer).without_first_space(text, tokens) == detokenizer.text


@of_each_tokenizer
@many
@given(text_and_tokens=texts_as_tokens(), stop=stop_texts)
@example(
    text_and_tokens=("aab", [256 + PIECES.index("aab")]), stop=["aa", "a"]
)  # the shorter one counts
@example(
    text_and_tokens=("aab", [97, 256]), stop=["aabb", "ab"]
)  # the longer one begins first, but never ends
@example(text_and_tokens=("aabb", [97, 256, 98]), stop=["aabb", "ab"])  # it does
def test_the_text_ends_where_the_first_stop_text_begins_however_it_is_cut_into_tokens(
    tokenizer: TokenizerWrapper, text_and_tokens: tuple[str, list[int]], stop: list[str]
):
    _, tokens = text_and_tokens
    expected, expected_stop = cut_at_stop(whole_text(tokens), stop)
    texts, found = stream_of(tokenizer, tokens, stop)
    assert (texts[-1], found) == (expected, expected_stop)
    assert_grows(texts)  # and so nothing of the stop text was shown at any time


@pytest.mark.parametrize("kind", ["bpe", "spm", "spm-trim"])
@many
@given(text_and_tokens=texts_as_tokens(), stop=stop_texts)
def test_no_more_is_held_back_than_what_may_become_a_stop_text(
    kind: str, text_and_tokens: tuple[str, list[int]], stop: list[str]
):
    stream, tokens = new_stream(TOKENIZERS[kind], stop), text_and_tokens[1]
    for number, token in enumerate(tokens, 1):
        found = stream.add(token)
        so_far = text_so_far(tokens[:number])
        if found is not None:
            return
        may_begin = (
            i for i in range(len(so_far)) if any(text.startswith(so_far[i:]) for text in stop)
        )
        assert stream.text == so_far[: next(may_begin, len(so_far))]


@of_each_tokenizer
@many
@given(text_and_tokens=texts_as_tokens(), stop=stop_texts, min_tokens=st.integers(0, 8))
def test_a_stop_text_counts_if_it_ends_in_the_text_after_the_first_tokens(
    tokenizer: TokenizerWrapper,
    text_and_tokens: tuple[str, list[int]],
    stop: list[str],
    min_tokens: int,
):
    _, tokens = text_and_tokens
    num_ignored = len(text_so_far(tokens[:min_tokens]))
    text = whole_text(tokens)
    ends = [
        (begin, len(each), each)
        for each in stop
        for begin in range(len(text))
        if text.startswith(each, begin) and begin + len(each) > num_ignored
    ]
    begin, length, expected_stop = min(ends, default=(len(text), 0, None))
    for includes_stop in (False, True):
        stream = new_stream(tokenizer, stop, min_tokens=min_tokens, includes_stop=includes_stop)
        texts = [""]
        for token in tokens:
            found = stream.add(token)
            texts.append(stream.text)
            if found is not None:
                break
        assert stream.finish() == expected_stop
        assert stream.text == text[: begin + length * includes_stop]
        assert_grows([*texts, stream.text])


@of_each_tokenizer
@many
@given(
    tokens=st.lists(st.sampled_from([97, 98, 256, 257, 258]), max_size=12),
    sequences=st.lists(
        st.lists(st.sampled_from([97, 98, 256]), min_size=2, max_size=4).map(tuple), max_size=3
    ),
)
def test_the_text_of_a_stop_sequence_is_never_shown(
    tokenizer: TokenizerWrapper, tokens: list[int], sequences: list[tuple[int, ...]]
):
    sequences.sort(key=len, reverse=True)
    stream, texts, left_out = new_stream(tokenizer, stop_sequences=sequences), [""], 0
    before: list[int] = []  # characters before each token
    for number, token in enumerate(tokens, 1):
        seen = tuple(tokens[:number])
        ended = next((each for each in sequences if seen[-len(each) :] == each), None)
        if ended is not None:
            # As the engine does it: the last token never comes into the text.
            left_out = len(ended) - 1
            break
        before.append(len(whole_text(tokens[: number - 1])))
        stream.add(token)
        texts.append(stream.text)
        # Nothing is held back but what may begin a sequence.
        begins = [
            length
            for each in sequences
            for length in range(1, len(each))
            if seen[-length:] == each[:length]
        ]
        text = whole_text(tokens[:number])
        assert stream.text == (text[: before[number - max(begins)]] if begins else text)
    assert stream.finish(left_out) is None
    text = whole_text(tokens[: len(before)])
    assert stream.text == (text[: before[-left_out]] if left_out else text)
    assert_grows([*texts, stream.text])


@of_each_tokenizer
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("hello world", ["world"], ("hello ", "world")),
        ("hello", ["hel"], ("", "hel")),
        ("x\n\ny", ["\n", "\n\n"], ("x", "\n")),
        ("x\n\ny", ["\n\n", "\n"], ("x", "\n")),
        ("xabcd", ["bc", "abcd"], ("x", "abcd")),
        ("xabcx", ["bc", "abcd"], ("xa", "bc")),
        ("xabc", ["bc", "abcd"], ("xa", "bc")),
        ("xabd", ["d", "abd"], ("x", "abd")),
        ("aaab", ["aab"], ("a", "aab")),
        ("go on. 終わり。 more", ["終わり。"], ("go on. ", "終わり。")),
        ("one 😀 two", ["😀"], ("one ", "😀")),
        ("one 😁 two", ["😀"], ("one 😁 two", None)),
        ("the end </sto", ["</stop>"], ("the end </sto", None)),
        ("x" * 50 + "y", ["x" * 20 + "y"], ("x" * 30, "x" * 20 + "y")),
    ],
)
def test_stop_texts_by_example(
    tokenizer, text: str, stop: list[str], expected: tuple[str, str | None]
):
    texts, found = stream_of(tokenizer, byte_tokens(text), stop)
    assert (texts[-1], found) == expected
    assert_grows(texts)


def test_a_token_that_holds_more_than_the_stop_text_shows_neither_it_nor_the_rest():
    tokenizer = TOKENIZERS["bpe"]
    token = 256 + PIECES.index("aab")
    texts, found = stream_of(tokenizer, [120, token, 97], ["a"])
    assert (texts, found) == (["", "x", "x", "x"], "a")


def test_the_text_waits_for_a_stop_text_that_began_before_one_that_is_complete():
    stream = new_stream(TOKENIZERS["bpe"], ["abcd", "bc"])
    assert [stream.add(token) for token in b"xabc"] == [None] * 4
    assert (stream.text, stream.add(ord("x")), stream.text) == ("x", "bc", "xa")


def test_after_a_stop_text_nothing_changes_any_more():
    stream = new_stream(TOKENIZERS["bpe"], ["b"])
    assert [stream.add(token) for token in b"abc"] == [None, "b", "b"]
    assert (stream.text, stream.finish(), stream.finish(), stream.text) == ("a", "b", "b", "a")


@of_each_tokenizer
def test_finishing_twice_shows_nothing_twice(tokenizer: TokenizerWrapper):
    stream = new_stream(tokenizer, ["abc"])
    for token in byte_tokens("xab"):
        stream.add(token)
    assert stream.text == "x"
    assert (stream.finish(), stream.text) == (None, "xab")
    assert (stream.finish(), stream.text) == (None, "xab")


@of_each_tokenizer
def test_a_character_that_never_ends_is_a_replacement_at_the_end(tokenizer: TokenizerWrapper):
    texts, _ = stream_of(tokenizer, [120, *"é".encode()[:1]], [])
    # With byte tokens alone, tokenizers give up on the x as well, but what was shown stays.
    assert texts == ["", "x", "x", "x\ufffd"]


@of_each_tokenizer
def test_a_stop_text_that_is_complete_only_at_the_end_is_found_there(tokenizer: TokenizerWrapper):
    stream = new_stream(tokenizer, ["\ufffd"])
    assert [stream.add(token) for token in [120, 0xE4]] == [None, None]
    assert (stream.finish(), stream.text) == ("\ufffd", "x")


@of_each_tokenizer
@many
@given(
    tokens=st.lists(st.integers(0, NUM_TOKENS + 20)),
    stop=st.lists(st.text(letters, min_size=1), max_size=2),
)
def test_no_tokens_whatever_raise_or_take_text_back(
    tokenizer: TokenizerWrapper, tokens: list[int], stop: list[str]
):
    texts, _ = stream_of(tokenizer, tokens, stop)
    assert_grows(texts)


@pytest.mark.parametrize("kind", ["bpe", "bpe-naive", "spm"])
@many
@given(
    data=st.binary(),
    stop=st.lists(st.sampled_from(["\ufffd", "a\ufffd", "\ufffda", "a"]), max_size=2),
)
def test_bytes_that_are_no_text_are_replaced_once_for_each_part_of_a_character(
    kind: str, data: bytes, stop: list[str]
):
    tokens = [120, *data]
    texts, found = stream_of(TOKENIZERS[kind], tokens, stop)
    assert (texts[-1], found) == cut_at_stop(whole_text(tokens), stop)
    assert_grows(texts)


@of_each_tokenizer
@pytest.mark.parametrize("unknown", [NUM_TOKENS + 5, 151_935, -1, 2**40])
def test_a_token_that_the_tokenizer_does_not_have_adds_no_text(
    tokenizer: TokenizerWrapper, unknown: int
):
    first, second = "é".encode()
    texts, found = stream_of(
        tokenizer, [unknown, 97, unknown, first, unknown, second, unknown], ["b"]
    )
    assert (texts, found) == (["", "", "a", "a", "a", "a", "aé", "aé", "aé"], None)


def test_a_tokenizer_that_raises_for_a_token_it_does_not_have_loses_nothing():
    class Raising(PreTrainedTokenizerFast):
        def convert_ids_to_tokens(self, ids, skip_special_tokens=False):
            if ids == 999:
                raise KeyError(ids)
            return super().convert_ids_to_tokens(ids, skip_special_tokens)

    tokenizer = Raising(tokenizer_object=byte_level_bpe()._tokenizer)
    assert stream_of(TokenizerWrapper(tokenizer), [97, 999, 98], [])[0] == [
        "",
        "a",
        "a",
        "ab",
        "ab",
    ]


def test_a_last_token_outside_the_byte_alphabet_is_a_replacement():
    tokenizer = byte_level_bpe()
    tokenizer.add_tokens([AddedToken("\ufffd", normalized=False)])
    token = tokenizer.convert_tokens_to_ids("\ufffd")
    wrapper = TokenizerWrapper(tokenizer, BPEStreamingDetokenizer)
    assert stream_of(wrapper, [97, token], [])[0] == ["", "a", "a\ufffd", "a\ufffd"]
    assert stream_of(wrapper, [97, token, 98], [])[0][-1] == "a\ufffdb"


def test_a_tokenizer_that_cleans_up_spaces_takes_back_nothing_that_was_shown():
    vocab = {word: token for token, word in enumerate(["[UNK]", "a", "b", ",", "do", "n't"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapper = TokenizerWrapper(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=True)
    )
    texts, _ = stream_of(wrapper, [1, 3, 2, 4, 5], [])
    assert_grows(texts)
    assert texts[-1] == "a, b don't"


@pytest.mark.parametrize("kind", ["bpe", "spm"])
def test_stops_are_looked_for_in_new_text_and_what_was_held_back_only(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    searched: list[int] = []
    find_stop = text_stream.find_stop
    monkeypatch.setattr(
        text_stream,
        "find_stop",
        lambda text, *args: searched.append(len(text)) or find_stop(text, *args),
    )
    stream_of(TOKENIZERS[kind], byte_tokens("ab abc abx 😀 " * 100), ["abcd", "abxy", "😁"])
    assert max(searched) <= 1 + 3


def with_special_tokens(*names: str) -> TokenizerWrapper:
    tokenizer = byte_level_bpe()
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
    return TokenizerWrapper(tokenizer, BPEStreamingDetokenizer)


@given(tokens=st.lists(st.sampled_from([97, 98, 0xC3, 0xA9, 268, 269]), max_size=12))
def test_skipped_special_tokens_are_those_that_the_tokenizer_skips(tokens: list[int]):
    tokenizer = with_special_tokens("<end>", "<turn>")
    special = special_token_ids(tokenizer)
    assert special == {268, 269} and special_token_ids(None) == frozenset()
    for skipped in (special, frozenset()):
        stream = new_stream(tokenizer, skipped_token_ids=skipped)
        for token in tokens:
            stream.add(token)
        stream.finish()
        assert stream.text == tokenizer.decode(tokens, skip_special_tokens=bool(skipped))


def test_a_special_token_that_is_a_stop_text_ends_the_text_though_it_is_not_shown():
    tokenizer = with_special_tokens("<end>", "<turn>")
    tokens = [*byte_tokens("ab "), 269, *byte_tokens("cd"), 268, 97]

    def ended(stop: list[str], **options) -> tuple[str, str | None]:
        stream = new_stream(tokenizer, stop, skipped_token_ids={268, 269}, **options)
        found = next(filter(None, map(stream.add, tokens)), None) or stream.finish()
        return stream.text, found

    assert ended([]) == ("ab cda", None)
    assert ended(["<end>"]) == ("ab cd", "<end>")
    assert ended(["<end>"], includes_stop=True) == ("ab cd", "<end>")
    assert ended(["<turn>", "<end>"]) == ("ab ", "<turn>")
    assert ended(["<turn>", "<end>"], min_tokens=4) == ("ab cd", "<end>")
    assert ended(["<end>"], min_tokens=7) == ("ab cda", None)
    assert ended(["b c"]) == ("a", "b c")  # across a token that has no text
    assert ended(["cdx", "<end>"]) == ("ab cd", "<end>")  # what was held back comes, too


@pytest.fixture(scope="module")
def demo_tokenizer() -> TokenizerWrapper:
    return load_tokenizer(demo_model_path())


@many
@given(
    parts=st.lists(any_text | st.sampled_from(["the ", "cat", " sat", "\n", "<|im_end|>"])),
    stop=stop_texts,
)
def test_the_demo_models_tokenizer_gives_back_what_it_encoded(
    demo_tokenizer, parts: list[str], stop: list[str]
):
    text = "".join(parts)
    tokens = demo_tokenizer.encode(text, add_special_tokens=False)
    texts, found = stream_of(demo_tokenizer, tokens, stop)
    assert (texts[-1], found) == cut_at_stop(text, stop)
    assert_grows(texts)
    if not stop:
        assert texts[-1] == text
