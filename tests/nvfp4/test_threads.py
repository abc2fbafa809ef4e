"""One layer, several threads: each gets the outputs of its own inputs, to the bit."""

import threading

import pytest
import torch

import nanochat_fp4 as nf


def forwards(threads: int, count: int, method: str) -> int:
    """How many of `threads` x `count` outputs of one layer were not those of a thread that is alone."""
    torch.manual_seed(0)
    layer = nf.QuantLinear(128, 128, method=method)
    inputs = [[torch.randn(4, 128) for _ in range(8)] for _ in range(threads)]
    with torch.no_grad():
        expected = [[layer(x.clone()) for x in mine] for mine in inputs]
    wrong, together = [0] * threads, threading.Barrier(threads)

    def run(thread: int) -> None:
        together.wait()
        with torch.no_grad():
            for i in range(count):
                x, y = inputs[thread][i % 8], expected[thread][i % 8]
                wrong[thread] += not torch.equal(layer(x), y)

    workers = [threading.Thread(target=run, args=(t,)) for t in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(wrong)


@pytest.mark.parametrize("method", ["nvidia", "clover"])
def test_threads_get_their_own_outputs(method):
    assert forwards(4, 50, method) == 0


@pytest.mark.soak
def test_forty_thousand_outputs_of_four_threads():
    wrong = forwards(4, 10_000, "clover")
    print(f"{wrong} of 40,000 outputs were not the thread's own")
    assert wrong == 0
