"""Writes the repository's address into the files that need it. It changes the checkout from which it is run.

    python dev/links.py https://github.com/me/nanochat_fp4           once: in each file that says OWNER
    python dev/links.py https://github.com/me/nanochat_fp4 v0.2.0    also README's links, and pyproject.toml

A package index shows README outside of the repository, where its relative links and pictures lead nowhere. The workflow
`release` therefore runs the second form on its own copy, and commits none of these changes.
"""

import re
import sys
from pathlib import Path

# save.py writes the address into model cards.
NAMING = ("README.md", "examples/nvfp4_in_ten_minutes.ipynb", "nanochat_fp4/export/save.py")
# The relative target of a Markdown link, or of an attribute of HTML.
TARGET = re.compile(r'(?P<before>\]\(\s*|\b(?:src|srcset|href)=")(?P<path>(?![a-z]+:|#)[^)"\s]+)')


def named(text: str, repository: str) -> str:
    """Returns the text of a file of NAMING with `repository` (https://HOST/OWNER/NAME) where one gets it."""
    owner = "/".join(repository.split("/")[-2:])
    text = re.sub(r"(colab\.research\.google\.com/github/)[^/]+/[^/]+", rf"\g<1>{owner}", text)
    text = re.sub(r"git clone https://\S+", f"git clone {repository}", text)
    return re.sub(r'git\+https://[^\\"\s]+', f"git+{repository}", text)


def absolute_links(text: str, repository: str, ref: str) -> str:
    """Returns Markdown whose relative links and pictures lead to `repository` at `ref`. Blocks of code stay as they
    are."""

    def absolute(found: re.Match) -> str:
        kind = "raw" if found["path"].endswith((".png", ".svg")) else "blob"
        return f"{found['before']}{repository}/{kind}/{ref}/{found['path']}"

    return "\n".join(line if line.startswith("    ") else TARGET.sub(absolute, line) for line in text.split("\n"))


def main(repository: str, ref: str = "") -> None:
    repository = repository.removesuffix("/").removesuffix(".git")
    if not re.fullmatch(r"https://[\w.-]+/[\w.-]+/[\w.-]+", repository):
        sys.exit(f"error: {repository} is no repository; expected https://HOST/OWNER/NAME")
    changes = dict.fromkeys(NAMING, lambda text: named(text, repository))
    if ref:
        changes["README.md"] = lambda text: absolute_links(named(text, repository), repository, ref)
        url = f'[project.urls]\nSource = "{repository}"\n'
        changes["pyproject.toml"] = lambda text: text.replace("[project.urls]\n", url, 1)
    for name, change in changes.items():
        path = Path(name)
        path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"{name} names {repository}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(*sys.argv[1:])
