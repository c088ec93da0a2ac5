"""How a text is split into words before byte-level BPE, by the file's ``tokenizer.ggml.pre``.

The file has only a name of llama.cpp. The patterns are those in the ``tokenizer.json`` of the
models that the names stand for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Words in which an upper-case letter after a lower-case one begins a new word.
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_CASED_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_GPT_2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class PreTokenizer:
    """How words are split.

    Attributes:
        patterns: each splits the pieces of the previous one; what it does not match stays a piece.
        ignores_merges: whether a word that is a token is never split by the merges.
        adds_bos: whether texts begin with the BOS token, unless the file specifies it.
        normalises: whether texts are normalised to NFC first.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    normalises: bool = False

    @property
    def as_json(self) -> dict[str, Any]:
        """The entry of ``tokenizer.json``, which maps bytes to GPT-2's letters."""
        splits = [
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
            for pattern in self.patterns
        ]
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        }
        return {"type": "Sequence", "pretokenizers": [*splits, byte_level]}


_LLAMA_3_PATTERN = "|".join((_CONTRACTIONS, _WORDS, r"\p{N}{1,3}", _MARKS, _SPACES))
_LLAMA_3 = PreTokenizer((_LLAMA_3_PATTERN,), ignores_merges=True, adds_bos=True)
_SMAUG = PreTokenizer((_LLAMA_3_PATTERN,))
_QWEN_2_PATTERN = "|".join((_CONTRACTIONS, _WORDS, r"\p{N}", _MARKS, _SPACES))
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT_2))
_GPT_4O = PreTokenizer(
    (
        "|".join(
            (
                *(f"{words}{_CONTRACTIONS}?" for words in _CASED_WORDS),
                r"\p{N}{1,3}",
                _CASED_MARKS,
                _SPACES,
            )
        ),
    )
)

PRE_TOKENIZERS = {
    # llama.cpp's fallback for files of unknown tokenizers.
    "default": PreTokenizer(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"),
    ),
    "gpt-2": PreTokenizer((_GPT_2,)),
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "llama-bpe": _LLAMA_3,
    "falcon3": _LLAMA_3,
    "midm-2.0": _LLAMA_3,
    "pixtral": _LLAMA_3,
    "dbrx": _SMAUG,
    "smaug-bpe": _SMAUG,
    "qwen2": PreTokenizer((_QWEN_2_PATTERN,), normalises=True),
    "deepseek-r1-qwen": PreTokenizer((_QWEN_2_PATTERN,)),
    "megrez": PreTokenizer((_QWEN_2_PATTERN,)),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "exaone": _SINGLE_DIGITS,
    "minerva-7b": _SINGLE_DIGITS,
    "tekken": PreTokenizer(
        ("|".join((*_CASED_WORDS, r"\p{N}", _CASED_MARKS, _SPACES)),),
        ignores_merges=True,
        adds_bos=True,
    ),
    "gpt-4o": _GPT_4O,
    "llama4": _GPT_4O,
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    ),
    "seed-coder": PreTokenizer(
        (
            "|".join(
                (
                    _CONTRACTIONS,
                    _WORDS,
                    r"\p{N}{1}",
                    r" ?[^\s\p{L}\p{N}\r\n]+",
                    _SPACES,
                )
            ),
        )
    ),
}
