"""The guard: what it notices, what it does then, and that it leaves a run alone that needs no guarding."""

from __future__ import annotations

import functools
import random
import time
from typing import Any, Dict, Iterable, List

import pytest
import torch

from smoke_tests.claims import long, needs, proves
from smoke_tests.training import checkpoint, guard_proof
from smoke_tests.training import guard as guard_module
from smoke_tests.training.distance import ALL, LOSSES, WORST, Outcome, distances
from smoke_tests.training.guard import Guard, place
from smoke_tests.training.options import Options
from smoke_tests.training.precision import compute_by, computed, plain, rounded
from smoke_tests.training.small_runs import small
from smoke_tests.training.trainer import Run

pytestmark = pytest.mark.usefixtures("one_thread")


def quick(monkeypatch: pytest.MonkeyPatch, **others: int) -> None:
    """Let guard_proof take smaller batches, and these constants."""
    monkeypatch.setattr(guard_proof, "options", quick_options)
    for name, value in others.items():
        monkeypatch.setattr(guard_proof, name, value)


def quick_options(seed: int, precision: str, steps: int) -> Options:
    """The tiny model on two windows of 32 bytes."""
    return small(precision, steps, seed=seed, length=32, schedule="constant")


@functools.lru_cache(maxsize=None)
def losses_of_going_on(good: int, steps: int) -> List[float]:
    """The losses of a run that goes on in high precision from a step."""
    run = Run(quick_options(0, "torchao.tensorwise", steps))
    losses = [run.update(step)["loss"] for step in range(good)]
    with computed(run.model, plain):
        return losses + [run.update(step)["loss"] for step in range(good, steps)]


def decided(events: Iterable[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """The events that are decisions."""
    return [event for event in events if event["kind"] not in ("layers", "warning", "unsure")]


LAYERS = ("attention.qkv", "attention.output", "feed_forward.gate_up", "feed_forward.down")


def in_fp8(layer: torch.nn.Linear) -> torch.nn.Sequential:
    """A model of one layer that computes otherwise than torch's."""
    compute_by([layer], rounded(3, 2))
    return torch.nn.Sequential(layer)


def loss_of(row: Dict[str, float]) -> float:
    """The loss of what a step returned."""
    return row["loss"]


def moved(losses: float, *weights: float) -> Outcome:
    """Two steps and some matrices that are so far from where `moved(0, 0, ...)` is."""
    names = [f"matrix {index}" for index in range(len(weights))]
    return Outcome([2 + losses, 3 - losses], {name: torch.full((3, 5), 1 + far) for name, far in zip(names, weights)})


@proves(
    "the guard's distances are those from high precision in units of what was rounded by hand: of the losses, of the "
    "farthest matrix, and of all as their geometric mean; each is too far beyond its own limit and not below it",
    seed="C23",
    package="torch",
    since="2.4",
)
def test_distances() -> None:
    high, by_hand = moved(0.0, 0.0, 0.0), moved(1 / 64, 1 / 32, 1 / 128)
    for losses, first, second, named in (
        (2.0, 1.0, 0.5, ""),
        (LOSSES - 0.1, 1.0, 1.0, ""),
        (LOSSES + 0.1, 1.0, 1.0, "the losses are 20.1 times"),
        (1.0, WORST - 0.1, 0.25, ""),
        (1.0, 0.25, WORST + 0.1, "matrix 1 ends 4.1 times"),
        (1.0, ALL - 0.05, ALL - 0.05, ""),
        (1.0, ALL + 0.1, ALL + 0.1, "the matrices end 1.5 times"),
        # The farthest matrix is named before all, and all before the losses.
        (LOSSES + 0.1, WORST + 0.2, WORST + 0.1, "matrix 0 ends 4.2 times"),
        (LOSSES + 0.1, ALL + 0.1, ALL + 0.1, "the matrices end 1.5 times"),
    ):
        fp8 = moved(losses / 64, first / 32, second / 128)
        numbers, why = distances(fp8, high, by_hand)
        exact = {"losses": losses, "one": max(first, second), "all": (first * second) ** 0.5}
        assert numbers == pytest.approx(exact, rel=1e-4)
        assert (named in why) if named else not why, why
    assert distances(moved(float("nan"), 0.0), moved(0.0, 0.0), by_hand) == ({}, "a loss is not finite")
    assert distances(moved(0.0, float("nan"), 0.0), high, by_hand)[0]["one"] == float("inf")
    # Where nothing moved, nothing is too far; where what was rounded by hand did not and FP8 did, that is.
    assert distances(high, high, high)[0] == {"losses": 1.0, "one": 1.0, "all": 1.0}
    assert distances(moved(0.0, 1e-6, 0.0), high, high)[0]["one"] > 1e3


RARE = ("every seventh batch", "overflow by data")


@pytest.mark.parametrize("fault", [name for name in guard_proof.FAULTS if name not in RARE])
@proves(
    "the guard notices a fault in FP8 within two periods, and at once a gradient that is huge and finite or moments "
    "that make the loss jump: what follows has every bit of a run that went on in high precision from the last good "
    "state",
    seed="C23",
    package="torchao",
)
def test_fault(fault: str, measured: Dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch, EVERY=6, COMPARED=3, FROM=10, UNTIL=99)
    run = guard_proof.guarded_run(0, "torchao.tensorwise", fault, steps=19)
    events = decided(run["events"])
    before = [event for event in events if event["step"] < 10]
    assert before and all(event["kind"] == "good" for event in before), "it is noticed before it is there"
    fallback = events[len(before)]
    assert fallback["kind"] == "fallback" and fallback["step"] < 22, fallback
    measured["noticed after"] = fallback["step"] - 10
    measured.update({key: fallback[key] for key in ("losses", "one", "all") if key in fallback})
    assert fallback["verified"] == before[-1]["verified"] == before[-1]["step"] + 1 <= 10
    back = [event["step"] for event in events if event["kind"] == "return"]
    in_high = slice(fallback["step"], back[0] + 1 if back else 19)
    assert run["losses"][in_high] == losses_of_going_on(fallback["verified"], 19)[in_high]
    if fault in ("NaN", "gradient dropped"):
        assert guard_proof.LAYER in fallback["text"], "it does not name the layer"
    if fault in ("NaN", "huge gradient once", "moments corrupted"):
        assert fallback["step"] <= 11
    if fault == "huge gradient once":
        assert "gradient's norm jumps" in fallback["text"]


@pytest.mark.parametrize("fault", RARE)
@proves(
    "the guard notices a fault that comes with every seventh batch, or with some text, although it does not come at "
    "the end of any period",
    seed="C23",
    package="torchao",
)
def test_rare_fault(fault: str, measured: Dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch, EVERY=7, COMPARED=2, FROM=0, UNTIL=99)
    own = guard_proof.FAULTS[fault]

    def planted(run: Run) -> guard_proof.Planted:
        fault_of = own(run)
        return fault_of._replace(comes=lambda step: step % 7 < 5 and fault_of.comes(step))

    monkeypatch.setitem(guard_proof.FAULTS, fault, planted)
    run = guard_proof.guarded_run(0, "torchao.tensorwise", fault, 42)
    fallbacks = [event["step"] for event in run["events"] if event["kind"] == "fallback"]
    assert fallbacks, "it is not noticed in six periods"
    measured["noticed after"] = fallbacks[0]


@proves(
    "where in a period the guard compares is drawn from the seed and the period alone: every step of a period is "
    "compared in some period, and no draw from Python's or torch's generators is added or changed",
    seed="C23",
    package="torch",
    since="2.4",
)
def test_place() -> None:
    before = checkpoint.random_state()
    places = [[place(seed, period, 7) for period in range(100)] for seed in (0, 1)]
    after = checkpoint.random_state()
    assert before["python"] == after["python"] and torch.equal(before["torch"], after["torch"])
    random.seed(5)
    assert places[0] == [place(0, period, 7) for period in range(100)] != places[1]
    assert [set(each) for each in places] == [set(range(8))] * 2
    assert place(3, 5, 0) == 0
    guard = Guard(lambda batch: 1.0, in_fp8(torch.nn.Linear(2, 2)), every=10, steps=3)
    compared = []
    for step in range(200):
        guard(step)
        compared += [(event["kind"], step + 1 - 3) for event in decided(guard.news())]
    assert compared == [("good", 10 * period + place(0, period, 7)) for period in range(20)]


@proves(
    "it goes back to FP8 in the period after the fault is gone, its decisions change no bit of a sound run, and what "
    "is not FP8's doing is said to be that",
    seed="C23",
    package="torchao",
)
def test_states(measured: Dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch, EVERY=5, COMPARED=2, FROM=6, UNTIL=13)
    monkeypatch.setattr(guard_module, "place", lambda seed, period, last: last)
    run = guard_proof.guarded_run(0, "torchao.rowwise", "NaN", steps=25)
    assert [(event["kind"], event["step"], event["verified"]) for event in decided(run["events"])] == [
        ("good", 4, 5),
        ("fallback", 6, 5),
        ("away", 9, 10),
        ("return", 14, 15),
        ("good", 19, 20),
        ("good", 24, 25),
    ]
    sound = guard_proof.guarded_run(0, "torchao.rowwise", steps=11)
    alone = Run(quick_options(0, "torchao.rowwise", 11))
    assert sound["losses"] == [alone.update(step)["loss"] for step in range(11)]
    measured["share"] = sound["share"]
    assert 0 < sound["share"] < 1

    compared: List[Outcome] = []

    def noting(*outcomes: Outcome) -> Any:
        compared.extend(outcomes)
        return distances(*outcomes)

    # Where FP8 is what is rounded by hand, one is as far from high precision as the other, to the last bit.
    monkeypatch.setattr(guard_module, "distances", noting)
    by_hand = Run(small("e8m3"))
    guard = Guard(by_hand.update, by_hand.model, by_hand.optimizer, every=5, steps=2, mantissas=(3, 3), loss_of=loss_of)
    assert guard.seconds == 0
    for step in range(5):
        guard(step)
    (event,) = decided(guard.news())
    assert [event[key] for key in ("kind", "losses", "one", "all")] == ["good", 1, 1, 1]
    matrices = {
        f"blocks.{index}.{name}.weight" for index in (0, 1) for name in LAYERS
    }  # not the head, nor the embedding
    assert [(len(each.losses), set(each.weights)) for each in compared] == [(2, matrices)] * 3
    assert guard.seconds > 0

    def broken(batch: int) -> float:
        return float("nan") if batch == 3 else 1.0

    model = in_fp8(torch.nn.Linear(2, 2))
    guard = Guard(broken, model, every=5, steps=1)
    with pytest.raises(ArithmeticError, match="in high precision, too"):
        for batch in range(5):
            guard(batch)
    for steps in (0, 3):
        with pytest.raises(ValueError, match=f"a period of 2 steps has no {steps} to compare"):
            Guard(broken, model, every=2, steps=steps)


@proves(
    "FP8 that is right is as far from high precision as its rounding explains, in every check, but for single ones "
    "that are a little farther by chance",
    seed="C23",
    package="torchao",
)
def test_no_false_alarm(seed: int, measured: Dict[str, Any]) -> None:
    events: List[Dict[str, Any]] = []
    for precision in guard_proof.PRECISIONS:
        run = guard_proof.guarded_run(seed, precision, steps=20)
        events += [event for event in run["events"] if event["kind"] not in ("layers", "warning")]
    assert len(events) >= 2 and {event["kind"] for event in events} <= {"good", "unsure"}
    for key in ("losses", "one", "all"):
        measured[key] = max(event[key] for event in events)


@needs(sm=(8, 9))
@long
@proves(
    "Transformer Engine's FP8 under delayed scaling passes every check of the guard, one whose layers give a quarter "
    "too much does not, and after the fallback and the return it passes again",
    seed="C23",
    package="transformer-engine",
    since="2.0",
)
def test_guard_on_gpu(device: str, measured: Dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import transformer_engine.pytorch as te

    fields: Dict[str, Any] = {"model": "hare-1.1b", "layers": 2, "length": 512, "device": "cuda", "batch_size": 2}
    run = Run(Options(precision="fp8", steps=60, learning_rate=3e-4, **fields))
    guard = Guard(run.update, run.model, run.optimizer, every=10, steps=4, loss_of=lambda row: float(row["loss"]))
    own, began = te.Linear.forward, time.perf_counter()
    events = []
    for step in range(60):
        wrong = 20 <= step < 40
        monkeypatch.setattr(te.Linear, "forward", (lambda *a, **n: 1.25 * own(*a, **n)) if wrong else own)
        guard(step)
        events += [(event["kind"], step, event) for event in decided(guard.news())]
    measured["share"] = guard.seconds / (time.perf_counter() - began)
    kinds = [kind for kind, _, _ in events]
    history = "; ".join("{} at {}: {}".format(kind, step, event["text"]) for kind, step, event in events)
    assert kinds == ["good", "good", "fallback", "away", "return", "good"], history
    for key in ("losses", "one", "all"):
        measured[key] = max(event[key] for kind, _, event in events if kind in ("good", "return"))
