"""Show what each cut leaves out of a data set, in numbers and with random images. A cut is an expression on columns."""

from collections.abc import Sequence

from eagleray.curation.cuts import Cut
from eagleray.data.index import Index
from eagleray.reports.data_plots import images_uri
from eagleray.reports.draw_choice import ACROSS, images_of, some_of
from eagleray.reports.page import Picture, Pictures, Section, Table


def left_out(index: Index, cuts: Sequence[Cut]) -> Section:
    """Return a section on what each of the `cuts` leaves out. An image counts for the first cut that leaves it out."""
    rows = [[c.name, c.where, int(c.out.sum()), 100 * float(c.out.mean()), "" if c.made else "not made"] for c in cuts]
    pictures = []
    for cut in cuts:
        if images := [image for _, image in images_of(index, some_of(cut.out))]:
            said = f"{cut.name}: not {cut.where}"
            pictures.append(Picture(images_uri(images, ACROSS), f"Images that are {cut.name}", said))
    table = Table("What each cut leaves out", ["Cut", "Keeps", "Images", "%", ""], rows)
    return Section("Left out", [table, Pictures(pictures)], ["An image counts for the first cut that leaves it out."])
