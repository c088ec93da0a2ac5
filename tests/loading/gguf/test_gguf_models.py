"""Models from GGUF files compute what their weights say."""

from __future__ import annotations

import warnings

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.llama
import numpy as np
import pytest
from helpers.fast_lane import mostly_slow
from helpers.gguf_files import (
    TYPES,
    demo_config,
    demo_tokenizer,
    demo_weights,
    dequantise,
    metadata_of,
    tensors_of,
    write,
    write_demo,
)
from helpers.mlx_lm_models import save_adapters
from mlx.utils import tree_flatten
from mlx_lm.models import gemma3_text
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_paged import LLM, SamplingParams, demo_model_path, load, make_kv_cache
from mlx_paged.cache import Sequences
from mlx_paged.loading.gguf.loader import load_gguf
from mlx_paged.models import qwen3
from mlx_paged.models.mlx_lm.packed import PackedModel
from mlx_paged.models.run_step import run_step

# "Repeat: warm tapole", in the demo model's tokens.
TOKENS = [1, 580, 269, 4, 566, 995, 941, 263, 363, 958, 300, 2, 4, 1, 316, 959, 261, 961, 285, 4]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def nothing_is_said(recwarn):
    """Losses are said in warnings; tests that expect one look for it."""
    warnings.simplefilter("always")
    return recwarn


def logits_of(model: nn.Module) -> mx.array:
    seqs = Sequences(make_kv_cache(model))
    return run_step(model, seqs, {"s": TOKENS})[0]


def dense_weights(model: nn.Module) -> dict[str, mx.array]:
    """Weights by name in float32, quantised ones decoded by MLX."""
    weights = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
            weights[f"{path}.weight"] = mx.dequantize(
                module.weight, module.scales, module.biases, module.group_size, module.bits
            )
    own = dict(tree_flatten(model.parameters()))
    for name, weight in own.items():
        if name.rpartition(".")[2] in ("weight", "bias") and name not in weights:
            weights[name] = weight.astype(mx.float32)
    return weights


def random_llama(seed: int = 0, **changes) -> tuple[dict, dict[str, np.ndarray]]:
    config = {**LLAMA, **changes}
    mx.random.seed(seed)
    model = mlx_lm.models.llama.Model(mlx_lm.models.llama.ModelArgs.from_dict(config))
    weights = {
        name: np.array(mx.random.normal(w.shape) * (0.05 if w.ndim > 1 else 0.2) + (w.ndim == 1))
        for name, w in tree_flatten(model.parameters())
    }
    return config, weights


def write_llama(path, config, weights, kind="F32", extra=None, **metadata):
    tensors = {**tensors_of(weights, config, "llama", kind), **(extra or {})}
    keys = {**metadata_of(config, "llama"), **demo_tokenizer(), **metadata}
    return write(path, "llama", keys, tensors)


def stock_logits(config, weights) -> mx.array:
    """mlx-lm's own llama on its own cache."""
    model = mlx_lm.models.llama.Model(mlx_lm.models.llama.ModelArgs.from_dict(config))
    arrays = [(name, mx.array(values)) for name, values in weights.items()]
    model.load_weights(arrays, strict=True)
    return model(mx.array([TOKENS]))[0, -1]


# How far logits are from those of the unquantised model, root mean square in parts of their own
# spread: twice what was seen. It falls by half or so with each bit.
LOSSES = {
    "F32": 0, "F16": 1e-3, "BF16": 7e-3, "Q8_0": 0.03, "Q6_K": 0.05, "Q5_K": 0.2, "Q5_1": 0.2,
    "Q5_0": 0.2, "Q4_K": 0.25, "Q4_1": 0.4, "Q4_0": 0.4,
}  # fmt: skip


@mostly_slow("kind", TYPES, quick=range(0, len(TYPES), 3))
def test_the_demo_model_says_the_same_in_every_type(kind, tmp_path):
    file = write_demo(tmp_path / "demo.gguf", kind)
    model, _, config = load(file, model_config={"dtype": "float32"}, return_config=True)
    expected = logits_of(load(demo_model_path())[0])
    got = logits_of(model)
    assert got.dtype == mx.float32
    assert mx.sqrt(mx.mean((got - expected) ** 2)) <= LOSSES[kind] * mx.std(expected)
    assert mx.argmax(got) == mx.argmax(expected)
    assert (kind in ("F32", "F16", "BF16")) == ("quantization" not in config)


@mostly_slow("kind", [kind for kind in TYPES if kind != "Q6_K"], quick=(0, 2, 4, 6))
def test_every_weight_is_the_files(kind, tmp_path):
    config = demo_config()
    tensors = tensors_of(demo_weights(), config, "qwen3", kind)
    model, _, _ = load_gguf(
        write_demo(tmp_path / "demo.gguf", kind), model_config={"dtype": "float32"}
    )
    by_name = dense_weights(model)
    names = {name: tensors_of({name: w}, config, "qwen3").popitem()[0]
             for name, w in demo_weights().items()}  # fmt: skip
    assert by_name.keys() == names.keys()
    for name, tensor in names.items():
        chosen, data = tensors[tensor]
        values = dequantise(data, chosen).reshape(by_name[name].shape)
        assert np.array_equal(np.array(by_name[name]), values), (name, chosen)
    # And it computes with them: the same model with the weights decoded.
    dense = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    dense.load_weights(list(by_name.items()))
    assert mx.allclose(logits_of(model), logits_of(dense), rtol=1e-4, atol=1e-4)


def test_the_tokens_of_a_plain_file_are_the_folders(tmp_path):
    prompts = ["<|im_start|>user\nRepeat: warm tapole<|im_end|>\n<|im_start|>assistant\n", "one 2"]
    params = SamplingParams(max_tokens=12)
    texts = [
        [output.outputs[0].text for output in LLM(model).generate(prompts, params)]
        for model in (demo_model_path(), write_demo(tmp_path / "demo.gguf"))
    ]
    assert texts[0] == texts[1]
    assert all(texts[0])


@mostly_slow("kind", ["F32", "Q8_0", "Q4_K", "Q5_K", "Q6_K"], quick=(0, 2))
def test_a_llama_is_mlx_lms_with_its_rows_in_mlx_lms_order(kind, tmp_path):
    config, weights = random_llama()
    file = write_llama(tmp_path / "llama.gguf", config, weights, kind)
    model, _ = load(file)
    assert isinstance(model, PackedModel)
    inner, _, _ = load_gguf(file)
    decoded = {name: np.array(w) for name, w in dense_weights(inner).items()}
    expected = stock_logits(config, decoded)
    assert mx.allclose(logits_of(model), expected, rtol=1e-4, atol=1e-4)
    tolerance = {"F32": 0, "Q8_0": 1e-2, "Q6_K": 2e-2, "Q5_K": 0.05, "Q4_K": 0.1}[kind]
    for name, w in weights.items():
        assert np.abs(decoded[name] - w).max() <= tolerance * np.abs(w).max(), name
    if kind == "F32":
        assert mx.array_equal(expected, stock_logits(config, weights))


@mostly_slow("num_layers", [7, 62], quick=(0,))
def test_a_gemma_3_is_mlx_lms_with_its_norms_and_scales(num_layers, tmp_path):
    """llama.cpp adds 1 to norms, and scales the queries of the 27B, with 62 layers, differently."""
    config = {
        **LLAMA,
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 8,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": 16 if num_layers == 62 else 32,
        "tie_word_embeddings": True,
    }
    mx.random.seed(0)
    model = gemma3_text.Model(gemma3_text.ModelArgs.from_dict(config))
    model.sanitize({})
    shapes = [(name, w.shape) for name, w in tree_flatten(model.parameters())]
    weights = {name: np.array(mx.random.normal(shape) * 0.2) for name, shape in shapes}
    model.load_weights([(name, mx.array(w)) for name, w in weights.items()])
    keys = {**metadata_of(config, "gemma3"), **demo_tokenizer()}
    file = write(tmp_path / "g.gguf", "gemma3", keys, tensors_of(weights, config, "gemma3"))
    loaded, _ = load(file)
    expected = model(mx.array([TOKENS]))[0, -1]
    assert mx.allclose(logits_of(loaded), expected, rtol=1e-4, atol=1e-4 * mx.std(expected).item())


def test_a_llama_with_biases_and_tied_embeddings(tmp_path):
    config, weights = random_llama(
        1, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, num_key_value_heads=8
    )
    model, _ = load(write_llama(tmp_path / "llama.gguf", config, weights, "Q8_0"))
    assert model.dtype == mx.float32
    inner = {name: np.array(w) for name, w in dense_weights(model).items()}
    assert any(name.endswith("k_proj.bias") for name in inner)
    got = logits_of(load(write_llama(tmp_path / "f32.gguf", config, weights))[0])
    assert mx.allclose(got, stock_logits(config, weights), rtol=1e-4, atol=1e-4)


LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama_3_factors(head_dim: int, base: float, factor: float) -> np.ndarray:
    """Llama 3's scaling as llama.cpp's converter writes it (Meta's formula, in float64)."""
    wavelengths = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (8192 / wavelengths - 1) / (4 - 1)
    middle = 1 / ((1 - smooth) / factor + smooth)
    factors = np.where(wavelengths > 8192, factor, np.where(wavelengths < 2048, 1, middle))
    return factors.astype(np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_factors_of_llama_3_become_its_rope_scaling(factor, tmp_path):
    config, weights = random_llama(rope_theta=500000.0)
    factors = llama_3_factors(32, 500000.0, factor)
    file = write_llama(
        tmp_path / "x.gguf", config, weights, extra={"rope_freqs.weight": ("F32", factors)}
    )
    model, _, read = load(file, return_config=True)
    expected = {**LLAMA_3, "factor": factor}
    assert read["rope_scaling"] == expected
    stock = stock_logits({**config, "rope_scaling": expected}, weights)
    assert mx.allclose(logits_of(model), stock, rtol=1e-4, atol=1e-4)


def test_other_factors_are_taken_as_they_are(tmp_path):
    config, weights = random_llama()
    factors = np.linspace(1, 3, 16, dtype=np.float32)
    file = write_llama(
        tmp_path / "x.gguf", config, weights, extra={"rope_freqs.weight": ("F32", factors)}
    )
    inner, _, _ = load_gguf(file)
    x = mx.random.normal((1, 1, 9, 32))
    freqs = mx.array(factors) * 50000.0 ** (mx.arange(0, 32, 2) / 32)
    expected = mx.fast.rope(x, 32, traditional=False, base=None, scale=1.0, offset=5, freqs=freqs)
    rotated = inner.model.layers[0].self_attn.rope(x, offset=5)
    assert mx.allclose(rotated, expected, rtol=1e-5, atol=1e-5)
    assert mx.isfinite(logits_of(load(file)[0])).all()


LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"scaling.type": "none"}, None),
        ({"scaling.type": "linear", "scaling.factor": 2.0}, LINEAR),
        # What llama.cpp makes of files that leave something out, of old ones, and of zeros.
        ({"scaling.factor": 2.0}, LINEAR),
        ({"scale_linear": 2.0}, LINEAR),
        ({"scaling.type": "linear", "scale_linear": 2.0}, LINEAR),
        ({"scaling.factor": 2.0, "scale_linear": 8.0}, LINEAR),
        ({"scaling.factor": 2}, LINEAR),
        ({"scaling.type": "none", "scaling.factor": 2.0}, None),
        ({"scaling.type": "linear"}, None),
        ({"scaling.factor": 0.0}, None),
        ({"scaling.factor": 1.0}, None),
        ({"scaling.type": "yarn", "scaling.factor": 1.0}, None),
        ({"scaling.original_context_length": 1024, "scaling.finetuned": True}, None),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_beta_fast": 32.0,
             "scaling.original_context_length": 1024},
            {**YARN, "beta_fast": 32.0},
        ),
        (
            {"scaling.type": "yarn", "scale_linear": 4.0, "context_length": 1024},
            YARN,
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.finetuned": False,
             "scaling.original_context_length": 1024, "scaling.attn_factor": 1.0,
             "scaling.yarn_attn_factor": 1.0, "scaling.yarn_ext_factor": -1.0,
             "scaling.yarn_log_multiplier": 0.0},
            YARN,
        ),
    ],
)  # fmt: skip
def test_scalings_are_read_as_llama_cpp_reads_them(metadata, scaling, tmp_path):
    keys = {
        f"qwen3.{name}" if name == "context_length" else f"qwen3.rope.{name}": value
        for name, value in metadata.items()
    }
    model, _, config = load(write_demo(tmp_path / "x.gguf", **keys), return_config=True)
    assert config["rope_scaling"] == scaling
    folder = load(demo_model_path(), model_config={"rope_scaling": scaling})[0]
    assert mx.array_equal(logits_of(model), logits_of(folder))


@pytest.mark.parametrize("name", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_llama_whose_file_names_no_kind_of_scaling_is_scaled_linearly(name, tmp_path):
    config, weights = random_llama()
    path = write_llama(tmp_path / "x.gguf", config, weights, **{f"llama.{name}": 4.0})
    got = logits_of(load(path)[0])
    linear = {**config, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    assert mx.allclose(got, stock_logits(linear, weights), rtol=1e-4, atol=1e-4)
    assert not mx.allclose(got, stock_logits(config, weights), rtol=1e-2, atol=1e-2)


def test_metadata_that_changes_no_logits_is_ignored(tmp_path):
    harmless = {
        "vocab_size": 1024, "tensor_data_layout": "Meta AI original pth", "pooling_type": 3,
        "attention.layer_norm_epsilon": 1e-5, "attention.causal": True, "expert_count": 0,
        "expert_used_count": 0, "attention.sliding_window": 0, "attention.scale": 0.0,
        "final_logit_softcapping": 0.0, "logit_scale": 1.0, "use_parallel_residual": False,
    }  # fmt: skip
    keys = {f"qwen3.{name}": value for name, value in harmless.items()}
    others = {"general.file_type": 0, "quantize.imatrix.chunks_count": 7, "x.expert_count": 8}
    model = load(write_demo(tmp_path / "x.gguf", **keys, **others))[0]
    assert mx.array_equal(logits_of(model), logits_of(load(demo_model_path())[0]))


# What is lost


def said(recwarn) -> list[str]:
    return [str(w.message) for w in recwarn if str(w.message).startswith("[load]")]


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0", "Q5_1"])
def test_there_is_no_warning_where_nothing_is_lost(kind, tmp_path, nothing_is_said):
    model, _ = load(write_demo(tmp_path / "demo.gguf", kind))
    assert model.dtype == mx.float32
    assert said(nothing_is_said) == []


def test_weights_that_are_quantised_once_more_are_said(tmp_path, nothing_is_said):
    load(write_demo(tmp_path / "demo.gguf", "Q6_K"))
    assert said(nothing_is_said) == [
        "[load] demo.gguf: 4 tensors of Q6_K are quantised again, to 8 bits in groups of 32"
    ]


def test_scales_that_are_rounded_are_said(tmp_path, nothing_is_said):
    file = write_demo(tmp_path / "demo.gguf", "Q4_K")
    model, _ = load(file, model_config={"dtype": "float16"})
    assert model.dtype == mx.float16
    (line,) = said(nothing_is_said)
    # Those of Q5_0, which llama.cpp takes for short rows, are float16 in the file.
    assert "tensors of F32, Q4_K are rounded to float16" in line


@pytest.mark.parametrize(("kind", "dtype"), [("F16", mx.float16), ("BF16", mx.bfloat16)])
def test_a_plain_file_runs_in_its_own_dtype(kind, dtype, tmp_path):
    model, _, config = load(write_demo(tmp_path / "x.gguf", kind), return_config=True)
    assert model.dtype == dtype
    assert config["dtype"] == str(dtype).removeprefix("mlx.core.")
    assert logits_of(model).dtype == dtype


# What goes with it


def test_adapters_go_on_top(tmp_path):
    parameters = {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    config, weights = random_llama()
    stock = mlx_lm.models.llama.Model(mlx_lm.models.llama.ModelArgs.from_dict(config))
    stock.load_weights([(name, mx.array(w)) for name, w in weights.items()])
    linear_to_lora_layers(stock, 2, parameters)
    mx.random.seed(3)
    lora = {
        name: mx.random.normal(w.shape) * 0.1
        for name, w in tree_flatten(stock.parameters())
        if "lora_" in name
    }
    stock.load_weights(list(lora.items()), strict=False)
    adapters = save_adapters(tmp_path / "adapters", lora, parameters, num_layers=2)
    # llama's rows are reordered in a file: an adapter fits only where they are put right again.
    file = write_llama(tmp_path / "x.gguf", config, weights)
    got = logits_of(load(file, adapter_path=adapters)[0])
    stock.eval()
    assert mx.allclose(got, stock(mx.array([TOKENS]))[0, -1], rtol=1e-4, atol=1e-4)
    assert not mx.allclose(got, logits_of(load(file)[0]), rtol=1e-2, atol=1e-2)


def test_a_file_drafts_for_its_folder(tmp_path):
    file = write_demo(tmp_path / "draft.gguf", "Q8_0")
    prompt = "<|im_start|>user\nRepeat: warm tapole<|im_end|>\n<|im_start|>assistant\n"
    params = SamplingParams(max_tokens=8)
    plain = LLM(demo_model_path()).generate(prompt, params)
    drafted = LLM(demo_model_path(), draft_model=file).generate(prompt, params)
    assert drafted[0].outputs[0].token_ids == plain[0].outputs[0].token_ids


def test_a_model_is_read_from_its_parts(tmp_path):
    config = demo_config()
    keys = {**metadata_of(config, "qwen3"), **demo_tokenizer()}
    tensors = tensors_of(demo_weights(), config, "qwen3", "Q8_0")
    write(tmp_path / "demo.gguf", "qwen3", keys, tensors, split_max_tensors=20)
    parts = sorted(tmp_path.glob("demo-*.gguf"))
    assert [part.name for part in parts] == [f"demo-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    whole = logits_of(load(write_demo(tmp_path / "whole.gguf", "Q8_0"))[0])
    for part in parts:
        assert mx.array_equal(logits_of(load(part)[0]), whole)
