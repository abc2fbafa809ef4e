"""The documents: links lead somewhere, pages are short, and the site builds where mkdocs is installed."""

import html
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from lab import pages

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "CONTRIBUTING.md", *pages.pages()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.S)
    targets = re.findall(r"\]\(\s*([^)\s]+)\s*\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for target in targets:
        path, _, anchor = target.partition("#")
        if re.match(r"\w+://", target):
            continue
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
            assert anchor in [re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings], target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page):
    """Files, modules, nf.NAMES, and names that it says to be in a file."""
    assert runpy.run_path(str(ROOT / "dev/check_pages.py"))["named"](page.read_text(encoding="utf-8")) == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    for package in ("mkdocs", "material", "mkdocstrings", "griffe"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package} (pip install '.[docs]')")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    import nanochat_fp4 as nf

    api = "".join(p.read_text(encoding="utf-8") for p in (tmp_path / "api").glob("*.html"))
    for name in nf.__all__:
        assert name == "METHODS" or re.search(rf'id="nanochat_fp4\.[\w.]*\.{name}"', api), name
    assert "trains GPTs in 4 bits" in (tmp_path / "index.html").read_text(encoding="utf-8")
    for page in sorted(tmp_path.rglob("*.html")):
        article = re.search(r"<article.*?</article>", page.read_text(encoding="utf-8"), re.S)
        prose = re.sub(r"<(pre|code)\b.*?</\1>", "", article[0] if article else "", flags=re.S)
        left = re.search(r"\|---|\]\(|```|^- |^\| ", html.unescape(re.sub(r"<[^>]+>", "", prose)), re.M)
        assert not left, f"{page.name}: Markdown that was not understood: {left[0]!r}"
