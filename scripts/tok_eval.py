"""
Measures how well the tokenizer compresses text, in bytes per token, and compares it with GPT-2's and GPT-4's
tokenizers.

    python -m scripts.tok_eval

tiktoken downloads the other two tokenizers when they are first used. If they cannot be downloaded, they are left out.
With --no-compare the program does not try.
"""

import argparse

from nanochat_fp4.cli import ArgumentParser, UserError, logger, one_line, run_main
from nanochat_fp4.common import print0
from nanochat_fp4.data.dataset import add_data_arguments, ensure_data, parquets_iter_batched
from nanochat_fp4.data.tokenizer import RustBPETokenizer, get_tokenizer
from nanochat_fp4.evaluation.report import get_report

# Short texts of different kinds. Some kinds are frequent in a training corpus, and others are rare.
SAMPLES = {
    "news": """
The harbour authority said on Tuesday that ferries to the two outer islands will run every 40 minutes from 1 March,
after a winter in which storms closed the route on 17 days. A second vessel, bought for $12.6 million, arrived last
week. "We have heard for years that people miss hospital appointments because of the timetable," said the authority's
director, Anna Lindqvist. "That ends now." Shopkeepers welcomed the decision; the union, which had asked for more crew,
said it would wait for the new rosters before commenting. Fares stay at 4.80 for adults and 2.40 for children.
""",
    "korean": """
도서관은 아침 아홉 시에 문을 열고 저녁 열 시에 닫습니다. 일 층에는 신문과 잡지가 있고, 이 층에는 어린이를 위한
책이 있습니다. 새로 나온 책은 입구 옆의 책장에서 찾을 수 있으며, 한 사람이 두 주 동안 다섯 권까지 빌릴 수 있습니다.
""",
    "code": '''
def moving_average(values, width):
    """Mean of every window of `width` neighbours."""
    if width < 1 or width > len(values):
        raise ValueError(f"width must be between 1 and {len(values)}, got {width}")
    total = sum(values[:width])
    means = [total / width]
    for old, new in zip(values, values[width:]):
        total += new - old
        means.append(total / width)
    return means

for (int i = 0; i < n; ++i) { if (a[i] != b[i]) return -1; }
''',
    "math": r"""
\begin{lemma} Let $f : [0,1] \to \mathbb{R}$ be continuous and convex. Then
\[ f\!\left(\frac{a+b}{2}\right) \;\le\; \frac{1}{b-a}\int_a^b f(x)\,dx \;\le\; \frac{f(a)+f(b)}{2}. \]
\end{lemma}
\begin{proof} Substitute $x = (1-t)a + tb$ and integrate $f(x) \le (1-t)f(a) + tf(b)$ over $t \in [0,1]$. \end{proof}
""",
    "science": """
Mitochondria couple the oxidation of NADH and FADH₂ to the phosphorylation of ADP: electrons pass through complexes I,
III and IV to molecular oxygen, protons are pumped across the inner membrane, and the resulting electrochemical
gradient (about 180 mV) drives ATP synthase. Uncoupling proteins dissipate this gradient as heat, which is how brown
adipose tissue keeps hibernating mammals at 37 °C.
""",
}
BASELINES = {"GPT-2": "gpt2", "GPT-4": "cl100k_base"}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="Evaluate the compression of the tokenizer")
    add_data_arguments(parser, "as for training")
    add = parser.add_argument
    add("--no-compare", action="store_true", help="without GPT-2's and GPT-4's tokenizers (no network)")
    return parser.parse_args(argv)


def num_tokens(tokenizer: RustBPETokenizer, text: str, name: str) -> int:
    """Returns the number of tokens of a text. Raises UserError if they do not decode to the same text."""
    ids = tokenizer.encode(text)
    if tokenizer.decode(ids) != text:
        problem = f"the tokenizer does not give the text {name!r} back as it was"
        raise UserError(f"{problem}; train it again (scripts.tok_train)")
    return len(ids)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    survey = ensure_data(args.data_dir, column=args.text_column)
    ours = get_tokenizer()
    texts = {name: text.strip() for name, text in SAMPLES.items()}
    for split in ("train", "val"):  # The tokenizer was trained on the first of the two.
        batches = parquets_iter_batched(split, data_dir=survey, column=args.text_column)
        texts[f"data-{split} ({survey.folder.name})"] = "\n".join(next(batches))
    counts = {name: num_tokens(ours, text, name) for name, text in texts.items()}
    sizes = {name: len(text.encode("utf-8")) for name, text in texts.items()}

    print0(f"Ours: {ours.get_vocab_size():,} tokens, fingerprint {ours.fingerprint()}")
    lines = ["| Text | Bytes | Tokens | Bytes per token |", "|---|---|---|---|"]
    lines += [f"| {name} | {sizes[name]:,} | {counts[name]:,} | {sizes[name] / counts[name]:.2f} |" for name in texts]
    for title, tiktoken_name in {} if args.no_compare else BASELINES.items():
        try:
            baseline = RustBPETokenizer.from_pretrained(tiktoken_name)
        except UserError as e:
            logger.warning(f"no comparison with {title}: {one_line(e)} (--no-compare leaves it out)")
            continue
        lines += ["", f"### Comparison with {title} ({baseline.get_vocab_size():,} tokens)", ""]
        lines += [f"| Text | Bytes | {title} tokens | Ratio | Our tokens | Ratio | Fewer tokens |", "|---" * 7 + "|"]
        for name, text in texts.items():
            size, ours_, theirs = sizes[name], counts[name], num_tokens(baseline, text, name)
            cells = f"{size:,} | {theirs:,} | {size / theirs:.2f} | {ours_:,} | {size / ours_:.2f}"
            lines.append(f"| {name} | {cells} | {(theirs - ours_) / theirs:+.1%} |")
    report = "\n".join(lines)
    print0(report)
    get_report().log(section="Tokenizer evaluation", data=[report])


if __name__ == "__main__":
    run_main(main)
