"""Runs, evaluations and sweeps become one HTML page.

Run folders go in; a page that needs nothing else comes out.

May import: base, config, evaluation, runs, storage, sweeps.
"""
