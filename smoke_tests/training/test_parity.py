"""The comparison of runs in several precisions."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any, Dict

import pytest
import torch

from smoke_tests.claims import proves
from smoke_tests.training import (
    logs,
    parity,
)
from smoke_tests.training.documents import TextError
from smoke_tests.training.models import MODELS
from smoke_tests.training.small_runs import refusal_of

pytestmark = pytest.mark.usefixtures("one_thread")


@proves(
    "parity's interval over seeds holds the difference that was put there in 93 to 97 % of 1,000 simulated comparisons "
    "(pooled blocks of steps: in less than half), and a difference of the margin is called equivalent in 5 % at most",
    package="torch",
    since="2.1",
)
def test_parity(measured: Dict[str, Any]) -> None:
    draw = random.Random(1)
    held, pooled, wrong = 0, 0, 0
    for _ in range(1000):
        # Five seeds; a seed's deviation lasts for its whole run of ten blocks of steps.
        means = [draw.gauss(parity.MARGIN, 0.01) for _ in range(5)]
        blocks = [[draw.gauss(mean, 0.002) for _ in range(10)] for mean in means]
        low, high = parity.judged([statistics.mean(own) for own in blocks])["interval"]
        held += low <= parity.MARGIN <= high
        close = parity.judged([draw.gauss(parity.MARGIN, 0.0005) for _ in range(5)])
        wrong += close["verdict"] == "equivalent"
        every = [block for own in blocks for block in own]
        reach = 1.96 * statistics.stdev(every) / len(every) ** 0.5
        pooled += abs(statistics.mean(every) - parity.MARGIN) <= reach
    measured.update(held=held / 1000, pooled=pooled / 1000, wrong=wrong / 1000)
    assert 930 <= held <= 970 and pooled < 500 and wrong <= 50
    assert parity.smoothed([1, 2, 3, 4], 2) == [1.5, 2.5, 3.5]
    assert parity.differences([[9, 9, 1, 1], [9, 9, 2, 2]], [[0, 0, 1, 2], [0, 0, 2, 2]]) == [0.5, 0.0]
    assert parity.differences([[0.0, 0.0]], [[0.0, 0.00123456]]) == [0.0012346]
    assert parity.judged([0.1] * 4) == {}
    verdicts = [parity.judged([mean + off for off in (-0.002, -0.001, 0, 0.001, 0.002)]) for mean in (0.001, 0.02)]
    verdicts.append(parity.judged([-0.1, 0.1, 0.0, -0.05, 0.08]))
    assert [judged["verdict"] for judged in verdicts] == ["equivalent", "different", "not told apart"]


@proves(
    "parity's interval is Student's: the mean over seeds, plus and minus the quantile of one seed fewer times the "
    "standard error; beyond 31 seeds the quantile stays that of 31",
    package="torch",
    since="2.1",
)
def test_parity_interval() -> None:
    for count, quantile in ((5, 2.776), (6, 2.571), (31, 2.042), (40, 2.042)):
        values = [draw + 1.0 for draw in torch.randn(count, dtype=torch.float64).tolist()]
        judged, mean = parity.judged(values), sum(values) / count
        reach = quantile * (sum((each - mean) ** 2 for each in values) / (count - 1) / count) ** 0.5
        assert judged["above"] == pytest.approx(mean) and judged["interval"] == pytest.approx(
            [mean - reach, mean + reach]
        )


@proves(
    "an arm is compared with the first of its learning rate, or with the first of all where no other has its rate",
    package="torch",
    since="2.1",
)
def test_parity_compares() -> None:
    rates = {"a": 1e-3, "b": 1e-3, "c": 2e-3, "d": 2e-3, "e": 3e-3}
    curves: parity.Curves = {arm: {0: {"options": {"learning_rate": rate}}} for arm, rate in rates.items()}
    assert parity.references(curves) == {"a": "a", "b": "a", "c": "c", "d": "c", "e": "a"}
    assert parity.texts(curves) == set()
    curves["a"][0]["text"], curves["b"][0]["text"] = "one", "another"
    assert parity.texts(curves) == {"one", "another"}


@proves(
    "on held-out text, an arm's last loss is compared with its reference's of the same seed, and the tokens and "
    "seconds that both needed to a loss that they all reached are read between two evaluations on a line",
    package="torch",
    since="2.1",
)
def test_parity_on_held_out_text() -> None:
    def row(seconds: float, *losses: float) -> Dict[str, Any]:
        held_out = [[10 * index, loss] for index, loss in enumerate(losses, start=1)]
        return {"tokens_per_step": 256, "step_seconds": seconds, "validation": held_out}

    curves = {
        "a": {0: row(2.013, 5.0, 3.0, 2.3), 1: row(1.0, 4.0, 2.5, 2.5)},
        "b": {0: row(3.0, 3.0, 2.0, 1.1), 1: row(1.0, 3.5, 3.0, 2.4), 2: row(1.0, 9.0)},
    }
    numbers = parity.on_held_out(curves, {"a": "a", "b": "a"})
    assert numbers["a"] == {"end": 2.4}
    assert numbers["b"] == {
        "end": 1.75,
        "above": [-0.521739, -0.04],
        "goal": 2.5,
        "arm": {"tokens": 5547, "seconds": 36.7},  # after steps 15 and 28.333
        "reference": {"tokens": 6034, "seconds": 37.3},  # after steps 27.143 and 20
    }
    assert parity.reached([[10, 2.0], [20, 1.5]], 1.75) == 15 and parity.reached([[10, 2.0], [20, 1.5]], 3.0) == 10
    with pytest.raises(ValueError, match=r"no loss is as low as 1\.0"):
        parity.reached([[10, 2.0], [20, 1.9]], 1.0)
    del curves["b"][0]["validation"]
    assert parity.on_held_out(curves, {"a": "a", "b": "a"}) == {}


@proves("runs of several arms go on where their time was over, and become numbers and a figure", package="torchao")
def test_parity_runs(tmp_path: Path) -> None:
    flags = ["--model=tiny", "--steps=12", "--batch-size=2", "--device=cpu", "--checkpoint-every=0"]
    flags += ["--eval-every=5", "--eval-windows=2"]
    arms = ["float32/naive", "torchao.rowwise", "bf16/fused@0.001", "e8m3/fused@0.001", "e8m3/fused@0.002"]
    assert parity.run(tmp_path, arms, 2, 0.0, flags) == 75
    assert parity.run(tmp_path, arms, 2, 1.0, flags) == 0
    report = parity.report(tmp_path, 4)
    assert [sorted(runs) for runs in parity.curves(tmp_path).values()] == [[0, 1]] * 5
    assert all(len(row["loss"]) == 12 for runs in parity.curves(tmp_path).values() for row in runs.values())
    assert list(report["arms"]) == arms and "differences" not in report["arms"][arms[0]]
    held_out = [row["validation"] for runs in parity.curves(tmp_path).values() for row in runs.values()]
    assert all([step for step, _ in row] == [5, 10, 12] for row in held_out)
    assert [len(report["arms"][arm]["validation"].get("above", [])) for arm in arms] == [0, 2, 0, 2, 2]
    row = parity.curves(tmp_path)[arms[1]][0]
    assert 0 < row["step_seconds"] <= row["seconds"] / 4
    assert row["columns"]["attention"] == "torch" and row["tokens_per_step"] == 2 * MODELS["tiny"].shape.length
    assert len(report["arms"][arms[1]]["differences"]) == 2 and "verdict" not in report["arms"][arms[1]]
    beside = [report["arms"][arm]["beside"] for arm in arms]
    assert beside == [arms[0], arms[0], arms[2], arms[2], arms[0]]  # the last has its learning rate alone
    assert (tmp_path / "parity.svg").read_text().count("<polyline") == 15
    logs.Log(tmp_path / "curves.jsonl").write(arm=arms[0], seed=2, text="another")
    with pytest.raises(TextError, match="read another text"):
        parity.run(tmp_path, arms, 4, 1.0, flags)
    with pytest.raises(TextError, match="different texts"):
        parity.report(tmp_path, 4)
    (tmp_path / "curves.jsonl").write_text((tmp_path / "curves.jsonl").read_text().partition("\n")[0] + "\n")
    assert "has 12 steps, too few" in refusal_of(lambda: parity.report(tmp_path, 50))
