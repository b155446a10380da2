"""The `args` of an application in the file for `serve deploy`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coattn.errors import ConfigError
from coattn.method.row import compose
from coattn.method.table import find_method
from coattn.serve.errors import from_validation
from coattn.serve.settings import Settings
from coattn.units import parse_bytes

Count = Annotated[int, Field(ge=1)]


class Options(BaseModel):
    """The options of `coattn serve`, and those of a cluster, as in docs/ray.md. Unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str = "smollm2"
    dtype: str = "auto"
    device: str = "auto"
    method: str = "full"
    set: dict[str, Any] = Field(default_factory=dict)
    gpu_kv: str | None = None
    host_kv: str | None = None
    weights_on_gpu: float | None = Field(None, ge=0, le=1)
    max_batch: Count = 16
    max_length: int | None = Field(None, ge=2)
    chunk: Count | None = None
    max_waiting: int = Field(256, ge=0)
    no_reuse: bool = False
    warm_up: bool = True
    api_key_file: str | None = None
    no_key: bool = False
    names: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_body: str = "32MiB"
    timeout: float | None = Field(None, gt=0)
    drain: float = Field(30.0, ge=0)
    stall: float = Field(120.0, gt=0)

    replicas: Count | dict[str, Any] = 1
    """Number of engines, or Ray's `autoscaling_config`."""
    fronts: Count = 1
    """Processes that take HTTP from Ray's proxies."""
    replica: dict[str, Any] = Field(default_factory=dict)
    """Further options of the replicas' deployment, as Ray names them."""

    @classmethod
    def read(cls, given: dict[str, Any]) -> Options:
        """Raises the first fault, also of the method, its parameters and the sizes, before anything is deployed."""
        try:
            made = cls.model_validate(given)
        except ValidationError as error:
            fault = from_validation(error)
            known = f"There are: {', '.join(cls.model_fields)}." if fault.code == "extra_forbidden" else ""
            raise ConfigError(fault.message, known) from None
        compose(find_method(made.method), **made.set)
        for name in ("gpu_kv", "host_kv", "max_body"):
            parse_bytes(getattr(made, name), name)
        return made

    def settings(self, keys: tuple[str, ...]) -> Settings:
        """Settings of the app. Their host only says which names are answered without keys."""
        return Settings(
            host="0.0.0.0" if self.no_key else "127.0.0.1",
            keys=keys,
            max_body=parse_bytes(self.max_body, "max_body") or 0,
            request_timeout=self.timeout,
            **self.model_dump(include={"names", "origins", "drain", "stall"}),
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
