"""The guard's limits: what it refuses, warns of, keeps in a checkpoint and in memory, and what it does not notice."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List
from unittest import mock

import pytest
import torch

from smoke_tests.claims import proves
from smoke_tests.training import checkpoint, guard, guard_example, guard_proof, pretrain, trainer
from smoke_tests.training.distance import ALL, SURE, sure
from smoke_tests.training.guard import FEW, LOSS_JUMP, NORM_JUMP, Guard, place
from smoke_tests.training.logs import read_log
from smoke_tests.training.options import Options
from smoke_tests.training.precision import compute_by, fp8_layers_of, rounded
from smoke_tests.training.shares import FORMATS, SATURATION, UNDERFLOW, Shares, scale_of, shares, warning
from smoke_tests.training.small_runs import last_of, small, trained
from smoke_tests.training.snapshot import Hosted, mapped, to_device, to_host
from smoke_tests.training.trainer import Run

pytestmark = pytest.mark.usefixtures("one_thread")


def short(steps: int, **others: Any) -> Options:
    """A guarded run in FP8 on two windows of 32 bytes."""
    fields = {"precision": "torchao.tensorwise", "length": 32, "schedule": "constant", "guard": 4, "guard_steps": 2}
    return small(steps=steps, **{**fields, **others})


def guard_of(run: Run, **others: Any) -> Guard:
    """A guard around a run."""
    fields: Dict[str, Any] = {"every": 4, "steps": 2, "loss_of": lambda row: row["loss"]}
    return Guard(run.update, run.model, run.optimizer, **{**fields, **others})


class Twice(torch.nn.Linear):  # type: ignore[misc]
    """A linear layer that does not compute as torch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + super().forward(x)


class LayerNormLinear(Twice):
    """A layer with a norm in it, as Transformer Engine's."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(2))


class ScalingTensor:
    """A weight that is no tensor of torch, as MS-AMP's."""


@proves(
    "a model that the guard cannot compare is refused in a sentence that names why: no FP8 layer, a norm in a layer, "
    "weights in bfloat16, of MS-AMP or sharded by FSDP2",
    package="torch",
    since="2.6",
)
def test_refusals() -> None:
    def refusal(*layers: torch.nn.Module) -> str:
        with pytest.raises(ValueError, match="the guard") as caught:
            Guard(float, torch.nn.Sequential(*layers))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "finds no FP8 layer in Sequential" in refusal(torch.nn.Linear(2, 2))
    assert "no FP8 layer" in refusal()
    assert "1 in high precision: LayerNormLinear is more" in refusal(Twice(2, 2), LayerNormLinear())
    assert "torch.bfloat16" in refusal(Twice(2, 2).bfloat16())
    scaled = Twice(2, 2)
    del scaled.weight
    scaled.__dict__["weight"] = ScalingTensor()
    assert "MS-AMP" in refusal(scaled)
    sharded = Twice(2, 2)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        fsdp = importlib.import_module("torch.distributed.fsdp")
        fsdp.fully_shard(sharded, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        assert "DTensor (a shard of FSDP2" in refusal(sharded)
    finally:
        torch.distributed.destroy_process_group()
    mlp = torch.nn.Module()
    mlp.fc1_weight = torch.nn.Parameter(torch.ones(2, 2))
    assert "is more than a product" in refusal(mlp)


@proves(
    "the layers that a guard compares are those in FP8: a head is one of them only if it was converted, and no other "
    "weight is ever named",
    package="torchao",
)
def test_head() -> None:
    from torchao.float8 import convert_to_float8_training

    run = Run(short(1))
    compared = {f"blocks.{block}.{name}" for block in (0, 1) for name in LAYERS}
    assert set(fp8_layers_of(run.model)) == compared
    assert set(guard_of(run)._weights) == {f"{name}.weight" for name in compared}
    whole = Run(small("float32"))
    assert fp8_layers_of(whole.model) == {}
    assert set(fp8_layers_of(convert_to_float8_training(whole.model))) == {*compared, "head"}


LAYERS = ("attention.qkv", "attention.output", "feed_forward.gate_up", "feed_forward.down")


# --- shares ---


@proves(
    "the shares of a tensor are its largest magnitude, what FP8 rounds to 0 and what it cuts off, as torch's cast to "
    "the format does, under its own scale, each row's, or delayed scaling's",
    package="torch",
    since="2.4",
)
def test_shares() -> None:
    for bits, dtype in ((3, torch.float8_e4m3fn), (2, torch.float8_e5m2)):
        form = FORMATS[bits]
        assert form.largest == torch.finfo(dtype).max
        x = torch.randn(64, 33) * 2.0 ** torch.randint(-45, 0, (64, 33))
        x[0, 0] = 0.0
        cast = (x * (form.largest / x.abs().max())).to(dtype).float()
        amax, zeroed, cut = shares(x, form).tolist()
        assert amax == float(x.abs().max())
        assert zeroed == pytest.approx(float(((cast == 0) & (x != 0)).sum() / (x != 0).sum())) and zeroed > 0
        assert cut == 0
        rows = x * (form.largest / x.abs().amax(-1, keepdim=True))
        zeroed_by_row = float(((rows.to(dtype).float() == 0) & (x != 0)).sum() / (x != 0).sum())
        assert shares(x, form, rows=True)[1] == pytest.approx(zeroed_by_row) and zeroed_by_row < zeroed
        ends = torch.tensor([form.largest, (form.largest + form.beyond) / 2, form.beyond, -2 * form.beyond, 1.0])
        assert shares(ends, form, torch.ones(())).tolist() == pytest.approx([2 * form.beyond, 0.0, 0.4])
        edge = torch.tensor([form.zero, -form.zero, 1.01 * form.zero, 1.0])
        assert shares(edge, form, torch.ones(()))[1] == 0.5
        assert (edge.to(dtype) == 0).tolist() == [True, True, False, False]
    assert shares(torch.zeros(3, 5), FORMATS[3]).tolist() == [0, 0, 0]


@proves(
    "shares are those of each layer's input, weight and output gradient, the largest since they were taken, and a "
    "warning names the one that is farthest beyond a limit",
    package="torch",
    since="2.4",
)
def test_shares_of_layers() -> None:
    layer, other = torch.nn.Linear(3, 5, bias=False), torch.nn.Linear(3, 5)
    watch = Shares({"one": layer, "two": other}, (3, 2))
    compute = watch.watched(rounded(3, 2))
    for factor in (2.0, 1.0):
        x, behind = factor * torch.tensor([[1.0, -3.0, 1e-6]]), torch.tensor([[1.0, 7.0, 1e-12, 0.0, 1e-12]])
        compute(layer, x).backward(factor * behind)
    table = watch.take()
    assert set(table) == {"one"} and watch.take() == {}
    assert table["one"]["input"] == pytest.approx([6.0, 1 / 3, 0.0])
    assert table["one"]["weight"][0] == float(layer.weight.detach().abs().max())
    assert table["one"]["gradient"] == pytest.approx([14.0, 0.5, 0.0])
    assert warning(table).startswith("one: FP8 rounds 50.0% of its gradient to 0")
    assert warning(table).endswith("1 more tensors are beyond a limit")
    assert warning({"one": {"input": [1.0, UNDERFLOW, SATURATION]}}) == ""
    assert "cuts 0.20% off" in warning({"one": {"input": [1.0, 0.0, 2 * SATURATION]}})

    class DelayedScaling:
        pass

    assert scale_of(layer, "scaling_fwd", 0) is None
    scaling = mock.Mock(scale=torch.tensor([400.0, 2.0]))
    layer.fp8_meta = {"recipe": DelayedScaling(), "scaling_fwd": scaling}
    assert [scale_of(layer, "scaling_fwd", index) for index in (0, 1)] == [400, 2]
    assert scale_of(layer, "scaling_bwd", 0) is None
    compute(layer, torch.tensor([[1.0, -3.0, 0.5]]))
    assert watch.take()["one"]["input"] == pytest.approx([3.0, 0.0, 1 / 3])


@proves(
    "gate and up projections that have grown large in the same direction make a guard warn of the values of the "
    "product that FP8 rounds to 0, and fall back",
    package="torchao",
)
def test_swiglu_outliers(measured: Dict[str, Any]) -> None:
    run = Run(short(12, learning_rate=1e-5, warmup=0))
    feed_forward = run.model.blocks[1].feed_forward
    direction = torch.nn.functional.normalize(torch.randn(96), dim=0)
    with torch.no_grad():  # one channel; what it multiplies is small, as long as it has not learned to be large
        feed_forward.gate_up.weight[3] = feed_forward.gate_up.weight[208 + 3] = 100 * direction
        feed_forward.down.weight[:, 3] = 0.0
    watching = guard_of(run)
    events: List[Dict[str, Any]] = []
    for step in range(12):
        watching(step)
        events += watching.news()
    (layers, *_) = (event["layers"] for event in events if event["kind"] == "layers")
    measured["amax"], measured["underflow"], _ = layers["blocks.1.feed_forward.down"]["input"]
    warned = [event["text"] for event in events if event["kind"] == "warning"]
    assert "blocks.1.feed_forward.down: FP8 rounds" in warned[0]
    assert "fallback" in [event["kind"] for event in events]


# --- what is kept ---


@proves(
    "with its copies in the host's memory a guard does the same, bit for bit, and a copy has no tensor elsewhere",
    package="torchao",
)
def test_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_proof, "options", lambda seed, precision, steps: short(steps, precision=precision))
    for name, value in {"EVERY": 4, "COMPARED": 2, "FROM": 6, "UNTIL": 7}.items():
        monkeypatch.setattr(guard_proof, name, value)
    runs = [guard_proof.guarded_run(0, "torchao.tensorwise", "NaN", 12, host) for host in (False, True)]
    kinds, losses = [[[event["kind"] for event in run["events"]] for run in runs], [run["losses"] for run in runs]]
    assert kinds[0] == kinds[1] and {"good", "fallback", "return"} <= set(kinds[0])
    assert losses[0] == losses[1]
    run = Run(short(2))
    run.update(0)
    devices: List[torch.device] = []
    copies = mapped([run.model.state_dict(), run.optimizer.state_dict()], to_host)
    mapped(
        copies, lambda each: devices.append(each.values.device) if isinstance(each, Hosted) else devices.append(None)
    )
    assert len(devices) > 30 and set(devices) == {torch.device("cpu")}
    back = mapped(copies, to_device)
    weight = copies[0]["head.weight"]
    assert torch.equal(back[0]["head.weight"], weight.values) and weight.device == run.model.head.weight.device
    assert back[0]["head.weight"].data_ptr() != weight.values.data_ptr()


@proves(
    "a resumed run compares the steps that the whole run compares, its checkpoint says up to which step it was "
    "verified, and an event says which steps were not",
    package="torchao",
)
def test_resumed(tmp_path: Path) -> None:
    def events_of(out: str) -> List[Any]:
        rows = read_log(tmp_path / out / "events.jsonl")
        return [(row["kind"], row["step"], row["verified"]) for row in rows if row.get("kind") not in (None, "layers")]

    losses = trained(short(12, out=str(tmp_path / "whole")))
    whole = events_of("whole")
    assert [kind for kind, *_ in whole] == ["good"] * 3
    ends = [verified for *_, verified in whole]
    trained(short(7, out=str(tmp_path / "parts")))
    kept = checkpoint.load(last_of(tmp_path / "parts"))["guard"]
    verified = max(end for end in ends if end <= 7)
    assert (kept["state"], kept["done"], kept["verified"]) == ("fp8", 7, verified)
    assert trained(short(12, out=str(tmp_path / "parts"), resume=True)) == losses
    first, second = [each for each in whole if each[2] <= 7], [each for each in whole if each[2] - 2 >= 7]
    assert second and events_of("parts") == [*first, ("resumed", 7, verified), *second]


@proves(
    "after a fallback there is no checkpoint of a step that was done again, but one of the run as it went on",
    package="torchao",
)
def test_replaced(tmp_path: Path) -> None:
    run, _ = pretrain.start(short(8, guard=8, checkpoint_every=1, keep=9, out=str(tmp_path)))
    own, planted = run.update, guard_proof.not_a_number(run)

    def update(step: int) -> Dict[str, float]:
        with planted.plant() if step == 5 else contextlib.nullcontext():
            return own(step)

    run.update = update  # type: ignore[method-assign]
    assert trainer.train(run, lambda line: None) == 0
    rows = read_log(tmp_path / "events.jsonl")
    (fallback,) = [row for row in rows if row.get("kind") == "fallback"]
    verified, step = fallback["verified"], fallback["step"]
    left = sorted(checkpoint.step_of(path) for path in tmp_path.glob("step-*.pt"))
    assert left == [each for each in range(1, 9) if each <= verified or each > step]
    assert checkpoint.load(tmp_path / f"step-{step + 1:08}.pt")["guard"]["state"] == "high"


# --- what is not noticed ---


@proves(
    "a fault that is gone before a step is compared, and one of the optimizer alone, are not noticed while nothing "
    "jumps: the guard calls their periods good",
    package="torchao",
)
def test_not_noticed() -> None:
    def kinds(spoil: Callable[[Run, int], None]) -> List[str]:
        run, events = Run(short(8)), []
        watching = guard_of(run)
        for step in range(8):
            spoil(run, step)
            watching(step)
            events += watching.news()
        return [event["kind"] for event in events if event["kind"] not in ("layers", "warning")]

    def moments(run: Run, step: int) -> None:
        for state in run.optimizer.state.values() if step else ():
            state["exp_avg"].mul_(1.05)

    def weight(run: Run, step: int) -> None:
        if step == place(0, 0, 2) + 2:  # after the first compared steps, before the next
            with torch.no_grad():
                run.model.blocks[0].attention.qkv.weight.mul_(1.01)

    assert kinds(moments) == kinds(weight) == ["good", "good"]


@proves(
    "where a loss or a gradient jumps, the guard falls back unless high precision jumps as well; then no bit changes, "
    "and once in a period the guard says so",
    package="torch",
    since="2.4",
)
def test_jump() -> None:
    def events_of(step: Callable[[int], Any]) -> Any:
        layer = torch.nn.Linear(2, 2)
        compute_by([layer], rounded(3, 2))
        watching = Guard(step, torch.nn.Sequential(layer), every=20, steps=1, loss_of=min, norm_of=max, high=in_high)
        results = [watching(batch) for batch in range(20)]
        return results, [(event["kind"], event["text"]) for event in watching.news() if event["kind"] != "layers"]

    high = [False]

    @contextlib.contextmanager
    def in_high() -> Iterator[None]:
        high[0] = True
        yield
        high[0] = False

    def jumping(to: Any, *batches: int, only_fp8: bool = False) -> Callable[[int], Any]:
        return lambda batch: to if batch in batches and not (only_fp8 and high[0]) else (1.0, 4.0)

    of_loss, of_norm = (LOSS_JUMP + 0.1, 4.0), (1.0, 4 * NORM_JUMP + 1)
    for to, named in ((of_loss, "the loss jumps"), (of_norm, "the gradient's norm jumps to 41 from about 4")):
        results, events = events_of(jumping(to, 9, 11))
        assert results == [to if batch in (9, 11) else (1.0, 4.0) for batch in range(20)]
        texts = [text for kind, text in events if kind == "jump"]
        assert len(events) - len(texts) == 1 and 1 <= len(texts) <= 2
        assert all(named in text and "in high precision, too" in text for text in texts)
        results, events = events_of(jumping(to, 9, only_fp8=True))
        assert results == [(1.0, 4.0)] * 20
        assert named in dict(events)["fallback"]
    for to, batch in (((LOSS_JUMP - 0.1, 4.0), 9), ((1.0, 4 * NORM_JUMP - 1), 9), (of_loss, FEW - 1)):
        assert [kind for kind, _ in events_of(jumping(to, batch))[1]] == ["good"]


@proves(
    "what is a little too far has to be so twice in a row: then, and at once if it is twice as far as a limit, a guard "
    "falls back to the last good state",
    package="torch",
    since="2.4",
)
def test_unsure(monkeypatch: pytest.MonkeyPatch) -> None:
    def decided(*ratios: float) -> List[Any]:
        answers = iter(ratios)
        far = lambda *_: (lambda all: ({"losses": 1.0, "one": 1.0, "all": all}, "far" * (all > ALL)))(next(answers))  # noqa: E731
        monkeypatch.setattr(guard, "distances", far)
        layer = torch.nn.Linear(2, 2)
        compute_by([layer], rounded(3, 2))
        watching = Guard(lambda batch: 1.0, torch.nn.Sequential(layer), every=10, steps=2)
        for batch in range(20):
            watching(batch)
        return [(event["kind"], event["verified"]) for event in watching.news() if event["kind"] != "layers"]

    first, second = (10 * period + place(0, period, 8) + 2 for period in (0, 1))
    little = SURE * ALL - 0.1
    assert decided(1.0, 1.0) == [("good", first), ("good", second)]
    assert decided(little, 1.0, 1.0) == [("unsure", 0), ("good", first + 2), ("good", second)]
    assert decided(little, little, 1.0)[:2] == [("unsure", 0), ("fallback", 0)]
    assert decided(1.0, SURE * ALL + 0.1)[:2] == [("good", first), ("fallback", first)]
    assert [sure({"losses": a, "one": b, "all": c}) for a, b, c in ((39, 7.9, 2.7), (41, 1, 1), (1, 8.1, 1))] == [
        False,
        True,
        True,
    ]
    assert sure({})


@proves("the example of a loop of one's own runs, and its guard compares and goes on", package="torchao")
def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    watching = guard_example.main(16)
    assert (watching.state, watching.done) == ("fp8", 16) and watching.verified > 8
    assert [line.split()[2:] for line in capsys.readouterr().out.splitlines() if "good" in line] == [
        ["layers", "good"]
    ] * 2
    assert len(Path(guard_example.__file__).read_text().splitlines()) <= 30
