"""Configuration: from the environment (prefix ``ONCEBORN_``), typed, with every default here.

``DATABASE_URL`` and the ``TEMPORAL_*`` variables keep the names that their tools use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from .ledger.operations import Limits
from .protocol.errors import ConfigurationError


def _name(*names: str) -> AliasChoices:
    return AliasChoices(*names)


class Settings(BaseSettings):
    """One installation's settings. Times are seconds, sizes are bytes."""

    model_config = SettingsConfigDict(env_prefix="ONCEBORN_", extra="ignore", populate_by_name=True)

    data: Path = Path(".onceborn")
    """The folder that holds everything of this host."""

    database_url: str | None = Field(default=None, validation_alias=_name("DATABASE_URL"))
    """SQLite or PostgreSQL; default: ``ledger.db`` in the data folder."""

    temporal_address: str | None = Field(default=None, validation_alias=_name("TEMPORAL_ADDRESS"))
    """``host:port`` of a cluster; default: the embedded server that `onceborn up` starts."""
    temporal_namespace: str = Field(default="default", validation_alias=_name("TEMPORAL_NAMESPACE"))
    temporal_tls: bool = Field(default=False, validation_alias=_name("TEMPORAL_TLS"))
    temporal_tls_server_ca: Path | None = Field(
        default=None, validation_alias=_name("TEMPORAL_TLS_SERVER_CA_CERT_PATH")
    )
    temporal_tls_cert: Path | None = Field(
        default=None, validation_alias=_name("TEMPORAL_TLS_CLIENT_CERT_PATH")
    )
    temporal_tls_key: Path | None = Field(
        default=None, validation_alias=_name("TEMPORAL_TLS_CLIENT_KEY_PATH")
    )
    temporal_api_key: SecretStr | None = Field(
        default=None, validation_alias=_name("TEMPORAL_API_KEY")
    )

    api_host: str = "127.0.0.1"
    api_port: int = Field(default=8460, ge=0, le=65535)
    max_body_bytes: int = Field(default=1024 * 1024, ge=1024)

    lease_s: float = Field(default=30.0, gt=0)
    """How long an owner is presumed alive after its last ledger write."""
    sweep_interval_s: float = Field(default=2.0, gt=0)
    slots: int = Field(default=32, ge=1)
    """Short steps that one worker process carries out at once at most."""
    long_slots: int = Field(default=16, ge=1)
    """Long steps (attaching a repository) that it carries out at once at most."""
    progress_budget: int = Field(default=5, ge=1)
    """Claims without progress after which an operation is parked for an operator."""
    step_attempts: int = Field(default=8, ge=1)
    """Tries of a step that fails for a passing reason before it fails for good."""
    retry_base_s: float = Field(default=1.0, gt=0)
    retry_max_s: float = Field(default=60.0, gt=0)

    git_time_limit_s: float = Field(default=900.0, gt=0)
    repository_roots: Annotated[tuple[Path, ...], NoDecode] = ()
    """Colon-separated. Repositories on this host's disk may be attached from below these only."""
    profiles: Path | None = None
    """The agent profiles, a TOML file; default: ``profiles.toml`` in the data folder."""

    log_format: str = Field(default="auto", pattern="^(auto|json|console)$")
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")

    @field_validator("repository_roots", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return _paths(value) if isinstance(value, str) else value

    @property
    def resolved_data(self) -> Path:
        return self.data.resolve()

    @property
    def resolved_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.resolved_data / 'ledger.db'}"

    @property
    def limits(self) -> Limits:
        """What the ledger measures operations by."""
        return Limits(
            lease_ms=int(self.lease_s * 1000),
            progress_budget=self.progress_budget,
            step_attempts=self.step_attempts,
            busy_ms=int((self.git_time_limit_s + 2 * self.lease_s + 60) * 1000),
        )

    @property
    def profiles_file(self) -> Path:
        return self.profiles or self.resolved_data / "profiles.toml"


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(Path(part) for part in text.split(":") if part)


def load_settings() -> Settings:
    """The settings of this process.

    Raises:
        ConfigurationError: names the variable that is wrong.
    """
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(f"setting {name}: {first['msg']}", setting=name) from None
