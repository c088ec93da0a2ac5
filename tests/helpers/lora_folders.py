"""LoRA adapters of small random models, in the files of mlx-lm and of PEFT, and what mlx-lm itself
answers with one of them loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from mlx_paged.models.adapters import sizes_of


def write_adapter(
    folder: Path,
    model: Module,
    layers: Sequence[str],
    rank: int = 4,
    scale: float = 3.0,
    seed: int = 0,
    size: float = 1.0,
) -> Path:
    """Write an adapter as mlx-lm does, so large that each of its layers shows in the answers.

    Args:
        model: one whose modules have mlx-lm's names.
        layers: the paths that it targets.
    """
    rng, modules = np.random.default_rng(seed), dict(model.named_modules())
    arrays = {}
    for path in layers:
        num_inputs, num_outputs = sizes_of(modules[path])
        a = rng.normal(size=(num_inputs, rank)) * num_inputs**-0.5
        b = rng.normal(size=(rank, num_outputs)) * size * num_outputs**-0.5
        arrays[f"{path}.lora_a"] = mx.array(a, dtype=mx.float32)
        arrays[f"{path}.lora_b"] = mx.array(b, dtype=mx.float32)
    config = {
        "fine_tune_type": "lora",
        "num_layers": -1,
        "lora_parameters": {
            "rank": rank,
            "scale": scale,
            "dropout": 0.0,
            "keys": sorted({re.sub(r".*layers\.\d+\.", "", path) for path in layers}),
        },
    }
    return write_files(folder, arrays, config)


def write_files(folder: Path, arrays: Mapping[str, mx.array], config: Mapping[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), dict(arrays))
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_peft(folder: Path, of_mlx_lm: Path) -> Path:
    """The same adapter as PEFT writes it."""
    arrays = mx.load(str(of_mlx_lm / "adapters.safetensors"))
    config = json.loads((of_mlx_lm / "adapter_config.json").read_text())["lora_parameters"]
    folder.mkdir(parents=True)
    names = {".lora_a": ".lora_A.weight", ".lora_b": ".lora_B.weight"}
    mx.save_safetensors(
        str(folder / "adapter_model.safetensors"),
        {
            f"base_model.model.{name[:-7]}{names[name[-7:]]}": mx.contiguous(array.T)
            for name, array in arrays.items()
        },
    )
    rank, alpha = config["rank"], config["scale"] * config["rank"]
    text = json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": alpha})
    (folder / "adapter_config.json").write_text(text)
    return folder
