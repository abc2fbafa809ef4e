"""Prompts to the letter, scoring, and the loops that run a benchmark."""

import hashlib
import json
import os
import textwrap
from types import SimpleNamespace

import pytest
import torch
from _samples import BENCHMARK_ROWS, GSM8K_ROW, HUMANEVAL_ROW, MMLU_ROW, byte_tokenizer

import nanochat_fp4 as nf
from eval import humaneval
from eval.arc import ARC
from eval.common import extract_answer, render_mc
from eval.gsm8k import GSM8K, answer_parts
from eval.humaneval import HumanEval, extract_program, leading_imports
from eval.local import LocalArithmetic, LocalChoice, LocalCode
from eval.mmlu import MMLU
from eval.run import Score, run_task
from eval.spellingbee import SpellingBee
from nanochat_fp4.data.chat_data import LOCAL_WORDS
from nanochat_fp4.generation.engine import Engine
from nanochat_fp4.models.gpt import GPT, GPTConfig

TASKS = {
    "ARC-Easy": lambda d: ARC("ARC-Easy", "test", eval_dir=d),
    "ARC-Challenge": lambda d: ARC("ARC-Challenge", "test", eval_dir=d),
    "MMLU": lambda d: MMLU("all", "test", eval_dir=d),
    "GSM8K": lambda d: GSM8K("main", "test", eval_dir=d),
    "HumanEval": lambda d: HumanEval(eval_dir=d),
}


@pytest.fixture
def eval_dir(tmp_path):
    """Benchmark files of one row each, in the published formats."""
    for path, row in BENCHMARK_ROWS.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{path}.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "words_alpha.txt").write_text("strawberry\r\nbanana\r\n")
    return tmp_path


# ----------------------------------------------------------------------------------------------------------------------
# Prompts


def test_prompts_to_the_letter(eval_dir):
    mc = "Multiple Choice question: What do plants need?\n- light=A\n- sand=B\n- noise=C\n\n"
    mc += "Respond only with the letter of the correct answer."
    for subset in ("ARC-Easy", "ARC-Challenge"):
        assert ARC(subset, "test", eval_dir=eval_dir)[0] == {
            "messages": [{"role": "user", "content": mc}, {"role": "assistant", "content": "A"}],
            "letters": ["A", "B", "C"],
        }
    assert MMLU("all", "test", eval_dir=eval_dir)[0] == {
        "messages": [
            {"role": "user", "content": render_mc("2 + 2 =", "ABCD", ["3", "4", "5", "6"])},
            {"role": "assistant", "content": "B"},
        ],
        "subject": "elementary_mathematics",
        "letters": ("A", "B", "C", "D"),
    }
    assert GSM8K("main", "test", eval_dir=eval_dir)[0] == {
        "messages": [
            {"role": "user", "content": GSM8K_ROW["question"]},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "She has 1000*2 = "},
                    {"type": "python", "text": "1000*2"},
                    {"type": "python_output", "text": "2000"},
                    {"type": "text", "text": "2000 coins.\nThat is "},
                    {"type": "python", "text": "2000"},
                    {"type": "python_output", "text": ""},
                    {"type": "text", "text": "all.\n#### 2,000"},
                ],
            },
        ]
    }
    conversation = HumanEval(eval_dir=eval_dir)[0]
    assert [m["content"] for m in conversation["messages"]] == [
        HUMANEVAL_ROW["prompt"],
        HUMANEVAL_ROW["prompt"] + "\n" + HUMANEVAL_ROW["canonical_solution"],
    ]
    bee = SpellingBee(size=3, split="test", eval_dir=eval_dir)
    assert bee[0] == SpellingBee(size=1, split="test", words=["strawberry", "banana"])[0]
    assert bee[0] != SpellingBee(size=1, split="train", words=["strawberry", "banana"])[0]


RELEASED = os.path.join(os.path.dirname(__file__), "..", "..", "..", "shared", "data", "eval")
GOLDEN = {  # (problems, SHA-256 of all conversations in order) of the published test sets
    "ARC-Easy": (2376, "0022b217b39cd1f7"),
    "ARC-Challenge": (1172, "e9ca627a6bc081b9"),
    "MMLU": (14042, "9ad928e363ff562d"),
    "GSM8K": (1319, "c55d1c1be2fce3eb"),
    "HumanEval": (164, "a151d39ce5ad6fec"),
}


@pytest.mark.skipif(not os.path.isdir(RELEASED), reason="the released benchmark files are not here")
@pytest.mark.parametrize("name", GOLDEN)
def test_every_prompt_of_the_released_benchmarks(name):
    """The hashes were taken when each conversation was equal to the one that nanochat f5425245f makes of the file."""
    task = TASKS[name](RELEASED)
    digest = hashlib.sha256()
    for conversation in task:
        digest.update(json.dumps(conversation, sort_keys=True).encode())
    assert (len(task), digest.hexdigest()[:16]) == GOLDEN[name]
    assert task.VERSION == 1  # another hash is another version


# ----------------------------------------------------------------------------------------------------------------------
# Files with faults


def test_the_folder_can_come_from_the_environment(eval_dir, monkeypatch):
    monkeypatch.setenv("NANOCHAT_EVAL_DIR", str(eval_dir))
    assert len(ARC("ARC-Easy", "test")) == len(HumanEval()) == 1


def test_unknown_subsets_and_splits():
    for make in (
        lambda: ARC("ARC-Medium", "test"),
        lambda: ARC("ARC-Easy", "dev"),
        lambda: MMLU("all", "train"),
        lambda: MMLU("auxiliary_train", "test"),
        lambda: GSM8K("main", "validation"),
        lambda: SpellingBee(split="dev", words=["a"]),
    ):
        with pytest.raises(ValueError, match="use one of|train and test"):
            make()


def test_mmlu_auxiliary_train_is_unwrapped(tmp_path):
    place = tmp_path / "cais" / "mmlu" / "auxiliary_train"
    place.mkdir(parents=True)
    for row in ({"train": MMLU_ROW}, MMLU_ROW):  # as on the hub, and as anyone would write it
        (place / "train.jsonl").write_text(json.dumps(row) + "\n")
        assert MMLU("auxiliary_train", "train", eval_dir=tmp_path)[0]["messages"][1]["content"] == "B"


# ----------------------------------------------------------------------------------------------------------------------
# Scoring


def test_final_numbers():
    for text, expected in [
        ("so #### 42", "42"), ("#### -1,234.5 apples #### 7", "-1234.5"), ("####42", None), ("42", None),
    ]:  # fmt: skip
        assert extract_answer(text) == expected
    parts = answer_parts("a <<1+1=2>>b<<3>>")
    assert [p["type"] for p in parts] == ["text", "python", "python_output", "text", "python", "python_output", "text"]


def test_scoring_of_each_task(eval_dir):
    arc = ARC("ARC-Easy", "test", eval_dir=eval_dir)
    assert arc.evaluate(arc[0], "A") is True and arc.evaluate(arc[0], "B") is False
    gsm = GSM8K("main", "test", eval_dir=eval_dir)
    assert gsm.evaluate(gsm[0], "#### 2000") is gsm.evaluate(gsm[0], "#### 2,000") is True
    assert not any(gsm.evaluate(gsm[0], answer) for answer in ("#### 2001", "2000", ""))
    bee = SpellingBee(size=1, split="test", words=["banana"])
    right = bee[0]["messages"][1]["content"][3]["text"]
    assert bee.evaluate(bee[0], f"#### {right}") and not bee.evaluate(bee[0], f"#### {int(right) + 1}")


def test_humaneval_runs_the_tests_in_the_sandbox(eval_dir):
    task = HumanEval(eval_dir=eval_dir)
    conversation = task[0]
    body = "def total(xs):\n    return sum(xs)"
    for answer, right in [
        (conversation["messages"][1]["content"], True),
        (body, True),  # the imports come from the prompt
        (f"Sure!\n```python\n{body}\n```\nand\n```\nnonsense(\n```", True),
        (f"```\n{body}\n```", True),
        ("def total(xs):\n    return 0", False),
        ("I cannot do this.", False),
    ]:
        assert task.evaluate(conversation, answer) is right, answer
    assert leading_imports(HUMANEVAL_ROW["prompt"]) == "from typing import List\nimport math"
    assert extract_program("  x = 1\n") == "x = 1"


FENCED = "{0}\nadd = sum\ndef total(xs):\n    return add(xs)\n{1}"


@pytest.mark.parametrize(
    "answer, nanochats",
    [
        (FENCED.format("```python", "```"), True),
        (FENCED.format("```Python", "```"), False),
        (FENCED.format("```py", "```"), False),
        (FENCED.format("~~~python", "~~~"), False),
        (FENCED.format("Sure:\n```python title=x", "```\nDone."), False),
        (FENCED.format("```python", ""), False),  # cut off
        (textwrap.indent(FENCED.format("```python", "```"), "   "), False),
        ("```bash\nls\n```\n" + FENCED.format("```Python", "```"), False),
        ("```python\ndef total(xs):\n    return 0\n```", None),
    ],
)
def test_the_form_of_an_answer_is_not_the_ability(eval_dir, answer, nanochats):
    """nanochat's score reads one form; the other score reads all, and no wrong program."""
    task = HumanEval(eval_dir=eval_dir)
    verdicts = {name: judge(task[0], answer) for name, judge in task.judges.items()}
    assert verdicts == {"": bool(nanochats), "any fence": nanochats is not None}


def test_a_second_judge_has_a_score_of_its_own(eval_dir, monkeypatch):
    model, tokenizer, ran = tiny_model(), byte_tokenizer(), []
    monkeypatch.setattr(humaneval, "execute_code", lambda code, **_: ran.append(code) or SimpleNamespace(success=True))
    monkeypatch.setattr(humaneval, "extract_program", lambda answer: f"nanochat reads {len(ran)}")
    humaneval.passes.cache_clear()
    task = HumanEval(eval_dir=eval_dir)
    monkeypatch.setattr(task, "evaluate", lambda *_: False)
    score = run_task(task, model, tokenizer, max_new_tokens=2)
    assert (score.outcomes, score.others) == ([False], {"any fence": [True]}) and score.accuracy == 0
    assert task.evaluate_any_fence(task[0], "x") and task.evaluate_any_fence(task[0], "x") and len(ran) == 2


def test_the_accuracy_of_all_problems_is_left_to_the_result(capsys):
    """The line after the last batch is followed by the score with its interval, and has none of its own."""
    run_task(LocalChoice(size=4, split="test"), tiny_model(), byte_tokenizer(), batch_size=2)
    *_, last = capsys.readouterr().err.splitlines()
    assert "4/4 (100%)" in last and "accuracy" not in last


@pytest.mark.parametrize("kind", [LocalChoice, LocalArithmetic, LocalCode])
def test_local_tasks_accept_their_own_answers(kind):
    task = kind(size=40, split="test")
    assert [task[i] for i in range(40)] == list(kind(size=40, split="test")) != list(kind(size=40, split="train"))
    for conversation in list(task)[:3]:
        answer = conversation["messages"][-1]["content"]
        text = answer if isinstance(answer, str) else "".join(p["text"] for p in answer)
        assert task.evaluate(conversation, text)
        wrong = "E" if kind is LocalChoice else text.replace("return x", "return 1000 + x").replace("#### ", "#### 9")
        assert not task.evaluate(conversation, wrong)


def test_interval_is_that_of_table_5():
    """ARC-Challenge, 1,172 problems at 38.8%: plus or minus 2.8%."""
    solved = round(0.388 * 1172)
    score = Score([True] * solved + [False] * (1172 - solved))
    assert round(100 * score.accuracy, 1) == 38.8 and round(100 * score.interval, 1) == 2.8
    assert str(score) == "38.82% ± 2.85% (455/1172)"


def test_no_interval_leaves_0_to_100_percent():
    for solved in range(9):
        text = str(Score([True] * solved + [False] * (8 - solved)))
        assert (text == f"{solved} of 8") == (solved not in (3, 4, 5)), text


# ----------------------------------------------------------------------------------------------------------------------
# The loops


def tiny_model(seed=0, **changes):
    torch.manual_seed(seed)
    shape = dict(sequence_len=256, vocab_size=265, n_layer=2, n_head=2, n_kv_head=2, n_embd=64, window_pattern="SL")
    model = GPT(GPTConfig(**{**shape, **changes}))
    model.init_weights()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape)
    return model.eval()


@pytest.mark.parametrize("dtype, autocasts", [(torch.bfloat16, True), (torch.float32, False), (None, False)])
def test_a_task_is_computed_in_the_dtype_that_is_asked_for(dtype, autocasts):
    model, seen = tiny_model(), set()
    model.register_forward_pre_hook(lambda *_: seen.add(torch.is_autocast_enabled("cpu")))
    run_task(LocalChoice(size=2, split="test"), model, byte_tokenizer(), dtype=dtype)
    assert seen == {autocasts}


@pytest.mark.parametrize("method", ["bf16", "clover"])
def test_choices_do_not_depend_on_the_batch(method):
    """Padding and neighbours change nothing: neither in full precision nor with quantized activations."""
    model, tokenizer = tiny_model(), byte_tokenizer()
    nf.convert(model, method, verbose=False)
    task = LocalChoice(size=8, split="test")
    alone = run_task(task, model, tokenizer, batch_size=1)
    assert alone.outcomes == run_task(task, model, tokenizer, batch_size=8).outcomes
    assert alone.outcomes[:5] == run_task(task, model, tokenizer, batch_size=3, max_problems=5).outcomes
    assert 0 < sum(alone.outcomes) < 8

    # The reference: logits of the whole sequence, the letters' at the last token of the prompt, one problem at a time.
    for i, outcome in enumerate(alone.outcomes[:4]):
        ids = tokenizer.render_for_completion(task[i])
        with torch.no_grad(), nf.per_token_scale(model):
            logits = model(torch.tensor([ids]))[0, -1]
        letters = task[i]["letters"]
        best = max(letters, key=lambda letter: logits[ord(letter)].item())
        assert outcome == (best == task[i]["messages"][-1]["content"])


def test_weights_are_quantized_once_for_a_task():
    model, tokenizer = tiny_model(), byte_tokenizer()
    nf.convert(model, "clover", verbose=False)
    ready = []
    block = model.transformer.h[1]
    block.register_forward_pre_hook(
        lambda *_: ready.append(
            all(any(c.weights for c in m.contexts) for m in (block.attn.c_q, block.mlp.c_fc, block.mlp.c_proj))
        )
    )
    run_task(LocalChoice(size=4, split="test"), model, tokenizer, batch_size=2)
    run_task(LocalArithmetic(size=2, split="test"), model, tokenizer, max_new_tokens=3)
    assert len(ready) >= 4 and all(ready)
    assert not any(m.contexts for m in model.modules() if isinstance(m, nf.QuantLinear))


def test_choices_must_be_one_token():
    class Long(LocalChoice):
        def make(self, rng):
            return {**super().make(rng), "letters": ["AA", "BB"]}

    with pytest.raises(ValueError, match="'AA' is 2 tokens"):
        run_task(Long(size=1), tiny_model(), byte_tokenizer())


@pytest.mark.parametrize("method, temperature", [("bf16", 0.0), ("clover", 1.0)])
def test_generate_many_is_generate_batch(method, temperature):
    model, tokenizer = tiny_model(), byte_tokenizer()
    nf.convert(model, method, verbose=False)
    engine = Engine(model, tokenizer)
    bos = tokenizer.get_bos_token_id()
    prompts = [[bos, *text.encode()] for text in ("abc", "brown fox", "", "brown dog")]
    sampling = dict(max_tokens=6, temperature=temperature, top_k=20, seed=7)
    with nf.per_token_scale(model):
        many = engine.generate_many(prompts, num_samples=2, **sampling)
        each = [engine.generate_batch(prompt, num_samples=2, **sampling)[0] for prompt in prompts]
    assert many == each
    for bad in ([], [[bos], []]):
        with pytest.raises(ValueError, match="empty"):
            engine.generate_many(bad)


def test_seeded_sampling_is_repeatable():
    model, tokenizer = tiny_model(), byte_tokenizer()
    answers = []

    class Record(LocalArithmetic):
        def evaluate(self, conversation, answer):
            answers.append(answer)
            return False

    for seed, batch_size in ((1, 2), (1, 4), (2, 4)):
        run_task(Record(size=4), model, tokenizer, temperature=1.0, max_new_tokens=8, seed=seed, batch_size=batch_size)
    assert sorted(answers[:4]) == sorted(answers[4:8]) != sorted(answers[8:])


def test_prompts_longer_than_the_model_can_read_are_cut(capsys):
    model, tokenizer = tiny_model(sequence_len=16), byte_tokenizer()  # 160 positions

    class Long(LocalArithmetic):
        def __getitem__(self, i):
            question = {"role": "user", "content": "x" * (20 + 200 * (i % 2))}
            return {"messages": [question, super().__getitem__(i)["messages"][1]]}

    class LongChoice(Long):
        eval_type = "categorical"

        def __getitem__(self, i):
            return {**super().__getitem__(i), "letters": ("A", "B")}

    for task, longest in ((Long(size=4), 149), (LongChoice(size=4), 159)):
        assert run_task(task, model, tokenizer, "Long", max_new_tokens=10).count == 4
        assert f"note: Long: 2 prompts were cut after {longest} tokens" in capsys.readouterr().out
    with pytest.raises(ValueError, match="leaves no room"):
        run_task(Long(size=4), model, tokenizer, max_new_tokens=160)


def test_bad_requests():
    model, tokenizer = tiny_model(), byte_tokenizer()
    for kwargs in ({"max_problems": 0}, {"batch_size": 0}, {"num_samples": 0}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError):
            run_task(LocalChoice(size=2), model, tokenizer, **kwargs)
    assert len(LOCAL_WORDS) > 150


RANKS_CODE = """
import sys
sys.stderr = sys.stdout
from nanochat_fp4.common import compute_cleanup, compute_init
import test_eval as t
compute_init("cpu")
t.print_outcomes()
compute_cleanup()
"""


def print_outcomes():
    """Of as many problems as leave one of two processes with more than the other, or with all."""
    model, tokenizer = tiny_model(), byte_tokenizer()
    nf.convert(model, "clover", verbose=False)
    choice, arithmetic = LocalChoice(size=16, split="test"), LocalArithmetic(size=3, split="test")
    outcomes = [run_task(choice, model, tokenizer, batch_size=2, max_problems=n).outcomes for n in (1, 11)]
    outcomes.append(run_task(arithmetic, model, tokenizer, max_new_tokens=3).outcomes)
    print("outcomes", outcomes)


def test_processes_share_the_problems_of_a_task(run_ranks, capsys):
    """What is known is the same in all, and in one; the progress says whose part of them it counts."""
    print_outcomes()
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("outcomes"))
    first, second = run_ranks(RANKS_CODE)
    assert line in first and line in second
    assert "LocalChoice, process 1 of 2: 6/6" in first and "process" not in second
