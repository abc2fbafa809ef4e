"""
Downloads with a deadline. A file gets its name only when it is complete, has the published SHA-256 and has passed the
caller's check.

Files of the Hugging Face hub come through huggingface_hub, which continues after a cut connection. Other files come
through urllib, by http and https only, also after a redirect. A server must answer 200 and state the length of the
file, because otherwise nobody can tell whether the file is complete. A download that a process did not finish starts
again from its beginning in the next process.
"""

import os
import re
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, wait
from email.message import Message
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nanochat_fp4.cli import USER_ERRNOS, UserError, format_bytes, logger, missing_package, one_line, switched_on
from nanochat_fp4.common import get_base_dir, print0
from nanochat_fp4.files import fsync_dir, git_hash, sha256_file

LIMIT_BYTES = 1 << 30  # The limit for any file.
BACKOFF_SECONDS = 1.0  # The time before the second attempt. It is longer by as much before each further attempt.
HOPELESS = (400, 401, 403, 404, 410)  # HTTP status codes that another attempt does not change.
T = TypeVar("T")


class NotEnoughRoom(UserError):
    """The error for a file that is larger than its limit or than the free space. Another attempt does not help."""


def hub_url() -> str:
    """Returns the address of Hugging Face's hub. HF_ENDPOINT names another one, as for Hugging Face's own tools."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def within(seconds: float, work: Callable[[], T], stop: threading.Event | None = None) -> T:
    """
    Returns the result of work(), which runs in a thread. After `seconds` the thread is left alone, because looking up
    the name of a host ignores every timeout.

    Raises TimeoutError when the time is over or `stop` is set, and all exceptions of `work`.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as e:
            result.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    end = time.monotonic() + seconds
    while not wait([result], min(0.2, max(0.0, end - time.monotonic()))).done:
        if time.monotonic() >= end or (stop is not None and stop.is_set()):
            raise TimeoutError("it was stopped" if stop is not None and stop.is_set() else "it took too long")
    return result.result()


def status_of(error: BaseException) -> int | None:
    """Returns the HTTP status code with which a server answered, or None if there was no answer."""
    return getattr(error, "code", None) or getattr(getattr(error, "response", None), "status_code", None)


def hub_problem(dataset: str, name: str, deadline: float = 8.0) -> str | None:
    """Returns the reason why the hub gives no answer about a file of a dataset within `deadline` seconds, or None if
    it gives any answer."""
    problem, status = _ask_hub(dataset, name, deadline)
    return None if status else problem


def file_problem(dataset: str, name: str, deadline: float = 8.0) -> str | None:
    """Returns the reason why the hub does not offer a file of a dataset, or None. It may not answer, not have the
    file, or not have it for this user."""
    return _ask_hub(dataset, name, deadline)[0]


def _ask_hub(dataset: str, name: str, deadline: float) -> tuple[str | None, int | None]:
    """Returns the reason why the file cannot be had, or None, and the status code of an answer that refuses it, or
    None."""
    if switched_on("HF_HUB_OFFLINE"):
        return "HF_HUB_OFFLINE is set", None
    try:
        within(deadline, lambda: hub_metadata(dataset, name, deadline))
    except TimeoutError:
        return f"no answer from {hub_url()} within {deadline:g} seconds", None
    except Exception as e:  # Several libraries raise errors here.
        if status := status_of(e):
            return f"{hub_url()} answers {status} for {dataset}/{name}", status
        return f"{hub_url()} cannot be reached: {missing_package(e) or one_line(e)[:150]}", None
    return None, None


def hub_metadata(dataset: str, name: str, timeout: float = 10.0) -> Any:
    """Returns huggingface_hub's record of a file. It has the size in bytes, and as etag the SHA-256 if the hub
    publishes it."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(dataset, name, repo_type="dataset", endpoint=hub_url())
    return get_hf_file_metadata(url, timeout=timeout)


def check_space(folder: Path, needed: int, what: str) -> None:
    """Makes the folder. Raises NotEnoughRoom if `what` needs more bytes than the disk has left."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise NotEnoughRoom(
            f"{what}: about {format_bytes(needed)} needed, but {folder} has {format_bytes(free)} left; free some "
            "space, ask for less, or set NANOCHAT_BASE_DIR to a larger disk"
        )


def download_file(
    url: str,
    path: str | os.PathLike,
    *,
    dataset: str = "",
    deadline: float = 1800.0,
    timeout: float = 30.0,
    attempts: int = 3,
    limit: int = LIMIT_BYTES,
    hint: str = "",
    validate: Callable[[str], Any] | None = None,
    stop: threading.Event | None = None,
) -> str:
    """
    Downloads an http or https `url` to `path`. With `dataset`, `url` is the name of a file of this dataset on the hub.
    Returns the path as a str.

    The size that the server states is logged. It is compared with the free disk space before the first byte is written,
    and with the number of bytes that arrived. The hub publishes hashes of its files, which are compared, too. More than
    `limit` bytes are refused. validate(temporary path) may raise UserError to reject the content.

    A failed attempt is repeated up to `attempts` times, after 1, 2, ... seconds. An attempt fails if no answer comes
    for `timeout` seconds. All attempts together have `deadline` seconds. `stop` ends a download that runs in a thread.

    Raises UserError with the problem of the last attempt and `hint`, which should say how to do without the network.
    """
    path, hint, end = Path(path), f"; {hint}" if hint else "", time.monotonic() + deadline
    folder = path.with_name(path.name + ".download")
    if not dataset and not url.startswith(("https://", "http://")):
        raise UserError(f"{url} is no http or https address; correct the address")
    problem, attempts_made = "", 0
    while attempts_made < attempts and time.monotonic() < end:
        if attempts_made:
            logger.warning(f"{path.name}: {problem}; trying again ({attempts_made + 1} of {attempts})")
            (stop or threading.Event()).wait(BACKOFF_SECONDS * attempts_made)
        attempts_made += 1
        shutil.rmtree(folder, ignore_errors=True)  # A killed process may have left this folder.
        try:
            folder.mkdir(parents=True)
            fetch = partial(_fetch_hub, dataset) if dataset else _fetch_url
            file = within(end - time.monotonic(), partial(fetch, url, folder / path.name, timeout, end, limit), stop)
            if validate is not None:
                validate(file)
            os.replace(file, path)
            fsync_dir(path.parent)
            return str(path)
        except NotEnoughRoom as e:
            raise UserError(f"{e}{hint}") from e
        except Exception as e:  # httpx, http.client, urllib and huggingface_hub each have their own exceptions.
            if getattr(e, "errno", None) in USER_ERRNOS:
                raise UserError(f"cannot write {path}: {e.strerror}; free some space or choose another folder") from e
            code, late = status_of(e), time.monotonic() >= end
            problem = one_line(getattr(e, "reason", e)) if code is None else f"the server answered {code}"
            problem = f"not finished within {deadline:g} seconds" if late else problem
            if code in HOPELESS or (stop is not None and stop.is_set()):
                break
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    source = f"{hub_url()}/datasets/{dataset}/{url}" if dataset else url
    raise UserError(
        f"could not download {source}: {problem} ({attempts_made} attempt{'s' * (attempts_made != 1)}){hint}"
    )


def _check_size(file: Path, size: int | None, limit: int) -> None:
    """Logs the size of a file. Raises NotEnoughRoom if the file is too large for the limit or for the disk."""
    if (size or 0) > limit:
        raise NotEnoughRoom(f"{file.name} is larger than the {format_bytes(limit)} that it may have")
    check_space(file.parent, size or 0, file.name)
    free, stated = shutil.disk_usage(file.parent).free, "size not stated" if size is None else format_bytes(size)
    logger.info(f"downloading {file.name}: {stated}, {format_bytes(free)} free in {file.parent}")


def _fetch_hub(dataset: str, name: str, file: Path, timeout: float, end: float, limit: int) -> str:
    from huggingface_hub import hf_hub_download

    stated = hub_metadata(dataset, name, timeout)
    if stated.size is None or stated.size < 0:
        raise ValueError(f"the hub states the length {stated.size}")
    _check_size(file, stated.size, limit)
    place = hf_hub_download(dataset, name, repo_type="dataset", endpoint=hub_url(), local_dir=file.parent)
    if (arrived := os.path.getsize(place)) != stated.size:
        raise ValueError(f"{arrived} bytes arrived instead of {stated.size}")
    # The hub publishes the SHA-256 of a large file, and git's hash of a small one.
    etag = stated.etag or ""
    if re.fullmatch(r"[0-9a-f]{64}", etag) and sha256_file(place) != etag:
        raise ValueError("the SHA-256 differs from the published one")
    if re.fullmatch(r"[0-9a-f]{40}", etag) and git_hash(place) != etag:
        raise ValueError("git's hash differs from the published one")
    return place


def http_opener() -> urllib.request.OpenerDirector:
    """Returns urllib's default opener without its handlers of ftp:, file: and data:, which a redirect could ask for."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    return opener


def _stated_length(headers: Message) -> int | None:
    """Returns the length of the body in bytes, as the headers state it. It is None for a body in chunks, whose end
    is marked. Raises ValueError if the headers state no length, or state it in two ways."""
    encoding = headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise ValueError(f"the server sent the encoding {encoding!r}, which was not asked for")
    if headers.get("Transfer-Encoding", "").lower() == "chunked":
        if "Content-Length" in headers:  # A proxy on the way may have used the other one of both lengths.
            raise ValueError("the server states a length beside chunks")
        return None
    lengths = set(headers.get_all("Content-Length", []))
    if len(lengths) != 1 or not re.fullmatch("[0-9]+", length := lengths.pop()):
        raise ValueError("the server states no length")
    return int(length)


def _fetch_url(url: str, file: Path, timeout: float, end: float, limit: int) -> str:
    headers = {"User-Agent": "nanochat_fp4", "Accept-Encoding": "identity"}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 The opener accepts http and https only.
    with http_opener().open(request, timeout=timeout) as response, open(file, "xb") as f:
        if response.status != 200:
            raise ValueError(f"the server answered {response.status} in place of 200")
        _check_size(file, size := _stated_length(response.headers), limit)
        while chunk := response.read1(1 << 20):
            f.write(chunk)
            if f.tell() > limit:
                _check_size(file, f.tell(), limit)
            if time.monotonic() > end:  # Nobody waits for this thread any more.
                raise TimeoutError
        f.flush()
        os.fsync(f.fileno())
        if size is not None and f.tell() != size:
            raise ValueError(f"{f.tell()} bytes arrived instead of {size}")
    return str(file)


def download_file_with_lock(
    url: str, filename: str, postprocess_fn: Callable[[str], Any] | None = None, **kwargs: Any
) -> str:
    """
    Returns the path of `filename` in the base directory. If the file does not exist, it is downloaded, and only once
    even if all ranks call this function together.

    postprocess_fn(temporary path) is the argument `validate` of download_file, and kwargs are its further arguments.
    """
    from filelock import FileLock

    path = os.path.join(get_base_dir(), filename)
    if not os.path.exists(path):
        with FileLock(path + ".lock"):
            if not os.path.exists(path):
                print0(f"Downloading {url}...")
                download_file(url, path, validate=postprocess_fn, **kwargs)
    return path
