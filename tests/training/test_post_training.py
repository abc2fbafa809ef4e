"""Mid-training, SFT, evaluation and chat on a tiny model: end to end, resumed to the bit, and given bad input."""

import builtins
import contextlib
import itertools
import json
import re
import shutil

import pytest
import torch
from _assertions import assert_same, final_state
from _damage import edit_meta
from _samples import byte_tokenizer, save_base
from _training import BASE, MID, SFT, after_steps, stopped_in_step

from eval.local import LocalArithmetic, LocalChoice
from nanochat_fp4.cli import UserError
from nanochat_fp4.data.chat_data import LOCAL_IDENTITY, CustomJSON, Task
from nanochat_fp4.data.dataloader import Conversations, join_positions, packed_rows, padded_conversations
from nanochat_fp4.data.sources import Source
from nanochat_fp4.data.tokenizer import get_tokenizer
from nanochat_fp4.evaluation.execution import SandboxError
from nanochat_fp4.evaluation.metrics import read_jsonl
from nanochat_fp4.models.gpt import GPT
from nanochat_fp4.training.checkpoint_manager import list_steps, load_checkpoint, read_meta, weights_digest
from nanochat_fp4.training.load_model import checkpoint_method, tokens_read
from scripts import base_train, chat_cli, chat_eval, chat_sft, export, mid_train

MID = [*MID, "--eval-every=4"]
SFT = [*SFT, "--eval-every=4", "--eval-metrics-every=4", "--eval-metrics-max-problems=6"]


@pytest.fixture
def base(tiny_base):
    save_base(tiny_base, n_layer=1)
    return tiny_base


def mid(*flags, steps=6):
    mid_train.main([*MID, f"--num-iterations={steps}", *flags])


def sft(*flags, steps=6):
    chat_sft.main([*SFT, f"--num-iterations={steps}", *flags])


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < 900
    return text


# ----------------------------------------------------------------------------------------------------------------------
# Batches


@contextlib.contextmanager
def as_rank(rank, world_size):
    with pytest.MonkeyPatch.context() as m:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}.items():
            m.setenv(name, str(value))
        yield


class Texts(Task):
    """Conversation i: a question of given length and an answer."""

    def __init__(self, lengths, answer="yes"):
        super().__init__()
        self.lengths, self.answer = lengths, answer

    def num_examples(self):
        return len(self.lengths)

    def get_example(self, index):
        question = chr(65 + index % 26) * self.lengths[index]
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": self.answer}]}


def nanochat_rows(dataset, tokenizer, T, buffer_size, count, cursor=0, stride=1):
    """The packing of nanochat's mid-training as one reads it there: an independent, slow version."""
    buffer, rows = [], []
    for _ in range(count):
        row = []
        while len(row) < T + 1:
            while len(buffer) < buffer_size:
                buffer.append(tokenizer.render_conversation(dataset[cursor % len(dataset)], max_tokens=T)[0])
                cursor += stride
            remaining = T + 1 - len(row)
            best, best_length = -1, 0
            for i, tokens in enumerate(buffer):
                if best_length < len(tokens) <= remaining:
                    best, best_length = i, len(tokens)
            row += buffer.pop(best if best >= 0 else 0)[:remaining]
        rows.append(row)
    return rows


LENGTHS = [(7 * i * i + 3 * i) % 61 for i in range(90)]


def test_packing_is_nanochats():
    dataset, tokenizer, T = Texts(LENGTHS), byte_tokenizer(), 50
    loader = packed_rows(Conversations(dataset, tokenizer, T), 4, "cpu")
    rows = [row for _ in range(10) for x, y, _ in [next(loader)] for row in torch.cat([x, y[:, -1:]], 1).tolist()]
    for lane in range(8):
        assert rows[lane::8] == nanochat_rows(dataset, tokenizer, T, 90 // 32, 5, cursor=lane, stride=8)
    assert all(row[0] == tokenizer.get_bos_token_id() for row in rows)


def test_rows_and_progress_do_not_depend_on_the_number_of_processes():
    """And neither after a resume with more or fewer of them: what all ranks have consumed together goes on."""
    dataset, tokenizer = Texts(LENGTHS), byte_tokenizer()

    def steps(world_size, count, position=None):
        rows, positions, consumed = [], [], 0.0
        for rank in range(world_size):
            with as_rank(rank, world_size):
                loader = packed_rows(Conversations(dataset, tokenizer, 50), 2, "cpu", 12, position)
            batches = [next(loader) for _ in range(count * 12 // world_size)]
            rows += [row for x, _, _ in batches for row in x.tolist()]
            positions.append(json.loads(json.dumps(batches[-1][2])))
            consumed += positions[-1]["consumed"]
        return sorted(rows), join_positions(positions), round(consumed)

    rows, position, consumed = steps(1, 2)
    alone = steps(1, 4)
    assert consumed > 60 and alone[2] > consumed
    for world_size in (2, 3, 4, 12):
        assert steps(world_size, 2)[::2] == (rows, consumed)
        after, _, all_consumed = steps(world_size, 2, steps(2, 2)[1])
        assert sorted(rows + after) == alone[0] and all_consumed == alone[2]


def test_sft_batches():
    """Rows are padded, targets are the assistant's words and its end; micro-batches stay together on any world size."""
    tokenizer = byte_tokenizer()
    dataset = Texts([3, 10, 0, 200, 5])
    end = tokenizer.encode_special("<|assistant_end|>")
    x, y, _ = next(padded_conversations(dataset, tokenizer, 3, "cpu", max_tokens=64))
    assert x.shape == y.shape == (3, 10 + 8 - 1)  # bos, user_start, 10, user_end, assistant_start, "yes", end; less one
    for row, length in enumerate((3, 10, 0)):
        n = length + 8
        ids, mask = tokenizer.render_conversation(dataset[row])
        assert x[row, : n - 1].tolist() == ids[:-1] and (x[row, n - 1 :] == end).all()
        assert y[row, : n - 1].tolist() == [t if m else -1 for t, m in zip(ids[1:], mask[1:])]
        assert (y[row, n - 1 :] == -1).all()
        assert [t for t in y[row].tolist() if t >= 0] == [*b"yes", end]

    # Conversation 3 is cut before its answer: number 4 stands in for it, and is used itself as well.
    x, y, _ = list(zip(range(2), padded_conversations(dataset, tokenizer, 3, "cpu", max_tokens=64)))[1][1]
    assert x[0].tolist() == x[1].tolist() and (y >= 0).any(1).all()

    def of_rank(rank, world_size, position=None):
        """With its first batch, which asks for the rank."""
        with as_rank(rank, world_size):
            it = padded_conversations(dataset, tokenizer, 2, "cpu", 64, position)
            return itertools.chain([next(it)], it)

    def micro_batches(world_size, count):
        loaders = [of_rank(r, world_size) for r in range(world_size)]
        return [next(loaders[m % world_size])[0].tolist() for m in range(count)]

    assert micro_batches(1, 6) == micro_batches(2, 6) == micro_batches(3, 6)

    def gone_on_with(before, now):
        """What `now` processes take after one micro-batch of each of `before`."""
        position = next(of_rank(before - 1, before))[2]
        loaders = [of_rank(r, now, position) for r in range(now)]
        return [next(loaders[m % now])[0].tolist() for m in range(6 - before)]

    for before, now in ((1, 2), (2, 1), (2, 3), (3, 2), (2, 2)):
        assert gone_on_with(before, now) == micro_batches(1, 6)[before:]
    with pytest.raises(UserError, match="64 tokens; .* --max-seq-len"):
        next(padded_conversations(Texts([200]), tokenizer, 1, "cpu", max_tokens=64))


@pytest.mark.parametrize(
    "make",
    [
        lambda state=None: packed_rows(Conversations(Texts(LENGTHS), byte_tokenizer(), 50), 3, "cpu", 0, state),
        lambda state=None: padded_conversations(
            Texts(LENGTHS), byte_tokenizer(), 3, "cpu", max_tokens=64, position=state
        ),
    ],
    ids=["packed", "single"],
)
def test_loaders_resume_from_any_batch(make):
    batches = [next(loader) for loader in [make()] for _ in range(40)]  # more than an epoch
    for i in (0, 7, 23, 38):
        state = json.loads(json.dumps(batches[i][2]))
        x, y, next_state = next(make(state))
        assert (
            torch.equal(x, batches[i + 1][0]) and torch.equal(y, batches[i + 1][1]) and next_state == batches[i + 1][2]
        )
    for bad in ({}, {**batches[0][2], "conversations": 1}, {**batches[0][2], "content": "other conversations"}):
        with pytest.raises(UserError, match="data position"):
            next(make(bad))


def test_conversations_that_say_something_else_are_not_gone_on_with():
    """As many conversations of the same lengths, one of them with another letter."""

    class Other(Texts):
        def get_example(self, index):
            conversation = super().get_example(index)
            if index == 3:
                conversation["messages"][1]["content"] = "yEs"
            return conversation

    for make in (
        lambda d, state=None: packed_rows(Conversations(d, byte_tokenizer(), 50), 3, "cpu", 0, state),
        lambda d, state=None: padded_conversations(d, byte_tokenizer(), 3, "cpu", max_tokens=64, position=state),
    ):
        state = next(make(Texts(LENGTHS)))[2]
        make(Texts(LENGTHS), state)
        with pytest.raises(UserError, match="content was"):
            next(make(Other(LENGTHS), state))


def test_loaders_name_bad_conversations(tmp_path):
    class Bad(Texts):
        def get_example(self, index):
            return {"messages": [{"role": "user", "content": "hi"}]} if index == 2 else super().get_example(index)

    for make in (
        lambda d: packed_rows(Conversations(d, byte_tokenizer(), 50), 8, "cpu"),
        lambda d: padded_conversations(d, byte_tokenizer(), 8, "cpu"),
    ):
        with pytest.raises(UserError, match="conversation 2 .*assistant"):
            next(make(Bad([1] * 8)))
        with pytest.raises(UserError, match="no conversation"):
            next(make(Texts([])))


# ----------------------------------------------------------------------------------------------------------------------
# End to end


def test_base_to_mid_to_sft_to_evaluation_and_chat(base, capsys, monkeypatch):
    mid(steps=8)
    out = capsys.readouterr().out
    assert not re.search("Scaling|Padding|validation mixture", out)  # as in base training
    assert out.count("training mixture:") == 1
    assert "QAT method clover; the backward pass is not quantized" in out
    assert "Local-Arithmetic" in out and "2,000 conversations" in out
    folder = base / "mid_checkpoints" / "d2_clover"
    assert list_steps(folder) == [8]
    _, _, meta = load_checkpoint(folder, None, "cpu")
    assert meta["user_config"]["method"] == "clover" and meta["model_config"]["window_pattern"] == "SL"
    assert meta["parent"] == {"stage": "base", "model_tag": "d2_clover", "step": 5} | {
        "weights_sha256": weights_digest(base / "base_checkpoints" / "d2_clover", 5)
    }
    bpb = [r["bpb"] for r in read_jsonl(folder / "metrics.jsonl") if r["event"] == "val"]
    assert len(bpb) == 3 and bpb[-1] == meta["val_bpb"] < 0.9 * bpb[0]  # it learns

    sft(steps=4)
    folder = base / "chatsft_checkpoints" / "d2_clover"
    _, _, meta = load_checkpoint(folder, None, "cpu")
    assert meta["parent"]["stage"] == "mid" and meta["parent"]["step"] == 8
    assert {"val_loss", "local_choice_acc"} <= meta.keys()
    capsys.readouterr()

    arguments = "-i sft -a local -x 4 -m 8 -b 4 --precision both --device-type cpu".split()
    in_four_bits, run_task = [], chat_eval.run_task

    def watched(task, model, *rest, **settings):
        in_four_bits.append(model.transformer.h[0].mlp.c_fc.quantizes)
        return run_task(task, model, *rest, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(chat_eval, "run_task", watched)
        chat_eval.main(arguments)
    tasks = len(chat_eval.LOCAL_TASKS)
    assert in_four_bits == [True] * tasks + [False] * tasks  # the method's own forward first, then BF16's
    out = capsys.readouterr().out
    assert "clover forward:" in out and "FP32 forward" in out and "Local-Code: 0 of 4" in out
    assert "backend" not in out  # which the base training says
    records = read_jsonl(folder / "metrics.jsonl")
    parts, scores = [r for r in records if r["event"] == "part"], records[-1]["scores"]
    assert records[-1]["step"] == 4 and len(parts) == 2 * tasks and all(len(p["value"]["outcomes"]) == 4 for p in parts)
    assert scores["Local-Choice"]["count"] == 4 and "Local-Choice, BF16 forward" in scores

    # The same again, another part of it alone, and in other batches: equal results.
    chat_eval.main("-i sft -a Local-Choice -x 4 -b 1 --device-type cpu".split())
    again = read_jsonl(folder / "metrics.jsonl")
    assert again[-1]["scores"] == {"Local-Choice": scores["Local-Choice"]}
    assert again[-2]["value"]["outcomes"] == parts[0]["value"]["outcomes"]

    capsys.readouterr()
    chat_cli.main(["-p", "Who are you?", "--device-type=cpu", "-t", "0", "--max-tokens=12"])
    alone = capsys.readouterr().out.split("Assistant: ")[1].strip()
    lines = iter(["Who are you?", "", "clear", "Who are you?", "quit"])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(lines))
    chat_cli.main(["--device-type=cpu", "-t", "0", "-m", "12"])
    _, first_answer, second_answer = capsys.readouterr().out.split("Assistant: ")
    assert first_answer.strip() == f"{alone}\nConversation cleared."
    assert second_answer.strip() == f"{alone}\nGoodbye!"


def test_stages_go_on_as_the_base_was_trained(tiny_base):
    """--state, recomputation, orthogonalizer and micro-batch are the model's, of new runs and of resumed ones: a card
    that has trained the base trains them all."""

    def run(stage, *flags):
        stage.main([*flags, "--model-tag=d1", "--num-iterations=2", "--resume-from-step=latest"])

    sizes = "--max-seq-len=128 --total-batch-size=512 --eval-tokens=512".split()
    as_planned = ["--method=clover", "--state=lean", "--recompute=codes", "--orthogonalizer=newton_schulz"]
    run(base_train, *BASE, *sizes, *as_planned)
    for stage, flags, place in (mid_train, MID, "mid_checkpoints"), (chat_sft, SFT, "chatsft_checkpoints"):
        flags = [f for f in flags if not f.startswith("--device-batch-size")]
        with stopped_in_step(0):
            run(stage, *flags)
        run(stage, *flags)
        weights, _, meta = load_checkpoint(tiny_base / place / "d1", 2, "cpu")
        config = {k: meta["user_config"][k] for k in ("state", "recompute", "orthogonalizer", "device_batch_size")}
        assert list(config.values()) == ["lean", "codes", "newton_schulz", 2]
        assert {t.dtype for t in weights.values() if t.ndim == 2} == {torch.bfloat16}
        events = read_jsonl(tiny_base / place / "d1" / "metrics.jsonl")
        assert [r["step"] for r in events if r["event"] == "start"] == [0, 1]


def test_the_scalars_of_mid_training_have_the_rate_of_its_batch(base, monkeypatch):
    """As in pre-training. Adam's first step is as large as the rate, and 0.5 is nanochat's for 2^19 tokens."""
    found, setup = [], GPT.setup_finetuning

    def setup_finetuning(*args, **options):
        optimizers, schedule = setup(*args, **options)
        found.extend(group["lr"] for group in optimizers[0].param_groups[2:])  # of resid_lambdas and x0_lambdas
        return optimizers, schedule

    monkeypatch.setattr(GPT, "setup_finetuning", setup_finetuning)
    mid(steps=1)  # 512 tokens
    assert found == pytest.approx([0.01 / 64, 1 / 64])
    assert mid_train.scalar_lr(mid_train.parse_args([]).total_batch_size) == 0.5


def test_the_tokens_that_a_chat_model_has_read_are_those_of_its_base_model(tiny_base, capsys):
    base_train.main([*BASE, "--num-iterations=2", "--model-tag=d1"])
    mid(steps=1)
    meta = read_meta(tiny_base / "mid_checkpoints/d1", 1)
    tokens = tokens_read(meta)
    assert tokens == 2 * base_train.parse_args(BASE).total_batch_size
    capsys.readouterr()
    chat_cli.main(["-i", "mid", "-p", "Who are you?", "--device-type=cpu"])
    said = capsys.readouterr()
    assert f"note: this model has read {tokens} tokens, " in said.err and "note" not in said.out
    shutil.rmtree(tiny_base / "base_checkpoints/d1")
    assert tokens_read(meta) is None


def test_a_full_epoch_ends_where_the_data_ends(base, monkeypatch):
    """Without --num-iterations, until every conversation was used; resumed in between to the bit."""
    small = lambda args: [Source("few", lambda: LocalArithmetic(size=60))]  # noqa: E731
    monkeypatch.setattr(mid_train, "train_sources", small)
    mid("--save-every=3", "--keep-last=-1", "--quantization=none", steps=-1)
    folder = base / "mid_checkpoints" / "d2_clover"
    last = list_steps(folder)[0]
    expected = final_state(folder, last)
    records = [r for r in expected["records"] if r["event"] == "train"]
    assert len(records) == last > 5 and expected["loop"]["progress"] >= 1
    multipliers = [r["lrm"] for r in records]
    assert multipliers[0] == 1.0 and multipliers == sorted(multipliers, reverse=True) and 0 < multipliers[-1] < 0.6
    mid("--resume-from-step=3", "--quantization=none", steps=-1)
    assert_same(final_state(folder, last), expected)


# ----------------------------------------------------------------------------------------------------------------------
# Quantization


@pytest.mark.parametrize("quantization", ["forward", "full", "none"])
def test_quantization_of_post_training(base, quantization):
    recipes = []
    with after_steps(lambda run: recipes.append(run.model.transformer.h[0].mlp.c_fc.recipe)):
        mid(f"--quantization={quantization}", steps=1)
    recipe = recipes[0]
    assert (recipe.output.a.rounding is not None) == (quantization != "none")
    assert (recipe.grad_weight.a.rounding is not None) == (quantization == "full")
    _, _, meta = load_checkpoint(base / "mid_checkpoints" / "d2_clover", 1, "cpu")
    assert checkpoint_method(meta) == ("bf16" if quantization == "none" else "clover")
    assert checkpoint_method(meta, "nvidia") == "nvidia"


@pytest.mark.parametrize(
    "config, method",
    [
        ({"method": "nvidia_full"}, "nvidia_full_end"),
        ({"method": "clover", "method_phases": "0.85=bf16"}, "bf16"),
        ({"method": "clover", "method_phases": ""}, "clover"),
        ({}, "bf16"),
    ],
)
def test_a_checkpoint_is_used_with_the_method_that_it_was_trained_with_last(config, method):
    assert checkpoint_method({"user_config": config}) == method
    assert checkpoint_method({"user_config": config}, "nvidia_full") == "nvidia_full_end"


def test_method_is_the_checkpoints_unless_a_flag_says_otherwise(base, monkeypatch, capsys):
    monkeypatch.setenv("QAT_METHOD", "nvidia")
    mid("--dry-run", steps=1)
    assert "QAT_METHOD=nvidia" in capsys.readouterr().out
    monkeypatch.setenv("NANOCHAT_BEGAN", "1")  # In a speedrun it may be another model's.
    mid("--dry-run", steps=1)
    assert "QAT_METHOD=nvidia" not in capsys.readouterr().out
    monkeypatch.delenv("NANOCHAT_BEGAN")
    mid("--dry-run", "--method=nvidia", steps=1)
    assert "QAT method nvidia" in capsys.readouterr().out
    mid("--dry-run", "--method=bf16", steps=1)
    assert "QAT method bf16\n" in capsys.readouterr().out  # It has no quantized backward pass to leave out.
    monkeypatch.setenv("QAT_METHOD", "my_method")  # RECIPES is not set in this shell.
    with pytest.raises(UserError, match="^QAT_METHOD: unknown method 'my_method'"):
        mid("--dry-run", steps=1)
    assert not (base / "mid_checkpoints").exists()  # nothing was saved


@pytest.mark.parametrize("name", ["clover_mixed", "clover_search_feedback"])
def test_a_checkpoint_of_a_row_that_left_loads_with_another_method(base, tmp_path, name, capsys):
    """A checkpoint stores the recipe of a row that is not in the package, here with a field that no operand has now."""
    operand = {"a": {"rounding": "four_over_six"}, "b": {"rounding": "scale_search_6", "feedback": True}}
    config = read_meta(base / "base_checkpoints" / "d2_clover", 5)["user_config"]
    recipes = [{"name": name, "output": operand}] if "search" in name else []
    edit_meta(base / "base_checkpoints" / "d2_clover", 5, user_config=config | {"method": name}, recipes=recipes)
    calls = {
        "mid": lambda *flags: mid("--dry-run", *flags, steps=1),
        "chat": lambda *flags: chat_cli.main(
            ["-i", "base", "-p", "Hello", "--max-tokens=2", "--device-type=cpu", *flags]
        ),
        "export": lambda *flags: export.main(
            ["--source=base", f"--out={tmp_path / 'out'}", "--eval-tokens=0", "--format=compressed-tensors", *flags]
        ),
    }
    for call in calls.values():
        with pytest.raises(UserError, match=f"unknown method '{name}'"):
            call()
        call("--method=clover_fp8_forward")
    assert (tmp_path / "out" / "model.safetensors").is_file() and "clover_fp8_forward" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------------
# Data that is not there


def test_missing_data_is_named_or_left_out(base, tmp_path, capsys, monkeypatch):
    sft_dir, eval_dir = tmp_path / "sft", tmp_path / "eval"
    sft_dir.mkdir()
    (eval_dir / "words").mkdir(parents=True)
    (eval_dir / "words" / "words_alpha.txt").write_text("banana\nstrawberry\n")
    conversation = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    for split in ("train", "test"):
        (sft_dir / f"{split}.jsonl").write_text((json.dumps(conversation) + "\n") * 50)
    (base / "identity_conversations.jsonl").write_text(json.dumps(conversation["messages"]) + "\n")
    flags = [f for f in MID if f != "--data=local"] + [f"--sft-dir={sft_dir}", f"--eval-dir={eval_dir}"]
    with pytest.raises(UserError) as e:
        mid_train.main([*flags, "--num-iterations=1"])
    assert "MMLU auxiliary_train" in one_line(e) and "--allow-missing" in str(e.value)

    mid_train.main([*flags, "--num-iterations=1", "--allow-missing"])
    out = capsys.readouterr().out
    assert "MMLU auxiliary_train" in out and "left out: " in out and "200,000 conversations" in out
    assert "identity conversations" in out and "2 conversations" in out  # two epochs of the one
    _, _, meta = load_checkpoint(base / "mid_checkpoints" / "d2_clover", 1, "cpu")
    assert meta["run_config"]["sources"]["GSM8K"].startswith("left out")

    (sft_dir / "train.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    with pytest.raises(UserError) as e:  # damaged is not missing
        mid_train.main([*flags, "--num-iterations=1", "--allow-missing", "--overwrite"])
    assert "train.jsonl, line 1" in one_line(e)

    with pytest.raises(UserError) as e:
        chat_eval.main(["-i", "base", "-a", "GSM8K", f"--eval-dir={eval_dir}", "--device-type=cpu"])
    assert "openai/gsm8k/main/test.jsonl" in one_line(e) and "--allow-missing" in str(e.value)

    def no_sandbox():
        raise SandboxError("no sandbox works here")

    monkeypatch.setattr(chat_eval, "describe_sandbox", no_sandbox)
    local = "-i base -a Local-Choice|Local-Code -x 1 -b 1 -m 4 --precision bf16 --device-type cpu".split()
    with pytest.raises(UserError, match="Local-Code: no sandbox works here. .*--allow-missing"):
        chat_eval.main(local)
    chat_eval.main([*local, "--allow-missing"])
    out = capsys.readouterr().out
    assert "Local-Code is left out: no sandbox" in out and "Local-Choice: " in out


def test_own_conversations_stand_beside_the_local_ones(base, tmp_path):
    lines = [json.dumps({"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "Yes."}]})
             for i in range(30)]  # fmt: skip
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    for stage, folder in ((mid, "mid"), (sft, "chatsft")):
        stage(f"--sft-dir={tmp_path}", steps=1)
        _, _, meta = load_checkpoint(base / f"{folder}_checkpoints" / "d2_clover", 1, "cpu")
        read = meta["run_config"]["sources"]
        assert read[f"conversations of {tmp_path}"] == "30 conversations" and "Local-Code" in read
    for stage, rest in ((mid_train, 500), (chat_sft, 0)):
        validates = stage.val_sources(stage.parse_args(["--data=local", f"--sft-dir={tmp_path}"]))
        assert sum(len(source.make()) for source in validates) == 30 + rest


# ----------------------------------------------------------------------------------------------------------------------
# Bad input


def test_resume_of_another_run_is_refused(base):
    mid("--save-every=1", steps=2)
    with pytest.raises(UserError) as e:
        mid(steps=2)
    assert "already" in one_line(e)
    for flags in (["--quantization=full"], ["--total-batch-size=256"], ["--method=nvidia"]):
        with pytest.raises(UserError) as e:
            mid("--resume-from-step=latest", *flags, steps=2)
        # Another --model-tag alone would name a base model that is not there.
        assert "another run" in one_line(e) and "--overwrite" in one_line(e)
    mid("--overwrite", "--total-batch-size=256", steps=2)


def test_a_finished_stage_is_left_alone_unless_its_model_was_trained_anew(base, capsys):
    mid("--quantization=none", steps=1)
    report = base / "report" / "d2_clover" / "midtraining.json"
    before = report.read_text()
    mid("--quantization=none", "--resume-from-step=latest", steps=1)
    assert "Nothing to do" in capsys.readouterr().out and report.read_text() == before
    report.unlink()  # as if it had been killed between its last save and its report
    mid("--quantization=none", "--resume-from-step=latest", steps=1)
    assert json.loads(report.read_text())["data"][0].keys() == json.loads(before)["data"][0].keys()
    save_base(base, n_layer=3)
    with pytest.raises(UserError, match="d2_clover .*--overwrite"):
        mid("--quantization=none", "--resume-from-step=latest", steps=1)


def test_overwrite_deletes_nothing_before_all_is_known_to_be_good(base, tmp_path):
    mid("--quantization=none", steps=1)
    folder = base / "mid_checkpoints" / "d2_clover"
    for flags in (["--total-batch-size=100"], ["--data=nanochat", f"--sft-dir={tmp_path}"], ["--method=quartz"]):
        with pytest.raises(UserError):
            mid("--overwrite", *flags, steps=1)
        assert list_steps(folder) == [1]
    sft("--source=mid", steps=1)
    with pytest.raises(UserError, match="--eval-metrics-max-problems=0 .*at least 1"):
        sft("--source=mid", "--overwrite", "--eval-metrics-max-problems=0", steps=1)
    assert list_steps(base / "chatsft_checkpoints" / "d2_clover") == [1]


def test_a_model_that_never_stops_can_be_talked_to(base):
    """An untrained model does not know the end token: the answer is cut off, and closed before the next question."""
    model, tokenizer = save_base(base), get_tokenizer()
    with torch.no_grad():
        model.lm_head.weight[tokenizer.encode_special("<|bos|>") :] = 0
        model.lm_head.weight[:256] *= 100
    chat = chat_cli.Chat(chat_cli.Engine(model.eval(), tokenizer), temperature=0, top_k=0, max_tokens=256)
    for turn in (1, 2):
        assert "".join(chat.ask("hello"))
        assert "--max-tokens" in chat.cut_off
        ends = [t for t in chat.tokens if t == tokenizer.encode_special("<|assistant_end|>")]
        assert len(ends) == turn and chat.tokens[-1] == ends[0]
    model.rotary_seq_len = len(chat.tokens) + 10
    with pytest.raises(UserError, match="no longer fits"):
        list(chat.ask("hello hello hello"))
    model.rotary_seq_len = len(chat.tokens) + 40
    assert "".join(chat.ask("hello")) and "no room is left" in chat.cut_off


def test_a_base_model_continues_the_text_itself(base, monkeypatch, capsys):
    """It has seen no token of a conversation, and each text begins anew."""
    save_base(base)
    prompts, generate = [], chat_cli.Engine.generate
    monkeypatch.setattr(chat_cli.Engine, "generate", lambda self, p, **k: prompts.append(p) or generate(self, p, **k))
    lines = iter(["The old fisherman", "The old fisherman", "quit"])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(lines))
    chat_cli.main(["-i", "base", "-t", "0", "-m", "4", "--device-type=cpu"])
    tokenizer = get_tokenizer()
    assert prompts == 2 * [[tokenizer.get_bos_token_id(), *tokenizer.encode("The old fisherman")]]
    said = capsys.readouterr()
    assert said.out.count("\nThe old fisherman") == 2 and "Assistant" not in said.out and "ask it" not in said.err


# ----------------------------------------------------------------------------------------------------------------------
# Results


def test_local_tasks_are_named_as_such():
    """Nothing made on the spot may be taken for a benchmark."""
    assert all(name.startswith("Local-") for name in chat_eval.LOCAL_TASKS)
    assert chat_eval.chosen_tasks("local|MMLU") == [*chat_eval.LOCAL_TASKS, "MMLU"]
    assert chat_eval.chosen_tasks(None) == list(chat_eval.TASKS)
    assert chat_eval.chatcore({name: chat_eval.Score([True]) for name in chat_eval.LOCAL_TASKS}) is None


def test_chatcore_is_the_centered_mean():
    quarter, all_right = chat_eval.Score([True, False, False, False]), chat_eval.Score([True])
    scores = {name: quarter if name in chat_eval.GUESSING else all_right for name in chat_eval.TASKS}
    assert chat_eval.chatcore(scores) == pytest.approx(0.5)  # guessing counts 0
    assert LocalChoice(size=1)[0]["letters"] and len(CustomJSON(LOCAL_IDENTITY))
