"""How well FP8's range holds what each layer multiplies: the largest magnitudes, and the shares beyond either end.

Early warning: outliers, as SwiGLU grows them over many steps (arXiv 2409.12517), widen a tensor's range until FP8
rounds its small values to zero, or, where the scale is that of earlier steps, cuts its large ones off.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch

from smoke_tests.training.precision import Compute


class Format(NamedTuple):
    """The range of an FP8 format: its largest value, from where values round beyond it, up to where they round to 0."""

    largest: float
    beyond: float
    zero: float


FORMATS = {3: Format(448.0, 464.0, 2.0**-10), 2: Format(57344.0, 61440.0, 2.0**-17)}  # e4m3 and e5m2, by mantissa
# The shares from which there is a warning; in sound runs of the tiny model they stay below a fifth of these.
UNDERFLOW, SATURATION = 0.25, 0.001


def shares(x: torch.Tensor, form: Format, scale: Optional[torch.Tensor] = None, rows: bool = False) -> torch.Tensor:
    """[largest magnitude, share of the values but 0 that FP8 rounds to 0, share that it cuts off] of a tensor.

    scale: what the tensor is multiplied by before the cast; by default what brings its largest magnitude, or with
    `rows` that of each row, to the format's largest value.
    """
    magnitude = x.detach().abs().float()
    amax = magnitude.amax()
    if scale is None:
        scale = form.largest / (magnitude.amax(-1, keepdim=True) if rows else amax).clamp(min=2.0**-100)
    scaled, some = magnitude * scale, magnitude > 0
    zeroed = ((scaled <= form.zero) & some).sum() / some.sum().clamp(min=1)
    return torch.stack([amax, zeroed.float(), (scaled >= form.beyond).float().mean()])


def scale_of(layer: torch.nn.Module, way: str, index: int) -> Optional[torch.Tensor]:
    """The scale that Transformer Engine's delayed scaling will use, or None of a layer that scales each tensor anew."""
    meta: Dict[str, Any] = getattr(layer, "fp8_meta", {})
    if not type(meta.get("recipe")).__name__.startswith("Delayed") or way not in meta:
        return None
    scale: torch.Tensor = meta[way].scale[index]
    return scale


class Shares:
    """The largest shares of each layer's input, weight and output gradient over some steps.

    layers: by name. mantissas: bits forward and backward; where both are 3 a row has its own scale.
    """

    def __init__(self, layers: Dict[str, torch.nn.Module], mantissas: Tuple[int, int]) -> None:
        self._names = {layer: name for name, layer in layers.items()}
        self._forms, self._rows = [FORMATS[bits] for bits in mantissas], mantissas == (3, 3)
        self._largest: Dict[Tuple[str, str], torch.Tensor] = {}

    def watched(self, compute: Compute) -> Compute:
        """The same computation of a layer, with its tensors noted."""
        forward, backward = self._forms

        def watching(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            name = self._names[layer]
            self._note(name, "input", shares(x, forward, scale_of(layer, "scaling_fwd", 0), self._rows))
            self._note(name, "weight", shares(layer.weight, forward, scale_of(layer, "scaling_fwd", 1), self._rows))
            output = compute(layer, x)
            if output.requires_grad:
                scale = scale_of(layer, "scaling_bwd", 0)
                output.register_hook(
                    lambda grad: self._note(name, "gradient", shares(grad, backward, scale, self._rows))
                )
            return output

        return watching

    def _note(self, name: str, what: str, numbers: torch.Tensor) -> None:
        before = self._largest.get((name, what))
        self._largest[name, what] = numbers if before is None else torch.maximum(before, numbers)

    def take(self) -> Dict[str, Dict[str, List[float]]]:
        """Layer -> input, weight, gradient -> [amax, underflow, saturation] since the last call."""
        table: Dict[str, Dict[str, List[float]]] = {}
        for (name, what), numbers in self._largest.items():
            table.setdefault(name, {})[what] = numbers.tolist()
        self._largest = {}
        return table


def warning(table: Dict[str, Dict[str, List[float]]]) -> str:
    """A sentence about the layer that is farthest beyond a limit, and how many others are; "" if none is."""
    found: List[Tuple[float, str]] = []
    for name, tensors in table.items():
        for what, (amax, zeroed, cut) in tensors.items():
            text = f"{name}: FP8 rounds {zeroed:.1%} of its {what} to 0 and cuts {cut:.2%} off (amax {amax:.3g})"
            found.append((max(zeroed / UNDERFLOW, cut / SATURATION), text))
    far = sorted((each for each in found if each[0] > 1), reverse=True)
    return far[0][1] + (f"; {len(far) - 1} more tensors are beyond a limit" if far[1:] else "") if far else ""
