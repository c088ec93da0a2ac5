"""What a GGUF file that can't be used is said of in one line."""

from __future__ import annotations

import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from helpers.gguf_files import (
    demo_config,
    demo_tokenizer,
    demo_weights,
    metadata_of,
    tensors_of,
    write,
    write_demo,
)

from mlx_paged import LLM, demo_model_path, load
from mlx_paged.errors import ArgumentError
from mlx_paged.loading import LoadError, read_sampling_defaults
from mlx_paged.loading.gguf import header
from mlx_paged.loading.gguf.header import read_header


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(LoadError) as raised:
        load(path, **options)
    message = str(raised.value)
    assert message.startswith("[load] ")
    assert "\n" not in message
    return message.removeprefix("[load] ")


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("gguf") / "demo.gguf", "Q8_0")


@pytest.fixture(scope="module")
def whole_parts() -> tuple[dict[str, Any], dict[str, Any]]:
    config = demo_config()
    keys = {**metadata_of(config, "qwen3"), **demo_tokenizer()}
    return keys, tensors_of(demo_weights(), config, "qwen3", "Q8_0")


@pytest.fixture
def demo_parts(whole_parts) -> list[dict[str, Any]]:
    """Metadata and tensors, to be spoilt."""
    return [dict(part) for part in whole_parts]


# Not a file, or not one of this format


def test_a_file_that_is_not_there(tmp_path):
    for name in (tmp_path / "none.gguf", "models/none.gguf"):
        assert refused(name) == f"no file '{name}'"


def test_a_file_that_must_not_be_read(demo, monkeypatch):
    def deny(*args: Any) -> None:
        raise PermissionError(13, "Permission denied")

    # Root, who often runs tests, reads every file.
    monkeypatch.setattr("mlx_paged.loading.gguf.header.open", deny, raising=False)
    assert refused(demo) == f"{demo} can't be read: Permission denied"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a GGUF file: it is empty"),
        (b"GG", "is not a GGUF file: it begins with b'GG' and not with GGUF"),
        (b"PK\x03\x04 and more", "is not a GGUF file: it begins with b'PK\\x03\\x04'"),
        (b"GGUF", "is truncated or damaged: it ends within its header"),
        (b"GGUF\x01\0\0\0" + bytes(32), "is a GGUF file of version 1; supported: 2 and 3"),
        (b"GGUF\x09\0\0\0" + bytes(32), "is a GGUF file of version 9"),
        (b"GGUF\0\0\0\x03" + bytes(32), "is a big-endian GGUF file; write a little-endian one"),
        (b"GGUF\x03\0\0\0" + bytes(16), "lacks general.architecture in its metadata"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 16, "is truncated or damaged: it ends within its header"),
    ],
)
def test_a_file_that_is_not_gguf_is_refused(content, message, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    assert message in refused(path)


def test_a_big_endian_file_of_the_package(tmp_path):
    path = tmp_path / "x.gguf"
    write(path, "qwen3", {}, {}, endianess=gguf.GGUFEndian.BIG)
    assert "is a big-endian GGUF file" in refused(path)


def test_files_that_are_cut_off(tmp_path, demo):
    content = demo.read_bytes()
    path = tmp_path / "x.gguf"
    path.write_bytes(content[:-1])
    assert "is truncated or damaged: tensor 'blk." in refused(path)
    assert f"but the file has {len(content) - 1:,}" in refused(path)
    path.write_bytes(content[:5000])
    assert refused(path) == f"{path} is truncated or damaged: it ends within its header"


def test_a_file_that_shrinks_while_it_is_read(tmp_path, demo, monkeypatch):
    path = Path(shutil.copy(demo, tmp_path / "x.gguf"))
    read = np.fromfile

    def shrink(*args: Any, **options: Any) -> Any:
        path.write_bytes(path.read_bytes()[:-1000])
        return read(*args, **options)

    monkeypatch.setattr(np, "fromfile", shrink)
    assert "was truncated while it was read" in refused(path)


def test_a_folder_with_a_file_in_it_names_the_file(tmp_path, demo):
    shutil.copy(demo, tmp_path / "demo.gguf")
    assert refused(tmp_path).endswith(f"for its GGUF file, give {tmp_path / 'demo.gguf'}")


def test_without_the_package_the_command_to_install_it_is_said(demo, monkeypatch):
    header.gguf.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    for name in [name for name in sys.modules if name.startswith("gguf.")]:
        monkeypatch.delitem(sys.modules, name)
    try:
        assert refused(demo).endswith("pip install gguf")
    finally:
        header.gguf.cache_clear()


# Metadata

KEY = "qwen3."


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma2"}, "has the architecture 'gemma2', which is not supp"),
        ({"general.type": "adapter"}, "holds no model: general.type is 'adapter'"),
        ({f"{KEY}block_count": None}, "lacks qwen3.block_count in its metadata"),
        ({f"{KEY}block_count": "4"}, "qwen3.block_count must be a whole number, at least 1"),
        ({f"{KEY}block_count": 5}, "lacks the tensor blk.4.attn_q.weight"),
        ({f"{KEY}block_count": 3}, "has the tensor 'blk.3."),
        ({f"{KEY}block_count": 4_000_000_000}, "lacks the tensor blk.3999999999.attn_q.weight"),
        ({f"{KEY}embedding_length": 256}, "token_embd.weight has the shape [1024, 128], and the "),
        ({f"{KEY}attention.head_count": [4, 4, 4, 4]}, "head_count must be a whole number, at le"),
        ({f"{KEY}attention.head_count": 8}, "attn_q.weight has the shape [128, 128], and the met"),
        ({f"{KEY}attention.head_count_kv": 4}, "attn_k.weight' has the shape [64, 128], and the"),
        ({f"{KEY}attention.head_count_kv": 3}, "4 query heads are not a multiple of 3 KV heads"),
        ({f"{KEY}attention.value_length": 16}, "heads of 32 for keys, 16 for values and 32 rota"),
        ({f"{KEY}rope.dimension_count": 16}, "heads of 32 for keys, 32 for values and 16 rotate"),
        ({f"{KEY}attention.layer_norm_rms_epsilon": -1.0}, "must be a finite number above 0"),
        ({f"{KEY}attention.causal": False}, "is not a causal language model"),
        ({f"{KEY}attention.sliding_window": 64}, "qwen3.attention.sliding_window is 64, which is"),
        ({f"{KEY}expert_count": 8}, "qwen3.expert_count is 8, which is not supported"),
        ({f"{KEY}rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope' is not supported"),
        ({f"{KEY}rope.scaling.type": "yarn"}, "lacks qwen3.rope.scaling.factor"),
        (
            {f"{KEY}rope.scaling.type": "yarn", f"{KEY}rope.scaling.factor": 2.0,
             f"{KEY}rope.scaling.original_context_length": 64,
             f"{KEY}rope.scaling.attn_factor": 2.0},
            "rope.scaling.attn_factor is 2.0, which is not supported",
        ),
        ({f"{KEY}rope.scaling.attn_factor": 2.0}, "attn_factor is 2.0, which is not supported"),
        (
            {f"{KEY}rope.scaling.type": "none", f"{KEY}rope.scaling.attn_factor": 2.0},
            "rope.scaling.attn_factor is 2.0, which is not supported",
        ),
        ({f"{KEY}rope.scaling.alpha": 1000.0}, "rope.scaling.alpha is 1000.0, which is not supp"),
        ({f"{KEY}rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1, which is"),
        ({f"{KEY}rope.scaling.yarn_ext_factor": 1.0}, "yarn_ext_factor is 1.0, which is not supp"),
        ({f"{KEY}rope.scaling.factor": -2.0}, "rope.scaling.factor must be a finite number at l"),
        ({f"{KEY}rope.scale_linear": "2"}, "qwen3.rope.scale_linear must be a number, got '2'"),
        ({f"{KEY}rope.dimension_sections": [8, 8]}, "rope.dimension_sections is [8, 8], which is"),
        ({f"{KEY}rope.scaling.new_kind": 2.0}, "qwen3.rope.scaling.new_kind is 2.0, which is not"),
        ({f"{KEY}attention.temperature_scale": 0.1}, "attention.temperature_scale is 0.1, which"),
        ({f"{KEY}something.new": True}, "qwen3.something.new is True, which is not supported for"),
        ({f"{KEY}attention.gate": 0}, "qwen3.attention.gate is 0, which is not supported for the"),
        ({"tokenizer.ggml.model": "bert"}, "a tokenizer of the kind 'bert'"),
        ({"tokenizer.ggml.scores": None}, "give a folder with the model's tokenizer as token"),
    ],
)  # fmt: skip
def test_metadata_that_does_not_fit(changes, message, tmp_path, demo_parts):
    keys, tensors = demo_parts
    architecture = changes.pop("general.architecture", "qwen3")
    path = write(tmp_path / "x.gguf", architecture, {**keys, **changes}, tensors)
    assert message in refused(path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"dtype": "int8"}, "dtype must be one of float32, float16, bfloat16, got 'int8'"),
        ({"dtype": []}, "dtype must be one of float32, float16, bfloat16, got []"),
        ({"quantization": {"bits": 4}}, "model_config can't have quantization: a GGUF file has"),
        ({"model_type": "llama"}, "model_config can't have model_type: a GGUF file has"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers in config.json must be a positive int"),
        ({"hidden_size": 64}, "'token_embd.weight' has the shape [1024, 128], and the metadata i"),
        ({"vocab_size": None}, "vocab_size in config.json must be a positive integer, got None"),
        ({"eos_token_id": 1.5}, "the tokenizer in "),
    ],
)
def test_changes_that_do_not_fit(config, message, demo):
    assert message in refused(demo, model_config=config)


def test_changes_that_fit(demo):
    changes = {"eos_token_id": 7, "max_position_embeddings": 100}
    model, tokenizer = load(demo, model_config=changes)
    assert model.args.max_position_embeddings == 100
    assert tokenizer.eos_token_ids == {2, 7}


# Tensors


DOWN = "blk.2.ffn_down.weight"


def rows_of(kind: str) -> tuple[str, np.ndarray]:
    """128 rows of 512 zeros."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = np.zeros((128, 512 // block_size * block_bytes), np.uint8)
    return kind, data.view({"I32": np.int32, "F64": np.float64}.get(kind, np.uint8))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "blk.1.ffn_up.weight",
            None,
            "lacks the tensor blk.1.ffn_up.weight (model.layers.1.mlp.up_proj.weight)",
        ),
        (
            "blk.0.ssm_a",
            ("F32", np.ones(128, np.float32)),
            "has the tensor 'blk.0.ssm_a', which qwen3 does not use",
        ),
        *(
            (DOWN, rows_of(kind), f"tensor '{DOWN}' is of the type {kind}, which is not supported")
            for kind in ("Q2_K", "Q3_K", "IQ4_NL", "TQ1_0", "I32", "F64")
        ),
        (
            "output_norm.weight",
            ("Q8_0", np.zeros(136, np.uint8)),
            "tensor 'output_norm.weight' is of Q8_0, which is supported for matrices",
        ),
        (
            "rope_freqs.weight",
            ("F32", np.ones(5, np.float32)),
            "rope_freqs.weight must be 16 numbers of F32, and is F32 of the shape [5]",
        ),
        (
            "rope_freqs.weight",
            ("F32", np.zeros(16, np.float32)),
            "rope_freqs.weight has numbers that are not finite",
        ),
    ],
)
def test_tensors_that_do_not_fit(name, tensor, message, tmp_path, demo_parts):
    keys, tensors = demo_parts
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    assert message in refused(write(tmp_path / "x.gguf", "qwen3", keys, tensors))


def test_a_type_that_the_package_does_not_know(tmp_path, demo):
    content = bytearray(demo.read_bytes())
    # After a tensor's name come the number of its dimensions, these, and its type.
    at = content.index(b"blk.2.ffn_down.weight") + len(b"blk.2.ffn_down.weight") + 4 + 16
    assert content[at : at + 4] == struct.pack("<I", gguf.GGMLQuantizationType.Q8_0)
    content[at : at + 4] = struct.pack("<I", 9999)
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    assert refused(path) == f"{path}: tensor 'blk.2.ffn_down.weight' has the unknown type 9999"


def test_numbers_that_are_not_finite(tmp_path, demo_parts):
    keys, tensors = demo_parts
    data = tensors["blk.0.ffn_up.weight"][1].copy()
    data[3, :2] = np.array([np.inf], np.float16).view(np.uint8)
    tensors["blk.0.ffn_up.weight"] = ("Q8_0", data)
    message = refused(write(tmp_path / "x.gguf", "qwen3", keys, tensors))
    assert "tensor 'blk.0.ffn_up.weight' holds numbers that are not finite in float32" in message


def test_numbers_that_a_dtype_can_not_hold(tmp_path, demo_parts):
    keys, tensors = demo_parts
    tensors["output_norm.weight"] = ("F32", np.full(128, 1e6, np.float32))
    path = write(tmp_path / "x.gguf", "qwen3", keys, tensors)
    message = refused(path, model_config={"dtype": "float16"})
    assert "'output_norm.weight' holds numbers that are not finite in float16" in message


def test_factors_beside_another_scaling(tmp_path, demo_parts):
    keys, tensors = demo_parts
    tensors["rope_freqs.weight"] = ("F32", np.full(16, 2, np.float32))
    keys[f"{KEY}rope.scaling.factor"] = 8.0
    message = refused(write(tmp_path / "x.gguf", "qwen3", keys, tensors))
    assert "has both rope_freqs.weight and linear scaling of RoPE by 8; only one" in message


# Parts


@pytest.fixture
def parts(tmp_path, demo_parts) -> list[Path]:
    write(tmp_path / "x.gguf", "qwen3", *demo_parts, split_max_tensors=20)
    return sorted(tmp_path.glob("x-*.gguf"))


def test_parts_that_are_missing_are_named(parts):
    parts[1].unlink()
    assert f"lacks {parts[1].name}; the model is split into 3 parts" in refused(parts[0])
    parts[0].unlink()
    assert f"lacks {parts[0].name} and 1 more; the model" in refused(parts[2])


def test_parts_of_another_name_or_order_are_refused(parts, tmp_path):
    alone = Path(shutil.copy(parts[0], tmp_path / "alone.gguf"))
    assert "alone.gguf is part 0 of 3" in refused(alone)
    shutil.copy(parts[1], parts[2])
    assert "is part 1 of 3 by its metadata (split.no, counted from 0" in refused(parts[0])


# Tokenizers from elsewhere


def test_a_tokenizer_may_come_from_a_folder(tmp_path):
    keys = {"tokenizer.ggml.model": "t5", "tokenizer.chat_template": None}
    file = write_demo(tmp_path / "x.gguf", **keys)
    assert "'t5'" in refused(file)
    _, tokenizer = load(file, tokenizer_path=demo_model_path())
    assert tokenizer.encode("is it") == load(demo_model_path())[1].encode("is it")
    assert tokenizer.eos_token_ids == {2}
    llm = LLM(file, tokenizer_path=demo_model_path())
    assert llm.get_tokenizer().has_chat_template


def test_a_tokenizer_of_other_tokens_is_refused(tmp_path):
    tokens = demo_tokenizer()["tokenizer.ggml.tokens"]
    tokens[300], tokens[301] = tokens[301], tokens[300]
    file = write_demo(tmp_path / "x.gguf", **{"tokenizer.ggml.tokens": tokens})
    message = refused(file, tokenizer_path=demo_model_path())
    assert f"token 300 of the file, {tokens[300]!r}, is 301 there" in message


def test_a_tokenizer_folder_that_is_none(tmp_path, demo):
    assert "no folder 'nowhere'" in refused(demo, tokenizer_path="nowhere")
    assert "tokenizer_path is the folder of a tokenizer" in refused(demo, tokenizer_path=demo)
    message = refused(demo, tokenizer_path=tmp_path)
    assert message.startswith(f"the tokenizer in {tmp_path} is missing or broken: none of")
    assert "must be a folder, a hub id, or None, got 5" in refused(demo, tokenizer_path=5)
    with pytest.raises(ValueError, match="tokenizer_path is for a model that is loaded here"):
        LLM(*load(demo), tokenizer_path=demo_model_path())


def test_a_folders_tokenizer_may_come_from_elsewhere_too(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(demo_model_path(), folder)
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        (folder / name).unlink()
    _, tokenizer = load(folder, tokenizer_path=demo_model_path())
    assert tokenizer.encode("is it") == load(demo_model_path())[1].encode("is it")


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, demo_parts):
    keys, tensors = demo_parts
    kind, data = tensors["token_embd.weight"]
    tensors["token_embd.weight"] = (kind, data[:1000])
    message = refused(write(tmp_path / "x.gguf", "qwen3", keys, tensors))
    assert message.endswith("has 1,024 tokens, and the model 1,000")


# Sampling


def test_a_file_says_how_it_wants_to_be_sampled(tmp_path, demo):
    assert read_sampling_defaults(demo).get("temperature") is None
    keys = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0}
    file = write_demo(
        tmp_path / "x.gguf", **{f"general.sampling.{name}": value for name, value in keys.items()}
    )
    defaults = read_sampling_defaults(file)
    assert defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0}
    file = write_demo(tmp_path / "y.gguf", **{"general.sampling.top_p": 1.5})
    with pytest.raises(ArgumentError, match=r"top_p in .*y.gguf must be a number within 0..1"):
        read_sampling_defaults(file)


# The header's reader beside the package's


def test_the_header_is_read_as_the_package_reads_it(demo, demo_parts):
    header, theirs = read_header(demo), gguf.GGUFReader(demo)
    fields = {
        name: field.contents()
        for name, field in theirs.fields.items()
        if not name.startswith("GGUF.")
    }
    assert header.metadata.keys() == fields.keys()
    for name, value in header.metadata.items():
        if isinstance(value, float):
            assert np.float32(value) == np.float32(fields[name])
        else:
            assert value == fields[name], name
    assert [info.name for info in header.tensors.values()] == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        info = header.tensors[tensor.name]
        assert info.type_name == tensor.tensor_type.name
        assert list(info.shape) == tensor.shape.tolist()[::-1]
        assert (info.start, info.num_bytes) == (tensor.data_offset, tensor.n_bytes)


def test_mx_load_never_sees_a_gguf_file(demo, monkeypatch):
    def fail(*args: Any, **options: Any) -> None:
        raise AssertionError("mx.load decodes some types wrongly, and in silence")

    monkeypatch.setattr(mx, "load", fail)
    load(demo)
