"""Small helpers that every other room needs: errors, files, the process group, random numbers, the console.

They take and return plain values, and know nothing of runs, recipes or images.

May import: nothing of eagleray."""
