"""Property tests run the same examples every time, and may be slow on their first."""

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("repeatable")
