"""Objects followed through videos, by nearest patches."""
