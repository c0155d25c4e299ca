"""Numbers that break a physical limit are no win; rows survive what kills a run; the page links each to its row."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import Plan, plan
from recipes.errors import Refusal
from recipes.files import ROOT
from recipes.measure import bench, charts, goals, recommend, report, results
from recipes.process import group
from recipes.tests.conftest import Checkout, script
from recipes.tests.rows import LIMITS, SHARD, arm, fast, row

ROWS, RECOMMEND = results.room("rows"), results.room("recommend")


LARGE, NAMED = "linear/seed/large/both", "transformer-engine.delayed graph"


def first_goal(judged: results.Row) -> tuple[str, bool | None]:
    """What is shown of the large Linear's goal, and whether it is reached."""
    run = {**SHARD, "machine": {**SHARD["machine"], "gpus": [{}]}}
    goal = goals.answered([{**judged, "run": run}])[0]
    return goal["found"], goal["met"]


def job(precision: str, rate: float, gib: int, **others: Any) -> results.Row:
    return arm(
        precision,
        1e3 / rate,
        run="llama-8b",
        recomputed="",
        more="",
        tokens_per_second=rate,
        peak_mib=gib * 1024,
        **others,
    )


def test_recommend_takes_the_rows_of_the_newest_torch_among_those_that_are_kept(tmp_path: Path) -> None:
    chosen = results.newest_committed(ROOT)
    assert results.of(results.read(chosen)[1], "linear/sweep/")
    swept = [path for path in results.committed(ROOT) if "linear/sweep/" in path.read_text(encoding="utf-8")]
    versions = {path: Version(results.read(path)[0][0]["releases"]["torch"]) for path in swept}
    assert len(swept) > 1 and versions[chosen] == max(versions.values())
    with pytest.raises(Refusal, match=r"none.*--rows"):
        results.newest_committed(tmp_path)
    folder = results.committed_path(tmp_path, "", "").parent
    folder.mkdir(parents=True)
    for name in (chosen.name, "other--" + chosen.name):
        (folder / name).write_bytes(chosen.read_bytes())
    with pytest.raises(Refusal, match=re.escape(f"{chosen.name}, other--{chosen.name}")):
        results.newest_committed(tmp_path)


ON_GPUS = {**SHARD, "machine": {**SHARD["machine"], "gpus": [{}]}}


def shown(*rows: results.Row) -> dict[str, tuple[str, bool | None]]:
    """Goal -> what is shown, and whether it is reached, of those that were measured."""
    answers = goals.answered([{**ROWS.judge(cell, LIMITS), "run": ON_GPUS} for cell in rows])
    return {goal["goal"]: (goal["found"], goal["met"]) for goal in answers if goal["key"]}


def test_four_gpus_are_held_to_the_arm_that_was_named_and_recomputed_alike() -> None:
    beside: results.Row = {"comparable": True, "low": 1.32, "high": 1.34, "samples_ms": [1.0] * 9}
    faster = job("bf16", 10, 100, base="bf16", ratio=1.11, **{**beside, "comparable": False})
    arms = {"bf16": job("bf16", 9, 68), "fp8 gathered": job("fp8", 12, 57, base="bf16", ratio=1.33, **beside)}
    sharded = row("scaling/fsdp/8B/4", **{**arms, "bf16, nothing recomputed": faster})
    pp2 = job("bf16", 11, 50, base="fsdp", ratio=1.1, low=1.05, high=1.15, comparable=False)
    layouts = row("scaling/layouts/8B/4", fsdp=job("bf16", 10, 70), pp2=pp2)
    words = list(shown(sharded, layouts).values())
    assert words == [
        ("**1.33 (1.32 to 1.34, 9)**", True),
        ("1.1 (1 samples: no interval), inconclusive", None),
        ("**1.39**", True),
    ], "FP8 that recomputes has no number beside bf16 that does not"
    both = row("scaling/fsdp/8B/4", **{**sharded["arms"], "fp8 gathered, nothing recomputed": arms["fp8 gathered"]})
    both["arms"]["bf16, nothing recomputed"]["samples_ms"] = [1.5] * 9
    assert shown(both)["the same, nothing recomputed in either"] == ("**1.5 (1.5 to 1.5, 9)**", True)


def test_a_goal_is_held_to_one_cell_and_shows_how_many_others_reach_it() -> None:
    def block(key: str, ratio: float) -> results.Row:
        facts = {"hidden": 4096, "length": 2048, "batch": 4}
        return {**row(key, **{"fp8 graph": fast(ratio, samples_ms=[1.0] * 9)}), "facts": facts}

    rows = [block("block/core/6.7B/2048x4", 1.4), block("block/grid/13B/2048x8", 1.9), block("block/grid/13B/8x1", 1.2)]
    answers = goals.answered([{**ROWS.judge(cell, LIMITS), "run": ON_GPUS} for cell in rows])
    (goal,) = [goal for goal in answers if goal["goal"] == "FP8 over bf16, one block"]
    assert (goal["found"], goal["met"]) == ("1.4 (1.39 to 1.41, 9), not reached", False)
    assert goal["grid"] == "median 1.4, 1 of 3 reach it"


def test_fused_is_held_to_naive_by_time_and_memory_of_one_arm_at_equal_batch() -> None:
    naive = arm(ms=10.0, samples_ms=[10.0] * 9, state_mib=0, peak_mib=3000)
    small = arm(ms=2.5, samples_ms=[2.5] * 9, state_mib=0, peak_mib=1500)
    large = arm(ms=1.0, samples_ms=[1.0] * 9, state_mib=0, peak_mib=100)
    facts = {"tokens": 65536, "nanogpt": 8e9, "without input embedding": 7e9, "causal, products only": 6e9}
    arms = {"naive 2": naive, "fused te graph 2": small, "fused te graph 8": large}
    numbers = shown({**row("ablation/step/te", **arms), "facts": facts})
    mfu, time, memory = numbers.values()
    assert time == ("**4 (4 to 4, 9)**", True) and memory == ("2, not reached", False)
    share, others = (count * 65536 / 1e-3 / 989e12 for count in (7e9, 8e9))
    assert mfu[0].startswith(f"**{share:.3g} (") and mfu[0].endswith(f"({others:.1%} by nanoGPT's count)")


def test_a_rate_is_that_of_the_gpu_and_is_asked_of_targets_with_the_package_only() -> None:
    speed: results.Row = {"flops": 3e11, "flops_per_second": 3e14, "samples_ms": [1.0] * 9, "host_ms": 1.0}
    cell = {**row("operators/attention/2x32x8192x128/forward", **{"flash-attn-3": arm(**speed)})}
    with_package = {**ON_GPUS, "releases": {"flash-attn-3": "3.0.0"}}
    goal = "attention forward, 8,192 tokens, causal, heads of 128, TFLOP/s"
    for run, expected in ((with_package, ["300 (300 to 300, 9), not reached"]), (ON_GPUS, [])):
        answers = goals.answered([{**ROWS.judge(cell, LIMITS), "run": run}])
        assert [each["found"] for each in answers if each["goal"] == goal] == expected


def test_a_goal_that_is_not_reached_says_where_the_time_went() -> None:
    slow = row(LARGE, **{NAMED: fast(1.25, kernels=[["nvjet_qqtst", 0.5], ["quantize", 0.25]], samples_ms=[0.8] * 9)})
    goal = goals.answered([{**ROWS.judge(slow, LIMITS), "run": ON_GPUS}])[0]
    assert (goal["met"], goal["profile"]) == (False, "of 0.8 ms on the GPU: `nvjet_qqtst` 0.5, `quantize` 0.25")


def test_a_bound_within_the_interval_is_inconclusive() -> None:
    near = {NAMED: fast(1.65, samples_ms=[1.0] * 9)}
    assert first_goal(ROWS.judge(row(LARGE, **near), LIMITS)) == ("1.65 (1.64 to 1.66, 9), inconclusive", None)


def test_a_block_is_held_to_what_recommend_says_of_its_layers() -> None:
    def block(hidden: int, ratio: float) -> results.Row:
        facts = {"hidden": hidden, "length": 4096, "batch": 1}
        return {**row(f"block/grid/{hidden}/4096x1", **{"fp8 graph": fast(ratio)}), "facts": facts}

    linear = row("linear/sweep/2048", **{"transformer-engine.delayed graph": fast(1.2)})
    linear["facts"] = {"way": "both", "m": 2048, "k": 2048, "n": 2048}
    blocks = [block(1024, 0.8), block(2048, 1.1), block(4096, 1.3)]  # the first is smaller than what was measured
    cells = [ROWS.judge(measured, LIMITS) for measured in (linear, *blocks)]
    (goal,) = goals._least_gain(cells)
    assert (goal["key"], goal["grid"]) == ("block/grid/2048/4096x1", "the least of 2")
    assert goals._least_gain(cells[1:]) == []


# --- which rows are valid ---


def test_a_sound_row_is_valid() -> None:
    judged = ROWS.judge(row(fp8=fast(flops_per_second=1.4e15), copy=arm(bytes_per_second=4.1e12)), LIMITS)
    assert [measured["invalid"] for measured in judged["arms"].values()] == [[], [], []]
    fp8 = {NAMED: fast(1.7, samples_ms=[1.0] * 9)}
    assert first_goal(ROWS.judge(row(LARGE, **fp8), LIMITS)) == ("**1.7 (1.69 to 1.71, 9)**", True)


def test_a_call_whose_launches_take_its_time_is_launch_bound() -> None:
    judged = ROWS.judge(row(slow=arm(host_ms=0.96), failed={"error": "it does not run"}), LIMITS)["arms"]
    assert [judged[name].get("launch_bound") for name in ("bf16", "slow", "failed")] == [False, True, None]


def test_gaps_between_launches_are_seen_beside_the_same_work_as_a_graph() -> None:
    gaps, graph = arm(ms=1.2, host_ms=0.5), arm(ms=1.0, host_ms=0.01)
    cell = row(te=gaps, same=arm())
    cell["arms"].update({"te graph": graph, "same graph": graph})
    arms = ROWS.judge(cell, LIMITS)["arms"]
    assert [name for name, measured in arms.items() if measured["launch_bound"]] == ["te"]
    judged = {**ROWS.judge(row(slow=arm(host_ms=0.96, bytes=1, bytes_per_second=1e12)), LIMITS), "run": SHARD}
    assert results.share(judged["arms"]["slow"], judged) is None
    step = ROWS.judge(row("ablation/step/te", slow=arm(host_ms=0.99)), LIMITS)["arms"]
    assert not step["slow"]["launch_bound"], "its host may wait for a full queue"


def test_a_copy_is_no_ceiling_of_a_cpu() -> None:
    swift = row(copy=arm(bytes_per_second=9e12))
    on_gpu = {**SHARD, "machine": {**SHARD["machine"], "gpus": [{}]}}
    for shard, words in ((SHARD, []), (on_gpu, ["9000 GB/s, where the measured copy has 4000"])):
        (judged,) = ROWS.latest([shard, swift]).values()
        assert judged["arms"]["copy"]["invalid"] == words


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        (fast(2.1), "2.10 times its base, where fp8 is at most 2 times bf16"),
        (fast(flops_per_second=1.6e15), "1600 TFLOP/s, where the measured fp8 product has 1500"),
        (fast(bytes_per_second=4.2e12), "4200 GB/s, where the measured copy has 4000"),
        (fast(fp8_kernels=[]), "no FP8 product kernel ran"),
        (fast(checks=[[0.04, 0.02, 0.1], [0.2, 0.02, 0.1]]), "relative error 0.2, outside 0.02 to 0.1"),
        (fast(checks=[[0.001, 0.02, 0.1]]), "relative error 0.001, outside 0.02 to 0.1"),
        (fast(checks=[[float("nan"), 0.02, 0.1]]), "relative error nan"),
    ],
)
def test_a_planted_fault_is_invalid_and_no_win(planted: results.Row, message: str) -> None:
    judged = ROWS.judge(row(LARGE, fp8=planted, **{NAMED: planted}), LIMITS)
    assert judged["arms"]["bf16"]["invalid"] == []
    (reason,) = judged["arms"]["fp8"]["invalid"]
    assert reason.startswith(message)
    assert first_goal(judged) == ("not measured", None)
    assert RECOMMEND.recommend([judged], {"q": (4096, 4096)}, 16384, "fp8", "eager")["layers"]["q"]["fp8"] is False


def test_a_slowed_gpu_and_an_invalid_base_are_no_win() -> None:
    slowed = ROWS.judge({**row(fp8=fast()), "throttled": ["slowed by heat"]}, LIMITS)
    assert slowed["arms"]["bf16"]["invalid"] == ["the GPU was slowed by heat"]
    too_fast = row(fp8=fast())
    too_fast["arms"]["bf16"]["flops_per_second"] = 9e14
    assert ROWS.judge(too_fast, LIMITS)["arms"]["fp8"]["invalid"] == ["its base, bf16, is invalid"]


def test_more_than_the_hardware_is_allowed_where_the_work_differs() -> None:
    naive = ROWS.judge(row(fused=arm(base="bf16", ratio=4.2, low=4.1, high=4.3, comparable=False)), LIMITS)
    assert naive["arms"]["fused"]["invalid"] == []


def test_a_ratio_is_the_median_of_pairs_and_its_interval_holds_it() -> None:
    base, half = [2.0, 2.2, 1.9, 40.0] * 8, [1.0, 1.1, 1.0, 1.0] * 8
    ratio, low, high = ROWS.ratio(base, half)
    assert ratio == pytest.approx(2.0)
    assert 1.9 <= low <= ratio <= high < 40
    assert ROWS.ratio(half, base)[0] == pytest.approx(0.5)


# --- rows ---


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    file = tmp_path / "bench" / "rows.jsonl"
    ROWS.append(file, SHARD)
    with file.open("a") as torn:
        torn.write('{"key": "linear/x", "ar')
    ROWS.append(file, row())
    assert [line["key"] for line in ROWS.read(file)] == ["shard", row()["key"]]


def test_the_last_row_of_a_cell_counts_and_errors_do_not(tmp_path: Path) -> None:
    newer = row(fp8=fast(1.7))
    judged = ROWS.latest([SHARD, row(fp8=fast(1.2)), newer, {"key": "linear/y", "shard": "s", "error": "OOM"}])
    assert [cell["arms"]["fp8"]["ratio"] for cell in judged.values()] == [1.7]


def planted(folder: Path, *rows: results.Row) -> Path:
    """A file of rows."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in (SHARD, *rows)))
    return file


@pytest.mark.parametrize(
    ("change", "message"),
    [({"quick": True}, "rows of --quick"), ({"shard": "gone"}, "holds no measured row")],
)
def test_what_is_no_evidence_is_not_promoted(tmp_path: Path, change: results.Row, message: str) -> None:
    with pytest.raises(Refusal, match=message):
        report.promote(plan(Catalogue(), "cpu"), planted(tmp_path, {**row(), **change}))


def test_a_promoted_file_keeps_the_other_cells_of_the_same_releases(tmp_path: Path) -> None:
    chosen = elsewhere(tmp_path / "checkout")
    final = results.committed_path(chosen.root, "cpu", "H200")
    other, quick = row("linear/sweep/8x8x8/both", fp8=fast()), {**row("ablation/quick/2x2048"), "quick": True}
    report.promote(chosen, planted(tmp_path, row(fp8=fast(1.2)), other))
    report.promote(chosen, planted(tmp_path, row(fp8=fast(1.7)), quick))
    promoted = {cell["key"]: cell for cell in results.read(final)[1]}
    assert {key: cell["arms"]["fp8"]["ratio"] for key, cell in promoted.items()} == {
        row()["key"]: 1.7,
        other["key"]: 1.5,
    }
    assert final.with_name(f"{final.stem}-crossover.svg").exists()
    added = {**SHARD, "shard": "a", "releases": {**SHARD["releases"], "apex": "1"}}
    report.promote(chosen, planted(tmp_path, added, {**row(fp8=fast(1.8)), "shard": "a"}))
    assert {cell["key"] for cell in results.read(final)[1]} == {row()["key"], other["key"]}
    newer = {**SHARD, "shard": "n", "releases": {"torch": "3"}}
    report.promote(chosen, planted(tmp_path, newer, {**row("operators/x/8/forward", t=arm()), "shard": "n"}))
    assert [cell["key"] for cell in results.read(final)[1]] == ["operators/x/8/forward"]
    assert not final.with_name(f"{final.stem}-crossover.svg").exists(), "a picture without rows stays"


@pytest.mark.parametrize(
    "text",
    [
        "[]\n",
        '{"cells": []}\n',
        '["key"]\n',
        '{"key": "shard", "shard": "s", "limits": {}}\n',
        *(
            "".join(json.dumps(line) + "\n" for line in rows)
            for rows in (
                (SHARD, row("foo/bar")),
                (SHARD, {**row(), "facts": None}),
                (SHARD, row(te=arm(ms=None))),
                ({**SHARD, "machine": {**SHARD["machine"], "name": "../../x"}}, row()),
            )
        ),
        None,
    ],
)
def test_what_is_no_file_of_rows_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path if text is None else tmp_path / "rows.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(Refusal, match=re.escape(str(path)) + " is not a file of rows"):
        results.read(path)


def test_a_report_is_of_its_target(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="holds rows of ms-amp: bring those of cpu"):
        report.report(elsewhere(tmp_path), planted(tmp_path, {**SHARD, "target": "ms-amp"}, row()))


# --- the page ---


def elsewhere(folder: Path) -> Plan:
    """The plan of cpu, its checkout in another folder, where the report goes."""
    chosen = plan(Catalogue(), "cpu")
    folder.mkdir(exist_ok=True)
    (folder / "recipes").symlink_to(ROOT / "recipes")
    shutil.copytree(
        ROOT / "smoke_tests", folder / "smoke_tests", ignore=shutil.ignore_patterns("evidence", "__pycache__")
    )
    return dataclasses.replace(chosen, root=folder)


def test_every_number_of_the_page_links_to_its_row(tmp_path: Path) -> None:
    cells = [
        row(fp8=fast(), bad=fast(2.5)),
        row("operators/rms_norm/8x8/forward", t=arm(bytes_per_second=2e12, bytes=1)),
    ]
    written = report.report(elsewhere(tmp_path), planted(tmp_path, *cells))
    assert written == tmp_path / "build" / "cpu" / "bench" / "report.html"
    page = written.read_text()
    links, places = set(re.findall(r'href="#([^"]+)"', page)), set(re.findall(r'\bid="([^"]+)"', page))
    assert {cell["key"] for cell in cells} <= links
    assert links <= places
    assert page.count("<svg") == 2
    assert "invalid: 2.50 times its base" in page
    assert not re.search(r"""(src|href)=["'](https?:)?//""", page), "the page needs the network"
    assert written.with_name("rows.csv").read_text().count("\n") == 1 + sum(len(cell["arms"]) for cell in cells)


def test_the_page_says_what_failed_and_what_is_quick(tmp_path: Path) -> None:
    failed = {"key": "operators/adamw/step", "shard": "s", "error": "no memory <left>"}
    page = report.report(elsewhere(tmp_path), planted(tmp_path, {**row(fp8=fast()), "quick": True}, failed)).read_text()
    assert "operators/adamw/step (no memory &lt;left&gt;)" in page
    assert "1 of the 1 cells are of a quick run" in page
    assert "1.49 to 1.51" not in page, "an interval of one sample"


def test_an_invalid_arm_is_in_no_picture(tmp_path: Path) -> None:
    (cell,) = ROWS.latest([SHARD, row(bad=fast(2.5))]).values()
    assert charts.picture("crossover", [cell]) == ""
    (cell,) = ROWS.latest([SHARD, row(good=fast())]).values()
    assert "good" in charts.picture("crossover", [cell])


# --- recommend ---


def test_a_layer_gains_what_the_largest_smaller_product_gains() -> None:
    small = row("linear/a", te=fast(0.9))
    small["facts"] = {"m": 4096, "k": 1024, "n": 1024, "way": "both"}
    cells = list(ROWS.latest([SHARD, small, row("linear/b", te=fast(1.3))]).values())
    layers = {"up": (2048, 5632), "key": (1024, 2048), "tiny": (512, 512), "odd": (2048, 2050), "head": (4096, 32000)}
    answer = RECOMMEND.recommend(cells, layers, 16384, "te", "eager")
    assert {name: entry["fp8"] for name, entry in answer["layers"].items()} == {
        "up": True, "key": False, "tiny": False, "odd": False, "head": False,
    }  # fmt: skip
    assert (answer["layers"]["up"]["row"], answer["layers"]["key"]["row"]) == ("linear/b", "linear/a")
    chosen = RECOMMEND.layer_filter(answer)
    assert [chosen(None, f"model.layers.3.mlp.{name}") for name in ("up", "key")] == [True, False]


def test_a_configuration_of_transformers_and_a_model_of_ours_have_the_same_layers() -> None:
    config = {
        "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32000,
    }  # fmt: skip
    ours = RECOMMEND.layers_of_shape(*recommend.shapes(ROOT)["hare-1.1b"])
    assert list(RECOMMEND.layers_of(config).values()) == list(ours.values())


def test_the_1_26b_model_trains_as_its_article_says() -> None:
    """A step is 16 micro-batches of 2 sequences of 2048, and the vocabulary a multiple of 8 (B02, B04)."""
    *_, vocabulary, length = recommend.shapes(ROOT)["z2all-1.26b"]
    text = (ROOT / "smoke_tests" / "bench" / "ablation.py").read_text()
    (tokens,) = re.findall(r"^TOKENS = (\d+)", text, re.MULTILINE)
    assert int(tokens) == 16 * 2 * length == 65536
    assert vocabulary == 64320 and vocabulary % 8 == 0


LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
OTHERS: tuple[dict[str, Any], ...] = (
    {"num_attention_heads": 0}, {"head_dim": [1]}, {"hidden_size": -64}, {"vocab_size": True}, {"model_type": "bert"},
    {"model_type": "qwen2_moe"}, {"model_type": ["llama"]},
)  # fmt: skip


@pytest.mark.parametrize(
    "config",
    ["none.json", "{}", "[]", "[" * 10**5, *(json.dumps(LLAMA | change) for change in OTHERS)],
    ids=lambda config: config[-40:],
)
def test_another_configuration_is_refused_in_one_sentence(tmp_path: Path, config: str) -> None:
    if config[0] in "[{":
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(Refusal, match="cannot be used"):
        recommended(tmp_path, row(te=fast()))


def test_a_configuration_that_is_not_there_is_refused_in_plain_words(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"config\.json cannot be used \(No such file or directory\): give a Llama-like"):
        recommended(tmp_path, row(te=fast()))


def recommended(folder: Path, measured: results.Row, tokens: int = 16384, launch: str = "eager") -> results.Row:
    """What is recommended for the config.json of a folder, by one measured row of the package "te"."""
    return recommend.recommend(
        ROOT, str(folder / "config.json"), planted(folder, measured), tokens, "te", launch, head=False
    )


def test_what_was_never_measured_is_not_recommended_from(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert recommended(tmp_path, row(te=fast()))["package"] == "te"
    for measured, more, why in (
        (row(te=fast()), {"launch": "compiled"}, r"by 'te compiled' \(there are: te\)"),
        (row(), {}, r"by 'te' \(there are: none\)"),
        (row(te=fast()), {"tokens": 0}, "--tokens 0"),
    ):
        with pytest.raises(Refusal, match=why):
            recommended(tmp_path, measured, **more)


# --- running ---


def test_what_the_machine_cannot_do_is_said_in_its_own_sentence(tmp_path: Path) -> None:
    script(
        tmp_path / "env" / "bin" / "python",
        "#!/bin/sh\necho '[1/2] linear/a  1 ms  2 s, about 1 min left'\necho 'bench: The GPU is busy.'\nexit 2\n",
    )
    with pytest.raises(Refusal, match=r"^cpu: The GPU is busy\.$"):
        bench.measure(plan(Catalogue(), "cpu"), tmp_path / "env", [], None, quick=True)


APART = """
import signal, subprocess, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
job = subprocess.Popen(["sleep", "60"], start_new_session=True)
try:
    print(job.pid, flush=True)
    time.sleep(60)
finally:
    job.kill()
    job.wait()
"""


def test_when_we_are_stopped_bench_ends_the_job_that_it_started_apart(tmp_path: Path) -> None:
    command = [sys.executable, "-c", APART]
    with pytest.raises(KeyboardInterrupt), group(command, tmp_path, os.environ) as process:
        assert process.stdout
        job = int(process.stdout.readline())
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        os.kill(job, 0)


def test_listing_cells_builds_nothing(checkout: Checkout) -> None:
    checkout.refuse("bench", "cpu", "--list", naming=("build/cpu/env does not exist", "build(cpu)"))
