"""Train the talker: words, in chunks of any size -> codes, saved as a LlamaForCausalLM folder with its tokenizer.

    python train_talker.py OUT [--steps N]

A sentence is one sequence in which what is read and what is said alternate, as vLLM's streaming input makes it: after
each chunk of words its codes. The end of a chunk's codes is predicted and then left out of what follows.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

from speech import LEXICON, sentence, word_codes

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "shapes/training"))
import torch
import torch.nn.functional as F
from codes import BOS, CODES, END, FIRST_CODE, PAD, SAY, UNKNOWN, VOCABULARY, codes_of
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from train_writer import learning_rate, log, make_optimizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from words import to_read
from world import HELD_OUT_PAIR_SCENES, HELD_OUT_SCENES, TRAIN_SCENES, caption

CONTEXT = 512
"""A caption has about 50 letters and 140 codes."""
BATCH = 12
MOST_CHUNKS = 4
OTHER_WORDS = 0.4
"""Fraction of the samples that is no caption but some words in a row."""
ID = {token: number for number, token in enumerate(VOCABULARY)}
CODE_ID = {code: FIRST_CODE + number for number, code in enumerate(CODES)}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Every letter is a token, and so is every code."""
    letters = Tokenizer(models.WordLevel(ID, unk_token=UNKNOWN))
    letters.normalizer = normalizers.Lowercase()
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, ID[BOS])])
    return PreTrainedTokenizerFast(
        tokenizer_object=letters,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[SAY],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def make_words(rng: random.Random) -> list[str]:
    """A caption that is not held out, or some words in a row."""
    if rng.random() < OTHER_WORDS:
        return rng.choices(list(LEXICON), k=rng.randint(1, 6))
    return caption(rng.choice(TRAIN_SCENES)).split()


def make_sample(
    words: list[str], tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> tuple[list[int], list[int]]:
    """Tokens, and labels that are -100 where the talker only reads; the words come in chunks at random."""
    cuts = sorted(rng.sample(range(1, len(words)), min(rng.randrange(MOST_CHUNKS), len(words) - 1)))
    if rng.random() < 0.3:
        cuts = list(range(1, len(words)))
    tokens, labels, start = [ID[BOS]], [-100], 0
    for end in [*cuts, len(words)]:
        read = tokenizer.encode(to_read(words[start:end], end == len(words)), add_special_tokens=False)
        said = [
            CODE_ID[code]
            for number in range(start, end)
            for code in word_codes(words[number], number, number == len(words) - 1)
        ]
        tokens += read + said
        labels += [-100] * (len(read) - 1) + [*said, ID[END]]
        start = end
    return tokens, labels


def make_model() -> LlamaForCausalLM:
    """Three layers, 128 wide; heads of 32, the smallest that vLLM's CPU attention takes."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=(len(VOCABULARY) + 63) // 64 * 64,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=ID[BOS],
            eos_token_id=ID[END],
            pad_token_id=ID[PAD],
            rms_norm_eps=1e-5,
        )
    )


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save both, with a tokenizer configuration that transformers 4 and 5 read alike."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("backend", None)
    config["additional_special_tokens"] = config.pop("extra_special_tokens", [SAY])
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=1) + "\n")


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, rng: random.Random) -> None:
    """Learn in place."""
    optimizer, losses = make_optimizer(model), list[float]()
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number / steps)
        samples = [make_sample(make_words(rng), tokenizer, rng) for _ in range(BATCH)]
        tokens, labels = (
            torch.nn.utils.rnn.pad_sequence([torch.tensor(one[part]) for one in samples], True, (ID[PAD], -100)[part])
            for part in (0, 1)
        )
        states = model.model(input_ids=tokens).last_hidden_state  # causal, padded at the right: needs no mask
        counted = labels != -100
        loss = F.cross_entropy(model.lm_head(states[counted]), labels[counted])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (number + 1) % 100 == 0:
            log(f"step {number + 1}/{steps} loss {sum(losses[-100:]) / 100:.4f}")


@torch.no_grad()
def measure(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Share of held-out captions that are spoken exactly as they should be, given whole."""
    captions, right = [caption(scene) for scene in HELD_OUT_SCENES + HELD_OUT_PAIR_SCENES], 0
    for text in captions:
        prompt = torch.tensor([tokenizer.encode(to_read(text.split(), True))])
        made = model.generate(input_ids=prompt, do_sample=False, max_new_tokens=200)[0, prompt.shape[1] :]
        right += codes_of(made.tolist()) == sentence(text)
    print(f"held-out captions: exact {right / len(captions):.3f} of {len(captions)}", flush=True)


def main() -> None:
    """Train, save, measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    tokenizer, model = make_tokenizer(), make_model()
    log("vocabulary", len(tokenizer), "parameters", model.num_parameters())
    train(model, tokenizer, options.steps, random.Random(3))
    save(model.eval(), tokenizer, options.out)
    log("saved", options.out, "cpu seconds", round(time.process_time()))
    measure(model, tokenizer)


if __name__ == "__main__":
    main()
