"""Write held_out.json: wishes whose captions neither model was trained on.

    python make_held_out.py

Each of the 50 wishes means another scene, and names no background that its scene must then avoid.
"""

import json
import random
from pathlib import Path

from wishes import Wish, is_held_out, make_wish
from world import HELD_OUT_SCENES, Scene, caption

SEED = 2024
COUNT = 50
FILE = Path(__file__).parent / "held_out.json"


def choose(count: int, rng: random.Random) -> list[Wish]:
    """The first `count` random wishes that are fit, each with a scene of its own."""
    open_scenes, chosen = set(HELD_OUT_SCENES), []
    while len(chosen) < count:
        wish = make_wish(rng)
        is_literal = wish.asked_background in (None, wish.scene.background)
        if wish.scene in open_scenes and is_literal and not is_held_out(wish):
            open_scenes.remove(wish.scene)
            chosen.append(wish)
    return chosen


def load(path: Path = FILE) -> list[tuple[str, Scene]]:
    """The wishes of the file, each with the scene that it means."""
    cases = json.loads(path.read_text(encoding="utf-8"))["wishes"]
    return [(case["wish"], Scene(*(case[part] for part in Scene._fields))) for case in cases]


def main() -> None:
    wishes = [
        {"wish": wish.text, "caption": caption(wish.scene), **wish.scene._asdict()}
        for wish in choose(COUNT, random.Random(SEED))
    ]
    FILE.write_text(json.dumps({"seed": SEED, "wishes": wishes}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
