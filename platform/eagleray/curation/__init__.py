"""Finds clusters and near copies among the features of a data set.

An embedding and the index of its data go in; columns beside the shards come out, which `data.train.where` reads.

May import: base, cluster, data, engine, evaluation, storage."""
