"""
Text, rows and conversations of the user that are refused: (what reads them, the files, a word of the message). Each is
one line, names the file, and leaves nothing half made.
"""

import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from _samples import BENCHMARK_ROWS

from eval.arc import ARC
from eval.gsm8k import GSM8K
from eval.humaneval import HumanEval
from eval.mmlu import MMLU
from nanochat_fp4.cli import UserError
from nanochat_fp4.data.chat_data import CustomJSON, SmolTalk, load_words
from nanochat_fp4.data.dataset import ensure_data, look_into, open_text, survey
from nanochat_fp4.data.sources import MissingDataError, load_rows


def lines(*values) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def shard(**columns) -> bytes:
    table = pa.table(columns) if columns else pa.table([["a"], ["b"]], names=["text", "text"])
    pq.write_table(table, out := io.BytesIO())
    return out.getvalue()


def number(row: dict) -> str | None:
    return None if isinstance(row["n"], int) else "the field 'n' is not a number"


WHOLE, ZIPPED = shard(text=["a"] * 9), gzip.compress(lines({"n": 1, "text": "a"}) * 5000, mtime=0)
GOOD = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SYSTEM = {"role": "system", "content": "Be brief."}
READERS = {
    "text": lambda folder: ensure_data(str(folder)),
    "column": lambda folder: ensure_data(str(folder), column="body"),
    "shards": lambda folder: [s.read(0) for s in open_text("train", folder)],
    "rows": lambda folder: load_rows("o/s", "m", "test", folder, number),
    "conversations": lambda folder: CustomJSON(folder / "c.jsonl"),
    "SmolTalk": lambda folder: SmolTalk("test", sft_dir=folder),
    "words": load_words,
    "ARC": lambda folder: ARC("ARC-Easy", "test", eval_dir=folder),
    "MMLU": lambda folder: MMLU("all", "test", eval_dir=folder),
    "GSM8K": lambda folder: GSM8K("main", "test", eval_dir=folder),
    "HumanEval": lambda folder: HumanEval(eval_dir=folder),
}
TEXT = [  # what else is wrong is test_text's to say
    ({}, "no text"),
    ({"notes.docx": b"x"}, "no text.*notes.docx"),
    ({"README.md": b"x", "test.txt": b"y"}, "no text.*README.md, test.txt"),
    ({"a.txt": b"short"}, "too little text"),
    *(({"a.txt": blanks}, "no text.*empty .a.txt") for blanks in (b"", b" \n", b"\n" * 99_999)),
    *(({name: b""}, f"no text.*{name}") for name in ("a.jsonl", "a.csv", "a.json", "a.txt.gz")),
    ({"a.csv": b"id,text\n"}, "no text.*a.csv"),
    ({"a.json": b"[]"}, "no text.*a.json"),
    ({"a.jsonl": lines({"text": ""}, {"text": None}, {"text": " "})}, "no text.*a.jsonl"),
    ({"a.txt.gz": gzip.compress(b"")}, "no text.*a.txt.gz"),
    ({"a.parquet": shard(text=pa.array([], "string"))}, "no text.*a.parquet"),
    ({"a.parquet": shard(text=pa.array([], "string")), "b.parquet": WHOLE}, "no rows"),
    ({"a.txt": b"some text " * 999, "valid.csv": b"text\n"}, "too little text.*valid.csv"),
    ({"a.jsonl": lines({"text": "a"}, {"texts": "b"})}, "a.jsonl, line 2: .*--text-column"),
    ({"a.csv": b"id,body,to\n1,a longer text,b\n"}, "'text' .*id, body, to.*TEXT_COLUMN=body"),
    ({"a.csv": b"my id;my body\n1;a longer text, of words\n"}, "'text' .*TEXT_COLUMN='my body' "),
    ({"a.jsonl": lines({"id; ls": "a longer text", "n": 5})}, "TEXT_COLUMN='id; ls' "),
    ({"a.parquet": shard(n=[1], body=["a text"])}, "with texts: body.*TEXT_COLUMN=body"),
    # To name the column would only move the fault to the other file, whichever of the two is read first.
    *(
        ({name: lines({"text": "a"}), "b.csv": b"Id;Body\n1;a text\n"}, f"b.csv, line 2: .*{remedy}")
        for remedy in ("rename this column to 'text', or name it, TEXT_COLUMN=Body .* rename the others",)
        for name in ("a.jsonl", "c.jsonl")
    ),
    ({"a.txt": b"a text", "b.csv": b"Id;Body\n1;a text\n"}, "if not, name it, TEXT_COLUMN=Body [^;]*$"),
    # Without a header the first line is text, of which the beginning is enough.
    ({"a.csv": b'7,"It was a night. And "\n' * 9}, "the first line is text, add a header above it .text, .*as .txt; "),
    (
        {"a.csv": b"It was a dark and stormy night in the year 7\n" * 9},
        "texts: It .* in the ye[.]{3}.; if .*LUMN=NAME ",
    ),
    ({"a.csv": b"id,text\n1,It was a night, and dark\n"}, "line 2 .*quotes, or save them as .txt"),
    ({"a.jsonl": lines({"text": "a"}) + b"not json\n"}, "a.jsonl .*past line 1"),
    ({"a.parquet": b"", "b.parquet": WHOLE}, "a.parquet .*delete it"),
    ({"a.parquet": b"this is no parquet file", "b.parquet": WHOLE}, "a.parquet .*readable"),
    ({"a.parquet": WHOLE, "b.parquet": WHOLE[:-9]}, "b.parquet .*readable"),
    ({"a.parquet": shard(content=["a"]), "b.parquet": WHOLE}, "named text .*content.*-column"),
    ({"a.parquet": shard(text=[1]), "b.parquet": WHOLE}, "int64"),
    ({"a.parquet": shard(text=[["a"]]), "b.parquet": WHOLE}, "list.*"),
    ({"a.parquet": shard(), "b.parquet": WHOLE}, "string, string"),
    *(({"a.parquet": bad}, "a.parquet") for bad in (b"", WHOLE[:-9], shard(text=[1] * 30), shard(content=["a"]))),
]
ROWS = [
    (b"", "has no rows"),
    (b'{"n": 1}\n{"n": ', "past line 1"),
    (b'{"n": 1}\n\n[1]\n', "line 3"),
    (lines({"n": 1}, {"n": "x"}), "line 2: .*'n'"),
    (lines({"n": 1}, {"m": 1}), "line 2: unexpected content"),
    (b'{"n": 1}\n\xff\xfe\n', "line 2, character 1: .*iconv"),
    (b'{"n": 1}\n{"n": "caf\xe9"}\n', "line 2, character 11: .*iconv"),
    (b"\xff\xfe{\x00}\x00", "UTF-16"),
    (b"[" * 100_000 + b"\n", "past its beginning"),
]
CONVERSATIONS = [  # what else is wrong is test_tokenizer's to say
    (lines(GOOD, []), "line 2: .*at least one message"),
    (lines(GOOD, "text"), "line 2: .*at least one message"),
    (lines(GOOD, GOOD[:1]), "line 2: .*no message from the assistant"),
    (lines(GOOD, [GOOD[0], {"role": "assistant", "content": 3}]), "line 2: .*string"),
    (b"{oops\n", "past its beginning"),
    (b"\n", "holds no conversation"),
]
FIELDS = [  # of a benchmark's row: what is changed, ... for missing
    ("ARC", {"question": ...}, "'question' is missing"),
    ("ARC", {"answerKey": "Z"}, "'Z' is none of the labels"),
    ("ARC", {"choices": ["a"]}, "'choices' is list, expected dict"),
    ("ARC", {"choices": {"text": []}}, "'label' is missing"),
    ("MMLU", {"answer": "B"}, "'answer' is str, expected int"),
    ("MMLU", {"answer": 4}, "expected 0 to 3"),
    ("MMLU", {"choices": ["1"]}, "1 entries, expected 4"),
    ("MMLU", {"subject": ...}, "'subject' is missing"),
    ("GSM8K", {"answer": "no number"}, "'#### <number>'"),
    ("GSM8K", {"question": ...}, "'question' is missing"),
    ("HumanEval", {"test": None}, "'test' is NoneType"),
]


def benchmark(name: str, changes: dict) -> dict[str, bytes]:
    """Two rows of the benchmark, the second one changed."""
    path = next(path for path in BENCHMARK_ROWS if name.lower() in path.lower())
    row = BENCHMARK_ROWS[path]
    changed = {key: value for key, value in (row | changes).items() if value is not ...}
    return {f"{path}.jsonl": lines(row, changed)}


REFUSED = [
    *(("text", files, word) for files, word in TEXT),
    ("column", {"a.parquet": WHOLE, "b.parquet": WHOLE}, "named body .*--text-column"),
    # The footer is whole, and a page is not.
    ("shards", {"a.parquet": WHOLE[:4] + b"\xff" * 36 + WHOLE[40:], "b.parquet": WHOLE}, "row group 0"),
    *(("rows", {"o/s/m/test.jsonl": content}, word) for content, word in ROWS),
    *(("rows", {"o/s/m/test.jsonl.gz": content}, "test.jsonl.gz") for content in (ZIPPED[:99], b"no gzip at all")),
    ("rows", {"o/s/m/test.parquet": b"PAR1 nonsense PAR1"}, "cannot be read"),
    ("rows", {"o/s/m/test-00000-of-00002.parquet": WHOLE}, "1 of the parts"),
    *(("conversations", {"c.jsonl": content}, word) for content, word in CONVERSATIONS),
    ("SmolTalk", {"test.jsonl": lines({"messages": GOOD}, {"messages": [SYSTEM]})}, "line 2: a system message"),
    *((name, benchmark(name, changes), f"line 2: .*{word}") for name, changes, word in FIELDS),
]
MISSING = [  # may be left out on request, unlike what is damaged
    ("rows", {}, "test.jsonl.*--eval-dir"),
    ("conversations", {}, "is not there"),
    ("SmolTalk", {}, "test.jsonl.*--sft-dir"),
    ("words", {}, "words_alpha.txt is not there"),
    *((name, {}, "test.jsonl.*--eval-dir") for name in ("ARC", "MMLU", "GSM8K", "HumanEval")),
]


@pytest.mark.parametrize("reader, files, word", REFUSED + MISSING)
def test_refused_in_one_line(tmp_path, base_dir, reader, files, word):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=word) as e:
        READERS[reader](folder)
    text = str(e.value)
    assert "\n" not in text and len(text) < 600 and str(folder) in text
    assert isinstance(e.value, MissingDataError) == (reader != "text" and (not files or word == "has no rows"))
    assert not list(base_dir.rglob("*.arrow"))
    if reader == "text":  # and the plan refuses it, too
        with pytest.raises(UserError, match=word.partition(".*")[0]):
            look_into(survey(folder))


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    for name, word in (("file", "is a file of another kind; it must be a folder .*txt"), ("nowhere", "is not there")):
        with pytest.raises(UserError, match=word):
            ensure_data(str(tmp_path / name))
        with pytest.raises(UserError, match="not a folder"):
            load_rows("o/s", "m", "test", tmp_path / name, number)
