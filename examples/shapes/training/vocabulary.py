"""The words of the wish grammar, each mapped to what it means in the world of shapes."""

from typing import NamedTuple

COLOUR_WORDS: dict[str, list[str]] = {
    "red": ["red", "crimson", "scarlet", "ruby", "cherry-red", "blood-red", "tomato-coloured"],
    "orange": ["orange", "tangerine", "amber", "pumpkin-coloured", "apricot", "carrot-coloured"],
    "yellow": ["yellow", "golden", "lemon", "canary", "sunny", "gold", "mustard"],
    "green": ["green", "emerald", "lime", "jade", "grassy", "olive", "mint"],
    "blue": ["blue", "azure", "navy", "sapphire", "sky-blue", "cobalt", "cyan"],
    "purple": ["purple", "violet", "lilac", "lavender", "amethyst", "plum-coloured", "mauve"],
    "pink": ["pink", "rosy", "salmon", "fuchsia", "magenta", "bubblegum", "rose"],
    "white": ["white", "snowy", "ivory", "pearly", "milky", "snow-white"],
    "black": ["black", "jet-black", "ebony", "inky", "coal-black", "pitch-black"],
}

SHAPE_WORDS: dict[str, list[str]] = {
    "circle": [
        "circle",
        "disc",
        "disk",
        "dot",
        "ball",
        "coin",
        "button",
        "spot",
        "bubble",
        "balloon",
        "marble",
    ],
    "square": ["square", "box", "block", "tile", "cube", "brick", "die", "stamp"],
    "triangle": ["triangle", "pyramid", "wedge", "tent", "arrowhead", "cone", "roof"],
    "star": ["star", "five-pointed star", "sparkle", "starfish", "shooting star"],
    "ring": ["ring", "hoop", "donut", "doughnut", "loop", "tyre", "wheel", "bracelet", "halo"],
}

SIZE_WORDS: dict[str, list[str]] = {
    "small": ["small", "little", "tiny", "wee", "mini", "teeny", "teeny tiny", "minuscule", "petite"],
    "medium": ["medium", "medium-sized", "mid-sized", "average", "normal-sized", "middling", "regular"],
    "large": ["large", "big", "huge", "giant", "enormous", "massive", "great big", "gigantic", "really big"],
}

PLACES: dict[str, list[str]] = {
    "white": [
        "in the snow",
        "on snow",
        "on white paper",
        "on ice",
        "in winter",
        "in a snowstorm",
        "on a clean page",
        "on a sheet of paper",
    ],
    "black": [
        "at night",
        "in the night sky",
        "in the dark",
        "in space",
        "at midnight",
        "in a dark cave",
        "among the galaxies",
        "in outer space",
    ],
    "blue": [
        "in the sky",
        "at noon",
        "in the sea",
        "on the ocean",
        "under water",
        "by day",
        "in a clear sky",
        "in the daytime",
        "in a swimming pool",
        "on a summer day",
    ],
    "green": [
        "on grass",
        "on the grass",
        "in a meadow",
        "on the lawn",
        "in the forest",
        "in a field",
        "in the jungle",
        "in the garden",
        "on a golf course",
    ],
    "grey": [
        "in the fog",
        "on the road",
        "on stone",
        "on concrete",
        "in the mist",
        "on a rainy day",
        "in the street",
        "on the pavement",
        "under heavy clouds",
    ],
}

BACKGROUND_WORDS: dict[str, list[str]] = {
    "white": ["white", "snowy", "ivory"],
    "black": ["black", "dark", "pitch-black"],
    "blue": ["blue", "azure", "sky-blue", "navy"],
    "green": ["green", "emerald", "grassy"],
    "grey": ["grey", "gray", "stone-coloured", "silver"],
}

BACKGROUND_FORMS = [
    "on {a} {} background",
    "on {}",
    "against {a} {} background",
    "with {a} {} background",
    "over {a} {} backdrop",
    "on {a} {} canvas",
    "in front of {a} {} wall",
    "against {}",
    "and {a} {} background",
    "{} background",
]
"""Filled with the colour's word, and with "a" or "an"."""


class Thing(NamedTuple):
    """What a thing usually looks like, and where."""

    colour: str
    shape: str
    size: str | None = None
    background: str | None = None


THINGS: dict[str, Thing] = {
    "sun": Thing("yellow", "circle", "large", "blue"),
    "moon": Thing("white", "circle", "medium", "black"),
    "full moon": Thing("white", "circle", "large", "black"),
    "tomato": Thing("red", "circle"),
    "cherry": Thing("red", "circle", "small"),
    "apple": Thing("red", "circle"),
    "pea": Thing("green", "circle", "small"),
    "melon": Thing("green", "circle", "large"),
    "pumpkin": Thing("orange", "circle", "large"),
    "basketball": Thing("orange", "circle"),
    "clementine": Thing("orange", "circle", "small"),
    "plum": Thing("purple", "circle"),
    "grape": Thing("purple", "circle", "small"),
    "blueberry": Thing("blue", "circle", "small"),
    "snowball": Thing("white", "circle"),
    "pearl": Thing("white", "circle", "small"),
    "cannonball": Thing("black", "circle"),
    "piglet nose": Thing("pink", "circle"),
    "peach": Thing("pink", "circle"),
    "wedding ring": Thing("yellow", "ring", "small"),
    "lifebuoy": Thing("red", "ring", None, "blue"),
    "car tyre": Thing("black", "ring", "large", "grey"),
    "rubber ring": Thing("pink", "ring", None, "blue"),
    "onion ring": Thing("yellow", "ring"),
    "christmas tree": Thing("green", "triangle", "large", "white"),
    "fir tree": Thing("green", "triangle", None, "white"),
    "slice of pizza": Thing("yellow", "triangle"),
    "traffic cone": Thing("orange", "triangle", None, "grey"),
    "piece of cheese": Thing("yellow", "triangle"),
    "shark fin": Thing("black", "triangle", None, "blue"),
    "sail": Thing("white", "triangle", None, "blue"),
    "witch hat": Thing("black", "triangle"),
    "mountain": Thing("white", "triangle", "large", "blue"),
    "sugar cube": Thing("white", "square", "small"),
    "chessboard square": Thing("black", "square", None, "white"),
    "carpet tile": Thing("red", "square"),
    "pat of butter": Thing("yellow", "square", "small"),
    "block of ice": Thing("blue", "square"),
    "mailbox": Thing("red", "square"),
    "bar of soap": Thing("pink", "square", "small"),
    "lump of coal": Thing("black", "square"),
    "sheriff badge": Thing("yellow", "star"),
    "snowflake": Thing("white", "star", "small", "blue"),
    "christmas star": Thing("yellow", "star", "large", "black"),
    "twinkling star": Thing("yellow", "star", "small", "black"),
    "north star": Thing("white", "star", "medium", "black"),
    "sea star": Thing("orange", "star", None, "blue"),
}

_ASKING = [
    "draw {}",
    "please draw {}",
    "i'd love {}",
    "could you paint {}",
    "something like {}",
    "can i have {}",
    "i want to see {}",
    "i want {}",
    "make me {}",
    "give me {}",
    "show me {}",
    "how about {}",
    "paint {}",
    "i wish for {}",
    "let's have {}",
    "a picture of {}",
    "i would like {}",
    "what about {}",
    "sketch {}",
    "imagine {}",
    "maybe {}",
    "i dream of {}",
    "just {}",
    "we need {}",
    "an image of {}",
    "can you do {}",
    "i'm thinking of {}",
    "my wish is {}",
    "could you please make {}",
    "hello, can you draw {}",
]
OPENINGS = ["{}", "{}", "{}", *_ASKING]
"""A wish with no opening is three times as likely as each of the others."""
ENDINGS = ["", "", "", "", " please", ", thanks", "!", ".", " please!", ", would you?", " if you can"]
ENDINGS += [", if possible", " for me", "?"]
