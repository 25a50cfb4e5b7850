"""Metrics, alerts, the divergence guard, the watchdog, progress and trackers."""
