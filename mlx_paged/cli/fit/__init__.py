"""Whether a model fits into a machine, before any of its weights is read: ``mlx-paged fit`` and
``mlx-paged list``.
"""
