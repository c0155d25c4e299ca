"""HARE and its wide and narrow variants (A22 to A28): naive or fused, bf16 or FP8, so that neither hides the other.

A micro-batch is forward and backward of two sequences of 2,048 tokens; AdamW is not in it. te.Linear replaces single
projections; te.TransformerLayer (with te.LayerNormMLP in it) a whole block.
"""

from __future__ import annotations

from functools import partial
from typing import Dict, List

from bench.ablation import micro_batches, naive
from bench.llama import Config, flops, fused
from bench.method import Cell
from bench.shapes import shape_of
from training.llama import Shape


def cells(releases: Dict[str, str], cuda: bool, quick: bool) -> List[Cell]:
    """One cell per model: the four corners, eager and, fused, as CUDA graphs."""
    found = []
    names = (["hare-1.1b"] if quick else ["hare-1.1b", "hare-2.0b", "hare-0.4b"]) if cuda else ["tiny"]
    for name in names:
        shape = shape_of(name) if cuda else Shape(layers=2, heads=8, kv_heads=2, head_size=32, vocabulary=2048, length=128)
        arms = corners(releases, cuda)
        facts = {"model": name, "batch": 2, "tokens": 2 * shape.length, **flops(shape)}
        make = partial(micro_batches, shape, arms, 2, "cuda" if cuda else "cpu")
        found.append(Cell(f"models/{name}", facts, make, 15 + 6 * len(arms) if cuda else 5, 110 if cuda else 1))
    return found


def corners(releases: Dict[str, str], cuda: bool) -> Dict[str, Config]:
    """Naive bf16 first; FP8 beside bf16 of the same layers."""
    arms = {"naive": naive()._replace(weights="bfloat16"), "fused": Config(fused(releases, cuda), merged=False)}
    if "transformer-engine" in releases and cuda:
        te = Config(fused(releases, cuda), layers="transformer-engine")
        arms["fp8 naive, te.Linear"] = arms["naive"]._replace(linear="transformer-engine.delayed", head=True)
        arms["fp8 fused, te.Linear"] = arms["fused"]._replace(linear="transformer-engine.delayed", head=True)
        arms["fused te.TransformerLayer"] = te
        arms["fp8 te.TransformerLayer"] = te._replace(linear="transformer-engine.delayed")
        arms["fused te graph"] = te._replace(graph=True)
        arms["fp8 te.delayed graph"] = te._replace(graph=True, linear="transformer-engine.delayed")
    return arms
