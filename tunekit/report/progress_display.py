"""Showing a sweep while it runs: a live screen on a terminal, plain lines anywhere else.

The live screen lists what is running with its phase and its seconds, so that a
stuck variant is visible. The plain form writes at most one line a variant, and
once a minute one that names what is still running.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tunekit.progress import Running, SweepEvent
from tunekit.report import units
from tunekit.report.printer import is_plain
from tunekit.trials import Stage, Status

HEARTBEAT_S = 60.0
SHOWN_RUNNING = 8
OnEvent = Callable[[SweepEvent], None]


@contextmanager
def progress_display(stream: TextIO, *, plain: bool | None = None, quiet: bool = False) -> Iterator[OnEvent]:
    """The function to call with each event; the display ends with the context."""
    if quiet:
        yield lambda event: None
    elif is_plain(stream) if plain is None else plain:
        yield PlainProgress(stream)
    else:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=stream)
        screen = LiveScreen(console.print)
        with Live(get_renderable=screen.render, console=console, transient=True, refresh_per_second=4):
            yield screen


class PlainProgress:
    """One line for each thing worth knowing; no escapes, no carriage returns.

    Falls silent when `stream` takes no more (a reader that left, a full disk): work goes on unwatched.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._told: set[str] = set()
        self._silent = False
        self._last_line_s = clock()

    def __call__(self, event: SweepEvent) -> None:
        text = self._text(event)
        if text is None and self._clock() - self._last_line_s >= HEARTBEAT_S:
            text = _still(event)
        if text is not None and not self._silent:
            self._last_line_s = self._clock()
            try:
                self._stream.write(" ".join(text.split()) + "\n")
                self._stream.flush()
            except OSError:
                self._silent = True

    def _text(self, event: SweepEvent) -> str | None:
        if event.kind == "finished":
            worth_a_line = finished_line(event) if _worth_a_line(event) else None
            if event.variant is None or event.variant.id in self._told or worth_a_line is None:
                return None
            self._told.add(event.variant.id)
            return worth_a_line
        if event.kind == "expanded":
            self._told.clear()  # the next problem's variants
        return _headline(event)


class LiveScreen:
    """The lines that stay on the screen: a bar, and what is running now and for how long."""

    def __init__(self, print_above: Callable[..., None], clock: Callable[[], float] = time.monotonic) -> None:
        self._print = print_above
        self._clock = clock
        self._phase = ""
        self._done = 0
        self._last = SweepEvent("phase")
        self._at_s = clock()

    def __call__(self, event: SweepEvent) -> None:
        if event.kind == "phase" and event.text:
            self._phase, self._done = event.text, 0
        self._done = max(self._done, event.done)  # ticks don't all know it
        self._last, self._at_s = event, self._clock()
        above = _headline(event)
        if event.kind == "finished" and event.outcome is not None and not event.outcome.ok and _worth_a_line(event):
            above = finished_line(event)
        if above is not None:
            self._print(above, markup=False, highlight=False, soft_wrap=True)

    def render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        event, since = self._last, self._clock() - self._at_s
        bar = Table.grid(padding=(0, 1))
        bar.add_row(Text(self._phase), ProgressBar(max(1, event.total), self._done, width=30), self._counts(event))
        running = event.running
        if not running and event.kind == "started" and event.variant is not None:
            running = ((str(event.variant), event.text or self._phase, 0.0),)
        lines = [_running_line((name, phase, s + since)) for name, phase, s in running[:SHOWN_RUNNING]]
        if len(running) > SHOWN_RUNNING:
            lines.append(f"and {len(running) - SHOWN_RUNNING} more")
        return Group(bar, *(Text("  " + line, no_wrap=True, overflow="ellipsis") for line in lines))

    def _counts(self, event: SweepEvent) -> str:
        return f"{self._done}/{event.total}" if event.total else ""


def finished_line(event: SweepEvent) -> str:
    """``3/20 compile 1a2b... kv_stage=2: ok, 3.2 s`` or the reason's first line."""
    outcome, variant = event.outcome, event.variant
    name = units.label(variant) if variant else event.text
    place = f"{event.done}/{event.total} " if event.total else ""
    if outcome is None:
        return f"{place}{name}"
    if outcome.ok:
        took = units.seconds(sum(float(s) for s in outcome.seconds.values()))
        word = f"stored (took {took})" if outcome.facts.get("cached") else f"ok, {took}"
        return f"{place}{outcome.stage} {name}: {word}"
    lines = outcome.reason.strip().splitlines()
    return f"{place}{outcome.stage} {name}: {outcome.status}" + (f": {lines[0]}" if lines else "")


def _worth_a_line(event: SweepEvent) -> bool:
    """Compiles and failures; but what doesn't fit as declared, perhaps hundreds, is counted in the headline."""
    outcome = event.outcome
    if outcome is None or (outcome.status is Status.OVER_BUDGET and not event.total):
        return False
    return not outcome.ok or outcome.stage is Stage.COMPILE


def _headline(event: SweepEvent) -> str | None:
    if event.kind == "phase":
        return event.text or None
    if event.kind == "expanded":
        return event.text
    if event.kind == "note":
        return f"note: {event.text}"
    if event.kind == "winner":
        return f"winner: {event.text}" if event.text else None
    return None


def _still(event: SweepEvent) -> str | None:
    """What goes on, for a stream that has heard nothing for a while."""
    if event.running:
        return "still running: " + "; ".join(_running_line(running) for running in event.running[:SHOWN_RUNNING])
    if event.kind == "started" and event.variant is not None:
        return f"still running: {event.text}, {event.done} of {event.total} done, now {units.label(event.variant)}"
    return None


def _running_line(running: Running) -> str:
    name, phase, elapsed = running
    return f"{name} ({phase}, {units.seconds(elapsed)})"
