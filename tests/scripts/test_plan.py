"""The plan of a run: what a user's variables, a machine and a base directory make of it."""

import dataclasses
import importlib
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from _damage import edit_meta
from _samples import make_bundle, save_base, write_shard

from nanochat_fp4.cli import UserError
from nanochat_fp4.data import sources
from nanochat_fp4.data.dataset import build_embedded_corpus, ensure_data
from nanochat_fp4.evaluation.report import FOLDERS, get_report
from nanochat_fp4.locks import held_run
from nanochat_fp4.models.gpt import GPT
from nanochat_fp4.models.optim import PretrainingOptions
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.recipes import to_record
from nanochat_fp4.training.flags import SAME_RUN
from nanochat_fp4.training.load_model import BRANCH_SETTINGS
from nanochat_fp4.variables import NUMBERS, problem
from scripts import base_train, tok_train
from scripts import plan as program

ROOT = Path(__file__).parents[2]
FACT = re.compile(r"^  (\S[\w ]*?)? +(\S.*)$")


def planned(run="speedrun", **variables):
    """The plan of a machine with the GPU that GPU names, or of this one, which has none."""
    return program.Plan(
        run, {"PLAN_ONLY": "1", "NANOCHAT_BASE_DIR": os.environ.get("NANOCHAT_BASE_DIR", ""), **variables}
    )


def said(plan, **how):
    """The facts of the page by label, the lines of a fact joined."""
    found, label = {}, ""
    for line in program.page(plan, **how).splitlines()[1:]:
        if line.startswith(" " * 16):
            found[label][-1] += f" {line.strip()}"
            continue
        label = line[2:14].strip() or label
        found.setdefault(label, []).append(line[14:])
    return found


def commands(plan):
    return {stage.name: stage.command for stage in plan.stages}


@pytest.fixture(autouse=True)
def offline(monkeypatch, base_dir):
    """Nothing is asked of the network, no GPU is here, and the disk has room for a d20."""
    usage = program.shutil.disk_usage(ROOT)
    monkeypatch.setattr(program.shutil, "disk_usage", lambda path: usage._replace(free=10**12))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("DATA_DIR", raising=False)
    for module in (program, sources):
        monkeypatch.setattr(module, "url_problem", lambda url: "no network")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(program, "usable_cpus", lambda: 4)


@pytest.fixture
def h100(monkeypatch):
    """Two H100 are in this machine."""
    monkeypatch.setattr(program, "machine", lambda environment: (program.find_card("h100"), True, 2))


# ----------------------------------------------------------------------------------------------------------------------
# What a user asks for


def test_the_defaults_are_nanochats_and_every_variable_reaches_its_stage():
    two = planned(GPU="h100", NPROC="2", COMPARE="1", QAT_METHOD="quartet2")
    expected = {"DEPTH": 20, "SEQ_LEN": 2048, "VOCAB_SIZE": 65536, "TOTAL_BATCH": 524288, "DATA_RATIO": 20}
    assert expected.items() < two.s.values.items() and [base.tag for base in two.bases] == ["d20_clover", "d20_bf16"]
    assert commands(two)["report"][-1] == "--model-tag=d20_clover"  # The baseline was not asked for alone.
    assert not any("(s)" in stage.title for stage in two.stages)
    assert {stage.processes for stage in two.stages if stage.source} == {2} and two.bases[0].parameters == 560_988_200
    assert [planned("run1000", **gpu).s.values["DEPTH"] for gpu in ({"GPU": "h100"}, {})] == [32, 4]
    plan = planned(GPU="rtx5090", DEPTH="12", MATRIX_LR="0.01", EVAL_EVERY="7", BASE_ARGS="--warmup-ratio=0.1")
    command = commands(plan)["base:d12_clover_matrix-lr0.01_warmup-ratio-0.1"]
    assert command[0] == "scripts.base_train" and command[-1] == "--warmup-ratio=0.1"
    assert {"--depth=12", "--matrix-lr=0.01", "--eval-every=7", "--device-batch-size=auto"} < set(command)
    for name, (flag, _, default) in NUMBERS.items():
        script, _, flag = flag.partition(" ")
        assert not flag or any(f"{flag}={default}" in c for c in commands(planned()).values() if script in c[0]), name


@pytest.mark.parametrize(
    "variables, tag",
    [
        ({}, "d2_clover"),
        ({"EVAL_EVERY": "7", "DEPTH": "3", "QAT_METHOD": "nvidia"}, "d3_nvidia"),
        ({"NUM_ITERATIONS": "77", "MATRIX_LR": "0.1", "SEED": "2"}, "d2_clover_steps77_seed2_matrix-lr0.1"),
        ({"BASE_ARGS": "--weight-decay=0.1", "MID_ARGS": "--data=local"}, "d2_clover_weight-decay-0.1"),
        # What an interrupted run may be given goes on in its folder; a branch is a run of its own.
        ({"BASE_ARGS": "--state=lean --recompute codes --no-cuda-graph --run='a b'", "DEVICE_BATCH": "4"}, "d2_clover"),
        ({"BASE_ARGS": "--on-nonfinite=skip --adam-beta1=0.9 --save-every -1"}, "d2_clover_adam-beta1-0.9"),
        ({"BASE_ARGS": "--branch-from=d2_bf16@9"}, "d2_clover_branch-from-d2_bf16-9"),
        ({"BASE_ARGS": "--model-tag=d2_clover_state-lean"}, "d2_clover_state-lean"),
    ],
)
def test_a_runs_name_says_what_differs(variables, tag):
    plan = planned(**variables)
    assert plan.bases[0].tag == tag and f"mid:{tag}" in commands(plan)


def test_every_flag_that_makes_no_other_run_is_one_and_may_change_in_a_resume():
    args = vars(base_train.parse_args([]))
    assert SAME_RUN - args.keys() == {"dry_run", "model_step"}  # of later stages
    options = {f.name for f in dataclasses.fields(PretrainingOptions)} | {
        "num_iterations",
        "data_dir",
        *BRANCH_SETTINGS,
    }
    assert not SAME_RUN & (options | {"method", "seed", "total_batch_size", "data_seed", "shuffle_documents", "depth"})


def test_names_of_long_and_of_other_text_differ():
    tags = [program.Settings("speedrun", {"DATA_DIR": f}).tag("clover") for f in ("/a/books", "/b/books")]
    long = program.Settings("speedrun", {"BASE_ARGS": "--weight-decay=0.1 " * 9}).tag("clover")
    assert tags[0] != tags[1] and all("_data-books-" in tag for tag in tags) and len(long) < 100


def test_a_text_is_one_run_however_its_folder_is_spelled(base_dir, tmp_path, monkeypatch):
    (tmp_path / "books").mkdir()
    (tmp_path / "link").symlink_to("books")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    spelled = [str(tmp_path / "books"), "books", "./books/", f"{tmp_path}/x/../books/", "~/books", "link"]
    made = [program.Settings("speedrun", {"DATA_DIR": f, "NANOCHAT_BASE_DIR": str(base_dir)}) for f in spelled]
    assert len({s.tag("clover") for s in made}) == 1


REFUSED = [
    ({"QAT_METHOD": "fp3"}, "QAT_METHOD"),
    ({"DEPTH": "abc"}, "DEPTH=abc"),
    ({"DEPTH": "0", "SEED": "3"}, "DEPTH=0"),
    ({"HEAD_DIM": "63"}, "HEAD_DIM=63"),
    ({"BASE_ARGS": "--head-dim=63"}, "BASE_ARGS=--head-dim=63"),
    ({"TOTAL_BATCH": "1000"}, "TOTAL_BATCH=1000"),
    ({"TOTAL_BATCH": "5e5"}, "TOTAL_BATCH=5e5"),
    ({"SEQ_LEN": "100"}, "SEQ_LEN=100"),
    ({"DEVICE_BATCH": "7"}, "another DEVICE_BATCH"),
    ({"DEVICE_BATCH": "4096", "TOTAL_BATCH": "1048576"}, "set DEVICE_BATCH=32"),
    ({"DEPTH": "1000"}, "BASE_ARGS=--device-type=cpu"),
    ({"NUM_ITERATIONS": "0"}, "NUM_ITERATIONS=0"),
    ({"VOCAB_SIZE": "10"}, "VOCAB_SIZE=10"),
    ({"MATRIX_LR": "-1", "BASE_ARGS": "--warmup-ratio=0.1"}, "MATRIX_LR"),
    ({"WINDOW_PATTERN": "X"}, "WINDOW_PATTERN=X"),
    ({"BASE_ARGS": "--xyz"}, "(see python -m scripts.base_train --help)"),
    ({"BASE_ARGS": "--depth-nope=3"}, "unrecognized arguments: --depth-nope=3"),  # as the user has typed it
    ({"BASE_ARGS": "--depth=x"}, "argument --depth"),
    ({"BASE_ARGS": "--run='a"}, "close the quotation"),
    ({"MID_ARGS": "--max-seq-len=x"}, "MID_ARGS"),
    ({"SFT_ARGS": "--num-epochs=x"}, "SFT_ARGS"),
    # What a stage would refuse after the base training.
    ({"MID_ARGS": "--total-batch-size=1000"}, "MID_ARGS"),
    ({"SFT_ARGS": "--eval-steps=0"}, "SFT_ARGS"),
    ({"EVAL_ARGS": "-m 3000"}, "EVAL_ARGS"),
    ({"EVAL_ARGS": "-a nope"}, "'nope'"),
    ({"SPLIT_TOKENS": "1000"}, "SPLIT_TOKENS=1000"),
    ({"EVAL_BATCH": "0"}, "EVAL_BATCH=0"),
    ({"NUM_SHARDS": "-4"}, "NUM_SHARDS=-4"),
    ({"NUM_SHARDS": "many"}, "NUM_SHARDS=many"),
    ({"SEQ_LEN": "long"}, "SEQ_LEN"),
    ({"TOK_SHARDS": "5000"}, "TOK_SHARDS=5000"),
    ({"TOK_CHARS": "5"}, "TOK_CHARS=5"),
    ({"STAGES": "tok fly"}, "'fly'"),
    ({"NPROC": "99"}, "NPROC=99"),
    ({"NPROC": "2x"}, "NPROC='2x'"),
    (
        {"NPROC": "3", "GPU": "rtx5090"},
        "TOTAL_BATCH=524288 is not a multiple of 6144 tokens (1 row(s) of 2048 on NPROC=3",
    ),
    ({"QAT_METHOD": "clover_fp8"}, "did you mean clover_fp8_forward?"),
    ({"COMPARE": "maybe"}, "COMPARE=maybe"),
    ({"COMPARE": "1", "BASE_ARGS": "--model-tag=mine"}, "BASE_ARGS"),
    ({"COMPARE": "1", "QAT_METHOD": "bf16"}, "COMPARE"),
    ({"GPU": "rtx5099"}, "did you mean rtx5090?"),
    ({"GPU": "NVIDIA GeForce RTX 5090 Laptop GPU"}, "another chip; give its memory"),
    ({"DEPTH": "26"}, "GPU=rtx5090 plans"),
    *(({"GPU_MEMORY": text}, f"GPU_MEMORY={text}") for text in ("0", "-1", "x", "nan")),
    ({"GPU": "rtx5090", "PLAN_ONLY": ""}, "PLAN_ONLY=1"),
    ({"DATA_DIR": "/nowhere"}, "DATA_DIR"),
    ({"TEXT_COLUMN": "body"}, "DATA_DIR"),
    ({"STAGES": "sft"}, "add mid"),
    ({"STAGES": "base loss"}, "add tok"),
    ({"STAGES": "tok base sft"}, "add mid"),
    ({"MEMORY": "24"}, "GPU_MEMORY"),
]


@pytest.mark.parametrize("variables, word", REFUSED)
def test_what_a_stage_would_refuse_is_refused_by_the_plan(variables, word):
    with pytest.raises(UserError) as error:
        planned(**variables)
    assert word in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, meant",
    [
        ("NUM_ITERATION", "NUM_ITERATIONS"), ("DEPHT", "DEPTH"), ("NPROCS", "NPROC"), ("BATCH_SIZE", "DEVICE_BATCH"),
        ("LR", "MATRIX_LR"), ("VRAM", "GPU_MEMORY"), ("METHOD", "QAT_METHOD"), ("MODEL_TAG", "BASE_ARGS=--model-tag"),
        ("depth", "DEPTH"), ("PLAN", "PLAN_ONLY"), ("DRY_RUN", "PLAN_ONLY"), ("DEVICE_TYPE", "CUDA_VISIBLE_DEVICES="),
        ("DATA", "DATA_DIR"), ("SFT_DIR", "SFT_ARGS=--sft-dir"),
    ],
)  # fmt: skip
def test_a_variable_that_would_be_ignored_is_refused(name, meant):
    assert meant in problem({name, "PATH", "HOME"}) and problem({"PATH", "SHELL", "PYTHONHASHSEED"}) is None
    assert problem({"NANOCHAT", "OUT"}) is None  # exported for dev/measure.sh


# ----------------------------------------------------------------------------------------------------------------------
# The machine and its memory


@pytest.mark.parametrize("gpu", ["rtx5090", "5090", "RTX 5090", "rtx-5090", "NVIDIA GeForce RTX 5090"])
def test_a_card_in_any_spelling(gpu):
    assert program.find_card(gpu)["gib"] == 31.36 and program.find_card(gpu, 24)["gib"] == 24


@pytest.mark.parametrize("gpu", ["rtx5090laptop", "RTX 5090 Laptop GPU", "5090d", "rtx5090ti"])
def test_another_chip_of_the_same_name_is_not_meant(gpu):
    with pytest.raises(UserError, match="another chip"):
        program.find_card(gpu)


def test_other_chips_of_the_same_name_have_no_speeds():
    named = {"NVIDIA GeForce RTX 5090": True, "NVIDIA GeForce RTX 5090 D": False, "NVIDIA A30": False,
             "NVIDIA GeForce RTX 5090 Laptop GPU": False, "NVIDIA H100 80GB HBM3": True}  # fmt: skip
    assert {name: bool(program.card_of_device(name, 31.4, "sm_120")["speed"]) for name in named} == named


def test_each_method_has_its_own_memory_and_both_train_in_one_state(monkeypatch):
    monkeypatch.setattr(GPT, "init_weights", None)  # Nothing is allocated.
    plan = planned(GPU="rtx5090", DEPTH="32", COMPARE="1")
    clover, bf16 = (base.ways[0] for base in plan.bases)
    assert clover.state == bf16.state == "lean" and clover.rows == bf16.rows == 4
    assert all(set(base.ways[0].flags) < set(base.argv) for base in plan.bases)
    assert clover.parts["activations"] < 0.9 * bf16.parts["activations"] and all(
        way.peak <= 0.94 * 32 * 2**30 for way in (clover, bf16)
    )
    assert {"--state=lean", *clover.flags} <= set(said(plan)["memory"][1].split())
    besides = said(plan)["how long"][-1]
    assert besides == "besides: core, mid, sft (docs/one_card.md bounds mid and sft)"
    assert "besides" not in " ".join(said(planned(GPU="rtx5090", STAGES="tok base"))["how long"])


def test_a_model_that_does_not_fit_is_refused_with_what_does():
    with pytest.raises(UserError, match="d36_clover needs .* lower DEPTH"):
        planned(GPU="rtx5060", DEPTH="36")
    with pytest.raises(UserError, match="d26_bf16 needs .* leave COMPARE out"):
        planned(GPU="rtx5060", GPU_MEMORY="8", DEPTH="26", COMPARE="1")
    small = {"GPU": "rtx5060", "GPU_MEMORY": "8", "DEPTH": "24"}
    (note,) = said(planned(QAT_METHOD="bf16", **small))["note"]  # It fits hardly.
    others = re.search(r"QAT_METHOD=(.*?), or lower DEPTH", note)[1].split(" or ")
    assert others and all(planned(QAT_METHOD=method, **small).bases[0].ways[0].rows for method in others)
    with pytest.raises(UserError, match="without a name has 0.01 GiB"):
        planned(GPU_MEMORY="0.01", DEPTH="2")
    rows = {"20": "2", "32": "4"}
    slow = [planned(GPU="rtx5090", DEPTH=d, DEVICE_BATCH=n) for d, n in [*rows.items(), ("32", "2")]]
    slow = [" ".join(said(plan)["how long"]) for plan in (*slow, planned(GPU="rtx5080", DEPTH="32"))]
    assert ["half of BF16's tokens/s, once, on an H200" in facts for facts in slow] == [False, False, True, True]
    llama = planned(GPU="rtx5090", BASE_ARGS="--llama=30M")
    assert llama.bases[0].ways == [] and "not counted" in said(llama)["memory"][0]


@pytest.mark.parametrize("compare", ["", "1"])
def test_two_gpus_take_the_state_that_fits_as_one_does(compare):
    """d32 does not fit two RTX 5090 in FP32. A state that fits, or one that the user names, stays."""
    two = {"GPU": "rtx5090", "NPROC": "2"}
    plan = planned(**two, DEPTH="32", COMPARE=compare)
    assert all("--state=lean" in base.argv and base.ways[0].rows for base in plan.bases)
    assert "the run sets --state=lean for that" in " ".join(said(plan)["memory"])
    assert planned(**two).bases[0].ways[0].flags == []
    with pytest.raises(UserError, match="d32_clover needs"):
        planned(**two, DEPTH="32", BASE_ARGS="--state=fp32")
    with pytest.raises(UserError, match="d48_clover needs .* with one row, --state=lean"):
        planned(**two, DEPTH="48")
    with pytest.raises(UserError, match="fit with --state=lean") as e:
        planned(**two, DEPTH="32", DEVICE_BATCH="128")
    rows = re.search(r"set DEVICE_BATCH=(\d+)", str(e.value))[1]
    assert planned(**two, DEPTH="32", DEVICE_BATCH=rows).bases[0].ways[0].rows == int(rows)


@pytest.mark.parametrize("how", ["DEVICE_BATCH", "BASE_ARGS"])
def test_a_micro_batch_that_does_not_fit_names_its_rows_and_those_that_fit(how):
    with pytest.raises(UserError) as e:
        planned(GPU="rtx5060", **{how: "--device-batch-size=64" if how == "BASE_ARGS" else "64"})
    rows, flags = re.search(r"at most (\d+) of them fit with (.*?), which", str(e.value)).groups()
    fits = planned(GPU="rtx5060", DEVICE_BATCH=rows)
    assert "64 rows" in str(e.value) and fits.bases[0].ways[0].flags == flags.split() and fits.bases[0].ways[0].rows
    hardly = said(planned(GPU="rtx5090", DEVICE_BATCH="64"))
    assert "hardly fits" in hardly["note"][0] and "64 rows, --state=lean, " in hardly["note"][0]
    assert "64 rows of 2,048 tokens: 30." in hardly["memory"][0] and "--state=lean" in hardly["memory"][-1]


def test_every_micro_batch_up_to_the_whole_card_has_a_line_of_memory():
    """Also one that takes between 94% and all of it. What a way does not fit is no way."""
    of = {
        rows: program.Base(planned(GPU="rtx5090").s, "clover", f"--device-batch-size={rows}").ways[0]
        for rows in (32, 64)
    }
    assert of[32].rows == 32 and not of[64].rows and of[64].peak < 31.36 * 2**30
    for gib in ("28.5", "29", "31", "33"):  # 30.6 GiB are counted for 64 rows.
        try:
            plan = planned(GPU="rtx5090", GPU_MEMORY=gib, DEVICE_BATCH="64")
        except UserError as e:
            assert "64 rows" in str(e)
            continue
        assert said(plan)["memory"][0].startswith("64 rows ") and (float(gib) > 32.6) != ("note" in said(plan))
    total, *parts = map(float, re.findall(r"\d[\d.]*", said(planned(GPU="rtx5090"))["disk"][0]))
    assert len(parts) == 3 and sum(parts) == pytest.approx(total, abs=0.1)
    graphs = [said(planned(GPU="rtx5090", DEPTH="26", BASE_ARGS=flag))["memory"][0] for flag in ("", "--cuda-graph")]
    assert ["with CUDA graphs" in fact for fact in graphs] == [False, True]
    ways = [planned(GPU="rtx5090", NPROC=n).bases[0].ways[0] for n in ("1", "2")]
    assert [f"{way.parts['moments'] / 2**30:.1f}" for way in ways] == [
        "2.4",
        "1.2",
    ]  # docs/scale.md: each GPU keeps its share.


# ----------------------------------------------------------------------------------------------------------------------
# Hours


def hours(base_dir="", **variables):
    plan = planned(NANOCHAT_BASE_DIR=str(base_dir), **variables)
    return plan.bases[0], program.hours(plan.s, plan.bases[0])


def test_hours_are_scaled_by_weights_and_flops_and_divided_by_gpus():
    (d20, (low, high, facts)), (d12, (low12, *_)) = (hours(GPU="rtx5090", DEPTH=d) for d in ("20", "12"))
    ratio = d12.weights * d12.tokens / d20.weights / d20.tokens
    assert low < high and low12 / low == pytest.approx(ratio, rel=0.02)  # but for the validations
    assert hours(GPU="rtx5090", NPROC="2")[1][:2] == pytest.approx((low / 2, high / 2))
    long = hours(GPU="rtx5090", SEQ_LEN="8192", EVAL_EVERY="-1")
    usual = hours(GPU="rtx5090", EVAL_EVERY="-1")
    assert long[1][0] / usual[1][0] == pytest.approx(long[0].flops / usual[0].flops, rel=0.01)
    assert sum("SOURCE" in fact for fact in facts) == 1 and hours(GPU="rtx5080")[1] is None
    *each, both = said(planned(GPU="rtx5090", COMPARE="1"))["how long"][:3]
    ends = [[float(x) for x in re.search(r"(\d+) to (\d+) hours", fact).groups()] for fact in (*each, both)]
    assert ends[2] == pytest.approx([sum(pair) for pair in zip(*ends[:2])], abs=2) and "days" in both
    assert "power cut loses up to 1,000 steps, 1.1 to 3.2 hours (SAVE_EVERY=250" in " ".join(
        said(planned(GPU="rtx5090"))["how long"]
    )
    assert any(f.startswith("EXTRAPOLATED") for f in hours(GPU="rtx5090", DEPTH="4")[1][2])
    assert "not known" in said(planned(GPU="rtx5080"))["how long"][0]


def test_a_run_of_several_precisions_takes_the_time_of_each():
    """Half of the steps in BF16, and a third of the products in FP8."""
    plain = {m: hours(GPU="rtx5090", QAT_METHOD=m, EVAL_EVERY="-1")[1][0] for m in ("bf16", "fp8", "nvidia")}
    half = hours(GPU="rtx5090", QAT_METHOD="nvidia", EVAL_EVERY="-1", BASE_ARGS="--method-phases=0.5=bf16")[1][0]
    mixed, _, facts = hours(GPU="rtx5090", QAT_METHOD="clover_fp8_forward", EVAL_EVERY="-1")[1]
    assert "1 of nvfp4 on this card" in facts[0] and facts[-1].startswith("interpolated between nvfp4 and fp8")
    assert sum("BF16 with 1 row" in fact for fact in facts) == 1
    assert half == pytest.approx((plain["nvidia"] + plain["bf16"]) / 2, rel=0.01)
    assert mixed == pytest.approx((2 * plain["nvidia"] + plain["fp8"]) / 3, rel=0.01)


@pytest.mark.parametrize("method, forwards", [("bf16", 1), ("nvidia", 2)])
def test_validations_take_a_third_of_a_step_for_each_forward(method, forwards):
    base, (low, *_) = hours(GPU="rtx5090", QAT_METHOD=method, EVAL_EVERY="100")
    without = hours(GPU="rtx5090", QAT_METHOD=method, EVAL_EVERY="-1")[1][0]
    read = (base.steps // 100 + 1) * base.args.eval_tokens * forwards
    assert low / without == pytest.approx(1 + read / 3 / base.tokens)


@pytest.fixture
def timed(base_dir):
    """Steps that dev/measure.sh timed on an RTX 5090."""
    content = json.loads((ROOT / "lab/results/bench.json").read_text())["bench_train_d26_h100"]
    content["environment"]["gpu"] = "NVIDIA GeForce RTX 5090"
    records = {r["method"]: r for r in content["records"] if r.get("tokens_per_second")}
    content["records"].append(records["fp8"] | {"method": "clover_fp8_forward", "tokens_per_second": 90e3})
    (base_dir / "measurements").mkdir(parents=True)
    (base_dir / "measurements/steps.json").write_text(json.dumps(content))
    return records


def test_what_was_measured_on_this_gpu_counts_before_what_others_published(timed, base_dir):
    """A method that was not timed has its precision's speed."""
    same = {"GPU": "rtx5090", "DEPTH": "26", "WINDOW_PATTERN": "L", "EVAL_EVERY": "-1"}
    for method, of in {"fp8": timed["fp8"], "clover": timed["clover"], "nvidia": timed["clover"]}.items():
        flops = of["tokens_per_second"] * of["flops_per_token"]
        base, (low, high, facts) = hours(base_dir, QAT_METHOD=method, **same)
        assert low == pytest.approx(base.tokens * base.flops / flops / 3600) == high
        assert facts[0].startswith("estimated" if method == "nvidia" else "measured")
    base, (*_, facts) = hours(base_dir, QAT_METHOD="fp8", **same | {"DEPTH": "20"})
    now = timed["fp8"]["tokens_per_second"] * timed["fp8"]["flops_per_token"] / base.flops
    assert facts[:2] == [
        f"estimated by steps on this GPU: {float(f'{now:.3g}'):,.0f} tokens/s",
        "scaled from 83,049 at d26, windows L",
    ]
    assert any("EXTRAPOLATED" in fact for fact in hours(base_dir, QAT_METHOD="fp8", **same | {"DEPTH": "8"})[1][2])
    other = hours(base_dir, **same | {"GPU": "rtxpro6000"})[1][2]
    assert "docs/measured.md" in other[0]
    (base_dir / "measurements/steps.json").write_text('{"records": [1]}')
    assert hours(base_dir, QAT_METHOD="fp8", **same)[1][2][0].startswith("from 4 runs, 3 of fp8 ")


def test_one_line_and_one_number_say_which_method_to_take(timed, monkeypatch, base_dir, tmp_path):
    ratio = [{"depth": 20, "weights": 477e6, "b": [0.084, 0.036], "ratio": [1.05, 1.13]},
             {"depth": 32, "weights": 1745e6, "b": [0.084, 0.03], "ratio": [1.05, 1.19]}]  # fmt: skip
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    monkeypatch.setitem(program.CARDS, "R", ratio)
    for name, words in {"h100": "take fp8", "rtx3090": "take bf16", "rtx5090": "1.13 times"}.items():
        facts = said(planned(GPU=name))["method"][-1]
        assert words in facts and ("clover_fp8_forward" in facts) == (name == "rtx5090")
    assert "1.19 times" in said(planned(GPU="rtx5090", DEPTH="32"))["method"][-1]
    now = 90e3 / timed["fp8"]["tokens_per_second"]
    *_, last = said(planned(GPU="rtx5090", NANOCHAT_BASE_DIR=str(base_dir)))["method"]
    assert f"take fp8: clover_fp8_forward makes {now:.3f}" in last
    assert said(planned(QAT_METHOD="fp8"))["method"][0].startswith("fp8: the FP8 baseline")


def test_each_method_to_choose_from_has_a_row_with_its_gap_rows_memory_and_hours():
    """Those of the plan of this method. The one that the user has chosen has a row, too."""
    rows = [fact for fact in said(planned(GPU="rtx5090", QAT_METHOD="nvidia"))["method"][1:-1]]
    assert [row.split()[0] for row in rows] == ["fp8", "clover_fp8_forward", "clover", "nvidia"]
    assert "gap unknown" in rows[3] and "interpolated" in rows[1] and rows[0].count("%") == 1
    for row in rows:
        method, plan = row.split()[0], said(planned(GPU="rtx5090", QAT_METHOD=row.split()[0]))
        rows, peak = re.search(r"(\d+ rows?) of .* ([\d.]+) of [\d.]+ GiB", plan["memory"][0]).groups()
        long = re.search(r": (.* h)ours", plan["how long"][0])[1]
        assert f"{rows}, {peak} GiB" in row and long in row and f"with {method}:" in plan["how long"][0]
    few = said(planned(GPU="rtx5060", GPU_MEMORY="8", DEPTH="26", QAT_METHOD="clover"))["method"]
    assert "does not fit" in few[1] and "does not fit" not in few[3]
    assert "%" not in " ".join(said(planned())["method"]) and "keep" in said(planned())["method"][0]


@pytest.mark.parametrize(
    "variables, measured, words",  # words: those with which each line to type begins
    [
        ({"GPU": "rtx5090"}, False, ["DEPTH=20", "QAT_METHOD=fp8"]),
        ({"GPU": "rtx5090", "QAT_METHOD": "clover"}, False, ["DEPTH=20", "QAT_METHOD=clover"]),
        ({"GPU": "rtx5090", "QAT_METHOD": "fp8"}, False, ["DEPTH=20", "QAT_METHOD=fp8"]),
        ({"GPU": "rtx5090"}, True, ["QAT_METHOD=clover_fp8_forward"]),
        ({"GPU": "rtx5090", "QAT_METHOD": "nvidia"}, True, ["QAT_METHOD=nvidia"]),
        ({"GPU": "h100"}, False, ["QAT_METHOD=fp8"]),
        ({"GPU": "h100", "COMPARE": "1"}, False, ["QAT_METHOD=fp8"]),
        ({"GPU": "rtx3090"}, False, ["QAT_METHOD=bf16"]),
        ({"GPU": "rtx3090", "COMPARE": "1"}, False, ["COMPARE=1"]),  # which cannot compare bf16 with itself
        ({"GPU": "h100", "QAT_METHOD": "clover"}, False, ["QAT_METHOD=clover"]),
    ],
)
def test_the_command_trains_the_advised_row_once_it_is_decided(
    timed, monkeypatch, base_dir, tmp_path, variables, measured, words
):
    """Where the advice depends on a measurement, that comes first. Who names a method gets it."""
    monkeypatch.setitem(program.CARDS, "R", [{"weights": 1, "ratio": [1.05, 1.05]}])
    lines = said(planned(**variables, NANOCHAT_BASE_DIR=str(base_dir if measured else tmp_path)))
    *commands, _ = lines["type"]
    assert len(commands) == len(words) and all(line.startswith(word) for line, word in zip(commands, words))
    assert ("measure.sh" in commands[0]) == (len(words) > 1) and commands[-1].endswith(" bash speedrun_fp4.sh")
    assert (", by default: " in lines["run"][0]) == ("QAT_METHOD" not in variables)


def test_a_method_that_does_not_fit_is_not_typed():
    lines = said(planned(GPU="rtx5090", DEVICE_BATCH="64"))
    assert any("does not fit" in line for line in lines["method"])
    assert not any("QAT_METHOD=fp8 " in line for line in lines["type"])


def test_a_run_that_was_begun_or_is_begun_now_is_the_one_to_type(h100, monkeypatch):
    command, after = said(planned())["type"]
    assert command.startswith("QAT_METHOD=fp8 ") and after.startswith("its hours are in fp8's line; ")
    real = program.Plan("speedrun", {"NANOCHAT_BASE_DIR": os.environ["NANOCHAT_BASE_DIR"]})
    assert "QAT_METHOD=" not in said(real)["type"][0] and "hours" not in said(real)["type"][1]
    monkeypatch.setattr(program, "list_steps", lambda folder: [5] if folder.name == "d20_clover" else [])
    assert "QAT_METHOD=" not in said(planned())["type"][0]


def test_a_measurement_as_printed_writes_where_the_same_plan_looks(tmp_path):
    """In the user's environment of packages. Each measure.sh that was printed without them left its plan unmeasured."""
    variables = {"NANOCHAT_BASE_DIR": str(tmp_path / "a base"), "VENV": str(tmp_path / "venv"), "GPU": "rtx5090"}
    plan = planned(**variables, BASE_ARGS="--depth=26", QAT_METHOD="fp8", SEED="3")
    line, run, _ = said(plan)["type"]
    both = [
        {word for word in shlex.split(text) if "=" in word and word.split("=")[0] in variables} for text in (line, run)
    ]
    assert both[0] == both[1] == {f"{name}={variables[name]}" for name in ("NANOCHAT_BASE_DIR", "VENV")}
    unset = {k: v for k, v in os.environ.items() if k not in ("NANOCHAT_BASE_DIR", "OUT", "PARTS", "SEED")}
    environment = unset | {"PLAN_ONLY": "1", "PY": "python"}
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    steps = shlex.split(done.stdout.splitlines()[-1])
    assert Path(steps[steps.index("--json") + 1]) == plan.s.base_dir / "measurements/steps.json"
    assert steps[steps.index("--depth") + 1] == "26"


def test_a_row_of_the_users_own_is_said_as_it_was_registered(tmp_path):
    (tmp_path / "mine.py").write_text("""\
from dataclasses import replace
import nanochat_fp4 as nf
row = nf.Recipe("mine_1", grad_weight=nf.get_recipe("clover").grad_weight)
nf.register(row)
nf.register(replace(row, name="mine_2", summary="WORDS"))
""")
    facts = [said(planned(RECIPES=str(tmp_path / "mine.py"), QAT_METHOD=f"mine_{i}"))["method"][0] for i in (1, 2)]
    assert "grad_weight ms_eden" in facts[0] and facts[1] == "mine_2: WORDS"


@pytest.mark.parametrize(
    "bf16, needed, words",
    [
        (95e3, 1.05, "take bf16: clover_fp8_forward makes 0.947 times bf16's tokens/s here (d26), and needs 1.050"),
        (80e3, 1.08, "take clover_fp8_forward, which makes 1.084 times fp8's tokens/s here (d26), and needs 1.080"),
        (80e3, 1.09, "take fp8: clover_fp8_forward makes 1.084 times"),
    ],
)
def test_the_method_to_take_is_the_best_of_all_that_were_measured(timed, monkeypatch, base_dir, bf16, needed, words):
    monkeypatch.setitem(program.CARDS, "R", [{"weights": 1, "ratio": [needed, needed]}])
    content = json.loads((base_dir / "measurements/steps.json").read_text())
    next(r for r in content["records"] if r["method"] == "bf16")["tokens_per_second"] = bf16
    (base_dir / "measurements/steps.json").write_text(json.dumps(content))
    page = program.page(planned(GPU="rtx5090", NANOCHAT_BASE_DIR=str(base_dir)))
    assert words in re.sub(r"\s+", " ", page) and "measure.sh" not in page


def test_a_card_without_an_architecture_is_advised_to_measure():
    page = program.page(planned(GPU="rtx3080", GPU_MEMORY="10", DEPTH="12"))
    assert "no method is advised" in page and "take " not in page and page.count("dev/measure.sh") == 1


# ----------------------------------------------------------------------------------------------------------------------
# A CPU


def test_steps_chosen_by_time_are_the_run_that_was_printed(base_dir):
    """The probe's number is a default, so the run keeps the name that PLAN_ONLY printed. Later stages shrink, too."""
    usual = planned()
    base_dir.mkdir()
    (base_dir / "cpu_steps.json").write_text('{"d2_120": {"steps": 60, "seconds_per_step": 1.5}}')
    plan, mine = planned(), planned(NUM_ITERATIONS="60")
    assert plan.s.values["NUM_ITERATIONS"] == 60 and plan.bases[0].tag == usual.bases[0].tag == "d2_clover"
    assert mine.bases[0].tag == "d2_clover_steps60" and "1.5 s" in said(plan)["how long"][1]
    names = ("SPLIT_TOKENS", "MID_ARGS", "SFT_ARGS", "EVAL_ARGS")
    assert [plan.s.values[name] for name in names] == [mine.s.values[name] for name in names]
    assert plan.s.values["SPLIT_TOKENS"] == 32768 and "--max-problems=16 " in plan.s.values["EVAL_ARGS"]
    assert "--num-iterations=30" in plan.s.values["MID_ARGS"] and "--num-iterations=10 " in plan.s.values["SFT_ARGS"]
    few, many = planned(NUM_ITERATIONS="4").s, planned(NUM_ITERATIONS="400", SFT_ARGS="--num-iterations=9").s
    assert "--num-iterations=2" in few.words("MID_ARGS") and "--max-problems=8" in few.words("EVAL_ARGS")
    assert many.values["MID_ARGS"] == usual.s.values["MID_ARGS"] and many.values["SFT_ARGS"] == "--num-iterations=9"


def test_a_base_directory_that_cannot_be_made_is_refused(base_dir):
    base_dir.write_text("")
    for place in (base_dir, base_dir / "more"):
        with pytest.raises(UserError, match="NANOCHAT_BASE_DIR"):
            planned(NANOCHAT_BASE_DIR=str(place))


@pytest.mark.parametrize("tokens, rows", [("256", 8), ("512", 4), ("2048", 1)])
def test_longer_rows_on_a_cpu_are_fewer(tokens, rows):
    for name, command in commands(planned(SEQ_LEN=tokens)).items():
        assert not name.startswith(("base", "mid")) or f"--device-batch-size={rows}" in command, name


def test_a_time_has_no_more_digits_than_are_known():
    assert program.duration(0.0008, 0.00125) == "less than a minute" and program.duration(0, 0) == "0 minutes"


def test_the_minutes_on_a_cpu_count_what_is_asked():
    whole, other = ["the default"], {"two": {"COMPARE": "1"}, "few": {"NUM_ITERATIONS": "2"}, "large": {"DEPTH": "12"},
                                     "half": {"STAGES": "tok base report"}}  # fmt: skip
    assert len(said(planned(COMPARE="1"))["memory"]) == 1  # Both methods take the same.
    times = {name: said(planned(**v))["how long"][0].split(" for ")[0] for name, v in {whole[0]: {}, **other}.items()}
    assert times["the default"] == "5 minutes" and times["two"] == "10 minutes" and "hours" in times["large"]
    assert float(times["few"].split()[0]) < 2 and 2.5 < float(times["half"].split()[0]) < 4


SHAPE = {"DEPTH": "1", "ASPECT_RATIO": "128", "HEAD_DIM": "64", "SEQ_LEN": "32", "TOTAL_BATCH": "128",
         "VOCAB_SIZE": "300", "DEVICE_BATCH": "2", "PLAN_ONLY": ""}  # fmt: skip


@pytest.mark.parametrize("damaged", ["", "{"])
def test_the_probe_trains_and_its_choice_is_stored(base_dir, damaged, monkeypatch):
    if damaged:
        base_dir.mkdir()
        (base_dir / "cpu_steps.json").write_text(damaged)
    assert planned(**SHAPE | {"PLAN_ONLY": "1"}).chosen == {}
    chosen = planned(**SHAPE).chosen
    assert chosen["steps"] in (120, 60, 30) and chosen["seconds_per_step"] > 0
    monkeypatch.setattr(program, "try_micro_batch", None)  # No second probe.
    assert planned(**SHAPE, QAT_METHOD="bf16").chosen == planned(**SHAPE | {"PLAN_ONLY": "1"}).chosen == chosen


@pytest.mark.parametrize("seconds, steps", [(0.01, 120), (1.2, 60), (9, 30)])
def test_slower_steps_mean_fewer_of_them(monkeypatch, seconds, steps):
    clock = iter(range(100))
    monkeypatch.setattr(program, "try_micro_batch", lambda *a: None)
    monkeypatch.setattr(program.time, "monotonic", lambda: seconds * next(clock))
    assert planned(**SHAPE).chosen["steps"] == steps


def tokens_per_second(base: Path, tag: str, cpus: set[int]) -> float:
    """Of the speedrun's model on these CPUs: the median of its steps after the first two."""
    flags = (
        "--method=clover --depth=2 --aspect-ratio=64 --head-dim=64 --max-seq-len=256 --window-pattern=L "
        "--device-batch-size=8 --total-batch-size=2048 --num-iterations=10 --eval-every=-1 --eval-tokens=2048 "
        "--sample-every=-1 --core-metric-every=-1"
    ).split()
    unset = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "TRITON_"))}
    environment = unset | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "NANOCHAT_BASE_DIR": str(base)}
    subprocess.run(
        [sys.executable, "-m", "scripts.base_train", f"--model-tag={tag}", *flags], cwd=ROOT, env=environment,
        check=True, capture_output=True, timeout=600, preexec_fn=lambda: os.sched_setaffinity(0, cpus),
    )  # fmt: skip
    records = map(json.loads, (base / "base_checkpoints" / tag / "metrics.jsonl").read_text().splitlines())
    return statistics.median([r["tok_per_sec"] for r in records if r["event"] == "train"][2:])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_training_beside_two_busy_processes_has_two_fifths_of_its_speed(tiny_base):
    cpus = set(sorted(os.sched_getaffinity(0))[:2])
    alone = [tokens_per_second(tiny_base, "alone", cpus)]
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=lambda: os.sched_setaffinity(0, cpus))
        for _ in range(len(cpus))
    ]
    try:
        beside = tokens_per_second(tiny_base, "beside", cpus)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    alone.append(tokens_per_second(tiny_base, "again", cpus))  # whatever else this machine does may have changed
    assert beside >= 0.4 * min(alone)


# ----------------------------------------------------------------------------------------------------------------------
# Text, tokenizer, disk, and what is missing


def test_text_that_is_read_more_than_once_is_said():
    times = {n: said(planned(GPU="rtx5090", NUM_SHARDS=n))["text"][1] for n in ("370", "8")}
    assert "37 GB to download, 49 minutes" in said(planned(GPU="rtx5090"))["text"][0]
    assert "read once" in times["370"] and "41 times" in times["8"]
    shards = [planned(GPU="rtx5090", DEPTH=depth).s.values["NUM_SHARDS"] for depth in ("12", "20", "32")]
    assert shards == sorted(shards) and shards[1] == 370 and shards[0] < 150
    assert "text" not in said(planned(GPU="rtx5090", STAGES="report"))


def test_own_text_that_is_read_very_often_has_a_warning_with_fewer_steps(tmp_path):
    (tmp_path / "a.txt").write_text("Some text. " * 10_000)
    *_, often, warning = said(planned(DATA_DIR=str(tmp_path), NUM_ITERATIONS="400"))["text"]
    once, few = (re.search(r"NUM_ITERATIONS=(\d+)", line)[1] for line in (often, warning))
    assert "read once" in said(planned(DATA_DIR=str(tmp_path), NUM_ITERATIONS=once))["text"][-1]
    fewer = said(planned(DATA_DIR=str(tmp_path), NUM_ITERATIONS=few))["text"]
    (tmp_path / "a.txt").write_text("Some text.\n\n" * 100)
    (tmp_path / "b.txt").write_text("Some text.\n\n" * 100)
    assert "NUM_ITERATIONS=" not in said(planned(DATA_DIR=str(tmp_path)))["text"][-1]
    assert "30 times" in often and re.search(r"read (3\.\d|4) times", fewer[-1]) and "WARNING" in warning


def test_a_plan_looks_into_the_users_folder(base_dir, tmp_path):
    (folder := tmp_path / "text").mkdir()
    (folder / "scan.pdf").write_text("a,b\n")
    with pytest.raises(UserError, match="no text"):
        planned(DATA_DIR=str(folder))
    for content, word in (("", "no text"), ("Some.", "too little text")):
        (folder / "a.txt").write_text(content)
        with pytest.raises(UserError, match=word):
            planned(DATA_DIR=str(folder))
    (folder / "a.txt").write_text("Some text." * 400)
    plan = planned(DATA_DIR=str(folder))
    facts = said(plan)["text"]
    assert "1 file(s) to train on (a.txt; 3.9 KB); 1 not read" in facts[0] and "scan.pdf; 4 bytes" in facts[0]
    assert "; validation: 5 bytes" in facts[0] and "WARNING" in facts[0]
    assert "1 thousand tokens" in facts[1] and "246 times" in facts[1] and plan.text == "folder"
    assert not (base_dir / "stored_text").exists()
    (folder / "scan.pdf").write_text("a,b\n" * 2000)
    with pytest.raises(UserError, match="not read for the most part"):
        planned(DATA_DIR=str(folder))


def test_a_text_without_its_column_is_refused_before_anything_is_stored(base_dir, tmp_path, monkeypatch, capsys):
    """Also in a second file, and in a shard. A real run stores the text, and has named it once."""
    (folder := tmp_path / "text").mkdir()
    for name in "ab":
        (folder / f"{name}.csv").write_text("story,text\n" + "A short story.,of a river\n" * 40)
    (file := folder / "c.csv").write_text("story,n\nA short story.,7\n")
    with pytest.raises(UserError, match="c.csv, line 2.*TEXT_COLUMN=story"):
        planned(DATA_DIR=str(folder))
    monkeypatch.setenv("TEXT_COLUMN", "story")
    assert len(said(planned(DATA_DIR=str(folder)))["text"]) == 3 and not (base_dir / "stored_text").exists()
    written = program.Plan("speedrun", {"DATA_DIR": str(folder), "NANOCHAT_BASE_DIR": str(base_dir), "STAGES": "tok"})
    assert (base_dir / "stored_text").exists() and "a.csv" not in " ".join(said(written)["text"])
    ensure_data(str(folder))  # as the stage of the text does
    assert re.findall(r"validation: .*from (.*)", capsys.readouterr().out) == ["2 file(s) (a.csv, b.csv)"]
    file.unlink()
    for name in "ab":
        pq.write_table(pa.table({"story": ["A river."]}), folder / f"{name}.parquet")
        (folder / f"{name}.csv").unlink()
    monkeypatch.setenv("TEXT_COLUMN", "text")
    with pytest.raises(UserError, match="parquet.*TEXT_COLUMN"):
        planned(DATA_DIR=str(folder))


@pytest.mark.parametrize("asked", [4096, 32768])  # the speedrun's on a CPU, and the default of scripts.tok_train
def test_a_small_text_is_trained_on_again(asked, base_dir, tmp_path, monkeypatch):
    """It yields fewer tokens than were asked for. The same command goes on; another size is refused."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("Some text, which is small. " * 20)
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    tok_train.main([f"--vocab-size={asked}"])
    get_report().path("Tokenizer training").unlink()
    plan = planned(DATA_DIR=str(tmp_path), VOCAB_SIZE=str(asked))
    tokens = plan.tokenizer.get_vocab_size()
    assert 0 < tokens < asked and "tok" not in commands(plan) and "is kept" in " ".join(said(plan)["text"])
    # The model is as large as base_train will make it.
    assert plan.bases[0].parameters == planned(VOCAB_SIZE=str(tokens), DATA_DIR=str(tmp_path)).bases[0].parameters
    with pytest.raises(UserError, match=f"set VOCAB_SIZE={tokens}"):
        planned(DATA_DIR=str(tmp_path), VOCAB_SIZE=str(asked + 1))
    file = Path(os.environ["NANOCHAT_BASE_DIR"]) / "tokenizer/tokenizer.json"
    file.write_text(file.read_text()[:-200])
    with pytest.raises(UserError, match="is not a tokenizer"):
        planned(DATA_DIR=str(tmp_path), VOCAB_SIZE=str(asked))


def test_a_disk_that_is_too_small(h100, monkeypatch):
    usage = program.shutil.disk_usage(ROOT)
    monkeypatch.setattr(program.shutil, "disk_usage", lambda path: usage._replace(free=10e9))
    with pytest.raises(UserError, match="has 10.0 GB free"):
        planned()
    assert planned(STAGES="tok").checkpoint_bytes == 0


def test_without_a_hub_the_run_takes_what_is_embedded(h100):
    plan = planned(DEPTH="4")
    run = commands(plan)
    assert "--data=local" in run["mid:d4_clover"] and "--data=local" in run["sft:d4_clover"]
    # The embedded mixture has some 440,000 tokens: many steps of this batch, less than one of the usual batch.
    assert f"--total-batch-size={4 * 2048 * 2}" in run["mid:d4_clover"] and "--embedded" in run["text"]
    assert "--task-name=local" in run["eval_sft:d4_clover"] and "core:d4_clover" not in run and "report" in run
    assert "--no-compare" in run["tok_eval"] and len(plan.left_out) == 4 == len(said(plan)["without"])
    (of_mid,) = (line for line in plan.left_out if line.startswith("mid "))  # names its own flag, not the last stage's
    assert "MID_ARGS=--sft-dir" in of_mid and "SFT_ARGS" not in of_mid
    allowed = planned(DEPTH="4", MID_ARGS="--allow-missing")
    assert "--data=local" not in commands(allowed)["mid:d4_clover"] and len(allowed.left_out) == 3
    with pytest.raises(UserError, match="mid needs .*; or leave it out"):
        planned(DEPTH="4", STAGES="tok base mid")
    for words in ("", "--data=local "):  # A folder that was named is not replaced by what is embedded.
        with pytest.raises(UserError, match="sft needs .*: --sft-dir x is not a folder"):
            planned(DEPTH="4", SFT_ARGS=f"{words}--sft-dir=x")


@pytest.mark.parametrize("lacks", ["ARC-Easy", "a sandbox"])
def test_a_part_that_is_missing_leaves_the_stage(h100, monkeypatch, lacks):
    monkeypatch.setattr(sources.Source, "problem", lambda need: "gone" if need.name == lacks else None)
    run = commands(planned(DEPTH="4"))
    words = run["eval_sft:d4_clover"]
    assert "core:d4_clover" in run and "--allow-missing" in words
    assert not any(word.startswith("--task-name=") for word in words)


@pytest.mark.parametrize("kind", ["core", "mid", "sft", "eval"])
def test_the_needs_of_a_stage_are_what_it_loads(kind, base_dir, monkeypatch):
    """A plan asks the network for what each source names, so that must be what the source downloads."""
    from nanochat_fp4.data import chat_data
    from nanochat_fp4.evaluation import core_eval

    class Asked(Exception):
        pass

    def ask(what, *rest, **how):
        raise Asked(what)

    for place in (chat_data, importlib.import_module("eval.common")):
        monkeypatch.setattr(place, "load_rows", ask)
    for place in (chat_data, core_eval):
        monkeypatch.setattr(place, "download_file_with_lock", ask)
    module = program.LATER[kind]
    remote = [s for s in module.needs(module.parse_args(["-i", "sft"] if kind == "eval" else [])) if s.remote]
    assert len(remote) >= (1 if kind == "core" else 6)
    for source in remote:
        with pytest.raises(Asked, match=re.escape(source.remote)):
            source.make()


def test_files_that_are_here_are_read_before_the_first_step(base_dir, tmp_path):
    """A file that is there and damaged would end its stage after the base training."""
    bench, talk, bundle = tmp_path / "bench", tmp_path / "talk", make_bundle(tmp_path / "bundle")
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for path, text in (
        (bench / "openai/gsm8k/main/train.jsonl", '{"question": "1 + 1?", "answer": 2}'),
        (bench / "words/words_alpha.txt", "\n"),
        (talk / "train.jsonl", json.dumps({"messages": conversation})),
        (talk / "test.jsonl", json.dumps({"messages": conversation[:1]})),
        (base_dir / "identity_conversations.jsonl", "[1]"),
        (bundle / "eval_data/schema.jsonl", '{"gold": 1}'),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    flags = {"sft": [f"--sft-dir={talk}", f"--eval-dir={bench}"], "core": [f"--bundle-dir={bundle}"]}
    found = {
        m.name: m.missing
        for kind, words in flags.items()
        for m in sources.look_for(program.LATER[kind].needs(program.LATER[kind].parse_args(words)))
    }
    for what, why in {
        "GSM8K": "line 1: the field 'answer' is int",
        "SpellingBee": "words_alpha.txt is empty",
        f"conversations of {talk}": "test.jsonl, line 1",
        "identity conversations": "identity_conversations.jsonl, line 1",
        "the eval bundle": "schema.jsonl, line 1: 'context_options' is missing",
        "ARC-Easy": "train.jsonl",
    }.items():
        assert why in found[what]


@pytest.fixture
def talk(tmp_path):
    """A folder of 300 conversations for training, and one for validation."""
    row = json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]) + "\n"
    (tmp_path / "talk").mkdir()
    for split, count in (("train", 300), ("test", 1)):
        (tmp_path / f"talk/{split}.jsonl").write_text(row * count)
    return tmp_path / "talk"


@pytest.mark.parametrize("split, line", [("train", 301), ("test", 2)])
@pytest.mark.parametrize("kind, words", [("SFT", "--data=local"), ("MID", "--data=local"), ("SFT", "--allow-missing")])
def test_a_bad_conversation_of_the_users_own_is_refused_by_the_plan(talk, split, line, kind, words):
    with (talk / f"{split}.jsonl").open("a") as file:
        file.write('[{"role": "user", "content": "a"}]\n')
    with pytest.raises(UserError, match=f"{split}.jsonl, line {line}: .*no message from the assistant"):
        planned(**{f"{kind}_ARGS": f"{words} --sft-dir={talk}"})


@pytest.mark.parametrize("kind", ["mid", "sft", "eval"])
@pytest.mark.parametrize("words", ["", " --allow-missing"])
def test_a_damaged_benchmark_is_refused_and_not_left_out(tmp_path, kind, words):
    """Its stage would end there. What is missing is left out."""
    (folder := tmp_path / "openai/gsm8k/main").mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text('{"question": "1 + 1?", "answer": 2}\n')
    arguments = f"--eval-dir={tmp_path}{words}"
    with pytest.raises(UserError, match=f"{kind} needs GSM8K: .*jsonl, line 1: the field 'answer' is int"):
        planned(**{f"{kind.upper()}_ARGS": arguments})
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").unlink()
    assert words or planned(**{f"{kind.upper()}_ARGS": arguments}).left_out


@pytest.mark.parametrize(
    "words, says",
    [
        ("--data=local", " of 2,136, 66 steps"),
        ("--data=local --num-iterations=7", " of 2,136, 7 steps"),
        ("--target-examples-per-step=8", " of 300, 37 steps"),  # Nothing else can be had.
    ],
)
def test_the_steps_of_sft_are_those_of_the_users_conversations(talk, words, says):
    """Also in the minutes, to which an earlier version gave 20 steps."""
    usual, own = planned(), planned(SFT_ARGS=f"{words} --sft-dir={talk}")
    assert said(own)["text"][-1] == f"SFT: 300 conversations in {talk}{says}" and "SFT:" not in str(said(usual))
    minutes = [float(said(plan)["how long"][0].split()[0]) for plan in (usual, own)]
    more = (int(says.split()[-2]) - 20) / (2 * 120 + program.OTHER_STEPS)
    assert minutes[1] / minutes[0] == pytest.approx(1 + more, abs=0.02)
    if "local" not in words:
        with pytest.raises(UserError, match="SFT_ARGS.* 300 conversations, .*=512 .* make no step"):
            planned(SFT_ARGS=f"--target-examples-per-step=512 --device-batch-size=4 --sft-dir={talk}")


def test_conversations_that_are_still_to_be_downloaded_are_not_counted(talk, monkeypatch):
    monkeypatch.setattr(sources, "url_problem", lambda url: None)
    facts = said(planned(SFT_ARGS=f"--sft-dir={talk}"))
    assert facts["text"][-1] == f"SFT: 300 conversations in {talk}"
    assert "conversations are counted after their download" in facts["how long"][1]


# ----------------------------------------------------------------------------------------------------------------------
# The page and the calls

ORDER = ("machine", "note", "run", "at work", "unfinished", "stages", "folder", "disk", "text", "without", "how long",
         "memory", "set by you", "numbers", "method", "type")  # fmt: skip


@pytest.mark.parametrize(
    "variables, most",
    [({}, 25), ({"GPU": "rtx5090"}, 25), ({"GPU": "h100", "DEPTH": "26"}, 25), ({"GPU": "b200", "NPROC": "8"}, 25),
     ({"GPU": "h200", "DEPTH": "26"}, 25), ({"GPU": "rtx5090", "DEPTH": "32", "COMPARE": "1"}, 46),
     ({"GPU": "rtx5060", "QAT_METHOD": "fp8"}, 28)],
)  # fmt: skip
def test_the_page_is_short_and_ends_in_the_command(variables, most):
    plan = planned(**variables)
    lines, facts = program.page(plan).splitlines(), said(plan)
    own = os.environ["NANOCHAT_BASE_DIR"]  # A path stays whole.
    assert len(lines) <= most and max(len(line) for line in lines if own not in line) <= 100
    assert list(facts) == [label for label in ORDER if label in facts] and len(facts) >= 10
    assert "bash speedrun_fp4.sh" in facts["type"][-2] and "GPU=" not in facts["type"][-2]
    typed = [f"{name}={value}" for name, value in variables.items() if name != "GPU"]
    assert set(typed) <= set(shlex.split(facts["type"][-2], comments=True))


def test_the_plan_of_an_interrupted_run_says_that_it_goes_on(h100, monkeypatch):
    whole = said(planned())
    monkeypatch.setattr(program, "list_steps", lambda folder: [10_700, 5] if folder.name == "d20_clover" else [])
    half = said(planned())
    assert "step 10,700 of 21,400 is done" in half["run"][0] and "done" not in whole["run"][0]
    (low, high), (all_low, all_high) = (
        map(float, re.match(r"base training with clover: ([\d.]+) to ([\d.]+) hours", facts["how long"][0]).groups())
        for facts in (half, whole)
    )
    assert (2 * low, 2 * high) == pytest.approx((all_low, all_high), abs=2) and "left" in half["how long"][0]
    monkeypatch.setattr(program, "list_steps", lambda folder: [21_400])
    end = said(planned())
    assert "step 21,400 of 21,400" in end["run"][0] and "base training" not in " ".join(end["how long"])


def test_text_and_folder_of_another_machine_are_not_counted_and_it_is_said(tmp_path):
    (tmp_path / "a.txt").write_text("Some text." * 400)
    assert "not found here" in said(planned(GPU="rtx5090", DATA_DIR="/nowhere"))["text"][0]
    assert "1 thousand tokens" in said(planned(GPU="rtx5090", DATA_DIR=str(tmp_path)))["text"][1]
    folders = [said(planned(**gpu))["folder"][0] for gpu in ({"GPU": "rtx5090"}, {})]
    assert ["not counted" in folder for folder in folders] == [True, False]


def test_numbers_are_printed_if_they_are_asked_for():
    plan = planned(DEPTH="3")
    assert "DEPTH" not in said(plan)["numbers"][0] and said(plan)["set by you"] == ["DEPTH=3 (default: 2)"]
    assert "set by you" not in said(planned(QAT_METHOD="fp8"))
    (numbers,) = said(plan, numbers=True)["numbers"]
    assert all(f"{name}=" in numbers for name in NUMBERS)


@pytest.fixture
def finished(base_dir, monkeypatch):
    """A plan of two methods whose models are all there, without sections."""
    models = set()
    monkeypatch.setattr(program, "list_steps", lambda folder: [1] if folder in models else [])
    plan = planned(COMPARE="1")
    models |= {base_dir / FOLDERS[kind] / base.tag for kind in ("base", "mid", "sft") for base in plan.bases}
    for folder in models:
        folder.mkdir(parents=True)
    return planned(COMPARE="1"), models


def skipped(plan) -> set[str]:
    """The sections for which a stage is skipped where they are there."""
    calls = [shlex.split(line) for line in program.calls(plan.stages).splitlines()]
    return {call[3] for call in calls if call[3]}


def log(monkeypatch, name: str, arguments: list[str]) -> None:
    """Somebody has made a section of the run d2_clover with these flags."""
    monkeypatch.setattr(sys, "argv", ["a script", *arguments])
    get_report("d2_clover").log(name, [{"tokens": 64}])


def test_what_is_done_takes_no_time(finished, base_dir, monkeypatch):
    """A stage is done if its section is there. Those of a model that is not whole are made again."""
    models, minutes = finished[1], []
    for step, kinds in ((0, ""), (0, "mid"), (120, ""), (120, "mid sft eval"), (120, "base loss mid sft eval")):
        monkeypatch.setattr(program, "list_steps", lambda folder, step=step: [step] if folder in models else [])
        for stage in planned().stages:
            if stage.section and stage.name.partition(":")[0].partition("_")[0] in kinds.split():
                (base_dir / stage.section).parent.mkdir(parents=True, exist_ok=True)
                (base_dir / stage.section).write_text(json.dumps({"arguments": stage.command[1:]}))
        minutes.append(float(said(planned())["how long"][0].replace("less than a", "0.5").split(" minute")[0]))
    untouched, still_untouched, trained, measured, nothing = minutes
    assert untouched == still_untouched > trained > measured > nothing == 0, minutes


def test_a_measurement_with_other_flags_is_not_the_plans(finished, base_dir, monkeypatch):
    """Somebody has measured the loss on fewer tokens by hand. Sections of earlier versions do not name their flags."""
    plan, _ = finished
    stages = {stage.section: stage for stage in plan.stages if stage.section}
    assert skipped(plan) == set(stages)
    section = "report/d2_clover/base-model-loss.json"
    for arguments, is_the_plans in ((stages[section].command[1:], True), (["--split-tokens=64"], False)):
        log(monkeypatch, "Base model loss", arguments)
        assert skipped(planned(COMPARE="1")) == set(stages) - (set() if is_the_plans else {section})
    record = json.loads((base_dir / section).read_text())
    del record["arguments"]
    (base_dir / section).write_text(json.dumps(record))
    assert skipped(planned(COMPARE="1")) == set(stages)


@pytest.mark.parametrize("kind, title", [("base", "Base model training"), ("mid", "Midtraining"), ("sft", "Chat SFT")])
def test_a_model_of_other_flags_is_kept_and_said_so(finished, base_dir, monkeypatch, kind, title):
    """The plan says which flags the model has, and what to delete for one of its own. A deleted model is made again."""
    plan, models = finished
    stage = next(stage for stage in plan.stages if stage.name == f"{kind}:d2_clover")
    log(monkeypatch, title, stage.command[1:][::-1])
    assert "kept" not in said(planned(COMPARE="1"))
    log(monkeypatch, title, [*stage.command[1:], "--save-every=9"])  # It may change in a resume.
    assert "kept" not in said(planned(COMPARE="1"))
    log(monkeypatch, title, [*stage.command[1:], "--one=2"])
    kept, anew = said(again := planned(COMPARE="1"))["kept"]
    long = [line for line in program.page(again).splitlines() if len(line) > 100 and str(base_dir) not in line]
    assert "not trained again" in kept and not long
    assert "made with --one=2, where the plan has fewer flags;" in kept and stage.section in skipped(again)
    later = ["base", "mid", "sft"][["base", "mid", "sft"].index(kind) :]
    folders = [str(base_dir / FOLDERS[k] / "d2_clover") for k in later]
    assert shlex.split(anew, comments=True) == ["rm", "-r", *folders]
    models.discard(base_dir / FOLDERS[kind] / "d2_clover")
    assert stage.section not in skipped(planned(COMPARE="1"))


TOY = {
    "DEPTH": "1", "ASPECT_RATIO": "64", "HEAD_DIM": "32", "SEQ_LEN": "32", "VOCAB_SIZE": "300", "NUM_ITERATIONS": "2",
    "TOTAL_BATCH": "256", "EVAL_TOKENS": "64", "SAVE_EVERY": "1", "SPLIT_TOKENS": "64", "QAT_METHOD": "bf16",
}  # fmt: skip


@pytest.fixture
def trained(base_dir, tmp_path, monkeypatch, capsys):
    """(the variables of a run whose base training is done, its file of text, its folder, its log)."""
    (folder := tmp_path / "text").mkdir()
    (file := folder / "a.jsonl").write_text('{"text": "Some text of a river.", "body": "Another one."}\n' * 40)
    monkeypatch.setenv("DATA_DIR", str(folder))
    tok_train.main(["--vocab-size=300"])
    plan = planned(**TOY, DATA_DIR=str(folder))
    ((name, command),) = ((name, command) for name, command in commands(plan).items() if name.startswith("base:"))
    base_train.main(command[1:])
    model = base_dir / FOLDERS["base"] / name.removeprefix("base:")
    return TOY | {"DATA_DIR": str(folder)}, file, model, capsys.readouterr().out


@pytest.mark.parametrize("change", ["a line more", "another column", "another file"])
def test_a_text_that_changed_after_the_training_is_said(trained, monkeypatch, tmp_path, change):
    """A finished run is kept, which the last lines of the command repeat, and an interrupted one cannot go on: both
    name what to do for the text of now."""
    variables, file, folder, _ = trained
    os.utime(file, (1, 1))
    logged = next(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))
    assert logged["text"] == base_train.text_digest(file.parent)  # by which a report compares runs
    before = planned(**variables)
    assert "done" in said(before)["run"][0] and "has changed" not in program.page(before)
    if change == "another column":
        monkeypatch.setenv("TEXT_COLUMN", "body")
        variables = variables | {"TEXT_COLUMN": "body"}
    elif change == "another file":
        file.with_name("b.txt").write_text("And one more.")
    else:
        file.write_text(file.read_text() + '{"text": "And one more."}\n')
    (line,) = (line for line in said(planned(**variables))["without"] if "has changed" in line)
    assert "_new " in line and line.endswith("bash speedrun_fp4.sh") and "step 2" in line
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    program.main(["speedrun", "--calls", str(tmp_path / "calls.sh")])
    assert line in (tmp_path / "left_out.txt").read_text().splitlines()  # which dev/pipeline.sh prints at its end
    shutil.rmtree(folder / "step_000002")
    with pytest.raises(UserError, match="step 1 .*NANOCHAT_BASE_DIR"):
        planned(**variables)


def test_no_more_shards_are_here_than_are_asked_for(base_dir):
    """As with the text of nanochat, which is linked and has more of them."""
    (folder := base_dir / "base_data").mkdir(parents=True)
    for number in (0, 1, 2, 1822):
        write_shard(folder / f"shard_{number:05d}.parquet", ["One text.", "Another one."])
    assert planned().about_text[0] == "FineWeb-Edu, 2 shards, 2 of them here"


def test_fineweb_edu_grows_and_is_not_the_embedded_corpus(base_dir):
    """Other runs download more of it. A run on the corpus goes on as one of another text when shards are there."""
    (folder := base_dir / "base_data").mkdir(parents=True)
    for number in (0, 1822):
        write_shard(folder / f"shard_{number:05d}.parquet", ["One text.", "Another one."])
    digest = base_train.text_digest(folder)
    tok_train.main(["--vocab-size=300"])
    save_base(base_dir)
    edit_meta(model := base_dir / FOLDERS["base"] / "d2_clover", 5, text=digest)
    write_shard(folder / "shard_00001.parquet", ["And a third one."])
    assert base_train.look_back(model, None, str(folder)) is None
    assert "has changed" in base_train.look_back(model, None, build_embedded_corpus(0.2))
    write_shard(folder / "shard_01822.parquet", ["Other text to validate on."])
    assert "has changed" in base_train.look_back(model, None, str(folder))


def test_another_tokenizer_or_recipe_than_a_models_is_refused(trained):
    """Also if every stage is done."""
    variables, _, folder, _ = trained
    edit_meta(folder, 2, recipes=[to_record(get_recipe("nvidia")) | {"name": "bf16"}])
    with pytest.raises(UserError, match="recipe"):
        planned(**variables)
    edit_meta(folder, 2, recipes=[])
    tok_train.main(["--vocab-size=300", "--text-column=body", "--overwrite"])
    with pytest.raises(UserError, match="tokenizer"):
        planned(**variables)


def test_own_text_has_as_many_tokens_in_the_plan_as_in_the_log(trained):
    """Once there is a tokenizer, which counts them. Before, the plan says that it guesses."""
    variables, file, folder, log = trained
    (logged,) = re.findall(r"^the text has about .*", log, re.MULTILINE)
    real = program.Plan("speedrun", {"NANOCHAT_BASE_DIR": os.environ["NANOCHAT_BASE_DIR"], **variables})
    assert logged == said(real)["text"][1]
    for method in ("bf16", "clover"):  # A plan stores no text, and a run has counted it.
        assert logged == said(planned(**variables | {"QAT_METHOD": method}))["text"][1]
    assert "at most" not in said(real)["run"][0]
    shutil.rmtree(folder)
    held = program.amount(sum(len(json.loads(line)["text"]) for line in file.read_text().splitlines()) // 4)
    assert f"{held} tokens (a guess, 4 bytes each), and" in said(planned(**variables))["text"][1]
    shutil.rmtree(Path(os.environ["NANOCHAT_BASE_DIR"], "tokenizer"))
    assert "at most 90.1 thousand par" in said(planned(**variables))["run"][0]


@pytest.mark.parametrize(
    "now, named",
    [
        ({"QAT_METHOD": "clover"}, True),
        ({"SEED": "7"}, True),
        ({"DATA_DIR": ""}, True),
        ({"BASE_ARGS": "--warmup-ratio=0.1"}, True),
        ({"COMPARE": "1", "QAT_METHOD": "clover"}, False),
        ({"STAGES": "report"}, False),
        ({"NUM_ITERATIONS": "2"}, False),
    ],
)
def test_an_unfinished_run_that_a_command_does_not_go_on_with_is_in_its_plan(
    trained, now, named, monkeypatch, base_dir, tmp_path
):
    """With the command that trained it last, or without one if no script began it."""
    variables, _, folder, _ = trained
    assert "unfinished" not in said(planned(**variables, SEED="3"))  # It is done.
    kept = (folder / "step_000002").rename(tmp_path / "kept")
    facts = said(planned(**variables | now))
    assert named == ("unfinished" in facts)
    if named:
        head, tail = f"{folder.name}, step 1 of 2: ", " goes on with it"
        assert facts["unfinished"] == [f"{head}the command that began it{tail}"]
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        (base_dir / "report").mkdir(exist_ok=True)
        program.main(["speedrun", "--calls", str(base_dir / "report/calls.sh")])
        (line,) = said(planned(**variables | now))["unfinished"]
        *words, bash, script = shlex.split(line.removeprefix(head).removesuffix(tail))
        assert (bash, script) == ("bash", "speedrun_fp4.sh")
        assert planned(**dict(word.split("=", 1) for word in words)).bases[0].done == 1
        kept.rename(folder / "step_000002")
        (line,) = said(planned(**variables | now))["unfinished"]
        assert line.startswith(f"{folder.name}, base training done: ")  # Later stages may be missing.
        calls = (base_dir / "report/calls.sh").read_text().splitlines()
        subprocess.run(["bash", "-c", f"STATUS=1; {calls[-1]}; STATUS=0; {calls[-1]}"], check=True)
        assert "unfinished" not in said(planned(**variables | now))
        shutil.rmtree(folder / "step_000002")
        with held_run(folder):  # It is at work.
            busy = said(planned(**variables | now))
            assert "unfinished" not in busy and folder.name in busy["at work"][0]
            assert busy["type"][-2].startswith("after the end of what is at work: ")


def test_a_tokenizer_of_another_text_is_said(trained, tmp_path):
    variables, file, _, _ = trained
    (other := tmp_path / "other").mkdir()
    (other / "a.txt").write_text("Some other text.\n\n" * 999)
    texts = [" ".join(said(planned(**variables | {"DATA_DIR": str(at)}))["text"]) for at in (other, file.parent)]
    assert [f"trained on {file.parent}" in text for text in texts] == [True, False]


def test_later_stages_save_as_often_as_the_base_training():
    run = commands(planned(GPU="rtx5090", SAVE_EVERY="77"))
    assert all("--save-every=77" in run[f"{kind}:d20_clover"] for kind in ("base", "mid", "sft"))


def test_calls_are_quoted_for_the_shell():
    plan = planned(BASE_ARGS="--run='a $(b)'", STAGES="tok base report")
    *_, base, report = program.calls(plan.stages).splitlines()
    assert base.startswith("stage base:d2_clover") and "'--run=a $(b)'" in base and report.startswith("stage report")


def test_the_program_writes_its_calls_and_what_is_left_out(base_dir, monkeypatch, capsys, tmp_path, h100):
    monkeypatch.setenv("DEPTH", "4")
    program.main(["run1000", "--calls", str(tmp_path / "calls.sh")])
    assert "d4_clover" in capsys.readouterr().out and "stage report" in (tmp_path / "calls.sh").read_text()
    assert len((tmp_path / "left_out.txt").read_text().splitlines()) == 4
