"""What an application on Ray is told: `args` in the file for `serve deploy`."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coattn.errors import ConfigError
from coattn.serve.settings import Settings
from coattn.units import parse_bytes

M = TypeVar("M", bound=BaseModel)


class Scale(BaseModel):
    """How many replicas there may be."""

    model_config = ConfigDict(extra="forbid")

    min: int = Field(1, ge=0)
    max: int = Field(ge=1)
    target: int | None = Field(None, ge=1)
    """Requests that each replica should have; by default `max_batch`."""

    @model_validator(mode="after")
    def _ordered(self) -> Scale:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, which is more than max, {self.max}")
        return self


class Options(BaseModel):
    """As the options of `coattn serve`, and what only a cluster has. Unknown ones are refused."""

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
    """Answer under any name without a key; else without keys only names of this machine are answered to."""
    names: list[str] = Field(default_factory=list)
    origins: list[str] = Field(default_factory=list)
    max_body: str = "32MiB"
    timeout: float | None = Field(None, gt=0)
    drain: float = Field(30.0, ge=0)
    stall: float = Field(120.0, gt=0)

    replicas: Annotated[int, Field(ge=1)] | Scale = 1
    """Engines: so many, or `{min, max, target}` as requests come."""
    fronts: int = Field(1, ge=1)
    """Processes that take HTTP from Ray's proxies."""
    resources: dict[str, Any] = Field(default_factory=dict)
    """Of each replica, as Ray's `ray_actor_options`: `num_cpus`, `num_gpus`, `memory`, `resources`."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of each replica."""
    ongoing: int | None = Field(None, ge=1)
    """Requests that a replica may have at a time; by default twice `max_batch`: one batch runs, one is in line."""
    retries: int = Field(1, ge=0)
    """Further replicas that a request is sent to when one is lost before its first event."""
    line: float = Field(60.0, gt=0)
    """Seconds that a request waits for a replica."""
    health: float = Field(5.0, gt=0)
    """Seconds between two looks at whether a replica is ready."""
    tell: float = Field(2.0, gt=0)
    """Seconds between two reports of what a replica has stored."""

    @classmethod
    def read(cls, given: dict[str, Any]) -> Options:
        """Raises ConfigError with the first thing that is wrong."""
        scale = given.get("replicas")
        if isinstance(scale, dict):
            given = {**given, "replicas": _made(Scale, scale, "replicas")}
        return _made(cls, given, "")

    @property
    def most(self) -> int:
        """`max_ongoing_requests` of a replica."""
        return self.ongoing or 2 * self.max_batch

    def settings(self, keys: tuple[str, ...]) -> Settings:
        """Of the app. Its host says only which names it answers to without keys."""
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

    def check(self) -> None:
        """Raises what is wrong with the method, its parameters or the sizes, before anything is deployed."""
        from coattn.method.row import compose
        from coattn.method.table import find_method

        compose(find_method(self.method), **self.set)
        for name in ("gpu_kv", "host_kv", "max_body"):
            parse_bytes(getattr(self, name), name)
        taken = {"runtime_env"} & set(self.resources)
        if taken:
            raise ConfigError("resources has runtime_env, which is written from env.", "Put variables into env.")


def _made(kind: type[M], given: dict[str, Any], where: str) -> M:
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(filter(None, (where, *map(str, first["loc"][:1]))))
        said = first["msg"].removeprefix("Value error, ").rstrip(".")
        known = f"There are: {', '.join(kind.model_fields)}." if first["type"] == "extra_forbidden" else ""
        raise ConfigError(f"{field}: {said}.", known) from None
