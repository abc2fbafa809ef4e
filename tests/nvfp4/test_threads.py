"""One layer, several threads: each gets the outputs of its own inputs, to the bit."""

import threading

import pytest
import torch

import nanochat_fp4 as nf


@pytest.mark.parametrize("method", ["nvidia", "clover"])
def test_threads_get_their_own_outputs(method):
    torch.manual_seed(0)
    layer = nf.QuantLinear(128, 128, method=method)
    inputs = [[torch.randn(4, 128) for _ in range(8)] for _ in range(4)]
    with torch.no_grad():
        expected = [[layer(x) for x in mine] for mine in inputs]
    wrong, together = [0] * 4, threading.Barrier(4)

    def run(thread: int) -> None:
        together.wait()
        with torch.no_grad():
            for i in range(50):
                wrong[thread] += not torch.equal(layer(inputs[thread][i % 8]), expected[thread][i % 8])

    workers = [threading.Thread(target=run, args=(t,)) for t in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == [0] * 4
