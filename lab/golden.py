"""
Golden hashes: what short runs of the public entries leave behind, before and after a change of the code.

    python -m lab.golden record FILE.json [--only PATTERN ...]
    python -m lab.golden compare FILE.json [--only PATTERN ...] [--gone NAME ...]

A case is one name: tok, api/ROUNDING, method/METHOD, mid/clover, export/FORMAT, ... (`--list` prints all). Training
cases run twice on the CPU: straight, and killed (SIGKILL two steps after the save in the middle) and resumed. Both
must leave the same contents. A part of a case is one hash: the weights, one entry of the optimizer's file, ... Parts
that begin with "bytes of" are those of whole .pt files: where only such a part differs, the layout of the file does.
Left out: times, the commit, the folder of the run, and the environment that a model card names.

compare ends with status 1 where a part differs, or where a name is gone or new; --gone NAME is for what was removed on
purpose. --nanochat CHECKOUT adds the runs of nanochat_fp4.upstream. Hashes are of one processor, one release of torch
and one set of optional packages: BLAS sums in another order elsewhere. So FILE.json is made where it is compared, and
is not committed. Runs are forks of one process that imported everything; only public entries are named here.
"""

import argparse
import contextlib
import fnmatch
import gc
import hashlib
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

for _name in ("QAT_METHOD", "DATA_DIR", "WANDB_RUN", "TRACKER", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
    os.environ.pop(_name, None)
os.environ.update(OMP_NUM_THREADS="1", WANDB_MODE="disabled", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")

import torch
import torch._dynamo  # or each fork would import it

import nanochat_fp4 as nf

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("base_train", "mid_train", "chat_sft", "tok_train", "export", "bench_parallel")
FORMATS = ("safetensors", "compressed-tensors", "modelopt", "gguf", "gguf-bf16")
# Methods that change so late that eight steps end before. The others that change do so at 70% and 82%.
LATE, STEPS, LONG = ("nvidia_full", "clover_late", "clover_feedback_late"), 8, {"clover_feedback_late": 34}
TIMES = {"dt", "tok_per_sec", "mfu", "training_seconds", "commit", "environment", "config_key", "config", "backend"}

RUN = "--device-type=cpu --keep-last=-1 --resume-from-step=latest --eval-every=4".split()
BASE = "--head-dim=64 --core-metric-every=-1 --sample-every=-1 --device-batch-size=2".split()
SMALL = [*BASE, *"--depth=1 --aspect-ratio=128 --max-seq-len=32 --total-batch-size=128 --eval-tokens=128".split()]
CHAIN = [*BASE, *"--depth=2 --aspect-ratio=64 --max-seq-len=128 --total-batch-size=512 --eval-tokens=512".split()]
LLAMA = [*BASE, *"--llama=tiny --max-seq-len=64 --total-batch-size=256 --eval-tokens=256".split()]
MID = "--data=local --device-batch-size=2 --total-batch-size=512 --eval-tokens=512".split()
SFT = "--data=local --device-batch-size=2 --target-examples-per-step=4 --eval-steps=2 --eval-metrics-every=4".split()
SFT += ["--eval-metrics-max-problems=6"]
TP = "--depth=2 --aspect-ratio=128 --head-dim=128 --vocab-size=256 --seq-len=32 --micro-batch=1 --total-batch-size=64"
UPSTREAM = "--depth=2 --max-seq-len=128 --window-pattern=L --device-batch-size=1 --total-batch-size=512 --device-type=cpu"
UPSTREAM += " --num-iterations=8 --eval-every=4 --eval-tokens=512 --core-metric-every=-1 --sample-every=-1"

Parts = dict[str, str]  # what -> hash


# ----------------------------------------------------------------------------------------------------------------------
# Hashes


def digest(value: Any) -> str:
    """Of a value's content: neither the order of a dict, nor the strides and the storage of a tensor, counts."""
    sha = hashlib.sha256()

    def add(v: Any) -> None:
        if isinstance(v, torch.Tensor):
            add(f"tensor {v.dtype} {tuple(v.shape)}")
            sha.update(v.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(v, dict):
            keys = sorted(v.keys() - {"differentiable"}, key=repr)  # torch adds that to an optimizer that it loads
            add(f"dict {len(keys)}")
            for key in keys:
                add(key)
                add(v[key])
        elif isinstance(v, (list, tuple)):
            add(f"{type(v).__name__} {len(v)}")
            for item in v:
                add(item)
        else:
            data = v if isinstance(v, bytes) else repr(v).encode()
            sha.update(f"{type(v).__name__} {len(data)} ".encode() + data)

    add(value)
    return sha.hexdigest()[:24]


def cleaned(value: Any, folder: Path) -> Any:
    """JSON without what differs from one run to the next."""
    if isinstance(value, dict):
        return {k: cleaned(v, folder) for k, v in value.items() if k not in TIMES}
    if isinstance(value, list):
        return [cleaned(v, folder) for v in value]
    return value.replace(str(folder), "FOLDER") if isinstance(value, str) else value


def of_checkpoints(folder: Path, work: Path) -> Parts:
    """Everything in the folder of a model tag."""
    parts: Parts = {"names of files": digest(sorted(p.name for p in folder.iterdir()))}
    for path in sorted(folder.iterdir()):
        kind, step, *_ = path.stem.split("_") + [""]
        if path.name == "metrics.jsonl":
            records = [cleaned(json.loads(line), work) for line in path.read_text().splitlines()]
            parts["metrics: start"] = digest([r for r in records if r["event"] == "start"][:1])
            parts["metrics"] = digest([r for r in records if r["event"] != "start"])
        elif kind == "manifest":
            manifest = json.loads(path.read_text())
            names = [f["name"] for f in manifest.pop("files")]
            parts[f"{step} manifest"] = digest([manifest, names])
        elif kind == "meta":
            for key, value in cleaned(json.loads(path.read_text()), work).items():
                parts[f"{step} meta, {key}"] = digest(value)
        elif path.suffix == ".pt":
            content = torch.load(path, map_location="cpu", weights_only=True)
            whole = kind in ("model", "method") or not isinstance(content, dict)
            for key, value in {"": content}.items() if whole else content.items():
                parts[f"{step} {path.stem.replace(f'_{step}', '')} {key}".strip()] = digest(value)
            parts[f"bytes of {path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()[:24]
        else:
            raise ValueError(f"{path}: a kind of file that this tool does not know; teach it of_checkpoints")
    return parts


def of_export(folder: Path, work: Path) -> Parts:
    """Each file byte by byte, but for the line of the model card that names processor and torch."""
    parts = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data = path.read_bytes()
        if path.name == "README.md":
            data = re.sub(rb" validation tokens, on .*", b"", data).replace(str(work).encode(), b"FOLDER")
        parts[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()[:24]
    return parts


# ----------------------------------------------------------------------------------------------------------------------
# Runs: forks of this process, which imports and does not compute


class Failed(Exception):
    pass


def run(base: Path, module: str, argv: list[str], *, ranks: int = 1, kill_at: int = 0, checkout: str = "") -> str:
    """`python -m module argv` in a fork for each rank, with base as NANOCHAT_BASE_DIR; returns what rank 0 printed.

    kill_at: rank 0 kills itself two steps after its save of this step.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    os.environ.update(NANOCHAT_BASE_DIR=str(base), DATA_DIR=str(base.parent / "text"), MASTER_PORT=port)
    os.environ.update(MASTER_ADDR="127.0.0.1", NANOCHAT_DIR=checkout)
    log, pids = base / "log.txt", []
    sys.stdout.flush()
    for rank in range(ranks):
        if ranks > 1:
            os.environ.update(WORLD_SIZE=str(ranks), RANK=str(rank), LOCAL_RANK=str(rank))
        pids.append(os.fork())
        if not pids[-1]:
            _child(module, argv, log if rank == 0 else base / f"log_{rank}.txt", kill_at if rank == 0 else 0, checkout)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        os.environ.pop(name, None)
    status = os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1])
    for pid in pids[1:]:
        if status:
            os.kill(pid, signal.SIGKILL)
        other = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        status = status or other
    text = log.read_text(errors="replace")
    if status != (-signal.SIGKILL if kill_at else 0):
        tail = "\n".join(text.splitlines()[-15:])
        raise Failed(f"{module} {' '.join(argv)}: status {status}{', expected a kill' if kill_at else ''}\n{tail}")
    return text


def _child(module: str, argv: list[str], log: Path, kill_at: int, checkout: str) -> None:
    status = 70
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)
        os.fsync = lambda fd: None  # a killed process loses nothing that was written
        if kill_at:
            _kill_after_save(kill_at)
        if checkout:
            _forget_our_scripts(log.parent)
        sys.argv = [module, *argv]
        sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(status)


def _kill_after_save(step: int) -> None:
    """SIGKILL at the second record of metrics.jsonl after the manifest of this step has its name."""
    after = [0, 0]  # the manifest is there, records since

    def hook(event: str, args: tuple) -> None:
        if event == "os.rename" and str(args[1]).endswith(f"manifest_{step:06d}.json"):
            after[0] = 1
        elif event == "open" and after[0] and str(args[0]).endswith("metrics.jsonl"):
            after[1] += 1
            if after[1] == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _forget_our_scripts(folder: Path) -> None:
    """As a new process in a checkout: its `scripts` are others; packages that it only imports may be missing."""
    for name in [n for n in sys.modules if n.split(".")[0] == "scripts"]:
        del sys.modules[name]
        inspect._filesbymodname.pop(name, None)  # or inspect looks for a file of the checkout's `scripts`
    sys.dont_write_bytecode = True
    torch._dynamo.config.disable = True  # the checkout compiles its model
    for name, inside in {"psutil": (), "tokenizers": ("models", "trainers"), "wandb": ()}.items():
        if importlib.util.find_spec(name) is None:
            (folder / "stubs" / name).mkdir(parents=True, exist_ok=True)
            for module in ("__init__", *inside):
                (folder / "stubs" / name / f"{module}.py").write_text("def __getattr__(name):\n    return object\n")
    sys.path.append(str(folder / "stubs"))


# ----------------------------------------------------------------------------------------------------------------------
# Cases


class Cases:
    """Names of cases -> the job that makes them. A job runs in a process of its own."""

    def __init__(self, work: Path, nanochat: str):
        self.work, self.nanochat, self.formats = work, nanochat, list(FORMATS)
        self.jobs: dict[str, tuple[Callable[..., dict[str, Parts]], tuple]] = {}  # name -> job, what it takes
        self.jobs["tok"] = self.tok, ()
        self.jobs |= {f"api/{name}": (self.api, ("api", name)) for name in nf.ROUNDINGS}
        self.jobs |= {f"method/{name}": (self.method, ("method", name)) for name in (*nf.METHODS, *nf.ABLATIONS)}
        for mode, names in {"ddp": ["clover"], "fsdp": ["clover", "clover_feedback", "nvidia"]}.items():
            self.jobs |= {f"{mode}/{name}": (self.method, (mode, name)) for name in names}
        self.jobs |= {f"tp/{name}": (self.tensor_parallel, (name,)) for name in ("bf16", "clover", "nvidia")}
        if importlib.util.find_spec("gguf") is None:
            print("not exported: gguf (its package is not installed)")
            self.formats = [name for name in FORMATS if not name.startswith("gguf")]
        for family, chain in {"gpt": self.chain, "llama": self.llama}.items():
            formats = [f for f in self.formats if f.startswith("gguf") <= (family == "llama")]
            names = ["mid/clover", "sft/clover"] if family == "gpt" else ["llama/clover"]
            self.jobs |= {name: (chain, ()) for name in [*names, *(f"export-{family}/{f}" for f in formats)]}
        if nanochat:
            self.jobs |= {f"upstream/{m}": (self.upstream, (m,)) for m in ("bf16", "clover", "nvidia")}
        else:
            print("not run: upstream (no --nanochat CHECKOUT)")

    def folder(self, name: str) -> Path:
        """A base directory with the tokenizer, beside the text."""
        base = self.work / name.replace("/", "_")
        shutil.copytree(self.work / "made" / "tokenizer", base / "tokenizer")
        return base

    def prepare(self) -> None:
        words = "the of capital gold planets hot day color France opposite symbol was tomorrow number cat dog runs"
        rng = random.Random(0)
        texts = [" ".join(rng.choices(words.split(), k=rng.randint(20, 200))) + "." for _ in range(600)]
        (self.work / "text").mkdir()
        (self.work / "made").mkdir()
        write = "import json, sys, pyarrow as pa, pyarrow.parquet as pq\nfor path, texts in json.load(sys.stdin):\n"
        write += "    pq.write_table(pa.table({'text': texts}), path, row_group_size=30)\n"
        shards = [(str(self.work / f"text/shard_{i:05d}.parquet"), texts[300 * i :][:300]) for i in range(2)]
        # In a process of its own, as pyarrow has threads.
        subprocess.run([sys.executable, "-c", write], input=json.dumps(shards), text=True, check=True)
        run(self.work / "made", "scripts.tok_train", ["--vocab-size=300"])

    def tok(self) -> dict[str, Parts]:
        folder = self.work / "made" / "tokenizer"
        token_bytes = digest(torch.load(folder / "token_bytes.pt", weights_only=True))
        return {"tok": {"tokenizer.json": digest((folder / "tokenizer.json").read_bytes()), "token_bytes": token_bytes}}

    def api(self, kind: str, name: str) -> dict[str, Parts]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(64, 128, generator=generator) * torch.randn(128, generator=generator).exp()
        t = nf.quantize(x, name, seed=3)
        made = {"codes": t.codes, "scales": t.scales, "tensor_scale": t.tensor_scale, "value": t.dequantize()}
        return {f"api/{name}": {k: digest(v) for k, v in made.items()} | {"rotate": digest(nf.rotate(x, seed=3))}}

    def trained(self, name: str, module: str, argv: list[str], tree: str, base: Path, steps: int = STEPS, ranks: int = 1,
                late: bool = False) -> Parts:  # fmt: skip
        """Of a straight run in `base`; that a killed and resumed one leaves the same is checked in a copy of it."""
        argv = [*argv, *RUN, f"--num-iterations={steps}", f"--save-every={steps // 2}"]
        copy = shutil.copytree(base, base.with_name(base.name + "_killed"))
        text = run(base, module, argv, ranks=ranks)
        if late and "from here on" not in text:
            raise Failed("the run ended before its method changed")
        run(copy, module, argv, ranks=ranks, kill_at=steps // 2)
        text = run(copy, module, argv, ranks=ranks)
        if f"Resuming from step {steps // 2}" not in text:
            raise Failed("the killed run was not resumed from the save in the middle")
        straight, resumed = (of_checkpoints(next(p for p in (b / tree).iterdir() if p.is_dir()), self.work) for b in (base, copy))
        shutil.rmtree(copy)
        wrong = [k for k in straight.keys() | resumed.keys() if straight.get(k) != resumed.get(k)]
        if wrong := sorted(k for k in wrong if not k.startswith("bytes of")):
            raise Failed(f"killed and resumed differs from straight: {', '.join(wrong)}")
        return straight

    def method(self, mode: str, name: str) -> dict[str, Parts]:
        base, case = self.folder(f"{mode}/{name}"), f"{mode}/{name}"
        flags = [*SMALL, f"--method={name}", f"--parallel={mode if mode == 'fsdp' else 'ddp'}"]
        flags += ["--total-batch-size=64"] if name in LONG else []
        ranks, steps = 1 if mode == "method" else 2, LONG.get(name, STEPS)
        parts = self.trained(case, "scripts.base_train", flags, "base_checkpoints", base, steps, ranks, name in LATE)
        if name.startswith("clover_feedback") and not any("method" in key.split() for key in parts):
            raise Failed("the run has not looked at inputs: no method_*.pt")
        return {case: parts}

    def tensor_parallel(self, name: str) -> dict[str, Parts]:
        base = self.folder(f"tp/{name}")
        flags = [*TP.split(), "--parallel=tp", "--seconds=0.001", f"--method={name}", f"--json={base / 'row.json'}"]
        run(base, "scripts.bench_parallel", flags, ranks=2)
        row = json.loads((base / "row.json").read_text())
        kept = ("loss", "sent", "sent_bytes", "predicted_bytes", "state_gib", "micro_batches", "mode", "gpus")
        return {f"tp/{name}": {key: digest(row[key]) for key in kept}}

    def exports(self, base: Path, family: str, source: str, formats: list[str]) -> dict[str, Parts]:
        made = {}
        for name in formats:
            out = base / f"exported_{name}"
            flags = [f"--source={source}", f"--format={name}", f"--out={out}", "--device-type=cpu"]
            run(base, "scripts.export", [*flags, "--calibration-tokens=512", "--eval-tokens=512"])
            made[f"export-{family}/{name}"] = out
        return {name: of_export(out, self.work) for name, out in made.items()}

    def chain(self) -> dict[str, Parts]:
        """Base training, mid-training and SFT of one model, and its exports."""
        base = self.folder("chain")
        run(base, "scripts.base_train", [*CHAIN, *RUN, "--method=clover", "--num-iterations=8"])
        made = {"mid/clover": self.trained("mid", "scripts.mid_train", MID, "mid_checkpoints", base)}
        made["sft/clover"] = self.trained("sft", "scripts.chat_sft", SFT, "chatsft_checkpoints", base)
        return made | self.exports(base, "gpt", "sft", [f for f in self.formats if not f.startswith("gguf")])

    def llama(self) -> dict[str, Parts]:
        base = self.folder("llama")
        parts = self.trained("llama", "scripts.base_train", [*LLAMA, "--method=clover"], "base_checkpoints", base)
        return {"llama/clover": parts} | self.exports(base, "llama", "base", self.formats)

    def upstream(self, name: str) -> dict[str, Parts]:
        base = self.work / f"upstream_{name}"
        shutil.copytree(self.work / "text", base / "base_data")

        def upstream(script: str, *argv: str) -> str:
            return run(base, "nanochat_fp4.upstream", [f"--method={name}", script, "--", *argv], checkout=self.nanochat)

        upstream("scripts.tok_train", "--vocab-size=300", "--max-chars=100000")
        text = upstream("scripts.base_train", *UPSTREAM.split())
        parts = of_checkpoints(next(p for p in (base / "base_checkpoints").iterdir() if p.is_dir()), self.work)
        lines = [re.sub(r"\| dt:.*", "", line) for line in text.splitlines() if re.match(r"step \d+/|Step \d+ \|", line)]
        return {f"upstream/{name}": parts | {"losses that it prints": digest(lines)}}


def make(cases: Cases, chosen: list[str], jobs: int) -> dict[str, Any]:
    """{name: parts, or what went wrong as text}; prints a line for each job."""
    todo = list({id(work): work for work in (cases.jobs[name] for name in chosen)}.values())
    unique: list[tuple] = []
    for job in todo:
        if not any(job[0] == other[0] and job[1] == other[1] for other in unique):
            unique.append(job)
    made: dict[str, Any] = {}
    running: dict[int, tuple[Path, str, float]] = {}
    total = len(unique)
    # The longest first, so that none is left alone at the end.
    unique.sort(key=lambda job: (job[0].__name__ != "chain", not job[1] or job[1][-1] not in LONG))
    while unique or running:
        while unique and len(running) < jobs:
            job, what = unique.pop(0)
            result = cases.work / f"result_{len(unique)}.json"
            sys.stdout.flush()
            pid = os.fork()
            if not pid:
                try:
                    result.write_text(json.dumps(job(*what)))
                except BaseException as e:
                    text = str(e) if isinstance(e, Failed) else traceback.format_exc()
                    result.write_text(json.dumps({"/".join(what) or job.__name__: text}))
                finally:
                    os._exit(0)
            running[pid] = result, "/".join(what) or job.__name__, time.monotonic()
        pid, _ = os.wait()
        result, name, began = running.pop(pid)
        new = json.loads(result.read_text())
        made |= new
        bad = "".join(f"  FAILED\n{v}" for v in new.values() if isinstance(v, str))
        print(f"{total - len(unique) - len(running)}/{total} {name} {time.monotonic() - began:.0f} s{bad}", flush=True)
    return made


def compare(recorded: dict[str, Any], made: dict[str, Any], chosen: list[str], gone: list[str]) -> int:
    """Prints what differs, by case; how many cases do."""
    wrong = 0
    for name in sorted(set(recorded) | set(chosen)):
        before, after = recorded.get(name), made.get(name)
        if name not in chosen:
            text = f"gone: {name}"
            wrong += name not in gone and name.rpartition("/")[2] not in gone
        elif before is None or not isinstance(after, dict):
            text, wrong = f"{'new' if before is None else 'failed'}: {name}", wrong + 1
        elif before == after:
            continue
        else:
            parts = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
            content = [k for k in parts if not k.startswith("bytes of")]
            what = "differs" if content else "layout of files only, contents are equal"
            text, wrong = f"{what}: {name}: {'; '.join(content or parts)}", wrong + 1
        print(text)
    return wrong


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description="Golden hashes of short runs: see the top of lab/golden.py")
    parser.add_argument("what", choices=("record", "compare", "list"))
    parser.add_argument("file", type=Path, nargs="?", help="JSON; record adds to the cases that it has")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names of cases: 'method/clover*'")
    parser.add_argument("--gone", nargs="+", default=[], metavar="NAME", help="removed on purpose: a method, or a case")
    parser.add_argument("--nanochat", type=lambda p: str(Path(p).resolve()), default="", metavar="CHECKOUT")
    parser.add_argument("--jobs", type=int, default=1, help="cases at the same time")
    args = parser.parse_args()
    if Path(nf.__file__).resolve().parent.parent != ROOT:
        sys.exit(f"nanochat_fp4 is that of {Path(nf.__file__).parent}, not of {ROOT}; set PYTHONPATH={ROOT}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="golden_") as work:
        cases = Cases(Path(work), args.nanochat)
        chosen = [name for name in cases.jobs if any(fnmatch.fnmatch(name, p) for p in args.only)]
        if args.what == "list" or args.file is None:
            print("\n".join(chosen))
            return 0
        for name in SCRIPTS:
            importlib.import_module(f"scripts.{name}")
        importlib.import_module("nanochat_fp4.upstream")
        gc.collect()
        gc.freeze()
        cases.prepare()
        made = make(cases, chosen, args.jobs)
    failed = [name for name, parts in made.items() if isinstance(parts, str)]
    about = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    if args.what == "record":
        known = json.loads(args.file.read_text())["cases"] if args.file.exists() else {}
        kept = known | {k: v for k, v in made.items() if k in chosen and isinstance(v, dict)}
        args.file.write_text(json.dumps({"about": about, "cases": kept}, indent=1) + "\n")
        print(f"{len(kept)} cases in {args.file}; failed: {', '.join(failed) or 'none'}")
        wrong = len(failed)
    else:
        file = json.loads(args.file.read_text())
        if file["about"] != about:
            print(f"note: recorded with {file['about']}, this is {about}")
        recorded = {k: v for k, v in file["cases"].items() if any(fnmatch.fnmatch(k, p) for p in args.only)}
        if not args.nanochat:
            recorded = {k: v for k, v in recorded.items() if not k.startswith("upstream/")}
        wrong = compare(recorded, made, chosen, args.gone)
        print(f"{len(chosen)} cases, {wrong} differ")
    print(f"{time.monotonic() - began:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
