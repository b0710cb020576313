"""One hypothesis profile for everyone: the same examples everywhere, no deadline on a shared machine."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "project",
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("project")
