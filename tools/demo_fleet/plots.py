"""The words and the plots that little stories are made of."""

from __future__ import annotations


def words(text: str, between: str | None = None) -> list[str]:
    """A list, written plainly."""
    return text.split(between)


ANIMALS = words("""
fox bear owl rabbit mouse cat dog hedgehog squirrel frog duck goose swan wolf deer badger otter
beaver turtle snail bee ant spider butterfly crow raven robin sparrow penguin seal whale dolphin octopus crab
lion tiger elephant giraffe zebra monkey parrot camel horse pony donkey cow pig sheep goat lamb hen rooster
bat mole lizard snake crocodile hippo panda koala kangaroo moose fish bird kitten puppy dragon robot unicorn
giant witch wizard knight princess king queen pirate baker farmer sailor gardener boy girl child ghost
""")
BOYS = words("Tim Max Leo Sam Ben Tom Finn Oscar Hugo Otto Milo Felix Jack Theo Noah")
GIRLS = words("Lily Mia Anna Lucy Tilda Ella Rosa Nora Ida Clara Emma Zoe Ruby Ada Molly")
ADJECTIVES = words("small brave kind clever shy cheerful lonely curious hungry gentle quiet young old")
PLACES = [
    "a quiet forest",
    "a green valley",
    "a little house by the sea",
    "a garden full of roses",
    "a village on a hill",
    "an old castle",
    "a cave behind a waterfall",
    "a meadow by the river",
    "a big city",
    "a snowy land",
]
THINGS = words(
    "red ball,golden key,blue kite,silver bell,little boat,warm hat,shiny stone,old map,wooden flute", ","
)
FOODS = words("apples,berries,honey,warm bread,nuts,pancakes,pears,soup,cake", ",")

OPENINGS = [
    "Once upon a time, there was {a_adj} {hero} named {name}. {He} lived in {place}.",
    "Once upon a time, {a_adj} {hero} named {name} lived in {place}.",
    "Once upon a time in {place}, there lived {a_adj} {hero}. {His} name was {name}.",
    "There once was {a_adj} {hero} called {name}, who lived in {place}.",
    "In {place} lived {a_adj} {hero} named {name}.",
]

# A plot is a row of beats; of each beat one wording is told.
PLOTS: list[list[list[str]]] = [
    [
        ["One day, {name} lost {his} {thing}.", "One morning, {name} could not find {his} {thing}."],
        [
            "{He} looked under the bed and behind the door, but it was gone.",
            "{He} looked everywhere and felt sad.",
        ],
        [
            'Then {a_friend} came by. "I will help you," said the {friend}.',
            '{A_friend} saw {him} and said, "Let us look together."',
        ],
        ["They found the {thing} under a big tree.", "At last, they found the {thing} in the tall grass."],
        [
            "{name} thanked the {friend}, and they played until dark.",
            "{name} and the {friend} were friends from that day on.",
        ],
    ],
    [
        [
            "One day, {name} was hungry and went out to find {food}.",
            "{name} loved {food} more than anything.",
        ],
        [
            "On the way {he} met {a_friend} who had nothing to eat.",
            "Soon {a_friend} came to the door and asked for {food}.",
        ],
        [
            "{name} had only a little, but {he} gave half of the {food} to the {friend}.",
            '"Take some of my {food}," said {name}.',
        ],
        [
            "The next day, the {friend} came back with a {thing} to say thank you.",
            "The {friend} smiled and gave {name} a {thing}.",
        ],
        ["{name} learned that sharing makes two hearts glad.", "So {name} learned that it is good to share."],
    ],
    [
        ["One night, a big storm came.", "One evening, the sky turned black and it began to rain."],
        ["{name} heard {a_friend} crying outside.", "{name} saw {a_friend} shaking in the cold."],
        ['"Come in and get warm," said {name}.', "{name} opened the door and let the {friend} in."],
        ["They ate {food} and told stories all night.", "They sat by the fire and shared some {food}."],
        [
            "In the morning the sun was out, and they were friends.",
            "When the storm was over, neither of them was alone any more.",
        ],
    ],
    [
        ["One day, {name} found a {thing} on the road.", "One day, {name} saw a {thing} in the river."],
        ['"Whose is it?" {he} wondered.', "{He} wanted to keep it, but {he} knew it was not {his}."],
        [
            '{He} asked {a_friend}. "It is mine!" said the {friend}. "I have looked for it all day."',
            "Then {he} met {a_friend} who was looking for a {thing}.",
        ],
        ["{name} gave the {thing} back at once.", '"Here it is," said {name}.'],
        [
            "The {friend} was so happy that they ate {food} together.",
            "The {friend} danced with joy, and {name} was proud.",
        ],
    ],
    [
        ["{name} was afraid of the dark.", "Every night, {name} was afraid of the dark."],
        ["One night, {a_friend} gave {him} a lamp.", "{He} told {a_friend} about it."],
        [
            '"Look up," said the {friend}. "The stars are there to watch over you."',
            '"The dark is only the day asleep," said the {friend}.',
        ],
        ["{name} looked at the sky and was not afraid any more.", "{name} closed {his} eyes and smiled."],
        ["From then on, {name} slept well every night.", "That night {he} slept until the sun came up."],
    ],
    [
        ["{name} wanted to see the world.", "{name} had always dreamed of the sea."],
        [
            "So {he} packed {food} and a {thing} and set out.",
            "One morning, {he} took a {thing} and walked away.",
        ],
        [
            "On a high hill {he} met {a_friend}, and they went on together.",
            "{He} walked for three days until {he} met {a_friend} who knew the way.",
        ],
        ["They saw mountains, rivers and towns.", "They crossed a wide river and slept under the stars."],
        [
            "But the best day of all was the day they came home.",
            "When {he} came home, {he} had a friend and a story to tell.",
        ],
    ],
    [
        ["One day, {name} and {a_friend} had a race.", "{A_friend} laughed at {name} because {he} was slow."],
        [
            "The {friend} ran so fast that it fell into a hole.",
            "Halfway down the road, the {friend} fell and hurt a foot.",
        ],
        [
            "{name} could have won, but {he} stopped to help.",
            "{name} stopped and helped the {friend} get up.",
        ],
        ["They crossed the line together.", "Side by side, they walked to the end."],
        [
            '"You are the real winner," said the {friend}.',
            "The {friend} said sorry and shared some {food} with {name}.",
        ],
    ],
]

CLOSINGS = ["The end.", "And they lived happily ever after.", "", ""]
ASKS = [
    "Tell me a story about {a_hero}.",
    "Tell me a story about {a_hero}.",
    "Tell me a story about {a_adj} {hero}.",
    "A story about {a_hero}, please.",
    "Write a short story about {a_hero}.",
    "Write a story about {a_hero} named {name}.",
    "Tell me about {a_hero} named {name}.",
    "Tell me a story about {a_hero} and {a_friend}.",
    "Can you tell me a story about {a_hero}?",
    "Please tell me a bedtime story about {a_hero}.",
    "I want a story about {a_hero} in {place}.",
    "story about {a_hero}",
    "{hero}",
    "Tell me a story.",
    "Tell me another story.",
    "Hello",
]
