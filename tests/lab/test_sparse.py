"""The bias of averaged MS-EDEN draws, where its size is known."""

import torch

from lab.study.sparse import averages


def test_one_rotation_leaves_a_bias_where_a_group_has_one_number():
    """Of (1, 0.1, 0, ...) no draw has anything of the second number: bias^2 is its square."""
    groups = torch.zeros(2, 128)
    groups[:, 0], groups[:, 1] = 1.0, 0.1
    found = averages(groups, [1, 400])
    assert 0.009 < found["bias"] * found["error"] < 0.011
    assert found["errors"][400] > 0.009
