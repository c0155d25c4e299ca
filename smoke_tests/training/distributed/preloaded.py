"""What every run on a CPU needs, imported once by the server of forks.py."""

from __future__ import annotations

import contextlib
import os

os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")  # a process with threads cannot be forked safely

import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp

from smoke_tests.training import documents, pretrain  # noqa: F401

with contextlib.suppress(ImportError):
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(torch.nn.Sequential())  # the first call imports a compiler
torch.set_num_threads(1)
list(documents.documents(()))  # the default text, which is cached
