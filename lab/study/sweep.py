"""Trains a model for each method, size and seed with scripts.base_train, and compares them with error bars.

    python -m lab.study.sweep --methods bf16,nvidia,clover --sizes d6,d8 --seeds 3 --tokens 100M --data-dir folder
    python -m lab.study.sweep ... the same again          # goes on where it was interrupted, and skips finished runs
    python -m lab.study.sweep --again d6_longer --data-dir folder       # a study of lab.runs, on its text, once more

Each GPU has one process, or --jobs of them, which train run after run. Without a GPU the runs follow one another in
this process. The methods of a seed have the same initialization and the same order of the data, so their differences
are paired. Each seed has its own order of all documents, so that error bars include the order of the data.
--no-vary-data gives all seeds the same order.

With --bf16-until all methods branch from the BF16 run of their seed, and scatter far less. With --share-until 0.7
methods that compute the same up to 70% of the steps train this part once. A finished run is one small JSON file with
its validation curve: <folder>/runs/<size>_<method>_s<seed>_<key>.json. The key is a hash of all flags and the text, so
sweeps of one folder share runs. The table is printed after every run. All numbers are written to <folder>/<name>.json
and .md. lab.reproduce --results=<folder>/<name>.json makes tables and plots of them.

--sizes    d<depth> is a nanochat of that depth. llama-30M to llama-200M are those of the paper's Tables 3 and 4. tiny
           is for CPUs, and where no text is here it is trained on a small corpus that is made on the spot.
--methods  names of nf.METHODS, of lab/recipes.py, of the files of --recipes or of sweep_runs.VARIANTS
--variant  "label: flags of base_train" adds a method of its own
"""

import argparse
import dataclasses
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab import public_text, table
from lab.runs import names_of, shown_commit, stored
from lab.statistics import gap
from lab.study.sweep_results import LEGEND, data_name, difference_from_paper, of_one_seed, other_lengths, summary
from lab.study.sweep_runs import LEFT, Run, again, data_key, gives_its_tokens, labels, left_code, parse_number, plan
from lab.study.sweep_scheduler import Interrupted, Sweep, base_directory, visible_devices
from nanochat_fp4.cli import ArgumentParser, UserError, format_seconds, run_main
from nanochat_fp4.common import add_recipes_argument, get_base_dir, print0
from nanochat_fp4.data.dataset import EMBEDDED_MB, build_embedded_corpus, ensure_data, found_data, survey
from nanochat_fp4.data.tokenizer import get_tokenizer
from nanochat_fp4.files import atomic_write
from nanochat_fp4.hardware import environment_info
from scripts import base_train, tok_train

METHODS = "bf16,nvidia,four_over_six,tetrajet_v2,clover,clover_search"


def make_folder(folder: Path) -> None:
    """Makes a folder unless it exists. Raises UserError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot create --folder={folder} ({e.strerror}); choose a writable folder") from None


def prepare(folder: Path, data_dir: str | None, vocab_size: int, embedded_mb: float | None = None) -> str:
    """Returns the folder of the data, and puts a tokenizer into `folder`. It is a copy of the base directory's
    tokenizer, or a new one with vocab_size tokens.

    vocab_size:  0 takes the base directory's tokenizer of any size
    embedded_mb: so many MB of the embedded corpus are written to `folder` and used in the place of data_dir, with a
                 tokenizer of their own
    Raises UserError if `folder` already has a tokenizer with more tokens.
    """
    make_folder(folder)
    with base_directory(folder):
        data = build_embedded_corpus(embedded_mb) if embedded_mb else None
        if not data and (data_dir or os.environ.get("DATA_DIR")):  # Own text is stored where its runs look for it.
            data = ensure_data(data_dir).folder
    data = str(data or ensure_data(data_dir).folder)
    base = Path(get_base_dir())
    if has := tokens_of(folder):
        if vocab_size and has > vocab_size:  # Fewer tokens are fine, because a small text does not yield more.
            raise UserError(f"{folder} has a tokenizer of {has:,} tokens, not {vocab_size:,}; give another --folder")
        return data
    if not embedded_mb and (has := tokens_of(base)) and vocab_size in (0, has):
        shutil.copytree(base / "tokenizer", folder / "tokenizer", dirs_exist_ok=True)
        return data
    with base_directory(folder):
        tok_train.main([f"--vocab-size={vocab_size or 32768}", f"--data-dir={data}", "--max-chars=200000000"])
    return data


def tokens_of(base: Path) -> int:
    """Returns the number of tokens of a base directory's tokenizer, or 0 if there is none."""
    if not (base / "tokenizer" / "token_bytes.pt").is_file():
        return 0
    with base_directory(base):
        return get_tokenizer().get_vocab_size()


def with_forwards(sweep: Sweep, runs: Sequence[Run]) -> tuple[list[dict], list[str]]:
    """Returns (the results of the finished runs, notes). If lab.study.forwards has evaluated a run on the same text,
    its result gets "forwards", the bits per byte by forward pass."""
    results, notes = [], []
    for run in runs:
        if (result := sweep.result(run)) is None:
            continue
        results.append(result)
        try:
            found = json.loads((sweep.folder / "forwards" / f"{run.tag}.json").read_text())
            bpb, tokens = found["bpb"], found["eval_tokens"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if tokens != (own := result.get("eval_tokens")):
            mend = f"run lab.study.forwards --eval-tokens={own}, which measures it again"
            notes.append(f"{run.tag}: evaluated on {own} tokens, by lab.study.forwards on {tokens}; {mend}")
            continue
        result["forwards"] = bpb
    return results, notes


def report(sweep: Sweep, name: str, runs: Sequence[Run]) -> tuple[str, list[str]]:
    """Writes the finished runs to <folder>/<name>.json and .md. Returns the table as text, with the methods of one seed
    below it, and the other notes."""
    results, notes = with_forwards(sweep, runs)
    methods, sizes = (list(dict.fromkeys(getattr(r, f) for r in runs)) for f in ("method", "size"))
    header, rows = summary(results, methods, sizes)
    first = {r["size"]: r for r in reversed(results)}
    differs = {size: difference_from_paper(r, data_name(sweep.data_dir)) for size, r in sorted(first.items())}
    said = [f"{size} differs from the paper's runs: {what}" for size, what in differs.items() if what]
    said += [f"{size}: {note}" for size in sizes if (note := other_lengths(results, size))]
    said += [LEGEND, *notes]
    single = [note for size in sizes if (note := of_one_seed(results, size))]
    content = {
        "name": name,
        "runs": len(runs),
        "done": len(results),
        "data": data_name(sweep.data_dir),
        "environment": environment_info(),
        "table": [header, *rows],
        "differs": differs,
        "gaps": {f"{size} {m}": dataclasses.asdict(gap(results, size, m)) for size in sizes for m in methods},
        "results": [{k: v for k, v in r.items() if k != "environment"} for r in results],
    }
    runs_text = ",\n".join(json.dumps(r) for r in content["results"])  # Each run is a line.
    lines = [f'"{k}": ' + (f"[\n{runs_text}\n]" if k == "results" else json.dumps(v)) for k, v in content.items()]
    atomic_write(sweep.folder / f"{name}.json", "{\n" + ",\n".join(lines) + "\n}\n")
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (header, ["---"] * len(header), *rows)]
    atomic_write(sweep.folder / f"{name}.md", "\n".join([*lines, "", *single, *said]).rstrip() + "\n")
    return "\n".join([table(header, rows), *single]), said


def run_sweep(sweep: Sweep, name: str, runs: Sequence[Run]) -> list[dict]:
    """Trains all runs and prints the table after each of them but the last. Returns their results. Raises Interrupted
    after a signal, and UserError if runs failed."""
    start, before = time.monotonic(), [run for run in runs if sweep.result(run)]

    def progress() -> None:
        done, elapsed = [run for run in runs if sweep.result(run)], time.monotonic() - start
        timed, waiting = [run for run in done if run not in before], [run for run in runs if run not in done]
        left = format_seconds(elapsed / max(1, len(timed)) * len(waiting))
        methods = dict.fromkeys(run.method for run in timed)
        if methods and not methods.keys() >= {run.method for run in waiting}:
            left += f" if all take as long as {', '.join(methods)}"
        print0(f"\n{name}: {len(done)} of {len(runs)} runs done, {format_seconds(elapsed)}; left: about {left}")
        shown, _ = report(sweep, name, runs)
        print0(shown if waiting else "", flush=True)

    where = f"on {', '.join(sweep.devices)}; in {sweep.folder}; text {data_name(sweep.data_dir)}"
    print0(f"{name}: {len(runs)} runs, {len(before)} of them done before; {where}")
    try:
        sweep.train(runs, progress)
    finally:
        report(sweep, name, runs)
    return sweep.results(runs)


def stopped(interrupted: Interrupted) -> None:
    """Prints how to go on, and exits with the signal's status."""
    print0("stopped; what runs has saved itself. The same command again goes on")
    sys.exit(interrupted.args[0])


def fractions(text: str) -> list[float]:
    """Reads fractions that are separated by commas."""
    return [float(part) for part in text.split(",") if part]


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that lab.study.sweep and lab.reproduce share."""
    add = parser.add_argument
    add_recipes_argument(parser)
    add("--sizes", default="", help="d<depth>, llama-<size>, tiny; with commas")
    add("--seeds", type=int, default=3, help="number of seeds")
    add("--first-seed", type=int, default=1, help="the first of them: fresh seeds for what others were chosen on")
    add("--tokens", default="", help="training tokens of a run, for example 100M")
    add("--ratio", type=float, default=0.0, help="instead of --tokens: training tokens per parameter")
    text = "branch all runs of a seed from its BF16 run at this fraction of the steps: smaller differences can be told "
    add("--bf16-until", type=float, default=0.0, help=text + "apart (default: 0, no branches)")
    text = "fractions of the steps, with commas: train the part up to the last of them up to which methods compute the "
    text += "same once for all of these (default: every method from its own beginning)"
    add("--share-until", type=fractions, default=[], help=text)
    text = "a seed changes the order of the data as well, not only weights and noise (default: yes)"
    add("--vary-data", action=argparse.BooleanOptionalAction, default=True, help=text)
    add("--data-dir", default=None, help="folder of text or parquet files (default: as for base_train)")
    text = "the base directory's, if it has as many; else of a new one (32768)"
    add("--vocab-size", type=int, default=0, help=text)
    add("--folder", default="", help="where runs and results go (default: sweeps/ in the base directory)")
    add("--jobs", type=int, default=1, help="runs at the same time on each GPU: small models leave it idle")
    add("--extra", default="", help="further flags of base_train for all runs, in one string")


def plan_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of sweep_runs.plan that the flags set. Raises UserError."""
    options = {name: getattr(args, name) for name in ("ratio", "bf16_until", "share_until", "vary_data")}
    return options | {"tokens": parse_number(args.tokens) if args.tokens else 0, "extra": args.extra.split()}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line. Raises UserError for flags that do not go together."""
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--name", default="", help="of the table and its files (default: the study's, or sweep)")
    add("--again", default="", metavar="STUDY", help="train the runs of this study or group of lab.runs anew")
    text = f"names of nf.METHODS, of lab/recipes.py or of --recipes, with commas (default: {METHODS})"
    add("--methods", default="", help=text)
    add("--variant", action="append", default=[], help='"label: flags of base_train"; may be repeated')
    add("--keep", default="", help="methods whose checkpoints stay, with commas")
    add("--plan", action="store_true", help="list the runs and stop; no text is needed")
    add_sweep_arguments(parser)
    args = parser.parse_args(argv)
    args.sizes = [s for s in args.sizes.split(",") if s]
    args.stored, args.texts = [], {}
    if args.again:
        fixed = "methods sizes seeds first_seed tokens ratio variant extra vary_data bf16_until share_until".split()
        given = [name.replace("_", "-") for name in fixed if getattr(args, name) not in (parser.get_default(name), [])]
        if given:
            raise UserError(f"--again trains the runs of {args.again} with the flags they had; leave out --{given[0]}")
        studies = [stored(study) for study in names_of(args.again)]
        args.texts = {content["data"]: text_of(content) for content in studies}
        args.stored = [run for content in studies for run in content["results"]]
        args.stored = without_left(args.again, args.stored)
        if lost := next((r for r in args.stored if not gives_its_tokens(r)), None):
            problem = f"the stored flags of {lost['method']} do not give its {lost['tokens']:,} tokens"
            mend = "none of its runs can be trained again; --methods, --sizes and --tokens train others"
            raise UserError(f"--again={args.again}: {problem}; {mend}")
        if not any(r.get("tokenizer") for r in args.stored):
            print0("the tokenizer of these runs is not recorded, so the text's tokens, and the losses, may differ")
        args.methods = list(dict.fromkeys(r["method"] for r in args.stored))
        args.sizes = list(dict.fromkeys(r["size"] for r in args.stored))
        args.vocab_size = args.vocab_size or args.stored[0].get("vocab_size", 0)
    else:
        args.methods = [*filter(None, (args.methods or METHODS).split(",")), *args.variant]
    args.name = args.name or Path(args.again).name.removesuffix(".json") or "sweep"  # --again may be a file
    if not args.sizes or not args.methods or min(args.seeds, args.jobs) < 1:
        raise UserError("--sizes, --methods, --seeds and --jobs must be at least one each")
    if "/" in args.name:
        raise UserError(f"--name={args.name}: expected the name of a file without /; --folder says where it goes")
    args.keep, names = [m for m in args.keep.split(",") if m], labels(args.methods)
    if unknown := [m for m in args.keep if m not in names]:
        raise UserError(f"--keep: {unknown[0]!r} is none of this sweep's methods; use one of {', '.join(names)}")
    return args


def without_left(study: str, results: list[dict]) -> list[dict]:
    """Returns the runs whose flags and methods this code has, and prints which are left out. Raises UserError if none
    is left, and for a method that the file of a sweep has from another file."""
    names = [left_code(r["flags"]) for r in results]
    left: dict[str, list[tuple[str, str]]] = {}  # A commit -> the labels, and what they have that left the code.
    for r, missing in zip(results, names):
        for name in missing:
            if "study" not in r and name not in LEFT:  # of a sweep's file
                raise UserError(f"--again={study}: unknown method {name!r}; give its file with --recipes, or RECIPES")
            left.setdefault(LEFT.get(name) or shown_commit(r.get("commit")), []).append((r["method"], name))
    for commit, pairs in sorted(left.items()):
        labels, missing = (", ".join(sorted(set(of))) for of in zip(*pairs))
        what = missing if labels == missing else f"{labels}; {missing}"
        print0(f"left out: {what} are neither here nor in RECIPES; the commit that had them: {commit}")
    found = [r for r, missing in zip(results, names) if not missing]
    if not found:
        raise UserError(f"--again={study}: no run is left to train; check out its commit ({', '.join(sorted(left))})")
    return found


def text_of(content: dict[str, Any]) -> str:
    """Returns the text of a study with its key, and says who can make it, unless it is that of one's own sweep."""
    text = content["data"] if content["data"].endswith(")") else f"{content['data']}, whose key is unknown"
    if "study" not in content["results"][0]:
        return text
    if public_text.PIECES in text:
        return f"{text}, which anyone can make (python -m lab.texts make --public; docs/texts.md)"
    return f"{text}, which is not published, while anyone can make that of d6_public (docs/texts.md)"


def refuse_other_text(args: argparse.Namespace) -> None:
    """Raises UserError unless the command line gives the text that the studies of --again were trained on."""
    folder = args.data_dir or os.environ.get("DATA_DIR")
    this = data_name(str(survey(folder).folder)) if folder else "none"
    for text, known in args.texts.items():
        if not text.endswith(this.rpartition(" ")[2]):
            mend = "give its folder by --data-dir; other texts take the flags that --plan prints"
            raise UserError(f"--again={args.again} was trained on the text {known}, and this is {this}; {mend}")


def refuse_other_tokenizer(args: argparse.Namespace) -> None:
    """Raises UserError if the current base directory's tokenizer is not that of the runs of --again, where they stored
    theirs."""
    tokenizer = get_tokenizer()
    this = {"vocab_size": tokenizer.get_vocab_size(), "tokenizer": tokenizer.fingerprint()}
    for r in args.stored:
        for name in this:
            if r.get(name) and r[name] != this[name]:
                both = f"{r['method']} was trained with {name} {r[name]}, and {get_base_dir()} has {this[name]}"
                mend = "train it as docs/texts.md says, and give another --folder"
                raise UserError(f"--again={args.again}: {both}; {mend}")


def planned(args: argparse.Namespace, data: str = "") -> list[Run]:
    """Returns the runs of a command line. `data` is the data_key of the text. Raises UserError. If `data` is empty, the
    flags of base_train are checked, too."""
    if args.stored:
        runs = again(args.stored, data)
    else:
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        runs = plan(args.methods, args.sizes, seeds, **plan_options(args), data=data)
    for run in () if data else runs:
        base_train.parse_args(list(run.flags))
    return runs


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    runs = planned(args)  # Wrong flags should be refused before the data is made.
    if args.plan:
        flags = [{flag.partition("=")[0]: flag for flag in run.flags} for run in runs]  # The last of a flag counts.
        common = [flag for flag in flags[0].values() if all(flag in of.values() for of in flags)]
        print0("all runs:", *common)
        if args.stored:
            print0("text:", "; ".join(args.texts.values()))
            for name in ("vocab_size", "tokenizer"):
                print0(f"{name}:", ", ".join({str(r.get(name) or "not recorded")[:16]: 0 for r in args.stored}))
            print0("commit:", ", ".join({shown_commit(r.get("commit")): 0 for r in args.stored}))
        for run, of in zip(runs, flags):
            own = [flag for flag in of.values() if flag not in common]
            print0(f"{run.size} {run.method}, seed {run.seed}:", *own)
        return
    refuse_other_text(args)
    folder = Path(args.folder) if args.folder else Path(get_base_dir()) / "sweeps"
    text = args.data_dir or os.environ.get("DATA_DIR") or found_data() or set(args.sizes) != {"tiny"}
    data = prepare(folder, args.data_dir, args.vocab_size, None if text else EMBEDDED_MB)
    if args.stored:
        with base_directory(folder):
            refuse_other_tokenizer(args)
    runs = planned(args, data_key(data))
    sweep = Sweep(folder, data, visible_devices(args.jobs), args.keep, recipes=args.recipes)
    try:
        run_sweep(sweep, args.name, runs)
        shown, said = report(sweep, args.name, runs)
        print0("\n".join(["", shown, *said]))
    except Interrupted as e:
        stopped(e)
    finally:
        file = shlex.quote(str(folder / f"{args.name}.json"))
        print0(f"the finished runs are in {file}; tables of them: python -m lab.reproduce gaps --results {file}")


if __name__ == "__main__":
    run_main(main)
