"""Tries to start engines whose ranks differ; each rank prints what it is told."""

import os
import shutil
import sys
from pathlib import Path

from mlx_paged import LLM, demo_model_path
from mlx_paged.distributed import RanksError, launched_ranks, ranks
from mlx_paged.loading import load_for

folder = Path(sys.argv[1])
is_second = os.environ["MLX_RANK"] == "1"


def told(**options):
    try:
        llm = LLM(options.pop("model", demo_model_path()), **options)
    except (RanksError, ValueError) as error:
        print(error, flush=True)
    else:
        print(llm.engine.cache.config.num_blocks, flush=True)


told(block_size=16 if is_second else 32)
told(kv_format=8 if is_second else None)
told(draft_model=demo_model_path())
told(adapter_path=folder)

version = ranks.__version__
ranks.__version__ = "0.0.1" if is_second else version
told()
ranks.__version__ = version

other = folder / f"rank-{is_second}"
shutil.copytree(demo_model_path(), other)
if is_second:
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-5] ^= 1
    (other / "model.safetensors").write_bytes(bytes(weights))
told(model=other)

# What can be had, after all that; each rank has room for another number of blocks.
model, tokenizer = load_for(launched_ranks(), demo_model_path())
from mlx_paged.models import kv_cache  # noqa: E402

kv_cache.default_kv_cache_bytes = lambda *_: 3_000_000 if is_second else 5_000_000
told(model=model, tokenizer=tokenizer)
if is_second:
    try:
        LLM(model, tokenizer, kv_cache_bytes="9blocks").engine.add_request("a", [1])
    except RuntimeError as error:
        print(error)
else:
    LLM(model, tokenizer, kv_cache_bytes="9blocks")
