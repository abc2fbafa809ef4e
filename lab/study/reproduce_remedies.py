"""Beyond the paper: what can be done about Clover's gap, and what it costs."""

from lab.study import sweep_results
from lab.study.reproduce_common import Context, Outcome
from lab.study.reproduce_training import WITH_OTHERS, ends_in_bf16, one_size, training

REMEDIES = (
    "clover_search", "clover_search_forward", "clover_search_backward", "clover_weight_search", "clover_warmup",
    "clover_late_bf16", "clover_late_forward", "clover_late_backward", "clover_refined", "clover_late_refined",
    "clover_late", "clover_late_fp8", "clover_up_fp8", "clover_qkv_fp8", "clover_up_bf16", "clover_fp8_input",
    "clover_fp8_weight", "clover_fp8_forward", "clover_rates_up", "clover_rates_down", "clover_less_decay",
    "clover_feedback", "clover_search_feedback", "clover_late_refined_bf16",
    "clover_feedback_late_bf16",
)  # fmt: skip

# With --quick one of each sort.
QUICK = ("clover_feedback", "clover_late_forward", "clover_up_fp8")


def remedies(context: Context) -> Outcome:
    chosen = [m for m in REMEDIES if m in QUICK or not context.quick]
    size = one_size(context)
    chosen = [*(WITH_OTHERS if context.args.results else ("bf16", "clover")), *chosen, ends_in_bf16("clover", size)]
    methods = list(dict.fromkeys(chosen))
    outcome, results = training(context, "remedies", "Remedies on top of Clover", methods, [], [size], 20.0)
    outcome.header = ["size", "method", "work in 4 / 8 / 16 bits, %", *outcome.header[3:]]
    outcome.header += ["minus clover", "of clover's", "BF16 forward: gap", "of clover's"]
    for row in outcome.rows:
        size, method = row[:2]
        work = next(r["gemm_work"] for r in results if (r["size"], r["method"]) == (size, method))
        row[2] = " / ".join(f"{100 * work[bits]:.1f}" for bits in ("4", "8", "16"))
        row.append("-" if method == "clover" else str(sweep_results.difference(results, size, method, "clover")))
        for value in ("val_bpb", "val_bpb_bf16"):
            gap, clover = (sweep_results.gap(results, size, m, value=value) for m in (method, "clover"))
            own = [str(gap)] if value != "val_bpb" else []
            row += ["-"] * (1 + len(own)) if method == "bf16" else [*own, f"{gap.mean / clover.mean:.2f}x"]
    outcome.notes += [
        "work: the linear layers' multiply-adds over all steps, by a GEMM's wider operand; more than 100% where "
        "operands have two terms",
        "a run is evaluated with the forward pass that it ends with; BF16 forward: the same weights, evaluated alike",
    ]
    return outcome
