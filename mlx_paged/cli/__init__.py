"""The programs of ``mlx-paged``, apart from the server: ``chat``, ``cache``, ``fit`` and ``list``;
and what all programs share: the parser and its flags, and standard streams. MLX is imported once
the arguments are checked.
"""
