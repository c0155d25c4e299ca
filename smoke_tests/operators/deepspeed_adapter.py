"""DeepSpeed's AdamW for a CPU."""

from __future__ import annotations

from typing import Any

import torch

from smoke_tests.operators.torch_adapter import Parameters


def deepspeed_cpu_adamw(parameters: Parameters, **settings: Any) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(list(parameters), adamw_mode=True, **settings)
    return optimizer
