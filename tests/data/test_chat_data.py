"""Tasks, mixtures, rows from folders, and what training conversations look like."""

import gzip
import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat_fp4.data import chat_data, rows
from nanochat_fp4.data.chat_data import (
    LOCAL_IDENTITY,
    LOCAL_WORDS,
    CustomJSON,
    SimpleSpelling,
    SmolTalk,
    Task,
    TaskMixture,
    counting_conversation,
)
from nanochat_fp4.data.rows import MissingDataError, load_rows
from nanochat_fp4.errors import UserError


class Numbers(Task):
    """Conversation i of n is the number first + i."""

    def __init__(self, first, n, **kwargs):
        super().__init__(**kwargs)
        self.first, self.n = first, n

    def num_examples(self):
        return self.n

    def get_example(self, index):
        return self.first + index


def one_line_error(error):
    text = str(error.value)
    assert "\n" not in text and len(text) < 500
    return text


# ----------------------------------------------------------------------------------------------------------------------
# Tasks


@pytest.mark.parametrize("start, stop, step", [(0, None, 1), (2, None, 3), (1, 8, 4), (0, 100, 1), (50, None, 1)])
def test_slices_are_those_of_a_list(start, stop, step):
    task = Numbers(0, 10, start=start, stop=stop, step=step)
    assert list(task) == list(range(10))[start:stop:step]
    assert len(task) == len(list(task))
    with pytest.raises(IndexError):
        task[len(task)]
    for bad in ({"start": -1}, {"start": 5, "stop": 2}, {"step": 0}):
        with pytest.raises(ValueError):
            Numbers(0, 10, **bad)


def test_mixture_is_everything_once_in_nanochats_order():
    parts = [Numbers(0, 5), Numbers(100, 7), Numbers(0, 0), Numbers(100, 7, stop=3)]
    in_sequence = [i for part in parts for i in part]
    mixture = TaskMixture(parts)
    assert list(mixture) != in_sequence and sorted(mixture) == sorted(in_sequence)
    # nanochat shuffles the list of (task, index) pairs with random.Random(42)
    pairs = [(t, i) for t, part in enumerate(parts) for i in range(len(part))]
    random.Random(42).shuffle(pairs)
    assert list(mixture) == [parts[t][i] for t, i in pairs]
    assert list(TaskMixture(parts, start=2, stop=9, step=3)) == list(mixture)[2:9:3]
    assert list(TaskMixture([])) == []


# ----------------------------------------------------------------------------------------------------------------------
# Rows


def write_jsonl(path: Path, items, gz=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(item) + "\n" for item in items)
    with gzip.open(path, "wt") if gz else open(path, "w") as f:
        f.write(text)


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "parquet", "parts"])
def test_rows_of_every_form_come_in_the_order_of_datasets(tmp_path, form):
    items = [{"n": i} for i in range(23)]
    place = tmp_path / "org" / "set" / "main"
    place.mkdir(parents=True)
    if form == "parts":
        pq.write_table(pa.Table.from_pylist(items[:10]), place / "test-00000-of-00002.parquet")
        pq.write_table(pa.Table.from_pylist(items[10:]), place / "test-00001-of-00002.parquet")
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(items), place / "test.parquet")
    else:
        write_jsonl(place / f"test.{form}", items, gz=form.endswith("gz"))
    if form == "parts":  # half a benchmark is another benchmark
        shutil.move(place / "test-00000-of-00002.parquet", tmp_path)
        with pytest.raises(UserError, match="has 1 of 00002 parts of test"):
            load_rows("org/set", "main", "test", folder=tmp_path)
        shutil.move(tmp_path / "test-00000-of-00002.parquet", place)
    loaded = load_rows("org/set", "main", "test", folder=tmp_path)
    assert [r["n"] for r in loaded] == np.random.default_rng(42).permutation(23).tolist()


def test_shuffle_is_that_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    expected = datasets.Dataset.from_list([{"n": i} for i in range(101)]).shuffle(seed=42)["n"]
    write_jsonl(tmp_path / "org" / "set" / "main" / "test.jsonl", [{"n": i} for i in range(101)])
    assert [r["n"] for r in load_rows("org/set", "main", "test", folder=tmp_path)] == list(expected)


def test_damaged_files_are_named_with_the_line(tmp_path):
    place = tmp_path / "org" / "set" / "main"
    place.mkdir(parents=True)
    load = lambda **kw: load_rows("org/set", "main", "test", folder=tmp_path, **kw)  # noqa: E731
    check = lambda row: None if isinstance(row["n"], int) else "the field 'n' is not a number"  # noqa: E731

    with pytest.raises(MissingDataError) as e:
        load()
    assert "test.jsonl" in one_line_error(e) and "--eval-dir" in str(e.value)
    with pytest.raises(UserError, match="not a folder"):
        load_rows("org/set", "main", "test", folder=tmp_path / "nowhere")

    path = place / "test.jsonl"
    for content, expected in [
        (b"", "has no rows"),
        (b'{"n": 1}\n{"n": ', "line 2: not JSON"),
        (b'{"n": 1}\n\n[1]\n', "line 3: expected an object"),
        (b'{"n": 1}\n{"n": "x"}\n', "line 2: the field 'n' is not a number"),
        (b'{"n": 1}\n{"m": 1}\n', "line 2: unexpected content"),
        (b'{"n": 1}\n\xff\xfe\n', "cannot be read past line"),
        (b"[" * 100_000 + b"\n", "line 1: not JSON"),
    ]:
        path.write_bytes(content)
        with pytest.raises(UserError) as e:
            load(check=check)
        assert expected in one_line_error(e) and str(path) in str(e.value)
        assert not isinstance(e.value, MissingDataError)  # damaged data is never left out silently
    path.unlink()

    path = place / "test.jsonl.gz"
    whole = gzip.compress(b'{"n": 1}\n' * 5000)
    for content in (whole[: len(whole) // 2], b"no gzip at all", whole[:20] + b"\x00" * 20 + whole[40:]):
        path.write_bytes(content)
        with pytest.raises(UserError) as e:
            load()
        assert str(path) in one_line_error(e)
    path.unlink()

    (place / "test.parquet").write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(UserError, match="not a readable parquet"):
        load()


def test_the_hub_is_asked_for_one_revision(monkeypatch):
    import datasets

    asked = {}

    def load_dataset(name, config, split, revision):
        asked[name] = revision
        return datasets.Dataset.from_list([{"x": 1}])

    monkeypatch.setattr(rows, "_hub_problem", lambda: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in rows.REVISIONS:
        assert list(load_rows(name, None, "test")) == [{"x": 1}]
    assert asked == rows.REVISIONS and all(re.fullmatch("[0-9a-f]{40}", revision) for revision in asked.values())
    used = "\n".join(
        p.read_text() for p in [Path(chat_data.__file__), *(Path(rows.__file__).parents[2] / "eval").glob("*.py")]
    )
    assert {name for name in re.findall(r'"([\w-]+/[\w-]+)"', used)} == set(rows.REVISIONS)


# ----------------------------------------------------------------------------------------------------------------------
# Conversations

GOOD = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
BAD = [  # what else is wrong is test_tokenizer's to say
    ([], "at least one message"),
    ("text", "at least one message"),
    (GOOD[:1], "no message from the assistant"),
    ([GOOD[0], {"role": "assistant", "content": 3}], "not int"),
]


def test_custom_json(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + json.dumps({"messages": GOOD * 2}) + "\n")
    task = CustomJSON(path)
    assert list(task) == [{"messages": GOOD}, {"messages": GOOD * 2}] and len(CustomJSON(LOCAL_IDENTITY)) >= 30
    for bad, expected in BAD:
        path.write_text(json.dumps(GOOD) + "\n" + json.dumps(bad) + "\n")
        with pytest.raises(UserError) as e:
            CustomJSON(path)
        assert expected in one_line_error(e) and f"{path}, line 2" in str(e.value)
    path.write_text("{oops\n")
    with pytest.raises(UserError, match="line 1: not JSON"):
        CustomJSON(path)
    path.write_text("\n")
    with pytest.raises(UserError, match="no conversation"):
        CustomJSON(path)
    with pytest.raises(MissingDataError, match="is not there"):
        CustomJSON(tmp_path / "absent.jsonl")


def test_smoltalk_from_a_folder(tmp_path):
    system = {"role": "system", "content": "Be brief."}
    write_jsonl(tmp_path / "train.jsonl.gz", [{"messages": GOOD}, {"messages": [system, *GOOD]}], gz=True)
    task = SmolTalk("train", sft_dir=tmp_path)
    assert list(task) == [{"messages": GOOD}, {"messages": [system, *GOOD]}]
    with pytest.raises(MissingDataError) as e:
        SmolTalk("test", sft_dir=tmp_path)
    assert "--sft-dir" in one_line_error(e)
    write_jsonl(tmp_path / "test.jsonl", [{"messages": GOOD}, {"messages": [system]}])
    with pytest.raises(UserError, match="line 2: a system message must be followed by a user message"):
        SmolTalk("test", sft_dir=tmp_path)
    with pytest.raises(ValueError, match="train and test"):
        SmolTalk("validation", sft_dir=tmp_path)


def test_identity_and_words_without_a_network(base_dir, monkeypatch):
    def no_network(*args, **kwargs):
        raise UserError("download of https://... failed (test)")

    monkeypatch.setattr(chat_data, "download_file_with_lock", no_network)
    with pytest.raises(MissingDataError, match="put a JSONL file"):
        chat_data.identity_conversations()
    with pytest.raises(MissingDataError, match="--eval-dir"):
        chat_data.load_words()


# ----------------------------------------------------------------------------------------------------------------------
# Spelling


def test_words_of_a_folder(tmp_path):
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "words_alpha.txt").write_bytes(b"a\r\naa\r\nzebra\r\n")
    assert chat_data.load_words(tmp_path) == ["a", "aa", "zebra"]
    with pytest.raises(MissingDataError, match="words_alpha.txt is missing"):
        chat_data.load_words(tmp_path / "words")


def test_simple_spelling():
    task = SimpleSpelling(size=50, split="train", words=LOCAL_WORDS)
    for conversation in task:
        question, answer = (m["content"] for m in conversation["messages"])
        word = question.removeprefix("Spell the word: ")
        assert word in LOCAL_WORDS and answer == f"{word}:{','.join(word)}"
    assert list(task) == list(SimpleSpelling(size=50, split="train", words=LOCAL_WORDS))
    assert list(task) != list(SimpleSpelling(size=50, split="test", words=LOCAL_WORDS))
    with pytest.raises(ValueError, match="splits train and test"):
        SimpleSpelling(split="validation", words=LOCAL_WORDS)


def test_counting_conversation_to_the_letter():
    """The conversation that nanochat draws for seed 0 from the words below."""
    conversation = counting_conversation(["strawberry", "banana"], random.Random(0))
    question, answer = (m["content"] for m in conversation["messages"])
    assert question == "count the number of \"a\" in 'banana'?"
    assert [p["type"] for p in answer] == ["text", "text", "python", "python_output", "text"]
    assert "".join(p["text"] for p in answer) == (
        "We are asked to find the number 'a' in the word 'banana'. Let me try a manual approach first.\n\n"
        "First spell the word out:\nbanana:b,a,n,a,n,a\n\nThen count the occurrences of 'a':\n"
        "1:b\n2:a hit! count=1\n3:n\n4:a hit! count=2\n5:n\n6:a hit! count=3\n\nThis gives us 3."
        "\n\nLet me double check this using Python:\n\n'banana'.count('a')3"
        "\n\nPython gives us 3.\n\nMy final answer is:\n\n#### 3"
    )
