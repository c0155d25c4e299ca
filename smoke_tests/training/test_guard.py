"""The guard: what it notices, what it does then, and that it leaves a run alone that needs no guarding."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import runpy
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple
from unittest import mock

import pytest
import torch

from smoke_tests.claims import long, needs, proves
from smoke_tests.training import checkpoint, guard_proof
from smoke_tests.training import guard as guard_module
from smoke_tests.training.guard import ALL, LOSSES, WORST, Extremes, Guard, Outcome, distances, place_of
from smoke_tests.training.options import Options
from smoke_tests.training.precision import compute_by, computed, in_fp8, plain, rounded
from smoke_tests.training.small_runs import last_of, small, trained
from smoke_tests.training.trainer import Run

pytestmark = pytest.mark.usefixtures("one_thread")


# What a window's comparisons say: near enough, too far from all four roundings, from the first alone, clearly too far.
TOO_FAR: Any = ({}, "too far", False)
VERDICTS: Dict[str, Any] = {"+": [({}, "", False)], "-": [TOO_FAR] * 4, "~": [TOO_FAR, ({}, "", False)]}
VERDICTS["!"] = [({}, "too far", True)]


def losses_of_going_on(fault: str, good: int, steps: int) -> List[float]:
    """The losses of a run that goes on in high precision after so many steps, with the fault in the last of them."""
    run = Run(guard_proof.options(0, "torchao.tensorwise", steps))
    planted = guard_proof.FAULTS[fault](run)
    losses = []
    for step in range(steps):
        planted.each_step()
        with computed(run.model, plain) if step >= good else planted.plant() if step >= 8 else contextlib.nullcontext():
            losses.append(run.update(step)["loss"])
    return losses


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
    since="2.1",
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
        numbers, why, clear = distances(fp8, high, by_hand)
        exact = {"losses": losses, "one": max(first, second), "all": (first * second) ** 0.5}
        assert numbers == pytest.approx(exact, rel=1e-4)
        assert (named in why) if named else not why, why
        assert not clear
    assert distances(moved(float("nan"), 0.0), moved(0.0, 0.0), by_hand) == ({}, "a loss is not finite", True)
    assert distances(moved(0.0, float("nan"), 0.0), high, by_hand)[0]["one"] == float("inf")
    # Beyond five times a limit, chance is ruled out.
    for losses, weight, clear in ((5 * LOSSES, 1.0, False), (5 * LOSSES + 0.1, 1.0, True), (1.0, 5.1 * ALL, True)):
        fp8 = moved(losses / 64, weight / 32, weight / 128)
        assert distances(fp8, high, by_hand)[2] is clear
    # If nothing moved, nothing is too far; if FP8 moved and what is rounded by hand did not, FP8 is too far.
    assert distances(high, high, high)[0] == {"losses": 1.0, "one": 1.0, "all": 1.0}
    assert distances(moved(0.0, 1e-6, 0.0), high, high)[0]["one"] > 1e3


@pytest.mark.parametrize("fault", list(guard_proof.FAULTS))
@proves(
    "the guard notices a fault in FP8 that stays, in one of the next two windows or by the vote of those after it, and "
    "falls back: what follows has every bit of a run that went on in high precision from the last good window's end",
    seed="C23",
    package="torchao",
)
def test_fault(fault: str, measured: Dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"EVERY": 4, "COMPARED": 2, "FROM": 8, "UNTIL": 99, "BATCH": 4}.items():
        monkeypatch.setattr(guard_proof, name, value)
    # With this seed windows begin at the steps 1, 4, 8 and 14; those that vote follow. A scale that has only just been
    # frozen may be near enough in the third.
    assert [place_of(0, period, 2) for period in range(4)] == [1, 0, 0, 2]
    run = guard_proof.guarded_run(0, "torchao.tensorwise", fault, steps=20)
    kinds = [(event["kind"], event["step"]) for event in run["events"]]
    assert kinds[:2] == [("good", 2), ("good", 5)], "it is noticed before it is there"
    fallbacks = [event for event in run["events"] if event["kind"] == "fallback"]
    assert fallbacks, kinds
    fallback = fallbacks[0]
    before = [(kind, step) for kind, step in kinds[2:] if step < fallback["step"]]
    good = [step for kind, step in before if kind == "good"]
    begins = 14 if good else 8
    votes = [("doubt", step) for step in range(begins + 1, fallback["step"], 2)]
    assert before == [("good", 9)] * len(good) + votes
    measured["noticed after"] = fallback["step"] - 8
    measured.update({key: fallback[key] for key in ("losses", "one", "all") if key in fallback})
    truth = losses_of_going_on(fault, (good or [5])[-1] + 1, 20)
    returned = [step for kind, step in kinds if kind == "return"]
    high = slice(fallback["step"], returned[0] + 1 if returned else 20)  # with two bits fewer it may return by chance
    assert run["losses"][high] == truth[high]
    if fault in ("NaN", "gradient dropped"):
        assert guard_proof.LAYER in fallback["text"], "it does not name the layer"


@proves(
    "it goes back to FP8 in the first window without the fault, its decisions change no bit of a run that is sound, "
    "and what is not FP8's doing is said to be that",
    seed="C23",
    package="torchao",
)
def test_states(measured: Dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"EVERY": 5, "COMPARED": 2, "FROM": 6, "UNTIL": 13, "BATCH": 2}.items():
        monkeypatch.setattr(guard_proof, name, value)
    run = guard_proof.guarded_run(0, "torchao.rowwise", "NaN", steps=22)
    assert [place_of(0, period, 3) for period in range(5)] == [2, 1, 1, 0, 3]
    assert [(event["kind"], event["step"]) for event in run["events"]] == [
        ("good", 3),
        ("fallback", 6),
        ("away", 9),
        ("return", 13),
        ("good", 21),
    ]
    sound = guard_proof.guarded_run(0, "torchao.rowwise", steps=8)
    alone = Run(guard_proof.options(0, "torchao.rowwise", 8))
    assert sound["losses"] == [alone.update(step)["loss"] for step in range(8)]
    measured["share"] = sound["share"]
    assert 0 < sound["share"] < 1
    assert_equally_far(monkeypatch)
    assert_own_faults_are_not_of_fp8()


def assert_equally_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that FP8 rounded by hand and the emulation are equally far from high precision, to the last bit."""
    compared: List[Outcome] = []

    def noting(*outcomes: Outcome) -> Any:
        compared.extend(outcomes)
        return distances(*outcomes)

    monkeypatch.setattr(guard_module, "distances", noting)
    by_hand = Run(small("e8m3"))
    guard = Guard(by_hand.update, by_hand.model, by_hand.optimizer, every=5, steps=2, mantissas=(3, 3), loss_of=loss_of)
    assert guard.seconds == 0
    for step in range(5):
        guard(step)
    (event,) = guard.news()
    assert [event[key] for key in ("kind", "losses", "one", "all")] == ["good", 1, 1, 1]
    matrices = {f"{name}.weight" for name in in_fp8(by_hand.model)}
    assert len(matrices) == 8 and not any("head" in name or "embedding" in name for name in matrices)
    assert [(len(each.losses), set(each.weights)) for each in compared] == [(2, matrices)] * 3
    assert guard.seconds > 0


def assert_own_faults_are_not_of_fp8() -> None:
    """Assert that a loss which is NaN in high precision, too, and a period too short are named as what they are."""

    def broken(batch: int) -> float:
        return float("nan") if batch == 3 else 1.0

    layer = torch.nn.Linear(2, 2)
    compute_by([layer], plain)
    model = torch.nn.Sequential(layer)
    guard = Guard(broken, model, every=5, steps=1)
    with pytest.raises(ArithmeticError, match="in high precision, too"):
        for batch in range(5):
            guard(batch)
    for steps in (0, 3):
        with pytest.raises(ValueError, match=f"a period of 2 steps has no {steps} to compare"):
            Guard(broken, model, every=2, steps=steps)


class Functional(torch.nn.Module):  # type: ignore[misc]
    """A product in FP8 by functions, without a layer of any package."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.to(torch.float8_e4m3fn).float()


@proves(
    "the guard judges and rounds only layers that are in FP8, refuses a model in which it sees none, and refuses by "
    "name a layer that it cannot compute and a weight that does not show a step's change",
    seed="C23",
    package="torchao",
)
def test_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    for model in (Functional(), Run(small("float32")).model):
        with pytest.raises(ValueError, match=f"no layer of this {type(model).__name__} is in FP8"):
            Guard(float, model)
    in_bfloat16 = Run(small("torchao.tensorwise")).model
    in_bfloat16.blocks[1].feed_forward.down.weight.data = torch.ones(96, 208, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"feed_forward\.down\.weight is a Tensor in torch\.bfloat16"):
        Guard(float, in_bfloat16)
    for package, kind in (("transformer_engine", "LayerNormMLP"), ("msamp", "FP8Linear")):
        layer = type(kind, (torch.nn.Module,), {"__module__": f"{package}.pytorch"})()
        with pytest.raises(ValueError, match=f"0 is a {kind} of {package}, which the guard cannot compute"):
            Guard(float, torch.nn.Sequential(layer))

    judged: List[Outcome] = []

    def noting(*outcomes: Outcome) -> Any:
        judged.extend(outcomes)
        return distances(*outcomes)

    # If a layer in high precision were rounded by hand, too, FP8 would be nearer than the noise, and not as near.
    monkeypatch.setattr(guard_module, "distances", noting)
    run = Run(small("e8m3"))
    kept = list(in_fp8(run.model))[4:]
    for name in kept:
        del run.model.get_submodule(name).forward
    guard = Guard(run.update, run.model, run.optimizer, every=2, steps=2, mantissas=(3, 3), loss_of=loss_of)
    for step in range(2):
        guard(step)
    (event,) = guard.news()
    assert [event[key] for key in ("kind", "losses", "one", "all")] == ["good", 1, 1, 1]
    names = {f"{name}.weight" for name in in_fp8(run.model)}
    assert len(names) == 4 and [set(outcome.weights) for outcome in judged] == [names] * 3


@proves(
    "the windows lie at places that follow from the seed and the period alone and that the first rank decides; a fault "
    "of one step is in a window as often as the documentation says, and so is one of every 7th batch",
    seed="C23",
    package="torch",
    since="2.1",
)
def test_places(measured: Dict[str, Any]) -> None:
    places = [place_of(3, period, 196) for period in range(1000)]
    assert places[:4] == [148, 113, 174, 149] and set(places) <= set(range(197))
    faults: Dict[str, Tuple[Callable[[int], bool], float]] = {
        "one step": (lambda step: step % 200 == 100, 4 / 197),
        "ten in a row": (lambda step: step % 200 in range(50, 60), 13 / 197),
        "every 7th": (lambda step: step % 7 == 0, 4 / 7),
    }
    for name, (is_faulty, expected) in faults.items():
        met = [any(is_faulty(200 * at + place + step) for step in range(4)) for at, place in enumerate(places)]
        measured[name] = sum(met) / 1000
        assert abs(measured[name] - expected) < 4 * (expected * (1 - expected) / 1000) ** 0.5, name

    layer = torch.nn.Linear(2, 2)
    compute_by([layer], plain)
    agreements: List[Any] = [lambda value: value, lambda value: 3 if value in range(9) else value]
    for agreed, begins in zip(agreements, ([2, 1, 1], [3, 3, 3])):
        guard = Guard(lambda _: 1.0, torch.nn.Sequential(layer), every=5, steps=2, agreed=agreed)
        ends = []
        for step in range(15):
            guard(step)
            ends += [step for _ in guard.news()]
        assert ends == [5 * period + begin + 1 for period, begin in enumerate(begins)]


@proves(
    "where chance could explain a distance, three other roundings must agree, and windows follow until three of up to "
    "five do; one that is far beyond it decides alone, and a fallback does all steps since the last good window again",
    seed="C23",
    package="torch",
    since="2.1",
)
def test_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.Linear(2, 2)
    compute_by([layer], plain)
    cases = (
        ("-+++", "good"),
        ("-+-++", "good"),
        ("---", "fallback"),
        ("-++--", "fallback"),
        ("-~!", "fallback"),
        ("~", "good"),
    )
    for windows, last in (*cases, ("!", "fallback")):
        sequence = iter([verdict for window in "+" + windows for verdict in VERDICTS[window]])
        compared: List[Tuple[Outcome, ...]] = []

        def noting(*outcomes: Outcome) -> Any:
            compared.append(outcomes)  # noqa: B023
            return next(sequence)  # noqa: B023

        monkeypatch.setattr(guard_module, "distances", noting)
        guard = Guard(lambda _: 1.0, torch.nn.Sequential(layer), every=3, steps=1)
        assert [place_of(0, period, 2) for period in (0, 1)] == [1, 0]
        events = []
        for step in range(3 + len(windows)):  # the windows begin at steps 1 and 3, followed by those that vote
            guard(step)
            events += [(event["kind"], step, event["text"]) for event in guard.news()]
        kinds = ["good", *["doubt"] * (len(windows) - 1), last]
        assert [event[:2] for event in events] == [(kinds[0], 1), *zip(kinds[1:], range(3, 9))]
        assert f": {len(windows) + 1} steps are done again" in events[-1][2] or last == "good"
        for outcomes, others in zip(compared, compared[1:]):  # of one window, only what is rounded by hand is another
            assert [each is other for each, other in zip(outcomes, others)] in ([True, True, False], [False] * 3)


def scripted(verdicts: str, cut: int, steps: int = 1, until: int = 16, **others: Any) -> List[Tuple[Any, ...]]:
    """What a guard does if its windows compare like that and another goes on from its state at step cut."""
    layer, events = torch.nn.Linear(2, 2), []
    sequence = iter([verdict for window in verdicts for verdict in VERDICTS[window]])
    compute_by([layer], plain)
    with mock.patch.object(guard_module, "distances", lambda *_: next(sequence)):
        guard = Guard(lambda _: 1.0, torch.nn.Sequential(layer), every=4, steps=steps)
        for step in range(until):
            if step == cut:
                saved = {**guard.state_dict(), **others}
                guard = Guard(lambda _: 1.0, torch.nn.Sequential(layer), every=4, steps=steps, begun=step)
                guard.load_state_dict(saved if saved["every"] else {})
            guard(step)
            events += [(event["kind"], step, event["verified"], event["text"]) for event in guard.news()]
    return events


@proves(
    "a guard that goes on from another's state decides what that would have decided, at the same steps, in FP8, in "
    "high precision and in a vote; what cannot be done again is named, and without a state nothing is verified",
    seed="C23",
    package="torch",
    since="2.1",
)
def test_goes_on() -> None:
    for verdicts, kinds, verified in (
        ("+-+++++", "gdddgg", [3, 3, 3, 3, 9, 11]),
        ("+!-++++", "gfar", [3, 6, 8, 11]),  # in high precision every step counts as verified
        ("+---++++", "gddfrg", [3, 3, 3, 8, 10, 13]),
        ("++!-++++", "ggfa", [3, 6, 10, 11]),
    ):
        whole = scripted(verdicts, 99)
        assert [(event[0][0], event[2]) for event in whole[: len(kinds)]] == [*zip(kinds, verified)]
        fell = [step for kind, step, *_ in whole if kind == "fallback"]
        good = [event[2] for event in whole if event[0] == "good" and event[1] < min(fell, default=16)][-1]
        for cut in range(1, 16):
            parts = scripted(verdicts, cut)
            assert [event[:2] for event in parts] == [event[:2] for event in whole]
            # After a good window and before the fallback, the steps before the cut stay as they were.
            spoiled = [step for step in fell if good < cut <= step]
            named = f"the steps from {good} to {cut - 1}, which are not verified"
            assert ["not verified" in event[3] for event in parts].count(True) == len(spoiled)
            assert (named in "".join(event[3] for event in parts)) == bool(spoiled)
            assert spoiled or [event[2] for event in parts] == [event[2] for event in whole]
    # A window of two steps that is cut begins again if it still fits; otherwise, the period ends.
    assert [place_of(0, period, 2) for period in range(4)] == [1, 0, 0, 2]
    assert [[event[1] for event in scripted("+++++", cut, steps=2)] for cut in (99, 2, 5, 9, 15)] == [
        [2, 5, 9, 15],
        [3, 5, 9, 15],
        [2, 6, 9, 15],
        [2, 5, 10, 15],
        [2, 5, 9],
    ]
    assert [event[1] for event in scripted("+++++", 15, steps=2, until=20)] == [2, 5, 9, 18]
    (_, step, verified, _), *_ = scripted("+" * 9, 1, every=0)  # as from a checkpoint without a guard
    assert (step, verified) == (3, 4)
    other = Guard(lambda _: 1.0, Run(small("e8m3")).model, every=4, steps=1, begun=7)
    assert other.verified == 0
    other.load_state_dict({**other.state_dict(), "state": "high", "period": 5, "done": 3, "every": 9, "verified": 6})
    assert other.state_dict() == {**other.state_dict(), "state": "high", "period": 6, "done": 0, "verified": 6}


@proves(
    "a resumed run goes on in the guard's period, and its checkpoints and events say up to which step FP8 is verified",
    seed="C23",
    package="torchao",
)
def test_resumes(tmp_path: Path) -> None:
    assert [place_of(1, period, 2) for period in range(2)] == [0, 2]  # windows end behind the steps 1 and 7
    options = small("torchao.rowwise", steps=3, guard=4, guard_steps=2, seed=1, schedule="constant", out=str(tmp_path))
    trained(options)
    saved = checkpoint.load(last_of(tmp_path))["guard"]
    assert {name: saved[name] for name in ("state", "verified", "period", "done")} == {
        "state": "fp8",
        "verified": 2,
        "period": 0,
        "done": 3,
    }
    trained(dataclasses.replace(options, steps=8, resume=True))
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["step"], event["verified"]) for event in events if event["event"] == "guard"] == [(1, 2), (7, 8)]
    checkpoints = {event["step"]: event["verified"] for event in events if event["event"] == "checkpoint begins"}
    assert checkpoints == {2: 2, 3: 2, 4: 2, 6: 2, 8: 8}


@proves(
    "copies in the host's memory share none with the model or the optimizer, before or after a fallback, which has the "
    "same bits as with copies on the device",
    seed="C23",
    package="torch",
    since="2.1",
)
def test_host_memory() -> None:
    losses: Dict[str, List[float]] = {}
    for memory in ("device", "host"):
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 8)
        compute_by([layer], rounded(3, 2))
        model = torch.nn.Sequential(layer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        calls: List[int] = []

        def step_of(step: int) -> float:
            calls.append(step)  # noqa: B023
            optimizer.zero_grad()  # noqa: B023
            loss = (model(torch.randn(4, 8)) - 1).square().mean()  # noqa: B023
            loss.backward()
            optimizer.step()  # noqa: B023
            return float("nan") if step == 7 and calls.count(7) == 1 else float(loss.detach())  # noqa: B023

        guard = Guard(step_of, model, optimizer, every=4, steps=2, mantissas=(3, 2), memory=memory)
        losses[memory], kinds = [], []
        for step in range(16):
            losses[memory].append(guard(step))
            kinds += [event["kind"] for event in guard.news()]
            tensors = [*model.state_dict().values(), *leaves(optimizer.state_dict())]
            held = leaves([guard._good, guard._start])
            assert len(held) >= (3 if step < 4 else 9)  # weight, bias, random state; then two moments and a count each
            assert not {tensor.data_ptr() for tensor in tensors} & {tensor.data_ptr() for tensor in held}
        assert kinds[:3] == ["good", "good", "fallback"] and set(kinds[3:]) <= {"away", "return", "good"}
    assert losses["host"] == losses["device"]


def leaves(tree: Any) -> List[torch.Tensor]:
    """The tensors of a nested state."""
    return [leaf for leaf in torch.utils._pytree.tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


@proves(
    "the guard logs the layer with the largest magnitude, underflow and saturation: in closed form they are what e4m3 "
    "loses, and aligned rows of gate and up, whose product SwiGLU squares, show up in the layer behind them",
    seed="C23",
    package="torchao",
)
def test_extremes(measured: Dict[str, Any]) -> None:
    layers = {name: torch.nn.Linear(4, 2) for name in ("a", "b")}
    extremes, weight = Extremes(layers), torch.tensor([[2.0, 0.0], [-1.0, 1.0]])
    # e4m3 has 448 and 2^-9; what is at most half of the latter becomes 0, and 0 itself is not lost.
    for x in ([-448.0, 2.0**-10, 1.5 * 2.0**-10, 0.0], [449.0, -450.0, 3.0, 2.0]):
        extremes.note(layers["a"], torch.tensor([x]), weight)
    extremes.note(layers["b"], torch.tensor([[1.0, 3.0]]), 3 * weight)
    assert extremes.worst() == {
        "input amax": ("a", 450.0),
        "input underflow": ("a", 0.25),
        "input saturation": ("a", 0.5),
        "weight amax": ("b", 6.0),
        "weight underflow": ("a", 0.0),
        "weight saturation": ("a", 0.0),
    }

    worst: Dict[bool, Any] = {}
    for planted in (False, True):
        run = Run(small("torchao.tensorwise"))
        gate_up = run.model.blocks[1].feed_forward.gate_up.weight
        if planted:  # arXiv 2409.12517: w of the gate and of up align and grow, so that silu(wx) wx is about (wx)^2
            with torch.no_grad():
                gate_up[3] = gate_up[3 + len(gate_up) // 2] = torch.nn.functional.normalize(gate_up[3], dim=0) * 16
        guard = Guard(run.update, run.model, run.optimizer, every=1, steps=1, loss_of=loss_of)
        guard(0)
        worst[planted] = {name: value for event in guard.news() for name, value in event["extremes"].items()}
    for name in ("input amax", "input underflow"):
        layer, measured[name] = worst[True][name]
        assert layer == guard_proof.LAYER and measured[name] > 10 * worst[False][name][1]
    assert worst[True]["weight amax"][0] == "blocks.1.feed_forward.gate_up"


@proves(
    "the loop of one's own that the documentation shows is guarded, and goes on in its period from its checkpoint",
    seed="C23",
    package="torchao",
)
def test_own_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    ends = [20 * period + place_of(0, period, 16) + 3 for period in range(3)]
    for part in (ends[:2], ends[2:]):  # of 30 steps each
        torch.manual_seed(0)
        runpy.run_module("smoke_tests.training.guarded_loop")
        lines = [line.split()[:3] for line in capsys.readouterr().out.splitlines() if line[0].isdigit()]
        assert lines == [[str(end), "good", str(end + 1)] for end in part]
    saved = torch.load(tmp_path / "checkpoint.pt")
    assert ends[1] < 30 <= ends[2] and saved["step"] == 60
    assert {name: saved["guard"][name] for name in ("state", "period", "done")} == {
        "state": "fp8",
        "period": 3,
        "done": 0,
    }


@proves(
    "FP8 that is right is as far from high precision as its rounding explains, in each of 22 windows or by their vote",
    seed="C23",
    package="torchao",
)
def test_no_false_alarm(seed: int, measured: Dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    events: List[Dict[str, Any]] = []
    for name, value in {"EVERY": 2, "COMPARED": 2, "BATCH": 4}.items():
        monkeypatch.setattr(guard_proof, name, value)
    for precision, steps in zip(guard_proof.PRECISIONS, (40, 4)):
        events += guard_proof.guarded_run(seed, precision, steps=steps)["events"]
    assert len(events) == 22 and {event["kind"] for event in events} <= {"good", "doubt"}
    measured["doubts"] = sum(event["kind"] == "doubt" for event in events)
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
    run = Run(Options(precision="fp8", steps=80, learning_rate=3e-4, **fields))
    guard = Guard(run.update, run.model, run.optimizer, every=10, steps=4, loss_of=lambda row: float(row["loss"]))
    own, began = te.Linear.forward, time.perf_counter()
    events = []
    for step in range(80):
        wrong = 20 <= step < 40
        monkeypatch.setattr(te.Linear, "forward", (lambda *a, **n: 1.25 * own(*a, **n)) if wrong else own)
        guard(step)
        events += [(event["kind"], step, event) for event in guard.news()]
    measured["share"] = guard.seconds / (time.perf_counter() - began)
    history = "; ".join("{} at {}: {}".format(kind, step, event["text"]) for kind, step, event in events)
    decided = [(kind, step) for kind, step, _ in events if kind != "doubt"]
    kinds = [kind for kind, _ in decided]
    assert kinds[: kinds.index("fallback")] == ["good", "good"], history
    back, ends = kinds.index("return"), [step for _, step in decided]
    assert kinds.count("fallback") == kinds.count("return") == 1 and 20 <= ends[kinds.index("fallback")] < 40, history
    assert ends[back] >= 40 and kinds[back + 1 :] and set(kinds[back + 1 :]) == {"good"}, history
    for key in ("losses", "one", "all"):
        measured[key] = max(event[key] for kind, _, event in events if kind in ("good", "return"))
