"""The colours and the resolution of all plots."""

INK, BLUE, GREY, LIGHT, RED = "#222222", "#3b6ea5", "#8c8c8c", "#dcdcd8", "#b3261e"
DPI = 110  # dots per inch, for screens
