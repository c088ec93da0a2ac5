"""GGUF files, written by the gguf package as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import sentencepiece
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from mlx_paged import demo_model_path

TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip
# What llama.cpp takes where the rows are no multiples of 256.
FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
ARCHITECTURES = {
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}

Floats = np.ndarray[Any, np.dtype[np.float32]]


def pick(name: str, kind: str, row_length: int) -> str:
    """The type of a tensor in a file of ``kind``: norms are float32."""
    if "norm" in name or name.endswith("bias"):
        return "F32"
    block_size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
    return kind if row_length % block_size == 0 else FALLBACKS[kind]


def quantise(weights: Floats, kind: str) -> np.ndarray[Any, Any]:
    """Weights as the bytes of a type; K-quants, which the package can't make, simply."""
    if kind in _K_QUANTS:
        blocks = _K_QUANTS[kind](weights.reshape(-1, 256).astype(np.float32))
        return blocks.reshape(weights.shape[0], -1)
    return gguf.quants.quantize(weights, GGMLQuantizationType[kind])


def dequantise(data: np.ndarray[Any, Any], kind: str) -> Floats:
    return gguf.quants.dequantize(data, GGMLQuantizationType[kind])


def _as_bytes(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values.astype(np.float16).view(np.uint8).reshape(len(values), -1)


def _k_parts(blocks: Floats, bits: int) -> tuple[Any, Any]:
    """Head of a block of Q4_K or Q5_K, 16 bytes, and its integers ``[num_blocks, 8, 32]``."""
    groups = blocks.reshape(-1, 8, 32)
    minima = np.maximum(-groups.min(-1), 0)
    steps = (groups.max(-1) + minima) / (2**bits - 1)
    d, dmin = (
        (values.max(-1, keepdims=True) / 63).astype(np.float16) for values in (steps, minima)
    )
    wide = [np.where(half == 0, 1, half.astype(np.float32)) for half in (d, dmin)]
    sc, mn = (
        np.rint(values / step).clip(0, 63).astype(np.uint8)
        for values, step in zip((steps, minima), wide, strict=True)
    )
    scale = (d.astype(np.float32) * sc)[..., None]
    bias = (dmin.astype(np.float32) * mn)[..., None]
    integers = np.rint((groups + bias) / np.where(scale == 0, 1, scale))
    packed = np.concatenate(
        [
            sc[:, :4] | (sc[:, 4:] >> 4 << 6),
            mn[:, :4] | (mn[:, 4:] >> 4 << 6),
            (sc[:, 4:] & 15) | (mn[:, 4:] & 15) << 4,
        ],
        axis=-1,
    )
    head = np.concatenate([_as_bytes(d), _as_bytes(dmin), packed], axis=-1)
    return head, integers.clip(0, 2**bits - 1).astype(np.uint8)


def _low_nibbles(integers: Any) -> Any:
    pairs = (integers & 15).reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)


def _q4_k(blocks: Floats) -> Any:
    head, integers = _k_parts(blocks, 4)
    return np.concatenate([head, _low_nibbles(integers)], axis=-1)


def _q5_k(blocks: Floats) -> Any:
    head, integers = _k_parts(blocks, 5)
    high = np.packbits((integers >> 4).transpose(0, 2, 1), axis=-1, bitorder="little")
    return np.concatenate([head, high.reshape(-1, 32), _low_nibbles(integers)], axis=-1)


def _q6_k(blocks: Floats) -> Any:
    groups = blocks.reshape(-1, 16, 16)
    steps = np.abs(groups).max(-1) / 31
    d = (steps.max(-1, keepdims=True) / 127).astype(np.float16)
    wide = np.where(d == 0, 1, d.astype(np.float32))
    scales = np.rint(steps / wide).clip(0, 127).astype(np.int8)
    step = (d.astype(np.float32) * scales)[..., None]
    integers = np.rint(groups / np.where(step == 0, 1, step)).clip(-32, 31) + 32
    # Two halves of 128, each of four runs of 32.
    runs = integers.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = runs & 15
    high = runs >> 4
    ql = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], -1)
    qh = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = [ql.reshape(-1, 128), qh.reshape(-1, 64), scales.view(np.uint8), _as_bytes(d)]
    return np.concatenate(parts, axis=-1)


_K_QUANTS: dict[str, Callable[[Floats], Any]] = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}


def metadata_of(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """What a converter writes for a ``config.json``."""
    heads = config["num_attention_heads"]
    names = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads", heads),
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(config["rope_theta"]),
        "rope.dimension_count": config["head_dim"],
    }
    if architecture == "gemma3":
        names["attention.sliding_window"] = config["sliding_window"]
    return {f"{architecture}.{name}": value for name, value in names.items()}


def permuted(rows: Floats, num_heads: int) -> Floats:
    """Rows of q or k in the order of llama.cpp's files of llama: pairs that rotate together."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def tensors_of(
    weights: dict[str, Floats], config: dict[str, Any], architecture: str, kind: str = "F32"
) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    """Type and bytes of each tensor, by the file's names, from weights by Hugging Face's names."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config["num_hidden_layers"])
    tensors = {}
    for name, values in weights.items():
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            which = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
            values = permuted(values, config[which])
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        tensor = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert tensor is not None, name
        chosen = pick(tensor, kind, values.shape[-1])
        tensors[tensor] = (chosen, quantise(np.ascontiguousarray(values), chosen))
    return tensors


def write(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    tensors: dict[str, tuple[str, np.ndarray[Any, Any]]],
    **writer_options: Any,
) -> Path:
    """Write a file; metadata that is ``None`` is left out."""
    writer = gguf.GGUFWriter(path, architecture, **writer_options)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, (kind, data) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    if value is not None:
        adders[type(value)](key, value)


def demo_weights() -> dict[str, Floats]:
    arrays = mx.load(str(demo_model_path() / "model.safetensors"))
    return {name: np.array(array.astype(mx.float32)) for name, array in arrays.items()}


def demo_config() -> dict[str, Any]:
    return json.loads((demo_model_path() / "config.json").read_text())


def demo_tokenizer() -> dict[str, Any]:
    """The demo model's tokenizer as metadata: SentencePiece's kind, without a prefix."""
    pieces = sentencepiece.SentencePieceProcessor(str(demo_model_path() / "tokenizer.model"))
    settings = json.loads((demo_model_path() / "tokenizer.json").read_text())
    special = {token["id"] for token in settings["added_tokens"]}
    ids = range(pieces.get_piece_size())
    types = [
        6 if pieces.is_byte(i) else 2 if pieces.is_unknown(i) else 3 if i in special else 1
        for i in ids
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [pieces.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [pieces.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 3,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": (demo_model_path() / "chat_template.jinja").read_text(),
    }


def write_demo(path: Path, kind: str = "F32", **metadata: Any) -> Path:
    """The demo model as a file of a type; ``metadata`` goes on top, ``None`` takes away."""
    config = demo_config()
    keys = {**metadata_of(config, "qwen3"), **demo_tokenizer(), **metadata}
    return write(path, "qwen3", keys, tensors_of(demo_weights(), config, "qwen3", kind))
