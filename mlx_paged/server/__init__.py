"""A server for clients of the APIs of OpenAI and Anthropic: ``mlx-paged serve``.

Nothing heavy is imported until the arguments are known to be right.
"""

from mlx_paged.server.command_line import setup_arg_parser
from mlx_paged.server.program import main

__all__ = ["main", "setup_arg_parser"]
