"""How a model wants to be sampled, as the ``generation_config.json`` of its folder says it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_paged.argument_values import is_plain_integer
from mlx_paged.errors import shown
from mlx_paged.loading.folder import LoadError, read_json_object
from mlx_paged.loading.gguf import is_gguf, read_gguf_sampling

FILE_NAME = "generation_config.json"


@dataclass(frozen=True)
class SamplingDefaults:
    """The fields of a generation configuration that a chat uses; ``None`` is not said there."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    @property
    def said(self) -> dict[str, Any]:
        """What is said there, by field of ``SamplingParams``."""
        return {name: value for name, value in vars(self).items() if value is not None}


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """The sampling that a model's authors recommend; empty where they don't.

    A GGUF file may have it in its metadata.

    ``"do_sample": false`` means greedy, whatever else is there, and ``true`` without a temperature
    means 1, as in transformers. A ``top_k`` of -1 is off, as in vLLM.

    Raises:
        LoadError: the file can't be read, or a value in it is out of its range.
    """
    if is_gguf(folder):
        return _sampling_defaults(read_gguf_sampling(folder), folder, "")
    file = folder / FILE_NAME
    if not file.exists():
        return SamplingDefaults()
    config = read_json_object(file, "; mend it or leave it out")
    return _sampling_defaults(config, file, "; mend it or leave the file out")


def _sampling_defaults(config: dict[str, Any], file: Path, way_out: str) -> SamplingDefaults:
    def value(name: str, is_right: Callable[[Any], bool], what: str) -> Any:
        value = config.get(name)
        if value is not None and not is_right(value):
            raise LoadError(f"[load] {name} in {file} must be {what}, got {shown(value)}{way_out}")
        return value

    do_sample = value("do_sample", lambda v: isinstance(v, bool), "true or false")
    temperature = value("temperature", lambda v: _is_within(v, 0), "a number, at least 0")
    top_p = value("top_p", lambda v: _is_within(v, 0, 1), "a number within 0..1")
    top_k = value("top_k", _is_top_k, "a whole number, at least 0, or -1")
    min_p = value("min_p", lambda v: _is_within(v, 0, 1), "a number within 0..1")
    if do_sample is False:
        return SamplingDefaults(temperature=0.0)
    if do_sample and temperature is None:
        temperature = 1.0
    return SamplingDefaults(
        temperature, top_p, None if top_k is None else max(int(top_k), 0), min_p
    )


def _is_within(value: object, low: float, high: float = math.inf) -> bool:
    if not is_plain_integer(value) and not isinstance(value, float):
        return False
    # Not every integer of JSON has a float, so it is compared as it is.
    return low <= value <= high and value != math.inf


def _is_top_k(value: object) -> bool:
    return _is_within(value, -1, 2**31 - 1) and float(value).is_integer()  # type: ignore[arg-type]
