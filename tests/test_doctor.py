"""The doctor and the start-up probe: silent on a sound machine, one clear line for every fault that is injected."""

import contextlib
import time

import pytest
import torch
from _rows import METHOD_TABLE

from nanochat_fp4 import doctor
from nanochat_fp4.cli import UserError
from nanochat_fp4.models.cross_entropy import Head
from nanochat_fp4.nvfp4 import layer
from nanochat_fp4.nvfp4.format import NVFP4Tensor
from nanochat_fp4.nvfp4.methods import METHODS
from nanochat_fp4.nvfp4.quantizers import quantize
from nanochat_fp4.nvfp4.recipes import Gemm, Operand, Recipe
from nanochat_fp4.nvfp4.roundings import ROUNDINGS, Rounding

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRAINING = ["nvidia", "four_over_six", "tetrajet_v2", "clover", "clover_search"]


@pytest.fixture(autouse=True)
def kernels_by_default(monkeypatch):
    monkeypatch.delenv("NVFP4_KERNELS", raising=False)


def use_interpreted_kernels(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("NVFP4_KERNELS", "triton")


# --------------------------------------------------------------------------------------------------------------------
# A sound machine.


@pytest.mark.parametrize("method", METHOD_TABLE)
def test_every_layer_passes(method):
    assert doctor.layer_problem(DEVICE, method) is None


def test_probe_passes_quickly_and_says_so():
    assert "clover" in doctor.self_check(DEVICE)
    start = time.process_time()
    doctor.self_check(DEVICE)
    assert time.process_time() - start < 2  # about 0.2 s
    assert "nvidia" in doctor.self_check(str(DEVICE), "nvidia")


@pytest.mark.parametrize("capability, launches", [((10, 0), [("ms_eden", 20, 128)]), ((12, 0), []), ((9, 0), [])])
def test_a_b200_repeats_its_rotating_kernels_at_the_start(monkeypatch, capability, launches):
    """A fence that Triton before 3.7.1 may miss on sm_10x shows in some launches alone."""
    seen = []

    def repeat(device, rounding, shape, times, rht_dim):
        seen.append((rounding.name, times, rht_dim))
        return "launch 13 has other values than the first"

    for name in ("kernel_problem", "layer_problem"):
        monkeypatch.setattr(doctor, name, lambda *arguments: None)
    monkeypatch.setattr(doctor, "use_kernels", lambda device: True)
    monkeypatch.setattr(doctor, "repeat_problem", repeat)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(UserError, match="launch 13 has other values") if launches else contextlib.nullcontext():
        doctor.self_check("cuda", "clover")
    assert seen == launches


def test_beside_a_gpu_the_self_check_computes_in_one_thread(monkeypatch):
    """torch.compile's processes take the cores of a start, and threads that wait for one another waited seconds."""
    seen = []
    monkeypatch.setattr(doctor, "use_kernels", lambda device: False)
    monkeypatch.setattr(doctor, "layer_problem", lambda *arguments: seen.append(torch.get_num_threads()))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        doctor.self_check("cuda", "clover")
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_probe_leaves_the_generators_alone():
    torch.manual_seed(5)
    want = torch.rand(3, device=DEVICE)
    torch.manual_seed(5)
    doctor.self_check(DEVICE)
    assert torch.equal(torch.rand(3, device=DEVICE), want)


def test_probe_checks_the_kernels_where_they_are_used(monkeypatch):
    use_interpreted_kernels(monkeypatch)
    monkeypatch.setattr(doctor, "LAYER", (40, 32, 48))
    seen, real = [], doctor.kernel_problem
    monkeypatch.setattr(doctor, "kernel_problem", lambda *a: seen.append((a[1].name, a[2])) or real(*a))
    doctor.self_check(DEVICE, "clover")
    assert seen == [("four_over_six", 0), ("ms_eden", 128)]


def test_the_command_passes_here(fork_server):
    run = fork_server.run("nanochat_fp4.doctor", ["--method", "clover"], as_main=True)
    assert run.status == 0, run.log
    assert "everything agrees" in run.log and "FAIL" not in run.log
    assert "GEMM: " in run.log and "ok    clover" in run.log and "ok    sdpa" in run.log


@pytest.mark.parametrize("rounding", ["rtn", "sr"])
def test_kernels_that_add_a_rotation_in_their_own_order_are_sound(rounding, monkeypatch):
    """An RHT of 128 of codes: the amax, and with it a tensor_scale that is no power of two, is a unit of FP32 apart."""
    use_interpreted_kernels(monkeypatch)
    assert doctor.kernel_problem(DEVICE, ROUNDINGS[rounding], 128, (40, 144)) is None


# --------------------------------------------------------------------------------------------------------------------
# Faults.


def failure(method="clover") -> str:
    with pytest.raises(UserError) as caught:
        doctor.self_check(DEVICE, method)
    text = str(caught.value)
    assert "\n" not in text and "NVFP4_KERNELS=reference" in text
    return text


def inject(monkeypatch, calls, damage):
    """Damages the results of the calls-th GEMMs of a layer: 0 forward, 1 dgrad, 2 wgrad."""
    real, count = layer.gemm, [0]

    def gemm(a, b, **kw):
        y = real(a, b, **kw)
        count[0] += 1
        return damage(y) if (count[0] - 1) % 3 in calls else y

    monkeypatch.setattr(layer, "gemm", gemm)


@pytest.mark.parametrize("method", TRAINING)
@pytest.mark.parametrize("call, name", [(0, "output"), (1, "grad_input"), (2, "grad_weight")])
def test_a_gemm_that_returns_zeros(method, call, name, monkeypatch):
    inject(monkeypatch, (call,), torch.zeros_like)
    assert f"{name} is all zeros" in failure(method)


def test_a_gemm_of_torch_that_returns_zeros(monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w, b: 0 * (x @ w.T.to(x.dtype)))
    assert "output is all zeros" in failure("bf16")


@pytest.mark.parametrize(
    "damage, text",
    [
        (lambda y: y * 1.02, "relative square error of 4"),
        (lambda y: torch.where(torch.arange(y.shape[1], device=y.device) == 3, 0, y), "relative square error"),
        (lambda y: y.roll(1, 0), "relative square error"),
        (lambda y: y * float("nan"), "not finite"),
    ],
)
def test_a_gemm_that_is_wrong(damage, text, monkeypatch):
    inject(monkeypatch, (0,), damage)
    assert text in failure()


def test_operands_rotated_with_different_signs(monkeypatch):
    real = layer.Pass.how

    def how(self, operand, *args):
        made = real(self, operand, *args)
        return made._replace(rht_stream=made.rht_stream + operand % 2)  # the second operand of each GEMM

    monkeypatch.setattr(layer.Pass, "how", how)
    assert "grad_input has a relative square error" in failure()


def test_an_error_in_a_kernel_is_one_line(monkeypatch):
    def gemm(*args, **kw):
        raise RuntimeError("cublasGemmEx returned status 15\nand a long story")

    monkeypatch.setattr(layer, "gemm", gemm)
    assert "status 15" in failure()


def test_a_kernel_that_returns_wrong_codes(monkeypatch):
    use_interpreted_kernels(monkeypatch)
    import nvfp4_kernels.quantize as kernels

    real = kernels.quantize

    def quantize(*args):
        codes, *rest = real(*args)
        codes[3, 5] ^= 1  # one code, by one step
        return codes, *rest

    monkeypatch.setattr(kernels, "quantize", quantize)
    monkeypatch.setattr(doctor, "LAYER", (40, 32, 48))
    assert "four_over_six" in failure() and "1 of " in failure() and "values of the codes" in failure()


@pytest.fixture(params=["a grad_output", "a transposed grad_output"])
def wrong_byte(request, monkeypatch) -> str:
    """Of the kernel of FP8 gradients, in one of both layouts."""
    use_interpreted_kernels(monkeypatch)
    import nvfp4_kernels.quantize as kernels

    real = kernels.quantize_both

    def quantize_both(*args):
        made = real(*args)
        made["transposed" in request.param].view(torch.uint8)[3, 5] ^= 1
        return made

    monkeypatch.setattr(kernels, "quantize_both", quantize_both)
    monkeypatch.setattr(doctor, "LAYER", (40, 32, 48))
    return f"1 of 1920 values of {request.param} differ"


def test_one_wrong_byte_of_an_fp8_gradient(wrong_byte):
    """Before training begins. The products' own check would not see it."""
    assert doctor.layer_problem(DEVICE, "fp8") is None
    with pytest.raises(UserError, match=wrong_byte):
        doctor.self_check(DEVICE, "fp8")


@pytest.mark.parametrize("method", ["clover_fp8_forward", "bf16"])
def test_one_wrong_byte_of_an_fp8_heads_gradient(method, wrong_byte, monkeypatch):
    """No layer of these methods has such operands, so a BF16 head needs no check."""
    model = torch.nn.ModuleDict({"lm_head": Head(16, 64)})
    assert method in doctor.self_check(DEVICE, method, model)
    model.lm_head.precision = "fp8"
    with pytest.raises(UserError, match=wrong_byte):
        doctor.self_check(DEVICE, method, model)
    monkeypatch.setattr(doctor, "SMALL_LAYER", (40, 32, 48))
    monkeypatch.setattr(doctor.flash_attention, "BACKENDS", [])
    found = doctor.examine(torch.device("cpu"), (method,))
    assert [wrong_byte in problem for problem in found] == [True] * (method == "clover_fp8_forward")  # its own head


OPERANDS = ["a grad_output", "a transposed grad_output", "transposed codes"]
OPERANDS += ["a gradient of ReLU^2", "a transposed gradient of ReLU^2"]


@pytest.mark.parametrize("name", OPERANDS)
def test_the_probe_sees_each_operand_of_a_step(name, monkeypatch):
    use_interpreted_kernels(monkeypatch)
    wrong = OPERANDS.index(name)
    import nvfp4_kernels.rotate as kernels

    real, made = kernels.rotate_quantize, []

    def rotate_quantize(*args):
        tensors = real(*args)
        made.extend(tensors)
        if len(made) - len(tensors) <= wrong < len(made):
            made[wrong][:, 3] *= 2
        return tensors

    monkeypatch.setattr(kernels, "rotate_quantize", rotate_quantize)
    text = doctor.kernel_problem(DEVICE, ROUNDINGS["ms_eden"], 128, (128, 128))
    assert text.startswith("ms_eden after an RHT of 128, 128 x 128: ") and f"values of {name} differ" in text


@pytest.mark.parametrize("factor", [1 + 2**-18, float("nan"), 0])
def test_a_rotating_kernel_that_is_wrong_after_its_sums(factor, monkeypatch):
    """A tensor_scale more than a few units apart, or every 16th value zero."""
    use_interpreted_kernels(monkeypatch)
    import nvfp4_kernels.rotate as kernels

    real = kernels.rotate_quantize

    def rotate_quantize(*args):
        tensors = real(*args)
        damaged = tensors[-1] if factor else tensors[0].view(-1)[::16]  # of the transposed one, and of either
        damaged.mul_(factor)
        return tensors

    monkeypatch.setattr(kernels, "rotate_quantize", rotate_quantize)
    assert "values of a " in doctor.kernel_problem(DEVICE, ROUNDINGS["sr"], 128, (128, 128))


def test_a_rotating_kernel_with_other_bits_in_one_of_many_launches(monkeypatch):
    use_interpreted_kernels(monkeypatch)
    import nvfp4_kernels.rotate as kernels

    real, launches = kernels.rotate_quantize, []
    assert doctor.repeat_problem(DEVICE, ROUNDINGS["ms_eden"], (32, 128), 2) is None

    def rotate_quantize(*args):
        tensors = real(*args)
        launches.append(len(tensors))
        if len(launches) == 7:  # three for each time: of grad_output, of codes, of a gradient of ReLU^2
            tensors[0].view(torch.uint8)[3, 4] ^= 1
        return tensors

    monkeypatch.setattr(kernels, "rotate_quantize", rotate_quantize)
    text = doctor.repeat_problem(DEVICE, ROUNDINGS["ms_eden"], (32, 128), 4)
    assert text == "ms_eden, 32 x 128: launch 3 has other values than the first"


@pytest.mark.parametrize("wrong", ["window", "gradient", "raises"])
def test_an_attention_that_is_wrong(wrong, monkeypatch):
    assert doctor.attention_problem(DEVICE, "sdpa") is None
    real = doctor.flash_attention.sdpa_attention

    def sdpa(q, k, v, left):
        if wrong == "raises":
            raise RuntimeError("no kernel image\nis available")
        if wrong == "gradient":
            k = k.detach() + 0.9 * (k - k.detach())
        return real(q, k, v, left - 1 if wrong == "window" and left > 0 else left)

    monkeypatch.setattr(doctor.flash_attention, "sdpa_attention", sdpa)
    expected = {
        "window": "attention, sdpa, a window of 65: output has a relative square error of",
        "gradient": "attention, sdpa, no window: grad of k has a relative square error of 1.0e-02",
        "raises": "attention, sdpa: no kernel image",
    }
    assert doctor.attention_problem(DEVICE, "sdpa").startswith(expected[wrong])


def test_examine_lists_every_problem(monkeypatch, capsys):
    inject(monkeypatch, (0,), torch.zeros_like)
    problems = doctor.examine(torch.device("cpu"), ("clover", "bf16"))
    assert problems == ["clover: output is all zeros"]
    text = capsys.readouterr().out
    assert "FAIL" in text and "ok    bf16" in text


def test_the_command_fails_with_one_line(monkeypatch, capsys):
    inject(monkeypatch, (0, 1, 2), torch.zeros_like)
    with pytest.raises(SystemExit) as caught:
        doctor.run_main(lambda: doctor.main(["--method", "clover"]))
    assert caught.value.code == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(error) == 1 and "NVFP4_KERNELS=reference" in error[0]


def test_by_default_the_methods_to_choose_from_are_examined(monkeypatch):
    seen = []
    monkeypatch.setattr(doctor, "examine", lambda device, methods, **more: seen.append(methods) or [])
    doctor.main([])
    assert seen == [tuple(METHODS)]


def test_what_a_compiler_raises_is_a_problem_and_no_traceback(monkeypatch):
    """Triton's CompilationError and a missing gcc (FileNotFoundError) are no RuntimeError."""

    def raises(*args, **kw):
        raise FileNotFoundError("gcc not found")

    monkeypatch.setattr(torch.autograd, "grad", raises)
    assert doctor.layer_problem(torch.device("cpu"), "clover") == "clover: gcc not found"


def test_the_doctor_compares_each_kernel_with_its_own_rotation(monkeypatch):
    """A start compares roundings other than ms_eden without one."""
    use_interpreted_kernels(monkeypatch)
    seen = []
    monkeypatch.setattr(doctor, "kernel_problem", lambda *a: seen.append((a[1].name, a[2])))
    doctor.self_check(DEVICE, "nvidia")
    at_the_start, seen[:] = [*seen], []
    monkeypatch.setattr(doctor, "attention_problem", lambda *arguments: None)
    doctor.examine(DEVICE, ("nvidia",))
    assert {rht_dim for _, rht_dim in at_the_start} == {0} and {rht_dim for _, rht_dim in seen} == {0, 16}


# --------------------------------------------------------------------------------------------------------------------
# Functions of a user's file.


def in_a_codebook(x, rounding, noise):
    """Codes are indices, and decoded is what they stand for."""
    scale = x.abs().amax(-1, keepdim=True)
    index = (x / scale * 8).round().clamp(-8, 7) + 8
    return NVFP4Tensor(index.to(torch.int8), scale, torch.ones(()), (index - 8) / 8 * scale)


def in_bytes(x, rounding, noise):
    return NVFP4Tensor((x * 4 + 8).to(torch.uint8), x.new_ones(len(x), 1), torch.ones(()))


def plain(x, rounding, noise):
    return x.round()


@pytest.mark.parametrize("function", [in_a_codebook, in_bytes, plain])
def test_a_function_that_returns_something_else_is_named(function):
    """In one line: by the self-check, by the doctor, which does not blame the machine, and by Table 1."""
    row = Rounding(quantize=function, name="mine")
    recipe = Recipe("of_mine", grad_weight=Gemm(Operand(row), Operand()))
    with pytest.raises(ValueError, match=f"{function.__name__}.* (expected an NVFP4Tensor|codes \\* scales)") as e:
        doctor.self_check(torch.device("cpu"), recipe)
    assert "\n" not in str(e.value)
    with pytest.raises(ValueError, match=function.__name__):
        doctor.examine(torch.device("cpu"), (recipe,))
    with pytest.raises(ValueError, match=function.__name__):
        quantize(torch.randn(4, 32), row)
