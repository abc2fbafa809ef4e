"""What an owner of the repository publishes: version, sdist, wheel, workflows, container."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import nanochat_fp4 as nf

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def command(name: str) -> str:
    """The path of a program that pip installs beside this Python, or that is on PATH."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return path or pytest.skip(f"{name} is not installed (the extra lint)")


def test_one_version():
    newest = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)[1]
    assert newest == cited == nf.__version__
    assert 'dynamic = ["version"]' in PYPROJECT


def test_workflows_are_pinned_and_test_what_pyproject_admits():
    used = re.findall(r"uses: *(.*)", "".join(path.read_text() for path in WORKFLOWS))
    assert len(used) > 5
    for action in used:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action
    tests = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    pythons = re.findall(r'"(3\.\d+)"', re.search(r"python: (\[.*\])", tests)[1])
    assert pythons == re.findall(r"Python :: (3\.\d+)", PYPROJECT)
    assert f'requires-python = ">={pythons[0]},<3.{int(pythons[-1][2:]) + 1}"' in PYPROJECT
    oldest = re.search(r'"torch>=([\d.]+)"', PYPROJECT)[1]
    pinned = [re.search(r"^torch==(\S+)", (ROOT / f"requirements{of}.txt").read_text(), re.M)[1] for of in ("-gpu", "")]
    assert f'torch: ["=={oldest}.0", "=={pinned[0]}", "=={pinned[1]}", ""]' in tests
    assert "bash tests/run.sh" in tests


def test_actionlint():
    done = subprocess.run([command("actionlint"), *WORKFLOWS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint():
    done = subprocess.run([command("hadolint"), ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("gpu, pair", [("gpu", ("2.11", "3.6")), ("gpu_newer", ("2.13", "3.7"))])
def test_the_container_has_the_pair_of_the_results_unless_another_is_asked_for(gpu, pair, tmp_path):
    """The line of Dockerfile that chooses the pins, on the files that Dockerfile gives it."""
    lines = (ROOT / "Dockerfile").read_text()
    assert "ARG GPU=gpu\n" in lines
    for name in re.findall(r"source=(\S+),target=/pins/\1", lines):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (venv := tmp_path / "venv").mkdir()
    program = re.search(r"bash -c '(.*)'", lines)[1].replace("/pins", str(tmp_path)).replace("/opt/venv", str(venv))
    subprocess.run(["bash", "-c", program], env=os.environ | {"GPU": gpu}, check=True, timeout=60)
    pins = "".join((venv / name).read_text() for name in ("requirements.txt", "constraints.txt"))
    for package, version in zip(("torch", "triton"), pair):
        assert {found[: len(version)] for found in re.findall(rf"^{package}==(\S+)", pins, re.M)} == {version}
    assert "numpy==" in pins


def test_links_of_a_package_index(tmp_path):
    """The workflow's step, on a copy: README has no relative link or picture left, and each leads to a file."""
    step = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert 'run: python dev/links.py "$REPOSITORY" "$GITHUB_REF_NAME"' in step
    notebook, cards = "examples/nvfp4_in_ten_minutes.ipynb", "nanochat_fp4/export/save.py"
    for name in ("README.md", "pyproject.toml", notebook, cards):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    repository = "https://github.com/me/nanochat_fp4"

    def links(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, ROOT / "dev" / "links.py", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert links("me/nanochat_fp4").stderr.startswith("error: me/nanochat_fp4 is no repository; expected https://")
    assert links(repository).returncode == 0
    readme = (ROOT / "README.md").read_text().replace("https://github.com/OWNER/nanochat_fp4", repository)
    assert (tmp_path / "README.md").read_text() == readme and readme.count(f"git clone {repository}") == 1
    stored = (tmp_path / notebook).read_text()
    assert "OWNER" not in stored and stored.count("me/nanochat_fp4") == 2
    assert f'nf  # pip install git+{repository}"\n' in (tmp_path / cards).read_text()
    assert json.loads(stored)["cells"][0]["source"][2].count("/github/me/nanochat_fp4/blob/main/" + notebook) == 1

    assert links(repository + ".git", "v9.9").returncode == 0
    text = re.sub(r"^ {4}.*|`[^`\n]*`", "", (tmp_path / "README.md").read_text(), flags=re.M)
    targets = re.findall(r'\]\(\s*([^)\s]+)\s*\)|(?:src|srcset|href)="([^"]+)"', text)
    assert len(targets) > 10 and not any(target.startswith(("docs/", "nanochat_fp4/")) for target, _ in targets)
    for target in map("".join, targets):
        if not target.startswith(repository):
            assert target.startswith("https://"), target  # of others
            continue
        kind, _, path = target.removeprefix(repository + "/").partition("/v9.9/")
        assert (
            kind == ("raw" if path.endswith((".png", ".svg")) else "blob") and (ROOT / path.partition("#")[0]).is_file()
        ), target
    assert f'[project.urls]\nSource = "{repository}"\nPaper' in (tmp_path / "pyproject.toml").read_text()


# ----------------------------------------------------------------------------------------------------------------------
# sdist and wheel

NOT_COPIED = (".git", ".venv", "build", "dist", "wandb", "*.egg-info", "__pycache__", ".*_cache")
HOOKS = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> dict[str, Path]:
    """The sdist of this tree, and the wheel of the sdist: what `python -m build` makes."""
    folder = tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*NOT_COPIED))
    made = {}
    source = folder / "source"
    for hook in ("build_sdist", "build_wheel"):
        before = set(folder.iterdir())
        done = subprocess.run([sys.executable, "-c", HOOKS, hook, folder], cwd=source, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        (made[hook],) = set(folder.iterdir()) - before
        if hook == "build_sdist":
            with tarfile.open(made[hook]) as archive:
                archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
            source = folder / made[hook].name.removesuffix(".tar.gz")
    return {"sdist": made["build_sdist"], "wheel": made["build_wheel"]}


@pytest.mark.slow
def test_metadata_is_what_an_index_takes(distributions):
    if importlib.util.find_spec("twine") is None:
        pytest.skip("twine is not installed (the extra lint)")
    check = [sys.executable, "-m", "twine", "check", "--strict", *distributions.values()]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_installed_into_an_empty_environment(kind, distributions, tmp_path, capsys):
    """From another folder: an example, the doctor, the speedrun. torch and what else is needed are those of the Python
    that runs the tests. The workflow `tests` runs this on the oldest, the pinned and the newest torch."""
    env, elsewhere = tmp_path / "env", tmp_path / "elsewhere"
    elsewhere.mkdir()
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VENV", "NANOCHAT_BASE_DIR")}

    def run(*arguments: str | Path, **more: str) -> str:
        done = subprocess.run(
            arguments, cwd=elsewhere, env=variables | more, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    run(sys.executable, "-m", "venv", "--without-pip", env)
    python = env / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "torch_of_the_tests.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    offline = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet")
    run(sys.executable, "-m", "pip", "--python", python, "install", *offline, distributions[kind])
    installed = files(site)
    assert site in Path(run(python, "-c", "import nanochat_fp4; print(nanochat_fp4.__file__)").strip()).parents
    with capsys.disabled():
        print(f"\n{kind} on torch {torch.__version__}, Python {sys.version.split()[0]}")

    shutil.copy(ROOT / "examples" / "plain_loop.py", elsewhere)
    assert re.search(r"clover_fp8_forward: [\d.]+ -> [\d.]+; BF16", run(python, "plain_loop.py"))
    program = env / "bin" / "nanochat-fp4"
    assert run(program, "--version") == f"nanochat-fp4 {nf.__version__}\n"
    assert run(program, "doctor").endswith("everything agrees\n")
    plan = run(program, "speedrun", PLAN_ONLY="1", NANOCHAT_BASE_DIR="runs").splitlines()
    script = ROOT / "speedrun_fp4.sh"
    of_clone = run("bash", script, PLAN_ONLY="1", NANOCHAT_BASE_DIR="runs", VENV=str(env)).splitlines()
    assert plan[:-2] == of_clone[:-2] and str(elsewhere / "runs") in "".join(plan)
    assert plan[-2].endswith("nanochat-fp4 speedrun") and of_clone[-2].endswith("bash speedrun_fp4.sh")
    if kind == "wheel":
        (elsewhere / "text").mkdir()
        (elsewhere / "text" / "a.txt").write_text("\n\n".join(f"Line {i} has {i % 7} words." for i in range(4000)))
        toy = {"DEPTH": "1", "HEAD_DIM": "64", "SEQ_LEN": "32", "VOCAB_SIZE": "300", "TOTAL_BATCH": "128"}
        toy |= {"NUM_ITERATIONS": "2", "DEVICE_BATCH": "2", "EVAL_EVERY": "2", "EVAL_TOKENS": "64"}
        toy |= {"STAGES": "tok base report", "DATA_DIR": "text", "NANOCHAT_BASE_DIR": "runs"}
        run(program, "speedrun", **toy)
        assert (elsewhere / "runs" / "report").is_dir() and list(
            elsewhere.glob("runs/base_checkpoints/*/step_*/meta_*.json")
        )
    assert files(site) == installed, "something was written into site-packages"
