"""The guard: compares training in FP8 with high precision from time to time, and falls back if they differ.

    guard = Guard(step, model, optimizer, every=200)     # step(batch) -> loss: one training step of any loop
    for batch in batches:
        loss = guard(batch)

guard_example.py is a whole loop. The guard is in one of two states:

    fp8     steps run as they are. In every period a few steps in a row are compared: they are repeated from the same
            weights, optimizer and random state on the same batches, once in high precision and once rounded by hand.
            If FP8 is no farther from high precision than the rounded steps, their end is kept as the last good state.
            If FP8 is farther (twice in a row, if only a little), or as soon as a loss is infinite or NaN, the guard
            goes back to the last good state, does all steps since then again in high precision, and the state becomes
            `high`. If a loss or a gradient jumps, it does the same, but keeps the steps of FP8 if high precision jumps
            as well.
    high    steps run in high precision. In every period a few are repeated in FP8 and rounded by hand; if FP8 is near
            enough again, the state becomes `fp8`. The steps of high precision stay.

Where in a period the compared steps are is drawn from the seed and the period's number alone: a fault that comes with
some batches, or at some steps of a period, meets them sooner or later, and a resumed run compares the same steps.

How near is near enough follows from the format, not from a trial. Steps that are rounded by hand cut the factors of
every product to the mantissa of FP8. They are right by construction, so their distance from high precision is the noise
that the format causes for these weights and batches. In units of that noise, FP8 is too far if its losses are, if the
end of any single matrix is, or if the ends of all matrices together are (their geometric mean, which is near 1 for
correct FP8 and distinguishes two bits of mantissa from three).

What it does not notice, each with a test in test_guard.py or test_guard_limits.py:

    between the compared steps      a fault that is gone before any step is compared, and makes neither loss nor
                                    gradient jump; a small one that is gone before steps are compared again
    outside of the FP8 layers       a wrong optimizer state, or anything else that high precision computes alike,
                                    unless a loss or a gradient jumps; FP8 in functions beside the layers
    before a resumed run's start    a checkpoint says up to which step it was verified (`verified`); what came after
                                    is not undone
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from typing import Any, Callable, ContextManager, Dict, List, NamedTuple, Optional, Tuple

import torch

from smoke_tests.training.distance import Outcome, distances, sure
from smoke_tests.training.precision import computed, fp8_layers_of, plain, rounded
from smoke_tests.training.shares import Shares, warning
from smoke_tests.training.snapshot import Snapshot

# A loss or a gradient's norm jumps if it is so many times the median of up to RECENT steps before it, if there are FEW.
LOSS_JUMP, NORM_JUMP = 1.5, 10.0
FEW, RECENT = 8, 32


class Done(NamedTuple):
    """A step that was done: what it returned, its loss, and its gradient's norm, or 0 if that is not known."""

    result: Any
    loss: float
    norm: float


class Guard:
    """Does the steps of a training loop, and compares them as described at the top of this file.

    step: does one training step on its argument, and returns a value of which loss_of makes the loss and norm_of the
    gradient's norm before clipping; without norm_of, only losses are seen to jump. It may raise ArithmeticError if the
    loss is not finite. In several processes both have to be the same numbers in each.
    parts: the objects that a step changes, the model first; the others have state_dict() and load_state_dict().
    every: steps of a period. steps: how many of them are compared. seed: of their places. mantissas: bits of FP8
    forward and backward. high: a context in which the model computes in high precision, by default with plain products
    of its layers. host: keep the copies in the host's memory, pinned where the parts are on a GPU.

    ValueError names a model that cannot be compared: one without FP8 layers, with layers that are more than a product,
    or with weights that are not plain float32.

    Memory: three copies of the parts and two of the FP8 layers' weights, which are 44 bytes per parameter with float32
    weights and AdamW (49 GB for 1.1 billion), on the device or in the host's memory. With `host` the device holds
    one copy of the optimizer's state while that is restored (8 bytes per parameter).
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        *parts: Any,
        every: int = 200,
        steps: int = 4,
        seed: int = 0,
        mantissas: Tuple[int, int] = (3, 2),
        loss_of: Callable[[Any], float] = float,
        norm_of: Callable[[Any], float] = lambda result: 0.0,
        high: Optional[Callable[[], ContextManager[Any]]] = None,
        host: bool = False,
    ) -> None:
        if not 1 <= steps <= every:
            raise ValueError(f"a period of {every} steps has no {steps} to compare")
        model = parts[0]
        layers = comparable_layers_of(model)
        self._step, self._parts, self._loss_of, self._norm_of = step, parts, loss_of, norm_of
        self.every, self.steps, self.seed, self.state, self._host = every, steps, seed, "fp8", host
        self.done = 0  # steps of the run
        self.verified = 0  # the steps up to the last good state
        self._weights = [f"{name}.weight" for name in layers]
        self._shares = Shares(layers, mantissas)
        self._as_it_is: Callable[[], ContextManager[Any]] = contextlib.nullcontext
        self._high = high or (lambda: computed(model, plain))
        self._by_hand = lambda: computed(model, self._shares.watched(rounded(*mantissas)))
        self._good: Optional[Snapshot] = None  # the last good state
        self._batches: List[Any] = []  # since then
        self._since: List[Tuple[float, float]] = []  # losses and norms since then
        self._before: List[Tuple[float, float]] = []  # and some before it
        self._unsure = False  # whether the last steps that were compared may have been far by chance
        self._doubted = False  # whether a jump since then was looked into
        self._window = self._next_window()  # the first step that will be compared
        self._start: Optional[Snapshot] = None  # the state before it
        self._error = ""  # the message of the last step that was not finite
        self._events: List[Dict[str, Any]] = []
        self.seconds = 0.0  # seconds spent on comparisons and repeated steps

    def __call__(self, batch: Any) -> Any:
        """Do one step and the comparison that is due after it; returns what `step` returned."""
        if self._good is None:
            self._good = self._snapshot()
        if self.done == self._window:
            self._start = self._snapshot()
        self._batches.append(batch)
        done = self._run(batch, self._high if self.state == "high" else self._as_it_is)
        self._since.append((done.loss, done.norm))
        self.done += 1
        began = time.perf_counter()
        result = self._decide(done)
        self.seconds += time.perf_counter() - began
        return result

    def news(self) -> List[Dict[str, Any]]:
        """The events since the last call, each with "kind", "text", "verified" and numbers.

        kind: good, unsure (the next steps decide), fallback, away (high precision goes on), return (to FP8), jump (in
        high precision, too), resumed, warning, and layers (with "layers", as of shares.Shares.take).
        """
        events, self._events = self._events, []
        return events

    def state_dict(self) -> Dict[str, Any]:
        """What a checkpoint keeps: the state, the steps done, those verified, and the losses and norms of some.

        The copies are not in it: a resumed run cannot go back to before its start.
        """
        return {
            "state": self.state,
            "done": self.done,
            "verified": self.verified,
            "recent": [list(pair) for pair in self._recent()],
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Go on where another guard was, with the parts as they are now; an event says what it cannot undo."""
        self.state, self.done, self.verified = state["state"], state["done"], state["verified"]
        self._before = [(loss, norm) for loss, norm in state["recent"]]
        if self.verified < self.done:
            text = f"what steps {self.verified} to {self.done - 1} did was not compared, and cannot be undone from here"
            self._note("resumed", text)
        self._good, self._start, self._batches, self._since, self._window = None, None, [], [], self._next_window()

    # --- the decisions ---

    def _decide(self, done: Done) -> Any:
        """What to do after a step; returns what the step that counts returned."""
        if not math.isfinite(done.loss):
            if self.state == "high":
                raise ArithmeticError(f"in high precision, too, the loss is {done.loss}: that is not FP8's doing")
            return self._fall_back(self._error or f"the loss is {done.loss}")
        jump = self._jump() if self.state == "fp8" and not self._doubted else ""
        again = self._doubt(jump) if jump else None
        if again is not None:
            return again.result
        if self._start is not None and self.done == self._window + self.steps:
            return self._compare(done.result)
        return done.result

    def _compare(self, result: Any) -> Any:
        end = self._snapshot()
        taken = Outcome([loss for loss, _ in self._since[-self.steps :]], end.weights(self._weights))
        by_hand = self._again(self._by_hand)
        other = self._again(self._high if self.state == "fp8" else self._as_it_is)
        fp8, high = (taken, other) if self.state == "fp8" else (other, taken)
        if not all(map(math.isfinite, high.losses + by_hand.losses)):
            raise ArithmeticError(f"in high precision the losses are {high.losses}: that is not FP8's doing")
        numbers, why = distances(fp8, high, by_hand)
        layers = self._shares.take()
        self._note("layers", "", layers=layers)
        if text := warning(layers):
            self._note("warning", text)
        if why and self.state == "fp8" and (self._unsure or sure(numbers)):
            return self._fall_back(why, **numbers)
        end.restore(self._parts)
        if why and self.state == "fp8":
            self._unsure, self._start, self._window = True, None, self.done
            self._note("unsure", f"{why}, which may be chance: the next steps are compared as well", **numbers)
            return result
        self._begin(end)
        if why:
            self._note("away", f"high precision goes on: {why}", **numbers)
        elif self.state == "high":
            self.state = "fp8"
            self._note("return", "back in FP8", **numbers)
        else:
            self._note("good", "FP8 is as near as its format allows", **numbers)
        return result

    def _fall_back(self, why: str, **numbers: float) -> Any:
        """Do all steps since the last good state again in high precision; returns what the last step returned."""
        self.state = "high"
        text = f"{why}: {len(self._batches)} steps are done again in high precision"
        self._note("fallback", text, **numbers)
        done = self._redo()
        if not math.isfinite(done.loss):
            raise ArithmeticError(f"in high precision, too, the loss is {done.loss}: that is not FP8's doing")
        self._begin(self._snapshot())
        return done.result

    def _doubt(self, jump: str) -> Optional[Done]:
        """See whether high precision jumps as well: then FP8 goes on as it was, and else that is kept and returned."""
        end, since = self._snapshot(), self._since
        done = self._redo()
        if math.isfinite(done.loss) and not self._jump():
            self.state = "high"
            text = f"{jump}, and not in high precision, in which {len(self._batches)} steps were done again"
            self._note("fallback", text)
            self._begin(self._snapshot())
            return done
        end.restore(self._parts)
        self._since, self._doubted = since, True
        self._note("jump", f"{jump}, and in high precision, too: that is not FP8's doing")
        return None

    def _jump(self) -> str:
        """What jumps at the last step, or ""."""
        *before, last = self._recent(RECENT + 1)
        for index, (what, most) in enumerate((("loss", LOSS_JUMP), ("gradient's norm", NORM_JUMP))):
            typical = statistics.median(pair[index] for pair in before) if len(before) >= FEW else math.inf
            if last[index] > most * typical > 0:
                return f"the {what} jumps to {last[index]:.4g} from about {typical:.4g}"
        return ""

    # --- parts of the decisions ---

    def _next_window(self) -> int:
        """The first of the steps that are compared next."""
        period = self.done // self.every
        places = (
            number * self.every + place(self.seed, number, self.every - self.steps) for number in (period, period + 1)
        )
        return next(first for first in places if first >= self.done)

    def _begin(self, good: Snapshot) -> None:
        """Go on from a good state."""
        self._before = self._recent()
        self._good, self._start, self._batches, self._since = good, None, [], []
        self._doubted = self._unsure = False
        self.verified, self._window = self.done, self._next_window()

    def _recent(self, most: int = RECENT) -> List[Tuple[float, float]]:
        return [*self._before, *self._since][-most:]

    def _note(self, kind: str, text: str, **more: Any) -> None:
        self._events.append({"kind": kind, "text": text, "verified": self.verified, **more})

    def _run(self, batch: Any, way: Callable[[], ContextManager[Any]]) -> Done:
        try:
            with way():
                result = self._step(batch)
        except ArithmeticError as error:
            self._error = str(error)
            return Done(None, math.nan, math.nan)
        return Done(result, self._loss_of(result), self._norm_of(result))

    def _redo(self) -> Done:
        """Do the steps since the last good state again in high precision, up to one that is not finite; the last."""
        assert self._good is not None, "there are steps since then"
        self._good.restore(self._parts)
        self._since = []
        for batch in self._batches:
            done = self._run(batch, self._high)
            self._since.append((done.loss, done.norm))
            if not math.isfinite(done.loss):
                break
        return done

    def _again(self, way: Callable[[], ContextManager[Any]]) -> Outcome:
        """Repeat the steps that are compared from their start."""
        assert self._start is not None, "it was kept before the first of them"
        self._start.restore(self._parts)
        losses = [self._run(batch, way).loss for batch in self._batches[-self.steps :]]
        return Outcome(losses, self._snapshot_weights())

    def _snapshot_weights(self) -> Dict[str, torch.Tensor]:
        return Snapshot(self._parts[:1], self._host).weights(self._weights)

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._parts, self._host)


def place(seed: int, period: int, last: int) -> int:
    """Where in a period the compared steps begin, 0 to `last`; no other draw changes it, and it changes no other."""
    return random.Random(f"{seed} {period}").randint(0, last)


def comparable_layers_of(model: torch.nn.Module) -> Dict[str, torch.nn.Module]:
    """The model's FP8 layers, by name; ValueError in one sentence if the guard cannot compare each of them."""
    for name, part in model.named_modules():
        if hasattr(part, "fc1_weight") or (hasattr(part, "layer_norm_weight") and hasattr(part, "in_features")):
            raise ValueError(
                f"the guard cannot compute {name} in high precision: {type(part).__name__} is more than a product; "
                "use a norm and a Linear in its place"
            )
    layers = fp8_layers_of(model)
    if not layers:
        raise ValueError(
            f"the guard finds no FP8 layer in {type(model).__name__}: it compares modules that have in_features, a "
            "weight, and another forward than torch.nn.Linear's; convert it first, and put functions into such modules"
        )
    for name, layer in layers.items():
        weight: Any = getattr(layer, "weight", None)
        kind = type(getattr(weight, "data", weight)).__name__
        if kind != "Tensor":
            raise ValueError(
                f"the guard cannot compare {name}, whose weight is a {kind} {KINDS.get(kind, '')}".rstrip()
            )
        if weight.dtype is not torch.float32:
            raise ValueError(
                f"the guard cannot compare {name}: the last bit of a weight in {weight.dtype} is larger than what a "
                "few steps change; keep weights in float32"
            )
    return layers


# Weights of other types, and who makes them.
KINDS = {
    "DTensor": "(a shard of FSDP2 or tensor parallelism): guard a run on one GPU, or with DDP",
    "ScalingTensor": "(MS-AMP's, which has no high precision)",
    "ScalingParameter": "(MS-AMP's, which has no high precision)",
    "Float8Tensor": "(Transformer Engine's fp8_model_init): keep weights in float32",
}
