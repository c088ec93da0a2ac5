"""The equivalent of ``config.json`` in a GGUF file's metadata."""

from __future__ import annotations

from typing import Any

from mlx_paged.errors import shown
from mlx_paged.loading.folder import LoadError
from mlx_paged.loading.gguf.files import GGUFFile
from mlx_paged.loading.gguf.metadata import Metadata
from mlx_paged.loading.gguf.rope import ROPE_KEYS, rope_scaling

# general.architecture -> the model type of Hugging Face's configuration
ARCHITECTURES = {"gemma3": "gemma3_text", "llama": "llama", "qwen3": "qwen3"}
# What files of Gemma 3 leave out, as in llama.cpp: every sixth layer attends to all tokens, the
# others rotate with a base of their own, and the 27B, with 62 layers, scales queries differently.
_GEMMA_3_PATTERN, _GEMMA_3_LOCAL_BASE, _GEMMA_3_27B_LAYERS = 6, 10_000.0, 62
# Keys under the architecture's name that are known here: unlike llama.cpp, which ignores others,
# this reader refuses them, since they may stand for something that the model computes.
_READ = {
    "block_count", "context_length", "embedding_length", "feed_forward_length",
    "attention.causal", "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.layer_norm_rms_epsilon", "attention.value_length", "rope.dimension_count",
    "rope.freq_base", *(f"rope.{name}" for name in ROPE_KEYS),
}  # fmt: skip
_OF_ARCHITECTURE = {"gemma3": {"attention.sliding_window", "rope.freq_base_swa"}}
# They change no logits of these architectures: the vocabulary's size is that of its tensor, rows of
# q and k are always in llama.cpp's order, there is no layer norm with a mean, and pooling is for
# embeddings.
_IGNORED = {
    "vocab_size", "tensor_data_layout", "attention.layer_norm_epsilon", "pooling_type",
    "rope.scaling.finetuned",
}  # fmt: skip
# Features that these architectures lack, with the values that turn them off.
_OFF = {
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (False,),
}


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
    if architecture == "gemma3":
        config |= _gemma_3(metadata, config)
    config["vocab_size"] = _check_sizes(file, config)
    config["rope_scaling"] = rope_scaling(file, architecture, config)
    if "blk.0.attn_q.bias" in file.tensors:
        config["attention_bias"] = True
    if "blk.0.ffn_gate.bias" in file.tensors:
        config["mlp_bias"] = True
    return config


def _gemma_3(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Gemma 3's further fields."""
    is_27b = config["num_hidden_layers"] == _GEMMA_3_27B_LAYERS
    return {
        "query_pre_attn_scalar": (
            config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
        ),
        "sliding_window": metadata.integer("gemma3.attention.sliding_window", low=1),
        "sliding_window_pattern": _GEMMA_3_PATTERN,
        "rope_local_base_freq": metadata.number("gemma3.rope.freq_base_swa", _GEMMA_3_LOCAL_BASE),
    }


def _refuse_unknown_features(metadata: Metadata, architecture: str) -> None:
    known = _READ | _IGNORED | _OF_ARCHITECTURE.get(architecture, set())
    for key, value in metadata.values.items():
        name = key.removeprefix(f"{architecture}.")
        if name == key or name in known or value in _OFF.get(name, ()):
            continue
        raise LoadError(
            f"[load] {metadata.file}: {key} is {shown(value)}, which is not supported for the "
            f"architecture {architecture} as a GGUF file; try the model's folder with safetensors"
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
