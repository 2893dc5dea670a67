"""The command line. Each command's module is imported when that command runs, so `--help` costs click alone.

Results go to stdout, everything else to stderr. Exit status: 0 done, 1 the
result is a failure, 2 the caller's mistake (one line says which), 130 and 143
after Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

import click

from tunekit.errors import TunekitError, UserError, suggestion

# name: (module, attribute, one line). A test compares each line with the command's own.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "sweep": ("tunekit.cli.sweep", "sweep", "Find the fastest correct variant for each problem."),
    "list": ("tunekit.cli.listing", "listing", "List the shipped specs, or the variants of one."),
    "explain": ("tunekit.cli.explain", "explain", "Say why variants were dropped, or all that is known of one."),
    "probe": ("tunekit.cli.probe", "probe", "Compare declared, traced and compiled footprints."),
    "compile": ("tunekit.cli.compile", "compile_", "Compile variants and store their artifacts."),
    "simulate": (
        "tunekit.cli.simulate",
        "simulate",
        "Run compiled kernels on the CPU, and check them as a sanitizer would.",
    ),
    "best": ("tunekit.cli.best", "best", "Say which variant serves a problem, and why."),
    "capture": ("tunekit.cli.capture", "capture", "Run a command, and record the problems that it asks for."),
    "bundle": (
        "tunekit.cli.bundle",
        "bundle",
        "Put the winners' kernels into one directory, which tunekit.load(SPEC, bundle=DIR) serves from.",
    ),
    "check": ("tunekit.cli.check", "check", "Checks for CI: compile times."),
    "env": ("tunekit.cli.env", "env", "Show the GPU, the toolchain, the limits and where results are kept."),
    "db": ("tunekit.cli.db", "db", "Export, import, merge, verify and clean the results."),
}


class LazyGroup(click.Group):
    """A group that knows its commands' names and lines without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            raise UserError(f"no command '{args[0]}'{suggestion(args[0], COMMANDS)} (tunekit --help lists them)")
        return super().resolve_command(ctx, args)


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from importlib.metadata import PackageNotFoundError, version

        try:
            click.echo(f"tunekit {version('tunekit')}")
        except PackageNotFoundError:
            click.echo("tunekit 0+unknown (not installed)")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version, help="Show the version."
)
def tunekit() -> None:
    """Tune CuTeDSL kernels: expand, probe, compile, verify, measure, record, serve.

    SPEC is a shipped spec's name (fmha) or a path to a file (./my_kernel.py, ./my_kernel.py:name).
    """


class Interruption:
    """Which signal asked this process to stop; SIGTERM and SIGHUP become KeyboardInterrupt, as Ctrl-C is."""

    def __init__(self) -> None:
        self.number = int(signal.SIGINT)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """For the time of the context, SIGTERM and SIGHUP (unless nohup ignores it) interrupt as SIGINT does."""

        def interrupt(number: int, _: FrameType | None) -> None:
            self.number = number
            raise KeyboardInterrupt

        before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
        taken = [n for n, handler in before.items() if handler != signal.SIG_IGN]
        try:
            for number in taken:
                signal.signal(number, interrupt)
        except ValueError:  # not the main thread: whoever embeds us handles its own signals
            yield
            return
        try:
            yield
        finally:
            for number in taken:
                signal.signal(number, before[number])


INTERRUPTION = click.make_pass_decorator(Interruption, ensure=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    interruption = Interruption()
    _ready_the_streams()
    try:
        with interruption.watch():
            status = tunekit.main(
                args=None if arguments is None else list(arguments),
                prog_name="tunekit",
                standalone_mode=False,
                obj=interruption,
            )
            _flush()
        return status if isinstance(status, int) else 0
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "tunekit"
        if error.ctx and error.format_message() == error.ctx.get_help():  # a group without a command
            _complain(error.format_message())
            return 2
        _complain(f"tunekit: {error.format_message()} (see {command} --help)")
        return 2
    except click.ClickException as error:
        _complain(f"tunekit: {error.format_message()}")
        return 2
    except UserError as error:
        _complain(f"tunekit: {_one_line(error)}")
        return 2
    except TunekitError as error:
        _complain(f"tunekit: {_one_line(error)}")
        return 1
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # `tunekit list | head`: the reader has seen enough
            _discard_output()
            return 128 + signal.SIGPIPE
        _complain(f"tunekit: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}")
        return 2
    except (click.Abort, KeyboardInterrupt):
        _complain("tunekit: interrupted")
        return 128 + interruption.number


def _ready_the_streams() -> None:
    """What was started without stdout or stderr writes nowhere; a name that can't be encoded shows as escapes."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):  # the exit status says it too
        click.echo(text, err=True)


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard_output()
        raise UserError(f"can't write the result: {error.strerror}") from None


def _discard_output() -> None:
    """Let the interpreter's last flush of stdout go nowhere: it would fail again, with a traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
