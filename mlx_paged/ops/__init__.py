"""The operations on paged K/V slabs, in plain MLX or as Metal kernels: a backend is chosen once,
and each step and layer is described to it.
"""

from mlx_paged.ops.attention_plan import AttentionPlan, PlanKey
from mlx_paged.ops.attention_shape import AttentionShape
from mlx_paged.ops.backend import Backend, BackendError
from mlx_paged.ops.choose import BACKENDS, check_backend_name, choose_backend, try_kernels_of
from mlx_paged.ops.copy_detector import CopyDetector
from mlx_paged.ops.formats import (
    AffineFormat,
    DenseFormat,
    KVFormat,
    Parts,
    RowFormat,
    affine_name,
    dtype_name,
)
from mlx_paged.ops.kv_handle import KVHandle
from mlx_paged.ops.metadata import (
    AttentionMetadata,
    AttentionParams,
    SlotMapping,
    traced_decode,
)
from mlx_paged.ops.prefill import attend_to_latents, attend_with_sdpa
from mlx_paged.ops.states import (
    ReadState,
    StateArrays,
    StateRow,
    StateStack,
    StepState,
    reader_of,
    separate_states,
)
from mlx_paged.ops.tried_once import TrialStoppedError

__all__ = [
    "BACKENDS",
    "AffineFormat",
    "AttentionMetadata",
    "AttentionParams",
    "AttentionPlan",
    "AttentionShape",
    "Backend",
    "BackendError",
    "CopyDetector",
    "DenseFormat",
    "KVFormat",
    "KVHandle",
    "Parts",
    "PlanKey",
    "ReadState",
    "RowFormat",
    "SlotMapping",
    "StateArrays",
    "StateRow",
    "StateStack",
    "StepState",
    "TrialStoppedError",
    "affine_name",
    "attend_to_latents",
    "attend_with_sdpa",
    "check_backend_name",
    "choose_backend",
    "dtype_name",
    "reader_of",
    "separate_states",
    "traced_decode",
    "try_kernels_of",
]
