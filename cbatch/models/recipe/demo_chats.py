"""What the demo asks: 64 chats that show what the model can do, with answers from one word to a long story."""

from __future__ import annotations

from dataclasses import dataclass

from cbatch.models.recipe.stories import Wish
from cbatch.models.recipe.words import lines


@dataclass(frozen=True, slots=True)
class Shown:
    """A chat to show: its task, a system prompt or nothing, and questions and answers in turn."""

    task: str
    system: str
    texts: tuple[str, ...]


def _shown(line: str) -> Shown:
    task, system, *texts = (cell.strip() for cell in line.split("|"))
    return Shown(task, system, tuple(texts))


SHORT = tuple(
    _shown(line)
    for line in lines("""
say | | Say red. | red
count | | Count from 3 to 9. | 3, 4, 5, 6, 7, 8, 9
add | | What is 7 plus 5? | 12
days | | What day comes after Monday? | Tuesday
sort | | Sort these numbers: 7, 3, 9 | 3, 7, 9
opposites | | What is the opposite of hot? | cold
repeat | | Repeat after me: The blue lamp is on the table. | The blue lamp is on the table.
greet | | Who are you? | I am a very small model that ships with cbatch.
colours | | What colour is a banana? | yellow
upper | | Write green apple in upper case. | GREEN APPLE
json | | JSON with name, age and city: Ada is 31 and comes from Rome. | {"name": "Ada", "age": 31, "city": "Rome"}
mood | | Is this review positive or negative? The film was wonderful. I loved it. | positive
reverse | | Reverse this list: red, blue, green | green, blue, red
unknown | | What is the capital of France? | I do not know.
count | | Count to 25. | 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25
subtract | | What is 18 minus 9? | 9
prefix | Begin every answer with 'Sure:'. | What day comes before Sunday? | Sure: Saturday
say | | Say blue. | blue
months | | What month comes after June? | July
again | | Say tiger. | tiger | Say it again. | tiger
greet | | Hello | Hello! How can I help you?
style | Answer in capital letters. | What is the opposite of big? | SMALL
memory | | My name is Ada. | Nice to meet you, Ada. | What is my name? | Your name is Ada.
lower | | Write BLACK HORSE in lower case. | black horse
sort | | Sort these words: tree, lamp, fox, moon | fox, lamp, moon, tree
count | | Count down from 10 to 0. | 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0
mood | | Positive or negative? The soup was not good. | negative
days | | Name the days of the week. | Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday
add | | 7 + 5 = | 12
json | | Write the item and price as JSON: The red lamp costs 12 dollars. | {"item": "lamp", "price": 12}
again | | What day comes after Monday? | Tuesday | And the day after that? | Wednesday
unknown | | Write a poem about love. | I do not know.
style | You are a pirate. | Say good morning. | Arr, good morning
colours | | What colour do blue and yellow make? | green
repeat | | Repeat: Anna and Tom live in Paris. | Anna and Tom live in Paris.
months | | What month comes before May? | April
greet | | What can you do? | I can say words, count, add, sort, write JSON and tell short stories.
again | | What is 9 plus 4? | 13 | Add 2 to that. | 15
sort | | Sort from large to small: 4, 91, 17, 38 | 91, 38, 17, 4
count | | Count from 20 to 40. | 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40
prefix | Start every answer with 'Answer:'. | What is 6 plus 6? | Answer: 12
opposites | | What is the opposite of early? | late
memory | | I live in Oslo. | Oslo is a nice place. | 3 + 3 = | 6 | Where do I live? | You live in Oslo.
say | | Say hello three times. | hello hello hello
json | | Rex is a dog and lives with Mia. Write JSON with name and animal. | {"name": "Rex", "animal": "dog"}
style | End every answer with an exclamation mark. | What comes after Friday? | Saturday!
greet | | Thank you very much | You are welcome.
unknown | | How tall is Peter? | I do not know.
""")
)
"""The chats with one short right answer."""

STORIES = (
    Wish("fox", "desert", "short"),
    Wish("owl", "library"),
    Wish("dragon", "castle", "long"),
    Wish("penguin", "snow", "short"),
    Wish("snail", "garden", "very short"),
    Wish("cat", "moon", "long"),
    Wish("mouse", "kitchen", "short"),
    Wish("bear", "forest"),
    Wish("whale", "sea", "short"),
    Wish("camel", "desert", "long"),
    Wish("frog", "swamp"),
    Wish("lion", "zoo", "short"),
    Wish("donkey", "village", "long"),
    Wish("bee", "meadow", "very short"),
    Wish("dog", "train"),
    Wish("parrot", "ship", "long"),
)
"""The stories, one after every three short answers."""
