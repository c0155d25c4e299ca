"""What FP8 and fused operators are worth on this machine: `python -m bench --out FILE`, from smoke_tests/."""
