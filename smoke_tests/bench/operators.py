"""Each operator of the table by itself: bytes/s beside the measured copy, or FLOP/s beside the measured product.

Bytes are the fewest that the call must move: each input read once, each output written once, and again backward. What
the table's entry does besides (putting halves together, making a layer object) is in its time.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from smoke_tests.bench.method import Arm, Cell, Check
from smoke_tests.operators import bounds, references
from smoke_tests.operators.table import OPERATORS, operator, rows

Bound = Callable[..., torch.Tensor]
ROUNDINGS = 16  # no operator here makes more of them, forward or backward
ADAMW: Dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Case(NamedTuple):
    """An operator at one size.

    shapes: of the inputs that get a gradient, those first whose rows are looked at. forward, both: tensors of the
    first shape moved, or FLOP if not `moves`, forward and with the gradients. classes: of the labels, where it has any.
    """

    name: str
    shapes: Sequence[Tuple[int, ...]]
    forward: float
    both: float
    classes: int = 0
    moves: bool = True

    @property
    def size(self) -> str:
        return "x".join(map(str, self.shapes[0])) + (f"x{self.classes}" if self.classes else "")


def cases(cuda: bool, quick: bool) -> List[Case]:
    """The sizes: of the 1.26B model with 16,384 tokens at once, and of a wider one."""
    if not cuda:
        n, widths, hidden, heads = 512, [1024], [2048], [(1, 8, 2, 256, 64)]
        vocabularies = [8192]
    else:
        n, widths, hidden = 16384, [2048, 8192], [5632, 14336]
        heads, vocabularies = [(8, 32, 8, 2048, 64), (2, 32, 8, 8192, 128)], [64320, 128256]
    listed = []
    for f in widths:
        listed.append(Case("rms_norm", [(n, f), (f,)], 2, 5))
        listed.append(Case("add_rms_norm", [(n, f), (n, f), (f,)], 4, 8))
    listed += [Case("swiglu", [(n, h), (n, h)], 3, 8) for h in hidden]
    listed += [Case("rope", [(b, h, length, d)], 2, 4) for b, h, _, length, d in heads]
    listed += [Case("cross_entropy", [(n // 2, v)], 1, 2) for v in vocabularies]
    for v in vocabularies[:1]:
        product = 2.0 * n // 2 * widths[0] * v
        listed.append(
            Case("linear_cross_entropy", [(n // 2, widths[0]), (v, widths[0])], product, 3 * product, v, False)
        )
    for b, h, k, length, d in heads:
        flops = 2.0 * b * h * length * length * d  # half of it for the causal mask
        listed.append(
            Case("attention", [(b, h, length, d), (b, k, length, d), (b, k, length, d)], flops, 3.5 * flops, 0, False)
        )
    f, h = widths[0], hidden[0]
    listed.append(
        Case("mlp", [(n, f), (h, f), (h, f), (f, h), (h,), (h,), (f,)], 6.0 * n * f * h, 18.0 * n * f * h, 0, False)
    )
    return [
        case for number, case in enumerate(listed) if not quick or case.name not in [c.name for c in listed[:number]]
    ]


def cells(releases: Dict[str, str], cuda: bool, quick: bool) -> List[Cell]:
    """Forward, and forward with gradients, of every case; and one step of each optimizer."""
    listed = []
    for case in cases(cuda, quick):
        dtype = torch.bfloat16 if cuda else torch.float32
        columns = list(dict.fromkeys(row.column for row in rows(case.name, releases, cuda) if row.dtype is dtype))
        for way in ("both",) if quick and cuda else ("forward", "both"):
            facts = {"operator": case.name, "size": case.size, "way": way}
            gib = (
                sum(torch.Size(shape).numel() for shape in case.shapes) * 24 / 2**30 + case.classes * 16384 * 24 / 2**30
            )
            make = partial(_arms, case, way == "both", columns, dtype, "cuda" if cuda else "cpu")
            if columns:
                listed.append(Cell(f"operators/{case.name}/{case.size}/{way}", facts, make, 6.0 if cuda else 3.0, gib))
    columns = list(dict.fromkeys(row.column for row in rows("adamw", releases, cuda)))
    count = 64 if cuda else 2
    facts = {"operator": "adamw", "size": f"{count * 4}M", "way": "forward"}
    make = partial(_optimizers, columns, count, "cuda" if cuda else "cpu")
    return [*listed, Cell("operators/adamw/step", facts, make, 8.0, count * len(columns) * 0.07)]


def bind(name: str, entry: Any, case: Case, labels: torch.Tensor, device: str) -> Bound:
    """The entry as a function of the inputs that get a gradient."""
    if name in ("rms_norm", "add_rms_norm"):
        return lambda *inputs: entry(*inputs, 1e-5)
    if name in ("cross_entropy", "linear_cross_entropy"):
        return lambda *inputs: entry(*inputs, labels, -100)
    if name == "rope":
        return bound_rope(entry, case.shapes[0], device)
    return entry  # type: ignore[no-any-return]


def bound_rope(make: Any, shape: Tuple[int, ...], device: str) -> Bound:
    """A rotary embedding from position 0 on; tables of cosines are made once, as a model does."""
    rope = make(shape[-1], 10000.0)
    if not hasattr(rope, "rotate"):
        return lambda x: rope(x, 0)
    angle = torch.arange(shape[-2], dtype=torch.float64)[:, None] * rope.frequency
    tables = {
        dtype: (angle.cos().to(device, dtype), angle.sin().to(device, dtype))
        for dtype in (torch.bfloat16, torch.float32)
    }
    return lambda x: rope.rotate(x, *tables[x.dtype])


def _arms(case: Case, both: bool, columns: List[str], dtype: torch.dtype, device: str) -> Dict[str, Callable[[], Arm]]:
    original = [torch.randn(shape, device=device).to(dtype) for shape in case.shapes]
    for index, shape in enumerate(case.shapes):
        if len(shape) == 2 and shape[0] != case.shapes[0][0]:
            original[index] /= shape[1] ** 0.5  # a weight
    # The operators may write into their inputs, so each call gets them anew.
    inputs = [torch.nn.Parameter(tensor.clone(), requires_grad=both) for tensor in original]
    classes = case.classes or case.shapes[0][-1]
    labels = torch.randint(classes, (case.shapes[0][0],), device=device)
    problem = Problem(case, original, inputs, labels, both)
    base = "torch" if "torch" in columns else columns[0]
    return {column: partial(problem.arm, column, base) for column in columns}


class Problem:
    """The inputs of one operator, and what it gives in float64 on a part of them."""

    def __init__(
        self, case: Case, original: List[torch.Tensor], inputs: List[torch.Tensor], labels: torch.Tensor, both: bool
    ) -> None:
        self.case, self.original, self.inputs, self.labels, self.both = case, original, inputs, labels, both
        self.gradient: Optional[torch.Tensor] = None

    def arm(self, column: str, base: str) -> Arm:
        """One implementation, compared with that of another column."""
        case, device = self.case, self.original[0].device.type
        run = bind(case.name, operator(case.name, column), case, self.labels, device)

        def call() -> Any:
            y = run(*self.inputs)
            if not self.both:
                return (y,)
            if self.gradient is None:
                self.gradient = torch.ones_like(y) if y.dim() == 0 else torch.randn_like(y)
            return (y, *torch.autograd.grad(y, self.inputs, self.gradient.to(y.dtype)))

        amount = case.both if self.both else case.forward
        tensor = torch.Size(case.shapes[0]).numel() * self.original[0].element_size()
        work = {"bytes": amount * tensor} if case.moves else {"flops": amount}
        precision = "bf16" if self.original[0].dtype is torch.bfloat16 else "fp32"
        return Arm(call, precision, base, check=self.check, before=self.restore, **work)

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, original in zip(self.inputs, self.original):
                tensor.copy_(original)

    def check(self, results: Any) -> List[Check]:
        """The error of a part of the result, and of the gradients of what that part was made of."""
        case, dtype = self.case, self.original[0].dtype
        place, looked_at = self.part()
        with torch.device(self.original[0].device):  # the references make masks and angles
            leaves = [
                (tensor[place[index]] if index in looked_at else tensor).detach().double().requires_grad_(self.both)
                for index, tensor in enumerate(self.original)
            ]
            rows = self.labels[place[0]] if case.name.endswith("cross_entropy") else self.labels
            reference = getattr(references, case.name)
            make = (lambda d, base: lambda x, start: reference(x, start, base)) if case.name == "rope" else reference
            truth = bind(case.name, make, case, rows, str(self.original[0].device))(*leaves)
        # The label's entry makes up nearly all of a row's gradient, and it is hardly rounded.
        exact = dtype is torch.float32 or case.name == "cross_entropy"
        floor = 0.0 if exact else bounds.rounding_noise(bounds.MANTISSA[dtype])[0]
        most = bounds.ceiling(dtype, ROUNDINGS)
        checks = []
        scale = 1.0
        if truth.dim() == 0:  # the mean over the checked rows; their gradient is part of that of the mean over all
            scale = len(rows) / len(self.labels)
        else:
            checks.append(Check(bounds.relative_error(results[0].detach()[place[0]], truth.detach()), floor, most))
        if self.both:
            assert self.gradient is not None
            gradient = self.gradient if truth.dim() == 0 else self.gradient[place[0]]
            inputs = [leaves[index] for index in looked_at]
            truths = torch.autograd.grad(truth, inputs, gradient.double() * scale)
            parts = [results[1 + index][place[index]] for index in looked_at]
            checks += [Check(bounds.relative_error(*pair), floor, most) for pair in zip(parts, truths)]
        return checks

    def part(self) -> Tuple[List[Any], Tuple[int, ...]]:
        """Where to look in each input, and which inputs have such a place: rows, or the heads of one group."""
        first = self.case.shapes[0]
        if self.case.name == "attention":
            heads = (slice(0, 1), slice(0, first[1] // self.case.shapes[1][1]))
            return [heads, (slice(0, 1), slice(0, 1)), (slice(0, 1), slice(0, 1))], (0, 1, 2)
        if self.case.name == "rope":
            return [(slice(0, 1), slice(0, 2))], (0,)
        some = slice(0, None, max(1, first[0] // 128))
        looked_at = (0, 1) if self.case.name in ("swiglu", "add_rms_norm") else (0,)
        return [some for _ in self.case.shapes], looked_at


def _optimizers(columns: List[str], count: int, device: str) -> Dict[str, Callable[[], Arm]]:
    """One step over `count` parameters of 2048 x 2048 in float32: 28 bytes each (four read, three written)."""
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, 2048, 2048, device=device, generator=generator)
    starts, gradient = [draw() for _ in range(count)], draw()

    def arm(make: Callable[..., torch.optim.Optimizer]) -> Arm:
        parameters = [torch.nn.Parameter(start.clone()) for start in starts]
        for parameter in parameters:
            parameter.grad = gradient.clone()
        optimizer = make(parameters, **ADAMW)
        optimizer.step()

        def check(_: Any) -> List[Check]:
            # The parameters after the step above and the one just called.
            start, updated = starts[0][:64].double(), parameters[0][:64].detach().double()
            truth = references.adamw(start, [gradient[:64].double()] * 2, **ADAMW)
            return [Check(bounds.relative_error(updated - start, truth - start), 0.0, 1e-3)]

        return Arm(optimizer.step, "fp32", "torch.foreach", bytes=28.0 * count * 2048 * 2048, check=check)

    makers: Dict[str, Callable[..., torch.optim.Optimizer]] = {
        "torch.foreach": partial(torch.optim.AdamW, foreach=True)
    }
    makers.update({column: OPERATORS["adamw"][column].call for column in columns})
    return {name: partial(arm, make) for name, make in makers.items()}
