"""Draws a trace over time: the training loop's waits, the fill of the ring, and what every slot was filled with."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, MissingExtraError
from stoker.trace.phases import Phase, Span
from stoker.trace.recorder import Wait
from stoker.trace.recording import Filled, Held, Recording, Told
from stoker.trace.summary import Summary

__all__ = ["Section", "draw", "ring_fill"]

COLOURS = {
    Phase.FIRST_BYTE: "#e9a23b",
    Phase.TRANSFER: "#2a7f9e",
    Phase.HEDGE: "#d1495b",
    Phase.RETRY: "#8c1c2c",
    Phase.QUEUE: "#8a6bbe",
    Phase.TIER: "#4f772d",
    Phase.VERIFY: "#2a9d8f",
    Phase.DECODE: "#c2569b",
    Phase.GATHER: "#555555",
    Phase.START: "#b08968",
    Phase.OTHER: "#b9b9b9",
}
"""Of the phases, so that those that are often neighbours differ most."""
_READY, _FILLING, _TRAINING = "#cfe3d4", "#9db4c0", "#ececec"
_MOST_FETCHES, _MOST_BATCHES = 500, 5_000
"""Shown, unless more is asked for: beyond it, they are narrower than what can be told apart."""
_MOST_DRAWN = 20_000
"""Waits, fetches and slots in use that are ever drawn; they are in memory then."""
_ROUNDED_SECONDS = 1e-6
_LABELLED = 3
_EXTRA = "drawing needs the extra 'plan': pip install 'stoker[plan]'"


@dataclass(frozen=True, slots=True)
class Section:
    """The stretch of a trace that is drawn, in seconds since it began."""

    begin_seconds: float
    end_seconds: float

    @classmethod
    def of(cls, summary: Summary, begin_seconds: float | None, seconds: float | None) -> Section:
        """Return the stretch that is asked for, by default all, or of a long trace what is around its worst wait.

        Raises:
            ConfigError: there is nothing in it.
        """
        if not summary.batches and not summary.fetches:
            raise ConfigError("there is nothing in the trace to draw")
        first, last = summary.begin_seconds, summary.end_seconds
        if seconds is None:
            fetches, batches = max(1, summary.fetches), max(1, summary.batches)
            share = min(1.0, _MOST_FETCHES / fetches, _MOST_BATCHES / batches)
            seconds = (last - first) * share
            if begin_seconds is None and share < 1.0 and (worst := summary.worst()):
                begin_seconds = max(first, worst[0][1].spans[0].begin_seconds - seconds / 4)
        begin_seconds = first if begin_seconds is None else begin_seconds
        if not seconds > 0 or not begin_seconds < last:
            raise ConfigError(f"the trace is from second {first:.3f} to {last:.3f}: name a stretch of it")
        return cls(begin_seconds, min(last, begin_seconds + seconds))

    def has(self, begin_seconds: float, end_seconds: float) -> bool:
        """Return whether something that lasted from one moment to another can be seen."""
        return end_seconds > self.begin_seconds and begin_seconds < self.end_seconds

    def cut(self, told: Iterable[Told]) -> Recording:
        """Keep what can be seen of one process. What never was released, as at the end of a killed run, is held on.

        Raises:
            ConfigError: it is too much to draw.
        """
        recording = Recording.of(islice((each for each in told if self._has(each.what)), _MOST_DRAWN + 1))
        if len(recording.waits) + len(recording.fetches) + len(recording.held) > _MOST_DRAWN:
            raise ConfigError(
                f"seconds {self.begin_seconds:.3f} to {self.end_seconds:.3f} have more than the {_MOST_DRAWN:,} waits "
                "and fetches that a picture can show: name fewer with --seconds"
            )
        recording.held += _unreleased(recording, self.end_seconds)
        return recording

    def _has(self, what: object) -> bool:
        match what:
            case Wait():
                return self.has(what.spans[0].begin_seconds, what.spans[-1].end_seconds)
            case Filled() | Held():
                return self.has(what.begin_seconds, what.end_seconds)
        return False


def _unreleased(recording: Recording, end_seconds: float) -> list[Held]:
    """Return for how long what was fetched, and not told to be released, was held: until its slot was used again."""
    released = {(each.slot, round(each.begin_seconds / _ROUNDED_SECONDS)) for each in recording.held}
    until: dict[int, float] = {}
    held: list[Held] = []
    for each in sorted(recording.fetches, key=lambda each: -each.begin_seconds):
        moment = round(each.end_seconds / _ROUNDED_SECONDS)
        if not any((each.slot, moment + off) in released for off in (-1, 0, 1)):
            held.append(Held(each.slot, each.end_seconds, until.get(each.slot, end_seconds)))
        until[each.slot] = each.begin_seconds
    return [each for each in held if each.end_seconds > each.begin_seconds]


def ring_fill(recording: Recording) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the moments at which the ring's fill changed, and from each on how many slots were filling and ready."""
    changes: list[tuple[float, int, int]] = []
    for filled in recording.fetches:
        changes += (filled.begin_seconds, 1, 0), (filled.end_seconds, -1, 0)
    for held in recording.held:
        changes += (held.begin_seconds, 0, 1), (held.end_seconds, 0, -1)
    changes.sort()
    moments = np.array([change[0] for change in changes], np.float64)
    counts = np.cumsum(np.array([change[1:] for change in changes], np.int64).reshape(-1, 2), axis=0)
    return moments, counts[:, 0], counts[:, 1]


def draw(recording: Recording, path: Path, section: Section, title: str) -> None:
    """Draw a stretch of a trace into a ``.png`` (matplotlib) or an ``.html`` page that needs no network (plotly).

    Raises:
        ConfigError: the name ends otherwise, or the file cannot be written to.
        MissingExtraError: what draws is not installed.
    """
    drawers = {".png": _draw_png, ".html": _draw_html}
    drawer = drawers.get(path.suffix.lower())
    if drawer is None:
        raise ConfigError(f"a picture is a .png or an .html file, not {path}")
    try:
        drawer(recording, path, section, title)
    except ImportError:
        raise MissingExtraError(_EXTRA) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written to: {error.strerror}; name another file") from None


def _waits(recording: Recording) -> list[Span]:
    return [span for wait in recording.waits for span in wait.spans]


def _phases(recording: Recording) -> list[Phase]:
    """Return the phases that are to be seen, in the order of the colours."""
    there = {span.phase for span in _waits(recording) if span.seconds}
    there |= {span.phase for each in recording.fetches for span in each.spans}
    return [phase for phase in COLOURS if phase in there]


def _draw_png(recording: Recording, path: Path, section: Section, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    slots = sorted({each.slot for each in recording.fetches} | {each.slot for each in recording.held})
    ring_height = 1.2 + min(len(slots), 48) * 0.14
    figure = Figure(figsize=(13, 3.7 + ring_height), layout="constrained")
    FigureCanvasAgg(figure)
    loop, fill, ring = figure.subplots(3, 1, sharex=True, height_ratios=[1.0, 1.5, ring_height])
    _draw_loop(loop, recording, section)
    _draw_fill(fill, recording)
    _draw_slots(ring, recording, slots)
    ring.set_xlim(section.begin_seconds, section.end_seconds)
    for axes in (loop, fill, ring):
        axes.title.set(fontsize=9, ha="left", position=(0.0, 1.0))
        axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=COLOURS[phase], label=str(phase)) for phase in _phases(recording)]
    patches += [Patch(color=_READY, label="ready, or in use"), Patch(color=_TRAINING, label="training")]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, parse_math=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _draw_loop(axes: Any, recording: Recording, section: Section) -> None:
    spans = _waits(recording)
    _boxes(axes, [(section.begin_seconds, section.end_seconds, 0, _TRAINING)])
    _boxes(axes, [(span.begin_seconds, span.end_seconds, 0, COLOURS[span.phase]) for span in spans])
    width, labelled = section.end_seconds - section.begin_seconds, list[float]()
    for wait in heapq.nlargest(_LABELLED, recording.waits, key=lambda wait: wait.seconds):
        middle = (max(section.begin_seconds, wait.spans[0].begin_seconds) + wait.spans[-1].end_seconds) / 2
        at = min(max(middle, section.begin_seconds + 0.06 * width), section.end_seconds - 0.06 * width)
        if wait.seconds and all(abs(at - other) > 0.12 * width for other in labelled):
            labelled.append(at)
            (phase, _), _ = next(iter(wait.by_cause().items()))
            text = f"batch {wait.batch}: {wait.seconds:.3f} s {phase}"
            axes.text(at, 0.46, text, fontsize=7.5, ha="center", va="bottom")
    axes.set(yticks=[], ylim=(-0.5, 0.8), title="training loop: what it waits for")


def _draw_fill(axes: Any, recording: Recording) -> None:
    moments, filling, ready = ring_fill(recording)
    axes.stackplot(moments, ready, filling, step="post", colors=[_READY, _FILLING])
    axes.legend(["ready, or in use", "filling"], loc="upper right", fontsize=8, ncols=2, frameon=False)
    most = max(1, int((filling + ready).max(initial=1)))
    axes.set(ylabel="slots", ylim=(0, most * 1.25), title="fill of the ring")
    axes.yaxis.get_major_locator().set_params(integer=True)


def _draw_slots(axes: Any, recording: Recording, slots: Sequence[int]) -> None:
    row_of = {slot: row for row, slot in enumerate(slots)}
    _boxes(axes, [(each.begin_seconds, each.end_seconds, row_of[each.slot], _READY) for each in recording.held])
    _boxes(
        axes,
        [
            (span.begin_seconds, span.end_seconds, row_of[each.slot], COLOURS[span.phase])
            for each in recording.fetches
            for span in each.spans
        ],
    )
    axes.set(ylim=(len(slots) - 0.4, -0.6), ylabel="slot", xlabel="seconds since the trace began")
    every = 1 + len(slots) // 16
    axes.set_yticks(range(0, len(slots), every), [str(slot) for slot in slots[::every]])
    axes.set_title("fetches: how a slot is filled, and how long it is held")


def _boxes(axes: Any, boxes: Sequence[tuple[float, float, int, str]]) -> None:
    """Draw stretches of time, each with its row and colour; thousands in one go."""
    from matplotlib.collections import PolyCollection

    times = np.array([box[:2] for box in boxes], np.float64).reshape(-1, 2)[:, [0, 0, 1, 1]]
    rows = np.array([box[2] for box in boxes], np.float64)[:, None] + [-0.4, 0.4, 0.4, -0.4]
    corners = np.stack([times, rows], axis=-1)
    axes.add_collection(PolyCollection(list(corners), facecolors=[box[3] for box in boxes], edgecolors="none"))


def _draw_html(recording: Recording, path: Path, section: Section, title: str) -> None:
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    titles = ["training loop: what it waits for", "fill of the ring", "fetches, by slot"]
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, row_heights=[0.15, 0.3, 0.55], subplot_titles=titles)
    moments, filling, ready = ring_fill(recording)
    for name, counts, colour in (("ready", ready, _READY), ("filling", filling, _FILLING)):
        line = {"shape": "hv", "color": colour}
        area = graph_objects.Scatter(x=moments, y=counts, name=name, stackgroup="ring", line=line)
        figure.add_trace(area, row=2, col=1)
    held = [Span(Phase.OTHER, each.begin_seconds, each.end_seconds) for each in recording.held]
    slots = [f"slot {each.slot}" for each in recording.held]
    figure.add_trace(_timeline(graph_objects, held, slots, "held", _READY), row=3, col=1)
    waits = _waits(recording)
    filled = [(each.slot, span) for each in recording.fetches for span in each.spans]
    for phase in _phases(recording):
        of_loop = [span for span in waits if span.phase is phase]
        of_ring = [(slot, span) for slot, span in filled if span.phase is phase]
        rows = [f"slot {slot}" for slot, _ in of_ring]
        loop = _timeline(graph_objects, of_loop, ["loop"] * len(of_loop), str(phase), COLOURS[phase])
        ring = _timeline(graph_objects, [span for _, span in of_ring], rows, str(phase), COLOURS[phase])
        ring.showlegend = not of_loop
        figure.add_trace(loop, row=1, col=1)
        figure.add_trace(ring, row=3, col=1)
    figure.update_layout(title=title, template="plotly_white", barmode="overlay", height=900)
    figure.update_xaxes(range=[section.begin_seconds, section.end_seconds])
    figure.update_xaxes(title_text="seconds since the trace began", row=3, col=1)
    path.write_text(figure.to_html(include_plotlyjs=True, full_html=True), "utf-8")


def _timeline(graph_objects: Any, spans: Sequence[Span], rows: Sequence[str], name: str, colour: str) -> Any:
    return graph_objects.Bar(
        base=[span.begin_seconds for span in spans],
        x=[span.seconds for span in spans],
        y=list(rows),
        orientation="h",
        name=name,
        legendgroup=name,
        marker={"color": colour, "line": {"width": 0}},
        customdata=[[span.object, span.seconds] for span in spans],
        hovertemplate="%{customdata[1]:.4f} s of %{customdata[0]}<extra>" + name + "</extra>",
    )
