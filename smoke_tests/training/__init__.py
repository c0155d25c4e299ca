"""Models assembled from the table of fused operators, and their training."""

import os
import sys

# Claims start `python -m training.pretrain` in the folder above, and sharded.py by its path. This one line lets both
# import smoke_tests, as pytest and `python -m smoke_tests.training.pretrain` do without it.
if __name__ == "training":
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
