"""Train the reader and the translator together: a wish in English -> hidden states -> the scene in German.

    python train.py ../models/reader ../models/translator --plain 0
    python train.py ../models/reader ../models/translator --again --steps 2000

Together they are an encoder and a decoder: the reader's last hidden states [tokens, 128] stand where other models have
the embeddings of their prompt's tokens, and the loss on the German words teaches both. Each is then saved as a
LlamaForCausalLM folder of its own, since each runs in an engine of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from sentences import in_english, in_german

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "shapes/training"))
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from train_writer import MISSPELT, learning_rate, log, make_optimizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from wishes import is_held_out, make_wish, misspell
from world import HELD_OUT_SCENES, SCENES

PAD, END = SPECIAL = ["<|pad|>", "<|end|>"]
PAIRS = 100_000
CONTEXT = 256
HIDDEN = 128
BATCH = 32

Pair = tuple[str, str]
"""A wish in English, its scene in German."""


def make_pairs(count: int, rng: random.Random, plain: float) -> list[Pair]:
    """Plain descriptions, and wishes in freer words; the scenes that `shapes` holds out are held out here too."""
    held_out, pairs = set(HELD_OUT_SCENES), list[Pair]()
    seen = [scene for scene in SCENES if scene not in held_out]
    while len(pairs) < count:
        if rng.random() < plain:
            scene = rng.choice(seen)
            pairs.append((in_english(scene, rng), in_german(scene)))
            continue
        wish = make_wish(rng)
        if wish.scene not in held_out and not is_held_out(wish):
            text = misspell(wish.text, rng) if rng.random() < MISSPELT else wish.text
            pairs.append((text, in_german(wish.scene)))
    return pairs


def make_tokenizer(texts: Iterable[str], size: int, *, lowercase: bool) -> PreTrainedTokenizerFast:
    """A byte-level BPE, learnt from `texts`."""
    bpe = Tokenizer(models.BPE())
    if lowercase:
        bpe.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    # The reader's first word is a word like the others; the translator's text begins without a space.
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=lowercase)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, min_frequency=2, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=PAD, model_max_length=CONTEXT)


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Two layers; heads of 32, the smallest that vLLM's CPU attention takes."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=(len(tokenizer) + 63) // 64 * 64,
            hidden_size=HIDDEN,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            rms_norm_eps=1e-5,
        )
    )


def read(reader: LlamaForCausalLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Last hidden states [tokens, HIDDEN] of each prompt, after the final norm, as vLLM's pooler gives them."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in prompts], batch_first=True)
    states = reader.model(input_ids=ids).last_hidden_state  # causal, padded at the right: needs no mask
    return [row[: len(one)] for row, one in zip(states, prompts, strict=True)]


def train(
    reader: LlamaForCausalLM,
    translator: LlamaForCausalLM,
    samples: list[tuple[list[int], list[int]]],
    steps: int,
    rng: random.Random,
) -> None:
    """Both learn in place; the loss counts the German tokens only."""
    optimizers, losses = [make_optimizer(reader), make_optimizer(translator)], list[float]()
    weights = [*reader.parameters(), *translator.parameters()]
    for number in range(steps):
        for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
            group["lr"] = learning_rate(number / steps)
        batch = rng.choices(samples, k=BATCH)
        rows, labels = [], []
        for states, (_, answer) in zip(read(reader, [prompt for prompt, _ in batch]), batch, strict=True):
            rows.append(torch.cat([states, translator.model.embed_tokens(torch.tensor(answer[:-1]))]))
            labels.append(torch.tensor([-100] * (len(states) - 1) + answer))
        inputs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        wanted = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        made, counted = translator.model(inputs_embeds=inputs).last_hidden_state, wanted != -100
        loss = F.cross_entropy(translator.lm_head(made[counted]), wanted[counted])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        if (number + 1) % 200 == 0:
            log(f"step {number + 1}/{steps} loss {sum(losses[-200:]) / 200:.4f}")


def main() -> None:
    """Train, save, measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("reader", type=Path)
    parser.add_argument("translator", type=Path)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--plain", type=float, default=0.6, help="share of plain descriptions; the rest is wishes")
    parser.add_argument("--again", action="store_true", help="go on with the models that are there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = random.Random(5)

    pairs = make_pairs(PAIRS, rng, options.plain)
    if options.again:
        english, german = (AutoTokenizer.from_pretrained(one) for one in (options.reader, options.translator))
        reader, translator = (LlamaForCausalLM.from_pretrained(one) for one in (options.reader, options.translator))
    else:
        english = make_tokenizer((wish for wish, _ in pairs[:20_000]), 1216, lowercase=True)
        german = make_tokenizer((in_german(scene) for scene in SCENES), 640, lowercase=False)
        reader, translator = make_model(english), make_model(german)
    samples = [
        (wish, [*answer, german.eos_token_id])
        for wish, answer in zip(
            english([wish for wish, _ in pairs])["input_ids"], german([text for _, text in pairs])["input_ids"],
            strict=True,
        )
    ]  # fmt: skip
    log("vocabularies", len(english), len(german), "parameters", reader.num_parameters(), translator.num_parameters())
    train(reader.train(), translator.train(), samples, options.steps, rng)
    save(reader.eval(), english, options.reader)
    save(translator.eval(), german, options.translator)
    log("saved", options.reader, options.translator, "cpu seconds", round(time.process_time()))
    measure(reader, translator, english, german, "plain descriptions of scenes never seen", held_out_pairs(200))
    wishes = make_pairs(200, random.Random(98), plain=0)
    measure(reader, translator, english, german, "wishes in free words", wishes)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save both, with a tokenizer configuration that transformers 4 and 5 read alike."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for name in ("backend", "is_local", "local_files_only"):
        config.pop(name, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=1) + "\n")


def held_out_pairs(count: int) -> list[Pair]:
    """Plain descriptions of scenes that no training has seen."""
    rng = random.Random(99)
    scenes = rng.choices(HELD_OUT_SCENES, k=count)
    return [(in_english(scene, rng), in_german(scene)) for scene in scenes]


@torch.no_grad()
def measure(
    reader: LlamaForCausalLM,
    translator: LlamaForCausalLM,
    english: PreTrainedTokenizerFast,
    german: PreTrainedTokenizerFast,
    name: str,
    pairs: list[Pair],
) -> None:
    """Print the share of exact sentences."""
    right = 0
    for text, wanted in pairs:
        (states,) = read(reader, [english.encode(text)])
        made = translator.generate(inputs_embeds=states[None], do_sample=False, max_new_tokens=24)[0]
        right += german.decode(made, skip_special_tokens=True) == wanted
    print(f"{name}: exact {right / len(pairs):.3f} of {len(pairs)}", flush=True)


if __name__ == "__main__":
    main()
