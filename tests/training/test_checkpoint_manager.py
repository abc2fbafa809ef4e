"""Checkpoints under kills, full disks, bit flips and tampering; models that come back; resume to the bit."""

import copy
import hashlib
import json
import os
import random
import re
import shutil

import pytest
import torch
from _damage import damaged

from nanochat_fp4.cli import UserError
from nanochat_fp4.data.tokenizer import RustBPETokenizer
from nanochat_fp4.models.gpt import GPT, GPTConfig
from nanochat_fp4.training import checkpoint_manager as cm
from nanochat_fp4.training import telemetry
from nanochat_fp4.training.checkpoint_manager import (
    NoCheckpointError,
    find_last_step,
    list_steps,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from nanochat_fp4.training.load_model import build_model, find_model_tag, load_model
from nanochat_fp4.training.telemetry import not_finite

KINDS = ("model_{:06d}.pt", "optim_{:06d}_rank0.pt", "meta_{:06d}.json")


def file(folder, kind, step):
    return folder / f"step_{step:06d}" / kind.format(step)


def save(folder, step, value=None, size=100, **meta):
    """A checkpoint whose three files all say `value` (default: the step)."""
    value = step if value is None else value
    tensor = torch.full((size,), float(value))
    return save_checkpoint(
        folder, step, {"w": tensor}, {"m": tensor, "state": {"i": [value]}}, {"value": value, **meta}
    )


def value_of(folder, step):
    """The value of a checkpoint; fails unless its files belong together."""
    model, (optimizer,), meta = load_checkpoint(folder, step, "cpu", load_optimizer=True)
    values = {*model["w"].tolist(), *optimizer["m"].tolist(), float(optimizer["state"]["i"][0]), float(meta["value"])}
    assert len(values) == 1 and meta["step"] == step
    return values.pop()


# ----------------------------------------------------------------------------------------------------------------------
# Saving and loading


def test_files_have_nanochats_names(tmp_path):
    assert save(tmp_path / "d4", 7)
    assert os.listdir(tmp_path / "d4") == ["step_000007"]
    assert sorted(os.listdir(tmp_path / "d4/step_000007")) == sorted(kind.format(7) for kind in KINDS)
    assert value_of(tmp_path / "d4", 7) == 7 and find_last_step(tmp_path / "d4") == 7
    assert load_checkpoint(tmp_path / "d4", 7, "cpu")[1] == []  # the optimizer only on request
    # As nanochat reads it, by --model-tag d4/step_000007, the folder is one of flat files.
    assert load_checkpoint(tmp_path / "d4/step_000007", 7, "cpu")[0]["w"].tolist() == [7] * 100


def test_what_goes_in_comes_out(tmp_path):
    generator = torch.Generator().manual_seed(3)
    optimizer = [
        {"state": {0: {"step": 3, "exp_avg": torch.randn(3, generator=generator)}}, "param_groups": [{"lr": 0.1}]}
    ]
    rank_state = {
        "optimizers": optimizer,
        "rng": {"cpu": torch.get_rng_state()},
        "dataloader": {"a": [[1, 2], None, "x"]},
    }
    model = {"a": torch.randn(2, 2).bfloat16(), "b": torch.arange(3)}
    meta = {"loss": 1.5, "inf": float("inf"), "config": {"n": 1}, "none": None, "path": tmp_path}
    assert save_checkpoint(tmp_path, 1_234_567, model, rank_state, meta)
    model2, (rank_state2,), meta2 = load_checkpoint(tmp_path, 1_234_567, "cpu", load_optimizer=True)
    assert all(torch.equal(model[k], model2[k]) and model[k].dtype == model2[k].dtype for k in model)
    assert torch.equal(rank_state2["rng"]["cpu"], rank_state["rng"]["cpu"])
    assert rank_state2["dataloader"] == rank_state["dataloader"]
    assert torch.equal(rank_state2["optimizers"][0]["state"][0]["exp_avg"], optimizer[0]["state"][0]["exp_avg"])
    assert meta2["loss"] == 1.5 and meta2["inf"] == float("inf") and meta2["step"] == 1_234_567


def test_a_step_can_be_saved_again(tmp_path):
    save(tmp_path, 5, 1)
    save(tmp_path, 5, 2)
    assert value_of(tmp_path, 5) == 2 and os.listdir(tmp_path) == ["step_000005"]


def test_the_newest_is_found(tmp_path, monkeypatch):
    monkeypatch.delattr(hashlib, "file_digest", raising=False)  # Python 3.10 has none
    for step in (5, 20, 100_000_0, 10):
        save(tmp_path, step)
    assert list_steps(tmp_path) == [1_000_000, 20, 10, 5] and find_last_step(tmp_path) == 1_000_000
    assert load_checkpoint(tmp_path, None, "cpu")[2]["step"] == 1_000_000


def test_no_checkpoints(tmp_path):
    assert list_steps(tmp_path / "none") == []
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(NoCheckpointError, match="train a model first"):
            find_last_step(folder)
        with pytest.raises(FileNotFoundError):  # nanochat's kind of error
            load_checkpoint(folder, None, "cpu")
    save(tmp_path, 5)
    with pytest.raises(NoCheckpointError, match="step 6 .* steps .5.$"):
        load_checkpoint(tmp_path, 6, "cpu")


# ----------------------------------------------------------------------------------------------------------------------
# Damage


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def fifo(path):
    path.unlink()
    os.mkfifo(path)


def endless(path):
    path.unlink()
    path.symlink_to("/dev/zero")


DAMAGE = {"truncated": truncate, "flipped": flip, "empty": lambda p: p.write_bytes(b""), "missing": os.unlink}
DAMAGE |= {"fifo": fifo, "endless": endless}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_an_older_one_is_used(tmp_path, caplog, kind, damage):
    for step in (10, 20, 30):
        save(tmp_path, step)
    name = kind.format(30)
    DAMAGE[damage](file(tmp_path, kind, 30))
    with pytest.raises(UserError, match=f"step 30 .*{name} .*step 20 ") as e:
        load_checkpoint(tmp_path, 30, "cpu", load_optimizer=True)
    assert "\n" not in str(e.value)
    assert find_last_step(tmp_path) == 20 and value_of(tmp_path, None or 20) == 20
    assert f"{name} " in caplog.text and "step 20" in caplog.text


def test_nothing_is_intact(tmp_path):
    for step in (10, 20):
        save(tmp_path, step)
        truncate(file(tmp_path, KINDS[0], step))
    with pytest.raises(UserError, match="step 20: model_000020.pt .*; step 10: ") as e:
        find_last_step(tmp_path)
    assert not isinstance(e.value, NoCheckpointError)  # a run must not start over as if there had been nothing


def test_the_old_folder_is_read_until_the_new_one_is_there(tmp_path):
    """A save of the same step was killed between its two renames."""
    save(tmp_path, 10)
    (tmp_path / "step_000010").rename(tmp_path / "step_000010.old")
    (tmp_path / "step_000020.tmp").mkdir()
    assert list_steps(tmp_path) == [10] and value_of(tmp_path, find_last_step(tmp_path)) == 10
    cm.delete_remains(tmp_path)
    save(tmp_path, 30)
    assert sorted(os.listdir(tmp_path)) == ["step_000010", "step_000030"]


def test_what_is_not_finite_is_found():
    good = {"w": torch.ones(3), "empty": torch.ones(0), "count": torch.arange(3), "rate": 0.1, "codes": None}
    assert list(not_finite([good, {"state": {0: good}}])) == []
    bad = {"a": torch.tensor([1.0, float("inf")]), "b": torch.tensor([float("nan")], dtype=torch.bfloat16)}
    assert list(not_finite({"w": good, "optimizers": [good, {"state": bad}]})) == [
        "optimizers.1.state.a",
        "optimizers.1.state.b",
    ]


def test_numbers_in_lists_are_not_looked_at_one_by_one(monkeypatch):
    """The position in the text has lists of thousands of numbers, none of which is a tensor."""
    calls, real = [], telemetry.not_finite
    monkeypatch.setattr(telemetry, "not_finite", lambda *of: calls.append(of) or real(*of))
    assert list(telemetry.not_finite({"rows": [*range(1000)], "w": torch.tensor([float("nan")])})) == ["w"]
    assert len(calls) == 3


def test_files_of_others_stay(tmp_path):
    """Also those that somebody has put into a checkpoint's folder."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    for path in (tmp_path / "notes.txt", tmp_path / "step_000001/mine.txt", tmp_path / "step_000003/mine.txt"):
        path.write_text("mine")
    prune_checkpoints(tmp_path, 1, 3)
    save(tmp_path, 3, 4)
    assert list_steps(tmp_path) == [3] and value_of(tmp_path, 3) == 4
    nanochat_checkpoint(tmp_path, 5)
    (tmp_path / "metrics.jsonl").touch()
    others = cm.delete_run(tmp_path)
    assert "notes.txt" in others and list_steps(tmp_path) == [] and not list(tmp_path.rglob("*.json*"))
    assert len(list(tmp_path.rglob("mine.txt"))) == 2


def test_fuzzed_checkpoints_are_refused_or_as_they_were(tmp_path):
    """Random bytes and truncations of all three files: the original content or one line, nothing else."""
    good = tmp_path / "good"
    save(good, 10)
    save(good, 20)
    rng, refused, fell_back = random.Random(0), 0, 0
    for i in range(60):
        folder = tmp_path / f"f{i}"
        shutil.copytree(good, folder)
        path = file(folder, rng.choice(KINDS), 20)
        path.write_bytes(damaged(path.read_bytes(), rng, rng.choice(("cut", "bytes", "a byte"))))
        try:
            assert value_of(folder, 20) == 20
        except UserError as e:
            assert "\n" not in str(e)
            refused += 1
        step = find_last_step(folder)
        assert value_of(folder, step) == step
        fell_back += step == 10
        shutil.rmtree(folder)
    assert refused > 50 and fell_back > 50


def test_a_checkpoint_cannot_run_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'was_here'}",)

    assert save_checkpoint(tmp_path, 1, {"w": Evil()}, None, {})  # a valid manifest, a bad heart
    with pytest.raises(UserError, match="model_000001.pt ") as e:
        load_checkpoint(tmp_path, 1, "cpu")
    assert "\n" not in str(e.value) and not (tmp_path / "was_here").exists()


def test_everything_is_on_the_disk_before_the_folder_appears(tmp_path, monkeypatch):
    """What a power cut could undo is undone before the checkpoint exists, never after."""
    events = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(fd):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        events.append("fsync " + re.sub(r"^\.(.*)\.[0-9a-f]{8}\.tmp$", r"\1", name))
        fsync(fd)

    def note_rename(source, target):
        events.append("rename " + os.path.basename(target))
        rename(source, target)

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc to know what a file descriptor is")
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    save(tmp_path / "d4", 7)
    files = [f"fsync {name}" for kind in KINDS for name in (kind.format(7), "step_000007.tmp")]
    assert events == [*files, "rename step_000007", "fsync d4"]


# ----------------------------------------------------------------------------------------------------------------------
# Full disks


# The call of a function of os that finds the disk full: of a folder, of one of the three files, of the rename.
@pytest.mark.parametrize("name, n", [("mkdir", 1), ("fsync", 1), ("fsync", 3), ("fsync", 5), ("rename", 1)])
def test_a_full_disk_ends_the_save_and_harms_nothing(tmp_path, monkeypatch, caplog, name, n):
    save(tmp_path, 5)
    save(tmp_path, 10)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*t*")}
    real, count = getattr(os, name), [0]

    def full(*args, **kwargs):
        count[0] += 1
        if count[0] == n:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, full)
    assert not save(tmp_path, 15)
    assert "NOT saved" in caplog.text and "No space left" in caplog.text
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*t*")} == before and list_steps(tmp_path) == [10, 5]
    assert save(tmp_path, 15) and value_of(tmp_path, 15) == 15


def test_a_folder_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("x")
    assert save(tmp_path / "file" / "d4", 10) is False
    assert "NOT saved" in caplog.text


# ----------------------------------------------------------------------------------------------------------------------
# Keeping the last N


def test_prune(tmp_path):
    for step in range(1, 7):
        save(tmp_path, step)
    prune_checkpoints(tmp_path, 0, 6)
    prune_checkpoints(tmp_path, -1, 6)
    assert list_steps(tmp_path) == [6, 5, 4, 3, 2, 1]
    prune_checkpoints(tmp_path, 2, 5)  # A later step is damaged: --resume-from-step=latest has passed over it.
    assert list_steps(tmp_path) == [6, 5, 4]
    for step in (100_000, 1_000_000):  # The name of the one begins with the other's.
        save(tmp_path, step)
    prune_checkpoints(tmp_path, 1, 1_000_000)
    assert list_steps(tmp_path) == [1_000_000] and value_of(tmp_path, 1_000_000) == 1_000_000


# ----------------------------------------------------------------------------------------------------------------------
# nanochat's own checkpoints


def nanochat_checkpoint(folder, step, **meta):
    folder.mkdir(exist_ok=True)
    torch.save({"w": torch.full((3,), float(step))}, folder / f"model_{step:06d}.pt")
    (folder / f"meta_{step:06d}.json").write_text(json.dumps({"step": step, **meta}))


def test_nanochats_checkpoints_are_read_with_a_warning(tmp_path, caplog):
    nanochat_checkpoint(tmp_path, 20)
    save(tmp_path, 10)
    assert find_last_step(tmp_path) == 20
    model, _, meta = load_checkpoint(tmp_path, 20, "cpu")
    assert model["w"].tolist() == [20] * 3 and "no checksums" in caplog.text
    prune_checkpoints(tmp_path, 1, 20)
    assert list_steps(tmp_path) == [20, 10]  # never deleted
    with pytest.raises(UserError, match="optim_000020_rank0.pt is missing"):
        load_checkpoint(tmp_path, 20, "cpu", load_optimizer=True)


# ----------------------------------------------------------------------------------------------------------------------
# Several ranks

RANKS_CODE = """
import os, torch
from nanochat_fp4.training import checkpoint_manager as cm
from nanochat_fp4.common import compute_init, compute_cleanup
ddp, rank, _, world_size, _ = compute_init("cpu")
folder = os.environ["FOLDER"]

def save(step):
    return cm.save_checkpoint(folder, step, {"w": torch.ones(2)}, {"rank": rank}, {"a": 1}, rank=rank)

assert save(1) is True and save(2) is True
fsync = os.fsync
def broken(fd):
    if rank == 1:
        raise OSError(28, "No space left on device")
    return fsync(fd)
os.fsync = broken
assert save(3) is False  # on both ranks
os.fsync = fsync
if rank == 0:
    os.truncate(os.path.join(folder, "step_000002/optim_000002_rank1.pt"), 10)
torch.distributed.barrier()
assert cm.find_last_step(folder) == 1  # rank 0 falls back for rank 1's sake
assert cm.load_checkpoint(folder, 1, "cpu", load_optimizer=True, rank=rank)[1][0]["rank"] == rank
try:
    cm.find_last_step(folder + "/none")
    raise SystemExit("found nothing's step")
except cm.NoCheckpointError:
    pass
compute_cleanup()
"""


def test_two_ranks_save_and_load_together(run_ranks, tmp_path):
    run_ranks(RANKS_CODE, env={"FOLDER": str(tmp_path)})
    assert sorted(os.listdir(tmp_path)) == ["step_000001", "step_000002"]
    weights, parts, meta = load_checkpoint(tmp_path, 1, "cpu", load_optimizer=True)  # by one process: what both saved
    assert meta["world_size"] == 2 and [part["rank"] for part in parts] == [0, 1]
    assert weights["w"].tolist() == [1, 1]


# ----------------------------------------------------------------------------------------------------------------------
# Models

CONFIG = dict(sequence_len=32, vocab_size=320, n_layer=2, n_head=2, n_kv_head=2, n_embd=64, window_pattern="SL")


@pytest.fixture(scope="module")
def tok():
    return RustBPETokenizer.train_from_iterator(iter(["some text to learn from, and some more of it"] * 9), 300)


@pytest.fixture
def model(base_dir, tok):
    """A small GPT, saved as base model d2_clover, step 3, with its tokenizer."""
    tok.save(base_dir / "tokenizer")
    config = CONFIG | {"vocab_size": tok.get_vocab_size()}
    model = GPT(GPTConfig(**config))
    model.init_weights()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    meta = {"model_config": config, "run_config": {"tokenizer": tok.fingerprint(), "method": "clover"}}
    model.meta, model.folder = meta, base_dir / "base_checkpoints" / "d2_clover"
    save_checkpoint(model.folder, 3, model.state_dict(), None, meta)
    return model


def logits(model):
    with torch.no_grad():
        return model(torch.arange(16).view(2, 8))


def test_a_model_comes_back(model, tok):
    loaded, tokenizer, meta = load_model("base", "cpu", "eval")
    assert torch.equal(logits(loaded), logits(model)) and not loaded.training
    assert tokenizer.fingerprint() == tok.fingerprint()
    assert meta["run_config"]["method"] == "clover" and meta["model_tag"] == "d2_clover" and meta["step"] == 3
    assert load_model("base", torch.device("cpu"), phase="train", model_tag="d2_clover", step=3)[0].training


def test_old_and_compiled_checkpoints_come_back(model):
    data = {"_orig_mod." + k: v.bfloat16() for k, v in model.state_dict().items() if "lambdas" not in k}
    meta = copy.deepcopy(model.meta)
    del meta["model_config"]["window_pattern"]
    meta["model_config"]["some_switch"] = False
    save_checkpoint(model.folder, 4, data, None, meta)
    loaded, _, _ = build_model(model.folder, 4, "cpu", "eval")
    assert all(p.dtype == torch.float32 for p in loaded.parameters())
    assert (loaded.resid_lambdas == 1).all() and (loaded.x0_lambdas == 0).all() and loaded.config.window_pattern == "L"


def test_a_record_of_a_recipe_that_left_refuses_nothing(model):
    recipe = {"name": "clover_gone", "output": {"a": {"rounding": "four_over_six", "terms": 2}}, "kinds": []}
    save_checkpoint(model.folder, 4, model.state_dict(), None, model.meta | {"recipes": [recipe]})
    assert torch.equal(logits(build_model(model.folder, 4, "cpu", "eval")[0]), logits(model))


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda m: m.pop("model_config"), "model config is"),
        (lambda m: m["model_config"].update(n_rotors=3), "model config is"),
        (lambda m: m["model_config"].update(n_head=0), "model config is"),
        (lambda m: m["model_config"].update(n_layer="two"), "model config is"),
        (lambda m: m["model_config"].update(n_layer=3), "weights"),
        (lambda m: m["model_config"].update(n_embd=128), "weights"),
        (lambda m: m["run_config"].update(tokenizer="0123456789abcdef"), "fingerprint 0123456789abcdef"),
        (lambda m: (m["model_config"].update(vocab_size=301), m.pop("run_config")), "tokens 301"),
    ],
)
def test_models_that_do_not_fit(model, change, text):
    meta = copy.deepcopy(model.meta)
    change(meta)
    save_checkpoint(model.folder, 4, model.state_dict(), None, meta)
    with pytest.raises(UserError, match=text) as e:
        build_model(model.folder, 4, "cpu", "eval")
    assert "\n" not in str(e.value)


def test_sources_that_are_not_there(model):
    with pytest.raises(UserError, match="'bse'; .*base, mid, sft, rl"):
        load_model("bse", "cpu", "eval")
    with pytest.raises(UserError, match=r"sft checkpoint in \S+chatsft_checkpoints; .*chat_sft"):
        load_model("sft", "cpu", "eval")
    with pytest.raises(UserError, match="no_such_tag"):
        load_model("base", "cpu", "eval", model_tag="no_such_tag")
    with pytest.raises(UserError, match=r"step 99 in .*; it has steps \[\d+\]$"):  # and nothing to make
        load_model("base", "cpu", "eval", step=99)


def test_the_largest_model_is_taken(base_dir):
    folder = base_dir / "base_checkpoints"
    for tag in ("d4", "d20_clover", "d12", "mine", "d99_empty"):
        if tag == "d99_empty":
            (folder / tag).mkdir(parents=True)
        else:
            save(folder / tag, 1)
    assert find_model_tag("base", None) == "d20_clover"
    for tag, method in (("d20_bf16", "bf16"), ("d20_clover", "clover"), ("d20_fp8", "fp8")):
        save(folder / tag, 2, user_config={"method": method})
    # Of equals the newer one, but for the baseline, which COMPARE=1 trains last.
    for i, (tag, taken) in enumerate(
        (("d20_fp8", "d20_fp8"), ("d20_clover", "d20_clover"), ("d20_bf16", "d20_clover"))
    ):
        os.utime(folder / tag, (0, 2_000_000_000 + i))
        assert find_model_tag("base", None) == taken
