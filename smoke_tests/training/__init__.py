"""A Llama of fused operators, its training in every precision, and the tools that claims and records need for it."""
