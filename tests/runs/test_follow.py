"""A run is followed from its folder."""

from eagleray.runs.follow import progress_text


def test_scores_are_shown_where_a_record_has_them():
    record = {"step": 3, "loss": 1.5, "images_per_s": 99.6, "data_wait": 0.1, "bad_samples": 2}
    assert progress_text(record) == "loss 1.500  100 images/s  data wait 10 %  bad 2"
    assert progress_text(record | {"knn/top1": 30.0}).endswith("  bad 2  kNN 30.0 %")
