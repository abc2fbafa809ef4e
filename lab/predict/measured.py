"""Predictions beside measurements, this project's own and those that owners of a card sent.

python -m lab.predict.measured linear.json train.json                       # of bench_linear and bench_train
python -m lab.predict.measured linear.json train.json --card my_card.json   # the same numbers in one file to send
python -m lab.predict.measured --page docs/measured.md                      # from lab/results
"""

import json
from pathlib import Path

from lab import RESULTS
from lab.predict.blackwell import LAYER_SETS
from lab.predict.machines import Machine, machine_of
from lab.predict.step_time import Shape, is_counted, is_predictable, layer_steps, predicted_ms, tokens_per_second
from lab.recipes import RECIPES
from nanochat_fp4.console import ArgumentParser, table
from nanochat_fp4.errors import UserError, run_main
from nanochat_fp4.files import atomic_write
from nanochat_fp4.nvfp4.methods import METHODS, get_recipe


def layer_set_ms(machine: Machine, model: str, method: str, tokens: int, backward: bool) -> float:
    """Predicted milliseconds of the layers of a model of the paper's Table 6, one after the other."""
    recipe = get_recipe(method)
    native = machine.fp4 is not None and recipe.quantizes
    sizes = LAYER_SETS[model].values()
    steps = [s for k, n in sizes for s in layer_steps(recipe, tokens, k, n, backward=backward, native=native)]
    return sum(predicted_ms(step, machine) for step in steps)


# What a card's file holds: nothing that the owner of the machine named.
ENVIRONMENT = ("python", "torch", "triton", "cuda", "gpu", "gpu_count", "gpu_memory_gb", "compute_capability", "driver")
SETTINGS = ("tokens", "seq_len", "vocab_size", "total_batch_size", "window_pattern", "memory_cap")
NAMES = ("model", "pass", "method", "mode", "variant", "recompute", "kernel", "name", "limit")
H200 = ("bench_linear", "bench_train", "bench_train_32gib", "bench_train_methods", "bench_train_nanochat")
# What only a card can answer, and the command that does.
QUESTIONS = {
    "Are kernels, GEMMs and attention right, launch after launch?": "python -m nanochat_fp4.doctor",
    "How fast is a step, and which micro-batch fits?": "bash dev/measure.sh",
    "How far is cuBLASLt's FP4 GEMM from cuDNN's 1,510 TFLOP/s?": "python -m lab.measure.bench_linear --models 22B",
    "Which share of the issue rate do the rotating kernels reach?": "python -m lab.measure.bench_quantize",
    "Which attention is the fastest for sliding windows?": "python -m lab.measure.bench_train --window-pattern SSSL",
    "Which memory does a run of d26 take in 32 GiB?": "python -m lab.measure.bench_train --memory-cap 32GiB",
    "Do the predicted hours of a run hold?": "DEPTH=12 bash speedrun_fp4.sh",
}


def read(path: str | Path) -> list[dict]:
    """The results in a file of bench_linear, bench_train or of a card, or in a part of lab/results/bench.json.

    Raises UserError for another file.
    """
    try:
        kept = json.loads((RESULTS / "bench.json").read_text(encoding="utf-8"))
        content = kept.get(str(path)) or json.loads(Path(path).read_text(encoding="utf-8"))
        parts = content.get("parts", [content])
        for part in parts:
            _ = part["environment"]["gpu"], part["records"], part["benchmark"], part["settings"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{path} is no JSON of bench_linear or bench_train ({e}); make one with dev/measure.sh") from e
    return parts


def card(parts: list[dict], statuses: dict[str, int]) -> dict:
    """What the owner of a card sends: numbers, versions, the names of GPU and methods. statuses: of measure.sh."""
    kept = [{"benchmark": p["benchmark"], "settings": {}, "environment": {}, "records": []} for p in parts]
    for part, p in zip(kept, parts):
        part["environment"] |= {k: p["environment"].get(k) for k in ENVIRONMENT}
        part["settings"] |= {k: p["settings"][k] for k in SETTINGS if k in p["settings"]}
        for r in p["records"]:
            known = {k: v for k, v in r.items() if k in NAMES or not isinstance(v, str | list | dict)}
            part["records"].append(known | {"problem": bool(r.get("problem"))})
    return {"statuses": statuses, "parts": kept}


def comparison(parts: list[dict]) -> list[list[object]]:
    """[what, predicted, measured, off by] for each number that can be predicted; "-" for a GPU without a model."""
    rows: list[list[object]] = []
    for part in parts:
        machine = machine_of(part["environment"]["gpu"] or "")
        for r in part["records"]:
            row = _predicted(part["benchmark"], part["settings"], r, machine)
            if row:
                what, predicted, measured, unit = row
                off = f"{100 * (predicted / measured - 1):+.0f}%" if predicted else "-"
                rows.append([what, f"{predicted:,.4g} {unit}" if predicted else "-", f"{measured:,.4g} {unit}", off])
    return rows


def page(cards: list[Path]) -> str:
    """docs/measured.md: the H200 of this project, then the cards that were sent."""
    of_cards = [[part for name in H200 for part in read(name)], *map(read, cards)]
    lines = [
        "# Measured: what cards really did",
        "",
        "How far are predictions from measurements? On the only card so far within 5%, but for d20 in BF16 (6%): the",
        "model's BF16 rate is that of long GEMMs at the power limit. Made by",
        "`python -m lab.predict.measured --page docs/measured.md`. `bash dev/measure.sh` measures yours in 20 minutes,",
        "`python -m nanochat_fp4.doctor --send` says where to send it.",
        "",
        "| card | what | predicted | measured | off by |",
        "|---|---|---|---|---|",
    ]
    for parts in of_cards:
        gpu = parts[0]["environment"]["gpu"] or "a CPU"
        lines += [f"| {gpu} | {' | '.join(map(str, row))} |" for row in comparison(parts)]
    lines += ["", "## What only a card can answer", "", "| question | command |", "|---|---|"]
    return "\n".join([*lines, *(f"| {question} | `{command}` |" for question, command in QUESTIONS.items())]) + "\n"


def _predicted(
    benchmark: str, settings: dict, r: dict, machine: Machine | None
) -> tuple[str, float | None, float, str] | None:
    """A benchmark's record as (name, predicted, measured, unit). None where nothing can be predicted of any machine."""
    method = r.get("method")
    if r.get("problem") or not (method == "bf16" or (method in METHODS | RECIPES and is_predictable(method))):
        return None
    if benchmark == "bench_linear" and r["mode"] == "graph" and (method == "bf16" or is_counted(method)):
        what = f"{r['model']}, {r['pass']}, {method}"
        backward = r["pass"] != "forward"
        ms = machine and layer_set_ms(machine, r["model"], method, settings["tokens"], backward)
        return what, ms, r["ms"], "ms"
    if benchmark == "bench_train" and r.get("recompute") == "none" and r.get("tokens_per_second"):
        tokens = r["micro_batch"] * settings["seq_len"]
        batch = {"micro_batch": tokens, "total_batch": settings["total_batch_size"]}
        shape, windowed = Shape(r["depth"], settings["vocab_size"]), "S" in settings["window_pattern"]
        speed = machine and tokens_per_second(shape, method, machine, windowed=windowed, **batch)[""]
        return f"d{r['depth']}, micro-batch {r['micro_batch']}, {method}", speed, r["tokens_per_second"], "tokens/s"
    return None


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description="Predicted and measured times of this project's benchmarks")
    parser.add_argument("json", nargs="*", help="files of bench_linear and bench_train, or of cards")
    parser.add_argument("--card", default="", help="also write the numbers of all files into this one, to be sent")
    parser.add_argument("--statuses", default="", help="exit statuses for --card: doctor=0,train=2")
    parser.add_argument("--page", default="", help="write docs/measured.md, from lab/results/cards/*.json")
    args = parser.parse_args(argv)
    if args.page:
        atomic_write(Path(args.page), page(sorted((RESULTS / "cards").glob("*.json"))))
        return
    parts = [part for path in args.json for part in read(path)]
    if args.card:
        pairs = (pair.split("=") for pair in args.statuses.split(",") if pair)
        statuses = {name: int(status) for name, status in pairs}
        if not (folder := Path(args.card).resolve().parent).is_dir():
            raise UserError(f"--card={args.card}: there is no folder {folder}; make it, or name another file")
        atomic_write(Path(args.card), json.dumps(card(parts, statuses), indent=1) + "\n")
    print(table(["", "predicted", "measured", "off by"], comparison(parts)))


if __name__ == "__main__":
    run_main(main)
