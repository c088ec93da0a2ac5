"""A tool that looks into a folder of K/V blocks, while engines use it: ``mlx-paged cache``.

MLX is imported only where a tokenizer is asked for.
"""

from mlx_paged.cache_tool.command_line import setup_arg_parser
from mlx_paged.cache_tool.program import main

__all__ = ["main", "setup_arg_parser"]
