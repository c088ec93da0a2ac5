"""Heads as conversions leave them: where they are, how their tensors are named and stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers.hybrid_folders import make_folder
from helpers.model_zoo import config_of
from mlx.utils import tree_flatten

from mlx_paged.cache import KVCacheConfig, PagedKVCache, Sequences
from mlx_paged.errors import ArgumentError
from mlx_paged.loading import load, load_draft_model
from mlx_paged.loading.outline import read_outline
from mlx_paged.models.kv_cache import weight_nbytes
from mlx_paged.models.language_model import LanguageModel, model_type_of
from mlx_paged.models.mlx_lm.draft_head import LAYOUTS, DraftHead, text_model
from mlx_paged.models.mlx_lm.gemma4_assistant import Assistant

Tensors = dict[str, mx.array]
QWENS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
NEXTS = ("glm4_moe", "glm4_moe_lite", "deepseek_v3")

# What the tensors of published heads are called, in models of three layers or as many as theirs.
PUBLISHED = {
    "step3p5": {
        "projection": "model.layers.3.eh_proj",
        "embedding_norm": "model.layers.3.enorm",
        "hidden_norm": "model.layers.3.hnorm",
        "end_norm": "model.layers.3.transformer.shared_head.norm",
        "lm_head": "model.layers.3.transformer.shared_head.output",
        "layer": "model.layers.3",
    },
    "mimo": {
        "projection": "model.mtp_layers.0.input_proj",
        "embedding_norm": "model.mtp_layers.0.token_layernorm",
        "hidden_norm": "model.mtp_layers.0.hidden_layernorm",
        "end_norm": "model.mtp_layers.0.final_layernorm",
        "layer": "model.mtp_layers.0",
    },
    "mimo_v2_flash": {
        "projection": "model.mtp.layers.0.eh_proj",
        "embedding_norm": "model.mtp.layers.0.enorm",
        "hidden_norm": "model.mtp.layers.0.hnorm",
        "end_norm": "model.mtp.layers.0.final_layernorm",
        "layer.post_attention_layernorm": "model.mtp.layers.0.pre_mlp_layernorm",
        "layer": "model.mtp.layers.0",
    },
    "ernie4_5_moe": {
        "projection": "model.mtp_linear_proj.0",
        "embedding_norm": "model.mtp_emb_norm.0",
        "hidden_norm": "model.mtp_hidden_norm.0",
        "layer": "model.mtp_block.0",
    },
    "longcat_flash": {
        "projection": "model.mtp.layers.0.eh_proj",
        "embedding_norm": "model.mtp.layers.0.enorm.m",
        "hidden_norm": "model.mtp.layers.0.hnorm.m",
        "end_norm": "model.mtp.norm",
        "embed_tokens": "model.mtp.embed_tokens",
        "layer.mlp": "model.mtp.layers.0.transformer_layer.mlp",
        "layer": "model.mtp.layers.0",
    },
    "nemotron_h": {
        "projection": "mtp.layers.0.eh_proj",
        "embedding_norm": "mtp.layers.0.enorm",
        "hidden_norm": "mtp.layers.0.hnorm",
        "end_norm": "mtp.layers.1.final_layernorm",
        "layer.layers": "mtp.layers",
    },
}


class Folder:
    """A target in a folder, and the tensors of a random head as they are published."""

    def __init__(self, path: Path, kind: str):
        config = config_of(kind)
        if kind == "step3p5":
            config["layer_types"].append("sliding_attention")  # of the head
            config["num_nextn_predict_layers"] = 1
        if kind == "nemotron_h":
            del config["layer_types"]  # which transformers takes for layers_block_type
        self.path = make_folder(path, config)
        self.target, self.tokenizer = load(self.path)
        assert isinstance(self.target, LanguageModel)
        mx.random.seed(3)
        self.head = DraftHead(self.target, LAYOUTS[model_type_of(self.target)])
        noise = lambda w: w + 0.1 * mx.random.normal(w.shape)  # noqa: E731
        weights = [(name, noise(each)) for name, each in tree_flatten(self.head.parameters())]
        self.head.load_weights(weights)

    @property
    def prefix(self) -> str:
        """Of published heads."""
        last = text_model(self.target).args.num_hidden_layers
        return "mtp." if self.head.layout.is_zero_centred else f"model.layers.{last}."

    def published(self, prefix: str | None = None) -> Tensors:
        layout = self.head.layout
        names = {
            "projection": layout.projection,
            "embedding_norm": layout.embedding_norm,
            "hidden_norm": layout.hidden_norm,
            "end_norm": layout.end_norm,
            "layer": "layers.0" if layout.is_zero_centred else "",
        }
        tensors = {}
        for name, tensor in tree_flatten(self.head.parameters()):
            part, _, rest = name.partition(".")
            full = ".".join(filter(None, [names[part], rest]))
            tensors[f"{self.prefix if prefix is None else prefix}{full}"] = tensor
        return tensors

    def check(self, found: Any, atol: float = 0.0) -> None:
        assert isinstance(found, DraftHead)
        ours, theirs = (dict(tree_flatten(each.parameters())) for each in (self.head, found))
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert mx.allclose(tensor, theirs[name], rtol=0, atol=atol), name


@pytest.fixture(params=[*QWENS, *NEXTS])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return Folder(tmp_path / "target", request.param)


def in_shards(folder: Folder, tensors: Tensors) -> Any:
    mx.save_safetensors(str(folder.path / "model-00002.safetensors"), tensors)
    return "auto"


def in_a_file_beside(folder: Folder, tensors: Tensors) -> Any:
    mx.save_safetensors(str(folder.path / "mtp.safetensors"), tensors)
    return "auto"


def in_a_folder_below(folder: Folder, tensors: Tensors) -> Any:
    (folder.path / "mtp").mkdir()
    mx.save_safetensors(str(folder.path / "mtp" / "model.safetensors"), tensors)
    return folder.path


def in_a_folder_of_its_own(folder: Folder, tensors: Tensors) -> Any:
    own = folder.path.parent / "head"
    own.mkdir()
    mx.save_safetensors(str(own / "model.safetensors"), tensors)
    (own / "config.json").write_text('{"model_type": "a_mtp"}')
    return own


PLACES = [in_shards, in_a_file_beside, in_a_folder_below, in_a_folder_of_its_own]


@pytest.mark.parametrize("put", PLACES)
def test_a_head_is_found_where_conversions_leave_it(
    folder: Folder, put: Callable[[Folder, Tensors], Any]
):
    name = put(folder, folder.published())
    target, tokenizer = load(folder.path)  # Its own weights load beside the head's.
    folder.check(load_draft_model(name, tokenizer, target))


def test_a_head_has_kv_of_the_models_dtype(tmp_path: Path):
    target = Folder(tmp_path / "target", "qwen3_5").target
    target.set_dtype(mx.bfloat16)
    head = DraftHead(target, LAYOUTS[model_type_of(target)])
    assert [spec.format.dtype for spec in head.layer_specs] == [mx.bfloat16]


@pytest.mark.parametrize("put", [in_a_file_beside, in_a_folder_of_its_own])
def test_the_outline_of_a_head_is_as_large_as_the_head(
    folder: Folder, put: Callable[[Folder, Tensors], Any]
):
    nn.quantize(folder.head, 32, 4, class_predicate=lambda name, _: name == "projection")
    tensors = folder.published()
    # As published: a copy of the model's embedding.
    embedding = text_model(folder.target).model.embed_tokens.weight
    tensors[f"{folder.prefix}embed_tokens.weight"] = embedding
    name = put(folder, tensors)
    outline = read_outline(folder.path, draft_model=name)
    assert outline.num_bytes_to_download == 0
    found = outline.draft_model
    assert isinstance(found, DraftHead) and found.is_of(outline.model)
    assert weight_nbytes(found) == weight_nbytes(folder.head)
    assert found.layer_specs == folder.head.layer_specs


@pytest.mark.parametrize("prefix", ["", "language_model.mtp.", "model.mtp.", "mtp.layers.0."])
def test_a_folder_of_its_own_may_leave_out_or_add_prefixes(tmp_path: Path, prefix: str):
    kind = "glm4_moe" if prefix == "mtp.layers.0." else "qwen3_5"
    folder = Folder(tmp_path / "target", kind)
    name = in_a_folder_of_its_own(folder, folder.published(prefix))
    folder.check(load_draft_model(name, None, folder.target))


@pytest.mark.parametrize("kind", QWENS)
def test_norms_that_are_stored_without_their_one(tmp_path: Path, kind: str):
    folder = Folder(tmp_path / "target", kind)
    tensors = {
        name: each - 1 if each.ndim == 1 and name.endswith("norm.weight") else each
        for name, each in folder.published().items()
    }
    tensors = {n: e - 1 if "pre_fc_norm" in n else e for n, e in tensors.items()}
    in_a_file_beside(folder, tensors)
    folder.check(load_draft_model("auto", None, folder.target), atol=1e-6)


def test_norms_that_are_stored_with_their_one_stay(tmp_path: Path):
    folder = Folder(tmp_path / "target", "qwen3_5")
    in_a_file_beside(folder, folder.published())
    folder.check(load_draft_model("auto", None, folder.target))


@pytest.mark.parametrize("kind", ["qwen3_next", "glm4_moe"])
def test_experts_one_by_one(tmp_path: Path, kind: str):
    folder = Folder(tmp_path / "target", kind)
    tensors = {}
    for name, each in folder.published().items():
        before, found, after = name.partition("switch_mlp.")
        if found:
            tensors |= {f"{before}experts.{i}.{after}": each[i] for i in range(len(each))}
        else:
            tensors[name] = each
    in_a_file_beside(folder, tensors)
    folder.check(load_draft_model("auto", None, folder.target))


def test_experts_with_two_projections_in_one_array(tmp_path: Path):
    folder = Folder(tmp_path / "target", "qwen3_5_moe")
    tensors = folder.published()
    prefix = "mtp.layers.0.mlp"
    gate, up, down = (
        tensors.pop(f"{prefix}.switch_mlp.{name}_proj.weight") for name in ("gate", "up", "down")
    )
    tensors[f"{prefix}.experts.gate_up_proj"] = mx.concatenate([gate, up], axis=-2)
    tensors[f"{prefix}.experts.down_proj"] = down
    in_a_file_beside(folder, tensors)
    folder.check(load_draft_model("auto", None, folder.target))


@pytest.mark.parametrize("kind", ["glm4_moe_lite", "deepseek_v3"])
def test_keys_and_values_of_latents_in_one_projection(tmp_path: Path, kind: str):
    folder = Folder(tmp_path / "target", kind)
    tensors = folder.published()
    of_attention = f"{folder.prefix}self_attn"
    keys = tensors.pop(f"{of_attention}.embed_q.weight").swapaxes(-1, -2)
    values = tensors.pop(f"{of_attention}.unembed_out.weight")
    both = mx.concatenate([keys, values], axis=1)
    tensors[f"{of_attention}.kv_b_proj.weight"] = both.reshape(-1, both.shape[-1])
    in_a_file_beside(folder, tensors)
    folder.check(load_draft_model("auto", None, folder.target))


def test_weights_of_8_bits_with_a_scale_per_tile(tmp_path: Path):
    folder = Folder(tmp_path / "target", "deepseek_v3")
    tensors = folder.published()
    name = f"{folder.prefix}eh_proj.weight"
    dense = tensors[name]
    stored = mx.to_fp8(dense * 2)
    tiles = [-(-size // 128) for size in dense.shape]
    tensors |= {name: stored, f"{name}_scale_inv": mx.full(tiles, 0.5)}
    in_a_file_beside(folder, tensors)
    head = load_draft_model("auto", None, folder.target)
    assert mx.allclose(head.projection.weight, dense, rtol=0.07, atol=0.01)


@pytest.mark.parametrize(
    ("bits", "group_size", "mode"),
    [(4, 32, "affine"), (8, 64, "affine"), (4, 32, "mxfp4"), (4, 16, "nvfp4"), (8, 32, "mxfp8")],
)
def test_bits_are_read_from_the_shapes(tmp_path: Path, bits: int, group_size: int, mode: str):
    folder = Folder(tmp_path / "target", "qwen3_5")
    is_wide = lambda _, module: (  # noqa: E731
        hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0
    )
    nn.quantize(folder.head, group_size, bits, mode=mode, class_predicate=is_wide)
    in_a_file_beside(folder, folder.published())
    found = load_draft_model("auto", None, folder.target)
    folder.check(found)
    projection = found.projection
    assert (projection.bits, projection.group_size, projection.mode) == (bits, group_size, mode)


def test_its_own_embedding_and_output_count_unless_they_are_copies(tmp_path: Path):
    folder = Folder(tmp_path / "target", "glm4_moe")
    text = text_model(folder.target)
    tensors = folder.published()
    tensors[f"{folder.prefix}embed_tokens.weight"] = text.model.embed_tokens.weight
    tensors[f"{folder.prefix}shared_head.head.weight"] = text.lm_head.weight + 1
    in_a_file_beside(folder, tensors)
    head = load_draft_model("auto", None, folder.target)
    assert "embed_tokens" not in head
    assert mx.array_equal(head.lm_head.weight, text.lm_head.weight + 1)


def test_its_own_embedding_and_output_are_what_it_drafts_with(tmp_path: Path):
    """A head whose own layers are the target's negated: logits of the negated ones."""
    folder = Folder(tmp_path / "target", "glm4_moe")
    text = text_model(folder.target)
    tensors = folder.published()
    in_a_file_beside(folder, tensors)
    copying = load_draft_model("auto", None, folder.target)
    parts = {
        "embed_tokens": text.model.embed_tokens.weight,
        "shared_head.head": text.lm_head.weight,
    }
    tensors |= {f"{folder.prefix}{name}.weight": -each for name, each in parts.items()}
    in_a_file_beside(folder, tensors)
    owning = load_draft_model("auto", None, folder.target)
    hidden = mx.random.normal((3, owning.hidden_size))
    ours, theirs = (logits_of(each, hidden) for each in (owning, copying))
    text.model.embed_tokens.weight *= -1
    assert mx.allclose(ours, -logits_of(copying, hidden), atol=1e-4)
    assert not mx.allclose(ours, -theirs, atol=1e-2)


def logits_of(head: DraftHead, hidden: mx.array) -> mx.array:
    """``[num_tokens, vocab_size]`` after the first tokens of a sequence."""
    sequences = Sequences(PagedKVCache(KVCacheConfig(tuple(head.layer_specs))))
    count = len(hidden)
    with sequences.step({"a": count}, [count]):
        logits, _ = head.draft(mx.arange(count), hidden, sequences.cache.layers)
        mx.eval(logits)
    return logits


# Other families


@pytest.mark.parametrize("kind", PUBLISHED)
def test_the_names_of_other_families(tmp_path: Path, kind: str):
    folder = Folder(tmp_path / "target", kind)
    own = {"step3p5": "lm_head", "longcat_flash": "embed_tokens"}.get(kind)
    if own is not None:
        folder.head.own(own)
    tensors: Tensors = {}
    for name, each in tree_flatten(folder.head.parameters()):
        part = next(part for part in PUBLISHED[kind] if name.startswith(f"{part}."))
        full = PUBLISHED[kind][part] + name.removeprefix(part)
        stored = each - 1 if kind == "step3p5" and full.endswith("norm.weight") else each
        block, is_of_experts, after = full.partition("switch_mlp.")
        if is_of_experts:
            after = after.replace("fc1", "up_proj").replace("fc2", "down_proj")
            tensors |= {f"{block}experts.{i}.{after}": row for i, row in enumerate(stored)}
        else:
            tensors[full] = stored
    # Those of a second head are not read.
    further = {"step3p5": ("layers.3.", "layers.4."), "mimo_v2_flash": ("layers.0.", "layers.1.")}
    if kind in further:
        tensors |= {name.replace(*further[kind]): each + 1 for name, each in tensors.items()}
    in_shards(folder, tensors)
    target, tokenizer = load(folder.path)  # Its own weights load beside the head's.
    folder.check(load_draft_model("auto", tokenizer, target), atol=1e-6)


# Assistants


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    path = tmp_path_factory.mktemp("folder") / "target"
    target, _ = load(make_folder(path, config_of("gemma4")))
    assert isinstance(target, LanguageModel)
    return target


def write_assistant(folder: Path, target: LanguageModel, bits: int | None) -> Assistant:
    """A folder of a random assistant, as it is published or quantised; returns the assistant."""
    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"head_dim": 16, "global_head_dim": 32, "vocab_size": target.args.vocab_size}
    kinds = ["sliding_attention", "full_attention"]
    config = {"model_type": "gemma4_assistant", "backbone_hidden_size": 64}
    config |= {"text_config": text | {"layer_types": kinds}, "use_ordered_embeddings": True}
    assistant = Assistant(target, config | {"num_centroids": 32})
    if bits is not None:
        nn.quantize(assistant, 32, bits)
    tensors = dict(tree_flatten(assistant.parameters()))
    order = "masked_embedding.token_ordering"
    tensors |= {order: tensors[order].astype(mx.int64), "lm_head.weight": mx.zeros(1)}
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text(json.dumps(config | {"num_centroids": 32}))
    return assistant


@pytest.mark.parametrize("bits", [None, 4])
def test_an_assistant_is_its_folder(tmp_path: Path, gemma: LanguageModel, bits: int | None):
    written = write_assistant(tmp_path / "assistant", gemma, bits)
    found = load_draft_model(tmp_path / "assistant", None, gemma)
    assert isinstance(found, Assistant)
    ours, theirs = (dict(tree_flatten(each.parameters())) for each in (written, found))
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]) for name in ours)
    assert gemma.path is not None
    outline = read_outline(gemma.path, draft_model=tmp_path / "assistant")
    assert isinstance(outline.draft_model, Assistant)
    assert weight_nbytes(outline.draft_model) == weight_nbytes(found)


def test_an_assistant_of_another_model_is_refused_by_name(
    tmp_path: Path, gemma: LanguageModel, qwen: Folder
):
    write_assistant(tmp_path / "assistant", gemma, None)
    message = r"the assistant in .*assistant can't run: it reads the K/V of a Gemma 4, and the mod"
    with pytest.raises(ArgumentError, match=message):
        load_draft_model(tmp_path / "assistant", None, qwen.target)


# What is refused


@pytest.mark.parametrize(
    ("config", "tensor", "message"),
    [
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, "fc", "a DFlash drafter"),
        ({"architectures": ["DFlash2DraftModel"]}, "fc", "a DFlash drafter"),
        ({"speculators_model_type": "dspark"}, "fc", "a DSpark drafter"),
        ({"architectures": ["Gemma4ForDraft"], "markov_rank": 256}, "fc", "a DSpark drafter"),
        ({"dflash_config": {"projector_type": "dspark"}}, "fc", "a DSpark drafter"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "fc", "an EAGLE drafter"),
        (None, "hidden_norm", "a DFlash drafter"),
        (None, "markov_head.w1", "a DSpark drafter"),
        (None, "midlayer.self_attn.q_proj", "an EAGLE drafter"),
    ],
)
def test_other_drafters_are_refused_by_name(
    qwen: Folder, tmp_path: Path, config: dict[str, Any] | None, tensor: str, message: str
):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {f"{tensor}.weight": mx.zeros(1)})
    with pytest.raises(ArgumentError, match=f"has {message}, which is not supported: it"):
        load_draft_model(tmp_path, None, qwen.target)


def test_a_head_that_the_configuration_does_not_describe(tmp_path: Path):
    folder = make_folder(tmp_path / "target", config_of("step3p5"))
    target, _ = load(folder)
    mx.save_safetensors(str(folder / "mtp.safetensors"), {"mtp.eh_proj.weight": mx.zeros(1)})
    with pytest.raises(ArgumentError, match="can't run: the model's configuration does not desc"):
        load_draft_model("auto", None, target)


def test_a_head_that_is_refused_says_what_it_would_need(tmp_path: Path):
    target, _ = load(make_folder(tmp_path / "target", config_of("deepseek_v32")))
    with pytest.raises(ArgumentError, match="head of a deepseek_v32 is not supported: its layer"):
        load_draft_model("auto", None, target)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("folder") / "target", "qwen3_5")


def test_a_head_that_was_asked_for_and_is_not_there(qwen: Folder):
    with pytest.raises(ArgumentError, match=r"has no head: neither mtp\.saf.* mtp\.fc\.weight"):
        load_draft_model("auto", None, qwen.target)


def test_tensors_that_are_missing_too_many_or_of_another_shape(qwen: Folder, tmp_path: Path):
    head = tmp_path / "head"
    head.mkdir()
    tensors = qwen.published()
    del tensors["mtp.pre_fc_norm_hidden.weight"]
    tensors["mtp.layers.0.mlp.gate.weight"] = tensors["mtp.fc.weight"]
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][:, :-1]
    mx.save_safetensors(str(head / "mtp.safetensors"), tensors)
    with pytest.raises(ArgumentError) as caught:
        load_draft_model(head, None, qwen.target)
    for part in ("hidden_norm.weight is missing", "layer.mlp.gate.weight is not a part of it"):
        assert part in str(caught.value)
    assert "projection.weight has the shape" in str(caught.value)


def test_a_file_that_is_broken(qwen: Folder, tmp_path: Path):
    head = tmp_path / "head"
    head.mkdir()
    (head / "mtp.safetensors").write_bytes(b"nothing")
    with pytest.raises(ArgumentError, match=r"the head in .* is broken"):
        load_draft_model(head, None, qwen.target)


def test_a_model_whose_heads_are_not_known(tmp_path: Path):
    target, _ = load(make_folder(tmp_path / "llama", config_of("llama")))
    with pytest.raises(ArgumentError, match="'auto': heads of a llama are not known; known are"):
        load_draft_model("auto", None, target)


def test_a_whole_model_with_a_head_drafts_as_a_model(qwen: Folder, tmp_path: Path):
    small = Folder(tmp_path / "small", "qwen3_5")
    in_shards(small, small.published())
    found = load_draft_model(small.path, qwen.tokenizer, qwen.target)
    assert not isinstance(found, DraftHead)
