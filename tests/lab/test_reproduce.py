"""`python -m lab.reproduce`: what it prints from the stored runs, what it refuses, and each sort of item in small.

TABLE has what no page shows as a table: notes, and items that have no page. A change of the statistics or of a column
shows there and in test_pages.py.
"""

import json
import re
import shlex
import sys

import pytest
import torch

import lab.recipes
import nanochat_fp4 as nf
from lab import pages, reproduce, scaling, statistics
from lab.study import numerics, questions, sweep, sweep_runs
from lab.study.context import Context
from lab.study.gaps import Claim
from nanochat_fp4.cli import UserError
from nanochat_fp4.common import load_recipes
from nanochat_fp4.evaluation import plots
from nanochat_fp4.nvfp4 import methods
from nanochat_fp4.nvfp4.methods import get_recipe
from scripts import base_train

# Command, beginning of a line of its output, what else is in that line.
TABLE = [
    ("horizon --results d6_stored", "- the paper: Clover beats NVIDIA", "agrees (-0.36 ± 0.13 points)"),
    ("horizon --results d6_stored", "- clover_feedback_late minus clover -0.715", "the last phase trains -0.080"),
    ("horizon --results d6_stored", "- clover's gap over that of four_over_six", "0.81 ± 0.12"),
    ("horizon --results d6_stored", "- corrected for 5 claims (Holm; all of horizon whose two methods are in these",
     "Clover beats 4/6 p = 0.065 (undecided)"),
    # The same difference, among more claims.
    ("table5 --results d8_second_half", "- corrected for 5 claims (Holm; all of table5", "NVIDIA p = 0.049,"),
    ("horizon --results d8_second_half", "- corrected for 7 claims (Holm; all of horizon",
     "Clover beats NVIDIA p = 0.050 (undecided)"),
    ("attribution --results d6_attribution --columns 'method | own: share | BF16: share'", "forward 0.87",
     "0.80 (0.70 to 0.93)"),
    ("extra_steps --results d6_longer", "clover_7.8%_longer +7.8% 1.08 +1.47 ± 0.21", "+1.06 ± 0.14"),
    ("horizon --results d4_64m", "- the paper: Clover beats NVIDIA", "undecided (-0.36 ± 0.39 points)"),
    ("horizon --results d6_shuffled,d6_means_apart", "d6 clover 1.00", "+2.14 ± 0.08 - 1 +1.74 ± 0.06 - 1"),
    ("horizon --results d6_width", "d6 clover_448_wide", "+0.06 ± 0.71"),
    ("forwards --results d6_shuffled", "- clover_feedback, both in BF16: share 0.703", "missed"),
    ("equal_time --results d6_shuffled,d6_longer",
     "mdhorton/nanochat_sm120, d20, 1 x RTX PRO 4000, micro-batch 4, FP8 untuned bf16", "1.60 0.036 4.01"),
    ("table5 --results d8_second_half", "- the paper: Clover beats TetraJet-v2", "agrees (-0.29 ± 0.12 points)"),
    ("fig1 --results d6_ablations", "- the paper: (e) both GEMMs: MS-EDEN beats SR", "agrees (-0.24 ± 0.05 points)"),
    ("fig2 --results d6_ablations", "- the paper: native scales beat square blocks (4/6)",
     "agrees (-0.18 ± 0.05 points)"),
    ("fig4 --results llama_second_half", "- clover's gap over that of", "0.85"),
    ("fig5 --results d8", "clover", ""),
    ("methods --results d6_shuffled --columns 'QAT_METHOD | GEMM work | exported as | gap as exported, %'",
     "clover_feedback_late", "1.02 NVFP4 +2.36 ± 0.32"),
    ("eden --draws=64", "128 0.966 1.057", "64"),
    ("law", "c fitted 0.6334", "0.10"),
    ("by_length", "30M clover", ""),
    # The studies of a table may be of several machines, which its last line names.
    *((command, "1 x NVIDIA H100 80GB HBM3, 3 x NVIDIA H200; ", "commit 760df3fa, f489032a, 97e539ab")
      for command in ("methods", "break_even --results d6_mixed,d6_fp8_forward")),
    ("methods", "- public text: 1 x NVIDIA H200; d6, data public", ""),
    ("ladder --results ladder_128_wide_12,moe", "1 x NVIDIA H100 80GB HBM3, 1 x NVIDIA H200", "9c3641ae, not recorded"),
    ("effective --results ladder_*", "1 x NVIDIA H100 80GB HBM3; runs: ladder_*", "commit 9c3641ae"),
    ("measured", "1 x NVIDIA H200, 1 x NVIDIA H100 80GB HBM3; ", ""),
    ("table3", "30M", "6; 6"),
    ("table4", "weight decay", "0.1 0.1"),
]  # fmt: skip


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """printed(command): its lines, with single spaces; no picture is saved, but each is drawn."""
    folder, known = tmp_path_factory.mktemp("reproduce"), {}

    def draw(path, title, plot):
        from matplotlib.figure import Figure

        return plot(Figure().subplots()) is None

    def run(command: str) -> list[str]:
        if command not in known:
            with pytest.MonkeyPatch.context() as patch:
                said = []
                patch.setattr(plots, "draw", draw)
                patch.setattr(reproduce, "print0", said.append)
                patch.setattr(sweep, "run_sweep", lambda *args: pytest.fail("trained"))
                reproduce.main([*shlex.split(command), f"--folder={folder}"])
            known[command] = [" ".join(line.split()) for line in "\n".join(said).splitlines()]
        return known[command]

    return run


@pytest.mark.parametrize(("command", "begins", "holds"), TABLE)
def test_what_the_documents_say_is_printed(printed, command, begins, holds):
    lines = [line for line in printed(command) if line.startswith(begins)]
    assert lines and any(holds in line for line in lines), "\n".join(printed(command))


def written(figure) -> list[tuple[str, object]]:
    """Each text of a picture, with the box that it takes."""
    texts = []
    for axes in (axes for outer in figure.axes for axes in (outer, *outer.child_axes)):
        texts.append(axes.title)
        for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
            low, high = sorted(axis.get_view_interval())
            texts += [axis.label, *(tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high)]
    return [(text.get_text(), text.get_window_extent()) for text in texts if text.get_visible() and text.get_text()]


@pytest.mark.parametrize("results", ["d6_mixed", "d4_64m"])
def test_no_text_of_the_two_panels_lies_on_another(tmp_path, monkeypatch, results):
    from matplotlib.figure import Figure

    boxes, save = [], Figure.savefig

    def look(figure, *args, **kwargs):
        save(figure, *args, **kwargs)
        figure.canvas.draw()  # The file has other dots per inch, so the boxes of its texts are others.
        boxes.extend(written(figure))

    monkeypatch.setattr(Figure, "savefig", look)
    reproduce.main(["horizon", "--results", results, f"--folder={tmp_path}"])
    assert len(boxes) > 15
    on_another = [(a, b) for i, (a, at) in enumerate(boxes) for b, other in boxes[:i] if at.overlaps(other)]
    assert not on_another


def test_a_picture_has_the_methods_of_the_chosen_rows(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "curve", lambda panel, method, *_: drawn.append(method))
    for rows, has_nvidia in (("clover | fp8", False), ("d6", True)):
        drawn.clear()
        reproduce.main(["horizon", "--results", "d6_mixed", f"--folder={tmp_path}", f"--rows={rows}"])
        assert "clover" in drawn and ("nvidia" in drawn) == has_nvidia


def test_a_picture_of_too_many_methods_has_those_of_the_paper(tmp_path, monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr(plots, "curve", lambda panel, method, *_: drawn.append(method))
    reproduce.main(["fig5", "--results", "d6_stored", f"--folder={tmp_path}"])
    assert {"clover", "nvidia"} < {*drawn} and len(drawn) <= 6 and "--rows" in capsys.readouterr().out


def test_the_list_says_what_each_table_shows(printed):
    described = dict(line.split(" ", 1) for line in printed("list") if not line.endswith(":"))
    assert set(described) == {*reproduce.ITEMS, *reproduce.OF_RESULTS, *reproduce.SAME}
    assert described["fig2"] == reproduce.RUNS["fig2"].title and described["growth"].startswith("ln gap = ")
    assert described["methods"] == "README's table of methods" and len({*described.values()}) == len(described)


def test_readmes_table_names_the_measurement_of_its_step_times(printed):
    lines = printed("methods --results d6_mixed")
    assert any(line.endswith("(lab/results/bench.json: bench_train_d26_h100_graphs)") for line in lines)


def test_without_a_study_the_table_of_methods_is_readmes(printed):
    (command,) = re.findall(r"reproduce (methods.*)\n", (pages.ROOT / "README.md").read_text())
    lines = printed(command)
    assert command == "methods" and [line.split()[0] for line in lines if line.startswith("clover")] == [
        "clover_fp8_forward",
        "clover",
    ]
    assert not any("step time" in line or line.startswith("- time") or "_dgrad" in line for line in lines)


def test_every_item_of_stored_runs_is_on_a_page_or_in_the_table():
    """What is on a page is compared with it (test_pages.py)."""
    text = "\n".join(path.read_text() for path in pages.pages())
    on_pages = {command.split()[0] for command, _ in pages.COMMAND_AND_TABLE.findall(text)}
    assert set(reproduce.OF_RESULTS) <= on_pages | {command.split()[0] for command, *_ in TABLE}


REFUSED = [
    ("table1 --folder=/dev/null/x", "--folder=/dev/null/x "),
    ("fig3", "'fig3' .*table1, table2"),
    *((f"table1 {flag}", "--draws at least 4") for flag in ("--seeds=-1", "--draws=3")),
    ("attribution --sizes=d6,d8", "--sizes=d6,d8: .*one size"),
    ("horizon", "--results=STUDY"),
    ("claims", "lab.runs"),
    ("horizon --results d5", "'d5'"),
    ("table1 --rows rtn_16x61", r"'rtn_16x61'; did you mean rtn_16x16\? .* rtn \| "),  # before anything is computed
    ("fig4 --rows clovr", "'clovr'; did you mean clover"),
    ("horizon --results d6_forwards_s1,d6_fresh", r"d6_fresh is of prose and code .* give sweeps of the same text"),
    ("horizon --results d6_longer,d6_lean", "--results has bf16 of seed 1 twice"),
    ("horizon --results d6_fresh,d8_350m", "d6, d8; .*--sizes=d6"),
    ("fig1 --results d6_longer", "has no run of fig1's methods"),
    ("forwards --results d6_longer", "no run of --results was evaluated in several forwards"),
    ("claims --results d6_longer", "has no run of seeds .* of a method with a target"),
    ("extra_steps --results d4_once", "no method of two lengths"),
    ("equal_time --results d4_once", "no seed of all of bf16, fp8, clover, clover_feedback, clover_feedback_late"),
    ("break_even --results d4_once", "d4_once has runs of fp8 and of clover_fp8_forward"),
    ("leaderboard --results d6_longer", "the leaderboard has d6_stored, d6_mixed, d2_embedded"),
    ("fig6 --results bench_none", "bench_none is not there; give its JSON, or a part"),
    ("fig9 --results none", "lab/results/fig9.json has own_forward, both_forwards"),
]


@pytest.mark.parametrize(("command", "problem"), REFUSED)
def test_what_cannot_be_made_is_refused(base_dir, command, problem):
    with pytest.raises(UserError, match=problem) as e:
        reproduce.main(command.split())
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", [*reproduce.ITEMS, *reproduce.OF_RESULTS])
def test_every_table_refuses_runs_that_are_not_there(base_dir, name):
    """Those of one source did not read --results."""
    with pytest.raises(UserError, match=f"{name}.*--results|nonsense") as e:
        reproduce.main([name, "--quick", "--results=nonsense"])
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "flags, said",
    [("--quick", "tiny for 5,120 tokens, 2 x bf16, "), ("--sizes=d12 --seeds=1", "d12 for 20 tokens per p")],
)
def test_what_will_be_trained_stands_in_the_first_line(flags, said, base_dir, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "prepare", lambda *args: "text")
    monkeypatch.setattr(sweep_runs, "data_key", lambda data: pytest.fail("the end of this test"))
    with pytest.raises(pytest.fail.Exception, match="the end"):
        reproduce.main(["table5", *flags.split()])
    assert said in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("columns, flag, hint", [("90", "", 1), ("900", "", 0), ("90", "--columns=method|own: gap", 0)])
def test_a_table_wider_than_a_terminal_names_the_flags(columns, flag, hint, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    reproduce.main(["horizon", "--results=d6_fresh", f"--folder={tmp_path}", *filter(None, [flag])])
    assert capsys.readouterr().out.count("--columns and --rows") == hint


@pytest.mark.parametrize("name", [n for n in reproduce.ITEMS if n not in ("table2", "table3", "table4")])  # seconds
def test_a_column_that_a_table_lacks_is_refused_before_the_hours(name, tmp_path, monkeypatch):
    begun = []
    for what in ("piece", "sweep"):
        monkeypatch.setattr(Context, what, lambda *args: begun.append(args))
    monkeypatch.setattr(numerics, "search_scales", lambda *args: begun.append(args))
    with pytest.raises(UserError, match="--columns: .*'gap of clover'.* its columns are "):
        reproduce.main([name, f"--folder={tmp_path}", "--columns=gap of clover"])
    assert not begun


def study(path, change=lambda run: {}, **gaps: list[float]) -> str:
    """A sweep's file with these gaps in percent by seed, to a BF16 of 1 bit per byte."""
    one = {"size": "d6", "steps": 2000, "tokens": 2000, "gemm_work": {"4": 1.0, "8": 0.0, "16": 0.0}, "flags": []}
    one |= {"vocab_size": 512, "eval_tokens": 64}
    runs = [
        one | {"method": m, "seed": s, "val_bpb": 1 + v / 100, "val_bpb_bf16": 1 + v / 200}
        | {"curve": [[at, 1 + v / 100, 1 + v / 200] for at in (1000, 2000)], "loss_curve": []}
        for m, values in gaps.items() for s, v in enumerate(values)
    ]  # fmt: skip
    environment = {"gpu": "an old GPU", "gpu_count": 1, "torch": "1.0", "commit": "abc"}
    path.write_text(
        json.dumps({"data": "text (1)", "environment": environment, "results": [r | change(r) for r in runs]})
    )
    return str(path)


def test_the_costs_of_a_users_function_are_not_those_of_nvfp4(tmp_path, printed, monkeypatch):
    """Nobody knows what format it has. Those of lab's functions are known, also where their file was given."""
    monkeypatch.setattr(nf.ROUNDINGS, "data", dict(nf.ROUNDINGS))
    monkeypatch.setattr(methods, "REGISTERED", dict(methods.REGISTERED))
    load_recipes(lab.recipes.__file__)
    nf.ROUNDINGS["mine"] = nf.Rounding(quantize=lambda x, rounding, noise: None)
    for name in ("mine", "mxfp8"):
        nf.register(nf.Recipe(f"m_{name}", output=nf.Gemm(nf.Operand(name), nf.Operand(name))))
    flags = {m: [f"--method={m}"] for m in ("bf16", "clover", "m_mine", "m_mxfp8")}
    path = study(tmp_path / "a.json", lambda run: {"flags": flags[run["method"]]}, **dict.fromkeys(flags, [1.0]))
    columns = "method | GEMM work | bytes kept"
    said = printed(f"horizon --results={path} --columns='{columns}'")
    assert {"m_mine - -", "m_mxfp8 1.00 1"} <= set(said), said


def test_figure_5_and_the_table_of_methods_have_those_of_a_users_sweep(tmp_path, printed):
    path = study(tmp_path / "a.json", bf16=[0.0], clover=[1.0], mine=[2.0])
    assert "mine 1000: +2.00 2000: +2.00" in printed(f"fig5 --results={path}")
    assert any(line.split()[0] == "mine" for line in printed(f"methods --results={path}") if line)


def test_the_forwards_are_those_that_a_study_has(tmp_path, printed):
    """Also of a user's method, and no column of what nobody evaluated."""
    forwards = {"mine": 1.03, "clover": 1.02, "bf16": 1.01}
    path = study(tmp_path / "a.json", lambda run: {"forwards": forwards}, bf16=[0.0], mine=[4.0])
    said = printed(f"forwards --results={path}")
    assert "weights of GEMM work own 4/6, one term mine BF16" in said, said
    assert "mine 1.00 +4.00 [1] +2.00 [1] +3.00 [1] +2.00 [1]" in said and "targets" not in " ".join(said), said


@pytest.mark.parametrize("name", ["horizon", "fig5"])
def test_runs_without_evaluations_on_the_way_have_no_blank_picture(tmp_path, capsys, name):
    path = study(tmp_path / "a.json", lambda run: {"curve": []}, bf16=[0.0], clover=[1.0])
    reproduce.main([name, f"--results={path}", f"--folder={tmp_path}"])
    assert "no picture" in capsys.readouterr().out and not (tmp_path / f"{name}.png").exists()


def test_runs_that_branch_have_their_picture_in_fig5(tmp_path, capsys):
    path = study(tmp_path / "a.json", lambda run: {"flags": ["--branch-from=a@9"]}, bf16=[0.0], clover=[1.0])
    for name, said in (("horizon", "fig5"), ("fig5", "fig5.png")):
        reproduce.main([name, f"--results={path}", f"--folder={tmp_path}"])
        assert said in capsys.readouterr().out and (tmp_path / f"{name}.png").exists() == (name == "fig5")


def test_bars_are_those_of_methods_that_were_run(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    monkeypatch.setattr(plots, "draw", lambda path, title, plot: plot(axes) is None)
    path = study(tmp_path / "a.json", bf16=[0.0], clover=[1.0], nvidia=[1.2])
    reproduce.main(["remedies", f"--results={path}", f"--folder={tmp_path}"])
    assert {label.get_text() for label in axes.get_xticklabels()} == {"clover", "nvidia"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"flags": ["--data-seed=1"]}, "nvidia and bf16 of seed 0 .*different orders"),
        ({"eval_tokens": 2048}, "evaluated on different parts"),
        ({"vocab_size": 1024}, "runs of different vocabularies"),
        ({"tokenizer": "b"}, "runs of different tokenizers"),
        ({"val_text": "b"}, "runs of different validation texts"),
        ({"seed": 7}, "other.json .*'d6' .*add its file"),
    ],
)
def test_runs_that_cannot_be_compared_have_no_gap(tmp_path, change, problem):
    """A gap is between runs of one validation text, tokenizer and forward."""
    known = {"tokenizer": "a", "val_text": "a"}
    first = study(tmp_path / "first.json", lambda run: known, bf16=[0.0], clover=[1.0])
    other = study(tmp_path / "other.json", lambda run: known | change, nvidia=[2.0])
    with pytest.raises(UserError, match=problem):
        reproduce.main(["horizon", f"--results={first},{other}", f"--folder={tmp_path}"])


def test_a_head_in_16_bits_is_no_end_in_16_bits(tmp_path, printed):
    """Runs whose head counts as work have 16 bits; what is exported of clover is its own forward all the same."""
    work = {"bf16": (0.0, 1.0), "clover": (0.77, 0.23), "nvidia_full": (0.6, 0.4)}

    def with_head(run: dict) -> dict:
        four, sixteen = work[run["method"]]
        return {"head": "bf16", "gemm_work": {"4": four, "8": 0.0, "16": sixteen}}

    path = study(tmp_path / "a.json", with_head, bf16=[0.0, 0.0], clover=[1.0, 1.1], nvidia_full=[0.5, 0.6])
    lines = {line.split()[0]: line for line in printed(f"methods --results={path}") if line}
    assert "as own forward" in lines["clover"] and "as own forward" not in lines["nvidia_full"]


def test_of_one_seed_no_interval_is_claimed(tmp_path, printed):
    path = study(tmp_path / "a.json", bf16=[0.0], nvidia=[2.0], clover=[1.0])
    lines = printed(f"horizon --results={path}")
    assert "- the paper: Clover beats NVIDIA. Here, d6: undecided (-1.00 points)" in lines
    (single,) = (line for line in lines if "nothing is ranked" in line)
    assert single.endswith("evaluated on 64 tokens: nvidia, clover")
    two = study(tmp_path / "b.json", bf16=[0.0] * 2, clover=[1.0] * 2)
    assert not any("nothing is ranked" in line for line in printed(f"horizon --results={two}"))
    assert any(line.endswith("+2.00 +1.00 2.00 +1.00 +0.50 2.00 - +2.00 +1.00") for line in lines)


@pytest.mark.parametrize(
    ("better", "worse", "verdict"),
    [
        ([1.0, 1.0, 1.1], [2.0, 2.1, 2.0], "agrees (-1.00"),
        ([2.0, 2.1, 2.0], [1.0, 1.0, 1.1], "DISAGREES (+1.00"),
        ([1.0, 3.0, 2.0], [2.0, 2.0, 1.0], "undecided"),
        ([1.0], [2.0], "undecided"),  # one seed decides nothing
        ([], [2.0], "no runs"),
    ],
)
def test_a_claim_of_the_paper_is_judged_with_error_bars(tmp_path, better, worse, verdict):
    path = study(tmp_path / "a", bf16=[0.0] * 3, clover=better, nvidia=worse)
    runs = json.loads((tmp_path / "a").read_text())["results"]
    assert Claim("", "clover", "nvidia").verdict(runs, "d6").startswith(verdict), path


def test_targets_are_judged_together():
    shares = ((0.01, 0.4), (0.04, 0.4), (0.03, 0.6), (0.001, 0.6))
    found = [{"p": p, "share": statistics.around(share, 0.1, 3), "target": 0.5} for p, share in shares]
    questions.judge(found)
    assert [of["verdict"] for of in found] == ["met", "not decided", "not decided", "missed"]


@pytest.mark.parametrize(
    ("gaps", "said"),
    [
        ({"clover_fp8_forward": [0.60, 0.62, 0.64]}, "own 0.31 ± 0.02 3 mean at most 0.33, upper end at most 0.41 met"),
        ({"clover_fp8_forward": [0.58, 0.62, 0.80]}, "not decided"),  # the mean is below its target, the end is not
        ({"clover_fp8_forward": [0.90, 0.92, 0.94]}, "missed"),
        ({"clover_fp8_forward": [0.60]}, "share of clover_fp8_forward own 0.30 1 mean at most 0.33"),
        ({"clover_fp8_forward": [0.5], "clover_fp8_forward_4bit": [0.60]}, "+0.10 1 not above zero not decided"),
        ({"clover_fp8_forward": [0.5, 0.52], "clover_fp8_forward_4bit": [0.6, 0.62]}, "not above zero missed"),
        ({"clover_fp8_forward": [0.5, 0.72], "clover_fp8_forward_4bit": [0.6, 0.62]}, "not above zero met"),
        (
            {"clover_fp8_forward_dgrad": [0.5, 0.5, 0.6], "clover_fp8_forward_wgrad": [0.4, 0.4, 0.49]},
            "FP8 in dgrad over FP8 in wgrad, % own +0.10 ± 0.01 3 the sign above zero",
        ),
        ({"clover_fp8_forward_dgrad": [0.5], "clover_fp8_forward_wgrad": [0.4]}, "own +0.10 1 the sign not decided"),
        (  # Each over its own pair, on the seeds of both, beside the targets and none of them.
            {
                "clover_fp8_forward_dgrad": [0.5] * 3,
                "clover_fp8_forward_4bit_input": [0.6, 0.7, 0.8],
                "clover_fp8_forward_wgrad": [0.4] * 2,
                "clover_fp8_forward_4bit": [0.7, 0.9],
            },
            "dgrad's gain minus wgrad's, points own -0.25 ± 0.63 2 none -",
        ),
    ],
)
def test_the_targets_of_an_fp8_forward(tmp_path, printed, gaps, said):
    path = study(tmp_path / "a.json", bf16=[0.0] * 3, clover=[2.0, 2.01, 2.02], **gaps)
    lines = printed(f"fp8_forward --results={path}")
    assert any(said in line for line in lines), lines
    ends = ("met", "missed", "not decided", "below zero", "above zero")
    counted = sum(line.endswith(ends) and not line.startswith("- ") for line in lines)
    assert any(f"verdict, {counted} targets" in line for line in lines)
    assert any(line.startswith("bytes kept by clover_fp8") for line in lines) == bool(
        gaps.keys() & {"clover_fp8_forward", "clover_fp8_forward_4bit"}
    )


@pytest.mark.parametrize(("bf16", "said"), [([0.0] * 3, False), ([3.0, 0.0, 0.0], True)])
def test_a_legend_stands_where_its_words_occur(tmp_path, printed, bf16, said):
    """Of a gap of clover that may be zero there is no share. A column that is not chosen has no note."""
    path = study(tmp_path / "a.json", bf16=bf16, clover=[2.0, 2.1, 2.2], clover_mixed=[0.8, 0.9, 1.0])
    lines = printed(f"claims --results={path}")
    assert any(line.startswith("clover_mixed") and questions.NO_GAP in line for line in lines) == said
    assert any(line.startswith("-") and questions.NO_GAP in line for line in lines) == said
    lines = printed(f"horizon --results={path} --columns 'method | own: share'")
    assert any(line.startswith("- share") for line in lines)
    assert not any(line.startswith(("- pooled", "- bytes", "- GEMM", "- BF16:", "- minus")) for line in lines)
    lines = printed(f"gaps --results={path} --columns 'method | own: minus'")
    assert any(line.startswith("- minus") for line in lines) and not any(line.startswith("- share") for line in lines)
    assert any("evaluated on 64" in line for line in lines)


def test_notes_are_on_the_rows_that_are_shown(tmp_path):
    def notes(*rows):
        args = reproduce.parse_args(["horizon", "--results=d6_stored", f"--folder={tmp_path}", *rows])
        return "\n".join(reproduce.make(args, "horizon")[1].notes)

    others = "attention_from_77.5%", "clover_feedback_late minus clover", "of other lengths"
    some = notes("--rows=tetrajet_v2 | nvidia | four_over_six | clover")
    assert [note in some for note in others] == 3 * [False] and all(note in notes() for note in others)
    assert "Clover beats NVIDIA" in some and "corrected for 5 claims" in some


def test_a_rounding_of_a_users_file_is_measured_again_when_it_is_edited(tmp_path, monkeypatch):
    """Of the chosen rows alone, with two digits like the paper's."""
    found = []
    monkeypatch.setitem(nf.ROUNDINGS, "rtn_again", nf.Rounding())
    for grid_max in (5.0, 4.0):
        monkeypatch.setitem(nf.ROUNDINGS, "sr_mine", nf.Rounding(grid_max=grid_max, stochastic=True))
        argv = f"table1 --rows sr_mine|rtn|rtn_again --samples 65536 --draws 8 --folder={tmp_path}".split()
        _, outcome = reproduce.make(reproduce.parse_args(argv), "table1")
        assert [note.partition(":")[0] for note in outcome.notes] == ["gain", "rtn_again (equals rtn)"]
        rows = outcome.rows
        assert (
            [row[0] for row in rows] == ["sr_mine", "rtn", "rtn_again"]
            and rows[1][1] == "9.0"
            and rows[1][2][1:2] == "."
        )
        found.append(rows[0][2])
    assert found[0] != found[1]


def test_the_place_on_the_leaderboard_is_interpolated():
    curve = [(0, 4.0, 4.1), (10, 3.0, 3.1), (20, 2.0, 2.1)]
    assert [questions.reached(curve, to) for to in (2.5, 3.0, 9.0, 1.9)] == [15, 10, 0, None]


# ----------------------------------------------------------------------------------------------------------------------
# What is trained and computed here, in its smallest form


SMALL = "--quick --seeds=1 --tokens=512 --samples=16384 --draws=4 --extra=--eval-tokens=512".split()


def test_items_train_write_plot_and_share_their_runs(tmp_path, capsys, monkeypatch):
    for name in ("fig2", "attribution"):  # attribution takes the bf16 run of fig2
        reproduce.main([name, *SMALL, f"--folder={tmp_path}"])
        content = json.loads((tmp_path / f"{name}.json").read_text())
        page = (tmp_path / f"{name}.md").read_text().splitlines()
        assert "QUICK" in page[-1] == content["measured_on"] and page[0] == f"# {content['title']}"
        cells = [len(re.split(r"(?<!\\)\|", line)) - 2 for line in page if line.startswith("|")]
        assert set(cells) == {len(content["table"][0])} and len(cells) == len(content["table"]) + 1
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    trained = [json.loads(p.read_text())["method"] for p in (tmp_path / "runs").glob("*.json")]
    assert trained.count("bf16") == 1 and len(trained) == 3 + 5
    capsys.readouterr()
    monkeypatch.setattr(base_train, "main", lambda argv: pytest.fail("trained again"))
    reproduce.main(["fig2", *SMALL, f"--folder={tmp_path}"])
    assert "Figure 2" in capsys.readouterr().out


@pytest.mark.slow
def test_everything_in_small(tmp_path, fork_server, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(fork_server.python))  # for the benchmark that it starts
    reproduce.main(["all", *SMALL, f"--folder={tmp_path}"])
    assert {p.stem for p in tmp_path.glob("*.md")} >= set(reproduce.ITEMS)


def test_table_2_is_counted(tmp_path):
    reproduce.main(["table2", *SMALL, f"--folder={tmp_path}"])
    content = json.loads((tmp_path / "table2.json").read_text())
    numbers, table = content["numbers"], {(row[0], row[1]): row[3] for row in content["table"][1:]}
    assert table["naive", "bits read per element"] == "4.5 + 4.5" and table["naive", "rotations per element"] == "2"
    assert table["naive", "bits written per element"] == "0 + 4.5"
    # The paper's 4.5 + 1 and 5 + 0.5, and EDEN's S: 32 bits for 128 elements, written and read.
    assert table["post hoc", "bits read per element"] == "4.5 + 1.25"
    assert table["post hoc", "bits written per element"] == "5.25 + 0.5"
    assert table["post hoc", "rotations per element"] == "1"
    assert numbers["saving"] == pytest.approx(1 - 11.5 / 13.5)


def test_counting_sees_masks_and_products():
    """A kernel whose traffic is known: 100 of 128 numbers read and written, one product of two 16 x 16 matrices."""
    triton = pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("counts interpreted kernels")
    tl = triton.language

    @triton.jit
    def kernel(x_ptr, y_ptr, n):
        i = tl.arange(0, 128)
        tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)
        j = tl.arange(0, 16)
        a = tl.load(x_ptr + j[:, None] * 0 + j[None, :])  # 16 different numbers, each asked for 16 times
        tl.store(y_ptr + j, tl.sum(tl.dot(a, a), axis=0))

    x, y = torch.randn(128), torch.zeros(128)
    (launch,) = numerics.count_launches(lambda: kernel[(1,)](x, y, 100))
    assert launch.read == {"x": 4 * (100 + 16)} and launch.written == {"y": 4 * (100 + 16)}
    assert launch.rotated == 16**2 and launch.kernel == "kernel"


def test_fig9_knows_biased_from_unbiased():
    """On a small model, with a forward that is left alone: MS-EDEN's error falls with slope -1, nearest rounding's
    does not fall."""
    from nanochat_fp4.models.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(sequence_len=32, vocab_size=64, n_layer=1, n_head=2, n_kv_head=2, n_embd=128))
    model.init_weights()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn_like(p)
    x = torch.randint(64, (4, 32))
    slopes = {}
    for method in ("fig1e_ms_eden", "nvidia_no_sr"):
        curve = numerics.concentration(model, get_recipe(method), x, x.roll(-1, 1), [1, 2, 4, 8])
        slopes[method] = numerics.slope(curve["errors"])
    assert slopes["fig1e_ms_eden"] == pytest.approx(-1, abs=0.2)
    assert slopes["nvidia_no_sr"] > -0.5
    assert numerics.slope({1: 5.0, 2: 0.1, 4: 0.1, 8: 0.1}) == pytest.approx(0)  # the last three


def test_gain_of_averaging_products():
    assert numerics.unbiasedness_gain("sr", 32) > 0.7 * 32
    assert numerics.unbiasedness_gain("rtn", 8) == pytest.approx(1)
    assert numerics.unbiasedness_gain("sr_four_over_six", 64) < 0.5 * 64


def test_what_was_interrupted_goes_on_and_what_changed_is_done_again(tmp_path):
    context, calls = Context(tmp_path, True, None), []

    def compute():
        calls.append(1)
        return {"n": len(calls)}

    assert context.piece("a", {"x": 1}, compute) == context.piece("a", {"x": 1}, compute) == {"n": 1}
    assert context.piece("a", {"x": 2}, compute) == {"n": 2}
    for path in (tmp_path / "pieces").iterdir():
        path.write_text('{"settings"')  # cut short
    assert context.piece("a", {"x": 1}, compute) == {"n": 3}


def test_the_attribution_takes_clover_apart():
    runs = sweep_runs.plan(reproduce.clover_apart("d6"), ["d6"], [1], tokens=10**6)
    by_name = {r.method: r for r in runs}
    assert len(by_name) == len(runs) == 30 and all(len(r.tag.encode()) <= 100 for r in runs)
    assert "--layer-methods=*.attn.c_[qkv]=clover_input" in by_name["input-qkv"].flags
    assert "--method-phases=0.75=clover" in by_name["steps_75-100%"].flags
    (halves,) = (f for f in by_name["forward-second_half"].flags if f.startswith("--layer-methods="))
    assert [part.split(".")[2] for part in halves.split(",")] == ["3", "4", "5"]


def test_scaling_has_the_papers_fit():
    """Lost parameters, lost tokens and one gap for all: what describes the paper's 21 runs."""
    runs = scaling.read_runs("paper")
    law = scaling.fit_law(runs)
    n, d = (scaling.effective(law, runs, "clover", of) for of in ("parameters", "tokens"))
    assert (n.runs, round(law.rms, 2), round(n.share, 2), round(n.rms, 2)) == (21, 0.10, 0.74, 0.17)
    assert d.rms > 5 * n.rms and scaling.constant_gap(runs, "clover")[1] == pytest.approx(0.34, abs=0.005)
    assert scaling.exponent_of_tokens(law, 12 * 1280**2 * 20, 20 * 561e6) == pytest.approx(0.036, abs=0.001)
