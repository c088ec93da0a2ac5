"""mlx_paged: a paged KV cache for running language models on Apple Silicon with MLX.

    from mlx_paged import LLM, SamplingParams

    llm = LLM("mlx-community/Qwen3-0.6B-4bit")
    for output in llm.generate(["Hello", "The capital is"], SamplingParams(max_tokens=50)):
        print(output.outputs[0].text)

The names below are imported on first use, so that ``import mlx_paged`` (and ``--help``) does not
import MLX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.2.0"

_HOME_OF = {
    "load": "mlx_paged.loading",
    "demo_model_path": "mlx_paged.loading",
    "generate": "mlx_paged.generation",
    "batch_generate": "mlx_paged.batch_generation",
    "stream_generate": "mlx_paged.generation",
    "GenerationResponse": "mlx_paged.generation",
    "LLM": "mlx_paged.llm",
    "SamplingParams": "mlx_paged.options.sampling_params",
    "PoolingParams": "mlx_paged.options.sampling_params",
    "RequestOutputKind": "mlx_paged.options.sampling_params",
    "StructuredOutputsParams": "mlx_paged.options.sampling_params",
    "RequestOutput": "mlx_paged.request",
    "CompletionOutput": "mlx_paged.request",
    "PoolingRequestOutput": "mlx_paged.request",
    "Engine": "mlx_paged.engine.engine",
    "AsyncEngine": "mlx_paged.engine.async_engine",
    "make_sampler": "mlx_lm.sample_utils",
    "Sequences": "mlx_paged.cache",
    "run_step": "mlx_paged.models.run_step",
    "make_kv_cache": "mlx_paged.models.kv_cache",
    "KVCacheConfig": "mlx_paged.cache",
}


if TYPE_CHECKING:
    from mlx_lm.sample_utils import make_sampler

    from mlx_paged.batch_generation import batch_generate
    from mlx_paged.cache import KVCacheConfig, Sequences
    from mlx_paged.engine.async_engine import AsyncEngine
    from mlx_paged.engine.engine import Engine
    from mlx_paged.generation import GenerationResponse, generate, stream_generate
    from mlx_paged.llm import LLM
    from mlx_paged.loading import demo_model_path, load
    from mlx_paged.models.kv_cache import make_kv_cache
    from mlx_paged.models.run_step import run_step
    from mlx_paged.options.sampling_params import (
        PoolingParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from mlx_paged.request import CompletionOutput, PoolingRequestOutput, RequestOutput


__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "Engine",
    "GenerationResponse",
    "KVCacheConfig",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "Sequences",
    "StructuredOutputsParams",
    "__version__",
    "batch_generate",
    "demo_model_path",
    "generate",
    "load",
    "make_kv_cache",
    "make_sampler",
    "run_step",
    "stream_generate",
]


# Type checkers assume that a module with a __getattr__ has every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _HOME_OF:
            return getattr(importlib.import_module(_HOME_OF[name]), name)
        from mlx_paged.errors import REMOVED

        if name in REMOVED:
            # ``from mlx_paged import name`` would replace the text of an AttributeError.
            raise ImportError(f"mlx_paged.{name} was removed: {REMOVED[name]}")
        raise AttributeError(f"module 'mlx_paged' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
