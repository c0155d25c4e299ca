"""Tencent's article on tilearn: a Llama on 8 GPUs sharded, and with tensor and pipeline parallelism, in torchtitan.

    python -m smoke_tests.training.recipes.tilearn --out runs/tilearn [--rows sharded "pipeline 2"]

Windows of 4,096 tokens and 128 of them in a step are the article's (E05, E06, E08, E09). tilearn itself cannot be
downloaded, so torchtitan trains its layouts. The article's numbers are from 8 A800 (80 GB) and, with tensor
parallelism, from 8 A100 (40 GB), where its sharded run reached 2,129 tokens/s.
"""

from __future__ import annotations

import sys

from smoke_tests.training.recipes import rows

ROWS = {
    "sharded": rows.Row("llama-8b-fsdp", "none", "2,975"),
    "pipeline 2": rows.Row("llama-8b-pp2", "none", "4,038 (1.36)"),
    "tensor 2": rows.Row("llama-8b-tp2", "none", ""),
    "tensor 2, pipeline 2": rows.Row("llama-8b-tp2-pp2", "none", "3,335 (1.57), A100"),
}

if __name__ == "__main__":
    sys.exit(rows.main("tilearn", str(__doc__).partition("\n")[0], ROWS, "8 A800 or A100", sys.argv[1:]))
