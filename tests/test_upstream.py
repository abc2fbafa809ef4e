"""
The runner for real nanochat checkouts, against two small make-believe checkouts that are laid out as the revision
f5425245f and as the newest one are; and, where NANOCHAT_TEST_CHECKOUTS names real ones (separated by :), against those.
"""

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanochat_fp4 import upstream
from nanochat_fp4.errors import run_main

ROOT = Path(upstream.__file__).resolve().parent.parent
LAYOUTS = ("old", "new")

# ----------------------------------------------------------------------------------------------------------------------
# Make-believe checkouts. `NEW` in a source stands for what only one of the two layouts has.

COMMON = """
import os
import torch
import torch.distributed as dist

COMPUTE_DTYPE = {"float16": torch.float16}.get(os.environ.get("NANOCHAT_DTYPE"), torch.float32)

def compute_init():
    torch.manual_seed(42)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")

def compute_cleanup():
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
"""

GPT = """
import torch
from torch import nn
import torch.distributed as dist
import torch.nn.functional as F
from nanochat.common import COMPUTE_DTYPE

NEW = {new}

class OwnLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))

Linear = OwnLinear if NEW else nn.Linear

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = Linear(32, 64, bias=False), Linear(64, 32, bias=False)
        if NEW:
            self.gate = Linear(12, 1, bias=False)

    def forward(self, x):
        h = self.down(F.relu(self.up(x)).square())
        return x + (h * torch.sigmoid(self.gate(x[..., :12])) if NEW else h)

class Optimizer:
    '''Plain SGD that knows its parameters by identity and averages gradients over ranks.'''
    def __init__(self, *modules):
        self.params = [p for m in modules for p in m.parameters()]

    @torch.no_grad()
    def step(self):
        for p in self.params:
            if dist.is_initialized():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
            p -= 0.1 * p.grad
            p.grad = None

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
        return [Optimizer(self.transformer.h), Optimizer(self.transformer.wte, self.lm_head)]

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
import torch
from nanochat.gpt import GPT

def load_model():
    with torch.device("meta"):
        model = GPT()
    model.to_empty(device="cpu")
    model.init_weights()
    torch.manual_seed(7)
    data = {k: torch.randn(v.shape) for k, v in model.state_dict().items()}
    model.load_state_dict(data, strict=True, assign=True)
    return model.eval(), data
"""

BASE_TRAIN = """
import argparse, json, os, sys
import torch
from torch import nn
from nanochat.common import compute_cleanup, compute_init
from nanochat.gpt import GPT, NEW
from scripts.base_eval import NAME
from tasks.arc import TASK

parser = argparse.ArgumentParser()
parser.add_argument("--depth", type=int, default=2)
parser.add_argument("--fp8", action="store_true")
parser.add_argument("--num-iterations", type=int, default=3)
args = parser.parse_args()
compute_init()
with torch.device("meta"):
    model = GPT(args.depth)
model.to_empty(device="cpu")
before = {name: id(p) for name, p in model.named_parameters()}
model.init_weights()
record = {"main": __name__, "argv": sys.argv, "scripts": NAME, "tasks": TASK}
record["after_init"] = {name: type(m).__name__ for name, m in model.named_modules() if isinstance(m, nn.Linear)}
record["same_parameters"] = before == {name: id(p) for name, p in model.named_parameters()}
if args.fp8:
    class Float8Linear(nn.Linear):
        pass
    for block in model.transformer.h:
        block.up = Float8Linear(32, 64, bias=False)
compiled = torch.compile(model, dynamic=False, backend="eager")  # no C++ compiler in a test
if NEW:
    with torch.device("meta"):
        GPT(12)  # a reference, for scaling laws
optimizers = compiled.setup_optimizer() if NEW else compiled.setup_optimizers()
record["optimizer_knows_all"] = {id(p) for o in optimizers for p in o.params} == {id(p) for p in model.parameters()}
rank = int(os.environ.get("RANK", 0))
x = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(rank))
record |= {"flops": compiled.flops(), "seed": torch.initial_seed(), "losses": []}
step, num_iterations = 0, args.num_iterations
while step < num_iterations:
    loss = compiled(x[:, :-1], x[:, 1:].contiguous())
    loss.backward()
    for o in optimizers:
        o.step()
    record["losses"].append(loss.item())
    step += 1
record["keys"] = list(model.state_dict())
record["checksum"] = sum(p.double().sum().item() for p in model.parameters())
record["recipe"] = str(getattr(model.transformer.h[0].up, "recipe", None))
sys.stdout.write(f"RECORD {rank} " + json.dumps(record) + chr(10))  # one write: two processes share the pipe
compute_cleanup()
"""

POST = """
import json
from nanochat.checkpoint_manager import load_model
model, data = load_model()
up = model.transformer.h[0].up
loaded = all((model.state_dict()[k] == v).all().item() for k, v in data.items())
record = {"recipe": str(getattr(up, "recipe", None)), "kind": type(up).__name__, "loaded": loaded}
print("RECORD 0 " + json.dumps(record))
"""

LOGITS = """
import json
import torch
from nanochat.checkpoint_manager import load_model
model, _ = load_model()
alone = torch.tensor([[1, 2, 3, 4]])
with torch.no_grad():
    model.transformer.wte.weight[9] *= 1000  # a stranger whose amax would dwarf everything else
    both = torch.tensor([[1, 2, 3, 4], [9, 9, 9, 9]])
    with_stranger, loss = model(both)[0], model(both, both, loss_reduction="none").view(2, 4)[0]
    record = {
        "logits": (with_stranger - model(alone)[0]).abs().max().item(),
        "cached": (model(alone, kv_cache=None)[0] - model(idx=alone)[0]).abs().max().item(),
        "loss": (loss - model(alone, targets=alone, loss_reduction="none")).abs().max().item(),
    }
print("RECORD 0 " + json.dumps(record))
"""


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def make_checkout(root: Path, layout: str) -> Path:
    new, scripts = layout == "new", {"base_train": BASE_TRAIN, "chat_sft": POST, "chat_eval": POST, "logits": LOGITS}
    scripts |= {
        "base_eval": "NAME = __file__\n",
        "twice": "from nanochat.checkpoint_manager import load_model\nload_model()[0].init_weights()\n",
        "never": "print('done')\n",
        "bare": "from nanochat.gpt import GPT\nGPT()\n",
        "bare_train": "from nanochat.gpt import GPT\nGPT().setup_optimizer()\n",
        "breaks": "raise ValueError('the script is wrong')\n",
        "leaves": "import sys; sys.exit(7)\n",
    }
    files = {
        "nanochat/__init__.py": "",
        "nanochat/common.py": COMMON,
        "nanochat/gpt.py": GPT.format(new=new, optimizer="optimizer" if new else "optimizers"),
        "nanochat/checkpoint_manager.py": CHECKPOINTS,
        "tasks/arc.py": "TASK = __file__\n",  # neither tasks nor scripts is a package with an __init__.py
    }
    write(root, files | {f"scripts/{name}.py": text for name, text in scripts.items()})
    return root


@pytest.fixture(params=LAYOUTS)
def checkout(request, tmp_path):
    return make_checkout(tmp_path / "nanochat", request.param)


@pytest.fixture
def old(tmp_path):
    return make_checkout(tmp_path / "nanochat", "old")


@pytest.fixture
def run(monkeypatch, capsys):
    """run(checkout, *arguments): the runner in this process; (exit status, stdout, stderr). Leaves no trace."""
    taken = ("nanochat", "scripts", "tasks")
    kept = {name: m for name, m in sys.modules.items() if name.split(".")[0] in taken}
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    path, meta_path = list(sys.path), list(sys.meta_path)

    def forget():
        for name in [name for name in sys.modules if name.split(".")[0] in taken]:
            del sys.modules[name]
            # Or it looks for the file of a checkout's `scripts`, which has none.
            inspect._filesbymodname.pop(name, None)
        sys.path[:], sys.meta_path[:] = path, meta_path

    def runner(root, *arguments):
        forget()
        if root is not None:
            monkeypatch.setenv("NANOCHAT_DIR", str(root))
        try:
            run_main(lambda: upstream.main(arguments))
            status = 0
        except SystemExit as e:
            status = e.code
        return status, *capsys.readouterr()

    yield runner
    forget()
    sys.modules.update(kept)


def record(out: str, rank: int = 0) -> dict:
    (line,) = [line for line in out.splitlines() if line.startswith(f"RECORD {rank} ")]
    return json.loads(line.split(" ", 2)[2])


def outside(root: Path | None, *command: str, **env: str) -> subprocess.CompletedProcess:
    """A process of its own, from this project's folder, as a user has it."""
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]), "OMP_NUM_THREADS": "1"} | env
    env = {k: v for k, v in os.environ.items() if k not in ("NANOCHAT_DIR", "PYTHONDONTWRITEBYTECODE")} | env
    if root is not None:
        env["NANOCHAT_DIR"] = str(root)
    return subprocess.run([sys.executable, *command], env=env, cwd=ROOT, capture_output=True, text=True, timeout=1500)


# ----------------------------------------------------------------------------------------------------------------------
# What it does


def test_converts_after_the_weights_and_before_compile_and_optimizers(checkout, run):
    status, out, err = run(checkout, "--method", "clover", "scripts.base_train", "--", "--depth=3")
    assert status == 0, err
    r = record(out)
    blocks = {f"transformer.h.{i}.{name}" for i in range(3) for name in ("up", "down")}
    assert {name for name, kind in r["after_init"].items() if kind == "QuantLinear"} == blocks
    assert r["same_parameters"] and r["optimizer_knows_all"]
    assert r["main"] == "__main__" and r["argv"] == [str(checkout / "scripts/base_train.py"), "--depth=3"]
    assert r["scripts"] == str(checkout / "scripts/base_eval.py") and r["tasks"] == str(checkout / "tasks/arc.py")
    assert "four_over_six" in r["recipe"] and "ms_eden" in r["recipe"]
    assert all(torch.tensor(r["losses"]).isfinite()) and r["losses"][-1] < r["losses"][0]
    assert "converted 6 linear layers, 12,288 weights: transformer.h.*.up (3), transformer.h.*.down (3)" in err
    assert "left alone: lm_head (the output head stays in full precision)" in err
    if "gate" in str(r["after_init"]):
        assert "left alone: transformer.h.*.gate (3) (in_features is 12, expected a multiple of 16)" in err
    assert "validation bits per byte): NVFP4 forward" in err and "disable_fp8" in err
    assert "scripts.base_train ended; models converted: 1; method clover, quantized: forward and backward" in err
    assert "nanochat_fp4" not in out  # stdout is the script's own


# In a fork of a process that has imported our own scripts, what a new one would do in a checkout. {} is the program.
ROWS = f"--recipes={Path(__file__).parent / '_rows.py'}"
IN_A_FORK = """
import inspect, runpy, sys
for name in [n for n in sys.modules if n.split(".")[0] == "scripts"]:
    del sys.modules[name]
    inspect._filesbymodname.pop(name, None)  # see forget()
sys.dont_write_bytecode = True
{}
"""


def test_bf16_is_the_checkout_as_it_is_and_clover_keeps_its_bookkeeping(checkout, run, run_ranks):
    path = f"sys.path[:] = [{str(checkout)!r}, *(p for p in sys.path if p != {str(ROOT)!r})]"
    program = f"{path}\nrunpy.run_module('scripts.base_train', run_name='__main__')"
    (plain,) = map(record, run_ranks(IN_A_FORK.format(program), 1))
    bf16 = record(run(checkout, "--method", "bf16", "scripts.base_train")[1])
    clover = record(run(checkout, "--method", "clover", "scripts.base_train")[1])
    assert bf16["after_init"] == plain["after_init"]
    assert bf16["losses"] == plain["losses"] and bf16["checksum"] == plain["checksum"]
    assert clover["losses"] != plain["losses"]
    assert clover["losses"] == pytest.approx(plain["losses"], rel=0.05)
    assert clover["flops"] == plain["flops"]  # the newest nanochat counts instances of its own Linear
    assert clover["keys"] == plain["keys"] and clover["seed"] == plain["seed"]


def test_a_method_with_phases_is_told_where_the_run_is(tmp_path, run, run_ranks):
    """clover_late is clover for 70% of the steps, and not from there on; later stages go on with what it ended with."""
    checkout, more = make_checkout(tmp_path, "new"), ("scripts.base_train", "--", "--num-iterations=5", "--depth=1")
    status, out, err = run(checkout, ROWS, "--method=clover_late", *more)
    assert status == 0, err
    assert "step 4 of 5: from here on clover_refined" in err and err.count("from here on") == 1
    late, clover = record(out), record(run(checkout, "--method=clover", *more)[1])
    assert late["losses"][:4] == clover["losses"][:4] and late["losses"][4] != clover["losses"][4]
    assert late["recipe"].startswith("clover_refined")
    assert (
        "four_over_six + rest" in record(run(checkout, ROWS, "--method=clover_late", "scripts.chat_sft")[1])["recipe"]
    )
    # As a user starts it, this module is __main__ as well.
    program = f"sys.stderr, sys.argv = sys.stdout, ['', '{ROWS}', '--method=clover_late', *{more}]\n"
    program += "runpy.run_module('nanochat_fp4.upstream', run_name='__main__', alter_sys=True)"
    (out,) = run_ranks(IN_A_FORK.format(program), 1, env={"NANOCHAT_DIR": str(checkout)})
    assert "step 4 of 5: from here on clover_refined" in out
    script = checkout / "scripts/base_train.py"
    script.write_text(re.sub("num_iterations(?= =|:)", "steps", script.read_text()))  # another name for it
    check_error(run(checkout, ROWS, "--method=clover_late", *more), "where the run is (step is 0, num_iterations None)")


@pytest.mark.parametrize("script", ["scripts.chat_sft", "scripts.chat_eval"])
def test_later_stages_quantize_the_forward_pass_of_loaded_weights(checkout, run, script, monkeypatch):
    status, out, err = run(checkout, "--method=clover", script)
    r = record(out)
    assert r["loaded"] and r["kind"] == "QuantLinear"
    assert "output four_over_six" in r["recipe"] and "ms_eden" not in r["recipe"]
    assert f"{script} of {checkout}: method clover, quantized: forward\n" in err
    assert "ms_eden" in record(run(checkout, "--method=clover", "--backward", "full", script)[1])["recipe"]
    monkeypatch.setenv("QAT_BACKWARD", "none")
    status, out, err = run(checkout, "--method=clover", script)
    assert record(out)["recipe"] == "None" and record(out)["kind"] in ("Linear", "OwnLinear")
    assert "converted no layer" in err


def test_logits_do_not_depend_on_the_batch_and_losses_are_computed_as_in_training(checkout, run):
    r = record(run(checkout, "--method=clover", "scripts.logits")[1])
    assert r["logits"] < 1e-3 and r["cached"] == 0
    assert r["loss"] > 0.1


def test_layers_can_be_left_alone(old, run):
    _, out, err = run(old, "--method=clover", "--skip", "*.down", "--keep-first-blocks=1", "scripts.base_train")
    converted = [name for name, kind in record(out)["after_init"].items() if kind == "QuantLinear"]
    assert converted == ["transformer.h.1.up"]
    assert "left alone: transformer.h.*.up (1) (in a first or last block" in err
    assert "left alone: transformer.h.*.down (2) (skip pattern '*.down')" in err


def test_dry_run_stops_before_weights_are_made(checkout, run):
    status, out, err = run(checkout, "--method=clover", "--dry-run", "scripts.base_train", "--", "--depth=5")
    assert status == 0 and "RECORD" not in out
    assert "converted 10 linear layers" in err and "dry run" in err


def test_the_checkout_wins_over_folders_of_the_same_name(old, tmp_path, run_ranks):
    """From this project's folder, which has a package `scripts` and a folder `kernels`; it is on PYTHONPATH too, and so
    is a folder of installed packages, one of which calls itself `scripts`."""
    (tmp_path / "site/scripts").mkdir(parents=True)
    (tmp_path / "site/scripts/__init__.py").write_text("")
    (old / "scripts/where.py").write_text(
        "import importlib.util, json, sys, scripts, nanochat\n"
        "import nanochat_fp4.evaluation.report, nanochat_fp4.nvfp4.convert\n"  # still there for us
        "kernels, own = importlib.util.find_spec('kernels'), importlib.util.find_spec('scripts.tok_train')\n"
        "where = list(kernels.submodule_search_locations) if kernels else []\n"
        "print('RECORD 0', json.dumps([list(scripts.__path__), nanochat.__file__, where, own is None, sys.path]))\n"
    )
    program = f"import os; os.chdir({str(ROOT)!r}); root = {str(ROOT)!r}\n"
    program += f"sys.path[:0] = [root, root, root + '/kernels', {str(tmp_path / 'site')!r}]\n"
    program += "sys.argv = ['', '--method=bf16', 'scripts.where']\n"
    program += "runpy.run_module('nanochat_fp4.upstream', run_name='__main__', alter_sys=True)"
    (out,) = run_ranks(IN_A_FORK.format(program), 1, env={"NANOCHAT_DIR": str(old)})
    scripts, nanochat, kernels, ours_hidden, path = record(out)
    assert scripts == [str(old / "scripts")] and nanochat == str(old / "nanochat/__init__.py")
    assert str(ROOT / "kernels") not in kernels
    assert ours_hidden
    assert path[0] == str(old) and str(ROOT) not in path


def test_two_processes_share_weights_and_not_their_random_numbers(tmp_path, run_ranks):
    checkout = make_checkout(tmp_path / "nanochat", "new")
    files = sorted(checkout.rglob("*"))
    program = "sys.stderr = sys.stdout\nfrom nanochat_fp4.upstream import main\n"
    program += "main(['scripts.base_train', '--', '--depth=1'])"
    outs = run_ranks(IN_A_FORK.format(program), env={"NANOCHAT_DIR": str(checkout)})
    zero, one = record(outs[0], 0), record(outs[1], 1)
    assert zero["argv"][1:] == one["argv"][1:] == ["--depth=1"]
    assert zero["losses"] != one["losses"]  # different data
    assert zero["checksum"] == one["checksum"]
    assert (zero["seed"], one["seed"]) == (42, 43)
    assert "".join(outs).count("converted 2 linear layers") == 1  # rank 0 speaks for all
    assert sorted(checkout.rglob("*")) == files  # no __pycache__ either


# ----------------------------------------------------------------------------------------------------------------------
# What it reports at the end


@pytest.mark.parametrize(
    "script, warning",
    [
        ("never", "warning: scripts.never ended without building a GPT: nothing was quantized"),
        ("bare", "warning: scripts.bare built a GPT but never called init_weights: nothing was quantized"),
        ("twice", "warning: init_weights ran more than once on one model"),
    ],
)
def test_reports_what_was_not_quantized(old, run, script, warning):
    status, _, err = run(old, "--method=clover", f"scripts.{script}")
    assert status == 0 and warning in err and err.count("converted 4 linear layers") == (script == "twice")
    assert script == "twice" or "warning" not in run(old, "--method=bf16", f"scripts.{script}")[2]


# ----------------------------------------------------------------------------------------------------------------------
# Errors


def check_error(result, *expected):
    status, out, err = result
    lines = [line for line in err.splitlines() if not line.startswith("nanochat_fp4: ")]
    assert status == 2 and len(lines) == 1 and lines[0].startswith("error: "), err
    for text in expected:
        assert text in lines[0]


def test_errors_of_the_script_stay_as_they_are(old, run):
    status, _, err = run(old, "scripts.breaks")
    assert status == 1 and "Traceback" in err and "ValueError: the script is wrong" in err
    assert run(old, "scripts.leaves")[0] == 7


def test_nanochat_dir(tmp_path, run, monkeypatch):
    monkeypatch.delenv("NANOCHAT_DIR", raising=False)
    check_error(run(None, "scripts.base_train"), "NANOCHAT_DIR is not set")
    check_error(run(tmp_path / "nowhere", "scripts.base_train"), "is not a folder")
    check_error(run(tmp_path, "scripts.base_train"), "not a nanochat checkout", "no nanochat/gpt.py and no scripts")
    check_error(run(ROOT, "scripts.base_train"), "not a nanochat checkout")


@pytest.mark.parametrize("script", ["scripts.mid_train", "base_train", "scripts/base_train.py", "scripts..base_train"])
def test_script_that_is_not_there(old, run, script):
    check_error(run(old, script), f"there is no script {script!r}", "scripts.base_eval, scripts.base_train")


def test_unknown_method_flag_or_value(old, run, monkeypatch):
    check_error(run(old, "--method=clever", "scripts.base_train"), "--method: unknown method 'clever'", "clover")
    check_error(run(old, "--method=clover_feedback", "scripts.base_train"), "does not collect", "another method")
    check_error(run(old, "--backward=half", "scripts.base_train"), "--backward: unknown value 'half'", "forward")
    check_error(run(old, "scripts.base_train", "--depth=3"), "unknown arguments: --depth=3", "go after --")
    check_error(run(old), "required: SCRIPT")
    check_error(run(old, "--skip", "nothing.*", "scripts.base_train"), "nothing.*", "matches no")
    monkeypatch.setenv("QAT_METHOD", "clever")
    check_error(run(old, "scripts.base_train"), "QAT_METHOD: unknown method 'clever'")
    monkeypatch.setenv("QAT_METHOD", "clover")
    monkeypatch.setenv("QAT_BACKWARD", "half")
    check_error(run(old, "scripts.base_train"), "QAT_BACKWARD: unknown value 'half'")


@pytest.mark.parametrize(
    "old_text, new_text, expected",
    [
        ("class GPT(nn.Module)", "class Transformer(nn.Module)", "no model class GPT"),
        ("def init_weights", "def init_parameters", "GPT has no init_weights"),
        ("def setup_optimizers", "def make_optimizers", "GPT has no setup_optimizer (or setup_optimizers)"),
        ("idx, targets=None", "idx, labels=None", "no argument targets (it has self, idx, labels,"),
        ("from nanochat.common", "from nanochat.shared", "it has no module nanochat.shared"),
        ("import COMPUTE_DTYPE", "import COMPUTE_TYPE", "cannot import name 'COMPUTE_TYPE'"),
    ],
)
def test_checkout_that_cannot_be_patched(old, run, old_text, new_text, expected):
    gpt = old / "nanochat/gpt.py"
    assert old_text in gpt.read_text()
    gpt.write_text(gpt.read_text().replace(old_text, new_text))
    check_error(run(old, "scripts.base_train"), "has changed too much to be patched", expected, "f5425245f")


def test_missing_package_and_half_precision(old, run, monkeypatch):
    monkeypatch.setenv("NANOCHAT_DTYPE", "float16")
    check_error(run(old, "--method=clover", "scripts.base_train"), "computes in float16", "NANOCHAT_DTYPE=bfloat16")
    assert run(old, "--method=bf16", "scripts.never")[0] == 0
    (old / "nanochat/gpt.py").write_text("import no_such_package_anywhere\n")
    check_error(run(old, "scripts.base_train"), "needs the package no_such_package_anywhere", "install")


def test_a_model_whose_layers_are_not_the_converted_ones(tmp_path, run):
    new = make_checkout(tmp_path / "nanochat", "new")
    result = run(new, "--method=clover", "scripts.base_train", "--", "--fp8")
    check_error(result, "replaced 2 of 4 converted layers by Float8Linear", "--fp8 exclude each other")
    assert run(new, "--method=bf16", "scripts.base_train", "--", "--fp8")[0] == 0
    check_error(run(new, "--method=clover", "scripts.bare_train"), "init_weights was never called on")


# ----------------------------------------------------------------------------------------------------------------------
# Pieces


def test_defaults_by_stage(monkeypatch):
    monkeypatch.delenv("QAT_BACKWARD", raising=False)
    stages = {"base_train": "full", "mid_train": "forward", "of_mine": "forward", "tok_train": "none"}
    for script, backward in stages.items():
        assert upstream.parse_args([f"scripts.{script}"]).backward == backward
    options = upstream.parse_args(["--method", "quartet2", "scripts.base_train", "--", "--", "--method=x"])
    assert options.method == "clover" and options.script_args == ("--", "--method=x")
    assert upstream.parse_args(["--backward=none", "scripts.base_train"]).recipe is None
    assert upstream.parse_args(["--method=fig1a_sr", "scripts.chat_sft"]).recipe is None  # quantizes no forward
    backward = upstream.parse_args(["--method=fig1a_sr", "scripts.base_train"])
    assert backward.what().endswith("quantized: backward")
    assert "BF16 forward" in upstream.precision_lines(backward.recipe)[0]


# ----------------------------------------------------------------------------------------------------------------------
# Real checkouts: NANOCHAT_TEST_CHECKOUTS=/path/to/nanochat-f5425245f:/path/to/nanochat (minutes)

REAL = [Path(p) for p in os.environ.get("NANOCHAT_TEST_CHECKOUTS", "").split(os.pathsep) if p]


@pytest.mark.skipif(not REAL, reason="NANOCHAT_TEST_CHECKOUTS names no checkouts")
@pytest.mark.parametrize("checkout", REAL, ids=lambda path: path.name)
def test_a_real_checkout_trains_in_bf16_and_clover(checkout, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.table({"text": [p.read_text(errors="replace")[:4000] for p in Path(os.__file__).parent.glob("*.py")] * 8})
    for name in ("base_data", "base_data_climbmix"):
        (tmp_path / name).mkdir()
        for i in range(2):
            pq.write_table(text, tmp_path / name / f"shard_{i}.parquet", row_group_size=200)
    missing = [name for name in ("wandb", "psutil", "tokenizers") if importlib.util.find_spec(name) is None]
    files = [f"{name}/{module}.py" for name in missing for module in ("__init__", "models", "trainers")]
    write(tmp_path / "stubs", dict.fromkeys(files, "def __getattr__(name):\n    return object\n"))  # never called
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", tmp_path / "stubs")))
    env = {"TORCHDYNAMO_DISABLE": "1", "NANOCHAT_BASE_DIR": str(tmp_path), "WANDB_RUN": "dummy", "PYTHONPATH": paths}
    flags = "--depth=2 --max-seq-len=256 --window-pattern=L --device-batch-size=1 --total-batch-size=512 --eval-every=6"
    flags += " --num-iterations=6 --eval-tokens=1024 --core-metric-every=-1 --sample-every=-1 --device-type=cpu"
    flags += " --matrix-lr=0.5 --embedding-lr=6 --unembedding-lr=0.1"

    def losses(method: str, script: str, flags: str) -> list[float]:
        command = "-m", "nanochat_fp4.upstream", f"--method={method}", script, "--"
        done = outside(checkout, *command, *flags.split(), **env)
        assert done.returncode == 0, done.stdout + done.stderr
        return [float(v) for v in re.findall(r"^step .*? loss: ([\d.]+)", done.stdout, re.M)]

    losses("bf16", "scripts.tok_train", "--vocab-size=1024 --max-chars=500000")
    bf16, clover = (losses(method, "scripts.base_train", flags) for method in ("bf16", "clover"))
    assert len(bf16) == len(clover) == 6
    assert bf16[0] == clover[0]  # the blocks' projections are zero at the start: nothing to quantize yet
    assert bf16[-1] < bf16[0] and clover[-1] < clover[0] and bf16[-1] != clover[-1]
    assert clover[-1] == pytest.approx(bf16[-1], rel=0.01)
