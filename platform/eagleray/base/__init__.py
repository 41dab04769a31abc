"""Small helpers that every other room needs: errors, files, the process group, random numbers, the console.

Plain values go in and come out; nothing here knows what a run, a recipe or an image is.

May import: nothing of eagleray.
"""
