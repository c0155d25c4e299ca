"""The kernels that a call ran, on the GPU or in ATen."""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Listener(TorchDispatchMode):  # type: ignore[misc]
    """Records the name of every operator that reaches a backend."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operators_run(function: Callable[[], object]) -> Set[str]:
    """Names of the ATen operators (without "aten::") that a call dispatched, backward included if it calls that."""
    listener = _Listener()
    with listener:
        function()
    return listener.names


def gpu_kernels_run(function: Callable[[], object]) -> Set[str]:
    """Names of the kernels that a call ran on the GPU, as CUPTI names them, without copies, fills and annotations."""
    return set(gpu_launches(function))


def gpu_launches(function: Callable[[], object]) -> Dict[str, List[float]]:
    """Kernel -> the milliseconds of each of its launches, for the kernels that a call ran on the GPU."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        torch.empty(1, device="cuda").fill_(0)  # the first kernel may be lost
        torch.cuda.synchronize()
        function()
        torch.cuda.synchronize()
    launches: Dict[str, List[float]] = {}
    for event in profiler.events():
        # Optimizer.step#AdamW.step is an annotation, and {lambda()#1} a part of a kernel's name.
        none = event.name.startswith(("Memcpy", "Memset")) or "#" in event.name.partition("(")[0]
        if event.device_type == torch.autograd.DeviceType.CUDA and not none:
            launches.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e3)
    return launches


def cuda_errors() -> List[str]:
    """The pending CUDA errors of unchecked launches, in this thread and in autograd's backward thread.

    Each thread has its own error; a checked launch raises and clears it.
    """
    errors = []
    in_backward = lambda: torch.ones(1, device="cuda", requires_grad=True).mul(2).backward()  # noqa: E731
    for launch in (lambda: torch.ones(1, device="cuda").add_(1), in_backward, torch.cuda.synchronize):
        try:
            launch()
        except RuntimeError as error:
            errors.append(str(error).splitlines()[0])
    return errors


# --- FP8 products ---

# Kernels that multiply matrices, by the names that cuBLAS, CUTLASS and Transformer Engine give them.
PRODUCT = re.compile(r"gemm|nvjet|xmma|cutlass.*(mma|Kernel2|device_kernel)|splitK|wgmma", re.IGNORECASE)
ATTENTION = re.compile(r"sdpa|fmha|flash(::|_fwd|_bwd)")
FLOAT8 = re.compile(r"nvjet(_sm\d+)?_[qr]{2}tst|e4m3|e5m2")  # cuBLAS: q is e4m3, r is e5m2


def products(names: Iterable[str]) -> Set[str]:
    """The kernels among these that multiply matrices outside attention."""
    return {name for name in names if PRODUCT.search(name) and not ATTENTION.search(name)}


def assert_float8_products(step: Callable[[bool], object], exactly: int, mixed: bool = False) -> Dict[str, str]:
    """Assert that all products of step(True) run as FP8 kernels, and none of step(False): a calibration pair.

    exactly: how many products run in FP8. A trained layer has three, a fourth where its output is computed again, and
    two where its input needs no gradient. A kernel that adds up the parts of a product has no FP8 in its name and does
    not count. mixed: some products of step(True) stay in high precision. Returns the kernels, for the evidence.
    """
    launched, other = (gpu_launches(lambda on=on: step(on)) for on in (True, False))  # type: ignore[misc]
    in_float8, control = products(launched), products(other)
    assert control, "the control ran no product at all"
    assert not any(FLOAT8.search(name) for name in control), f"FP8 in the control: {sorted(control)}"
    plain = {name for name in in_float8 if not FLOAT8.search(name)}
    counts = {name: len(launched[name]) for name in sorted(in_float8 - plain)}
    count = sum(counts.values())
    in_high = f"; in high precision {sorted(plain)}"
    assert count == exactly > 0, f"{count} products ran in FP8, not {exactly}: {counts}{in_high}"
    assert bool(plain) == mixed, f"no FP8 kernel: {sorted(plain)}" if plain else "none stays in high precision"
    return {"fp8": sorted(in_float8 - plain)[0][:80], "control": sorted(control)[0][:80]}
