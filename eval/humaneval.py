"""
HumanEval (Chen et al., 2021) asks for Python functions. An answer is right if it passes the problem's tests in the
sandbox.

The data set is https://huggingface.co/datasets/openai/openai_humaneval. Its rows have the fields prompt,
canonical_solution, entry_point and test. A prompt holds imports, a signature and a description. A test defines
check(candidate).
"""

import functools
import re
import textwrap
from collections.abc import Callable
from typing import Any

from eval.common import RowTask, message_pair, wrong_field
from nanochat_fp4.evaluation.execution import execute_code

CODE_BLOCK = re.compile(r"```(?:python)?\s*\n(.*?)\n```", re.DOTALL)  # what nanochat reads
# Any fence of Markdown: with any language, indented, of tildes, or without its end.
ANY_FENCE = re.compile(r"(`{3,}|~{3,})[^\n`]*\n(.*?)(?:^[ \t]*\1|\Z)", re.DOTALL | re.MULTILINE)


def row_problem(row: dict) -> str | None:
    """Returns a description of the first fault in a row, or None."""
    return wrong_field(row, prompt=str, canonical_solution=str, entry_point=str, test=str)


def leading_imports(program: str) -> str:
    """Returns the import lines at the top of a program, without the comments and empty lines between them."""
    imports = []
    for line in map(str.strip, program.split("\n")):
        if line.startswith(("import ", "from ")):
            imports.append(line)
        elif line and not line.startswith("#"):
            break
    return "\n".join(imports)


def extract_program(completion: str) -> str:
    """Returns the first Markdown code block of a completion, or the whole completion if it has none."""
    match = CODE_BLOCK.search(completion)
    return (match.group(1) if match else completion).strip()


def program_of_any_fence(completion: str, function: str) -> str:
    """Returns the first fenced block that defines the function, else the first block, else the whole completion."""
    blocks = [textwrap.dedent(block) for _, block in ANY_FENCE.findall(completion)] or [completion]
    return next((block for block in blocks if f"def {function}" in block), blocks[0]).strip()


@functools.lru_cache(maxsize=16)
def passes(code: str, tests: str, function: str) -> bool:
    """Returns whether code passes tests in the sandbox. Two judges that read the same program run it once."""
    return execute_code(code, tests=tests, function=function).success


class HumanEval(RowTask):
    """
    The problems of HumanEval, which has one split. An answer is right if it passes the tests.

    nanochat's score reads the program from a fence ```python or ```, and takes any other form for a wrong answer. The
    score "any fence" stands beside it, because the form of an answer is not the ability to write the program.
    """

    dataset = "openai/openai_humaneval"
    eval_type = "generative"

    def __init__(self, **kwargs: Any):
        super().__init__("openai_humaneval", "test", row_problem, **kwargs)

    def get_example(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        conversation = message_pair(row["prompt"], f"{row['prompt']}\n{row['canonical_solution']}")
        return conversation | {"entry_point": row["entry_point"], "test": row["test"]}

    def evaluate(self, conversation: dict[str, Any], answer: str) -> bool:
        """Returns True if the function of the program that nanochat reads passes the tests."""
        return self.solves(conversation, extract_program(answer))

    def evaluate_any_fence(self, conversation: dict[str, Any], answer: str) -> bool:
        """Returns True if the function of the program in any fence passes the tests."""
        return self.solves(conversation, program_of_any_fence(answer, conversation["entry_point"]))

    @property
    def judges(self) -> dict[str, Callable[[dict[str, Any], str], bool]]:
        return super().judges | {"any fence": self.evaluate_any_fence}

    def solves(self, conversation: dict[str, Any], program: str) -> bool:
        """Runs the prompt's imports, which an answer often leaves out, the program, and the tests."""
        prompt, name = conversation["messages"][0]["content"], conversation["entry_point"]
        # Some tests call the prompt's other functions or the function itself by name.
        tests = f"{prompt}\n{conversation['test']}\n{name} = candidate\ncheck(candidate)"
        return passes(f"{leading_imports(prompt)}\n\n{program}", tests, name)
