"""The faults that are planted to see that a claim catches each: what is wrong, where, and which claim has to fail.

A fault of an operator changes what goes into an implementation or what comes out of it, and so fits all of them; what
computes in between is the implementation's own, so that a claim which fails, fails because of the fault.

Each module adds its faults to planting.FAULTS when it is imported, which this package does.
"""

from smoke_tests.faults import (
    adamw,
    environment,
    float8,
    operators,
    planting,
    rope,
    survivors,
    transformer_engine_layers,
    transformers_models,
)

__all__ = [
    "adamw",
    "environment",
    "float8",
    "operators",
    "planting",
    "rope",
    "survivors",
    "transformer_engine_layers",
    "transformers_models",
]
