"""Does the guard work? Plant faults in torchao's FP8 while a tiny model trains, and watch runs without a fault.

    python -m smoke_tests.training.guard_proof OUT.json [--clean 20]

Each faulty run has one fault from step 50 to step 105, in the middle of the third period of 20 and of the sixth.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, ContextManager, Dict, List, NamedTuple
from unittest import mock

import torch

from smoke_tests.training.guard import Guard
from smoke_tests.training.options import Options
from smoke_tests.training.precision import mantissas
from smoke_tests.training.trainer import Run

EVERY, COMPARED = 20, 4
FROM, UNTIL, STEPS = 50, 105, 160
BATCH = 8  # windows of 64 bytes
PRECISIONS = ("torchao.tensorwise", "torchao.rowwise")
LAYER = "blocks.1.feed_forward.down"  # the layer that some faults affect

Patch = Callable[[], ContextManager[Any]]


class Planted(NamedTuple):
    """A fault: the function that plants it in a run, and the one that is called before each step with it."""

    plant: Patch
    each_step: Callable[[], None] = lambda: None


def _replaced(file: str, name: str, make: Callable[[Any], Any]) -> Patch:
    """A function of torchao.float8 in place of which make(function) is called."""

    def patch() -> ContextManager[Any]:
        module = importlib.import_module("torchao.float8." + file)
        return mock.patch.object(module, name, make(getattr(module, name)))

    return patch


def _forward(run: Run, compute: Callable[[Any, torch.nn.Module, torch.Tensor], torch.Tensor]) -> Patch:
    """Every FP8 layer of a run computes compute(its own forward, layer, x)."""

    def patch() -> ContextManager[Any]:
        from torchao.float8.float8_linear import Float8Linear

        own = Float8Linear.forward
        return mock.patch.object(Float8Linear, "forward", lambda layer, x: compute(own, layer, x))

    return patch


def scale_frozen(run: Run) -> Planted:
    """The scales of the model at this point are used for all steps; planted before the first step."""
    scales: List[torch.Tensor] = []
    used = [0]

    def make(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def frozen(*arguments: Any, **named: Any) -> torch.Tensor:
            if used[0] == len(scales):
                scales.append(compute(*arguments, **named))
            used[0] += 1
            return scales[used[0] - 1]

        return frozen

    patch = _replaced("float8_scaling_utils", "tensor_to_scale", make)
    with patch():
        run.gradients(0)
    return Planted(patch, lambda: used.__setitem__(0, 0))


def gradient_dropped(run: Run) -> Planted:
    """One layer's weight gets no gradient."""
    faulty = run.model.get_submodule(LAYER)

    def compute(own: Any, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = own(layer, x)
        if layer is not faulty:
            return output
        layer.weight.requires_grad_(False)
        try:
            output = own(layer, x)
        finally:
            layer.weight.requires_grad_(True)
        return output + 0.0 * layer.weight.sum()

    return Planted(_forward(run, compute))


def not_a_number(run: Run) -> Planted:
    """One value of one layer's output is NaN."""
    faulty = run.model.get_submodule(LAYER)

    def compute(own: Any, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = own(layer, x)
        if layer is faulty:
            output = output.clone()
            output[0, 0, 0] = float("nan")
        return output

    return Planted(_forward(run, compute))


def amax_overflowed(run: Run) -> Planted:
    """The largest magnitude is taken to be 16 times smaller than it is, so that values near it overflow."""

    def make(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *arguments, **named: 16 * compute(*arguments, **named)

    return Planted(_replaced("float8_scaling_utils", "tensor_to_scale", make))


def stale_weight(run: Run) -> Planted:
    """Each layer computes with the weight that it had when the fault began."""
    copies: Dict[int, torch.Tensor] = {}

    def compute(own: Any, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        weight = layer.weight
        stale = copies.setdefault(id(layer), weight.detach().clone())
        now = weight.data
        weight.data = stale
        try:
            output: torch.Tensor = own(layer, x)
        finally:
            weight.data = now
        return output

    return Planted(_forward(run, compute))


def wrong_format(run: Run) -> Planted:
    """Values that should be e4m3 are e5m2: one bit of mantissa less."""

    def make(cast: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tensor, dtype, *rest, **named: cast(tensor, torch.float8_e5m2, *rest, **named)

    return Planted(_replaced("float8_linear", "hp_tensor_to_float8_dynamic", make))


FAULTS: Dict[str, Callable[[Run], Planted]] = {
    "scale frozen": scale_frozen,
    "gradient dropped": gradient_dropped,
    "NaN": not_a_number,
    "overflowed amax": amax_overflowed,
    "stale weight copy": stale_weight,
    "wrong format": wrong_format,
}


def options(seed: int, precision: str, steps: int) -> Options:
    """The options of all runs: the tiny model on windows of 64 bytes."""
    return Options(
        model="tiny",
        precision=precision,
        steps=steps,
        seed=seed,
        learning_rate=3e-3,
        schedule="constant",
        batch_size=BATCH,
        device="cpu",
    )


def losses_of(seed: int, steps: int = STEPS) -> List[float]:
    """The losses of a run in high precision."""
    run = Run(options(seed, "float32", steps))
    return [run.update(step)["loss"] for step in range(steps)]


def guarded_run(seed: int, precision: str, fault: str = "", steps: int = STEPS) -> Dict[str, Any]:
    """A run under the guard, with or without a fault: its losses, and what the guard did at which step."""
    run = Run(options(seed, precision, steps))
    planted = FAULTS[fault](run) if fault else Planted(contextlib.nullcontext)
    active = [False]

    def step_of(step: int) -> Dict[str, float]:
        planted.each_step()
        with planted.plant() if active[0] else contextlib.nullcontext():
            return run.update(step)

    began = time.perf_counter()
    guard = Guard(
        step_of,
        run.model,
        run.optimizer,
        every=EVERY,
        steps=COMPARED,
        seed=seed,
        mantissas=mantissas(precision),
        loss_of=lambda row: float(row["loss"]),
    )
    losses, events = [], []
    for step in range(steps):
        active[0] = FROM <= step < UNTIL
        losses.append(guard(step)["loss"])
        events += [{"step": step, "state": guard.state, **event} for event in guard.news()]
    share = guard.seconds / (time.perf_counter() - began)
    return {"fault": fault, "precision": precision, "seed": seed, "losses": losses, "events": events, "share": share}


def judged(run: Dict[str, Any], plain: List[List[float]]) -> Dict[str, Any]:
    """The verdict on a faulty run, given the losses of plain runs, the first of which has its seed."""
    kinds = [(event["kind"], event["step"]) for event in run["events"]]
    fell = [step for kind, step in kinds if kind == "fallback" and step >= FROM]
    back = [step for kind, step in kinds if kind == "return"]
    ends = [statistics.mean(losses[-20:]) for losses in plain]
    gap = abs(statistics.mean(run["losses"][-20:]) - ends[0])
    return {
        "detected after": fell[0] - FROM if fell else None,
        "false alarms": sum(kind == "fallback" and step < FROM for kind, step in kinds),
        "returned at": back[0] if back else None,
        "gap at the end": gap,
        "spread of seeds": max(ends) - min(ends),
    }


def passed(run: Dict[str, Any]) -> bool:
    """Whether the fault alone was noticed by the next window or those that vote, and FP8 returned and ended well."""
    noticed = run["detected after"] is not None and run["detected after"] < 2 * EVERY + 4 * COMPARED
    ended = run["returned at"] is not None and run["gap at the end"] <= run["spread of seeds"]
    return noticed and ended and not run["false alarms"]


def main(arguments: List[str]) -> int:
    """All runs, into one file; 1 if the guard failed in one of them."""
    parser = argparse.ArgumentParser(prog="guard_proof")
    parser.add_argument("out", type=Path)
    parser.add_argument("--clean", type=int, default=20)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    plain = [losses_of(seed) for seed in range(5)]
    result: Dict[str, Any] = {"every": EVERY, "compared": COMPARED, "from": FROM, "until": UNTIL, "plain": plain}
    result.update(faulty=[], clean=[])
    for precision in PRECISIONS:
        for fault in FAULTS:
            run = guarded_run(0, precision, fault)
            result["faulty"].append({**run, **judged(run, plain)})
            print(precision, fault, judged(run, plain), flush=True)
    for seed in range(asked.clean):
        precision = PRECISIONS[seed % 2]
        run = guarded_run(seed, precision)
        alarms = sum(event["kind"] not in ("good", "doubt") for event in run["events"])
        result["clean"].append({**run, "false alarms": alarms})
        print(precision, "clean", seed, [event["kind"] for event in run["events"]], flush=True)
    asked.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    failed = [run for run in result["faulty"] if not passed(run)] + [
        run for run in result["clean"] if run["false alarms"]
    ]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
