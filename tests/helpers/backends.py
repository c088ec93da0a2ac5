"""The two backends, as tests name them; ``METAL`` needs a Mac, or the emulator around it."""

from mlx_paged.ops.metal import MetalBackend
from mlx_paged.ops.reference import ReferenceBackend

REFERENCE = ReferenceBackend()
METAL = MetalBackend()
