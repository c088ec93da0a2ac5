"""``python -m mlx_paged.server``."""

import sys

from mlx_paged.server.program import main

sys.exit(main())
