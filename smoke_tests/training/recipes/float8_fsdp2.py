"""PyTorch's article on float8 with FSDP2: its 8B Llama in bfloat16 and in float8, on this machine's GPUs.

    python -m smoke_tests.training.recipes.float8_fsdp2 --out runs/float8 [--rows bf16 "float8, gathered"]

Windows of 8,192 tokens, attention in bfloat16, torch.compile and tensorwise scales are the article's. Its numbers (D07
in docs/status/documents.md) are rounded and from 128 H100. "gathered" also gathers FSDP's weights in float8, worth
about 5 % according to the article; "by rows" has rowwise scales, which it does not measure.
"""

from __future__ import annotations

import sys

from smoke_tests.training.recipes import rows

ROWS = {
    "bf16": rows.Row("llama-8b", "none", "8K"),
    "float8": rows.Row("llama-8b", "tensorwise", ""),
    "float8, gathered": rows.Row("llama-8b", "tensorwise-gathered", "10K (1.28)"),
    "float8, by rows": rows.Row("llama-8b", "rowwise", ""),
}

if __name__ == "__main__":
    sys.exit(rows.main("float8_fsdp2", str(__doc__).partition("\n")[0], ROWS, "128 H100", sys.argv[1:]))
