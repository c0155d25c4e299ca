"""What each fused operator is worth in the 1.26B model of the second article (B12 to B39), and FP8 beyond that.

A micro-batch is forward and backward, which adds to gradients that are there; a step is as many of those as make
65,536 tokens, and AdamW. "naive" has float32 weights under autocast and no operator fused; "fused" has bfloat16 weights
and residuals, float32 moments and master weights (as remainders), merged projections and the table's kernels; "without
X" is that with X naive. "compiled" leaves everything but attention to torch.compile.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import Any, Callable, Dict, List, Tuple

import torch

from bench.llama import FUSED, NAIVE, Config, Llama, build, draw, flops, fused
from bench.method import Arm, Cell, Check, graphed
from bench.shapes import shape_of
from bounds import relative_error
from fused_ops import OPERATORS, rows, version_of_torch
from training.llama import Shape

TOKENS = 65536  # of a step
# Relative error of the first block's down projection's gradient, which comes through all layers, against float32.
BOUNDS = {"bf16": (1e-4, 0.1), "fp8": (0.01, 0.5)}
Makers = Dict[str, Callable[[], Arm]]


def cells(releases: Dict[str, str], cuda: bool, quick: bool) -> List[Cell]:
    """Micro-batches of 2 sequences by launch path; larger ones, where FP8 pays; AdamW; and whole steps."""
    if not cuda:
        shape = Shape(layers=2, heads=8, kv_heads=2, head_size=32, hidden=704, vocabulary=4096, length=256)
        found = [("eager", 2, eager(releases, cuda))] + ([] if quick else [("compiled", 2, compiled(releases, cuda))])
    else:
        shape = shape_of("z2all-1.26b")
        found = [("graphed", 8, best(releases)), ("eager", 2, eager(releases, cuda))]
        found += [("compiled", 2, compiled(releases, cuda)), ("fp8", 8, fp8(releases)), ("loss", 8, losses(releases))]
        found = found[:1] if quick else found
    made = []
    for name, batch, configs in found:
        facts = {"model": "1.26B" if cuda else "tiny", "batch": batch, "tokens": batch * shape.length, **flops(shape)}
        make = partial(micro_batches, shape, configs, batch, "cuda" if cuda else "cpu")
        key = f"ablation/{name}/{batch}x{shape.length}"
        made.append(Cell(key, facts, make, (20 + 15 * len(configs)) if cuda else 8, 100 if cuda else 1))
    if not quick:
        names = [column for column in STEPS if column in best(releases)] if cuda else []
        facts = {"model": "1.26B" if cuda else "tiny", "tokens": TOKENS if cuda else 4 * shape.length, **flops(shape)}
        make = partial(steps, shape, releases, names, "cuda" if cuda else "cpu", facts["tokens"])
        made.append(Cell("ablation/step", facts, make, 100 if cuda else 20, 130 if cuda else 1, pairs=10))
    return made


# --- configurations ---


def naive() -> Config:
    return Config(NAIVE, weights="float32", merged=False)


def eager(releases: Dict[str, str], cuda: bool) -> Dict[str, Config]:
    """Naive, all fused, and all but one, as kernels launched one by one."""
    kernels = fused(releases, cuda)
    arms = {"naive": naive(), "fused": Config(kernels, merged=False)}
    for name in FUSED:
        arms[f"fused without {name}"] = Config({**kernels, name: "naive"}, merged=False)
    arms["fused with float32 weights"] = Config(kernels, merged=False, weights="float32")
    return arms


def plain(releases: Dict[str, str], cuda: bool) -> Dict[str, str]:
    """Attention as one kernel, and the rest as formulas that a compiler fuses."""
    return {**dict.fromkeys(FUSED, "plain"), "attention": fused(releases, cuda)["attention"]}


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
    return arms


def best(releases: Dict[str, str]) -> Dict[str, Config]:
    """The candidates for the fastest step, bf16 and FP8, with CUDA graphs."""
    kernels = fused(releases, True)
    arms = {"fused": Config(kernels, merged=False), "fused graph": Config(kernels, merged=False, graph=True)}
    if version_of_torch() >= (2, 5):
        ops = plain(releases, True)
        arms["fused compiled graph"] = Config(ops, compile="blocks", graph=True)
        if "torchao" in releases:
            arms["fp8 torchao.tensorwise compiled graph"] = Config(
                ops, compile="blocks", graph=True, linear="torchao.tensorwise", head=True
            )
    if "transformer-engine" in releases:
        te = Config(kernels, layers="transformer-engine", graph=True)
        arms["fused te graph"] = te
        arms["fp8 te.delayed graph"] = te._replace(linear="transformer-engine.delayed")
    return arms


def fp8(releases: Dict[str, str]) -> Dict[str, Config]:
    """FP8 by package and recipe, with the head in bf16 or not."""
    arms = {}
    for name, config in best(releases).items():
        if name in ("fused compiled graph", "fused te graph", "fp8 te.delayed graph"):
            arms[name] = config
    if version_of_torch() >= (2, 5) and "torchao" in releases:
        base = Config(plain(releases, True), compile="blocks", graph=True)
        arms["fp8 torchao.tensorwise but the head compiled graph"] = base._replace(linear="torchao.tensorwise")
        arms["fp8 torchao.rowwise compiled graph"] = base._replace(linear="torchao.rowwise", head=True)
    if "fp8 te.delayed graph" in arms and version_of_torch() >= (2, 2):
        te = arms["fused te graph"]
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


def precision_of(config: Config) -> str:
    return "bf16" if config.linear == "torch" else "fp8"


# --- micro-batches ---


class Batch:
    """The tokens of a micro-batch, the weights, and the gradient by which the arms are checked."""

    def __init__(self, shape: Shape, size: int, device: str) -> None:
        self.shape, self.device = shape, device
        self.tokens, self.labels = (torch.randint(shape.vocabulary, (size, shape.length), device=device) for _ in range(2))
        self.weights = draw(shape, device)
        model = build(shape, naive(), self.weights, device)
        model.config = model.config._replace(weights="exact")  # no autocast
        part = len(self.tokens) // min(len(self.tokens), 2)
        self.part = slice(0, len(self.tokens) // part)
        model(self.tokens[self.part], self.labels[self.part]).backward()
        self.truth = gradient_of(model).double()
        del model
        gc.collect()

    def model(self, config: Config) -> Llama:
        return build(self.shape, config, self.weights, self.device)

    def check(self, model: Llama, precision: str) -> List[Check]:
        """The error of a gradient that comes through all layers, for the sequences whose truth is known."""
        for parameter in model.parameters():
            parameter.grad.zero_()
        model(self.tokens[self.part], self.labels[self.part]).backward()
        return [Check(relative_error(gradient_of(model), self.truth), *BOUNDS[precision])]


def gradient_of(model: Llama) -> torch.Tensor:
    """The gradient of the first block's down projection."""
    names = ("blocks.0.down.weight", "blocks.0.layernorm_mlp.fc2_weight")
    (found,) = [parameter.grad for name, parameter in model.named_parameters() if name in names]
    return found.detach()


def micro_batches(shape: Shape, configs: Dict[str, Config], size: int, device: str) -> Makers:
    """One arm per configuration: forward and backward of one micro-batch, each with its own weights."""
    batch = Batch(shape, size, device)
    pool = torch.cuda.graph_pool_handle() if device == "cuda" else None
    return {name: partial(micro_batch, batch, config, base_of(name, configs), pool) for name, config in configs.items()}


def base_of(name: str, configs: Dict[str, Config]) -> str:
    """What an arm is compared with: FP8 with bf16 launched alike, everything else with the first arm."""
    if name.startswith("fp8"):
        alike = "fused te graph" if " te." in name else "fused compiled graph"
        return alike if alike in configs else next(iter(configs))
    return next(iter(configs))


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
    # The base of FP8 is the same model in bf16.
    comparable = precision == "fp8"
    return Arm(run, precision, base, work, check=lambda _: checks, state_bytes=held, comparable=comparable)


# --- whole steps ---

STEPS = ("fused te graph", "fp8 te.delayed graph", "fused compiled graph", "fp8 torchao.tensorwise compiled graph")
ADAMW: Dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def optimizer_of(config: Config, model: Llama, releases: Dict[str, str], cuda: bool) -> torch.optim.Optimizer:
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
    """Naive and the candidates: micro-batches of 2 and, of the candidates, of 8, to 65,536 tokens, then AdamW."""
    cuda = device == "cuda"
    weights = draw(shape, device)
    candidates = best(releases) if cuda else {}
    arms: Makers = {"naive 2": partial(step, shape, naive(), weights, releases, 2, device, tokens)}
    if not cuda:
        config = Config(fused(releases, cuda), merged=False)
        return {**arms, "fused 2": partial(step, shape, config, weights, releases, 2, device, tokens)}
    for name in names[2:] or names:
        for size in (2, 8):
            arms[f"{name} {size}"] = partial(step, shape, candidates[name], weights, releases, size, device, tokens)
    return arms


def step(
    shape: Shape, config: Config, weights: Dict[str, torch.Tensor], releases: Dict[str, str], size: int, device: str,
    tokens: int,
) -> Arm:  # fmt: skip
    """One whole step as it is trained: every micro-batch, AdamW, gradients back to zero."""
    model = build(shape, config, weights, device)
    optimizer = optimizer_of(config, model, releases, device == "cuda")
    data = torch.randint(shape.vocabulary, (2, size, shape.length), device=device)
    parameters = list(model.parameters())
    for parameter in parameters if config.weights != "float32" and device == "cuda" else []:
        # torchao's and Transformer Engine's layers leave them in bfloat16; the optimizer's remainders need that.
        assert parameter.dtype is torch.bfloat16

    def forward_and_backward() -> None:
        model(data[0], data[1]).backward()

    for _ in range(3):
        forward_and_backward()
    run = graphed(forward_and_backward) if config.graph else forward_and_backward
    count = tokens // (size * shape.length)

    def call() -> None:
        for _ in range(count):
            run()
        optimizer.step()
        torch._foreach_zero_([parameter.grad for parameter in parameters])

    call()
    states = [state for entry in optimizer.state.values() for state in entry.values() if torch.is_tensor(state)]
    held = sum(tensor.numel() * tensor.element_size() for tensor in [*states, *parameters, *parameters[:0]])
    held += sum(parameter.grad.numel() * parameter.grad.element_size() for parameter in parameters)
    work = flops(shape)["causal, products only"] * tokens
    base = "naive 2" if precision_of(config) == "bf16" else base_name(config, size)
    return Arm(call, precision_of(config), base, work, state_bytes=float(held), comparable=precision_of(config) == "fp8")


def base_name(config: Config, size: int) -> str:
    return ("fused te graph" if config.layers == "transformer-engine" else "fused compiled graph") + f" {size}"
