"""The runs that claims still need, in their order, and one command that does them for as long as a GPU is lent.

    python -m lab.visits                                       # the list, with minutes and visits of half an hour
    timeout --signal=TERM 28m python -m lab.visits '*' --folder results --data-dir text --pieces pieces    # goes on

A study is a command line of lab.study.sweep. Where the list says "forwards", its checkpoints are evaluated in other
forwards as soon as its runs are done. Each run resumes, also on another machine if --folder comes along. What
runs.parquet has of a run, on the same text and for any study, is not trained again. Minutes are PREDICTED for one GPU,
from the seconds that runs of the same size took there beside others. The start of a run and the evaluation of a
checkpoint are guesses. Where the list says "pieces of 256", the text is that of PIECES/256, which lab.texts cuts to
rows of so many tokens.
"""

import argparse
import fnmatch
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lab import runs as kept_runs
from lab.study import forwards, sweep
from lab.study.sweep_runs import Run, data_key, flag_values
from lab.study.sweep_scheduler import Sweep
from nanochat_fp4.common import autodetect_device_type, print0
from nanochat_fp4.console import ArgumentParser, table
from nanochat_fp4.errors import UserError, run_main
from nanochat_fp4.files import atomic_write

# Seconds of a GPU for a million tokens, over jobs: of the studies d4_40m, d6_frontier and d8_second_half (H200).
# d2: the ladder's 6,800M tokens, 36 runs beside each other on each of two H100s with MPS.
SECONDS = {"d4": 0.35, "d6": 0.5, "d8": 1.15, "d2": 0.4}
SECONDS_TO_START, SECONDS_TO_EVALUATE = 30, 15
VISIT = 28  # minutes
LADDER_ROW, LADDER_EPOCH = 256, 163e6  # tokens; an epoch of the text in pieces, by lab.texts
SIZE_ROW = 1024  # tokens of a row of d4 and d6 (sweep_runs.size_flags)
NO_STOPS = "--device-batch-size=64 --eval-tokens=1048576 --eval-every=100000 --save-every=-1"
SETTLED = "bf16,nvidia,clover,clover_feedback,clover_search_feedback,clover_feedback_late"
LADDER = "bf16,nvidia,clover,clover_feedback"


@dataclass(frozen=True)
class Study:
    """A sweep of runs.

    settles:   the question
    flags:     of lab.study.sweep
    evaluated: whether its checkpoints are evaluated in several forwards
    pieces:    tokens of the rows that its documents are cut to, so that no text is read twice; 0: text as it is
    """

    name: str
    settles: str
    flags: tuple[str, ...]
    evaluated: bool = False
    pieces: int = 0

    def arguments(self, folder: str = "", data_dir: str | None = None) -> list[str]:
        where = Path(folder) / f"v{flag_values(self.flags)['vocab-size']}"
        args = [f"--name={self.name}", *self.flags, f"--folder={where}"]
        return args + ([f"--data-dir={data_dir}"] if data_dir else [])

    @cache  # noqa: B019 (of a few studies)
    def runs(self, data: str = "") -> list[Run]:
        """data: data_key of the text."""
        return sweep.planned(sweep.parse_args(self.arguments()), data)

    def stored(self) -> dict[Run, dict]:
        """The results that runs.parquet has of its runs, also where another study trained them; all on one text."""
        texts, mine = stored_by_text(self), [computed(run) for run in self.runs()]
        key, results = max(texts.items(), key=lambda of: sum(run in of[1] for run in mine), default=("", {}))
        return {run: results[computed(run)] for run in self.runs(key) if computed(run) in results}

    def open_runs(self) -> list[Run]:
        stored = self.stored()
        return [run for run in self.runs(next((s.data for s in stored), "")) if run not in stored]

    def minutes(self, runs: list[Run]) -> float:
        """PREDICTED, of one GPU, for these runs of the study."""
        jobs, seconds = sweep.parse_args(self.arguments()).jobs, 0.0
        for run in runs:
            flags = flag_values(run.flags)
            steps = int(flags["num-iterations"]) - (run.branch[1] if run.branch else 0)
            tokens = steps * int(flags["total-batch-size"])
            seconds += SECONDS[run.size] * tokens / 1e6 + SECONDS_TO_START / jobs
            seconds += SECONDS_TO_EVALUATE * self.evaluated
        return seconds / 60


def computed(run: Run) -> tuple:
    """What makes a run's numbers, apart from the text: its flags without those that only save checkpoints.

    The hash of flags in the tag of --branch-from depends on how flags were written, so it does not count.
    """
    flags = [f for f in run.flags if not f.startswith(("--save-every=", "--save-at=", "--keep-last="))]
    flags = [re.sub(r"_[0-9a-f]{8}@", "@", f) for f in flags]
    return run.method, run.size, run.seed, *flags


def stored_by_text(study: Study) -> dict[str, dict[tuple, dict]]:
    """data_key of a text -> computed(run) -> result in runs.parquet: of the study itself, else of the first.

    Whether a text is one of pieces no file says: a study of pieces has its own rows alone, and no other study has it.
    """
    found: dict[str, dict[tuple, dict]] = {}
    apart = {s.name for s in studies() if s.pieces}
    for name in sorted(reversed(kept_runs.studies()), key=lambda name: name == study.name):
        if name != study.name and (study.pieces or name in apart):
            continue
        key, results = results_of(name)
        found.setdefault(key, {}).update(results)
    return found


@cache
def results_of(name: str) -> tuple[str, dict[tuple, dict]]:
    """(data_key of the text, computed(run) -> result) of a study in runs.parquet."""
    content = kept_runs.stored(name)
    runs = [(Run(r["method"], r["size"], r["seed"], tuple(r["flags"])), r) for r in content["results"]]
    return content["data"].rpartition("(")[2].rstrip(")"), {computed(run): r for run, r in runs}


def variant(label: str, flags: tuple[str, ...]) -> str:
    return f"--variant={label}: {' '.join(flags)}"


def sizes(
    size: str, tokens: str, seeds: int, methods: str, *more: str, jobs: int = 6, vocabulary: int = 8192, extra: str = ""
) -> tuple:
    """extra: the last flags of base_train, which count."""
    common = f"--sizes={size}", f"--tokens={tokens}", f"--seeds={seeds}", f"--jobs={jobs}", f"--methods={methods}"
    return (*common, f"--vocab-size={vocabulary}", *more, f"--extra={NO_STOPS} {extra}".rstrip())


def evaluation(size: str, tokens: str, seed: int) -> Study:
    """Of one seed: checkpoints are evaluated in the visit that made them."""
    flags = sizes(size, tokens, 1, SETTLED, f"--first-seed={seed}", f"--keep={SETTLED}", "--share-until=0.97")
    return Study(f"{size}_forwards_s{seed}", "the forward that the gain is of; what plain NVFP4 loses", flags, True)


def lean(size: str, seeds: int, tokens: str, *more: str, heads: bool = False) -> Study:
    """--state=lean and --head=fp8 are for both, so that each pair has the same forward."""
    settings = {"lean": "--state=lean"} | ({"fp8_head": "--head=fp8"} if heads else {})
    arms = [
        variant(f"{m}_{label}", (f"--method={m}", flag)) for label, flag in settings.items() for m in ("bf16", "clover")
    ]
    flags = sizes(size, tokens, seeds, "bf16,clover", *arms, *more)
    return Study(f"{size}_lean", "does a lean state, or an FP8 head, cost quality?", flags)


def longer(size: str, tokens: str, seeds: int, steps: int) -> Study:
    """BF16, FP8, clover and feedback, each also for 7.8% more steps."""
    methods = ("bf16", "fp8", "clover", "clover_feedback")
    more = [variant(f"{m}_7.8%_longer", (f"--method={m}", f"--num-iterations={round(1.078 * steps)}")) for m in methods]
    flags = sizes(size, tokens, seeds, ",".join(methods), *more)
    return Study(f"{size}_longer", "what 7.8% more steps buy each arm", flags)


def rates() -> Study:
    usual = {"embedding-lr": 0.3, "unembedding-lr": 0.004, "matrix-lr": 0.02, "scalar-lr": 0.5}
    at = {f: [f"--{name}={f * rate:g}" for name, rate in usual.items()] for f in (0.6, 1.6)}
    methods = ("bf16", "clover", "clover_feedback")
    others = [variant(f"{m}_rate_{f:g}", (f"--method={m}", *flags)) for f, flags in at.items() for m in methods]
    return Study("d4_rates", "is the gap that of a bad rate?", sizes("d4", "40M", 2, ",".join(methods), *others))


def width() -> Study:
    """384 and 448 wide, 6 and 7 heads of 64: 1.36 times the parameters of the blocks."""
    wide = [variant(f"{m}_448_wide", (f"--method={m}", "--aspect-ratio=74")) for m in ("clover", "bf16")]
    flags = sizes("d6", "160M", 3, "bf16,clover", *wide, extra="--head-dim=64")
    return Study("d6_width", "does 1.35 times the parameters close clover's gap?", flags)


def once() -> Study:
    """The d4 of the tables reads a fifth of its documents twice, d6 each of them about three times."""
    flags = sizes("d4", "64M", 3, "bf16,clover,clover_feedback,clover_feedback_late", "--share-until=0.97")
    return Study("d4_once", "are the shares those of text that is read twice?", flags, pieces=SIZE_ROW)


def ladder(heads: int, seeds: int, *ratios: int) -> list[Study]:
    """Of one width. ratios: tokens for each parameter without the embedding, of a vocabulary of 1,024.

    No text is read twice: the longest runs end with the text. The shortest scatter most, and have six seeds.
    """
    found, parameters = [], 2 * 12 * (64 * heads) ** 2 + 1024 * 64 * heads
    shape = f"--head-dim=64 --aspect-ratio={32 * heads} --total-batch-size=8192 --max-seq-len={LADDER_ROW}"
    for ratio in (min(r, int(LADDER_EPOCH / parameters)) for r in ratios):
        n, tokens = 6 if ratio == 12 else seeds, f"{parameters * ratio / 1e6:.1f}M"
        flags = sizes("d2", tokens, n, LADDER, jobs=24, vocabulary=1024, extra=f"{shape} --device-batch-size=32")
        settles = f"{ratio} tokens per parameter, N = {parameters / 1e6:.1f}M"
        found.append(Study(f"ladder_{64 * heads}_wide_{ratio}", settles, flags, pieces=LADDER_ROW))
    return found


def studies() -> list[Study]:
    """In the order in which they are done."""
    return [
        evaluation("d6", "160M", 1),
        *(evaluation("d4", "64M", seed) for seed in range(1, 6)),
        *(evaluation("d6", "160M", seed) for seed in (2, 3)),
        lean("d8", 3, "32M", "--bf16-until=0.5", heads=True),
        *ladder(2, 6, 12, 25, 50, 100),
        rates(),
        lean("d6", 2, "160M"),
        width(),
        longer("d6", "160M", 3, 2441),
        once(),
        *ladder(4, 3, 12, 25, 50, 100),
        *ladder(3, 3, 12, 25),  # a law needs three sizes
    ]


def listed() -> str:
    rows, done = [], 0.0
    for s in studies():
        left = s.open_runs()
        minutes = s.minutes(left)
        first, last = (int(at // VISIT) + 1 for at in (done, done + minutes - 1e-6))
        visits = "done" if not left else f"{first}" if first == last else f"{first} to {last}"
        more = f"pieces of {s.pieces}" if s.pieces else "forwards" * s.evaluated
        rows.append([visits, s.name, len(s.runs()), len(left), f"{minutes:.0f}", more, s.settles])
        done += minutes
    header = ["visit", "study", "runs", "open", "minutes", "", "what it settles"]
    return f"{table(header, rows)}\n{done:.0f} minutes of one GPU in all, PREDICTED; a visit has {VISIT}"


def do(study: Study, folder: str, data_dir: str | None) -> None:
    argv = study.arguments(folder, data_dir)
    args = sweep.parse_args(argv)
    for run, result in study.stored().items():
        path = Sweep(Path(args.folder), data_dir="", devices=()).result_path(run)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, json.dumps(result))
    sweep.main(argv)
    if study.evaluated and list(Path(args.folder).glob("base_checkpoints/*/model_*")):
        first, *_ = study.runs()
        flags = flag_values(first.flags)
        where = [f"--folder={args.folder}", f"--tags={first.size}_*_s{first.seed}_*"]
        where += [f"--{name}={flags[name]}" for name in ("eval-tokens", "device-batch-size")]
        forwards.main(where + ([f"--data-dir={data_dir}"] if data_dir else []))
        sweep.main(argv)  # its table has plain NVFP4 now


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "studies", nargs="?", default="", help="their names, a glob pattern; '*': all open ones; without: the list"
    )
    parser.add_argument("--folder", default="results", help="of all runs")
    parser.add_argument("--data-dir", default=None, help="folder of text or parquet files")
    parser.add_argument("--pieces", default="", help="folder of its shards in pieces, by the length of rows")
    args = parser.parse_args(argv)
    if not args.studies:
        print0(listed())
        return
    left = {s: s.open_runs() for s in studies() if fnmatch.fnmatch(s.name, args.studies)}
    chosen = [s for s in left if left[s] or args.studies != "*"]
    if not left:
        raise UserError(f"no study is named {args.studies}; run lab.visits without a name for the list")
    texts = {s: f"{args.pieces}/{s.pieces}" if s.pieces else args.data_dir for s in chosen}
    # A study that is done is trained again on another text.
    other = [s for s in chosen if data_key(texts[s] or "") not in {run.data for run in s.stored()}]
    trained = {s: left[s] or s.runs() for s in chosen if left[s] or s in other}
    if trained and autodetect_device_type() != "cuda":
        minutes = sum(s.minutes(runs) for s, runs in trained.items())
        raise UserError(f"there is no GPU here, and these runs take one for {minutes:.0f} minutes; run them on a GPU")
    for s in chosen:
        if s.pieces and left[s] and not Path(args.pieces, str(s.pieces)).is_dir():
            command = f"python -m lab.texts cut --data-dir TEXT --max-seq-len {s.pieces} --out PIECES/{s.pieces}"
            raise UserError(f"{s.name} reads no text twice: cut it by {command}, and give --pieces=PIECES")
    for s in chosen:
        do(s, args.folder, texts[s])


if __name__ == "__main__":
    run_main(main)
