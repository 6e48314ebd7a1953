"""Summarizes a trace and draws a section of it.

The summary's memory does not grow with the trace. The picture shows a section of the trace over time: the training
loop's waits, the fill of the ring, and the contents of every slot.
"""

from __future__ import annotations

import heapq
import html
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker._base.fetch_record import Phase, Span
from stoker._base.plugins import require_extra
from stoker._base.recorder import WORST_WAITS, Wait
from stoker._trace.quantiles import Quantiles
from stoker._trace.recording import (
    ProcessName,
    Recording,
    SlotFill,
    SlotHold,
    TracedCopy,
    TracedResponse,
    TraceEvent,
    Truncated,
)
from stoker.errors import ConfigError


class TraceSummary:
    """Summary of a trace.

    Args:
        max_worst: maximum number of longest waits to keep.

    Attributes:
        names: process number → name of the process.
        batches: number of batches.
        waited_seconds: time that all processes together waited for batches, in seconds.
        phases: phase → seconds waited, and number of batches that had such a wait.
        fetches: number of fetches into the ring.
        first_bytes: quantiles of the time to the first byte, in seconds.
        rates: quantiles of the rate of complete transfers, in bytes per second.
        requests: number of requests.
        lost: number of requests that failed or lost to a hedge.
        is_full: whether the trace reached its size limit before the run ended.
        begin_seconds: start of the first recorded event; infinite if there is none.
        end_seconds: end of the last recorded event; minus infinity if there is none.
    """

    def __init__(self, max_worst: int = WORST_WAITS) -> None:
        self.names: dict[int, str] = {}
        self.batches = 0
        self.waited_seconds = 0.0
        self.phases: dict[Phase, tuple[float, int]] = {}
        self.fetches = 0
        self.first_bytes, self.rates = Quantiles(), Quantiles()
        self.requests = self.lost = 0
        self.is_full = False
        self.begin_seconds, self.end_seconds = math.inf, -math.inf
        self._max_worst = max_worst
        self._worst: list[tuple[float, int, int, Wait]] = []
        self._order = count(0, -1)

    @classmethod
    def of(cls, events: Iterable[TraceEvent], max_worst: int = WORST_WAITS) -> TraceSummary:
        """Return the summary of a trace."""
        summary = cls(max_worst)
        for process, event in events:
            match event:
                case Wait():
                    summary._add_wait(process, event)
                case SlotFill():
                    summary.fetches += 1
                    summary._extend_range(event.begin_seconds, event.end_seconds)
                case SlotHold():
                    summary._extend_range(event.begin_seconds, event.end_seconds)
                case TracedResponse():
                    summary._add_response(event)
                case ProcessName():
                    summary.names[process] = event.name
                case Truncated():
                    summary.is_full = True
        return summary

    @property
    def seconds(self) -> float:
        """Time from the first recorded event to the last, in seconds."""
        return max(0.0, self.end_seconds - self.begin_seconds)

    def worst(self) -> list[tuple[int, Wait]]:
        """Return the longest waits that are not 0 with their processes, the longest first."""
        return [(process, wait) for seconds, _, process, wait in sorted(self._worst, reverse=True) if seconds]

    def _add_wait(self, process: int, wait: Wait) -> None:
        seconds = wait.seconds
        self.batches += 1
        self.waited_seconds += seconds
        for phase in {span.phase for span in wait.spans if span.seconds}:
            before, batches = self.phases.get(phase, (0.0, 0))
            mine = sum(span.seconds for span in wait.spans if span.phase is phase)
            self.phases[phase] = before + mine, batches + 1
        self._extend_range(wait.spans[0].begin_seconds, wait.spans[-1].end_seconds)
        entry = seconds, next(self._order), process, wait
        if len(self._worst) < self._max_worst:
            heapq.heappush(self._worst, entry)
        else:
            heapq.heappushpop(self._worst, entry)

    def _add_response(self, answer: TracedResponse) -> None:
        self.requests += 1
        self.lost += not answer.is_whole
        if answer.is_begun:
            self.first_bytes.add(answer.first_byte_seconds)
        if answer.is_whole and answer.transfer_seconds:
            self.rates.add(answer.size_bytes / answer.transfer_seconds)

    def _extend_range(self, begin_seconds: float, end_seconds: float) -> None:
        self.begin_seconds = min(self.begin_seconds, begin_seconds)
        self.end_seconds = max(self.end_seconds, end_seconds)


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
"""Colours of the phases, chosen so that phases that are often adjacent differ most."""
_READY, _FILLING, _TRAINING, _COPY = "#cfe3d4", "#9db4c0", "#ececec", "#c2185b"
_READY_NAME, _FILLING_NAME, _TRAINING_NAME, _COPY_NAME = "ready, or in use", "filling", "training", "copy to the device"
_LOOP_TITLE = "training loop: what it waits for"
_FILL_TITLE = "fill of the ring"
_SLOTS_TITLE = "fetches: how a slot is filled, and how long it is held"
_TIME_TITLE = "seconds since the trace began"
_BOX_HEIGHT = 0.8
_FILL_HEADROOM = 1.25
_MAX_FETCHES, _MAX_BATCHES = 500, 5_000
"""Default maximum of fetches and batches in a picture; more would be too narrow to distinguish."""
_MAX_DRAWN = 20_000
"""Maximum number of waits, fetches and slots in use to draw, all of which are held in memory."""
_ROUNDED_SECONDS = 1e-6
_MAX_LABELS = 3


@dataclass(frozen=True, slots=True)
class TraceSection:
    """A section of a trace to draw, from ``begin_seconds`` to ``end_seconds`` since the trace began."""

    begin_seconds: float
    end_seconds: float

    @classmethod
    def of(cls, summary: TraceSummary, begin_seconds: float | None, seconds: float | None) -> TraceSection:
        """Return the requested section; by default the whole trace or, if it is long, the part around its longest wait.

        Raises:
            ConfigError: the trace or the section is empty.
        """
        if not summary.batches and not summary.fetches:
            raise ConfigError("the trace has no waits or fetches to draw")
        first, last = summary.begin_seconds, summary.end_seconds
        if seconds is None:
            fetches, batches = max(1, summary.fetches), max(1, summary.batches)
            share = min(1.0, _MAX_FETCHES / fetches, _MAX_BATCHES / batches)
            seconds = (last - first) * share
            if begin_seconds is None and share < 1.0 and (worst := summary.worst()):
                begin_seconds = max(first, worst[0][1].spans[0].begin_seconds - seconds / 4)
        begin_seconds = first if begin_seconds is None else begin_seconds
        if not seconds > 0 or not begin_seconds < last:
            raise ConfigError(f"the trace is from second {first:.3f} to {last:.3f}: name a section of it")
        return cls(begin_seconds, min(last, begin_seconds + seconds))

    def overlaps(self, begin_seconds: float, end_seconds: float) -> bool:
        """Return whether an interval overlaps the section."""
        return end_seconds > self.begin_seconds and begin_seconds < self.end_seconds

    def select(self, events: Iterable[TraceEvent]) -> Recording:
        """Return one process's events that overlap the section; slots that were never released are held to its end.

        Raises:
            ConfigError: there are too many events to draw.
        """
        recording = Recording.of(islice((each for each in events if self._includes(each.event)), _MAX_DRAWN + 1))
        if len(recording.waits) + len(recording.fetches) + len(recording.held) > _MAX_DRAWN:
            raise ConfigError(
                f"seconds {self.begin_seconds:.3f} to {self.end_seconds:.3f} have more than the {_MAX_DRAWN:,} waits "
                "and fetches that a picture can show: name fewer with --seconds"
            )
        recording.held += _unreleased_holds(recording, self.end_seconds)
        return recording

    def _includes(self, event: object) -> bool:
        match event:
            case Wait():
                return self.overlaps(event.spans[0].begin_seconds, event.spans[-1].end_seconds)
            case SlotFill() | SlotHold() | TracedCopy():
                return self.overlaps(event.begin_seconds, event.end_seconds)
        return False


def _unreleased_holds(recording: Recording, end_seconds: float) -> list[SlotHold]:
    """Return the intervals in which fetched items without a release event were held: until the slot's next fetch."""
    released = {(each.slot, round(each.begin_seconds / _ROUNDED_SECONDS)) for each in recording.held}
    until: dict[int, float] = {}
    held: list[SlotHold] = []
    for each in sorted(recording.fetches, key=lambda each: -each.begin_seconds):
        moment = round(each.end_seconds / _ROUNDED_SECONDS)
        if not any((each.slot, moment + off) in released for off in (-1, 0, 1)):
            held.append(SlotHold(each.slot, each.end_seconds, until.get(each.slot, end_seconds)))
        until[each.slot] = each.begin_seconds
    return [each for each in held if each.end_seconds > each.begin_seconds]


def ring_fill(recording: Recording) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the times at which the ring's fill changed, and the numbers of filling and ready slots after each."""
    changes: list[tuple[float, int, int]] = []
    for filled in recording.fetches:
        changes += (filled.begin_seconds, 1, 0), (filled.end_seconds, -1, 0)
    for held in recording.held:
        changes += (held.begin_seconds, 0, 1), (held.end_seconds, 0, -1)
    changes.sort()
    moments = np.array([change[0] for change in changes], np.float64)
    counts = np.cumsum(np.array([change[1:] for change in changes], np.int64).reshape(-1, 2), axis=0)
    return moments, counts[:, 0], counts[:, 1]


def draw_trace(recording: Recording, path: Path, section: TraceSection, title: str) -> None:
    """Draw a section of a trace into a ``.png`` (matplotlib) or an ``.html`` page that needs no network (plotly).

    Raises:
        ConfigError: the path has another suffix, or the file cannot be written to.
        MissingExtraError: matplotlib or plotly is not installed.
    """
    suffix = path.suffix.lower()
    if suffix not in (".png", ".html"):
        raise ConfigError(f"a picture must be a .png or an .html file, not {path}")
    try:
        with require_extra("drawing", "plan"):
            if suffix == ".png":
                _draw_png(recording, path, section, title)
            else:
                path.write_text(html_page(html_figure(recording, section, title), title), "utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written to: {error.strerror}; name another file") from None


@dataclass(frozen=True, slots=True)
class _Layer:
    """Intervals of one colour, drawn as boxes on rows.

    Attributes:
        name: name in the legend.
        colour: colour of all boxes.
        boxes: start and end in seconds, row, and the object's name or an empty string.
    """

    name: str
    colour: str
    boxes: Sequence[tuple[float, float, int, str]]


def _loop_layers(recording: Recording, section: TraceSection) -> list[_Layer]:
    """Return the layers of the training loop, lowest first: training, the waits on top of it, and copies in row -1."""
    spans = [(0, span) for wait in recording.waits for span in wait.spans]
    training = _Layer(_TRAINING_NAME, _TRAINING, [(section.begin_seconds, section.end_seconds, 0, "")])
    copies = [(each.begin_seconds, each.end_seconds, -1, "") for each in recording.copies]
    return [training, *_by_phase(spans), *([_Layer(_COPY_NAME, _COPY, copies)] if copies else [])]


def _slot_layers(recording: Recording, slots: Sequence[int]) -> list[_Layer]:
    """Return the layers of the slots, lowest first: held, then phases of fetches; rows are indices into ``slots``."""
    row_of = {slot: row for row, slot in enumerate(slots)}
    held = [(each.begin_seconds, each.end_seconds, row_of[each.slot], "") for each in recording.held]
    spans = [(row_of[each.slot], span) for each in recording.fetches for span in each.spans]
    return [_Layer(_READY_NAME, _READY, held), *_by_phase(spans)]


def _by_phase(spans: Sequence[tuple[int, Span]]) -> Iterator[_Layer]:
    for phase, colour in COLOURS.items():
        boxes = [
            (span.begin_seconds, span.end_seconds, row, span.object or "")
            for row, span in spans
            if span.phase is phase and span.seconds
        ]
        if boxes:
            yield _Layer(str(phase), colour, boxes)


def _slots(recording: Recording) -> list[int]:
    return sorted({each.slot for each in recording.fetches} | {each.slot for each in recording.held})


def _labels(recording: Recording, section: TraceSection) -> Iterator[tuple[float, str]]:
    """Yield time and text of the labels of the longest waits, which do not overlap."""
    width, labelled = section.end_seconds - section.begin_seconds, list[float]()
    for wait in heapq.nlargest(_MAX_LABELS, recording.waits, key=lambda wait: wait.seconds):
        middle = (max(section.begin_seconds, wait.spans[0].begin_seconds) + wait.spans[-1].end_seconds) / 2
        at = min(max(middle, section.begin_seconds + 0.06 * width), section.end_seconds - 0.06 * width)
        if wait.seconds and all(abs(at - other) > 0.12 * width for other in labelled):
            labelled.append(at)
            (phase, _), _ = next(iter(wait.by_cause().items()))
            yield at, f"batch {wait.batch}: {wait.seconds:.3f} s {phase}"


def _draw_png(recording: Recording, path: Path, section: TraceSection, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    slots = _slots(recording)
    ring_height = 1.2 + min(len(slots), 48) * 0.14
    figure = Figure(figsize=(13, 3.7 + ring_height), layout="constrained")
    FigureCanvasAgg(figure)
    loop, fill, ring = figure.subplots(3, 1, sharex=True, height_ratios=[1.0, 1.5, ring_height])
    loop_layers = _loop_layers(recording, section)
    slot_layers = _slot_layers(recording, slots)
    _draw_boxes(loop, loop_layers)
    for at, text in _labels(recording, section):
        loop.text(at, 0.46, text, fontsize=7.5, ha="center", va="bottom")
    loop.set(yticks=[], ylim=(-1.5 if recording.copies else -0.5, 0.8), title=_LOOP_TITLE)
    _draw_fill(fill, recording)
    _draw_boxes(ring, slot_layers)
    ring.set(ylim=(len(slots) - 0.4, -0.6), ylabel="slot", xlabel=_TIME_TITLE, title=_SLOTS_TITLE)
    every = 1 + len(slots) // 16
    ring.set_yticks(range(0, len(slots), every), [str(slot) for slot in slots[::every]])
    ring.set_xlim(section.begin_seconds, section.end_seconds)
    for axes in (loop, fill, ring):
        axes.title.set(fontsize=9, ha="left", position=(0.0, 1.0))
        axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=colour, label=name) for name, colour in _legend(*loop_layers, *slot_layers).items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, parse_math=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _legend(*layers: _Layer) -> dict[str, str]:
    """Return the colour of each name, in the order of the legend: phases first."""
    colours = {layer.name: layer.colour for layer in layers}
    last = [name for name in (_READY_NAME, _TRAINING_NAME, _COPY_NAME) if name in colours]
    phases = [str(phase) for phase in COLOURS if str(phase) in colours]
    return {name: colours[name] for name in (*phases, *last)}


def _draw_fill(axes: Any, recording: Recording) -> None:
    moments, filling, ready = ring_fill(recording)
    axes.stackplot(moments, ready, filling, step="post", colors=[_READY, _FILLING])
    axes.legend([_READY_NAME, _FILLING_NAME], loc="upper right", fontsize=8, ncols=2, frameon=False)
    axes.set(ylabel="slots", ylim=(0, int((filling + ready).max(initial=1)) * _FILL_HEADROOM), title=_FILL_TITLE)
    axes.yaxis.get_major_locator().set_params(integer=True)


def _draw_boxes(axes: Any, layers: Sequence[_Layer]) -> None:
    """Draw each layer as one collection."""
    from matplotlib.collections import PolyCollection

    half = _BOX_HEIGHT / 2
    for layer in layers:
        times = np.array([box[:2] for box in layer.boxes], np.float64).reshape(-1, 2)[:, [0, 0, 1, 1]]
        rows = np.array([box[2] for box in layer.boxes], np.float64)[:, None] + [-half, half, half, -half]
        corners = np.stack([times, rows], axis=-1)
        axes.add_collection(PolyCollection(list(corners), facecolors=layer.colour, edgecolors="none"))


def html_figure(recording: Recording, section: TraceSection, title: str) -> Any:
    """Return the plotly figure of a page, with the layout, names and colours of the PNG picture."""
    from plotly.subplots import make_subplots

    slots = _slots(recording)
    titles, heights = [_LOOP_TITLE, _FILL_TITLE, _SLOTS_TITLE], [0.13, 0.27, 0.6]
    figure = make_subplots(
        rows=3, cols=1, shared_xaxes=True, row_heights=heights, subplot_titles=titles, vertical_spacing=0.06
    )
    loop_layers = _loop_layers(recording, section)
    slot_layers = _slot_layers(recording, slots)
    in_legend = _legend(*loop_layers, *slot_layers)
    for row, layers in ((1, loop_layers), (3, slot_layers)):
        for layer in layers:
            rank = list(in_legend).index(layer.name)
            is_first = row == 1 or layer.name not in {other.name for other in loop_layers}
            figure.add_trace(_bars(layer, legendrank=rank, showlegend=is_first), row=row, col=1)
    largest = _add_fill(figure, recording)
    for at, text in _labels(recording, section):
        figure.add_annotation(
            x=at, y=0.42, text=text, yanchor="bottom", showarrow=False, font={"size": 11}, row=1, col=1
        )
    bottom = -1.5 if recording.copies else -0.5
    figure.update_yaxes(range=[bottom, 1.2], showticklabels=False, fixedrange=True, row=1, col=1)
    figure.update_yaxes(title_text="slots", range=[0, largest * _FILL_HEADROOM], fixedrange=True, row=2, col=1)
    ticks = {"tickvals": list(range(len(slots))), "ticktext": [str(slot) for slot in slots]} if len(slots) <= 48 else {}
    figure.update_yaxes(title_text="slot", range=[len(slots) - 0.4, -0.6], row=3, col=1, **ticks)
    figure.update_xaxes(range=[section.begin_seconds, section.end_seconds])
    figure.update_xaxes(title_text=_TIME_TITLE, row=3, col=1)
    figure.update_annotations(xanchor="left", x=0, selector=lambda each: each.text in titles)
    figure.update_layout(title=title, template="plotly_white", barmode="overlay", bargap=0.2, height=900)
    return figure


def _add_fill(figure: Any, recording: Recording) -> int:
    """Add the ring's fill, and return its maximum."""
    from plotly import graph_objects

    moments, filling, ready = ring_fill(recording)
    for name, counts, colour in ((_READY_NAME, ready, _READY), (_FILLING_NAME, filling, _FILLING)):
        area = graph_objects.Scatter(
            x=moments,
            y=counts,
            name=name,
            stackgroup="ring",
            line={"shape": "hv", "color": colour, "width": 0},
            fillcolor=colour,
            legendrank=len(COLOURS) + 3,
            showlegend=name == _FILLING_NAME,
        )
        figure.add_trace(area, row=2, col=1)
    return int((filling + ready).max(initial=1))


def _bars(layer: _Layer, *, legendrank: int, showlegend: bool) -> Any:
    """Return a layer's boxes as a bar trace.

    Their opacity is slightly below 1: plotly widens opaque bars to a whole pixel each, and thousands of short waits
    would look like one long wait.
    """
    from plotly import graph_objects

    begin, end, rows, names = zip(*layer.boxes, strict=True) if layer.boxes else ((), (), (), ())
    seconds = np.array(end) - np.array(begin)
    red, green, blue = (int(layer.colour[at : at + 2], 16) for at in (1, 3, 5))
    return graph_objects.Bar(
        base=begin,
        x=seconds,
        y=rows,
        width=_BOX_HEIGHT,
        orientation="h",
        name=layer.name,
        legendgroup=layer.name,
        legendrank=legendrank,
        showlegend=showlegend,
        marker={"color": f"rgba({red},{green},{blue},0.999)", "line": {"width": 0}},
        customdata=list(zip(seconds.tolist(), names, strict=True)),
        hovertemplate="%{customdata[0]:.4f} s %{customdata[1]}<extra>" + layer.name + "</extra>",
    )


_BUNDLE = "plotly-basic.min.js"
"""plotly.js with scatter, bar and pie traces only: a quarter of what the Python package would write into each page."""


def html_page(figure: Any, title: str) -> str:
    """Return an HTML page with a plotly figure of bars and lines, and the script that it needs.

    Args:
        figure: ``plotly.graph_objects.Figure`` to show.
        title: title of the page, as plain text.
    """
    script = resources.files("stoker._trace").joinpath(_BUNDLE).read_text("utf-8")
    body = figure.to_html(include_plotlyjs=False, full_html=False, default_width="100%")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f"<script>{script}</script></head>\n<body>\n{body}\n</body>\n</html>\n"
    )
