"""msamp_adamw, MS-AMP's AdamW, which keeps its first moment in FP8 and its second in float16."""

from __future__ import annotations

from typing import Any, Dict

import torch
from msamp.optim import LBAdamW

import references
from bounds import ADAMW, E4M3, MANTISSA, assert_rounded_like, relative_error, rounding_noise
from claims import needs, proves


@needs(sm=(8, 9))
@proves(
    "a first step is that of AdamW in float32, and leaves moments that, divided by their scales, carry the noise of "
    "FP8 and of float16",
    seed="C24",
)
def test_first_step(device: str, measured: Dict[str, Any]) -> None:
    start, gradient = torch.randn(96, 80), torch.randn(96, 80)
    parameter = torch.nn.Parameter(start.to(device, copy=True))
    parameter.grad = gradient.to(device)
    optimizer = LBAdamW([parameter], **ADAMW)
    optimizer.step()
    truth = references.adamw(start.double(), [gradient.double()], **ADAMW)
    measured["update"] = relative_error(parameter.detach().cpu() - start.double(), truth - start)
    assert measured["update"] <= 2e-5  # of numbers near 1, whose rounding is 6e-8, an update is a hundredth
    (beta1, beta2), state = ADAMW["betas"], optimizer.state[parameter]
    moments = {
        "exp_avg": ((1 - beta1) * gradient, E4M3),
        "exp_avg_sq": ((1 - beta2) * gradient**2, MANTISSA[torch.float16]),
    }
    for name, (true, mantissa) in moments.items():
        # Of scale and scale_inv a step sets the first alone, and the next one divides by it; float() multiplies by
        # scale_inv, still that of the zeros with which it began.
        state[name].meta.scale_inv.fill_(1 / state[name].meta.scale)
        measured[name] = assert_rounded_like(state[name].float().cpu(), true.double(), *rounding_noise(mantissa))
