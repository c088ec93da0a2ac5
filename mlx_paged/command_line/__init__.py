"""What the command lines of the programs share: the parser, common flags, errors and exit statuses,
and descriptions of an engine. Only ``descriptions`` imports MLX.
"""
