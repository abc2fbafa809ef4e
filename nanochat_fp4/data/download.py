"""Downloads that continue where they stopped, with size and SHA-256 checked before a file gets its name."""

import os
import re
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass
class _Download:
    """A file on its way; see download_file."""

    url: str
    path: Path
    hint: str
    size: int | None
    sha256: str | None
    timeout: float
    deadline: float
    limit: int
    progress: Progress | None
    stop: threading.Event | None
    counted: int = 0  # bytes that `progress` was told of
    hopeless: bool = False  # another attempt would end as the last one did
    began: float = field(default_factory=time.monotonic)

    @property
    def part(self) -> Path:
        return self.path.with_name(self.path.name + ".part")

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.began + self.deadline - time.monotonic())

    def discard(self) -> None:
        self.part.unlink()
        if self.progress is not None:
            self.progress.update(-self.counted)
        self.counted = 0

    def stop_if_asked(self) -> None:
        if self.stop is not None and self.stop.is_set():
            raise UserError(f"download of {self.url} stopped; run again to continue it{self.hint}")

    def attempt(self, quiet: bool) -> str | None:
        """Asks for the bytes that are missing; what is wrong with the file then, or None. Raises UserError."""
        have = self.part.stat().st_size if self.part.exists() else 0
        published = _KeepHubHeaders()
        request = urllib.request.Request(
            self.url, headers={"User-Agent": "nanochat_fp4", "Accept-Encoding": "identity"}
        )
        if have:
            request.add_header("Range", f"bytes={have}-")
        try:
            with urllib.request.build_opener(published).open(request, timeout=self.timeout) as response:
                published.note(response.headers)
                if have and response.status != 206:  # the server does not know ranges: from the start
                    self.discard()
                    have = 0
                whole = self.size or _whole_size(response, have) or published.size
                self.check_room(whole, have, quiet)
                have = self.receive(response, have)
        except urllib.error.HTTPError as e:
            stated = re.fullmatch(r"bytes \*/(\d+)", e.headers.get("Content-Range", "").strip())
            whole = self.size or (int(stated.group(1)) if stated else published.size)
            if e.code != 416 or not have:
                self.hopeless = e.code in (400, 401, 403, 404, 410)
                return f"the server answered {e.code} {e.reason}"
            # No byte beyond `have`: the part is complete, or longer than the file; of unknown size, it is not trusted.
            whole = whole or -1
        except OSError as e:  # URLError and timeouts are OSErrors, too
            if getattr(e, "errno", None) in USER_ERRNOS:
                raise UserError(
                    f"cannot write {self.part}: {e.strerror}; free some space or choose another folder"
                ) from e
            return one_line(getattr(e, "reason", e))
        except UserError:
            raise
        except Exception as e:  # http.client has a family of its own (IncompleteRead, BadStatusLine, ...)
            return one_line(e)
        return self.problem(whole, have, self.sha256 or published.sha256)

    def check_room(self, whole: int | None, have: int, quiet: bool) -> None:
        if max(whole or 0, have) > self.limit:
            raise UserError(f"{self.url} is larger than the {format_bytes(self.limit)} that it may have{self.hint}")
        folder = self.path.parent
        free = shutil.disk_usage(folder).free
        if whole is not None and whole - have > free:
            raise UserError(
                f"{self.path.name} needs {format_bytes(whole - have)}, but {folder} has {format_bytes(free)} left; "
                f"free some space, or set NANOCHAT_BASE_DIR to a larger disk{self.hint}"
            )
        if self.progress is None and not quiet:
            size_text = "size not stated" if whole is None else format_bytes(whole)
            logger.info(f"downloading {self.path.name}: {size_text}, {format_bytes(free)} free in {folder}")

    def receive(self, response: Any, have: int) -> int:
        """Writes what arrives; how many bytes there are then."""
        with open(self.part, "ab" if have else "wb") as f:
            while chunk := response.read(1 << 20):
                f.write(chunk)
                have += len(chunk)
                self.counted += len(chunk)
                if self.progress is not None:
                    self.progress.update(len(chunk))
                if have > self.limit:
                    self.discard()
                    raise UserError(
                        f"{self.url} is larger than the {format_bytes(self.limit)} that it may have{self.hint}"
                    )
                self.stop_if_asked()
                if not self.seconds_left:
                    raise OSError(f"not finished within {self.deadline:g} seconds")
            f.flush()
            os.fsync(f.fileno())
        return have

    def problem(self, whole: int | None, have: int, sha256: str | None) -> str | None:
        """What is wrong with the bytes that are there; those that cannot be the beginning of the file are deleted."""
        if whole is not None and have != whole:
            if have > whole:
                self.discard()
            return f"{have} bytes arrived instead of {whole if whole >= 0 else 'an unknown number'}"
        if sha256 and sha256_file(self.part) != sha256:
            self.discard()
            return "the SHA-256 differs from the published one"
        return None


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
    `progress` is told the bytes as they arrive, `stop` ends the work early (both for downloads in threads).
    Raises UserError with what was tried and `hint`, which should name the way around the network.
    """
    path, hint = Path(path), f"; {hint}" if hint else ""
    file = _Download(url, path, hint, size, sha256, timeout, deadline, limit, progress, stop)
    problem, made = "", 0
    while made < attempts and not file.hopeless:
        if made:
            wait = min(BACKOFF_SECONDS * 2 ** (made - 1), 30.0, file.seconds_left)
            logger.warning(f"{path.name}: {problem}; trying again in {wait:.0f} s ({made + 1} of {attempts})")
            (stop or threading.Event()).wait(wait)
        file.stop_if_asked()
        if not file.seconds_left:
            problem = f"not finished within {deadline:g} seconds ({problem or 'too slow'})"
            break
        made += 1
        problem = file.attempt(quiet=made > 1)
        if problem is None and validate is not None:
            try:
                validate(str(file.part))
            except UserError as e:
                problem = one_line(e)
                file.discard()
        if problem is None:
            os.replace(file.part, path)
            fsync_dir(path.parent)
            return str(path)
    raise UserError(f"could not download {url}: {problem} ({made} attempt{'s' * (made != 1)}){hint}")


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
