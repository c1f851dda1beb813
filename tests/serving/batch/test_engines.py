"""The programs of docs/batch-scoring.md for a real local Ray and a real local Spark give the scores of the command."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from serving.batch.run import score_files
from serving.batch.sources import BundleSource
from tests.support.day import partitioned_day, write_day

PAGE = (Path(__file__).parents[3] / "docs" / "batch-scoring.md").read_text()
# Ray takes the CPUs that it is told of; two scorers and what reads files need three.
RAY = 'import ray\nray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1")\n'
ON_LOOPBACK = {"RAY_USAGE_STATS_ENABLED": "0", "SPARK_LOCAL_IP": "127.0.0.1"}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Ray and Spark."""
    folder = tmp_path_factory.mktemp("engines")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target"]
    command = [*install, str(folder), "--requirement", str(Path(__file__).with_name("engines.txt"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.long
@pytest.mark.parametrize(("engine", "before"), [("ray", RAY), ("spark", "")], ids=["ray", "spark"])
def test_the_scores_of_an_engine_are_those_of_the_command(
    engine: str, before: str, engines: Path, bundle: Path, day: Path, tmp_path: Path
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (program,) = (block for block in blocks if f"{engine}_scores" in block)
    program = before + program.replace("/models/ranker/1", str(bundle))
    environment = ON_LOOPBACK | {
        "PYTHONPATH": f"{engines}{os.pathsep}{Path(__file__).parents[3]}",
        "PYSPARK_PYTHON": sys.executable,
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=day.parent,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    scores: Any = parquet.read_table(day.parent / f"{engine}_scores").sort_by("id")
    score_files(BundleSource(bundle), [str(day)], tmp_path / "scores", keep=["id"])
    expected: Any = parquet.read_table(tmp_path / "scores")
    assert scores.column_names == expected.column_names
    assert scores["id"].to_pylist() == expected["id"].to_pylist()
    for name in ("like", "both"):
        numbers, right = (np.array(table[name].to_pylist()) for table in (scores, expected))
        np.testing.assert_allclose(numbers, right, rtol=1e-6, atol=1e-6)


READ_BACK = """
import sys
from pyspark.sql import SparkSession

rows = SparkSession.builder.getOrCreate().read.parquet(sys.argv[1]).orderBy("id").collect()
print([(row.id, str(row.day), row.country) for row in rows])
"""


@pytest.mark.long
def test_spark_reads_the_columns_of_folders(engines: Path, bundle: Path, tmp_path: Path) -> None:
    """Text with signs that are escaped and letters that are not, and nulls."""
    day, columns = write_day(tmp_path / "day.parquet", partitioned_day(200)), ["day", "country"]
    score_files(BundleSource(bundle), [str(day)], tmp_path / "scores", keep=["id", *columns], partition_by=columns)
    environment = os.environ | ON_LOOPBACK | {"PYTHONPATH": str(engines), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", READ_BACK, str(tmp_path / "scores")]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    rows = partitioned_day(200).select(["id", *columns]).to_pylist()
    assert ast.literal_eval(done.stdout) == [(row["id"], str(row["day"]), row["country"]) for row in rows]
