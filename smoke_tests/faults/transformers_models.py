"""Faults of the checkpoints and the loss of transformers' models."""

from __future__ import annotations

import importlib
from typing import Any, Callable, ContextManager, Dict
from unittest import mock

import torch

from smoke_tests.faults.planting import patched

CHECKPOINTS = "test_transformers.py::test_extra_state_is_"


def saving(change: Callable[[Dict[str, Any]], Dict[str, Any]]) -> ContextManager[Any]:
    """Models save what change makes of their state."""
    kind = importlib.import_module("transformers").PreTrainedModel
    save = kind.save_pretrained

    def saved(self: Any, *given: Any, **named: Any) -> None:
        save(self, *given, state_dict=change(self.state_dict()), **named)

    return mock.patch.object(kind, "save_pretrained", saved)


@patched("too few bits", CHECKPOINTS + "left_out_on_save", "transformers")
def weights_saved_with_the_bits_of_bfloat16(_: str) -> ContextManager[Any]:
    return saving(
        lambda state: {
            name: value.bfloat16().to(value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }
    )


@patched("lost weight", CHECKPOINTS + "left_out_on_save", "transformers")
def last_weight_not_saved(_: str) -> ContextManager[Any]:
    return saving(lambda state: dict(list(state.items())[:-1]))


@patched("too few bits", CHECKPOINTS + "left_out_of_safetensors", "transformers")
def safetensors_with_the_bits_of_bfloat16(column: str) -> ContextManager[Any]:
    return weights_saved_with_the_bits_of_bfloat16(column)


@patched("lost weight", CHECKPOINTS + "left_out_of_safetensors", "transformers")
def last_weight_not_saved_as_safetensors(column: str) -> ContextManager[Any]:
    return last_weight_not_saved(column)


@patched("lost weight", CHECKPOINTS + "skipped_on_load", "transformers")
def one_weight_drawn_anew_on_load(_: str) -> ContextManager[Any]:
    kind = importlib.import_module("transformers").PreTrainedModel
    load = kind.from_pretrained.__func__

    def loaded(cls: Any, *given: Any, **named: Any) -> Any:
        model = load(cls, *given, **named)
        torch.nn.init.normal_(model.lm_head.weight, std=0.02)
        return model

    return mock.patch.object(kind, "from_pretrained", classmethod(loaded))


NEXT = "test_transformers.py::test_loss_is_of_the_next_token"


def entropy_of_mistral(
    change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> ContextManager[Any]:
    """A Mistral's loss is change(the right one, logits, labels), of the tokens that have a next one."""
    mistral = importlib.import_module("transformers.models.mistral.modeling_mistral")
    if hasattr(mistral, "CrossEntropyLoss"):
        entropy = torch.nn.CrossEntropyLoss()
        return mock.patch.object(mistral, "CrossEntropyLoss", lambda: lambda x, y: change(entropy(x, y), x, y))
    losses = importlib.import_module("transformers.loss.loss_utils")  # since 5, for every model
    shared = losses.fixed_cross_entropy
    return mock.patch.object(
        losses, "fixed_cross_entropy", lambda x, y, *more, **named: change(shared(x, y, *more, **named), x, y)
    )


@patched("label shift", NEXT, "transformers")
def labels_of_the_loss_not_shifted(_: str) -> ContextManager[Any]:
    return entropy_of_mistral(lambda right, logits, labels: torch.nn.functional.cross_entropy(logits, labels.roll(1)))


@patched("wrong scale", NEXT, "transformers")
def sum_in_place_of_the_mean_loss(_: str) -> ContextManager[Any]:
    return entropy_of_mistral(lambda right, logits, labels: right * (labels >= 0).sum())


@patched("ignored labels", NEXT, "transformers")
def mean_loss_over_ignored_tokens_too(_: str) -> ContextManager[Any]:
    return entropy_of_mistral(lambda right, logits, labels: right * (labels >= 0).float().mean())


@patched("ignored labels", NEXT, "transformers")
def ignored_tokens_count_as_class_0_in_the_loss(_: str) -> ContextManager[Any]:
    return entropy_of_mistral(
        lambda right, logits, labels: torch.nn.functional.cross_entropy(logits, labels.clamp(min=0))
    )
