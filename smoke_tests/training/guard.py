"""The guard: compares training in FP8 with high precision from time to time, and falls back if they differ.

    guard = Guard(step, model, optimizer, every=200)     # step(batch) -> loss: one training step of any loop
    for batch in batches:
        loss = guard(batch)

In every period of `every` steps a window of a few is compared. It lies at a random place, which follows from the seed
and the period's number. The guard is in one of two states:

    fp8     steps run as they are. At the window's end its steps are repeated from the same weights, optimizer and
            random state on the same batches, once in high precision and once rounded by hand. If FP8 is no farther
            from high precision than the rounded steps, the window is good and its end is kept. If FP8 is far beyond
            that, or as soon as a loss is infinite or NaN, the guard goes back to the end of the last good window, does
            all steps since then again in high precision, and begins a period in the state `high`. If it is only a
            little beyond, which chance can explain, steps rounded by hand in three other ways must agree, and up to
            four windows follow at once, of all of which the majority decides.
    high    steps run in high precision. At the window's end they are repeated in FP8 and rounded by hand; if FP8 is
            near enough again, the state becomes `fp8`. The steps of high precision stay.

What lies between two windows is run and not compared. A fault of L steps in a row is in a window of n with the
probability of about (L + n - 1) / every; one on every 7th batch, of four steps, with 4 / 7 in each period; one that
stays is in the next window, which ends within 2 every steps. The first and the last steps of a period, as a window has
fewer places there, are compared less often. What was wrong before a window is in all its repetitions, so that weights
or moments of the optimizer that were spoiled between windows are called good. docs/use/guard.md lists what is not seen.

How near is near enough follows from the format, not from a trial. Steps that are rounded by hand cut the factors of
every product to the mantissa of FP8. They are right by construction, so their distance from high precision is the noise
that the format causes for these weights and batches. In units of that noise, FP8 is too far if its losses are, if the
end of any single matrix is, or if the ends of all matrices together are (their geometric mean, which is near 1 for
correct FP8 and distinguishes two bits of mantissa from three).
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import statistics
import time
from typing import Any, Callable, ContextManager, Dict, List, NamedTuple, Optional, Tuple

import torch

from smoke_tests.training import checkpoint
from smoke_tests.training.precision import computed, in_fp8, plain, rounded

# Limits in units of the noise: for the losses, whose noise may be small by chance because they are few (160 sound
# comparisons reached 8), for the worst matrix (2.4), and for all matrices (1.3; with two mantissa bits, 1.6 and more).
LOSSES, WORST, ALL = 20.0, 4.0, 1.4
# By chance a sound window of a short run is farther off (13 of 256, up to 3.2 for all matrices, 7.0 for one, 25 for the
# losses). So up to CLEAR times the limits, it is also compared with steps rounded on other grids, with these SCALES
# (that left 3). If it is too far from each of them, windows vote, and a MAJORITY decides.
CLEAR, MAJORITY = 5.0, 3
SCALES = (2**0.2, 2**0.4, 2**0.6)
E4M3_MAX, E4M3_HALF = 448.0, 2.0**-10  # the largest value, and half of the smallest, which rounds to 0
TINY = 1e-12  # smaller values count as no distance


class Outcome(NamedTuple):
    """The result of some steps: their losses, and the matrices at their end, by name; device: where to compare them."""

    losses: List[float]
    weights: Dict[str, torch.Tensor]
    device: Optional[torch.device] = None


class Held(NamedTuple):
    """A tensor's copy in the host's memory, and the device that it is of."""

    copy: torch.Tensor
    device: torch.device


class Extremes:
    """Early warnings: what FP8 can lose of the input and the weight of each layer, with one scale for a whole tensor.

    amax: the largest magnitude. underflow: the share of values that become 0 when amax is scaled to e4m3's largest.
    saturation: the share above the amax of the first pass, which a scale as old as the window cuts off. Of several
    passes the largest counts.
    """

    def __init__(self, layers: Dict[str, torch.nn.Module]) -> None:
        self._names = {layer: name for name, layer in layers.items()}
        self._first: Dict[Tuple[str, str], torch.Tensor] = {}
        self._most: Dict[str, Dict[str, torch.Tensor]] = {}  # by measure and layer

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def note(self, layer: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Note a pass; nothing waits for the device."""
        name = self._names[layer]
        for factor, values in (("input", x), ("weight", weight)):
            size = values.abs().float()
            amax = size.amax()
            first = self._first.setdefault((factor, name), amax)
            lost = (size > 0) & (size * (E4M3_MAX / E4M3_HALF) <= amax)
            shares = {"underflow": lost.float().mean(), "saturation": (size > first).float().mean()}
            for measure, value in {"amax": amax, **shares}.items():
                most = self._most.setdefault(f"{factor} {measure}", {})
                most[name] = torch.maximum(most.get(name, value), value)

    def worst(self) -> Dict[str, Tuple[str, float]]:
        """The layer with the largest value of each measure, and that value: {"input amax": ("blocks.0...", 5.1)}."""
        numbers = {
            measure: {name: float(value) for name, value in most.items()} for measure, most in self._most.items()
        }
        return {measure: max(of.items(), key=lambda pair: pair[1]) for measure, of in numbers.items()}


class Guard:
    """Does the steps of a training loop, and compares them as described at the top of this file.

    step: does one training step on its argument, and returns a value of which loss_of makes the loss; it may raise
    ArithmeticError if the loss is not finite. parts: the objects that a step changes, the model first; the others have
    state_dict() and load_state_dict(). every: steps of a period. steps: how many of them are compared. seed: of the
    places of the windows. mantissas: bits of FP8 forward and backward. high: a context in which the model computes in
    high precision, by default with plain products of its layers. agreed: of several processes with the same weights,
    what gives each the first one's value. ValueError: the model has no layer in FP8, or one that cannot be compared.

    begun: steps that were done before the first. verified: the number of steps up to the last that ended a good window,
    or that was done in high precision behind such a one; 0 if none.

    The guard keeps up to three copies of the parts and three of the layers' weights, on the same device or, with memory
    "host", in the host's memory, pinned where a GPU copies them; every bit stays the same. state_dict() does not hold
    them: a run that is resumed between two windows goes on in its period, but falls back no farther than to
    where it was resumed, and a window in which it was resumed begins again.
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        *parts: Any,
        every: int = 200,
        steps: int = 4,
        seed: int = 0,
        begun: int = 0,
        mantissas: Tuple[int, int] = (3, 2),
        loss_of: Callable[[Any], float] = float,
        high: Optional[Callable[[], ContextManager[Any]]] = None,
        agreed: Callable[[Any], Any] = lambda value: value,
        memory: str = "device",
    ) -> None:
        if not 1 <= steps <= every:
            raise ValueError(f"a period of {every} steps has no {steps} to compare")
        self._layers = _layers_of(parts[0])
        self._step, self._parts, self._loss_of, self._agreed = step, parts, loss_of, agreed
        self._kept_copy = _held if memory == "host" else _clone
        self.every, self.steps, self.seed, self.state = every, steps, seed, "fp8"
        self._extremes = Extremes(self._layers)  # of the last window
        self._set_ways(mantissas, high)
        self._period = -1  # its number, before the first
        self._votes: List[bool] = []  # whether each of these consecutive windows was too far off
        self._place: int  # where the window begins in this period
        self._done: int  # steps of this period
        self._begin()
        self._count, self.verified = begun, 0
        self._good: Any = None  # the end of the last good window
        self._since = begun  # its number of steps
        self._batches: List[Any] = []  # since then
        self._losses: List[float] = []  # of these batches
        self._start: Any = None  # where the window begins
        self._error = ""  # the message of the last step that was not finite
        self._events: List[Dict[str, Any]] = []
        self.seconds = 0.0  # seconds spent on comparisons and repeated steps

    def _set_ways(self, mantissas: Tuple[int, int], high: Optional[Callable[[], ContextManager[Any]]]) -> None:
        """Set the contexts in which a step is done: as it is, in high precision, and rounded by hand on four grids."""
        model, layers = self._parts[0], list(self._layers.values())
        self._as_it_is: Callable[[], ContextManager[Any]] = contextlib.nullcontext
        self._high = high or (lambda: computed(model, plain, layers))
        self._by_hand = lambda: computed(model, rounded(*mantissas, self._extremes.note), layers)
        self._by_other_hands = [
            functools.partial(computed, model, rounded(*mantissas, scale=scale), layers) for scale in SCALES
        ]

    def __call__(self, batch: Any) -> Any:
        """Do one step and the comparison that is due after it; returns what `step` returned."""
        if self._good is None:
            self._good = self._snapshot()
        if self._done == self._place:
            self._start = self._snapshot()
        self._batches.append(batch)
        result, loss = self._run(batch, self._high if self.state == "high" else self._as_it_is)
        self._losses.append(loss)
        self._done, self._count = self._done + 1, self._count + 1
        if self.state == "high" and self.verified == self._count - 1:
            self.verified = self._count
        began = time.perf_counter()
        if not math.isfinite(loss):
            if self.state == "high":
                raise ArithmeticError(f"in high precision, too, the loss is {loss}: that is not FP8's doing")
            result = self._fall_back(self._error or f"the loss is {loss}")
        elif self._done == self._place + self.steps:
            result = self._compare(result)
        if self._done >= self.every and not self._votes:
            self._begin()
        self.seconds += time.perf_counter() - began
        return result

    def state_dict(self) -> Dict[str, Any]:
        """The guard's state and place in its period, for load_state_dict() after as many steps as now."""
        names = ("state", "verified", "period", "done", "place", "votes", "every", "steps")
        own = {**vars(self), **{name: vars(self)[f"_{name}"] for name in ("period", "done", "place", "votes")}}
        return {name: own[name] for name in names}

    def load_state_dict(self, saved: Dict[str, Any]) -> None:
        """Go on from state_dict(); with {}, of a run without a guard, begin a period, and nothing is verified.

        With another every or steps a period begins, too.
        """
        saved = self._agreed(saved)
        if not saved:
            return
        self.state, self.verified, self._period = saved["state"], saved["verified"], saved["period"]
        self._done, self._place, self._votes = saved["done"], saved["place"], list(saved["votes"])
        other = (saved["every"], saved["steps"]) != (self.every, self.steps)
        cut = self._place < self._done < self._place + self.steps  # where the window began is lost
        if other or (cut and self._done + self.steps > self.every and not self._votes):
            self._begin()
        elif cut:
            self._place = self._done

    def news(self) -> List[Dict[str, Any]]:
        """The events since the last call: "kind" (good, doubt, fallback, away, return), "text", "verified", numbers.

        "extremes", of a comparison, has the worst layer of each measure (Extremes).
        """
        events, self._events = self._events, []
        return events

    # --- the two decisions ---

    def _compare(self, result: Any) -> Any:
        end, taken = self._snapshot(), self._outcome(self._losses[-self.steps :])
        self._extremes = Extremes(self._layers)
        by_hand = self._again(self._by_hand)
        if self.state == "fp8":
            other, scales = self._again(self._high), {}
        else:
            self._again(self._as_it_is, 1)  # scales of delayed scaling are as old as the fallback
            other = self._again(self._as_it_is, scales=self._scales())
            scales = self._scales()
        fp8, high = (taken, other) if self.state == "fp8" else (other, taken)
        numbers, why, clear = self._agreed(distances(fp8, high, by_hand))
        for other_hand in self._by_other_hands:  # the noise of one may be small by chance
            if why and not clear:
                numbers, why, _ = self._agreed(distances(fp8, high, self._again(other_hand)))
        numbers = {**numbers, "extremes": self._extremes.worst()}
        if self.state == "fp8":
            self._votes.append(bool(why))
            if why and (clear or sum(self._votes) == MAJORITY):
                return self._fall_back(why, **numbers)
        self._restore(end)
        if self.state == "high" and why:
            self._note("away", f"high precision goes on: {why}", **numbers)
        elif self.state == "high":
            self.state, self.verified = "fp8", self._count
            self._take(scales)
            end = self._snapshot()
            self._note("return", "back in FP8", **numbers)
        elif any(self._votes) and self._votes.count(False) < MAJORITY:
            self._place = self._done
            self._note("doubt", f"{why or 'FP8 is near enough here'}: the next steps decide", **numbers)
            return result
        else:
            self.verified = self._count
            self._note("good", "FP8 is as near as its format allows", **numbers)
        self._keep(end)
        return result

    def _fall_back(self, why: str, **numbers: Any) -> Any:
        """Do all steps since the last good window again in high precision; returns what the last step returned."""
        self._restore(self._good)
        self.state, result = "high", None
        text = f"{why}: {len(self._batches)} steps are done again in high precision"
        if self.verified < self._since:
            text += f"; the steps from {self.verified} to {self._since - 1}, which are not verified, cannot be"
        else:
            self.verified = self._count
        self._note("fallback", text, **numbers)
        for batch in self._batches:
            result, loss = self._run(batch, self._high)
            if not math.isfinite(loss):
                raise ArithmeticError(f"in high precision, too, the loss is {loss}: that is not FP8's doing")
        self._keep(self._snapshot())
        self._begin()
        return result

    # --- parts of the decisions ---

    def _begin(self) -> None:
        """Begin the next period."""
        self._period, self._done, self._votes = self._period + 1, 0, []
        self._place = self._agreed(place_of(self.seed, self._period, self.every - self.steps))

    def _keep(self, good: Any) -> None:
        """Keep a good state."""
        self._good, self._start, self._batches, self._losses, self._votes = good, None, [], [], []
        self._since = self._count

    def _note(self, kind: str, text: str, **numbers: Any) -> None:
        self._events.append({"kind": kind, "text": text, "verified": self.verified, **numbers})

    def _run(self, batch: Any, way: Callable[[], ContextManager[Any]]) -> Tuple[Any, float]:
        try:
            with way():
                result = self._step(batch)
        except ArithmeticError as error:
            self._error = str(error)
            return None, math.nan
        return result, self._loss_of(result)

    def _again(
        self,
        way: Callable[[], ContextManager[Any]],
        steps: Optional[int] = None,
        scales: Optional[Dict[str, torch.Tensor]] = None,
    ) -> Outcome:
        """Repeat the window, or so many of its steps, from its start, with these scales of FP8 in place of its own."""
        self._restore(self._start)
        self._take(scales or {})
        losses = [self._run(batch, way)[1] for batch in self._batches[-self.steps :][:steps]]
        return self._outcome(losses)

    def _scales(self) -> Dict[str, torch.Tensor]:
        state: Dict[str, torch.Tensor] = _mapped(checkpoint.fp8_state_of(self._parts[0]), _clone)
        return state

    def _take(self, scales: Dict[str, torch.Tensor]) -> None:
        now = checkpoint.fp8_state_of(self._parts[0])
        for name, values in scales.items():
            now[name].copy_(values)

    def _outcome(self, losses: List[float]) -> Outcome:
        weights = {f"{name}.weight": layer.weight for name, layer in self._layers.items()}
        copies = _mapped(weights, self._kept_copy)
        return Outcome(losses, _mapped(copies, _host_copy), next(iter(weights.values())).device)

    def _snapshot(self) -> Any:
        model, *others = self._parts
        states = checkpoint.state_of(model), [part.state_dict() for part in others]
        return _mapped(states, self._kept_copy), checkpoint.random_state()

    def _restore(self, snapshot: Any) -> None:
        ((state, states), random_state), (model, *others) = snapshot, self._parts
        checkpoint.restore(model, _mapped(state, _host_copy))
        for part, own in zip(others, states):
            part.load_state_dict(_mapped(own, _clone))  # an optimizer keeps and changes the tensors that it is given
        checkpoint.restore_random_state(random_state)


def _layers_of(model: torch.nn.Module) -> Dict[str, torch.nn.Module]:
    """The layers in FP8, by name; ValueError if there is none."""
    layers = in_fp8(model)
    if not layers:
        raise ValueError(
            f"no layer of this {type(model).__name__} is in FP8, so that the guard would compare nothing: convert "
            "its linear layers with torchao or Transformer Engine, or train without the guard"
        )
    return layers


def place_of(seed: int, period: int, last: int) -> int:
    """The step of a period before which its window begins, 0 to last: the same in every process and Python."""
    return random.Random(f"{seed} {period}").randint(0, last)


def distances(fp8: Outcome, high: Outcome, by_hand: Outcome) -> Tuple[Dict[str, float], str, bool]:
    """The distance of FP8 from high precision in units of the noise; why that is too far, or ""; whether clearly so."""
    if not all(math.isfinite(loss) for loss in fp8.losses):
        return {}, "a loss is not finite", True
    gaps = [sum(abs(a - b) for a, b in zip(way.losses, high.losses)) for way in (fp8, by_hand)]
    ratios = {}
    for name, truth in high.weights.items():
        truth = truth.to(high.device)
        far, noise = (float((way.weights[name].to(high.device) - truth).norm()) for way in (fp8, by_hand))
        ratios[name] = max(far, TINY) / max(noise, TINY) if math.isfinite(far) else math.inf
    name = max(ratios, key=lambda name: ratios[name])
    mean = math.exp(statistics.mean(map(math.log, ratios.values())))
    numbers = {"losses": max(gaps[0], TINY) / max(gaps[1], TINY), "one": ratios[name], "all": mean}
    clear, reasons = False, []
    for key, limit, what in (
        ("one", WORST, f"{name} ends"),
        ("all", ALL, "the matrices end"),
        ("losses", LOSSES, "the losses are"),
    ):
        clear = clear or numbers[key] > CLEAR * limit
        if numbers[key] > limit:
            reasons.append(f"{what} {numbers[key]:.1f} times as far from high precision as rounding explains")
    return numbers, reasons[0] if reasons else "", clear


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A nested state with its tensors, or what is held of them, changed."""
    if isinstance(tree, (torch.Tensor, Held)):
        return change(tree)
    if isinstance(tree, dict):
        return type(tree)((key, _mapped(value, change)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return type(tree)(_mapped(value, change) for value in tree)
    return tree


def _clone(tensor: Any) -> torch.Tensor:
    """A copy on the tensor's device, or on that which a held one is of."""
    if isinstance(tensor, Held):
        copy: torch.Tensor = tensor.copy.to(tensor.device, copy=True)
        return copy
    return tensor.detach().clone()


def _held(tensor: torch.Tensor) -> Held:
    """A copy in the host's memory."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
    return Held(copy.copy_(tensor.detach()), tensor.device)


def _host_copy(tensor: Any) -> torch.Tensor:
    """What is held in the host's memory, or the tensor itself."""
    inside: torch.Tensor = tensor.copy if isinstance(tensor, Held) else tensor
    return inside
