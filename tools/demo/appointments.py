"""Appointments: the working walks from the day of the message to the day meant and adds the duration to the start."""

from datetime import date, timedelta
from typing import Any

from tools.demo import lexicon
from tools.demo.draw import Draw, DrawnExample

MODES = {
    "in person": ["at the office", "on site", "in person", "at our place"],
    "phone": ["by phone", "over the phone", "as a phone call"],
    "video": ["by video", "on a video call", "online"],
}

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"const": "appointment"},
        "subject": {"type": "string"},
        "person": {"type": "string"},
        "mode": {"enum": list(MODES)},
        "date": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
        "start": {"type": "string", "pattern": "^[0-9]{2}:[0-9]{2}$"},
        "minutes": {"type": "integer"},
        "end": {"type": "string", "pattern": "^[0-9]{2}:[0-9]{2}$"},
    },
    "required": ["kind", "subject", "person", "mode", "date", "start", "minutes", "end"],
    "additionalProperties": False,
}

DURATIONS = {
    "a quarter of an hour": 15,
    "20 minutes": 20,
    "25 minutes": 25,
    "half an hour": 30,
    "30 minutes": 30,
    "40 minutes": 40,
    "45 minutes": 45,
    "three quarters of an hour": 45,
    "50 minutes": 50,
    "an hour": 60,
    "one hour": 60,
    "75 minutes": 75,
    "an hour and a half": 90,
    "90 minutes": 90,
    "two hours": 120,
}

_FIRST_DAY = date(2026, 1, 1)


def write(draw: Draw) -> DrawnExample:
    person, subject, mode = draw.person(), draw.choice(lexicon.SUBJECTS), draw.choice(list(MODES))
    today = _FIRST_DAY + timedelta(days=draw.number(0, 729))
    ahead = draw.number(1, 6)
    day = today + timedelta(days=ahead)
    hour, minute = draw.number(8, 17), 5 * draw.number(0, 11)
    lasting = draw.choice(list(DURATIONS))
    minutes = DURATIONS[lasting]
    later, rest = divmod(minute + minutes, 60)
    start, end = f"{hour:02}:{minute:02}", f"{hour + later:02}:{rest:02}"

    written, spoken = _clock(draw, hour, minute)
    working = [f"Today is {today:%A} {today}."]
    working += [f"{step:%A} {step}" for step in (today + timedelta(days=n) for n in range(1, ahead + 1))]
    if spoken:
        working.append(f"{written} is {start}.")
    carried = f" = {later} h {rest}" if later else ""
    working.append(f"{start} for {minutes} min: {minute} + {minutes} = {minute + minutes}{carried}, end {end}.")
    sentence = _sentence(draw, person, subject, draw.choice(MODES[mode]), _day(draw, day, ahead), written, lasting)
    return DrawnExample(
        draw.among_asides(_with_today(draw, sentence, today)),
        working,
        {
            "kind": "appointment",
            "subject": subject,
            "person": person,
            "mode": mode,
            "date": str(day),
            "start": start,
            "minutes": minutes,
            "end": end,
        },
    )


def _clock(draw: Draw, hour: int, minute: int) -> tuple[str, bool]:
    if draw.chance(0.35):
        return f"{(hour - 1) % 12 + 1}.{minute:02} {'am' if hour < 12 else 'pm'}", True
    return f"{hour:02}:{minute:02}", False


def _day(draw: Draw, day: date, ahead: int) -> str:
    if ahead == 1 and draw.chance(0.5):
        return "tomorrow"
    if ahead == 2 and draw.chance(0.3):
        return "the day after tomorrow"
    if ahead > 1 and draw.chance(0.2):
        return f"in {draw.count(ahead, True)} days"
    return f"{draw.choice(['on', 'this coming', 'next'])} {day:%A}"


def _with_today(draw: Draw, sentence: str, today: date) -> str:
    long = f"{today:%A} {today.day} {today:%B} {today.year}"
    short = f"{today:%A}, {today}"
    return draw.choice(
        [
            f"Today is {long}. {sentence}",
            f"It is {short}. {sentence}",
            f"{sentence} (Written on {long}.)",
            f"Received {short}: {sentence}",
            f"[{long}] {sentence}",
        ]
    )


def _sentence(draw: Draw, person: str, subject: str, how: str, day: str, clock: str, lasting: str) -> str:
    return draw.choice(
        [
            f"Please book the {subject} with {person} {day} at {clock} for {lasting}, {how}.",
            f"{person} can do the {subject} {day} at {clock}, {how}, and it takes {lasting}.",
            f"The {subject} with {person} is {day} from {clock} and lasts {lasting}, {how}.",
            f"{person} asked for {lasting} {how} {day} at {clock}: {subject}.",
            f"Can we have the {subject} {how} {day}? {person} has {lasting} from {clock}.",
            f"Put {person} down for the {subject} {day}, {clock}, {lasting}, {how}.",
        ]
    )
