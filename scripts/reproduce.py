"""Moved: `python -m lab.reproduce` makes the tables and figures of the paper, with the same arguments."""

import sys

from nanochat_fp4.errors import UserError, run_main


def main() -> None:
    arguments = " ".join(sys.argv[1:]) or "list"
    raise UserError(f"scripts.reproduce is lab.reproduce now; run python -m lab.reproduce {arguments}")


if __name__ == "__main__":
    run_main(main)
