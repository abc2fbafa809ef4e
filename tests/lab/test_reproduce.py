"""`python -m lab.reproduce`: every item in its smallest form, its numbers, resuming; the counting of Table 2."""

import json
import math
import re
import sys

import pytest
import torch

from lab import reproduce
from lab.measure import traffic
from lab.study import sweep, sweep_runs
from lab.study.reproduce_common import Context
from lab.study.reproduce_concentration import concentration, slope
from lab.study.reproduce_numerics import operand_statistics, unbiasedness_gain
from lab.study.reproduce_training import Claim, clover_apart, depth_of
from lab.study.statistics import holm, t95, two_sided_p
from nanochat_fp4.errors import UserError
from nanochat_fp4.evaluation import plots
from nanochat_fp4.nvfp4.methods import get_recipe

SMALL = "--quick --seeds=1 --tokens=512 --samples=65536 --draws=4 --extra=--eval-tokens=512".split()


@pytest.fixture(scope="module")
def everything(made_once, fork_server):
    """The folder of `reproduce all --quick` with the smallest runs there are: one step, one seed."""

    def make(folder):
        with pytest.MonkeyPatch.context() as m:
            m.setattr(sys, "executable", str(fork_server.python))  # for bench_train, which it starts
            reproduce.main(["all", *SMALL, f"--folder={folder}"])

    return made_once("reproduce", make)


@pytest.mark.parametrize("name", reproduce.ITEMS)
def test_every_item_prints_writes_and_plots(everything, name, capsys):
    content = json.loads((everything / f"{name}.json").read_text())
    assert content["quick"] and len(content["table"]) >= 3
    for fact in ("QUICK", "cores", "torch", "commit"):
        assert fact in content["measured_on"]
    page = (everything / f"{name}.md").read_text().splitlines()
    assert page[0] == f"# {content['title']}" and page[-1] == content["measured_on"]
    cells = [len(re.split(r"(?<!\\)\|", line)) - 2 for line in page if line.startswith("|")]
    assert cells == [len(content["table"][0])] * (len(content["table"]) + 1)  # and the rule below the header
    assert (everything / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    reproduce.main([name, *SMALL, f"--folder={everything}"])  # again: from what is there
    out = capsys.readouterr().out
    assert content["title"] in out and content["measured_on"].partition("; torch")[0] in out


def test_runs_are_shared_between_figures(everything):
    """bf16 and clover are in most of them, and trained once each."""
    runs = [json.loads(p.read_text()) for p in (everything / "runs").glob("*.json")]
    flags = [tuple(sorted(f for f in r["flags"])) for r in runs]
    assert [r["method"] for r in runs].count("bf16") == 1
    assert len(set(flags)) >= len(flags) - 2  # attribution has names of its own for clover and its forward


def test_table_2_is_counted(everything):
    numbers = json.loads((everything / "table2.json").read_text())["numbers"]
    table = {(row[0], row[1]): row[3] for row in json.loads((everything / "table2.json").read_text())["table"][1:]}
    assert table["naive", "bits read per element"] == "4.5 + 4.5" and table["naive", "rotations per element"] == "2"
    assert table["naive", "bits written per element"] == "0 + 4.5"
    # The paper's 4.5 + 1 and 5 + 0.5, and EDEN's S: 32 bits for 128 elements, written and read.
    assert table["post hoc", "bits read per element"] == "4.5 + 1.25"
    assert table["post hoc", "bits written per element"] == "5.25 + 0.5"
    assert table["post hoc", "rotations per element"] == "1"
    assert numbers["saving"] == pytest.approx(1 - 11.5 / 13.5)


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
    draws = [1, 8, 16, 32]
    slopes = {}
    for method in ("fig1e_ms_eden", "nvidia_no_sr"):
        curve = concentration(model, get_recipe(method), x, x.roll(-1, 1), draws)
        slopes[method] = slope(curve["errors"])
    assert slopes["fig1e_ms_eden"] == pytest.approx(-1, abs=0.2)
    assert slopes["nvidia_no_sr"] > -0.5


def test_slope_by_hand():
    assert slope({b: 0.3 / b for b in (1, 2, 4, 8)}) == pytest.approx(-1)
    assert slope({1: 5.0, 2: 0.1, 4: 0.1, 8: 0.1}) == pytest.approx(0)  # the last three


def test_gain_of_averaging_products():
    assert unbiasedness_gain("sr", 64) > 0.7 * 64
    assert unbiasedness_gain("rtn", 64) == pytest.approx(1)
    assert unbiasedness_gain("sr_four_over_six", 256) < 0.6 * 256


def results(**bpb):
    return [
        {"method": m, "size": "tiny", "seed": s, "val_bpb": v, "val_bpb_bf16": v}
        for m, values in bpb.items()
        for s, v in enumerate(values)
    ]


@pytest.mark.parametrize(
    "better, worse, verdict",
    [
        ([1.01, 1.01, 1.011], [1.02, 1.021, 1.02], "agrees (-1.00"),
        ([1.02, 1.021, 1.02], [1.01, 1.01, 1.011], "DISAGREES (+1.00"),
        ([1.01, 1.03, 1.02], [1.02, 1.02, 1.01], "undecided"),
        ([1.01], [1.02], "undecided"),  # one seed decides nothing
        ([], [1.02], "no runs"),
    ],
)
def test_a_claim_of_the_paper_is_judged_with_error_bars(better, worse, verdict):
    runs = results(bf16=[1.0, 1.0, 1.0], clover=better, nvidia=worse)
    assert Claim("", "clover", "nvidia").verdict(runs, "tiny").startswith(verdict)


def test_what_was_interrupted_goes_on_and_what_changed_is_done_again(tmp_path):
    import argparse

    context, calls = Context(tmp_path, True, argparse.Namespace()), []

    def compute():
        calls.append(1)
        return {"n": len(calls)}

    assert context.piece("a", {"x": 1}, compute) == context.piece("a", {"x": 1}, compute) == {"n": 1}
    assert context.piece("a", {"x": 2}, compute) == {"n": 2}
    for path in (tmp_path / "pieces").iterdir():
        path.write_text('{"settings"')  # cut short
    assert context.piece("a", {"x": 1}, compute) == {"n": 3}


def test_operand_statistics_by_hand():
    generator = torch.Generator().manual_seed(0)
    s = operand_statistics(torch.randn(512, 128, generator=generator))
    assert s["kurtosis"] == pytest.approx(3, abs=0.1) and s["error"] == pytest.approx(0.0076, rel=0.05)
    assert s["top channels"] == pytest.approx(1 / 128, rel=0.3) and s["rank"] > 0.85
    x = torch.randn(512, 1, generator=generator) * torch.ones(128)
    assert operand_statistics(x)["rank"] == pytest.approx(1 / 128, rel=1e-3)
    x = torch.randn(512, 128, generator=generator)
    x[:, 7] *= 100
    assert operand_statistics(x)["top channels"] > 0.95


def stored_runs(path):
    """Runs of three seeds that only an earlier machine can have made: gaps of 2%, 1% and, in the end, 0.5%."""
    runs = []
    two, one = [1.02, 1.122, 1.224], [1.01, 1.111, 1.212]
    for r in results(bf16=[1.0, 1.1, 1.2], nvidia=two, four_over_six=two, tetrajet_v2=two, clover=one):
        runs.append(r | {"tokens": 4096, "steps": 8, "gemm_work": {"4": 1.0, "8": 0.0, "16": 0.0}})
    for r in results(clover_late_bf16=[1.005, 1.1055, 1.206]):
        runs.append(r | {"tokens": 4096, "steps": 8, "gemm_work": {"4": 1.1, "8": 0.0, "16": 0.0}})
    for r in runs:
        r["curve"] = [[0, 3.0, 3.0], [8, r["val_bpb"], r["val_bpb"]]]
        r["loss_curve"] = [[4, 2 * r["val_bpb"]], [8, r["val_bpb"]]]
    environment = {"gpu": "an old GPU", "gpu_count": 2, "torch": "1.0", "commit": "abc"}
    path.write_text(json.dumps({"data": "text (123)", "environment": environment, "results": runs}))


def test_tables_are_made_from_the_runs_of_an_earlier_sweep(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "run_sweep", lambda *a: pytest.fail("trained"))
    stored_runs(tmp_path / "d6.json")
    content = {}
    for name in ("table5", "remedies", "fig5"):
        reproduce.main([name, f"--results={tmp_path / 'd6.json'}", f"--folder={tmp_path}"])
        content[name] = json.loads((tmp_path / f"{name}.json").read_text())
        assert content[name]["measured_on"].startswith("2 x an old GPU; data text (123), 4,096 training tokens, seeds")
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert "results" not in content[name]["numbers"]
    table = {row[1]: row for row in content["table5"]["table"]}
    assert table["nvidia"][2:] == ["+1.57 / +1.92", "1.1220", "+2.00 ± 0.00", 3]
    assert table["bf16"][2:4] == ["0.7693 / 0.6925", "1.1000"] and "clover_late_bf16" not in table
    assert "clover's mean gap is 50% below the best" in content["table5"]["notes"][0]
    table = {row[1]: row for row in content["remedies"]["table"]}
    assert table["clover_late_bf16"][2] == "110.0 / 0.0 / 0.0"
    assert table["clover_late_bf16"][-4:] == ["-0.50 ± 0.00", "0.50x", "+0.50 ± 0.00", "0.50x"]
    curves = content["fig5"]["numbers"]["curves"]["tiny"]
    assert curves["clover"] == [[4, pytest.approx(1)], [8, pytest.approx(1)]]
    assert "training loss" in content["fig5"]["title"]
    reproduce.main(["fig4", f"--results={tmp_path / 'd6.json'}", f"--folder={tmp_path}"])
    table = {row[1]: row for row in json.loads((tmp_path / "fig4.json").read_text())["table"]}
    assert table["clover"][2] == "+1.26 / +2.45" and table["bf16"][2] == "-"
    reproduce.main(["systems", f"--results={tmp_path / 'd6.json'}", f"--folder={tmp_path}"])
    table = {row[1]: row for row in json.loads((tmp_path / "systems.json").read_text())["table"]}
    assert table["nvidia"][-2:] == ["+2.00 ± 0.00", "+1.00 ± 0.00"] and table["clover"][-1] == "-"
    with pytest.raises(UserError, match="has no run of systems's methods"):
        reproduce.main(["systems", f"--results={tmp_path / 'd6.json'}", "--sizes=d8", f"--folder={tmp_path}"])


def test_long_runs_are_put_beside_their_gemm_work(tmp_path):
    stored_runs(tmp_path / "d6.json")
    content, notes = {}, {}
    for name in ("horizon", "frontier"):
        reproduce.main([name, f"--results={tmp_path / 'd6.json'}", f"--folder={tmp_path}"])
        written = json.loads((tmp_path / f"{name}.json").read_text())
        content[name] = {row[0]: row[1:] for row in written["table"]}
        notes[name] = written["notes"]
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    cells = ["+0.50 ± 0.00", "-0.50 ± 0.00", "0.50 ± 0.00"]  # of each forward: they are alike in these runs
    assert content["horizon"]["clover_late_bf16"][-7:] == [*cells, *cells, "not measured"]
    assert "the paper: Clover beats NVIDIA. Here: agrees (-1.00 ± 0.00 points)" in notes["horizon"]
    assert "the paper: 4/6 beats NVIDIA. Here: undecided (+0.00 ± 0.00 points)" in notes["horizon"]
    assert any(n.endswith("below the best other. Here: 50 ± 0%, nvidia") for n in notes["horizon"])
    # clover is better for the same
    assert content["frontier"]["nvidia"][0] == "1.000" and content["frontier"]["nvidia"][2:] == ["2.00", "2.00", "-", 3]
    assert content["frontier"]["clover"][2:4] == ["1.00*", "1.00*"]
    assert content["frontier"]["clover_late_bf16"][2:5] == ["0.50*", "0.50*", "not measured"]
    with pytest.raises(UserError, match="takes its runs from a sweep: add --results"):
        reproduce.main(["horizon", f"--folder={tmp_path}"])


def test_of_one_seed_no_interval_is_claimed(tmp_path):
    long_runs(tmp_path / "d8.json", [1], {"bf16": [0], "nvidia": [2.0], "clover": [1.0]})
    reproduce.main(["horizon", f"--results={tmp_path / 'd8.json'}", f"--folder={tmp_path}"])
    written = json.loads((tmp_path / "horizon.json").read_text())
    assert [row[-7:-1] for row in written["table"][1:]] == [
        ["+2.00", "+1.00", "2.00", "+1.00", "+0.50", "2.00"],
        ["+1.00", "-", "1", "+0.50", "-", "1"],
    ]
    assert [row[7:10] for row in written["table"]] == [
        ["80%", "90%", "end"], ["-", "-", "2.00"], ["-", "-", "1.00"]
    ] and [row[10] for row in written["table"]] == ["training text", "5.00 (2.00x)", "2.50 (1.00x)"]  # fmt: skip
    assert "the paper: Clover beats NVIDIA. Here: undecided (-1.00 points)" in written["notes"]
    assert any(n.endswith("Here: 50%, nvidia") for n in written["notes"])


@pytest.fixture
def axes():
    from matplotlib.figure import Figure

    return Figure().subplots()


def test_the_end_of_a_run_is_seen_where_its_beginning_is_chaos(tmp_path, axes, monkeypatch):
    monkeypatch.setattr(plots, "draw", lambda path, title, plot: plot(axes))
    long_runs(tmp_path / "d6.json", [1], {"bf16": [0.0], "nvidia": [2.0], "clover": [1.0]})
    content = json.loads((tmp_path / "d6.json").read_text())
    for run in content["results"]:
        run["curve"].insert(0, [800, 1.0 if run["method"] == "bf16" else 1.15, 1.0])
    (tmp_path / "d6.json").write_text(json.dumps(content))
    reproduce.main(["horizon", f"--results={tmp_path / 'd6.json'}", f"--folder={tmp_path}"])
    assert len(axes.child_axes) == 2  # own forward, BF16 forward, at one scale
    for panel in axes.child_axes:
        assert 2 < panel.get_ylim()[1] < 4 and -1 < panel.get_ylim()[0] <= 0


def test_names_of_points_are_not_written_over_one_another(axes):
    axes.set(xlim=(0, 1), ylim=(0, 1))
    plots.names(axes, [(0.1, 0.5, "b"), (0.1, 0.5, "a"), (0.1, 0.51, "c"), (0.9, 0.5, "far")])
    at = {text.get_text(): text.xy[1] for text in axes.texts}
    assert at["far"] == at["b"] == 0.5 and at["a"] >= 0.52 and at["c"] >= at["a"] + 0.02


def test_of_no_gap_there_is_no_share(tmp_path):
    """A text read so often that BF16 has learnt it by heart: on other text clover is level with it."""
    methods = {"bf16": [0.0, 0.0], "nvidia": [0.9, 1.1], "clover": [-0.2, 0.2], "clover_feedback_late": [-0.7, -0.3]}
    long_runs(tmp_path / "d8.json", [1, 2], methods | {"both_from_92.5%": [0, 0.4], "both_from_85%": [0, 0.4]})
    reproduce.main(["horizon", f"--results={tmp_path / 'd8.json'}", f"--folder={tmp_path}"])
    table = {row[0]: row for row in json.loads((tmp_path / "horizon.json").read_text())["table"]}
    assert {cell for row in table.values() for cell in (row[-2], row[-5])} == {
        "-",
        *(table["method"][i] for i in (-2, -5)),
    }
    notes = json.loads((tmp_path / "horizon.json").read_text())["notes"]
    assert any(re.search(r"below the best other. Here: 100 ± \d+%, nvidia$", n) for n in notes)
    assert table["nvidia"][10] == "2.50"  # nor of none on the text that it is trained on
    long_runs(tmp_path / "more", [3], {"bf16": [0.0], "clover": [0.5]})  # a share of nothing would move all points
    files = f"{tmp_path / 'd8.json'},{tmp_path / 'more'}"
    reproduce.main(["frontier", f"--results={files}", f"--folder={tmp_path}"])
    gaps = {row[0]: row[3] for row in json.loads((tmp_path / "frontier.json").read_text())["table"]}
    assert (gaps["clover"], gaps["clover_feedback_late"], gaps["nvidia"]) == ("0.17", "-0.50*", "1.00")
    reproduce.main(["claims", f"--results={tmp_path / 'd8.json'}", f"--folder={tmp_path}"])
    written = json.loads((tmp_path / "claims.json").read_text())
    assert {tuple(row[5:]) for row in written["table"][1:]} == {("clover has no gap", "-", "-", "not decided", "-")}


def long_runs(path, seeds: list[int], percent: dict[str, list[float]], steps: int = 2000, data: str = "text (1)"):
    """A sweep's file: gaps to a BF16 of 1 bit per byte, in percent, by seed."""
    one = {"size": "d6", "steps": steps, "tokens": steps, "gemm_work": {"4": 1.0, "8": 0.0, "16": 0.0}}
    results = [
        one
        | {"method": m, "seed": s, "val_bpb": 1 + v / 100, "val_bpb_bf16": 1 + v / 200}
        | {"curve": [[at, 1 + v / 100, 1 + v / 200] for at in (steps // 2, steps)]}
        | {"loss_curve": [[at, 2 + v / 20] for at in (steps // 2, steps)]}
        for m, values in percent.items()
        for s, v in zip(seeds, values)
    ]
    environment = {"gpu": "an old GPU", "gpu_count": 1, "torch": "1.0", "commit": path.name}
    path.write_text(json.dumps({"data": data, "environment": environment, "results": results}))


def test_claims_are_made_on_fresh_seeds(tmp_path):
    """Shares of 0.1 where the methods were chosen, and of 0.45 and 0.6 on the fresh seeds."""
    for name, seeds, late in (("a", [1, 2], [0.1, 0.1]), ("b", [3, 4, 5], [0.45, 0.45, 0.45])):
        other = [0.6 if name == "b" else 0.1 for _ in seeds]
        methods = {"bf16": [0.0] * 3, "clover": [1.0] * 3, "clover_feedback_late": late}
        long_runs(tmp_path / name, seeds, methods | {"both_from_92.5%": other, "both_from_85%": other})
    files = f"{tmp_path / 'a'},{tmp_path / 'b'}"
    reproduce.main(["claims", f"--results={files}", f"--folder={tmp_path}"])
    written = json.loads((tmp_path / "claims.json").read_text())
    _, late, other, at_85, *_ = written["table"]
    assert written["environment"]["commit"] == "a, b"
    assert late[:6] == ["clover_feedback_late", "1.00", "1.020", "own forward", "0.50x", "0.450 ± 0.209"]
    assert (other[5], at_85[4:6]) == ("0.600 ± 0.209", ["0.33x", "0.600 ± 0.212"])
    # Missed by itself, but not among five targets.
    assert at_85[6:9] == ["0.017", "0.085", "not decided"] and late[-1] == "0.310 ± 0.162"
    long_runs(tmp_path / "more", [3, 4, 5], {"clover_feedback_late_7.8%_longer": [0.2] * 3}, steps=2156)
    for order in ("a,b,more", "a,more,b"):  # methods that were trained later on the same seeds, in a file of their own
        joined = ",".join(str(tmp_path / name) for name in order.split(","))
        reproduce.main(["claims", f"--results={joined}", f"--folder={tmp_path}"])
        rows = [row for row in json.loads((tmp_path / "claims.json").read_text())["table"] if "longer" in row[0]]
        assert [[row[1], *row[3:5], row[5][:5]] for row in rows] == [
            ["1.08", "own forward", "0.33x", "0.200"],
            ["1.08", "BF16 forward", "0.40x", "0.200"],
        ]
    for name, methods, problem in (
        ("d", {"bf16": [0.0]}, r"no clover run of seeds \[7\]"),
        (
            "e",
            {"bf16": [0.0], "clover": [1.0]},
            r"no run of seeds \[7\] of a method with a target: clover_feedback_late",
        ),
    ):
        long_runs(tmp_path / name, [7], methods)
        with pytest.raises(UserError, match=problem):
            reproduce.main(["claims", f"--results={files},{tmp_path / name}", f"--folder={tmp_path}"])
    with pytest.raises(UserError, match="bf16 of seed 1 twice"):
        reproduce.main(["claims", f"--results={files},{tmp_path / 'a'}", f"--folder={tmp_path}"])
    long_runs(tmp_path / "c", [6], {"bf16": [0.0]}, data="other text (2)")
    with pytest.raises(UserError, match=r"c is of other text \(2\), .* give sweeps of the same text"):
        reproduce.main(["claims", f"--results={files},{tmp_path / 'c'}", f"--folder={tmp_path}"])


def test_verdicts_hold_together(tmp_path):
    """Three targets that are far off, both ways, and one that is not decided; each forward beside clover's with it."""
    methods = {"bf16": [0.0, 0.01, 0.0], "clover": [1.0, 1.01, 1.02], "nvidia": [1.5, 1.5, 1.51]}
    methods |= {"both_from_85%": [0.6, 0.61, 0.6], "clover_feedback_late": [0.49, 0.5, 0.52]}
    methods |= {"clover_feedback_late_2.9%_longer": [0.2, 0.2, 0.21]}
    long_runs(tmp_path / "a", [1, 2, 3], methods)
    content = json.loads((tmp_path / "a").read_text())
    for r in content["results"]:
        if r["method"] == "clover_feedback_late":
            r["gemm_work"]["4"], r["val_bpb_one_term"] = 1.02, 1.009
    (tmp_path / "a").write_text(json.dumps(content))
    reproduce.main(["claims", f"--results={tmp_path / 'a'}", f"--folder={tmp_path}"])
    verdicts = [(row[0], row[3], row[-2]) for row in json.loads((tmp_path / "claims.json").read_text())["table"][1:]]
    assert verdicts == [
        ("clover_feedback_late", "own forward", "not decided"),
        ("both_from_85%", "own forward", "missed"),
        ("clover_feedback_late", "BF16 forward", "missed"),
        ("both_from_85%", "BF16 forward", "missed"),
        ("clover_feedback_late_2.9%_longer", "own forward", "reached"),
        ("clover_feedback_late_2.9%_longer", "BF16 forward", "reached"),
    ]
    # Deployed in plain NVFP4 a model is beside clover with its own forward.
    reproduce.main(["horizon", f"--results={tmp_path / 'a'}", f"--folder={tmp_path}"])
    last = {row[0]: row[-1] for row in json.loads((tmp_path / "horizon.json").read_text())["table"]}
    assert last["clover_feedback_late"].startswith("+0.90 ± ") and " (0.89 ± " in last["clover_feedback_late"]


def test_what_the_last_phase_trains(tmp_path):
    """From 1.2: feedback to 1.0, the forward to 0.5, the phase to 0.4, its own forward to 0.8."""
    methods = {
        "bf16": [0.0, 0.0],
        "clover": [1.2, 1.3],
        "clover_feedback": [1.0, 1.1],
        "clover_feedback_late": [0.8, 0.9],
    }
    long_runs(tmp_path / "a", [1, 2], methods)
    reproduce.main(["horizon", f"--results={tmp_path / 'a'}", f"--folder={tmp_path}"])
    (said,) = (n for n in json.loads((tmp_path / "horizon.json").read_text())["notes"] if n.startswith("clover_feedb"))
    parts = [float(v) for v in re.findall(r"([+-]\d\.\d+) ±", said)]
    assert parts == pytest.approx([-0.4, -0.2, -0.525, -0.1, 0.425])


def test_extra_steps_are_given_to_bf16_as_well(tmp_path):
    """Losses that fall as steps^-0.1: clover's 1% are 10% of the tokens, and with 10% more steps it is still behind."""

    def bpb(percent: float, steps: float) -> float:
        return 100 * ((1 + percent / 100) * (steps / 2000) ** -0.1 - 1)

    long_runs(tmp_path / "a", [1, 2], {m: [bpb(g, 2000)] * 2 for m, g in (("bf16", 0), ("clover", 1), ("fp8", 0.2))})
    long_runs(tmp_path / "b", [1, 2], {"clover_10%_longer": [bpb(1, 2200)] * 2}, steps=2200)
    content = json.loads((tmp_path / "b").read_text())
    for r in content["results"]:
        r["flags"] = ["--method=clover", "--num-iterations=2200"]
    (tmp_path / "b").write_text(json.dumps(content))
    reproduce.main(["extra_steps", f"--results={tmp_path / 'a'},{tmp_path / 'b'}", f"--folder={tmp_path}"])
    written = json.loads((tmp_path / "extra_steps.json").read_text())
    assert written["numbers"]["exponent"] == pytest.approx(0.1) and list(written["numbers"]["exponents"]) == ["clover"]
    table = {row[0]: row for row in written["table"]}
    assert table["clover"][4:7] == ["+1.00", "+1.00", "+10%"] and table["clover"][1] == "+0.0%"
    assert table["clover_10%_longer"][4:7] == ["+0.04", "+1.00", "+10%"] and table["clover_10%_longer"][1] == "+10.0%"
    with pytest.raises(UserError, match="no method of two lengths"):
        reproduce.main(["extra_steps", f"--results={tmp_path / 'a'}", f"--folder={tmp_path}"])


def test_p_values_and_their_correction():
    """Against tables of Student's t, and Holm's procedure by hand."""
    for freedom in (1, 2, 5, 30):
        assert two_sided_p(t95(freedom), freedom) == pytest.approx(0.05, abs=5e-5)
    assert two_sided_p(-1.0, 1) == pytest.approx(0.5) and two_sided_p(0.0, 7) == pytest.approx(1.0)
    assert two_sided_p(math.inf, 3) == 0 and math.isnan(two_sided_p(1.0, 0))
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    corrected = holm([0.6, math.nan, 0.02])
    assert corrected[::2] == pytest.approx([0.6, 0.04]) and math.isnan(corrected[1])


def test_no_run_is_left_out_in_silence(tmp_path):
    long_runs(tmp_path / "a", [1, 2], {"bf16": [0.0], "clover": [1.0, 1.2], "clover_feedback_late": [0.4, 0.5]})
    for item in ("horizon", "claims", "frontier"):
        reproduce.main([item, f"--results={tmp_path / 'a'},", f"--folder={tmp_path}"])
        written = json.loads((tmp_path / f"{item}.json").read_text())
        assert "seeds [1]" in written["measured_on"]  # an interrupted sweep: seed 2 has no bf16 run
        assert not any("nan" in str(cell) for row in written["table"] for cell in row)
    long_runs(tmp_path / "b", [3], {"clover": [1.0]})
    long_runs(tmp_path / "c", [1], {"bf16": [0.0]})
    for files, problem in (
        (("a", "b"), "no run of .*b has size 'd6' and a bf16 run of its seed in --results; add its file"),
        (("c",), "has bf16 runs of size 'd6' alone; gaps are those of other methods"),
    ):
        with pytest.raises(UserError, match=problem):
            joined = ",".join(str(tmp_path / name) for name in files)
            reproduce.main(["horizon", f"--results={joined}", f"--folder={tmp_path}"])


def test_of_no_gap_of_the_best_nothing_is_a_share(tmp_path):
    long_runs(tmp_path / "d8.json", [1, 2], {"bf16": [0.0] * 2, "nvidia": [-0.3, 0.5], "clover": [-0.2, 0.2]})
    reproduce.main(["horizon", f"--results={tmp_path / 'd8.json'}", f"--folder={tmp_path}"])
    notes = json.loads((tmp_path / "horizon.json").read_text())["notes"]
    assert any(n.endswith("Here: undecided, nvidia has no gap above zero beyond its interval") for n in notes)
    # Of one method, which branches from another's run, there is no scatter of its own.
    long_runs(tmp_path / "late", [1, 2], {"bf16": [0.0] * 2, "clover": [1.0, 1.1], "clover_feedback_late": [0.4, 0.5]})
    content = json.loads((tmp_path / "late").read_text())
    for run in content["results"][4:]:
        run["flags"] = ["--branch-from=clover_feedback@1940"]
    (tmp_path / "late").write_text(json.dumps(content))
    reproduce.main(["horizon", f"--results={tmp_path / 'late'}", f"--folder={tmp_path}"])
    assert "nan" not in str(json.loads((tmp_path / "horizon.json").read_text())["table"])
    for run in content["results"]:  # and of runs that all branch from one, none of any; nor curves of older files
        run |= {"flags": ["--branch-from=bf16@1940"], "curve": []}
    (tmp_path / "late").write_text(json.dumps(content))
    reproduce.main(["horizon", f"--results={tmp_path / 'late'}", f"--folder={tmp_path}"])
    notes = json.loads((tmp_path / "horizon.json").read_text())["notes"]
    assert any(n.startswith("no intervals, and so nothing is decided") for n in notes)
    assert not any(n.startswith("intervals: 95%") for n in notes)


def test_runs_that_cannot_be_compared_are_refused(tmp_path):
    """Two sizes in a file, a method of two lengths, the text in another order, another part of it to evaluate on."""
    long_runs(tmp_path / "a", [1], {"bf16": [0.0], "clover": [1.0]})
    long_runs(tmp_path / "longer", [2], {"bf16": [0.0], "clover": [1.0]}, steps=4000)
    content = json.loads((tmp_path / "a").read_text())
    for name, change in (
        ("order", {"method": "nvidia", "flags": ["--data-seed=1"]}),
        ("part", {"method": "nvidia", "eval_tokens": 2048}),
        ("sizes", {"size": "d8"}),
    ):
        runs = [r | change for r in content["results"] if r["method"] == "clover"]
        (tmp_path / name).write_text(json.dumps(content | {"results": runs}))
    for name, problem in (
        ("longer", "runs of bf16 of 2,000 and of 4,000 steps; give files of one, or name the others by a --variant"),
        ("order", "nvidia and bf16 of seed 1 in --results read the text in different orders .* the same --vary-data"),
        ("part", "nvidia and bf16 of seed 1 in --results .* evaluated on different parts of it"),
        ("sizes", "--results has runs of d6, d8; choose one of them, --sizes=d6"),
    ):
        for item in ("horizon", "claims", "frontier", "equal_time"):
            with pytest.raises(UserError, match=problem):
                reproduce.main([item, f"--results={tmp_path / 'a'},{tmp_path / name}", f"--folder={tmp_path}"])


def test_other_lengths_are_named_beside_their_work(tmp_path):
    methods = {"bf16": [0.0, 0.1], "clover": [1.0, 1.0], "clover_feedback_late": [0.4, 0.5]}
    long_runs(tmp_path / "a", [1, 2], methods)
    long_runs(tmp_path / "b", [1, 2], {"clover_feedback_late_7.8%_longer": [0.2, 0.3]}, steps=2156)
    long_runs(tmp_path / "c", [1, 2], {"search_feedback_late_1%_shorter": [0.5, 0.5]}, steps=1980)
    for item in ("horizon", "claims", "frontier"):
        for names, note in (
            ("abc", "clover_feedback_late_7.8%_longer 2,156, search_feedback_late_1%_shorter 1,980"),
            ("a", None),
        ):
            files = ",".join(str(tmp_path / name) for name in names)
            reproduce.main([item, f"--results={files}", f"--folder={tmp_path}"])
            written = json.loads((tmp_path / f"{item}.json").read_text())
            notes = [n for n in written["notes"] if n.startswith("of other lengths than bf16's 2,000 steps")]
            said = f"of other lengths than bf16's 2,000 steps, compared with it at their ends: {note}"
            assert notes == [f"{said}; GEMM work counts their steps"] * (note is not None)
            work = {row[0]: round(float(row[1]), 2) for row in written["table"][1:]}
            assert {work[m] for m in work if "%" in m} == ({1.08, 0.99} if note else set())


def test_at_equal_time_faster_methods_have_trained_for_longer(tmp_path):
    names = ("bf16", "fp8", "clover", "clover_feedback_late")
    long_runs(tmp_path / "long", [1], {m: [float(i)] for i, m in enumerate(names)})
    long_runs(tmp_path / "short", [1], {f"{m}_1000": [10.0 + i] for i, m in enumerate(names)}, steps=1000)
    with pytest.raises(UserError, match="has 0 shorter runs of bf16 .*: add its file"):
        reproduce.main(["equal_time", f"--results={tmp_path / 'long'}", f"--folder={tmp_path}"])
    long_runs(tmp_path / "two", [1], {"bf16_1000": [10.0], "bf16_500": [11.0]}, steps=1000)
    with pytest.raises(UserError, match="has 2 shorter runs of bf16 .*: leave the others out"):
        reproduce.main(["equal_time", f"--results={tmp_path / 'long'},{tmp_path / 'two'}", f"--folder={tmp_path}"])
    long_runs(tmp_path / "three", [1], {m: [float(i)] for i, m in enumerate(names[:3])})
    with pytest.raises(UserError, match="has no run of clover_feedback_late of seed 1 of another length than clover_f"):
        reproduce.main(["equal_time", f"--results={tmp_path / 'three'},{tmp_path / 'short'}", f"--folder={tmp_path}"])
    files = f"{tmp_path / 'long'},{tmp_path / 'short'}"
    reproduce.main(["equal_time", "--quick", f"--results={files}", f"--folder={tmp_path}"])
    assert (tmp_path / "equal_time.png").read_bytes()[:4] == b"\x89PNG"
    predictions = json.loads((tmp_path / "equal_time.json").read_text())["numbers"]["predictions"]
    found = {(p["machine"], p["depth"]): p for p in predictions}
    at = found["RTX 5090", 20]
    hours = at["hours"][""]
    assert hours["clover"] < hours["clover_feedback_late"] < hours["fp8"] < hours["bf16"]
    assert at["budget"] == hours["fp8_tuned"] and at["bpb"]["fp8_tuned"] == pytest.approx(1.01)
    # In the time that a tuned FP8 has, others do this share of their steps; from 1000 to 2000 their BPB falls by 0.1.
    for m, end in (("bf16", 1.0), ("clover", 1.02)):
        assert at["bpb"][m] == pytest.approx(end - 0.1 * math.log2(at["budget"] / hours[m]))
    # The same runs, evaluated in BF16, have half the gap.
    assert at["bpb_bf16"]["clover"] - 1 == pytest.approx((at["bpb"]["clover"] - 1) / 2)
    assert at["hours"]["worst"]["clover"] > hours["clover"] > at["hours"]["best"]["clover"]
    assert at["hours"]["worst"]["fp8_tuned"] < hours["fp8_tuned"] < at["hours"]["best"]["fp8_tuned"]
    assert found["B200", 20]["bpb"]["fp8"] == pytest.approx(1.01)  # where FP8 is the fastest


def test_speed_from_the_files_of_benchmarks(tmp_path):
    environment = {"gpu": "NVIDIA X", "gpu_count": 1, "torch": "2", "commit": "abc"}
    timed = {"model": "3B", "pass": "forward+backward", "mode": "graph", "method": "clover", "ms": 20.0, "ratio": 1.25}
    parts = {("forward", "GEMM"): 3.0, ("forward", "quantize"): 1.0, ("backward", "GEMM"): 5.0}
    phases = [{"variant": "clover", "phase": p, "kind": k, "ms": ms} for (p, k), ms in parts.items()]
    for name, records in (("fig6", [timed]), ("table7", phases)):
        (tmp_path / "bench.json").write_text(json.dumps({"records": records, "environment": environment}))
        reproduce.main([name, f"--results={tmp_path / 'bench.json'}", f"--folder={tmp_path}"])
    content = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("fig6", "table7")}
    assert content["fig6"]["table"][1] == ["NVIDIA X, graph", "3B", "clover", "up to 4.2 (RTX 5090)", 0.8, 20.0]
    assert {row[0]: row[2::2] for row in content["table7"]["table"][1:3]}["GEMM"] == ["75", "100"]
    assert "1 x NVIDIA X" in content["fig6"]["measured_on"]
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(UserError, match="is not the JSON file of a benchmark"):
        reproduce.main(["fig6", f"--results={tmp_path / 'bench.json'}", f"--folder={tmp_path}"])


def test_a_folder_that_cannot_be_made_is_one_line():
    with pytest.raises(UserError, match="cannot create --folder=/dev/null/x .*; choose a writable folder"):
        reproduce.main(["table1", "--folder=/dev/null/x"])


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="'fig3' is no table or figure; use all, list, or one of table1, table2"):
        reproduce.main(["fig3"])


@pytest.mark.parametrize("flag", ["--seeds=-1", "--samples=-5", "--draws=3", "--jobs=0"])
def test_counts_that_mean_nothing_are_refused(flag):
    with pytest.raises(UserError, match="--jobs is at least 1 and --draws at least 4"):
        reproduce.main(["table1", flag])


def test_an_item_of_one_size_refuses_two(tmp_path):
    with pytest.raises(UserError, match="--sizes=d6,d8: this item is of one size at a time"):
        reproduce.main(["attribution", "--sizes=d6,d8", f"--folder={tmp_path}"])


def test_other_names(capsys):
    reproduce.main(["list"])
    assert "table6 (= fig6)" in capsys.readouterr().out


def test_the_attribution_takes_clover_apart():
    runs = sweep_runs.plan(clover_apart(depth_of("d6")), ["d6"], [1], tokens=10**6)
    by_name = {r.method: r for r in runs}
    assert len(by_name) == len(runs) == 30 and all(len(r.tag.encode()) <= 100 for r in runs)
    assert "--method-changes=*.attn.c_[qkv]=clover_input" in by_name["input-qkv"].flags
    assert "--method-changes=0.75=clover" in by_name["steps_75-100%"].flags
    (halves,) = (f for f in by_name["forward-second_half"].flags if f.startswith("--method-changes="))
    assert [part.split(".")[2] for part in halves.split(",")] == ["3", "4", "5"]
    assert [depth_of(s) for s in ("tiny", "llama-200M", "d20")] == [2, 10, 20]


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
    (launch,) = traffic.count_launches(lambda: kernel[(1,)](x, y, 100))
    assert launch.read == {"x": 4 * (100 + 16)} and launch.written == {"y": 4 * (100 + 16)}
    assert launch.multiply_adds == 16**3 and launch.kernel == "kernel"
