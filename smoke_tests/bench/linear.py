"""One Linear layer: which precision, through which package, by which launch path, from which size on.

x [m, k] times weight [n, k], without bias; forward, or forward with both gradients. The weight is cast in every call.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, List, Tuple

import torch

from smoke_tests.bench.machine import tf32
from smoke_tests.bench.method import Arm, Cell, Check, graphed
from smoke_tests.operators.bounds import E4M3, E5M2, relative_error, rounding_noise
from smoke_tests.operators.table import operator, rows

Size = Tuple[int, int, int]  # m, k, n

# A16 to A20: batch x hidden rows of hidden features.
SEED: Dict[str, Size] = {
    "A16": (16384, 2048, 512),
    "A17": (16384, 2048, 5632),
    "A18": (1024, 1024, 1024),
    "A19": (16384, 2048, 2048),
    "A20": (16384, 2048, 32),
}
# The recipes left out, blockwise and rowwise with a bfloat16 weight gradient, are made for other GPUs or for accuracy.
COLUMNS = ("transformer-engine.delayed", "transformer-engine.current", "torchao.tensorwise", "torchao.rowwise")
LARGE: Size = (16384, 8192, 8192)
# Least and greatest error of the same product in float64, by format: of e4m3 times e4m3 to e5m2 times e4m3 (one of the
# gradients), and of a result rounded to bfloat16. A float32 product only sums; tf32 may cut ten bits off.
BOUNDS = {
    "fp32": (0.0, 1e-5),
    "tf32": (1e-5, 2 * rounding_noise(10, 10)[1]),
    "bf16": (rounding_noise(7)[0], 1.2 * rounding_noise(7)[1]),
    "fp8": (rounding_noise(E4M3, E4M3)[0], 1.2 * rounding_noise(E5M2, E4M3)[1]),
}


def cells(releases: Dict[str, str], cuda: bool, quick: bool) -> List[Cell]:
    """The articles' shapes forward and with gradients, the large one, and the sweep that finds the crossover."""
    columns = [row.column for row in rows("linear", releases, cuda) if row.column in COLUMNS]
    if not cuda:
        columns = columns[:1]  # one emulated recipe is enough
        small: Dict[str, Size] = {"A18": SEED["A18"], "wide": (256, 1024, 2048)}
        seeds = {name: size for name, size in small.items() if not (quick and name == "wide")}
        sweep = [(256, k, k) for k in (256, 512, 1024)]
    else:
        seeds = {
            **({} if quick else SEED),
            **({"A17": SEED["A17"], "A18": SEED["A18"]} if quick else {}),
            "large": LARGE,
        }
        widths = (1024, 2048, 4096, 8192)
        sweep = [(m, k, n) for m in (16384, 4096) for k in widths for n in widths]
        sweep = [size for size in sweep if size in ((16384, 2048, 2048), (4096, 4096, 4096))] if quick else sweep
    listed = []
    for name, size in seeds.items():
        for way in ("both",) if quick and cuda else ("both", "forward"):
            listed.append(_cell(f"linear/seed/{name}/{way}", size, way, columns, cuda, compiled=cuda and not quick))
    for size in sweep:
        listed.append(_cell("linear/sweep/{}x{}x{}/both".format(*size), size, "both", _quantized(columns), cuda, False))
    if cuda and not quick:
        for width in (1024, 2048, 4096):
            size = (16384, width, width)
            listed.append(_cell(f"linear/compiled/{width}/both", size, "both", columns, cuda, compiled=True))
    return listed


def _quantized(columns: List[str]) -> List[str]:
    """Of the sweep: torchao without a compiler casts in many small steps, and is measured at the articles' shapes."""
    return [column for column in columns if not column.startswith("torchao")]


def _cell(key: str, size: Size, way: str, columns: List[str], cuda: bool, compiled: bool) -> Cell:
    m, k, n = size
    gib = (m * k + n * k + m * n) * 40 / 2**30
    seconds = (25 if compiled else 2) + m * k * n / 1e11 * (len(columns) + 2) / 8
    facts = {"m": m, "k": k, "n": n, "way": way}
    return Cell(key, facts, partial(_arms, size, way == "both", columns, cuda, compiled), seconds, gib)


def _arms(size: Size, both: bool, columns: List[str], cuda: bool, compiled: bool) -> Dict[str, Callable[[], Arm]]:
    """Every precision eager; bf16 and FP8 as CUDA graphs; and compiled. Each is compared with bf16 launched alike."""
    m, k, n = size
    draw = partial(torch.randn, device="cuda" if cuda else "cpu")
    problem = Problem(draw(m, k), draw(n, k), draw(m, n), both)
    arms: Dict[str, Callable[[], Arm]] = {}

    def add(name: str, precision: str, column: str = "torch", compile: bool = False, graph: bool = False) -> None:
        launch = (" compiled" if compile else "") + (" graph" if graph else "")
        make = partial(_arm, problem, precision, column, compile, graph, "bf16" + launch)
        arms[name + launch] = make

    wide = [("fp32", "fp32"), ("tf32", "tf32"), ("bf16", "bf16")] if cuda else [("fp32", "fp32"), ("bf16", "bf16")]
    for name, precision in wide:
        add(name, precision)
    for column in columns:
        add(column, "fp8", column)
    if cuda:
        for column in ["torch", *_quantized(columns)]:
            add("bf16" if column == "torch" else column, "bf16" if column == "torch" else "fp8", column, graph=True)
    if compiled:
        for graph in (False, True):
            for column in ["torch"] + [column for column in columns if column.startswith("torchao")]:
                fp8 = column != "torch"
                add(column if fp8 else "bf16", "fp8" if fp8 else "bf16", column, compile=True, graph=graph)
    return arms


class Problem:
    """The operands of one layer in float32, and what its results are in float64, on some of the rows."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, both: bool) -> None:
        self.x, self.weight, self.gradient, self.both = x, weight / weight.shape[1] ** 0.5, gradient, both
        self.rows, self.columns = (slice(0, None, max(1, size // 256)) for size in (x.shape[0], weight.shape[0]))

    def truth(self, dtype: torch.dtype) -> List[torch.Tensor]:
        """Some rows of x weight^T, and of both gradients, in float64, of the operands rounded to dtype."""
        x, weight, gradient = (each.to(dtype) for each in (self.x, self.weight, self.gradient))
        truths = [x[self.rows].double() @ weight.double().t()]
        if self.both:
            truths.append(gradient[self.rows].double() @ weight.double())
            truths.append(gradient[:, self.columns].double().t() @ x.double())
        return truths

    def check(self, results: Any, precision: str) -> List[Check]:
        """The error of each result against float64."""
        dtype = torch.float32 if precision in ("fp32", "tf32") else torch.bfloat16
        places = (self.rows, self.rows, self.columns)
        sample = [result.detach()[place] for result, place in zip(results, places)]
        return [Check(relative_error(*pair), *BOUNDS[precision]) for pair in zip(sample, self.truth(dtype))]


def _arm(problem: Problem, precision: str, column: str, compile: bool, graph: bool, base: str) -> Arm:
    m, k = problem.x.shape
    n = len(problem.weight)
    wide = precision in ("fp32", "tf32") or (column != "torch" and not problem.x.is_cuda)
    dtype = torch.float32 if wide else torch.bfloat16
    x, gradient = problem.x.detach().to(dtype).requires_grad_(problem.both), problem.gradient.to(dtype)
    layer = torch.nn.Linear(k, n, bias=False, device=x.device, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(problem.weight)
    layer = operator("linear", column)(torch.nn.Sequential(layer), keep=lambda name: False)
    if compile:
        layer = torch.compile(layer, dynamic=False)
    leaves = (x, *layer.parameters())

    def call() -> Any:
        with tf32(precision == "tf32"):
            y = layer(x)
            return (y, *torch.autograd.grad(y, leaves, gradient)) if problem.both else (y,)

    for _ in range(3):  # a delayed scale follows what it has seen
        call()
    return Arm(
        graphed(call) if graph else call,
        precision,
        base,
        flops=(6.0 if problem.both else 2.0) * m * k * n,
        check=partial(problem.check, precision=precision),
        ungraphed=call,
    )
