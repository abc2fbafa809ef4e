"""What llama.cpp says to the same prompts, by the package xllamacpp, in a process of its own.

python -m nanochat_fp4.export.llama_cpp model.gguf prompts.json answers.json
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat_fp4.errors import UserError


def answers(model: Path, prompts: list[list[int]], tokens: int, vocab_size: int) -> list[tuple[list[int], Tensor]]:
    """For each prompt (ids): the greedy tokens that follow, and the first one's log-probabilities (vocab_size,).

    Raises UserError where llama.cpp does not read the file.
    """
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder) / "prompts.json", Path(folder) / "answers.json"
        question.write_text(json.dumps({"prompts": prompts, "tokens": tokens, "vocab_size": vocab_size}))
        command = [sys.executable, "-m", __name__, str(model), str(question), str(answer)]
        child = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if not answer.exists():
            last = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
            raise UserError(f"llama.cpp does not read {model}: {last[:200]}")
        read = json.loads(answer.read_text())
    result = []
    for greedy, logprobs in read:
        row = torch.full((vocab_size,), -torch.inf)
        row[torch.tensor([int(i) for i, _ in logprobs])] = torch.tensor([p for _, p in logprobs])
        result.append((greedy, row))
    return result


def _ask(server: Any, prompt: list[int], tokens: int, probabilities: int) -> list[dict]:
    reply = server.handle_completions(
        {
            "prompt": prompt, "n_predict": tokens, "n_probs": probabilities, "temperature": 0.0, "ignore_eos": True,
            "cache_prompt": False, "samplers": ["temperature"],
        }
    )  # fmt: skip
    return reply["choices"][0]["logprobs"]["content"]


def main(model: str, question: str, answer: str) -> None:
    import xllamacpp

    asked = json.loads(Path(question).read_text())
    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.n_ctx = 2048
    parameters.n_gpu_layers = 0
    server = xllamacpp.Server(parameters)
    result = []
    for prompt in asked["prompts"]:
        first = _ask(server, prompt, 1, asked["vocab_size"])[0]["top_logprobs"]
        greedy = _ask(server, prompt, asked["tokens"], 1)
        result.append(([token["id"] for token in greedy], [(entry["id"], entry["logprob"]) for entry in first]))
    Path(answer).write_text(json.dumps(result))
    os._exit(0)  # the server's threads would be waited for


if __name__ == "__main__":
    main(*sys.argv[1:])
