"""The configurations by architecture, which is the name of a module in ``mlx_lm.models``."""

from __future__ import annotations

import copy
import dataclasses

from mlx_lm.utils import _get_classes

from helpers.model_zoo.attention import ATTENTION
from helpers.model_zoo.common import COMMON, Config
from helpers.model_zoo.experts import EXPERTS
from helpers.model_zoo.latents import LATENTS
from helpers.model_zoo.recurrent import RECURRENT
from helpers.model_zoo.wrappers import WRAPPERS

CONFIGS: dict[str, Config] = ATTENTION | EXPERTS | LATENTS | RECURRENT | WRAPPERS
ARCHITECTURES = sorted(CONFIGS, key=str.lower)


def config_of(architecture: str) -> Config:
    """What its ``config.json`` would say."""
    own = {"model_type": architecture} | CONFIGS[architecture]
    if "text_config" not in own:
        _, args_class = _get_classes(own)
        fields = {field.name for field in dataclasses.fields(args_class)}
        own = {name: value for name, value in COMMON.items() if name in fields} | own
    return copy.deepcopy(own)
