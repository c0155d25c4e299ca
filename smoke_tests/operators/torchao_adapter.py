"""torchao's linear layers in float8."""

from __future__ import annotations

from typing import Callable

import torch


def torchao_linear(model: torch.nn.Module, keep: Callable[[str], bool], recipe: str) -> torch.nn.Module:
    """torchao's float8 training layers; where the model is on no FP8 GPU their products are emulated in float32."""
    import dataclasses

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # The model's device decides, whatever GPU the machine has: on a CPU, _scaled_mm does not support rowwise scales.
    emulate = not next(model.parameters()).is_cuda or torch.cuda.get_device_capability() < (8, 9)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: not keep(name))
