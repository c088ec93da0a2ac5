"""Several models on one machine: copies of the demo model whose answers differ, processes of them,
and what they say.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_paged.loading import demo_model_path
from mlx_paged.router.model_process import PROCESS_NBYTES, ModelProcess, Need
from mlx_paged.router.residency import Residency, Resident
from mlx_paged.server.http.access import ANONYMOUS
from mlx_paged.server.program import setup_arg_parser

MB = 2**20
NEED = Need(8 * MB, 90 * MB, 16 * MB)
HEADERS = [ANONYMOUS.header(), (b"content-type", b"application/json")]


class Measured(ModelProcess):
    """One whose need is known."""

    async def measure(self) -> Need:
        return NEED


def write_models(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """Copies of the demo model with other weights, each with other answers."""
    weights = mx.load(str(demo_model_path() / "model.safetensors"))
    made = {}
    for seed, name in enumerate(names):
        made[name] = folder / name
        shutil.copytree(demo_model_path(), made[name], ignore=lambda *_: ["mtp.safetensors"])
        mx.random.seed(seed)
        other = {
            key: each * (1 + 0.02 * mx.random.normal(each.shape)) for key, each in weights.items()
        }
        mx.save_safetensors(str(made[name] / "model.safetensors"), other, {"format": "mlx"})
    return made


def flags_of(model: Path, name: str, *words: str) -> dict[str, Any]:
    """The parsed flags of a model's process."""
    args = setup_arg_parser().parse_args(["--model", str(model), "--no-idle-prefill", *words])
    return {**vars(args), "served_model_name": [name]}


def residency_of(
    models: Mapping[str, Path], num_places: int, sockets: Path, *words: str, **options: Any
) -> Residency:
    """Models of which this many have room at once, with equal needs, which are not measured."""
    residents = [
        Resident(Measured(name, flags_of(path, name, *words), sockets / name))
        for name, path in models.items()
    ]
    budget = num_places * (NEED.nbytes + 8 * MB)
    assert budget < (num_places + 1) * NEED.nbytes - PROCESS_NBYTES // 2
    return Residency(residents, budget, lambda weights, more: budget - weights - more, **options)


async def post(process: ModelProcess, path: str, body: dict[str, Any]) -> Any:
    """The answer of a process to a request without streaming."""
    content = json.dumps({"model": process.name, "temperature": 0, **body}).encode()
    async with process.send("POST", path.encode(), HEADERS, content) as response:
        found = json.loads(await response.aread())
        assert response.status == 200, found
        return found
