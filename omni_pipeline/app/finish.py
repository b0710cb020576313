"""After a run: its gallery and its report."""

from __future__ import annotations

from pathlib import Path

from loaders.cache import read_payload
from omni_pipeline.app.report import write_report
from omni_pipeline.app.report_gallery import gallery_from_plan, read_gallery, write_gallery
from omni_pipeline.app.run_dir import RunDir
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.plan import StepPlan


def keep_gallery(run: RunDir, plan: StepPlan, *, max_packs: int) -> None:
    """Keep the media of some packs of ``plan`` for the report, so that it needs no shard later."""
    if max_packs:
        write_gallery(run.gallery_path, gallery_from_plan(plan, read_payload, max_packs=max_packs))


def report_of(run_dir: Path, *, out: Path | None = None) -> Path:
    """Write the report of the run in ``run_dir`` and return its path.

    Raises:
        ConfigError: There is no run with metrics.
    """
    if not run_dir.is_dir():
        raise ConfigError(
            f"there is no folder {run_dir}", fix="give the run.dir of a run that has trained a step"
        )
    if out is not None and out.is_dir():
        raise ConfigError(f"{out} is a folder", fix="name the page to write, e.g. report.html")
    run = RunDir(run_dir)
    gallery = read_gallery(run.gallery_path) if run.gallery_path.exists() else []
    return write_report(
        run_dir,
        out or run.path / "report.html",
        gallery=gallery,
        events=run.events(),
        summary=run.summary(),
    )
