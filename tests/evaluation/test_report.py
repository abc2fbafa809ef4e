"""The report from whole, partial and damaged data."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from nanochat_fp4.cli import UserError
from nanochat_fp4.evaluation import plots, report, report_log, report_page
from nanochat_fp4.evaluation.metrics import MetricsLog
from nanochat_fp4.evaluation.report_log import Report, get_report


@pytest.fixture
def folder(base_dir):
    return base_dir / "report"


def make_run(
    base_dir: Path, tag: str, method: str, bpb: float, steps: int = 6, finished: bool = True, key: str = "k",
    text: str | None = "text 1", measured: str | None = "text 1", tokenizer: str = "T", loss_step: int | None = None,
    params: int = 100,
):  # fmt: skip
    """What base_train and base_loss leave behind, with the validation text and the step of either."""
    log = MetricsLog(base_dir / "base_checkpoints" / tag)
    sizes = {"num_iterations": steps, "total_batch_size": 1000, "num_params": params}
    same = {"config_key": key, "val_text": text, "tokenizer": tokenizer}
    log.append("start", 0, method=method, backend="reference", **same, **sizes)
    for step in range(steps if finished else steps // 2):
        log.append("train", step, loss=5 - step / 10, smoothed_loss=5 - step / 10, tok_per_sec=100.0)
    log.append("val", step + 1, bpb=bpb + 0.01, bpb_bf16=bpb + 0.02, tokens=500)
    log.append("telemetry", 0, layers={"transformer.h.0.mlp.c_fc": {"output_error": 0.7}})
    for folder in ("mid_checkpoints", "chatsft_checkpoints", "chatrl_checkpoints"):
        for step in range(2):
            MetricsLog(base_dir / folder / tag).append("train", step, smoothed_loss=2.0 - step, reward=step / 2)
    if finished:
        results = {"method": method, "tokens_per_second": 123.0, "training_seconds": 75.0}
        get_report(tag).log("Base model training", [{"Number of parameters": 12345}], results)
        results = {"val_bpb": bpb, "val_bpb_bf16": bpb + 0.001 * (method != "bf16"), "val_tokens": 9000}
        results |= {"samples": ["One `two`", "Three"], "val_text": measured, "step": loss_step or steps}
        get_report(tag).log("Base model loss", [{"val_bpb": bpb}], results)


def generated(folder: Path, drawn: bool = False) -> str:
    """report.md; without the plots, which are slow, unless they are to be `drawn`."""
    with pytest.MonkeyPatch.context() as m:
        if not drawn:
            m.setattr(report_page, "draw_plots", lambda *_: [])
        path = report_page.generate(folder)
    assert path == str(folder / "report.md")
    json.loads((folder / "report.json").read_text())  # strict JSON: no NaN
    return Path(path).read_text()


@pytest.fixture
def pictures(monkeypatch):
    """{file name: the axes of its panels}, where the pictures would be drawn."""
    from matplotlib.figure import Figure

    drawn = {}

    def draw(path, title, *panels):
        drawn[path.name] = Figure().subplots(len(panels), squeeze=False)[:, 0]
        for panel, axes in zip(panels, drawn[path.name]):
            panel(axes)

    monkeypatch.setattr(plots, "draw", draw)
    return drawn


def lines_of(panels):
    """(label, *values) of each line of each panel"""
    return [[(line.get_label(), *line.get_ydata()) for line in axes.get_lines()] for axes in panels]


def row_of(text: str, start: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_whole_report(base_dir, folder):
    get_report().log("Tokenizer training", [{"vocab_size": 4096}, None, "free text"])
    make_run(base_dir, "d4_bf16", "bf16", 1.25)
    make_run(base_dir, "d4_clover", "clover", 1.275)
    text = generated(folder, drawn=True)
    assert row_of(text, "d4_clover") == [
        "d4_clover", "clover", "6", "6,000", "1.2750", "1.2760", "+2.00%", "+2.08%", "123", "1m15s",
    ]  # fmt: skip
    assert row_of(text, "d4_bf16")[6:8] == ["baseline", "baseline"]
    assert "$" not in text and not re.search(r"^- \w*_\w*:|^- [^:]*: *$", text, re.M), "a raw key, or an empty value"
    for expected in (
        "![loss](loss.png)", "![bpb](bpb.png)", "## Samples", "- `One 'two'`", "## Environment", torch.__version__,
        "backend (d4_clover): reference", "### Tokenizer training", "free text", "- vocab size: 4096", "12,345",
        "| **total** |",
    ):  # fmt: skip
        assert expected in text
    for plot in ("loss.png", "bpb.png", "loss_mid.png", "loss_sft.png", "reward_rl.png"):
        assert f"({plot})" in text
        assert (folder / plot).read_bytes().startswith(b"\x89PNG") and (folder / plot).stat().st_size > 5000
    # The tokenizer comes before training, and training before the loss.
    places = [text.index(f"### {name}") for name in ("Tokenizer training", "Base model training", "Base model loss")]
    assert places == sorted(places)


def test_the_first_lines_say_what_where_and_how_to_chat(base_dir, folder, capsys, monkeypatch):
    for tag, chat in (("d4_clover", True), ("d4_nvidia", False)):
        make_run(base_dir, tag, "clover", 1.275)
        if chat:
            place = base_dir / "chatsft_checkpoints" / tag
            (place / "model_000002.pt").write_bytes(b"")
    make_run(base_dir, "half", "clover", 1.3, finished=False)
    text = generated(folder)
    head, said = text.split("| run |")[0], capsys.readouterr().out.split("\n\n")[-1]
    for part in (head, said):
        assert str(place) in part and "chat_web -i sft --model-tag d4_clover" in part and "1.2750 bits per byte" in part
        assert str(base_dir / "base_checkpoints/d4_nvidia") in part and "--model-tag d4_nvidia" not in part
        assert "half" not in part and "nonsense" not in part
        assert f"talk to it: NANOCHAT_BASE_DIR={base_dir} python -m" in part
    usual = base_dir.parent / ".cache/nanochat"
    usual.parent.mkdir()
    base_dir.rename(usual)
    monkeypatch.setenv("HOME", str(base_dir.parent))
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(usual))
    assert "talk to it: python -m" in generated(usual / "report")


def test_the_first_lines_say_how_far_a_small_run_can_go(base_dir, folder):
    """The loss before training, and what to expect from a chat with a model that has read next to nothing."""
    MetricsLog(base_dir / "base_checkpoints/d4_clover").append("val", 0, bpb=3.375, bpb_bf16=3.375, tokens=500)
    make_run(base_dir, "d4_clover", "clover", 1.275, params=60_000)
    (base_dir / "chatsft_checkpoints/d4_clover/model_000002.pt").write_bytes(b"")
    text = generated(folder)
    assert "1.2760 with a BF16 forward (3.38 before training)" in text
    assert "this model has read 6,000 tokens, 0.1 for each parameter, where 20 are usual: expect nonsense" in text


@pytest.mark.parametrize(
    ("stage", "name", "total", "said"),
    [
        ("sft", "chatsft_checkpoints", 20, "so far:     sft has done 12 of 20 steps"),
        ("rl", "chatrl_checkpoints", 20, "so far:     rl has done 12 of 20 steps"),
        ("mid", "mid_checkpoints", -1, "so far:     mid has done 12 steps, 60% of its epoch"),
        ("mid", "mid_checkpoints", 12, None),
    ],
)
def test_a_chat_model_that_is_not_trained_to_its_end_is_said_to_be(base_dir, folder, stage, name, total, said):
    """The checkpoint counts: a killed run has logged steps that its newest checkpoint does not have."""
    make_run(base_dir, "d4_clover", "clover", 1.275)
    place = base_dir / name / "d4_clover"
    log = MetricsLog(place)
    log.append("start", 0, num_iterations=total)
    for step in range(14):
        log.append("train", step, smoothed_loss=2.0, progress=(step + 1) / 20)
    for file in ("model_000008.pt", "model_000012.pt"):
        (place / file).write_bytes(b"")
    text = generated(folder)
    assert f"chat_web -i {stage} --model-tag d4_clover" in text and str(place) in text
    assert said in text if said else "so far" not in text


def test_runs_of_several_seeds_are_a_line_with_a_band(base_dir, folder, monkeypatch, pictures):
    """By the pipeline's names and by the sweep's; runs of another length are not among them."""
    for tag in ("d4_clover", "d4_clover_seed43", "tiny_clover_s1_0123abcd", "tiny_clover_s2_89abcdef"):
        make_run(base_dir, tag, "clover", 1.25)
    make_run(base_dir, "tiny_clover_s1_01234567", "clover", 1.25, steps=4)
    drawn, curve = set(), plots.curve

    def noted(axes, label, runs, *style, **more):
        before = len(axes.collections)
        curve(axes, label, runs, *style, **more)
        drawn.add((label, len(runs), len(axes.collections) - before))

    monkeypatch.setattr(plots, "curve", noted)
    generated(folder, drawn=True)
    assert drawn == {
        ("d4_clover", 2, 1), ("tiny_clover, 6 steps", 2, 1), ("tiny_clover, 4 steps", 1, 0),
    }  # fmt: skip


def test_gap_only_between_finished_runs_of_one_configuration(base_dir, folder):
    make_run(base_dir, "base", "bf16", 1.25)
    make_run(base_dir, "other", "clover", 1.275, key="another configuration")
    make_run(base_dir, "half", "clover", 1.275, finished=False)
    MetricsLog(base_dir / "base_checkpoints" / "unmeasured").append("start", 0, method="clover", config_key="k")
    text = generated(folder)
    assert [row_of(text, tag)[6] for tag in ("other", "half", "unmeasured")] == ["-", "-", "-"]


@pytest.mark.parametrize(
    "of_base, of_run",
    [
        ({}, {"text": "text 2", "measured": "text 2"}),
        ({}, {"measured": "text 2"}),  # base_loss on another folder than training
        ({}, {"measured": None}),  # measured by an earlier version, which did not say
        ({"text": None, "measured": None}, {"text": None, "measured": None}),
        ({}, {"tokenizer": "U"}),
    ],
)
def test_no_gap_between_runs_of_different_text_or_tokenizer(base_dir, folder, of_base, of_run):
    make_run(base_dir, "base", "bf16", 1.25, **of_base)
    make_run(base_dir, "other", "clover", 1.275, **of_run)
    text = generated(folder)
    assert row_of(text, "other")[4:8] == ["1.2750", "1.2760", "-", "-"]
    assert "- no gap between other and base: " in text


def test_losses_on_different_numbers_of_tokens_are_marked(base_dir, folder):
    """The loss stage of one run failed, so training's loss on fewer tokens stands beside the loss stage's."""
    make_run(base_dir, "base", "bf16", 1.25)
    make_run(base_dir, "other", "clover", 1.2)
    assert row_of(generated(folder), "other")[4] == "1.2000"
    (folder / "other" / "base-model-loss.json").unlink()
    text = generated(folder)
    assert row_of(text, "other")[4:8] == ["1.2100 (500 tokens)", "1.2200", "-", "-"]
    assert row_of(text, "base")[4] == "1.2500 (9,000 tokens)"
    assert "- no gap, because other on 500 tokens and base on 9,000 tokens were validated; measure both" in text


def test_a_loss_of_another_step_is_not_that_of_the_run(base_dir, folder):
    make_run(base_dir, "base", "bf16", 1.25)
    make_run(base_dir, "other", "clover", 1.275, loss_step=3)
    assert row_of(generated(folder), "other")[4:8] == ["1.2850 (500 tokens)", "1.2950", "-", "-"]


def test_runs_of_different_text_share_no_picture(base_dir, folder, pictures):
    make_run(base_dir, "a", "bf16", 1.25)
    make_run(base_dir, "b", "clover", 1.25)
    make_run(base_dir, "c", "clover", 1.25, text="text 2", measured="text 2")
    log = MetricsLog(base_dir / "base_checkpoints" / "b")
    log.append("start", 6, method="clover", config_key="k", val_text="text 3", tokenizer="T")  # a resume on other text
    log.append("val", 8, bpb=2.0, bpb_bf16=1.0, tokens=500)
    generated(folder, drawn=True)
    bpb = {name: lines_of(panels) for name, panels in pictures.items()}
    # The difference of both forward passes is below, in percent of the loss in BF16; the baseline has none.
    assert bpb["bpb.png"] == [[("a", 1.26)]]
    assert bpb["bpb_2.png"] == [[("b", 2.0)], [("b", pytest.approx(100.0))]]
    assert bpb["bpb_3.png"] == [[("c", 1.26)], [("c", pytest.approx(100 * (1.26 / 1.27 - 1)))]]


def test_a_picture_shows_the_gap_to_the_baseline_below(base_dir, folder, pictures):
    make_run(base_dir, "a", "clover", 1.27)
    make_run(base_dir, "b", "bf16", 1.25)
    make_run(base_dir, "c", "clover", 1.25, key="another configuration")
    generated(folder, drawn=True)
    whole, gaps, forwards = lines_of(pictures["bpb.png"])
    assert [name for name, _ in whole] == ["b", "a", "c"]  # the baseline first, under the others
    assert gaps == [("a", pytest.approx(100 * (1.28 / 1.26 - 1)))]
    assert [name for name, _ in forwards] == ["a", "c"]
    assert len(pictures["loss.png"]) == 2


def test_interrupted_run_shows_what_it_has(base_dir, folder):
    make_run(base_dir, "d4_clover", "clover", 1.3, finished=False)
    with open(base_dir / "base_checkpoints" / "d4_clover" / "metrics.jsonl", "a") as f:
        f.write('{"event": "train", "step": [], "smoothed_loss": {}}\n{"event": "val", "step": 1e999, "bpb": "x"}\n')
        f.write('{"event": "train", "step": 3, "lo')  # killed while it wrote
    text = generated(folder, drawn=True)
    assert row_of(text, "d4_clover")[2:6] == ["3 of 6, unfinished", "3,000", "1.3100", "1.3200"]


def test_a_run_that_was_only_evaluated_before_training_has_no_loss(base_dir, folder):
    """Beside runs of a few steps it would look like the worst result of all."""
    make_run(base_dir, "d4_clover", "clover", 1.3, finished=False)
    path = base_dir / "base_checkpoints" / "d4_clover" / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records = [r for r in records if r["event"] != "val"] + [{"event": "val", "step": 0, "bpb": 4.0, "bpb_bf16": 4.0}]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    text = generated(folder)
    assert row_of(text, "d4_clover")[2:6] == ["3 of 6, unfinished", "3,000", "-", "-"] and "4.0000" not in text


def test_section_is_replaced_and_reset_keeps_metrics(base_dir, folder, capsys, monkeypatch):
    monkeypatch.setattr(report_page, "draw_plots", lambda *_: [])
    make_run(base_dir, "d4_bf16", "bf16", 1.25)
    get_report("d4_bf16").log("Base model loss", [{"val_bpb": 1.0}], {"val_bpb": 1.0})
    assert row_of(generated(folder), "d4_bf16")[4] == "1.0000"
    report.main(["generate"])
    assert capsys.readouterr().out.splitlines()[-1] == str(folder / "report.md")
    report.main(["reset"])
    assert [p for p in folder.rglob("*") if p.is_file()] == []
    assert row_of(generated(folder), "d4_bf16")[4] == "1.2600"  # from the metrics


def test_measurements_of_an_earlier_model_are_left_out(base_dir, folder, monkeypatch):
    times = iter(["2026-01-01 10:00:00", "2026-01-01 11:00:00", "2026-01-01 12:00:00", "2026-01-01 13:00:00"])
    monkeypatch.setattr(report_log.time, "strftime", lambda _: next(times))
    logged = get_report("d4_clover")
    logged.log("Base model loss", [], {"val_bpb": 1.0})
    logged.log("Chat evaluation sft", [], {"MMLU": 0.3})
    logged.log("Base model training", [], {"val_bpb": 1.2})
    text = generated(folder)
    assert row_of(text, "d4_clover")[4] == "1.2000" and "| d4_clover | - | sft |" in text
    assert "- Base model loss of d4_clover measured a model that has been trained anew since" in text


def test_a_run_that_starts_over_has_no_number_of_the_one_before(base_dir, folder):
    make_run(base_dir, "d4", "clover", 1.25)
    (base_dir / "base_checkpoints" / "d4" / "metrics.jsonl").unlink()  # --overwrite
    make_run(base_dir, "d4", "nvidia", 1.5, steps=8, finished=False)
    row = row_of(generated(folder), "d4")
    assert row[1:5] == ["nvidia", "4 of 8, unfinished", "4,000", "1.5100"]


def test_benchmarks_as_in_table_5(base_dir, folder):
    make_run(base_dir, "d4_bf16", "bf16", 1.25)
    sft = {"ARC-Easy": {"accuracy": 0.5, "count": 400}, "MMLU": {"accuracy": 0.25, "interval": 0.01}, "Own": 0.75}
    sft["None"] = {"accuracy": 0.0, "count": 32, "interval": 0.0, "guessing": 0.25}
    get_report("d4_bf16").log("Chat evaluation sft", [{"temperature": 0.0}], sft)
    get_report("d4_bf16").log("Chat evaluation mid", [{"temperature": 0.0}], {"ARC-Easy": 0.4})
    text = generated(folder)
    header = next(line for line in text.splitlines() if line.startswith("| run | method | after |"))
    assert (
        header == "| run | method | after | val BPB of the base model | ARC-Easy | MMLU | Own | None (guessing: 25) |"
    )
    rows = [line for line in text.splitlines() if line.startswith("| d4_bf16 | bf16 | ")]
    assert "| d4_bf16 | bf16 | mid | 1.2500 | 40.00 | - | - | - |" in rows
    assert "| d4_bf16 | bf16 | sft | 1.2500 | 50.00 ± 5.00 | 25.00 ± 1.00 | 75.00 | 0.00 ± 11.11 |" in rows


def test_newest_telemetry_by_kind_of_layer(base_dir, folder):
    make_run(base_dir, "d4_clover", "clover", 1.25)
    log = MetricsLog(base_dir / "base_checkpoints" / "d4_clover")
    for step, error in ((0, 0.5), (4, 0.1)):
        layers = {f"transformer.h.{i}.mlp.c_fc": {"output_error": error + i / 10} for i in range(2)}
        log.append("telemetry", step, layers=layers | {"transformer.h.0.attn.c_q": {"input_zeros": 0.25}})
    text = generated(folder)
    assert "**d4_clover**, step 4" in text and "| layer | output error | input zeros |" in text
    assert "| mlp.c_fc | 0.150 | - |" in text and "| attn.c_q | - | 0.250 |" in text


def test_values_of_all_kinds(folder, base_dir):
    with pytest.raises(UserError, match="bash speedrun_fp4.sh"):
        report_page.generate(folder)
    odd = {"nan": math.nan, "inf": math.inf, "tensor": torch.tensor(1.5), "path": Path("/x"), "none": None, "n": 10**6}
    path = get_report().log("Some Section!", [odd, {}, "", None, 3])
    assert path.endswith("some-section.json")
    text = generated(folder)
    for expected in ("- nan: nan", "- inf: inf", "- tensor: 1.5", "- path: /x", "- n: 1,000,000"):
        assert expected in text


def test_other_ranks_log_nothing(base_dir, monkeypatch):
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    get_report("tag").log("Base model training", [{}])
    assert not (base_dir / "report").exists()


def test_what_was_left_out_is_in_the_report(base_dir):
    (base_dir / "report").mkdir(parents=True)
    (base_dir / "report/left_out.txt").write_text("the CORE metric, because no network. To have it: a folder\n")
    report = Report(base_dir / "report", "d2_clover")
    report.log("Base model training", [{}], {"val_bpb": 1.0})
    text = Path(report_page.generate(base_dir / "report")).read_text()
    assert "## Left out\n\n- the CORE metric, because no network. To have it: a folder\n" in text
