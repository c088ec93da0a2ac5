"""Checks that the sizes of a model can be split over ranks."""

from __future__ import annotations

from mlx.nn.layers.base import Module

from mlx_paged.errors import ArgumentError


def check_divisible(sizes: dict[str, int], num_ranks: int) -> None:
    """Check that sizes are divisible by the number of ranks.

    Args:
        sizes: by their names in ``config.json``.

    Raises:
        ArgumentError: a size is not; the message names it.
    """
    for name, size in sizes.items():
        if size % num_ranks:
            raise ArgumentError(
                f"[ranks] {name}={size} of the model is not divisible by {num_ranks} ranks; start "
                "another number of ranks",
                name,
            )


def check_linear_sizes(model: Module, names: set[str], num_ranks: int) -> None:
    """Check that the inputs of quantised weights can be split between two groups of a scale.

    Args:
        names: of the layers whose inputs are split, such as ``o_proj``.

    Raises:
        ArgumentError: those of a layer can't; the message names it.
    """
    for path, module in model.named_modules():
        name, group_size = path.rpartition(".")[2], getattr(module, "group_size", None)
        if name in names and group_size is not None and module.scales.shape[-1] % num_ranks:
            num_inputs = module.scales.shape[-1] * group_size
            raise ArgumentError(
                f"[ranks] {path} has {num_inputs} inputs in groups of {group_size} for each scale, "
                f"which {num_ranks} ranks can't share evenly; quantise it with smaller groups",
                name,
            )
