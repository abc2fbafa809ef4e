"""Beyond the paper: where Clover's gap comes from."""

from lab.study import sweep_runs
from lab.study.reproduce_common import Context, Outcome
from lab.study.reproduce_training import compare, depth_of, one_size, training


def attribution_methods(depth: int) -> list[str]:
    """The runs that take clover apart, as "label: flags": operand, kind of layer, half of the depth, phase."""
    forward = "fig2_1x16_four_over_six"  # the forward of clover alone
    methods = {
        "bf16": sweep_runs.changed("bf16"),
        "all": sweep_runs.changed("clover"),
        "forward": sweep_runs.changed(forward),
        "forward, input": sweep_runs.changed("clover_input"),
        "forward, weight": sweep_runs.changed("clover_weight"),
        "backward": sweep_runs.changed("fig1e_ms_eden"),
        "backward, dgrad": sweep_runs.changed("fig1c_ms_eden"),
        "backward, wgrad": sweep_runs.changed("fig1a_ms_eden"),
    }
    for kind, pattern in sweep_runs.LAYER_KINDS.items():
        methods[f"forward, {kind}"] = sweep_runs.changed("bf16", f"{pattern}={forward}")
        methods[f"input, {kind}"] = sweep_runs.changed("bf16", f"{pattern}=clover_input")
        methods[f"weight, {kind}"] = sweep_runs.changed("bf16", f"{pattern}=clover_weight")
        methods[f"all but {kind}"] = sweep_runs.changed("clover", f"{pattern}=bf16")
    for half, blocks in (("first", range(depth // 2)), ("second", range(depth // 2, depth))):
        patterns = ",".join(f"transformer.h.{i}.*={forward}" for i in blocks)
        methods[f"forward, {half} half"] = sweep_runs.changed("bf16", patterns)
    for first, last in ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0)):
        end = f",{last}=bf16" if last < 1 else ""
        methods[f"steps {100 * first:.0f}-{100 * last:.0f}%"] = sweep_runs.changed("bf16", "", f"{first}=clover{end}")
    return [f"{label.replace(', ', '-').replace(' ', '_')}: {' '.join(flags)}" for label, flags in methods.items()]


def attribution(context: Context) -> Outcome:
    """Gaps of parts of clover."""
    size = one_size(context)
    methods = attribution_methods(depth_of(size))
    if context.quick:  # one of each sort
        wanted = ("bf16", "all", "forward-input", "forward-up", "all_but_up", "steps_75-100%")
        methods = [m for m in methods if m.partition(":")[0] in wanted]
    title = "Where Clover's gap comes from: only this part is quantized"
    outcome, results = training(context, "attribution", title, methods, [], [size], 20.0)
    outcome.rows = [[row[0], row[1], *row[3:]] for row in outcome.rows]
    outcome.header = ["size", "quantized", *outcome.header[3:]]
    compare(outcome, results, "all")
    return outcome
