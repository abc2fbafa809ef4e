"""Shows measurements of lab.bench beside published numbers, and writes the file that the owner of a card can send.

    python -m lab.bench compare layers.json steps.json --card my_card.json

The published numbers are whole steps and linear layers that others, or this project, measured on other machines. Text,
batch and versions differ, so ratios to BF16 can be compared rather than tokens/s.
"""

import json
from pathlib import Path

from lab import table
from lab.bench.layers import TOKENS
from lab.cards import published
from nanochat_fp4.cli import ArgumentParser, UserError, one_line
from nanochat_fp4.files import atomic_write

# (GPU, model) -> milliseconds of forward and backward of the layers of the paper's Table 6 in BF16 and NVFP4. The
# source for the RTX 5090 is Quartet II, notebooks/plots.ipynb. That for the H200, where 4 bits are emulated, is
# lab/results/bench.json.
LAYERS = {
    ("RTX 5090, Quartet II", "800M"): (24.1, 7.71),
    ("RTX 5090, Quartet II", "3B"): (51.0, 14.01),
    ("RTX 5090, Quartet II", "7B"): (88.2, 22.66),
    ("RTX 5090, Quartet II", "22B"): (193.4, 46.22),
    ("H200, here", "800M"): (7.793, 9.531),
    ("H200, here", "3B"): (17.20, 19.28),
    ("H200, here", "7B"): (30.74, 33.10),
}
# The fields that a card's file holds. None of them was named by the owner of the machine.
ENVIRONMENT = ("python", "torch", "triton", "cuda", "gpu", "gpu_count", "gpu_memory_gb", "compute_capability", "driver")
SETTINGS = ("tokens", "seq_len", "vocab_size", "total_batch_size", "window_pattern", "memory_cap")
NAMES = ("model", "pass", "method", "mode", "variant", "recompute", "head", "name", "limit")


def published_steps() -> dict[tuple[str, int], tuple[float, float]]:
    """Returns the published whole steps: (card and source, depth) -> tokens/s in BF16 and in NVFP4. If BF16 was not
    timed, FP8 takes its place."""
    found = {}
    for card in published():
        for rate in card["rates"]:
            pair = [k for k in ("bf16", "fp8") if k in rate and "nvfp4" in rate]
            if "depth" in rate and pair:
                over = "" if pair[0] == "bf16" else "; for BF16: FP8"
                where = f"{rate['gpus']} x {card['name']}, {rate['source']} ({rate['note']}{over})"
                found[where, rate["depth"]] = (rate[pair[0]], rate["nvfp4"])
    return found


def read(path: str) -> dict:
    """Returns the content of a file of lab.bench. Raises UserError for any other file."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        _ = content["environment"]["gpu"], content["records"], content["benchmark"], content["settings"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        problem = "is not there" if isinstance(e, FileNotFoundError) else f"is no JSON of lab.bench ({one_line(e)})"
        raise UserError(f"{path} {problem}; make one with dev/measure.sh") from e
    return content


def card(parts: list[dict], statuses: dict[str, int]) -> dict:
    """Returns the content that the owner of a card sends: numbers, versions, and the names of the GPU and the methods.
    `statuses` are the exit statuses of the parts of dev/measure.sh."""
    kept = []
    for part in parts:
        kept.append({"benchmark": part["benchmark"], "records": []})
        kept[-1]["environment"] = {k: part["environment"].get(k) for k in ENVIRONMENT}
        kept[-1]["settings"] = {k: part["settings"][k] for k in SETTINGS if k in part["settings"]}
        for r in part["records"]:
            known = {k: v for k, v in r.items() if k in NAMES or not isinstance(v, str | list | dict)}
            kept[-1]["records"].append(known | {"problem": bool(r.get("problem"))})
    return {"statuses": statuses, "parts": kept}


def comparison(parts: list[dict]) -> list[list[str]]:
    """Returns rows [what, where, BF16, 4 bits, speed-up]. Below each measurement stand the published ones of the same
    layers or steps."""
    rows = []
    for part in parts:
        here = part["environment"]["gpu"] or "this CPU"
        times: dict[object, dict[str, float]] = {}
        for r in part["records"]:
            if part["benchmark"] == "bench_linear" and r["pass"] == "forward+backward" and r["mode"] == "graph":
                times.setdefault(r["model"], {})[r["method"]] = r["ms"]
            if part["benchmark"] == "bench_train" and r.get("tokens_per_second") and r["recompute"] == "none":
                times.setdefault(r["depth"], {}).setdefault(r["method"], r["tokens_per_second"])
        for key, of in times.items():
            if not {"bf16", "clover"} <= of.keys():
                continue
            pair, layers = (of["bf16"], of["clover"]), part["benchmark"] == "bench_linear"
            what = f"{key}, layers, {TOKENS} tokens" if layers else f"d{key}, steps"
            known = {where: v for (where, k), v in (LAYERS if layers else published_steps()).items() if k == key}
            for where, (bf16, four) in ({f"{here}, measured now": pair} | known).items():
                unit, ratio = ("ms", bf16 / four) if layers else ("tokens/s", four / bf16)
                rows.append([what, where, f"{bf16:,.5g} {unit}", f"{four:,.5g} {unit}", f"{ratio:.2f}x"])
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description="Measured numbers beside published ones")
    parser.add_argument("json", nargs="+", help="files of lab.bench layers and steps")
    parser.add_argument("--card", default="", help="also write the numbers of all files into this one, to be sent")
    parser.add_argument("--statuses", default="", help="exit statuses for --card: doctor=0,train=2")
    args = parser.parse_args(argv)
    parts = [read(path) for path in args.json]
    if args.card:
        pairs = (pair.split("=") for pair in args.statuses.split(",") if pair)
        statuses = {name: int(status) for name, status in pairs}
        if not (folder := Path(args.card).resolve().parent).is_dir():
            raise UserError(f"--card={args.card}: there is no folder {folder}; make it, or name another file")
        atomic_write(Path(args.card), json.dumps(card(parts, statuses), indent=1) + "\n")
    print(table(["", "card", "BF16", "clover, or NVFP4", "speed-up"], comparison(parts)))
