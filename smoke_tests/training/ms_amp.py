"""MS-AMP beside torch's own tensors: its layers and its AdamW in a model, and both in a checkpoint.

Every linear layer but the head keeps its weight in float16 with a scale, multiplies in FP8 and keeps the gradient of
its weight in FP8; embedding, norms, head and their gradients stay float32, and autocast computes them in bfloat16.
AdamW's moments are float32 at O1, and FP8 and float16 at O2, those of the float32 parameters too.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, Iterable, Tuple

import torch

PRECISIONS = ("ms-amp.O1", "ms-amp.O2")
# Options that do not work with MS-AMP, and why.
WITHOUT = {
    "recompute": "its layers keep their inputs anyway",
    "compile": "its weights are not torch tensors",
    "graphs": "its layers decide on the host, and replace their gradients",
    "guard": "its layers cannot compute in high precision",
}


def prepared(
    model: torch.nn.Module, groups: Iterable[Dict[str, Any]], precision: str, **settings: Any
) -> Tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model with MS-AMP's layers, all but the head, and its AdamW with these settings."""
    import msamp  # MS-AMP replaces functions of torch, which a run in another precision must keep

    model.head.use_fp32_linear = True  # MS-AMP's own name for a layer that stays
    converted: Tuple[torch.nn.Module, torch.optim.Optimizer] = msamp.initialize(
        model, torch.optim.AdamW(groups, **settings), precision.partition(".")[2]
    )
    return converted


def clip_grad_norm_(parameters: Iterable[Any], largest: float) -> float:
    """Clip as torch's does; the norm, infinite where a gradient was not finite, since FP8 has no infinity for it."""
    import msamp

    parameters = list(parameters)
    scaled = [each.grad for each in parameters if each.grad is not None and not isinstance(each.grad, torch.Tensor)]
    finite = bool(torch.isfinite(torch.stack([gradient.meta.amax[0] for gradient in scaled])).all())
    norm = float(msamp.clip_grad_norm_(parameters, largest))
    return norm if finite else math.inf


def plain(tensor: Any) -> torch.Tensor:
    """A torch tensor unchanged, or the float32 value of an MS-AMP tensor, which keeps every bit."""
    unscaled: torch.Tensor = tensor if isinstance(tensor, torch.Tensor) else tensor.float()
    return unscaled


# --- in a checkpoint, which contains only torch tensors and numbers ---


def like(weights: Dict[str, torch.Tensor], own: Dict[str, Any]) -> Dict[str, Any]:
    """Plain weights as the tensors that a model's own state dict has by these names."""
    scaled = {name: each for name, each in own.items() if not isinstance(each, torch.Tensor)}
    return {
        name: weight.to(scaled[name].device).cast(scaled[name].qtype) if name in scaled else weight
        for name, weight in weights.items()
    }


def scales_of(model: torch.nn.Module) -> Dict[str, torch.Tensor]:
    """What MS-AMP's layers know of the tensors before, by name: these very tensors; empty in another precision."""
    scales = {}
    for name, layer in model.named_modules():
        metas = getattr(layer, "scaling_metas", None) or {}
        for what, meta in metas.items():
            for part in ("scale", "scale_inv", "amax", "amax_counter"):
                scales[f"{name}.{what}.{part}"] = getattr(meta, part)
        if metas:  # of the weight before it was rounded; its scale in FP8 follows from that
            scales[f"{name}.weight.amax"] = layer.weight.meta.amax
    return scales


def packed(optimizer: torch.optim.Optimizer) -> Dict[str, Any]:
    """The state of an optimizer, of any, with value and scale in place of each of MS-AMP's tensors."""
    return _with_moments(
        optimizer.state_dict(),
        lambda each: {"value": each.value, "scale": float(each.meta.scale)} if hasattr(each, "meta") else each,
    )


def unpacked(state: Dict[str, Any]) -> Dict[str, Any]:
    """The inverse of packed()."""

    def scaled(each: Any) -> Any:
        if not isinstance(each, dict):
            return each
        from msamp.common.dtype import Dtypes
        from msamp.common.tensor import ScalingMeta, ScalingTensor

        value = each["value"].cuda()
        meta = ScalingMeta(Dtypes.dtype_to_qtype[value.dtype])
        meta.scale = each["scale"]  # as MS-AMP's AdamW leaves it: a number
        return ScalingTensor(value, meta)

    return _with_moments(state, scaled)


def _with_moments(state: Dict[str, Any], change: Callable[[Any], Any]) -> Dict[str, Any]:
    moments = {index: {name: change(each) for name, each in own.items()} for index, own in state["state"].items()}
    return {**state, "state": moments}
