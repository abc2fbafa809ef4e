"""Beyond the paper: the other systems, FP8, NVIDIA's recipe piece by piece, Chmiel, Tseng, MXFP4."""

from lab.study.reproduce_common import Context, Outcome
from lab.study.reproduce_training import Claim, compare, ends_in_bf16, one_size, training

OTHER_SYSTEMS = (
    "bf16", "fp8", "clover", "nvidia", "nvidia_fixed_signs", "nvidia_1d", "nvidia_no_rht", "nvidia_no_sr",
    "nvidia_late_forward", "nvidia_full", "chmiel", "tetrajet_v2", "tetrajet_v2_rht128", "tseng", "mxfp4_nvidia",
    "mxfp8",
)  # fmt: skip

# With --quick one of each sort.
QUICK = ("bf16", "fp8", "clover", "nvidia", "mxfp4_nvidia")


def systems(context: Context) -> Outcome:
    claims = [
        Claim("NVFP4 has a smaller gap than MXFP4 (NVIDIA: 1.5% and 2.5%)", "nvidia", "mxfp4_nvidia"),
        Claim(
            "a BF16 forward in the last 18% of the steps helps (NVIDIA: 1.5% to 0.5%)", "nvidia_late_forward", "nvidia"
        ),
    ]
    title = "Other systems: FP8, NVIDIA's recipe piece by piece, Chmiel, Tseng, MXFP4"
    chosen = [m for m in OTHER_SYSTEMS if m in QUICK or not context.quick]
    chosen.append(ends_in_bf16("nvidia", one_size(context)))
    outcome, results = training(context, "systems", title, chosen, claims, [one_size(context)], 20.0)
    compare(outcome, results, "clover")
    return outcome
