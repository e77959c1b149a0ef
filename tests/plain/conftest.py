"""Hypothesis without deadlines: how long an example takes says how busy the machine is."""

from hypothesis import settings

settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")
