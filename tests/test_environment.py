"""What a number was measured on."""

import json

import torch

from nanochat_fp4.environment import environment_info


def test_environment_info_can_be_stored():
    info = json.loads(json.dumps(environment_info()))
    assert info["torch"] == torch.__version__ and info["cpu"] and info["cpu_count"] >= 1
    assert (info["gpu"] is None) == (not torch.cuda.is_available())
    assert {"python", "triton", "driver", "commit", "gpu_count", "platform"} <= set(info)
