"""Small helpers that every other room needs: errors, files, the process group, random numbers, the console.

Plain values go in and come out; nothing here depends on runs, recipes or images.

May import: nothing of eagleray.
"""
