"""``mlx-paged cache``: inspect and maintain a folder of K/V blocks while engines use it."""
