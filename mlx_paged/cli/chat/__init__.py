"""``mlx-paged chat``. Answers go to stdout and everything else to stderr."""
