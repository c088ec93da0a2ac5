"""Train the demo model's SentencePiece tokenizer and write it in the Hugging Face format as well.

The two give the same ids: SentencePiece BPE with byte fallback corresponds to the `tokenizers`
library's BPE whose merges are ranked by the pieces' scores. Nothing is normalised, no space is
added or dropped, so that text comes back from its ids unchanged. (One exception, which all
SentencePiece models share: the character U+2581, which stands for a space inside the pieces, comes
back as a space.)
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import sentencepiece

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL = [IM_START, IM_END, END_OF_TEXT]

# ChatML, as Qwen has it. A turn's text never depends on later turns, so that a longer conversation
# starts with the same characters as a shorter one and its K/V can be reused.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(lines: list[str], vocab_size: int) -> bytes:
    """Train on the lines and return the serialised SentencePiece model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        # A newline is a piece of its own: merged with the first letters of an answer, it would tie
        # the answer's tokens to the prompt's.
        user_defined_symbols=[*SPECIAL, "\n"],
        # Byte fallback covers every other character, so that no piece is spent on a rare one.
        character_coverage=0.9995,
        unk_id=0,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        # The same pieces on every machine.
        num_threads=1,
        input_sentence_size=0,
        minloglevel=2,
    )
    return model.getvalue()


def huggingface_tokenizer(processor: sentencepiece.SentencePieceProcessor) -> dict:
    """The contents of a `tokenizer.json` that gives the same ids as the SentencePiece model."""
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges: list[tuple[float, int, int, int, str, str]] = []
    for i, piece in enumerate(pieces):
        if processor.is_byte(i) or processor.is_unknown(i) or piece in SPECIAL:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((-processor.get_score(i), i, vocab[left], vocab[right], left, right))
    merges.sort()
    added = [
        {
            "id": vocab[piece],
            "content": piece,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for piece in SPECIAL
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "post_processor": None,
        # mlx-lm knows this decoder, and then streams without trimming the first space.
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [[left, right] for *_, left, right in merges],
        },
    }


def save_tokenizer(model: bytes, folder: Path, max_length: int) -> None:
    """Write the SentencePiece model, the Hugging Face files and the chat template."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model)
    (folder / "tokenizer.json").write_text(
        json.dumps(huggingface_tokenizer(processor), ensure_ascii=False, indent=1) + "\n",
        encoding="utf-8",
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
