"""A Llama of fused operators, its training in every precision, and what claims and records need around that."""
