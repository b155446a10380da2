"""The `args` of an application in the file for `serve deploy`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coattn.errors import ConfigError
from coattn.serve.errors import from_validation
from coattn.serve.settings import Settings
from coattn.units import parse_bytes


class Options(BaseModel):
    """The options of `coattn serve`, and those of a cluster. Unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str = "smollm2"
    dtype: str = "auto"
    device: str = "auto"
    method: str = "full"
    gpu_kv: str | None = None
    host_kv: str | None = None
    weights_on_gpu: float | None = Field(None, ge=0, le=1)
    set: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the method."""
    max_batch: int = Field(16, ge=1)
    max_length: int | None = Field(None, ge=2)
    chunk: int | None = Field(None, ge=1)
    max_waiting: int = Field(256, ge=0)
    no_reuse: bool = False
    warm_up: bool = False
    api_key_file: str | None = None
    """On every machine that has a front or a replica."""
    no_key: bool = False
    """Answer under any host name without a key. Otherwise, without keys, only names of this machine are answered."""
    names: list[str] = Field(default_factory=list)
    origins: list[str] = Field(default_factory=list)
    max_body: str = "32MiB"
    timeout: float | None = Field(None, gt=0)
    drain: float = Field(30.0, ge=0)
    stall: float = Field(120.0, gt=0)

    replicas: Annotated[int, Field(ge=1)] | dict[str, Any] = 1
    """Number of engines, or Ray's `autoscaling_config`; its `target_ongoing_requests` defaults to `max_batch`."""
    fronts: int = Field(1, ge=1)
    """Processes that take HTTP from Ray's proxies."""
    replica: dict[str, Any] = Field(default_factory=dict)
    """Further options of the replicas' deployment, as Ray names them, such as `ray_actor_options`."""
    retries: int = Field(1, ge=0)
    """How many other replicas get a request if one is lost before its first event."""
    line: float = Field(60.0, gt=0)
    """Seconds that a request waits for a replica."""

    @classmethod
    def read(cls, given: dict[str, Any]) -> Options:
        """Raises ConfigError with the first fault."""
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            fault = from_validation(error)
            known = f"There are: {', '.join(cls.model_fields)}." if fault.code == "extra_forbidden" else ""
            raise ConfigError(fault.message, known) from None

    def settings(self, keys: tuple[str, ...]) -> Settings:
        """Settings of the app. Their host only says which names are answered without keys."""
        return Settings(
            host="0.0.0.0" if self.no_key else "127.0.0.1",
            keys=keys,
            names=tuple(self.names),
            origins=tuple(self.origins),
            max_body=parse_bytes(self.max_body, "max_body") or 0,
            request_timeout=self.timeout,
            drain=self.drain,
            stall=self.stall,
        )

    def deployment(self) -> dict[str, Any]:
        """Options of the replicas' deployment. Ray's default of 5 requests would leave most of a batch empty."""
        scaling: dict[str, Any] = {"num_replicas": self.replicas}
        if isinstance(self.replicas, dict):
            scaling = {"autoscaling_config": {"target_ongoing_requests": self.max_batch, **self.replicas}}
        return {
            "max_ongoing_requests": 2 * self.max_batch,
            "max_queued_requests": max(1, self.max_waiting),
            "graceful_shutdown_timeout_s": self.drain,
            "health_check_period_s": 5.0,
            **scaling,
            **self.replica,
        }

    def check(self) -> None:
        """Raises a fault of the method, its parameters or the sizes before anything is deployed."""
        from coattn.method.row import compose
        from coattn.method.table import find_method

        compose(find_method(self.method), **self.set)
        for name in ("gpu_kv", "host_kv", "max_body"):
            parse_bytes(getattr(self, name), name)
