"""CORE: its prompts to the letter, what is judged, bundles with faults, and questions that do not fit the model."""

import json
import zipfile

import pytest
import torch
from _samples import CORE_TASKS, byte_tokenizer, make_bundle, save_base

from nanochat_fp4.cli import UserError
from nanochat_fp4.evaluation import core_eval
from nanochat_fp4.evaluation.metrics import read_jsonl
from nanochat_fp4.models.gpt import GPT, GPTConfig
from scripts import base_eval

MC, SCHEMA, LM = CORE_TASKS.values()


def test_core_prompts_to_the_letter():
    assert core_eval.render_prompts_mc(MC[2], " -> ", [MC[1], MC[0]]) == [
        "Question 1 -> no\n\nQuestion 0 -> yes\n\nQuestion 2 -> yes",
        "Question 1 -> no\n\nQuestion 0 -> yes\n\nQuestion 2 -> no",
    ]
    assert core_eval.render_prompts_schema(SCHEMA[0], " ", [SCHEMA[1]]) == [
        "The cat sat.\n\nThe cat sat.",
        "The cat sat.\n\nThe dog sat.",
    ]
    assert core_eval.render_prompts_lm(LM[0], " ", [LM[1]]) == [
        "One two 1 three\n\nOne two 0",
        "One two 1 three\n\nOne two 0 three",
    ]


def test_core_spans():
    tokenizer = byte_tokenizer()
    meta = {"task_type": "multiple_choice", "continuation_delimiter": " "}
    sequences, spans = core_eval.render_question(MC[0], tokenizer, meta, [])
    assert [tokenizer.decode(s[a:b]) for s, (a, b) in zip(sequences, spans)] == ["yes", "no"]
    sequences, spans = core_eval.render_question(SCHEMA[0], tokenizer, {**meta, "task_type": "schema"}, [])
    assert [tokenizer.decode(s[a:b]) for s, (a, b) in zip(sequences, spans)] == [" sat.", " sat."]
    sequences, spans = core_eval.render_question(LM[0], tokenizer, {**meta, "task_type": "language_modeling"}, [])
    assert [tokenizer.decode(s[a:b]) for s, (a, b) in zip(sequences, spans)] == [" three"]


@pytest.mark.parametrize("kind, data", CORE_TASKS.items())
def test_core_finds_what_the_model_knows(kind, data):
    """A model that makes the right answer likely is right everywhere; one that makes the wrong one likely, nowhere."""
    tokenizer = byte_tokenizer()

    class Knows:
        def __init__(self, right):
            self.right = right

        def __call__(self, ids):
            logits = torch.zeros(*ids.shape, 265)
            for row in range(ids.size(0)):
                good = kind == "language_modeling" or (row == self.gold) == self.right
                bonus = 5.0 if good and (self.right or kind != "language_modeling") else -5.0
                logits[row, :-1].scatter_(1, ids[row, 1:, None], bonus)
            return logits

    meta = {"task_type": kind, "num_fewshot": 2, "continuation_delimiter": " "}
    for right in (True, False):
        model = Knows(right)
        outcomes = []
        for i, item in enumerate(data):
            model.gold = item.get("gold", 0)
            outcomes.append(core_eval.evaluate_example(i, model, tokenizer, data, "cpu", meta)[0])
        assert outcomes == [right] * len(data)


def test_base_eval_with_a_bundle_and_without(tiny_base, tmp_path, capsys, monkeypatch):
    save_base(tiny_base, n_layer=1)
    bundle = make_bundle(tmp_path / "bundle")
    base_eval.main([f"--bundle-dir={bundle}", "--device-type=cpu", "--max-per-task=3"])
    out = capsys.readouterr().out
    assert "clover forward" in out and "CORE" in out
    table = (tiny_base / "base_eval" / "d2_clover" / "base_model_000005.csv").read_text().splitlines()
    assert [line.split(",")[0].strip() for line in table] == ["Task", *CORE_TASKS, "CORE"]
    accuracy, centered = ([float(line.split(",")[column]) for line in table[1:4]] for column in (1, 2))
    # Guessing, half of the answers in the first two kinds, counts 0.
    assert centered == pytest.approx([2 * accuracy[0] - 1, 2 * accuracy[1] - 1, accuracy[2]], abs=1e-5)
    assert float(table[4].split(",")[2]) == pytest.approx(sum(centered) / 3, abs=1e-6)
    record = read_jsonl(tiny_base / "base_checkpoints" / "d2_clover" / "metrics.jsonl")[-1]
    assert record["step"] == 5 and record["scores"]["CORE"]["accuracy"] == pytest.approx(sum(centered) / 3, abs=1e-6)
    base_eval.main([f"--bundle-dir={bundle}", "--device-type=cpu", "--max-per-task=3", "--precision=bf16"])
    record = read_jsonl(tiny_base / "base_checkpoints" / "d2_clover" / "metrics.jsonl")[-1]
    assert list(record["scores"]) == ["CORE, bf16 forward"]

    def no_network(*args, **kwargs):
        raise UserError(f"the download failed ({'as it does ' * 20}); put it there")

    monkeypatch.setattr(core_eval, "download_file_with_lock", no_network)
    with pytest.raises(UserError) as e:
        base_eval.main(["--device-type=cpu"])
    assert "eval bundle" in str(e.value) and "--bundle-dir" in str(e.value)
    assert "; put it there" in str(e.value)  # The message of the download is not cut off.
    (bundle / "core.yaml").write_text("icl_tasks: 3\n")
    with pytest.raises(UserError, match="damaged"):
        base_eval.main([f"--bundle-dir={bundle}", "--device-type=cpu"])
    make_bundle(tmp_path / "two")
    (tmp_path / "two" / "eval_data" / "schema.jsonl").write_text('{"gold": 1}\n{"gold": 1}\n')
    with pytest.raises(UserError, match="schema.jsonl, line 1: 'context_options' is missing"):
        base_eval.main([f"--bundle-dir={tmp_path / 'two'}", "--device-type=cpu"])
    with pytest.raises(UserError, match="is missing"):
        base_eval.main([f"--bundle-dir={tmp_path}", "--device-type=cpu"])


def test_an_archive_that_is_no_bundle(base_dir):
    base_dir.mkdir()
    path = base_dir / "eval_bundle.zip"
    for content in (b"PK nothing", None):
        if content is None:
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("something/else", "x")
        else:
            path.write_bytes(content)
        with pytest.raises(UserError, match="not the eval bundle"):
            core_eval.find_bundle()
        assert [p.name for p in base_dir.iterdir() if not p.name.endswith(".lock")] == ["eval_bundle.zip"]


TASK = "icl_tasks:\n- {{label: {}, icl_task_type: {}, dataset_uri: {}, num_fewshot: [{}]}}"


@pytest.mark.parametrize(
    "core",
    [
        "[" * 10_000,
        "icl_tasks: 2001-99-99",
        "icl_tasks: 3",
        "icl_tasks: []",
        "- a list",
        "icl_tasks: [a text]",
        TASK.format("[schema]", "schema", "a", 0),
        TASK.format("unknown", "schema", "a", 0),
        TASK.format("schema", "guessing", "a", 0),
        TASK.format("schema", "schema", 3, 0),
        TASK.format("schema", "schema", "a", "x"),
        TASK.format("schema", "schema", "a", -1),
    ],
)
def test_damaged_tasks(tmp_path, core):
    bundle = make_bundle(tmp_path / "bundle")
    core_eval.read_tasks(bundle)
    (bundle / "core.yaml").write_text(core)
    with pytest.raises(UserError, match="damaged"):
        core_eval.read_tasks(bundle)


@pytest.mark.parametrize("chance", ["100", "nan", "-1", "x"])  # 100 percent would divide by zero after all questions
def test_damaged_chances(tmp_path, chance):
    bundle = make_bundle(tmp_path / "bundle")
    table = (bundle / "eval_meta_data.csv").read_text()
    (bundle / "eval_meta_data.csv").write_text(table.replace("schema,50", f"schema,{chance}"))
    with pytest.raises(UserError, match="damaged"):
        core_eval.read_tasks(bundle)


# ----------------------------------------------------------------------------------------------------------------------
# What a model cannot read


def small_gpt():
    """32 tokens of context, so 320 positions."""
    torch.manual_seed(0)
    shape = dict(sequence_len=32, vocab_size=265, n_layer=1, n_head=2, n_kv_head=2, n_embd=64, window_pattern="L")
    model = GPT(GPTConfig(**shape))
    model.init_weights()
    return model


def bundle_of(folder, **tasks):
    """A bundle of multiple-choice tasks, name -> (rows, examples shown before each question)."""
    (folder / "eval_data").mkdir(parents=True)
    lines, chances = "icl_tasks:\n", "Eval Task,Random baseline\n"
    for name, (rows, shots) in tasks.items():
        (folder / "eval_data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        kind = f"icl_task_type: multiple_choice, dataset_uri: {name}.jsonl, num_fewshot: [{shots}]"
        lines, chances = f"{lines}- {{label: {name}, {kind}}}\n", f"{chances}{name},50\n"
    (folder / "core.yaml").write_text(lines)
    (folder / "eval_meta_data.csv").write_text(chances)
    return folder


SHORT = [{"query": f"{i}?", "choices": ["yes", "no"], "gold": i % 2} for i in range(12)]
LONG = [{"query": f"{i}" + "word " * 12, "choices": ["yes", "no"], "gold": i % 2} for i in range(12)]
ENDLESS = [{"query": "?", "choices": ["x" * 400, "no"], "gold": 0} for _ in range(3)]


def test_long_prompts_end_no_evaluation(tmp_path):
    bundle = bundle_of(tmp_path / "b", short=(SHORT, 0), long=(LONG, 10), endless=(ENDLESS, 0))
    out = core_eval.evaluate_model(small_gpt(), byte_tokenizer(), torch.device("cpu"), bundle_dir=bundle)
    assert set(out["results"]) == {"short", "long", "endless"} and out["results"]["endless"] == 0
    assert [note.split(" ", 2)[:2] for note in out["notes"]] == [["long:", "12"], ["endless:", "3"]]


def test_an_answer_without_a_token_of_its_own_is_not_judged():
    """Its loss would be that of no token: NaN, beside which the first choice is the best."""
    rows = [{"query": "?", "choices": ["no", "no way"], "gold": 0} for _ in range(3)]
    meta = {"task_type": "multiple_choice", "num_fewshot": 0, "continuation_delimiter": " "}
    model = lambda ids: torch.zeros(*ids.shape, 265)  # noqa: E731
    assert core_eval.evaluate_task(model, byte_tokenizer(), rows, "cpu", meta) == (0.0, 3)


def test_a_cropped_prompt_is_the_end_of_the_whole_one():
    seen = []

    class Reads:
        rotary_seq_len = 200

        def __call__(self, ids):
            seen.append(ids)
            return torch.zeros(*ids.shape, 265)

    meta = {"task_type": "multiple_choice", "num_fewshot": 10, "continuation_delimiter": " "}
    same_length = [{**row, "choices": ["yes", "nay"]} for row in LONG]
    for Reads.rotary_seq_len in (200, None):
        _, whole = core_eval.evaluate_example(0, Reads(), byte_tokenizer(), same_length, "cpu", meta)
        assert whole == (Reads.rotary_seq_len is None)
    end, whole = seen
    assert end.shape == (2, 200) and torch.equal(end, whole[:, -200:])
    # A token before the answer must fit, which predicts its first one.
    for Reads.rotary_seq_len, judged in ((3, False), (4, True)):
        seen.clear()
        core_eval.evaluate_example(0, Reads(), byte_tokenizer(), same_length, "cpu", meta)
        assert len(seen) == judged


def test_an_answer_that_begins_inside_a_token_counts_as_wrong():
    class Merges:
        """'ab' is one token, so the context 'a' is no beginning of the whole text's tokens."""

        def get_bos_token_id(self):
            return 0

        def __call__(self, texts, prepend):
            return [[prepend, *map(ord, text.replace("ab", "X"))] for text in texts]

    meta = {"task_type": "language_modeling", "num_fewshot": 0, "continuation_delimiter": ""}
    data = [{"context": "a", "continuation": "b"}, {"context": "c", "continuation": "d"}]
    result = core_eval.evaluate_task(lambda ids: torch.zeros(*ids.shape, 265), Merges(), data, "cpu", meta)
    assert result == (0.0, 1)


@pytest.mark.parametrize(
    "rows, shots, said",
    [
        ([*SHORT, {"query": "?", "choices": ["a"]}], 0, "late.jsonl, line 13: 'gold' is missing"),
        ([*SHORT, {"query": "?", "choices": ["a"], "gold": 1}], 0, "line 13: 'gold' is 1, expected 0 to 0"),
        (
            [*SHORT, {"query": "?", "choices": ["a", 3], "gold": 1}],
            0,
            "line 13: 'choices' is missing or no list of strings",
        ),
        (SHORT[:5], 10, "late shows 10 .* its 5; raise --max-per-task"),
    ],
)
def test_what_would_fail_later_is_said_before_the_first_question(tmp_path, rows, shots, said):
    bundle = bundle_of(tmp_path / "b", first=(SHORT, 0), late=(rows, shots))
    with pytest.raises(UserError, match=said):
        core_eval.evaluate_model(None, byte_tokenizer(), torch.device("cpu"), bundle_dir=bundle)
