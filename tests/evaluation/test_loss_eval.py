"""Bits per byte by hand, with special and ignored targets, and over two processes."""

import math

import pytest
import torch

from nanochat_fp4.evaluation.loss_eval import evaluate_bpb

TOKEN_BYTES = torch.tensor([1, 2, 5, 0, 7])  # 3 is special


class TableModel(torch.nn.Module):
    """A target's loss is its input, as a number."""

    def forward(self, x, y, loss_reduction):
        assert loss_reduction == "none" and not torch.is_grad_enabled()
        return x.float().flatten()


def batch(losses, targets):
    return torch.tensor([losses]), torch.tensor([targets])


def test_counts_bytes_of_text_only():
    nan = float("nan")
    batches = [batch([3.0, 4.0, nan], [0, 2, 3]), batch([1.0, nan, 2.0], [1, -1, 1])]
    # nats 3 + 4 + 1 + 2 over bytes 1 + 5 + 2 + 2; the special and the ignored target do not count, whatever their loss
    assert evaluate_bpb(TableModel(), batches, 2, TOKEN_BYTES) == pytest.approx(10 / (math.log(2) * 10), rel=1e-12)
    assert evaluate_bpb(TableModel(), batches, 1, TOKEN_BYTES) == pytest.approx(7 / (math.log(2) * 6), rel=1e-12)


def test_nothing_to_count_is_infinite():
    assert evaluate_bpb(TableModel(), [batch([1.0], [3])], 1, TOKEN_BYTES) == math.inf


def test_too_few_batches_is_named():
    with pytest.raises(ValueError, match="1 of 3 batches.*--eval-tokens"):
        evaluate_bpb(TableModel(), [batch([1.0], [0])], 3, TOKEN_BYTES)


def test_of_a_gpt_is_its_mean_loss_and_repeatable():
    from nanochat_fp4.models.gpt import GPT, GPTConfig

    model = GPT(GPTConfig(sequence_len=16, vocab_size=64, n_layer=1, n_head=2, n_kv_head=2, n_embd=32))
    model.init_weights()
    data = [(torch.randint(0, 64, (2, 16)), torch.randint(0, 64, (2, 16))) for _ in range(3)]
    bpb = evaluate_bpb(model, data, 3, torch.full((64,), 3))
    mean = sum(model(x, y).item() for x, y in data) / 3
    assert bpb == pytest.approx(mean / (3 * math.log(2)), rel=1e-5)
    assert evaluate_bpb(model, data, 3, torch.full((64,), 3)) == bpb


TWO_RANKS = """
from nanochat_fp4.common import compute_cleanup, compute_init
from test_loss_eval import TOKEN_BYTES, TableModel, batch, evaluate_bpb
_, rank, _, _, _ = compute_init("cpu")
mine = [batch([3.0, 4.0], [0, 2]), batch([1.0, 2.0], [1, 1])][rank]
print(evaluate_bpb(TableModel(), [mine], 1, TOKEN_BYTES))
compute_cleanup()
"""


def test_two_processes_sum_before_they_divide(run_ranks):
    first, second = map(float, run_ranks(TWO_RANKS))
    assert first == second == pytest.approx(10 / (math.log(2) * 10), rel=1e-12)


def test_of_a_model_of_transformers(tiny_base, tmp_path, capsys):
    """--hf-path, on the text that ours are measured on, against the definition: nats of all text / (ln 2 * bytes)."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import ByteLevelBPETokenizer

    from nanochat_fp4.data.dataloader import Documents, packed_rows
    from nanochat_fp4.data.dataset import ensure_data, open_text
    from nanochat_fp4.models.hf_model import describe, load_hf_model
    from scripts import base_loss

    words = ByteLevelBPETokenizer()
    words.train_from_iterator(["the capital of France é 中 planets"] * 3, vocab_size=300, special_tokens=["<|bos|>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words._tokenizer, bos_token="<|bos|>")
    tokenizer.save_pretrained(tmp_path / "hf")
    config = transformers.GPT2Config(vocab_size=len(tokenizer), n_positions=32, n_embd=32, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "hf")

    described = describe(str(tmp_path / "hf"))
    model, ours = load_hf_model(described, torch.device("cpu")), described.tokenizer
    lengths = ours.token_bytes(torch.device("cpu"))
    text = "the é 中 capital"
    assert sum(lengths[i] for i in ours.encode([text], ours.get_bos_token_id())[0]) == len(text.encode())
    assert lengths[ours.get_bos_token_id()] == 0

    base_loss.main(["--device-type=cpu", f"--hf-path={tmp_path / 'hf'}", "--device-batch-size=2", "--split-tokens=128"])
    said = {
        line.split()[0]: float(line.split()[2]) for line in capsys.readouterr().out.splitlines() if " bpb: " in line
    }
    loader = packed_rows(Documents(ours, 32, open_text("val", ensure_data())), 2, "cpu")
    nats = count = 0.0
    with torch.no_grad():
        for _, (x, y, _) in zip(range(2), loader):
            for row, targets in zip(model.model(x).logits.log_softmax(-1), y):
                for at, target in zip(row, targets):
                    if lengths[target]:
                        nats, count = nats - float(at[target]), count + int(lengths[target])
    assert said["val"] == pytest.approx(nats / (math.log(2) * count), abs=1e-4) and said["train"] > 0
