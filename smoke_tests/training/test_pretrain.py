"""The run that a user starts: its models, its steps, its checkpoints, and what it says of what goes wrong."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import math
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import pytest
import torch

import bounds
import references
from claims import long, needs, proves
from kernels import assert_float8_products
from training import checkpoint, deepspeed_config, infer, kills, memory, parity, pretrain
from training.checkpoint import CheckpointError
from training.decoder import Decoder
from training.models import MODELS, operations_per_token, parameters_of
from training.precision import layers_of, round_mantissa
from training.pretrain import NotFinite, Options, Refused, Run, columns_of, model_of
from training.text import Text, TextError

FP8 = ("torchao.tensorwise", "torchao.rowwise")


pytestmark = pytest.mark.usefixtures("one_thread")


def small(precision: str = "float32", steps: int = 6, **others: Any) -> Options:
    """A run of the tiny model that takes a second."""
    fields: Dict[str, Any] = {
        "batch_size": 2,
        "warmup": 2,
        "checkpoint_every": 2,
        "device": "cpu",
        "learning_rate": 3e-3,
    }
    return Options(**{**fields, "precision": precision, "steps": steps, **others})


def trained(options: Options, say: Callable[[str], None] = lambda line: None) -> List[float]:
    """The losses of a run, from its first step or from where it was left."""
    run, _ = pretrain.start(options)
    assert pretrain.train(run, say) == 0
    return [row["loss"] for row in pretrain.read_log(Path(options.out) / "log.jsonl")]


def refusal_of(call: Callable[[], Any]) -> str:
    """The one sentence that a call ends with."""
    with pytest.raises((SystemExit, Refused, deepspeed_config.Unmapped)) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and "Traceback" not in text
    return text


@proves("each model that can be trained has the number of parameters that its source gives it", package="torch")
def test_models(measured: Dict[str, Any]) -> None:
    columns = columns_of("naive", False, 16)
    for name, model in MODELS.items():
        assert parameters_of(model.shape) == model.parameters, name
        with torch.device("meta"):
            made = Decoder(model, columns, torch.float32)
        assert sum(parameter.numel() for parameter in made.parameters()) == model.parameters, name
    published = {"hare-1.1b": 1_123_117_056, "z2all-1.26b": 1_255_499_776, "llama-3-8b": 8_030_261_248}
    assert all(MODELS[name].parameters == count for name, count in published.items())
    measured["models"] = len(MODELS)


@proves(
    "a run learns real text, accumulates what a larger batch would give, and recomputed activations change no bit",
    seed="B03",
    package="torch",
    since="2.4",
)
def test_run(tmp_path: Path, measured: Dict[str, Any]) -> None:
    losses = trained(small(steps=40, batch_size=8, out=str(tmp_path / "one")))
    measured["first"], measured["last"] = losses[0], losses[-1]
    assert abs(losses[0] - math.log(256)) < 0.3
    assert losses[-1] < 4
    assert "<polyline" in (tmp_path / "one/loss.svg").read_text()
    halves = trained(small(steps=4, batch_size=4, gradient_accumulation_steps=2, out=str(tmp_path / "two")))
    assert halves == pytest.approx(trained(small(steps=4, batch_size=8, out=str(tmp_path / "three"))), rel=1e-5)
    again = trained(small(steps=4, batch_size=8, recompute=True, out=str(tmp_path / "four")))
    assert again == trained(small(steps=4, batch_size=8, out=str(tmp_path / "five")))


@proves(
    "a step's windows follow from seed and step alone, each once in an epoch, none held out",
    package="torch",
    since="2.4",
)
def test_order() -> None:
    run = Run(small())
    text = run.text
    seen = [text._place(sample) for sample in range(text.count)]
    assert sorted(seen) == list(range(text.count))
    jumped = Run(small()).text
    assert torch.equal(jumped.windows(3 * text.count + 5, 4)[0], text.windows(3 * text.count + 5, 4)[0])
    assert [text._place(sample) for sample in range(text.count, text.count + 9)] != seen[:9]
    tokens, targets = text.windows(7, 2)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert max(seen) < text.count <= text.count + text.held_out - 1


@proves(
    "a run resumed at any step has the losses of one that was never stopped, to the last bit, with FP8's state",
    package="torchao",
)
def test_resume(tmp_path: Path) -> None:
    whole = trained(small(FP8[0], out=str(tmp_path / "whole")))
    for done in (1, 3, 5):
        options = small(FP8[0], out=str(tmp_path / str(done)), checkpoint_every=1)
        run, _ = pretrain.start(options)
        for step in range(done):
            run.update(step)
        run.save()
        assert trained(dataclasses.replace(options, resume=True)) == whole[done:]


@long
@proves(
    "a deterministic run killed while it writes a checkpoint goes on, every later loss equal to the last bit",
    package="torchao",
)
def test_kill(tmp_path: Path, measured: Dict[str, Any]) -> None:
    fields: Dict[str, Any] = {"precision": FP8[0], "steps": 8, "checkpoint_every": 2, "device": "cpu"}
    draw = random.Random(0)
    for trial in range(9):  # a write takes milliseconds and can be over when the signal comes
        killed = tmp_path / str(trial)
        death = kills.killed(killed, fields["steps"], inside=True, draw=draw)
        if death["inside a write"]:
            break
    measured["inside"] = " ".join(death["inside a write"])
    assert measured["inside"] and not death["had ended"]
    options = Options(out=str(killed), deterministic=True, resume=True, **fields)
    try:  # in this process, on one thread as well
        resumed = trained(options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert resumed == trained(Options(out=str(tmp_path / "whole"), **fields))


@proves(
    "a full disk is named, the last good checkpoint stays, and the run ends with its failure",
    package="torch",
    since="2.4",
)
def test_full_disk(tmp_path: Path) -> None:
    options = small(out=str(tmp_path))
    run, _ = pretrain.start(options)
    run.update(0)
    kept = run.save()
    before = kept.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        run.update(1)
        with pytest.raises(CheckpointError, match=r"step 2 .*File too large.*step-00000001.pt is still"):
            run.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [kept.name]
    assert kept.read_bytes() == before
    kept.write_bytes(before[: len(before) // 2])
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        checkpoint.load(kept)


@proves(
    "an FP8 run goes on in bfloat16 and back from its checkpoint, no weight changed",
    package="torchao",
)
def test_other_precision(tmp_path: Path) -> None:
    options = small(FP8[1], out=str(tmp_path), steps=2)
    trained(options)
    first = Run(options)
    first.load(checkpoint.newest(tmp_path))  # type: ignore[arg-type]
    for precision in ("bf16", FP8[1]):
        options = dataclasses.replace(options, precision=precision, resume=True, steps=options.steps + 2)
        run, _ = pretrain.start(options)
        if precision == "bf16":
            for name, weight in checkpoint.weights_of(first.model).items():
                assert torch.equal(weight, checkpoint.weights_of(run.model)[name])
        assert pretrain.train(run, lambda line: None) == 0
    assert [row["step"] for row in pretrain.read_log(tmp_path / "log.jsonl")] == list(range(6))


@proves("SIGTERM ends a run after its step, with a checkpoint from which it goes on", package="torch", since="2.4")
def test_signal(tmp_path: Path) -> None:
    options, said = small(out=str(tmp_path), steps=10_000, log_every=1), []

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("step 3/"):
            signal.raise_signal(signal.SIGTERM)

    assert threading.current_thread() is threading.main_thread()
    run, _ = pretrain.start(options)
    assert pretrain.train(run, say) == 128 + signal.SIGTERM
    assert said[-1] == "stopped after step 3 of 10000; --resume goes on"
    assert checkpoint.newest(tmp_path).name == "step-00000003.pt"  # type: ignore[union-attr]


@proves(
    "a loss that is not finite ends the run before a weight changes, and is named by step and layer",
    package="torch",
    since="2.4",
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
    assert pretrain.spikes([5 - 0.01 * step for step in range(40)]) == []
    assert pretrain.spikes([5 - 0.01 * step + (step == 35) for step in range(40)]) == [35]


@proves(
    "a DeepSpeed configuration is followed field by field, and what cannot be followed is refused by name",
    seed="A08",
    package="torch",
    since="2.4",
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
    for field, table in {
        "zero_optimization.stage": {"zero_optimization": {"stage": 3}},
        "fp16.enabled": {"fp16": {"enabled": True}},
        "train_batch_size": {"train_batch_size": 999},
        "msamp.enabled": {"msamp": {"enabled": True, "opt_level": "O2"}},
        "bf16.enabled": {"bf16": {"enabled": False}},
        "gradient_clipping": {"gradient_clipping": "much"},
        "tensorboard.output_path": {"tensorboard": {"output_path": "x"}},
    }.items():
        path.write_text(json.dumps(table))
        assert field in refusal_of(lambda: deepspeed_config.applied(str(path), small("bf16")))


@proves("a run that cannot be made is refused in one sentence that names the flag", package="torch", since="2.4")
def test_refusals(tmp_path: Path) -> None:
    lines = (tmp_path / "lines.jsonl", tmp_path / "short.txt")
    lines[0].write_text('{"text": "a"}\n{"txt": "b"}\n')
    lines[1].write_text("too short")
    for words, named in (
        ("--steps 0", "--steps"),
        ("--steps ten", "--steps"),
        ("--modle tiny", "--modle"),
        ("--model huge", "--model"),
        ("--precision fp7", "--precision"),
        ("--learning-rate nan", "--learning-rate"),
        ("--guard 10 --precision bf16", "--guard"),
        ("--guard 2 --precision torchao.tensorwise", "--guard-steps"),
    ):
        assert named in refusal_of(lambda words=words: pretrain.parse(words.split()))  # type: ignore[misc]
    out = ["--out", str(tmp_path / "out"), "--device", "cpu"]
    for more, named in (
        (["--precision", "fp8"], "--precision fp8"),
        (["--ops", "swish=torch"], "--ops"),
        (["--ops", "rope=cuda"], "--ops"),
        (["--graphs"], "--graphs"),
        (["--precision", "ms-amp.O1"], "--precision ms-amp.O1 needs"),  # the package, or else a GPU
        (["--precision", "ms-amp.O1", "--ops", "adamw=apex"], "--ops"),
        *((["--precision", "ms-amp.O2", f"--{name}"], f"--{name}") for name in ("compile", "graphs", "recompute")),
        (["--precision", "ms-amp.O2", "--guard", "10"], "--guard"),
        (["--precision", "ms-amp.O2", "--gradient-accumulation-steps", "2"], "--gradient-accumulation-steps"),
        (["--weights", "bfloat16"], "--weights bfloat16 needs a GPU"),
        (["--weights", "bfloat16", "--precision", "float32"], "--precision float32"),
        (["--weights", "bfloat16", "--ops", "adamw=torch"], "--ops"),
        (["--weights", "bfloat16", "--precision", "torchao.rowwise", "--guard", "10"], "--guard"),
        (["--te-modules"], "--te-modules needs a GPU"),
        (["--te-modules", "--precision", "torchao.rowwise"], "--precision torchao.rowwise"),
        (["--te-modules", "--ops", "swiglu=torch"], "--ops swiglu=torch"),
        (["--te-modules", "--guard", "10"], "--guard"),
        (["--resume"], "--resume"),
        (["--data", str(lines[0])], "line 2"),
        (["--data", str(lines[1])], "too few"),
        (["--data", str(tmp_path / "none.txt")], "none.txt"),
        (["--deepspeed", str(lines[0])], "--deepspeed"),
        (["--tokenizer", str(tmp_path)], "tokenizer"),
        (["--out", "/proc/none"], "--out"),
    ):
        assert named in refusal_of(lambda more=more: pretrain.main([*out, *more]))  # type: ignore[misc]
    trained(small(steps=1, out=str(tmp_path / "done")))
    assert "--resume" in refusal_of(lambda: pretrain.start(small(out=str(tmp_path / "done"))))
    assert "--seed" in refusal_of(lambda: pretrain.start(small(out=str(tmp_path / "done"), resume=True, seed=1)))
    run = Run(small())
    run.options.precision = "ms-amp.O1"
    last = checkpoint.newest(tmp_path / "done")
    assert last is not None
    assert "--precision" in refusal_of(lambda: run.load(last))


@proves(
    "on a GPU fused attention is cuDNN's, but for wide heads and where every bit has to repeat",
    package="torch",
    since="2.5",
)
def test_columns() -> None:
    def attention(head_size: int) -> str:
        return columns_of("fused", True, head_size)["attention"]

    assert attention(128) == "torch.cudnn" != attention(256)
    torch.use_deterministic_algorithms(True)
    try:
        assert attention(128) != "torch.cudnn"
        assert "attention=torch.cudnn" in refusal_of(lambda: columns_of("attention=torch.cudnn", True, 64))
    finally:
        torch.use_deterministic_algorithms(False)


@proves(
    "cut mantissas are the nearest values with that many bits, ties to even, for every bfloat16",
    package="torch",
    since="2.4",
)
def test_cut_mantissa() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = every[torch.isfinite(every)]
    for bits in (3, 4, 5, 6):
        found = round_mantissa(finite, bits).double()
        exact = finite.double()
        exponent = torch.frexp(exact)[1].clamp(min=-125) - 1  # |x| = m 2^exponent, 1 <= m < 2, or a subnormal
        step = torch.tensor([math.ldexp(1.0, power - bits) for power in exponent.tolist()], dtype=torch.float64)
        truth = (exact / step).round() * step  # round() takes ties to even
        truth = torch.where(truth.abs() >= 2.0**128, math.inf * exact.sign(), truth)
        assert torch.equal(found, truth), bits
    ends = torch.tensor([math.inf, -math.inf, math.nan], dtype=torch.bfloat16)
    assert torch.equal(round_mantissa(ends, 3)[:2], ends[:2])
    assert bool(round_mantissa(ends, 3)[2].isnan())
    run = Run(small("e8m3"))
    assert run.update(0)["loss"] != Run(small("bf16")).update(0)["loss"]


@proves(
    "reading with a KV cache, token by token, gives what one pass over the whole text gives, in FP8 too",
    package="torchao",
)
def test_cache(tmp_path: Path, measured: Dict[str, Any]) -> None:
    trained(small(steps=2, out=str(tmp_path)))
    path = checkpoint.newest(tmp_path)
    assert path is not None
    tokens = torch.randint(256, (16, 24))
    for precision in ("float32", "torchao.rowwise"):  # one scale for all would depend on the other tokens
        reader = infer.opened(path, precision, "fused", "cpu")
        measured[precision] = infer.fp8_layers(reader)
        whole, cache = reader(tokens), reader.model.empty_cache(16)
        parts = [reader(part, cache=cache) for part in (tokens[:, :9], *tokens[:, 9:].split(1, dim=1))]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-3, atol=1e-5)
    assert measured["float32"] == 0 and measured["torchao.rowwise"] == 8
    assert infer.generate(reader, tokens[0, :5].tolist(), 4, 0.0, 0).shape == (16, 4)


@proves("the perplexity of unseen text in FP8 is within 2 % of bfloat16's and not the same", package="torchao")
def test_perplexity(tmp_path: Path, measured: Dict[str, Any]) -> None:
    options = small(steps=30, batch_size=8, out=str(tmp_path))
    trained(options)
    path, text = checkpoint.newest(tmp_path), Run(options).text
    assert path is not None
    for precision in ("float32", "bf16", "torchao.tensorwise"):
        measured[precision] = infer.perplexity(infer.opened(path, precision, "fused", "cpu"), text, 16)
    assert 10 < measured["float32"] < 200
    assert measured["torchao.tensorwise"] != measured["float32"] == pytest.approx(measured["bf16"], rel=0.02)
    assert measured["torchao.tensorwise"] == pytest.approx(measured["bf16"], rel=0.02)


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
    with pytest.raises(ValueError, match="chooses its own"):
        memory.bytes_per_parameter("ms-amp.O2")
    seed_001 = memory.bytes_per_parameter("bf16", weights="bfloat16", moments="float32")
    assert seed_001["weights"] + seed_001["moments"] == 10  # of Z2all's 1,255,499,776: 12.0 GiB, the seed's 12250 MB
    # 6 x (1,255,499,776 - 64,320 x 2,048) + 12 x 22 x 2,048 x 2,048: the input embedding is no product.
    assert operations_per_token(MODELS["z2all-1.26b"].shape) == 7_849_930_752
    assert 10 * MODELS["z2all-1.26b"].parameters / 2**20 == pytest.approx(12250, rel=0.03)


@proves(
    "parity's interval over seeds holds the difference that was put there in 93 to 97 % of 1,000 simulated comparisons "
    "(pooled blocks of steps: in less than half), and a difference of the margin is called equivalent in 5 % at most",
    package="torch",
    since="2.4",
)
def test_parity(measured: Dict[str, Any]) -> None:
    draw = random.Random(1)
    held, pooled, wrong = 0, 0, 0
    for _ in range(1000):
        # Five seeds; what sets a seed apart stays for its whole run, which is ten blocks of steps.
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
    assert parity.judged([0.1] * 4) == {}
    verdicts = [parity.judged([mean + off for off in (-0.002, -0.001, 0, 0.001, 0.002)]) for mean in (0.001, 0.02)]
    verdicts.append(parity.judged([-0.1, 0.1, 0.0, -0.05, 0.08]))
    assert [judged["verdict"] for judged in verdicts] == ["equivalent", "different", "not told apart"]


@proves("runs of several arms go on where their time was over, and become numbers and a figure", package="torchao")
def test_parity_runs(tmp_path: Path) -> None:
    flags = ["--model=tiny", "--steps=12", "--batch-size=2", "--device=cpu", "--checkpoint-every=0"]
    arms = ["float32/naive", "torchao.rowwise/fused", "bf16/fused@0.001", "e8m3/fused@0.001", "e8m3/fused@0.002"]
    assert parity.run(tmp_path, arms, 2, 0.0, flags) == 75
    assert parity.run(tmp_path, arms, 2, 1.0, flags) == 0
    found = parity.report(tmp_path, 4)
    assert [sorted(runs) for runs in parity.curves(tmp_path).values()] == [[0, 1]] * 5
    assert all(len(row["loss"]) == 12 for runs in parity.curves(tmp_path).values() for row in runs.values())
    assert list(found["arms"]) == arms and "differences" not in found["arms"][arms[0]]
    assert len(found["arms"][arms[1]]["differences"]) == 2 and "verdict" not in found["arms"][arms[1]]
    beside = [found["arms"][arm]["beside"] for arm in arms]
    assert beside == [arms[0], arms[0], arms[2], arms[2], arms[0]]  # the last has its learning rate alone
    assert (tmp_path / "parity.svg").read_text().count("<polyline") == 15
    pretrain.Log(tmp_path / "curves.jsonl").write(arm=arms[0], seed=2, text="another")
    with pytest.raises(TextError, match="read another text"):
        parity.run(tmp_path, arms, 4, 1.0, flags)
    with pytest.raises(TextError, match="different texts"):
        parity.report(tmp_path, 4)


PARTS = ("attention", "rms_norm", "rope", "swiglu", "cross_entropy")


@pytest.mark.parametrize("base", [10000.0, 5e5], ids=["1e4", "5e5"])
@proves("the model turns its heads by the closed form of its own rotary base", seed="B07", package="torch")
def test_decoder_turns_by_its_base(base: float, measured: Dict[str, Any]) -> None:
    model = MODELS["tiny"]._replace(base=base)
    rotary = Decoder(model, dict.fromkeys(PARTS, "naive"), torch.float32).blocks[0].attention.rotary
    x = torch.randn(2, 3, 41, model.shape.head_size)
    turned, truth = rotary(x, 13), references.rope(x.double(), 13, base)
    # Rounded on the way: the cosine, both products, the result.
    floor, _ = bounds.rounding_noise(bounds.MANTISSA[torch.float32])
    measured["error"] = bounds.assert_rounded_like(turned, truth, floor, bounds.ceiling(torch.float32, 4))


@pytest.mark.parametrize("base", [10000.0, 5e5], ids=["1e4", "5e5"])
@proves(
    "a checkpoint becomes a Mistral with its logits and its rotary base, which transformers saves and loads, and comes "
    "back bit-equal",
    package="transformers",
)
def test_hugging_face(base: float, tmp_path: Path, measured: Dict[str, Any]) -> None:
    from transformers import MistralForCausalLM

    from training.hugging_face import from_mistral, to_mistral

    model = MODELS["tiny"]._replace(base=base)
    decoder = Decoder(model, dict.fromkeys(PARTS, "naive"), torch.float32)
    for block in decoder.blocks:  # so that attention looks at some tokens more than at others, and positions count
        torch.nn.init.normal_(block.attention.qkv.weight, std=2 / math.sqrt(model.shape.width))
    weights = checkpoint.weights_of(decoder)
    to_mistral(weights, model).save_pretrained(tmp_path)
    loaded = MistralForCausalLM.from_pretrained(tmp_path)
    back = from_mistral(loaded)
    assert set(back) == set(weights) and all(torch.equal(back[name], weights[name]) for name in weights)
    assert loaded.config.rope_theta == base
    tokens = torch.randint(256, (2, 64))
    with torch.no_grad():
        other, own = loaded(tokens).logits, decoder(tokens)
    measured["difference"] = bounds.relative_error(other, own.double())
    # Each of the 16 products of both models sums up to 208 terms in float32; transformers' angles, of up to 64 radians,
    # are float32 as well. A score of 20 or so makes an error 20 times larger before the exponential.
    assert measured["difference"] <= 20 * (bounds.ceiling(torch.float32, 16, terms=208) + 64 * 2.0**-24)


# --- on a GPU with FP8 ---

HARE: Dict[str, Any] = {
    "model": "hare-1.1b",
    "layers": 2,
    "length": 512,
    "device": "cuda",
    "ops": "fused",
    "learning_rate": 3e-4,  # at ten times that, FP8's ways and bfloat16 were up to 6.9 nats apart at one step
    "warmup": 5,
    "checkpoint_every": 0,  # of 2.7 GB each
}


# What is trained to be stored and read again is smaller, and its checkpoint too: 0.8 GB.
TINYLLAMA: Dict[str, Any] = {**HARE, "model": "tinyllama-120m"}


class InFp8(NamedTuple):
    """A run in FP8 that has ended: its last checkpoint, its losses (nats per token), its text."""

    checkpoint: Path
    losses: List[float]
    text: Text


@pytest.fixture(scope="module")
def in_fp8(tmp_path_factory: pytest.TempPathFactory) -> InFp8:
    """TinyLlama's layers after 30 steps from the command's own start, in FP8 with delayed scaling."""
    options = small("fp8", out=str(tmp_path_factory.mktemp("fp8")), steps=30, **TINYLLAMA)
    losses = trained(options)
    path = checkpoint.newest(Path(options.out))
    assert path is not None
    data = model_of(options).shape
    return InFp8(path, losses, Text.read((), "", data.vocabulary, data.length, options.seed))


@functools.lru_cache(maxsize=None)
def hare_in_bf16() -> Tuple[Run, List[float]]:
    """HARE's layers and their losses without FP8; once a process."""
    return hare(precision="bf16")


def hare(**more: Any) -> Tuple[Run, List[float]]:
    """HARE's layers and their losses, trained as in_fp8 is but for these fields."""
    run = Run(small(steps=31, **{**HARE, **more}))  # one more than the losses, for who looks at a step
    return run, [run.update(step)["loss"] for step in range(30)]


WAYS: Dict[str, Dict[str, Any]] = {
    "fp8": {"precision": "fp8"},
    "current": {"precision": "transformer-engine.current"},
    "graph": {"precision": "fp8", "graphs": True},
    "recompute": {"precision": "fp8", "recompute": True},
}


@needs(sm=(8, 9))
@long
@pytest.mark.parametrize("way", list(WAYS))
@proves(
    "HARE's layers train in FP8 with fused operators, recomputed, and in a CUDA graph: every loss falls and stays "
    "within 0.15 nats of bfloat16's, the median over the steps, and a step has three products of each layer in FP8",
    seed=("A11", "B03"),
    package="transformer-engine",
    since="2.0",
)
def test_fp8_run(way: str, device: str, measured: Dict[str, Any]) -> None:
    (run, losses), (control, plain) = hare(**WAYS[way]), hare_in_bf16()
    measured["bf16"], measured[way] = plain[-1], losses[-1]
    # At one step, where the loss falls fast, they were up to 0.30 apart on an H200: no bound on the largest is claimed.
    measured["apart"] = statistics.median(abs(one - other) for one, other in zip(plain, losses))
    assert min(curve[0] - curve[-1] for curve in (plain, losses)) > 1
    assert measured["apart"] < 0.15
    least = 3 * len(layers_of(run.model))
    measured.update(assert_float8_products(lambda on: (run if on else control).update(30), mixed=True, least=least))


of_one_run = pytest.mark.xdist_group("in_fp8")  # these in one process, which trains it once for all of them


@needs(sm=(8, 9))
@long
@of_one_run
@proves(
    "two layers of TinyLlama pre-train in FP8 from the command itself, their loss falling by a nat per token or more",
    seed="B03",
    package="transformer-engine",
    since="2.0",
)
def test_command_in_fp8(in_fp8: InFp8, measured: Dict[str, Any]) -> None:
    measured["first"], measured["last"] = in_fp8.losses[0], in_fp8.losses[-1]
    assert measured["first"] - measured["last"] > 1


@needs(sm=(8, 9))
@long
@of_one_run
@proves(
    "a checkpoint of a run in FP8 holds scales that followed its tensors, and they are loaded to the last bit",
    package="transformer-engine",
    since="2.0",
)
def test_scales_survive(in_fp8: InFp8) -> None:
    run = Run(small("fp8", steps=30, **TINYLLAMA))
    assert run.load(in_fp8.checkpoint) == ""
    before, now = checkpoint.load(in_fp8.checkpoint)["fp8"], checkpoint.fp8_state_of(run.model)
    assert before.keys() == now.keys() and len(before) >= 2 * 4 * 2 * 2
    assert all((before[name] != 1).any() for name in before if name.endswith(".scale"))  # as they begin
    assert all((before[name] > 0).any() for name in before if name.endswith(".amax_history"))
    assert all(torch.equal(before[name], now[name].cpu()) for name in before)


@needs(sm=(8, 9))
@long
@of_one_run
@proves(
    "a checkpoint generates in FP8, for real: its products run as FP8 kernels and those of bfloat16 do not, and the "
    "perplexity of unseen text is within 2 % of bfloat16's",
    seed="A12",
    package="transformer-engine",
    since="2.0",
)
def test_fp8_inference(device: str, in_fp8: InFp8, measured: Dict[str, Any]) -> None:
    readers = {name: infer.opened(in_fp8.checkpoint, name, "fused", "cuda") for name in ("fp8", "bf16")}
    tokens = in_fp8.text.unseen(8)[0][:, :64].to(device)
    least = infer.fp8_layers(readers["fp8"])
    measured.update(assert_float8_products(lambda on: readers["fp8" if on else "bf16"](tokens), True, least))
    for name, reader in readers.items():
        measured[name] = infer.perplexity(reader, in_fp8.text, 16)
        assert infer.generate(reader, tokens[0, :8].tolist(), 8, 0.0, 0).shape == (16, 8)
    assert measured["fp8"] == pytest.approx(measured["bf16"], rel=0.02)


@needs(sm=(8, 9))
@long
@proves(
    "the state of training takes the bytes per parameter of the sum on paper, to 5 %",
    seed="B05",
    package="transformer-engine",
    since="2.0",
)
def test_memory_on_gpu(device: str, measured: Dict[str, Any]) -> None:
    for precision, weights in (("bf16", "float32"), ("fp8", "float32"), ("fp8", "bfloat16")):
        gc.collect()
        before = torch.cuda.memory_allocated()
        run = Run(small(precision, weights=weights, **HARE))
        run.update(0)
        paper = memory.bytes_per_parameter(precision, weights, remainders=weights == "bfloat16")
        found = (torch.cuda.memory_allocated() - before) / run.data.parameters
        measured[f"{precision}, {weights}"] = found
        assert found == pytest.approx(sum(paper.values()) - paper["copies"], rel=0.05)
        del run


@needs(sm=(8, 9))
@long
@proves(
    "weights in bfloat16, whose other bits AdamW keeps, train in FP8 as those in float32 do: the loss stays within 0.1 "
    "nats of theirs, the median over the steps, and a checkpoint holds those bits",
    package="transformer-engine",
    since="2.0",
)
def test_bfloat16_weights(tmp_path: Path, measured: Dict[str, Any]) -> None:
    options = small("fp8", steps=30, weights="bfloat16", out=str(tmp_path), **TINYLLAMA)
    wide = Run(small("fp8", steps=30, **TINYLLAMA))
    run, _ = pretrain.start(options)
    losses = [[one.update(step)["loss"] for step in range(30)] for one in (wide, run)]
    measured["apart"] = statistics.median(abs(one - other) for one, other in zip(*losses))
    assert min(curve[0] - curve[-1] for curve in losses) > 1
    assert measured["apart"] < 0.1
    saved = checkpoint.load(run.save())
    expected = run.update(30)["loss"]  # now: Transformer Engine updates the scales of all models together
    again, _ = pretrain.start(dataclasses.replace(options, resume=True))
    before, now = (
        torch.cat([state["master_param"].flatten() for state in one["state"].values()]).cpu()
        for one in (saved["optimizer"], again.optimizer.state_dict())
    )
    assert before.dtype is torch.int16 and bool(before.any())
    assert torch.equal(before, now)
    assert again.update(30)["loss"] == pytest.approx(expected, abs=1e-3)  # attention adds in a random order


@needs(sm=(8, 9))
@long
@proves(
    "Transformer Engine's modules train as separate layers do: the loss of FP8 stays within 0.1 nats of theirs, the "
    "median over the steps, the first of bf16 within 0.005, and a run goes on with or without them",
    package="transformer-engine",
    since="2.0",
)
def test_te_modules(tmp_path: Path, measured: Dict[str, Any]) -> None:
    first = [Run(small("bf16", te_modules=each, **TINYLLAMA)).update(0)["loss"] for each in (False, True)]
    assert first[0] == pytest.approx(first[1], abs=5e-3)
    apart = Run(small("fp8", steps=30, **TINYLLAMA))
    options = small("fp8", steps=30, te_modules=True, graphs=True, out=str(tmp_path), **TINYLLAMA)
    run, _ = pretrain.start(options)
    losses = [[one.update(step)["loss"] for step in range(30)] for one in (apart, run)]
    measured["apart"] = statistics.median(abs(one - other) for one, other in zip(*losses))
    assert min(curve[0] - curve[-1] for curve in losses) > 1
    assert measured["apart"] < 0.1
    weights = {name: weight.clone() for name, weight in checkpoint.weights_of(run.model).items()}
    run.save()
    expected = [run.update(step)["loss"] for step in (30, 31)]
    for te_modules in (True, False):  # scales start anew
        again, note = pretrain.start(dataclasses.replace(options, te_modules=te_modules, resume=True))
        assert ("anew" in note) is not te_modules
        assert all(torch.equal(weights[name], each) for name, each in checkpoint.weights_of(again.model).items())
        assert [again.update(step)["loss"] for step in (30, 31)] == pytest.approx(expected, abs=0.05)


@needs(sm=(8, 9))
@long
@proves(
    "a deterministic run with fused operators in FP8 repeats itself to the last bit in another process on a GPU, with "
    "Transformer Engine's modules too",
    package="transformer-engine",
    since="2.0",
)
def test_deterministic_on_gpu(tmp_path: Path) -> None:
    flags = ["--model=tinyllama-120m", "--layers=2", "--length=512", "--precision=fp8", "--deterministic"]
    flags += ["--batch-size=2", "--steps=8", "--checkpoint-every=0", "--device=cuda"]
    started = {}
    for out in (tmp_path / "one", tmp_path / "other", tmp_path / "one-te-modules", tmp_path / "other-te-modules"):
        more = ["--te-modules"] if "te-modules" in out.name else []
        command = [sys.executable, "-m", "training.pretrain", *flags, *more, "--out", str(out)]
        apart = {**os.environ, "TRITON_CACHE_DIR": str(out) + "-kernels"}  # what is tuned, is so anew
        started[out] = subprocess.Popen(command, cwd=str(kills.ROOM), env=apart, stdout=subprocess.DEVNULL)
    assert [process.wait() for process in started.values()] == [0] * 4
    losses = [[row["loss"] for row in pretrain.read_log(out / "log.jsonl")] for out in started]
    assert losses[0] == losses[1] and losses[2] == losses[3] and len(losses[0]) == 8
