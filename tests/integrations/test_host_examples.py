"""Examples of the hosts' own documentation, as they are: only the model, and the most tokens of an answer, are ours."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from tests.integrations.test_page import register_llm_plugin

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cbatch.engine import Engine

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]  # those of hosts

SHORT = {"temperature": 0, "max_tokens": 200, "logit_bias": {263: 6.0, 322: 12.0}}
"""The small model, asked for what it does not know, would repeat itself: the biases, for `"` and `]`, end strings and
lists, whatever the rounding."""


@pytest.fixture(scope="module")
def engine(test_model: Path) -> Iterator[Engine]:
    with cbatch.load(test_model, parallel=4, ctx_per_seq=1024, options=SHORT) as made:
        yield made


def run(source: str, **names: Any) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__main__", **names}
    exec(compile(source, "<example>", "exec", dont_inherit=True), namespace)
    return namespace


OUTLINES = """
from typing import Literal
from pydantic import BaseModel


# Simple classification
sentiment = model(
    "Analyze: 'This product completely changed my life!'",
    Literal["Positive", "Negative", "Neutral"]
)
print(sentiment)  # "Positive"

# Extract specific types
temperature = model("What's the boiling point of water in Celsius?", int)
print(temperature)  # 100

from pydantic import BaseModel
from enum import Enum

class Rating(Enum):
    poor = 1
    fair = 2
    good = 3
    excellent = 4

class ProductReview(BaseModel):
    rating: Rating
    pros: list[str]
    cons: list[str]
    summary: str

review = model(
    "Review: The XPS 13 has great battery life and a stunning display, but it runs hot and the webcam is poor quality.",
    ProductReview,
    max_tokens=600,
)

review = ProductReview.model_validate_json(review)
print(f"Rating: {review.rating.name}")  # "Rating: good"
print(f"Pros: {review.pros}")           # "Pros: ['great battery life', 'stunning display']"
print(f"Summary: {review.summary}")     # "Summary: Good laptop with great display but thermal issues"
"""
"""Source: outlines 1.3, README, "Quickstart"; `max_new_tokens` is an argument of transformers."""


def test_quickstart_of_outlines(engine: Engine) -> None:
    pytest.importorskip("outlines", reason="outlines is not installed")
    from cbatch.integrations.outlines import Cbatch

    found = run(OUTLINES, model=Cbatch(engine))
    assert found["sentiment"] in ("Positive", "Negative", "Neutral")
    int(found["temperature"])
    assert found["review"].rating.name in ("poor", "fair", "good", "excellent")


LANGCHAIN = """
from pydantic import BaseModel


class AnswerWithJustification(BaseModel):
    '''An answer to the user question along with justification for the answer.'''

    answer: str
    justification: str


model = ChatModel(model="model-name", temperature=0)
structured_model = model.with_structured_output(
    AnswerWithJustification, include_raw=True
)

answer = structured_model.invoke(
    "What weighs more a pound of bricks or a pound of feathers"
)
"""
"""Source: langchain-core 1.8, the docstring of `BaseChatModel.with_structured_output`."""

CHAIN = """
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

prompt = ChatPromptTemplate.from_template("tell me a joke about {topic}")
chain = prompt | model | StrOutputParser()
jokes = chain.batch([{"topic": "bears"}, {"topic": "cats"}])
for chunk in chain.stream({"topic": "parrot"}):
    print(chunk, end="|", flush=True)
"""
"""Source: LangChain's documentation of LCEL."""


def test_structured_output_and_chain_of_langchain(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("langchain_core", reason="langchain-core is not installed")
    from cbatch.integrations.langchain import ChatCbatch

    def chat_model(model: str, **options: Any) -> ChatCbatch:
        return ChatCbatch(engine=engine, max_tokens=600, **options)

    answer = run(LANGCHAIN, ChatModel=chat_model)["answer"]
    assert answer["parsed"].justification == answer["parsed"].justification
    found = run(CHAIN, model=ChatCbatch(engine=engine))
    assert len(found["jokes"]) == 2
    assert all(isinstance(joke, str) for joke in found["jokes"])
    assert "|" in capsys.readouterr().out


LLM = """
import llm

model = llm.get_model("cbatch")
response = model.prompt("Five surprising names for a pet pelican", max_tokens=60, temperature=0)
print(response.text())

conversation = model.conversation()
response = conversation.prompt("Five fun facts about pelicans", max_tokens=60, temperature=0)
print(response.text())
response2 = conversation.prompt("Now do skunks", max_tokens=60, temperature=0)
print(response2.text())

for chunk in model.prompt("Five diabolical names for a pet goat", max_tokens=60, temperature=0):
    print(chunk, end="")


def upper(text: str) -> str:
    '''Convert text to uppercase.'''
    return text.upper()


chain = model.chain(
    "Convert panda to upper", tools=[upper], options={"max_tokens": 100, "temperature": 0}
)
print(chain.text())
"""
"""Source: llm 0.36, docs/python-api.md."""


def test_python_api_of_llm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llm", reason="llm is not installed")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    register_llm_plugin()
    found = run(LLM)
    assert len(found["conversation"].responses) == 2
    assert found["response"].text() in capsys.readouterr().out


INSPECT = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import exact
from inspect_ai.solver import generate

@task
def hello_world():
    return Task(
        dataset=[
            Sample(
                input="Just reply with Hello World",
                target="Hello World",
            )
        ],
        solver=[generate()],
        scorer=exact(),
    )
"""
"""Source: inspect_ai's documentation, "Hello World"."""


def test_hello_world_of_inspect(tmp_path: Path) -> None:
    pytest.importorskip("inspect_ai", reason="inspect_ai is not installed")
    from inspect_ai import eval as evaluate

    import_module("cbatch.integrations.inspect")  # as the entry point of an installed package does
    task = run(INSPECT)["hello_world"]()
    [log] = evaluate(
        task, model="cbatch/shipped", max_tokens=20, display="none", log_dir=str(tmp_path)
    )
    assert log.status == "success"
    assert log.samples is not None
    assert len(log.samples) == 1


DAFT = """
import daft
from daft.functions.ai import prompt
# Create a dataframe with the quotes
df = daft.from_pydict(
    {
        "quote": [
            "I am going to be the king of the pirates!",
            "I'm going to be the next Hokage!",
        ],
    }
)
# Use the prompt function to classify the quotes
df = df.with_column(
    "response",
    prompt(
        daft.col("quote"),
        system_message="Classify the anime from the quote and return the show, character name, and explanation.",
        provider=provider,
        model=path,
        max_tokens=60,
    ),
)
df.show(format="fancy", max_width=120)
"""
"""Source: daft 0.7, the docstring of `daft.functions.prompt`."""


def test_prompt_of_daft(test_model: Path) -> None:
    pytest.importorskip("daft", reason="daft is not installed")
    from cbatch.integrations.daft import CbatchProvider

    found = run(DAFT, provider=CbatchProvider(parallel=4), path=str(test_model))["df"].to_pydict()
    assert [*found] == ["quote", "response"]
    assert all(isinstance(said, str) for said in found["response"])
