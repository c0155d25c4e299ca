"""What each fused operator is worth in the 1.26B model of the second article (B12 to B39), and FP8 beyond that.

A micro-batch is forward and backward, which adds to gradients that are there; a step is as many of those as make
65,536 tokens, and AdamW. "naive" has float32 weights under autocast and no operator fused; "fused" has bfloat16 weights
and residuals, float32 moments and master weights (as remainders), merged projections and the table's kernels; "without
X" is that with X naive. "compiled" leaves everything but attention to torch.compile. "pretrain" is a step of
training/pretrain.py as a user starts it, which also reads its text, clips the gradients and looks at the loss.
"""

from __future__ import annotations

import gc
import itertools
from functools import lru_cache, partial
from typing import Any, Callable, Dict, List

import torch

from smoke_tests.bench.ablated_llama import NAIVE, AblatedLlama, Config, build, draw, flops, fused
from smoke_tests.bench.method import Arm, Cell, Check, graphed
from smoke_tests.operators.bounds import relative_error
from smoke_tests.operators.table import OPERATORS, rows
from smoke_tests.operators.torch_adapter import version_of_torch
from smoke_tests.training import memory
from smoke_tests.training.models import MODELS, Shape
from smoke_tests.training.options import Options
from smoke_tests.training.trainer import Run

TOKENS = 65536  # of a step
PRETRAIN = ("pretrain bf16", "pretrain fp8")
# Relative error, against float32, of the gradient of the first block's down projection: it passes through all layers.
BOUNDS = {"bf16": (1e-4, 0.1), "fp8": (0.01, 0.5)}
Makers = Dict[str, Callable[[], Arm]]


def cells(releases: Dict[str, str], cuda: bool, quick: bool) -> List[Cell]:
    """Micro-batches of 2 sequences by launch path; larger ones, where FP8 pays; AdamW; and whole steps."""
    if not cuda:
        shape = Shape(layers=2, heads=8, kv_heads=2, head_size=32, hidden=704, vocabulary=4096, length=256)
        groups = [("eager", 2, eager(releases, cuda))] + ([] if quick else [("compiled", 2, compiled(releases, cuda))])
    else:
        shape = MODELS["z2all-1.26b"].shape
        groups = [("graphed", 8, best(releases)), ("eager", 2, eager(releases, cuda))]
        groups += [("without", 2, without(releases)), ("compiled", 2, compiled(releases, cuda))]
        groups += [("fp8", 8, fp8(releases)), ("loss", 8, losses(releases))]
        groups += [("layout", 8, layouts(releases))] if "transformer-engine" in releases else []
        groups = [("quick", 2, short(releases))] if quick else groups
    made = []
    for name, batch, configs in groups:
        if len(configs) < 2:  # an older torch has nothing to compare here
            continue
        facts = {"model": "1.26B" if cuda else "tiny", "batch": batch, "tokens": batch * shape.length, **flops(shape)}
        make = partial(micro_batches, shape, configs, batch, "cuda" if cuda else "cpu")
        key = f"ablation/{name}/{batch}x{shape.length}"
        made.append(Cell(key, facts, make, (20 + 15 * len(configs)) if cuda else 8, 100 if cuda else 1))
    if not quick:
        pairs = {"fused": ["naive", "fused"]} if not cuda else step_pairs(releases)
        tokens = TOKENS if cuda else 4 * shape.length
        facts = {"model": "1.26B" if cuda else "tiny", "tokens": tokens, **flops(shape)}
        for name, arms in pairs.items():
            make = partial(steps, shape, releases, arms, "cuda" if cuda else "cpu", tokens)
            made.append(Cell(f"ablation/step/{name}", facts, make, 80 if cuda else 20, 125 if cuda else 1, pairs=10))
    return made


def step_pairs(releases: Dict[str, str]) -> Dict[str, List[str]]:
    """Which arms are trained beside each other: naive and a candidate, and a candidate in bf16 and FP8."""
    has = {"naive", *best(releases)}
    pairs = {"te": ["naive", "fused te graph"], "compiled": ["naive", "fused compiled graph"]}
    pairs["eager"] = ["naive", "fused"]
    pairs["te-chunked"] = ["naive", "fused te graph, loss chunked"]
    pairs["te-fp8"] = ["fused te graph", "fp8 te.delayed graph"]
    pairs["torchao-fp8"] = ["fused compiled graph", "fp8 torchao.tensorwise compiled graph"]
    if "transformer-engine" in {row.column for row in rows("adamw", releases, True)}:
        has |= set(PRETRAIN)
        pairs["pretrain-bf16"] = ["fused te graph", "pretrain bf16"]
        pairs["pretrain-fp8"] = ["fp8 te.delayed graph", "pretrain fp8"]
    return {name: arms for name, arms in pairs.items() if has.issuperset(arms)}


# --- configurations ---


def naive() -> Config:
    return Config(NAIVE, weights="float32", merged=False)


def eager(releases: Dict[str, str], cuda: bool) -> Dict[str, Config]:
    """Naive, all fused, and all but one, as kernels launched one by one."""
    kernels = fused(releases, cuda)
    arms = {"naive": naive(), "fused": Config(kernels, merged=False)}
    for name in NAIVE:
        arms[f"fused without {name}"] = Config({**kernels, name: "naive"}, merged=False)
    arms["fused with float32 weights"] = Config(kernels, merged=False, weights="float32")
    return arms


def without(releases: Dict[str, str]) -> Dict[str, Config]:
    """All fused and all but one, as CUDA graphs: what each is worth where the host does not set the time."""
    arms = {name: arm for name, arm in eager(releases, True).items() if name == "fused" or "without" in name}
    return {f"{name} graph": arm._replace(graph=True) for name, arm in arms.items()}


def plain(releases: Dict[str, str], cuda: bool) -> Dict[str, str]:
    """Attention as one kernel, and the rest as formulas that a compiler fuses."""
    return {**dict.fromkeys(NAIVE, "plain"), "attention": fused(releases, cuda)["attention"]}


def compiled(releases: Dict[str, str], cuda: bool) -> Dict[str, Config]:
    """The same behind torch.compile; the table's kernels inside it too, which the article found to cost time."""
    ops, kernels = plain(releases, cuda), fused(releases, cuda)
    if version_of_torch() < (2, 5):
        return {"naive": naive()}
    arms = {"naive": naive(), "naive compiled": naive()._replace(compile="blocks")}
    arms["fused compiled"] = Config(ops, compile="blocks")
    arms["fused without attention compiled"] = Config({**ops, "attention": "naive"}, compile="blocks")
    arms["fused without merged projections compiled"] = Config(ops, compile="blocks", merged=False)
    arms["fused kernels compiled"] = Config(kernels, compile="blocks")
    for name in NAIVE if cuda else ():
        arms[f"fused kernels without {name} compiled"] = Config({**kernels, name: "naive"}, compile="blocks")
    return arms


def best(releases: Dict[str, str]) -> Dict[str, Config]:
    """The candidates for the fastest step, bf16 and FP8, with CUDA graphs."""
    kernels = fused(releases, True)
    arms = {"fused": Config(kernels, merged=False), "fused graph": Config(kernels, merged=False, graph=True)}
    if version_of_torch() >= (2, 5):
        config = Config(plain(releases, True), compile="blocks", graph=True)
        arms["fused compiled graph"] = config
        if "torchao" in releases:
            in_fp8 = config._replace(linear="torchao.tensorwise", head=True, base="fused compiled graph")
            arms["fp8 torchao.tensorwise compiled graph"] = in_fp8
    if "transformer-engine" in releases:
        te = Config(kernels, layers="transformer-engine", graph=True)
        arms["fused te graph"] = te
        if version_of_torch() >= (2, 5):
            arms["fused te graph, loss chunked"] = te._replace(ops={**kernels, "cross_entropy": "chunked"})
        in_fp8 = te._replace(linear="transformer-engine.delayed", base="fused te graph")
        arms["fp8 te.delayed graph"] = in_fp8
        arms["fp8 te.delayed and the head graph"] = in_fp8._replace(head=True)
    return arms


def short(releases: Dict[str, str]) -> Dict[str, Config]:
    """Naive, fused, and what FP8 adds, without anything that has to be compiled."""
    ready = {
        name: config
        for name, config in best(releases).items()
        if config.graph and not config.compile and config.ops["cross_entropy"] != "chunked"  # which compiles too
    }
    return {"naive": naive(), **ready}


def fp8(releases: Dict[str, str]) -> Dict[str, Config]:
    """FP8 by package and recipe, with the head in bf16 or not."""
    arms = {
        name: config for name, config in best(releases).items() if name in ("fused compiled graph", "fused te graph")
    }
    if "fused compiled graph" in arms and "torchao" in releases:
        base = arms["fused compiled graph"]._replace(base="fused compiled graph")
        arms["fp8 torchao.tensorwise but the head compiled graph"] = base._replace(linear="torchao.tensorwise")
        arms["fp8 torchao.rowwise compiled graph"] = base._replace(linear="torchao.rowwise", head=True)
    if "fused te graph" in arms and version_of_torch() >= (2, 2):
        te = arms["fused te graph"]._replace(base="fused te graph")
        arms["fp8 te.current graph"] = te._replace(linear="transformer-engine.current")
    return arms


def losses(releases: Dict[str, str]) -> Dict[str, Config]:
    """The loss of all logits, and in chunks that never hold all of them."""
    if version_of_torch() < (2, 5):
        return {"fused": Config(fused(releases, True), merged=False)}
    ops = plain(releases, True)
    kernels = fused(releases, True)["cross_entropy"]
    return {
        "fused compiled graph": Config(ops, compile="blocks", graph=True),
        "fused compiled graph, loss chunked": Config({**ops, "cross_entropy": "chunked"}, compile="blocks", graph=True),
        f"fused compiled graph, loss of {kernels}": Config(
            {**ops, "cross_entropy": kernels}, compile="blocks", graph=True
        ),
    }


def layouts(releases: Dict[str, str]) -> Dict[str, Config]:
    """Transformer Engine's layers with the batch first, as all others have it, and with the sequence first (B01)."""
    te = best(releases)["fused te graph"]
    return {"fused te graph": te, "fused te graph, sequence first": te._replace(sequence_first=True)}


def precision_of(config: Config) -> str:
    return "bf16" if config.linear == "torch" else "fp8"


# --- micro-batches ---


class Batch:
    """The tokens of a micro-batch, the weights, and the gradient by which the arms are checked."""

    def __init__(self, shape: Shape, size: int, device: str) -> None:
        self.shape, self.device = shape, device
        self.tokens, self.labels = (
            torch.randint(shape.vocabulary, (size, shape.length), device=device) for _ in range(2)
        )
        self.weights = draw(shape, device)
        model = build(shape, naive(), self.weights, device)
        model.config = model.config._replace(weights="exact")  # no autocast
        for part in range(0, size, 2):  # naive attention in float32 takes memory
            (model(self.tokens[part : part + 2], self.labels[part : part + 2]) * 2 / size).backward()
        self.truth = gradient_of(model).double()
        del model
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()

    def model(self, config: Config) -> AblatedLlama:
        return build(self.shape, config, self.weights, self.device)

    def check(self, model: AblatedLlama, precision: str) -> List[Check]:
        """The error of a gradient that comes through all layers."""
        for parameter in model.parameters():
            parameter.grad.zero_()
        model(self.tokens, self.labels).backward()
        return [Check(relative_error(gradient_of(model), self.truth), *BOUNDS[precision])]


def gradient_of(model: AblatedLlama) -> torch.Tensor:
    """The gradient of the first block's down projection."""
    names = ("blocks.0.down.weight", "blocks.0.layernorm_mlp.fc2_weight")
    (gradient,) = [parameter.grad for name, parameter in model.named_parameters() if name in names]
    return gradient.detach()


def micro_batches(shape: Shape, configs: Dict[str, Config], size: int, device: str) -> Makers:
    """One arm per configuration: forward and backward of one micro-batch, each with its own weights."""
    batch = Batch(shape, size, device)
    pool = torch.cuda.graph_pool_handle() if device == "cuda" else None
    first = next(iter(configs))
    return {name: partial(micro_batch, batch, config, config.base or first, pool) for name, config in configs.items()}


def micro_batch(batch: Batch, config: Config, base: str, pool: Any) -> Arm:
    model = batch.model(config)

    def call() -> Any:
        loss = model(batch.tokens, batch.labels)
        loss.backward()
        return loss.detach()

    precision = precision_of(config)
    for _ in range(3):
        call()
    checks = batch.check(model, precision)
    held = sum(p.numel() * p.element_size() * 2.0 for p in model.parameters())
    work = flops(batch.shape)["causal, products only"] * batch.tokens.numel()
    run = graphed(call, pool) if config.graph else call
    comparable = bool(config.base)  # the base of FP8 is the same model in bf16
    return Arm(
        run, precision, base, work, check=lambda _: checks, state_bytes=held, comparable=comparable, ungraphed=call
    )


# --- whole steps ---

ADAMW: Dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def optimizer_of(config: Config, model: AblatedLlama, releases: Dict[str, str], cuda: bool) -> torch.optim.Optimizer:
    """torch's own loop for naive; else the fused one that keeps float32 master weights of bfloat16 ones."""
    parameters = list(model.parameters())
    if config.weights == "float32" or not cuda:
        return torch.optim.AdamW(parameters, **ADAMW)
    columns = {row.column for row in rows("adamw", releases, cuda)}
    if "transformer-engine" in columns:
        make = OPERATORS["adamw"]["transformer-engine"].call
        optimizer: torch.optim.Optimizer = make(parameters, master_weights=True, store_param_remainders=True, **ADAMW)
        return optimizer
    if "apex" in columns:
        optimizer = OPERATORS["adamw"]["apex"].call(parameters, master_weights=True, capturable=True, **ADAMW)
        return optimizer
    return torch.optim.AdamW(parameters, fused=True, **ADAMW)


def steps(shape: Shape, releases: Dict[str, str], names: List[str], device: str, tokens: int) -> Makers:
    """Whole steps of these arms: in micro-batches of 2 sequences, and where they are CUDA graphs also of 8."""
    cuda = device == "cuda"
    weights, pool = draw(shape, device), torch.cuda.graph_pool_handle() if cuda else None
    candidates = {**(best(releases) if cuda else eager(releases, cuda)), "naive": naive()}
    arms: Makers = {}
    for name in names:
        if name in PRETRAIN:
            arms[f"{name} 8"] = partial(pretrained, name.partition(" ")[2], tokens, f"{names[0]} 8")
            continue
        trained = lru_cache(maxsize=None)(partial(Trained, shape, candidates[name], weights, releases, device))
        for size in (2, 8) if candidates[name].graph else (2,):
            base = names[0] + (f" {size}" if candidates[names[0]].graph else " 2")
            arms[f"{name} {size}"] = partial(step, trained, size, tokens, base, pool)
    return arms


class Trained:
    """A model and its optimizer."""

    def __init__(
        self, shape: Shape, config: Config, weights: Dict[str, torch.Tensor], releases: Dict[str, str], device: str
    ) -> None:
        self.shape, self.config, self.device = shape, config, device
        self.model = build(shape, config, weights, device)
        self.parameters = list(self.model.parameters())
        self.optimizer = optimizer_of(config, self.model, releases, device == "cuda")

    def held(self) -> float:
        """Bytes of weights, gradients and the optimizer's state."""
        states = [
            tensor for entry in self.optimizer.state.values() for tensor in entry.values() if torch.is_tensor(tensor)
        ]
        tensors = [*states, *self.parameters, *[parameter.grad for parameter in self.parameters]]
        return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def step(make: Callable[[], Trained], size: int, tokens: int, base: str, pool: Any) -> Arm:
    """One whole step as it is trained: every micro-batch, AdamW, gradients back to zero."""
    trained = make()
    shape, config = trained.shape, trained.config
    data = torch.randint(shape.vocabulary, (2, size, shape.length), device=trained.device)

    def forward_and_backward() -> None:
        trained.model(data[0], data[1]).backward()

    for _ in range(3):
        forward_and_backward()
    run = graphed(forward_and_backward, pool) if config.graph else forward_and_backward

    def call() -> None:
        for _ in range(tokens // (size * shape.length)):
            run()
        trained.optimizer.step()
        torch._foreach_zero_([parameter.grad for parameter in trained.parameters])

    call()
    precision, work = precision_of(config), flops(shape)["causal, products only"] * tokens
    return Arm(
        call, precision, base, work, state_bytes=trained.held(), comparable=precision == "fp8",
        ungraphed=forward_and_backward,
    )  # fmt: skip


def pretrained(precision: str, tokens: int, base: str) -> Arm:
    """One step of pretrain.py, in micro-batches of 8 sequences.

    Transformer Engine keeps the scales of all models of a recipe together: its graph updates the base's too.
    """
    shape, size = MODELS["z2all-1.26b"].shape, 8
    run = Run(
        Options(
            model="z2all-1.26b", precision=precision, weights="bfloat16", te_modules=True, graphs=True, device="cuda",
            batch_size=size, gradient_accumulation_steps=tokens // (size * shape.length),
        )
    )  # fmt: skip
    steps = itertools.count()

    run.update(next(steps))
    work = flops(shape)["causal, products only"] * tokens
    state = sum(memory.held(run.model, run.optimizer).values()) * run.data.parameters
    return Arm(
        lambda: run.update(next(steps)), precision, base, work, state_bytes=state, comparable=False,
        ungraphed=lambda: run.gradients(0, launched=True), waits=True,
    )  # fmt: skip
