"""
The report of a run: report.md, report.json and plots, from the numbers that every stage logs (report_log.py).

`python -m nanochat_fp4.evaluation.report generate` reads all sections and the metrics.jsonl of every run. It writes
report.md, report.json and the plots beside them. The report also shows runs that were interrupted or are still running,
with the numbers that they have.

Runs are compared with each other only if they were validated on the same text, with the same tokenizer, on as many
tokens and with the same forward pass. Otherwise the report has no gap between them, and no picture shows both.
"""

from nanochat_fp4.cli import ArgumentParser, run_main
from nanochat_fp4.evaluation.report_log import DummyReport, get_report
from nanochat_fp4.evaluation.report_page import generate


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description="Put the report together from what the stages logged, or forget it.")
    parser.add_argument("command", nargs="?", default="generate", choices=["generate", "reset"])
    args = parser.parse_args(argv)
    report = get_report()
    if isinstance(report, DummyReport):
        return
    if args.command == "reset":
        report.reset()
        print(f"report: sections in {report.report_dir} removed")
    else:
        print(generate(report.report_dir))


if __name__ == "__main__":
    run_main(main)
