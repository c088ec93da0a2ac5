"""The heads that a model drafts with: finding their tensors, in the model's own folder, a file
beside its weights or a folder of their own, and reading them as any conversion has left them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from mlx_paged.errors import UnsuitableModelError
from mlx_paged.loading.folder import LoadError, load_errors, read_json_object
from mlx_paged.models.language_model import WEIGHT_PATTERN, LanguageModel, model_type_of
from mlx_paged.models.mlx_lm.draft_head import (
    LAYOUTS,
    REFUSED,
    DraftHead,
    Head,
    HeadLayout,
    embedding_of,
    output_of,
    text_model,
)
from mlx_paged.models.mlx_lm.gemma4_assistant import MODEL_TYPES, Assistant

AUTO = "auto"  # the head in the model's own folder

# Files beside a model's weights that conversions write heads to.
SIDECARS = ("mtp.safetensors", "mtp/*.safetensors", "model-mtp*.safetensors")
# Names of a head's tensors: after those of the whole model and its text part, the name and number
# of the head. Heads are also named as the layers after the model's last one, and a file of its own
# may leave out the name or the number. ERNIE has the name before each part.
_NAME = re.compile(
    r"(?:(?:model|language_model)\.)*(?P<head>mtp\.|mtp_layers\.|(?=mtp_))?"
    r"(?:layers\.)?(?:(?P<number>\d+)\.)?(?P<part>.+)"
)
# Parts under other names than those of mlx-lm's layers and of the layouts.
_OTHER_NAMES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(?:block|mtp_block\.0|transformer|transformer_layer)\.", ""),
        (r"^pre_mlp_layernorm\.", "post_attention_layernorm."),
        (r"^(enorm|hnorm)\.m\.", r"\1."),
        (r"^shared_head\.(?:head|output)\.", "lm_head."),
        (r"^(mixer\.experts\.\d+)\.up_proj\.", r"\1.fc1."),
        (r"^(mixer\.experts\.\d+)\.down_proj\.", r"\1.fc2."),
    )
]
# A model that has a head of its own drafts as a model, unless it is the target itself.
_OF_WHOLE_MODEL = re.compile(
    r"(?:\w+\.)*(?:model\.(?:embed_tokens|norm)|backbone\.(?:embeddings|norm_f))\..+"
)

# Other drafters: what the names in their configuration or of their tensors contain, and why they
# are not run.
_OTHER_DRAFTERS = {
    "a DSpark": (
        re.compile("dspark|markov_"),
        "its drafts attend to each other in both directions, and attention is causal here",
    ),
    "a DFlash": (
        re.compile("dflash|^hidden_norm[.]"),
        "its drafts attend to each other in both directions, and attention is causal here",
    ),
    "an EAGLE": (
        re.compile("lmeagle|eagle_?[13]|^d2t$|^midlayer[.]"),
        "it reads the outputs of several of the model's layers, and only the last one's are kept",
    ),
}

# Rows of an embedding that are compared, and the share of their length by which the rows of a copy
# that was quantised may differ.
NUM_COMPARED = 256
MAX_DIFFERENCE = 0.5


def is_of_head(name: str, last: int) -> bool:
    """Whether a tensor of a model's own files is one of a head, by its name.

    Args:
        last: the number of the model's layers.
    """
    return _place(name, last, needs_name=True) is not None


def _place(name: str, last: int, needs_name: bool) -> tuple[int, str] | None:
    """The number of the head that a tensor is of, and its name there; ``None`` for others."""
    matched = _NAME.fullmatch(name)
    if matched is None:
        return None
    number = int(matched["number"] or 0)
    is_named = matched["head"] is not None
    if not is_named and number >= last:
        number, is_named = number - last, True
    if needs_name and not is_named:
        return None
    part = matched["part"]
    for pattern, replacement in _OTHER_NAMES:
        part = pattern.sub(replacement, part)
    return number, part


def load_head(
    target: LanguageModel, name: str | Path, *, evaluates_weights: bool = True
) -> Head | None:
    """The head of a model, or its assistant.

    Args:
        target: the model that it drafts for.
        name: a folder with the head, or :data:`AUTO` for the model's own folder.
        evaluates_weights: otherwise the head has the sizes of the real one, and can't run.

    Returns:
        ``None`` if there are no tensors of a head of this model.

    Raises:
        LoadError: tensors are missing or have other shapes; the folder has a drafter that is not
            run here; or the name is :data:`AUTO` and there is no head, with what was looked for.
    """
    layout, path = LAYOUTS.get(model_type_of(target)), Path(name)
    own = target.path and target.path.resolve()
    is_own = name == AUTO or path.resolve() == own
    folder = target.path if is_own else path
    if not is_own:
        with load_errors(f"the head in {path} is broken"):
            assistant = _drafter_of_its_own(target, path, evaluates_weights)
        if assistant is not None:
            return assistant
    if layout is None:
        kind = model_type_of(target)
        problem = (
            f"a head of a {kind} is not supported: {REFUSED[kind]}"
            if kind in REFUSED
            else f"heads of a {kind} are not known; known are those of {', '.join(sorted(LAYOUTS))}"
        )
    elif folder is None or (is_own and not folder.is_dir()):
        problem = "the model was not loaded from a folder, which would have its head"
    else:
        last = len(text_model(target).layers)
        with load_errors(f"the head in {folder} is broken"):
            read = _own_tensors if is_own else _tensors
            found = read(folder, layout, last)
            if found:
                return _built(target, layout, found, folder, evaluates_weights)
        problem = (
            f"{folder} has no head: neither {', '.join(SIDECARS)} nor tensors "
            f"{_wanted(layout, last)} in its weights; many conversions drop them; give the folder "
            "of a head instead"
        )
    if name == AUTO:
        raise LoadError(f"[load] {AUTO!r}: {problem}", "draft_model")
    return None


def _drafter_of_its_own(
    target: LanguageModel, path: Path, evaluates_weights: bool
) -> Assistant | None:
    """An assistant in a folder; ``None`` if there is a head with a layer of its own, or a model.

    Raises:
        LoadError: it is another drafter, or not one of this model.
    """
    file = path / "config.json"
    config = read_json_object(file) if file.is_file() else {}
    if config.get("model_type") in MODEL_TYPES:
        try:
            assistant = Assistant(target, config)
        except UnsuitableModelError as error:
            raise LoadError(f"[load] the assistant in {path} can't run: {error}") from error
        weights = _all_tensors(path)
        weights.pop("lm_head.weight", None)  # its embedding
        _fill(assistant, weights, path, evaluates_weights)
        return assistant
    kinds = [config.get(key) for key in ("architectures", "model_type", "speculators_model_type")]
    words = [json.dumps([*kinds, config.get("dflash_config")]).lower()]
    words += config or _all_tensors(path)
    for kind, (pattern, reason) in _OTHER_DRAFTERS.items():
        if any(map(pattern.search, words)):
            raise LoadError(
                f"[load] {path} has {kind} drafter, which is not supported: {reason}; give a head "
                "of the model, or a small model with the same vocabulary"
            )
    return None


def _all_tensors(folder: Path) -> dict[str, mx.array]:
    """Those of a folder, not evaluated."""
    tensors: dict[str, mx.array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= cast(dict[str, mx.array], mx.load(str(file)))
    return tensors


def _wanted(layout: HeadLayout, last: int) -> str:
    return f"mtp.{layout.projection}.weight or model.layers.{last}.{layout.projection}.weight"


def _own_tensors(folder: Path, layout: HeadLayout, last: int) -> dict[str, mx.array]:
    """Those of a file beside the weights, otherwise those among the weights."""
    for pattern in (*SIDECARS, WEIGHT_PATTERN):
        files = sorted(folder.glob(pattern))
        found = _read(files, layout, last, needs_name=pattern == WEIGHT_PATTERN)
        if found:
            return found
    return {}


def _tensors(path: Path, layout: HeadLayout, last: int) -> dict[str, mx.array]:
    return _read(sorted(path.rglob("*.safetensors")), layout, last, needs_name=False)


def _read(
    files: Iterable[Path], layout: HeadLayout, last: int, needs_name: bool
) -> dict[str, mx.array]:
    """The tensors of the first head by their names in it, not evaluated; empty without a head.
    Those of its further blocks begin with their number.

    Args:
        last: the number of the model's layers.
        needs_name: whether the files have the model's own tensors, too, so that names without that
            of a head are not its.
    """
    found: dict[str, mx.array] = {}
    for file in files:
        tensors: Any = mx.load(str(file))
        for name, tensor in tensors.items():
            if not needs_name and _OF_WHOLE_MODEL.fullmatch(name):
                return {}
            number, part = _place(name, last, needs_name) or (layout.num_blocks, "")
            if number < layout.num_blocks:
                found[f"{number}.{part}" if number else part] = tensor
    return found if f"{layout.projection}.weight" in found else {}


def _built(
    target: LanguageModel,
    layout: HeadLayout,
    found: Mapping[str, mx.array],
    folder: Path,
    evaluates_weights: bool,
) -> DraftHead:
    try:
        head = DraftHead(target, layout)
    except UnsuitableModelError as error:
        raise LoadError(f"[load] the head in {folder} can't run: {error}") from error
    weights = _renamed(found, layout)
    weights = _split_latents(_stacked_experts(_from_fp8(weights)), text_model(target).args)
    for name in ("embed_tokens", "lm_head"):
        of_part = {key: each for key, each in weights.items() if key.startswith(f"{name}.")}
        if not _is_copy(of_part, name, target, evaluates_weights):
            head.own(name)
        else:
            weights = {key: each for key, each in weights.items() if key not in of_part}
    is_zero_centred = layout.is_zero_centred and evaluates_weights
    if is_zero_centred and _is_stored_zero_centred(weights, target):
        weights = {
            key: each + 1 if each.ndim == 1 and key.endswith("norm.weight") else each
            for key, each in weights.items()
        }
    _fill(head, weights, folder, evaluates_weights)
    return head


def _fill(
    head: Head, weights: Mapping[str, mx.array], folder: Path, evaluates_weights: bool
) -> None:
    """Put the weights of a folder into a head, in the bits that they have."""
    _quantise(head, weights)
    expected = dict(tree_flatten(head.parameters()))
    problems = [f"{key} is missing" for key in expected if key not in weights]
    problems += [f"{key} is not a part of it" for key in weights if key not in expected]
    problems += [
        f"{key} has the shape {list(each.shape)}, not {list(expected[key].shape)}"
        for key, each in weights.items()
        if key in expected and expected[key].shape != each.shape
    ]
    if problems:
        raise LoadError(
            f"[load] the head in {folder} does not fit the model: "
            f"{'; '.join(problems[:4])}"
            + (f" and {len(problems) - 4} more" if len(problems) > 4 else ""),
            "draft_model",
        )
    head.load_weights([(key, _cast(key, each, head.dtype)) for key, each in weights.items()])
    head.eval()
    if evaluates_weights:
        mx.eval(head.parameters())
    head.name, head.path = folder.name, folder


def _renamed(found: Mapping[str, mx.array], layout: HeadLayout) -> dict[str, mx.array]:
    """The tensors under the names of :class:`DraftHead`."""
    names = {
        layout.projection: "projection",
        layout.embedding_norm: "embedding_norm",
        layout.hidden_norm: "hidden_norm",
        layout.end_norm: "end_norm",
        "embed_tokens": "embed_tokens",
        "lm_head": "lm_head",
    }
    renamed = {}
    for key, tensor in found.items():
        module, _, leaf = key.rpartition(".")
        of_layer = module
        if layout.num_blocks > 1:
            of_layer = f"layers.{module}" if module[0].isdigit() else f"layers.0.{module}"
        if "rotary_emb" not in key:
            renamed[f"{names.get(module) or f'layer.{of_layer}'}.{leaf}"] = tensor
    return renamed


def _from_fp8(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Weights of 8 bits with a scale for each 128 x 128 of them, as bfloat16 (DeepSeek-V3)."""
    made = {}
    for key, tensor in weights.items():
        scales = weights.get(f"{key}_scale_inv")
        if scales is not None:
            rows = mx.repeat(mx.repeat(scales, 128, axis=0), 128, axis=1)
            dense = mx.from_fp8(tensor, dtype=mx.float32)
            made[key] = (dense * rows[: dense.shape[0], : dense.shape[1]]).astype(mx.bfloat16)
        elif not key.endswith("_scale_inv"):
            made[key] = tensor
    return made


def _stacked_experts(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Experts in one array per projection, as mlx-lm keeps them: from one per expert, or from one
    for two projections.
    """
    made: dict[str, mx.array] = {}
    experts: dict[str, dict[int, mx.array]] = {}
    for key, tensor in weights.items():
        single = re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)\.(\w+)", key)
        fused = re.fullmatch(r"(.*)\.(?:experts|switch_mlp)\.gate_up_proj(?:\.(\w+))?", key)
        down = re.fullmatch(r"(.*)\.experts\.down_proj(?:\.(\w+))?", key)
        if single is not None:
            name = f"{single[1]}.switch_mlp.{single[3]}.{single[4]}"
            experts.setdefault(name, {})[int(single[2])] = tensor
        elif fused is not None:
            halves = mx.split(tensor, 2, axis=-2)
            for name, half in zip(("gate_proj", "up_proj"), halves, strict=True):
                made[f"{fused[1]}.switch_mlp.{name}.{fused[2] or 'weight'}"] = half
        elif down is not None:
            made[f"{down[1]}.switch_mlp.down_proj.{down[2] or 'weight'}"] = tensor
        else:
            made[key] = tensor
    for name, tensors in experts.items():
        made[name] = mx.stack([tensors[number] for number in sorted(tensors)])
    return made


def _split_latents(weights: Mapping[str, mx.array], args: Any) -> dict[str, mx.array]:
    """The projection of latents to keys and values as the two that mlx-lm multiplies by (MLA)."""
    made = dict(weights)
    prefix = "layer.self_attn.kv_b_proj"
    parts = {key: made.pop(key) for key in weights if key.startswith(f"{prefix}.")}
    if not parts:
        return made
    weight, scales = parts[f"{prefix}.weight"], parts.get(f"{prefix}.scales")
    form = None
    if scales is not None:
        form = _form_of(parts, prefix, args.kv_lora_rank)
        weight = mx.dequantize(weight, scales, parts.get(f"{prefix}.biases"), **form)
    heads = weight.reshape(args.num_attention_heads, -1, weight.shape[-1])
    keys, values = mx.split(heads, [args.qk_nope_head_dim], axis=1)
    for name, part in (("embed_q", keys.swapaxes(-1, -2)), ("unembed_out", values)):
        leaves = [mx.contiguous(part)] if form is None else mx.quantize(part, **form)
        for leaf, array in zip(("weight", "scales", "biases"), leaves, strict=False):
            made[f"layer.self_attn.{name}.{leaf}"] = array
    return made


def _form_of(weights: Mapping[str, Any], path: str, num_inputs: int) -> dict[str, Any]:
    """How a weight is quantised, by the shapes of its arrays: a configuration may be that of the
    model, and not of its head.
    """
    plain = nn.Linear(num_inputs, 1, bias=False)
    form: dict[str, Any] = infer_quant_config(path, plain, dict(weights))
    return form


def _quantise(head: Head, weights: Mapping[str, mx.array]) -> None:
    """Quantise the modules whose weights are, each as it is."""

    def form(path: str, module: Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights or "weight" not in module:
            return False
        found: dict[str, Any] = infer_quant_config(path, module, dict(weights))
        return found

    nn.quantize(head, class_predicate=form)


def _is_stored_zero_centred(weights: Mapping[str, mx.array], target: LanguageModel) -> bool:
    """Whether norms are stored as ``weight - 1``: whether those of the layer are nearer to the
    norms of the same names in the model's layers with 1 added than without. A file has one
    convention.
    """
    distances = [0.0, 0.0]
    layers = text_model(target).layers
    for name in (
        "input_layernorm",
        "post_attention_layernorm",
        "self_attn.q_norm",
        "self_attn.k_norm",
    ):
        own = weights.get(f"layer.{name}.weight")
        of_layers = [dict(layer.named_modules()).get(name) for layer in layers if own is not None]
        means = [norm.weight.mean().item() for norm in of_layers if norm is not None]
        if own is None or not means:
            continue
        usual = sum(means) / len(means)
        for added in (0, 1):
            distances[added] += abs(own.mean().item() + added - usual)
    return distances[1] < distances[0]


def _is_copy(
    part: Mapping[str, mx.array], name: str, target: LanguageModel, evaluates_weights: bool
) -> bool:
    """Whether a head has no embedding or output layer of its own, or copies of the model's; without
    their values, one for as many tokens is taken for a copy.
    """
    if not part:
        return True
    text = text_model(target)
    theirs = embedding_of(text) if name == "embed_tokens" else output_of(text)
    size, number = text.args.hidden_size, theirs.weight.shape[0]
    rows = mx.arange(0, number, max(1, number // NUM_COMPARED))
    is_as_long = bool(part[f"{name}.weight"].shape[0] == number)
    if not is_as_long or not evaluates_weights:
        return is_as_long
    mine = _dense_rows(part, name, rows, size)
    known = _dense_rows(
        {f"{name}.{leaf}": array for leaf, array in theirs.items()}, name, rows, size
    )
    return bool((mx.linalg.norm(mine - known) <= MAX_DIFFERENCE * mx.linalg.norm(known)).item())


def _dense_rows(weights: Mapping[str, Any], path: str, rows: mx.array, num_inputs: int) -> mx.array:
    weight, scales = weights[f"{path}.weight"][rows], weights.get(f"{path}.scales")
    if scales is not None:
        biases = weights.get(f"{path}.biases")
        biases = None if biases is None else biases[rows]
        form = _form_of(weights, path, num_inputs)
        weight = mx.dequantize(weight, scales[rows], biases, **form)
    return cast(mx.array, weight).astype(mx.float32)


def _cast(name: str, tensor: mx.array, dtype: mx.Dtype) -> mx.array:
    """Dense weights in the model's dtype, as mixed ones would be computed in float32; the router's
    correction is added in float32.
    """
    if tensor.dtype == mx.int64:  # the order of tokens by their centroids
        return tensor.astype(mx.int32)
    is_floating = tensor.dtype in (mx.float32, mx.float16, mx.bfloat16)
    return tensor.astype(dtype) if is_floating and "correction_bias" not in name else tensor
