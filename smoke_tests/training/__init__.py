"""Models assembled from the table of fused operators, and their training."""

import os
import sys

# The files of this room import each other by their bare names, as pytest runs them. This one line lets
# `python -m smoke_tests.training.pretrain` do so from the checkout's root as `python -m training.pretrain` does here.
if __name__ != "training":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
