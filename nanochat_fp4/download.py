"""Downloads that continue where they stopped, with size and SHA-256 checked before a file gets its name."""

import os
import re
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanochat_fp4.common import get_base_dir, print0
from nanochat_fp4.console import Progress, format_bytes, logger
from nanochat_fp4.errors import USER_ERRNOS, UserError, one_line
from nanochat_fp4.files import fsync_dir, sha256_file

LIMIT_BYTES = 1 << 30  # of a file whose size nobody stated, or that is larger than it should be
BACKOFF_SECONDS = 1.0  # before the second attempt; doubled before each further one


class _KeepHubHeaders(urllib.request.HTTPRedirectHandler):
    """Follows redirects as usual; remembers the SHA-256 and size that the hub states on the redirecting answer."""

    def __init__(self) -> None:
        self.sha256: str | None = None
        self.size: int | None = None

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # noqa: ANN001 (the base class has no hints)
        self.note(headers)
        return super().redirect_request(req, fp, code, msg, headers, newurl)

    def note(self, headers: Any) -> None:
        etag = (headers.get("X-Linked-ETag") or "").strip('"')
        if re.fullmatch(r"[0-9a-f]{64}", etag):
            self.sha256 = etag
        size = headers.get("X-Linked-Size") or ""
        if size.isdigit():
            self.size = int(size)


def _whole_size(response: Any, offset: int) -> int | None:
    """Size of the whole file in bytes from an answer to a request for the bytes from `offset` on."""
    if response.status == 206:
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip())
        if not match or int(match.group(1)) != offset:
            raise OSError("the server answered with another range than the one asked for")
        return None if match.group(2) == "*" else int(match.group(2))
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdigit() else None


def download_file(
    url: str,
    path: str | os.PathLike,
    *,
    size: int | None = None,
    sha256: str | None = None,
    deadline: float = 1800.0,
    timeout: float = 30.0,
    attempts: int = 5,
    hint: str = "",
    validate: Callable[[str], Any] | None = None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
    limit: int = LIMIT_BYTES,
) -> str:
    """
    Download `url` to `path`, resuming what an earlier call left in `path`.part. Returns the path as a str.

    The size is checked against `size`, or else against what the server states; the SHA-256 against `sha256`, or else
    against the one a Hugging Face hub publishes for its large files; `validate(temporary path)` may raise UserError to
    reject the content. Only then does the file get its name. The size is logged (where no `progress` shows it) and
    compared with the free disk space before the first byte is written. A failed attempt is repeated up to `attempts`
    times with 1, 2, 4, ... seconds between, and continues where it stopped; no answer for `timeout` seconds is a
    failure, and after `deadline` seconds all is over; more than `limit` bytes are refused, whatever the server says.
    `progress` is told the bytes as they arrive, `stop` ends the work
    early (both for downloads in threads).
    Raises UserError with what was tried and `hint`, which should name the way around the network.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    give_up_at = time.monotonic() + deadline
    hint = f"; {hint}" if hint else ""
    problem, attempt, fatal = "", 0, False
    counted = 0  # bytes that `progress` was told of

    def discard() -> None:
        nonlocal counted
        part.unlink()
        if progress is not None:
            progress.update(-counted)
        counted = 0

    while attempt < attempts and not fatal:
        if attempt:
            wait = min(BACKOFF_SECONDS * 2 ** (attempt - 1), 30.0, max(0.0, give_up_at - time.monotonic()))
            logger.warning(f"{path.name}: {problem}; trying again in {wait:.0f} s ({attempt + 1} of {attempts})")
            (stop or threading.Event()).wait(wait)
        if stop is not None and stop.is_set():
            raise UserError(f"download of {url} stopped; run again to continue it{hint}")
        if time.monotonic() >= give_up_at:
            problem = f"not finished within {deadline:g} seconds ({problem or 'too slow'})"
            break
        attempt += 1
        have = part.stat().st_size if part.exists() else 0
        published = _KeepHubHeaders()
        request = urllib.request.Request(url, headers={"User-Agent": "nanochat_fp4", "Accept-Encoding": "identity"})
        if have:
            request.add_header("Range", f"bytes={have}-")
        try:
            with urllib.request.build_opener(published).open(request, timeout=timeout) as response:
                published.note(response.headers)
                if have and response.status != 206:  # the server does not know ranges: from the start
                    discard()
                    have = 0
                whole = size or _whole_size(response, have) or published.size
                if max(whole or 0, have) > limit:
                    raise UserError(f"{url} is larger than the {format_bytes(limit)} that it may have{hint}")
                free = shutil.disk_usage(path.parent).free
                if whole is not None and whole - have > free:
                    raise UserError(
                        f"{path.name} needs {format_bytes(whole - have)}, but {path.parent} has {format_bytes(free)} "
                        f"left; free some space, or set NANOCHAT_BASE_DIR to a larger disk{hint}"
                    )
                if progress is None and attempt == 1:
                    size_text = "size not stated" if whole is None else format_bytes(whole)
                    logger.info(f"downloading {path.name}: {size_text}, {format_bytes(free)} free in {path.parent}")
                with open(part, "ab" if have else "wb") as f:
                    while chunk := response.read(1 << 20):
                        f.write(chunk)
                        have += len(chunk)
                        counted += len(chunk)
                        if progress is not None:
                            progress.update(len(chunk))
                        if have > limit:
                            discard()
                            raise UserError(f"{url} is larger than the {format_bytes(limit)} that it may have{hint}")
                        if stop is not None and stop.is_set():
                            raise UserError(f"download of {url} stopped; run again to continue it{hint}")
                        if time.monotonic() >= give_up_at:
                            raise OSError(f"not finished within {deadline:g} seconds")
                    f.flush()
                    os.fsync(f.fileno())
        except urllib.error.HTTPError as e:
            stated = re.fullmatch(r"bytes \*/(\d+)", e.headers.get("Content-Range", "").strip())
            whole = size or (int(stated.group(1)) if stated else published.size)
            if e.code == 416 and have:  # no byte beyond `have`: the part is complete, or longer than the file
                whole = whole or -1  # of unknown size: not to be trusted
            else:
                problem = f"the server answered {e.code} {e.reason}"
                fatal = e.code in (400, 401, 403, 404, 410)
                continue
        except OSError as e:  # URLError and timeouts are OSErrors, too
            if getattr(e, "errno", None) in USER_ERRNOS:
                raise UserError(f"cannot write {part}: {e.strerror}; free some space or choose another folder") from e
            problem = one_line(getattr(e, "reason", e))
            continue
        except Exception as e:  # http.client has a family of its own (IncompleteRead, BadStatusLine, ...)
            if isinstance(e, UserError):
                raise
            problem = one_line(e)
            continue
        if whole is not None and have != whole:
            problem = f"{have} bytes arrived instead of {whole if whole >= 0 else 'an unknown number'}"
            if have > whole:
                discard()
            continue
        want = sha256 or published.sha256
        if want and sha256_file(part) != want:
            problem = "the SHA-256 differs from the published one"
            discard()
            continue
        if validate is not None:
            try:
                validate(str(part))
            except UserError as e:
                problem = one_line(e)
                discard()
                continue
        os.replace(part, path)
        fsync_dir(path.parent)
        return str(path)
    raise UserError(f"could not download {url}: {problem} ({attempt} attempt{'s' * (attempt != 1)}){hint}")


def download_file_with_lock(
    url: str,
    filename: str,
    postprocess_fn: Callable[[str], Any] | None = None,
    **kwargs: Any,
) -> str:
    """
    The path of `filename` in the base directory, downloaded if it is not there; once, even if all ranks ask together.

    `postprocess_fn(temporary path)` runs after the download and before the file gets its name. Keyword arguments are
    those of download_file.
    """
    from filelock import FileLock

    path = os.path.join(get_base_dir(), filename)
    if os.path.exists(path):
        return path
    with FileLock(path + ".lock"):
        if not os.path.exists(path):
            print0(f"Downloading {url}...")
            fresh = path + ".fresh"
            download_file(url, fresh, **kwargs)
            if postprocess_fn is not None:
                postprocess_fn(fresh)
            os.replace(fresh, path)
    return path
