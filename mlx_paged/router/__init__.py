"""``mlx-paged serve`` with several models: a proxy in front of one server process per model."""
