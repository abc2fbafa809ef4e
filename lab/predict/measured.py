"""Predictions beside this project's own measurements.

python -m lab.predict.measured linear.json train.json      # of bench_linear and bench_train
"""

import json
from pathlib import Path

from lab.predict.blackwell import LAYER_SETS
from nanochat_fp4.console import ArgumentParser, table
from nanochat_fp4.errors import UserError, run_main
from nanochat_fp4.nvfp4.methods import METHOD_TABLE, get_recipe
from nanochat_fp4.step_time import (
    MACHINES,
    Machine,
    Shape,
    is_predictable,
    layer_steps,
    machine_of,
    predicted_ms,
    tokens_per_second,
)


def layer_set_ms(machine: Machine, model: str, method: str, tokens: int, backward: bool) -> float:
    """Predicted milliseconds of the layers of a model of the paper's Table 6, one after the other."""
    recipe = get_recipe(method)
    native = machine.fp4 is not None and recipe.quantizes
    sizes = LAYER_SETS[model].values()
    steps = [s for k, n in sizes for s in layer_steps(recipe, tokens, k, n, backward=backward, native=native)]
    return sum(predicted_ms(step, machine) for step in steps)


def comparison(paths: list[str]) -> list[list[object]]:
    """[what, predicted, measured, off by] for each number of the JSONs of bench_linear and bench_train that the model
    knows. Raises UserError for a file that is not theirs or a GPU without numbers."""
    rows: list[list[object]] = []
    for path in paths:
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            gpu, records = content["environment"]["gpu"], content["records"]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise UserError(
                f"{path} is no JSON of bench_linear or bench_train ({e}); make one with dev/measure.sh"
            ) from e
        machine = machine_of(gpu or "")
        if machine is None:
            known = ", ".join(m.name for m in MACHINES.values())
            raise UserError(f"{path} was measured on {gpu}, of which nothing is predicted; there is: {known}")
        for r in records:
            row = _predicted(content["benchmark"], content["settings"], r, machine)
            if row:
                what, predicted, measured, unit = row
                off = f"{100 * (predicted / measured - 1):+.0f}%"
                rows.append([what, f"{predicted:,.4g} {unit}", f"{measured:,.4g} {unit}", off])
    return rows


def _predicted(benchmark: str, settings: dict, r: dict, machine: Machine) -> tuple[str, float, float, str] | None:
    """A benchmark's record as (name, predicted, measured, unit). None where nothing is predicted."""
    method = r.get("method")
    if r.get("problem") or not (method == "bf16" or (method in METHOD_TABLE and is_predictable(method))):
        return None
    if benchmark == "bench_linear" and r["mode"] == "graph":
        what = f"{r['model']}, {r['pass']}, {method}"
        ms = layer_set_ms(machine, r["model"], method, settings["tokens"], r["pass"] != "forward")
        return what, ms, r["ms"], "ms"
    if benchmark == "bench_train" and r.get("recompute") == "none":
        tokens = r["micro_batch"] * settings["seq_len"]
        speed = tokens_per_second(
            Shape(r["depth"], settings["vocab_size"]),
            method,
            machine,
            micro_batch=tokens,
            total_batch=settings["total_batch_size"],
            windowed="S" in settings["window_pattern"],
        )[""]
        return f"d{r['depth']}, micro-batch {r['micro_batch']}, {method}", speed, r["tokens_per_second"], "tokens/s"
    return None


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description="Predicted and measured times of this project's benchmarks")
    parser.add_argument("json", nargs="+", help="files of bench_linear and bench_train")
    args = parser.parse_args(argv)
    print(table(["", "predicted", "measured", "off by"], comparison(args.json)))


if __name__ == "__main__":
    run_main(main)
