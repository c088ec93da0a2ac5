"""``mlx-paged serve``: an HTTP server with OpenAI- and Anthropic-compatible APIs.

Nothing heavy is imported before the arguments have been checked.
"""

from mlx_paged.server.command_line import setup_arg_parser
from mlx_paged.server.program import main

__all__ = ["main", "setup_arg_parser"]
