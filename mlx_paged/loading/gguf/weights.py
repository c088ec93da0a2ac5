"""Loading the weights of a GGUF file into a model."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from mlx_paged.errors import shown
from mlx_paged.loading.folder import LoadError
from mlx_paged.loading.gguf.affine import AFFINE_TYPES, GROUP_SIZE
from mlx_paged.loading.gguf.files import GGUFFile
from mlx_paged.loading.gguf.header import TensorInfo, gguf
from mlx_paged.loading.gguf.rope import FACTORS

# An unquantised type -> how numpy reads its bytes, and MLX's dtype.
PLAIN_TYPES = {
    "F32": (np.float32, mx.float32),
    "F16": (np.float16, mx.float16),
    "BF16": (np.uint16, mx.bfloat16),
}
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
# llama.cpp rotates adjacent pairs of a head's numbers, and permutes the rows of these matrices in
# files of llama accordingly.
_PERMUTED = re.compile(r"model\.layers\.\d+\.self_attn\.(q|k)_proj\.(weight|bias)")
# llama.cpp adds 1 to the norms of Gemma when it converts them; mlx-lm does when it computes.
_NORM = re.compile(r".*norm\.weight")
_QUANTISED_MODULES = (nn.Linear, nn.Embedding)


class Weights:
    """Reads the weights of a model from a file, under the model's own names.

    Args:
        model: as built from its configuration, not quantised yet.
        config: the model's; ``dtype`` is that of scales, biases, norms and activations.
    """

    def __init__(self, file: GGUFFile, model: Module, config: dict[str, Any]):
        self.file = file
        self.model = model
        self.config = config
        self.dtype = DTYPES[config["dtype"]]
        self.infos = _tensors_by_parameter(file, model, config)
        self.requantised: set[str] = set()  # tensors
        self.rounded: set[str] = set()

    def load(self) -> None:
        """Quantise the model's modules as in the file, and load the weights.

        Tensors are read and repacked one at a time, so that the peak is little more than the model.

        Raises:
            LoadError: a tensor does not fit the model.
        """
        self.shape_model()
        weights: dict[str, mx.array] = {}
        for name, info in self.infos.items():
            weights.update(self._arrays(name, info))
        self.model.load_weights(list(weights.items()), strict=True)

    def shape_model(self) -> None:
        """Quantise the model's modules as in the file, and set the dtype."""
        quantised = self._quantised_modules()
        if quantised:
            nn.quantize(self.model, class_predicate=lambda path, _: quantised.get(path, False))
            self.config["quantization"] = {"group_size": GROUP_SIZE, "bits": 4, **quantised}
        self.model.set_dtype(self.dtype)

    def losses(self) -> list[str]:
        """Which tensors are not exact, in words; empty if all are."""
        lines = []
        for names, what in (
            (self.requantised, "quantised again, to 8 bits in groups of 32"),
            (self.rounded, f"rounded to {self.config['dtype']}"),
        ):
            types = sorted({self.file.tensors[name].type_name for name in names})
            if names:
                lines.append(f"{len(names)} tensors of {', '.join(types)} are {what}")
        return lines

    def _quantised_modules(self) -> dict[str, Any]:
        modules = dict(self.model.named_modules())
        quantised: dict[str, Any] = {}
        for name, info in self.infos.items():
            kind = AFFINE_TYPES.get(info.type_name)
            if kind is None:
                continue
            path = name.removesuffix(".weight")
            if not isinstance(modules.get(path), _QUANTISED_MODULES):
                raise LoadError(
                    f"[load] {self.file.path}: tensor {shown(info.name)} is of {info.type_name}, "
                    "which is supported for matrices only"
                )
            quantised[path] = {"group_size": GROUP_SIZE, "bits": kind.bits}
        return quantised

    def _arrays(self, name: str, info: TensorInfo) -> dict[str, mx.array]:
        data = self.file.read(info.name)
        order = self._row_order(name, info)
        if info.type_name in PLAIN_TYPES:
            return {name: self._plain(name, data, info, order)}
        kind = AFFINE_TYPES[info.type_name]
        rows = kind.rows(data if order is None else data[order])
        path = name.removesuffix(".weight")
        scales, biases = (self._cast(mx.array(part), info) for part in rows[1:])
        if not kind.is_exact:
            self.requantised.add(info.name)
        return {
            name: mx.array(rows.packed),
            f"{path}.scales": scales,
            f"{path}.biases": biases,
        }

    def _plain(
        self,
        name: str,
        data: np.ndarray[Any, Any],
        info: TensorInfo,
        order: np.ndarray[Any, Any] | None,
    ) -> mx.array:
        as_numpy, as_mlx = PLAIN_TYPES[info.type_name]
        values = data.reshape(-1).view(as_numpy).reshape(info.shape)
        array = mx.array(values if order is None else values[order]).view(as_mlx)
        if self.config["model_type"] == "gemma3_text" and _NORM.fullmatch(name):
            array = array.astype(mx.float32) - 1
        return self._cast(array, info)

    def _cast(self, array: mx.array, info: TensorInfo) -> mx.array:
        """The array in the model's dtype, evaluated; records tensors that are rounded."""
        cast = array.astype(self.dtype)
        if not mx.isfinite(cast).all().item():
            raise LoadError(
                f"[load] {self.file.path}: tensor {shown(info.name)} holds numbers that are not "
                f"finite in {self.config['dtype']}"
            )
        if array.dtype != self.dtype and not _are_equal(array, cast):
            self.rounded.add(info.name)
        return cast

    def _row_order(self, name: str, info: TensorInfo) -> np.ndarray[Any, Any] | None:
        """The file's row for each row of the model; ``None`` for the same order."""
        match = _PERMUTED.fullmatch(name)
        if self.config["model_type"] != "llama" or match is None:
            return None
        heads = self.config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        # The file's order within a head is 0, half, 1, half + 1, ...
        rows = np.arange(self.infos[name].shape[0]).reshape(heads, -1, 2)
        return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)


def _are_equal(one: mx.array, other: mx.array) -> bool:
    return bool(mx.array_equal(one.astype(mx.float32), other.astype(mx.float32)).item())


def default_dtype(file: GGUFFile) -> str:
    """The dtype in which the file's matrices are exact: F16 or BF16 if all are of that type, else
    float32, in which the scales of all quantised types are exact.
    """
    kinds = {info.type_name for info in file.tensors.values() if len(info.shape) > 1}
    plain = {"F16": "float16", "BF16": "bfloat16"}
    return plain.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"


def _tensors_by_parameter(
    file: GGUFFile, model: Module, config: dict[str, Any]
) -> dict[str, TensorInfo]:
    """The file's tensors by the model's parameter names; neither may have others."""
    constants = gguf().constants
    architecture = file.metadata.text("general.architecture")
    numbers = {name: number for number, name in constants.MODEL_ARCH_NAMES.items()}
    names = gguf().tensor_mapping.get_tensor_name_map(
        numbers[architecture], config["num_hidden_layers"]
    )
    infos: dict[str, TensorInfo] = {}
    left = dict(file.tensors)
    left.pop(FACTORS, None)
    for name, parameter in dict(tree_flatten(model.parameters())).items():
        tensor = names.get_name(name, try_suffixes=(".weight", ".bias"))
        info = left.pop(tensor, None)
        if info is None:
            raise LoadError(f"[load] {file.path} lacks the tensor {tensor} ({name})")
        _check_tensor(file, info, parameter.shape)
        infos[name] = info
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise LoadError(
            f"[load] {file.path} has the tensor {shown(min(left))}{more}, which {architecture} "
            "does not use"
        )
    return infos


def _check_tensor(file: GGUFFile, info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.type_name not in PLAIN_TYPES and info.type_name not in AFFINE_TYPES:
        raise LoadError(
            f"[load] {file.path}: tensor {shown(info.name)} is of the type {info.type_name}, which "
            f"is not supported; supported: {', '.join([*PLAIN_TYPES, *AFFINE_TYPES])}"
        )
    if info.shape != shape:
        raise LoadError(
            f"[load] {file.path}: tensor {shown(info.name)} has the shape {list(info.shape)}, and "
            f"the metadata implies {list(shape)}"
        )
