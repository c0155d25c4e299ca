"""torchtitan's trainer on the shapes, the text and the numbers of this package; torchrun starts it with `-m`.

What the engine is told comes from recipes/runs.toml. This file registers the model "fusebox": the engine's Llama 3 in
the shapes below, real text in an order that no layout changes, and one line of numbers a step and rank in
DUMP_FOLDER/rank<N>.jsonl. `--cpu` trains over gloo, to see on any machine that a layout is right; `--look` notes the
kernels of rank 0's fourth microbatch in DUMP_FOLDER/kernels.json.

Shapes: b sequences of a microbatch, l length.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List, Tuple

import torch

if "--look" in sys.argv:  # both flags go before the import of the engine, which reads the arguments
    sys.argv.remove("--look")
    LOOK = True
else:
    LOOK = False
if "--cpu" in sys.argv:  # the engine knows no CPU: its device module is defined here, before the import
    sys.argv.remove("--cpu")
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda device: "CPU"
    torch.cpu.get_device_properties = lambda device: SimpleNamespace(total_memory=2**30)
    torch.cpu.memory_stats = lambda device: {}
    torch.cpu.current_device = lambda: 0
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None

from torch.distributed.fsdp import FSDPModule
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.quantization.float8 import Float8LinearConverter
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec, parallelize_llama
from torchtitan.models.llama3.infra.parallelize import apply_fsdp
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.tools.utils import device_type
from torchtitan.train import Trainer, main

from smoke_tests.training.short_training import standard_library_text
from smoke_tests.training.text import Text as Windows

# Llama 3's 8B, 70B and 405B are the engine's own; the 1.8B is fms-fsdp's (feed-forward 7168 wide).
OWN = {
    "tiny": TransformerModelArgs(dim=64, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=256, multiple_of=64),
    "1.8B": TransformerModelArgs(
        dim=2048, n_layers=24, n_heads=16, n_kv_heads=8, ffn_dim_multiplier=1.3125, multiple_of=256, rope_theta=500000
    ),
}
TEXT_BYTES = 2_000_000


class Text(BaseDataLoader):  # type: ignore[misc]
    """Microbatches of real text: {"input": [b, l]} and the tokens that follow [b, l].

    The text is the folder of prepare_data that --training.dataset_path names, or else the standard library's bytes.
    Sequence n of a run is the same whatever the layout. All replicas together take the sequences in order, so the state
    is their number alone, and a run resumes on another number of replicas.
    """

    def __init__(self, dp_world_size: int, dp_rank: int, job_config: Any, **_: Any) -> None:
        self.replicas, self.replica = dp_world_size, dp_rank
        self.batch, self.length = job_config.training.local_batch_size, job_config.training.seq_len
        self.text, self.windows, self.taken = torch.empty(0), None, 0
        if job_config.training.dataset_path:
            models = {**get_train_spec().model_args, **OWN}
            vocabulary = models[job_config.model.flavor].vocab_size
            self.windows = Windows.read([job_config.training.dataset_path], "", vocabulary, self.length, seed=0)
        else:
            self.text = standard_library_text(TEXT_BYTES)

    def sequence(self, number: int) -> torch.Tensor:
        """Sequence `number` with the token after it, [l + 1]: a window at a place that only the number decides."""
        if self.windows is not None:
            tokens, targets = self.windows.windows(number, 1)
            return torch.cat([tokens[0], targets[0, -1:]])
        draw = torch.Generator().manual_seed(number)
        start = int(torch.randint(len(self.text) - self.length, (), generator=draw))
        return self.text[start : start + self.length + 1]

    def __iter__(self) -> Iterator[Tuple[Dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            first = self.taken + self.replica * self.batch
            rows = torch.stack([self.sequence(first + row) for row in range(self.batch)])
            self.taken += self.replicas * self.batch
            yield {"input": rows[:, :-1]}, rows[:, 1:]

    def state_dict(self) -> Dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self.taken = state_dict["taken"]


class Numbers(MetricsProcessor):  # type: ignore[misc]
    """The engine's metrics, and a line of them at full precision: loss (nats a token), seconds, tokens, peak GiB."""

    def log(
        self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float, extra_metrics: Any = None
    ) -> None:
        seconds = time.perf_counter() - self.time_last_log
        memory = self.device_memory_monitor.get_peak_stats()
        row = {
            "step": step,
            "loss": float(global_avg_loss),  # -1 on the ranks of a pipeline that see no loss
            "grad_norm": grad_norm,
            "seconds": seconds,
            "tokens_per_second": self.ntokens_since_last_log / seconds / self.parallel_dims.non_data_parallel_size,
            "active_gib": memory.max_active_gib,
            "reserved_gib": memory.max_reserved_gib,
        }
        rank = torch.distributed.get_rank()
        with open(f"{self.job_config.job.dump_folder}/rank{rank}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)


def parallelize(model: torch.nn.Module, parallel_dims: ParallelDims, job_config: Any) -> torch.nn.Module:
    """The engine's plan; and without replicas to shard over, FSDP all the same, over a group of one.

    The engine computes in bfloat16 through FSDP only: tensor and pipeline parallel alone would run in float32.
    """
    model = parallelize_llama(model, parallel_dims, job_config)
    if not parallel_dims.fsdp_enabled and not parallel_dims.dp_replicate_enabled:
        parallel_dims.get_optional_mesh("fsdp")  # makes the meshes
        param_dtype, reduce_dtype = (
            getattr(torch, name)
            for name in (job_config.training.mixed_precision_param, job_config.training.mixed_precision_reduce)
        )
        apply_fsdp(model, parallel_dims._meshes["fsdp"], param_dtype, reduce_dtype, parallel_dims.pp_enabled)
    for module in model.modules():
        if isinstance(module, FSDPModule) and device_type == "cpu":
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale a sum
    return model


def loss_of(job_config: Any, parallel_dims: ParallelDims) -> Any:
    """The engine's sum over tokens; in a pipeline with the gradient of the mean.

    The pipeline takes the backward of the sum as it is: gradients are as many times too large as a step has tokens, and
    every step is clipped (seen in 0.2.2). No token of Text is left out, so their number is known.
    """
    summed = get_train_spec().build_loss_fn(job_config, parallel_dims=parallel_dims)
    if not parallel_dims.pp_enabled:
        return summed
    tokens = job_config.training.global_batch_size * job_config.training.seq_len

    def meant(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = summed(logits, labels)
        return loss / tokens + (loss - loss / tokens).detach()

    return meant


def register() -> None:
    """Make the model "fusebox" known to the engine, and its float8 converter by the name its tensor parallel looks for.

    The plan asks for "float8" among the converters, and the converter is registered as "quantize.linear.float8": by
    that name alone, tensor parallel would gather activations in high precision.
    """
    spec = get_train_spec()
    register_model_converter(Float8LinearConverter, "float8")
    register_train_spec(
        "fusebox",
        dataclasses.replace(
            spec,
            model_args={**spec.model_args, **OWN},
            parallelize_fn=parallelize,
            build_loss_fn=loss_of,
            build_dataloader_fn=Text,
            build_tokenizer_fn=None,
            build_validator_fn=None,
            build_metrics_processor_fn=lambda job_config, parallel_dims, model_args: Numbers(job_config, parallel_dims),
            state_dict_adapter=None,
        ),
    )


class Watched(Trainer):  # type: ignore[misc]
    """The engine's trainer; with `--look` rank 0 notes name -> [how often, ms] of one microbatch's GPU kernels.

    From the start of the fourth microbatch to that of the fifth: by then all is compiled. In a pipeline that is one
    forward and one backward pass, of different microbatches.
    """

    def __init__(self, job_config: Any) -> None:
        super().__init__(job_config)
        self.passes = 0
        self.profiler: Any = None
        if LOOK and device_type == "cuda" and torch.distributed.get_rank() == 0:
            self.model_parts[0].register_forward_pre_hook(self.look)

    def look(self, *_: Any) -> None:
        self.passes += 1
        if self.passes == 4:
            torch.cuda.synchronize()
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profiler.start()
        elif self.passes == 5:
            torch.cuda.synchronize()
            self.profiler.stop()
            ran: Dict[str, List[float]] = {}
            for event in self.profiler.events():
                if event.device_type == torch.autograd.DeviceType.CUDA:
                    count, spent = ran.get(event.name, (0, 0.0))
                    ran[event.name] = [count + 1, spent + event.time_range.elapsed_us() / 1e3]
            with open(f"{self.job_config.job.dump_folder}/kernels.json", "w") as file:
                json.dump(ran, file)


if __name__ == "__main__":
    register()
    main(Watched)
