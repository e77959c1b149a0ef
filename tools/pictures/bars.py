"""Grouped horizontal bars, each with its value at its end."""

from collections.abc import Mapping, Sequence

from tools.pictures.svg import WIDTH, box, picture, text

_LEFT, _RIGHT, _BAR, _GAP, _TOP = 92, 100, 19, 12, 74


def bars(
    title: str,
    about: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    labels: Mapping[str, Sequence[str | None]],
) -> str:
    """Draw one bar per series in each of ``groups``, with ``labels`` at their ends; None: not measured."""
    most = max(value for values in series.values() for value in values if value is not None)
    parts = [text(10, 24, title, "ink title"), text(10, 43, about, "faint small")]
    x = 10.0
    for number, name in enumerate(series):
        parts += [box(x, 52, 12, 12, f"c{number}"), text(x + 17, 63, name, "ink small")]
        x += 34 + 7.2 * len(name)
    y = float(_TOP)
    for at, group in enumerate(groups):
        begin = y
        for number, (name, values) in enumerate(series.items()):
            value, label = values[at], labels[name][at]
            if value is None:
                continue
            width = (WIDTH - _LEFT - _RIGHT) * value / most
            parts.append(box(_LEFT, y, width, _BAR - 3, f"c{number}", f"{name}, {group}: {label}"))
            parts.append(text(_LEFT + width + 5, y + 13, str(label), "ink small"))
            y += _BAR
        parts.append(text(_LEFT - 8, (begin + y) / 2 + 3, group, "ink", "end"))
        y += _GAP
    return picture(y, f"{title}. {about}", parts)
