"""Shapes of the models that are measured whole."""

from __future__ import annotations

from training.llama import Shape

SHAPES = {
    "hare-1.1b": Shape(22, 32, 8, 64, 5632, 32000, 2048),
    "hare-2.0b": Shape(4, 128, 32, 64, 5632, 32000, 2048),
    "hare-0.4b": Shape(4, 16, 4, 64, 1024, 32000, 2048),
    "z2all-1.26b": Shape(22, 32, 8, 64, 5632, 64320, 2048),
    "llama-3-8b": Shape(32, 32, 8, 128, 14336, 128256, 8192),
}


def shape_of(name: str) -> Shape:
    return SHAPES[name]
