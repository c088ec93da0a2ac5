"""A tiny random model of every architecture of mlx-lm's, and what is compared with it.

Each has every kind of layer that its architecture mixes: with a window and without, dense and with
experts, recurrent and with attention, with K/V of its own and shared. Heads are grouped where they
can be, and windows are of 8 tokens.
"""

from helpers.model_zoo.configs import ARCHITECTURES, Config, config_of
from helpers.model_zoo.models import make, make_from_config

__all__ = ["ARCHITECTURES", "Config", "config_of", "make", "make_from_config"]
