"""Draws a trace over time: the training loop's waits, the fill of the ring, and what every slot was filled with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, MissingExtraError
from stoker.trace.phases import Phase, Span
from stoker.trace.recording import Held, Recording

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
_READY, _TRAINING = "#cfe3d4", "#ececec"
_MOST_FETCHES = 500
"""Shown, unless more is asked for: beyond it, they are narrower than what can be told apart."""
_EXTRA = "drawing needs the extra 'plan': pip install 'stoker[plan]'"


@dataclass(frozen=True, slots=True)
class Section:
    """The stretch of a trace that is drawn, in seconds since it began."""

    begin_seconds: float
    end_seconds: float

    @classmethod
    def of(cls, recording: Recording, begin_seconds: float | None, seconds: float | None) -> Section:
        """Return the stretch that is asked for, by default all, or of a long trace what is around its worst wait.

        Raises:
            ConfigError: there is nothing in it.
        """
        if not recording.waits and not recording.fetches:
            raise ConfigError("there is nothing in the trace to draw")
        first, last = recording.begin_seconds, recording.end_seconds
        if seconds is None:
            begins = np.sort([each.begin_seconds for each in recording.fetches])
            share = min(1.0, _MOST_FETCHES / max(1, len(begins)))
            seconds = (last - first) * share
            if begin_seconds is None and share < 1.0 and recording.waits:
                worst = max(recording.waits, key=lambda wait: wait.seconds)
                begin_seconds = max(first, worst.spans[0].begin_seconds - seconds / 4)
        begin_seconds = first if begin_seconds is None else begin_seconds
        if not seconds > 0 or not begin_seconds < last:
            raise ConfigError(f"the trace is from second {first:.3f} to {last:.3f}: name a stretch of it")
        return cls(begin_seconds, min(last, begin_seconds + seconds))

    def has(self, begin_seconds: float, end_seconds: float) -> bool:
        """Return whether something that lasted from one moment to another can be seen."""
        return end_seconds > self.begin_seconds and begin_seconds < self.end_seconds


def ring_fill(recording: Recording) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the moments at which the ring's fill changed, and from each on how many slots were filling and ready."""
    changes = [
        (moment, *change)
        for rows, enters in ((recording.fetches, (1, 0)), (recording.held, (0, 1)))
        for each in rows
        for moment, change in ((each.begin_seconds, enters), (each.end_seconds, (-enters[0], -enters[1])))
    ]
    changes.sort()
    moments = np.array([change[0] for change in changes], np.float64)
    counts = np.cumsum(np.array([change[1:] for change in changes], np.int64).reshape(-1, 2), axis=0)
    return moments, counts[:, 0], counts[:, 1]


def draw(recording: Recording, path: Path, section: Section, title: str) -> Section:
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
    return section


def _waits(recording: Recording, section: Section) -> list[Span]:
    spans = (span for wait in recording.waits for span in wait.spans)
    return [span for span in spans if section.has(span.begin_seconds, span.end_seconds)]


def _shown(rows: Iterable[Held], section: Section) -> list[Held]:
    return [each for each in rows if section.has(each.begin_seconds, each.end_seconds)]


def _phases(recording: Recording, section: Section) -> list[Phase]:
    """Return the phases that are to be seen, in the order of the colours."""
    spans = [*_waits(recording, section), *(span for each in _shown(recording.fetches, section) for span in each.spans)]
    there = {span.phase for span in spans}
    return [phase for phase in COLOURS if phase in there]


def _draw_png(recording: Recording, path: Path, section: Section, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    fetches, held = _shown(recording.fetches, section), _shown(recording.held, section)
    slots = sorted({each.slot for each in (*fetches, *held)})
    figure = Figure(figsize=(13, 4.6 + min(len(slots), 48) * 0.14), layout="constrained")
    FigureCanvasAgg(figure)
    loop, fill, ring = figure.subplots(3, 1, sharex=True, height_ratios=[0.7, 1.5, 1.2 + min(len(slots), 48) * 0.14])
    _bars(loop, [(section.begin_seconds, section.end_seconds)], 0.0, _TRAINING)
    _spans(loop, _waits(recording, section), 0.0)
    loop.set(yticks=[], ylim=(-0.5, 0.5), title="training loop: what it waits for")
    moments, filling, ready = ring_fill(recording)
    fill.stackplot(moments, ready, filling, step="post", colors=[_READY, COLOURS[Phase.TRANSFER]])
    fill.legend(["ready", "filling"], loc="upper right", fontsize=8, ncols=2, frameon=False)
    fill.set(ylabel="slots", ylim=(0, max(1, int((filling + ready).max(initial=1))) * 1.25), title="fill of the ring")
    for row, slot in enumerate(slots):
        _bars(ring, [(each.begin_seconds, each.end_seconds) for each in held if each.slot == slot], row, _READY)
        _spans(ring, [span for each in fetches if each.slot == slot for span in each.spans], row)
    ring.set(ylim=(len(slots) - 0.4, -0.6), ylabel="slot", xlabel="seconds since the trace began")
    ring.set_yticks(range(0, len(slots), 1 + len(slots) // 16), [str(slot) for slot in slots[:: 1 + len(slots) // 16]])
    ring.set_title("fetches: how a slot is filled, and how long it is held")
    ring.set_xlim(section.begin_seconds, section.end_seconds)
    for axes in (loop, fill, ring):
        axes.title.set(fontsize=9, ha="left", position=(0.0, 1.0))
        axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=COLOURS[phase], label=str(phase)) for phase in _phases(recording, section)]
    patches += [Patch(color=_READY, label="ready"), Patch(color=_TRAINING, label="training")]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _bars(axes: Any, times: Sequence[tuple[float, float]], row: float, colour: str) -> None:
    axes.broken_barh([(begin, end - begin) for begin, end in times], (row - 0.4, 0.8), facecolors=colour)


def _spans(axes: Any, spans: Sequence[Span], row: float) -> None:
    pieces = [(span.begin_seconds, span.seconds) for span in spans]
    axes.broken_barh(pieces, (row - 0.4, 0.8), facecolors=[COLOURS[span.phase] for span in spans])


def _draw_html(recording: Recording, path: Path, section: Section, title: str) -> None:
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    titles = ["training loop: what it waits for", "fill of the ring", "fetches, by slot"]
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, row_heights=[0.15, 0.3, 0.55], subplot_titles=titles)
    moments, filling, ready = ring_fill(recording)
    for name, counts, colour in (("ready", ready, _READY), ("filling", filling, COLOURS[Phase.TRANSFER])):
        line = {"shape": "hv", "color": colour}
        area = graph_objects.Scatter(x=moments, y=counts, name=name, stackgroup="ring", line=line)
        figure.add_trace(area, row=2, col=1)
    held = [Span(Phase.OTHER, each.begin_seconds, each.end_seconds) for each in _shown(recording.held, section)]
    slots = [f"slot {each.slot}" for each in _shown(recording.held, section)]
    figure.add_trace(_timeline(graph_objects, held, slots, "held", _READY), row=3, col=1)
    waits = _waits(recording, section)
    filled = [(each.slot, span) for each in _shown(recording.fetches, section) for span in each.spans]
    for phase in _phases(recording, section):
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
