"""How much memory the state of training takes: computed on paper, and measured from its tensors."""

from __future__ import annotations

from typing import Any, Dict

import torch

from smoke_tests.training import ms_amp
from smoke_tests.training.precision import column_of


def bytes_per_parameter(
    precision: str, weights: str = "float32", moments: str = "float32", remainders: bool = False
) -> Dict[str, float]:
    """The bytes that each parameter of a linear layer costs, by what they are for.

    precision, weights: as of pretrain.py, the latter the dtype of gradients too. moments: that of AdamW's two; torch
    takes the weights', apex float32. remainders: whether AdamW keeps beside them the 16 bits that bfloat16 weights
    lack, as Transformer Engine's can. copies: what a forward keeps for its backward beside the weights.
    ValueError of MS-AMP's precisions, which choose all of it themselves.
    Seed 001's 10 bytes are bfloat16 weights and float32 moments, without the gradients: 2 + 8.
    """
    if precision in ms_amp.PRECISIONS:
        raise ValueError(f"{precision} chooses its own dtypes: ask memory.held() of a run")
    of_weight, of_moment = (
        float(torch.empty((), dtype=getattr(torch, dtype)).element_size()) for dtype in (weights, moments)
    )
    column, copies = column_of(precision), 0.0  # no copies: torchao casts a weight at each use, forward and backward
    if column.startswith("transformer-engine"):
        copies = 2.0  # the weight in FP8, and its transpose
    elif column == "torch" and weights == "float32" and precision != "float32":
        copies = 2.0  # autocast's bfloat16
    return {"weights": of_weight, "gradients": of_weight, "moments": 2 * of_moment + 2.0 * remainders, "copies": copies}


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Dict[str, float]:
    """Bytes per parameter that weights, gradients and moments really hold."""
    parameters = list(model.parameters())
    state = [value for each in optimizer.state.values() for value in each.values() if torch.is_tensor(value)]
    count = sum(parameter.numel() for parameter in parameters)

    def size(tensors: Any) -> float:
        return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors) / count)

    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return {"weights": size(parameters), "gradients": size(gradients), "moments": size(t for t in state if t.dim())}
