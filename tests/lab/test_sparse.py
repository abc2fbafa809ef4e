"""The bias of averaged MS-EDEN draws, where its size is known."""

import torch

from lab.study.sparse import averages


def test_one_rotation_leaves_a_bias_where_a_group_has_one_number_and_two_leave_none():
    """Of (1, 0.1, 0, ...) no draw with one rotation has anything of the second number: bias^2 is its square."""
    groups = torch.zeros(2, 128)
    groups[:, 0], groups[:, 1] = 1.0, 0.1
    one, two = (averages(groups, rotations, [1, 400]) for rotations in (1, 2))
    assert 0.009 < one["bias"] * one["error"] < 0.011
    assert abs(two["bias"]) * two["error"] < 3e-4
    assert two["errors"][400] < one["errors"][400] / 20
