"""Errors in one line, packages that are not installed, flags, and numbers as text."""

import argparse
import ast
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanochat_fp4 import cli
from nanochat_fp4.cli import (
    ArgumentParser,
    UserError,
    format_bytes,
    format_seconds,
    missing_package,
    one_line,
    require,
    run_main,
)
from scripts import base_train

ROOT = Path(__file__).resolve().parent.parent


def test_one_line():
    assert one_line("a\n  b") == "a b" and one_line(KeyError()) == "KeyError"


def run(raised, capsys, monkeypatch=None):
    """(exit status, stderr) of a main that raises."""

    def main():
        raise raised

    with pytest.raises(SystemExit) as e:
        run_main(main)
    return e.value.code, capsys.readouterr().err


def caused_by(cause: BaseException) -> SystemError:
    """What Python makes of a Ctrl-C inside compiled code that calls Python again."""
    error = SystemError("<method> returned a result with an exception set")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "raised, status, text",
    [
        (UserError("no data;\n  set DATA_DIR"), 2, "error: no data; set DATA_DIR\n"),
        (ValueError("K=17 is not a multiple of 16"), 2, "error: K=17 is not a multiple of 16\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (caused_by(KeyboardInterrupt()), 130, "error: interrupted\n"),
    ],
)
def test_user_errors_end_in_one_line(raised, status, text, capsys):
    assert run(raised, capsys) == (status, text)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EFBIG, errno.EBUSY])
def test_a_full_or_read_only_disk_is_the_users_to_fix(number, capsys):
    status, err = run(OSError(number, os.strerror(number), "/some/file"), capsys)
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1 and "/some/file" in err


@pytest.mark.parametrize("bug", [TypeError("bug"), KeyError("x"), OSError(errno.EBADF, "bug")])
def test_bugs_keep_their_traceback(bug):
    def main():
        raise bug

    with pytest.raises(type(bug)):
        run_main(main)


def test_out_of_gpu_memory_names_the_flag(capsys):
    status, err = run(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0"), capsys)
    assert status == 2 and "--device-batch-size" in err and err.count("\n") == 1


def test_other_ranks_name_themselves_and_tracebacks_come_on_request(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert run(UserError("bad"), capsys)[1] == "error (rank 3): bad\n"
    monkeypatch.setenv("NANOCHAT_TRACEBACK", "1")
    assert "Traceback" in run(UserError("bad"), capsys)[1]
    monkeypatch.setenv("NANOCHAT_TRACEBACK", "no")
    assert "Traceback" not in run(UserError("bad"), capsys)[1]


def test_what_all_ranks_would_say_is_said_by_one(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert run(KeyboardInterrupt(), capsys) == (130, "")


def test_run_main_returns_when_all_is_well():
    assert run_main(lambda: 1) is None


# ----------------------------------------------------------------------------------------------------------------------
# Packages that are not installed

PACKAGES = """accelerate compressed_tensors datasets fastapi filelock gguf huggingface_hub jinja2 lightning matplotlib
muon pandas peft pyarrow pydantic regex requests rustbpe safetensors starlette tiktoken tokenizers tqdm
transformers uvicorn wandb yaml""".split()
LIBRARY = """
import sys
import torch
from nanochat_fp4 import *
import nanochat_fp4.doctor
try:
    load_quantized(torch.nn.Linear(1, 1), ".")
except ModuleNotFoundError as e:
    assert "pip install -e" in str(e), e
else:
    raise AssertionError
del sys.modules["safetensors"]
try:
    from safetensors.torch import save_file
except ImportError:
    sys.exit()
layer, codes = torch.nn.Sequential(torch.nn.Linear(2, 1)), torch.ones(1, 2).to(torch.float8_e4m3fn)
tensors = {"0.weight": codes, "0.weight_scale": torch.ones(1), "0.bias": torch.ones(1)}
save_file(tensors, sys.argv[1] + "/model.safetensors")
assert float(load_quantized(layer, sys.argv[1])[0].weight.sum()) == 2
"""
FORKS = """
# A Python that has torch runs each program as `python -m` or `-c` would, excepthook and all, in a fork.
import json, os, runpy, tempfile
import torch
answers = []
for option, what, *rest in json.loads(sys.argv[1]):
    with tempfile.TemporaryFile("w+") as log:
        if pid := os.fork():
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            log.seek(0)
            answers.append((status, log.read()))
            continue
        os.dup2(log.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        argv = [*rest, sys.argv[2]]
        sys.orig_argv, sys.argv = [sys.executable, option, what, *argv], [option, *argv]
        status = 0
        try:
            if option == "-c":
                exec(what, {"__name__": "__main__"})
            else:
                runpy.run_module(what, run_name="__main__", alter_sys=True)
        except SystemExit as e:
            status = e.code
        except BaseException as e:
            status = 1
            try:
                sys.excepthook(type(e), e, e.__traceback__)
            except SystemExit as e:
                status = e.code
        sys.stderr.flush()
        os._exit(status or 0)
print(json.dumps(answers))
"""
PROGRAMS = {  # the end of stderr without a single package of the extras
    ("-m", "nanochat_fp4", "base_train"): f"pip install -e '{ROOT}[train]'",
    ("-m", "scripts.export", "--format=safetensors"): f"pip install -e '{ROOT}[train]'",
    ("-m", "nanochat_fp4.upstream", "scripts.base_train"): "",
    ("-c", LIBRARY): None,
}


def test_without_the_packages_of_the_extras(tmp_path):
    """Nothing but torch, imported once for all: one line with the `pip install`, or the answer where none is needed."""
    hidden = f"for name in {PACKAGES}:\n    sys.modules[name] = None\n"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))}
    env.pop("NANOCHAT_DIR", None)
    command = [sys.executable, "-c", f"import sys\n{hidden}{FORKS}", json.dumps(list(PROGRAMS)), tmp_path]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    answers = json.loads(done.stdout)
    for (program, expected), (status, err) in zip(PROGRAMS.items(), answers, strict=True):
        lines = err.splitlines()
        if expected is None:
            assert status == 0, err
        else:
            assert status == 2 and len(lines) == 1 and lines[0].startswith("error: "), err
            assert lines[0].endswith(expected) and "ModuleNotFound" not in lines[0], program


def test_a_reader_that_has_gone_ends_it_without_a_word(monkeypatch, capsys):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stdout, pytest.raises(SystemExit) as e:
        monkeypatch.setattr(sys, "stdout", stdout)
        run_main(lambda: print("x" * 1_000_000))  # more than the buffer takes
    monkeypatch.undo()
    assert e.value.code == 141 and capsys.readouterr().err == ""


def test_a_character_that_stdout_has_not_ends_no_run():
    """An encoding without the character, and bytes of a path that are no text."""
    code = r"from nanochat_fp4.cli import run_main; run_main(lambda: print('caf\xe9 \udcff'))"
    for encoding, printed in (("ascii", rb"caf\xe9 \udcff"), ("utf-8", b"caf\xc3\xa9 \\udcff")):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, printed, b"")


def test_a_stdout_that_was_closed_before_is_no_failure():
    code = "from nanochat_fp4.cli import run_main; run_main(lambda: print('done'))"
    done = subprocess.run(["sh", "-c", f'"{sys.executable}" -c "{code}" >&-'], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_broken_pipe_of_another_reader_is_a_bug():
    def main():
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_main(main)


def test_a_missing_package_says_what_to_type(tmp_path, monkeypatch):
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
    assert set(cli.EXTRAS.split(",")) <= set(extras)
    missing = ModuleNotFoundError(name="gguf.reader")
    for package, having in (("gguf", "export"), ("tiktoken", "train"), ("transformers", "export,examples")):
        assert missing_package(ModuleNotFoundError(name=package)).endswith(f"[{having}]'") or (ROOT / ".venv").is_dir()
    monkeypatch.setattr(cli, "ROOT", tmp_path)  # as site-packages, without pyproject.toml
    assert missing_package(missing).endswith(f"pip install 'nanochat_fp4[{cli.EXTRAS}]'")
    (tmp_path / ".venv").mkdir()
    assert f'source "{tmp_path}/.venv/bin/activate"' in missing_package(missing)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert "pip install" in missing_package(missing) and "package gguf is" in missing_package(missing)
    assert missing_package(ModuleNotFoundError(name="nanochat_fp4.gpt")) == ""
    require("torch", "json")
    with pytest.raises(ModuleNotFoundError, match="no_such_package") as e:
        require("torch", "no_such_package")
    assert cli.user_message(e.value) == missing_package(ModuleNotFoundError(name="no_such_package"))


@pytest.mark.parametrize("program", ["nanochat_fp4.doctor", "scripts.chat_web", "lab.study.forwards", "examples.lora"])
def test_a_python_without_torch_says_what_to_type(program, tmp_path):
    """The shell that typed `bash speedrun_fp4.sh` has the system's Python, and the packages are in .venv."""
    for name in ("scripts", "eval", "lab", "examples", "pyproject.toml"):
        (tmp_path / name).symlink_to(cli.ROOT / name)
    shutil.copytree(cli.ROOT / "nanochat_fp4", tmp_path / "nanochat_fp4", ignore=shutil.ignore_patterns("*cache*"))
    start = f"""if True:
        import runpy, sys
        sys.path.insert(0, "")
        sys.argv, sys.orig_argv = ["-m"], ["python", "-m", {program!r}]
        runpy.run_module({program!r}, run_name="__main__", alter_sys=True)"""
    command = [sys.executable, "-IS", "-c", start]
    for has_venv, expected in ((False, f"[{cli.EXTRAS}]'"), (True, '.venv/bin/activate"` and run it again')):
        if has_venv:
            (tmp_path / ".venv/lib/python3.13/site-packages/torch").mkdir(parents=True)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("error: the package ") and done.stderr.rstrip().endswith(expected)


# ----------------------------------------------------------------------------------------------------------------------
# Flags, and numbers as text


def test_formats():
    assert [format_bytes(n) for n in (12, 1536, 5 << 20, 3 << 40)] == ["12 bytes", "1.5 KB", "5.0 MB", "3.0 TB"]
    assert format_bytes(1) == "1 byte"
    assert [format_seconds(s) for s in (3, 75, 7500)] == ["3s", "1m15s", "2h05m"]


def test_flags_are_not_abbreviated_and_slips_are_one_line(capsys):
    parser = ArgumentParser(prog="base_train")
    parser.add_argument("--depth", type=int)
    commands = parser.add_subparsers()
    commands.add_parser("run").add_argument("--seconds", type=float)
    for argv, expected in (
        (["--dept=1"], "error: unrecognized arguments: --dept=1; did you mean --depth? (see base_train --help)"),
        (
            ["--depth", "--x"],
            "error: argument --depth: expected one argument (see base_train --help)",
        ),
        (["--xyz"], "error: unrecognized arguments: --xyz (see base_train --help)"),
        (["--depth=x"], "error: argument --depth: invalid int value: 'x' (see base_train --help)"),
    ):
        with pytest.raises(SystemExit) as e:
            parser.parse_args(argv)
        assert e.value.code == 2 and capsys.readouterr().err == expected + "\n"
    with pytest.raises(SystemExit):
        parser.parse_args(["run", "--sec=1"])


def test_dept_is_like_no_flag_only_because_all_begin_with_dashes(capsys):
    parser = ArgumentParser(prog="export")
    for flag in ("--format", "--step"):
        parser.add_argument(flag)
    for argv, expected in (
        (["--dept=3"], "unrecognized arguments: --dept=3"),
        (["--fromat=x"], "unrecognized arguments: --fromat=x; did you mean --format?"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(argv)
        assert capsys.readouterr().err == f"error: {expected} (see export --help)\n"


@pytest.mark.parametrize(
    "program", ["scripts.tok_train", "nanochat_fp4.data.tokenizer", "scripts.plan", "lab.bench layers", "lab.runs"]
)
def test_an_error_names_a_command_that_can_be_typed(program, fork_server):
    module, *words = program.split()
    done = fork_server.run(module, [*(words or ["speedrun"]), "--nope"], as_main=True)
    assert done.status == 2 and done.log.endswith(f"(see python -m {program} --help)\n"), done.log


def test_a_file_that_is_run_names_itself(monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["mine/train.py"])
    with pytest.raises(SystemExit):
        ArgumentParser().parse_args(["--nope"])
    assert capsys.readouterr().err.endswith("(see python mine/train.py --help)\n")


def test_no_number_of_a_flag_is_nan():
    for folder in ("nanochat_fp4", "scripts", "eval"):
        for file in (ROOT / folder).rglob("*.py"):
            assert not re.search(r"\btype=float\b", file.read_text()), f"{file.name}: parse_finite refuses NaN"


def test_no_command_abbreviates_flags():
    files = [
        f for folder in ("nanochat_fp4", "scripts", "eval", "lab", "examples") for f in (ROOT / folder).rglob("*.py")
    ]
    with_parsers = [file for file in files if "Parser" in file.read_text()]
    assert len(with_parsers) > 20
    for file in with_parsers:
        for node in ast.walk(ast.parse(file.read_text())):
            # cli.ArgumentParser refuses abbreviations by itself.
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("argparse.ArgumentParser", "_Parser"):
                assert "allow_abbrev=False" in ast.unparse(node), f"{file.name}:{node.lineno}"


@pytest.mark.parametrize(
    "parse, good, bad",
    [
        (cli.parse_finite, ["-1", "0.5"], ["nan", "inf", "x"]),
        (cli.parse_rate, ["0", "2"], ["-0.1", "nan"]),
        (base_train.parse_share, ["0", "1"], ["1.1", "-0.1", "inf"]),
        (base_train.parse_beta, ["0", "0.95"], ["1", "-0.1", "x"]),
    ],
)
def test_numbers_of_flags_have_ranges(parse, good, bad):
    assert [parse(text) for text in good] == [float(text) for text in good]
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is n"):
            parse(text)


# ----------------------------------------------------------------------------------------------------------------------
# While a program is still starting


@pytest.fixture
def slow_import(tmp_path):
    """An environment where `import torch` says so and takes a minute."""
    (tmp_path / "torch.py").write_text("import os, time\nos.write(1, b'importing\\n')\ntime.sleep(60)\n")
    path = os.pathsep.join(map(str, [tmp_path, ROOT, ROOT / "kernels"]))
    return {k: v for k, v in os.environ.items() if k != "RANK"} | {"PYTHONPATH": path}


@pytest.mark.parametrize("module", ["scripts.base_train", "scripts.chat_eval"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_program_imports(slow_import, module, number):
    process = subprocess.Popen(
        [sys.executable, "-m", module], env=slow_import, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(number)
    assert process.communicate(timeout=300) == ("", "") and process.returncode == -number


def test_another_program_keeps_its_signals(slow_import):
    """Who imports the package still gets a KeyboardInterrupt."""
    code = "try: import nanochat_fp4.nvfp4.convert\nexcept KeyboardInterrupt: print('interrupted')"
    process = subprocess.Popen([sys.executable, "-c", code], env=slow_import, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=300)[0] == "interrupted\n" and process.returncode == 0


# ----------------------------------------------------------------------------------------------------------------------
# torchrun


def test_torchrun_repeats_the_one_line_last(fork_server):
    """All processes fail alike: rank 0 says why, the other one does not, and torchrun's report ends with it."""
    # A busy machine may start rank 0 seconds later than rank 1, which waits long enough here.
    bad = "from nanochat_fp4 import cli; cli.OTHER_RANKS_WAIT = 200; cli.print_error('no data')"
    bad += "; raise SystemExit(2)"
    code = "import nanochat_fp4, torch.distributed.run as run; run.main()"
    argv = [str(fork_server.python), "-c", code, "--standalone", "--nproc_per_node=2", "--no-python"]
    done = subprocess.run([*argv, str(fork_server.python), "-c", bad], capture_output=True, text=True, timeout=300)
    assert "error: no data" in done.stderr.splitlines()[-2] and "error (rank 1)" not in done.stderr
    assert done.returncode == 1
