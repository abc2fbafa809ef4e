"""Makes the pages of the site that are not in docs/: README as the first page, and a page of the API for each module.

The file is a hook of mkdocs and an extension of griffe. mkdocs.yml names both.
"""

import ast
import re
from pathlib import Path

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent


def public_names() -> dict[str, list[str]]:
    """Returns for each module its names in the public API. Nothing is imported."""
    found: dict[str, list[str]] = {}
    for node in ast.parse((ROOT / "nanochat_fp4/__init__.pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            found.setdefault(node.module, []).extend(alias.name for alias in node.names)
    return found


def api_pages() -> dict[str, str]:
    """Returns the pages of the API as path -> Markdown: one for each module, and a list of them."""
    pages, rows = {}, []
    for module, names in public_names().items():
        short = module.rpartition(".")[2]
        listed = ", ".join(f"[`nf.{name}`]({short}.md#{module}.{name})" for name in names)
        rows.append(f"| [{short}]({short}.md) | {listed} |")
        parts = [f"::: {module}.{name}" for name in names]
        doc = ast.get_docstring(ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")))
        pages[f"api/{short}.md"] = "\n\n".join([f"# {short}", f"`{module}`. {doc}", *parts]) + "\n"
    head = "# API\n\n`import nanochat_fp4 as nf`. `nf.METHODS` are the names of the methods.\n\n"
    pages["api/index.md"] = head + "| module | names |\n|---|---|\n" + "\n".join(rows) + "\n"
    return pages


def on_files(files, config):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    readme = re.sub(r"\[([^]]+)\]\((?!docs/|https:|#)[^)]+\)", r"\1", readme)  # The site has no files of the source.
    readme = re.sub(r'(\]\(|srcset="|src=")docs/', r"\1", readme)  # docs/ is the root of the site.
    pages = {"index.md": readme, **api_pages()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown, **_):
    """Puts an empty line before each list, which Python-Markdown needs. GitHub begins a list after any line. README is
    the site's first page, and other files of the source are not there."""
    markdown = re.sub(r"\[([^]]+)\]\(\.\./(?!README)[^)]+\)", r"\1", markdown).replace("](../README.md", "](index.md")
    return re.sub(r"^(?!- |\d+\. |\s|$)(.*)\n(?=- |\d+\. )", r"\1\n\n", markdown, flags=re.M)


class Arguments(griffe.Extension):
    """Makes an item of a list from 'name:   what it is' at the beginning of a docstring's line and from the indented
    lines that follow."""

    def on_object(self, *, obj, **_) -> None:
        if obj.docstring:
            text = re.sub(r"^([a-z_]\w*(?:, \w+)*):\s+(?=\S)", r"- **\1**: ", obj.docstring.value, flags=re.M)
            text = re.sub(r"^ {9,}(?=\S)", "  ", text, flags=re.M)
            obj.docstring.value = re.sub(r"^(?!- |\s)(.+)\n(?=- )", r"\1\n\n", text, flags=re.M)
