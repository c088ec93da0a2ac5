"""The equivalent of ``config.json`` in a GGUF file's metadata."""

from __future__ import annotations

from typing import Any

from mlx_paged.errors import shown
from mlx_paged.loading.folder import LoadError
from mlx_paged.loading.gguf.files import GGUFFile
from mlx_paged.loading.gguf.metadata import Metadata
from mlx_paged.loading.gguf.rope import rope_scaling

# general.architecture -> the model type of Hugging Face's configuration
ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3"}
# Metadata that changes what a model computes, and that these models do not support.
_UNKNOWN_HERE = (
    "expert_count",
    "attention.max_alibi_bias",
    "attention.clamp_kqv",
    "attention.scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "attention.sliding_window",
    "nextn_predict_layers",
)


def read_configuration(file: GGUFFile) -> dict[str, Any]:
    """The configuration under the names of ``config.json``, without tokens and quantisation.

    Raises:
        LoadError: the architecture is not supported, or the metadata is incomplete.
    """
    metadata = file.metadata
    architecture = metadata.text("general.architecture")
    kind = metadata.text("general.type", "model")
    if kind != "model":
        raise LoadError(f"[load] {file.path} holds no model: general.type is {shown(kind)}")
    if architecture not in ARCHITECTURES:
        raise LoadError(
            f"[load] {file.path} has the architecture {shown(architecture)}, which is not "
            f"supported as a GGUF file; supported: {', '.join(ARCHITECTURES)}; try the model's "
            "folder with safetensors"
        )
    _refuse_unknown_features(metadata, architecture)
    heads = metadata.integer(f"{architecture}.attention.head_count", low=1)
    hidden = metadata.integer(f"{architecture}.embedding_length", low=1)
    config: dict[str, Any] = {
        "model_type": ARCHITECTURES[architecture],
        "hidden_size": hidden,
        "num_hidden_layers": metadata.integer(f"{architecture}.block_count", low=1),
        "intermediate_size": metadata.integer(f"{architecture}.feed_forward_length", low=1),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer(
            f"{architecture}.attention.head_count_kv", heads, low=1
        ),
        "head_dim": _head_dim(metadata, architecture, hidden // heads),
        "rms_norm_eps": metadata.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.integer(f"{architecture}.context_length", low=1),
        "rope_theta": metadata.number(f"{architecture}.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    config["vocab_size"] = _check_sizes(file, config)
    config["rope_scaling"] = rope_scaling(file, architecture, config)
    if "blk.0.attn_q.bias" in file.tensors:
        config["attention_bias"] = True
    if "blk.0.ffn_gate.bias" in file.tensors:
        config["mlp_bias"] = True
    return config


def _refuse_unknown_features(metadata: Metadata, architecture: str) -> None:
    for name in _UNKNOWN_HERE:
        value = metadata.values.get(f"{architecture}.{name}")
        if value:
            raise LoadError(
                f"[load] {metadata.file}: {architecture}.{name} is {shown(value)}, which is not "
                f"supported for the architecture {architecture} as a GGUF file"
            )
    if not metadata.flag(f"{architecture}.attention.causal", True):
        raise LoadError(f"[load] {metadata.file} is not a causal language model")


def _head_dim(metadata: Metadata, architecture: str, default: int) -> int:
    keys = metadata.integer(f"{architecture}.attention.key_length", default, low=1)
    values = metadata.integer(f"{architecture}.attention.value_length", keys, low=1)
    rotated = metadata.integer(f"{architecture}.rope.dimension_count", keys, low=1)
    if values != keys or rotated != keys:
        raise LoadError(
            f"[load] {metadata.file}: heads of {keys} for keys, {values} for values and {rotated} "
            f"rotated are not supported for the architecture {architecture}; they must be equal"
        )
    return keys


def _check_sizes(file: GGUFFile, config: dict[str, Any]) -> int:
    """Compare the metadata with tensors before a model of these sizes is built; returns the size of
    the vocabulary.
    """
    hidden, rows = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    last = f"blk.{config['num_hidden_layers'] - 1}"
    for name, shape in (
        ("token_embd.weight", (None, hidden)),
        (f"{last}.attn_q.weight", (rows, hidden)),
        (f"{last}.ffn_gate.weight", (config["intermediate_size"], hidden)),
    ):
        info = file.tensors.get(name)
        if info is None:
            raise LoadError(f"[load] {file.path} lacks the tensor {name}")
        if len(info.shape) != 2 or shape not in (info.shape, (None, info.shape[1])):
            expected = ", ".join("any" if size is None else f"{size:,}" for size in shape)
            raise LoadError(
                f"[load] {file.path}: tensor {name} has the shape {list(info.shape)}, and the "
                f"metadata implies [{expected}]"
            )
    return file.tensors["token_embd.weight"].shape[0]
