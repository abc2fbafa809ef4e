"""The tokens of an epoch by hand, pieces that are the text of their documents, texts that are made again, a public text
from tiny packages, and what training and validation text have in common."""

import importlib.util
import io
import json
import re
import tarfile
from hashlib import sha256

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from _samples import BYTE_TOKENIZER

from lab import public_text, texts
from nanochat_fp4.cli import UserError

WORDS = [f"{i:04d} " + "word " * (20 + 7 * i) for i in range(40)]


@pytest.fixture
def text(tmp_path, monkeypatch):
    """Documents of 100 to 1,500 characters, a token each."""
    monkeypatch.setattr(texts, "get_tokenizer", lambda: BYTE_TOKENIZER)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    (tmp_path / "text").mkdir()
    for k in range(3):
        pq.write_table(pa.table({"text": WORDS}), tmp_path / f"text/{k}.parquet", row_group_size=5)
    return tmp_path / "text"


def test_pieces_hold_the_text_and_an_epoch_of_rows_most_of_it(text, tmp_path, capsys):
    out = tmp_path / "pieces"
    texts.main(["cut", f"--data-dir={text}", "--max-seq-len=128", f"--out={out}"])
    *said, last = capsys.readouterr().out.splitlines()
    assert sorted(p.name for p in out.glob("*")) == ["0.parquet", "1.parquet", "2.parquet"]
    pieces = pq.read_table(out / "0.parquet")["text"].to_pylist()
    assert "".join(pieces).replace(" ", "") == "".join(WORDS).replace(" ", "") and len(pieces) > 150
    assert max(map(len, pieces)) <= 128 and any(f"{len(pieces)} pieces of at most 12" in line for line in said)
    tokens, cropped = texts.epoch(BYTE_TOKENIZER, str(out), 128)
    assert f"an epoch has about {tokens:,} tokens{cropped}" == last
    whole = 2 * sum(len(p) + 1 for p in pieces)
    assert 0.75 * whole < tokens < 1.1 * whole


def test_long_documents_lose_what_does_not_fit_into_a_row(text, capsys):
    """Hardly a document fits into 64 tokens: an epoch has a row for each, whatever its length."""
    texts.main(["epoch", f"--data-dir={text}", "--max-seq-len=64"])
    said = capsys.readouterr().out.splitlines()[-1]
    tokens = int(said.partition("about ")[2].partition(" tokens")[0].replace(",", ""))
    assert abs(tokens - 80 * 64) <= 64 * 64  # to a batch of 64 rows
    assert 85 < int(said.partition("crop away ")[2].partition("%")[0]) < 95


def test_of_a_cut_that_is_interrupted_nothing_is_left(text, tmp_path, monkeypatch):
    """Some of the shards would be another text, with training text as its validation."""
    written = []

    def stop(pieces):
        written.append(pieces)
        if len(written) == 2:
            raise KeyboardInterrupt
        return b"a shard"

    monkeypatch.setattr(texts, "parquet", stop)
    with pytest.raises(KeyboardInterrupt):
        texts.main(["cut", f"--data-dir={text}", "--max-seq-len=64", f"--out={tmp_path / 'pieces'}"])
    assert not (tmp_path / "pieces").exists() and not (tmp_path / "pieces.tmp").exists()


def test_a_text_is_made_of_its_shards_alone(tmp_path, monkeypatch):
    """Another shard of the same name makes another text, which no stored run had."""
    for kind, size in (("corpus", 3), ("code", 5)):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "shard_00000.parquet").write_bytes(b"x" * size)
    names = {"a.parquet": "corpus/shard_00000.parquet", "b.parquet": "code/shard_00000.parquet"}
    key = sha256(json.dumps([["a.parquet", 3], ["b.parquet", 5]]).encode()).hexdigest()[:12]
    monkeypatch.setattr(texts, "TEXTS", {key: names})
    make = ["make", key, f"--corpus={tmp_path}/corpus", f"--code={tmp_path}/code", f"--out={tmp_path}/made"]
    texts.main(make)
    assert [p.read_bytes() for p in sorted((tmp_path / "made").iterdir())] == [b"xxx", b"xxxxx"]
    (tmp_path / "code/shard_00000.parquet").write_bytes(b"other")
    (tmp_path / "code/shard_00000.parquet").write_bytes(b"longer than before")
    with pytest.raises(UserError, match=f"the shards are those of .*, not of {key}"):
        texts.main([*make[:-1], f"--out={tmp_path}/again"])
    assert not (tmp_path / "again").exists()


def test_every_text_is_named_by_the_sizes_of_its_shards():
    """Those of lab/private_texts.txt, by which each text of docs/texts.md without pieces can be made."""
    lines = (texts.public_text.LIST.parent / "private_texts.txt").read_text().partition("# The shards")[2].splitlines()
    listed = [[int(word.replace(",", "")) for word in re.findall(r"\d[\d,]*,\d{3}", line)] for line in lines]
    prose, code, (mixed,) = filter(None, listed)
    size = {"code/val_mixed.parquet": mixed}
    for kind, sizes in (("corpus", prose), ("code", code)):
        size |= {f"{kind}/shard_0000{i}.parquet": bytes_of for i, bytes_of in enumerate(sizes)}
    assert "6c479da8d6f0" in texts.TEXTS
    for key, shards in texts.TEXTS.items():
        named = sorted((name, size[source]) for name, source in shards.items())
        assert sha256(json.dumps(named).encode()).hexdigest()[:12] == key


# ----------------------------------------------------------------------------------------------------------------------
# The public text

BACKEND = """def prepare_metadata_for_build_wheel(folder, settings=None):
    import pathlib
    info = pathlib.Path(folder, "{name}-1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0\\n")
    return info.name
"""
BUILD = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def package(folder, name: str, **members: bytes) -> str:
    """Writes a source distribution that needs nothing to be built. Returns its line of the list."""
    with tarfile.open(folder / f"{name}-1.0.tar.gz", "w:gz") as archive:
        files = {"backend.py": BACKEND.format(name=name).encode(), "pyproject.toml": BUILD.encode()} | members
        for member, content in (files | {"PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\n".encode()}).items():
            info = tarfile.TarInfo(f"{name}-1.0/{member}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    digest = sha256((folder / f"{name}-1.0.tar.gz").read_bytes()).hexdigest()
    return f"{name}==1.0 --hash=sha256:{digest}  # MIT"


@pytest.fixture
def public(tmp_path, monkeypatch):
    """Two training packages and one for validation, in a folder of their own, and their list."""
    (tmp_path / "index").mkdir()
    page = {f"{i}.rst": f"Page {i}. ".encode() + b"words " * 100 for i in range(4)}
    common = {"licence.txt": b"The licence. " * 50}
    lines = [
        package(tmp_path / "index", "first", **page, **common, **{"short.md": b"x", "data.json": b"1 " * 400}),
        package(tmp_path / "index", "second", **{"latin.txt": b"\xe9 " * 400, "0.rst": page["0.rst"]}),
        package(tmp_path / "index", "third", **{"manual.tex": b"A manual. " * 60}, **common) + "; validation",
    ]
    monkeypatch.setattr(public_text, "LIST", tmp_path / "list.txt")
    public_text.LIST.write_text("# A comment\n\n" + "\n".join(lines) + "\n")
    return tmp_path


def test_a_public_text_is_made_of_the_text_in_its_packages(public, capsys, monkeypatch):
    """Each document once, and files of both parts in the validation text alone; no data, no short files, no bytes."""
    monkeypatch.setattr(texts, "SHARD", 1300)
    texts.main(["make", "--public", f"--sdists={public}/index", f"--out={public}/text"])
    *training, validation = sorted((public / "text").iterdir())
    made = [pq.read_table(path)["text"].to_pylist() for path in training]
    assert sorted(text[:7] for of in made for text in of) == [f"Page {i}." for i in range(4)] and len(made) == 2
    assert sorted(text[:12] for text in pq.read_table(validation)["text"].to_pylist()) == [
        "A manual. A ",
        "The licence.",
    ]
    said = capsys.readouterr().out
    assert "training: 4 documents" in said and texts.data_key(str(public / "text")) in said


def test_of_a_large_package_a_sample_is_taken(public, monkeypatch):
    monkeypatch.setattr(public_text, "MOST", 700)
    pages = sorted((f"Page {i}. " + "words " * 100 for i in range(4)), key=lambda text: sha256(text.encode()).digest())
    training, validation = public_text.documents(public / "index")
    assert set(training) == {pages[0], next(page for page in pages if "0" in page)} and len(validation) == 1


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip")
def test_pip_downloads_what_is_missing_and_nothing_else(public, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(public / "index"))
    (public / "sdists").mkdir()
    for name in ("first", "second"):
        (public / f"index/{name}-1.0.tar.gz").rename(public / f"sdists/{name}-1.0.tar.gz")
    assert [len(of) for of in public_text.documents(public / "sdists")] == [4, 2]
    assert sorted(path.name for path in (public / "sdists").iterdir()) == [f"{n}-1.0.tar.gz" for n in
                                                                         ("first", "second", "third")]  # fmt: skip
    # Another archive of this name is not the one that is pinned.
    package(public / "index", "third", **{"manual.tex": b"Another manual. " * 60})
    (public / "sdists/third-1.0.tar.gz").unlink()
    with pytest.raises(UserError, match="third==1.0 .*--sdists") as e:
        public_text.documents(public / "sdists")
    assert "\n" not in str(e.value)


def test_the_list_pins_packages_and_keeps_validation_apart():
    lines = [line for line in public_text.LIST.read_text().splitlines() if line and not line.startswith("#")]
    of = public_text.sources()
    assert len(of) == len(lines) == len({source.requirement for source in of}) > 20
    assert all(source.licence and len(source.sha256) == 64 for source in of)
    assert 1 <= sum(source.validation for source in of) < 5 and of[0].validation and not of[-1].validation


# ----------------------------------------------------------------------------------------------------------------------
# What training and validation text have in common


def test_the_overlap_of_two_texts_by_hand(tmp_path, capsys):
    """Of four validation documents one is a training document, one shares 14 words and so 2 of its 8 runs of 13 words,
    one shares 12 words, and one is shorter than a run."""
    words = [f"word{i}" for i in range(60)]
    training = [" ".join(words[:20]), " ".join(words[30:50])]
    shares_14 = ["other"] * 6 + words[30:44]
    validation = [training[0], " ".join(shares_14).upper(), " ".join(words[36:48] + ["new"] * 8), "short text"]
    for name, documents in (("0", training), ("1", validation)):
        pq.write_table(pa.table({"text": documents}), tmp_path / f"{name}.parquet")
    of = texts.overlap(str(tmp_path))
    assert of == {"documents": 4, "same": 0.25, "some": 0.5, "half": 0.25, "runs": pytest.approx(10 / 24)}
    texts.main(["overlap", f"--data-dir={tmp_path}"])
    assert "25.00% of them are" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("make --public --out={text}/o", "lab.texts make needs --sdists"),
        ("overlap", "lab.texts overlap needs --data-dir"),
        ("epoch --data-dir=x", "--max-seq-len=0: expected at least 1 token"),
        ("cut --data-dir=x --max-seq-len=8", "lab.texts cut needs --out"),
        ("cut --data-dir=x --max-seq-len=8 --out={text}", "has something already; choose an empty folder"),
        ("epoch --data-dir={text}/none --max-seq-len=64", "not there"),
        (
            "make 0123 --corpus=x --code=x --out={text}/o",
            "no text is named 0123; use one of 0ca8b83e6a47, 1db8be907300",
        ),
        ("make 1db8be907300 --corpus=x --code=x --out={text}/o", "--corpus: No such file or directory: x/shard_00000"),
    ],
)
def test_wrong_arguments_are_refused(text, flags, problem):
    with pytest.raises(UserError, match=problem):
        texts.main(flags.format(text=text).split())
