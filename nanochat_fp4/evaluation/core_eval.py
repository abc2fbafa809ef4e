"""
CORE is the metric of the DCLM paper (https://arxiv.org/abs/2406.11794). It has 22 tasks for a base model, which has not
learned to chat. A few solved examples come before each question.

Likelihood decides the answers of all three kinds of tasks, in one forward pass for each question:

    multiple_choice     query + each choice     the choice with the lowest mean loss on its own tokens
    schema              each context + ending   the context after which the ending has the lowest mean loss
    language_modeling   context + continuation  every token of the continuation must be the most likely one

The prompts are those of nanochat at f5425245f, which makes them from Jinja templates.
"""

import random
from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nanochat_fp4.common import get_dist_info, is_ddp_initialized
from nanochat_fp4.generation.engine import check_finite

FEWSHOT_SEED = 1234  # Question i draws its few-shot examples with the seed FEWSHOT_SEED + i.
# The fields of a question, by kind of task.
FIELDS: dict[str, dict[str, type]] = {
    "multiple_choice": {"query": str, "choices": list, "gold": int},
    "schema": {"context_options": list, "continuation": str, "gold": int},
    "language_modeling": {"context": str, "continuation": str},
}
TASK_TYPES = tuple(FIELDS)


def fault_of(item: dict[str, Any], kind: str) -> str | None:
    """Returns the fault of a question of this kind of task, or None."""
    for name, expected in FIELDS[kind].items():
        if not isinstance(item.get(name), expected):
            found_type = type(item[name]).__name__ if name in item else "missing"
            return f"{name!r} is {found_type}, expected {expected.__name__}"
        texts = item[name] if expected is list else ()
        if not all(isinstance(text, str) for text in texts):
            return f"{name!r} holds something else than strings"
    options = item.get("choices", item.get("context_options", ()))
    if "gold" in FIELDS[kind] and not 0 <= item["gold"] < len(options):
        return f"'gold' is {item['gold']}, expected 0 to {len(options) - 1}"
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Prompts


def render_prompts_mc(item: dict, delimiter: str, fewshot: Sequence[dict] = ()) -> list[str]:
    """Returns one prompt for each choice. The prompts differ in their endings."""
    head = "".join(f"{e['query']}{delimiter}{e['choices'][e['gold']]}\n\n" for e in fewshot)
    return [f"{head}{item['query']}{delimiter}{choice}" for choice in item["choices"]]


def render_prompts_schema(item: dict, delimiter: str, fewshot: Sequence[dict] = ()) -> list[str]:
    """Returns one prompt for each context. The prompts have the same ending."""
    head = "".join(f"{e['context_options'][e['gold']]}{delimiter}{e['continuation']}\n\n" for e in fewshot)
    return [f"{head}{context}{delimiter}{item['continuation']}" for context in item["context_options"]]


def render_prompts_lm(item: dict, delimiter: str, fewshot: Sequence[dict] = ()) -> list[str]:
    """
    Returns [the prompt without the continuation, the prompt with it].

    White space at the end of the first prompt is removed. Otherwise a trailing space would belong to the next token of
    the second prompt, and the tokens of the first prompt would not be the beginning of those of the second.
    """
    head = "".join(f"{e['context'].strip()}{delimiter}{e['continuation']}\n\n" for e in fewshot)
    prompt = f"{head}{item['context'].strip()}{delimiter}"
    return [prompt.strip(), f"{prompt}{item['continuation']}"]


PROMPTS = dict(zip(TASK_TYPES, (render_prompts_mc, render_prompts_schema, render_prompts_lm)))


def render_question(
    item: dict, tokenizer: Any, task_meta: dict[str, Any], fewshot: Sequence[dict]
) -> tuple[list[list[int]], list[tuple[int, int]]] | None:
    """Returns the token sequences of a question, and the span [start, end) of each sequence that is judged. Returns
    None if the answer does not begin at a token."""
    kind, delimiter = task_meta["task_type"], task_meta["continuation_delimiter"]
    sequences = tokenizer(PROMPTS[kind](item, delimiter, fewshot), prepend=tokenizer.get_bos_token_id())
    if kind == "multiple_choice":
        start = len(commonprefix(sequences))
        return sequences, [(start, len(s)) for s in sequences]
    if kind == "schema":
        length = len(commonprefix([s[::-1] for s in sequences]))
        return sequences, [(len(s) - length, len(s)) for s in sequences]
    prompt, full = sequences
    if len(prompt) >= len(full) or full[: len(prompt)] != prompt:
        return None
    return [full], [(len(prompt), len(full))]


# ----------------------------------------------------------------------------------------------------------------------
# Judging


def longest_input(model: Any) -> int | None:
    """Returns how many tokens the model can read at once. This is GPT-2's fixed context, or the length of the rotary
    tables. None means any number."""
    return getattr(model, "max_seq_len", None) or getattr(model, "rotary_seq_len", None)


def crop(sequence: list[int], span: tuple[int, int], longest: int | None) -> tuple[list[int], tuple[int, int]] | None:
    """Returns the last `longest` tokens, and the new position of the span. Returns None if the span and a token
    before it do not fit."""
    surplus = 0 if longest is None else max(0, len(sequence) - longest)
    start, end = span[0] - surplus, span[1] - surplus
    return (sequence[surplus:], (start, end)) if start >= 1 else None


@torch.no_grad()
def evaluate_example(
    index: int, model: Any, tokenizer: Any, data: Sequence[dict], device: torch.device | str, task_meta: dict[str, Any]
) -> tuple[bool, bool, bool]:
    """Puts question `index` to the model, after few-shot examples that are drawn from the other questions. Returns
    whether the answer is right, whether the model has seen only the end of the prompt, and whether the question could
    be judged. An answer that is longer than the model's context, or does not begin at a token, counts as wrong.

    Raises ValueError for logits that are not finite, and for more few-shot examples than there are other questions."""
    item, others = data[index], [i for i in range(len(data)) if i != index]
    chosen = random.Random(FEWSHOT_SEED + index).sample(others, task_meta["num_fewshot"])
    rendered = render_question(item, tokenizer, task_meta, [data[i] for i in chosen])
    inputs = rendered and [crop(s, span, longest_input(model)) for s, span in zip(*rendered)]
    if not inputs or None in inputs or any(start >= end for _, (start, end) in inputs):
        return False, False, False
    sequences, spans = map(list, zip(*inputs))
    cropped = sequences != rendered[0]

    padding = tokenizer.get_bos_token_id()  # The padding is at the end, where no judged token sees it.
    width = max(map(len, sequences))
    ids = torch.tensor([s + [padding] * (width - len(s)) for s in sequences], device=device)
    logits = model(ids)
    # For each sequence the logits that judge it, and the tokens that they should predict.
    judged = [
        (check_finite(logits[row, start - 1 : end - 1].float(), model), ids[row, start:end])
        for row, (start, end) in enumerate(spans)
    ]
    if task_meta["task_type"] == "language_modeling":
        predicted, expected = judged[0]
        return bool((predicted.argmax(-1) == expected).all()), cropped, True
    losses = [float(F.cross_entropy(*pair)) for pair in judged]
    return losses.index(min(losses)) == item["gold"], cropped, True


def evaluate_task(
    model: Any,
    tokenizer: Any,
    data: Sequence[dict],
    device: torch.device | str,
    task_meta: dict[str, Any],
    done: Any = lambda: None,
) -> tuple[float, int, int]:
    """Returns the share of right answers over all questions of a task, and the numbers of cropped questions and of
    those that were not judged. All ranks must call this function together. done() is called after each question."""
    _, rank, _, world_size = get_dist_info()
    counts = torch.zeros(3, device=device)
    for index in range(rank, len(data), world_size):
        right, cropped, judged = evaluate_example(index, model, tokenizer, data, device, task_meta)
        counts += torch.tensor([right, cropped, not judged], device=device)
        done()
    if is_ddp_initialized():
        dist.all_reduce(counts)
    right, cropped, not_judged = counts.tolist()
    return right / len(data), int(cropped), int(not_judged)
