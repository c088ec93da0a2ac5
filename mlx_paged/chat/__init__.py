"""Chat with a model in the terminal: ``mlx-paged chat``, or with a message, once.

The answer goes to stdout and everything else to stderr, so that it can be piped. Nothing heavy is
imported until the arguments are known to be right.
"""

from mlx_paged.chat.command_line import setup_arg_parser
from mlx_paged.chat.program import main

__all__ = ["main", "setup_arg_parser"]
