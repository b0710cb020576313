"""The command table and the exit codes.

0 done, 1 run failed, 2 wrong usage or settings, 130 interrupted. Commands are imported when they are called,
so that ``omni --help`` loads neither torch nor a codec.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import click

from omni_pipeline import __version__
from omni_pipeline.core.errors import ConfigError, OmniError

PACKAGES = ("omni_pipeline", "loaders", "balancer", "trainer")

COMMANDS = {
    "config": ("omni_pipeline.cli.config", "Show the settings of a run and where each value comes from."),
    "data": ("omni_pipeline.cli.data", "Prepare, index and check shards."),
    "demo": ("omni_pipeline.cli.demo", "Run the whole path on this machine in under three minutes."),
    "plan": ("omni_pipeline.cli.plan", "Print what a step would do, without running it."),
    "profile": ("omni_pipeline.cli.profile", "Tell where the time of a trained run went."),
    "report": ("omni_pipeline.cli.report", "Write the HTML report of a run."),
    "simulate": ("omni_pipeline.cli.simulate", "Model a step on any number of ranks, and its rivals."),
    "train": ("omni_pipeline.cli.train", "Train from a run file; continues from the latest checkpoint."),
    "weights": ("omni_pipeline.cli.weights", "Import published weights, export trained ones."),
}


class LazyGroup(click.Group):
    """A group whose commands live in modules that are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in sorted(COMMANDS)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="omni")
def command() -> None:
    """Stream multimodal shards, balance them, train a multiplexed encoder-LLM, and see what happened.

    Example: omni demo --out demo-run
    """


def main() -> None:
    """Run the command line; every ``OmniError`` becomes a message and an exit code, never a traceback."""
    try:
        _check_packages()
        status = command.main(standalone_mode=False)
    except OmniError as error:
        click.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)


def _check_packages() -> None:
    """Stop if one of the four top-level packages comes from another distribution."""
    parents = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"package {name!r} is missing or not ours",
                fix="install omni-pipeline into a clean environment",
            )
        parents[name] = Path(spec.origin).resolve().parent.parent
    for name, parent in parents.items():
        if parent != parents["omni_pipeline"]:
            raise ConfigError(
                f"package {name!r} comes from another distribution",
                where=f"{parent} against {parents['omni_pipeline']}",
                fix="install omni-pipeline into an environment of its own",
            )
