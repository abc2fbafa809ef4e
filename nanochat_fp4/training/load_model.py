"""
Loads models from checkpoints, and says where a run goes on. build_model loads from a folder, and load_model from a
stage of the base directory.

The model has the weights that it was trained to. It is neither compiled nor converted. nanochat's own checkpoints can
be loaded, too.
"""

import argparse
import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nanochat_fp4 as nf
from nanochat_fp4.cli import STAGE, UserError, did_you_mean, format_bytes, one_line
from nanochat_fp4.common import (
    base_dir_variable,
    fail_together,
    get_base_dir,
    get_dist_info,
    of_all_ranks,
    print0,
    resolve_method,
    set_cpu_threads,
)
from nanochat_fp4.data.dataloader import join_positions
from nanochat_fp4.data.tokenizer import RustBPETokenizer, get_tokenizer
from nanochat_fp4.evaluation.report import FOLDERS
from nanochat_fp4.hardware import physical_memory
from nanochat_fp4.locks import running
from nanochat_fp4.models.cross_entropy import default_head
from nanochat_fp4.models.families import config_from_record, family_of_config
from nanochat_fp4.models.gpt import GPT, ROTARY_FACTOR, GPTConfig
from nanochat_fp4.nvfp4.methods import REGISTERED, register
from nanochat_fp4.nvfp4.phases import MethodPlan
from nanochat_fp4.nvfp4.recipes import from_record
from nanochat_fp4.training import checkpoint_manager as checkpoints
from nanochat_fp4.training.checkpoint_manager import check_model_tag, list_steps, load_checkpoint, read_meta
from nanochat_fp4.training.flags import OF_THE_CALL

SCRIPTS = {"base": "base_train", "mid": "mid_train", "sft": "chat_sft", "rl": "chat_rl"}


def checkpoint_folder(source: str, model_tag: str) -> Path:
    """Returns the folder of the checkpoints of a stage (base, mid, sft or rl) under a model tag. Raises UserError
    for a tag that is not the name of one folder."""
    check_model_tag(model_tag)
    return Path(get_base_dir()) / FOLDERS[source] / model_tag


def build_model(
    checkpoint_dir: str | os.PathLike, step: int | None, device: str | torch.device, phase: str
) -> tuple[GPT, RustBPETokenizer, dict[str, Any]]:
    """
    Returns (model, tokenizer, metadata) of a checkpoint. The model is neither compiled nor converted, whatever it was
    trained with; the metadata name the method of its training. step=None takes the newest intact checkpoint.

    `phase` is 'train' or 'eval'. BF16 weights become FP32 on a CPU and on mps, as in nanochat. Only the weights of a
    --state=lean that will be trained stay BF16. Raises UserError for a damaged checkpoint, for a config that does not
    fit the weights, and for a tokenizer that is not the one in the base directory.
    """
    weights, _, meta = load_checkpoint(checkpoint_dir, step, device)
    where = f"checkpoint of step {meta['step'] if step is None else step} in {checkpoint_dir}"
    return *model_of(weights, meta, where, device, phase), meta


def model_of(
    model_data: dict[str, torch.Tensor], meta: dict[str, Any], where: str, device: str | torch.device, phase: str
) -> tuple[GPT, RustBPETokenizer]:
    """Does the work of build_model for a checkpoint whose weights and metadata are loaded already. `where` names the
    checkpoint in errors."""
    device = torch.device(device)
    register_recipes(meta, where)
    model_data = {name.removeprefix("_orig_mod."): tensor.to(device) for name, tensor in model_data.items()}
    lean = meta.get("user_config", {}).get("state") == "lean"
    if device.type in ("cpu", "mps") and not (phase == "train" and lean):
        model_data = {name: t.float() if t.dtype == torch.bfloat16 else t for name, t in model_data.items()}
    try:
        config = config_from_record(meta["model_config"], model_data)
        # The numbers are checked before anything is allocated, because a wrong one could ask for too much memory or
        # time.
        layers = len({name.split(".")[2] for name in model_data if name.startswith("transformer.h.")})
        if config.n_layer != layers:
            raise UserError(f"{where}: its weights do not fit its model config ({layers} layers, not {config.n_layer})")
        check_model_fits(config, device)
        set_cpu_threads(device, config.n_embd)
        with torch.device("meta"):
            model = family_of_config(config).model(config)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as e:
        raise UserError(f"{where}: its model config is not one of this GPT ({one_line(e)[:150]})") from e
    load_weights(model, model_data, where)
    model.lm_head.precision = meta.get("user_config", {}).get("head") or "bf16"
    model.prepare()
    model.train(phase == "train")
    tokenizer = get_tokenizer()
    check_tokenizer(meta, tokenizer, where)
    return model, tokenizer


def register_recipes(meta: dict[str, Any], where: str) -> None:
    """Registers the recipes that a checkpoint was trained with, so that their names are methods. A record that this
    version cannot read registers nothing, and its name is then unknown: --method and --recipes take its place.

    Raises UserError if a name stands for another recipe in this process, or for one with another function.
    """
    for record in meta.get("recipes", ()):
        try:
            recipe = from_record(record)
        except (LookupError, TypeError, ValueError) as e:
            if isinstance(e, LookupError) and record["name"] in REGISTERED:
                mend = (
                    f"{where} was trained with another recipe of this name; give the file of that time, or a new name"
                )
                raise UserError(f"--recipes or RECIPES, {record['name']}: {one_line(e)}: {mend}") from e
            continue
        try:
            register(recipe)
        except ValueError as e:
            raise UserError(
                f"{where}: the recipe that it was trained with has a name that --recipes or RECIPES gives to another "
                f"recipe ({one_line(e)}); leave the file out, or rename the row in it"
            ) from e


def check_model_fits(config: GPTConfig, device: torch.device) -> None:
    """Raises UserError if the weights alone need more than the device's memory. It is called before anything is
    allocated."""
    matrices = 12 * config.n_layer * config.n_embd**2 + 2 * config.vocab_size * config.n_embd
    tables = 2 * ROTARY_FACTOR * config.sequence_len * (config.n_embd // config.n_head)
    gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if gpu else physical_memory()
    if 4 * (matrices + tables) > memory:
        raise UserError(
            f"a model of {config.n_layer} layers of width {config.n_embd} for {config.sequence_len} tokens has weights "
            f"of {format_bytes(4 * (matrices + tables))}, and this device has {format_bytes(memory)} of memory; lower "
            "--depth, --aspect-ratio or --max-seq-len"
        )


def load_weights(model: GPT, model_data: dict[str, torch.Tensor], where: str) -> None:
    """Gives a model the checkpoint's tensors themselves, without a copy. Raises UserError if they do not fit."""
    try:
        shapes = {name: p.shape for name, p in model.state_dict().items()}
        model.load_state_dict(model_data, strict=True, assign=True)
        if any(p.shape != shapes[name] or not p.is_floating_point() for name, p in model.state_dict().items()):
            raise TypeError("a weight that is no floating-point tensor")
    except (RuntimeError, AttributeError, TypeError, ValueError) as e:
        raise UserError(f"{where}: its weights do not fit its model config ({one_line(e)[:200]})") from e


def check_tokenizer(meta: dict[str, Any], tokenizer: RustBPETokenizer, where: str = "the checkpoint") -> None:
    """Raises UserError unless the model was trained with this tokenizer. The fingerprint and the size of the
    vocabulary are compared, each if the metadata have it."""
    now = {"fingerprint": tokenizer.fingerprint(), "tokens": tokenizer.get_vocab_size()}
    before = {"fingerprint": meta.get("run_config", {}).get("tokenizer")}
    before["tokens"] = meta.get("model_config", {}).get("vocab_size")
    if different := [k for k, v in before.items() if v not in (None, now[k])]:
        what = " and ".join(f"{k} {before[k]}, and the one here has {now[k]}" for k in different)
        raise UserError(
            f"{where} was trained with a tokenizer that has {what}; use the base directory (NANOCHAT_BASE_DIR) in "
            "which it was trained, or train a new model"
        )


def checkpoints_made_with(tokenizer: RustBPETokenizer) -> list[str]:
    """Returns the runs in the base directory whose newest checkpoint fits the tokenizer, like
    'base_checkpoints/d20_clover'."""
    runs = []
    for place in FOLDERS.values():
        for folder in sorted(Path(get_base_dir(), place).glob("*/")):
            # If the newest metadata are damaged, older ones are read.
            meta = next(filter(None, (read_meta(folder, step) for step in list_steps(folder))), None)
            with contextlib.suppress(UserError):  # A checkpoint of another tokenizer raises UserError.
                if meta:
                    check_tokenizer(meta, tokenizer)
                    runs.append(f"{place}/{folder.name}")
    return runs


def checkpoint_method(meta: dict[str, Any], flag: str | None = None) -> str:
    """Returns the name of the QAT method with which a checkpoint computes its forward pass. If the method changed in
    training, this is the last one. `flag`, the value of --method, takes precedence. nanochat's own checkpoints have no
    method and compute in bf16."""
    config = meta.get("user_config", {})
    if flag is None and config.get("quantization") == "none":
        return "bf16"
    name = resolve_method(flag or config.get("method") or "bf16")
    return MethodPlan.parse(name, phases="" if flag else config.get("method_phases") or "").at(1.0).name


def choose_method(model: GPT, meta: dict[str, Any], flag: str | None) -> str:
    """Returns checkpoint_method(meta, flag). If `flag` names a method, the model gets the output head of its runs."""
    method = checkpoint_method(meta, flag)
    if flag:
        model.lm_head.precision = default_head(method)
    return method


def find_model_tag(source: str, model_tag: str | None) -> str:
    """Returns the tag of the model to take from a stage. Without model_tag this is, of the tags d<number>..., the one
    with the largest number. Of several with the same number, or if no tag has this form, a model of a 4-bit or 8-bit
    method comes before the bf16 baseline, and then the newest one. If there is no such model, the UserError names the
    command that makes one, and how to talk to one of another stage."""
    check_model_tag(model_tag)
    folder, variable = Path(get_base_dir()) / FOLDERS[source], base_dir_variable(Path(get_base_dir()))
    tags = [path for path in sorted(folder.glob("*/")) if list_steps(path)]
    if model_tag is not None and (folder / model_tag).is_dir():
        return model_tag
    if model_tag is not None or not tags:
        there = f" (there is {', '.join(path.name for path in tags[:8])})" if tags else ""
        what = f"{source} checkpoint {model_tag or ''}".rstrip()
        hint = f" --model-tag={model_tag}" if model_tag else f", or all stages with {variable}bash speedrun_fp4.sh"
        hint += ", or set NANOCHAT_BASE_DIR, if your models are elsewhere"
        others = [s for s, place in FOLDERS.items() if any(map(list_steps, folder.parent.glob(f"{place}/*/")))]
        if not tags and others:
            hint += f"; there is a model of {' and '.join(others)}: {variable}{STAGE}chat_cli -i {others[-1]}"
        raise UserError(f"there is no {what} in {folder}{there}; make it with {variable}{STAGE}{SCRIPTS[source]}{hint}")

    def rank(path: Path) -> tuple[int, bool, float]:
        method = read_meta(path, list_steps(path)[0]).get("user_config", {}).get("method")
        return int(re.match(r"d(\d+)|", path.name)[1] or -1), method not in (None, "bf16"), path.stat().st_mtime

    return max(tags, key=rank).name


def load_model(
    source: str, device: str | torch.device, phase: str, model_tag: str | None = None, step: int | None = None
) -> tuple[GPT, RustBPETokenizer, dict[str, Any]]:
    """
    Loads a stage's model from the base directory with build_model. Returns (model, tokenizer, metadata), and the
    metadata have the model's tag.

    `source` is base, mid, sft or rl. `model_tag` is by default that of find_model_tag, and `step` the newest intact
    one. If there is no such checkpoint, the UserError names the command that makes it.
    """
    if source not in FOLDERS:
        raise UserError(f"unknown source {source!r}; use one of {', '.join(FOLDERS)}")
    tag = find_model_tag(source, model_tag)
    model, tokenizer, meta = build_model(checkpoint_folder(source, tag), step, device, phase)
    if model_tag is None:
        print0(f"no --model-tag given: taking {tag}")
    return model, tokenizer, {**meta, "model_tag": tag}


def tokens_read(meta: dict[str, Any]) -> int | None:
    """Returns the number of tokens that a model has read in pre-training, or None if its base model is not there to
    say so."""
    while parent := meta.get("parent"):
        meta = read_meta(checkpoint_folder(parent["stage"], parent["model_tag"]), parent["step"])
    is_base = "stage" not in meta.get("run_config", {"stage": "unknown"})
    batch = meta.get("user_config", {}).get("total_batch_size")
    return meta["step"] * batch if is_base and batch else None


def load_for_inference(
    source: str, device: torch.device, args: argparse.Namespace
) -> tuple[GPT, RustBPETokenizer, dict[str, Any], str]:
    """Loads the model that the flags name, and converts it to --method or else to the method of its training.
    Returns (model, tokenizer, metadata, name of the method)."""
    model, tokenizer, meta = load_model(source, device, "eval", args.model_tag, args.step)
    method = choose_method(model, meta, args.method)
    nf.convert(model, method, backward=False, verbose=False)
    return model, tokenizer, meta, method


# ----------------------------------------------------------------------------------------------------------------------
# Where a run begins

# A run that branches from another run may differ from it in these settings, in the method, and in the head.
BRANCH_SETTINGS = ("layer_methods", "method_phases", "branch_from", "separate_qkv")


def find_resume_step(checkpoint_dir: Path, resume_from_step: int | str, overwrite: bool) -> int | None:
    """
    Returns the step whose checkpoint is resumed, or None for a new run. All ranks must call this function together.

    `resume_from_step` is -1, a step, or 'latest'. Nothing is deleted here. Raises UserError if a new run would be mixed
    with a run that exists already, or if --overwrite would delete a model with which a run of a later stage has begun
    that is still running.
    """
    # torchrun starts all processes again when one of them dies (--max-restarts). Each node has its own count.
    restarts = max(of_all_ranks(int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)))
    if resume_from_step == "latest" or (resume_from_step == -1 and restarts):
        with contextlib.suppress(checkpoints.NoCheckpointError):
            return checkpoints.find_last_step(checkpoint_dir)
        # The stages of a planned run have the plan's own tags, among which a new one is no slip.
        others = [] if os.environ.get("NANOCHAT_BEGAN") else checkpoint_dir.parent.glob("*/")
        meant = did_you_mean(checkpoint_dir.name, [folder.name for folder in others if list_steps(folder)])
        print0(f"{checkpoint_dir} has no checkpoint, so this run begins anew{meant and f'; {meant}'}")
        return None
    if resume_from_step != -1:
        return resume_from_step
    problem, steps = None, list_steps(checkpoint_dir)
    if steps and not overwrite:
        problem = (
            f"{checkpoint_dir} already holds a run (checkpoint of step {steps[0]}); go on with --resume-from-step "
            "latest, start over with --overwrite, or choose another --model-tag"
        )
    elif steps and get_dist_info()[1] == 0:
        places = list(FOLDERS.values())
        later = places[places.index(checkpoint_dir.parent.name) + 1 :]
        folders = [checkpoint_dir.parent.parent / place / checkpoint_dir.name for place in later]
        began = f"began with the model in {checkpoint_dir}; wait for it or stop it"
        problem = next((f"the run in {f} ({who}) {began}" for f in folders if (who := running(f))), None)
    fail_together(problem)  # All ranks have looked for checkpoints when it returns, so from here on one may save.
    return None


def branch_point(text: str, checkpoint_dir: Path) -> tuple[Path, int]:
    """Returns (folder, step) of the run that --branch-from names, which must be another run beside checkpoint_dir.
    Raises UserError for any other text."""
    tag, at, step = text.rpartition("@")
    if not (tag and at and step.isdecimal()):
        raise UserError(f"--branch-from={text!r}: expected '<model tag>@<step>', for example d20_bf16@5000")
    check_model_tag(tag, "--branch-from")
    if tag == checkpoint_dir.name:
        raise UserError(f"--branch-from={text!r} is this run itself; give the new run a --model-tag of its own")
    return checkpoint_dir.parent / tag, int(step)


def check_disk(folder: Path, model: nn.Module, overwrite: bool) -> None:
    """Raises UserError on every rank if the folder's disk has no room for a checkpoint of the model: its weights, and
    two moments for each of them. With `overwrite` the files of the old run count as free. Raises OSError if no file can
    be made there."""
    problem = None
    if get_dist_info()[1] == 0:
        size = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        freed = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) if overwrite else 0
        if (free := shutil.disk_usage(folder).free) + freed < size:
            has = f"its disk has {format_bytes(free)} free; free some space, or set NANOCHAT_BASE_DIR or --model-tag"
            problem = f"{folder} cannot take a checkpoint of {format_bytes(size)}: {has}"
    fail_together(problem)


# ----------------------------------------------------------------------------------------------------------------------
# The run of a checkpoint, and this run

_LOSES = {
    "state lean": "; weights are rounded to BF16 and moments to 8 bits, and their lower bits are lost",
    "state fp32": "; lower bits that --state=lean has not kept do not come back",
}


def check_same_run(now: dict[str, Any], before: dict[str, Any], checkpoint_dir: Path) -> None:
    """Raises UserError, which names the differences, unless the checkpoint has this run's settings that decide the
    bits."""
    different = [f"{k} was {before.get(k)!r} and is now {v!r}" for k, v in now.items() if before.get(k) != v]
    if different:
        why = "; ".join(different) if before else "it does not say how it was trained (nanochat's own?)"
        raise UserError(
            f"the checkpoint in {checkpoint_dir} belongs to another run: {why}. Resume it with the settings it has, "
            "start over with --overwrite in place of --resume-from-step, or choose another --model-tag"
        )


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """
    Returns the changes of settings that a resumed run may have, like 'matrix_lr was 0.02 so far and is 0.01 from here
    on'. `before` and `now` are the metadata of both runs. A setting that only one of them has is left out.
    """

    def settings(meta: dict[str, Any]) -> dict[str, Any]:
        flat = {k: v for k, v in meta["user_config"].items() if k not in OF_THE_CALL}
        return flat | ({"commit": meta["commit"]} if meta["commit"] else {})

    old, new = settings(before), settings(now)
    different = [k for k in old if k in new and old[k] != new[k]]
    return [f"{k} was {old[k]} so far and is {new[k]} from here on{_LOSES.get(f'{k} {new[k]}', '')}" for k in different]


def restore_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], parts: list[dict[str, Any]], meta: dict[str, Any], folder: Path
) -> None:
    """
    Gives the optimizers the state that a checkpoint has. Their options (rates, betas, ...) stay those of this run.

    `parts` is what load_checkpoint returns. Raises UserError if the state is not one of this run. Checksums cannot show
    this, because they only prove that the files are as they were written.
    """
    try:
        states = [part["optimizers"] for part in parts]
        if meta["world_size"] == get_dist_info()[3]:
            (states,) = states
        else:  # A run with another number of processes saved the checkpoint.
            of_each = zip(*states, strict=True)
            states = [o.resharded(list(parts)) for o, parts in zip(optimizers, of_each, strict=True)]
        for optimizer, state in zip(optimizers, states, strict=True):
            groups = zip(optimizer.param_groups, state["param_groups"], strict=True)
            own_options = [own | {"params": saved["params"]} for own, saved in groups]
            optimizer.load_state_dict(state | {"param_groups": own_options})
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as e:
        raise UserError(
            f"the optimizer state of the checkpoint in {folder} is not one of this run "
            f"({type(e).__name__}: {one_line(e)[:150]}); resume from another step"
        ) from e


def position_of(parts: list[dict[str, Any]]) -> Any:
    """Returns the position in the data. If a run with another number of processes saved the checkpoint, it joins the
    positions of all these processes."""
    positions = [part["dataloader"] for part in parts]
    return join_positions(positions) if len(positions) > 1 and any(positions) else positions[0]
