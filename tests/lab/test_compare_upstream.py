"""The table of compare_upstream.py, on made-up logs."""

import pytest


@pytest.fixture
def compare(fork_server):
    """compare(*arguments): the end of lab.measure.compare_upstream, and what it said."""

    def run(*arguments: object):
        return fork_server.run("lab.measure.compare_upstream", list(map(str, arguments)), as_main=True)

    return run


LOG = "step {0:05d}/00003 (0%) | loss: {1:.6f} | lrm: 1.00 | dt: {2:.2f}ms | tok/sec: 1\n"


def test_logs_side_by_side(compare, tmp_path):
    for name, losses in (("old_bf16", (3.0, 2.0, 1.5)), ("new_clover", (3.0, 2.25)), ("empty", ())):
        text = "".join(LOG.format(i, loss, 10.0 + i) for i, loss in enumerate(losses))
        (tmp_path / f"{name}.log").write_text("compiling\n" + text)
    logs = [tmp_path / f"{name}.log" for name in ("old_bf16", "new_clover", "empty")]
    done = compare("table", *logs, "--every", 1)
    assert done.status == 0, done.log
    note, header, *rows = [line.split() for line in done.log.splitlines()]
    assert note == "no training step in empty".split() and header == ["old_bf16", "new_clover"]
    assert rows[1] == ["step", "1", "2.000000", "2.250000"] and rows[2] == ["step", "2", "1.500000", "-"]
    assert rows[-1] == ["ms", "(median)", "11.0", "11.0"]
    done = compare("table", tmp_path / "nothing.log")
    assert done.status == 1 and done.log.startswith("error: there is no ")
