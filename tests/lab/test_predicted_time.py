"""lab/predict/predicted_time.py: what a run's phases, feedback and length add to the predicted time."""

import pytest

from lab.predict import predicted_time, step_time
from lab.predict.machines import MACHINES
from lab.predict.predicted_time import mean_step_ms, over_clover, phases_of, recipe_ms
from nanochat_fp4.nvfp4.methods import get_recipe

CARD = MACHINES["rtx5090"]


def run(*flags: str, method: str = "", steps: int = 100) -> dict:
    return {"method": method, "steps": steps} | ({"flags": list(flags)} if flags else {})


def test_a_run_is_the_mean_of_its_phases_times_its_length():
    clover, feedback, refined = (
        recipe_ms(get_recipe(m), 20, CARD) for m in ("clover", "clover_feedback", "clover_refined")
    )
    assert clover < feedback < refined
    by_hand = 0.85 * feedback + 0.15 * refined
    late = run("--method=clover_feedback", "--method-phases=0.85=clover_refined", steps=110)
    assert mean_step_ms(phases_of(late), 20, CARD) == pytest.approx(by_hand)
    assert over_clover(late, 100) == pytest.approx(1.1 * by_hand / clover)
    assert over_clover(run(method="clover"), 100) == 1
    # What is left of the feedback: measured on an H200 at d26, growing with weights and width, on a slower memory.
    grown = (20 / 26) ** 4 * MACHINES["h200"].bandwidth / CARD.bandwidth
    assert feedback - clover == pytest.approx(step_time.FEEDBACK_MS * grown)


def test_the_same_computation_under_two_names_is_one():
    late = run(method="clover_feedback_late")
    spelled = run("--method=clover_feedback", "--method-phases=0.97=clover_refined", method="mine")
    assert predicted_time.computation(late) == predicted_time.computation(spelled)
    assert predicted_time.computation(late) != predicted_time.computation(run(method="clover_feedback"))


def test_what_is_not_counted_is_not_predicted():
    for flags in (["--method=clover_masked"], ["--method=clover", "--layer-methods=*.mlp.*=fp8"], ["--method=mxfp8"]):
        assert over_clover(run(*flags), 100) is None
    kept = recipe_ms(get_recipe("nvidia_full").final, 20, CARD)
    assert recipe_ms(get_recipe("clover"), 20, CARD) < kept < recipe_ms(get_recipe("bf16"), 20, CARD)
