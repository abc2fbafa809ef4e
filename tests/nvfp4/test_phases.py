"""Methods that change between layers and in the course of a run."""

import functools
import pickle
from pathlib import Path
from unittest import mock

import pytest
import torch

import lab.recipes
import nanochat_fp4 as nf
from nanochat_fp4.cli import UserError
from nanochat_fp4.nvfp4 import methods
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.phases import MethodPlan, gemm_bits
from nanochat_fp4.training.checkpoint_manager import load_checkpoint
from scripts import base_loss, base_train


def model(method="clover"):
    net = torch.nn.Sequential()
    net.add_module("up", torch.nn.Linear(32, 128, bias=False))
    net.add_module("down", torch.nn.Linear(128, 32, bias=False))
    return nf.convert(net, method, verbose=False)


def names(net):
    return [layer.recipe.name for layer in net]


def test_phases_and_layers():
    net = model()
    plan = MethodPlan.parse("clover", layers="u*=fp8", phases="0.5=nvidia, 0.85=bf16")
    assert plan.apply(net, 0.0) and names(net) == ["fp8", "clover"]
    assert not plan.apply(net, 0.49)
    assert plan.apply(net, 0.5) and names(net) == ["fp8", "nvidia"]
    assert plan.apply(net, 0.9) and names(net) == ["bf16", "bf16"]  # nothing is quantized: no layer either
    MethodPlan.parse("clover", layers="up=fp8,*=nvidia").apply(net, 0.0)  # the first pattern counts
    assert names(net) == ["fp8", "nvidia"]
    MethodPlan.parse("bf16", layers="down=clover_input").apply(net, 0.3)
    assert names(net) == ["bf16", "clover_input"]


def test_work_by_hand():
    """Two layers of equal size, three GEMMs each. clover_fp8_forward: one of three in 8 bits."""
    share = MethodPlan.parse("clover", layers="up=clover_fp8_forward", phases="0.8=bf16").work(model())
    assert (
        share[8] == pytest.approx(0.8 / 6)
        and share[16] == pytest.approx(0.2)
        and sum(share.values()) == pytest.approx(1)
    )
    assert MethodPlan.parse("bf16", phases="0.1=clover").work(model())[16] == pytest.approx(0.1)
    net = model()
    net.add_module("lm_head", torch.nn.Linear(32, 64, bias=False))  # a fifth of all weights
    assert MethodPlan.parse("clover").work(net) == pytest.approx({4: 0.8, 8: 0, 16: 0.2})
    assert MethodPlan.parse("clover").work(net, heads=False) == {4: 1.0, 8: 0.0, 16: 0.0}
    net.lm_head.bits = 8
    assert MethodPlan.parse("clover").work(net)[8] == pytest.approx(0.2)


def test_blocks_that_are_kept_are_work_in_16_bits():
    """nvidia_full of two blocks: one, and of the other one GEMM of three for the last 18% of the steps."""
    blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(32, 32)) for _ in range(2))
    net = nf.convert(torch.nn.ModuleDict({"h": blocks}), "nvidia_full", verbose=False)
    work = MethodPlan.parse("nvidia_full").work(net)
    assert work == pytest.approx({4: 0.5 - 0.03, 8: 0.0, 16: 0.5 + 0.03})
    assert MethodPlan.parse("clover").work(nf.convert(net, "clover", verbose=False))[16] == 0


@pytest.mark.parametrize(
    "method, bits",
    [
        ("bf16", (16, 16, 16)),
        ("clover", (4, 4, 4)),
        ("nvidia", (4, 4, 4)),  # dgrad: the forward's 4-bit weight
        ("fig1b_sr", (16, 16, 16)),  # dgrad: a 4-bit gradient and an unquantized weight
        ("fig1e_ms_eden", (16, 4, 4)),
        ("rotated_integers", (16, 8, 8)),
        ("fp8", (8, 8, 8)),
        ("integers", (8, 8, 8)),
        ("nvidia_full_end", (16, 4, 4)),
        ("clover_integer_input", (8, 4, 4)),
        ("clover_weight", (16, 16, 16)),
    ],
)
def test_bits_of_a_gemm_are_those_of_its_wider_operand(method, bits):
    assert gemm_bits(get_recipe(method)) == bits


def test_a_method_that_changes_late_does_so_wherever_it_begins():
    late = MethodPlan.parse("clover_late")
    assert late.phases == MethodPlan.parse("clover", phases="0.7=clover_search").phases
    assert [late.at(x).name for x in (0.0, 0.69, 0.7, 1.0)] == ["clover_late"] * 2 + ["clover_search"] * 2
    assert late.work(model()) == pytest.approx({4: 1.0, 8: 0.0, 16: 0.0})
    begun = MethodPlan.parse("bf16", phases="0.5=clover_late")
    assert [begun.at(x).name for x in (0.4, 0.6, 0.8)] == ["bf16", "clover_late", "clover_search"]
    assert MethodPlan.parse("clover_late", phases="0.9=bf16").at(0.8).name == "clover_late"  # asked for otherwise
    early, clover = get_recipe("clover_late"), get_recipe("clover")
    assert (early.output, early.grad_input, early.grad_weight) == (clover.output, clover.grad_input, clover.grad_weight)


def test_a_pattern_without_a_layer_is_refused():
    with pytest.raises(ValueError, match="layers: 'mlp.*' .*: up, down"):
        MethodPlan.parse("clover", layers="mlp.*=fp8").apply(model(), 0.0)


# ----------------------------------------------------------------------------------------------------------------------
# In training

TINY = (
    "--depth=2 --aspect-ratio=64 --head-dim=64 --max-seq-len=32 --device-batch-size=2 --total-batch-size=128 "
    "--eval-tokens=128 --eval-every=-1 --core-metric-every=-1 --sample-every=-1 --device-type=cpu --num-iterations=4"
).split()


def weights(base, tag, step=4):
    return load_checkpoint(base / "base_checkpoints" / tag, step, "cpu")[0]


def same(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


def test_phases_of_a_run(tiny_base):
    """A run that switches is the method's run up to there; and resumed within a phase it is the same run. Weights are
    compared: two methods' losses may agree by chance."""

    def train(tag, *flags):
        base_train.main([*TINY, "--method=clover", f"--model-tag={tag}", "--save-every=1", "--keep-last=-1", *flags])

    train("clover")
    train("late", "--method-phases=0.5=bf16")
    at = {(tag, step): weights(tiny_base, tag, step) for tag in ("clover", "late") for step in (1, 2, 3, 4)}
    for step in (1, 2, 3, 4):
        assert same(at["late", step], at["clover", step]) == (step <= 2), step
    train("late", "--method-phases=0.5=bf16", "--resume-from-step=3")
    assert same(weights(tiny_base, "late"), at["late", 4])
    with pytest.raises(UserError, match="method_phases"):  # another run
        train("late", "--resume-from-step=3")


def test_layers_of_a_run(tiny_base, capsys):
    base_train.main([*TINY, "--method=clover", "--layer-methods=*.mlp.c_fc=bf16,*.attn.c_q=bf16", "--num-iterations=1"])
    said = capsys.readouterr().out
    assert "GEMM work  52.8% in 4 bits, 47.2% in 16 bits" in said  # 10 of 24 squares and the head's 2.5 in 16


MINE = """import nanochat_fp4 as nf
nf.register(nf.Recipe("row_of_a_file", output=nf.Gemm(nf.Operand("{}"), nf.Operand("rtn"))))
"""


def test_a_row_of_ones_own_trains_by_name_and_goes_on_without_its_file(tiny_base, monkeypatch, capsys):
    """The checkpoint holds the recipe: whoever resumes or evaluates needs no file, and no other row of this name."""
    monkeypatch.setattr(methods, "REGISTERED", dict(methods.REGISTERED))
    file = tiny_base / "mine.py"
    file.write_text(MINE.format("rtn"))
    flags = [*TINY, "--method=row_of_a_file", "--save-every=2", "--keep-last=-1"]
    base_train.main([*flags, f"--recipes={file}"])
    whole = weights(tiny_base, "d2_row_of_a_file")

    methods.REGISTERED.pop("row_of_a_file")
    with pytest.raises(UserError, match="--method: .*'row_of_a_file'"):
        base_train.main([*flags, "--overwrite"])
    base_train.main([*flags, "--resume-from-step=2"])
    assert same(weights(tiny_base, "d2_row_of_a_file"), whole)
    methods.REGISTERED.pop("row_of_a_file")
    capsys.readouterr()
    base_loss.main(["--model-tag=d2_row_of_a_file", "--split-tokens=128", "--device-batch-size=2", "--device-type=cpu"])
    said = capsys.readouterr().out  # What was converted was said by base training.
    assert "(row_of_a_file forward)" in said and "converted" not in said

    methods.REGISTERED.pop("row_of_a_file")
    file.write_text(MINE.format("sr"))
    with pytest.raises(UserError, match="step 4 in .* another recipe .* leave the file out"):
        base_train.main([*flags, "--resume-from-step=latest", f"--recipes={file}"])


OWN_ROUNDING = """import dataclasses
import nanochat_fp4 as nf
nf.ROUNDINGS["five_over_six"] = dataclasses.replace(nf.ROUNDINGS["four_over_six"], candidates=(1.0, 6 / 5))
five = nf.Operand("five_over_six")
nf.register(nf.Recipe("own_rounding", output=nf.Gemm(five, five)))
"""


def test_a_rounding_of_ones_own_is_resumed_and_evaluated_with_and_without_its_file(tiny_base, monkeypatch, capsys):
    """$RECIPES names the file. Each command is a new process for a user, so what the last one knew is forgotten."""
    monkeypatch.setattr(methods, "REGISTERED", known := dict(methods.REGISTERED))
    monkeypatch.setattr(nf.ROUNDINGS, "data", dict(nf.ROUNDINGS))
    file = tiny_base / "mine.py"
    file.write_text(OWN_ROUNDING)
    flags = [*TINY, "--method=own_rounding", "--save-every=2", "--keep-last=-1"]

    def command(main, argv, recipes=""):
        nf.ROUNDINGS.pop("five_over_six", None)
        methods.REGISTERED = dict(known)
        monkeypatch.setenv("RECIPES", recipes)
        main(argv)

    command(base_train.main, flags, str(file))
    whole = weights(tiny_base, "d2_own_rounding")
    loss = ["--model-tag=d2_own_rounding", "--split-tokens=128", "--device-batch-size=2", "--device-type=cpu"]
    for recipes in (str(file), ""):
        command(base_train.main, [*flags, "--resume-from-step=2"], recipes)
        assert same(weights(tiny_base, "d2_own_rounding"), whole)
        capsys.readouterr()
        command(base_loss.main, loss, recipes)
        assert "(own_rounding forward)" in capsys.readouterr().out
    assert "five_over_six" not in nf.ROUNDINGS


OWN_FUNCTION = """import torch
import nanochat_fp4 as nf

LARGEST = {largest}

def in_integers(x, rounding, noise):
    blocks = x.unflatten(-1, (-1, rounding.block))
    scale = (blocks.abs().amax(-1) / LARGEST).clamp(min=1e-30)
    codes = (blocks / scale.unsqueeze(-1)).round().flatten(-2).to(torch.int8)
    return nf.NVFP4Tensor(codes, scale, torch.ones((), device=x.device))

nf.ROUNDINGS["in_{largest}"] = nf.Rounding(quantize=in_integers)
both = nf.Gemm(nf.Operand("in_{largest}"), nf.Operand("in_{largest}"))
nf.register(nf.Recipe("in_{largest}", output=both, grad_input=both, grad_weight=both))
"""


def test_a_model_goes_on_with_the_function_that_it_was_trained_with(tiny_base, capsys):
    """A resume and an evaluation refuse another body, another helper's constant, and a function with a new name."""
    file = tiny_base / "mine.py"
    flags = [*TINY, "--method=in_7", f"--recipes={file}", "--depth=1", "--num-iterations=2", "--save-every=1"]
    loss = ["--model-tag=d1_in_7", "--split-tokens=128", "--device-batch-size=2", "--device-type=cpu"]
    commands = [(base_train.main, [*flags, "--resume-from-step=1"]), (base_loss.main, [*loss, f"--recipes={file}"])]

    def command(main, argv, text):
        file.write_text(text)
        with mock.patch.dict(methods.REGISTERED), mock.patch.dict(nf.ROUNDINGS.data):  # A new process for a user.
            main(argv)

    text = OWN_FUNCTION.format(largest=7)
    command(base_train.main, [*flags, "--keep-last=-1"], text)
    for main, argv in commands:
        for old, new in (("/ LARGEST", "/ 5"), ("LARGEST = 7", "LARGEST = 6"), ("in_integers", "in_other_integers")):
            with pytest.raises(UserError, match="function in_integers .*file of that time") as e:
                command(main, argv, text.replace(old, new))
            assert "\n" not in str(e.value)
        command(main, argv, f"# Two lines\n# more\n{text}")
    assert "(in_7 forward)" in capsys.readouterr().out


def test_functions_of_files_are_compiled(tiny_base, monkeypatch):
    """Two files have one name, each run reads all of them again, and lab.recipes is imported already."""
    monkeypatch.setattr(methods, "REGISTERED", dict(methods.REGISTERED))
    monkeypatch.setattr(nf.ROUNDINGS, "data", dict(nf.ROUNDINGS))
    monkeypatch.setenv("NVFP4_COMPILE", "1")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    files = [lab.recipes.__file__]
    for largest in (7, 127):
        (tiny_base / str(largest)).mkdir()
        files.append(str(tiny_base / str(largest) / "mine.py"))
        Path(files[-1]).write_text(OWN_FUNCTION.format(largest=largest))
    flags = [*TINY, f"--recipes={','.join(files)}", "--method=in_7", "--depth=1", "--num-iterations=2"]
    base_train.main([*flags, "--model-tag=compiled", "--compile"])
    base_train.main([*flags, "--model-tag=eager"])
    assert same(weights(tiny_base, "compiled", 2), weights(tiny_base, "eager", 2))
    for method in ("in_7", "in_127", "fp8_e4m3_rows"):
        function = get_recipe(method).output.a.rounding.quantize
        assert pickle.loads(pickle.dumps(function)) is function
    torch.compiler.reset()


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "name Python files"),
        ("1 / 0", "mine.py:1: ZeroDivisionError: division by zero"),
        ("import nanochat_fp4 as nf\n\nnf.regster(1)\n", "mine.py:3: AttributeError: .* 'regster'"),
        ("x = 1\ny = (\n", "mine.py:2: SyntaxError: "),
        ("def f():\n    raise SystemExit(3)\n\nf()\n", "mine.py:2: SystemExit: 3"),
        (MINE.format("rtn").replace("row_of_a_file", "clover"), "'clover' .*another recipe"),
    ],
)
def test_a_file_of_rows_that_cannot_be_used_is_one_line(text, message, tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    if text:
        file.write_text(text)
    with pytest.raises(UserError, match=f"^--recipes: .*{message}") as e:
        base_train.parse_args([f"--recipes={file}"])
    assert "\n" not in str(e.value)
    monkeypatch.setenv("RECIPES", str(file))
    with pytest.raises(UserError, match=f"^RECIPES: .*{message}"):
        base_train.parse_args([])


def test_a_method_that_no_file_has_registered_is_refused_with_those_that_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(methods, "REGISTERED", dict(methods.REGISTERED))
    texts = {"row": MINE.format("rtn"), "forgot": "import nanochat_fp4 as nf\nnf.Recipe('forgotten')\n"}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    base_train.parse_args([f"--recipes={tmp_path / 'row.py'},{tmp_path / 'forgot.py'}"])
    with pytest.raises(ValueError, match="(?i)use one of: bf16, .*, row_of_a_file.*; or register its"):
        methods.get_recipe("forgotten")


def test_several_files_of_rows_are_named_with_commas(tmp_path, monkeypatch):
    monkeypatch.setattr(methods, "REGISTERED", dict(methods.REGISTERED))
    files = [tmp_path / "first.py", tmp_path / "second.py"]
    for file in files:
        file.write_text(MINE.format("rtn").replace("row_of_a_file", file.stem))
    base_train.parse_args([f"--recipes={files[0]},{files[1]}"])
    assert {"first", "second"} <= set(methods.REGISTERED)
    with pytest.raises(UserError, match="no file .*third.py;"):
        base_train.parse_args([f"--recipes={files[0]},{tmp_path / 'third.py'}"])
