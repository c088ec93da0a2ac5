"""``python -m mlx_paged.chat``."""

import sys

from mlx_paged.chat.program import main

sys.exit(main())
