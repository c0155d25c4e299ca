"""The steps of a run: gradients, clipping, AdamW, learning rate, memory, signals, and a loss that is not finite."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any, Dict, List
from unittest import mock

import pytest
import torch

from smoke_tests.claims import proves
from smoke_tests.operators import bounds, references
from smoke_tests.training import (
    checkpoint,
    logs,
    memory,
    pretrain,
    schedule,
    trainer,
)
from smoke_tests.training.models import MODELS, operations_per_token
from smoke_tests.training.schedule import spikes
from smoke_tests.training.small_runs import FP8, small, trained
from smoke_tests.training.trainer import NotFinite, Run

pytestmark = pytest.mark.usefixtures("one_thread")


@proves(
    "a run learns real text, and recomputed activations change no bit",
    seed="B03",
    package="torch",
    since="2.1",
)
def test_run(tmp_path: Path, measured: Dict[str, Any]) -> None:
    losses = trained(small(steps=40, batch_size=8, out=str(tmp_path / "one")))
    measured["first"], measured["last"] = losses[0], losses[-1]
    assert abs(losses[0] - math.log(256)) < 0.3
    assert losses[-1] < 4
    assert "<polyline" in (tmp_path / "one/loss.svg").read_text()
    again = trained(small(steps=4, batch_size=8, recompute=True, out=str(tmp_path / "four")))
    assert again == trained(small(steps=4, batch_size=8, out=str(tmp_path / "five")))


@proves(
    "the gradient of a step in one to four passes is that of its whole batch, each window once",
    package="torch",
    since="2.1",
)
def test_accumulates(measured: Dict[str, Any]) -> None:
    whole, windows = None, 12
    untouched = Run(small())
    exact = float(untouched.model(*untouched.text.windows(windows, windows)).detach())
    for parts in (1, 2, 3, 4):
        run = Run(small(batch_size=windows // parts, gradient_accumulation_steps=parts))
        loss = run.gradients(1)
        gradient = torch.cat([parameter.grad.flatten() for parameter in run.model.parameters()])
        whole = (loss, gradient.double()) if whole is None else whole
        assert float(loss) == pytest.approx(exact, rel=2.0**-20)
        measured[f"{parts} parts"] = bounds.relative_error(gradient, whole[1])
        # Of sums of 12 * 64 terms in another order.
        assert measured[f"{parts} parts"] <= windows * run.text.length * 2.0**-24


@proves(
    "a loss computed in chunks has the loss and the gradient of the whole, and keeps no logits for the backward pass",
    package="torch",
    since="2.1",
)
def test_loss_chunks(measured: Dict[str, Any]) -> None:
    gradients, kept, rows = [], [], []
    for chunks in (1, 3):
        run = Run(small(loss_chunks=chunks))
        vocabulary, tokens = run.data.shape.vocabulary, 2 * run.text.length
        sizes: List[int] = []
        run.model.head.register_forward_hook(lambda head, inputs, output: rows.append(output.flatten(0, -2).shape[0]))

        def pack(tensor: torch.Tensor, sizes: List[int] = sizes, vocabulary: int = vocabulary) -> torch.Tensor:
            sizes.append(tensor.numel() if tensor.shape[-1:] == (vocabulary,) else 0)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = run.gradients(0)
        kept.append(max(sizes))
        gradient = torch.cat([parameter.grad.flatten() for parameter in run.model.parameters()])
        gradients.append((float(loss), gradient.double()))
    assert kept == [tokens * vocabulary, 0] and set(rows[1:]) == {43, 42} and sum(rows[1:]) == 2 * tokens
    assert gradients[0][0] == pytest.approx(gradients[1][0], rel=2.0**-20)
    measured["chunks"] = bounds.relative_error(gradients[1][1], gradients[0][1])
    assert 0 < measured["chunks"] <= tokens * 2.0**-24  # sums of so many terms in another order


@pytest.mark.parametrize("share", [0.0, 0.3, 1e3])
@proves(
    "a step's update is AdamW's in float64 for the gradient as clipping leaves it, which scales one above the limit "
    "to it and no other; matrices decay, and vectors do not",
    package="torch",
    since="2.1",
)
def test_update(share: float, measured: Dict[str, Any]) -> None:
    rate = 3e-3
    run = Run(small(learning_rate=rate, schedule="constant", warmup=0, weight_decay=0.1))
    before = {name: start.double() for name, start in checkpoint.weights_of(run.model).items()}
    before = {name: start.clone() for name, start in before.items()}
    limit, history = 0.0, []
    for step in range(3):
        run.gradients(step)
        gradients = {name: each.grad.double() for name, each in run.model.named_parameters()}
        norm = float(torch.cat([each.flatten() for each in gradients.values()]).norm())
        limit = limit or share * norm  # 0: none
        run.options.clip = limit
        measured["norm"] = run.update(step)["norm"]
        assert run.step == step + 1
        terms = sum(each.numel() for each in gradients.values())
        assert measured["norm"] == pytest.approx(norm, rel=terms**0.5 * 2.0**-24)  # rounded at random in each sum
        factor = limit / norm if 0 < limit < norm else 1.0
        history.append({name: each * factor for name, each in gradients.items()})
    for name, parameter in run.model.named_parameters():
        decay = 0.1 if parameter.dim() > 1 else 0.0
        given = [each[name] for each in history]
        true = references.adamw(before[name], given, rate, (0.9, 0.95), 1e-8, decay)
        weight = parameter.detach()
        allowed = 3 * 2.0**-24 * (2.5 * torch.maximum(before[name].abs(), true.abs()) + 40 * rate)
        # torch divides by the norm plus a millionth.
        excess = float(((weight - true).abs() / (allowed + rate * 1e-6)).max())
        assert excess <= 1, f"{name} is {excess:.3g} times as far from float64 as rounding explains"


@proves(
    "gradients in bfloat16 are clipped to the limit by their norm in float32, and left alone below it",
    package="torch",
    since="2.1",
)
def test_clip_in_float32() -> None:
    for limit, scale in ((0.5, 1.0), (1e4, 1.0), (0.5, 2.0**-12), (1e-5, 2.0**-20)):
        parameters = [torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in (300, 70)]
        for parameter in parameters:
            parameter.grad = (scale * torch.randn(parameter.shape)).bfloat16()
        gradients = torch.cat([parameter.grad for parameter in parameters]).double()
        norm = float(gradients.norm())
        clipped_norm = float(trainer.clip_in_float32([*parameters, torch.nn.Parameter(torch.zeros(3))], limit))
        assert clipped_norm == pytest.approx(norm, rel=2.0**-20)
        clipped = torch.cat([parameter.grad for parameter in parameters]).double()
        share = min(1.0, limit / (norm + 1e-6))  # as torch's
        assert clipped.tolist() == pytest.approx((gradients * share).tolist(), rel=2.0**-8)


@proves(
    "the learning rate of each step is the schedule's in closed form: it rises in equal parts to its highest, stays, "
    "falls as a cosine, or stays and falls in a line, to the lowest rate, where it stays",
    package="torch",
    since="2.1",
)
def test_rates() -> None:
    top = 3e-3
    for warmup, steps in ((0, 7), (4, 11), (4, 5)):
        for name in ("cosine", "wsd", "constant"):
            options = small(schedule=name, warmup=warmup, steps=steps, decay_ratio=0.4)
            for step in range(steps + 1):
                rate = top * min(1.0, (step + 1) / max(1, warmup))
                if name == "cosine" and step >= warmup:
                    turned = math.cos(math.pi * (step - warmup) / (steps - warmup))
                    rate = top / 10 + (top - top / 10) * (1 + turned) / 2
                falls = {7: 3, 11: 4, 5: 1}[steps]  # the last 0.4, without the warm-up
                if name == "wsd" and step > steps - falls:
                    rate = top - (top - top / 10) * (step - (steps - falls)) / falls
                assert schedule.rate_at(step, options) == pytest.approx(rate, rel=1e-12)
    assert schedule.rate_at(5, small(warmup=5, steps=5)) == top  # of warm-up alone
    for name in ("cosine", "wsd"):
        longer = small(schedule=name, steps=30, decay_steps=10, min_lr_factor=0.25)
        shorter = small(schedule=name, steps=10, min_lr_factor=0.25)
        assert [schedule.rate_at(step, longer) for step in range(11)] == [
            schedule.rate_at(step, shorter) for step in range(11)
        ]
        assert [schedule.rate_at(step, longer) for step in (10, 11, 29)] == [top / 4] * 3
    run = Run(small(steps=4))
    for step in range(3):
        rate = run.update(step)["lr"]
        assert rate == schedule.rate_at(step, run.options)
        assert [group["lr"] for group in run.optimizer.param_groups] == [rate] * 2


@proves("SIGTERM ends a run after its step, with a checkpoint from which it goes on", package="torch", since="2.1")
def test_signal(tmp_path: Path) -> None:
    options, lines = small(out=str(tmp_path), steps=10_000, log_every=1), []

    def say(line: str) -> None:
        lines.append(line)
        if line.startswith("step 3/"):
            signal.raise_signal(signal.SIGTERM)

    assert threading.current_thread() is threading.main_thread()
    run, _ = pretrain.start(options)
    assert trainer.train(run, say) == 128 + signal.SIGTERM
    assert lines[-1] == "stopped after step 3 of 10000; --resume goes on"
    assert checkpoint.newest(tmp_path).name == "step-00000003.pt"  # type: ignore[union-attr]


@proves("SIGUSR1 has a run write a checkpoint after its step and go on", package="torch", since="2.1")
def test_save_signal(tmp_path: Path) -> None:
    def say(line: str) -> None:
        if line.startswith("step 3/"):
            signal.raise_signal(signal.SIGUSR1)

    assert len(trained(small(out=str(tmp_path), checkpoint_every=0, log_every=1), say)) == 6
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["step-00000003.pt", "step-00000006.pt"]


@proves(
    "with --skip-spikes a step whose loss jumps leaves weights and moments as they are and is an event, also for a run "
    "that goes on from a later checkpoint; without it no step is left out",
    package="torch",
    since="2.1",
)
def test_skip_spikes(tmp_path: Path) -> None:
    for skips in (True, False):
        out = tmp_path / str(skips)
        options = small(out=str(out), skip_spikes=skips, checkpoint_every=0)
        run, _ = pretrain.start(options)
        run.losses = [5.0] * 32  # of a model that has learnt something; that of its first step is 5.5
        before = [weight.clone() for weight in run.model.parameters()]
        assert run.update(0).get("skipped", 0) == skips
        assert skips == all(map(torch.equal, before, run.model.parameters()))
        assert skips == (not run.optimizer.state)
        run.losses = []
        assert "skipped" not in run.update(1)
        run.save()
        run.release()
        again, _ = pretrain.start(small(out=str(out), skip_spikes=skips, checkpoint_every=0, resume=True))
        assert {int(state["step"]) for state in again.optimizer.state.values()} == {2 - skips}
        assert run.update(2) == again.update(2)
        again.release()
    again.options.skip_spikes, again.losses = True, [5.0] * 40
    with mock.patch.object(schedule, "spikes", return_value=False) as judged:
        again.update(3)
    assert len(judged.call_args[0][0]) == 32 + 1
    with mock.patch.object(schedule, "spikes", lambda losses: len(losses) == 4), mock.patch.object(
        logs, "spikes", lambda losses: len(losses) == 4
    ):
        trained(small(out=str(tmp_path / "events"), skip_spikes=True))
    rows = logs.read_log(tmp_path / "events" / "log.jsonl")
    assert [row["step"] for row in rows if "skipped" in row] == [3]
    events = logs.read_log(tmp_path / "events" / "events.jsonl")
    assert [event["step"] for event in events if event["event"] == "skip"] == [3]


@proves(
    "while the disk is full a run goes on, and its log has each step once if there is space again before its end; "
    "otherwise it says which file is not whole, and ends with its failure",
    package="torch",
    since="2.1",
)
def test_full_disk_of_logs(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def code_of(out: Path, full: str, space: str) -> int:
        def say(line: str) -> None:
            lines.append(line)
            if line.startswith(full):  # in the middle of a line of the log
                size = (out / "log.jsonl").stat().st_size + 20
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
            if line.startswith(space):
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)

        run, _ = pretrain.start(small(out=str(out), log_every=1, checkpoint_every=0))
        try:
            return trainer.train(run, say)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    for name, space, code, steps in (("again", "step 5/", 0, 6), ("never", "step 9/", 1, 2)):
        lines: List[str] = []
        assert code_of(tmp_path / name, "step 2/", space) == code
        assert [row["step"] for row in logs.read_log(tmp_path / name / "log.jsonl")] == list(range(steps))
        assert sum("log.jsonl cannot be written (File too large)" in line for line in lines) == 1
        assert (code == 1) == any("loss.svg cannot be written" in line for line in lines)


@proves(
    "a run whose output nobody reads any more ends after its step, with a checkpoint, as SIGPIPE would end it",
    package="torch",
    since="2.1",
)
def test_broken_pipe(tmp_path: Path) -> None:
    read, write = os.pipe()
    output = os.fdopen(write, "w")
    run, _ = pretrain.start(small(out=str(tmp_path), steps=20, log_every=1))
    os.close(read)
    with contextlib.redirect_stdout(output):
        assert trainer.train(run) == 128 + signal.SIGPIPE
        output.close()  # which flushes it
    assert checkpoint.newest(tmp_path).name == "step-00000001.pt"  # type: ignore[union-attr]


@proves(
    "a loss that is not finite ends the run before a weight changes, and is named by step and layer",
    package="torch",
    since="2.1",
)
def test_not_finite(tmp_path: Path) -> None:
    run = Run(small())
    layer = run.model.blocks[1].feed_forward.down
    hook = layer.register_forward_hook(lambda layer, inputs, output: output * math.nan)
    before = {name: weight.clone() for name, weight in checkpoint.weights_of(run.model).items()}
    with pytest.raises(NotFinite, match=r"step 0: .* output that is not finite is that of blocks.1.feed_forward.down"):
        run.update(0)
    hook.remove()
    assert all(torch.equal(weight, before[name]) for name, weight in checkpoint.weights_of(run.model).items())
    hook = layer.register_full_backward_hook(lambda layer, inputs, outputs: (inputs[0] * math.inf,))
    with pytest.raises(NotFinite, match=r"first gradient that is not finite is that of .*blocks.1.feed_forward"):
        run.update(0)
    hook.remove()
    assert spikes([5 - 0.01 * step for step in range(40)]) == []
    assert spikes([5 - 0.01 * step + (step == 35) for step in range(40)]) == [35]
    # Six deviations, at least 0.3: of equal losses, and of losses whose deviation is 0.1.
    for deviation, jump, found in ((0.0, 0.29, []), (0.0, 0.31, [32]), (0.1, 0.55, []), (0.1, 0.65, [32])):
        curve = [5 + deviation * (-1) ** step for step in range(32)]
        assert spikes([*curve, 5 + jump]) == found


@proves(
    "weights, gradients and moments hold the bytes per parameter of the sum on paper",
    seed="B05",
    package="torchao",
)
def test_memory(measured: Dict[str, Any]) -> None:
    for precision in ("bf16", *FP8):
        run = Run(small(precision))
        run.update(0)
        paper, held = memory.bytes_per_parameter(precision), memory.held(run.model, run.optimizer)
        assert held == pytest.approx({name: paper[name] for name in held})
        measured[precision] = sum(paper.values())
    for precision, copies in (("float32", 0.0), ("bf16", 2.0), ("fp8", 2.0)):
        assert memory.bytes_per_parameter(precision) == {"weights": 4, "gradients": 4, "moments": 8, "copies": copies}
    remainders = memory.bytes_per_parameter("bf16", weights="bfloat16", moments="float32", remainders=True)
    assert remainders == {"weights": 2, "gradients": 2, "moments": 10, "copies": 0}
    assert memory.bytes_per_parameter(FP8[0])["copies"] == 0
    with pytest.raises(ValueError, match="chooses its own"):
        memory.bytes_per_parameter("ms-amp.O2")
    seed_001 = memory.bytes_per_parameter("bf16", weights="bfloat16", moments="float32")
    assert seed_001["weights"] + seed_001["moments"] == 10  # of Z2all's 1,255,499,776: 12.0 GiB, the seed's 12250 MB
    # 6 x (1,255,499,776 - 64,320 x 2,048) + 12 x 22 x 2,048 x 2,048: the input embedding is no product.
    assert operations_per_token(MODELS["z2all-1.26b"].shape) == 7_849_930_752
    assert 10 * MODELS["z2all-1.26b"].parameters / 2**20 == pytest.approx(12250, rel=0.03)
