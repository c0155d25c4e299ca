"""Which operators really ran."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Set, Tuple

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
