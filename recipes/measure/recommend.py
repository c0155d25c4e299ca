"""Which layers of a model gain from FP8, according to measured rows."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from recipes.errors import Refusal
from recipes.measure.results import Row, of, read, room, valid

LAUNCHES = ("eager", "graph", "compiled", "compiled graph")


def recommend(root: Path, config: str, rows: Path, tokens: int, package: str, launch: str, head: bool) -> Row:
    """The answer of `recommend` for a config.json, or for a model named in smoke_tests/training/models.py."""
    module = room("recommend")
    _, cells = read(rows)
    models = shapes(root)
    if tokens < 1:
        raise Refusal(f"--tokens {tokens} is not a number of tokens: give how many a layer gets at once.")
    arm = module.arm_of(package, launch)
    measured = {name for row in of(cells, "linear/") for name, arm in valid(row).items() if arm["precision"] == "fp8"}
    if arm not in measured:
        named = ", ".join(sorted(measured)) or "none"
        raise Refusal(
            f"{rows} has no Linear layer in FP8 by {arm!r} (there are: {named}): choose --package, --launch or --rows."
        )
    try:
        if config in models:
            layers = module.layers_of_shape(*models[config])
        else:
            layers = module.layers_of(json.loads(Path(config).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Refusal(
            f"{config} cannot be used ({reason}): give a Llama-like model's config.json, or one of {', '.join(models)}."
        ) from None
    answer: Row = module.recommend(cells, layers, tokens, package, launch, head)
    return {"model": Path(config).name, "rows": rows.name, **answer}


def shapes(root: Path) -> dict[str, list[int]]:
    """The sizes of each model of smoke_tests/training/models.py, which this one cannot import; not "tiny"."""
    tree = ast.parse((root / "smoke_tests" / "training" / "models.py").read_text(encoding="utf-8"))
    (models,) = [
        part.value for part in tree.body if isinstance(part, ast.AnnAssign) and "MODELS" in ast.dump(part.target)
    ]
    assert isinstance(models, ast.Dict)
    shapes = {}
    for name, model in zip(models.keys, models.values, strict=True):
        assert isinstance(name, ast.Constant)
        assert isinstance(model, ast.Call)
        shape = model.args[0]
        assert isinstance(shape, ast.Call)
        if shape.args:
            shapes[str(name.value)] = [ast.literal_eval(size) for size in shape.args]
    return shapes
