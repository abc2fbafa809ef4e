"""Reinforcement learning: what is made of answers, its gradient, and the stage on GSM8K's files, resumed to the bit."""

import functools
import json

import pytest
import torch
import torch.nn.functional as F
from _assertions import assert_same, final_state
from _samples import GSM8K_ROW, byte_tokenizer, save_base

from nanochat_fp4.cli import UserError
from nanochat_fp4.data.chat_data import Task
from nanochat_fp4.data.dataloader import rollouts
from nanochat_fp4.evaluation.metrics import read_jsonl
from nanochat_fp4.generation.engine import Engine
from nanochat_fp4.models.gpt import GPT, GPTConfig
from nanochat_fp4.training import trainer
from nanochat_fp4.training.load_model import load_model
from scripts import chat_rl

RL = (
    "--device-type=cpu --device-batch-size=2 --num-samples=4 --examples-per-step=2 --max-new-tokens=3 "
    "--eval-examples=2 --eval-every=2 --num-iterations=2 --init-lr-frac=1.0"
).split()


class Lower(Task):
    """An answer is right if it begins with a byte below 128."""

    def num_examples(self):
        return 3

    def get_example(self, index):
        return {"messages": [{"role": "user", "content": "abc"[index]}, {"role": "assistant", "content": "x"}]}

    def evaluate(self, conversation, answer):
        return bool(answer) and ord(answer[0]) < 128


def test_policy_loss_by_hand():
    logits, y = torch.randn(3, 5, 11), torch.randint(11, (3, 5))
    y[0, :3], y[2] = -1, -1
    advantages = torch.tensor([0.5, -0.25, 1.0])

    def forward(x, y, loss_reduction):
        assert loss_reduction == "none"
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1, reduction="none")

    log_p = logits.log_softmax(-1)
    terms = [advantages[b] * log_p[b, t, y[b, t]] for b in range(3) for t in range(5) if y[b, t] >= 0]
    assert chat_rl.policy_loss(forward, None, y, advantages).item() == pytest.approx(-sum(terms).item() / 7)
    assert chat_rl.policy_loss(forward, None, torch.full_like(y, -1), advantages) == 0


def test_what_is_made_of_answers():
    """Four answers, two at a time: prompts, the calculator's words and padding are not trained on."""
    tokenizer, asked = byte_tokenizer(), []
    answers = [(b"ab", [1, 1]), (b"\xff", [1]), (b"a=2", [1, 0, 1]), (b"\xffx", [1, 1])]

    def generate(prompt, rows, seed):
        asked.append(seed)
        now = answers[2 * (len(asked) - 1) % 4 :][:rows]
        return [prompt + list(text) for text, _ in now], [[0] * len(prompt) + mask for _, mask in now]

    answered = rollouts(Lower(), tokenizer, generate, 2, 4, "cpu", seen := [], seed=1)
    x, y, advantages, _ = next(answered)
    _, y2, advantages2, position = next(answered)
    n = len(tokenizer.render_for_completion(Lower()[0]))
    assert x.shape == y.shape == (2, n + 3 - 1) and (y[:, : n - 1] == -1).all()
    assert y[:, n - 1 :].tolist() == [[97, 98, -1], [255, -1, -1]]
    assert y2[:, n - 1 :].tolist() == [[97, -1, 50], [255, 120, -1]]
    assert torch.cat([advantages, advantages2]).tolist() == [0.5, -0.5, 0.5, -0.5]
    assert chat_rl.means_of(seen, "cpu") == pytest.approx({"reward": 0.5, "sequence_length": 2.0}) and not seen
    next(answered)
    assert len(set(asked)) == 4, "every draw has a seed of its own"
    position = json.loads(json.dumps(position))
    again = rollouts(Lower(), tokenizer, generate, 2, 4, "cpu", [], seed=1, position=position)
    next(again)
    assert asked[-2:] == asked[2:4], "a resume asks what would have been asked"


def test_the_end_is_learned_and_padding_is_not():
    """Of an answer that ends and one that is cut off. Rewards see neither end."""
    tokenizer, seen = byte_tokenizer(), []
    end = tokenizer.encode_special("<|assistant_end|>")

    class Seen(Lower):
        def evaluate(self, conversation, answer):
            return not seen.append(answer)

    def generate(prompt, rows, seed):
        return [prompt + [97, end], prompt + [98, 99, 100]], [[0] * len(prompt) + [1] * n for n in (2, 3)]

    _, y, _, _ = next(rollouts(Seen(), tokenizer, generate, 2, 2, "cpu", []))
    assert y[:, -3:].tolist() == [[97, end, -1], [98, 99, 100]] and seen == ["a", "bcd"]


def test_what_is_rewarded_becomes_likelier():
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    model = GPT(GPTConfig(sequence_len=32, vocab_size=tokenizer.get_vocab_size(), n_layer=1, n_head=1, n_kv_head=1,
                          n_embd=32))  # fmt: skip
    model.init_weights()
    engine, adamw = Engine(model, tokenizer), torch.optim.AdamW(model.parameters(), 0.02)
    generate = lambda prompt, rows, seed: engine.generate_batch(prompt, rows, max_tokens=1, seed=seed)  # noqa: E731
    answered = rollouts(Lower(), tokenizer, generate, 16, 16, "cpu", seen := [])
    rewards = []
    for _ in range(20):
        x, y, advantages, _ = next(answered)
        chat_rl.policy_loss(model, x, y, advantages).backward()
        adamw.step()
        adamw.zero_grad()
        rewards.append(chat_rl.means_of(seen, "cpu")["reward"])
    assert sum(rewards[:3]) / 3 < 0.7 and sum(rewards[-3:]) / 3 > 0.9


def test_gsm8k_from_files_and_resumed(tiny_base, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "eval" / "openai" / "gsm8k" / "main"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        rows = [{**GSM8K_ROW, "question": f"{i} and {i}?"} for i in range(4)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_base(tiny_base, source="chatsft_checkpoints", n_layer=1)
    flags = [*RL, f"--eval-dir={tmp_path / 'eval'}"]
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "Progress", functools.partial(trainer.Progress, every=0))
        chat_rl.main([*flags, "--save-every=1", "--keep-last=-1"])
    assert "evaluation: 1/2 batches" in capsys.readouterr().err
    out = tiny_base / "chatrl_checkpoints" / "d2_clover"
    model, _, meta = load_model("rl", "cpu", "eval", "d2_clover")
    before = load_model("sft", "cpu", "eval", "d2_clover")[0]
    records = read_jsonl(out / "metrics.jsonl")
    assert meta["user_config"]["method"] == "clover" and meta["parent"]["stage"] == "sft"
    assert [r["step"] for r in records if r["event"] == "train" and {"reward", "sequence_length"} <= set(r)] == [0, 1]
    assert [sorted(k for k in r if k.startswith("pass@")) for r in records if r["event"] == "val"] == [
        ["pass@1", "pass@2"],
        ["pass@1", "pass@2"],
    ]
    # Nothing was right, so that there is no advantage and nothing is learned.
    assert all(r["reward"] == 0 for r in records if r["event"] == "train")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters()))
    whole = final_state(out, 2)
    chat_rl.main([*flags, "--resume-from-step=1", "--save-every=1", "--keep-last=-1"])
    assert_same(final_state(out, 2), whole)
    with pytest.raises(UserError, match="num_samples was 4 and is now 2"):
        chat_rl.main([*flags, "--resume-from-step=1", "--num-samples=2"])
    with pytest.raises(ValueError, match="positions; lower --max-new-tokens"):
        chat_rl.main([*flags, "--overwrite", "--max-new-tokens=99999"])
    for flag in ("--sft-dir=folder", "--allow-missing"):  # its only data set is GSM8K
        with pytest.raises(SystemExit):
            chat_rl.main([*flags, flag])
    assert_same(final_state(out, 2), whole)
