"""A resume after exactly one thing has changed: refused where it would be another run, told in a note otherwise."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from _damage import edit_meta
from _samples import save_base
from _training import STAGES

from nanochat_fp4.hardware import get_commit

TAG = "run"
COMMON = f"--model-tag={TAG} --num-iterations=3 --save-every=1 --keep-last=-1".split()


# What is done to the files of a copy of the base directory: (its folder of text, the run's folder) -> None


def rewrite(path: Path, change: Callable[[str], str]) -> None:
    groups = pq.ParquetFile(path).metadata.row_group(0).num_rows
    texts = [change(text) for text in pq.read_table(path).column("text").to_pylist()]
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=groups)


ACTIONS = {
    "train text": lambda text, run: rewrite(text / "shard_00000.parquet", str.upper),
    "one letter": lambda text, run: rewrite(text / "shard_00000.parquet", lambda t: t[:-1] + "!"),
    "val text": lambda text, run: rewrite(text / "shard_00001.parquet", str.upper),
    "commit": lambda text, run: edit_meta(run, 1, commit="0" * 40),
}
# (stage, flag or action, what is said)
REFUSED = [
    ("base", "--method=nvidia", "method was 'clover'"),
    ("base", "--seed=43", "seed was 42"),
    ("base", "--data-seed=3", "data_seed was None"),
    ("base", "--separate-qkv", "separate_qkv was None"),
    ("base", "--depth=2", "n_layer was 1"),
    ("base", "--max-seq-len=16", "sequence_len was 32"),
    ("base", "--total-batch-size=256", "total_batch_size was 128"),
    ("base", "--layer-methods=*.c_fc=bf16", "layer_methods was None"),
    ("base", "train text", "shard_00000.parquet"),
    ("base", "one letter", "shard_00000.parquet"),
    ("mid", "--quantization=full", "quantization was 'forward'"),
    ("mid", "--num-iterations=4", "num_iterations was 3"),
    ("mid", "--total-batch-size=256", "total_batch_size was 512"),
    ("sft", "--method=nvidia", "method was 'clover'"),
    ("sft", "--target-examples-per-step=8", "target_examples_per_step was 4"),
    ("sft", "--device-batch-size=1", "device_batch_size was 2"),
]
NOTED = [
    ("base", "--matrix-lr=0.01", "matrix_lr was 0.02 "),
    ("base", "--weight-decay=0.1", "weight_decay was 0.2"),
    ("base", "--orthogonalizer=newton_schulz", "orthogonalizer was polar_express "),
    ("base", "--state=lean", "state was fp32 "),
    ("mid", "--state=lean", "state was fp32 "),
    ("base", "--warmup-ratio=0.5", "warmup_ratio was 0.0"),
    ("base", "--num-iterations=4", "num_iterations was 3"),
    ("base", "--device-batch-size=1", "device_batch_size was 2"),
    ("base", "--eval-tokens=256", "eval_tokens was 128"),
    ("base", "--on-nonfinite=skip", "on_nonfinite was stop"),
    ("base", "val text", "val_data was"),
    ("base", "commit", "commit was 0000"),
    ("mid", "--matrix-lr=0.01", "matrix_lr was 0.02"),
    ("mid", "--init-lr-frac=0.5", "init_lr_frac was"),
    ("mid", "--device-batch-size=1", "device_batch_size was 2"),
    ("sft", "--weight-decay=0.1", "weight_decay was 0.0"),
]
CHANGES = [(*c, 2) for c in REFUSED] + [(*c, 0) for c in NOTED]
FEW = {"train text", "val text", "commit", "--device-batch-size=1"}  # in a normal run


class Finished:
    """The run of a stage with a checkpoint of each step, to be resumed from the first in copies."""

    def __init__(self, fork_server, tiny_base: Path, text: Path, stage: str, method: str):
        self.module, flags, self.place, parent = STAGES[stage]
        self.flags = [*flags, f"--method={method}"] if stage == "base" else flags  # later stages take the model's
        self.server, self.base, self.text = fork_server, tiny_base, text
        if parent:
            save_base(tiny_base, tag=TAG, source=parent, n_layer=1)
        run = self.run(tiny_base, text)
        assert run.status == 0, run.log

    def run(self, base: Path, text: Path, *flags: str):
        env = {"NANOCHAT_BASE_DIR": str(base), "DATA_DIR": str(text)}
        return self.server.run(self.module, [*self.flags, *COMMON, *flags], env=env)

    def resume(self, change: str, said: str, status: int) -> None:
        if change == "commit" and get_commit() is None:
            return  # the tests of a source distribution, which is no checkout
        copy = self.base.with_name("copy")
        shutil.copytree(self.base, copy)
        # Where the text is must stay, or its path would be a second change.
        kept = {p: p.read_bytes() for p in self.text.iterdir()}
        if change in ACTIONS:
            ACTIONS[change](self.text, copy / self.place / TAG)
        run = self.run(copy, self.text, "--resume-from-step=1", *([] if change in ACTIONS else [change]))
        for path in set(self.text.iterdir()) - kept.keys():
            path.unlink()
        for path, data in kept.items():
            path.write_bytes(data)
        assert run.status == status and "Traceback" not in run.log, run.log
        notes = [line for line in run.log.splitlines() if line.startswith("  note: ")]
        if status:
            last = run.log.splitlines()[-1]
            assert last.startswith("error: ") and said in last, run.log
            assert not any("so far" in note for note in notes), run.log
        else:
            assert len(notes) == 1 and notes[0].startswith(f"  note: {said}"), run.log
        shutil.rmtree(copy)


@pytest.fixture
def text(tiny_base, tmp_path):
    """A folder of text of this test's own."""
    shutil.copytree(os.environ["DATA_DIR"], tmp_path / "own")
    return tmp_path / "own"


@pytest.mark.parametrize(
    "stage, few", [("base", True), *(pytest.param(stage, False, marks=pytest.mark.soak) for stage in STAGES)]
)
def test_one_change_is_refused_or_noted(fork_server, tiny_base, text, stage, few):
    run = Finished(fork_server, tiny_base, text, stage, "bf16" if few else "clover")  # no row of FEW is of a method
    for where, change, said, status in CHANGES:
        if where == stage and (change in FEW or not few):
            run.resume(change, said, status)
