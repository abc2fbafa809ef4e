"""
Compares the results of short runs before and after a change of the code, by hashes ("golden hashes").

    python -m lab.golden record FILE.json [--only PATTERN ...] [--nanochat CHECKOUT]
    python -m lab.golden compare FILE.json [--only PATTERN ...] [--gone NAME ...] [--nanochat CHECKOUT]

Cases have names such as tok, api/ROUNDING, method/METHOD, fsdp/METHOD, mid/clover and export-gpt/FORMAT, which are the
keys of FILE. Each training case runs twice on the CPU. The first run is not interrupted. The second one is killed
(SIGKILL two steps after the save in the middle) and resumed. Both must leave the same contents.

Each part of a case has a hash, for example the weights, or one entry of the optimizer's file. A part named "bytes of"
is a whole .pt file. If a case differs in such parts alone, only the layout of its files is new. Times, the commit, the
folder of the run, and the environment that a model card names are left out.

compare ends with status 1 if a part differs, or if a name is gone or new. Hashes hold for one processor, one release of
torch and one set of optional packages, because BLAS sums in another order elsewhere. FILE.json must therefore be made
on the machine that compares. Runs are forks of one process, which has imported everything and computes nothing.
"""

import argparse
import fnmatch
import gc
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import platform
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

for _name in ("QAT_METHOD", "DATA_DIR", "WANDB_RUN", "TRACKER", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
    os.environ.pop(_name, None)
os.environ.update(OMP_NUM_THREADS="1", WANDB_MODE="disabled", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")

import torch  # noqa: E402
import torch._dynamo  # noqa: E402 (otherwise each fork would import it)

import nanochat_fp4 as nf  # noqa: E402
from lab import ROOT  # noqa: E402
from lab.recipes import RECIPES  # noqa: E402

MODULES = [f"scripts.{s}" for s in ("base_train", "mid_train", "chat_sft", "tok_train", "export")]
MODULES.append("lab.bench.parallel")
FORMATS = ("safetensors", "compressed-tensors", "gguf", "gguf-bf16")
# Methods that change during a run. Their runs must be long enough to see it, and one changes at 97% of the steps.
LATE, STEPS, LONG = ("nvidia_full", "clover_late", "clover_feedback_late"), 8, {"clover_feedback_late": 34}
LEFT_OUT = {"dt", "tok_per_sec", "mfu", "training_seconds", "commit", "environment", "config_key", "config", "backend"}

RUN = "--device-type=cpu --keep-last=-1 --resume-from-step=latest --eval-every=4"
BASE = "--head-dim=64 --core-metric-every=-1 --sample-every=-1 --device-batch-size=2"
SMALL = f"{BASE} --depth=1 --aspect-ratio=128 --max-seq-len=32 --total-batch-size=128 --eval-tokens=128"
CHAIN = f"{BASE} --depth=2 --aspect-ratio=64 --max-seq-len=128 --total-batch-size=512 --eval-tokens=512"
LLAMA = f"{BASE} --llama=tiny --max-seq-len=64 --total-batch-size=256 --eval-tokens=256 --method=clover"
MID = "--data=local --device-batch-size=2 --total-batch-size=512 --eval-tokens=512"
SFT = "--data=local --device-batch-size=2 --target-examples-per-step=4 --eval-steps=2 --eval-metrics-every=4"
SFT += " --eval-metrics-max-problems=6"
TP = "--depth=2 --aspect-ratio=128 --head-dim=128 --vocab-size=256 --seq-len=32 --micro-batch=1 --total-batch-size=64"
UPSTREAM = "--depth=2 --max-seq-len=128 --window-pattern=L --device-batch-size=1 --total-batch-size=512 --eval-every=4"
UPSTREAM += " --device-type=cpu --num-iterations=8 --eval-tokens=512 --core-metric-every=-1 --sample-every=-1"

Parts = dict[str, str]  # The name of a part -> its hash.
COUNTED = ("sent", "sent_bytes", "predicted_bytes")


# ----------------------------------------------------------------------------------------------------------------------
# Hashes


def digest(value: Any) -> str:
    """Returns a hash of a value. The order of a dict does not count, nor do the strides and the storage of a tensor."""
    sha = hashlib.sha256()

    def add(v: Any) -> None:
        if isinstance(v, torch.Tensor):
            add(f"tensor {v.dtype} {tuple(v.shape)}")
            sha.update(v.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(v, dict):
            keys = sorted(v.keys() - {"differentiable"}, key=repr)  # torch adds this key when it loads an optimizer.
            add(f"dict {len(keys)}")
            for item in (item for key in keys for item in (key, v[key])):
                add(item)
        elif isinstance(v, (list, tuple)):
            for item in (f"{type(v).__name__} {len(v)}", *v):
                add(item)
        else:
            data = v if isinstance(v, bytes) else repr(v).encode()
            sha.update(f"{type(v).__name__} {len(data)} ".encode() + data)

    add(value)
    return sha.hexdigest()[:24]


def read_json(text: str, folder: Path) -> Any:
    """Reads JSON, without the entries that differ from one run to the next."""
    hook = lambda d: {k: v for k, v in d.items() if k not in LEFT_OUT}  # noqa: E731
    return json.loads(text.replace(str(folder), "FOLDER"), object_hook=hook)


def of_checkpoints(tree: Path, work: Path) -> Parts:
    """Returns the parts of a folder of checkpoints with a single model tag: everything that it holds."""
    files = sorted(next(p for p in tree.iterdir() if p.is_dir()).iterdir())
    parts: Parts = {"names of files": digest([p.name for p in files])}
    for path in files:
        kind, step, *_ = path.stem.split("_") + [""]
        if path.suffix == ".pt":
            content = torch.load(path, map_location="cpu", weights_only=True)
            entries = content.items() if kind == "optim" and isinstance(content, dict) else [("", content)]
            name = f"{step} {path.stem.replace(f'_{step}', '')}"
            parts |= {f"{name} {key}".strip(): digest(value) for key, value in entries}
            parts[f"bytes of {path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()[:24]
        elif path.name == "metrics.jsonl":
            records = [read_json(line, work) for line in path.read_text().splitlines()]
            parts["metrics: start"] = digest([r for r in records if r["event"] == "start"][:1])
            parts["metrics"] = digest([r for r in records if r["event"] != "start"])
        elif kind == "manifest":
            manifest = json.loads(path.read_text())
            names = [f["name"] for f in manifest.pop("files")]
            parts[f"{step} manifest"] = digest([manifest, names])
        else:
            meta = read_json(path.read_text(), work)
            parts |= {f"{step} meta, {key}": digest(value) for key, value in meta.items()}
    return parts


def of_export(folder: Path, work: Path) -> Parts:
    """Returns the parts of an export: each file byte by byte, except for the line of the model card that names the
    processor and the release of torch."""
    files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    card = files["README.md"].replace(str(work).encode(), b"FOLDER")
    files["README.md"] = re.sub(rb" validation tokens, on .*", b"", card)
    return {name: hashlib.sha256(files[name]).hexdigest()[:24] for name in sorted(files)}


# ----------------------------------------------------------------------------------------------------------------------
# Runs: forks of this process


def run(base: Path, module: str, argv: str, *, ranks: int = 1, kill_at: int = 0, checkout: str = "") -> str:
    """Runs `python -m module argv` in a fork for each rank, with `base` as NANOCHAT_BASE_DIR. Returns the output of
    rank 0.

    kill_at: rank 0 kills itself two steps after it has saved this step. 0 means never.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    os.environ.update(NANOCHAT_BASE_DIR=str(base), DATA_DIR=str(base.parent / "text"), NANOCHAT_DIR=checkout)
    pids = []
    for rank in range(ranks):
        pids.append(os.fork())
        if not pids[-1]:
            os.environ.update(env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {})
            _child(module, argv, base / f"log_{rank}.txt", 0 if rank else kill_at, checkout)
    status = os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1])
    for pid in pids[1:]:
        if status:
            os.kill(pid, signal.SIGKILL)
        status = status or os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = (base / "log_0.txt").read_text(errors="replace")
    expected = -signal.SIGKILL if kill_at else 0
    assert status == expected, f"{module} {argv}: status {status}, expected {expected}\n{text[-1500:]}"
    return text


def _child(module: str, argv: str, log: Path, kill_at: int, checkout: str) -> None:
    status = 1
    try:
        sys.stdout = sys.stderr = log.open("w", buffering=1)
        for fd in (1, 2):
            os.dup2(sys.stdout.fileno(), fd)
        os.fsync = lambda fd: None  # It is not needed, because a killed process loses nothing that was written.
        if kill_at:
            _kill_after_save(kill_at)
        if checkout:
            _enter_checkout()
        sys.argv = [module, *argv.split()]
        sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _kill_after_save(step: int) -> None:
    """Lets this process kill itself at the second record of metrics.jsonl after the manifest of this step is saved."""
    records: list[str] = []

    def hook(event: str, args: tuple) -> None:
        if event == "os.rename" and str(args[1]).endswith(f"manifest_{step:06d}.json"):
            records.append("the manifest")
        elif event == "open" and records and str(args[0]).endswith("metrics.jsonl"):
            records.append("a record")
            if len(records) == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _enter_checkout() -> None:
    """Makes this process like a new one in a checkout of nanochat, which has other `scripts`. Packages that nanochat
    imports but does not use here may be missing."""
    for name in [n for n in sys.modules if n.split(".")[0] == "scripts"]:
        del sys.modules[name]
        inspect._filesbymodname.pop(name, None)  # Otherwise inspect would look for files of our `scripts`.
    sys.dont_write_bytecode = True
    torch.compile = lambda function=None, **how: function or (lambda f: f)  # Compiling takes minutes on a CPU.
    names = ("psutil", "wandb", "tokenizers", "tokenizers.models", "tokenizers.trainers")
    missing = [name for name in names if importlib.util.find_spec(name.split(".")[0]) is None]
    for name in missing:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(__getattr__=lambda name: object, __file__=f"{name}.py")


# ----------------------------------------------------------------------------------------------------------------------
# Cases


def prepare(work: Path) -> None:
    """Makes a text and a tokenizer."""
    words = "the of capital gold planets hot day color France opposite symbol was tomorrow number cat dog runs".split()
    rng = random.Random(0)
    texts = [" ".join(rng.choices(words, k=rng.randint(20, 200))) + "." for _ in range(600)]
    for name in ("text", "made"):
        (work / name).mkdir()
    write = "import json, sys, pyarrow as pa, pyarrow.parquet as pq\nfor path, texts in json.load(sys.stdin):\n"
    write += "    pq.write_table(pa.table({'text': texts}), path, row_group_size=30)\n"
    shards = [(str(work / f"text/shard_{i:05d}.parquet"), texts[300 * i :][:300]) for i in range(2)]
    # The shards are written in another process, because pyarrow starts threads and this process forks.
    subprocess.run([sys.executable, "-c", write], input=json.dumps(shards), text=True, check=True)
    run(work / "made", "scripts.tok_train", "--vocab-size=300")


class Cases:
    """The jobs. Each one runs in a process of its own, and returns {name of a case: its parts}."""

    def __init__(self, work: Path, nanochat: str, formats: list[str]):
        self.work, self.nanochat = work, nanochat
        self.formats = {"gpt": [f for f in formats if not f.startswith("gguf")], "llama": formats}

    def folder(self, name: str) -> Path:
        """Makes a base directory with the tokenizer, beside the text."""
        return shutil.copytree(self.work / "made/tokenizer", self.work / name / "tokenizer").parent

    def tok(self) -> dict[str, Parts]:
        """Hashes the tokenizer."""
        folder = self.work / "made/tokenizer"
        token_bytes = torch.load(folder / "token_bytes.pt", weights_only=True)
        made = {"tokenizer.json": (folder / "tokenizer.json").read_bytes(), "token_bytes": token_bytes}
        return {"tok": {k: digest(v) for k, v in made.items()}}

    def api(self, rounding: str) -> dict[str, Parts]:
        """Quantizes and rotates a fixed tensor with a rounding."""
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(64, 128, generator=generator) * torch.randn(128, generator=generator).exp()
        t = nf.quantize(x, rounding, seed=3)
        made = {"codes": t.codes, "scales": t.scales, "tensor_scale": t.tensor_scale, "value": t.dequantize()}
        return {f"api/{rounding}": {k: digest(v) for k, v in (made | {"rotate": nf.rotate(x, seed=3)}).items()}}

    def trained(self, module: str, argv: str, tree: str, base: Path, late=False, steps=STEPS, ranks=1) -> Parts:
        """Returns the parts of an uninterrupted run in `base`. A run in a copy of `base` that is killed and resumed
        must leave the same contents."""
        argv, half = f"{argv} {RUN} --num-iterations={steps} --save-every={steps // 2}", steps // 2
        copy = shutil.copytree(base, base.with_name(base.name + "_killed"))
        assert "from here on" in run(base, module, argv, ranks=ranks) or not late, "the method has not changed"
        run(copy, module, argv, ranks=ranks, kill_at=half)
        assert f"Resuming from step {half}" in run(copy, module, argv, ranks=ranks), "not resumed from the middle"
        straight, resumed = (of_checkpoints(b / tree, self.work) for b in (base, copy))
        shutil.rmtree(copy)
        wrong = [part for part in differing(straight, resumed) if not part.startswith("bytes of")]
        assert not wrong, f"killed and resumed differs from straight: {', '.join(wrong)}"
        return straight

    def method(self, mode: str, name: str) -> dict[str, Parts]:
        """Pre-trains with a method: in one process (mode "method"), or in two with ddp or fsdp."""
        base, ranks = self.folder(f"{mode}_{name}"), 1 if mode == "method" else 2
        flags = f"{SMALL} --method={name} --parallel={'fsdp' if mode == 'fsdp' else 'ddp'}"
        flags += " --total-batch-size=64" if name in LONG else ""
        steps = LONG.get(name, STEPS)
        parts = self.trained("scripts.base_train", flags, "base_checkpoints", base, name in LATE, steps, ranks)
        looked = any("method" in part.split() for part in parts)
        assert looked or not name.startswith("clover_feedback"), "the run has not looked at inputs: no method_*.pt"
        return {f"{mode}/{name}": parts}

    def tensor_parallel(self, name: str) -> dict[str, Parts]:
        """Trains steps with tensor parallelism in two processes, by lab.bench parallel."""
        base = self.folder(f"tp_{name}")
        flags = f"parallel {TP} --parallel=tp --seconds=0.001 --method={name} --json={base}/row.json"
        run(base, "lab.bench", flags, ranks=2)
        row = json.loads((base / "row.json").read_text())
        kept = ("loss", "state_gib", "micro_batches", "mode", "gpus")
        return {f"tp/{name}": {key: digest(row[key]) for key in kept}}

    def chain(self, family: str) -> dict[str, Parts]:
        """Runs a model's stages one after the other, and exports the last model."""
        base, made, outs = self.folder(family), {}, {}
        if family == "gpt":
            run(base, "scripts.base_train", f"{CHAIN} {RUN} --method=clover --num-iterations=8")
            made["mid/clover"] = self.trained("scripts.mid_train", MID, "mid_checkpoints", base)
            made["sft/clover"] = self.trained("scripts.chat_sft", SFT, "chatsft_checkpoints", base)
        else:
            made["llama/clover"] = self.trained("scripts.base_train", LLAMA, "base_checkpoints", base)
        source = f"--source={'sft' if family == 'gpt' else 'base'} --calibration-tokens=512 --eval-tokens=512"
        for name in self.formats[family]:
            outs[f"export-{family}/{name}"] = out = base / f"exported_{name}"
            run(base, "scripts.export", f"{source} --format={name} --out={out} --device-type=cpu")
        return made | {name: of_export(out, self.work) for name, out in outs.items()}

    def upstream(self, name: str) -> dict[str, Parts]:
        """Trains a tokenizer and a model by the scripts of a nanochat checkout."""
        base = self.work / f"upstream_{name}"
        shutil.copytree(self.work / "text", base / "base_data")
        for script in ("scripts.tok_train -- --vocab-size=300 --max-chars=100000", f"scripts.base_train -- {UPSTREAM}"):
            text = run(base, "nanochat_fp4.upstream", f"--method={name} {script}", checkout=self.nanochat)
        parts = of_checkpoints(base / "base_checkpoints", self.work)
        lines = [line.partition("| dt:")[0] for line in text.splitlines() if re.match(r"step \d+/|Step \d+ \|", line)]
        return {f"upstream/{name}": parts | {"losses that it prints": digest(lines)}}

    def jobs(self) -> list[tuple[list[str], Callable[..., dict[str, Parts]], tuple[str, ...]]]:
        """Returns the jobs as (names of cases, the function that makes them, its arguments). Long jobs come first."""
        chains = {f: [f"export-{f}/{name}" for name in names] for f, names in self.formats.items()}
        jobs = [(["mid/clover", "sft/clover", *chains["gpt"]], self.chain, ("gpt",))]
        names = [("method", name) for name in sorted((*nf.METHODS, *RECIPES), key=lambda name: name not in LONG)]
        names += [("ddp", "clover"), *(("fsdp", name) for name in ("clover", "clover_feedback", "nvidia"))]
        jobs += [(["/".join(pair)], self.method, pair) for pair in names]
        jobs += [(["llama/clover", *chains["llama"]], self.chain, ("llama",)), (["tok"], self.tok, ())]
        jobs += [([f"tp/{name}"], self.tensor_parallel, (name,)) for name in ("bf16", "clover", "nvidia")]
        jobs += [([f"api/{name}"], self.api, (name,)) for name in nf.ROUNDINGS]
        if self.nanochat:
            jobs += [([f"upstream/{name}"], self.upstream, (name,)) for name in ("bf16", "clover", "nvidia")]
        return jobs


# ----------------------------------------------------------------------------------------------------------------------
# The command


def make(jobs: list[tuple], work: Path, together: int, keep: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Runs the jobs, `together` at a time. Returns {name: its parts, or a traceback}. A line is printed for each
    finished job, and `keep` is called with all results so far."""
    made: dict[str, Any] = {}
    running: dict[int, tuple[list[str], float]] = {}
    waiting = list(jobs)
    while waiting or running:
        while waiting and len(running) < together:
            names, job, arguments = waiting.pop(0)
            sys.stdout.flush()
            pid = os.fork()
            if not pid:
                try:
                    result = job(*arguments)
                except BaseException:
                    result = dict.fromkeys(names, traceback.format_exc())
                (work / f"result_{os.getpid()}.json").write_text(json.dumps(result))
                os._exit(0)
            running[pid] = names, time.monotonic()
        pid, _ = os.wait()
        names, began = running.pop(pid)
        new = json.loads((work / f"result_{pid}.json").read_text())
        made |= new
        keep(made)
        bad = next((f" FAILED: {parts}" for parts in new.values() if isinstance(parts, str)), "")
        done = len(jobs) - len(waiting) - len(running)
        print(f"{done}/{len(jobs)} {names[0]}, {time.monotonic() - began:.0f} s{bad}", flush=True)
    return made


def differing(before: Parts, after: Parts) -> list[str]:
    """Returns the names of the parts that differ between two cases."""
    return sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))


def compare(recorded: dict[str, Any], made: dict[str, Any], gone: list[str]) -> int:
    """Prints the differences by case. Returns the number of cases that differ."""
    wrong = 0
    for name in sorted(recorded | made):
        before, after = recorded.get(name), made.get(name)
        if before and name.startswith("tp/"):  # Bytes are not compared, because the tests count them.
            before = {part: value for part, value in before.items() if part not in COUNTED}
        if before == after:
            continue
        expected = after is None and (name in gone or name.rpartition("/")[2] in gone)
        wrong += not expected
        if after is None or before is None or isinstance(after, str):
            print(f"{'gone' if after is None else 'failed' if isinstance(after, str) else 'new'}: {name}")
            continue
        parts = differing(before, after)
        content = [part for part in parts if not part.startswith("bytes of")]
        what = "differs" if content else "the layout of files differs, contents are equal"
        print(f"{what}: {name}: {'; '.join(content or parts)}")
    return wrong


def main() -> int:
    began, about = time.monotonic(), "Golden hashes of short runs: see the top of lab/golden.py"
    parser = argparse.ArgumentParser(allow_abbrev=False, description=about)
    add = parser.add_argument
    add("what", choices=("record", "compare"))
    add("file", type=Path, help="JSON; record adds to the cases that it has")
    add("--only", nargs="+", default=["*"], metavar="PATTERN", help="names of cases: 'method/clover*'")
    add("--gone", nargs="+", default=[], metavar="NAME", help="removed on purpose: a method, or a case")
    add("--nanochat", default="", metavar="CHECKOUT")
    add("--jobs", type=int, default=1, help="cases at the same time")
    args = parser.parse_args()
    if Path(nf.__file__).resolve().parent.parent != ROOT:
        sys.exit(f"nanochat_fp4 is that of {Path(nf.__file__).parent}, not of {ROOT}; set PYTHONPATH={ROOT}")
    torch.set_num_threads(1)
    for name in (*MODULES, "nanochat_fp4.upstream"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # Otherwise each fork would copy the memory that its garbage collector looks at.

    def chosen(names: Any) -> list[str]:
        return [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in args.only)]

    formats = [f for f in FORMATS if not f.startswith("gguf") or importlib.util.find_spec("gguf")]
    if skipped := [*set(FORMATS) - set(formats), *([] if args.nanochat else ["upstream (no --nanochat)"])]:
        print(f"not run: {', '.join(sorted(skipped))}")
    about = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    try:
        old = args.what == "compare" or args.file.exists()
        file = json.loads(args.file.read_text()) if old else {"about": about, "cases": {}}
        known, recorded_with = file["cases"], file["about"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        sys.exit(f"error: {args.file} is not a file of lab.golden record ({e}); make it first")

    def keep(made: dict[str, Any]) -> None:
        new = {name: made[name] for name in chosen(made) if isinstance(made[name], dict)}
        args.file.write_text(json.dumps({"about": about, "cases": known | new}, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="golden_") as work:
        prepare(Path(work))
        cases = Cases(Path(work), args.nanochat and str(Path(args.nanochat).resolve()), formats)
        jobs = [job for job in cases.jobs() if chosen(job[0])]
        made = make(jobs, Path(work), args.jobs, keep if args.what == "record" else lambda made: None)
    made = {name: made[name] for name in chosen(made)}
    wrong = sum(isinstance(parts, str) for parts in made.values())
    if args.what == "compare":
        if recorded_with != about:
            print(f"note: recorded with {recorded_with}, this is {about}")
        left = ("upstream/",) * (not args.nanochat) + ("export-llama/gguf",) * (len(formats) < len(FORMATS))
        wrong = compare({k: known[k] for k in chosen(known) if not k.startswith(left)}, made, args.gone)
    print(f"{len(made)} cases made, {wrong} {'failed' if args.what == 'record' else 'differ'}")
    print(f"{time.monotonic() - began:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
