"""A tokenizer out of a GGUF file's metadata is the one that was written into it."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from helpers.fast_lane import mostly_slow
from helpers.gguf_files import demo_tokenizer
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    TokenizerWrapper,
)
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.tokenization_utils_base import generate_merges

from mlx_paged import demo_model_path
from mlx_paged.loading import LoadError
from mlx_paged.loading.gguf.metadata import Metadata
from mlx_paged.loading.gguf.pre_tokenizers import PRE_TOKENIZERS
from mlx_paged.loading.gguf.tokenizer import _merges_by_score, write_tokenizer
from mlx_paged.loading.gguf.vocabulary import GGUFVocabulary
from mlx_paged.loading.tokenizer import read_tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "I'LL say it's we're don't THEY'VE",
    "  two  spaces\tand tabs \t\n\nlines\r\n \r\n   end   ",
    "1 22 333 4444 55555 3.14 1,000,000 0x1F ２３",
    "naïve café — e\u0301 \u00e9 ﬁ Ǆ",
    "你好，世界！ こんにちは 안녕하세요",
    "नमस्ते दुनिया สวัสดี العربية עברית",
    "🙂👨‍👩‍👧 🇩🇪 ✊🏽",
    "\x00\x01\x7f\x85\u200b\ufeff\U0010ffff",
    "camelCase HTTPServer snake_case $x+=1; // <b>",
    "<|im_start|>user\nhi<|im_end|>\n<think>\nso</think> <|im_end|><|im_start|> x",
]


def random_texts(number: int = 400) -> list[str]:
    rng = random.Random(0)
    ranges = (range(1, 0x250), range(0x900, 0x980), range(0x2000, 0x2070), range(0x3040, 0x30A0),
              range(0x4E00, 0x4F00), range(0xAC00, 0xAC80), range(0x1F600, 0x1F650))  # fmt: skip
    wide = [chr(code) for codes in ranges for code in codes]
    dense = " \n\t\r'sdmtlveabAB019.!"
    return [
        "".join(rng.choice(letters) for _ in range(rng.randint(1, 30)))
        for letters in (wide, dense)
        for _ in range(number // 2)
    ]


def read(metadata: dict[str, Any], folder: Path, **config: Any) -> TokenizerWrapper:
    folder.mkdir(parents=True, exist_ok=True)
    ends = write_tokenizer(Metadata(Path("x.gguf"), metadata), folder)
    return read_tokenizer(folder, config or None, ends)


def assert_same(tokenizer: Any, original: Any) -> None:
    for text in TEXTS + random_texts():
        ids = original.encode(text)
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == original.decode(ids), text
        assert tokenizer.encode(text, add_special_tokens=False) == original.encode(
            text, add_special_tokens=False
        ), text


def streamed(tokenizer: TokenizerWrapper, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.text


# SentencePiece's kind


def test_the_demo_models_tokenizer_comes_back(tmp_path):
    tokenizer = read(demo_tokenizer(), tmp_path)
    original = read_tokenizer(demo_model_path(), None, None)
    assert tokenizer.get_vocab() == original.get_vocab()
    assert_same(tokenizer, original)
    assert type(tokenizer.detokenizer) is type(original.detokenizer)
    text = "Repeat: forest 12 é 你\nend"
    assert streamed(tokenizer, original.encode(text)) == text
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for options in ({}, {"add_generation_prompt": True}, {"tokenize": False}):
        assert tokenizer.apply_chat_template(messages, **options) == (
            original.apply_chat_template(messages, **options)
        )
    assert tokenizer.eos_token == "<|im_end|>"
    # The second ends an answer as well, by its name.
    assert tokenizer.eos_token_ids == {2, 3}


def llama_2(**changes: Any) -> dict[str, Any]:
    """The demo's tokens as Llama 2 has its own: BOS, and a space before each text."""
    metadata = demo_tokenizer()
    for key in ("add_bos_token", "add_space_prefix"):
        del metadata[f"tokenizer.ggml.{key}"]
    return {**metadata, "tokenizer.ggml.bos_token_id": 1, **changes}


def test_a_file_like_llama_2s_begins_texts_with_bos_and_a_space(tmp_path):
    tokenizer = read(llama_2(), tmp_path)
    # As the converter of transformers 4 writes it for Llama 2 (its "legacy" form).
    original = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    original.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    original.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    for text in TEXTS + random_texts():
        ids = original.encode(text).ids
        assert tokenizer.encode(text) == [1, *ids], text
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=True) == original.decode(ids), text
    assert streamed(tokenizer, original.encode("is it?").ids) == "is it?"


def test_an_end_token_is_added_where_the_file_says_so(tmp_path):
    tokenizer = read(llama_2(**{"tokenizer.ggml.add_eos_token": True}), tmp_path)
    assert tokenizer.encode("is")[0] == 1
    assert tokenizer.encode("is")[-1] == 2


def test_merges_follow_the_scores():
    vocabulary = GGUFVocabulary.read(Metadata(Path("x.gguf"), demo_tokenizer()))
    merges = _merges_by_score(vocabulary)
    original = json.loads((demo_model_path() / "tokenizer.json").read_text())
    assert merges == [tuple(merge) for merge in original["model"]["merges"]]
    scores = {token: vocabulary.scores[i] for token, i in vocabulary.ids.items()}
    special = [token for i, token in enumerate(vocabulary.tokens) if vocabulary.types[i] != 1]
    theirs = generate_merges(vocabulary.ids, scores, special)
    # Ways to make the same token are in another order there.
    assert ["".join(merge) for merge in merges] == ["".join(merge) for merge in theirs]
    assert set(merges) == set(theirs)


def test_texts_are_cut_as_sentencepiece_cuts_them(tmp_path):
    tokenizer = read(demo_tokenizer(), tmp_path)
    pieces = sentencepiece.SentencePieceProcessor(str(demo_model_path() / "tokenizer.model"))
    rng = random.Random(1)
    repeats = ["".join(rng.choice("ae t1=") for _ in range(30)) for _ in range(300)]
    for text in [*TEXTS[:-1], *random_texts(), *repeats]:
        assert tokenizer.encode(text) == pieces.encode(text), text


# Byte-level BPE

# Each kind as its model's own tokenizer.json has it, beside what transformers knows by pattern.
ORIGINALS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    ),
    "starcoder": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    ),
    "deepseek-coder": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated")
            for pattern in (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")
        ]
        + [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    **{
        kind: pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        for kind, pattern in GGUF_PRE_TOKENIZER_SPLITS.items()
        if kind in PRE_TOKENIZERS
    },
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{# tool_call.name <tool_call> #}{% if add_generation_prompt %}<|im_start|>"
    "assistant\n{% endif %}"
)


@cache
def trained(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer as Hugging Face has it, trained on these texts and on this file."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=PRE_TOKENIZERS[kind].ignores_merges))
    tokenizer.pre_tokenizer = ORIGINALS[kind]
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(), *TEXTS * 20], trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )


def metadata_of(tokenizer: Any, kind: str, num_padded: int = 5) -> dict[str, Any]:
    """What a converter writes, with rows that nothing is said of."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["content"]: token["special"] for token in content["added_tokens"]}
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    types = [{None: 1, True: 3, False: 4}[added.get(token)] for token in tokens]
    padding = [f"[PAD{len(tokens) + i}]" for i in range(num_padded)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": tokens + padding,
        "tokenizer.ggml.token_type": types + [5] * num_padded,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


@mostly_slow("kind", ORIGINALS, quick=range(0, len(ORIGINALS), 3))
def test_each_kind_cuts_words_as_its_own_tokenizer_does(kind, tmp_path):
    original = trained(kind)
    tokenizer = read(metadata_of(original, kind), tmp_path)
    assert tokenizer.get_vocab() == original.get_vocab()
    assert_same(tokenizer, original)
    assert isinstance(tokenizer.detokenizer, BPEStreamingDetokenizer)


def test_kinds_that_no_other_library_knows_are_few():
    assert set(PRE_TOKENIZERS) - set(ORIGINALS) == {
        # Of the same pre-tokenizer as starcoder, by llama.cpp's own table ...
        "refact", "command-r", "codeshell", "exaone", "minerva-7b",
        # ... and those that it has alone.
        "default", "seed-coder",
    }  # fmt: skip
    for kind in ("refact", "command-r", "codeshell", "exaone", "minerva-7b"):
        assert PRE_TOKENIZERS[kind] is PRE_TOKENIZERS["starcoder"]


@pytest.mark.parametrize("kind", ["default", "seed-coder"])
def test_no_text_is_lost_in_kinds_without_an_original(kind, tmp_path):
    tokenizer = read(metadata_of(trained("gpt-2"), kind), tmp_path)
    for text in TEXTS + random_texts():
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_marks_templates_and_ends_are_found(tmp_path):
    metadata = metadata_of(trained("qwen2"), "qwen2")
    tokenizer = read(metadata, tmp_path)
    assert tokenizer.has_chat_template
    assert tokenizer.has_thinking
    assert tokenizer.has_tool_calling
    tokens = metadata["tokenizer.ggml.tokens"]
    assert tokenizer.eos_token_ids == {tokens.index(t) for t in ("<|im_end|>", "<|endoftext|>")}
    assert tokenizer.pad_token == "<|endoftext|>"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi\n"
    # Marks are no special tokens: an answer shows them.
    ids = tokenizer.encode("<think>x</think>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>x</think>"


def test_llama_3_begins_texts_with_bos_unless_the_file_forbids_it(tmp_path):
    metadata = metadata_of(trained("llama-bpe"), "llama-bpe")
    bos = metadata["tokenizer.ggml.tokens"].index("<|im_start|>")
    metadata["tokenizer.ggml.bos_token_id"] = bos
    assert read(metadata, tmp_path / "a").encode("hi")[0] != bos
    del metadata["tokenizer.ggml.add_bos_token"]
    tokenizer = read(metadata, tmp_path / "b")
    assert tokenizer.encode("hi")[0] == bos
    assert bos not in tokenizer.encode("hi", add_special_tokens=False)


def test_several_chat_templates_keep_their_names(tmp_path):
    metadata = metadata_of(trained("gpt-2"), "gpt-2")
    metadata["tokenizer.chat_templates"] = ["tool_use"]
    metadata["tokenizer.chat_template.tool_use"] = "tools"
    tokenizer = read(metadata, tmp_path)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith("<|im_start|>user")
    named = tokenizer.apply_chat_template(messages, tokenize=False, chat_template="tool_use")
    assert named == "tools"


def test_settings_go_on_top(tmp_path):
    tokenizer = read(demo_tokenizer(), tmp_path, chat_template="{{ messages[0].content }}!")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert text == "a!"


def test_nothing_of_the_folder_is_needed_later(tmp_path):
    tokenizer = read(demo_tokenizer(), tmp_path / "a")
    for file in (tmp_path / "a").iterdir():
        file.unlink()
    tokenizer.save_pretrained(tmp_path / "b")
    again = AutoTokenizer.from_pretrained(tmp_path / "b")
    assert again.encode("Repeat: 12") == tokenizer.encode("Repeat: 12")
    assert not isinstance(tokenizer.detokenizer, NaiveStreamingDetokenizer)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("demo", {"model": "t5"}, "a tokenizer of the kind 't5'"),
        ("demo", {"model": None}, "lacks tokenizer.ggml.model"),
        ("demo", {"tokens": None}, "lacks tokenizer.ggml.tokens"),
        ("demo", {"tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list of texts"),
        ("demo", {"scores": None}, "lacks tokenizer.ggml.scores"),
        ("demo", {"scores": [1.0]}, "tokenizer.ggml.scores must have 1,024 entries"),
        ("demo", {"token_type": [1]}, "token_type must have 1,024 entries, and has 1"),
        ("demo", {"eos_token_id": 1024}, "is 1,024, but there are 1,024 tokens"),
        ("demo", {"chat_template": 5}, "tokenizer.chat_template must be a text, got 5"),
        ("gpt-2", {"pre": "new-kind"}, "unknown pre-tokenizer 'new-kind'"),
        ("gpt-2", {"pre": None}, "lacks tokenizer.ggml.pre"),
        ("gpt-2", {"merges": None}, "lacks tokenizer.ggml.merges"),
        ("gpt-2", {"merges": ["nothing"]}, "the tokenizer in "),
        ("gpt-2", {"merges": ["no such"]}, "the tokenizer in "),
    ],
)
def test_a_broken_tokenizer_is_reported_in_one_line(kind, changes, message, tmp_path):
    metadata = demo_tokenizer() if kind == "demo" else metadata_of(trained(kind), kind)
    for name, value in changes.items():
        prefix = "tokenizer." if name == "chat_template" else "tokenizer.ggml."
        metadata[prefix + name] = value
    with pytest.raises(LoadError) as raised:
        read(metadata, tmp_path)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_token_that_is_there_twice_is_refused(tmp_path):
    metadata = demo_tokenizer()
    metadata["tokenizer.ggml.tokens"][900] = metadata["tokenizer.ggml.tokens"][300]
    with pytest.raises(LoadError, match=r"the token .* twice"):
        read(metadata, tmp_path)
