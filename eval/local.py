"""
Three small tasks whose problems are generated, so that the whole pipeline runs without a network. None of them is a
benchmark. Their numbers cannot be compared with other programs' numbers, and their names therefore begin with "Local".

Local-Choice      asks which of four words begins with a letter, in the form of ARC and MMLU
Local-Arithmetic  has word problems, which are answered with the calculator as in GSM8K
Local-Code        asks for a one-line Python function, which is judged as in HumanEval
"""

import random
from typing import Any

from eval.common import LETTERS, message_pair, render_mc, same_final_number, same_letter
from eval.humaneval import extract_program
from eval.spellingbee import SpellingBee
from nanochat_fp4.data.chat_data import LOCAL_IDENTITY, LOCAL_WORDS, CustomJSON, DrawnTask, SimpleSpelling
from nanochat_fp4.data.sources import Source
from nanochat_fp4.evaluation.execution import execute_code

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jan")
THINGS = ("apples", "books", "coins", "stamps", "shells", "cards", "pencils", "marbles")


class LocalChoice(DrawnTask):
    """Asks which of four words begins with a letter."""

    eval_type = "categorical"
    evaluate = staticmethod(same_letter)

    def make(self, rng: random.Random) -> dict[str, Any]:
        initials = rng.sample(sorted({word[0] for word in LOCAL_WORDS}), len(LETTERS))
        choices = [rng.choice([word for word in LOCAL_WORDS if word[0] == initial]) for initial in initials]
        right = rng.randrange(len(LETTERS))
        question = f"Which word begins with the letter {initials[right]}?"
        return message_pair(render_mc(question, LETTERS, choices), LETTERS[right]) | {"letters": LETTERS}


class LocalArithmetic(DrawnTask):
    """Asks for the result of a word problem with one addition, subtraction or multiplication."""

    eval_type = "generative"
    evaluate = staticmethod(same_final_number)

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
        return message_pair(question, answer)


class LocalCode(DrawnTask):
    """Asks for a function that adds, subtracts or multiplies by a constant."""

    eval_type = "generative"

    def make(self, rng: random.Random) -> dict[str, Any]:
        word, n = rng.choice(("add", "subtract", "multiply")), rng.randint(1, 9)
        operator = {"add": "+", "subtract": "-", "multiply": "*"}[word]
        name = f"{word}_{n}"
        prompt = f'def {name}(x):\n    """ {word} {n} """\n'
        results = {"add": lambda x: x + n, "subtract": lambda x: x - n, "multiply": lambda x: x * n}
        test = "".join(f"assert {name}({x}) == {results[word](x)}\n" for x in rng.sample(range(-50, 50), 3))
        answer = f"{prompt}    return x {operator} {n}"
        return message_pair(prompt, answer) | {"entry_point": name, "test": test}

    def evaluate(self, conversation: dict[str, Any], answer: str) -> bool:
        """Runs the answer in the sandbox. Returns True if its function passes the tests."""
        name = conversation["entry_point"]
        tests = f"{name} = candidate\n{conversation['test']}"
        return execute_code(extract_program(answer), tests=tests, function=name).success


def training_sources(choice: int, arithmetic: int, code: int, spelling: int, bee: int) -> list[Source]:
    """Returns the mixture of a stage that trains with --data=local. The arguments are the numbers of conversations of
    each kind."""
    return [
        Source("identity conversations (local)", lambda: CustomJSON(LOCAL_IDENTITY)),
        Source("Local-Choice", lambda: LocalChoice(size=choice)),
        Source("Local-Arithmetic", lambda: LocalArithmetic(size=arithmetic)),
        Source("Local-Code", lambda: LocalCode(size=code)),
        Source("SimpleSpelling (local words)", lambda: SimpleSpelling(size=spelling, words=LOCAL_WORDS)),
        Source("SpellingBee (local words)", lambda: SpellingBee(size=bee, words=LOCAL_WORDS)),
    ]
