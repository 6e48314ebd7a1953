"""Settings of the whole suite."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Timed assertions fail on a busy machine and say nothing; the same examples every run keep a failure repeatable.
# HYPOTHESIS_PROFILE=explore draws fresh ones.
_QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("repeatable", _QUIET, derandomize=True)
settings.register_profile("explore", _QUIET, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
