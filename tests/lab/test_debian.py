"""Shards of Debian's packages: what is taken from an archive, what counts as new, and how large a shard is."""

import io
import random
import tarfile

import pyarrow.parquet as pq
import pytest

from lab import debian
from nanochat_fp4.errors import UserError


def lines(seed: int, count: int = 30) -> str:
    words = random.Random(seed)
    return "\n".join("".join(words.choices("abcdefgh ", k=60)) for _ in range(count))


def tar(files: dict[str, bytes], mode: str = "w") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def test_text_is_sorted_and_copies_are_left_out():
    code, page = lines(1), f"<html><style>p {{}}</style><p>{lines(2)}</p><script>var x</script></html>"
    inner = tar({"deep/b.py": lines(3).encode(), "deep/copy.c": (lines(4, 5) + "\n" + code).encode()}, "w:gz")
    files = {
        "a.c": code.encode(),
        "b.html": page.encode(),
        "logo.c": b"\xff" * 2000,
        "short.md": b"x",
        "x.tar.gz": inner,
    }
    with tarfile.open(fileobj=io.BytesIO(tar(files)), mode="r|") as archive:
        found = list(debian.documents(archive))
    assert found == [("code", code), ("prose", lines(2).strip()), ("code", lines(3)), ("code", found[3][1])]
    seen: set[bytes] = set()
    assert [debian.is_new(text, seen) for _, text in found] == [True, True, True, False]  # another header, a copy


def test_no_shard_is_larger_than_its_limit(tmp_path):
    texts = [lines(seed, 40) for seed in range(200)]
    shards = debian.Shards(tmp_path, limit=100_000)
    for text in texts:
        shards.add(text)
    shards.close_group()
    shards.write()
    files = sorted(tmp_path.iterdir())
    assert len(files) > 2 and max(f.stat().st_size for f in files) <= 100_000
    assert [text for f in files for text in pq.read_table(f)["text"].to_pylist()] == texts


def test_shards_are_not_mixed_with_older_ones(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "shard_00000.parquet").touch()
    with pytest.raises(UserError, match="has shards; choose an empty folder"):
        debian.main(["--out", str(tmp_path), "some-package"])
