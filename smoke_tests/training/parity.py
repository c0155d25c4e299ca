"""Do runs in other precisions end where bf16's do? Runs of several arms and seeds, compared and plotted.

    python -m smoke_tests.training.parity run DIR --arms bf16/naive,bf16/fused,fp8/fused --seeds 3 --minutes 8 -- \
        --model tiny
    python -m smoke_tests.training.parity report DIR

An arm is PRECISION or PRECISION/OPS, with @RATE where its learning rate is another; the first of each rate that is
trained is the one to compare with (MS-AMP's are trained last), and what follows -- are flags of pretrain.py. `run` goes
on where it was left, ends with 75 (call again) when its minutes are over, and appends each finished run to
DIR/curves.jsonl. `report` writes DIR/parity.json and DIR/parity.svg. Runs are compared seed by seed, and a seed is one
sample: the steps of a run hang together, so that more of them are not more samples.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence, Set

from smoke_tests.training import logs, plot, pretrain, schedule, trainer
from smoke_tests.training.checkpoint import CheckpointError, newest
from smoke_tests.training.command import Parser
from smoke_tests.training.documents import TextError
from smoke_tests.training.options import Refused, parse

WINDOW = 50  # steps of the moving mean
POINTS = 1000  # of a curve in the figure, at most
FEWEST = 5  # the fewest seeds for an interval and a verdict
# Nats per token within which two trainings count as equally good: 0.25 % of a loss of 2 nats per token. DeepSeek-V3
# (2412.19437, section 3.3) finds FP8's loss within that, and attributes as much to the randomness of training.
MARGIN = 0.005
# Student's t with 1, 2, ... 30 degrees of freedom, 97.5 %: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
Curves = Dict[str, Dict[int, Dict[str, Any]]]  # arm -> seed -> row of curves.jsonl


def run(folder: Path, arms: Sequence[str], seeds: int, minutes: float, flags: Sequence[str]) -> int:
    """Do the missing runs until the minutes are over; 0 if none is left, 75 if some are, or a failed run's code."""
    until = time.monotonic() + 60 * minutes
    folder.mkdir(parents=True, exist_ok=True)
    log = logs.Log(folder / "curves.jsonl")
    todo = [(seed, arm) for seed in range(seeds) for arm in arms]
    todo.sort(key=lambda pair: pair[1].startswith("ms-amp"))  # it changes torch for the rest of this process
    for seed, arm in todo:
        if seed in curves(folder).get(arm, {}):
            continue
        out = folder / "runs" / "{}-{}".format(arm.replace("/", "-"), seed)
        way, _, rate = arm.partition("@")
        precision, _, ops = way.partition("/")
        mine = [*flags, "--precision", precision, "--seed", str(seed), "--out", str(out)]
        mine += ["--ops", ops] if ops else []
        mine += ["--learning-rate", rate] if rate else []
        mine += ["--resume"] if newest(out) else []
        begun, note = pretrain.start(parse(mine))
        if texts(curves(folder)) - {begun.text.identity()}:  # each machine has its own standard library
            begun.release()
            raise TextError(f"{folder} holds runs that read another text: name one by --data, or take another folder")
        print(f"{arm}, seed {seed}, from step {begun.step} {note}", flush=True)
        code = trainer.train(begun, until=until)
        if code:
            return code
        rows = logs.read_log(out / "log.jsonl")
        numbers = {key: [round(row[key], 5) for row in rows] for key in ("loss", "norm")}
        asked = {key: value for key, value in vars(begun.options).items() if key not in ("out", "resume")}
        took = [row["seconds"] for row in rows]
        held_out = [[row["step"] + 1, round(row["validation"], 5)] for row in rows if "validation" in row]
        about: Dict[str, Any] = {"options": asked, "columns": begun.columns, "text": begun.text.identity()}
        about.update(tokens_per_step=begun.windows * begun.data.shape.length, seconds=round(sum(took), 1))
        about.update(step_seconds=round(statistics.median(took), 6))
        log.write(arm=arm, seed=seed, **about, **numbers, **({"validation": held_out} if held_out else {}))
        shutil.rmtree(out)
    return 0


def curves(folder: Path) -> Curves:
    """The curves of the runs so far."""
    by_arm: Curves = {}
    for row in logs.read_log(folder / "curves.jsonl"):
        by_arm.setdefault(row["arm"], {})[row["seed"]] = row
    return by_arm


def texts(by_arm: Curves) -> Set[str]:
    """The identities of the texts that were read, as far as they were noted."""
    return {row["text"] for runs in by_arm.values() for row in runs.values() if "text" in row}


# --- results ---


def smoothed(values: Sequence[float], window: int) -> List[float]:
    """The mean of each `window` values in a row."""
    total, means = sum(values[:window]), []
    for index in range(window, len(values) + 1):
        means.append(total / window)
        if index < len(values):
            total += values[index] - values[index - window]
    return means


def differences(reference: Sequence[Sequence[float]], arm: Sequence[Sequence[float]]) -> List[float]:
    """By how much each seed's losses lie above the reference's of the same seed: the mean over the second half."""
    means = ([statistics.mean(losses[len(losses) // 2 :]) for losses in side] for side in (arm, reference))
    return [round(mine - other, 7) for mine, other in zip(*means)]


def judged(values: Sequence[float], margin: float = MARGIN) -> Dict[str, Any]:
    """The verdict on the differences of some seeds; empty with too few seeds.

    above: their mean, with its interval of 95 % by Student's t. verdict: "equivalent" where the interval lies within
    the margin (two one-sided tests, each at 2.5 %), else "different" where it leaves 0 out, else "not told apart".
    """
    if len(values) < FEWEST:
        return {}
    mean = statistics.mean(values)
    reach = QUANTILES[min(len(values) - 1, len(QUANTILES)) - 1] * statistics.stdev(values) / len(values) ** 0.5
    low, high = mean - reach, mean + reach
    verdict = "equivalent" if -margin < low and high < margin else "different" if low * high > 0 else "not told apart"
    return {"above": mean, "interval": [low, high], "verdict": verdict}


def on_held_out(by_arm: Curves, beside: Dict[str, str]) -> Dict[str, Dict[str, Any]]:
    """The held-out losses of each arm; empty unless every run has some.

    end: the mean last loss. Of an arm that is compared with another, above: for each seed, by what share its last loss
    lies above the reference's. goal: the highest last loss of both, which all of their runs reached. arm, reference:
    what each needed to reach it.
    """
    if not all("validation" in row for runs in by_arm.values() for row in runs.values()):
        return {}
    result: Dict[str, Dict[str, Any]] = {}
    for arm, runs in by_arm.items():
        others = by_arm[beside[arm]]
        seeds = sorted(set(runs) & set(others))
        pairs = [(runs[seed]["validation"][-1][1], others[seed]["validation"][-1][1]) for seed in seeds]
        result[arm] = {"end": statistics.mean(end for end, _ in pairs)}
        if arm != beside[arm]:
            goal = max(max(pair) for pair in pairs)
            result[arm].update(above=[round(end / other - 1, 6) for end, other in pairs], goal=goal)
            for name, side in (("arm", runs), ("reference", others)):
                result[arm][name] = needed([side[seed] for seed in seeds], goal)
    return result


def needed(runs: Sequence[Dict[str, Any]], goal: float) -> Dict[str, float]:
    """The tokens and seconds that runs needed in the mean to reach a loss, evaluations left out.

    Each step counts as the median step, so that what else the machine did for a while does not count.
    """
    steps = [reached(run["validation"], goal) for run in runs]
    tokens = statistics.mean(run["tokens_per_step"] * step for run, step in zip(runs, steps))
    seconds = statistics.mean(run["step_seconds"] * step for run, step in zip(runs, steps))
    return {"tokens": round(tokens), "seconds": round(seconds, 1)}


def reached(losses: Sequence[Sequence[float]], goal: float) -> float:
    """The step at which a loss on held-out text, of pairs (step, loss), first is that low, between two on a line.

    ValueError if none is.
    """
    before = losses[0]
    for now in losses:
        if now[1] <= goal:
            fallen = before[1] - now[1]
            return now[0] - ((now[0] - before[0]) * (goal - now[1]) / fallen if fallen else 0)
        before = now
    raise ValueError(f"no loss is as low as {goal}")


def references(by_arm: Curves) -> Dict[str, str]:
    """The arm that each is compared with: the first one of its learning rate, or the first of all if it is alone."""
    by_rate: Dict[float, List[str]] = {}
    rates = {arm: next(iter(runs.values()))["options"]["learning_rate"] for arm, runs in by_arm.items()}
    for arm, rate in rates.items():
        by_rate.setdefault(rate, []).append(arm)
    first = next(iter(by_arm))
    return {arm: by_rate[rate][0] if len(by_rate[rate]) > 1 else first for arm, rate in rates.items()}


def report(folder: Path, window: int) -> Dict[str, Any]:
    """Compare every arm with the first one of its learning rate and plot all of them."""
    by_arm = curves(folder)
    if len(texts(by_arm)) > 1:
        raise TextError(f"{folder} holds runs that read different texts: give each its own folder")
    beside = references(by_arm)
    result: Dict[str, Any] = {"reference": next(iter(by_arm)), "window": window, "margin": MARGIN, "arms": {}}
    panels: Dict[str, plot.Curves] = {}
    above = "above " + " or ".join(dict.fromkeys(beside.values()))
    titles = (f"loss (nats per token), mean of {window} steps", above, "norm of the gradient")
    for arm, runs in by_arm.items():
        first = beside[arm]
        seeds = sorted(set(runs) & set(by_arm[first]))
        losses, others = ([side[seed]["loss"] for seed in seeds] for side in (runs, by_arm[first]))
        rough = sum(len(schedule.spikes(curve)) for curve in losses)
        end = statistics.mean(curve[-1] for curve in losses)
        result["arms"][arm] = {"beside": first, "seeds": seeds, "spikes": rough, "end": end}
        if min(map(len, losses)) < 2 * window:
            raise Refused(f"{arm} has {min(map(len, losses))} steps, too few: name a --window of half of them or less")
        if arm != first:
            apart_by_seed = differences(others, losses)
            result["arms"][arm].update(differences=apart_by_seed, **judged(apart_by_seed))
        means = [statistics.mean(values) for values in zip(*losses)]
        apart = [a - statistics.mean(values) for a, values in zip(means, zip(*others))]
        norms = [statistics.mean(values) for values in zip(*(runs[seed]["norm"] for seed in seeds))]
        for title, values in zip(titles, (means, apart, norms)):
            line = [(float(step + window), value) for step, value in enumerate(smoothed(values, window))]
            shown = line[:: math.ceil(len(line) / POINTS)]
            panels.setdefault(title, {})[f"{arm}, {rough} spikes" if title == titles[0] else arm] = shown
    for arm, numbers in on_held_out(by_arm, beside).items():
        result["arms"][arm]["validation"] = numbers
    (folder / "parity.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (folder / "parity.svg").write_text(plot.figure(panels), encoding="utf-8")
    return result


def main(arguments: List[str]) -> int:
    """The command; its exit code."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = Parser(prog="parity", description="Runs of several precisions, compared.")
    parser.add_argument("verb", choices=("run", "report"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arms", default="bf16/naive,bf16/fused,fp8/fused,torchao.tensorwise/fused")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--window", type=int, default=WINDOW)
    asked = parser.parse_args(arguments[:split])
    if asked.verb == "run":
        try:
            return run(asked.folder, asked.arms.split(","), asked.seeds, asked.minutes, arguments[split + 1 :])
        except (Refused, TextError, CheckpointError) as error:
            sys.exit(f"fusebox: {error}")
    if not curves(asked.folder):
        sys.exit(f"fusebox: {asked.folder} holds no finished run")
    try:
        for arm, numbers in report(asked.folder, asked.window)["arms"].items():
            print(arm, json.dumps(numbers))
    except (Refused, TextError) as error:
        sys.exit(f"fusebox: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
