"""The two backends, as tests name them; ``METAL`` needs a Mac, or the emulator around it. Of the
reference, one that decodes runs of any length, and one that gathers for all.
"""

from mlx_paged.ops.metal import MetalBackend
from mlx_paged.ops.reference import ReferenceBackend

REFERENCE = ReferenceBackend()
DECODING = ReferenceBackend(decode_runs=(1_000_000,))
GATHERING = ReferenceBackend(decode_runs=())
METAL = MetalBackend()
