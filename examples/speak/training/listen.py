"""Let a speech recogniser judge the voice: how many words of held-out captions does it hear right?

    pip install pocketsphinx && python listen.py [WORD]

It is told the grammar of captions. With WORD, only captions that have this word.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from speech import sentence

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "shapes/training"))
from pocketsphinx import Config, Decoder, get_model_path
from voice import Voice
from world import BACKGROUNDS, COLOURS, HELD_OUT_SCENES, SHAPES, SIZES, caption

PITCH_HZ = 110.0


def make_listener() -> Decoder:
    """PocketSphinx with its English model and the grammar of captions."""
    parts = [f"({' | '.join(words)})" for words in (SIZES, COLOURS, SHAPES, BACKGROUNDS)]
    with tempfile.NamedTemporaryFile("w", suffix=".gram") as file:
        file.write("#JSGF V1.0; grammar captions; public <one> = a {} {} {} on a {} background;".format(*parts))
        file.flush()
        dictionary = get_model_path("en-us/cmudict-en-us.dict")
        return Decoder(
            Config(
                hmm=get_model_path("en-us/en-us"), dict=dictionary, jsgf=file.name, loglevel="FATAL", logfn="/dev/null"
            )
        )


def main() -> None:
    """Speak, listen, count."""
    captions = [caption(scene) for scene in HELD_OUT_SCENES]
    captions = [text for text in captions if not sys.argv[1:] or sys.argv[1] in text.split()]
    listener, whole, words, mistaken = make_listener(), 0, 0, Counter[tuple[str, str]]()
    for text in captions:
        sound = Voice(PITCH_HZ).speak(sentence(text))
        listener.start_utt()
        listener.process_raw((sound * 32767).astype("<i2").tobytes(), full_utt=True)
        listener.end_utt()
        heard = listener.hyp().hypstr.split() if listener.hyp() else []
        whole += heard == text.split()
        heard += [""] * (len(text.split()) - len(heard))
        mistaken.update((one, two) for one, two in zip(text.split(), heard, strict=False) if one != two)
        words += len(text.split())
    print(
        f"words {1 - mistaken.total() / words:.3f} of {words}, captions {whole} of {len(captions)}", *mistaken.items()
    )


if __name__ == "__main__":
    main()
