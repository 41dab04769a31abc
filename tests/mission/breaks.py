"""Five planted breaks, each of which the mission must report at the right station."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
from mission.site import BUCKET, Site
from safetensors.torch import load_file, save_file


def lost_step(site: Site) -> None:
    """A line about a step is missing in the run's record."""
    name, data = max((n, d) for n, d in site.objects("runs/first").items() if n.startswith("steps.jsonl"))
    site.client().put_object(Bucket=BUCKET, Key=f"runs/first/{name}", Body=without_line(data, 100))


def without_line(data: bytes, number: int) -> bytes:
    return b"".join(line for n, line in enumerate(data.splitlines(keepends=True), 1) if n != number)


def unreadable_bucket(site: Site) -> None:
    """The server lists the bucket and hands out nothing of it."""
    site.swift("kill9", "object")


def no_tree(site: Site) -> None:
    """The trials of a sweep have lost their parent in MLflow."""
    from mlflow import MlflowClient

    client = MlflowClient()
    for run in client.search_runs([client.get_experiment_by_name("eagleray").experiment_id]):
        if "mlflow.parentRunId" in run.data.tags:
            client.delete_tag(run.info.run_id, "mlflow.parentRunId")


def refused_export(site: Site) -> None:
    """The exported file lacks a tensor that timm's model has."""
    drop_tensor(site.folder / "export" / "backbone.safetensors")


def drop_tensor(path: Path) -> None:
    tensors = load_file(path)
    tensors.pop("norm.weight")
    save_file(tensors, path)


def dropped_shard(site: Site) -> None:
    """The index has no row of the last shard."""
    index = without_last_shard(site.objects("train")["index.parquet"])
    site.client().put_object(Bucket=BUCKET, Key="train/index.parquet", Body=index)


def without_last_shard(index: bytes) -> bytes:
    file = pq.ParquetFile(io.BytesIO(index))
    kept = json.loads(file.metadata.metadata[b"shards"])[:-1]
    with pq.ParquetWriter(buffer := io.BytesIO(), file.schema_arrow) as writer:
        for group in range(len(kept)):
            writer.write_table(file.read_row_group(group))
        writer.add_key_value_metadata({"shards": json.dumps(kept)})
    return buffer.getvalue()


BREAKS: dict[str, tuple[str, bool, Callable[[Site], None]]] = {  # station, whether before it, what is done
    "lost-step": ("pretrain", False, lost_step),
    "unreadable-bucket": ("pretrain", True, unreadable_bucket),
    "no-tree": ("tune", False, no_tree),
    "refused-export": ("export", False, refused_export),
    "dropped-shard": ("shards", False, dropped_shard),
}
