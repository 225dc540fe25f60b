"""Spark: an engine in each Python worker answers a column of questions, batch by batch.

python spark.py questions.parquet answers.parquet
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np

import cbatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

N_CORES = (
    2  # of each task: Spark runs as many tasks at a time on a machine as have room on its cores
)

SPEC = cbatch.EngineSpec("model.gguf", parallel=16, n_threads=N_CORES)
OPTIONS = {"temperature": 0, "max_tokens": 64}


def make_predict() -> Callable[[NDArray[np.object_]], NDArray[np.object_]]:
    """Load the engine of this Python worker, where it stays, and return what answers a batch."""
    engine = SPEC.shared().__enter__()

    def predict(questions: NDArray[np.object_]) -> NDArray[np.object_]:
        chats = [[{"role": "user", "content": str(question)}] for question in questions]
        results = engine.run(chats, options=OPTIONS).results(return_errors=True)
        answers = [result.text if result.error is None else None for result in results]
        return np.array(answers, dtype=object)

    return predict


def main(source: str, target: str) -> None:
    """Add a column `answer` to a table with a column `question`; a row that fails has null."""
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StringType

    spark = SparkSession.builder.config("spark.task.cpus", N_CORES).getOrCreate()
    answer = predict_batch_udf(make_predict, return_type=StringType(), batch_size=512)
    table = spark.read.parquet(source).where("question is not null")
    table.withColumn("answer", answer("question")).write.mode("overwrite").parquet(target)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
