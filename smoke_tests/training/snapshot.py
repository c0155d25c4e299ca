"""Copies of everything that a step changes, on its own device or in the host's memory."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, NamedTuple, Sequence

import torch

from smoke_tests.training import checkpoint


class Hosted(NamedTuple):
    """A tensor of a device, copied to the host: pinned, where the device is a GPU."""

    values: torch.Tensor
    device: torch.device


class Snapshot:
    """The state of a model and of the other parts of a training loop at one moment, and of the random generators.

    parts: the model first; the others have state_dict() and load_state_dict(). host: keep the copies in the host's
    memory. A copy takes as many bytes as the parts: 12 per parameter with float32 weights and AdamW's two moments.
    """

    def __init__(self, parts: Sequence[Any], host: bool) -> None:
        model, *others = parts
        copy = to_host if host else to_device
        self._model = mapped(checkpoint.state_of(model), copy)
        self._others = mapped([part.state_dict() for part in others], copy)
        self._random = checkpoint.random_state()

    def restore(self, parts: Sequence[Any]) -> None:
        """Bring the parts back to that moment; an optimizer gets tensors of its own, which it changes in place."""
        model, *others = parts
        checkpoint.restore(model, mapped(self._model, values_of))
        for part, state in zip(others, self._others):
            part.load_state_dict(mapped(state, to_device))
        checkpoint.restore_random_state(self._random)

    def weights(self, names: Iterable[str]) -> Dict[str, torch.Tensor]:
        """The model's tensors of these names, where the snapshot keeps them."""
        return {name: values_of(self._model["model"][name]) for name in names}


def to_host(tensor: torch.Tensor) -> Hosted:
    """Copy a tensor to the host."""
    values = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return Hosted(values.copy_(tensor.detach()), tensor.device)


def to_device(tensor: Any) -> torch.Tensor:
    """A copy of a tensor, or of what to_host made of it, on its own device."""
    return tensor.values.to(tensor.device, copy=True) if isinstance(tensor, Hosted) else tensor.detach().clone()


def values_of(tensor: Any) -> torch.Tensor:
    """A tensor, or what to_host made of it, where it is."""
    return tensor.values if isinstance(tensor, Hosted) else tensor


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A nested state with change(tensor) in place of each tensor."""
    if isinstance(tree, (torch.Tensor, Hosted)):
        return change(tree)
    if isinstance(tree, dict):
        return type(tree)((key, mapped(value, change)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return type(tree)(mapped(value, change) for value in tree)
    return tree
