"""Command lines that are refused: one line that names the cause, exit status 2, and nothing written or lost."""

import importlib
import shlex
import shutil

import pytest
import torch
from _samples import make_bundle, save_base

from nanochat_fp4.cli import run_main
from nanochat_fp4.models.gpt import GPT

# What keeps a command small; the flags of a row come after these.
USUAL = {
    "scripts.base_train": "--depth=1 --aspect-ratio=128 --head-dim=64 --max-seq-len=32 --device-batch-size=2 "
    "--total-batch-size=128 --eval-tokens=128 --core-metric-every=-1 --sample-every=-1 --num-iterations=2 "
    "--method=bf16 --device-type=cpu",
    "scripts.mid_train": "--data=local --device-type=cpu --device-batch-size=2 --total-batch-size=512 "
    "--eval-tokens=512 --num-iterations=1 --overwrite",  # which deletes nothing before all is known to be good
    "scripts.chat_sft": "--data=local --device-type=cpu --device-batch-size=2 --target-examples-per-step=4 "
    "--eval-steps=2 --eval-metrics-every=-1 --num-iterations=1",
    "scripts.chat_rl": "--data=local --device-type=cpu --device-batch-size=2 --examples-per-step=2 --num-samples=4",
    "scripts.chat_eval": "-i mid -a local --device-type=cpu",
    "scripts.chat_cli": "-i mid -p hi --device-type=cpu",
    "scripts.chat_web": "--device-type=cpu",
    "scripts.base_loss": "--device-batch-size=2 --device-type=cpu",
    "scripts.export": "--source=base --format=safetensors --out=out --device-type=cpu",
}
TAGS = ("../../x", "/tmp/x", ".", "..", "''", "a/b", "'a\nb'")
WITH_A_TAG = "base_train mid_train chat_sft chat_rl base_loss chat_eval chat_cli chat_web export".split()
# (command, a word of the one line). The base directory holds a base model and a mid model, both d2_clover of step 5.
REFUSED = [
    # Flags that argparse refuses
    *(
        (f"scripts.{name} --nope=1", "--nope")
        for name in ("base_train", "mid_train", "chat_eval", "chat_web", "export")
    ),
    ("scripts.base_train --dept=3", "--depth"),
    ("scripts.base_train --depth=x", "--depth"),
    ("scripts.base_train --device-batch-size=0", "--device-batch-size"),
    ("scripts.base_train --device-batch-size=some", "--device-batch-size"),
    ("scripts.base_train --resume-from-step=x", "--resume-from-step"),
    ("scripts.base_train --save-every=x", "--save-every"),
    ("scripts.base_train --save-at=1,x", "--save-at"),
    ("scripts.base_train --seed=x", "--seed"),
    ("scripts.base_train --recompute=some", "codes-mlp"),
    ("scripts.base_train --on-nonfinite=ignore", "skip"),
    ("scripts.base_train --matrix-lr=nan", "--matrix-lr"),
    ("scripts.base_train --matrix-lr=-1", "matrix-lr"),
    ("scripts.base_train --warmup-ratio=2", "from 0 to 1"),
    ("scripts.base_train --adam-beta1=1", "below 1"),
    ("scripts.base_train --target-flops=inf", "--target-flops"),
    ("scripts.base_train --head=fp4", "fp8"),
    ("scripts.mid_train --recompute=some", "codes-mlp"),
    ("scripts.chat_sft --source=sft", "mid"),
    ("scripts.chat_eval -i nothing", "sft"),
    ("scripts.export --format=gguf4", "--format"),
    ("scripts.base_train --method-phase=0.85=bf16", "--method-phases?"),
    ("scripts.base_train --save-at=3,x", "'x'"),
    # Values that do not fit
    ("scripts.base_train --method=fp3", "clover"),
    ("scripts.base_train --layer-methods=nothing=bf16", "nothing"),
    ("scripts.base_train --layer-methods=foo", "pattern=method"),
    ("scripts.base_train --method-phases=2=bf16", "0.85=bf16"),
    ("scripts.base_train --total-batch-size=100", "not a multiple of 32"),
    ("scripts.base_train --total-batch-size=96", "not a multiple of 64"),
    ("scripts.base_train --total-batch-size=0", "--total-batch-size"),
    ("scripts.base_train --num-iterations=-1 --target-param-data-ratio=-1", "no training horizon"),
    ("scripts.base_train --num-iterations=-1 --target-flops=1", "--target-flops"),
    ("scripts.base_train --num-iterations=0", "at least 1 step"),
    ("scripts.base_train --num-iterations=-2", "at least 1 step"),
    ("scripts.base_train --num-iterations=99999999999", "lower it"),
    ("scripts.base_train --device-type=cuda", "--device-type"),
    ("scripts.base_train --device-type=tpu", "--device-type"),
    ("scripts.base_train --data-dir=/nowhere", "/nowhere"),
    ("scripts.base_train --data-seed=-1", "--data-seed"),
    ("scripts.base_train --window-pattern=X", "'X'"),
    ("scripts.base_train --depth=0", "depth 0"),
    ("scripts.base_train --depth=99999", "memory"),
    ("scripts.base_train --resume-from-step=5", "no checkpoint of step 5"),
    ("scripts.base_train --branch-from=d1_clover", "<step>"),
    ("scripts.base_train --branch-from=../d2@3", "one folder"),
    ("scripts.base_train --branch-from=d1_bf16@3", "is this run itself"),
    ("scripts.base_train --branch-from=d1_none@3", "no checkpoint of step 3"),
    ("scripts.base_train --model-tag=d2_clover", "--overwrite"),
    ("scripts.base_train --model-tag=d2_clover --resume-from-step=latest", "d2_clover"),
    ("scripts.base_train --llama=30M --recompute=mlp", "--llama"),
    ("scripts.base_train --llama=30M --separate-qkv", "--separate-qkv"),
    ("scripts.base_train --llama=31M", "30M"),
    ("scripts.base_train --method=clover --recompute=codes --separate-qkv", "--separate-qkv"),
    ("scripts.mid_train --total-batch-size=100", "not a multiple"),
    ("scripts.mid_train --device-batch-size=0", "--total-batch-size"),
    ("scripts.mid_train --method=quartz", "unknown method 'quartz'"),
    ("scripts.mid_train --num-iterations=0", "at least 1 step"),
    ("scripts.mid_train --sft-dir=folder", "--sft-dir"),
    ("scripts.mid_train --model-tag=d9", "d2_clover); make it with"),
    ("scripts.mid_train --model-step=99", "no checkpoint of step 99"),
    ("scripts.chat_sft --target-examples-per-step=3", "not a multiple of 2"),
    ("scripts.chat_sft --eval-steps=0", "--eval-steps=0"),
    ("scripts.chat_sft --num-iterations=-1 --num-epochs=0", "--num-epochs=0"),
    ("scripts.chat_sft --eval-metrics-every=1 --eval-metrics-max-problems=0", "at least 1"),
    ("scripts.chat_rl --num-samples=3", "multiple"),
    ("scripts.chat_rl --max-new-tokens=0", "at least 1"),
    ("scripts.chat_rl --temperature=0", "above 0"),
    ("scripts.chat_rl", "scripts.chat_sft"),  # the command that makes its model
    ("scripts.chat_eval -i sft", "scripts.chat_sft"),
    ("scripts.chat_eval -a Chess", "unknown task 'Chess'"),
    ("scripts.chat_eval -a '|'", "no task"),
    ("scripts.chat_eval -x 0", "--max-problems=0"),
    ("scripts.chat_eval -t -1", "--temperature"),
    ("scripts.chat_eval -b 0", "--batch-size"),
    ("scripts.chat_eval -a GSM8K --eval-dir=/nowhere", "--eval-dir"),
    ("scripts.chat_cli -i sft", " python -m scripts.chat_cli -i mid"),
    ("scripts.chat_cli -i sft", "there is a model of base and mid: NANOCHAT_BASE_DIR="),
    ("scripts.chat_web -i sft", "chat_cli -i mid"),
    ("scripts.chat_cli -p ''", "prompt is empty"),
    ("scripts.chat_cli -p ' \n'", "prompt is empty"),
    ("scripts.chat_cli --top-k=-1", "--top-k"),
    ("scripts.chat_cli --temperature=-1", "--temperature"),
    ("scripts.chat_cli --max-tokens=0", "--max-tokens"),
    ("scripts.chat_web --temperature=3", "--temperature"),
    ("scripts.chat_web --max-tokens=5000", "--max-tokens"),
    ("scripts.chat_web --port=0", "--port"),
    ("scripts.chat_web --temperature=3", "--temperature"),
    ("scripts.chat_web --top-k=-1", "--top-k"),
    ("scripts.chat_web --max-tokens=5000", "--max-tokens"),
    ("scripts.chat_web --port=65536", "--port"),
    ("scripts.base_loss --split-tokens=100", "not a multiple"),
    ("scripts.base_eval --bundle-dir=/nowhere --device-type=cpu", "/nowhere"),
    ("scripts.tok_train --vocab-size=100 --overwrite", "expected 265"),
    ("scripts.tok_train --doc-cap=0 --overwrite", "at least 1"),
    ("scripts.tok_train --max-chars=-5 --overwrite", "at least 1"),
    ("scripts.tok_train --data-dir=/nowhere --overwrite", "/nowhere"),
    ("scripts.tok_train --vocab-size=290", "base_checkpoints/d2_clover"),  # it would replace their tokenizer
    ("nanochat_fp4.data.dataset --embedded --size-mb=0", "0.2 to 100"),
    ("nanochat_fp4.data.dataset -n 1", "or say --embedded in place of -n"),
    ("nanochat_fp4.data.dataset -n 0", "1 to 1822"),
    ("nanochat_fp4.evaluation.report nothing", "generate"),
    ("nanochat_fp4.doctor --method=clever", "unknown method 'clever'"),
    ("nanochat_fp4.upstream scripts.base_train", "NANOCHAT_DIR"),
    *((f"scripts.{name} --model-tag={tag}", "is not the name of one folder") for name in WITH_A_TAG for tag in TAGS),
]
VARIABLES = [  # a variable of the environment, the command, a word of the one line
    ("QAT_METHOD=clever", "scripts.base_train --method=", "QAT_METHOD"),
    ("DATA_DIR=/nowhere", "scripts.base_train", "DATA_DIR"),
    ("RECIPES=/nowhere.py", "scripts.base_train", "/nowhere.py"),
    ("NVFP4_KERNELS=cutlass", "scripts.base_train --method=clover", "NVFP4_KERNELS"),
    ("WORLD_SIZE=x RANK=0 LOCAL_RANK=0", "scripts.base_train", "WORLD_SIZE"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory, _tiny_base):
    base = tmp_path_factory.mktemp("refusals") / "base"
    shutil.copytree(_tiny_base / "tokenizer", base / "tokenizer")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("NANOCHAT_BASE_DIR", str(base))
        for source in ("base_checkpoints", "mid_checkpoints"):
            save_base(base, source=source, n_layer=1)
    return base


def content(folder):
    """Everything but locks and folders without files."""
    paths = (p for p in folder.rglob("*") if p.is_file() and not (p.name.startswith(".") or p.suffix == ".lock"))
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}


@pytest.fixture
def refused(base, _tiny_base, tmp_path, monkeypatch, capsys):
    """refused(command, word): the command ends as the module's docstring says."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(base))
    monkeypatch.setenv("DATA_DIR", str(_tiny_base / "text"))
    monkeypatch.delenv("NANOCHAT_DIR", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(command, word):
        module, *flags = shlex.split(command)
        before = content(base)
        with pytest.raises(SystemExit) as stopped:
            run_main(lambda: importlib.import_module(module).main([*shlex.split(USUAL.get(module, "")), *flags]))
        said = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
        assert stopped.value.code == 2 and len(said) == 1 and word in said[0] and len(said[0]) < 900, said
        assert "invalid _" not in said[0]  # the name of a function of ours
        assert content(base) == before and not content(tmp_path)

    return run


@pytest.mark.parametrize("command, word", REFUSED, ids=[command for command, _ in REFUSED])
def test_command_lines_are_refused_in_one_line(refused, command, word):
    if "cuda" in command and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    refused(command, word)


@pytest.mark.parametrize("variables, command, word", VARIABLES)
def test_variables_are_refused_in_one_line(refused, monkeypatch, variables, command, word):
    for pair in variables.split():
        monkeypatch.setenv(*pair.split("="))
    refused(command, word)


NOT_FINITE = [  # programs that make a choice or a number of what the model computes
    "scripts.chat_eval -i mid -a Local-Choice -x 2",
    "scripts.chat_eval -i mid -a Local-Arithmetic -x 2 -m 4",
    "scripts.chat_cli -t 0",
    "scripts.chat_cli -t 0.6",
    "scripts.base_loss --split-tokens=256",
    "scripts.base_eval --device-type=cpu --max-per-task=2 --bundle-dir=BUNDLE",
]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("command", NOT_FINITE)
def test_evaluation_of_nan_gives_no_result(refused, tmp_path_factory, monkeypatch, command, number):
    load = GPT.load_state_dict

    def broken(model, *args, **kwargs):
        loaded = load(model, *args, **kwargs)
        with torch.no_grad():
            model.transformer.h[0].mlp.c_fc.weight[0] = number
        return loaded

    monkeypatch.setattr(GPT, "load_state_dict", broken)
    refused(command.replace("BUNDLE", str(make_bundle(tmp_path_factory.mktemp("bundle")))), "h.0.mlp.c_fc.weight")
