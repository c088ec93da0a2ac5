"""``mlx-paged serve``: an HTTP server with OpenAI- and Anthropic-compatible APIs.

Nothing heavy is imported before the arguments have been checked.
"""

from mlx_paged.server.program import main, setup_arg_parser

__all__ = ["main", "setup_arg_parser"]
