"""
The runner for real nanochat checkouts, against two small make-believe checkouts, laid out as f5425245f and as the
newest revision; and, where NANOCHAT_DIR names a real checkout, against that one.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nanochat_fp4 as nf
from nanochat_fp4 import upstream
from nanochat_fp4.cli import run_main
from nanochat_fp4.nvfp4.methods import METHODS

ROOT = Path(upstream.__file__).resolve().parent.parent
REAL = os.environ.get("NANOCHAT_DIR", "")

# ----------------------------------------------------------------------------------------------------------------------
# Make-believe checkouts: {new} and {optimizer} are what the two layouts differ in

GPT = """
import torch
from torch import nn
import torch.distributed as dist
import torch.nn.functional as F

NEW = {new}

class OwnLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))

Linear = OwnLinear if NEW else nn.Linear

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_proj, self.gate = Linear(32, 32, bias=False), Linear(12, 1, bias=False)

    def forward(self, x):
        return self.c_proj(x.cumsum(1) / 8) * torch.sigmoid(self.gate(x[..., :12]))

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.c_proj = Linear(32, 64, bias=False), Linear(64, 32, bias=False)

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = Attention(), MLP()

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.mlp(x)

class Optimizer(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"] if dist.is_initialized() else ():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        super().step()

class GPT(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.transformer = nn.ModuleDict(dict(wte=nn.Embedding(64, 32), h=blocks))
        self.lm_head = Linear(32, 64, bias=False)

    def init_weights(self):
        for p in self.parameters():
            nn.init.normal_(p, std=0.2)

    def flops(self):
        return sum(m.weight.numel() for m in self.modules() if isinstance(m, Linear))

    def setup_{optimizer}(self):
        return [Optimizer(self.transformer.h.parameters(), 0.1), Optimizer(self.lm_head.parameters(), 0.1)]

    def forward(self, idx, targets=None, kv_cache=None, loss_reduction="mean"):
        x = self.transformer.wte(idx)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(x)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=loss_reduction)
"""

CHECKPOINTS = """
import os, torch
from nanochat.gpt import GPT

def save_checkpoint(checkpoint_dir, step, model_data, optimizer_data, meta_data, rank=0):
    if rank == 0:
        os.makedirs(checkpoint_dir, exist_ok=True)
        torch.save(model_data, os.path.join(checkpoint_dir, f"model_{step:06d}.pt"))

def load_checkpoint(checkpoint_dir, step, device, load_optimizer=False, rank=0):
    return torch.load(os.path.join(checkpoint_dir, f"model_{step:06d}.pt")), None, {"step": step}

def load_model(step):
    data, _, _ = load_checkpoint(os.environ["NANOCHAT_BASE_DIR"], step, "cpu")
    with torch.device("meta"):
        model = GPT()
    model.to_empty(device="cpu")
    model.init_weights()
    model.load_state_dict(data, strict=True, assign=True)
    return model.eval(), data
"""

BASE_TRAIN = """
import argparse, json, os, sys
import torch
import torch.distributed as dist
from torch import nn
from nanochat.checkpoint_manager import load_checkpoint, save_checkpoint
from nanochat.gpt import GPT, NEW
from scripts.base_eval import NAME
from tasks.arc import TASK

parser = argparse.ArgumentParser()
parser.add_argument("--fp8", action="store_true")
parser.add_argument("--num-iterations", type=int, default=3)
parser.add_argument("--resume-from-step", type=int, default=-1)
parser.add_argument("--save-at", type=int, default=-1)
args = parser.parse_args()
torch.manual_seed(42)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
rank = int(os.environ.get("RANK", 0))
folder = os.environ["NANOCHAT_BASE_DIR"]
with torch.device("meta"):
    model = GPT()
model.to_empty(device="cpu")
before = {name: id(p) for name, p in model.named_parameters()}
model.init_weights()
record = {"main": __name__, "argv": sys.argv, "scripts": NAME, "tasks": TASK}
record["kinds"] = {name: type(m).__name__ for name, m in model.named_modules() if isinstance(m, nn.Linear)}
record["same_parameters"] = before == {name: id(p) for name, p in model.named_parameters()}
if args.resume_from_step != -1:
    model.load_state_dict(load_checkpoint(folder, args.resume_from_step, "cpu", True)[0], assign=True)
if args.fp8:
    model.transformer.h[0].mlp.c_fc = type("Float8Linear", (nn.Linear,), {})(32, 64, bias=False)
compiled = torch.compile(model, dynamic=False, backend="eager")  # no C++ compiler in a test
if NEW:
    with torch.device("meta"):
        GPT(12)  # a reference, for scaling laws
optimizers = compiled.setup_optimizer() if NEW else compiled.setup_optimizers()
torch.manual_seed(torch.initial_seed())
batch = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(rank))
x, y = batch[:, :-1], batch[:, 1:].contiguous()
record |= {"flops": compiled.flops(), "seed": torch.initial_seed(), "losses": []}
num_iterations = args.num_iterations
step = max(0, args.resume_from_step)
while step < num_iterations:
    for _ in range(2):
        loss = compiled(x, y)
        (loss / 2).backward()
    for o in optimizers:
        o.step()
        o.zero_grad()
    record["losses"].append(loss.item())
    step += 1
    if step == args.save_at:
        save_checkpoint(folder, step, model.state_dict(), None, {}, rank)
record["keys"] = list(model.state_dict())
record["checksum"] = sum(p.double().sum().item() for p in model.parameters())
record["recipe"] = str(getattr(model.transformer.h[0].mlp.c_proj, "recipe", None))
sys.stdout.write(f"RECORD {rank} " + json.dumps(record) + chr(10))  # one write: two processes share the pipe
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
"""

CHAT_EVAL = """
import json, sys
import torch
from nanochat.checkpoint_manager import load_model
model, data = load_model(int(sys.argv[1]))
layer = model.transformer.h[0].mlp.c_proj
loaded = all((model.state_dict()[k] == v).all().item() for k, v in data.items())
record = {"recipe": str(getattr(layer, "recipe", None)), "loaded": loaded}
alone = torch.tensor([[1, 2, 3, 4]])
with torch.no_grad():
    model.transformer.wte.weight[9] *= 1000  # a stranger whose amax would dwarf everything else
    both = torch.tensor([[1, 2, 3, 4], [9, 9, 9, 9]])
    with_stranger, loss = model(both)[0], model(both, both, loss_reduction="none").view(2, 4)[0]
    record["logits"] = (with_stranger - model(alone)[0]).abs().max().item()
    record["cached"] = (model(alone, kv_cache=None)[0] - model(idx=alone)[0]).abs().max().item()
    record["loss"] = (loss - model(alone, targets=alone, loss_reduction="none")).abs().max().item()
print("RECORD 0 " + json.dumps(record))
"""


def make_checkout(root: Path, new: bool) -> Path:
    files = {
        "nanochat/__init__.py": "",
        "nanochat/gpt.py": GPT.format(new=new, optimizer="optimizer" if new else "optimizers"),
        "nanochat/checkpoint_manager.py": CHECKPOINTS,
        "tasks/arc.py": "TASK = __file__\n",  # neither tasks nor scripts is a package with an __init__.py
        "scripts/base_train.py": BASE_TRAIN,
        "scripts/chat_eval.py": CHAT_EVAL,
        "scripts/base_eval.py": "NAME = __file__\n",
        "scripts/breaks.py": "raise ValueError('the script is wrong')\n",
        "scripts/leaves.py": "import sys; sys.exit(7)\n",
        "scripts/bare.py": "from nanochat.gpt import GPT\nGPT().setup_optimizer()\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture(params=["old", "new"])
def checkout(request, tmp_path):
    return make_checkout(tmp_path / "nanochat", request.param == "new")


@pytest.fixture
def new(tmp_path):
    return make_checkout(tmp_path / "nanochat", True)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run(checkout, *arguments): the runner in this process; (exit status, stdout, stderr). Leaves no trace."""
    of_a_checkout = ("nanochat", "scripts", "tasks", "__main__")
    kept = {name: m for name, m in sys.modules.items() if name.split(".")[0] in of_a_checkout}
    for name in ("path", "argv", "dont_write_bytecode"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    path = list(sys.path)

    def forget():
        for name in [name for name in sys.modules if name.split(".")[0] in of_a_checkout]:
            del sys.modules[name]
            inspect._filesbymodname.pop(name, None)  # or inspect looks for a file of the checkout's `scripts`
        sys.path[:] = path

    def runner(root, *arguments):
        forget()
        monkeypatch.setenv("NANOCHAT_DIR", str(root))
        try:
            run_main(lambda: upstream.main(list(arguments)))
            status = 0
        except SystemExit as e:
            status = e.code
        return status, *capsys.readouterr()

    yield runner
    forget()
    sys.modules.update(kept)


def record(result, rank: int = 0) -> dict:
    """What a script says of itself. result: of run(), or the text that it printed."""
    status, out, err = (0, result, "") if isinstance(result, str) else result
    assert status == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith(f"RECORD {rank} ")]
    return json.loads(line.split(" ", 2)[2])


# In a fork of a process that has imported our own scripts, what a new one would do in a checkout. {} is the program.
IN_A_FORK = """
import inspect, runpy, sys
for name in [n for n in sys.modules if n.split(".")[0] == "scripts"]:
    del sys.modules[name]
    inspect._filesbymodname.pop(name, None)
sys.dont_write_bytecode = True
{}
"""


def by_hand(checkout: Path, run_ranks, tmp_path: Path, *edits: tuple[str, str], argv: str = "") -> dict:
    """The script without the runner, with lines of it replaced."""
    script = checkout / "scripts/base_train.py"
    text = script.read_text()
    for before, after in edits:
        assert before in text
        text = text.replace(before, after)
    path = f"sys.path[:] = [{str(checkout)!r}, *(p for p in sys.path if p != {str(ROOT)!r})]"
    program = f"{path}\nsys.argv = ['', *{argv.split()}]\nimport nanochat_fp4 as nf, torch\n"
    program += f"exec(compile({text!r}, 'by_hand.py', 'exec'), dict(globals(), __name__='__main__'))"
    return record(run_ranks(IN_A_FORK.format(program), 1, env={"NANOCHAT_BASE_DIR": str(tmp_path / "by_hand")})[0])


# ----------------------------------------------------------------------------------------------------------------------
# What it does


def test_converts_after_the_weights_and_before_compile_and_optimizers(checkout, run, run_ranks, tmp_path):
    files = sorted(checkout.rglob("*"))
    result = run(checkout, "--method", "clover", "scripts.base_train", "--", "--num-iterations=3")
    made, err = record(result), result[2]
    assert {name for name, kind in made["kinds"].items() if kind == "QuantLinear"} == {
        f"transformer.h.{i}.{name}" for i in range(2) for name in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert made["same_parameters"] and "nanochat_fp4" not in result[1]  # stdout is the script's own
    script = checkout / "scripts/base_train.py"
    assert made["main"] == "__main__" and made["argv"] == [str(script), "--num-iterations=3"]
    assert made["scripts"] == str(checkout / "scripts/base_eval.py") and made["tasks"] == str(checkout / "tasks/arc.py")
    assert "lm_head" in err and "in_features is 12" in err  # what is left alone, and why
    plain = by_hand(checkout, run_ranks, tmp_path)
    bf16 = record(run(checkout, "--method", "bf16", "scripts.base_train"))
    assert {k: bf16[k] for k in ("kinds", "losses", "checksum")} == {
        k: plain[k] for k in ("kinds", "losses", "checksum")
    }
    assert made["losses"] != plain["losses"] and made["losses"] == pytest.approx(plain["losses"], rel=0.05)
    assert [made[k] for k in ("flops", "keys", "seed")] == [plain[k] for k in ("flops", "keys", "seed")]
    assert sorted(checkout.rglob("*")) == files  # no __pycache__ either


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_as_a_loop_that_makes_its_calls_by_hand(new, run, run_ranks, tmp_path, method):
    argv = f"--num-iterations={12 if nf.get_recipe(method).late else 3}"
    convert = f"nf.convert(model, {method!r}, verbose=False, per_token_in_eval=False)"
    convert += "\nmodel.forward = torch.compiler.disable(model.forward)\ncompiled = torch"
    calls = "    nf.set_progress(model, step / num_iterations)\n"
    edits = ("compiled = torch", convert), ("    for _ in range(2):\n", f"{calls}    for _ in range(2):\n")
    expected = by_hand(new, run_ranks, tmp_path, *edits if method != "bf16" else (), argv=argv)
    made = record(run(new, f"--method={method}", "scripts.base_train", "--", argv))
    assert made["losses"] == expected["losses"] and made["checksum"] == expected["checksum"]


def test_later_stages_quantize_the_forward_pass_of_loaded_weights(checkout, run):
    record(run(checkout, "--method=bf16", "scripts.base_train", "--", "--save-at=3"))
    made = record(run(checkout, "--method=clover", "scripts.chat_eval", "--", "3"))
    assert made["loaded"] and "output four_over_six" in made["recipe"] and "ms_eden" not in made["recipe"]
    # Logits depend neither on the rest of the batch nor on the cache; losses are computed as in training.
    assert made["logits"] < 1e-3 and made["cached"] == 0 and made["loss"] > 1e-3
    both = record(run(checkout, "--method=clover", "--backward=full", "scripts.chat_eval", "--", "3"))
    assert "ms_eden" in both["recipe"]
    assert record(run(checkout, "--backward=none", "scripts.chat_eval", "--", "3"))["recipe"] == "None"


def test_layers_can_be_left_alone(new, run):
    made = record(run(new, "--method=clover", "--skip=*.c_proj", "--skip=transformer.h.0.*", "scripts.base_train"))
    assert [name for name, kind in made["kinds"].items() if kind == "QuantLinear"] == ["transformer.h.1.mlp.c_fc"]


def test_two_processes_share_weights_and_not_their_random_numbers(new, tmp_path, run_ranks):
    """As a user starts it, this module is __main__ at first."""
    program = (
        "sys.stderr, sys.argv = sys.stdout, ['', '--method=clover', 'scripts.base_train', '--', '--num-iterations=2']\n"
    )
    program += "runpy.run_module('nanochat_fp4.upstream', run_name='__main__', alter_sys=True)"
    env = {"NANOCHAT_DIR": str(new), "NANOCHAT_BASE_DIR": str(tmp_path)}
    outs = run_ranks(IN_A_FORK.format(program), env=env)
    zero, one = record(outs[0], 0), record(outs[1], 1)
    assert zero["losses"] != one["losses"]  # different data
    assert zero["checksum"] == one["checksum"] and (zero["seed"], one["seed"]) == (42, 43)


# ----------------------------------------------------------------------------------------------------------------------
# Errors


def test_errors_of_the_script_stay_as_they_are(new, run):
    status, _, err = run(new, "scripts.breaks")
    assert status == 1 and "Traceback" in err and "ValueError: the script is wrong" in err
    assert run(new, "scripts.leaves")[0] == 7
    assert "nothing was quantized" in run(new, "--method=clover", "--backward=full", "scripts.base_eval")[2]


REFUSED = [  # arguments; a file of the checkout and what is changed in it; what the one line says
    ("--method=clever scripts.base_train", None, "unknown method 'clever'"),
    ("--backward=half scripts.base_train", None, "forward"),
    ("scripts.base_train --depth=3", None, "--depth=3"),
    ("", None, "SCRIPT"),
    ("--skip=nothing.* scripts.base_train", None, "nothing.*"),
    ("scripts.mid_train", None, "scripts.base_eval, scripts.base_train"),
    ("base_train", None, "there is no script 'base_train'"),
    ("scripts/base_train.py", None, "there is no script"),
    ("scripts.bare", None, "init_weights was not called"),
    ("scripts.base_train -- --fp8", None, "--fp8"),
    ("scripts.base_train", ("nanochat/gpt.py", "class GPT(", "class Transformer("), "f5425245f"),
    ("scripts.base_train", ("nanochat/gpt.py", "def init_weights", "def init_parameters"), "f5425245f"),
    ("scripts.base_train", ("nanochat/gpt.py", "idx, targets=None", "idx, labels=None"), "f5425245f"),
    ("scripts.base_train", ("nanochat/gpt.py", "def setup_optimizer", "def make_optimizer"), "f5425245f"),
    (
        "--method=nvidia_full scripts.base_train", ("scripts/base_train.py", "= args.num", "= 1.0 * args.num"),
        "step and num_iterations",
    ),
    ("scripts.base_train", ("nanochat/gpt.py", None, None), "is not a nanochat checkout"),
]  # fmt: skip


@pytest.mark.parametrize("arguments, edit, said", REFUSED)
def test_refusals_are_one_line(new, run, arguments, edit, said):
    if edit:
        name, before, after = edit
        path = new / name
        path.write_text(path.read_text().replace(before, after)) if before else path.unlink()
    method = [] if "--method" in arguments else ["--method=clover", "--backward=full"]
    status, _, err = run(new, *method, *arguments.split())
    lines = [line for line in err.splitlines() if not line.startswith("nanochat_fp4: ")]
    assert status == 2 and len(lines) == 1 and lines[0].startswith("error: ") and said in lines[0], err


# ----------------------------------------------------------------------------------------------------------------------
# A real checkout: NANOCHAT_DIR=/path/to/nanochat (a minute)


@pytest.mark.skipif(not REAL, reason="NANOCHAT_DIR names no checkout")
def test_a_real_checkout_trains_and_resumes(tmp_path):
    import importlib.util

    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [p.read_text(errors="replace")[:4000] for p in Path(os.__file__).parent.glob("*.py")] * 8
    for name in ("base_data", "base_data_climbmix"):
        (tmp_path / name).mkdir()
        for i in range(2):
            pq.write_table(pa.table({"text": texts}), tmp_path / name / f"shard_{i}.parquet", row_group_size=200)
    for package in ("wandb", "psutil", "tokenizers"):  # imported and never called
        if importlib.util.find_spec(package) is None:
            for module in ("__init__", "models", "trainers"):
                stub = tmp_path / "stubs" / package / f"{module}.py"
                stub.parent.mkdir(parents=True, exist_ok=True)
                stub.write_text("def __getattr__(name):\n    return object\n")
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", tmp_path / "stubs")))
    env = os.environ | {"NANOCHAT_BASE_DIR": str(tmp_path), "WANDB_RUN": "dummy", "PYTHONPATH": paths}
    env |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    small = "--depth=2 --max-seq-len=256 --window-pattern=L --device-batch-size=1 --total-batch-size=512 --eval-every=6"
    small += " --num-iterations=6 --eval-tokens=1024 --core-metric-every=-1 --sample-every=-1 --device-type=cpu"
    small += " --matrix-lr=0.5 --embedding-lr=6 --unembedding-lr=0.1 --save-every=4"

    def losses(method: str, script: str, *flags: str) -> list[float]:
        command = [sys.executable, "-m", "nanochat_fp4.upstream", f"--method={method}", script, "--", *flags]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stdout + done.stderr
        return [float(v) for v in re.findall(r"^step .*? loss: ([\d.]+)", done.stdout, re.M)]

    losses("bf16", "scripts.tok_train", "--vocab-size=1024", "--max-chars=500000")
    bf16, *others = (losses(m, "scripts.base_train", *small.split()) for m in ("bf16", "clover", "clover_fp8_forward"))
    for quantized in others:
        assert len(quantized) == len(bf16) == 6 and quantized[0] == bf16[0]  # the blocks' projections begin as zeros
        assert quantized[-1] < quantized[0] and quantized[-1] != bf16[-1]
        assert quantized[-1] == pytest.approx(bf16[-1], rel=0.01)
    resume = *small.split(), "--resume-from-step=4"
    resumed = losses("clover_fp8_forward", "scripts.base_train", *resume)
    assert resumed == pytest.approx(losses("bf16", "scripts.base_train", *resume), rel=0.01)  # f5425245f skips rows
