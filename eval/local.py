"""
Three small tasks made on the spot, so that the whole pipeline runs without a network. None is a benchmark: the numbers
cannot be compared with others, and reports put "Local" in front of each name.

Local-Choice      four choices, asked as ARC and MMLU are: which word begins with the letter?
Local-Arithmetic  word problems with the calculator, answered as GSM8K is
Local-Code        a one-line Python function, asked and judged as HumanEval is
"""

import random
from typing import Any

from eval.common import render_mc, same_final_number
from eval.humaneval import extract_program
from nanochat_fp4.data.chat_data import LOCAL_WORDS, DrawnTask
from nanochat_fp4.evaluation.execution import execute_code

LETTERS = ("A", "B", "C", "D")
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jan")
THINGS = ("apples", "books", "coins", "stamps", "shells", "cards", "pencils", "marbles")


class LocalChoice(DrawnTask):
    eval_type = "categorical"

    def make(self, rng: random.Random) -> dict[str, Any]:
        initials = rng.sample(sorted({word[0] for word in LOCAL_WORDS}), len(LETTERS))
        choices = [rng.choice([word for word in LOCAL_WORDS if word[0] == initial]) for initial in initials]
        right = rng.randrange(len(LETTERS))
        question = f"Which word begins with the letter {initials[right]}?"
        return {
            "messages": [
                {"role": "user", "content": render_mc(question, LETTERS, choices)},
                {"role": "assistant", "content": LETTERS[right]},
            ],
            "letters": LETTERS,
        }

    def evaluate(self, conversation: dict[str, Any], answer: str) -> bool:
        return answer == conversation["messages"][-1]["content"]


class LocalArithmetic(DrawnTask):
    eval_type = "generative"

    def make(self, rng: random.Random) -> dict[str, Any]:
        name, thing = rng.choice(NAMES), rng.choice(THINGS)
        a, b = rng.randint(2, 20), rng.randint(2, 20)
        kind = rng.randrange(3)
        if kind == 0:
            question = f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?"
            expression, result = f"{a}+{b}", a + b
        elif kind == 1:
            a += b
            question = f"{name} had {a} {thing} and gave away {b}. How many {thing} are left?"
            expression, result = f"{a}-{b}", a - b
        else:
            question = f"{name} has {a} boxes with {b} {thing} each. How many {thing} is that in all?"
            expression, result = f"{a}*{b}", a * b
        answer = [
            {"type": "text", "text": f"{name} has {expression} = "},
            {"type": "python", "text": expression},
            {"type": "python_output", "text": str(result)},
            {"type": "text", "text": f"{result} {thing}.\n#### {result}"},
        ]
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    def evaluate(self, conversation: dict[str, Any], answer: str) -> bool:
        return same_final_number(conversation, answer)


class LocalCode(DrawnTask):
    eval_type = "generative"

    def make(self, rng: random.Random) -> dict[str, Any]:
        word, n = rng.choice(("add", "subtract", "multiply")), rng.randint(1, 9)
        operator = {"add": "+", "subtract": "-", "multiply": "*"}[word]
        name = f"{word}_{n}"
        prompt = f'def {name}(x):\n    """ {word} {n} """\n'
        cases = [(x, eval_case(x, operator, n)) for x in rng.sample(range(-50, 50), 3)]
        return {
            "messages": [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": f"{prompt}    return x {operator} {n}"},
            ],
            "entry_point": name,
            "test": "".join(f"assert {name}({x}) == {y}\n" for x, y in cases),
        }

    def evaluate(self, conversation: dict[str, Any], answer: str) -> bool:
        name = conversation["entry_point"]
        tests = f"{name} = candidate\n{conversation['test']}"
        return execute_code(extract_program(answer), tests=tests, function=name).success


def eval_case(x: int, operator: str, n: int) -> int:
    return {"+": x + n, "-": x - n, "*": x * n}[operator]
