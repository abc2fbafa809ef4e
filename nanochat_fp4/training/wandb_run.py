"""Logs a run to Weights & Biases, or to a local page of trackio. It never prompts, hangs or stops a training run."""

import os
import re
from typing import Any

from nanochat_fp4.cli import UserError, logger, missing_package, one_line, require
from nanochat_fp4.common import get_base_dir, print0


class DummyWandb:
    """Accepts the calls of a wandb run and does nothing, so that training code needs no `if`."""

    summary: dict[str, Any] = {}

    def log(self, *args: Any, **kwargs: Any) -> None:
        pass

    def finish(self, *args: Any, **kwargs: Any) -> None:
        pass


class TrackioRun:
    """Accepts the calls of a wandb run for a run of trackio, which stores its numbers in a file on this machine.

    trackio's page has a section for each first part of a name, in alphabetical order. The hundreds of curves of layers
    are therefore renamed, so that they come after train and val.
    """

    def __init__(self, run: Any):
        self.run = run

    def log(self, values: dict[str, Any]) -> None:
        named = {re.sub("^telemetry/", "within layers/", k): v for k, v in values.items() if k != "step"}
        self.run.log(named, step=values.get("step"))

    def finish(self) -> None:
        self.run.finish()


def known_tracker(name: str) -> str:
    """The tracker of this name, which is wandb if it is empty. Raises UserError for another name."""
    if name not in ("", "wandb", "trackio"):
        raise UserError(f"TRACKER={name} is not known; use wandb or trackio (or unset TRACKER)")
    return name or "wandb"


def check_tracker(name: str, run: str) -> None:
    """Raises UserError, before anything is trained, for what setup_tracker would refuse."""
    tracker = known_tracker(name)
    if run not in ("", "dummy"):
        try:
            require(tracker)
        except UserError as e:
            raise UserError(f"WANDB_RUN={run}: {e}, or set WANDB_RUN=dummy") from None


def setup_tracker(run: str | None, project: str, config: dict[str, Any]) -> Any:
    """
    Begins a run on wandb (setup_wandb), or with TRACKER=trackio a run of the same kind on trackio, which needs no
    account and no network and has a local page.

    Returns a DummyWandb if `run`, the value of --run, is empty or 'dummy', and on all ranks but 0. trackio stores its
    runs in $TRACKIO_DIR, by default in trackio/ under the base directory. A run of the same name is continued. Raises
    UserError if wandb or trackio is not installed, and for another name of a tracker.
    """
    tracker = known_tracker(os.environ.get("TRACKER", ""))
    if not run or run == "dummy" or os.environ.get("RANK", "0") != "0":
        return DummyWandb()
    if tracker == "wandb":
        return setup_wandb(run, project, config)
    # trackio reads this variable when it is imported.
    folder = os.environ.setdefault("TRACKIO_DIR", os.path.join(get_base_dir(), "trackio"))
    try:
        import trackio
    except ImportError as e:
        raise UserError(f"TRACKER=trackio: {missing_package(e) or one_line(e)}") from e
    try:
        options = {"resume": "allow", "embed": False, "auto_log_cpu": False}
        started = trackio.init(project=project, name=run, config=config, **options)
    except Exception as e:  # Whatever trackio raises, logging must not stop a training run.
        logger.warning(f"trackio does not start ({one_line(e)[:200]}); going on without it")
        return DummyWandb()
    print0(f"trackio: watch it with: TRACKIO_DIR={folder} trackio show --project {project}")
    return TrackioRun(started)


def setup_wandb(run: str, project: str, config: dict[str, Any]) -> Any:
    """
    Begins a wandb run, or returns a DummyWandb if wandb does not start. It never prompts and never hangs. Raises
    UserError if wandb is not installed.

    Without an account, or if the server does not answer within a minute, the run is stored offline under the base
    directory. The command that uploads the run is then printed. If WANDB_MODE is set, its mode is used.
    """
    try:
        import wandb
        from requests.utils import get_netrc_auth  # wandb depends on requests.
    except ImportError as e:
        raise UserError(f"run {run!r}: {missing_package(e) or one_line(e)}, or set WANDB_RUN=dummy") from e
    account = os.environ.get("WANDB_API_KEY") or get_netrc_auth(
        os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    )
    mode = os.environ.get("WANDB_MODE") or ("online" if account else "offline")
    for attempt in dict.fromkeys([mode, "offline"]):  # Each mode is tried once.
        try:
            settings = wandb.Settings(init_timeout=60.0)
            wandb_run = wandb.init(
                project=project, name=run, config=config, dir=get_base_dir(), mode=attempt, settings=settings
            )
        except Exception as e:  # Whatever wandb raises (usage, account, network), logging must not stop a training run.
            logger.warning(f"wandb does not start in mode {attempt} ({one_line(e)[:200]})")
            continue
        if attempt == "offline":
            print0(f"wandb: offline; upload later with: wandb sync {os.path.dirname(wandb_run.dir)}")
        return wandb_run
    logger.warning("going on without wandb")
    return DummyWandb()
