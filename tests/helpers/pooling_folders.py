"""Folders of embedders and rerankers: the demo model with the files that such models come with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from mlx_paged import demo_model_path

END = "<|endoftext|>"
PROMPTS = {"query": "Instruct: find it\nQuery:", "document": ""}
MODULES = ("models.Transformer", "models.Pooling", "models.Normalize")


def plain_folder(parent: Path, name: str = "plain") -> Path:
    """The demo model without its head that drafts."""
    folder = parent / name
    shutil.copytree(demo_model_path(), folder, ignore=shutil.ignore_patterns("mtp*", "*.md"))
    return folder


def change_json(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def end_texts(folder: Path) -> None:
    """Have the tokenizer append a token to each text, as Qwen3-Embedding's."""
    change_json(
        folder / "tokenizer.json",
        post_processor={
            "type": "TemplateProcessing",
            "single": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": END, "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
                {"SpecialToken": {"id": END, "type_id": 0}},
            ],
            "special_tokens": {END: {"id": END, "ids": [3], "tokens": [END]}},
        },
    )


def embedder_folder(
    parent: Path,
    name: str = "tiny-embedding",
    modules: tuple[str, ...] = MODULES,
    pooling: dict[str, Any] | None = None,
) -> Path:
    folder = plain_folder(parent, name)
    end_texts(folder)
    paths = [{"path": f"{index}_{each.rpartition('.')[2]}"} for index, each in enumerate(modules)]
    entries = [
        {"idx": index, "type": f"sentence_transformers.{each}", **path}
        for index, (each, path) in enumerate(zip(modules, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir()
    kinds = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or kinds))
    prompts = {"prompts": PROMPTS, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


def reranker_folder(parent: Path, name: str = "Qwen3-Reranker-tiny") -> Path:
    """One whose "no" and "yes" are single tokens, as Qwen's are."""
    folder = plain_folder(parent, name)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for byte, word in (("<0x00>", "no"), ("<0x01>", "yes")):
        token = vocabulary.pop(byte)
        vocabulary[word] = token
        kinds = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": token, "content": word, **kinds})
    tokenizer["added_tokens"].sort(key=lambda entry: entry["id"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder
