"""Runs on Ray: workers, submitted jobs, parallel maps and gauges for Prometheus.

A recipe or tasks and a cluster go in; a finished run, results or a job's state come out.

May import: base, config, data, engine, runs, storage."""
