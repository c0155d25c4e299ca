"""HARE and its wide and narrow variants (A22 to A28): naive or fused, bf16 or FP8, so that neither hides the other.

A micro-batch is forward and backward of two sequences of 2,048 tokens; AdamW is not in it. te.Linear replaces single
projections; te.TransformerLayer (with te.LayerNormMLP in it) a whole block.
"""

from __future__ import annotations

from functools import partial
from typing import Dict, List

from smoke_tests.bench.ablated_llama import Config, flops, fused
from smoke_tests.bench.ablation import micro_batches, naive
from smoke_tests.bench.method import Cell
from smoke_tests.training.models import MODELS


def cells(releases: Dict[str, str], cuda: bool, quick: bool) -> List[Cell]:
    """One cell per model: the four corners, eager and, fused, as CUDA graphs."""
    made: List[Cell] = []
    names = ([] if quick else ["hare-1.1b", "hare-2.0b", "hare-0.4b"]) if cuda else ["tiny"]
    for name in names:
        shape = MODELS[name].shape
        arms = corners(releases, cuda, shape.head_size)
        facts = {"model": name, "batch": 2, "tokens": 2 * shape.length, **flops(shape)}
        make = partial(micro_batches, shape, arms, 2, "cuda" if cuda else "cpu")
        made.append(Cell(f"models/{name}", facts, make, 15 + 6 * len(arms) if cuda else 5, 110 if cuda else 1))
    return made


def corners(releases: Dict[str, str], cuda: bool, head_size: int) -> Dict[str, Config]:
    """Naive bf16 first; FP8 beside bf16 of the same layers. "attention fused" is the article's: nothing else is."""
    kernels = fused(releases, cuda, head_size)
    plain = naive()._replace(weights="bfloat16")
    attention = plain._replace(ops={**plain.ops, "attention": kernels["attention"]})
    arms = {"naive": plain, "attention fused": attention, "fused": Config(kernels, merged=False)}
    if "transformer-engine" in releases and cuda:
        te = Config(kernels, layers="transformer-engine")
        for name in list(arms):
            in_fp8 = arms[name]._replace(linear="transformer-engine.delayed", head=True, base=name)
            arms[f"fp8 {name}, te.Linear"] = in_fp8
        for launch, graph in (("", False), (" graph", True)):
            arms["fused te" + launch] = te._replace(graph=graph)
            in_fp8 = te._replace(graph=graph, linear="transformer-engine.delayed", base="fused te" + launch)
            arms["fp8 te.delayed" + launch] = in_fp8
    return arms
