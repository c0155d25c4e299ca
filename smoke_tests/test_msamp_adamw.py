"""msamp_adamw, MS-AMP's AdamW, which keeps its first moment in FP8 and its second in float16."""

from __future__ import annotations

from typing import Any, Dict

import torch
from msamp.optim import LBAdamW

from smoke_tests.claims import needs, proves
from smoke_tests.operators import references
from smoke_tests.operators.bounds import ADAMW, E4M3, MANTISSA, assert_rounded_like, relative_error, rounding_noise

FLOAT8 = torch.float8_e4m3fn


@needs(sm=(8, 9))
@proves(
    "the first of four steps is that of AdamW in float32, the others differ by what FP8 takes of the first moment, and "
    "after each the moments, divided by the scales that the next step reads, carry the noise of FP8 and of float16",
    seed="C24",
)
def test_steps(device: str, measured: Dict[str, Any]) -> None:
    start, gradients = torch.randn(96, 80), [torch.randn(96, 80) for _ in range(4)]
    parameter = torch.nn.Parameter(start.to(device, copy=True))
    optimizer = LBAdamW([parameter], **ADAMW)
    first, second = torch.zeros(96, 80).double(), torch.zeros(96, 80).double()
    (beta1, beta2), least = ADAMW["betas"], rounding_noise(E4M3)[0]
    for step, gradient in enumerate(gradients, start=1):
        parameter.grad = gradient.to(device)
        optimizer.step()
        truth = references.adamw(start.double(), [gradient.double() for gradient in gradients[:step]], **ADAMW)
        error = relative_error(parameter.detach().cpu() - start.double(), truth - start)
        measured[f"update {step}"] = error
        if step == 1:
            assert error <= 2e-5  # an update is a hundredth of numbers near 1, whose rounding is 6e-8
        else:  # in all updates but the first, at least two thirds of a moment were rounded before
            assert least / 4 <= error <= 2 * least, f"the update of step {step} is off by {error:.3g}"
        first = beta1 * first + (1 - beta1) * gradient.double()
        second = beta2 * second + (1 - beta2) * gradient.double() ** 2
        state = optimizer.state[parameter]
        for name, dtype, true in (("exp_avg", FLOAT8, first), ("exp_avg_sq", torch.float16, second)):
            # scale_inv is still that of the zeros with which it began: no step reads it.
            moment = state[name].value.view(dtype).cpu().double() / float(state[name].meta.scale)
            floor, ceiling = rounding_noise(E4M3 if dtype is FLOAT8 else MANTISSA[dtype])
            # Each step adds its rounding, in quadrature, to what is left of those before.
            measured[name] = assert_rounded_like(moment, true, floor, ceiling * step**0.5)
