"""Logs a run to Weights & Biases, or to a local page of trackio. It never prompts, hangs or stops a training run."""

import importlib
import os
import types
from typing import Any

from nanochat_fp4.cli import UserError, logger, one_line, require
from nanochat_fp4.common import get_base_dir, print0


def check_tracker(name: str, run: str | None) -> str:
    """Returns the tracker of the variable TRACKER, or "" if the run, the value of --run, logs to none. Raises UserError
    for a tracker that is not known or not installed."""
    if name not in ("", "wandb", "trackio"):
        raise UserError(f"TRACKER={name} is not known; use wandb or trackio (or unset TRACKER)")
    if not run or run == "dummy":
        return ""
    try:
        require(name or "wandb")
    except UserError as e:
        raise UserError(f"WANDB_RUN={run}: {e}, or set WANDB_RUN=dummy") from None
    return name or "wandb"


# Takes the calls that a run of wandb or trackio takes, and does nothing.
NO_TRACKER = types.SimpleNamespace(log=lambda values, step: None, finish=lambda: None)


def setup_tracker(run: str | None, project: str, config: dict[str, Any]) -> Any:
    """
    Begins a run on wandb, or with TRACKER=trackio a run of the same kind on trackio, which needs no account and no
    network and has a local page. Returns the package's object of the run.

    The result is NO_TRACKER if `run`, the value of --run, is empty or 'dummy', and on other ranks than 0. wandb stores
    a run offline under the base directory if there is no account, or if the server does not answer within a minute, and
    the command that uploads the run is then printed. WANDB_MODE sets the mode. trackio stores its runs in $TRACKIO_DIR,
    by default in trackio/ under the base directory. Raises UserError for a tracker that is not known or not installed.
    """
    name = check_tracker(os.environ.get("TRACKER", ""), run)
    if not name or os.environ.get("RANK", "0") != "0":
        return NO_TRACKER
    local = name == "trackio"
    # trackio reads this variable when it is imported.
    folder = os.environ.setdefault("TRACKIO_DIR", os.path.join(get_base_dir(), "trackio")) if local else get_base_dir()
    package = importlib.import_module(name)
    for options in [{"resume": "allow", "embed": False, "auto_log_cpu": False}] if local else _wandb_options(package):
        try:
            started = package.init(project=project, name=run, config=config, **options)
        except Exception as e:  # Whatever the package raises (usage, account, network), training goes on.
            logger.warning(f"{name} does not start ({one_line(e)[:200]})")
            continue
        if local:
            print0(f"trackio: watch it with: TRACKIO_DIR={folder} trackio show --project {project}")
        elif options["mode"] == "offline":
            print0(f"wandb: offline; upload later with: wandb sync {os.path.dirname(started.dir)}")
        return started
    logger.warning(f"going on without {name}")
    return NO_TRACKER


def _wandb_options(wandb: Any) -> list[dict[str, Any]]:
    """The modes to try, each once."""
    from requests.utils import get_netrc_auth  # wandb depends on requests.

    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    account = os.environ.get("WANDB_API_KEY") or get_netrc_auth(server)
    mode = os.environ.get("WANDB_MODE") or ("online" if account else "offline")
    shared = {"dir": get_base_dir(), "settings": wandb.Settings(init_timeout=60.0)}
    return [{"mode": m, **shared} for m in dict.fromkeys([mode, "offline"])]
