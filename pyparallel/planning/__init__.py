"""Planning before training: what runs and schedules take, and what shortens steps."""

from . import pipelines, recommend, simulate

__all__ = ["pipelines", "recommend", "simulate"]
