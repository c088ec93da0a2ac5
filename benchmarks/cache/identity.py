"""What a start with `cache_dir` costs for the identity of the model: the first one on a folder of
weights, which hashes all bytes, and the next ones.

    python -m benchmarks identity                    # 0.5, 1, 2 and 4 GB of weights
    python -m benchmarks identity --gb 8 --files 4
    python -m benchmarks identity --quick            # does it run at all

Weights of Qwen3-8B in 4 bits, as many layers as there is to be, of random bits that nothing
computes with. Each start is a process of its own that reads the weights and then asks for the
identity; only the latter counts. The bytes are in memory by then, whatever the disk does. "CPU" is
that of all threads of the process.

Digests of files that are younger than a minute are not kept. Here they are, since nothing else
writes to the folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from benchmarks.lib.card import (
    COMMAND,
    machine_card,
    make_arg_parser,
    print_card,
    print_json,
    print_table,
)
from mlx_paged.loading.loader import _read_weights, build_model
from mlx_paged.models import language_model
from mlx_paged.models.identity import WeightCatalogue, model_identity

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 1_024,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    "quantization": {"group_size": 64, "bits": 4},
}
SIZES = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (12_288, 4096),
    "mlp.up_proj": (12_288, 4096),
    "mlp.down_proj": (4096, 12_288),
}
NORMS = {
    "input_layernorm": 4096,
    "post_attention_layernorm": 4096,
    "self_attn.q_norm": 128,
    "self_attn.k_norm": 128,
}


@dataclass(frozen=True)
class Start:
    """What one process saw."""

    digest: str
    nbytes: int
    num_arrays: int
    seconds: float
    cpu_seconds: float


def quantised(name: str, num_rows: int, num_columns: int) -> dict[str, mx.array]:
    groups = (num_rows, num_columns // 64)
    return {
        f"{name}.weight": mx.random.randint(0, 2**31, (num_rows, num_columns // 8), mx.uint32),
        f"{name}.scales": mx.random.normal(groups).astype(mx.bfloat16),
        f"{name}.biases": mx.random.normal(groups).astype(mx.bfloat16),
    }


def layer_of(index: int) -> dict[str, mx.array]:
    prefix = f"model.layers.{index}"
    weights: dict[str, mx.array] = {}
    for name, (num_rows, num_columns) in SIZES.items():
        weights |= quantised(f"{prefix}.{name}", num_rows, num_columns)
    for name, size in NORMS.items():
        weights[f"{prefix}.{name}.weight"] = mx.ones(size, mx.bfloat16)
    return weights


def write_model(folder: Path, gb: float, num_files: int) -> None:
    """Layer by layer and file by file, so that little of it is in memory."""
    mx.random.seed(0)
    layer_nbytes = sum(weight.nbytes for weight in layer_of(0).values())
    num_layers = max(num_files, round(gb * 1e9 / layer_nbytes))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": num_layers}))
    for file in range(num_files):
        weights: dict[str, mx.array] = {}
        for index in range(file, num_layers, num_files):
            weights |= layer_of(index)
        if file == 0:
            weights |= quantised("model.embed_tokens", 1024, 4096)
            weights |= quantised("lm_head", 1024, 4096)
            weights["model.norm.weight"] = mx.ones(4096, mx.bfloat16)
        mx.save_safetensors(str(folder / f"model-{file}.safetensors"), weights)
        del weights
        mx.clear_cache()


def start(folder: Path, cache: Path) -> Start:
    """In a process of its own."""
    language_model.SETTLING_SECONDS = 0
    model, _, files = build_model(folder, None)
    _read_weights(model, folder)
    arrays = list(dict(tree_flatten(model.parameters())).values())
    begin, cpu = time.perf_counter(), time.process_time()
    identity = model_identity(model, WeightCatalogue(cache), files)
    return Start(
        identity.digest,
        sum(weight.nbytes for weight in arrays),
        len(arrays),
        time.perf_counter() - begin,
        time.process_time() - cpu,
    )


def started(folder: Path, cache: Path) -> Start:
    command = [*COMMAND, "identity", "--start", str(folder), str(cache)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"identity.py: a start failed:\n{done.stderr}")
    return Start(**json.loads(done.stdout))


def measure(gb: float, num_files: int, num_starts: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder, cache = Path(name) / "model", Path(name) / "cache"
        write_model(folder, gb, num_files)
        first, *next_ones = (started(folder, cache) for _ in range(1 + num_starts))
        if {first.digest} != {each.digest for each in next_ones}:
            raise SystemExit("identity.py: the identity changed")
        kept = sum(file.stat().st_size for file in (cache / "weights").iterdir())
    fastest = min(next_ones, key=lambda each: each.seconds)
    return {"first": asdict(first), "next": asdict(fastest), "files": num_files, "kept": kept}


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--gb", type=float, nargs="+", default=[0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--files", type=int, default=2, help="over which the weights go")
    parser.add_argument("--starts", type=int, default=3, help="after the first; the fastest counts")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--start", type=Path, nargs=2, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    if args.start is not None:
        print(json.dumps(asdict(start(*args.start))))
        return
    if args.quick:
        args.gb, args.files, args.starts = [0.01], 1, 1
    setting = machine_card() | {"files": args.files, "starts": args.starts}
    print_card("the identity of a model", setting)
    rows = [measure(gb, args.files, args.starts) for gb in args.gb]
    print_table(
        ["GB", "arrays", "first, s", "CPU, s", "GB/s per CPU s", "next, ms", "CPU, ms", "kept, KB"],
        [
            [
                f"{row['first']['nbytes'] / 1e9:.2f}",
                row["first"]["num_arrays"],
                f"{row['first']['seconds']:.2f}",
                f"{row['first']['cpu_seconds']:.2f}",
                f"{row['first']['nbytes'] / 1e9 / row['first']['cpu_seconds']:.2f}",
                f"{row['next']['seconds'] * 1e3:.1f}",
                f"{row['next']['cpu_seconds'] * 1e3:.1f}",
                f"{row['kept'] / 1e3:.0f}",
            ]
            for row in rows
        ],
    )
    print_json("identity", setting, rows, args.out)


if __name__ == "__main__":
    main()
