"""Chat with a model in the terminal: ``mlx-paged chat``, with a message for a single answer.

Answers go to stdout and everything else to stderr.
"""

from mlx_paged.chat.program import main, setup_arg_parser

__all__ = ["main", "setup_arg_parser"]
