"""Which kernels really ran."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Set, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Listener(TorchDispatchMode):  # type: ignore[misc]
    """Notes the name of every operator that reaches a backend."""

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
    """Names of the kernels that a call ran on the GPU, as CUPTI gives them; copies and fills are none."""
    torch.cuda.synchronize()  # what was launched before is not this call's
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        function()
        torch.cuda.synchronize()
    on_gpu = (event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return {name for name in on_gpu if not name.startswith(("Memcpy", "Memset"))}


def kernels_run(function: Callable[[], object], device: str) -> Set[str]:
    """What ran: kernels on a GPU, ATen operators on a CPU."""
    return gpu_kernels_run(function) if device == "cuda" else operators_run(function)
