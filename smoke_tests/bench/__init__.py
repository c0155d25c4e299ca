"""What FP8 and fused operators are worth on this machine: `python -m smoke_tests.bench --out FILE`."""
