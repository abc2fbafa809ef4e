"""
Pre-trains the base model, with NVFP4 or any other method. From the root of the repository:

    python -m scripts.base_train
    torchrun --standalone --nproc_per_node=8 -m scripts.base_train

A CPU can train a much smaller model:

    python -m scripts.base_train --depth=4 --aspect-ratio=32 --head-dim=64 --max-seq-len=256 --device-batch-size=8 \\
        --total-batch-size=2048 --eval-tokens=8192 --core-metric-every=-1 --num-iterations=20

The flags are nanochat's. --method names the method of quantization. Without it the method is $QAT_METHOD, or else
clover. A checkpoint holds everything that training needs to go on. A run that is resumed with `--resume-from-step
latest` therefore ends with the same bits as a run that was never interrupted.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

import nanochat_fp4 as nf
from nanochat_fp4.cli import (
    ArgumentParser,
    UserError,
    amount,
    number_type,
    one_line,
    parse_finite,
    parse_positive,
    parse_rate,
    run_main,
)
from nanochat_fp4.common import add_recipes_argument, aligned, print0, resolve_method, say_once, set_cpu_threads
from nanochat_fp4.data.dataloader import Batches, Documents, evaluation_rows, packed_rows
from nanochat_fp4.data.dataset import (
    Survey,
    count_tokens,
    digest_of,
    ensure_data,
    open_text,
    survey,
    text_column,
    validation_text,
)
from nanochat_fp4.data.tokenizer import RustBPETokenizer, get_token_bytes, get_tokenizer
from nanochat_fp4.doctor import self_check
from nanochat_fp4.evaluation import report
from nanochat_fp4.evaluation.core_eval import evaluate_model
from nanochat_fp4.evaluation.loss_eval import evaluate_bpb
from nanochat_fp4.generation.engine import draw_samples
from nanochat_fp4.models import families
from nanochat_fp4.models.cross_entropy import FP8_HEADS, HEADS, default_head, head_problem
from nanochat_fp4.models.optim import ORTHOGONALIZERS, PretrainingOptions
from nanochat_fp4.models.optim8bit import set_state
from nanochat_fp4.nvfp4.dispatch import fp8_products
from nanochat_fp4.nvfp4.epilogue import groups_of
from nanochat_fp4.nvfp4.methods import WHICH
from nanochat_fp4.nvfp4.phases import MethodPlan
from nanochat_fp4.parallel import unsharded
from nanochat_fp4.training.checkpoint_manager import check_model_tag, list_steps, read_meta
from nanochat_fp4.training.flags import METHODS, add_compile_argument, add_run_arguments, changed_flags, parse_steps
from nanochat_fp4.training.graphed import GraphedStep, graphs_problem
from nanochat_fp4.training.load_model import (
    BRANCH_SETTINGS,
    check_model_fits,
    check_tokenizer,
    checkpoint_folder,
    register_recipes,
)
from nanochat_fp4.training.memory import auto_device_batch_size, plan_accumulation
from nanochat_fp4.training.step import TrainingStep
from nanochat_fp4.training.trainer import Trainer, due, run_stage

parse_share = number_type(float, lambda value: 0 <= value <= 1, "a number from 0 to 1")
# The factor by which a moving average keeps its old value.
parse_beta = number_type(float, lambda value: 0 <= value < 1, "a number of at least 0 and below 1")


def parse_device_batch_size(text: str) -> int | str:
    """The argparse type of --device-batch-size, which is 'auto' or a positive whole number."""
    return text if text == "auto" else parse_positive(text)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        description="Pretrain base model",
        epilog="SIGTERM, Ctrl-C and SIGHUP save a checkpoint and stop within one step; the exit status is then "
        "143, 130 and 129. Bad input and numerical trouble end in one line and exit status 2.",
    )
    add = parser.add_argument
    add_run_arguments(parser)
    add_compile_argument(parser)
    text = "replay each micro-batch as a CUDA graph: equal bits, less work for the CPU, more memory (default: on a GPU "
    text += "where the memory suffices by count)"
    add("--cuda-graph", action=argparse.BooleanOptionalAction, default=None, help=text)
    add("--seed", type=int, default=42, help="seed of weights, rotations and stochastic rounding")
    text = "folder of parquet shards or text (default: $DATA_DIR, else FineWeb-Edu, else a small embedded corpus)"
    add("--data-dir", default="", help=text)
    text = "seed of another order of the training text, from 1 to 4294967295 (default: as it is stored)"
    add("--data-seed", type=int, default=0, help=text)
    text = "train on all documents in one random order, which --data-seed chooses; takes a copy of the text on disk"
    add("--shuffle-documents", action="store_true", help=text)
    add_recipes_argument(parser)
    add("--method", default=None, help=f"QAT method (default: $QAT_METHOD, else clover): {METHODS}. {WHICH}")
    text = "other methods of single layers, 'pattern=method' with commas: '*.c_fc=fp8,*.attn.c_proj=bf16'"
    add("--layer-methods", default="", help=text)
    text = "other methods in the course of the run, 'fraction of the steps=method' with commas: '0.1=clover,0.85=bf16'"
    add("--method-phases", default="", help=text)
    text = "quantize q, k and v as three layers, each with a tensor scale, as the paper's runs did; slower than one"
    add("--separate-qkv", action="store_true", help=text)
    text = "products of the output head: in BF16, or in FP8 with a scale for each tensor, as nanochat's --fp8 "
    add("--head", choices=HEADS, help=f"{text}(default: fp8 for {', '.join(FP8_HEADS)}, and bf16 for other methods)")
    # Model architecture
    add("--depth", type=int, default=20, help="depth of the Transformer model")
    add("--aspect-ratio", type=int, default=64, help="model_dim = depth * aspect_ratio")
    add("--head-dim", type=int, default=128, help="target head dimension for attention")
    add("--max-seq-len", type=int, default=2048, help="max context length")
    add("--window-pattern", default="SSSL", help="sliding windows of the layers in turn: L=full, S=half context")
    families.add_arguments(parser)
    # Training horizon. Only one of these is used. Earlier ones take precedence.
    add("--num-iterations", type=parse_steps, default=-1, help="explicit number of optimization steps (-1 = disable)")
    add("--target-flops", type=parse_finite, default=-1.0, help="steps that reach these FLOPs (-1 = disable)")
    text = "steps that reach these tokens per parameter (Chinchilla=20, -1 = disable)"
    add("--target-param-data-ratio", type=parse_finite, default=8, help=text)
    # Optimization
    text = "per-device batch size, or 'auto' for the largest that fits; the total batch stays the same"
    add("--device-batch-size", type=parse_device_batch_size, default=32, help=text)
    add("--total-batch-size", type=int, default=524288, help="total batch size in tokens")
    add("--embedding-lr", type=parse_rate, default=0.3, help="learning rate for embedding parameters (Adam)")
    add("--unembedding-lr", type=parse_rate, default=0.004, help="learning rate for unembedding parameters (Adam)")
    add("--weight-decay", type=parse_rate, default=0.2, help="cautious weight decay of matrix parameters (Muon)")
    add("--matrix-lr", type=parse_rate, default=0.02, help="learning rate for matrix parameters (Muon)")
    text = "how Muon orthogonalizes its updates: nanochat's Polar Express, or the package muon-optimizer"
    add("--orthogonalizer", choices=ORTHOGONALIZERS, default="polar_express", help=text)
    add("--scalar-lr", type=parse_rate, default=0.5, help="learning rate for scalars (resid_lambdas, x0_lambdas)")
    add("--adam-beta1", type=parse_beta, default=0.8, help="Adam beta1 for embedding/unembedding")
    add("--adam-beta2", type=parse_beta, default=0.95, help="Adam beta2 for embedding/unembedding")
    add("--warmup-ratio", type=parse_share, default=0.0, help="ratio of iterations for LR warmup")
    add("--warmdown-ratio", type=parse_share, default=0.4, help="ratio of iterations for LR warmdown")
    add("--final-lr-frac", type=parse_rate, default=0.0, help="final LR as fraction of initial LR")
    # Evaluation
    add("--eval-every", type=int, default=250, help="evaluate val bpb every N steps (-1 = disable)")
    add("--eval-tokens", type=int, default=20 * 524288, help="number of tokens to evaluate val loss on")
    add("--core-metric-every", type=int, default=2000, help="evaluate CORE metric every N steps (-1 = disable)")
    add("--core-metric-max-per-task", type=int, default=500, help="examples per task for CORE metric")
    add("--sample-every", type=int, default=2000, help="sample from model every N steps (-1 = disable)")
    text = "'<model tag>@<step>': begin with this method at a checkpoint of a run of the same model, data and schedule"
    add("--branch-from", default="", help=text)
    add("--model-tag", default=None, help="checkpoint directory name (default: d<depth>_<method>)")
    return parser.parse_args(argv)


MAX_STEPS = 10**9  # A larger number is a typing error.
CPU_FLOPS = 1e11  # A generous estimate of how many FLOPs a CPU computes in a second.
CPU_TOO_MUCH = 1e15  # A run with more FLOPs takes a CPU hours.
MOST_OFTEN = 16  # Text that is read more often teaches next to nothing new (Muennighoff et al., arXiv 2305.16264).


def make_model(args: argparse.Namespace, vocab_size: int, device: torch.device, method: str) -> torch.nn.Module:
    """Returns the model with its first weights and the method's output head. Raises UserError if the device cannot
    train it in the way that the flags ask for."""
    family = families.family_of_flags(args)
    config = family.config_from_flags(args, vocab_size)
    if reason := families.recompute_problem(args.recompute, config, device):
        raise UserError(f"--recompute={args.recompute}: {reason}")
    check_model_fits(config, device)
    set_cpu_threads(device, config.n_embd)
    with torch.device("meta"):
        model = family.model(config)
    model.lm_head.precision = args.head or default_head(method)
    if problem := head_problem(model.lm_head.precision, *model.lm_head.weight.shape):
        raise UserError(f"--head: {problem}")
    set_state(model, args.state)
    model.to_empty(device=device)
    model.init_weights()
    model.recompute = args.recompute
    return model


def run_settings(
    args: argparse.Namespace, method: str, model: torch.nn.Module, tokenizer: RustBPETokenizer
) -> dict[str, Any]:
    """Returns the settings of a pre-training run that decide its bits. A run can only be resumed with the same
    settings."""
    return {
        "method": method,
        **{k: v for k, v in families.config_record(model.config).items() if k not in BRANCH_SETTINGS},
        "total_batch_size": args.total_batch_size,
        "seed": args.seed,
        "data_seed": args.data_seed or None,
        "shuffle_documents": args.shuffle_documents or None,
        **families.family_of_config(model.config).settings,
        "tokenizer": tokenizer.fingerprint(),
        **{k: getattr(args, k) or None for k in BRANCH_SETTINGS},
        "head": None if model.lm_head.precision == "bf16" else model.lm_head.precision,
    }


def text_digest(data_dir: str | os.PathLike | Survey, column: str = "") -> str:
    """Returns 16 hex digits of a hash of a run's text, of its column and of how several files of own text are split.
    FineWeb-Edu goes by its validation shard, because other runs in the same folder download more of it."""
    found = survey(data_dir)
    files = found.val if found.folder.name == "base_data" else found.files
    split = ["by file"] * (len(found.files) > 1 and not found.val)  # Before, by document: dev/LOG.md, 2026-11-28.
    return hashlib.sha256("".join([text_column(column), *split, *map(digest_of, files)]).encode()).hexdigest()[:16]


def how_often(held: float, of_step: int, steps: int, guess: str = "") -> str:
    """Returns how often steps of `of_step` tokens read a text of about `held` tokens, and how many steps read it once.
    A second line warns of a text that is learned by heart."""
    times, once = of_step * steps / held, round(held / of_step)
    read = "once" if 0.8 < times < 1.1 else f"{times:,.0f} times" if times > 10 else f"{times:.2g} times"
    said = f"the text has about {amount(held)} tokens{guess}, and is read {read}"
    said += f"; NUM_ITERATIONS={once} reads it once" * (read != "once" and once > 0)
    if times > MOST_OFTEN:
        fewer = f", or set NUM_ITERATIONS={4 * once}" * (once > 2)
        said += f"\nWARNING: so often read, a text is learned by heart; add text{fewer}"
    return said


def look_back(folder: Path, tokenizer: RustBPETokenizer | None = None, data_dir: str | None = None) -> str | None:
    """Registers the recipes of a run's newest checkpoint, and returns a line if it was trained on another text than
    that in data_dir. Raises UserError if it has another tokenizer, and if RECIPES has another recipe of its name."""
    for step in list_steps(folder)[:1]:
        meta, where = read_meta(folder, step), f"checkpoint of step {step} in {folder}"
        register_recipes(meta, where)
        if tokenizer is not None:
            check_tokenizer(meta, tokenizer, where)
        if data_dir and meta.get("text") not in (None, text_digest(data_dir)):
            return f"the text, or its split, has changed since the {where}"
    return None


def text_of_base(model_tag: str) -> tuple[str, str | None]:
    """Returns the folder or file of text on which the base model of this tag was trained, and its text_digest, as the
    newest checkpoint says. What is not known is an empty string, and None."""
    folder = checkpoint_folder("base", model_tag)
    meta = next(filter(None, (read_meta(folder, step) for step in list_steps(folder))), {})
    return meta.get("user_config", {}).get("data_dir") or "", meta.get("text")


def text_name(data_dir: str | os.PathLike) -> str:
    """Returns the name of a text for a reader who does not know this machine's folders."""
    return "FineWeb-Edu" if Path(data_dir).name == "base_data" else Path(data_dir).name


def text_to_measure(model_tag: str, data_dir: str | None, column: str = "") -> tuple[Survey, str]:
    """
    Returns the text on which a model is measured. If that is known not to be the text of its base training, a sentence
    says so, which is printed, too. Otherwise the sentence is empty.

    The text is `data_dir`, the value of --data-dir, or else DATA_DIR, or else that of the base model of this tag.
    FineWeb-Edu and the embedded corpus are found or made again if the base directory was moved. `column` is that of
    text_column. All ranks must call this function together. Raises UserError if it needs the base model's text, and
    the user's folder is not there any more.
    """
    own, trained_on = text_of_base(model_tag)
    read = data_dir or os.environ.get("DATA_DIR") or own
    if read and read == own and not Path(own).exists():
        if not {"base_data", "embedded_data"} & {*Path(own).parts}:
            raise UserError(f"{own}, the text of {model_tag}, is not there; give it or another with --data-dir=FOLDER")
        read = None
    found = ensure_data(read, column=column)
    if own and trained_on in (None, text_digest(found, column)):
        return found, ""
    name, was = text_name(found.folder), text_name(own) or "a text that is not known"
    was += " with other files, another split or another column" * (name == was)
    other = f"This is measured on {name}, and {model_tag} was trained on {was}"
    say_once(f"{other}; give the text of its training with --data-dir=FOLDER")
    return found, other * bool(own)


def comparison_key(settings: dict[str, Any]) -> str:
    """Returns a key that is the same for two runs if they differ only in the method or in how they are spread over
    devices."""
    apart = {"method", "world_size", "parallel", "head", *BRANCH_SETTINGS}
    # Without these settings the text is read in the order in which it is stored.
    apart |= {key for key in ("data_seed", "shuffle_documents") if not settings[key]}
    # Runs from before this setting existed used Polar Express. They stay comparable.
    apart |= {"orthogonalizer"} if settings["orthogonalizer"] == "polar_express" else set()
    comparable = {k: v for k, v in settings.items() if k not in apart}
    return hashlib.sha256(json.dumps(comparable, sort_keys=True).encode()).hexdigest()[:12]


def resolve_horizon(args: argparse.Namespace, flops_per_token: float, num_params: int) -> int:
    """Returns the number of optimizer steps that --num-iterations, --target-flops or --target-param-data-ratio asks
    for. Raises UserError if it is less than one step or more than MAX_STEPS, or if no flag is set."""
    batch = args.total_batch_size
    if args.num_iterations > 0:
        steps, flag = args.num_iterations, "--num-iterations"
    elif args.target_flops > 0:
        steps, flag = round(args.target_flops / (flops_per_token * batch)), "--target-flops"
    elif args.target_param_data_ratio > 0:
        steps, flag = int(args.target_param_data_ratio * num_params) // batch, "--target-param-data-ratio"
    else:
        raise UserError("no training horizon; set --num-iterations, --target-flops or --target-param-data-ratio")
    if not 1 <= steps <= MAX_STEPS:
        what = "less than one step" if steps < 1 else f"{float(steps):.3g} steps"
        raise UserError(f"{flag} asks for {what} of {batch} tokens; {'raise' if steps < 1 else 'lower'} it")
    return steps


def check_machine(args: argparse.Namespace, device: torch.device, flops: float) -> None:
    """Raises UserError if the run would take hours on this machine, which has no GPU. --device-type=cpu allows it."""
    if device.type == "cpu" and not args.device_type and flops > CPU_TOO_MUCH:
        raise UserError(
            f"there is no GPU here, and this run takes {flops:.1e} FLOPs, {flops / CPU_FLOPS / 3600:,.0f} hours or "
            "more on a CPU; train less (--depth, --max-seq-len, --total-batch-size, --num-iterations: see --help), or "
            "say --device-type=cpu to begin all the same"
        )


class BaseTraining(Trainer):
    """The run of this stage."""

    rate_flags = "the learning rates (--matrix-lr, --embedding-lr)"

    def __init__(self, args: argparse.Namespace, until_exit: contextlib.ExitStack, method: str):
        super().__init__("base", args, until_exit)
        self.core_every, self.samples = args.core_metric_every, []
        self.survey = ensure_data(args.data_dir)
        # The default tag has the method's name, so that no method overwrites the run of another one.
        tag = f"{families.family_of_flags(args).run_name(args)}_{method}" if args.model_tag is None else args.model_tag
        self.open_folder(tag, args.branch_from)
        tokenizer = get_tokenizer()
        self.make_model(args, tokenizer, method)
        plan = MethodPlan.parse(method, args.layer_methods, args.method_phases)
        self.convert(method, method, plan)
        self.backend = f"nothing is quantized ({nf.backend().reason})"
        if method != "bf16" or self.model.lm_head.bits == 8:
            # The self-check ends the run if kernels or GEMMs compute something wrong on this machine.
            self.backend = f"{nf.backend()}; {self_check(self.device, method, self.model)}"
        self.choose_micro_batch(args, self.world_size)
        self.announce(plan)
        self.text, self.val_text = (open_text(split, self.survey) for split in ("train", "val"))
        self.text_tokens = held = count_tokens(self.text, tokenizer)
        if held:
            say_once(how_often(held, args.total_batch_size, self.num_steps))
        self.num_rows, self.eval_steps = evaluation_rows(args.eval_tokens, self.rows, self.seq_len, self.world_size)
        self.eval_tokens, self.token_bytes = self.num_rows * self.seq_len, get_token_bytes(device=self.device)
        options = PretrainingOptions(**{f.name: getattr(args, f.name) for f in fields(PretrainingOptions)})
        kind = GraphedStep if self.wants_graphs(args.cuda_graph) else TrainingStep
        horizon = args.total_batch_size, self.num_steps
        self.make_step(lambda: self.model.setup_pretraining(options, *horizon, self.lean), kind)
        self.describe(plan, options)

    def make_model(self, args: argparse.Namespace, tokenizer: RustBPETokenizer, method: str) -> None:
        """Makes the model, and gives it the weights of the checkpoint with which training goes on."""
        model = make_model(args, tokenizer.get_vocab_size(), self.device, method)
        for rows in (1, *([] if args.device_batch_size == "auto" else [args.device_batch_size])):
            plan_accumulation(args.total_batch_size, rows, args.max_seq_len, self.world_size)
        flops = model.estimate_flops()
        self.step_tokens, self.seq_len = args.total_batch_size, args.max_seq_len
        self.num_steps = resolve_horizon(args, flops, model.num_scaling_params())
        check_machine(args, self.device, flops * args.total_batch_size * self.num_steps)
        self.settings = run_settings(args, method, model, tokenizer)
        self.adopt(model, tokenizer, self.settings, self.num_steps)

    def choose_micro_batch(self, args: argparse.Namespace, world_size: int) -> None:
        """Sets the rows of a micro-batch, and how many micro-batches make a step."""
        of_step = functools.partial(plan_accumulation, args.total_batch_size)
        self.rows = args.device_batch_size
        if self.rows == "auto":
            # A resumed run keeps its micro-batch. Rows of a micro-batch share tensor scales, so the result depends on
            # it.
            all_rows = of_step(1, self.seq_len, world_size)
            kept = self.trained_with("device_batch_size")
            self.rows = kept or auto_device_batch_size(self.model, all_rows, self.seq_len)
        self.micro_batches = of_step(self.rows, self.seq_len, world_size)

    def wants_graphs(self, flag: bool | None) -> bool:
        """Whether to replay micro-batches as CUDA graphs: as --cuda-graph says, or else if the memory suffices."""
        wanted = flag or (flag is None and self.device.type == "cuda")
        rows = 0 if flag else self.rows
        problem = graphs_problem(self.model, rows, self.seq_len, self.world_size) if wanted else None
        if problem:
            print0(f"no CUDA graphs: {problem}")
        return wanted and problem is None

    def describe(self, plan: MethodPlan, options: PretrainingOptions) -> None:
        """Sets what checkpoints and metrics.jsonl say of the run."""
        args, batch, val_data = self.args, {"device_batch_size": self.rows}, validation_text(self.survey)
        tunable = {**asdict(options), "num_iterations": self.num_steps, "data_dir": str(self.survey.folder)}
        changes = {**tunable, **batch, "val_data": val_data}
        more = {"max_seq_len": self.seq_len, "text": text_digest(self.survey)}
        self.record(self.settings, plan.recipes, changes, **more, **batch)
        spread = {"world_size": self.world_size, "parallel": args.parallel}
        self.start_record = {
            "backend": self.backend,
            "total_batch_size": args.total_batch_size,
            "num_params": self.model.num_scaling_params(),
            "flops_per_token": self.flops_per_token,
            "vocab_size": self.model.config.vocab_size,
            "gemm_work": plan.work(self.model),
            "head": self.model.lm_head.precision,
            "recipes": {r.name: {gemm: str(getattr(r, gemm)) for gemm in report.GEMMS} for r in plan.recipes},
            "config_key": comparison_key(self.settings | tunable | spread),
            "text": more["text"],
            "text_tokens": self.text_tokens,
            "val_text": val_data,
            "val_text_tokens": count_tokens(self.val_text, self.tokenizer),
            "tokenizer": self.tokenizer.fingerprint(),
            **batch,
        }

    def announce(self, plan: MethodPlan) -> None:
        """Prints the model, the steps and the batch."""
        config, num_params, tokens = self.model.config, self.model.num_scaling_params(), self.args.total_batch_size
        total_tokens = tokens * self.num_steps
        blocks: dict[tuple[str, str], list[str]] = {}
        for name, layer in self.model.named_modules():
            if isinstance(layer, nf.QuantLinear):
                _, _, block, kind = name.split(".", 3)
                blocks.setdefault((layer.recipe.name, kind), []).append(block)
        methods: dict[str, list[str]] = {}
        for (method, kind), of in blocks.items():
            kind += f" of block {', '.join(of)}" * (len(of) < config.n_layer)
            methods.setdefault(method, []).append(kind)
        work = [f"{100 * s:.1f}% in {b} bits" for b, s in plan.work(self.model).items() if s]
        # The report of the conversion has said two shares: that of the converted layers, and the rest.
        more_work = len(work) > 2 or len(plan.recipes) > 1
        lines = {
            "model": f"{num_params:,} parameters: {config.n_layer} layers, width {config.n_embd}, "
            f"{config.n_head} heads, vocabulary {config.vocab_size:,}",
            "steps": f"{self.num_steps:,} of {tokens:,} tokens: {total_tokens:,} tokens, "
            f"{total_tokens / num_params:.2f} per parameter, {self.flops_per_token * total_tokens:.2e} FLOPs",
            "batch": f"{self.rows} x {self.seq_len} tokens, {self.world_size} process(es), "
            f"{self.micro_batches} micro-batch(es) a step",
            **({"GEMM work": f"{', '.join(work)} (blocks and output head)"} if more_work else {}),
            **({method: f"in {', '.join(kinds)}" for method, kinds in methods.items()} if len(methods) > 1 else {}),
            **({"output head": f"FP8, {fp8_products(self.device.type)}"} if self.model.lm_head.quantizes else {}),
            "backend": self.backend,
            "output": self.folder,
        }
        print0(f"Training {self.model_tag}:\n{aligned(lines)}")

    def batches(self, position: Any) -> Batches:
        order = self.args.data_seed, self.args.shuffle_documents
        source, of_step = Documents(self.tokenizer, self.seq_len, self.text, *order), self.world_size
        return packed_rows(source, self.rows, self.device, of_step * self.micro_batches, position)

    def evaluate(self, last: bool) -> dict[str, float]:
        """Measures the bits per byte of the validation text with the method's own forward pass, and in BF16 (FP32 on a
        CPU)."""
        if not due(self.args.eval_every, self.step, last):
            return {}
        with self.evaluating():
            with self.training_step.weights_once(1):
                bpb = bpb_bf16 = self.bits_per_byte(self.training_step.forward)
            if groups_of(self.model) or self.model.lm_head.quantizes:
                # This forward pass is not compiled, because it would cost a second compilation of the same layers.
                with nf.full_precision(self.model):
                    bpb_bf16 = self.bits_per_byte(self.model)
        return {"val_bpb": bpb, "val_bpb_bf16": bpb_bf16}

    def bits_per_byte(self, forward: Any) -> float:
        source = Documents(self.tokenizer, self.seq_len, self.val_text)
        batches = packed_rows(source, self.rows, self.device, num_rows=self.num_rows)
        with self.training_step.autocast():
            batches = self.signals.watch(batches, self.device)
            batches = self.progress.meanwhile(batches, self.eval_steps, "evaluation")
            return evaluate_bpb(forward, batches, self.eval_steps, self.token_bytes)

    def before_step(self, last: bool) -> None:
        if self.step > 0 and due(self.core_every, self.step, last):
            self.measure_core()
        if self.step > 0 and due(self.args.sample_every, self.step, last):
            self.draw_samples()

    def measure_core(self) -> None:
        """Evaluates the CORE metric. If its data cannot be read, a warning says so, and the metric is left out from
        then on."""
        try:
            with self.evaluating(), unsharded(self.model), self.training_step.weights_once(1):
                with self.training_step.autocast(), nf.quantize_weights_once(self.model):
                    most = self.args.core_metric_max_per_task
                    results = evaluate_model(self.model, self.tokenizer, self.device, max_per_task=most)
        except (UserError, ValueError) as e:
            self.progress.write(f"warning: no CORE metric from here on: {one_line(e)}")
            self.core_every = -1
            return
        core_metric = self.state["numbers"]["core_metric"] = results["core_metric"]
        for note in results["notes"]:
            self.progress.write(f"note: {note}")
        self.progress.write(f"step {self.step:05d} | CORE metric {core_metric:.4f}")
        self.metrics.append("core", self.step, core_metric=core_metric)
        self.tracker.log({"step": self.step, "core_metric": core_metric}, step=self.step)

    def draw_samples(self) -> None:
        """Prints continuations of a few prompts."""
        with self.evaluating(), unsharded(self.model):
            if self.rank == 0:
                self.samples = draw_samples(self.model, self.tokenizer)
        for sample in self.samples:
            self.progress.write(f"  {sample}")
        self.metrics.append("sample", self.step, samples=self.samples)

    def report(self) -> None:
        num_params, numbers = self.model.num_scaling_params(), self.state["numbers"]
        total_tokens = self.args.total_batch_size * self.num_steps
        about = {
            "Flags": changed_flags(self.args, parse_args([])),
            "Number of parameters": num_params,
            "Number of FLOPs per token": self.flops_per_token,
            "Number of training tokens": total_tokens,
            "Tokens : Params ratio": total_tokens / num_params,
            "Device batch size": self.rows,
            "Layers": str(self.model.nf_report).splitlines(),
        }
        outcome = {
            "Minimum validation bpb": self.state["best"].get("val_bpb"),
            "Final validation bpb": numbers.get("val_bpb"),
            "Final validation bpb, BF16 forward": numbers.get("val_bpb_bf16"),
            "CORE metric estimate": numbers.get("core_metric"),
            "MFU %": f"{self.mfu:.2f}%" if self.mfu is not None else None,
            "Total training FLOPs": f"{self.flops_per_token * total_tokens:.2e}",
        }
        self.log_report("Base model training", about, outcome)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    check_model_tag(args.model_tag)
    if args.resume_from_step != -1:  # A row that the run's own checkpoints hold needs no --recipes.
        name = families.family_of_flags(args).run_name(args)
        tag = args.model_tag or f"{name}_{args.method or os.environ.get('QAT_METHOD')}"
        look_back(checkpoint_folder("base", tag))
    run_stage(args, functools.partial(BaseTraining, method=resolve_method(args.method)))


if __name__ == "__main__":
    run_main(main)
