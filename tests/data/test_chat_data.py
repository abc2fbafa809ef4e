"""Tasks, mixtures, rows from folders, and what training conversations look like."""

import gzip
import json
import random
from pathlib import Path

import pytest

from nanochat_fp4.data import chat_data
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
from nanochat_fp4.data.sources import MissingDataError, look_for


class Numbers(Task):
    """Conversation i of n is the number first + i."""

    def __init__(self, first, n, **kwargs):
        super().__init__(**kwargs)
        self.first, self.n = first, n

    def num_examples(self):
        return self.n

    def get_example(self, index):
        return self.first + index


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
# Conversations


def write_jsonl(path: Path, items, gz=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(item) + "\n" for item in items)
    with gzip.open(path, "wt") if gz else open(path, "w") as f:
        f.write(text)


GOOD = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def test_custom_json(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + json.dumps({"messages": GOOD * 2}) + "\n")
    task = CustomJSON(path)
    assert list(task) == [{"messages": GOOD}, {"messages": GOOD * 2}] and len(CustomJSON(LOCAL_IDENTITY)) >= 30


def test_smoltalk_from_a_folder(tmp_path):
    system = {"role": "system", "content": "Be brief."}
    write_jsonl(tmp_path / "train.jsonl.gz", [{"messages": GOOD}, {"messages": [system, *GOOD]}], gz=True)
    task = SmolTalk("train", sft_dir=tmp_path)
    assert list(task) == [{"messages": GOOD}, {"messages": [system, *GOOD]}]
    with pytest.raises(MissingDataError, match="validation"):
        SmolTalk("validation", sft_dir=tmp_path)


def test_identity_and_words_without_a_network(base_dir, monkeypatch):
    for name in ("IDENTITY_URL", "WORD_LIST_URL"):
        monkeypatch.setattr(chat_data, name, "http://127.0.0.1:9/x")
    for load in (chat_data.identity_conversations, chat_data.load_words):
        with pytest.raises(MissingDataError, match="127.0.0.1.*put it at .*base"):
            load()
    missing = look_for([chat_data.identity(), chat_data.words_source("words", SimpleSpelling, None)])
    assert [source.name for source in missing] == ["identity conversations", "words"]


# ----------------------------------------------------------------------------------------------------------------------
# Spelling


def test_words_of_a_folder(tmp_path):
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "words_alpha.txt").write_bytes(b"a\r\naa\r\nzebra\r\n")
    assert chat_data.load_words(tmp_path) == ["a", "aa", "zebra"]


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
