"""Who and where the stories are about: heroes and stages."""

from __future__ import annotations

from dataclasses import dataclass

from cbatch.models.recipe.words import lines, split


@dataclass(frozen=True, slots=True)
class Animal:
    """A hero: its name, what it is like, where it lives, and what it does when it is needed."""

    name: str
    nature: str
    home: str
    deed: str


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage: how one is there, which plot happens there, with whom, what is found, and what one sees."""

    where: str
    plot: str
    friend: str
    thing: str
    sight: str


def _table(text: str) -> dict[str, list[str]]:
    """Return each line's first cell with the other cells; bars divide them."""
    rows = ([cell.strip() for cell in line.split("|")] for line in lines(text))
    return {first: rest for first, *rest in rows}


ANIMALS = {
    kind: Animal(*cells)
    for kind, cells in _table("""
fox | Rusty | clever | forest | thought of a good trick
cat | Mimi | quiet | garden | climbed up without a sound
dog | Bruno | loyal | farm | followed its good nose
bear | Bruin | strong | forest | pushed with all its strength
owl | Olga | wise | old tower | flew up on silent wings
mouse | Pip | tiny | kitchen | slipped through a small hole
rabbit | Hops | quick | meadow | jumped over every stone
wolf | Lupo | proud | mountain | ran through the night
lion | Simba | brave | desert | gave a mighty roar
tiger | Raja | bold | jungle | leaped higher than ever before
elephant | Tembo | gentle | jungle | lifted the heavy stones away
monkey | Koko | funny | jungle | swung from branch to branch
horse | Blaze | fast | farm | ran as fast as the wind
cow | Bella | calm | meadow | walked on without any hurry
pig | Rosie | cheerful | farm | dug deep into the ground
sheep | Wolly | soft | hill | followed the sound of a bell
goat | Billy | stubborn | mountain | climbed where nobody dared to climb
duck | Dilly | merry | lake | went on with quick little steps
goose | Gerda | watchful | lake | flapped its wide wings
hen | Henny | careful | farm | looked behind every stone
frog | Freddy | green | swamp | made one giant jump
fish | Finn | silver | sea | made a great leap
whale | Wanda | huge | sea | pushed with its great head
seal | Sally | playful | beach | slid over the smooth stones
penguin | Pingu | polite | snow | slid along on its belly
turtle | Tilly | patient | beach | walked on, step by step
snake | Silas | slim | desert | made itself long and thin
bee | Bibi | busy | garden | followed the smell of flowers
ant | Anton | hard-working | garden | carried one little stone after another
spider | Sibyl | skilful | cave | made a long, strong thread
snail | Sven | slow | garden | never stopped to rest
crow | Corvo | curious | old tower | flew up to see the whole land
parrot | Polly | talkative | island | flew ahead to see the way
swan | Swana | elegant | lake | spread its white wings
deer | Dana | shy | forest | ran on light feet
hedgehog | Igor | prickly | park | rolled itself into a ball
squirrel | Nutty | lively | park | ran up the tallest tree
camel | Sahir | tough | desert | walked all night
donkey | Paco | faithful | village | went on and on without a word
dragon | Draco | friendly | castle | lit a small fire
""").items()
}

STRANGER = Animal("Lumo", "little", "forest", "tried once more")
"""A hero of any other kind."""

STRANGERS = split(
    "zebra giraffe eagle panda rhino otter kangaroo hippo dolphin crab lizard peacock pony kitten puppy "
    "unicorn robot hamster pigeon chicken"
)
"""Some kinds that have no story of their own, so that others are taken as they come."""

PLACES = {
    place: Stage(*cells)
    for place, cells in _table("""
desert | in the desert | thirst | a tired traveller | a hidden well | The sand was hot and the sky was wide.
forest | in the forest | lost | a lost child | the old path | The trees were tall and the light was green.
garden | in the garden | gift | an old woman | a red rose | Flowers stood in every corner.
city | in the city | lost | a small boy | the right street | The streets were full of noise and light.
farm | on the farm | gift | the farmer | a basket of apples | The corn was high and the air smelled of hay.
mountain | on the mountain | storm | a young shepherd | a dry cave | There was snow at the top and the air was thin.
beach | on the beach | treasure | a little girl | an old box | The waves came in and went out again.
sea | in the sea | storm | a fisherman | a safe harbour | The water was deep and blue.
lake | at the lake | race | a young otter | the far shore | The water was as smooth as a mirror.
river | by the river | race | a proud beaver | the wooden bridge | The water ran fast over the stones.
cave | in the cave | treasure | a shy bat | a shining stone | It was dark and every step made a sound.
castle | in the castle | song | a sad king | the great hall | The walls were thick and the halls were cold.
village | in the village | song | a lonely baker | the market square | Smoke came from every roof.
jungle | in the jungle | lost | a young parrot | the great tree | It was warm and wet and full of voices.
island | on the island | treasure | an old sailor | a golden coin | There was water on every side.
park | in the park | race | a fast pigeon | the stone fountain | Children played under the trees.
school | at the school | song | a nervous pupil | the big stage | The bell rang and the doors opened.
kitchen | in the kitchen | gift | the cook | a piece of cheese | It smelled of soup and fresh bread.
library | in the library | treasure | an old reader | a secret book | It was so quiet that one could hear the clock.
snow | in the snow | storm | a cold little bird | a warm hut | Everything was white and very still.
swamp | in the swamp | lost | a young heron | the dry road | The ground was soft and fog hung over the water.
meadow | in the meadow | thirst | a weak butterfly | a clear spring | The grass was high and bees hummed in the sun.
hill | on the hill | race | a lazy hare | the lonely tree | From there one could see the whole valley.
old tower | in the old tower | storm | a lost dove | a dry corner | The stairs were steep and the wind came in.
market | at the market | gift | a poor woman | a warm loaf of bread | There were people and baskets everywhere.
zoo | at the zoo | song | a bored zebra | the round stage | Many people came to look and to laugh.
train | on the train | lost | a crying girl | the right seat | The wheels sang and the fields flew by.
ship | on the ship | storm | the captain | a quiet bay | The sails were white and the mast was high.
valley | in the valley | thirst | an old goat | a deep pool | A thin river had run there between two hills.
moon | on the moon | treasure | a lonely robot | a silver star | The ground was grey and the stars were near.
""").items()
}
