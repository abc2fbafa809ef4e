"""The counterpart of nanochat's common.py: base directory and print0, ranks and devices, seeds and random state,
process group."""

import argparse
import contextlib
import hashlib
import os
import random
import shlex
import sys
import traceback
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanochat_fp4.cli import UserError, logger, one_line, print_safely
from nanochat_fp4.hardware import usable_cpus
from nanochat_fp4.nvfp4.methods import get_recipe


def base_dir_of(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder of all files that are made or downloaded, which may not be there yet: NANOCHAT_BASE_DIR, or
    by default ~/.cache/nanochat_fp4. nanochat's own is ~/.cache/nanochat."""
    return Path(environment.get("NANOCHAT_BASE_DIR") or os.path.expanduser("~/.cache/nanochat_fp4"))


def base_dir_variable(base_dir: Path) -> str:
    """Returns NANOCHAT_BASE_DIR=... and a space, for the front of a command that is about this folder. Returns nothing
    if it is the default. The shell that types the command may not have the variable."""
    return "" if base_dir == base_dir_of({}) else f"NANOCHAT_BASE_DIR={shlex.quote(str(base_dir))} "


def get_base_dir() -> str:
    """Returns base_dir_of(), and makes the folder. Raises UserError if it cannot be made."""
    base_dir = str(base_dir_of())
    try:
        base_dir.encode()  # pyarrow accepts only names that are UTF-8.
        os.makedirs(base_dir, exist_ok=True)
    except (OSError, UnicodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "the name is not UTF-8"
        raise UserError(f"cannot create {base_dir} ({why}); set NANOCHAT_BASE_DIR to a writable folder") from e
    return base_dir


def resolve_method(flag: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the name of the QAT method: that of --method, else QAT_METHOD, else clover. An alias becomes the name
    of its method. Raises UserError, which lists the methods."""
    try:
        return get_recipe(flag or environment.get("QAT_METHOD") or "clover").name
    except ValueError as e:
        raise UserError(f"--method: {e}" if flag else f"QAT_METHOD: {e}".replace("--recipes=", "RECIPES=")) from None


def add_recipes_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --recipes, whose default is $RECIPES.

    The files are run while the flags are read, so a command knows their methods before it reads a checkpoint. A
    resumed run, an evaluation or an export of a trained model does without the files, because a checkpoint has the
    recipes that it was trained with.
    """
    text = "Python file with methods of your own (nanochat_fp4.register); several with commas (default: $RECIPES)"

    def load(files: str) -> str:
        return load_recipes(files) if files else load_recipes(os.environ.get("RECIPES", ""), "RECIPES")

    parser.add_argument("--recipes", type=load, default="", metavar="FILE.py", help=text)


def load_recipes(files: str, source: str = "--recipes") -> str:
    """Runs Python files that register rows (nf.register), and returns `files`. These are paths with commas between
    them.

    `source` is the flag or the variable that named them. Raises UserError if there is no such file, or if a file raises
    an exception.
    """
    for path in filter(None, files.split(",")):
        if not os.path.isfile(path):
            raise UserError(f"{source}: there is no file {path}; name Python files, with commas between them")
        name = "recipes_" + hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()
        # The module is a new one, so that a function of the file reads the same at each run of the file.
        module = sys.modules[name] = types.ModuleType(name)
        module.__file__ = path
        try:
            # A loader of importlib would leave a __pycache__, which hides an edit within the same second.
            exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))  # noqa: S102
        except (Exception, SystemExit) as e:  # A file of the user can raise anything.
            lines = [frame.lineno for frame in traceback.extract_tb(e.__traceback__) if frame.filename == path]
            line = e.lineno if isinstance(e, SyntaxError) else lines[-1] if lines else None
            where = path if line is None else f"{path}:{line}"
            raise UserError(f"{source}: {where}: {type(e).__name__}: {one_line(e)}") from e
    return files


def print0(*args: Any, **kwargs: Any) -> None:
    """Prints on rank 0 only. If the log cannot be written, the text is lost and the run goes on."""
    if os.environ.get("RANK", "0") == "0":
        print_safely(*args, **kwargs)


SAID: set[str] = set()


def say_once(text: str) -> None:
    """Prints a text on rank 0 only, and only once in a process and in all stages of a speedrun. The stages of one share
    report/said.txt of the base directory, which dev/pipeline.sh empties when it sets NANOCHAT_BEGAN."""
    if os.environ.get("RANK", "0") != "0":
        return
    if os.environ.get("NANOCHAT_BEGAN"):
        path = Path(get_base_dir()) / "report/said.txt"
        with contextlib.suppress(OSError), path.open("a+", encoding="utf-8", errors="replace") as file:
            file.seek(0)
            SAID.update(file.read().split("\0"))
            if text not in SAID:
                file.write(text + "\0")
    if text not in SAID:
        SAID.add(text)
        print0(text)


def aligned(lines: dict[str, Any]) -> str:
    """Returns lines `name  value` with aligned columns."""
    width = max(map(len, lines), default=0)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in lines.items())


# ----------------------------------------------------------------------------------------------------------------------
# Ranks


def is_ddp_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_dist_info() -> tuple[bool, int, int, int]:
    """Returns `(ddp, rank, local_rank, world_size)` from torchrun's variables, and `(False, 0, 0, 1)` without them.
    Raises UserError if the variables do not fit together."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if not all(name in os.environ for name in names):
        return False, 0, 0, 1
    try:
        rank, local_rank, world_size = (int(os.environ[name]) for name in names)
        fit = 0 <= rank < world_size and 0 <= local_rank < world_size
    except ValueError:
        fit = False
    if not fit:
        given = " ".join(f"{name}={os.environ[name]}" for name in names)
        raise UserError(f"{given} do not fit together; unset them, or start with torchrun, which sets them")
    return True, rank, local_rank, world_size


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Returns the mean of a small tensor over the ranks. All ranks must call this function together. Without a
    process group the values stay as they are."""
    if is_ddp_initialized():
        values = values.clone()
        dist.all_reduce(values, op=dist.ReduceOp.SUM)
        values /= dist.get_world_size()
    return values


def of_all_ranks(value: Any) -> list[Any]:
    """Returns a list of `value` of every rank, in the order of the ranks. All ranks must call this function
    together."""
    values = [value]
    if is_ddp_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def fail_together(problem: str | None) -> None:
    """Raises the first problem of any rank on all ranks, as a UserError. All ranks must call this function together."""
    if first := next(filter(None, of_all_ranks(problem)), None):
        raise UserError(first)


# ----------------------------------------------------------------------------------------------------------------------
# Devices


def _why_no_cuda() -> str:
    built = f"for CUDA {torch.version.cuda} but sees no GPU"
    return f"this PyTorch ({torch.__version__}) is built " + (built if torch.version.cuda else "without CUDA")


def autodetect_device_type() -> str:
    """Returns 'cuda' if there is a CUDA GPU, else 'mps' if there is Metal, else 'cpu'. Prints the choice."""
    device_type = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    say_once(f"Autodetected device type: {device_type}" + (f" ({_why_no_cuda()})" if device_type == "cpu" else ""))
    return device_type


# ----------------------------------------------------------------------------------------------------------------------
# Seeds


def seed_everything(seed: int) -> None:
    """Seeds the default generators of Python and torch (CPU, CUDA, MPS), so that all ranks draw the same weights.
    Raises UserError for a seed of more than 64 bits."""
    if not -(2**63) <= seed < 2**64:
        raise UserError(f"--seed={seed} does not fit into 64 bits; use a number from 0 to {2**64 - 1}")
    random.seed(seed)
    torch.manual_seed(seed)  # This seeds the default generators of all devices as well.


def seed_micro_batch(seed: int, step: int, micro_batch: int) -> None:
    """
    Seeds torch's default generators for the rotations and the rounding noise of one micro-batch of a step.

    micro_batch counts over all ranks, so the numbers of a micro-batch do not depend on the rank that computes it. The
    seed is a SHA-256 of the three arguments, so neighbouring micro-batches draw independent noise. Independent noise
    averages out over micro-batches, but shared noise would not.
    """
    digest = hashlib.sha256(f"nanochat_fp4 seed {seed} step {step} micro-batch {micro_batch}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)  # 63 bits make a positive int64.


# ----------------------------------------------------------------------------------------------------------------------
# Joining and leaving the process group


def store_of_this_start(rank: int, world_size: int) -> dict[str, Any]:
    """Returns arguments of init_process_group with which the processes of one start find each other. {} leaves
    torch's default.

    torchrun's store outlives a restart (--max-restarts), and has the addresses of dead processes. A rank that reads
    before its peer has written would connect to a dead process, so each start has its own prefix. Several nodes count
    their restarts separately, so they have no common prefix and use the default.
    """
    one_node = os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
    if not one_node or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return {"store": dist.PrefixStore(f"start_{start}", store), "rank": rank, "world_size": world_size}


def use_deterministic_kernels() -> None:
    """
    Makes the results of a CUDA device have the same bits in each run.

    It uses PyTorch's deterministic algorithms, and cuBLAS with one workspace. It must be called before the first
    product of the process. It switches off cuDNN's attention, because its backward pass sums in any order and
    `torch.use_deterministic_algorithms` does not change this. An operation without a deterministic form raises
    RuntimeError, which `cli.run_main` turns into one line. torch's mode that only warns is not used, because flash
    attention would then not become deterministic.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # No operation here reads memory that was not written.
    torch.backends.cuda.enable_cudnn_sdp(False)


# Models narrower than this run on one CPU thread. Their operations are short, and threads would mostly wait for each
# other.
NARROW_WIDTH = 512


def set_cpu_threads(device: torch.device, width: int) -> None:
    """On a CPU, sets the number of torch's threads for a model of this width. OMP_NUM_THREADS takes precedence."""
    if device.type == "cpu" and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1 if width < NARROW_WIDTH else usable_cpus())


def keep_compiled(folder: str) -> None:
    """Lets Inductor and Triton store compiled kernels in `folder`, unless the environment names other folders.

    Inductor's default is under /tmp, which restarts and containers empty, so that the next first step would compile
    everything again. Each release of torch has its own folder, which can be deleted with the release.
    """
    if os.access(folder, os.W_OK):
        compiled = os.path.join(folder, "compiled", f"torch-{torch.__version__}")
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(compiled, "inductor"))
        os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(compiled, "triton"))


def compute_init(device_type: str = "cuda", seed: int = 42) -> tuple[bool, int, int, int, torch.device]:
    """
    Chooses the device, seeds all ranks alike, and joins the process group under torchrun. Returns `(ddp, rank,
    local_rank, world_size, device)`, as in nanochat.

    device_type is cuda, mps or cpu, or "" to detect it. The process group uses NCCL on CUDA, and gloo on the CPU.
    Raises UserError if the device or the process group cannot be had.
    """
    device_type = device_type or autodetect_device_type()
    if device_type not in ("cuda", "mps", "cpu"):
        raise UserError(f"unknown device type {device_type!r}; use --device-type cuda, mps or cpu")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device-type cuda: {_why_no_cuda()}; check nvidia-smi, or use --device-type cpu")
    if device_type == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device-type mps: Metal is not available here; use --device-type cpu")
    ddp, rank, local_rank, world_size = get_dist_info()
    seed_everything(seed)
    if device_type == "cuda":
        # The few FP32 matmuls use TF32. Its 10-bit significand still represents decoded NVFP4 operands exactly.
        torch.set_float32_matmul_precision("high")
        keep_compiled(get_base_dir())
    device = torch.device(device_type)
    if ddp:
        if device_type == "mps":
            raise UserError("several processes are not supported on mps; start without torchrun")
        if device_type == "cuda":
            if local_rank >= (gpus := torch.cuda.device_count()):
                raise UserError(f"local rank {local_rank} has no GPU: {gpus} are visible; lower --nproc_per_node to it")
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
        if not is_ddp_initialized():
            try:
                backend = {"backend": "nccl", "device_id": device} if device_type == "cuda" else {"backend": "gloo"}
                dist.init_process_group(**backend, **store_of_this_start(rank, world_size))
            except (dist.DistError, ValueError) as e:
                raise UserError(f"cannot join the process group: {one_line(e)}; start with torchrun") from e
        dist.barrier()
    if rank == 0 and world_size > 1:
        logger.info(f"device {device}, world size {world_size}")
    return ddp, rank, local_rank, world_size, device


def compute_cleanup() -> None:
    """Leaves the process group, if there is one."""
    if is_ddp_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def joined_processes(device_type: str, seed: int = 42, alone: str = "") -> Iterator[tuple[int, int, torch.device]]:
    """A context of compute_init, with compute_cleanup at its end. Its value is (rank, world size, device). `alone`
    is the name of a program that must run as one process. Under torchrun such a program raises UserError."""
    _, rank, _, world_size, device = compute_init(device_type, seed)
    try:
        if alone and world_size > 1:
            raise UserError(f"{alone} is one process; start it without torchrun")
        yield rank, world_size, device
    finally:
        compute_cleanup()
