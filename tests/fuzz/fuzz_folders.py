"""Model folders: a right one with a file that is cut, garbled, missing or says something that it
should not.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from fuzz_library import tiny_model
from fuzzing import Case, Defect
from mlx.utils import tree_flatten

from mlx_paged import demo_model_path, generate, load

NO_FLOATS = ", which is no float"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**63, 10**12, 10**30, 0.5, -0.5, 1e308,
    float("nan"), float("inf"), "", "x", "16", "float32", [], [1], [[]], {}, {"a": 1},
    {"type": "yarn"}, {"rope_type": "linear", "factor": -1}, {"group_size": 64, "bits": 4},
    {"bits": 4}, {"group_size": 64}, {"rope_type": 7}, ["x"] * 3, "\ud800",
)  # fmt: skip
# Fields that a configuration may have beside those of the right one.
MORE_FIELDS = (
    "quantization", "quantization_config", "rope_scaling", "rope_parameters", "model_file",
    "eos_token_id", "bos_token_id", "torch_dtype", "attention_bias", "sliding_window",
    "use_sliding_window", "layer_types", "max_window_layers", "num_experts", "auto_map",
)  # fmt: skip


@cache
def working_folder() -> Path:
    """Where programs run: --cache-dir and other flags make folders there."""
    folder = Path(_kept().name) / "working"
    folder.mkdir()
    return folder


@cache
def right_folder() -> Path:
    """A folder of a tiny model with the demo model's tokenizer; removed when the program ends."""
    folder = Path(_kept().name) / "right"
    folder.mkdir()
    model = tiny_model()
    config = {key: value for key, value in vars(model.args).items() if value is not None}
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 2}))
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        metadata={"format": "mlx"},
    )
    for name in TOKENIZER_FILES:
        shutil.copy(demo_model_path() / name, folder / name)
    return folder


@cache
def _kept() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="mlx_paged_fuzz_")


def folder_case(rng: random.Random) -> Case:
    kinds: tuple[Callable[[random.Random, Path], str], ...] = (
        _change_json, _change_json, _change_json, _change_text, _change_weights, _change_weights,
        _remove_file,
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp(dir=_kept().name))
    shutil.copytree(right_folder(), folder, dirs_exist_ok=True)
    titles = [rng.choice(kinds)(rng, folder) for _ in range(1 if rng.random() < 0.8 else 2)]

    def run() -> None:
        try:
            _load_and_answer(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    title = f"folder with {' and '.join(titles)}"
    return Case(title, lambda: _refuse(run) if NO_FLOATS in title and len(titles) == 1 else run())


def _refuse(run: Callable[[], None]) -> None:
    run()
    raise Defect("weights that are no floats are computed with")


def _load_and_answer(folder: Path) -> None:
    model, tokenizer = load(folder)
    text = generate(model, tokenizer, [1, 2, 3], max_tokens=2, kv_cache_bytes="4blocks")
    if not isinstance(text, str):
        raise Defect(f"the answer is {text!r}")


def _change_json(rng: random.Random, folder: Path) -> str:
    name = rng.choice(
        (
            "config.json",
            "config.json",
            "config.json",
            *TOKENIZER_FILES[:2],
            "generation_config.json",
        )
    )
    file = folder / name
    if not file.is_file():
        return _change_text(rng, folder)
    try:
        content = json.loads(file.read_text())
    except ValueError:
        return _change_text(rng, folder)
    if not isinstance(content, dict) or not content:
        return f"{name} as it is"
    fields = [*content, *(MORE_FIELDS if name == "config.json" else ())]
    field = rng.choice(fields)
    if rng.random() < 0.2:
        content.pop(field, None)
        what = f"no {field} in {name}"
    elif rng.random() < 0.05:
        content = rng.choice(JUNK)
        what = f"{name} = {content!r}"
    else:
        content[field] = rng.choice(JUNK)
        what = f"{field} = {content[field]!a} in {name}"
    file.write_text(json.dumps(content))
    return what


def _change_text(rng: random.Random, folder: Path) -> str:
    """Cut a file of text, or put bytes into it."""
    name = rng.choice(("config.json", *TOKENIZER_FILES))
    file = folder / name
    if file.is_dir():
        return f"{name} as it is"
    data = file.read_bytes() if file.is_file() else b""
    place = rng.randrange(len(data) + 1)
    if rng.random() < 0.5:
        file.write_bytes(data[:place])
        return f"{name} cut at {place} of {len(data)}"
    garbage = rng.choice(
        (b"\xff\xfe", b"{", b"\x00" * 8, b'"', b"[" * 5000, b"{% raise %}", b"\n\n", b"null")
    )
    file.write_bytes(data[:place] + garbage + data[place + len(garbage) :])
    return f"{garbage[:8]!r} at {place} of {name}"


def _change_weights(rng: random.Random, folder: Path) -> str:
    file = folder / "model.safetensors"
    if file.is_dir():
        return "weights as they are"
    data = file.read_bytes() if file.is_file() else b""
    kind = rng.randrange(6)
    if kind == 0:
        place = rng.choice((0, 4, 8, 100, len(data) // 2, max(0, len(data) - 1)))
        file.write_bytes(data[:place])
        return f"weights cut at {place} of {len(data)}"
    if kind == 1:
        place = rng.randrange(min(len(data), 3000) + 1)
        file.write_bytes(
            data[:place] + bytes(rng.randrange(256) for _ in range(8)) + data[place + 8 :]
        )
        return f"garbage at {place} of the weights"
    if kind == 2:
        index = {"metadata": {}, "weight_map": rng.choice(({}, {"x": "y"}, [], None, {"x": 7}))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        file.rename(folder / "model-00001-of-00002.safetensors") if file.is_file() else None
        return "an index of weights that are elsewhere"
    weights = dict(tree_flatten(tiny_model().parameters()))
    name = rng.choice(sorted(weights))
    if kind == 3:
        del weights[name]
        what = f"no weights {name}"
    elif kind == 4:
        shape = rng.choice(
            ((1,), (3, 5), (1, *weights[name].shape), tuple(reversed(weights[name].shape)), (0,))
        )
        weights[name] = mx.zeros(shape, dtype=rng.choice((mx.float32, mx.float16)))
        what = f"{name} of shape {shape}"
    else:
        dtype = rng.choice(
            (mx.int32, mx.uint8, mx.bool_, mx.float16, mx.bfloat16, mx.complex64, mx.int64)
        )
        weights[name] = weights[name].astype(dtype)
        if rng.random() < 0.3:
            weights[name + ".more"] = mx.zeros((2,))
        what = f"{name} as {dtype}" + ("" if mx.issubdtype(dtype, mx.floating) else NO_FLOATS)
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    return what


def _remove_file(rng: random.Random, folder: Path) -> str:
    name = rng.choice(("config.json", "model.safetensors", *TOKENIZER_FILES))
    (folder / name).unlink(missing_ok=True)
    if rng.random() < 0.3:
        (folder / name).mkdir()
        return f"a folder in place of {name}"
    return f"no {name}"
