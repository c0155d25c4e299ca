"""Which Linear layers of a model gain from FP8 on a GPU, by the rows that were measured there.

FP8 gains more the larger a product is, so a layer is taken to gain at least what the largest measured product gains
that is no larger in any of its three sizes; it is recommended if that gain's interval is not below 1. Needs the
standard library only:

    answer = json.loads(Path("fp8.json").read_text())  # what `nox -s recommend` wrote, asked of what shall run it:
    # --package torchao.tensorwise --launch "compiled graph"
    convert_to_float8_training(model, module_filter_fn=layer_filter(answer))
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

from smoke_tests.bench.rows import Row

Layers = Dict[str, Tuple[int, int]]  # the last part of its name -> features in, features out
# The model_types of transformers whose layers have these names and sizes.
LLAMA_LIKE = (
    "cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "granite", "llama", "ministral", "mistral", "olmo", "olmo2",
    "olmo3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm",
)  # fmt: skip


def layers_of(config: Dict[str, Any]) -> Layers:
    """The Linear layers of a Llama-like model, from the config.json that transformers writes; ValueError without."""
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [name for name in needed if not isinstance(config, dict) or config.get(name) is None]
    if missing:
        raise ValueError(f"it has no {missing[0]}, so it is not the configuration of a Llama-like model")
    if config.get("model_type", "llama") not in LLAMA_LIKE:
        raise ValueError(f"its model_type is {config['model_type']!r}, whose Linear layers are others than Llama's")
    sizes = {
        name: config[name] for name in (*needed, "head_dim", "num_key_value_heads") if config.get(name) is not None
    }
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"its {name} is {value!r}, and not a number of 1 or more")
    width, hidden, heads = (config[name] for name in needed[:3])
    size = sizes.get("head_dim", width // heads)
    kv = size * sizes.get("num_key_value_heads", heads)
    return {
        "q_proj": (width, heads * size),
        "k_proj": (width, kv),
        "v_proj": (width, kv),
        "o_proj": (heads * size, width),
        "gate_proj": (width, hidden),
        "up_proj": (width, hidden),
        "down_proj": (hidden, width),
        "lm_head": (width, config["vocab_size"]),
    }


def layers_of_shape(
    layers: int, heads: int, kv_heads: int, head_size: int, hidden: int, vocabulary: int, length: int
) -> Layers:
    """The Linear layers of a Llama, each projection by itself, from the sizes of its Shape."""
    width, kv = heads * head_size, kv_heads * head_size
    attention = {"query": (width, width), "key": (width, kv), "value": (width, kv), "output": (width, width)}
    gates = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    return {**attention, **gates, "head": (width, vocabulary)}


def arm_of(package: str, launch: str) -> str:
    """What the rows of a Linear call an FP8 column launched so."""
    return package if launch == "eager" else f"{package} {launch}"


def recommend(
    cells: Iterable[Row], layers: Layers, tokens: int, package: str, launch: str, head: bool = False
) -> Dict[str, Any]:
    """For each layer whether FP8 gains, by how much at least, and by which row; `tokens` is how many it sees at once.

    package: the FP8 column of the rows, e.g. "transformer-engine.delayed". launch: "eager", "graph", "compiled" or
    "compiled graph". The head is left in high precision, as published recipes have it, unless `head` asks for it too.
    """
    name = arm_of(package, launch)
    measured = [
        (row["facts"], row["arms"][name], row["key"])
        for row in cells
        if row["key"].startswith("linear/") and row["facts"].get("way") == "both" and usable(row["arms"].get(name))
    ]
    answer: Dict[str, Any] = {"package": package, "launch": launch, "tokens": tokens, "layers": {}}
    for layer, (k, n) in layers.items():
        match = smaller(measured, tokens, k, n)
        entry: Dict[str, Any] = {"in": k, "out": n, "fp8": False}
        if k % 16 or n % 16 or tokens % 16:
            entry["why"] = "FP8 products take multiples of 16 only"
        elif layer in ("head", "lm_head") and not head:
            entry["why"] = "the head stays in high precision"
        elif match is None:
            entry["why"] = "smaller than what was measured"
        else:
            _, arm, key = match
            entry.update(fp8=arm["low"] >= 1.0, ratio=round(arm["ratio"], 3), low=round(arm["low"], 3), row=key)
        answer["layers"][layer] = entry
    return answer


def usable(arm: Optional[Row]) -> bool:
    return arm is not None and "ratio" in arm and not arm["invalid"]


def smaller(measured: List[Tuple[Row, Row, str]], m: int, k: int, n: int) -> Optional[Tuple[Row, Row, str]]:
    """The largest measured product that is no larger in any size."""
    fits = [row for row in measured if row[0]["m"] <= m and row[0]["k"] <= k and row[0]["n"] <= n]
    return max(fits, key=lambda row: row[0]["m"] * row[0]["k"] * row[0]["n"], default=None)


def layer_filter(answer: Dict[str, Any]) -> Callable[[Any, str], bool]:
    """(layer, its full name) -> whether it shall be FP8: torchao's module_filter_fn.

    For fused_ops' entries, `keep = lambda name: not chosen(None, name)`.
    """
    gaining = {name for name, entry in answer["layers"].items() if entry["fp8"]}
    return lambda layer, name: name.rpartition(".")[2] in gaining
