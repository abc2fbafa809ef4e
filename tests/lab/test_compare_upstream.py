"""The table of compare_upstream.py, on made-up logs."""

from lab.measure import compare_upstream

LOG = "step {0:05d}/00003 (0%) | loss: {1:.6f} | lrm: 1.00 | dt: {2:.2f}ms | tok/sec: 1\n"


def test_logs_side_by_side(tmp_path):
    for name, losses in (("b_old", (3.0, 2.0, 1.5)), ("a_new", (3.0, 2.25)), ("empty", ())):
        text = "".join(LOG.format(i, loss, 10.0 + i) for i, loss in enumerate(losses))
        (tmp_path / f"{name}.log").write_text("compiling\n" + text)
    header, _, *rows = [line.split() for line in compare_upstream.side_by_side(tmp_path, 1).splitlines()]
    assert header == ["a_new", "b_old", "empty"]
    assert rows[1] == ["step", "1", "2.250000", "2.000000", "-"] and rows[2] == ["step", "2", "-", "1.500000", "-"]
    assert rows[-1] == ["ms", "(median)", "10.5", "11.0", "-"]
