"""Examples of one idea each. They run from a checkout: python -m examples.plain_loop"""

import nanochat_fp4  # noqa: F401  before torch: nanochat_fp4.cli.begin_program
