"""The report from whole, partial and damaged data."""

import math
import os
import re
import shlex
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import nanochat_fp4 as nf
from nanochat_fp4.cli import UserError
from nanochat_fp4.evaluation import plots, report
from nanochat_fp4.evaluation.metrics import MetricsLog
from nanochat_fp4.evaluation.report import get_report
from nanochat_fp4.nvfp4.dispatch import fp8_products
from scripts import export

LATER = ("mid_checkpoints", "chatsft_checkpoints", "chatrl_checkpoints")


@pytest.fixture
def folder(base_dir):
    return base_dir / "report"


def log_of(base_dir: Path, tag: str, stage: str = "base_checkpoints") -> MetricsLog:
    return MetricsLog(base_dir / stage / tag)


def make_run(base_dir: Path, tag: str, method: str, bpb: float, steps: int = 24, done: int | None = None, **changes):
    """What the stages of a run leave behind, with base_loss on 9,000 tokens where `done` is not less than `steps`.

    changes: of the record of the start, or with the prefix loss_ of the loss stage
    """
    log, done = log_of(base_dir, tag), steps if done is None else done
    start = {"num_iterations": steps, "total_batch_size": 1000, "num_params": 100, "config_key": "k", "tokenizer": "T"}
    start |= {"val_text": "text 1", "method": method, "backend": "reference, decode", "gemm_work": {"4": 0.0}}
    log.append("start", 0, **start | {k: v for k, v in changes.items() if not k.startswith("loss_")})
    log.append("val", 0, bpb=3.375, bpb_bf16=3.375, tokens=500)
    for step in range(done):
        log.append("train", step, smoothed_loss=5 - step / 10, tokens=1000, dt=0.5)
    log.append("val", done, bpb=bpb + 0.01, bpb_bf16=bpb + 0.02, tokens=500)
    for stage in LATER:
        later = log_of(base_dir, tag, stage)
        later.append("start", 0, num_iterations=24)
        later.append("val", 0, loss=2.5)
        for step in range(24):
            later.append("train", step, smoothed_loss=2.0 - step / 24, reward=step / 24)
        later.append("val", 24, loss=1.5)
    if done == steps:
        loss = {"step": steps, "bpb": bpb, "bpb_bf16": bpb + 0.001 * (method != "bf16"), "tokens": 9000}
        loss |= {"samples": ["One `two`", "Three"], "val_text": "text 1"}
        log.append("base_loss", **loss | {k[5:]: v for k, v in changes.items() if k.startswith("loss_")})


def generated(folder: Path, drawn: bool = False) -> str:
    """report.md; without the plots, which are slow, unless they are to be `drawn`."""
    with pytest.MonkeyPatch.context() as m:
        if not drawn:
            m.setattr(plots, "draw_runs", lambda *_: False)
        path = report.generate(folder)
    assert path == folder / "report.md"
    return path.read_text()


@pytest.fixture
def picture(monkeypatch):
    """The axes of the picture's panels, by the title of their y axis, where it would be drawn."""
    from matplotlib.figure import Figure

    drawn = {}

    def draw(path, title, *panels):
        for panel, axes in zip(panels, Figure().subplots(len(panels), squeeze=False)[:, 0]):
            panel(axes)
            drawn[axes.get_ylabel().split("\n")[0]] = axes
        return True

    monkeypatch.setattr(plots, "draw", draw)
    return drawn


WHOLE, GAP, FORWARDS, LOSS = (label.split("\n")[0] for label in plots.PANELS.values())


def lines_of(axes):
    """(label without the steps, *values) of each line of a panel"""
    return [(line.get_label().split(",")[0], *line.get_ydata()) for line in axes.get_lines()]


def row_of(text: str, start: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_whole_report(base_dir, folder):
    get_report().log("Tokenizer training", [{"vocab_size": 4096, "Layers": ["one", "two"]}, None, "free text"])
    make_run(base_dir, "d4_bf16", "bf16", 1.25)
    recipes = {"clover": {"output": "four_over_six x -", "grad_input": "e5m2 x -", "grad_weight": "- x -"}}
    make_run(base_dir, "d4_clover", "clover", 1.275, recipes=recipes)
    text = generated(folder, drawn=True)
    assert row_of(text, "d4_clover") == [
        "d4_clover", "clover", "24", "24,000", "9,000", "1.2750", "1.2760", "+2.00%", "+2.08%", "2,000", "12s",
    ]  # fmt: skip
    assert row_of(text, "d4_bf16")[7:9] == ["baseline", "baseline"]
    assert row_of(text, "clover") == ["clover", "four_over_six x -", "e5m2 x the forward's weight", "high precision"]
    for expected in (
        "(curves.png)", "- `One 'two'`", torch.__version__, "backend (d4_clover): reference",
        "### Tokenizer training", "free text", "- vocab size: 4096", "  - two", "- time of the last call: ",
        "by the clock on the wall",
    ):  # fmt: skip
        assert expected in text
    # What the tables have is read first. A page folds the rest, for which Markdown needs empty lines around the tags.
    before, _, archive = text.partition("\n\n<details><summary>")
    assert "by the clock on the wall" in before and "### " not in before and archive.endswith("\n\n</details>\n")
    picture = folder / "curves.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000


def test_the_first_lines_say_where_the_model_is_and_how_to_chat(base_dir, folder, capsys, monkeypatch):
    for tag, chat in (("d4_clover", True), ("d4_nvidia", False)):
        make_run(base_dir, tag, "clover", 1.275)
        if chat:
            place = base_dir / "chatsft_checkpoints" / tag
            (place / "model_000024.pt").write_bytes(b"")
    make_run(base_dir, "half", "clover", 1.3, done=12)
    text = generated(folder)
    head, said = text.split("| run |")[0], capsys.readouterr().out.split("\n\n")[-1]
    for part in (head, said):
        assert str(place) in part and "chat_web -i sft --model-tag d4_clover" in part
        assert "sft 2.50 -> 1.50 nats per token" in part and "mid 2.50" in part
        assert str(base_dir / "base_checkpoints/d4_nvidia") in part and "--model-tag d4_nvidia" not in part
        assert "half:" not in part and "so far" not in part
        assert f"talk to it: NANOCHAT_BASE_DIR={base_dir} python -m" in part
    usual = base_dir.parent / ".cache/nanochat_fp4"
    usual.parent.mkdir()
    base_dir.rename(usual)
    monkeypatch.setenv("HOME", str(base_dir.parent))
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(usual))
    make_run(usual, "small", "clover", 1.275)
    (usual / "chatrl_checkpoints/small/step_000024").mkdir()
    (usual / "chatrl_checkpoints/small/step_000024/model_000024.pt").write_bytes(b"")
    text = generated(usual / "report")
    assert "talk to it: python -m" in text and "-i rl --model-tag small" in text


@pytest.mark.parametrize("total, progress, said", [(20, 0.7, "14 of 20 steps"), (-1, 0.7, "14 steps"), (-1, 1.0, None)])
def test_a_chat_model_that_is_not_trained_to_its_end_is_said_to_be(base_dir, folder, total, progress, said):
    make_run(base_dir, "d4_clover", "clover", 1.275)
    log = log_of(base_dir, "d4_clover", "mid_checkpoints")
    (log.path.parent / "model_000012.pt").write_bytes(b"")
    log.append("start", 0, num_iterations=total)
    for step in range(14):
        log.append("train", step, smoothed_loss=2.0, progress=progress)
    text = generated(folder)
    assert "-i mid" in text and (f"mid has done {said};" in text if said else "so far" not in text)


def test_runs_of_several_seeds_are_a_line_with_a_band(base_dir, folder, picture):
    """By the pipeline's names and by the sweep's; runs of another length are not among them."""
    for tag in ("d4_clover", "d4_clover_seed43", "tiny_clover_s1_0123abcd", "tiny_clover_s2_89abcdef"):
        make_run(base_dir, tag, "clover", 1.25)
    make_run(base_dir, "tiny_clover_s1_01234567", "clover", 1.25, steps=22)
    generated(folder, drawn=True)
    seeds, alone = ", 2 seeds", ""
    expected = {f"d4_clover, 24 steps{seeds}", f"tiny_clover, 24 steps{seeds}", f"tiny_clover, 22 steps{alone}"}
    assert {line.get_label() for line in picture[LOSS].get_lines()} == expected
    assert len(picture[LOSS].collections) == 2  # the bands


@pytest.mark.parametrize("steps, style", [(9, "None"), (10, "-")])
def test_few_points_are_no_curve(base_dir, folder, picture, steps, style):
    make_run(base_dir, "d4_clover", "clover", 1.25, steps=steps)
    generated(folder, drawn=True)
    assert picture[WHOLE].get_lines()[0].get_linestyle() == "None"  # two validations
    assert picture[LOSS].get_lines()[0].get_linestyle() == style


def test_the_picture_is_of_the_text_of_the_last_run(base_dir, folder, picture):
    make_run(base_dir, "a", "bf16", 1.25)
    make_run(base_dir, "c", "clover", 1.25, val_text="text 2", loss_val_text="text 2")
    make_run(base_dir, "b", "clover", 1.25)
    log = log_of(base_dir, "b")
    log.append("start", 24, method="clover", config_key="k", val_text="text 3", tokenizer="T")  # a resume on other text
    log.append("val", 25, bpb=2.0, bpb_bf16=1.0, tokens=500)
    os.utime(log.path, times=(time.time() + 10,) * 2)  # a clock that ticks slowly gives several files one time
    text = generated(folder, drawn=True)
    # Neither is compared with the baseline, whose text is another one.
    assert lines_of(picture[WHOLE]) == [("b", 2.0)] and GAP not in picture
    assert lines_of(picture[FORWARDS]) == [("b", pytest.approx(100.0))]
    assert "without a, c" in text


def test_the_picture_shows_the_gap_to_the_baseline(base_dir, folder, picture):
    make_run(base_dir, "a", "clover", 1.27)
    make_run(base_dir, "b", "bf16", 1.25)
    make_run(base_dir, "c", "clover", 1.25, config_key="another configuration")
    generated(folder, drawn=True)
    assert lines_of(picture[WHOLE])[0] == ("b", 3.375, 1.26)  # the baseline first, under the others
    assert [name for name, *_ in lines_of(picture[WHOLE])] == ["b", "a", "c"]
    assert lines_of(picture[GAP]) == [("a", 0.0, pytest.approx(100 * (1.28 / 1.26 - 1)))]
    # The difference of both forward passes, in percent of the loss in BF16.
    assert lines_of(picture[FORWARDS])[1] == ("a", 0.0, pytest.approx(100 * (1.28 / 1.29 - 1)))


def test_runs_of_one_tick_of_the_clock_stand_in_the_order_of_their_names(base_dir, folder):
    for tag in "cfadbe":
        make_run(base_dir, tag, "clover", 1.25)
    for path in base_dir.glob("*/*/metrics.jsonl"):
        os.utime(path, (1e9, 1e9))
    text = generated(folder)
    assert sorted(range(6), key=lambda i: text.index(f"| {'abcdef'[i]} |")) == list(range(6))


def test_gap_only_between_finished_runs_of_one_configuration(base_dir, folder):
    make_run(base_dir, "base", "bf16", 1.25)
    make_run(base_dir, "other", "clover", 1.275, config_key="another configuration")
    make_run(base_dir, "half", "clover", 1.275, done=12)
    log_of(base_dir, "unmeasured").append("start", 0, method="clover", config_key="k")
    text = generated(folder)
    assert [row_of(text, tag)[7] for tag in ("other", "half", "unmeasured")] == ["-", "-", "-"]


@pytest.mark.parametrize(
    "of_base, of_run, gap",
    [
        ({}, {}, "+2.00%"),
        ({}, {"loss_val_text": "text 2"}, "-"),
        ({}, {"loss_val_text": None}, "-"),  # measured by an earlier version, which did not say
        ({"loss_val_text": None}, {"loss_val_text": None}, "-"),
        ({}, {"tokenizer": "U"}, "-"),
        ({"text": "one"}, {"text": "another"}, "-"),
        ({}, {"text": "another"}, "+2.00%"),  # The baseline's log is of an earlier version, which did not say.
        ({}, {"loss_tokens": 500}, "-"),
        ({}, {"loss_step": 3}, "-"),  # so training's own validation stands for it, on fewer tokens
    ],
)
def test_no_gap_between_runs_of_different_text_tokenizer_or_tokens(base_dir, folder, of_base, of_run, gap):
    make_run(base_dir, "base", "bf16", 1.25, **of_base)
    make_run(base_dir, "other", "clover", 1.275, **of_run)
    text = generated(folder)
    row = row_of(text, "other")
    assert row[7] == gap and (row[8] == "-") == (gap == "-") == (text.count("no gap of other: base ") == 1)
    differs = {"loss_tokens": "number", "loss_step": "number", "loss_val_text": "validation", "tokenizer": "tokenizer"}
    differs["text"] = "training text"
    assert gap != "-" or all(re.search(f"no gap of other: .*same .*{differs[key]}", text) for key in of_run)
    assert row[4] == ("500" if "loss_tokens" in of_run or "loss_step" in of_run else "9,000")


def test_runs_of_another_text_than_the_newest_stand_in_one_line(base_dir, folder, capsys):
    """Those whose logs do not say are not named."""
    for tag, text in (("one", "old"), ("two", "older"), ("unknown", None), ("three", "new"), ("four", "new")):
        make_run(base_dir, tag, "bf16", 1.25, **({"text": text} if text else {}))
        assert ("another text" in generated(folder)) == (tag in ("two", "unknown", "three", "four"))
    lines = [line for line in capsys.readouterr().out.splitlines() if "another text" in line]
    assert lines[0].endswith(": one") and lines[-1].endswith(": one, two")


@pytest.mark.parametrize(
    "method, config, served",
    [
        ("clover", {}, r"transformers alone.*vLLM \(not run\)"),
        ("bf16", {"llama": ""}, "alone"),
        ("fp8", {"llama": "30M"}, r"vLLM should \(not run\)"),
    ],
)
def test_a_model_that_is_there_can_be_exported(base_dir, folder, capsys, method, config, served):
    """In the report and in a run's last lines: a command that the program takes, and who reads its files."""
    make_run(base_dir, "d4", method, 1.275, config=config)
    assert "scripts.export" not in generated(folder)
    (base_dir / report.FOLDERS["base"] / "d4/model_000024.pt").write_bytes(b"")
    capsys.readouterr()
    for text in (generated(folder), capsys.readouterr().out):
        words = shlex.split(re.search(r"-m scripts\.export (.*)  # .*" + served, text)[1])
        args = export.parse_args(words)
        assert (args.source, args.model_tag, args.format == "safetensors") == ("base", "d4", method == "bf16")


def test_the_scatter_of_a_gap_is_said_below_the_table_on_the_terminal_too(base_dir, folder, capsys):
    make_run(base_dir, "base", "bf16", 1.25)
    for said in (0, 1):
        assert generated(folder).count("of one seed") == capsys.readouterr().out.count("of one seed") == said
        make_run(base_dir, "other", "clover", 1.275)


@pytest.mark.parametrize("params, said", [(100, ""), (1200, ""), (1220, "read 19.7"), (10_000, "read 2.4"), (None, "")])
def test_a_run_that_has_read_too_little_ranks_no_method(base_dir, folder, capsys, params, said):
    """A run reads 24,000 tokens here, and 20 for each parameter are usual."""
    make_run(base_dir, "d4_clover", "clover", 1.275, num_params=params)
    for text in (generated(folder), capsys.readouterr().out):
        assert ("ranks no method: " in text) == bool(said) and said in text
        assert "| d4_clover | clover | 24 |" in text  # also without the number, as in logs of before


def test_the_text_the_conversations_and_the_gap_are_said_once(base_dir, folder):
    own = {"config": {"data_dir": "/texts/novels"}, "text_tokens": 12_345, "val_text_tokens": 678}
    for tag, method in (("d4_clover", "clover"), ("d4_bf16", "bf16")):
        make_run(base_dir, tag, method, 1.275 - 0.025 * (method == "bf16"), **own)
        log_of(base_dir, tag, LATER[0]).append("start", 24, num_iterations=24, sources={"Local-Choice": "2,000 rows"})
        get_report(tag).log("Midtraining", [{}])
    text = generated(folder)
    head = text.partition("```")[0]
    assert "Text: /texts/novels, " in head and "12,345" in head and "678" in head
    assert text.count("/texts/novels") == text.count("Local-Choice: 2,000 rows") == text.count("- gap") == 1


@pytest.mark.parametrize("count, said", [(8, 1), (99, 1), (100, 0), (None, 0)])
def test_so_few_problems_tell_nothing(base_dir, folder, count, said):
    make_run(base_dir, "d4", "clover", 1.275)
    score = {"accuracy": 0.5} | ({"count": count} if count else {})
    log_of(base_dir, "d4", LATER[1]).append("benchmarks", 24, scores={"MMLU": score, "CORE": {"accuracy": 0.5}})
    assert generated(folder).count("tell nothing") == said


@pytest.mark.parametrize("stage, key, last, worse", [(1, "loss", 3.0, 1), (1, "loss", 2.0, 0), (2, "pass@1", 0.1, 1)])
def test_a_stage_that_made_the_model_worse_is_said_to_have(base_dir, folder, stage, key, last, worse):
    make_run(base_dir, "d4", "clover", 1.275)
    log = log_of(base_dir, "d4", LATER[stage])
    log.rewind(None)
    log.append("val", 0, **{key: 2.5})
    log.append("val", 24, **{key: last})
    assert generated(folder).count("worse") == worse


@pytest.mark.parametrize("text", ["own", "base_data"])
@pytest.mark.parametrize("stage", ["base", "sft"])
def test_a_base_model_continues_a_text(base_dir, folder, text, stage):
    """Of the user's own text, of which later stages teach nothing, or where no other model is there."""
    place = base_dir.parent if text == "own" else base_dir
    make_run(base_dir, "d4", "clover", 1.275, config={"data_dir": str(place / text)})
    for kind in {"base", stage}:
        (base_dir / report.FOLDERS[kind] / "d4" / "model_000024.pt").write_bytes(b"")
    text, chats = generated(folder), (base_dir / LATER[1] / "d4/model_000024.pt").exists()
    assert ("chat_cli -i base --model-tag d4 -p" in text) == (place != base_dir or not chats)
    assert ("chat_web -i sft --model-tag d4" in text) == chats
    assert ("your text" in text) == (chats and place != base_dir)


def test_the_scatter_of_a_gap_is_that_of_the_stored_runs():
    """The largest gap of clover less the smallest one, in points, among seeds of one size and text."""
    runs = pq.read_table(Path(__file__).parents[2] / "lab/results/runs.parquet").to_pylist()
    found = re.findall(r"(\w+)(?: seeds lie)? (\d\.\d) (?:points apart )?at (d\d) \((\d+)M", report.SCATTER)
    for (count, apart, size, tokens), studies in zip(found, (("d6_mixed", "d6_fp8_forward"), ("d4_40m",)), strict=True):
        of = {m: {r["seed"]: r for r in runs if r["study"] in studies and r["label"] == m} for m in ("bf16", "clover")}
        gaps = [100 * (run["val_bpb"] / of["bf16"][seed]["val_bpb"] - 1) for seed, run in of["clover"].items()]
        assert len(gaps) == {"nine": 9, "four": 4}[count] and f"{max(gaps) - min(gaps):.1f}" == apart
        same = {(run["size"], round(run["tokens"] / 1e6)) for run in of["clover"].values()}
        assert same == {(size, int(tokens))}


@pytest.mark.parametrize("asked, named", [("a", "a"), ("c", "c"), ("half", "abc"), (None, "abc")])
def test_the_commands_at_the_end_are_of_the_run_that_was_asked_for(base_dir, folder, capsys, asked, named):
    """Whichever was trained last, as the baseline of COMPARE=1 is. Where it is not finished, of those that are."""
    for tag in ("half", *"abc"):
        make_run(base_dir, tag, "clover", 1.275, done=12 if tag == "half" else None)
        get_report(tag).log("Base model training", [{}])
    report.main(["generate", *([f"--model-tag={asked}"] if asked else [])])
    said = capsys.readouterr().out
    for text in (said, (folder / "report.md").read_text()):
        assert sorted(re.findall("^([a-z]+): ", text, re.MULTILINE)) == [*named]
    assert not asked or said.splitlines()[2].startswith(f"| {asked} |")


def test_of_two_baselines_the_finished_one_counts(base_dir, folder):
    make_run(base_dir, "base", "bf16", 1.25)
    make_run(base_dir, "other", "clover", 1.275)
    make_run(base_dir, "base_again", "bf16", 1.3, done=12)
    os.utime(log_of(base_dir, "base_again").path, times=(time.time() + 10,) * 2)
    assert row_of(generated(folder), "other")[7] == "+2.00%"


def test_no_more_validation_text_is_claimed_than_there_is(base_dir, folder):
    """A small text of the user's is read more than once; of shards it is not known."""
    make_run(base_dir, "small", "clover", 1.275, val_text_tokens=6000)
    make_run(base_dir, "other", "clover", 1.275, val_text_tokens=6000, loss_val_text_tokens=9001)
    make_run(base_dir, "shards", "clover", 1.275, val_text_tokens=None)
    text = generated(folder)
    cells = {tag: row_of(text, tag)[4] for tag in ("small", "other", "shards")}
    assert cells == {"small": "6,000, read 1.5 times", "other": "9,000", "shards": "9,000"}


def test_losses_of_the_last_step_and_the_most_text(base_dir, folder):
    make_run(base_dir, "other", "clover", 1.275, loss_step=3)  # of an earlier step than the run's
    assert row_of(generated(folder), "other")[4:7] == ["500", "1.2850", "1.2950"]
    log_of(base_dir, "other").append("base_loss", 24, bpb=1.0, bpb_bf16=1.1, tokens=9000)
    log_of(base_dir, "other").append("other_forward", 24, bpb=9.0, bpb_bf16=1.1, tokens=9000)
    assert row_of(generated(folder), "other")[4:7] == ["9,000", "1.0000", "1.1000"]


def test_interrupted_run_shows_what_it_has(base_dir, folder):
    make_run(base_dir, "d4_clover", "clover", 1.3, done=12)
    with open(base_dir / "base_checkpoints" / "d4_clover" / "metrics.jsonl", "a") as f:
        f.write('{"event": "train", "step": 3, "lo')  # killed while it wrote
    text = generated(folder, drawn=True)
    assert row_of(text, "d4_clover")[2:7] == ["12 of 24, unfinished", "12,000", "500", "1.3100", "1.3200"]
    log_of(base_dir, "validated_once").append("val", 0, bpb=4.0, bpb_bf16=4.0)  # before training, which is no result
    assert row_of(generated(folder), "validated_once")[2:7] == ["-, unfinished", "-", "-", "-", "-"]


def test_a_run_that_starts_over_has_no_number_of_the_one_before(base_dir, folder):
    make_run(base_dir, "d4", "clover", 1.25)
    log_of(base_dir, "d4").append("benchmarks", 24, scores={"CORE": {"accuracy": 0.5}})
    assert "CORE" in generated(folder)
    log_of(base_dir, "d4").rewind(None)  # --overwrite
    make_run(base_dir, "d4", "nvidia", 1.5, steps=8, done=4)
    text = generated(folder)
    assert row_of(text, "d4")[1:6] == ["nvidia", "4 of 8, unfinished", "4,000", "500", "1.5100"] and "CORE" not in text


def test_damaged_files_are_named_and_left_out(base_dir, folder):
    make_run(base_dir, "whole", "clover", 1.3)
    make_run(base_dir, "damaged", "clover", 1.3)
    log_of(base_dir, "damaged").append("base_loss", 24, bpb=1.0, tokens=[])
    log_of(base_dir, "damaged").append("train", "x")
    get_report("whole").log("Chat SFT", [{}])
    get_report("whole").path("Midtraining").write_text('{"section": 1')
    text = generated(folder)
    assert "of damaged cannot be read" in text and "midtraining.json is not readable" in text
    assert row_of(text, "whole") and "### Chat SFT: whole" in text and "| damaged |" not in text


def test_the_total_is_that_of_the_clock_on_the_wall(base_dir, folder, monkeypatch):
    """Of each command from its beginning to the end of its last stage. A stage by itself is a command of its own."""
    strftime = time.strftime
    for began, ended, section in (("1000", 1100, "a"), ("1000", 1150, "b"), ("1940", 2000, "c")):
        with monkeypatch.context() as m:
            m.setenv("NANOCHAT_BEGAN", began)
            m.setattr(time, "strftime", lambda form: strftime(form, time.localtime(ended)))  # noqa: B023
            get_report().log(section, [{}])
    assert "In all 3m30s by the clock" in generated(folder)  # 150 and 60 s


HOPPER = "decode to BF16 + cuBLAS; FP8 products: FP8 tensor cores"


@pytest.mark.parametrize(
    "work, backend, said",
    [({"4": 1}, HOPPER, 1), ({"8": 1}, HOPPER, 0), ({"16": 1}, HOPPER, 0), ({"4": 1}, "FP4 tensor cores", 0)]
    + [({"8": 1}, f"FP8 products: {fp8_products('cpu')}", 1), ({"4": 1}, str(nf.backend()), 1)],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may compute them")
def test_the_speed_of_an_emulation_is_named_as_such(base_dir, folder, capsys, work, backend, said):
    make_run(base_dir, "d4_bf16", "bf16", 1.25)
    make_run(base_dir, "d4", "clover", 1.275, gemm_work=work, backend=backend)
    assert generated(folder).count("emulates") == capsys.readouterr().out.count("emulates") == said


def test_benchmarks_as_in_table_5(base_dir, folder):
    make_run(base_dir, "d4_bf16", "bf16", 1.25)
    sft, mid = (log_of(base_dir, "d4_bf16", stage) for stage in ("chatsft_checkpoints", "mid_checkpoints"))
    sft.append("benchmarks", 12, scores={"Old": {"accuracy": 0.5}})  # of an earlier checkpoint
    sft.append("benchmarks", 24, scores={"ARC-Easy": {"accuracy": 0}, "MMLU": {"accuracy": 0, "text": "0 of 8"}})
    sft.append("benchmarks", 24, scores={"ARC-Easy": {"accuracy": 0.5, "guessing": 0.25}})
    mid.append("benchmarks", 24, scores={"ARC-Easy": {"accuracy": 0.4, "guessing": 0.25}})
    text = generated(folder)
    assert "| run | method | after | val BPB of the base model | ARC-Easy (guessing: 25) | MMLU |" in text
    rows = [line for line in text.splitlines() if line.startswith("| d4_bf16 | bf16 | ")]
    assert rows[1:] == [
        "| d4_bf16 | bf16 | mid | 1.2500 | 40.00% | - |",
        "| d4_bf16 | bf16 | sft | 1.2500 | 50.00% | 0 of 8 |",
    ]  # fmt: skip


def test_values_of_all_kinds(base_dir, folder, capsys, monkeypatch):
    with pytest.raises(UserError, match="speedrun"):
        report.generate(folder)
    odd = {"nan": math.nan, "inf": math.inf, "tensor": torch.tensor(1.5), "path": Path("/x"), "none": None, "n": 10**6}
    get_report().log("Some Section!", [odd, {}, "", None, 3])
    get_report().log("Some Section!", [odd | {"flag": True}])  # a stage that runs again replaces its section
    assert get_report().path("Some Section!").name == "some-section.json"
    text = generated(folder)
    for expected in ("- nan: nan", "- inf: inf", "- tensor: 1.5", "- path: /x", "- n: 1,000,000", "- flag: True"):
        assert text.count(expected) == 1
    (folder / "left_out.txt").write_text("the CORE metric, because no network. To have it: a folder\n")
    monkeypatch.setattr(plots, "draw_runs", lambda *_: False)
    report.main(["generate"])
    assert capsys.readouterr().out.splitlines()[-1] == str(folder / "report.md")
    assert "## Left out\n\n- the CORE metric" in (folder / "report.md").read_text()


def test_other_ranks_log_nothing(base_dir, monkeypatch):
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    get_report("tag").log("Base model training", [{}])
    assert not (base_dir / "report").exists()
