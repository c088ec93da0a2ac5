"""Folders of tiny models with the demo model's tokenizer, which programs can load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from transformers import AutoTokenizer

from helpers.adapted_models import config_of
from helpers.model_zoo import make_from_config
from mlx_paged import demo_model_path

OUTPUT = ("lm_head.weight", "model.embed_tokens.weight")


def make_hybrid_folder(folder: Path, architecture: str) -> Path:
    return make_folder(folder, config_of(architecture))


def make_folder(folder: Path, config: dict[str, Any]) -> Path:
    """Write the folder of a random model; returns it. Answers are random words, whose text has the
    same tokens when it is read again, and end with their limit.
    """
    shutil.copytree(demo_model_path(), folder, ignore=shutil.ignore_patterns("mtp.safetensors"))
    of_demo = json.loads((folder / "config.json").read_text())
    sizes = {"vocab_size": of_demo["vocab_size"], "eos_token_id": of_demo["eos_token_id"]}
    config = config | sizes
    if "text_config" in config:  # of a model with other parts beside its text
        config["text_config"] = config["text_config"] | sizes
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(make_from_config(config).parameters()))
    name = next(name for end in OUTPUT for name in weights if name.endswith(end))
    weights[name] = _with_words_alone(weights[name])
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def _with_words_alone(rows: mx.array) -> mx.array:
    """Rows of an output layer of which those of words have the largest logits: of each pair one is
    as far above zero as the other is below, and all others are near it.
    """
    # Beside the configuration of another architecture, transformers may take it for another kind.
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    texts = [tokenizer.decode([token_id]) for token_id in range(len(tokenizer))]
    words = [i for i, text in enumerate(texts) if len(text) > 3 and text[1:].isalpha()]
    words = [i for i in words if texts[i].startswith(" ") and tokenizer.encode(texts[i]) == [i]]
    firsts = mx.array(words[: len(words) // 2])
    seconds = mx.array(words[len(words) // 2 :][: len(firsts)])
    only = rows * 0.01
    only[firsts] = rows[firsts]
    only[seconds] = -rows[firsts]
    return only
