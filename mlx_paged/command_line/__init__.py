"""What the programs' command lines share: a parser that reports an error in one line, types of
values, flags of the model, its sampling and its cache. Only ``words`` imports MLX.
"""
