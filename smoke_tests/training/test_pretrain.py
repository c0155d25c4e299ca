"""The command that a user starts: its flags, a DeepSpeed configuration, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from smoke_tests.claims import proves
from smoke_tests.operators.table import OPERATORS
from smoke_tests.training import (
    checkpoint,
    deepspeed_config,
    folder,
    infer,
    pretrain,
)
from smoke_tests.training.columns import columns_of
from smoke_tests.training.options import parse
from smoke_tests.training.small_runs import last_of, refusal_of, small, trained
from smoke_tests.training.trainer import Run

pytestmark = pytest.mark.usefixtures("one_thread")


# Tables of a DeepSpeed configuration that cannot be followed, by the field that the refusal names.
REFUSED_FIELDS = {
    "scheduler.params.warmup_type": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}},
    "optimizer.params.betas": {"optimizer": {"params": {"betas": [0.9]}}},
    "zero_optimization.stage": {"zero_optimization": {"stage": 3}},
    "fp16.enabled": {"fp16": {"enabled": True}},
    "train_batch_size": {"train_batch_size": 999},
    "msamp.enabled": {"msamp": {"enabled": True, "opt_level": "O2"}},
    "bf16.enabled": {"bf16": {"enabled": False}},
    "gradient_clipping": {"gradient_clipping": "much"},
    "tensorboard.output_path": {"tensorboard": {"output_path": "x"}},
}


@proves(
    "a DeepSpeed configuration is followed field by field, and what cannot be followed is refused by name",
    seed="A08",
    package="torch",
    since="2.1",
)
def test_deepspeed(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    hare = {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}, "fp16": {"enabled": False, "loss_scale": 0}}
    more = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.8, 0.9], "eps": "auto"}}}
    batch = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3, "train_batch_size": 12}
    path.write_text(json.dumps({**hare, **more, **batch, "gradient_clipping": 0.5}))
    options = deepspeed_config.applied(str(path), small("bf16"))
    assert (options.batch_size, options.gradient_accumulation_steps, options.clip) == (4, 3, 0.5)
    assert (options.learning_rate, options.beta1, options.beta2, options.eps) == (1e-4, 0.8, 0.9, 1e-8)
    schedule = {"type": "WarmupCosineLR", "params": {"warmup_type": "linear", "warmup_num_steps": 7}}
    schedule["params"]["cos_min_ratio"] = 0.1  # type: ignore[index]
    path.write_text(json.dumps({"scheduler": schedule}))
    options = deepspeed_config.applied(str(path), small("bf16", schedule="constant"))
    assert (options.schedule, options.warmup) == ("cosine", 7)
    for field, table in {
        "--clip": {"gradient_clipping": -1.0},
        "--log-every": {"steps_per_print": 0},
        "--beta2": {"optimizer": {"params": {"betas": [0.9, 1.5]}}},
    }.items():
        path.write_text(json.dumps(table))
        options = small("bf16", deepspeed=str(path), out=str(tmp_path / "out"))
        assert field in refusal_of(lambda options=options: pretrain.start(options))  # type: ignore[misc]
    for field, table in REFUSED_FIELDS.items():
        path.write_text(json.dumps(table))
        assert field in refusal_of(lambda: deepspeed_config.applied(str(path), small("bf16")))
    for processes, makes in ((1, "one process makes it 12"), (2, "2 processes make it 24")):
        path.write_text(json.dumps({**batch, "train_batch_size": 12 * processes}))
        assert deepspeed_config.applied(str(path), small("bf16"), processes).batch_size == 4
        path.write_text(json.dumps({**batch, "train_batch_size": 36}))
        text = refusal_of(lambda processes=processes: deepspeed_config.applied(str(path), small("bf16"), processes))  # type: ignore[misc]
        assert text.endswith(f"train_batch_size is 36, and {makes}")


# Flags that no machine can follow, and the flag that the refusal names.
UNREADABLE = (
    ("--steps 0", "--steps"),
    ("--steps ten", "--steps"),
    ("--modle tiny", "--modle"),
    ("--model huge", "--model"),
    ("--precision fp7", "--precision"),
    ("--learning-rate nan", "--learning-rate"),
    ("--guard 10 --precision bf16", "--guard"),
    ("--guard 2 --precision torchao.tensorwise", "--guard-steps"),
)
# Flags that cannot be followed together, or on a CPU.
UNFIT = (
    ("--precision fp8", "--precision fp8"),
    ("--ops swish=torch", "--ops"),
    ("--ops rope=cuda", "--ops"),
    ("--graphs", "--graphs"),
    ("--precision ms-amp.O1", "--precision ms-amp.O1 needs"),  # the package, or else a GPU
    ("--precision ms-amp.O1 --ops adamw=apex", "--ops"),
    ("--precision ms-amp.O2 --compile", "--compile"),
    ("--precision ms-amp.O2 --graphs", "--graphs"),
    ("--precision ms-amp.O2 --recompute", "--recompute"),
    ("--precision ms-amp.O2 --guard 10", "--guard"),
    ("--precision ms-amp.O2 --gradient-accumulation-steps 2", "--gradient-accumulation-steps"),
    ("--weights bfloat16", "--weights bfloat16 needs a GPU"),
    ("--weights bfloat16 --precision float32", "--precision float32"),
    ("--weights bfloat16 --ops adamw=torch", "--ops"),
    ("--weights bfloat16 --precision torchao.rowwise --guard 10", "--guard"),
    ("--te-modules", "--te-modules needs a GPU"),
    ("--te-modules --precision torchao.rowwise", "--precision torchao.rowwise"),
    ("--te-modules --ops swiglu=torch", "--ops swiglu=torch"),
    ("--te-modules --guard 10", "--guard"),
    ("--ops rms_norm=transformer-engine", "--weights bfloat16"),
    ("--resume", "--resume"),
    ("--out /proc/none", "--out"),
)


@proves("a run that cannot be made is refused in one sentence that names the flag", package="torch", since="2.1")
def test_refusals(tmp_path: Path) -> None:
    lines = (tmp_path / "lines.jsonl", tmp_path / "short.txt")
    lines[0].write_text('{"text": "a"}\n{"txt": "b"}\n')
    lines[1].write_text("too short")
    for words, named in UNREADABLE:
        assert named in refusal_of(lambda words=words: parse(words.split()))  # type: ignore[misc]
    for more, named in (
        *((words.split(), named) for words, named in UNFIT),
        (["--data", str(lines[0])], "line 2"),
        (["--data", str(lines[1])], "too few"),
        (["--data", str(tmp_path / "none.txt")], "none.txt"),
        (["--deepspeed", str(lines[0])], "--deepspeed"),
        (["--tokenizer", str(tmp_path)], "tokenizer"),
    ):
        flags = ["--out", str(tmp_path / "out"), "--device", "cpu", *more]
        assert named in refusal_of(lambda flags=flags: pretrain.main(flags))  # type: ignore[misc]
    trained(small(steps=1, out=str(tmp_path / "done")))
    assert "--resume" in refusal_of(lambda: pretrain.start(small(out=str(tmp_path / "done"))))
    assert "--seed" in refusal_of(lambda: pretrain.start(small(out=str(tmp_path / "done"), resume=True, seed=1)))
    trained(small(steps=3, out=str(tmp_path / "further")))
    assert "--steps 2" in refusal_of(lambda: pretrain.start(small(steps=2, out=str(tmp_path / "further"), resume=True)))
    lines[1].write_text("another text, long enough for two windows\n" * 99)
    content, moved = checkpoint.load(last_of(tmp_path / "further")), str(tmp_path / "moved.pt")
    torch.save({**content, "options": {**content["options"], "data": [str(lines[1])]}}, moved)
    assert "another text" in refusal_of(lambda: infer.main([moved, "--device=cpu", "--tokens=1"]))
    run = Run(small())
    run.options.precision = "ms-amp.O1"
    assert "--precision" in refusal_of(lambda: run.load(last_of(tmp_path / "done")))


@proves(
    "on a GPU fused attention is cuDNN's, but for wide heads, where every bit has to repeat, and in float32; what is "
    "named is proved in the precision, or refused",
    package="torch",
    since="2.5",
)
def test_columns() -> None:
    def attention(head_size: int, half: bool = True) -> str:
        return columns_of("fused", True, head_size, half)["attention"]

    def refused(ops: str, half: bool = True) -> str:
        return refusal_of(lambda: columns_of(ops, True, 64, half))

    assert attention(128) == "torch.cudnn" != attention(256)
    assert attention(128, half=False) == "naive"
    single = columns_of("fused", True, 64, half=False)
    assert all("float32" in OPERATORS[name][column].cuda for name, column in single.items() if column != "naive")
    assert "attention=torch.cudnn is not proved on a GPU in float32" in refused("attention=torch.cudnn", half=False)
    assert "attention=torch is not proved on a GPU" in refused("attention=torch")
    with mock.patch.dict(OPERATORS["rope"], {"nothing": OPERATORS["rope"]["torch"]}):
        assert "rope=nothing is not installed here" in refused("rope=nothing")
    assert columns_of("attention=naive", True, 64, half=False)["attention"] == "naive"
    torch.use_deterministic_algorithms(True)
    try:
        assert attention(128) != "torch.cudnn"
        assert "--deterministic" in refused("attention=torch.cudnn")
    finally:
        torch.use_deterministic_algorithms(False)


@proves("--data takes the files of each time that it is given", package="torch", since="2.1")
def test_data_twice() -> None:
    assert parse(["--data", "a.txt", "b.txt", "--data", "c.jsonl"]).data == ("a.txt", "b.txt", "c.jsonl")
    assert parse([]).data == ()


@proves(
    "a refused run leaves no folder behind, and takes nothing from one that was there",
    package="torch",
    since="2.1",
)
def test_refused_folder(tmp_path: Path) -> None:
    out, wrong = tmp_path / "runs" / "first", ["--device", "cpu", "--graphs"]
    assert "--graphs" in refusal_of(lambda: pretrain.main([*wrong, "--out", str(out)]))
    assert list(tmp_path.iterdir()) == []
    out.mkdir(parents=True)
    (out / "notes.txt").touch()
    assert "--graphs" in refusal_of(lambda: pretrain.main([*wrong, "--out", str(out)]))
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


@proves(
    "a second run in the folder of one that runs is refused, names its process, and may have it once that was killed",
    package="torch",
    since="2.1",
)
def test_lock(tmp_path: Path) -> None:
    options = small(out=str(tmp_path / "out"), steps=1)
    path = tmp_path / "out" / folder.LOCK
    path.parent.mkdir()
    code = (
        "import fcntl, os, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print(os.getpid(), file=file, flush=True); print('locked', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        assert f"in use by process {other.pid}:" in refusal_of(lambda: pretrain.start(options))
        other.kill()
    assert len(trained(options)) == 1
    run, _ = pretrain.start(small(out=options.out, resume=True, steps=1))
    assert f"process {os.getpid()}:" in refusal_of(lambda: pretrain.start(small(out=options.out, resume=True)))
    run.release()
