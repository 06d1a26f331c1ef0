"""Settings of every test."""

from hypothesis import settings

# No test is timed: time is measured by benchmarks/, and a busy machine must not fail a property.
settings.register_profile("torchmoe", deadline=None)
settings.load_profile("torchmoe")
