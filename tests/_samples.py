"""Small examples of what the package reads: text, checkpoints, benchmarks, an eval bundle, a model to convert."""

import json
import random
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from nanochat_fp4.data.dataset import open_text
from nanochat_fp4.data.tokenizer import SPECIAL_TOKENS, RustBPETokenizer, get_tokenizer
from nanochat_fp4.models.gpt import GPT, GPTConfig
from nanochat_fp4.nvfp4.epilogue import fused_linear
from nanochat_fp4.training.checkpoint_manager import save_checkpoint

# ----------------------------------------------------------------------------------------------------------------------
# Text

BOS = 256


class ByteTokenizer:
    """A token a byte."""

    def get_bos_token_id(self):
        return BOS

    def encode(self, texts, prepend=None, num_threads=1):
        return [[prepend, *text.encode()] for text in texts]


BYTE_TOKENIZER = ByteTokenizer()


def byte_tokenizer() -> RustBPETokenizer:
    """A real tokenizer without merges: a token a byte, then the special tokens."""
    ranks = {bytes([i]): i for i in range(256)}
    return RustBPETokenizer.from_parts(r"[\s\S]", ranks, {n: 256 + i for i, n in enumerate(SPECIAL_TOKENS)})


def write_shard(path, texts, row_group_size=4):
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=row_group_size)


def texts_of(folder, split):
    return [text for part in open_text(split, folder) for k in range(len(part.rows)) for text in part.read(k)]


def make_shards(folder, num_documents=400, num_shards=4, row_group_size=10, seed=0, longest=120):
    """Shards of documents of 1 to `longest` bytes; each begins with its number."""
    folder.mkdir(exist_ok=True)
    rng = random.Random(seed)
    documents = [f"{i}:" + "".join(rng.choices("abcdefgh ", k=rng.randint(0, longest))) for i in range(num_documents)]
    per_shard = -(-num_documents // num_shards)
    for s in range(num_shards):
        write_shard(folder / f"shard_{s:05d}.parquet", documents[s * per_shard : (s + 1) * per_shard], row_group_size)
    return documents


# ----------------------------------------------------------------------------------------------------------------------
# A checkpoint


def save_base(base: Path, tag: str = "d2_clover", method: str = "clover", source: str = "base_checkpoints", **changes):
    """A checkpoint as base_train writes it, of a model that was not trained."""
    tokenizer = get_tokenizer()
    shape = dict(sequence_len=128, vocab_size=tokenizer.get_vocab_size(), n_layer=2, n_head=2, n_kv_head=2, n_embd=128)
    config = GPTConfig(**{**shape, "window_pattern": "SL", **changes})
    torch.manual_seed(1)
    model = GPT(config)
    model.init_weights()
    with torch.no_grad():  # the projections are zero at first; with them no layer would matter
        for p in model.transformer.h.parameters():
            p += 0.02 * torch.randn(p.shape)
    meta = {
        "model_config": asdict(config),
        "user_config": {"method": method},
        "run_config": {"method": method, "tokenizer": tokenizer.fingerprint()},
        "device_batch_size": 8,
    }
    assert save_checkpoint(base / source / tag, 5, model.state_dict(), None, meta)
    return model


# ----------------------------------------------------------------------------------------------------------------------
# Benchmarks

ARC_ROW = {
    "id": "q1",
    "question": "What do plants need?",
    "choices": {"text": ["light", "sand", "noise"], "label": ["A", "B", "C"]},
    "answerKey": "A",
}
MMLU_ROW = {"question": "2 + 2 =", "choices": ["3", "4", "5", "6"], "answer": 1, "subject": "elementary_mathematics"}
GSM8K_ROW = {
    "question": "Ada has 1,000 coins and doubles them. How many are there?",
    "answer": "She has 1000*2 = <<1000*2=2000>>2000 coins.\nThat is <<2000>>all.\n#### 2,000",
}
HUMANEVAL_ROW = {
    "task_id": "t/0",
    "prompt": 'from typing import List\n# a comment\nimport math\n\n\ndef total(xs: List[int]):\n    """Sum."""\n',
    "canonical_solution": "    return sum(xs)\n",
    "entry_point": "total",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert math.pi > 3\n",
}
BENCHMARK_ROWS = {  # path, without its ending, below EVAL_DIR -> a row
    "allenai/ai2_arc/ARC-Easy/test": ARC_ROW,
    "allenai/ai2_arc/ARC-Challenge/test": ARC_ROW,
    "cais/mmlu/all/test": MMLU_ROW,
    "openai/gsm8k/main/test": GSM8K_ROW,
    "openai/openai_humaneval/openai_humaneval/test": HUMANEVAL_ROW,
}

CORE_TASKS = {
    "multiple_choice": [{"query": f"Question {i}", "choices": ["yes", "no"], "gold": i % 2} for i in range(5)],
    "schema": [{"context_options": ["The cat", "The dog"], "continuation": "sat.", "gold": 0} for _ in range(3)],
    "language_modeling": [{"context": f" One two {i} ", "continuation": "three"} for i in range(4)],
}


def make_bundle(folder: Path) -> Path:
    """An eval bundle (CORE) with one small task of each kind."""
    (folder / "eval_data").mkdir(parents=True)
    tasks = []
    for kind, data in CORE_TASKS.items():
        (folder / "eval_data" / f"{kind}.jsonl").write_text("".join(json.dumps(d) + "\n" for d in data))
        tasks.append(f"- {{label: {kind}, icl_task_type: {kind}, dataset_uri: {kind}.jsonl, num_fewshot: [1]}}\n")
    (folder / "core.yaml").write_text("icl_tasks:\n" + "".join(tasks))
    (folder / "eval_meta_data.csv").write_text(
        "Eval Task,Random baseline\nmultiple_choice,50\nschema,50\nlanguage_modeling,0\n"
    )
    return folder


# ----------------------------------------------------------------------------------------------------------------------
# A model of somebody else's


class Fused(nn.Module):
    """Two layers computed as one, and one alone."""

    fused_linears = ("q", "k")

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(64, 64, bias=False), nn.Linear(64, 32, bias=False)
        self.out = nn.Linear(96, 64)

    def forward(self, x):
        return self.out(torch.cat(fused_linear(x, self.q, self.k), -1).relu())
