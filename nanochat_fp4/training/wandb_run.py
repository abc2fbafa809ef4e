"""Logs a run to Weights & Biases. It never prompts, hangs or stops a training run."""

import os
import types
from typing import Any

from nanochat_fp4.cli import logger, one_line, require
from nanochat_fp4.common import get_base_dir, print0


def check_wandb(run: str | None) -> bool:
    """Returns whether a run logs to wandb, where `run` is the value of --run. Raises ModuleNotFoundError if
    wandb is not installed."""
    wanted = run not in (None, "", "dummy")
    if wanted:
        require("wandb")
    return wanted


# Takes the calls that a run of wandb takes, and does nothing.
NO_TRACKER = types.SimpleNamespace(log=lambda values, step: None, finish=lambda: None)


def setup_tracker(run: str | None, project: str, config: dict[str, Any]) -> Any:
    """
    Begins a run on wandb, and returns wandb's object of the run.

    The result is NO_TRACKER if `run`, the value of --run, is empty or 'dummy', and on other ranks than 0. wandb stores
    a run offline under the base directory if there is no account, or if the server does not answer within a minute, and
    the command that uploads the run is then printed. WANDB_MODE sets the mode. Raises UserError if wandb is not
    installed.
    """
    if not check_wandb(run) or os.environ.get("RANK", "0") != "0":
        return NO_TRACKER
    import wandb
    from requests.utils import get_netrc_auth  # wandb depends on requests.

    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    account = os.environ.get("WANDB_API_KEY") or get_netrc_auth(server)
    how = {"project": project, "name": run, "config": config, "dir": get_base_dir()}
    for mode in dict.fromkeys([os.environ.get("WANDB_MODE") or ("online" if account else "offline"), "offline"]):
        try:
            started = wandb.init(mode=mode, settings=wandb.Settings(init_timeout=60.0), **how)
        except Exception as e:  # Whatever wandb raises (usage, account, network), training goes on.
            logger.warning(f"wandb does not start ({one_line(e)[:200]})")
            continue
        if mode == "offline":
            print0(f"wandb: offline; upload later with: wandb sync {os.path.dirname(started.dir)}")
        return started
    logger.warning("going on without wandb")
    return NO_TRACKER
