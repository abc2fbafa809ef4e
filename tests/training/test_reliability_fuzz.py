"""
Damaged files of every kind that is read: whatever comes, the answer is a result or one line, and soon. --soak tries
many more, drawn anew. Also: the calls that could run what is in a file, which are nowhere in the code.
"""

import ast
import contextlib
import gzip
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from _damage import DAMAGES, damaged
from _forking import ROOT
from _samples import BENCHMARK_ROWS, make_bundle, save_base

from eval.arc import ARC
from eval.gsm8k import GSM8K
from eval.humaneval import HumanEval
from eval.mmlu import MMLU
from nanochat_fp4.cli import UserError
from nanochat_fp4.data.chat_data import CustomJSON, SmolTalk, load_words
from nanochat_fp4.data.dataset import ensure_data, parquets_iter_batched
from nanochat_fp4.data.tokenizer import get_token_bytes, get_tokenizer
from nanochat_fp4.evaluation import core_eval, plots, report
from nanochat_fp4.evaluation.metrics import MetricsLog
from nanochat_fp4.training.checkpoint_manager import list_steps
from nanochat_fp4.training.load_model import build_model

INPUTS = 40  # damaged versions of each kind of file, in a normal run
FILES_OF_A_KIND = 160  # in the soak: a multiple of the kinds of damage


SMALL = (
    "--depth=1 --aspect-ratio=64 --head-dim=64 --max-seq-len=16 --device-batch-size=2 --total-batch-size=32 "
    "--eval-tokens=32 --core-metric-every=-1 --sample-every=-1 --num-iterations=1 --device-type=cpu"
).split()

# ----------------------------------------------------------------------------------------------------------------------
# Damage


class Hang(BaseException):
    """What was to be quick is not."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    def stop(*args):
        raise Hang(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ----------------------------------------------------------------------------------------------------------------------
# Files


@dataclass
class Kind:
    """A kind of file: examples of it, and what reads it. reset() makes whole what reading may have changed."""

    paths: list[Path]
    read: Callable[[], Any]
    share: float = 1.0  # of INPUTS, less where reading is slow
    reset: Callable[[], Any] = field(default=lambda: None)


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


CONVERSATION = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def unsealed_kind(base: Path, tmp: Path) -> Kind:
    """Metadata of nanochat's own checkpoints, which have no checksum."""
    save_base(base, tag="r", n_layer=1, n_embd=64, n_head=1, n_kv_head=1, sequence_len=16)
    folder = base / "base_checkpoints" / "r"
    for path in (folder / "step_000005").iterdir():
        path.rename(folder / path.name)
    (folder / "step_000005").rmdir()

    def read():
        assert list_steps(folder) == [5]
        build_model(folder, 5, "cpu", "eval")

    return Kind([folder / "meta_000005.json"], read)


def tokenizer_kind(base: Path, tmp: Path) -> Kind:
    def read():
        tokenizer = get_tokenizer()
        get_token_bytes()
        assert tokenizer.decode(tokenizer.encode("some text")) == "some text"

    return Kind([base / "tokenizer" / "tokenizer.json"], read)


def pickle_kind(base: Path, tmp: Path) -> Kind:
    import pickle

    from nanochat_fp4.data.tokenizer import RustBPETokenizer

    path = write(tmp / "pickled" / "tokenizer.pkl", pickle.dumps(get_tokenizer().enc))
    return Kind([path], lambda: RustBPETokenizer.from_directory(path.parent, allow_pickle=True))


def shard_kind(base: Path, tmp: Path) -> Kind:
    folder = tmp / "shards"
    shutil.copytree(os.environ["DATA_DIR"], folder)

    def read():
        for split in ("train", "val"):
            for texts in parquets_iter_batched(split, data_dir=ensure_data(str(folder))):
                assert all(isinstance(text, str) for text in texts)

    return Kind(sorted(folder.iterdir()), read, share=2)


def text_kind(base: Path, tmp: Path) -> Kind:
    folder = tmp / "own_text"
    documents = [{"text": f"Document {i}. " * 40} for i in range(30)]
    lines = "\n".join(json.dumps(d) for d in documents).encode()
    paths = [write(folder / "a.jsonl", lines), write(folder / "b.jsonl.gz", gzip.compress(lines))]
    paths += [write(folder / "c.txt", "Some words. " * 300), write(folder / "d.md", "# Title\n\nWords.\n" * 200)]
    return Kind(paths, lambda: ensure_data(str(folder)), reset=lambda: shutil.rmtree(base / "stored_text", True))


def benchmark_kind(base: Path, tmp: Path) -> Kind:
    paths = []
    for i, (name, row) in enumerate(BENCHMARK_ROWS.items()):
        data = ("\n".join([json.dumps(row)] * 3) + "\n").encode()
        if i % 3 == 0:
            paths.append(write(tmp / f"{name}.jsonl", data))
        elif i % 3 == 1:
            paths.append(write(tmp / f"{name}.jsonl.gz", gzip.compress(data)))
        else:
            import pyarrow as pa

            path = write(tmp / f"{name}.parquet", b"")
            pq.write_table(pa.Table.from_pylist([row] * 3), path)
            paths.append(path)

    def read():
        for make in (
            lambda: ARC("ARC-Easy", "test", eval_dir=tmp),
            lambda: ARC("ARC-Challenge", "test", eval_dir=tmp),
            lambda: MMLU("all", "test", eval_dir=tmp),
            lambda: GSM8K("main", "test", eval_dir=tmp),
            lambda: HumanEval(eval_dir=tmp),
        ):
            tokenizer = get_tokenizer()
            for conversation in make():
                tokenizer.render_for_completion(conversation)

    return Kind(paths, read, share=4)


def conversation_kind(base: Path, tmp: Path) -> Kind:
    lines = "\n".join(json.dumps({"messages": CONVERSATION}) for _ in range(4))
    paths = [
        write(tmp / "sft" / "train.jsonl", lines),
        write(tmp / "sft" / "test.jsonl.gz", gzip.compress(lines.encode())),
    ]
    paths += [write(tmp / "custom.jsonl", "\n".join(json.dumps(CONVERSATION) for _ in range(4)))]
    paths += [write(tmp / "eval" / "words" / "words_alpha.txt", "strawberry\nbanana\n")]

    def read():
        tokenizer = get_tokenizer()
        tasks = [SmolTalk("train", sft_dir=tmp / "sft"), SmolTalk("test", sft_dir=tmp / "sft")]
        for task in (*tasks, CustomJSON(tmp / "custom.jsonl")):
            for conversation in task:
                tokenizer.render_conversation(conversation)
        load_words(tmp / "eval")

    return Kind(paths, read, share=2)


def bundle_kind(base: Path, tmp: Path) -> Kind:
    folder = make_bundle(tmp / "bundle")

    class Model(torch.nn.Module):
        def forward(self, ids):
            return torch.zeros(*ids.shape, get_tokenizer().get_vocab_size())

    def read():
        core_eval.evaluate_model(Model(), get_tokenizer(), torch.device("cpu"), 2, folder)

    return Kind([p for p in folder.rglob("*") if p.is_file()], read, share=2)


def report_kind(base: Path, tmp: Path) -> Kind:
    made = report.get_report("d2_x")
    made.log("Base model training", [{"a": 1}])
    made.log("Chat evaluation sft", [{"a": 1}])
    log = MetricsLog(base / "base_checkpoints" / "d2_x")
    log.append("start", 0, method="bf16", num_iterations=3)
    for step in range(3):
        log.append("train", step, loss=1.0, smoothed_loss=1.0)
        log.append("telemetry", step, layers={"transformer.h.0.mlp.c_fc": {"output_error": 0.1}})
    log.append("val", 3, bpb=1.0, bpb_bf16=1.0)
    whole = log.path.read_bytes()

    def read():
        with pytest.MonkeyPatch.context() as m:
            m.setattr(plots, "draw", lambda *args: None)  # slow; damaged numbers reach it in test_report.py
            report.generate(report.get_report().folder)
        log.rewind(2)

    paths = [log.path, *(base / "report" / "d2_x").glob("*.json")]
    return Kind(paths, read, share=2, reset=lambda: write(log.path, whole))


# Checkpoints are damaged in test_checkpoint_manager.py, too.
KINDS = {
    "nanochat's own metadata": unsealed_kind, "tokenizer": tokenizer_kind,
    "nanochat's tokenizer": pickle_kind, "parquet shard": shard_kind, "text": text_kind, "benchmark": benchmark_kind,
    "conversations": conversation_kind, "eval bundle": bundle_kind, "report and metrics": report_kind,
}  # fmt: skip


def try_damage(kind: Kind, count: int, rng: random.Random) -> dict[str, int]:
    """
    Read `count` damaged files, as many of each kind of damage, in all of the kind's files in turn and from their
    beginnings to their ends. Returns how many were refused, and how many gave a result.
    """
    kind.read()  # as it is, it is good
    kind.reset()
    outcome = {"refused": 0, "read": 0}
    first = rng.randrange(len(DAMAGES))
    for i in range(count):
        path = kind.paths[i // len(DAMAGES) % len(kind.paths)]
        whole = path.read_bytes()
        how = DAMAGES[(first + i) % len(DAMAGES)]
        path.write_bytes(data := damaged(whole, rng, how, (i + rng.random()) / count))
        try:
            with deadline(60):
                kind.read()
            outcome["read"] += 1
        except (UserError, ValueError) as e:  # what run_main turns into one line
            assert len(" ".join(str(e).split())) < 1500, e
            outcome["refused"] += 1
        except (Exception, Hang) as e:
            raise AssertionError(f"{path.name} = {data[:300]!r}: {type(e).__name__}: {e}") from e
        path.write_bytes(whole)
        kind.reset()
    return outcome


@pytest.mark.parametrize("name", KINDS)
def test_damaged_files_are_read_or_refused_in_one_line(tiny_base, tmp_path, name):
    kind = KINDS[name](tiny_base, tmp_path)
    outcome = try_damage(kind, round(INPUTS * kind.share), random.Random(0))
    print(outcome)
    assert outcome["refused"] > 0 or name in ("report and metrics", "corpus manifest"), outcome


@pytest.mark.soak
@pytest.mark.parametrize("name", KINDS)
def test_many_damaged_files(tiny_base, tmp_path, name):
    """1,920 in all, as many of each kind of file as of any other."""
    kind = KINDS[name](tiny_base, tmp_path)
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed, name, try_damage(kind, FILES_OF_A_KIND, random.Random(seed)))


# ----------------------------------------------------------------------------------------------------------------------
# Nothing executes what it should not

# The rules S of ruff (pyproject.toml) refuse exec, eval, pickles, shells and YAML that makes objects.


def trusting(program: str) -> list[str]:
    """Calls in this program that could run the content of a file, or trust it unchecked."""
    found = []
    for call in (node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)):
        name, given = ast.unparse(call.func), {k.arg: ast.unparse(k.value) for k in call.keywords}
        if (
            (name == "torch.load" and given.get("weights_only") != "True")
            or (name.endswith(".from_pretrained") and "Rust" not in name and given.get("trust_remote_code") != "False")
            or given.get("trust_remote_code", "False") != "False"
            or (name.startswith(("np.", "numpy.")) and given.get("allow_pickle", "False") != "False")
            or name.startswith(("torch.hub.", "torch.jit.load", "requests.get", "urllib.request.urlretrieve"))
        ):
            found.append(ast.unparse(call))
    return found


@pytest.mark.parametrize(
    "code",
    [
        "torch.load(f)", "torch.load(f, weights_only=x)", "AutoModel.from_pretrained(x)", "requests.get(x)",
        "load_dataset(x, trust_remote_code=True)", "np.load(f, allow_pickle=True)", "torch.hub.load(x)",
    ],
)  # fmt: skip
def test_trusting_calls_are_found(code):
    assert trusting(code)


def test_nothing_executes_what_it_reads():
    for folder in ("nanochat_fp4", "scripts", "eval", "kernels", "lab"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not trusting(path.read_text(encoding="utf-8")), path
    for path in [*ROOT.glob("*.sh"), *(ROOT / "dev").glob("*.sh"), *(ROOT / "tests").glob("*.sh")]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.split("#")[0]
            piped = "curl" in code or "wget" in code
            assert not (piped and "|" in code and "sh" in code.split("|")[-1]), (
                f"{path}:{number} runs what it downloads"
            )
            assert not code.strip().startswith("eval "), f"{path}:{number} evaluates text"
