"""Sky Batch: workers of a SkyPilot pool answer a file of questions, each with an engine.

sky jobs pool apply sky_batch_pool.yaml --pool cbatch -y && python sky_batch.py
"""

import sky

BUCKET = "s3://my-bucket"


@sky.batch.remote_function
def answer() -> None:
    """Answer the batches that this worker gets; a row that fails has its error."""
    import cbatch  # the function is sent to the workers alone, without the rest of this file

    options = {"temperature": 0, "max_tokens": 64}
    with cbatch.load("model.gguf", parallel=16) as engine:
        for batch in sky.batch.load():
            chats = [[{"role": "user", "content": row["question"]}] for row in batch]
            results = engine.run(chats, options=options).results(return_errors=True)
            sky.batch.save_results(
                [
                    {**row, "answer": result.text, "error": str(result.error or "")}
                    for row, result in zip(batch, results, strict=True)
                ]
            )


if __name__ == "__main__":
    data = sky.batch.Dataset(sky.batch.JsonReader(f"{BUCKET}/questions.jsonl"))
    output = sky.batch.JsonWriter(f"{BUCKET}/answers.jsonl")
    data.map(answer, pool_name="cbatch", batch_size=1024, output=output)
