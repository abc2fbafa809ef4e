"""
HumanEval (Chen et al., 2021) asks for Python functions. An answer is right if it passes the problem's tests in the
sandbox.

The data set is https://huggingface.co/datasets/openai/openai_humaneval. Its rows have the fields prompt,
canonical_solution, entry_point and test. A prompt holds imports, a signature and a description. A test defines
check(candidate).
"""

import re
from typing import Any

from eval.common import RowTask, message_pair, wrong_field
from nanochat_fp4.evaluation.execution import execute_code

CODE_BLOCK = re.compile(r"```(?:python)?\s*\n(.*?)\n```", re.DOTALL)


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


class HumanEval(RowTask):
    """The problems of HumanEval, which has one split. An answer is right if it passes the tests."""

    dataset = "openai/openai_humaneval"
    eval_type = "generative"

    def __init__(self, **kwargs: Any):
        super().__init__("openai_humaneval", "test", row_problem, **kwargs)

    def get_example(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        conversation = message_pair(row["prompt"], f"{row['prompt']}\n{row['canonical_solution']}")
        return conversation | {"entry_point": row["entry_point"], "test": row["test"]}

    def evaluate(self, conversation: dict[str, Any], answer: str) -> bool:
        """Runs the prompt's imports, which an answer often leaves out, and the answer. Returns True if the answer's
        function passes the tests."""
        prompt, name = conversation["messages"][0]["content"], conversation["entry_point"]
        # Some tests call the prompt's other functions or the function itself by name.
        tests = f"{prompt}\n{conversation['test']}\n{name} = candidate\ncheck(candidate)"
        code = f"{leading_imports(prompt)}\n\n{extract_program(answer)}"
        return execute_code(code, tests=tests, function=name).success
