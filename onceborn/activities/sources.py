"""A repository as its owner offers it: where it may be read from, and what it says it has.

What cannot be changed by trying again is a ``StepFailed``; a remote that does not answer is a
``StepRetry``. The address is repeated in messages without credentials.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ..runtime.protocol.refs import is_commit, is_local_source
from . import gitfiles
from .git import Git, GitError, redact
from .kind import Host, StepFailed, StepRetry

_LISTING_LIMIT: Final = 256 * 1024 * 1024
_LISTING_TIME_S: Final = 120.0

_AUTHENTICATION: Final = (
    "authentication failed",
    "could not read username",
    "could not read password",
    "terminal prompts disabled",
    "permission denied",
    "host key verification failed",
    "returned error: 401",
    "returned error: 403",
    "access denied",
)
_NOT_THERE: Final = (
    "does not appear to be a git repository",
    "repository not found",
    "returned error: 404",
    "not valid: is this a git repository",
)

_NO_REPOSITORY: Final = re.compile(r"repository '[^\n]*' not found")

ResolvedBy = Literal["remote_head", "detached_remote_head", "branch", "tag", "commit"]


@dataclass(frozen=True, slots=True)
class Listing:
    """What a remote says it has, by one question."""

    head: str | None
    """The commit that its HEAD points to."""
    head_ref: str | None
    """The branch that its HEAD names; ``None`` where it is detached."""
    refs: dict[str, str]
    """Full names of branches and tags; a tag that is an object is also there with ``^{}``."""

    @property
    def branches(self) -> dict[str, str]:
        return {k: v for k, v in self.refs.items() if k.startswith("refs/heads/")}

    @property
    def object_format(self) -> str:
        some = self.head or next(iter(self.refs.values()), "")
        return "sha256" if len(some) == 64 else "sha1"


@dataclass(frozen=True, slots=True)
class Base:
    """The commit that a task starts from, and why that one."""

    ref: str
    commit: str
    resolved_by: ResolvedBy


def readable_address(source: str, host: Host) -> str:
    """The address to hand to git: a local path resolved and checked, any other as it is.

    Raises:
        StepFailed: ``repository.not_found``; ``repository.not_allowed``: it is, or leads, outside
            the roots of this host.
    """
    if not is_local_source(source):
        return source
    path = Path(source).resolve()
    _check_root(path, source, host)
    if not path.is_dir():
        raise _not_found(source)
    folders = gitfiles.git_folders(path)
    if folders is None:
        raise _not_found(source)
    for folder in folders:
        # A `.git` file or link may lead anywhere.
        _check_root(folder, source, host)
    return str(path)


def _check_root(path: Path, source: str, host: Host) -> None:
    if not any(path.is_relative_to(root.resolve()) for root in host.repository_roots):
        raise StepFailed(
            "repository.not_allowed",
            f"{source} is not below a folder from which this host may attach repositories; "
            "see the setting repository_roots",
            source=source,
        )


def _not_found(source: str) -> StepFailed:
    return StepFailed(
        "repository.not_found",
        f"there is no git repository at {redact(source)}",
        source=redact(source),
    )


def list_remote(git: Git, address: str) -> Listing:
    """Ask the remote for its HEAD, branches and tags.

    Raises:
        StepFailed: ``repository.not_found``, ``repository.authentication``, ``repository.empty``.
        StepRetry: ``repository.unreachable``.
    """
    wanted = ["HEAD", "refs/heads/*", "refs/tags/*"]
    try:
        result = git.run(
            ["ls-remote", "--symref", "--", address, *wanted],
            stdout_limit=_LISTING_LIMIT,
            time_limit_s=min(_LISTING_TIME_S, git.host.git_time_limit_s),
        )
    except GitError as error:
        raise remote_failure(error, address) from error
    head: str | None = None
    head_ref: str | None = None
    refs: dict[str, str] = {}
    for line in result.text.splitlines():
        value, _, name = line.partition("\t")
        if name == "HEAD" and value.startswith("ref: "):
            head_ref = value.removeprefix("ref: ")
        elif name == "HEAD":
            head = value
        elif name.startswith(("refs/heads/", "refs/tags/")) and not value.startswith("ref: "):
            refs[name] = value
    if head is None and not refs:
        raise StepFailed(
            "repository.empty",
            f"the repository {redact(address)} has no commits; make a first one and create again",
            source=redact(address),
        )
    return Listing(head, head_ref, refs)


def remote_failure(error: GitError, address: str) -> StepFailed | StepRetry:
    """What a failed conversation with a remote means."""
    said = error.result.stderr.lower()
    where = redact(address)
    if any(words in said for words in _AUTHENTICATION):
        return StepFailed(
            "repository.authentication",
            f"{where} refused access; set up a credential helper or an SSH key on the host",
            source=where,
            stderr=error.result.stderr[-1000:],
        )
    if any(words in said for words in _NOT_THERE) or _NO_REPOSITORY.search(said):
        return _not_found(address)
    return StepRetry(
        "repository.unreachable",
        f"{where} could not be read: {error.message}",
        source=where,
        stderr=error.result.stderr[-1000:],
    )


def resolve_base(listing: Listing, base_ref: str | None, address: str) -> Base:
    """The base, from what the remote said just now; a name is never guessed.

    A name means a branch, else a tag, else, where it is one, a full commit ID.

    Raises:
        StepFailed: ``repository.base_not_found``.
    """
    where = redact(address)
    if base_ref is None or base_ref == "HEAD":
        return _default_base(listing, where)
    names = (
        [base_ref]
        if base_ref.startswith("refs/")
        else [f"refs/heads/{base_ref}", f"refs/tags/{base_ref}"]
    )
    for name in names:
        if (commit := listing.refs.get(f"{name}^{{}}", listing.refs.get(name))) is not None:
            return Base(name, commit, "branch" if name.startswith("refs/heads/") else "tag")
    if is_commit(base_ref):
        return Base(base_ref, base_ref, "commit")
    raise StepFailed(
        "repository.base_not_found",
        f"{where} has no branch or tag {base_ref}",
        source=where,
        base_ref=base_ref,
    )


def _default_base(listing: Listing, where: str) -> Base:
    if listing.head is None:
        raise StepFailed(
            "repository.base_not_found",
            f"the HEAD of {where} names a branch that does not exist; give base_ref",
            source=where,
            base_ref="HEAD",
        )
    if listing.head_ref is None:
        return Base("HEAD", listing.head, "detached_remote_head")
    return Base(listing.head_ref, listing.head, "remote_head")
