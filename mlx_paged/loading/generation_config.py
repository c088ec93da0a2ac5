"""The sampling that a model's authors recommend: ``generation_config.json`` in its folder, or
``general.sampling.*`` in its GGUF file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_paged.errors import shown
from mlx_paged.loading.folder import LoadError, read_json_object
from mlx_paged.loading.gguf import is_gguf
from mlx_paged.options.argument_values import BOOL, Domain, is_number
from mlx_paged.options.sampling_declarations import SAMPLING_PARAMS

FILE_NAME = "generation_config.json"
# The names of generation_config.json -> those of a GGUF file, behind general.sampling.
_GGUF_KEYS = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}


def read_sampling_defaults(folder: Path) -> dict[str, Any]:
    """The recommended sampling by field of ``SamplingParams``; empty if there is none.

    ``"do_sample": false`` means greedy, whatever else is given, and ``true`` without a temperature
    means a temperature of 1, as in transformers. A ``top_k`` of -1 is off, as in vLLM.

    Raises:
        LoadError: the file can't be read, or a value is out of range.
    """
    if is_gguf(folder):
        return _sampling_defaults(_read_gguf_sampling(folder), folder, "")
    file = folder / FILE_NAME
    if not file.exists():
        return {}
    config = read_json_object(file, "; correct or remove it")
    return _sampling_defaults(config, file, "; correct it or remove the file")


def _read_gguf_sampling(path: Path) -> dict[str, Any]:
    """The values in the file, under the names of ``generation_config.json``."""
    from mlx_paged.loading.gguf.header import read_header

    metadata = read_header(path).metadata
    values = {name: metadata.get(f"general.sampling.{key}") for name, key in _GGUF_KEYS.items()}
    return {name: value for name, value in values.items() if value is not None}


def _sampling_defaults(config: dict[str, Any], file: Path, way_out: str) -> dict[str, Any]:
    values = {}
    for name, domain in _DOMAINS.items():
        value = config.get(name)
        if value is None:
            continue
        values[name] = domain.read(value)
        if values[name] is None:
            raise LoadError(
                f"[load] {name} in {file} must be {domain.what}, got {shown(value)}{way_out}"
            )
    samples = values.pop("do_sample", None)
    if samples is False:
        return {"temperature": 0.0}
    return {"temperature": 1.0, **values} if samples else values


def _read_top_k(value: Any) -> int | None:
    """Read -1 as 0, and a JSON number with a decimal point as an integer."""
    is_valid = is_number(value) and -1 <= value < 2**31 and float(value).is_integer()
    return max(int(value), 0) if is_valid else None


_DOMAINS: dict[str, Domain[Any]] = {
    "do_sample": Domain("true or false", BOOL.read),
    **{name: SAMPLING_PARAMS[name].domain for name in _GGUF_KEYS},
    "top_k": Domain("a whole number, at least 0, or -1", _read_top_k),
}
