"""Models in the form of Ollama's API, for a server and for a router. Does not import MLX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NoReturn

from mlx_paged.server.errors import ApiError

VERSION = "0.24.0"
"""The version of Ollama whose API this is. Clients refuse older ones than they need, such as
Copilot, which needs 0.6.4.
"""
FOREVER = "2300-01-01T00:00:00Z"  # when a model expires that stays loaded
_INSTEAD = {
    "pull": "run mlx-paged pull NAME, and start a server with it",
    "push": "run hf upload",
    "create": "run mlx_lm.convert, and start a server with its folder",
    "copy": "start the server with --served-model-name, which gives a model further names",
    "delete": "run mlx-paged rm NAME",
}
REFUSED = {f"/api/{name}": "DELETE" if name == "delete" else "POST" for name in _INSTEAD}
"""The paths that change a store of models, and their methods."""
_TEXTS = ("parent_model", "format", "family", "parameter_size", "quantization_level")
_UNKNOWN = {
    "modified_at": "1970-01-01T00:00:00Z",
    "size": 0,
    "digest": "",
    "details": {**dict.fromkeys(_TEXTS, ""), "families": []},
}


def timestamp(seconds: float) -> str:
    """A time in seconds since the epoch, as text."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def entries(names: Iterable[str], description: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """A model in lists, by each of its names. A name without a tag gets one, since clients compare
    them.

    Args:
        description: of :func:`models.describe`; ``None`` if nothing is known yet.
    """
    kept = ("size", "digest", "details", "capabilities", "modified_at")
    known = _UNKNOWN if description is None else {name: description[name] for name in kept}
    tagged = (name if ":" in name.rpartition("/")[2] else f"{name}:latest" for name in names)
    return [{"name": name, "model": name, **known} for name in tagged]


def shown(name: str, description: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to ``/api/show`` for one of a model's names."""
    kept = ("parameters", "template", "details", "capabilities", "modified_at")
    # Copilot shows the base name.
    info = {**description["model_info"], "general.basename": name}
    head = {"license": "", "modelfile": f"FROM {name}\n", "model_info": info}
    return {**head, **{each: description[each] for each in kept}}


def refuse(path: str) -> NoReturn:
    """Raise for a path of :data:`REFUSED`, with what to use instead."""
    name = path.rpartition("/")[2]
    raise ApiError(501, f"{name} is not supported; {_INSTEAD[name]}")
