"""Sweeps: what is run and with which flags, resuming, failures, signals, devices.

Training is replaced by something that writes the metrics of a run. Real runs are in test_forwards.py.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import nanochat_fp4 as nf
from lab import runs as kept_runs
from lab.study import sweep, sweep_runs, sweep_scheduler
from lab.study.sweep_results import summary
from nanochat_fp4.cli import UserError
from nanochat_fp4.data import dataset
from nanochat_fp4.models.cross_entropy import FP8_HEADS, default_head
from nanochat_fp4.nvfp4 import methods
from nanochat_fp4.nvfp4.phases import MethodPlan
from scripts import base_train, tok_train


def result(method: str, seed: int, bpb: float, size: str = "tiny") -> dict:
    return {"method": method, "size": size, "seed": seed, "val_bpb": bpb, "val_bpb_bf16": bpb}


# ----------------------------------------------------------------------------------------------------------------------
# What is run


@pytest.mark.parametrize("study", ["d6_longer", "d8_mixed", "d8_builds", "d8_scratch", "ladder_192_wide_12"])
def test_a_stored_study_is_trained_again_on_another_text(study):
    """Its runs have their flags, and branches begin at the runs of the new text that they once began at."""
    args = sweep.parse_args([f"--again={study}"])
    stored, runs = args.stored, sweep.planned(args, "of another text")
    assert args.name == study and args.vocab_size == stored[0]["vocab_size"]
    assert {(r["method"], r["size"], r["seed"]) for r in stored} == {(r.method, r.size, r.seed) for r in runs}
    tags = [run.tag for run in runs]
    for run in runs:
        (old,) = (r for r in stored if (r["method"], r["seed"]) == (run.method, run.seed))
        differ = [flag for flag in run.flags if flag not in old["flags"]]
        branch = [f"--branch-from={run.branch[0]}@{run.branch[1]}"] if run.branch else []
        head = any(f"--method={method}" in run.flags for method in FP8_HEADS)  # the stored runs had BF16 heads
        assert differ == branch + ["--head=bf16"] * head
        assert not run.branch or tags.index(run.branch[0]) < tags.index(run.tag)


@pytest.mark.parametrize(
    "name, runs, left",
    [
        (
            "d6_stored",
            30,
            ["tetrajet_v2_full; oscil.*c116c2a", "clover_feedback.*857ae5f7", "sparse.* not recorded$"],
        ),
        ("d6_mixed", 18, ["left out: clover_feedback, clover_feedback_late, clover_mixed are neither .*857ae5f7"]),
        ("d8_mixed", 9, ["mixed_8bit, .*760df3f", "clover_mixed.*857ae5f7"]),
        ("d6_second_half", 28, ["clover_reset; .*c116c2a", "clover_hot.*clover_mxfp8_forward.*304a43fb$"]),
        ("d6_means_apart", 6, ["feedback_means_apart; means_apart .*769b438"]),
        ("d6_switches_second_half", 9, ["clover_exact_relu_squared; .*7172077"]),
        ("d6_shuffled", 9, ["857ae5f7"]),
    ],
)
def test_studies_and_groups_are_planned_without_what_left(name, runs, left, capsys):
    """Neither flags nor methods of the run, its phases and its layers. Each flag stands once, although a stored run's
    may have been given twice, and above the runs if all have it."""
    sweep.main([f"--again={name}", "--plan"])
    lines = capsys.readouterr().out.splitlines()
    said, planned = ([line for line in lines if word in line] for word in ("left out", ", seed "))
    assert len(planned) == runs and all(any(re.search(part, line) for line in said) for part in left)
    common, *about = lines[len(lines) - runs - 5 : len(lines) - runs]
    for line in planned:
        names = [word.partition("=")[0] for word in f"{common} {line}".split() if word.startswith("--")]
        assert len(names) == len(set(names)) and len(line) < 250
    assert [line.partition(":")[0] for line in about] == ["text", "vocab_size", "tokenizer", "commit"]
    (key,) = {r["text"] for study in kept_runs.names_of(name) for r in kept_runs.stored(study)["results"]}
    assert f"{key}, which is not published, while" in about[0] and re.search("--depth=[68]", common)
    assert all(len(commit) == 8 for commit in re.findall("[0-9a-f]{7,}", about[3]))
    warns = [line for line in lines if line.startswith("the tokenizer of these runs is not recorded")]
    assert len(warns) == (about[2] == "tokenizer: not recorded"), about
    assert "--eval-tokens=1048576" in common + planned[0] or name in ("d6_shuffled", "d6_mixed", "d8_mixed")


def test_every_stored_study_can_be_planned():
    """And trains as many tokens as are stored, but for four that say why not. The list of studies counts these runs."""
    refused = {"d6_controls": "no run", "d6_work": "no run .*857ae5f7", "d2_embedded": "40,960 t", "moe": "5,898,240 t"}
    listed = {
        line.split()[0]: int(re.split(r"\s{2,}", line)[3]) for line in kept_runs.listed().splitlines() if "(" in line
    }
    for name in {*kept_runs.studies(), *kept_runs.GROUPS} - set(refused):
        args = sweep.parse_args([f"--again={name}"])
        tokens = {(r["method"], r["size"], r["seed"]): r["tokens"] for r in args.stored}
        assert (runs := sweep.planned(args)), name
        assert listed.get(name, len(runs)) == len(runs)
        for run in runs:
            flags = base_train.parse_args(list(run.flags))
            assert flags.num_iterations * flags.total_batch_size == tokens[run.method, run.size, run.seed], name
    assert not any(map(listed.get, refused))
    for name, why in refused.items():
        with pytest.raises(UserError, match=f"{name}.* {why}"):
            sweep.parse_args([f"--again={name}"])


@pytest.fixture
def own_study(tmp_path, tiny_base, monkeypatch):
    """A sweep's file of one run, on a text in a folder, which the command line gets by DATA_DIR."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("".join(f"Document {i} of {i * i}.\n\n" for i in range(500)))
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "text"))
    (run,) = sweep_runs.plan(["bf16"], ["tiny"], [1], tokens=1024)
    of = result("bf16", 1, 1.5) | {"flags": run.flags, "steps": 2, "tokens": 1024, "gemm_work": {"4": 1.0}}
    environment = {"gpu": None, "gpu_count": 0, "torch": "2"}

    def write(data: str, **changes) -> str:
        content = {"data": data, "environment": environment, "results": [of | changes]}
        (path := tmp_path / "mine.json").write_text(json.dumps(content))
        return f"--again={path}"

    return write


@pytest.mark.parametrize("flag", ["methods=clover", "sizes=d6", "seeds=2", "first-seed=50", "extra=--seed=3"])
def test_again_takes_no_flags_of_runs(flag):
    with pytest.raises(UserError, match=f"d6_public .*leave out --{flag.partition('=')[0]}$"):
        sweep.parse_args(["--again=d6_public", f"--{flag}", "--plan"])


WHERE = ["d6_public", "private", "moved", "no key", "no text", "no folder", "tokenizer", "vocab_size"]


@pytest.mark.parametrize("where", WHERE)
def test_a_study_is_not_trained_again_on_another_text_or_tokenizer(where, own_study, tmp_path, monkeypatch, capsys):
    """Its results would stand under the study's name. A refusal comes before a text is stored or a run is trained."""
    trained, data = [], sweep.data_name(str(tmp_path / "text"))
    monkeypatch.setattr(sweep, "run_sweep", lambda *args: trained.append(args))
    monkeypatch.setattr(sweep, "report", lambda *args: ("", []))
    argv = ["--name=again", f"--folder={tmp_path / 's'}"]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DATA_DIR", "~/text")
    sweep.main([own_study(data.replace("text", "elsewhere")), *argv, "--vocab-size=280"])
    assert len(trained) == 1 and "the tokenizer of these runs is not recorded" in capsys.readouterr().out
    again = {
        "d6_public": lambda: "--again=d6_public",
        "private": lambda: "--again=d6_longer",
        "moved": lambda: own_study("text (0123456789ab)"),
        "no key": lambda: own_study("text"),
        "no text": lambda: own_study(data),
        "no folder": lambda: own_study(data),
        "tokenizer": lambda: own_study(data, tokenizer="0123456789abcdef"),
        "vocab_size": lambda: own_study(data, vocab_size=281),
    }[where]()
    if where == "no text":
        monkeypatch.delenv("DATA_DIR")
    if where == "no folder":
        monkeypatch.setenv("DATA_DIR", str(tmp_path / "nowhere"))
    message = {
        "d6_public": "a6d7c5d3eefb.*, which anyone can make .*--data-dir",
        "private": "b02ca4613600.*, which is not published, while anyone can make that of d6_public .*--data-dir",
        "no key": "unknown",
        "no text": r"text \(\w+\), and this is none",  # Nobody is asked to make the text of one's own sweep.
        "no folder": "nowhere is not there",
        "vocab_size": "281",
    }.get(where, "012345")
    with pytest.raises(UserError, match=message):
        sweep.main([again, *argv])
    assert len(trained) == 1


def test_the_file_of_a_sweep_is_trained_again_under_its_name(own_study):
    assert sweep.parse_args([own_study("text (0123456789ab)")]).name == "mine"


def test_again_finds_the_run_of_a_users_method_and_needs_its_file(own_study, tmp_path, monkeypatch):
    """An edited recipe is another run, which does not train under the name of the first one."""
    file, known = tmp_path / "mine.py", dict(methods.REGISTERED)

    def runs(rounding: str, argv) -> list[sweep_runs.Run]:
        file.write_text(MINE.format(rounding))
        monkeypatch.setattr(methods, "REGISTERED", dict(known))
        return sweep.planned(sweep.parse_args([*argv, f"--recipes={file}"]), "data")

    first = runs("rtn", "--methods=method_of_a_file --sizes=tiny --seeds=1 --tokens=1024".split())
    again = [own_study("text (0123456789ab)", method=first[0].method, flags=first[0].flags)]
    assert runs("rtn", again) == first and runs("sr", again)[0].tag != first[0].tag
    monkeypatch.setattr(methods, "REGISTERED", known)
    with pytest.raises(UserError, match="mine.json: unknown method 'method_of_a_file'; give its file with --recipes"):
        sweep.parse_args(again)


def test_a_study_without_the_run_that_others_branch_from_is_refused():
    lost = {"method": "clover", "size": "d6", "seed": 1, "flags": ["--branch-from=d6_bf16_s1_0123abcd@244"]}
    with pytest.raises(UserError, match="d6_bf16_s1"):
        sweep_runs.again([lost], "text")


def test_a_plan_is_whole_seeds_with_equal_flags_but_for_method_and_seed():
    sizes = ["d6", "llama-30M"]
    runs = sweep_runs.plan(["bf16", "clover"], sizes, [1, 2], tokens=10_000_000, vary_data=True)
    assert [(r.seed, r.size, r.method) for r in runs] == [
        (s, size, m) for s in (1, 2) for size in ("d6", "llama-30M") for m in ("bf16", "clover")
    ]
    by_size = {}
    for r in runs:
        own = {f"--method={r.method}", f"--seed={r.seed}", f"--data-seed={r.seed}"}
        assert own <= set(r.flags) and base_train.parse_args(list(r.flags)).data_seed == r.seed
        by_size.setdefault(r.size, set()).add(tuple(f for f in r.flags if f not in own))
    assert all(len(flags) == 1 for flags in by_size.values())
    # Tokens are turned into whole steps of each size's own batch.
    assert "--num-iterations=152" in runs[0].flags and "--num-iterations=38" in runs[2].flags
    assert len({r.tag for r in runs}) == len(runs)


@pytest.mark.parametrize("options, every", [
    (dict(tokens=585 * 512, bf16_until=0.5), 58), (dict(tokens=5 * 512), 1), (dict(ratio=20), 250),
    (dict(tokens=585 * 512, extra=["--eval-every=50"]), 50),
], ids=str)  # fmt: skip
def test_runs_are_evaluated_at_each_tenth_of_their_steps(options, every, tmp_path):
    sweep = sweep_scheduler.Sweep(tmp_path, str(tmp_path), ["cpu"])
    for run in sweep_runs.plan(["clover"], ["tiny"], [1], **options):
        assert base_train.parse_args(sweep.arguments(run)).eval_every == every


def test_runs_branch_from_the_bf16_run_of_their_seed():
    names = ["clover", "bf16", "clover_late_fp8", "clover_up_fp8", "clover_less_decay"]
    runs = sweep_runs.plan(names, ["tiny"], [1, 2], tokens=5 * 512, bf16_until=0.5)
    assert [r.method for r in runs] == 2 * ["bf16", "clover", "clover_late_fp8", "clover_up_fp8", "clover_less_decay"]
    for seed in (1, 2):
        trunk, *others = [r for r in runs if r.seed == seed]
        assert trunk.branch is None and {"--save-every=3", "--keep-last=-1", "--method=bf16"} <= set(trunk.flags)
        assert all(r.branch == (trunk.tag, 3) for r in others)
        for r in others:
            # What follows the branch is the method's own plan.
            own = [f for f in r.flags if not f.startswith("--branch-from=")]
            assert own == list(sweep_runs.plan([r.method], ["tiny"], [seed], tokens=5 * 512)[0].flags)
    with pytest.raises(UserError, match="--bf16-until=0.8: clover_late_fp8"):
        sweep_runs.plan(["clover_late_fp8"], ["tiny"], [1], tokens=5 * 512, bf16_until=0.8)
    for wrong in ({"bf16_until": 1.0, "tokens": 1000}, {"bf16_until": 0.5, "ratio": 8.0}):
        with pytest.raises(UserError, match="--tokens"):
            sweep_runs.plan(["clover"], ["tiny"], [1], **wrong)


def test_methods_that_compute_the_same_for_a_while_share_that_part():
    names = ["bf16", "clover", "clover_late", "clover_late_fp8", "clover_up_fp8", "nvidia", "clover_less_decay"]
    mixed = "late_up: --method=clover --layer-methods=*.mlp.c_proj=clover --method-phases=0.6=clover_fp8_forward"
    runs = {r.method: r for r in sweep_runs.plan([*names, mixed], ["tiny"], [1], tokens=10 * 512, share_until=[0.55])}
    trunk = runs["clover"]
    assert trunk.branch is None and {"--save-at=6", "--keep-last=-1"} <= set(trunk.flags)
    for name in ("clover_late", "clover_late_fp8", "late_up"):  # clover's until 0.7, 0.7 and 0.6
        assert runs[name].branch == (trunk.tag, 6), name
    for name in ("bf16", "clover_up_fp8", "nvidia", "clover_less_decay"):  # another method or layer from the start
        assert runs[name].branch is None and "--save-at=6" not in runs[name].flags, name
    several = [mixed.replace("late_up", "other").replace("0.6=", "0.8="), *names]  # parts at 0.8 from clover itself
    runs = {r.method: r for r in sweep_runs.plan(several, ["tiny"], [1], tokens=10 * 512, share_until=[0.55, 0.75])}
    assert "--save-at=6,8" in runs["other"].flags and runs["clover"].branch == (runs["other"].tag, 8)
    assert runs["clover_late"].branch == (runs["other"].tag, 6)
    # 0.97 of ten steps are ten: nothing would be left to train; and the others part before 0.8.
    for pair, until in (
        (["clover", "ends: --method=clover --method-phases=0.97=bf16"], 0.97),
        (["clover", "clover_late"], 0.8),
    ):
        ends = sweep_runs.plan(pair, ["tiny"], [1], tokens=10 * 512, share_until=[until])
        assert [r.branch for r in ends] == [None, None]
    for wrong in ({"share_until": [1.5], "tokens": 1000}, {"share_until": [0.5], "ratio": 8.0}):
        with pytest.raises(UserError, match="--share-until=.*--tokens"):
            sweep_runs.plan(["clover"], ["tiny"], [1], **wrong)
    with pytest.raises(UserError, match="exclude each other"):
        sweep_runs.plan(["clover"], ["tiny"], [1], tokens=1000, share_until=[0.5], bf16_until=0.5)


def test_labels_that_compute_the_same_have_one_key():
    def key(label):
        return sweep_runs.computed(label, sweep_runs.method_flags(label))

    alike = key("clover"), key("quartet2"), key("again: --method=clover --weight-decay=0.1")
    assert len({*alike}) == 1 and key("clover_up_fp8") == "clover_up_fp8"  # layers of several methods
    assert len({alike[0], *map(key, ("bf16", "nvidia", "clover_late", "clover_late_fp8"))}) == 5


def test_the_tag_changes_with_any_flag():
    assert [sweep_runs.parse_number(text) for text in ("100M", "1.5k", "2B", "7")] == [10**8, 1500, 2 * 10**9, 7]

    def tag(**kw):
        return sweep_runs.plan(["clover"], ["tiny"], [1], **{"tokens": 1000, **kw})[0].tag

    assert tag() == tag()
    others = tag(tokens=2000), tag(extra=["--matrix-lr=0.1"]), tag(tokens=0, ratio=20.0), tag(data="other")
    assert len({tag(), *others}) == 5


FUNCTIONS = """import nanochat_fp4 as nf
def integers(bits):
    def quantize(x, rounding, noise):
        return nf.NVFP4Tensor((x * 2**bits).round(), x.new_ones(len(x), 1), x.new_full((), 2.0**-bits))
    return nf.Rounding(quantize=quantize)

for bits in (2, 8):
    nf.ROUNDINGS[f"int{bits}"] = integers(bits)
    nf.register(nf.Recipe(f"m_int{bits}", output=nf.Gemm(nf.Operand(f"int{bits}"), nf.Operand())))
"""


def test_functions_of_a_users_file_are_what_they_compute(tmp_path, monkeypatch):
    """A changed function is another run, and two functions of one name share no part of a run."""
    monkeypatch.setattr(nf.ROUNDINGS, "data", rows := dict(nf.ROUNDINGS))
    file, known = tmp_path / "mine.py", dict(methods.REGISTERED)
    until = ["--share-until=0.5", f"--recipes={file}"]

    def planned(text):
        file.write_text(text)
        monkeypatch.setattr(methods, "REGISTERED", dict(known))
        nf.ROUNDINGS.data = dict(rows)
        argv = "--methods=m_int2,m_int8,bf16 --sizes=tiny --seeds=1 --tokens=5120".split()
        return sweep.planned(sweep.parse_args([*argv, *until]), "data")

    first, again, other = planned(FUNCTIONS), planned(FUNCTIONS), planned(FUNCTIONS.replace("round()", "floor()"))
    assert first == again and [a.tag == b.tag for a, b in zip(first, other)] == [False, False, True]
    assert not any(run.branch for run in first)
    keys = [sweep_runs.computed("", [f"--method=m_int{bits}"]) for bits in (2, 8)]
    assert len({*keys}) == 2


def test_stored_keys_of_the_repositorys_functions_stay():
    """They were stored when functions had their names alone."""
    assert sweep_runs.computed("", ["--method=mxfp8"]) == "3de05f5a4658"


MINE = """import nanochat_fp4 as nf
nf.register(nf.Recipe("method_of_a_file", output=nf.Gemm(nf.Operand("{}"), nf.Operand("rtn"))))
"""


@pytest.mark.parametrize("by_variable", [True, False])
def test_a_method_of_a_users_file_is_planned_and_trained(tmp_path, monkeypatch, trained, by_variable):
    """Beside those of lab/recipes.py. The file is edited, and the run with the new recipe is another one."""
    file, known = tmp_path / "mine.py", dict(methods.REGISTERED)
    monkeypatch.chdir(tmp_path)  # The processes of a sweep start in another folder.
    argv = "--methods=method_of_a_file,clover_search --sizes=tiny --seeds=1 --tokens=1024".split()
    if by_variable:
        monkeypatch.setenv("RECIPES", "mine.py")
    else:
        argv.append("--recipes=mine.py")

    def planned(rounding):
        file.write_text(MINE.format(rounding))
        monkeypatch.setattr(methods, "REGISTERED", dict(known))
        args = sweep.parse_args(argv)
        return args, sweep.planned(args, "data")

    (args, first), (_, again), (_, other) = planned("rtn"), planned("rtn"), planned("sr")
    assert first == again and [a.tag == b.tag for a, b in zip(first, other)] == [False, True]
    s = dataclasses.replace(trained[0], recipes=args.recipes)
    monkeypatch.setattr(methods, "REGISTERED", dict(known))
    file.write_text(MINE.format("rtn"))
    s.train(first)
    assert trained[1] == [run.tag for run in first]
    (given,) = [flag for flag in s.arguments(first[0]) if flag.startswith("--recipes=")]
    assert given == f"--recipes={sweep_scheduler.ROOT / 'lab/recipes.py'},{file}"


def test_a_plan_makes_nothing(tmp_path, capsys):
    args = f"--sizes=tiny --seeds=1 --tokens=4096 --plan --folder={tmp_path / 'runs'}"  # and downloads no text
    sweep.main([*args.split(), "--methods=bf16,clover"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tiny ")]
    assert [line.split(",")[0] for line in lines] == ["tiny bf16", "tiny clover"] and "--method=clover" in lines[1]
    with pytest.raises(SystemExit):
        sweep.main([*args.split(), "--methods=bf16", "--variant=x: --num-iteration=9"])
    message = "error: unrecognized arguments: --num-iteration=9; did you mean --num-iterations? (see "
    assert capsys.readouterr().err.startswith(message)  # now, and not when its turn comes, hours later
    assert not (tmp_path / "runs").exists()  # no tokenizer either, which takes minutes


def test_a_tokenizer_of_another_size_is_not_taken(tmp_path, monkeypatch):
    """Runs of 1,024 tokens, in a base directory whose tokenizer has 8,192, would have had those without a word."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("".join(f"Document {i} of {i * i}.\n\n" for i in range(500)))
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    tok_train.main(["--vocab-size=280", f"--data-dir={tmp_path / 'text'}"])

    def tokens(folder: str, vocab_size: int) -> int:
        sweep.prepare(tmp_path / folder, str(tmp_path / "text"), vocab_size)
        return sweep.tokens_of(tmp_path / folder)

    assert [tokens("any", 0), tokens("same", 280), tokens("other", 290), tokens("other", 290)] == [280, 280, 290, 290]
    assert (tmp_path / "same/tokenizer/tokenizer.json").read_bytes() == (
        tmp_path / "base/tokenizer/tokenizer.json"
    ).read_bytes()
    with pytest.raises(UserError, match="290 tokens.*--folder"):
        tokens("other", 280)
    (tmp_path / "text" / "b.txt").write_text("Another document, longer than the first.\n\n" * 500)
    stored = len(list((tmp_path / "base/stored_text").rglob("*.arrow")))
    tokens("other", 290)  # A text that is new is stored once, and not in the base directory as well.
    assert len(list((tmp_path / "base/stored_text").rglob("*.arrow"))) == stored
    assert list((tmp_path / "other/stored_text").rglob("*.arrow"))


def test_a_tiny_sweep_downloads_no_text(tmp_path, monkeypatch):
    """Where there is none, it makes one in its own folder, which is no base training's default."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.delenv("DATA_DIR", raising=False)
    monkeypatch.setattr(sweep, "EMBEDDED_MB", 0.2)
    monkeypatch.setattr(dataset, "download_shards", lambda *args: pytest.fail("a download"))
    trained: list[str] = []
    monkeypatch.setattr(sweep, "run_sweep", lambda made, *args: trained.append(made.data_dir))
    sweep.main([*"--sizes=tiny --methods=bf16 --tokens=4096 --vocab-size=300".split(), f"--folder={tmp_path / 's'}"])
    assert Path(trained[0]).parent == tmp_path / "s/embedded_data" and not dataset.found_data()


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--tokens=many", "'many' .*100M"),
        ("--tokens=1M --sizes=d0", "'d0'; use d<depth>, llama-30M"),
        ("--tokens=1M --sizes=llama-7B", "--llama='7B' .*30M"),
        ("--tokens=1M --methods=cloover", r"'cloover'; did you mean clover\? .*RECIPES=FILE.py"),
        ("--tokens=1M --methods=clover_late_bf61", "did you mean clover_late_bf16"),
        ("--tokens=1M --methods=xyz", "'xyz'; use one of bf16, .*RECIPES=FILE.py"),
        ("--tokens=1M --methods=bf16,bf16", "bf16 twice"),
        ("--tokens=1M --variant=': --method=bf16'", "a label"),
        ("--tokens=1M --variant='x: --method=foo'", "--variant 'x': .*unknown method 'foo'"),
        (
            "--tokens=1M --variant='x: --layer-methods=foo'",
            "--variant 'x': layers: 'foo' .*pattern=method",
        ),
        # What --bf16-until would not have seen, and a number of steps of another batch.
        (
            "--tokens=1M --variant='x: --method-phases 0.5=bf16'",
            "--variant 'x': '0.5=bf16' stands apart",
        ),
        ("--tokens=1M --extra='--total-batch-size 1024'", "--extra: '1024' stands apart"),
        ("--tokens=1M --name=a/b", "--name=a/b: .* a file without /"),
        ("--tokens=1M --keep=bf61", "--keep: 'bf61' .*use one of b"),
        ("--tokens=1M --folder=/dev/null/x", "--folder=/dev/null/x "),
        ("", "--tokens=100M or --ratio=20"),
        ("--ratio=-1", "--tokens=100M or --ratio=20"),
        ("--tokens=1 --ratio=1", "--tokens=100M or --ratio=20"),
        ("--tokens=4096 --bf16-until=0.9", "=0.9 .*8 steps"),
        ("--tokens=1M --sizes=", "--sizes, --methods, --seeds and --jobs"),
    ],
)
def test_bad_input_is_one_line(tiny_base, argv, message):
    with pytest.raises(UserError, match=message) as e:
        sweep.main(["--sizes=tiny", "--methods=bf16", *shlex.split(argv)])
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("variant", sweep_runs.VARIANTS)
def test_every_variant_is_a_plan_of_base_train(variant):
    """Flags that it knows, methods that exist, and patterns that meet layers of both families."""
    args = base_train.parse_args(list(sweep_runs.method_flags(variant)))
    nf.get_recipe(args.method)
    plan = MethodPlan.parse(args.method, args.layer_methods, args.method_phases)
    changed = plan.layers or plan.phases or args.matrix_lr != 0.02 or args.weight_decay != 0.2
    changed = changed or args.separate_qkv or args.head not in (None, default_head(args.method))
    assert changed, "as its method alone"


# ----------------------------------------------------------------------------------------------------------------------
# Running


def write_metrics(folder, tag, steps=2, bpb=1.5, complete=True):
    path = folder / "base_checkpoints" / tag
    (path / "step_000002").mkdir(parents=True, exist_ok=True)
    (path / "step_000002/model_000002.pt").write_text("weights")
    records = [
        {"event": "start", "step": 0, "num_iterations": steps, "total_batch_size": 512, "num_params": 7,
         "backend": "b", "environment": {}, "gemm_work": {"4": 1.0}, "tokenizer": "a", "val_text": "b"},
        {"event": "val", "step": 0, "bpb": 3.0, "bpb_bf16": 3.0, "tokens": 64},
        {"event": "train", "step": 0, "loss": 4.0, "dt": 1.0},
    ]  # fmt: skip
    if complete:
        records.append({"event": "val", "step": steps, "bpb": bpb, "bpb_bf16": bpb - 0.1, "tokens": 64})
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """(a sweep on the CPU, tags in the order of their training); base_train writes metrics and nothing else."""
    order = []

    def main(argv):
        args = base_train.parse_args(argv)
        nf.get_recipe(args.method)
        assert os.environ["NANOCHAT_BASE_DIR"] == str(tmp_path) and args.resume_from_step == "latest"
        order.append(args.model_tag)
        if args.method == "nvidia":
            raise UserError("out of luck; try again")
        if args.method == "tetrajet_v2":
            raise SystemExit(143)
        write_metrics(tmp_path, args.model_tag, complete=args.method != "four_over_six")

    monkeypatch.setattr(base_train, "main", main)
    return sweep_scheduler.Sweep(tmp_path, "data", ["cpu"], keep=("bf16",)), order


def test_what_is_done_is_skipped_and_checkpoints_go(trained, capsys):
    s, order = trained
    runs = sweep_runs.plan(["bf16", "clover"], ["tiny"], [1, 2], tokens=1024)
    results = sweep.run_sweep(s, "name", runs)
    assert order == [r.tag for r in runs] and len(results) == 4
    said = capsys.readouterr().out.splitlines()
    assert any("4 of 4 runs done" in line for line in said)
    left = [line.endswith("if all take as long as bf16") for line in said if " runs done" in line]
    assert left == [True, False, False, False]  # Before clover's first run nobody knows its time.
    ranked = [line for line in said if "nothing is ranked" in line]
    assert len(ranked) == 2 and all("evaluated on 64 tokens: clover" in line for line in ranked)  # after runs 2 and 3
    assert results[0]["curve"] == [[0, 3.0, 3.0], [2, 1.5, 1.4]] and results[0]["tokens"] == 1024
    assert [r["computed"] for r in results[:2]] == [
        sweep_runs.computed("", [f"--method={m}"]) for m in ("bf16", "clover")
    ]
    kept = [(s.folder / "base_checkpoints" / r.tag / "step_000002/model_000002.pt").exists() for r in runs]
    assert kept == [True, False, True, False]  # keep: bf16
    order.clear()
    sweep.run_sweep(s, "name", runs)
    assert order == []
    for run in runs[1], runs[3]:  # as with a variant's --num-iterations
        s.result_path(run).write_text(json.dumps(s.result(run) | {"steps": 3000}))
    note = "tiny: of other lengths than bf16's 2 steps, compared with it at their ends: clover 3,000"
    assert note in sweep.report(s, "name", runs)[1]
    whole = s.result(runs[2])
    for damaged in (
        '{"cut sho',  # as a full disk would leave it
        *("null", json.dumps(whole | {"val_bpb": None}), "[" * 10**5),
        json.dumps({name: value for name, value in whole.items() if name != "tokens"}),
        json.dumps(whole | {"method": "clover"}),  # would be clover's row
    ):
        s.result_path(runs[2]).write_text(damaged)
        order.clear()
        sweep.run_sweep(s, "name", runs)
        assert order == [runs[2].tag]
    content = json.loads((s.folder / "name.json").read_text())
    assert content["done"] == 4 and content["gaps"]["tiny clover"]["n"] == 2
    assert (s.folder / "name.md").read_text().startswith("| size | method |")
    assert kept_runs.stored(str(s.folder / "name.json"))["results"] == content["results"]
    assert len((s.folder / "name.json").read_text().splitlines()) < 20  # a line for each run


def test_means_are_of_the_seeds_that_all_methods_have():
    """Else a method whose harder seeds have not run yet would look better than one that has run them all."""
    bf16 = [result("bf16", 1, 1.0), result("bf16", 2, 2.0)]
    _, rows = summary([*bf16, result("clover", 1, 1.1)], ["bf16", "clover"], ["tiny"])
    assert [row[2:5] for row in rows] == [[2, "1.0000 (seed 1)", "-"], [1, "1.1000", "+10.00"]]
    _, rows = summary([*bf16, result("clover", 3, 1.1)], ["bf16", "clover", "nvidia"], ["tiny"])
    assert [row[2:5] for row in rows] == [[2, "-", "-"], [1, "-", "-"]]


@pytest.mark.parametrize(("methods", "status"), [("bf16,clover", 0), ("bf16,tetrajet_v2", 143)])
def test_a_sweep_ends_with_the_path_that_results_takes(trained, tiny_base, monkeypatch, capsys, methods, status):
    """Also when it is stopped; what is true of all runs is said once."""
    s, _ = trained
    monkeypatch.setattr(sweep, "prepare", lambda folder, *args: str(tiny_base))
    monkeypatch.setattr(sweep, "visible_devices", lambda jobs: ["cpu"])
    argv = f"--name=mine --methods={methods} --sizes=tiny --seeds=2 --tokens=1024 --folder={s.folder}"
    with pytest.raises(SystemExit) if status else contextlib.nullcontext() as stopped:
        sweep.main(argv.split())
    assert not status or stopped.value.code == status
    said = capsys.readouterr().out
    path = said.strip().splitlines()[-1].rpartition("--results ")[2]
    assert {r["method"] for r in kept_runs.stored(path)["results"]} == set(methods.split(",")) - {"tetrajet_v2"}
    assert said.count("differs from the paper's runs") == said.count("val BPB: ") == (status == 0)
    count = len([line for line in said.splitlines() if line.startswith("tiny  bf16")])
    assert count == (4 if status == 0 else 1), said  # The table stands once after each run.


def test_the_results_take_other_forwards_of_the_same_text_from_the_forwards_file(trained):
    s, _ = trained
    runs = sweep_runs.plan(["bf16", "clover", "clover_late", "clover_search"], ["tiny"], [1], tokens=1024)
    sweep.run_sweep(s, "name", runs)
    (s.folder / "forwards").mkdir()
    for run, tokens in zip(runs, (64, 64, 64, 32)):
        record = {"tag": run.tag, "eval_tokens": tokens, "bpb": {"clover": 1.7, "bf16": 1.4}}
        (s.folder / "forwards" / f"{run.tag}.json").write_text(json.dumps(record))
    text = "\n".join(sweep.report(s, "name", runs)[1])
    results = json.loads((s.folder / "name.json").read_text())["results"]
    bpb = {"clover": 1.7, "bf16": 1.4}
    assert [r.get("forwards") for r in results] == [bpb, bpb, bpb, None]
    assert "64 tokens" in text and "--eval-tokens=64" in text


def test_damaged_runs_are_refused_by_what_is_wrong_with_them(tmp_path):
    run = result("clover", 1, 1.0) | {"flags": [], "steps": 8, "tokens": 4096, "gemm_work": {"4": 1.0}}
    whole = {"results": [run], "environment": {"gpu": None, "gpu_count": 0, "torch": "2"}, "data": "x"}
    path, no_file = tmp_path / "d6.json", "d6.json is not a file of lab.study.sweep .*"
    path.write_text(json.dumps(whole))
    assert kept_runs.stored(str(path)) == whole
    for change, problem in (
        ({"results": [run | {"val_bpb": math.nan}]}, f"{no_file}val_bpb is nan, expected a positive number"),
        ({"results": [run | {"steps": 0}]}, f"{no_file}steps is 0, expected a positive"),
        ({"environment": {"gpu": None}}, f"{no_file}KeyError: 'gpu_count'.*; give <folder>/<name>.json"),
        ({"results": [run, run | {"val_bpb": 2.0}]}, "d6.json has clover of size tiny and seed 1 twice"),
        ({"results": []}, "holds no results"),
        ({"results": 3}, no_file),
    ):
        path.write_text(json.dumps(whole | change))
        with pytest.raises(UserError, match=problem):
            kept_runs.stored(str(path))
    for text in ("", "[]", "[" * 10**5):
        path.write_text(text)
        with pytest.raises(UserError, match=no_file):
            kept_runs.stored(str(path))
    with pytest.raises(UserError, match="nothing.json is not there; give <folder>/<name>.json of a sweep, or a study"):
        kept_runs.stored(str(tmp_path / "nothing.json"))
    with pytest.raises(UserError, match=r"is not a file of lab.study.sweep \(Is a directory\); give"):
        kept_runs.stored(f"{tmp_path}/")


def test_failures_are_named_and_do_not_stop_the_others(trained):
    s, order = trained
    runs = sweep_runs.plan(["nvidia", "four_over_six", "bf16"], ["tiny"], [1], tokens=1024)
    problem = r"2 of 3 runs failed: tiny_nvidia.*out of luck.*four_over_six.*ended early"
    with pytest.raises(UserError, match=problem) as e:
        sweep.run_sweep(s, "name", runs)
    assert "\n" not in str(e.value) and len(order) == 3 and "run again" not in str(e.value)
    assert s.result(runs[2]) and not s.result(runs[0])


def test_the_checkpoints_of_a_trunk_stay_until_its_branches_are_done(trained):
    s, order = trained
    s.keep = ()

    def plan(*methods):
        return sweep_runs.plan(methods, ["tiny"], [1], tokens=1024, bf16_until=0.5)

    runs = plan("nvidia", "clover")
    weights = s.folder / "base_checkpoints" / runs[0].tag / "step_000002/model_000002.pt"
    with pytest.raises(UserError, match="1 of 3 runs failed: tiny_nvidia"):
        s.train(runs)
    assert order == [r.tag for r in runs] and weights.exists()
    s.train(plan("clover"))
    assert not weights.exists()
    # One more method: the trunk is trained again, its checkpoint being gone.
    order.clear()
    more = plan("clover", "clover_search")
    s.train(more)
    assert order == [more[0].tag, more[2].tag]


def test_a_signal_stops_the_sweep_with_its_status(trained, capsys):
    s, order = trained
    with pytest.raises(sweep_scheduler.Interrupted) as e:
        sweep.run_sweep(s, "name", sweep_runs.plan(["tetrajet_v2", "bf16"], ["tiny"], [1], tokens=1024))
    assert len(order) == 1 and e.value.args == (143,)
    with pytest.raises(SystemExit) as stopped:
        sweep.stopped(e.value)
    assert stopped.value.code == 143 and "same command again" in capsys.readouterr().out


@pytest.fixture
def processes(monkeypatch, tmp_path):
    """A sweep over two devices whose processes are these few lines instead of base_train."""
    code = (
        "import json, os, pathlib, signal, sys, time\n"
        "tag = next(a for a in sys.argv if a.startswith('--model-tag=')).partition('=')[2]\n"
        "folder = pathlib.Path(os.environ['NANOCHAT_BASE_DIR'])\n"
        "log = folder / 'order.jsonl'\n"
        "def note(what): open(log, 'a').write(json.dumps([what, tag, os.environ['CUDA_VISIBLE_DEVICES']]) + '\\n')\n"
        "def stop(*a):\n"
        "    note('stopped')\n"
        "    if 'deaf' not in tag: sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "note('start')\n"
        # Whatever is not to be stopped ends as soon as two are at work.
        "def go_on(): return 'clover' in tag or log.read_text().count('start') < 2\n"
        "deadline = time.monotonic() + 100\n"
        "while time.monotonic() < deadline and go_on(): time.sleep(0.02)\n"
        "note('end')\n"
        "sys.exit('boom' if 'nvidia' in tag else 0)\n"
    )
    popen = subprocess.Popen

    def start(command, **kw):
        assert command[1:3] == ["-m", "scripts.base_train"] and "--device-type=cuda" in command
        return popen([sys.executable, "-c", code, *command[3:]], **kw)

    monkeypatch.setattr(sweep_scheduler.subprocess, "Popen", start)
    s = sweep_scheduler.Sweep(tmp_path, "data", ["3", "5"])

    def order():
        """What is written in whole lines."""
        path = tmp_path / "order.jsonl"
        return [json.loads(x) for x in path.read_text().splitlines(True) if x.endswith("\n")] if path.exists() else []

    return s, order


def test_two_devices_work_at_the_same_time_and_one_after_another(processes):
    s, order = processes
    runs = sweep_runs.plan(["bf16", "fp8", "nvidia", "chmiel"], ["tiny"], [1], tokens=1024)
    for r in runs:
        write_metrics(s.folder, r.tag, complete=r.method != "nvidia")
    with pytest.raises(UserError, match="1 of 4 runs failed: tiny_nvidia_s1_.*status 1: boom"):
        s.train(runs)
    seen = order()
    assert [e[0] for e in seen[:2]] == ["start", "start"] and {e[2] for e in seen[:2]} == {"3", "5"}
    assert sorted(e[1] for e in seen if e[0] == "end") == sorted(r.tag for r in runs)
    assert len(s.results(runs)) == 3


def test_branches_wait_for_their_trunk_and_what_needs_none_goes_first(processes):
    s, order = processes
    runs = sweep_runs.plan(["fp8"], ["tiny"], [1, 2], tokens=1024, bf16_until=0.5)
    for r in runs:
        write_metrics(s.folder, r.tag)
    s.train(runs)
    seen = order()
    assert {x[1] for x in seen[:2]} == {runs[0].tag, runs[2].tag}  # two trunks at the same time
    events = [tuple(x[:2]) for x in seen]
    for trunk, branch in (runs[:2], runs[2:]):
        assert events.index(("end", trunk.tag)) < events.index(("start", branch.tag))


@contextlib.contextmanager
def signals_when(condition, times: int = 1, number: int = signal.SIGTERM):
    """A signal to this process once condition() holds, and again each half second, from a thread that ends with the
    block. A signal that comes when the sweep is over is ignored: its default action would end all tests of a worker."""
    over, before = threading.Event(), signal.signal(number, lambda number, frame: None)

    def send():
        while not condition():
            if over.wait(0.05):
                return
        for _ in range(times):
            os.kill(os.getpid(), number)
            if over.wait(0.5):
                return

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(number, before)


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_reaches_every_process_and_nothing_new_is_started(processes, number, status):
    s, order = processes
    runs = sweep_runs.plan(["clover", "clover_search", "bf16"], ["tiny"], [1], tokens=1024)
    with signals_when(lambda: len(order()) == 2, number=number):
        before = signal.getsignal(number)
        with pytest.raises(sweep_scheduler.Interrupted) as e:
            s.train(runs)
        assert e.value.args == (status,) and signal.getsignal(number) is before
    assert sorted(x[0] for x in order()) == ["start", "start", "stopped", "stopped"]


def test_a_second_signal_kills_what_does_not_stop(processes):
    s, order = processes
    runs = sweep_runs.plan(["clover_deaf: --method=clover"], ["tiny"], [1], tokens=1024)
    with signals_when(lambda: len(order()) == 1, times=2), pytest.raises(sweep_scheduler.Interrupted):
        s.train(runs)
    assert {x[0] for x in order()} == {"start", "stopped"}  # not "end": its 100 seconds were not waited for
