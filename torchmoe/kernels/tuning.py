"""Which tile configuration a kernel runs with: shipped tables, a cache on disk, and tuning when it is asked for.

A choice depends on the kernel, the shapes of the weights, the dtype, the device's name and the bucket
floor(log2(rows per expert)) - never on the exact number of tokens, so a run with changing token counts compiles a handful of
variants. It never changes inside a process, so forward and recompute agree bit for bit.

``TORCHMOE_AUTOTUNE``: unset - shipped table, then the cache on disk if it has the key, else the default; nothing is ever
measured inside a training step. ``1`` - an unknown key is measured at first use and cached. ``0`` - shipped table and defaults
alone, the cache is not read. All ranks of a job must use the same setting and the same cache.
``TORCHMOE_CACHE_DIR``: where the cache lives (default ``~/.cache/torchmoe``).
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from torchmoe.errors import ConfigError

__all__ = [
    "KERNELS",
    "SLACK",
    "SMALLEST",
    "Config",
    "Device",
    "Key",
    "Tuner",
    "cache_path",
    "candidates",
    "default_config",
    "fits",
    "mode",
    "rows_bucket",
    "shared_memory_bytes",
    "tuner",
]

logger = logging.getLogger(__name__)

KERNELS = ("up_projection", "down_projection", "backward_hidden", "input_grad", "weight_grad")
"""The kernels that have configurations: the grouped GEMMs."""


@dataclass(frozen=True)
class Config:
    """One tile configuration of a grouped GEMM: tile sizes, row tiles that walk together, warps, pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int

    @property
    def parts(self) -> int:
        """Parts of the columns that an epilogue handles in turn: at most 32 elements of one part per thread, up to 4 parts."""
        return min(4, max(1, self.block_m * self.block_n // (32 * self.num_warps) // 32))


SMALLEST = Config(16, 16, 16, 8, 2, 2)
"""What is left when nothing else fits."""


@dataclass(frozen=True)
class Key:
    """What a choice depends on: kernel, (M, N) extents of its weights, experts, element size, bucket of rows per expert."""

    kernel: str
    left: int
    right: int
    num_experts: int
    itemsize: int
    bucket: int

    def text(self) -> str:
        """The key as it stands in the tables."""
        return f"{self.kernel}/{self.left}x{self.right}/E{self.num_experts}/b{self.itemsize}/r{self.bucket}"


def rows_bucket(rows: int, num_experts: int) -> int:
    """floor(log2(rows per expert)), at least 0: the only trace of the number of tokens in a key."""
    return max(rows // max(num_experts, 1), 1).bit_length() - 1


def shared_memory_bytes(kernel: str, config: Config, itemsize: int) -> int:
    """Shared memory of one program: the pipelined operand tiles, or the fp32 part that an epilogue passes through it.

    The compiler allocates at most SLACK bytes more.

    The up-projection holds two right tiles a stage (gate and up). The weight gradient loads row indices one pipeline step
    before the rows, so its stages give about half as many tiles.
    """
    rights = 2 if kernel == "up_projection" else 1
    stages = (config.num_stages - 1) // 2 + 1 if kernel == "weight_grad" else config.num_stages
    tile = config.block_m * config.block_k + rights * config.block_n * config.block_k
    return max(tile * stages * itemsize, config.block_m * config.block_n * 4 // config.parts)


SLACK = 4096
"""Shared memory beyond the operand tiles: barriers, reductions, index vectors. benchmarks/kernels.py checks it."""


def fits(kernel: str, config: Config, itemsize: int, limit: int) -> bool:
    """Whether a configuration can be launched on a device with ``limit`` bytes of shared memory per block."""
    return shared_memory_bytes(kernel, config, itemsize) + SLACK <= limit


def candidates(key: Key, architecture: str = "default") -> tuple[Config, ...]:
    """At most eight configurations worth measuring for a key, the preferred one first, from configs.json."""
    groups = _shipped()["architectures"]
    group = groups.get(architecture, groups["default"])
    if isinstance(group, str):  # another architecture's table
        group = groups[group]
    width = "wide" if key.itemsize > 2 else "half"
    size = "many" if key.bucket >= 8 else "some" if key.bucket >= 5 else "few"
    if key.left * key.itemsize % 16 or key.right * key.itemsize % 16:
        # Rows that do not start at 16 bytes are loaded element by element: large tiles would spill their pointers.
        size = "odd_few" if size == "few" else "odd"
    table = group[f"{width}_{size}"]
    return tuple(Config(*row) for row in table.get(key.kernel) or table["any"])


def default_config(key: Key, limit: int, architecture: str = "default") -> Config:
    """The first candidate that fits in ``limit`` bytes of shared memory.

    Raises:
        ConfigError: none fits.
    """
    for config in (*candidates(key, architecture), SMALLEST):
        if fits(key.kernel, config, key.itemsize, limit):
            return config
    need = shared_memory_bytes(key.kernel, SMALLEST, key.itemsize) + SLACK
    raise ConfigError(
        f"{key.kernel}: the smallest tile needs {need} bytes of shared memory, the device has {limit}; use backend='reference'"
    )


def mode() -> str:
    """ "off", "cached" or "on" from ``TORCHMOE_AUTOTUNE``.

    Raises:
        ConfigError: another value.
    """
    value = os.environ.get("TORCHMOE_AUTOTUNE", "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"TORCHMOE_AUTOTUNE={value!r} is unknown; use 0 (tables only) or 1 (measure), or leave it unset")
    return {"": "cached", "0": "off", "1": "on"}[value]


@dataclass(frozen=True)
class Device:
    """What a table needs to know of a device."""

    name: str
    architecture: str
    shared_memory: int
    can_measure: bool

    @staticmethod
    def of(device: torch.device) -> Device:
        """The properties of a CUDA or ROCm device; anything else is the interpreter, which has the limits of an H100."""
        if device.type != "cuda":
            return Device("interpreter", "sm_90", 232448, False)
        found = torch.cuda.get_device_properties(device)
        if torch.version.hip is not None:
            return Device(found.name, found.gcnArchName.split(":")[0], 65536, True)
        # The opt-in limit is not in torch's type stubs; every CUDA build that torch 2.11 supports has it.
        limit = int(getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block))
        return Device(found.name, f"sm_{found.major}{found.minor}", limit, True)


class Tuner:
    """Chooses configurations and remembers them; one per process (:func:`tuner`), more in tests.

    Args:
        cache_dir: folder of the cache, one JSON file a device name.
        mode: "off", "cached" or "on", see the module.
        measure: seconds of one call of its argument.
        properties: looks a device up.
    """

    def __init__(
        self,
        cache_dir: Path,
        mode: str,
        measure: Callable[[Callable[[], None]], float],
        properties: Callable[[torch.device], Device] = Device.of,
    ) -> None:
        self._cache_dir, self._mode, self._measure, self._properties = cache_dir, mode, measure, properties
        self._chosen: dict[tuple[str, Key], Config] = {}
        self._devices: dict[torch.device, Device] = {}
        self._tables: dict[str, dict[str, Config]] = {}

    def config(self, key: Key, device: torch.device, run: Callable[[Config], None]) -> Config:
        """The configuration of a key: remembered, shipped, cached, measured by ``run``, or the default, in this order.

        Raises:
            ConfigError: no configuration fits the device's shared memory.
        """
        found = self._devices.get(device) or self._devices.setdefault(device, self._properties(device))
        chosen = self._chosen.get((found.name, key))
        if chosen is None:
            chosen = self._table(found.name).get(key.text())
            if chosen is None or not fits(key.kernel, chosen, key.itemsize, found.shared_memory):
                chosen = default_config(key, found.shared_memory, found.architecture)
                if self._mode == "on" and found.can_measure:
                    chosen = self._tune(key, found, chosen, run)
            self._chosen[found.name, key] = chosen
        return chosen

    def _table(self, name: str) -> dict[str, Config]:
        if name not in self._tables:
            entries = dict(_shipped()["measured"].get(name, {}))
            path = self._path(name)
            if self._mode != "off" and path.exists():
                entries = {**_read(path), **entries}
            self._tables[name] = {text: Config(*row) for text, row in entries.items()}
        return self._tables[name]

    def _tune(self, key: Key, device: Device, default: Config, run: Callable[[Config], None]) -> Config:
        fitting = [c for c in candidates(key, device.architecture) if fits(key.kernel, c, key.itemsize, device.shared_memory)]
        logger.warning("torchmoe: tuning %s on %s, %d configurations", key.text(), device.name, len(fitting))
        times: dict[Config, float] = {}
        for config in fitting:
            try:
                times[config] = self._measure(lambda config=config: run(config))  # type: ignore[misc]
            except Exception as error:  # a configuration that this compiler or card refuses is not a candidate
                logger.warning("torchmoe: %s cannot run %s: %s", key.text(), config, error)
        best = min(times, key=lambda config: times[config]) if times else default
        self._table(device.name)[key.text()] = best
        self._save(device.name, key.text(), best)
        return best

    def _save(self, name: str, text: str, config: Config) -> None:
        """Add one entry; written aside and renamed, so that a reader never sees half a file."""
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = {**(_read(path) if path.exists() else {}), text: list(astuple(config))}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False) as file:
            json.dump(dict(sorted(entries.items())), file, indent=0)
        os.replace(file.name, path)

    def _path(self, name: str) -> Path:
        return cache_path(self._cache_dir, name)


def cache_path(cache_dir: Path, device_name: str) -> Path:
    """The cache file of a device."""
    return cache_dir / f"{re.sub('[^A-Za-z0-9]+', '_', device_name)}.json"


@functools.cache
def tuner() -> Tuner:
    """The tuner of this process, from the environment."""
    folder = os.environ.get("TORCHMOE_CACHE_DIR") or Path.home() / ".cache" / "torchmoe"
    return Tuner(Path(folder), mode(), _median_seconds)


def _median_seconds(call: Callable[[], None]) -> float:
    """Median time of a call on the current device, after a warm-up, with a cold L2 cache."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=20, rep=60, return_mode="median")) / 1e3


@functools.cache
def _shipped() -> dict[str, Any]:
    return json.loads(files("torchmoe.kernels").joinpath("configs.json").read_text())  # type: ignore[no-any-return]


def _read(path: Path) -> dict[str, list[int]]:
    try:
        entries = json.loads(path.read_text())
        if isinstance(entries, dict) and all(len(row) == len(fields(Config)) for row in entries.values()):
            return entries
    except (ValueError, TypeError, OSError) as error:
        logger.warning("torchmoe: tuning cache %s is unreadable (%s) and is ignored", path, error)
        return {}
    logger.warning("torchmoe: tuning cache %s has entries of another form and is ignored", path)
    return {}
