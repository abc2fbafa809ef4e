"""The plan of a run, as JSON: what a user's variables, a machine and a base directory make of it."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from _samples import make_bundle

from lab import scaling
from nanochat_fp4.cli import UserError
from nanochat_fp4.data.needs import Missing, look_for
from nanochat_fp4.evaluation.report import get_report
from nanochat_fp4.hardware import get_peak_flops
from nanochat_fp4.models.gpt import GPT
from nanochat_fp4.nvfp4.methods import ON_A_BLACKWELL, WHICH
from nanochat_fp4.plan import __main__ as program
from nanochat_fp4.plan import cards, shell, words
from nanochat_fp4.plan.base import FLAGS
from nanochat_fp4.plan.machine import Facts, Machine, made, this_machine, tokenizer_sizes
from nanochat_fp4.plan.plan import disk_problem, make_plan, settle
from nanochat_fp4.plan.settings import CPU, GPU, read
from nanochat_fp4.plan.stages import needs
from nanochat_fp4.plan.variables import NUMBERS, problem
from scripts import base_train, tok_train

ROOT = Path(__file__).parents[2]
EVERYTHING = Facts(text="hub", disk_free=1e15)
NO_HUB = {
    kind: [
        Missing(need.what, "a remedy", "no network", need.vital)
        for need in needs(read("speedrun", {}, True), kind)
        if need.what != "a sandbox"
    ]
    for kind in ("core", "mid", "sft", "eval")
}


def planned(run="speedrun", gpu="", facts=EVERYTHING, gpus=1, steps=None, **variables):
    machine = Machine((cards.find_card(gpu),) * gpus if gpu else (), 4)
    settings = read(run, variables, bool(gpu))
    bases = settle(settings, machine, lambda base: steps)
    return make_plan(settings, machine, bases, facts)


def as_json(**how):
    return json.loads(json.dumps(shell.as_json(planned(**how))))


def commands(plan):
    return {stage["name"]: stage["command"] for stage in plan["stages"]}


def test_every_number_is_a_variable_and_reaches_base_train():
    assert set(NUMBERS) == set(GPU) == set(CPU) and set(FLAGS) < set(NUMBERS)
    plan = as_json(gpu="rtx5090", DEPTH="12", MATRIX_LR="0.01", EVAL_EVERY="7", BASE_ARGS="--warmup-ratio=0.1")
    command = commands(plan)["base d12_clover_matrix-lr0.01_warmup-ratio-0.1"]
    assert command[0] == "scripts.base_train" and command[-1] == "--warmup-ratio=0.1"
    assert {"--depth=12", "--matrix-lr=0.01", "--eval-every=7", "--device-batch-size=auto"} < set(command)


@pytest.fixture
def finished(base_dir):
    """A plan of two methods whose models are all there, without sections."""
    plan = planned(NANOCHAT_BASE_DIR=str(base_dir), COMPARE="1")
    for stage in (stage for stage in plan.stages if stage.output):
        (base_dir / stage.output).mkdir(parents=True)
        (base_dir / stage.output / "meta_000001.json").touch()
    return plan


def skipped(plan) -> set[str]:
    """The sections for which a stage is skipped where they are there."""
    return {stage.section for stage in plan.stages if stage.section and f" {stage.section} " in shell.calls(plan)}


def log(monkeypatch, name: str, arguments: list[str]) -> None:
    """Somebody has made a section of the run d2_clover with these flags."""
    monkeypatch.setattr(sys, "argv", ["a script", *arguments])
    get_report("d2_clover").log(name, [{"tokens": 64}])


def test_a_measurement_with_other_flags_is_not_the_plans(finished, base_dir, monkeypatch):
    """Somebody has measured the loss on fewer tokens by hand. Sections of earlier versions do not name their flags."""
    stages = {stage.section: stage for stage in finished.stages if stage.section}
    assert skipped(finished) == set(stages)
    section = "report/d2_clover/base-model-loss.json"
    for arguments, is_the_plans in ((stages[section].command[1:], True), (["--split-tokens=64"], False)):
        log(monkeypatch, "Base model loss", arguments)
        assert skipped(finished) == set(stages) - (set() if is_the_plans else {section})
    record = json.loads((base_dir / section).read_text())
    del record["arguments"]
    (base_dir / section).write_text(json.dumps(record))
    assert skipped(finished) == set(stages)


@pytest.mark.parametrize("name, title", [("base", "Base model training"), ("mid", "Midtraining"), ("sft", "Chat SFT")])
def test_a_model_of_other_flags_is_kept_and_said_so(finished, base_dir, monkeypatch, name, title):
    """Finished work is not lost: the plan says which flags the model has, and what to delete for one of its own."""
    stage = next(stage for stage in finished.stages if stage.name == f"{name} d2_clover")
    log(monkeypatch, title, stage.command[1:][::-1])
    assert "made with" not in shell.calls(finished)
    log(monkeypatch, title, [*stage.command[1:-1], "--one=2"])
    (line,) = (line for line in shell.calls(finished).splitlines() if "made with" in line)
    kept = shlex.split(line)[5]
    assert f"made with --one=2, where the plan has {stage.command[-1]};" in kept and stage.section in line
    folders = ["base_checkpoints", "mid_checkpoints", "chatsft_checkpoints"]
    later = folders[folders.index(Path(stage.output).parent.name) :]
    assert f"rm -r {' '.join(str(base_dir / folder / 'd2_clover') for folder in later)}, and" in kept


def test_a_model_that_was_deleted_is_made_again(finished, base_dir):
    """Its section of the report is still there."""
    output = base_dir / "mid_checkpoints/d2_clover"
    before = skipped(finished)
    shutil.rmtree(output)
    assert before - skipped(finished) == {"report/d2_clover/midtraining.json"}


def test_the_defaults_on_gpus_are_nanochats():
    plan = as_json(gpu="h100", gpus=2, COMPARE="1", QAT_METHOD="quartet2")
    expected = {"DEPTH": 20, "SEQ_LEN": 2048, "VOCAB_SIZE": 65536, "TOTAL_BATCH": 524288, "DATA_RATIO": 20}
    assert expected.items() < plan["numbers"].items() and plan["processes"] == 2
    assert [run["tag"] for run in plan["runs"]] == ["d20_clover", "d20_bf16"] and plan["methods"] == ["clover", "bf16"]
    assert {stage["processes"] for stage in plan["stages"] if stage["source"]} == {2}
    assert as_json(run="run1000", gpu="h100")["numbers"]["DEPTH"] == 32
    assert as_json(run="run1000")["numbers"]["DEPTH"] == 4  # on a CPU


@pytest.mark.parametrize(
    "variables, tag",
    [
        ({}, "d2_clover"),
        ({"EVAL_EVERY": "7", "DEPTH": "3", "METHOD": "nvidia"}, "d3_nvidia"),
        ({"NUM_ITERATIONS": "77", "MATRIX_LR": "0.1", "SEED": "2"}, "d2_clover_steps77_seed2_matrix-lr0.1"),
        ({"BASE_ARGS": "--weight-decay=0.1"}, "d2_clover_weight-decay-0.1"),
    ],
)
def test_a_runs_name_says_what_differs(variables, tag):
    assert as_json(**variables)["runs"][0]["tag"] == tag


def test_names_of_long_and_of_other_text_differ():
    tags = [read("speedrun", v, False).tag("clover") for v in ({"DATA_DIR": "/a/books"}, {"DATA_DIR": "/b/books"})]
    long = read("speedrun", {"BASE_ARGS": "--weight-decay=0.1 " * 9}, False).tag("clover")
    assert tags[0] != tags[1] and all("_data-books-" in tag for tag in tags) and len(long) < 100


def test_each_method_has_its_own_memory():
    """bf16 keeps more than clover. Both train in one state, for a comparison."""
    plan = as_json(gpu="rtx5090", DEPTH="32", COMPARE="1")
    clover, bf16 = (run["memory"][0] for run in plan["runs"])
    assert clover["state"] == bf16["state"] == "lean" and clover["rows"] == bf16["rows"] == 4
    assert clover["activations"] < 0.9 * bf16["activations"]
    for run in plan["runs"]:
        for way in run["memory"]:
            parts = way["weights"] + way["gradients"] + way["moments"] + way["codes"]
            assert way["peak"] == pytest.approx(parts + max(way["activations"] + way["loss"], way["update"]))
            assert not way["rows"] or way["peak"] <= 0.94 * plan["gib"] * 2**30
    assert set(clover["flags"]) < set(commands(plan)["base d32_clover"])


@pytest.mark.parametrize("gpu", ["rtx5090", "5090", "RTX 5090", "rtx-5090", "NVIDIA GeForce RTX 5090"])
def test_a_card_in_any_spelling(gpu):
    assert cards.find_card(gpu).gib == 32


def test_other_chips_of_the_same_name_have_no_rates():
    named = {
        "NVIDIA GeForce RTX 5090": True,
        "NVIDIA GeForce RTX 5090 Laptop GPU": False,
        "NVIDIA GeForce RTX 5090 D": False,
    }
    assert {name: bool(cards.card_of_device(name, 31.4).rates) for name in named} == named
    assert (
        cards.card_of_device("NVIDIA H100 80GB HBM3", 79.1).rates and not cards.card_of_device("NVIDIA A30", 24).rates
    )


def test_what_a_gpu_cannot_is_said_where_its_architecture_is_known():
    """A GPU of this machine has one, also where cards.json has no such card. GPU_MEMORY alone names none."""
    laptop = cards.card_of_device("NVIDIA GeForce RTX 5090 Laptop GPU", 24, "sm_120")
    named = {name: cards.find_card(name) for name in ("rtx5090", "h100", "rtx3090")} | {"laptop": laptop}
    named["unnamed"] = cards.find_card(cards.UNNAMED, 24)
    said = {}
    for name, card in named.items():
        settings, machine = read("speedrun", {"DEPTH": "4"}, True), Machine((card,), 4, here=name == "laptop")
        bases = settle(settings, machine, lambda base: None)
        page = words.page(make_plan(settings, machine, bases, EVERYTHING))
        said[name] = " ".join(page.split())
    assert {name for name, page in said.items() if "no FP4 tensor cores" in page} == {"h100", "rtx3090"}
    assert {name for name, page in said.items() if "no FP8 tensor cores either, so take bf16" in page} == {"rtx3090"}
    assert "1 x RTX 3090, sm_86, 24 GiB" in said["rtx3090"] and "1.06 to 1.59" in said["laptop"]
    assert "GPU=... names the GPU" in said["unnamed"] and "Nobody has published a whole" not in said["unnamed"]


def test_a_small_card_gets_a_smaller_model_unless_the_user_has_chosen():
    """What a model is said to need are the bytes of its smallest way, a lean state for example."""
    assert as_json(run="run1000", gpu="rtx5060")["numbers"]["DEPTH"] == 24
    with pytest.raises(UserError, match="d36_clover needs .* RTX 5060 has 8 GiB") as e:
        planned(gpu="rtx5060", DEPTH="36")
    ways = as_json(gpu="b200", DEPTH="36", BASE_ARGS="--state=lean", DEVICE_BATCH="1")["runs"][0]["memory"]
    assert float(str(e.value).split(" needs ")[1].split()[0]) * 2**30 <= 1.01 * min(way["peak"] for way in ways)


def test_a_family_whose_memory_is_not_counted_is_planned_without():
    run = as_json(gpu="rtx5090", BASE_ARGS="--llama=30M")["runs"][0]
    assert run["memory"] == [] and run["parameters"] == pytest.approx(30.5e6, rel=0.005)


def test_what_does_not_fit_names_the_methods_with_which_it_does():
    """Each remedy that the refusal names passes the plan. Where it fits hardly, the page says the same."""
    with pytest.raises(UserError) as e:
        planned(gpu="rtx5060", DEPTH="22", QAT_METHOD="clover_mixed")
    named = re.search(r"it fits with QAT_METHOD=(.*); take one, or lower DEPTH", str(e.value))[1].split(" or ")
    assert named == ["bf16", "fp8", "clover"]
    assert all(planned(gpu="rtx5060", DEPTH="22", QAT_METHOD=m).bases[0].ways[0].rows for m in named)
    hardly = words.does_it_fit(planned(gpu="rtx5060", DEPTH="24", QAT_METHOD="bf16"))
    assert "d24_bf16: hardly" in hardly and "By count it fits with fp8 or clover." in hardly


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"DEPTH": "28"}, "with one row by count, and RTX 5060 has 8 GiB; no method makes it fit; lower DEPTH or"),
        ({"DEPTH": "26", "COMPARE": "1"}, "d26_bf16 needs .*; leave COMPARE out, or lower DEPTH"),
    ],
)
def test_what_fits_with_no_method_says_what_to_lower(variables, message):
    """A micro-batch that the user chose does not make the model smaller."""
    with pytest.raises(UserError, match=message):
        planned(gpu="rtx5060", **variables)


def test_a_micro_batch_that_does_not_fit_names_its_rows_and_those_that_fit():
    """Each number that is named passes the plan. A number in BASE_ARGS is the user's choice as well, and keeps the
    depth."""
    typed, flags = {"BASE_ARGS": "--device-batch-size=64"}, "--state=lean --recompute=codes"
    for variables, named in (
        ({"DEVICE_BATCH": "64"}, "set DEVICE_BATCH=4, or"),
        (typed, "set --device-batch-size=4, or"),
    ):
        with pytest.raises(
            UserError,
            match=f"^d20_clover.* needs .* with 64 rows .*; at most 4 of them fit with {flags}, which .*; {named}",
        ):
            planned(gpu="rtx5060", **variables)
    assert planned(gpu="rtx5060", DEVICE_BATCH="4").bases[0].ways[0].rows == 4
    hardly = words.does_it_fit(planned(gpu="rtx5090", DEVICE_BATCH="64"))
    assert "d20_clover: hardly, for by count 64 rows take 30.6 GiB of 32 GiB" in hardly
    assert planned(gpu="rtx5060", DEVICE_BATCH="4").bases[0].ways[0].flags == flags.split()
    assert "at most 32 rows fit with --recompute=codes;" in hardly and "no method" not in hardly
    assert planned(gpu="rtx5090", DEVICE_BATCH="32").bases[0].ways[0].rows == 32


def test_later_stages_have_no_larger_micro_batch_than_the_base_training():
    """run1000 gave mid-training 8 rows, and d32 fits 32 GiB with 4. Without a flag each stage takes the base's rows."""
    plan = planned(run="run1000", gpu="rtx5090")
    mid = next(stage.command for stage in plan.stages if stage.name.startswith("mid"))
    assert plan.bases[0].ways[0].rows == 4 and not any("--device-batch-size" in word for word in mid)
    assert "hardly" not in words.does_it_fit(plan)
    for name in ("MID_ARGS", "SFT_ARGS"):
        page = words.does_it_fit(planned(run="run1000", gpu="rtx5090", **{name: "--device-batch-size=8"}))
        assert f"  {name}: --device-batch-size=8 hardly fits, for the base training has at most 4 rows" in page


def test_hours_are_an_estimate_with_sources_and_are_scaled():
    d20, d12 = (as_json(gpu="rtx5090", DEPTH=depth)["runs"][0] for depth in ("20", "12"))
    assert d20["hours"]["kind"] == "estimated" and d20["hours"]["sources"]
    assert d20["hours"]["low"] < d20["hours"]["high"] and d12["hours"]["speed_low"] > d20["hours"]["speed_low"]
    tokens = d20["tokens"] / 3600
    assert tokens < d20["hours"]["low"] * d20["hours"]["speed_high"] < 1.2 * tokens  # and the validations
    assert "Validation is" in words.how_long(planned(gpu="rtx5090"))
    assert as_json(gpu="rtx5080")["runs"][0]["hours"] is None
    assert "Validation is" not in words.how_long(planned(gpu="rtx5080"))  # a share of hours that are not known


def test_a_method_of_two_precisions_is_as_fast_as_either():
    """clover_mixed multiplies a third of its products in FP8. Where nobody has timed it, its range spans both."""
    card = cards.find_card("rtx5090")
    fp8, nvfp4, mixed = (cards.gain_of(card, method) for method in ("fp8", "clover", "clover_mixed"))
    assert (mixed.low, mixed.high) == (min(fp8.low, nvfp4.low), max(fp8.high, nvfp4.high))
    assert cards.gain_of(cards.find_card("rtx4090"), "clover_mixed") is None


def test_the_hours_count_the_flops_of_attention():
    """Longer rows and wider windows take longer. The page says as which rows the published rates count."""
    usual, long, short, wide = (
        planned(gpu="rtx5090", DEPTH="12", **v)
        for v in ({}, {"SEQ_LEN": "8192"}, {"SEQ_LEN": "256"}, {"WINDOW_PATTERN": "L"})
    )
    for plan in (long, short, wide):
        more = plan.bases[0].flops / usual.bases[0].flops
        assert plan.hours[0].speed_low == pytest.approx(usual.hours[0].speed_low / more)
        as_which = f"takes {more:.3g} times the FLOPs that it takes in rows of 2,048 tokens with windows SSSL"
        assert as_which in words.how_long(plan)
    # d12 has 12 * 768 FLOPs for each key of a token and 6 for each weight.
    weights, keys = long.bases[0].weights, sum(8192 if i in (3, 7, 11) else 4096 for i in range(12))
    assert long.bases[0].flops == pytest.approx(6 * weights + 12 * 768 * keys, rel=1e-3)
    assert "rows of 2,048" not in words.how_long(usual)
    said = [words.how_long(planned(DEPTH="12", SEQ_LEN=tokens)) for tokens in ("64", "256")]
    few, many = (int(re.search(r"takes (\d+) to", text)[1]) for text in said)
    assert few < many  # minutes of a CPU


def test_hours_are_said_as_a_person_says_them():
    """Minutes where they are few, days where they are many, and the sum of a comparison. Each source is said once."""
    said = {depth: words.how_long(planned(gpu="rtx5090", DEPTH=depth, COMPARE="1")) for depth in ("12", "36")}
    assert "clover: 3 to 4.5 hours estimated" in said["12"] and "Together: 8.2 to 12 hours." in said["12"]
    assert "bf16: 1,332 to 1,788 hours (55 to 74 days) estimated" in said["36"]
    assert said["12"].count("estimated from github.com/IST-DASLab/llmq (Qwen2.5-0.5B") == 1
    few = words.how_long(planned(gpu="rtx5090", NUM_ITERATIONS="20", STAGES="tok base"))
    assert "clover: 2.8 to 4.3 minutes estimated" in few and "Together" not in few


def test_a_run_without_base_training_has_no_hours_and_no_text_to_come():
    report, tok = (planned(gpu="rtx5090", STAGES=stages) for stages in ("report", "tok"))
    assert report.text_bytes == 0 < tok.text_bytes
    for plan in (report, tok):
        page = words.page(plan)
        assert "tokens/s" not in page and "Does it fit?" not in page and "tokens are trained on" not in page
        assert ("GB of text to come" in page) == (plan is tok)
    assert "FineWeb-Edu" in words.page(tok) and "FineWeb-Edu" not in words.page(report)


def test_text_that_is_read_more_than_once_is_said():
    """FineWeb-Edu's shards hold 8.8M tokens each that are kept, and are 1,823."""
    pages = {n: words.head(planned(gpu="rtx5090", NUM_SHARDS=n)) for n in ("370", "8")}
    assert "so the text is read about 41 times" in pages["8"] and "times" not in pages["370"]
    assert "read about 1.1 times" in words.head(planned(gpu="rtx5090", DEPTH="40"))
    assert "times" not in words.head(planned(gpu="rtx5090")) + words.head(planned())


def test_hours_that_count_no_recomputation_say_so():
    """At d32 the plan itself chooses it; at d20 a user can."""
    said = {d: words.how_long(planned(gpu="rtx5090", DEPTH=d)) for d in ("20", "32")}
    said["all"] = words.how_long(planned(gpu="rtx5090", BASE_ARGS="--recompute=all"))
    found = {d: re.findall(r"activations are computed twice \(--recompute=(.*?)\)", text) for d, text in said.items()}
    assert found == {"20": [], "32": ["codes-mlp"], "all": ["all"]}


def test_the_plan_says_why_four_rows_come_before_no_recomputation():
    said = " ".join(words.does_it_fit(planned(gpu="rtx5090", DEPTH="32")).split())
    assert "The first one with 4 rows is taken, because with fewer a product is too small for a large GPU." in said


def test_products_in_bf16_take_bf16s_time():
    """nvidia_full keeps the last blocks in BF16, and makes its late forward in BF16; a run in phases likewise."""
    times = {}
    for name, variables in {
        **{method: {"QAT_METHOD": method} for method in ("bf16", "fp8", "nvidia", "nvidia_full")},
        "half": {"QAT_METHOD": "nvidia", "BASE_ARGS": "--method-phases=0.5=bf16"},
        "to fp8": {"QAT_METHOD": "nvidia", "BASE_ARGS": "--method-phases=0.5=fp8"},
    }.items():
        plan = planned(gpu="rtx5090", **variables)
        times[name] = 1 / plan.hours[0].speed_high
        if name == "nvidia_full":
            assert plan.bases[0].work[16] == pytest.approx(3 / 20 + 17 / 20 * 0.18 / 3)
            page = words.page(plan)
            assert "20% of the products of nvidia_full are in BF16" in page
            assert re.search(r"\n  nvidia_full      not measured +not measured +1\.43 ", page)
    mixed = times["nvidia"] + 0.201 * (times["bf16"] - times["nvidia"])
    assert times["nvidia_full"] == pytest.approx(mixed)
    assert times["half"] == pytest.approx((times["nvidia"] + times["bf16"]) / 2)
    assert times["to fp8"] == pytest.approx(min(times["nvidia"], times["fp8"]))  # between both
    known = words.how_long(planned(gpu="rtx5060", QAT_METHOD="nvidia_full"))
    assert "in each of its precisions (bf16 and nvfp4)" in known


@pytest.mark.parametrize("gpu", ["rtx5090", "rtxpro4000", "h100", "gb200"])
@pytest.mark.parametrize(("method", "key"), [("fp8", "fp8"), ("clover", "nvfp4"), ("clover_mixed", "clover_mixed")])
def test_no_hours_are_shorter_than_those_of_the_fastest_step_that_was_timed(gpu, method, key):
    """BF16's fastest step times the largest gain, which are of two programs, is faster than any step in NVFP4."""
    card = cards.find_card(gpu)
    keys = [key] if any(key in rate for rate in card.rates) else ["fp8", "nvfp4"]
    for weights in (135e6, 973e6):
        found, bf16 = cards.speed_of(card, method, weights), cards.published(card, "bf16", weights)
        timed = [r[k] / r["gpus"] * r["weights"] / weights for r in card.rates for k in keys if k in r]
        assert found.high <= max(timed) * 1.0001
        assert found.low == pytest.approx(bf16.low * cards.gain_of(card, method).low)


def test_a_gain_of_unequal_micro_batches_is_told_and_multiplies_nothing():
    """Nobody has timed NVFP4 on this card. Its hours follow from the 1.60 times of equal micro-batches."""
    card = cards.find_card("rtxpro6000")
    nvfp4, bf16 = cards.speed_of(card, "clover", 477e6), cards.published(card, "bf16", 477e6)
    assert cards.gain_of(card, "clover").high == pytest.approx(37532 / 23493)
    assert nvfp4.high == pytest.approx(bf16.high * 37532 / 23493)
    told = {gpu: words.which_method(planned(gpu=gpu)) for gpu in ("rtx5090", "rtxpro6000", "gb200")}
    assert "1.60 " in told["rtx5090"] and "2.45 times its speed: Quartet II, arXiv 2601.22813" in told["rtx5090"]
    assert "2.45 times its speed" in told["rtxpro6000"] and "smaller micro-batch" not in told["gb200"]


def test_the_fast_end_of_nvfp4_is_the_step_that_was_timed_on_an_rtx_5090():
    assert cards.speed_of(cards.find_card("rtx5090"), "clover", 973e6).high == pytest.approx(51000)


def test_what_this_program_measured_counts_before_other_programs():
    """nanochat's own FP8 is 1.17 times its BF16 on an H100; this program's is 1.04 to 1.12 times."""
    h100, kept = cards.find_card("h100"), json.loads((ROOT / "lab/results/bench.json").read_text())
    own = [rate for card in cards.read_cards() for rate in card.rates if "part" in rate]
    for rate in own:
        measured = {}
        for r in kept[rate["part"]]["records"]:
            if r.get("tokens_per_second"):
                measured[r["method"]] = round(r["tokens_per_second"])  # of equal micro-batches, the last is BF16's
        measured["nvfp4"] = measured["clover"]
        assert {key: rate[key] for key in rate["equal"]} == {key: measured[key] for key in rate["equal"]}
    assert cards.gain_of(h100, "fp8").high == pytest.approx(87118 / 78003)
    assert cards.gain_of(h100, "clover_mixed").high == pytest.approx(69178 / 78003)


def test_a_card_that_was_timed_twice_is_not_mixed_with_others():
    """GeForce cards halve the rate of BF16 products with FP32 sums and PRO cards do not, so FP8 gains less on these."""
    geforce, pro, timed_once = (cards.gain_of(cards.find_card(n), "fp8") for n in ("5090", "rtxpro6000", "rtxpro4000"))
    assert geforce.low == pytest.approx(70 / 55) and geforce.high == pytest.approx(13 / 8.2)
    assert pro.low == pytest.approx(90 / 85) and pro.high == pytest.approx(22 / 17)
    assert (timed_once.low, timed_once.high) == (pro.low, geforce.high)


def test_every_source_of_a_ratio_is_on_the_page_of_measurements():
    page = (ROOT / "docs/measured.md").read_text(encoding="utf-8")
    for gpu in ("rtx5090", "gb200"):
        for source in cards.gain_of(cards.find_card(gpu), "clover_mixed").sources:
            named = re.match(r"github.com/([\w-]+/[\w-]+)", source)
            assert named[1] in page, source


def test_a_ratio_over_fp8_is_of_programs_that_timed_both():
    """FP8 and NVFP4 gain most over BF16 on two different cards, so the ratio of their gains would be no measurement."""
    over_fp8 = cards.gain_of(cards.find_card("rtx5090"), "clover", over="fp8")
    assert (over_fp8.low, over_fp8.high) == (234000 / 240038, pytest.approx(81303 / 59978))
    mixed, bf16 = (cards.gain_of(cards.find_card("rtx5090"), m, over="fp8") for m in ("clover_mixed", "bf16"))
    assert (mixed.low, mixed.high) == (over_fp8.low, over_fp8.high) and bf16.high == pytest.approx(55 / 70)
    # Nobody has timed both on an Ada, and nobody has timed either on an Ampere.
    assert cards.gain_of(cards.find_card("rtx4090"), "clover", over="fp8") is None
    row = next(x for x in words.which_method(planned(gpu="rtx5090")).splitlines() if x.startswith("  clover_mixed  "))
    assert re.split(" {2,}", row.strip())[-2:] == ["0.97 to 1.36", "-2.2 to +0.8"]


def test_an_estimate_from_far_away_says_so():
    for gpu, depth, far in (("rtx5090", "1", True), ("rtx5090", "20", False), ("rtxpro4000", "26", True)):
        assert ("EXTRAPOLATED" in words.how_long(planned(gpu=gpu, DEPTH=depth))) == far, (gpu, depth)
    sources = {gpu: "ONE SOURCE" in words.how_long(planned(gpu=gpu, DEPTH="20")) for gpu in ("rtx5060", "rtx5090")}
    assert sources == {"rtx5060": True, "rtx5090": False}


@pytest.mark.parametrize(
    ("gpu", "timed"),
    [("gb10", "bf16 and nvfp4 "), ("rtx4090", "bf16 and fp8 "), ("rtx5060", "nvfp4 "), ("rtx5080", None)],
)
def test_hours_that_are_not_known_name_the_steps_that_are_published(gpu, timed):
    said = words.how_long(planned(gpu=gpu, DEPTH="12", QAT_METHOD="clover_mixed"))
    if timed is None:
        assert "not known. Nobody has published a whole training step of this GPU." in said
    else:
        with_it = "with this method, or in each of its precisions (fp8 and nvfp4), on this GPU."
        assert f"not known. Nobody has published whole training steps {with_it}" in said
        assert f"Published are steps in {timed}(github.com/" in said


def test_the_page_of_one_card_has_the_plans_numbers():
    page = (ROOT / "docs/one_card.md").read_text(encoding="utf-8")
    for depth in ("12", "20", "26", "32"):
        plans = [planned(gpu="rtx5090", DEPTH=depth, QAT_METHOD=m) for m in ("bf16", "fp8", "clover_mixed")]
        row = next(line for line in page.splitlines() if line.startswith(f"| d{depth}"))
        assert " | ".join(words.span(plan.hours[0].low, plan.hours[0].high) for plan in plans) in row
        assert {"EXTRAPOLATED" in words.how_long(plan) for plan in plans} == {"EXTRAPOLATED" in row}
        once = max(way.rows for way in plans[2].bases[0].ways if way.recompute == "none")
        twice = (
            f"A d{depth} with `clover_mixed` fits with {plans[2].bases[0].ways[0].rows} rows only if activations are "
        )
        twice += f"computed twice, from codes, and with {once} rows without"
        assert ("computed twice" in words.how_long(plans[2])) == (twice in page)
    mixed, bf16 = (planned(gpu="rtx5090", QAT_METHOD=m).hours[0] for m in ("clover_mixed", "bf16"))
    mixed_hours, bf16_hours = (words.span(hours.low, hours.high) for hours in (mixed, bf16))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"`clover_mixed` takes {mixed_hours} hours, where BF16's takes {bf16_hours}." in readme
    table = words.which_method(planned(gpu="rtx5090"))
    for method in ("fp8", "clover", "clover_feedback", "clover_mixed"):
        cells = re.split(" {2,}", next(x for x in table.splitlines() if f"  {method} " in x).strip())[3:]
        assert f"| `{method}` | {' | '.join(cells)} |" in page
    said, page = " ".join(table.split()), " ".join(page.split())
    points = re.findall(r"(\d\.\d\d) \((\S+) to (\S+)\) with ([\d.]+\d)", said)
    (high, least, most, b), (middle, least_2, most_2, b_2), (low, least_3, most_3, b_3) = points
    rule = (
        f"{high} times `fp8`'s tokens/s with an exponent of {b}, {middle} times with {b_2}, or {low} times with {b_3}."
    )
    assert rule in page
    assert f"to {least} to {most}, {least_2} to {most_2}, and {least_3} to {most_3}." in page
    between = f"between {high} and {low}, take clover_mixed from {middle} on, and fp8 below"
    assert between in said and between in page.replace("`", "")


@pytest.mark.parametrize(
    ("depth", "b"), [("6", "0.039"), ("12", "0.039"), ("20", "0.036"), ("26", "0.034"), ("32", "0.03")]
)
def test_the_plan_ranks_under_the_exponent_of_the_nearest_size(depth, b):
    said = words.which_method(planned(gpu="rtx5090", DEPTH=depth))
    assert re.findall(r"tokens\^-(\S+) ", said) == ["0.084", b, "0.02"]
    near = {"6": "12", "26": "24"}.get(depth, depth)
    assert f"tokens^-{b} (d{near}, by the law of the paper's runs)" in said


def test_the_exponents_are_those_of_the_law():
    law = scaling.fit_law(scaling.read_runs("paper"))
    for size in json.loads(cards.CARDS.read_text())["exponents"]["of"]:
        blocks, ends = 12 * (64 * size["depth"]) ** 2 * size["depth"], 2 * 65536 * 64 * size["depth"]
        assert size["b"] == pytest.approx(scaling.exponent_of_tokens(law, blocks, 20 * (blocks + ends)), abs=0.0005)
        assert size["weights"] == pytest.approx(blocks + ends / 2, rel=0.01)


def test_hours_that_follow_from_a_micro_batch_of_one_row_say_so(base_dir):
    why = "The most hours follow from one slow BF16 run"
    for method in ("bf16", "fp8", "clover_mixed"):
        said = words.how_long(planned(gpu="rtx5090", QAT_METHOD=method))
        assert f"{why} (micro-batch 1 in BF16, 4 in NVFP4), so they are probably fewer with more rows." in said
    assert why not in words.how_long(planned(gpu="rtx5090", DEVICE_BATCH="1"))
    assert why not in words.how_long(planned(gpu="rtx4090", QAT_METHOD="fp8"))
    assert not cards.slow_by_micro_batch(timed_here(base_dir, bf16=50e3, clover=70e3))
    assert f"{why}, which had a micro-batch of one row" in (ROOT / "docs/one_card.md").read_text(encoding="utf-8")


def test_the_head_says_where_the_default_is_not_the_method_recommended_for_a_card():
    note = "clover is the paper's method; for this card clover_fp8_forward or fp8 is recommended"
    named = planned(gpu="rtx5090", QAT_METHOD="clover")
    assert note in words.head(planned(gpu="rtx5090")) and note not in words.head(named)
    assert note not in words.head(planned(gpu="rtx4090")) and note not in words.head(planned())


def test_the_gram_matrices_are_no_codes():
    mixed, clover = (words.does_it_fit(planned(gpu="rtx5090", QAT_METHOD=m)) for m in ("clover_mixed", "clover"))
    assert "codes 0.3 + Gram matrices 2.0" in mixed
    assert "Gram" not in clover


def test_a_ratio_that_is_one_measurement_of_another_card_is_marked(base_dir):
    said = {gpu: words.which_method(planned(gpu=gpu)) for gpu in ("rtx5090", "rtxpro4000", "gb200", "rtx4090")}
    note, best = "* one measurement, of another card", "The best case of clover_mixed assumes that its products in FP8"
    marked = {gpu: (note in text, set(re.findall(r"\n  (\w+) .*1\.60 \*", text))) for gpu, text in said.items()}
    nothing = (False, set())
    assert marked == {"rtx5090": (True, {"clover", "clover_feedback"})} | dict.fromkeys(list(said)[1:], nothing)
    assert {gpu: best in text for gpu, text in said.items()} == {gpu: gpu != "rtx4090" for gpu in said}
    page = (ROOT / "docs/one_card.md").read_text(encoding="utf-8").replace("`", "")
    assert note in page and best in " ".join(page.split())
    timed = timed_here(base_dir, bf16=50e3, fp8=67e3, clover=70e3, clover_mixed=85e3)
    assert not cards.is_of_another_card(timed, cards.gain_of(timed, "clover"))


def test_the_page_of_one_card_says_how_much_faster_than_fp8_4_bits_are():
    page = " ".join((ROOT / "docs/one_card.md").read_text(encoding="utf-8").split())
    ratios = {}
    for rate in cards.find_card("rtxpro4000").rates:
        if rate["gpus"] == 2 and "untuned" not in rate["note"]:
            ratios.setdefault(rate["depth"], []).append(rate["nvfp4"] / rate["fp8"])
    (d24,), d12 = ratios[24], sorted(ratios[12])
    assert (
        f"{d24:.2f} times the speed of FP8 at d24" in page and f"ratios were {d12[0]:.2f} and {d12[1]:.2f} with" in page
    )
    assert "1.015" in page and "1.015 times" in (ROOT / "docs/measured.md").read_text(encoding="utf-8")


def test_the_documents_and_the_help_say_which_method_as_the_plan_does(capsys):
    with pytest.raises(SystemExit):
        base_train.parse_args(["--help"])
    of_a_card = words.which_method(planned(gpu="rtx5090"))
    assert ON_A_BLACKWELL in " ".join(of_a_card.split()) and "older GPU" not in of_a_card
    texts = [capsys.readouterr().out]
    texts += [
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/one_card.md", "docs/methods.md")
    ]
    for text in texts:
        assert WHICH in " ".join(text.replace("`", "").split())


def test_hours_are_measured_where_a_run_on_this_gpu_is_there(tmp_path):
    gpu = {"gpu": "NVIDIA GeForce RTX 5090"}  # A GPU that is named rtx5090, for a plan alone, has these speeds too.
    start = {"event": "start", "method": "clover", "environment": gpu, "world_size": 1}
    start["flops_per_token"] = planned(gpu="rtx5090").bases[0].flops
    steps = [{"event": "train", "step": i, "tok_per_sec": 1e3 if i < 5 else 8e4} for i in range(25)]
    folder = tmp_path / "base_checkpoints/d20_clover"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, [start, *steps])))
    found = as_json(gpu="rtx5090", NANOCHAT_BASE_DIR=str(tmp_path))["runs"][0]["hours"]
    assert found["kind"] == "measured" and found["speed_low"] == pytest.approx(8e4)
    far = {
        d: words.how_long(planned(gpu="rtx5090", NANOCHAT_BASE_DIR=str(tmp_path), DEPTH=d)) for d in ("12", "20", "32")
    }
    assert {depth: "EXTRAPOLATED" in text for depth, text in far.items()} == {"12": True, "20": False, "32": True}
    longer = planned(gpu="rtx5090", NANOCHAT_BASE_DIR=str(tmp_path), SEQ_LEN="8192")
    assert longer.hours[0].speed_low == pytest.approx(8e4 * start["flops_per_token"] / longer.bases[0].flops)


def test_what_measure_sh_timed_on_this_gpu_counts_before_what_others_published(base_dir, monkeypatch):
    """The file is of a real measurement, a d26 with windows L. A method that was not timed has its precision's rate."""
    content = json.loads((ROOT / "lab/results/bench.json").read_text())["bench_train_d26_h100"]
    gpu = content["environment"]["gpu"] = "NVIDIA GeForce RTX 5090"
    (base_dir / "measurements").mkdir(parents=True)
    (base_dir / "measurements/steps.json").write_text(json.dumps(content))
    environment = {"PLAN_ONLY": "1", "NANOCHAT_BASE_DIR": str(base_dir), "STAGES": "tok base"}

    def plan(name: str = gpu, **variables: str):
        card = cards.card_of_device(name, 32)
        monkeypatch.setattr(program.this, "this_machine", lambda gpu, gib: Machine((card,), 4))
        return program.plan_of("speedrun", environment | variables)

    timed = {r["method"]: r for r in content["records"] if r.get("tokens_per_second")}
    for method, key in (("bf16", "bf16"), ("fp8", "fp8"), ("clover", "clover"), ("nvidia", "clover")):
        made = plan(QAT_METHOD=method, DEPTH="26", WINDOW_PATTERN="L")
        hours = made.hours[0]
        assert hours.speed_low == pytest.approx(timed[key]["tokens_per_second"], rel=1e-6) == hours.speed_high
        assert hours.kind == ("estimated" if method == "nvidia" else "measured")
        assert hours.sources == ("dev/measure.sh (nanochat d26, on this GPU)",)
        assert "EXTRAPOLATED: " not in words.how_long(made)
        small = words.how_long(plan(QAT_METHOD=method, DEPTH="12"))
        assert "EXTRAPOLATED: this model has 135 million weights in products, and those that were timed" in small
        assert "ONE SOURCE" not in words.page(made) and "Ratios of speed on this GPU" in words.page(made)
    ratio = timed["fp8"]["tokens_per_second"] / timed["bf16"]["tokens_per_second"]
    assert re.search(rf"\n  fp8 +0\.21 ± 0\.11 +0\.15 ± 0\.12 +{ratio:.2f} ", words.which_method(plan()))
    assert plan("RTX 5090", QAT_METHOD="fp8").hours == plan(QAT_METHOD="fp8").hours
    assert plan("NVIDIA GeForce RTX 5090 D").hours == [None]  # another GPU
    (base_dir / "measurements/steps.json").write_text('{"records": [1]}')
    assert plan().hours[0].kind == "estimated" and "Quartet II" in plan().hours[0].sources[0]


def timed_here(base_dir, **speeds: float) -> cards.Card:
    """An RTX 5090 with speeds as dev/measure.sh would have found them."""
    content = json.loads((ROOT / "lab/results/bench.json").read_text())["bench_train_d26_h100_graphs"]
    content["environment"]["gpu"] = "NVIDIA GeForce RTX 5090"
    content["records"] = [
        r | {"tokens_per_second": speeds[r["method"]]} for r in content["records"] if r.get("method") in speeds
    ]
    (base_dir / "measurements").mkdir(parents=True)
    (base_dir / "measurements/steps.json").write_text(json.dumps(content))
    return cards.with_measurements(cards.find_card("rtx5090"), base_dir)


def test_a_rank_among_few_methods_names_them():
    """Nobody has timed FP8 on a GB10, so what is ranked there is not what the table lists."""
    ends = {gpu: re.findall(r"ends lowest(.*)\.", words.which_method(planned(gpu=gpu))) for gpu in ("gb10", "gb200")}
    assert ends == {"gb10": 3 * [" of bf16, clover, clover_feedback"], "gb200": ["", "", ""]}


def test_methods_that_were_timed_without_bf16_are_compared(base_dir):
    """BF16 may be the only one that is out of memory."""
    card = timed_here(base_dir, fp8=67e3, clover=70e3, clover_mixed=85e3)
    assert cards.gain_of(card, "clover_mixed", over="fp8").low == pytest.approx(85 / 67)
    assert cards.gain_of(card, "clover_mixed", over="fp8").high == pytest.approx(85 / 67)


@pytest.mark.parametrize(
    ("mixed", "first"),
    [
        (85e3, ["clover_mixed", "clover_mixed", "fp8 or clover_mixed"]),
        (95e3, ["clover_mixed"] * 3),
        (66e3, ["fp8"] * 3),
    ],
)
def test_measured_methods_are_ranked_under_each_exponent(base_dir, mixed, first):
    """Ranges that span both exponents overlap, although each exponent is the same for all methods."""
    card = timed_here(base_dir, bf16=50e3, fp8=67e3, clover=70e3, clover_mixed=mixed)
    settings = read("speedrun", {}, True)
    bases = settle(settings, Machine((card,), 4), lambda base: None)
    said = words.which_method(make_plan(settings, Machine((card,), 4), bases, EVERYTHING))
    assert "fp8 and clover_mixed are timed on this GPU" in said and "time fp8" not in said
    assert re.findall(r"\): (.*) ends lowest", said) == first
    assert f"The table has {mixed / 67e3:.2f}." in " ".join(said.split())


def test_text_by_tokens():
    shards = [as_json(gpu="rtx5090", DEPTH=depth)["numbers"]["NUM_SHARDS"] for depth in ("12", "20", "32")]
    assert shards == sorted(shards) and shards[1] == 370 and shards[0] < 150
    assert as_json(gpu="rtx5090", NUM_SHARDS="8")["numbers"]["NUM_SHARDS"] == 8


def test_a_shorter_sequence_takes_more_rows():
    long, short = (as_json(gpu="rtx5090", DEPTH="12", SEQ_LEN=n)["runs"][0]["memory"][0] for n in ("2048", "1024"))
    assert short["rows"] == 2 * long["rows"] and short["activations"] == long["activations"]


@pytest.mark.parametrize("tokens, rows", [("256", 8), ("512", 4), ("2048", 1)])
def test_longer_rows_on_a_cpu_are_fewer(tokens, rows):
    """SEQ_LEN alone is enough: micro-batches of the base and of mid-training keep their tokens."""
    plan = as_json(SEQ_LEN=tokens)
    for name, command in commands(plan).items():
        if name.startswith(("base", "mid")):
            assert f"--device-batch-size={rows}" in command, name


def test_steps_chosen_for_a_cpu_shrink_the_later_stages():
    plan = as_json(steps=(60, "slow"))
    assert plan["numbers"]["NUM_ITERATIONS"] == 60 and plan["numbers"]["SPLIT_TOKENS"] == 32768
    assert plan["runs"][0]["tag"] == "d2_clover_steps60" and "--max-problems=16 " in plan["args"]["EVAL_ARGS"]
    assert "--num-iterations=30" in plan["args"]["MID_ARGS"] and "--num-iterations=10 " in plan["args"]["SFT_ARGS"]
    del plan["numbers"], plan["machine"]
    assert {k: v for k, v in as_json(NUM_ITERATIONS="60").items() if k in plan} == plan  # whoever has chosen them
    few = as_json(NUM_ITERATIONS="4")
    assert "--num-iterations=2" in few["args"]["MID_ARGS"].split() and few["numbers"]["SPLIT_TOKENS"] == 16384
    assert "--num-iterations=1" in few["args"]["SFT_ARGS"].split() and "--max-problems=8 " in few["args"]["EVAL_ARGS"]
    many = as_json(NUM_ITERATIONS="400")
    assert many["args"] == as_json()["args"] and many["numbers"]["SPLIT_TOKENS"] == CPU["SPLIT_TOKENS"]
    mine = as_json(steps=(60, "slow"), NUM_ITERATIONS="120", SFT_ARGS="--num-iterations=9")
    assert mine["numbers"]["NUM_ITERATIONS"] == 120 and mine["args"]["SFT_ARGS"] == "--num-iterations=9"


REFUSED = [
    ({"QAT_METHOD": "fp3"}, "'fp3'"),
    ({"QAT_METHOD": "fp3"}, "or register its recipe (nf.register, or RECIPES=FILE.py)"),
    ({"QAT_METHOD": "clover", "METHOD": "nvidia"}, "two methods"),
    ({"DEPTH": "abc"}, "DEPTH=abc: "),
    ({"DEPTH": "0", "NUM_ITERATIONS": "3"}, "DEPTH=0: depth 0 must be at least 1"),
    ({"ASPECT_RATIO": "0", "HEAD_DIM": "-1"}, "HEAD_DIM=-1: head dimension -1 and aspect ratio 0 must be at least 1"),
    ({"HEAD_DIM": "63"}, "HEAD_DIM=63: n_embd 189 over n_head 3 is not an even head dimension"),
    ({"BASE_ARGS": "--head-dim=63"}, "BASE_ARGS='--head-dim=63': n_embd 189"),
    ({"TOTAL_BATCH": "1000"}, "TOTAL_BATCH=1000 is not a multiple of 256"),
    ({"TOTAL_BATCH": "5e5"}, "TOTAL_BATCH=5e5: "),
    (
        {"SEQ_LEN": "100", "SEED": "7"},
        "SEQ_LEN=100: TOTAL_BATCH=2048 is not a multiple of 100 tokens (1 row of 100 on ",
    ),
    ({"SEQ_LEN": "100"}, "choose a multiple such as 2000, or another length of rows"),
    ({"DEVICE_BATCH": "7"}, "another DEVICE_BATCH"),
    ({"DEPTH": "1000"}, "or say BASE_ARGS=--device-type=cpu to begin all the same"),
    ({"NUM_ITERATIONS": "0"}, "NUM_ITERATIONS=0: "),
    ({"VOCAB_SIZE": "10"}, "VOCAB_SIZE=10 "),
    ({"MATRIX_LR": "-1", "BASE_ARGS": "--warmup-ratio=0.1"}, "MATRIX_LR: '-1' is negative"),
    ({"WINDOW_PATTERN": "X"}, "window pattern 'X'"),
    ({"BASE_ARGS": "--xyz"}, "BASE_ARGS: unrecognized arguments: --xyz (see python -m scripts.base_train --help)"),
    # A flag that the user has typed stays as it is.
    ({"BASE_ARGS": "--depth-nope=3"}, "BASE_ARGS: unrecognized arguments: --depth-nope=3; did you mean DEPTH?"),
    ({"BASE_ARGS": "--depth=x"}, "BASE_ARGS: argument --depth: invalid int value"),
    ({"BASE_ARGS": "--total-batch-size=7"}, "BASE_ARGS='--total-batch-size=7': --total-batch-size=7 is not"),
    ({"MID_ARGS": "--max-seq-len=x"}, "MID_ARGS: argument --max-seq-len: "),
    ({"MID_ARGS": "--nope"}, "MID_ARGS: unrecognized arguments: --nope"),
    ({"SFT_ARGS": "--num-epochs=x"}, "SFT_ARGS: "),
    # What a stage would refuse after the base training.
    ({"MID_ARGS": "--total-batch-size=1000"}, "MID_ARGS: --total-batch-size=1000 is not a multiple of 256"),
    ({"MID_ARGS": "--device-batch-size=3"}, "MID_ARGS: --total-batch-size=524288 is not a multiple of 768"),
    ({"MID_ARGS": "--num-iterations=0"}, "MID_ARGS: --num-iterations=0"),
    ({"MID_ARGS": "--data=local --sft-dir=x"}, "MID_ARGS: --sft-dir takes SmolTalk's place"),
    ({"SFT_ARGS": "--target-examples-per-step=3 --device-batch-size=2"}, "SFT_ARGS: --target-examples-per-step=3"),
    ({"SFT_ARGS": "--eval-steps=0"}, "SFT_ARGS: --eval-steps=0"),
    ({"SFT_ARGS": "--num-epochs=0"}, "SFT_ARGS: --num-epochs=0"),
    ({"EVAL_ARGS": "--max-problems=0"}, "EVAL_ARGS: --max-problems=0"),
    ({"EVAL_ARGS": "-b 0"}, "EVAL_ARGS: --batch-size=0"),
    ({"EVAL_ARGS": "-m 3000"}, "EVAL_ARGS: --max-new-tokens=3000 leaves no room for a prompt in the model's 2560"),
    ({"SPLIT_TOKENS": "1000"}, "SPLIT_TOKENS=1000 is not a multiple of 256"),
    ({"EVAL_BATCH": "0"}, "EVAL_BATCH=0 "),
    ({"EVAL_ARGS": "-a nope"}, "unknown task 'nope'"),
    ({"BASE_ARGS": "--run='a"}, 'BASE_ARGS="--run=\'a": No closing quotation; close the quotation'),
    ({"NUM_SHARDS": "-4"}, "NUM_SHARDS=-4: FineWeb-Edu has 1 to 1822 training shards; set another number, or leave"),
    ({"TOK_SHARDS": "5000"}, "TOK_SHARDS=5000: FineWeb-Edu has 1 to 1822 training shards"),
    ({"STAGES": "tok fly"}, "there is no stage 'fly'"),
    ({"TOK_CHARS": "5"}, "TOK_CHARS=5 characters hold no VOCAB_SIZE=4096 different tokens; leave TOK_CHARS out"),
    ({"NPROC": "99"}, "NPROC=99: this machine has 4 CPU"),
    ({"NPROC": "2x"}, "'2x' is not a number of processes"),
]


@pytest.mark.parametrize("variables, message", REFUSED)
def test_what_a_stage_would_refuse_is_refused_by_the_plan(variables, message):
    with pytest.raises(UserError) as error:
        planned(**variables)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert all(name in message for name in ("BASE_ARGS", "DEVICE_BATCH") if name in str(error.value))  # who is to blame


@pytest.mark.parametrize(
    "stages, needed",
    [("sft", "the model of stage mid (d2_clover)"), ("mid", "the model of stage base (d2_clover)"),
     ("base loss", "a tokenizer"), ("loss", "the model of stage base"), ("tok base sft", "the model of stage mid")],
)  # fmt: skip
def test_a_stage_whose_model_is_not_there_is_refused_by_the_plan(stages, needed, base_dir, monkeypatch):
    """The folder of the runs is empty."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    environment = {"STAGES": stages, "PLAN_ONLY": "1", "NANOCHAT_BASE_DIR": str(base_dir), "SFT_ARGS": "--data=local"}
    monkeypatch.setattr(program.this, "this_machine", lambda gpu, gib: Machine((), 4))
    environment |= {"MID_ARGS": "--data=local", "EVAL_ARGS": "--task-name=local"}
    with pytest.raises(UserError) as e:
        program.plan_of("speedrun", environment)
    assert f"which needs {needed}" in str(e.value) and f"{base_dir} has none; add " in str(e.value)
    for name in ("tokenizer/tokenizer.json", "tokenizer/token_bytes.pt", "base_checkpoints/d2_clover/model_1.pt",
                 "mid_checkpoints/d2_clover/model_1.pt"):  # fmt: skip
        (base_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (base_dir / name).write_text("{}")
    assert made(base_dir, ["d2_clover"]) == {"tok", "base", "mid"} and made(base_dir, ["d2_clover", "d2_bf16"]) == {
        "tok"
    }
    if "tok" not in stages and "base" not in stages:
        assert program.plan_of("speedrun", environment).stages


def test_a_plan_looks_into_the_users_folder(base_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(program.this, "this_machine", lambda gpu, gib: Machine((), 4))
    environment = {"DATA_DIR": str(tmp_path), "PLAN_ONLY": "1", "NANOCHAT_BASE_DIR": str(base_dir), "STAGES": "tok"}
    with pytest.raises(UserError, match="holds no data; expected .parquet files"):
        program.plan_of("speedrun", environment)
    (tmp_path / "a.txt").write_text("Some text." * 100)
    said = words.head(program.plan_of("speedrun", environment | {"STAGES": "tok base"}))
    assert re.search(r"tokens are trained on, and it has about 250, so it is read more than once", said), said
    assert program.plan_of("speedrun", environment).facts.text == "folder"
    assert not (base_dir / "converted_data").exists()


def test_a_tracker_is_refused_before_anything_is_trained(base_dir, monkeypatch):
    monkeypatch.setattr(program.this, "this_machine", lambda gpu, gib: Machine((), 4))
    environment = {"PLAN_ONLY": "1", "NANOCHAT_BASE_DIR": str(base_dir), "STAGES": "tok"}
    with pytest.raises(UserError, match="TRACKER=tensorboard is not known; use wandb or trackio"):
        program.plan_of("speedrun", environment | {"TRACKER": "tensorboard"})
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match="WANDB_RUN=mine: trackio is not installed.*, or set WANDB_RUN=dummy"):
        program.plan_of("speedrun", environment | {"TRACKER": "trackio", "WANDB_RUN": "mine"})
    assert program.plan_of("speedrun", environment | {"TRACKER": "trackio"}).stages


def test_a_small_memory_is_not_said_to_be_none():
    """GPU_MEMORY in GiB. Nothing trains in 0, which is refused as what is no number."""
    assert str(this_machine("", "0.5")).startswith("1 x a GPU without a name, 0.5 GiB")
    with pytest.raises(UserError, match="d2_clover needs .* and a GPU without a name has 0.01 GiB"):
        program.plan_of("speedrun", {"GPU_MEMORY": "0.01", "DEPTH": "2", "PLAN_ONLY": "1"})
    for text in ("0", "-1", "x", "nan"):
        with pytest.raises(UserError, match=f"GPU_MEMORY={text}: expected a number of GiB"):
            this_machine("", text)


@pytest.mark.parametrize(
    "name, meant",
    [
        ("NUM_ITERATION", "NUM_ITERATIONS"), ("DETPH", "DEPTH"), ("NPROCS", "NPROC"), ("BATCH_SIZE", "DEVICE_BATCH"),
        ("NUM_STEPS", "NUM_ITERATIONS"), ("LR", "MATRIX_LR"), ("MODEL_TAG", "NANOCHAT_BASE_DIR"),
        ("depth", "set DEPTH, and unset depth"), ("DRY_RUN", "PLAN_ONLY"), ("DEVICE_TYPE", "CUDA_VISIBLE_DEVICES="),
    ],
)  # fmt: skip
def test_a_variable_that_would_be_ignored_is_refused(name, meant):
    assert meant in problem({name, "PATH", "HOME"}) and problem({"PATH", "METHOD", "SHELL", "PYTHONHASHSEED"}) is None


@pytest.mark.parametrize("name", ["COMPARE", "PLAN_ONLY"])
def test_a_switch_understands_both_words(name):
    def is_on(text: str) -> bool:
        settings = read("speedrun", {name: text}, False)
        return settings.plan_only if name == "PLAN_ONLY" else len(settings.methods) == 2

    assert [is_on(text) for text in ("1", "yes", "true", "True")] == [True] * 4
    assert [is_on(text) for text in ("", "0", "no", "false", "FALSE")] == [False] * 5
    with pytest.raises(UserError, match=f"{name}=maybe: expected 1 .* or 0"):
        is_on("maybe")


def test_recipes_that_no_method_takes_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr("nanochat_fp4.nvfp4.methods.REGISTERED", registered := {})
    monkeypatch.setattr("nanochat_fp4.plan.settings.REGISTERED", registered)
    (tmp_path / "mine.py").write_text(
        "import nanochat_fp4 as nf\nnf.register(nf.Recipe('mine', output=nf.Gemm(b=nf.Operand('rtn')), summary=''))\n"
    )
    variables = {"RECIPES": str(tmp_path / "mine.py")}
    page = words.page(planned(**variables))
    assert "  note      RECIPES has mine, and this run trains with clover; QAT_METHOD=mine trains with it" in page
    phases = {"BASE_ARGS": "--method-phases=0.5=mine"}
    assert not [note for how in ({"QAT_METHOD": "mine"}, phases) for note in planned(**variables, **how).settings.notes]


def test_a_card_that_is_not_known():
    with pytest.raises(UserError, match="did you mean RTX 5090 .*GPU_MEMORY=24"):
        cards.find_card("rtx5099")
    assert cards.find_card("rtx5099", gib=24).gib == 24


def test_measured_products_agree_with_data_sheets():
    """PRO cards do not halve their BF16 rate with FP32 sums: a sheet's 252 TFLOP/s for one that makes 334 to 417 turned
    a comparison with FP8 round."""
    both = {c.name: (c.products, get_peak_flops(c.name)) for c in cards.read_cards() if c.products}
    assert {"RTX 5090", "RTX PRO 6000"} <= {name for name, (_, peak) in both.items() if peak}
    for name, ((low, high, _), peak) in both.items():
        assert low <= high and (peak is None or 0.6 * peak <= low * 1e12 and high * 1e12 <= 1.15 * peak), name


def test_a_plan_of_another_machine_speaks_of_that_machine():
    with pytest.raises(UserError, match="NPROC=99: GPU .* one GPU"):
        program.plan_of("speedrun", {"GPU": "rtx5090", "NPROC": "99", "PLAN_ONLY": "1"})


def test_a_larger_model_on_a_cpu_is_not_said_to_take_minutes():
    """Its minutes follow the work of a step and the number of steps, which a probe may lower to a quarter."""
    said = words.how_long(planned(DEPTH="12"))
    low, high = map(int, re.search(r"takes (\d+) to (\d+) minutes", said).groups())
    assert low > 60 and 3.5 < high / low < 4.1
    assert "made for 5 minutes" in words.how_long(planned())
    assert "takes 1.1 minutes" in words.how_long(planned(NUM_ITERATIONS="2"))  # mid-training and SFT are shorter, too


def test_the_minutes_on_a_cpu_count_what_is_asked():
    """Methods, a smaller model, and stages that are left out."""
    assert "made for 5 minutes of this CPU with each of 2 methods, 10 together" in words.how_long(planned(COMPARE="1"))
    assert "takes 2.1 minutes with 2 methods" in words.how_long(planned(COMPARE="1", NUM_ITERATIONS="2"))
    most = {}
    for name, variables in {"all": {}, "half": {"STAGES": "tok base report"}, "small": {"DEPTH": "1"}}.items():
        said = words.how_long(planned(**variables))
        most[name] = float(re.search(r"([\d.]+) minutes", said)[1])
    assert most["all"] == 5 and 2.5 < most["half"] < 4 and 1 < most["small"] < 4


def test_a_tokenizer_of_another_size():
    with pytest.raises(UserError, match="VOCAB_SIZE=300"):
        planned(facts=Facts(tokenizer=300))
    assert "tok" not in commands(as_json(facts=Facts(tokenizer=3000, asked_tokens=4096)))  # of a small text
    kept = words.head(planned(facts=Facts(tokenizer=3000, asked_tokens=4096)))
    assert "tokenizer that of this folder is kept, 3000 tokens; one of another text needs a NANOCHAT_BASE_DIR" in kept
    assert "is kept" not in words.head(planned())


def test_a_tokenizer_that_is_there_is_seen(tiny_base):
    assert tokenizer_sizes(tiny_base)[0] == 300


@pytest.mark.parametrize("asked", [4096, 32768])  # the speedrun's on a CPU, and the default of scripts.tok_train
def test_a_small_text_is_trained_on_again(asked, base_dir, tmp_path, monkeypatch):
    """It yields fewer tokens than were asked for. The same command goes on, also after a reset of the report."""
    monkeypatch.setattr(program.this, "this_machine", lambda gpu, gib: Machine((), 4))
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("Some text, which is small. " * 20)
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    tok_train.main([f"--vocab-size={asked}"])
    get_report().reset()
    found, asked_for = tokenizer_sizes(base_dir)
    assert found < asked_for == asked
    environment = {"DATA_DIR": str(tmp_path), "NANOCHAT_BASE_DIR": str(base_dir), "VOCAB_SIZE": str(asked)}
    plan = program.plan_of("speedrun", environment | {"STAGES": "tok base", "NUM_ITERATIONS": "2"})
    assert [stage.command[0] for stage in plan.stages][-1] == "scripts.base_train"


def test_a_disk_that_is_too_small():
    plan = planned(gpu="rtx5090", facts=Facts(text="hub", disk_free=60e9))
    assert "has 60.0 GB free, and the run takes 78.9 GB" in disk_problem(plan)
    assert disk_problem(planned(gpu="rtx5090", facts=Facts(text="folder", disk_free=60e9))) is None


# ----------------------------------------------------------------------------------------------------------------------
# What is missing


def test_without_a_hub_the_run_takes_what_is_embedded():
    plan = as_json(gpu="h100", DEPTH="4", facts=Facts(text="embedded", disk_free=1e15, missing=NO_HUB))
    run = commands(plan)
    assert "--data=local" in run["mid d4_clover"] and "--data=local" in run["sft d4_clover"]
    # The embedded mixture has some 440,000 tokens: many steps of this batch, less than one of the usual batch.
    assert "--total-batch-size=8192" in run["mid d4_clover"]
    assert "--task-name=local" in run["eval_sft d4_clover"] and "core d4_clover" not in run and "report" in run
    assert "--no-compare" in run["tok_eval"] and "--embedded" in run["text"]
    assert len(plan["left_out"]) == 4 and all(left["remedies"] == ["a remedy"] for left in plan["left_out"])


def test_one_data_set_that_is_missing_leaves_the_stage():
    lacks = {"mid": [Missing("words", "a list", "gone", False)]}
    plan = as_json(gpu="h100", DEPTH="4", facts=Facts(text="hub", disk_free=1e15, missing=lacks))
    assert "--allow-missing" in commands(plan)["mid d4_clover"] and "core d4_clover" in commands(plan)


def test_a_stage_that_is_named_is_refused():
    with pytest.raises(
        UserError, match="STAGES asks for mid, which needs SmolTalk .*: no network.* To have it: a remedy"
    ):
        planned(gpu="h100", DEPTH="4", STAGES="tok base mid", facts=Facts(text="hub", missing=NO_HUB))


def test_without_a_sandbox_no_code_runs():
    lacks = {"eval": [Missing("a sandbox", "leave them out", "no namespaces", True)]}
    plan = as_json(gpu="h100", DEPTH="4", facts=Facts(text="hub", disk_free=1e15, missing=lacks))
    tasks = next(flag for flag in commands(plan)["eval_mid d4_clover"] if flag.startswith("--task-name="))
    assert "HumanEval" not in tasks and "GSM8K" in tasks


@pytest.mark.parametrize("kind", ["core", "mid", "sft", "eval"])
def test_the_needs_of_a_stage_are_what_it_loads(kind, base_dir, monkeypatch):
    """Each data set that the stage's mixtures or tasks load is one that the plan looks for."""
    import importlib

    from nanochat_fp4.data import chat_data, rows
    from nanochat_fp4.plan.stages import SCRIPTS

    base_dir.mkdir()
    module = importlib.import_module(f"scripts.{SCRIPTS[kind]}")
    args = module.parse_args(["-i", "sft"] if kind == "eval" else [])
    loaded = set()
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    fake = lambda dataset, config, split, **how: loaded.add((dataset, config, split)) or [row]  # noqa: E731
    for place in (chat_data, importlib.import_module("eval.common")):
        monkeypatch.setattr(place, "load_rows", fake)
    monkeypatch.setattr(chat_data, "identity_conversations", lambda: chat_data.LOCAL_IDENTITY)
    monkeypatch.setattr(chat_data, "load_words", lambda eval_dir=None: ["a"])
    importlib.import_module("eval.spellingbee")
    monkeypatch.setattr(importlib.import_module("eval.spellingbee"), "load_words", lambda eval_dir=None: ["a"])
    if kind in ("mid", "sft"):
        metrics = module.metric_sources(args) if kind == "sft" else []
        for source in [*module.train_sources(args), *module.val_sources(args), *metrics]:
            source.make()
    elif kind == "eval":
        for name in module.chosen_tasks(None):
            module.TASKS[name](None)
    looked = set()
    monkeypatch.setattr(rows, "rows_problem", None)
    from nanochat_fp4.data import needs as needed

    monkeypatch.setattr(needed, "rows_problem", lambda *what: looked.add(what[:3]))
    monkeypatch.setattr(needed, "url_problem", lambda url: None)
    needed.look_for([need for need in needs(read("speedrun", {}, True), kind) if need.what != "a sandbox"])
    assert looked == loaded


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
    flags = {"SFT_ARGS": f"--sft-dir={talk} --eval-dir={bench}", "CORE_ARGS": f"--bundle-dir={bundle}"}
    settings = read("speedrun", flags, True)
    found = {m.what: m.why for kind in ("core", "sft") for m in look_for(needs(settings, kind))}
    for what, why in {
        "openai/gsm8k (main, train)": "line 1: the field 'answer' is int",
        "the list of words": "words_alpha.txt is empty",
        f"conversations in {talk} (test)": "test.jsonl, line 1",
        "the identity conversations": "identity_conversations.jsonl, line 1",
        "the eval bundle": "schema.jsonl, line 1: 'context_options' is missing",
        "allenai/ai2_arc (ARC-Easy, train)": "train.jsonl (or .jsonl.gz, .parquet) is missing",
    }.items():
        assert why in found[what]
    assert f"conversations in {talk} (train)" not in found


# ----------------------------------------------------------------------------------------------------------------------
# Words and calls


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"gpu": "rtx5090", "DEPTH": "4", "COMPARE": "1"},
        {"gpu": "h100", "DEPTH": "4", "facts": Facts(missing=NO_HUB)},
    ],
)
def test_the_page_answers(how):
    plan = planned(**how)
    page = words.page(plan)
    assert plan.bases[0].tag in page and ("How long" in page) and all(left.what in page for left in plan.left_out)
    if plan.machine.card:
        assert all(question in page for question in ("Does it fit?", "What does it gain?", "Which method?"))
        assert max(map(len, page.splitlines())) < 190


def test_calls_are_quoted_for_the_shell():
    plan = planned(BASE_ARGS="--run='a $(b)'", STAGES="base report")
    base, report = shell.calls(plan).splitlines()
    assert base.startswith("stage base:d2_clover") and "'--run=a $(b)'" in base and report.startswith("stage report")


def test_the_program_prints_json(base_dir, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("GPU", "5090")
    monkeypatch.delenv("DATA_DIR", raising=False)
    program.main(["run1000", "--json"])
    assert json.loads(capsys.readouterr().out)["runs"][0]["tag"] == "d32_clover"


def test_the_model_of_a_plan_is_the_runs(monkeypatch):
    """Its parameters are those of the published sizes, and nothing is allocated."""
    monkeypatch.setattr(GPT, "init_weights", None)
    assert as_json(gpu="h200")["runs"][0]["parameters"] == 560_988_200
