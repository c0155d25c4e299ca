"""The faults of training, in its own code and in what packages do over many steps; and the claims for the rule.

The column "training" stands for smoke_tests/training, where any package's claim may catch the fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import math
from functools import partial
from types import CodeType
from typing import Any, Callable, ContextManager, Dict, Iterator, List
from unittest import mock

import torch

from smoke_tests.faults.planting import FAULTS, Call, Fault, patched
from smoke_tests.faults.transformer_engine_layers import delayed_with, engine
from smoke_tests.training import (
    checkpoint,
    document_masks,
    guard,
    hugging_face,
    model_config,
    schedule,
    trainer,
    validation,
)
from smoke_tests.training.llama import MASKED, Llama, RMSNorm, Rotary
from smoke_tests.training.options import Options

TRAINING = "training"
# The claims of this folder, by file.
CHECKPOINT = "training/test_checkpoint.py::test_"
FOLDERS = "training/test_hugging_face.py::test_"
GPU_RUNS = "training/test_gpu_runs.py::test_"
GUARD = "training/test_guard.py::test_"
LLAMA = "training/test_llama.py::test_"
MASKS = "training/test_document_masks.py::test_"
TRAINER = "training/test_trainer.py::test_"


def trained(kind: str, test: str) -> Callable[[Call], Call]:
    """Make a fault of a context manager that replaces something in this folder."""

    def note(plant: Call) -> Call:
        name = plant.__name__.replace("_", " ")
        FAULTS.append(Fault(name, kind, "", TRAINING, "", (test,), lambda _: plant()))
        return plant

    return note


# --- a step ---


def each_pass(change: Callable[[Call, List[Any]], torch.Tensor]) -> ContextManager[Any]:
    """In a step of three or more passes, each is change(its own function, the windows of the passes so far)."""
    own = trainer.Run.gradients

    def gradients(run: Any, step: int, launched: bool = False) -> torch.Tensor:
        micro: Call = run._micro
        windows: List[Any] = []

        def changed(*given: Any) -> torch.Tensor:
            windows.append(given)
            few = run.options.gradient_accumulation_steps < 3
            loss: torch.Tensor = micro(*given) if few else change(micro, windows)
            return loss

        run._micro = changed
        try:
            return own(run, step, launched)
        finally:
            del run._micro

    return mock.patch.object(trainer.Run, "gradients", gradients)


@trained("accumulation", TRAINER + "accumulates")
def second_of_three_passes_is_done_again_as_the_third() -> ContextManager[Any]:
    return each_pass(lambda micro, windows: micro(*windows[1 if len(windows) == 3 else -1]))


@trained("accumulation", TRAINER + "accumulates")
def second_of_three_passes_is_dropped() -> ContextManager[Any]:
    return each_pass(lambda micro, windows: torch.zeros(()) if len(windows) == 2 else micro(*windows[-1]))


@trained("clipping", TRAINER + "update")
def gradients_are_never_clipped() -> ContextManager[Any]:
    own: Call = vars(torch.nn.utils)["clip_grad_norm_"]
    return mock.patch.object(torch.nn.utils, "clip_grad_norm_", lambda parameters, _: own(parameters, math.inf))


@trained("clipping", TRAINER + "clip_in_float32")
def gradients_in_bfloat16_are_scaled_up_to_the_limit() -> ContextManager[Any]:
    def clip(parameters: Any, most: float) -> torch.Tensor:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = torch.cat([each.flatten().float() for each in gradients]).norm()
        for each in gradients:
            each.mul_(most / norm)
        return norm

    return mock.patch.object(trainer, "clip_in_float32", clip)


@trained("schedule", TRAINER + "rates")
def cosine_never_decays() -> ContextManager[Any]:
    own = schedule.rate_at

    def constant(step: int, options: Options) -> float:
        return own(step, dataclasses.replace(options, schedule="constant"))

    return mock.patch.object(schedule, "rate_at", constant)


@trained("schedule", TRAINER + "rates")
def warm_up_begins_at_zero() -> ContextManager[Any]:
    own = schedule.rate_at
    early = lambda step, options: own(step, options) * (step / (step + 1) if step < options.warmup else 1)  # noqa: E731
    return mock.patch.object(schedule, "rate_at", early)


def groups(change: Callable[[Dict[str, Any], Dict[str, Any]], Any]) -> ContextManager[Any]:
    """Runs begin with change(the matrices' group, the vectors') done to their optimizer."""
    own = trainer.Run.__init__

    def begin(run: Any, *given: Any) -> None:
        own(run, *given)
        change(*run.optimizer.param_groups)

    return mock.patch.object(trainer.Run, "__init__", begin)


@trained("loss", TRAINER + "loss_chunks")
def shorter_chunks_of_the_loss_are_dropped() -> ContextManager[Any]:
    own = Llama._loss

    def first(self: Any, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return own(self, x, targets) * (1.0 if targets.dim() == 2 or len(targets) > 42 else 0.0)

    return mock.patch.object(Llama, "_loss", first)


@trained("decay", TRAINER + "update")
def norms_decay() -> ContextManager[Any]:
    return groups(lambda matrices, vectors: vectors.update(weight_decay=matrices["weight_decay"]))


@trained("decay", TRAINER + "update")
def matrices_do_not_decay() -> ContextManager[Any]:
    return groups(lambda matrices, vectors: matrices.update(weight_decay=0.0))


# --- a model ---


def of_another_model(part: Any, change: Callable[[Any], Any]) -> ContextManager[Any]:
    """A part of each Llama is made as for change(model)."""
    own: Call = part.__init__
    return mock.patch.object(part, "__init__", lambda self, model, columns: own(self, change(model), columns))


@trained("another formula", LLAMA + "models_in_float64")
def base_of_the_rotary_positions_is_always_10000() -> ContextManager[Any]:
    return of_another_model(Rotary, lambda model: model._replace(base=1e4))


@trained("eps", LLAMA + "models_in_float64")
def eps_of_the_norms_is_always_a_hundred_thousandth() -> ContextManager[Any]:
    return of_another_model(RMSNorm, lambda model: model._replace(eps=1e-5))


# --- documents that share a window ---


def marked_as(change: Callable[[Call, torch.Tensor], torch.Tensor]) -> ContextManager[Any]:
    """What attention takes of documents is change(its own function, documents)."""
    changed = {name: each._replace(marked=partial(change, each.marked)) for name, each in MASKED.items()}
    return mock.patch.dict(MASKED, changed)


@trained("mask", MASKS + "packed_as_alone")
def separator_begins_the_next_document() -> ContextManager[Any]:
    documents = lambda tokens, separator: (tokens == separator).long().cumsum(1)  # noqa: E731
    return mock.patch.object(document_masks, "documents_of", documents)


@trained("mask", MASKS + "documents_apart")
def documents_attend_to_those_before_them() -> ContextManager[Any]:
    return marked_as(lambda own, documents: own(torch.zeros_like(documents)))


@trained("mask", MASKS + "packed_as_alone")
def all_windows_have_the_documents_of_the_first() -> ContextManager[Any]:
    return marked_as(lambda own, documents: own(documents[:1].expand_as(documents)))


@trained("mask", MASKS + "documents_apart")
def documents_behind_the_first_are_one() -> ContextManager[Any]:
    return marked_as(lambda own, documents: own(documents.clamp(max=1)))


@trained("mask", MASKS + "runs")
def held_out_windows_have_no_masks() -> ContextManager[Any]:
    own = validation.mean_loss

    def unmasked(run: Any) -> float:
        with mock.patch.object(run.model, "separator", None):
            return own(run)

    return mock.patch.object(validation, "mean_loss", unmasked)


# --- a folder of transformers ---


def read_as(change: Callable[[str, torch.Tensor], torch.Tensor]) -> ContextManager[Any]:
    """Each weight of a folder is change(its name, its values)."""
    own = hugging_face.opened

    def opened(folder: Any) -> Any:
        weights = own(folder)
        return weights._replace(read=lambda name: change(name, weights.read(name)))

    return mock.patch.object(hugging_face, "opened", opened)


@patched("another formula", FOLDERS + "from", "transformers")
def base_left_out_of_the_export(_: str) -> ContextManager[Any]:
    own = model_config.config_of
    return mock.patch.object(model_config, "config_of", lambda *given: {**own(*given), "rope_theta": 1e4})


@patched("another formula", FOLDERS + "from", "transformers")
def gate_and_up_change_places(_: str) -> ContextManager[Any]:
    own = hugging_face.parts_of

    def parts_of(model: Any) -> Any:
        table = own(model)
        return {ours: dict(reversed(list(table[ours].items()))) if "gate" in ours else table[ours] for ours in table}

    return mock.patch.object(hugging_face, "parts_of", parts_of)


@patched("another formula", FOLDERS + "from", "transformers")
def pairs_of_a_head_lie_side_by_side(_: str) -> ContextManager[Any]:
    def apart(name: str, weight: torch.Tensor) -> torch.Tensor:
        turned = name.endswith(("q_proj.weight", "k_proj.weight"))
        return weight.unflatten(0, (-1, 8, 2)).transpose(1, 2).reshape(weight.shape) if turned else weight

    return read_as(apart)


@patched("transpose", FOLDERS + "from", "transformers")
def outputs_of_attention_are_transposed(_: str) -> ContextManager[Any]:
    return read_as(lambda name, weight: weight.t() if "o_proj" in name else weight)


@patched("lost weight", FOLDERS + "export", "transformers")
def all_exported_layers_are_the_first(_: str) -> ContextManager[Any]:
    own = hugging_face.split

    def split(weights: Dict[str, torch.Tensor], model: Any) -> Dict[str, torch.Tensor]:
        state = own(weights, model)
        return {name: state[name.replace("layers.1.", "layers.0.")] for name in state}

    return mock.patch.object(hugging_face, "split", split)


# --- a checkpoint ---


def taken_over(change: Callable[[Dict[str, Any]], Any]) -> ContextManager[Any]:
    """What an AdamW gets of another's state is changed in place, parameter by parameter."""
    own = checkpoint.adamw_state

    def changed(*given: Any) -> Dict[str, Any]:
        state = own(*given)
        for each in state["state"].values():
            change(each)
        return state

    return mock.patch.object(checkpoint, "adamw_state", changed)


@trained("stale state", CHECKPOINT + "adamw_takes_over")
def count_of_steps_begins_anew() -> ContextManager[Any]:
    own = checkpoint.adamw_state
    return mock.patch.object(
        checkpoint, "adamw_state", lambda saved, optimizer, column, _: own(saved, optimizer, column, 0)
    )


@trained("stale state", CHECKPOINT + "adamw_takes_over")
def first_moment_begins_anew() -> ContextManager[Any]:
    return taken_over(lambda state: state.update(exp_avg=torch.zeros_like(state["exp_avg"])))


@trained("stale state", CHECKPOINT + "adamw_takes_over")
def second_moment_begins_anew() -> ContextManager[Any]:
    return taken_over(lambda state: state.update(exp_avg_sq=torch.zeros_like(state["exp_avg_sq"])))


# --- the guard ---


@trained("another layer", GUARD + "layers")
def layers_in_high_precision_are_judged_and_rounded() -> ContextManager[Any]:
    own: Call = vars(guard)["in_fp8"]

    def every(model: torch.nn.Module) -> Dict[str, torch.nn.Module]:
        every_layer = {name: layer for name, layer in model.named_modules() if hasattr(layer, "in_features")}
        return every_layer if own(model) else {}

    return mock.patch.object(guard, "in_fp8", every)


@trained("another kernel", GUARD + "vote")
def first_rounding_decides_alone() -> ContextManager[Any]:
    return mock.patch.object(guard, "SCALES", ())


@trained("another place", GUARD + "places")
def windows_lie_at_the_end_of_each_period() -> ContextManager[Any]:
    return mock.patch.object(guard, "place_of", lambda seed, period, last: last)


@trained("another place", GUARD + "places")
def windows_lie_where_each_process_says() -> ContextManager[Any]:
    own = guard.Guard._begin

    def begin(self: Any) -> None:
        own(self)
        self._place = guard.place_of(self.seed, self._period, self.every - self.steps)

    return mock.patch.object(guard.Guard, "_begin", begin)


@trained("stale state", GUARD + "goes_on")
def fallback_is_forgotten_by_a_resumed_run() -> ContextManager[Any]:
    own = guard.Guard.load_state_dict
    forget = lambda self, saved: own(self, {**saved, "state": "fp8"} if saved else saved)  # noqa: E731
    return mock.patch.object(guard.Guard, "load_state_dict", forget)


@trained("stale state", GUARD + "host_memory")
def copies_in_the_host_memory_are_the_tensors() -> ContextManager[Any]:
    return mock.patch.object(guard, "_held", lambda tensor: guard.Held(tensor.detach(), tensor.device))


@trained("wrong scale", GUARD + "extremes")
def underflow_is_that_of_one_bit_less() -> ContextManager[Any]:
    return mock.patch.object(guard, "E4M3_HALF", 2.0**-9)


# --- Transformer Engine, in a run and over many steps ---


@patched("another kernel", GPU_RUNS + "fp8_run", "transformer-engine")
def one_layer_is_left_in_bfloat16(_: str) -> ContextManager[Any]:
    own: Call = vars(trainer)["convert"]

    class Kept(torch.nn.Linear):  # type: ignore[misc]
        """A layer that no package recognizes as torch's."""

    def partly(model: torch.nn.Module, precision: str) -> torch.nn.Module:
        model.blocks[1].attention.output.__class__ = Kept
        converted: torch.nn.Module = own(model, precision)
        return converted

    return mock.patch.object(trainer, "convert", partly)


@engine("amax window", "amax_history", "transformer-engine.delayed")
def history_of_2_steps(_: str) -> ContextManager[Any]:
    return delayed_with(amax_history_len=2)


@engine("amax window", "amax_history", "transformer-engine.delayed")
def scale_of_the_most_recent_step(_: str) -> ContextManager[Any]:
    return delayed_with(amax_compute_algo="most_recent")


def scales_between(name: str, change: Callable[[Call, Dict[str, Any]], None]) -> ContextManager[Any]:
    """What Transformer Engine does with the scales before or after it computes again is change(its own, its scales)."""
    manager = importlib.import_module("transformer_engine.pytorch.module.base").FP8GlobalStateManager
    own = getattr(manager, name)
    return mock.patch.object(manager, name, lambda fp8_meta: change(own, fp8_meta))


@engine("recompute", "recompute", "transformer-engine.delayed")
def largest_value_is_recorded_again_in_recompute(_: str) -> ContextManager[Any]:
    return scales_between("restore_fp8_meta_tensors", lambda own, fp8_meta: None)


@engine("recompute", "recompute", "transformer-engine.delayed")
def recompute_takes_the_next_scales(_: str) -> ContextManager[Any]:
    def take(own: Call, fp8_meta: Dict[str, Any]) -> None:
        own(fp8_meta)
        fp8_meta["scaling_fwd"].scale.copy_(fp8_meta["updated_scale_fwd"])

    return scales_between("get_old_fp8_meta_tensors_for_recompute", take)


@engine("wrong scale", "transformer_layer")
def feed_forward_of_a_layer_5_percent_too_large(_: str) -> ContextManager[Any]:
    layer = importlib.import_module("transformer_engine.pytorch").LayerNormMLP
    own = layer.forward

    def larger(self: Any, *given: Any, **named: Any) -> Any:
        output = own(self, *given, **named)
        return (output[0] * 1.05, *output[1:]) if isinstance(output, tuple) else output * 1.05

    return mock.patch.object(layer, "forward", larger)


@engine("wrong gradient", "gradients_have_slope_1")
def gradients_of_norms_10_percent_too_large(_: str) -> ContextManager[Any]:
    module = importlib.import_module("transformer_engine.pytorch")
    own: Dict[Any, Call] = {}

    def larger(self: Any, *given: Any, **named: Any) -> Any:
        if "hooked" not in self.__dict__:
            self.__dict__["hooked"] = self.layer_norm_weight.register_hook(lambda gradient: gradient * 1.1)
        return own[type(self)](self, *given, **named)

    stack = contextlib.ExitStack()
    for layer in (module.LayerNormLinear, module.LayerNormMLP):
        own[layer] = layer.forward
        stack.enter_context(mock.patch.object(layer, "forward", larger))
    return stack


@patched("stale state", "test_msamp_adamw.py::test_steps", "msamp-adamw")
def every_step_corrects_its_bias_as_the_first(_: str) -> ContextManager[Any]:
    optimizer = importlib.import_module("msamp.optim").LBAdamW
    own = optimizer.adamw_fn

    def first(self: Any, *given: Any, **named: Any) -> None:
        *lists, steps = given
        own(self, *lists, [1 for _ in steps], **named)

    return mock.patch.object(optimizer, "adamw_fn", first)


# --- the rule ---


def function_of(module: str, name: str) -> Any:
    """The function of that name, as "Run.update", in a module of smoke_tests, as "training.trainer"."""
    place: Any = importlib.import_module("smoke_tests." + module.replace("/", "."))
    for part in name.split("."):
        place = getattr(place, part)
    return inspect.unwrap(getattr(place, "__func__", place))  # the function of a class method


def code_of(code: CodeType, name: str) -> CodeType:
    """The code of the function of that name in the code of its module."""
    for part in name.split("."):
        code = next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == part)
    return code


@contextlib.contextmanager
def recoded(function: Any, code: CodeType) -> Iterator[None]:
    """The context in which a function runs other code, wherever it is called from."""
    before, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = before
