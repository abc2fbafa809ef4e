"""
Lets a user talk to a chat model in the terminal.

    python -m scripts.chat_cli                     an interactive conversation
    python -m scripts.chat_cli -p "Why is the sky blue?"
    python -m scripts.chat_cli -i base -p "Once upon a time"      a base model continues a text

The program is a single process. While the model writes, its calls of the calculator are answered as in the evaluation.
"""

import argparse
import sys
from collections.abc import Iterator

import torch

import nanochat_fp4 as nf
from nanochat_fp4.cli import ArgumentParser, UserError, parse_count, parse_positive, parse_rate, run_main
from nanochat_fp4.common import joined_processes
from nanochat_fp4.evaluation.metrics import few_tokens
from nanochat_fp4.evaluation.report import FOLDERS
from nanochat_fp4.generation.chat import AnswerText, compute_dtype, prepare
from nanochat_fp4.generation.engine import Engine
from nanochat_fp4.models.gpt import autocast
from nanochat_fp4.training.flags import add_model_arguments
from nanochat_fp4.training.load_model import load_for_inference, tokens_read


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="Chat with the model")
    add = parser.add_argument
    add("-i", "--source", default="sft", choices=tuple(FOLDERS), help="stage whose model answers")
    add("-p", "--prompt", default=None, help="Prompt the model, get a single response back")
    add("-t", "--temperature", type=parse_rate, default=0.6, help="Temperature for generation")
    add("-k", "--top-k", type=parse_count, default=50, help="Top-k sampling parameter")
    add("-m", "--max-tokens", type=parse_positive, default=256, help="Max tokens of an answer")
    add("-d", "--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    add_model_arguments(parser, "nvfp4", "bf16")
    return parser.parse_args(argv)


class Chat:
    """A conversation as token ids, and the model that continues it. A base model has seen no conversation: with
    `plain`, it continues each text as it stands."""

    def __init__(self, engine: Engine, temperature: float, top_k: int, max_tokens: int, plain: bool = False):
        self.engine, self.tokenizer = engine, engine.tokenizer
        self.sampling, self.max_tokens = {"temperature": temperature, "top_k": top_k}, max_tokens
        self.plain = plain
        self.clear()

    def clear(self) -> None:
        """Begins a new conversation."""
        self.tokens = [self.tokenizer.get_bos_token_id()]

    def ask(self, text: str) -> Iterator[str]:
        """Yields the answer piece by piece, as text. Afterwards cut_off says why the answer has no end, or is empty.

        Raises UserError if the conversation no longer fits the model.
        """
        special = self.tokenizer.encode_special
        if self.plain:
            self.clear()
            prompt = self.tokens + self.tokenizer.encode(text)
        else:
            prompt = [*self.tokens, special("<|user_start|>"), *self.tokenizer.encode(text), special("<|user_end|>")]
            prompt.append(special("<|assistant_start|>"))
        room = self.engine.model.rotary_seq_len - len(prompt)
        if room < 1:
            problem = f"the conversation is {len(prompt)} tokens long and no longer fits"
            raise UserError(f"{problem}; type 'clear', or shorten it")
        shown, max_tokens = AnswerText(self.tokenizer), min(self.max_tokens, room)
        self.cut_off = f"cut off after {max_tokens} tokens (--max-tokens)" + "; ask it to go on" * (not self.plain)
        if room <= self.max_tokens:
            self.cut_off = "cut off: no room is left for this conversation; type 'clear'"
        for column, _ in self.engine.generate(prompt, max_tokens=max_tokens, **self.sampling):
            if column[0] in self.engine.terminal:
                self.cut_off = ""
                break
            yield shown.add(column[0])
        yield shown.rest()
        # The end token is added even if the answer was cut off, because the user speaks next.
        self.tokens = [*prompt, *shown.tokens, special("<|assistant_end|>")]


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.prompt is not None and not args.prompt.strip():
        raise UserError("the prompt is empty; write one after -p, or leave out -p to chat")
    with joined_processes(args.device_type, alone="chat_cli") as (_, _, device):
        converse(args, device)


def converse(args: argparse.Namespace, device: torch.device) -> None:
    """Loads the model, and answers the prompt or talks with the user."""
    model, tokenizer, meta, _ = load_for_inference(args.source, device, args)
    if problem := few_tokens(tokens_read(meta), model.num_scaling_params()):
        print(f"note: {problem}", file=sys.stderr, flush=True)
    plain = args.source == "base"
    chat = Chat(Engine(model, tokenizer), args.temperature, args.top_k, args.max_tokens, plain)
    precision = nf.full_precision(model) if args.precision == "bf16" else nf.quantize_weights_once(model)
    dtype = compute_dtype(device, args.dtype)
    with precision, nf.per_token_scale(model), autocast(device.type, dtype):
        prepare(model, dtype)
        if args.prompt is not None:
            answer(chat, args.prompt.strip())
            return
        print("\nType 'quit' or 'exit' to end, 'clear' to start a new conversation.")
        while True:
            try:
                text = input("\nUser: ").strip()
            except (EOFError, KeyboardInterrupt):
                print("\nGoodbye!")
                return
            if text.lower() in ("quit", "exit"):
                print("Goodbye!")
                return
            if text.lower() == "clear":
                chat.clear()
                print("Conversation cleared.")
            elif text:
                try:
                    answer(chat, text)
                except KeyboardInterrupt:  # It stops the answer, and the conversation goes on.
                    print("\n(interrupted)")
                except UserError as e:
                    print(f"\n{e}")


def answer(chat: Chat, text: str) -> None:
    """Prints the answer to a text while the model writes it, or the text as a base model continues it."""
    print(f"\n{text}" if chat.plain else "\nAssistant: ", end="", flush=True)
    for piece in chat.ask(text):
        print(piece, end="", flush=True)
    print()
    if chat.cut_off:
        print(f"({chat.cut_off})", file=sys.stderr)


if __name__ == "__main__":
    run_main(main)
