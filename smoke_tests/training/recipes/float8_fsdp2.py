"""PyTorch's article on float8 with FSDP2: its 8B Llama in bfloat16 and in float8, on this machine's GPUs.

    python -m smoke_tests.training.recipes.float8_fsdp2 --out runs/float8 [--rows bf16 "float8, gathered"]

Tensorwise scales, attention in bfloat16, torch.compile and windows of 8,192 tokens are the article's; its numbers (D07
of the inventory) are of 128 H100. "gathered" also gathers FSDP's weights in float8, which it says is worth about 5 %.
"""

from __future__ import annotations

import sys

from smoke_tests.training.recipes import rows

ROWS = {
    "bf16": rows.Row("llama-8b", "none", "8,000"),
    "float8": rows.Row("llama-8b", "tensorwise", ""),
    "float8, gathered": rows.Row("llama-8b", "tensorwise-gathered", "10,000 (1.28)"),
    "float8, by rows": rows.Row("llama-8b", "rowwise", ""),
}

if __name__ == "__main__":
    sys.exit(rows.main("float8_fsdp2", str(__doc__).partition("\n")[0], ROWS, "128 H100", sys.argv[1:]))
