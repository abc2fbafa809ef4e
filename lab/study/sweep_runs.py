"""Plans the runs of a sweep: sizes, variants of methods, and the flags of base_train for each run."""

import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import nanochat_fp4 as nf
from lab.recipes import RECIPES
from nanochat_fp4.cli import UserError, did_you_mean
from nanochat_fp4.data.dataset import survey
from nanochat_fp4.models import llama
from nanochat_fp4.models.cross_entropy import HEADS, default_head
from nanochat_fp4.nvfp4.methods import METHODS, REGISTERED
from nanochat_fp4.nvfp4.phases import MethodPlan
from nanochat_fp4.nvfp4.recipes import Recipe, to_record

# Kinds of layers -> the pattern of their names, in both families of models.
LAYER_KINDS = {"qkv": "*.attn.c_[qkv]", "out": "*.attn.c_proj", "up": "*.mlp.c_[fg]*", "down": "*.mlp.c_proj"}


def changed(method: str, *changes: str) -> tuple[str, ...]:
    """Returns the flags of base_train for a method and changes of it, in any order.

    A change is a flag, a part 'pattern=method' of --layer-methods, or a part 'fraction=method' of --method-phases.
    """
    words = [word for change in changes if change and not change.startswith("--") for word in change.split(",")]
    phases = [word for word in words if re.match(r"[\d.]+=", word)]
    layers = [word for word in words if word not in phases]
    flags = [f"--layer-methods={','.join(layers)}"] if layers else []
    flags += [f"--method-phases={','.join(phases)}"] if phases else []
    return (f"--method={method}", *flags, *(change for change in changes if change.startswith("--")))


# Variants that are not rows of the method table: label -> flags of base_train. base_train prints the GEMM work of a
# variant by bits, and the results store it.
VARIANTS: dict[str, tuple[str, ...]] = {
    "clover_late_bf16": changed("clover", "0.85=bf16"),
    "clover_late_forward": changed("clover", "0.85=fig1e_ms_eden"),  # It ends with the backward pass alone quantized.
    "clover_late_backward": changed("clover", "0.85=fig2_1x16_four_over_six"),  # It ends with the forward alone.
    "clover_late_fp8": changed("clover", "0.7=clover_fp8_forward"),  # A tenth of the GEMM work is in 8 bits.
    "clover_warmup": changed("bf16", "0.1=clover"),
    "clover_up_fp8": changed("clover", f"{LAYER_KINDS['up']}=clover_fp8_forward"),
    # FP8 in the whole forward, and in one backward GEMM of all layers but the MLP's second matrix.
    **{
        f"clover_fp8_forward_{gemm}_but_down": changed(
            "clover_fp8_forward", *(f"{kind}=clover_fp8_forward_{gemm}" for kind in ("*.attn.*", LAYER_KINDS["up"]))
        )
        for gemm in ("dgrad", "wgrad")
    },
    # The output head in the precision that is not the method's default.
    **{
        f"{method}_head_{head}": (f"--method={method}", f"--head={head}")
        for method in ("bf16", "fp8", "clover_fp8_forward")
        for head in HEADS
        if head != default_head(method)
    },
    "clover_less_decay": changed("clover", "--weight-decay=0.1"),  # nanochat has 0.2.
    "clover_separate_qkv": changed("clover", "--separate-qkv"),  # As in the paper's nanochat runs.
}

# Flags of base_train and methods that stored runs have and this code lacks, and the last commit that has them. Of other
# methods a run's own commit is named.
FEEDBACK = "clover_feedback", "clover_feedback_late", "clover_search_feedback", "clover_refined", "clover_mixed"
LEFT = {"oscillation": "c116c2ad", "exact-relu-squared": "71720778", **dict.fromkeys(FEEDBACK, "857ae5f7")}


def parse_number(text: str) -> int:
    """Reads a number with K, M or B behind it: '100M' is 100,000,000. Raises UserError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip().upper())
    if not match:
        raise UserError(f"{text!r} is not a number of tokens; write for example 100M")
    return round(float(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}[match[2]])


def size_flags(size: str) -> list[str]:
    """Returns the flags of base_train for a model of this size, its batch and its sequence length. Raises UserError for
    an unknown size."""
    if match := re.fullmatch(r"d([1-9]\d*)", size):
        shape = [f"--depth={match[1]}", "--max-seq-len=1024", "--window-pattern=L", "--total-batch-size=65536"]
        return [*shape, "--eval-tokens=2097152"]
    if size.startswith("llama-"):  # A step has 512 sequences of 512 (Table 4). The published micro-batch is 128.
        name = size.removeprefix("llama-")
        llama.config_from_size(name, vocab_size=1)
        shape = [f"--llama={name}", "--max-seq-len=512", "--total-batch-size=262144", "--device-batch-size=128"]
        return [*shape, "--eval-tokens=2097152"]
    if size == "tiny":  # Two layers of width 128 are the smallest model whose GEMMs can all be rotated by 128.
        return (
            "--depth=2 --aspect-ratio=64 --head-dim=64 --max-seq-len=64 --window-pattern=L --device-batch-size=8 "
            "--total-batch-size=512 --matrix-lr=0.32 --embedding-lr=4.8 --unembedding-lr=0.064 --eval-tokens=2048"
        ).split()
    raise UserError(f"unknown size {size!r}; use d<depth>, llama-30M, llama-50M, llama-100M, llama-200M or tiny")


def method_flags(method: str) -> tuple[str, ...]:
    """Returns the flags of base_train for a method, a variant or "label: flags". Raises UserError if there is no such
    method, and for flags that cannot be read."""
    if ":" in method:
        label, _, text = method.partition(":")
        where, own = f"--variant {label.strip()!r}", tuple(text.split())
        refuse_apart(own, where)
        try:
            method_plan(own)
        except ValueError as e:
            raise UserError(f"{where}: {e}") from None
        return own
    if method in VARIANTS:
        return VARIANTS[method]
    try:
        nf.get_recipe(method)
    except ValueError:
        meant = did_you_mean(method.lower(), [*METHODS, *REGISTERED, *VARIANTS]) or f"use one of {', '.join(METHODS)}."
        mend = 'A method of your own is known by RECIPES=FILE.py; flags of base_train are a --variant "label: flags"'
        raise UserError(f"unknown method {method!r}; {meant} {mend}") from None
    return (f"--method={method}",)


def refuse_apart(flags: Sequence[str], where: str) -> None:
    """Raises UserError if a flag and its value are separate words. Steps, branches and the key of a run are read from
    flags in the form --name=value."""
    if apart := [flag for flag in flags if not flag.startswith("--")]:
        raise UserError(f"{where}: {apart[0]!r} stands apart; write flags of base_train as --name=value")


def flag_values(flags: Sequence[str]) -> dict[str, str]:
    """Returns a dict from names, without --, to values, for flags in the form --name=value. If a name is repeated, the
    last value counts."""
    return dict(flag.removeprefix("--").partition("=")[::2] for flag in flags)


def method_changes(own: Sequence[str]) -> tuple[str, str]:
    """Returns the values of (--layer-methods, --method-phases) in a method's flags."""
    values = flag_values(own)
    return values.get("layer-methods", ""), values.get("method-phases", "")


def left_code(flags: Sequence[str]) -> list[str]:
    """Returns the names in a stored run's flags that this code lacks: flags of base_train, without --, and methods of
    the run, of its phases and of its layers. A run without such names can be planned."""
    values = flag_values(flags)
    pairs = filter(None, ",".join(method_changes(flags)).split(","))
    names = dict.fromkeys([values.get("method", "clover"), *(pair.rpartition("=")[2].strip() for pair in pairs)])
    return [name for name in values if name in LEFT] + [name for name in names if not known(name)]


def known(method: str) -> bool:
    try:
        return bool(nf.get_recipe(method))
    except ValueError:
        return False


def gives_its_tokens(result: dict) -> bool:
    """Returns True if the flags of a stored run say how long it is and how long its rows are."""
    flags = flag_values(result["flags"])
    trains = int(flags.get("total-batch-size", 0)) * int(flags.get("num-iterations", result["steps"]))
    return trains == result["tokens"] and "max-seq-len" in flags


def method_plan(own: Sequence[str]) -> MethodPlan:
    """Returns the plan of layers and phases in a method's flags of base_train. Raises ValueError."""
    return MethodPlan.parse(flag_values(own).get("method", "clover"), *method_changes(own))


def own_recipes(own: Sequence[str]) -> str:
    """Returns the recipes of a method's flags that a user's file has registered, as text. It is empty for methods of
    the repository.

    The name of such a method says little, because a user edits the file. A run that was trained with another recipe of
    this name must not count as done.
    """
    known = (*METHODS.values(), *RECIPES.values())
    of_the_repository = {part for row in known for part in (row, row.final)}
    recipes = [recipe for recipe in method_plan(own).recipes if recipe not in of_the_repository]
    return json.dumps([to_record(dataclasses.replace(recipe, summary="")) for recipe in recipes]) if recipes else ""


def begins_late(flags: tuple[str, ...], fraction: float) -> bool:
    """Returns True if a method has no phase that begins before this fraction of the steps. It can then branch from
    another run there."""
    _, phases = method_changes(flags)
    return not fraction or fraction <= float(phases.partition("=")[0] or 1)


def computation(recipe: Recipe) -> Recipe:
    """Returns a recipe without what does not change its numbers."""
    return dataclasses.replace(recipe, name="", summary="", late=None)


def computed(label: str, flags: Sequence[str]) -> str:
    """Returns a key of what a run's method computes. Runs with different labels have one key if their methods compute
    the same from beginning to end. A run stores its key, because the rows of its method may change or leave later."""
    plan = method_plan(flags)
    if plan.layers:
        return label
    phases = [(at, to_record(computation(of))) for at, of in ((0.0, plan.method), *plan.phases)]
    text = json.dumps(phases)
    if not own_recipes(flags):  # Functions of the repository count by name, as its other arithmetic.
        text = re.sub(r'("quantize": "\w+)[^"]*', r"\1", text)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def until(own: tuple[str, ...], fraction: float) -> tuple:
    """Returns a description of what a method computes before this fraction of the steps. If it is equal for two
    methods, their runs are the same until there."""
    plan = method_plan(own)
    phases = [(0.0, plan.method), *plan.phases]
    recipes = [(start, computation(recipe)) for start, recipe in phases if start < fraction]
    layers = [(pattern, computation(recipe)) for pattern, recipe in plan.layers]
    of_the_plan = ("--method", "--layer-methods", "--method-phases")
    others = tuple(flag for flag in own if flag.partition("=")[0] not in of_the_plan)
    return recipes, [layer for layer in layers if len(recipes) > 1 or layer[1] != recipes[0][1]], others


@dataclass(frozen=True)
class Run:
    """One training run.

    method: its label
    flags:  the flags of base_train, without the model tag
    data:   the data_key of the text
    own:    the own_recipes of its method
    """

    method: str
    size: str
    seed: int
    flags: tuple[str, ...]
    data: str = ""
    own: str = ""

    @property
    def tag(self) -> str:
        """The model tag of the run: its size, method and seed, and a hash of its flags, text and own recipes."""
        words = [*self.flags, self.data, *filter(None, [self.own])]
        key = hashlib.sha256("\n".join(words).encode()).hexdigest()[:8]
        return f"{self.size}_{self.method}_s{self.seed}_{key}"

    @property
    def branch(self) -> tuple[str, int] | None:
        """The checkpoint (tag, step) from which this run branches, or None."""
        tag, _, step = flag_values(self.flags).get("branch-from", "").rpartition("@")
        return (tag, int(step)) if tag else None


def plan(
    methods: Sequence[str], sizes: Iterable[str],
    seeds: Iterable[int], *, tokens: int = 0, ratio: float = 0.0, extra: Sequence[str] = (), data: str = "",
    bf16_until: float = 0.0, share_until: Sequence[float] = (), vary_data: bool = False,
) -> list[Run]:  # fmt: skip
    """Returns all runs of a sweep, seed after seed, so that an interrupted sweep has complete seeds.

    tokens:      the length of a run in tokens, or
    ratio:       the length of a run in tokens per parameter
    extra:       flags of base_train for all runs
    data:        the data_key of the text
    bf16_until:  all runs of a seed branch from its BF16 run at this fraction of the steps
    share_until: fractions of the steps at which a method may branch. It branches at the last fraction up to which an
                 earlier method computes the same.
    vary_data:   each seed has an order of the data of its own

    Raises UserError for arguments that do not go together.
    """
    if bool(tokens) == bool(ratio) or ratio < 0:
        raise UserError("say how long a run is: either --tokens=100M or --ratio=20 (tokens per parameter)")
    for flag, fraction in (("--bf16-until", bf16_until), *(("--share-until", f) for f in share_until)):
        if fraction and not (0 < fraction < 1 and tokens):
            raise UserError(f"{flag}={fraction:g}: expected a fraction of the steps, between 0 and 1, and --tokens")
    if bf16_until and share_until:
        raise UserError("--bf16-until and --share-until exclude each other; leave one of them out")
    names = labels(methods)
    for i, name in enumerate(names):
        if not name or "/" in name:
            raise UserError(f"--variant {methods[i]!r}: expected a label without /, a colon, flags of base_train")
        if name in names[:i]:
            raise UserError(f"--methods and --variant have {name} twice; give each a label of its own")
    refuse_apart(extra, "--extra")
    usual = ("--core-metric-every=-1", "--sample-every=-1", *extra, "--shuffle-documents")
    own_flags, runs = [method_flags(m) for m in methods], []
    for seed, size in itertools.product(seeds, sizes):
        shape = (*size_flags(size), *usual)
        seed_flags = (f"--seed={seed}", *([f"--data-seed={seed}"] if vary_data else []))
        steps = max(1, tokens // int(flag_values(shape)["total-batch-size"]))
        horizon = f"--num-iterations={steps}" if tokens else f"--target-param-data-ratio={ratio:g}"
        branch: tuple[str, ...] = ()
        if bf16_until:
            if (at := math.ceil(bf16_until * steps)) == steps:
                raise UserError(f"--bf16-until={bf16_until:g} leaves none of {steps} steps; branch earlier")
            flags = (*shape, horizon, "--method=bf16", f"--save-every={at}", "--keep-last=-1", *seed_flags)
            runs.append(Run("bf16", size, seed, flags, data))
            branch = (f"--branch-from={runs[-1].tag}@{at}",)
        points = branches(own_flags, share_until, steps)
        tags: list[str] = []  # The tags of the methods' runs.
        for i, (label, own) in enumerate(zip(names, own_flags)):
            if not begins_late(own, bf16_until):
                raise UserError(f"--bf16-until={bf16_until:g}: {label} changes before that")
            if branch and own == ("--method=bf16",):
                continue  # It is the run from which the others branch.
            more = branch
            if saved := sorted({at for first, at in filter(None, points) if first == i}):
                more = (f"--save-at={','.join(map(str, saved))}", "--keep-last=-1")
            if points[i]:
                first, at = points[i]
                more = (f"--branch-from={tags[first]}@{at}", *more)
            flags = (*shape, horizon, *own, *more, *seed_flags)
            runs.append(Run(label, size, seed, flags, data, own_recipes(own)))
            tags.append(runs[-1].tag)
    return runs


def same_head(result: dict) -> list[str]:
    """Returns the flag that gives a stored run's output head to another run with its flags, if they would choose
    another one. Runs that were stored without their head, and without a flag for it, had it in BF16."""
    flags, head = flag_values(result["flags"]), result.get("head") or "bf16"
    return [] if "head" in flags or head == default_head(flags.get("method", "")) else [f"--head={head}"]


def again(results: Iterable[dict], data: str) -> list[Run]:
    """Returns the runs of a stored study, to be trained again on the text with this data_key.

    A run's tag depends on the text. A branch therefore starts from the new tag of the run from which it once started.
    Raises UserError if the study lacks this run.
    """
    waiting = [
        Run(r["method"], r["size"], r["seed"], (*r["flags"], *same_head(r)), data, own_recipes(r["flags"]))
        for r in results
    ]
    tags: dict[str, str] = {}  # The beginning of a tag, "size_method_seed" -> the new tag.

    def begins(tag: str) -> str:
        return re.sub(r"_[0-9a-f]{8}$", "", tag)

    found = []
    while waiting:
        ready = [run for run in waiting if not run.branch or begins(run.branch[0]) in tags]
        if not ready:
            raise UserError(f"no run of the study is {begins(waiting[0].branch[0])}, from which others branch")
        for run in ready:
            waiting.remove(run)
            if run.branch:
                tag, step = run.branch
                old, new = f"--branch-from={tag}@{step}", f"--branch-from={tags[begins(tag)]}@{step}"
                run = dataclasses.replace(run, flags=tuple(new if flag == old else flag for flag in run.flags))
            tags[begins(run.tag)] = run.tag
            found.append(run)
    return found


def branches(flags: Sequence[tuple[str, ...]], fractions: Sequence[float], steps: int) -> list[tuple[int, int] | None]:
    """Returns for each method the point (index of an earlier method, step) at which it may branch, or None.

    steps: the length of runs whose flags have no --num-iterations
    """
    found: list[tuple[int, int] | None] = [None] * len(flags)
    for fraction in sorted(fractions):
        alike = [until(own, fraction) for own in flags]
        for i, own in enumerate(flags):
            if (first := alike.index(alike[i])) < i:
                last = int(flag_values(own).get("num-iterations", steps))
                if (at := math.ceil(fraction * last)) < last:  # At the end of a run nothing is left to train.
                    found[i] = first, at
    return found


def labels(methods: Iterable[str]) -> list[str]:
    """Returns the labels of methods, which stand before the colon of "label: flags"."""
    return [m.partition(":")[0].strip() for m in methods]


def data_key(data_dir: str) -> str:
    """Returns a hash of the names and sizes of the files of a text. It does not depend on where the folder is."""
    files = survey(data_dir).files if Path(data_dir).exists() else []
    named = sorted((path.name, path.stat().st_size) for path in files)
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:12]
