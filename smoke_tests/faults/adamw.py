"""Faults of AdamW: a factory(parameters, lr, betas, eps, weight_decay) of optimizers."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import torch

from smoke_tests.faults.planting import CASTS, FAULTS, TABLE, Call, Fault, Wrap, in_table, wrong


def stepping(make: Call, before: Optional[Call] = None, after: Optional[Call] = None, **replaced: Any) -> Call:
    """A factory with other settings, whose optimizers call before(parameters, settings) and after(optimizer, ...)."""

    def made(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        optimizer: torch.optim.Optimizer = make(parameters, **{**settings, **replaced})
        own = type(optimizer).step

        def step(self: torch.optim.Optimizer, *given: Any) -> None:
            with torch.no_grad():
                if before:
                    before(parameters, settings)
                own(self, *given)
                if after:
                    after(self, parameters, settings)

        optimizer.step = step.__get__(optimizer)
        return optimizer

    return made


def setting(name: str, factor: float) -> Wrap:
    """Multiplies one setting of the optimizer."""
    return lambda make: lambda parameters, **given: make(parameters, **{**given, name: given[name] * factor})


@wrong("AdamW as L2", "adamw", by="test_adamw_decays_without_gradient")
def decay_added_to_the_gradient(make: Call) -> Call:
    def add(parameters: List[torch.Tensor], settings: Dict[str, Any]) -> None:
        for parameter in parameters:
            parameter.grad += settings["weight_decay"] * parameter

    return stepping(make, add, weight_decay=0.0)


@wrong("another formula", "adamw")
def decay_after_the_update(make: Call) -> Call:
    def decay(_: Any, parameters: List[torch.Tensor], settings: Dict[str, Any]) -> None:
        for parameter in parameters:
            parameter *= 1 - settings["lr"] * settings["weight_decay"]

    return stepping(make, after=decay, weight_decay=0.0)


@wrong("stale state", "adamw")
def gradient_of_the_step_before(make: Call) -> Call:
    def delay(parameters: List[Any], settings: Dict[str, Any]) -> None:
        for parameter in parameters:
            now = parameter.grad.clone()
            parameter.grad.copy_(getattr(parameter, "before", now))
            parameter.before = now

    return stepping(make, delay)


@wrong("too few bits", "adamw")
def moments_rounded_to_bfloat16(make: Call) -> Call:
    def shorten(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())

    return stepping(make, after=shorten)


@wrong("another formula", "adamw")
def betas_swapped(make: Call) -> Call:
    return lambda parameters, betas, **others: make(parameters, betas=betas[::-1], **others)


for _name, _setting, _factor, _claim in (
    ("learning rate 2 percent off", "lr", 1.02, "test_adamw"),
    ("eps ten times larger", "eps", 10, "test_adamw"),
    ("decay 2 percent too large", "weight_decay", 1.02, "test_adamw_decays_without_gradient"),
    ("no decay", "weight_decay", 0, "test_adamw_decays_without_gradient"),
):
    _plant = in_table("adamw", setting(_setting, _factor))
    FAULTS.append(Fault(_name, "wrong setting", "adamw", "", "", (f"{TABLE}::{_claim}",), _plant))


@wrong("beyond a tile", "adamw")
def elements_from_65536_on_move_2_percent_less(make: Call) -> Call:
    held: Dict[int, torch.Tensor] = {}

    def note(parameters: List[torch.Tensor], _: Any) -> None:
        held.update({id(parameter): parameter.detach().clone() for parameter in parameters})

    def less(_: Any, parameters: List[torch.Tensor], __: Any) -> None:
        for parameter in parameters:
            parameter.data.view(-1)[65536:].lerp_(held[id(parameter)].view(-1)[65536:], 0.02)

    return stepping(make, note, less)


@wrong("beyond a launch", "adamw", by=("test_adamw", "test_adamw_decays_without_gradient"))
def tensors_from_the_37th_on_stay(make: Call) -> Call:
    def made(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        # The training that ordinary tests look at has far fewer tensors.
        optimizer: torch.optim.Optimizer = make(parameters[:36], **settings)
        return optimizer

    return made


@wrong("another kernel", "adamw", by=("test_own_adamw_ran", f"{CASTS}::test_fused_adamw_ran"))
def an_unfused_adamw_beside_the_fused(make: Call) -> Call:
    def beside(optimizer: Any, parameters: List[Any], settings: Dict[str, Any]) -> None:
        copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
        for copy, parameter in zip(copies, parameters):
            copy.grad = None if parameter.grad is None else parameter.grad.clone()
        torch.optim.AdamW(copies, foreach=False, **settings).step()

    return stepping(make, after=beside)


@wrong("another kernel", "adamw", by=("test_own_adamw_ran", f"{CASTS}::test_fused_adamw_ran"), column="torch")
def one_operator_per_formula(make: Call) -> Call:
    return lambda parameters, **settings: torch.optim.AdamW(parameters, foreach=False, **settings)
