"""The models that can be trained, as data: each a Llama of some sizes."""

from __future__ import annotations

from typing import Dict, NamedTuple


class Shape(NamedTuple):
    """Sizes of a Llama. By default 3 query heads share a key/value head, and no two sizes are equal."""

    layers: int = 2
    heads: int = 6
    kv_heads: int = 2
    head_size: int = 16
    hidden: int = 208
    vocabulary: int = 256
    length: int = 64

    @property
    def width(self) -> int:
        return self.heads * self.head_size


class Model(NamedTuple):
    """One model.

    shape: its sizes, shape.length being the context that it is trained with. parameters: how many there are, embedding
    and head apart unless they are tied. source: where the sizes were read. base, eps: of the rotary embedding and of
    the norms. tied: whether the head's weight is the embedding's.
    """

    shape: Shape
    parameters: int
    source: str
    base: float = 10000.0
    eps: float = 1e-5
    tied: bool = False


def parameters_of(shape: Shape, tied: bool = False) -> int:
    """How many parameters a Llama of that shape has: embedding, head, and per layer seven matrices and two norms.

    tied: the head has no weight of its own.
    """
    attention = 2 * shape.width * (shape.width + shape.kv_heads * shape.head_size)
    layer = attention + 3 * shape.width * shape.hidden + 2 * shape.width
    ends = 1 if tied else 2
    return ends * shape.vocabulary * shape.width + shape.layers * layer + shape.width


def operations_per_token(shape: Shape) -> float:
    """6 per parameter but for the input embedding, which is no product, and 12 * layers * width * length for attention.

    torchtitan's count. nanoGPT's takes all parameters, and its models have one embedding where these have two.
    """
    products = parameters_of(shape) - shape.vocabulary * shape.width
    return 6.0 * products + 12.0 * shape.layers * shape.width * shape.length


HARE = "LiteAI-Team/HARE 4c41f2c5, train/pretrain_fp8"
# Llama-type models of the layers, widths and heads of table 2.1, not GPT-3's own block. A feed-forward of 8/3 of the
# width, up to the next multiple of 128, has the parameters of GPT-3's two matrices of 4; the vocabulary is GPT-2's
# 50257 padded to 128; the head is not tied, so that each size has one more embedding than its name says.
GPT3 = "Brown et al. 2020 (2005.14165), table 2.1, with Llama's block"
# The table's 24 heads of 128 are wider than 2048, and its 5140 is no multiple of 16.
GPT3_1B, GPT3_13B = GPT3 + ", 16 heads", GPT3 + ", 5120 wide"

# Shape(layers, heads, kv_heads, head_size, hidden, vocabulary, length)
MODELS: Dict[str, Model] = {
    "tiny": Model(Shape(), 218_592, "training/models.py, for a CPU"),
    "tinyllama-120m": Model(
        Shape(12, 12, 1, 64, 2048, 32000, 2048), 121_129_728, "jzhang38/TinyLlama bf122247, lit_gpt/config.py"
    ),
    "hare-0.4b": Model(Shape(4, 32, 8, 32, 1024, 32000, 2048), 88_613_888, HARE + ", README.md: 1024 and 1024 wide"),
    "hare-1.1b": Model(Shape(22, 32, 8, 64, 5632, 32000, 2048), 1_123_117_056, HARE + "/mistral/config.json"),
    "hare-2.0b": Model(Shape(4, 32, 8, 256, 5632, 32000, 2048), 1_749_098_496, HARE + ", README.md: 8192 and 5632"),
    "z2all-1.26b": Model(Shape(22, 32, 8, 64, 5632, 64320, 2048), 1_255_499_776, "Gstdioh/Z2all, pretrain.py"),
    "llama-3-1.8b": Model(
        Shape(24, 16, 8, 128, 7168, 128256, 8192), 1_884_391_424, "foundation-model-stack/fms-fsdp, llama3_1.8b", 5e5
    ),
    "llama-3-8b": Model(
        Shape(32, 32, 8, 128, 14336, 128256, 8192), 8_030_261_248, "pytorch/torchtitan v0.1.0, llama3 8B", 5e5
    ),
    "gpt3-125m": Model(Shape(12, 12, 12, 64, 2048, 50304, 2048), 162_220_800, GPT3),
    "gpt3-350m": Model(Shape(24, 16, 16, 64, 2816, 50304, 2048), 411_354_112, GPT3),
    "gpt3-760m": Model(Shape(24, 16, 16, 96, 4096, 50304, 2048), 834_086_400, GPT3),
    "gpt3-1.3b": Model(Shape(24, 16, 16, 128, 5504, 50304, 2048), 1_420_396_544, GPT3_1B),
    "gpt3-2.7b": Model(Shape(32, 32, 32, 80, 6912, 50304, 2048), 2_795_276_800, GPT3),
    "gpt3-6.7b": Model(Shape(32, 32, 32, 128, 11008, 50304, 2048), 6_888_361_984, GPT3),
    "gpt3-13b": Model(Shape(40, 40, 40, 128, 13696, 50304, 2048), 13_124_654_080, GPT3_13B),
}
