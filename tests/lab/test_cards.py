"""nanochat_fp4/cards.json is what lab.cards computes from published steps."""

import json
import re

import pytest

from lab import ROOT, cards, scaling, statistics
from nanochat_fp4.hardware import get_peak_flops

BY_NAME = {card["name"]: card for card in cards.published()}


def test_cards_json_is_what_the_command_writes():
    assert cards.CARDS.read_text(encoding="utf-8") == cards.as_text()


def test_what_this_project_measured_counts_before_other_programs():
    """nanochat's own FP8 is 1.17 times its BF16 on an H100; this program's is 1.04 to 1.12 times."""
    low, high = cards.gain(BY_NAME["H100"], "fp8").ends
    assert low == pytest.approx(83049 / 80053, rel=1e-3) and high == pytest.approx(87118 / 78003, rel=1e-3)
    assert cards.speed(BY_NAME["H100"], "bf16")["runs"] == 5


def test_a_card_that_was_timed_twice_is_not_mixed_with_others():
    """GeForce cards halve the rate of BF16 products with FP32 sums and PRO cards do not, so FP8 gains less on these."""
    names = ("RTX 5090", "RTX PRO 6000", "RTX PRO 4000")
    geforce, pro, timed_once = (cards.gain(BY_NAME[name], "fp8") for name in names)
    assert (geforce.low, geforce.high) == pytest.approx((70 / 55, 13 / 8.2))
    assert (pro.low, pro.high) == pytest.approx((90 / 85, 22 / 17))
    assert (timed_once.low, timed_once.high) == (pro.low, geforce.high)


def test_the_ends_of_a_speed():
    """The fast end is the fastest step that was timed; a ratio of unequal micro-batches multiplies nothing."""
    (low, high), of = cards.speed(BY_NAME["RTX 5090"], "nvfp4")["range"], cards.speed(BY_NAME["RTX 5090"], "nvfp4")
    assert high == pytest.approx(1.4 * 51000 * 973e6 / 1e12, rel=1e-3)
    assert low == pytest.approx(20800 * 973e6 / 1e12 * 37532 / 23493 / 1.4, rel=1e-3)
    assert of["doubts"][0].count("SOURCE, Quartet II") == 1 and "more rows" in of["doubts"][1]
    # Each slow end is computed from BF16's, which had one row. What NVFP4 had concerns none.
    for precision in ("bf16", "fp8", "nvfp4"):
        (doubt,) = (d for d in cards.speed(BY_NAME["RTX 5090"], precision)["doubts"] if "more rows" in d)
        assert "BF16 with 1 row" in doubt and "NVFP4" not in doubt
        assert ("RTX PRO 4000's gain" in doubt) == (precision == "nvfp4")
    timed = {key: cards.speed(BY_NAME["RTX 5090"], key)["timed"] for key in ("bf16", "fp8", "nvfp4")}
    assert timed == {"bf16": 4, "fp8": 3, "nvfp4": 1}
    pro = cards.speed(BY_NAME["RTX PRO 6000"], "nvfp4")["range"][1]
    assert pro == pytest.approx(1.4 * 17000 * 3086e6 / 1e12 * 37532 / 23493, rel=1e-3)
    single = cards.speed(BY_NAME["RTX 5060"], "nvfp4")
    assert single["range"] == pytest.approx([9.3 / 1.4, 9.7 * 1.4], rel=1e-3) and "ONE SOURCE" in single["doubts"][0]


def test_an_end_is_widened_where_one_source_alone_is_known():
    """A speed or a gain; once, also if both have one source. Three steps of one program are one source."""
    eight_bits = cards.speed(BY_NAME["RTX 5090"], "fp8")
    assert eight_bits["timed"] == 3 and eight_bits["doubts"][0] == "both ends widened by 1.4: ONE SOURCE"
    widened = {name: cards.speed(BY_NAME[name], "nvfp4")["doubts"][:1] for name in ("RTX PRO 4000", "RTX 5090", "GB10")}
    assert sum("source" in doubt.lower() for doubt in cards.speed(BY_NAME["RTX 5090"], "nvfp4")["doubts"]) == 1
    assert "the slow end" in widened["RTX PRO 4000"][0]  # five steps in NVFP4, one in BF16
    assert "both ends" in widened["RTX 5090"][0] and "both ends" in widened["GB10"][0]
    assert cards.speed(BY_NAME["GB10"], "nvfp4")["range"] == pytest.approx(
        [14.4 / 17 * 14.4 * 0.477 / 1.4, 17 * 0.477 * 1.4], rel=1e-3
    )
    assert cards.speed(BY_NAME["GB200"], "nvfp4")["doubts"] == []


def test_a_card_has_no_more_memory_than_torch_sees():
    """Its name says 32 GB, of which the driver keeps a part."""
    gib = {name: card["gib"] for name, card in BY_NAME.items()}
    assert (gib["RTX 5090"], gib["RTX 4090"], gib["RTX 5060 Ti"]) == (31.36, 23.52, 15.44)
    assert not {8, 12, 16, 24, 32, 48, 80, 96} & set(gib.values())


def test_a_ratio_over_fp8_is_of_programs_that_timed_both():
    """Two thirds of clover_fp8_forward's products are in 4 bits."""
    low, high = cards.rival_over_fp8(BY_NAME["RTX 5090"])
    assert (1 / low, 1 / high) == pytest.approx(
        (2 / 3 * 240038 / 234000 + 1 / 3, 2 / 3 * 59978 / 81303 + 1 / 3), rel=1e-3
    )
    assert cards.rival_over_fp8(BY_NAME["RTX 4090"]) is None


def test_the_method_to_take_is_named_where_no_measurement_changes_it():
    found = cards.content()
    of = {card["name"]: found["take"].get(card["arch"], "") for card in found["cards"]}
    assert of["H100"].startswith("fp8 (1.04 to 1.12") and of["RTX 3090"].startswith("bf16") and not of["RTX 5090"]
    behind = [card | {"over_fp8": [0.8, 1.01]} for card in found["cards"] if card["arch"] == "sm_120"]
    for ratio, said in (([1.02, 1.05], True), ([1.0, 1.05], False)):
        taken = cards.take("sm_120", behind, [{"ratio": ratio}])
        assert bool(taken) == said and (not taken or "clover_fp8_forward" not in taken)


def test_the_ratios_that_decide_follow_from_gaps_and_exponents(monkeypatch):
    monkeypatch.setattr(cards, "lost", lambda studies: statistics.around(0.5, 0.1, 3))
    found, law = cards.break_even(), scaling.fit_law(scaling.read_runs("paper"))
    assert [of["depth"] for of in found] == [12, 20, 26, 32]
    for of in found:
        blocks, head = 12 * of["depth"] * (64 * of["depth"]) ** 2, 65536 * 64 * of["depth"]
        b = scaling.exponent_of_tokens(law, blocks, 20 * (blocks + 2 * head))
        assert of["b"] == pytest.approx([0.084, b], abs=0.0006) and of["weights"] == blocks + head
        assert of["ratio"] == pytest.approx([1.005 ** (1 / 0.084), 1.005 ** (1 / b)], abs=2e-3)
        low, high = of["interval"]
        assert low < of["ratio"][1] < high
    assert found[1]["b"][1] == 0.036
    monkeypatch.setattr(cards, "lost", lambda studies: None)
    assert cards.break_even() == []


def test_what_is_lost_is_paired_by_seed(monkeypatch):
    """A seed that lacks one of the two methods does not count."""

    def runs(first: int, **gaps: list[float]) -> dict:
        values = [(m, seed, 1 + g / 100) for m, of in gaps.items() for seed, g in enumerate(of, first)]
        return {"results": [{"method": m, "size": "d6", "seed": s, "val_bpb": v} for m, s, v in values]}

    studies = {"new": runs(10, bf16=[0, 0], clover_fp8_forward=[0.9, 0.9])}
    studies["old"] = runs(0, bf16=[0, 0, 0], fp8=[0.1, 0.3, 5], clover_fp8_forward=[0.4])
    studies["third"] = runs(20, bf16=[0], fp8=[0.3], clover_fp8_forward=[0.7])
    monkeypatch.setattr(cards.kept_runs, "stored", studies.__getitem__)
    found = cards.lost(("new", "old", "third"))
    assert found.n == 2 and found.mean == pytest.approx(0.35) and found.low < 0.3 < 0.4 < found.high
    assert cards.lost(("new",)) is None


def test_the_gaps_beside_a_method_are_those_of_the_results():
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8").split("\n## ")[1]
    rows = dict(re.findall(r"^\| (\w+) \| [^|]*; [^|]* \| ([\d.]+ ± [\d.]+) \|", page, re.M))
    assert cards.gaps() == ", ".join(f"{m} {rows[m]}" for m in ("fp8", "clover_fp8_forward", "clover"))


def test_the_ladder_of_others_has_what_two_thirds_in_4_bits_would_gain():
    of = cards.lora()
    assert of["source"].startswith("surogate") and "LoRA" in of["what"]
    assert list(of["ratio"].values())[::3] == [[1.01, 1.01], [1.28, 1.17]]  # 36.4 / 35.9 and 6.9 / 5.4


def test_measured_products_agree_with_data_sheets():
    """PRO cards do not halve their BF16 rate with FP32 sums: a sheet's 252 TFLOP/s for one that makes 334 to 417 turned
    a comparison with FP8 round."""
    both = {
        name: (card["bf16_products"], get_peak_flops(name)) for name, card in BY_NAME.items() if "bf16_products" in card
    }
    assert {"RTX 5090", "RTX PRO 6000"} <= {name for name, (_, peak) in both.items() if peak}
    for name, ((low, high), peak) in both.items():
        assert low <= high and (peak is None or 0.6 * peak <= low * 1e12 and high * 1e12 <= 1.15 * peak), name


def test_the_command_prints_a_table_or_the_file(capsys):
    cards.main(["--json"])
    assert json.loads(capsys.readouterr().out)["cards"]
    cards.main([])
    lines = capsys.readouterr().out.splitlines()
    of_4090 = [line for line in lines if "RTX 4090" in line]
    assert len(of_4090) == 2 and all("llmq" in line for line in of_4090) and len(lines) < 70
