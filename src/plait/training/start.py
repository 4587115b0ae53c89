"""`plait train`: begins a run from a recipe, or goes on with one."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from plait.errors import UsageError
from plait.jsonfile import read_text
from plait.training import checkpoints
from plait.training.assemble import assemble
from plait.training.config import RunConfig, check_same, config_of, load_config
from plait.training.data.build import Progress
from plait.training.logs import open_services
from plait.training.loop import Display, Loop, Summary
from plait.training.recipe import parse_yaml
from plait.training.run import RunDirectory
from plait.training.tree import to_plain
from plait.weights.runs import CONFIG

log = logging.getLogger("plait.training")


def settle(target: Path, words: Iterable[str] = ()) -> RunConfig:
    """The configuration of a recipe, or of the run whose directory is given, with `key=value` words."""
    if not target.is_dir():
        return load_config(target, words)
    if not (target / CONFIG).exists():
        raise UsageError(f"{target} is no training run (it has no {CONFIG}); give a recipe or a run's directory")
    file = target / CONFIG
    return config_of(parse_yaml(read_text(file), str(file)) | {"out": str(target)}, words)


def train(config: RunConfig, display: Display, progress: Progress | None = None) -> Summary:
    """Train until the tokens of the configuration have been seen, from where its run directory stands.

    Raises PlaitError: for a configuration that cannot be, a run that another process has or that was begun otherwise,
    and a training that cannot go on.
    """
    with RunDirectory(Path(config.out)) as run:
        stored = run.stored_config()
        found = checkpoints.last_good(run.path, log.warning)
        if stored is None:
            run.store_config(to_plain(config))
        else:
            check_same(stored, config, run.path)
        assembled = assemble(config, run.path, found, progress)
        for line in assembled.lines:
            display.line(line)
        if found is not None:
            display.line(f"{run.path}: goes on from step {found.step:,}")
        services = open_services(config.log.services, run.path, to_plain(config))
        return Loop(config, assembled.parts, run, display, services, found).run()
