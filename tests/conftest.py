"""Settings for all tests: property tests are repeatable in CI and search freely on a developer's machine."""

import os

from hypothesis import HealthCheck, settings

# No deadline anywhere: machines are shared, and a slow example is not a wrong one.
settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
