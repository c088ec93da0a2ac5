"""The tokenizer in a GGUF file's metadata.

It is written to a folder as Hugging Face's ``tokenizer.json`` and ``tokenizer_config.json``, and
loaded from there by mlx-lm, which finds the detokenizer, reasoning marks and tool-call parser as
for any other model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlx_paged.errors import shown
from mlx_paged.loading.folder import LoadError
from mlx_paged.loading.gguf.metadata import Metadata
from mlx_paged.loading.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from mlx_paged.loading.gguf.vocabulary import END_NAMES, GGUFVocabulary, TokenType

_SPACE = "▁"  # SentencePiece's


def write_tokenizer(metadata: Metadata, folder: Path) -> list[int]:
    """Write the tokenizer's files; returns the ids of the tokens that end an answer.

    Raises:
        LoadError: the tokenizer is of an unknown kind, or damaged.
    """
    vocabulary = GGUFVocabulary.read(metadata)
    kind = metadata.text("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise LoadError(
            f"[load] {metadata.file}: a tokenizer of the kind {shown(kind)} (tokenizer.ggml.model) "
            f"is not supported in a GGUF file; supported: {', '.join(_KINDS)}"
        )
    content = _KINDS[kind](vocabulary)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": None,
        "pre_tokenizer": None,
        **content,
    }
    for name, value in (("tokenizer", content), ("tokenizer_config", _settings(vocabulary))):
        text = json.dumps(value, ensure_ascii=False)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return vocabulary.end_ids


def named_end_ids(metadata: Metadata) -> list[int]:
    """The end tokens that the file names, independent of its tokenizer."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in END_NAMES]
    return list(dict.fromkeys(metadata.integer(key) for key in keys if key in metadata))


def _added_tokens(vocabulary: GGUFVocabulary) -> list[dict[str, Any]]:
    """Tokens that are matched in a text before it is split into words."""
    kinds = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": vocabulary.types[index] != TokenType.USER_DEFINED,
        }
        for index, token in vocabulary.of_type(*kinds)
    ]


def _settings(vocabulary: GGUFVocabulary) -> dict[str, Any]:
    """``tokenizer_config.json``."""
    metadata = vocabulary.metadata
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for ours, theirs in (
        ("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"),
    ):  # fmt: skip
        token_id = vocabulary.special(theirs)
        settings[f"{ours}_token"] = None if token_id is None else vocabulary.tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata.text("tokenizer.chat_template")
    others = []
    if "tokenizer.chat_templates" in metadata:
        others = metadata.texts("tokenizer.chat_templates")
    named = {name: metadata.text(f"tokenizer.chat_template.{name}") for name in others}
    if named:
        if "chat_template" in settings:
            named = {"default": settings["chat_template"], **named}
        settings["chat_template"] = [
            {"name": name, "template": text} for name, text in named.items()
        ]
    return settings


def _post_processor(vocabulary: GGUFVocabulary, adds_bos: bool) -> dict[str, Any] | None:
    """The post-processor that adds BOS and EOS to a text, if the file requests them."""
    ends = {}
    for name, default in (("bos", adds_bos), ("eos", False)):
        wanted = vocabulary.metadata.flag(f"tokenizer.ggml.add_{name}_token", default)
        token_id = vocabulary.special(name)
        if wanted and token_id is not None:
            ends[name] = token_id
    if not ends:
        return None
    texts = {name: vocabulary.tokens[token_id] for name, token_id in ends.items()}

    def template(*sequences: tuple[str, int]) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = []
        for sequence, type_id in sequences:
            bos, eos = (
                [{"SpecialToken": {"id": texts[name], "type_id": type_id}}] if name in texts else []
                for name in ("bos", "eos")
            )
            pieces += [*bos, {"Sequence": {"id": sequence, "type_id": type_id}}, *eos]
        return pieces

    return {
        "type": "TemplateProcessing",
        "single": template(("A", 0)),
        "pair": template(("A", 0), ("B", 1)),
        "special_tokens": {
            text: {"id": text, "ids": [ends[name]], "tokens": [text]}
            for name, text in texts.items()
        },
    }


def _byte_level_bpe(vocabulary: GGUFVocabulary) -> dict[str, Any]:
    """GPT-2's kind: words split by a pattern, bytes as letters, merged in the file's order."""
    pre = _known_pre_tokenizer(vocabulary.metadata)
    # An invalid merge raises when the tokenizer is loaded.
    merges = [merge.split(" ", 1) for merge in vocabulary.metadata.texts("tokenizer.ggml.merges")]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    processors = [{**byte_level, "use_regex": False}]
    template = _post_processor(vocabulary, pre.adds_bos)
    if template is not None:
        processors.append(template)
    return {
        "normalizer": {"type": "NFC"} if pre.normalises else None,
        "pre_tokenizer": pre.as_json,
        "post_processor": {"type": "Sequence", "processors": processors},
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignores_merges,
            "vocab": vocabulary.ids,
            "merges": merges,
        },
    }


def _known_pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    name = metadata.text("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise LoadError(
            f"[load] {metadata.file}: unknown pre-tokenizer {shown(name)} (tokenizer.ggml.pre)"
        )
    return PRE_TOKENIZERS[name]


def _sentencepiece_bpe(vocabulary: GGUFVocabulary) -> dict[str, Any]:
    """Llama 2's kind: SentencePiece's BPE, which merges the pair with the highest score."""
    metadata = vocabulary.metadata
    # A space before each piece of text between special tokens, as in llama.cpp.
    has_prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepended = {"type": "Prepend", "prepend": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next(vocabulary.of_type(TokenType.UNKNOWN), None)
    return {
        "normalizer": (
            {"type": "Sequence", "normalizers": [prepended, replaced]} if has_prefix else replaced
        ),
        "post_processor": _post_processor(vocabulary, adds_bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else unknown[1],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary.ids,
            "merges": _merges_by_score(vocabulary),
        },
    }


def _merges_by_score(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """Every merge of two tokens into another, in descending order of the result's score."""
    ids, scores = vocabulary.ids, vocabulary.scores
    kinds = (TokenType.NORMAL, TokenType.USER_DEFINED)
    merges = []
    for _, token in sorted(vocabulary.of_type(*kinds), key=lambda entry: -scores[entry[0]]):
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [(left, right) for left, right in splits if left in ids and right in ids]
        # A token may have several merges, ordered as in SentencePiece by the ids of the parts.
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


_KINDS = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
