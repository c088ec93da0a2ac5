"""``mlx-paged cache``: inspect and maintain a folder of K/V blocks while engines use it.

MLX is imported only for ``--tokenizer``.
"""

from mlx_paged.cache_tool.program import main, setup_arg_parser

__all__ = ["main", "setup_arg_parser"]
