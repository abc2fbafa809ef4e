"""Best-fit packing, micro-batches that do not depend on how they are spread over ranks, and resume that is exact."""

import base64
import contextlib
import functools
import itertools
import json
import math
import random
import threading
import time

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from _assertions import wait_until
from _samples import BOS, BYTE_TOKENIZER, make_shards

from nanochat_fp4.cli import UserError
from nanochat_fp4.data.dataloader import LANES, Documents, Packer, evaluation_rows, join_positions, packed_rows
from nanochat_fp4.data.dataset import Shard, Stored, digest_of, open_text


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_shards(folder)
    return folder


@contextlib.contextmanager
def as_rank(rank, world_size):
    names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    with pytest.MonkeyPatch.context() as m:
        for name, value in names.items():
            m.setenv(name, value)
        yield


def source_of(data, T=64, split="train", column="", **kwargs):
    """A list in the place of the folder has parts that are open."""
    parts = data if isinstance(data, list) else open_text(split, data, column)
    refill = kwargs.pop("refill", 16)
    source = Documents(kwargs.pop("tokenizer", BYTE_TOKENIZER), T, parts, **{"buffer": 100} | kwargs)
    source.refill = min(refill, source.refill)
    return source


def loader(data, B=4, ranks=(0, 1), micro_batches=0, position=None, num_rows=0, device="cpu", **kwargs):
    """kwargs: of source_of and Documents."""
    with as_rank(*ranks):
        return packed_rows(source_of(data, **kwargs), B, device, micro_batches, position, num_rows)


def documents_of(data, **kwargs) -> list[str]:
    """An epoch of the training split, in the order in which it is read."""
    source = source_of(data, **kwargs)
    groups = range(source.groups_of_an_epoch)
    return [bytes(tokens[1:].tolist()).decode() for g in groups for tokens in source.tokens(g, 0, 10**6)]


def rows_of(it, num_batches):
    """(num_batches * B, T + 1): inputs with the last target appended."""
    return torch.cat([torch.cat([x, y[:, -1:]], 1) for x, y, _ in itertools.islice(it, num_batches)])


def position_after(it, num_batches):
    """Through JSON, as a checkpoint has it."""
    text = json.dumps(next(itertools.islice(it, num_batches - 1, None))[2])
    assert len(text) < 40_000
    return json.loads(text)


def micro_batches(data, world_size, steps, M=24, position=None, **kwargs):
    """(the micro-batches of so many steps in their order, the joined position after them), from all processes."""
    made, positions = [], []
    for rank in range(world_size):
        how = {"ranks": (rank, world_size), "micro_batches": M, "position": position} | kwargs
        made.append(list(itertools.islice(loader(data, **how), steps * M // world_size)))
        positions.append(json.loads(json.dumps(made[-1][-1][2])))
    of_step = M // world_size
    batches = [made[m % world_size][s * of_step + m // world_size] for s in range(steps) for m in range(M)]
    random.Random(0).shuffle(positions)
    return [torch.cat([x, y[:, -1:]], 1) for x, y, _ in batches], join_positions(positions)


def same(a, b) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


# ----------------------------------------------------------------------------------------------------------------------
# Packing


def test_inputs_and_targets(data):
    x, y, position = next(loader(data))
    assert x.shape == y.shape == (4, 64) and x.dtype == y.dtype == torch.int64
    assert x.is_contiguous() and y.is_contiguous()
    assert torch.equal(x[:, 1:], y[:, :-1]) and (x[:, 0] == BOS).all() and position["epoch"] == 1


def test_a_tokenizer_is_never_asked_for_an_empty_list(tmp_path, monkeypatch):
    make_shards(tmp_path)
    asked = []
    encode = BYTE_TOKENIZER.encode
    monkeypatch.setattr(BYTE_TOKENIZER, "encode", lambda texts, **how: asked.append(len(texts)) or encode(texts, **how))
    source = source_of(tmp_path)
    for _ in itertools.takewhile(lambda batch: batch[2]["epoch"] == 1, loader(tmp_path)):
        pass
    assert source.tokens(0, 10**6, 1) == [] and min(asked) > 0


def test_it_says_once_that_the_text_begins_again(tmp_path, capsys):
    """32 documents of 101 tokens, each cropped to a row of 65: an epoch has 32 rows."""
    for k in range(2):
        pq.write_table(pa.table({"text": ["x" * 100] * 32}), tmp_path / f"{k}.parquet", row_group_size=4)
    it = loader(tmp_path, buffer=8, micro_batches=1)
    positions = [position_after(it, 1) for _ in range(30)]
    (said,) = capsys.readouterr().out.splitlines()
    tokens = int(said.partition("after about ")[2].partition(" tokens")[0].replace(",", ""))
    assert tokens % (4 * 64) == 0 and abs(tokens - 32 * 64) <= 8 * 64  # documents that wait in buffers are read ahead
    for position, again in ((positions[2], 1), (positions[-1], 0)):  # a run that goes on has said it, or says it
        rows_of(loader(tmp_path, buffer=8, micro_batches=1, position=position), 20)
        assert len(capsys.readouterr().out.splitlines()) == again
    rows_of(loader(tmp_path, buffer=8), 30)  # an evaluation, which has no steps
    assert not capsys.readouterr().out


def test_a_seed_is_another_order_of_the_same_text(data):
    orders = [rows_of(loader(data, seed=seed), 30) for seed in (0, 1, 2)]
    assert torch.equal(orders[0], rows_of(loader(data), 30))
    assert not torch.equal(orders[0], orders[1]) and not torch.equal(orders[1], orders[2])
    texts = [documents_of(data, seed=seed) for seed in (0, 7)]
    assert sorted(texts[0]) == sorted(texts[1]) and texts[0] != texts[1]
    places = [int(text.partition(":")[0]) % 10 for text in texts[1]]
    assert len({tuple(places[k : k + 10]) for k in range(0, 300, 10)}) > 20  # each row group has an order of its own
    it = loader(data, seed=5)
    position = position_after(it, 7)
    assert torch.equal(rows_of(loader(data, seed=5, position=position), 20), rows_of(it, 20))
    for seed, word in ((0, "data_seed was 5"), (6, "data_seed was 5"), (-1, "--data-seed=-1")):
        with pytest.raises(UserError, match=word):
            loader(data, seed=seed, position=position)


def test_shuffled_documents_are_all_of_them_in_an_order_of_the_seed(tmp_path, base_dir, monkeypatch):
    documents = make_shards(tmp_path / "d")[:300]  # the last of four shards is validation
    orders = {seed: documents_of(tmp_path / "d", shuffle=True, seed=seed) for seed in (0, 1)}
    for order in orders.values():
        assert sorted(order) == sorted(documents)
        # Neighbours in the shards, of one row group, are apart.
        places = [documents.index(text) // 10 for text in order]
        assert sum(a == b for a, b in zip(places, places[1:])) < 30
    assert orders[0] != orders[1]
    assert len(list(base_dir.rglob("*.arrow"))) == 1  # one copy for all seeds
    rows = rows_of(loader(tmp_path / "d", shuffle=True), 20)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "another machine"))
    assert torch.equal(rows_of(loader(tmp_path / "d", shuffle=True), 20), rows)


@pytest.mark.parametrize("world_size", [1, 3])
def test_shuffled_documents_on_any_number_of_processes_and_after_a_resume(data, base_dir, world_size):
    kwargs = {"shuffle": True, "seed": 3, "M": 6}
    alone, _ = micro_batches(data, 1, 20, **kwargs)  # more than an epoch
    before, position = micro_batches(data, world_size, 12, **kwargs)
    after, _ = micro_batches(data, 2, 8, position=position, **kwargs)
    assert same(before + after, alone)
    with pytest.raises(UserError, match="shuffle_documents was True"):
        loader(data, position=position, seed=3)


def test_a_copy_for_shuffling_is_whole_and_of_this_text(tmp_path, base_dir, monkeypatch):
    make_shards(tmp_path / "d")
    with monkeypatch.context() as m:
        m.setattr(Shard, "read", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loader(tmp_path / "d", shuffle=True)
    assert not list(base_dir.rglob("*.arrow"))
    loader(tmp_path / "d", shuffle=True)
    (copy,) = base_dir.rglob("*.arrow")
    make_shards(tmp_path / "d", seed=1)
    loader(tmp_path / "d", shuffle=True)
    assert len(list(base_dir.rglob("*.arrow"))) == 2  # other text
    make_shards(tmp_path / "d")
    copy.write_bytes(copy.read_bytes()[:100])
    with pytest.raises(UserError, match="damaged .*delete"):
        loader(tmp_path / "d", shuffle=True)


def plain_best_fit(documents, num_rows, T, size, refill):
    """nanochat's algorithm by linear scans, for one stream of documents in groups of ten."""

    def batches():
        while True:
            for start in range(0, len(documents), 10):
                group = documents[start : start + 10]
                for i in range(0, len(group), refill):
                    yield group[i : i + refill]

    source, buffer = batches(), []
    for _ in range(num_rows):
        row = []
        while len(row) < T + 1:
            while len(buffer) < size:
                buffer.extend(BYTE_TOKENIZER.encode(next(source), prepend=BOS))
            room = T + 1 - len(row)
            fitting = [i for i, d in enumerate(buffer) if len(d) <= room]
            if fitting:
                best = max(fitting, key=lambda i: len(buffer[i]))  # max and min take the first of equals
            else:
                best = min(range(len(buffer)), key=lambda i: len(buffer[i]))
            row.extend(buffer.pop(best)[:room])
        yield row


@pytest.mark.parametrize("buffer, refill", [(40, 16), (1, 1), (60, 7)])
def test_a_packer_is_nanochats_best_fit(tmp_path, buffer, refill):
    documents = make_shards(tmp_path / "d", num_documents=3200, longest=100)[:2400]
    it = loader(tmp_path / "d", B=8, buffer=buffer * LANES, refill=refill)
    rows, groups = rows_of(it, 30), [documents[i : i + 10] for i in range(0, 2400, 10)]
    for lane in range(LANES):
        of_lane = [text for group in groups[lane::LANES] for text in group]
        assert rows[lane::LANES].tolist() == list(plain_best_fit(of_lane, 30, 64, buffer, refill))


def test_epochs_of_a_small_corpus(tmp_path):
    """The buffer does not read the text several times over before the first batch."""
    make_shards(tmp_path / "d", num_documents=80)
    it = loader(tmp_path / "d", buffer=1000, refill=128)
    epochs = [position["epoch"] for _, _, position in itertools.islice(it, 80)]
    assert epochs[0] == 1 and epochs[-1] >= 3 and epochs == sorted(epochs)


def test_a_step_is_packed_in_a_thread_that_ends_with_the_batches(data):
    before = set(threading.enumerate())  # Those of earlier tests may end meanwhile.
    it = loader(data)
    next(it)
    (own,) = set(threading.enumerate()) - before
    it.close()
    wait_until(lambda: not own.is_alive())


def test_the_end_of_batches_waits_for_no_thread(data, monkeypatch):
    """A collection of garbage can end them anywhere, also where a lock is held that their thread waits for."""
    go, rows, real = threading.Event(), itertools.count(), Packer.next_row

    def next_row(self):
        if next(rows) >= 4:  # of the batch that is made ahead
            go.wait(60)
        return real(self)

    monkeypatch.setattr(Packer, "next_row", next_row)
    before, it = time.monotonic(), loader(data)
    next(it)
    it.close()
    assert time.monotonic() - before < 50
    go.set()


# ----------------------------------------------------------------------------------------------------------------------
# Documents of which nothing is thrown away


def whole(texts):
    """Texts as if they were stored of own text."""
    return [Stored(datasets.Dataset.from_dict({"text": texts}), np.arange(len(texts)), "whole", True)]


class Numbers:
    """Each token of each document has its own number: the text "7:3" is the tokens 7, 8, 9."""

    def get_bos_token_id(self):
        return 10**6

    def encode(self, texts, prepend, num_threads):
        pairs = [map(int, text.split(":")) for text in texts]
        return [[prepend, *range(first, first + length)] for first, length in pairs]


@pytest.mark.parametrize("buffer", [8, 400])
def test_each_token_is_a_target_once_in_an_epoch(buffer):
    """Documents of 0 to 20 rows: what does not fit into a row goes on in the next one, behind another BOS token."""
    rng = random.Random(1)
    lengths = [rng.choice((0, 1, 3, 61, 64, 65, 200, 1300)) for _ in range(300)]
    firsts = list(itertools.accumulate(lengths, initial=0))
    texts, total = [f"{first}:{length}" for first, length in zip(firsts, lengths)], firsts[-1]
    seen, row_of, read_again = np.zeros(total, int), {}, False
    it, groups = loader(whole(texts), B=1, tokenizer=Numbers(), buffer=buffer), 300 // 4
    for row in range(4 * total // 64):
        x, y, position = next(it)
        assert x[0, 0] == 10**6
        targets = y[y < 10**6].numpy()
        read_again = read_again or any(lane["next"][0] >= groups for lane in position["lanes"].values())
        seen[targets] += 1
        row_of |= {} if read_again else {int(t): row for t in targets}
        assert read_again or seen.max() == 1
    assert row > 400 and seen.min() >= 2 and seen.max() <= 5
    for first, length in zip(firsts, lengths):
        rows = [row_of[t] for t in range(first, first + length // 64 * 64) if t in row_of]
        if buffer > LANES and length == 1300 and len(rows) == 1280:
            assert {b - a for a, b in zip(rows, rows[1:])} == {0, LANES}, "a packer has every eighth row"


def test_a_whole_epoch_loses_and_repeats_nothing():
    """The tokens in rows and in buffers are those that were read."""
    texts = [str(i) * (1 + 7 * i % 90) for i in range(200)]
    source, it = source_of(whole(texts)), loader(whole(texts))
    assert source.whole
    for rows in range(1, 30):
        _, _, position = next(it)
        lanes = position["lanes"].values()
        assert sum(lane["used"][1] for lane in lanes) == sum(lane["used"][2] for lane in lanes) == 4 * rows * 65
        for n, lane in enumerate(lanes):
            g, i = lane["next"]
            groups = [(group, i if group == g else 10**6) for group in range(n, g + 1, LANES)]
            read = sum(len(tokens) - 1 for group, count in groups for tokens in source.tokens(group, 0, count))
            waiting = sum(length - 1 for length, *_ in lane["buffer"])
            assert waiting + lane["used"][1] - lane["used"][0] == read  # each piece has one more BOS token


@pytest.mark.parametrize("old, new", [(1, 1), (1, 3), (4, 2), (3, 8)])
def test_pieces_of_documents_resume_exactly(old, new):
    texts = [f"{i}," * (1 + 13 * i % 70) for i in range(400)]
    alone, _ = micro_batches(whole(texts), 1, 6)
    before, position = micro_batches(whole(texts), old, 3)
    after, _ = micro_batches(whole(texts), new, 3, position=position)
    assert same(before + after, alone)


# ----------------------------------------------------------------------------------------------------------------------
# Ranks


@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 8, 12, 24])
def test_a_step_has_the_same_micro_batches_on_any_number_of_processes(data, world_size):
    alone, end = micro_batches(data, 1, 2)
    made, position = micro_batches(data, world_size, 2)
    assert same(made, alone) and position["lanes"] == end["lanes"] and position["row"] == end["row"] == 2 * 24 * 4


@pytest.mark.parametrize("M, B", [(1, 1), (3, 2), (8, 4), (12, 1), (20, 3)])
def test_a_step_is_the_next_rows_of_the_run(data, M, B):
    rows = torch.cat(micro_batches(data, 1, 3, M=M, B=B)[0]).view(3, M * B, -1).tolist()
    expected = rows_of(loader(data, B=1), 3 * M * B).view(3, M * B, -1).tolist()
    assert [sorted(step) for step in rows] == [sorted(step) for step in expected]


def test_a_micro_batch_has_every_stride_th_row(data):
    """The picture of the module: 12 micro-batches of 2 rows, stride gcd(12, 8) = 4."""
    rows = rows_of(loader(data, B=1), 24)
    made, _ = micro_batches(data, 1, 1, M=12, B=2)
    for m, batch in enumerate(made):
        first = m // 4 * 8 + m % 4
        assert torch.equal(batch, rows[[first, first + 4]])


@pytest.mark.parametrize("B", [1, 3, 8])
def test_an_evaluation_has_the_same_rows_on_any_number_of_processes(data, B):
    """50 rows: where processes and batch do not divide them, the rest of the last batches does not count."""
    found = []
    for world_size in (1, 2, 3, 4):
        num_rows, batches = evaluation_rows(50 * 64 + 63, B, 64, world_size)
        assert num_rows == 50
        rows = []
        for rank in range(world_size):
            it = loader(data, B=B, split="val", num_rows=num_rows, ranks=(rank, world_size))
            for x, y, _ in itertools.islice(it, batches):
                assert x.min() >= 0  # a row that does not count is a row of tokens as well
                rows += [[*r, t[-1]] for r, t in zip(x.tolist(), y.tolist()) if t[0] >= 0]
        assert len(rows) == 50
        found.append(sorted(rows))
    assert all(rows == found[0] for rows in found)
    assert evaluation_rows(1, 8, 64, 3) == (1, 1)


@pytest.mark.parametrize("num_documents, row_group_size", [(4, 1), (8, 100)])
def test_fewer_row_groups_than_ranks(tmp_path, num_documents, row_group_size):
    make_shards(tmp_path / "d", num_documents=num_documents, num_shards=2, row_group_size=row_group_size)
    for split in ("train", "val"):
        for rank in range(8):
            rows = rows_of(loader(tmp_path / "d", split=split, ranks=(rank, 8)), 5)
            assert (rows[:, 0] == BOS).all()


@pytest.mark.parametrize("num_shards, row_group_size", [(2, 400), (2, 150), (3, 400)])
@pytest.mark.parametrize("seed", [0, 7])
def test_few_row_groups_give_each_packer_text_of_its_own(tmp_path, monkeypatch, num_shards, row_group_size, seed):
    """A file of pandas is one row group, and eight packers that read it alike would pack one row eight times. Two
    shards of one row group each are two texts."""
    documents = make_shards(tmp_path / "d", num_documents=800, num_shards=num_shards, row_group_size=row_group_size)
    made = functools.partial(loader, tmp_path / "d", B=8, buffer=8, seed=seed)
    texts = documents_of(tmp_path / "d", seed=seed)
    assert sorted(texts) == sorted(documents[: (num_shards - 1) * math.ceil(800 / num_shards)])
    read = []
    with monkeypatch.context() as m:
        real = Shard.read
        m.setattr(Shard, "read", lambda shard, index: read.append((shard.name, index)) or real(shard, index))
        next(made())
    if not seed:
        assert len(read) == len(set(read)), "once, and not once for each packer's piece"
    rows = rows_of(made(), 20)
    assert len({tuple(row) for row in rows.tolist()}) == 160
    assert torch.equal(rows_of(made(position=position_after(made(), 10)), 10), rows[80:])


def test_empty_row_groups_and_shards_do_not_hang(tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    for name in ("a", "b"):
        with pq.ParquetWriter(folder / f"{name}.parquet", pa.schema([("text", pa.string())])) as writer:
            for i in range(8):  # packer 3 would get nothing but empty ones
                writer.write_table(pa.table({"text": pa.array([] if i in (0, 3, 7) else ["text", None], pa.string())}))
    assert rows_of(loader(folder), 20).shape == (80, 65)
    for name in ("a", "b"):
        pq.write_table(pa.table({"text": pa.array([""] * 8, pa.string())}), folder / f"{name}.parquet")
    assert (rows_of(loader(folder), 2) == BOS).all()


# ----------------------------------------------------------------------------------------------------------------------
# Resume


@pytest.mark.parametrize("seed", range(5))
def test_resume_is_exact_at_random_points(data, seed):
    rng = random.Random(seed)
    old, new = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3, 6])
    kwargs = {"T": rng.choice([16, 64]), "buffer": rng.choice([8, 100, 400]), "M": 12 * rng.choice([1, 2])}
    steps, kwargs["B"] = rng.randint(1, 9), rng.randint(1, 5)
    alone, _ = micro_batches(data, 1, steps + 3, **kwargs)
    before, position = micro_batches(data, old, steps, **kwargs)
    after, end = micro_batches(data, new, 3, position=position, **kwargs)
    assert same(before + after, alone)
    # A position says the same after a resume.
    assert end["lanes"] == micro_batches(data, 1, steps + 3, **kwargs)[1]["lanes"]


@pytest.mark.parametrize("old, new", [(1, 2), (4, 2), (2, 8), (2, 3), (3, 2), (3, 1), (6, 4), (24, 12)])
def test_positions_of_all_ranks_resume_on_another_number_of_processes(data, old, new):
    alone, _ = micro_batches(data, 1, 2)
    before, position = micro_batches(data, old, 1)
    after, _ = micro_batches(data, new, 1, position=position)
    assert same(before + after, alone)


def test_consumed_adds_up_on_any_number_of_ranks(data):
    """What a step of all ranks has consumed is the same before and after a resume with more or fewer of them."""

    def consumed(world_size, steps, position=None):
        total, positions = 0.0, []
        for rank in range(world_size):
            it = loader(data, ranks=(rank, world_size), micro_batches=24, position=position)
            positions.append(position_after(it, steps * 24 // world_size))
            total += positions[-1]["consumed"]
        return total, join_positions(positions)

    alone, _ = consumed(1, 2)
    _, position = consumed(2, 1)
    assert alone > 100 and alone == int(alone)
    for world_size in (1, 2, 3, 8):
        assert consumed(world_size, 2)[0] == pytest.approx(alone)
        assert consumed(world_size, 1, position)[0] == pytest.approx(alone)


def test_positions_that_do_not_belong_together(data):
    a, b = (loader(data, ranks=(r, 2)) for r in range(2))
    first = position_after(a, 1)
    with pytest.raises(UserError, match="together"):
        join_positions([first, first])
    with pytest.raises(UserError, match="together"):
        join_positions([position_after(a, 1), position_after(b, 1)])


def test_a_position_that_does_not_fit(data, tmp_path):
    position = position_after(loader(data, ranks=(0, 2)), 1)
    make_shards(tmp_path / "other", num_documents=500)
    for kwargs, text in [
        ({"T": 32}, "T was 64"),
        ({"split": "val"}, "documents was"),
        ({"data": tmp_path / "other"}, "documents was"),
        ({"buffer": 16}, "buffer was"),
    ]:
        with pytest.raises(UserError, match=text) as e:
            loader(**({"data": data, "position": position, "ranks": (0, 2)} | kwargs))
        assert "\n" not in str(e.value)


@pytest.mark.parametrize("old", [{"pq_idx": 1, "rg_idx": 2, "epoch": 1}, {"version": 1}])
def test_a_position_of_an_older_version_is_refused_in_one_line(data, old):
    """nanochat's, and that of a run in flight."""
    position = position_after(loader(data), 1) | old if "version" in old else old
    with pytest.raises(UserError, match="version") as e:
        loader(data, position=position)
    assert "\n" not in str(e.value)


def test_a_resume_reads_the_same_column(tmp_path):
    for k in range(2):
        pq.write_table(pa.table({"text": ["a" * 50] * 99, "other": ["b" * 50] * 99}), tmp_path / f"{k}.parquet")
    position = position_after(loader(tmp_path, column="other"), 1)
    next(loader(tmp_path, column="other", position=position))
    with pytest.raises(UserError, match="column was other"):
        loader(tmp_path, position=position)


def test_a_shard_whose_text_was_replaced_is_named(tmp_path):
    """The same names, rows and row groups; and the file that says the same again under another time is the same."""
    folder = tmp_path / "d"
    make_shards(folder)
    it = loader(folder)
    position, expected = position_after(it, 3), rows_of(it, 5)
    path = sorted(folder.iterdir())[1]
    whole = path.read_bytes()
    path.write_bytes(whole)
    assert torch.equal(rows_of(loader(folder, position=position), 5), expected)
    texts = pq.read_table(path).column("text").to_pylist()
    groups = pq.ParquetFile(path).metadata.row_group(0).num_rows
    for change in (str.upper, lambda text: text[:-1] + "?"):
        table = pa.table({"text": pa.array([change(text) for text in texts], pa.string())})
        pq.write_table(table, path, row_group_size=groups)
        with pytest.raises(UserError, match=f"the text of {path.name} was"):
            loader(folder, position=position)


def test_the_digest_of_a_large_file(tmp_path):
    """Beyond 1 MB the footer and some blocks are looked at; other text in one row group of twelve changes them."""
    path = tmp_path / "large.parquet"

    def write(other: int | None) -> str:
        texts = []
        for group in range(12):
            rng = random.Random(group + 100 * (group == other))
            texts += [base64.b64encode(rng.randbytes(150)).decode() for _ in range(1000)]
        pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=1000, compression="zstd")
        assert path.stat().st_size > 1 << 20
        return digest_of(path)

    assert write(None) == write(None)
    assert len({write(other) for other in (None, 0, 5, 11)}) == 4
    (tmp_path / "a.arrow").write_bytes(bytes(3 << 20))
    assert len(digest_of(tmp_path / "a.arrow")) == 16


# ----------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize("kwargs", [{"B": 0}, {"T": 0}, {"micro_batches": 3, "ranks": (0, 2)}], ids=str)
def test_bad_sizes(data, kwargs):
    with pytest.raises(ValueError, match="cannot be dealt"):  # at the call, not at the first batch
        loader(data, **kwargs)
    with pytest.raises(ValueError, match="from row 3 on"):
        loader(data, micro_batches=8, position=position_after(loader(data, micro_batches=8), 8) | {"row": 3})
    with pytest.raises(ValueError, match="split"):
        open_text("test", data)


@pytest.mark.gpu
def test_batches_on_a_gpu(data):
    x, y, _ = next(loader(data, device="cuda"))
    x2, y2, _ = next(loader(data))
    assert x.device.type == "cuda" and torch.equal(x.cpu(), x2) and torch.equal(y.cpu(), y2)
