"""Best-fit packing, rows that do not depend on how they are spread over ranks, and resume that is exact."""

import base64
import copy
import functools
import json
import random
import shutil
import types
from dataclasses import fields

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from _samples import BOS, BYTE_TOKENIZER, make_shards

from nanochat_fp4.cli import UserError
from nanochat_fp4.data.dataloader import (
    BestFitLoader,
    Text,
    evaluation_rows,
    tokenizing_distributed_data_loader_bos_bestfit,
    tokenizing_distributed_data_loader_with_state_bos_bestfit,
)
from nanochat_fp4.data.packing import Deal, merge_states
from nanochat_fp4.data.shards import Shard, shard_digest


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_shards(folder)
    return folder


def loader(data, B=4, T=64, split="train", buffer_size=100, **kwargs):
    """kwargs: of Text, Deal and BestFitLoader."""
    kwargs = {"tokenizer_batch_size": 16, "device": "cpu", "data_dir": data} | kwargs
    text, deal = (
        kind(**{f.name: kwargs.pop(f.name) for f in fields(kind) if f.name in kwargs}) for kind in (Text, Deal)
    )
    return BestFitLoader(BYTE_TOKENIZER, B, T, split, buffer_size=buffer_size, text=text, deal=deal, **kwargs)


def rows_of(it, num_batches):
    """(num_batches * B, T + 1): inputs with the last target appended."""
    batches = [next(it) for _ in range(num_batches)]
    return torch.cat([torch.cat([x, y[:, -1:]], 1) for x, y, _ in batches])


# ----------------------------------------------------------------------------------------------------------------------
# Packing


def test_inputs_and_targets(data):
    x, y, state = next(loader(data))
    assert x.shape == y.shape == (4, 64) and x.dtype == y.dtype == torch.int64
    assert x.is_contiguous() and y.is_contiguous()
    assert torch.equal(x[:, 1:], y[:, :-1]) and (x[:, 0] == BOS).all()
    assert state["epoch"] == 1 and {"pq_idx", "rg_idx"} <= set(state)


def test_it_says_once_that_the_text_begins_again(tmp_path, capsys):
    """32 documents of 101 tokens, each cropped to a row of 65: an epoch has 32 rows."""
    for k in range(2):
        pq.write_table(pa.table({"text": ["x" * 100] * 32}), tmp_path / f"{k}.parquet", row_group_size=4)
    it = loader(tmp_path, buffer_size=8)
    states = [json.loads(json.dumps(next(it)[2])) for _ in range(30)]
    (said,) = capsys.readouterr().out.splitlines()
    tokens = int(said.partition("after about ")[2].partition(" tokens")[0].replace(",", ""))
    assert tokens % (4 * 64) == 0 and abs(tokens - 32 * 64) <= 8 * 64  # documents that wait in buffers are read ahead
    assert "crop away 36%" in said
    for state, again in ((states[2], 1), (states[-1], 0)):  # a run that goes on has said it, or says it
        rows_of(loader(tmp_path, buffer_size=8, resume_state_dict=state), 20)
        assert len(capsys.readouterr().out.splitlines()) == again
    rows_of(loader(tmp_path, split="val", buffer_size=8), 30)
    assert not capsys.readouterr().out


def test_a_data_seed_is_another_order_of_the_same_text(data):
    orders = [rows_of(loader(data, data_seed=seed), 30) for seed in (0, 1, 2)]
    assert torch.equal(orders[0], rows_of(loader(data), 30))
    assert not torch.equal(orders[0], orders[1]) and not torch.equal(orders[1], orders[2])
    whole = [loader(data, data_seed=seed) for seed in (0, 7)]
    texts = [[sorted(it.read(g)) for g in range(len(it.documents.groups))] for it in whole]
    assert sorted(texts[0]) == sorted(texts[1]) and texts[0] != texts[1]


def test_a_data_seed_is_kept_by_a_resume(data):
    it = loader(data, data_seed=5)
    rows_of(it, 7)
    state = json.loads(json.dumps(next(it)[2]))
    assert torch.equal(rows_of(loader(data, data_seed=5, resume_state_dict=state), 20), rows_of(it, 20))
    for seed in (0, 6):
        with pytest.raises(UserError, match=f"data_seed was 5, is {seed};"):
            loader(data, data_seed=seed, resume_state_dict=state)
    with pytest.raises(UserError, match="--data-seed=-1"):
        loader(data, data_seed=-1)


def test_shuffled_documents_are_all_of_them_in_an_order_of_the_seed(tmp_path, base_dir, monkeypatch):
    documents = make_shards(tmp_path / "d")[:300]  # the last of four shards is validation
    orders = {}
    for seed in (0, 1):
        it = loader(tmp_path / "d", shuffle_documents=True, data_seed=seed)
        orders[seed] = [text for g in range(len(it.documents.groups)) for text in it.read(g)]
        assert sorted(orders[seed]) == sorted(documents)
        # Neighbours in the shards, of one row group, are apart.
        places = [documents.index(text) // 10 for text in orders[seed]]
        assert sum(a == b for a, b in zip(places, places[1:])) < 30
    assert orders[0] != orders[1]
    assert len(list((base_dir / "shuffled_data").iterdir())) == 1  # one copy for all seeds
    rows = rows_of(loader(tmp_path / "d", shuffle_documents=True), 20)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "another machine"))
    assert torch.equal(rows_of(loader(tmp_path / "d", shuffle_documents=True), 20), rows)
    val = [rows_of(loader(tmp_path / "d", split="val"), 5) for _ in range(2)]
    assert torch.equal(*val)


@pytest.mark.parametrize("world_size", [1, 3])
def test_shuffled_documents_on_any_number_of_processes_and_after_a_resume(data, base_dir, world_size):
    kwargs = {"shuffle_documents": True, "data_seed": 3}
    alone = rows_of(loader(data, B=1, **kwargs), 48 * world_size).tolist()
    assert numbered_rows(data, world_size, 2, 48 * world_size, **kwargs) == dict(enumerate(alone))
    it = loader(data, rank=0, world_size=world_size, **kwargs)
    rows_of(it, 70)  # more than an epoch
    state = through_json(next(it)[2])
    resumed = loader(data, rank=0, world_size=world_size, resume_state_dict=state, **kwargs)
    assert torch.equal(rows_of(resumed, 20), rows_of(it, 20))
    with pytest.raises(UserError, match="shuffle_documents was True"):
        loader(data, rank=0, world_size=world_size, resume_state_dict=state, data_seed=3)


def test_a_shuffled_copy_is_whole_and_of_this_text(tmp_path, base_dir, monkeypatch):
    make_shards(tmp_path / "d")
    with monkeypatch.context() as m:
        m.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
        with pytest.raises(UserError, match="shuffle-documents"):
            loader(tmp_path / "d", shuffle_documents=True)
        m.undo()
        m.setattr(Shard, "read", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loader(tmp_path / "d", shuffle_documents=True)
    assert list((base_dir / "shuffled_data").iterdir()) == []
    loader(tmp_path / "d", shuffle_documents=True)
    (copy,) = (base_dir / "shuffled_data").iterdir()
    make_shards(tmp_path / "d", seed=1)
    loader(tmp_path / "d", shuffle_documents=True)
    assert len(list((base_dir / "shuffled_data").iterdir())) == 2  # other text
    make_shards(tmp_path / "d")
    copy.write_bytes(copy.read_bytes()[:-100])
    with pytest.raises(UserError, match="delete it"):
        loader(tmp_path / "d", shuffle_documents=True)


def plain_best_fit(documents, num_rows, T, buffer_size, refill, row_group_size):
    """nanochat's algorithm by linear scans, for one stream of documents."""

    def batches():
        while True:
            for start in range(0, len(documents), row_group_size):
                group = documents[start : start + row_group_size]
                for i in range(0, len(group), refill):
                    yield group[i : i + refill]

    source, buffer = batches(), []
    for _ in range(num_rows):
        row = []
        while len(row) < T + 1:
            while len(buffer) < buffer_size:
                buffer.extend(BYTE_TOKENIZER.encode(next(source), prepend=BOS))
            room = T + 1 - len(row)
            fitting = [i for i, d in enumerate(buffer) if len(d) <= room]
            if fitting:
                best = max(fitting, key=lambda i: len(buffer[i]))  # max and min take the first of equals
            else:
                best = min(range(len(buffer)), key=lambda i: len(buffer[i]))
            row.extend(buffer.pop(best)[:room])
        yield row


@pytest.mark.parametrize("buffer_size, refill", [(40, 16), (1, 1), (60, 7)])
def test_one_lane_is_nanochats_best_fit(tmp_path, buffer_size, refill):
    documents = make_shards(tmp_path / "d", longest=100)[:300]  # the last of four shards is validation
    ours = rows_of(loader(tmp_path / "d", lanes=1, buffer_size=buffer_size, tokenizer_batch_size=refill), 60)
    assert ours.tolist() == list(plain_best_fit(documents, 240, 64, buffer_size, refill, 10))


def test_epochs_of_a_small_corpus(tmp_path):
    """The buffer does not read the text several times over before the first batch."""
    make_shards(tmp_path / "d", num_documents=80)
    it = loader(tmp_path / "d", buffer_size=1000, tokenizer_batch_size=128)
    epochs = [next(it)[2]["epoch"] for _ in range(80)]
    assert epochs[0] == 1 and epochs[-1] >= 3 and epochs == sorted(epochs)


def test_nanochats_names(data):
    kwargs = dict(device="cpu", text=Text(data))
    x, y, state = next(
        tokenizing_distributed_data_loader_with_state_bos_bestfit(BYTE_TOKENIZER, 2, 32, "train", **kwargs)
    )
    x2, y2 = next(tokenizing_distributed_data_loader_bos_bestfit(BYTE_TOKENIZER, 2, 32, split="train", **kwargs))
    assert torch.equal(x, x2) and torch.equal(y, y2)
    with pytest.raises(ValueError, match="split"):  # at the call, not at the first batch
        tokenizing_distributed_data_loader_bos_bestfit(BYTE_TOKENIZER, 2, 32, "test", **kwargs)


# ----------------------------------------------------------------------------------------------------------------------
# Ranks


def numbered_rows(data, world_size, B, count, **kwargs):
    """{number: row} of the first `count` rows of the run, from all processes; targets of -1 are left out."""
    found = {}
    for rank in range(world_size):
        it = loader(data, B=B, rank=rank, world_size=world_size, **kwargs)
        numbers, next_rows = [], it.order.next_rows
        it.order.next_rows = lambda pack: [numbers.append(k) or (k, row) for k, row in next_rows(pack)]  # noqa: B023
        for _ in range(-(-count // (B * world_size))):
            x, y, _ = next(it)
            for k, row, targets in zip(numbers[-B:], x.tolist(), y.tolist()):
                assert k not in found and min(row) >= 0  # a row that does not count is a row of tokens as well
                if targets[0] >= 0:
                    found[k] = [*row, targets[-1]]
    return found


@pytest.mark.parametrize("world_size, B", [(1, 8), (2, 4), (3, 5), (5, 1), (8, 1), (12, 2)])
def test_rows_do_not_depend_on_the_number_of_processes_and_the_batch_size(data, world_size, B):
    count = 10 * B * world_size
    alone = dict(enumerate(rows_of(loader(data, B=1), count).tolist()))
    assert numbered_rows(data, world_size, B, count) == alone


def test_a_micro_batch_has_the_same_rows_on_any_number_of_processes(data):
    def micro_batches(world_size):
        per_rank = [loader(data, B=2, rank=r, world_size=world_size, micro_batches=12) for r in range(world_size)]
        return [rows_of(per_rank[m % world_size], 1) for m in range(36)]

    alone = micro_batches(1)
    for world_size in (2, 3, 4, 6):
        assert all(torch.equal(a, b) for a, b in zip(alone, micro_batches(world_size), strict=True))
    # A step of 12 x 2 rows is the next 24 rows of the run.
    steps = torch.cat(alone).view(3, 24, -1).tolist()
    expected = rows_of(loader(data, B=1), 72).view(3, 24, -1).tolist()
    assert [sorted(step) for step in steps] == [sorted(step) for step in expected]
    with pytest.raises(ValueError, match="3 micro-batches"):
        loader(data, rank=0, world_size=2, micro_batches=3)


@pytest.mark.parametrize("B", [1, 3, 8])
def test_an_evaluation_has_the_same_rows_on_any_number_of_processes(data, B):
    """50 rows: where processes and batch do not divide them, the rest of the last batches does not count."""
    runs = []
    for world_size in (1, 2, 3, 4):
        num_rows, batches = evaluation_rows(50 * 64 + 63, B, 64, world_size)
        assert num_rows == 50
        runs.append(numbered_rows(data, world_size, B, batches * B * world_size, split="val", num_rows=num_rows))
    assert list(sorted(runs[0])) == list(range(50)) and all(run == runs[0] for run in runs)
    assert evaluation_rows(1, 8, 64, 3) == (1, 1)


def test_ranks_come_from_torchrun(data, monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert torch.equal(rows_of(loader(data), 3), rows_of(loader(data, rank=1, world_size=2), 3))


@pytest.mark.parametrize("num_documents, row_group_size", [(4, 1), (8, 100)])
def test_fewer_row_groups_than_ranks(tmp_path, num_documents, row_group_size):
    make_shards(tmp_path / "d", num_documents=num_documents, num_shards=2, row_group_size=row_group_size)
    for split in ("train", "val"):
        for rank in range(8):
            rows = rows_of(loader(tmp_path / "d", split=split, rank=rank, world_size=8), 5)
            assert (rows[:, 0] == BOS).all()


@pytest.mark.parametrize("row_group_size", [400, 150])
@pytest.mark.parametrize("data_seed", [0, 7])
def test_few_row_groups_give_each_lane_text_of_its_own(tmp_path, monkeypatch, row_group_size, data_seed):
    """A file of pandas is one row group, and eight lanes that read it alike would pack one row eight times."""
    documents = make_shards(tmp_path / "d", num_documents=800, num_shards=2, row_group_size=row_group_size)
    made = functools.partial(loader, tmp_path / "d", B=8, buffer_size=8, data_seed=data_seed)
    it = made()
    texts = [text for g in range(len(it.documents.groups)) for text in it.read(g)]
    assert sorted(texts) == sorted(documents[:400]) and texts[: len(it.read(0))] == it.read(0)
    read = []
    with monkeypatch.context() as m:
        real = Shard.read
        m.setattr(Shard, "read", lambda shard, index: read.append(index) or real(shard, index))
        next(made())
    assert data_seed or read == [0]  # once, and not once for each lane's piece
    rows = rows_of(made(), 20)
    assert len({tuple(row) for row in rows.tolist()}) == 160
    half = made()
    state = [next(half)[2] for _ in range(10)][-1]
    assert torch.equal(rows_of(made(resume_state_dict=through_json(state)), 10), rows[80:])
    with pytest.raises(UserError, match="pieces was None, is 8"):  # of a run whose rows were equal
        made(resume_state_dict={k: v for k, v in state.items() if k != "pieces"})


def test_empty_row_groups_and_shards_do_not_hang(tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    for name in ("a", "b"):
        with pq.ParquetWriter(folder / f"{name}.parquet", pa.schema([("text", pa.string())])) as writer:
            for i in range(8):  # lane 3 would get nothing but empty ones
                writer.write_table(pa.table({"text": pa.array([] if i in (0, 3, 7) else ["text", None], pa.string())}))
    assert loader(folder).documents.shards[0].rows == (0, 2, 2, 0, 2, 2, 2, 0)
    assert rows_of(loader(folder), 20).shape == (80, 65)
    for name in ("a", "b"):
        pq.write_table(pa.table({"text": pa.array([""] * 8, pa.string())}), folder / f"{name}.parquet")
    assert (rows_of(loader(folder), 2) == BOS).all()


# ----------------------------------------------------------------------------------------------------------------------
# Resume


def through_json(state):
    text = json.dumps(state)
    assert len(text) < 40_000
    return json.loads(text)


@pytest.mark.parametrize("seed", range(5))
def test_resume_is_exact_at_random_points(data, seed):
    rng = random.Random(seed)
    world_size = rng.choice([1, 2, 3, 4])
    kwargs = dict(
        rank=rng.randrange(world_size),
        world_size=world_size,
        T=rng.choice([16, 64]),
        buffer_size=rng.choice([8, 100, 400]),
        micro_batches=world_size * rng.choice([1, 1, 3, 4]),
    )
    B, before = rng.randint(1, 5), rng.choice([0, rng.randint(1, 120)])
    it = loader(data, B=B, **kwargs)
    for _ in range(before):
        next(it)
    state, expected = through_json(it.state_dict()), rows_of(it, 40)
    resumed = loader(data, B=B, resume_state_dict=state, **kwargs)
    assert torch.equal(rows_of(resumed, 40), expected)
    # A state says the same after a resume, and another device batch size goes on with the same rows.
    assert resumed.state_dict() == it.state_dict()
    if kwargs["micro_batches"] == world_size != 3:
        other = loader(data, B=1, resume_state_dict=state, **kwargs)
        assert torch.equal(rows_of(other, 40 * B), expected)


@pytest.mark.parametrize(
    "old, new, lanes", [(1, 2, 8), (4, 2, 16), (2, 8, 8), (2, 3, 3), (3, 2, 8), (3, 1, 16), (6, 4, 8)]
)
def test_merged_states_resume_with_another_number_of_processes(data, old, new, lanes):
    states = []
    for rank in range(old):
        it = loader(data, B=2, rank=rank, world_size=old, micro_batches=24, lanes=lanes)
        for _ in range(24 // old):
            state = next(it)[2]
        states.append(through_json(state))
    random.Random(0).shuffle(states)
    merged = through_json(merge_states(states))
    found = []
    for rank in range(new):
        it = loader(data, B=1, rank=rank, world_size=new, micro_batches=48, resume_state_dict=merged)
        assert it.lanes == lanes
        found += rows_of(it, 48 // new).tolist()
    expected = rows_of(loader(data, B=1, lanes=lanes), 96)[48:].tolist()
    assert sorted(found) == sorted(expected)


def test_states_that_do_not_belong_together(data):
    a, b = (loader(data, rank=r, world_size=2) for r in range(2))
    state_a, state_b = next(a)[2], next(b)[2]
    with pytest.raises(UserError, match="rank is missing"):
        merge_states([state_a, state_a])
    with pytest.raises(UserError, match="row"):
        merge_states([next(a)[2], state_b])


def test_a_state_that_does_not_fit(data, tmp_path):
    state = next(loader(data, rank=0, world_size=2))[2]
    make_shards(tmp_path / "other", num_documents=500)
    for kwargs, text in [
        (dict(T=32), "T was 64, is 32; .*--max-seq-len"),
        (dict(split="val"), "split was train, is val"),
        (dict(data_dir=tmp_path / "other"), "data was .*shards"),
        (dict(lanes=2), "lanes was 8, is 2;"),
        (dict(buffer_size=16), "lane_buffer was "),
        (dict(rank=1), "rank 1 of 2; .*processes"),
        (dict(world_size=1), "rank 0 of 1"),
    ]:
        with pytest.raises(UserError, match=text) as e:
            loader(data, resume_state_dict=copy.deepcopy(state), **(dict(rank=0, world_size=2) | kwargs))
        assert "\n" not in str(e.value)
    with pytest.raises(UserError, match="version was None"):
        loader(data, resume_state_dict={"pq_idx": 1, "rg_idx": 2, "epoch": 1})  # nanochat's


def test_a_resume_reads_the_same_column(tmp_path):
    for k in range(2):
        pq.write_table(pa.table({"text": ["a" * 50] * 99, "other": ["b" * 50] * 99}), tmp_path / f"{k}.parquet")
    state = next(loader(tmp_path, column="other"))[2]
    next(loader(tmp_path, column="other", resume_state_dict=state))
    next(loader(tmp_path, resume_state_dict={k: v for k, v in state.items() if k != "column"}))  # as states were
    with pytest.raises(UserError, match="--text-column"):
        loader(tmp_path, resume_state_dict=state)


def test_a_shard_whose_text_was_replaced_is_named(tmp_path):
    """The same names, rows and row groups; and the file that says the same again under another time is the same."""
    folder = tmp_path / "d"
    make_shards(folder)
    it = loader(folder)
    *_, state = next(it)
    expected = rows_of(it, 5)
    path = sorted(folder.iterdir())[1]
    whole = path.read_bytes()
    path.write_bytes(whole)
    assert torch.equal(rows_of(loader(folder, resume_state_dict=state), 5), expected)
    texts = pq.read_table(path).column("text").to_pylist()
    groups = pq.ParquetFile(path).metadata.row_group(0).num_rows
    for change in (str.upper, lambda text: text[:-1] + "?"):
        table = pa.table({"text": pa.array([change(text) for text in texts], pa.string())})
        pq.write_table(table, path, row_group_size=groups)
        with pytest.raises(UserError, match=f"the text of {path.name} .*old file back"):
            loader(folder, resume_state_dict=state)
    path.write_bytes(whole)
    for odd in ({"content": None}, {"content": []}, {"lane_states": {"0": []}}, {"row": "x"}, {"row": -1}):
        with pytest.raises(UserError, match="damaged|is not that of rank|the text of"):
            loader(folder, resume_state_dict=state | odd)


def test_the_digest_of_a_large_shard(tmp_path):
    """Beyond 1 MB the footer and some blocks are looked at; other text in one row group of twelve changes them."""
    path = tmp_path / "large.parquet"

    def write(other: int | None) -> str:
        texts = []
        for group in range(12):
            rng = random.Random(group + 100 * (group == other))
            texts += [base64.b64encode(rng.randbytes(150)).decode() for _ in range(1000)]
        pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=1000, compression="zstd")
        assert path.stat().st_size > 1 << 20
        return shard_digest(path)

    assert write(None) == write(None)
    assert len({write(other) for other in (None, 0, 5, 11)}) == 4


# ----------------------------------------------------------------------------------------------------------------------
# Bad input


def test_bad_sizes(data):
    for name in ("B", "T", "buffer_size", "tokenizer_batch_size", "lanes"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            loader(data, **{name: 0})


@pytest.mark.gpu
def test_batches_on_a_gpu(data):
    x, y, _ = next(loader(data, device="cuda"))
    x2, y2, _ = next(loader(data))
    assert x.device.type == "cuda" and torch.equal(x.cpu(), x2) and torch.equal(y.cpu(), y2)
