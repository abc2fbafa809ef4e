"""A run on Weights & Biases, or on trackio's local page, that never prompts, hangs or stops a training run."""

import os
import re
from typing import Any

from nanochat_fp4.common import get_base_dir, print0
from nanochat_fp4.console import logger
from nanochat_fp4.errors import UserError, one_line
from nanochat_fp4.packages import missing_package


class DummyWandb:
    """Takes wandb's calls and does nothing, so that training code needs no `if`."""

    summary: dict[str, Any] = {}

    def log(self, *args: Any, **kwargs: Any) -> None:
        pass

    def finish(self, *args: Any, **kwargs: Any) -> None:
        pass


class TrackioRun:
    """wandb's calls on a run of trackio, which keeps it in a file of this machine.

    Its page has a section for each first part of a name, in alphabetical order. The hundreds of curves of layers must
    come after train and val.
    """

    def __init__(self, run: Any):
        self.run = run

    def log(self, values: dict[str, Any]) -> None:
        named = {re.sub("^telemetry/", "within layers/", k): v for k, v in values.items() if k != "step"}
        self.run.log(named, step=values.get("step"))

    def finish(self) -> None:
        self.run.finish()


def setup_tracker(run: str | None, project: str, config: dict[str, Any]) -> Any:
    """
    setup_wandb, or with TRACKER=trackio the same kind of run on trackio: no account, no network, a local page.

    A DummyWandb where `run`, the --run flag, is empty or 'dummy', and on ranks other than 0.
    trackio keeps its runs in $TRACKIO_DIR, by default trackio/ in the base directory; a run of the same name goes on.
    Raises UserError where it is not installed, and for another tracker.
    """
    tracker = os.environ.get("TRACKER") or "wandb"
    if tracker not in ("wandb", "trackio"):
        raise UserError(f"TRACKER={tracker} is not known; use wandb or trackio (or unset TRACKER)")
    if not run or run == "dummy" or os.environ.get("RANK", "0") != "0":
        return DummyWandb()
    if tracker == "wandb":
        return setup_wandb(run, project, config)
    folder = os.environ.setdefault("TRACKIO_DIR", os.path.join(get_base_dir(), "trackio"))  # read at its import
    try:
        import trackio
    except ImportError as e:
        raise UserError(f"TRACKER=trackio: {missing_package(e) or one_line(e)}") from e
    try:
        options = {"resume": "allow", "embed": False, "auto_log_cpu": False}
        started = trackio.init(project=project, name=run, config=config, **options)
    except Exception as e:  # whatever it raises: logging must not stop a training run
        logger.warning(f"trackio does not start ({one_line(e)[:200]}); going on without it")
        return DummyWandb()
    print0(f"trackio: watch it with: TRACKIO_DIR={folder} trackio show --project {project}")
    return TrackioRun(started)


def setup_wandb(run: str, project: str, config: dict[str, Any]) -> Any:
    """
    A wandb run, or a DummyWandb where wandb does not start. Never prompts and never hangs.

    The run is kept offline under the base directory without an account, or if the server does not answer within a
    minute. Then the command that uploads the run is printed. WANDB_MODE, when set, is obeyed.
    """
    try:
        import wandb
        from requests.utils import get_netrc_auth  # wandb needs requests
    except ImportError as e:
        raise UserError(f"run {run!r}: {missing_package(e) or one_line(e)}, or set WANDB_RUN=dummy") from e
    account = os.environ.get("WANDB_API_KEY") or get_netrc_auth(
        os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    )
    mode = os.environ.get("WANDB_MODE") or ("online" if account else "offline")
    for attempt in dict.fromkeys([mode, "offline"]):  # each once
        try:
            settings = wandb.Settings(init_timeout=60.0)
            wandb_run = wandb.init(
                project=project, name=run, config=config, dir=get_base_dir(), mode=attempt, settings=settings
            )
        except Exception as e:  # whatever wandb raises (usage, auth, network): logging must not stop a training run
            logger.warning(f"wandb does not start in mode {attempt} ({one_line(e)[:200]})")
            continue
        if attempt == "offline":
            print0(f"wandb: offline; upload later with: wandb sync {os.path.dirname(wandb_run.dir)}")
        return wandb_run
    logger.warning("going on without wandb")
    return DummyWandb()
