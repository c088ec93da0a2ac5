"""Chat with a model in the terminal: ``python -m mlx_paged.chat``, which is ``mlx-paged chat``."""

from __future__ import annotations

import sys

from mlx_paged.cli.chat.program import main, setup_arg_parser

__all__ = ["main", "setup_arg_parser"]

if __name__ == "__main__":
    sys.exit(main())
