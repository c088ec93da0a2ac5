"""The programs of ``mlx-paged``, apart from the server: ``chat``, ``cache``, ``fit`` and ``list``;
and what all programs share: the parser and its flags, standard streams, and descriptions of an
engine. Only ``descriptions`` imports MLX, and what is imported once the arguments are checked.
"""
