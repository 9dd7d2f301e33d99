"""Train the writer: free wish -> caption, or what to avoid; saved as a LlamaForCausalLM folder with its tokenizer.

    python train_writer.py OUT [--steps N] [--companion-steps N] [--start FOLDER]

It learns to write captions first, and then, beside it, what to avoid; `--start` begins there, with a writer that has
learnt the first. The number of steps, not the clock, ends the training, so that a busy machine only makes it slower.
"""

import argparse
import json
import math
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from wishes import is_held_out, make_wish, misspell
from world import HELD_OUT_SCENES, caption, caption_to_avoid

sys.path.append(str(Path(__file__).resolve().parents[1]))
from companions import AVOID

WISHES = 120_000
"""Pairs of wish and caption to learn from, in each of the two parts."""
COMPANIONS = 0.4
"""Fraction of them that ask for what to avoid, in the second part."""
MISSPELT = 0.06
"""Fraction of them with a typing error."""
VOCABULARY = 1536
"""Upper limit of the tokenizer's size; the words give fewer."""
CONTEXT = 256
"""Longest prompt plus caption, in tokens; a wish has about 15."""
MOST_NEW_TOKENS = 32
"""Default limit of an answer; a caption has about 11 tokens."""

PAD, BOS, USER, ASSISTANT, END = SPECIAL = ["<|pad|>", "<|bos|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHAT_TEMPLATE = (
    f"{{{{ '{BOS}' }}}}{{% for m in messages %}}"
    f"{{% if m['role'] == 'user' %}}{{{{ '{USER} ' + (m['content'] | trim) + '{END}' }}}}"
    f"{{% elif m['role'] == 'assistant' %}}{{{{ '{ASSISTANT}' + (m['content'] | trim) + '{END}' }}}}"
    f"{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{ASSISTANT}' }}}}{{% endif %}}"
)

Sample = tuple[list[int], list[int]]
"""Token ids of the prompt, as the chat template makes it, and of the caption with its end."""


def log(*words: object) -> None:
    print(time.strftime("[%H:%M:%S]"), *words, flush=True)


# ---------------------------------------------------------------------------------------- data


def make_pairs(count: int, rng: random.Random, companions: float = 0.0) -> list[tuple[str, str]]:
    """Wishes with their captions; neither held-out captions nor held-out pairs of words are among them.

    Args:
        companions: fraction of them that ask for what to avoid instead, and get that.
    """
    held_out = set(HELD_OUT_SCENES)
    pairs: list[tuple[str, str]] = []
    while len(pairs) < count:
        wish = make_wish(rng)
        if wish.scene in held_out or is_held_out(wish):
            continue
        text = misspell(wish.text, rng) if rng.random() < MISSPELT else wish.text
        if companions and rng.random() < companions:
            pairs.append((AVOID + text, caption_to_avoid(wish.scene)))
        else:
            pairs.append((text, caption(wish.scene)))
    return pairs


def make_tokenizer(pairs: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """A lower-casing byte-level BPE, learnt from the words of `pairs`."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        min_frequency=3,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = [" " + wish for wish, _ in pairs[:30_000]] + [answer for _, answer in pairs[:30_000:4]]
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_samples(tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]) -> list[Sample]:
    """Token ids of all pairs; one of them is compared with what the chat template gives."""

    def ids(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False).input_ids

    before, after = ids([BOS + USER, END + ASSISTANT])
    wishes = ids([" " + wish for wish, _ in pairs])
    captions = sorted({answer for _, answer in pairs})
    answers = dict(zip(captions, ids(captions), strict=True))
    samples = [
        (before + wish + after, [*answers[answer], tokenizer.eos_token_id])
        for wish, (_, answer) in zip(wishes, pairs, strict=True)
    ]
    chat = [{"role": "user", "content": pairs[0][0]}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    if list(prompt) != samples[0][0]:
        raise RuntimeError(f"the chat template gives {prompt}, the training uses {samples[0][0]}")
    return samples


def collate(samples: list[Sample], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, L] padded at the right, and labels [B, L] that are -100 outside the captions."""
    length = max(len(prompt) + len(answer) for prompt, answer in samples)
    ids = torch.full((len(samples), length), pad)
    labels = torch.full((len(samples), length), -100)
    for row, (prompt, answer) in enumerate(samples):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


# --------------------------------------------------------------------------------------- model


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Four layers, 128 wide; heads of 32, the smallest that vLLM's CPU attention takes."""
    config = LlamaConfig(
        vocab_size=(len(tokenizer) + 63) // 64 * 64,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rms_norm_eps=1e-5,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
        max_new_tokens=MOST_NEW_TOKENS,
    )
    return model


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """Weight decay for the matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    scales = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


def learning_rate(done: float, peak: float = 2e-3, warm_up: float = 0.03, floor: float = 0.02) -> float:
    """Linear warm-up, then a cosine down to `floor * peak`; `done` is the finished fraction, 0..1."""
    if done < warm_up:
        return peak * done / warm_up
    cosine = 0.5 * (1 + math.cos(math.pi * (done - warm_up) / (1 - warm_up)))
    return peak * (floor + (1 - floor) * cosine)


def train(
    model: LlamaForCausalLM, samples: list[Sample], steps: int, rng: random.Random, peak: float, batch: int = 32
) -> None:
    """Learn in place to answer each prompt; the loss counts the caption's tokens only."""
    optimizer = make_optimizer(model)
    losses: list[float] = []
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number / steps, peak)
        ids, labels = collate(rng.choices(samples, k=batch), model.config.pad_token_id)
        states = model.model(input_ids=ids).last_hidden_state  # causal, padded at the right: needs no mask
        counted = labels[:, 1:] != -100
        loss = F.cross_entropy(model.lm_head(states[:, :-1][counted]), labels[:, 1:][counted])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (number + 1) % 200 == 0:
            log(f"step {number + 1}/{steps} loss {sum(losses[-200:]) / 200:.4f}")


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save both, with a tokenizer configuration that transformers 4 and 5 read alike."""
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for key in ("backend", "extra_special_tokens", "is_local", "local_files_only"):
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["additional_special_tokens"] = [USER, ASSISTANT]
    config["chat_template"] = CHAT_TEMPLATE
    path.write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--companion-steps", type=int, default=2000)
    parser.add_argument("--start", type=Path, help="folder of a writer that writes captions")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = random.Random(3)

    if options.start:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(options.start, local_files_only=True)
        model = LlamaForCausalLM.from_pretrained(options.start, local_files_only=True).train()
    else:
        pairs = make_pairs(WISHES, rng)
        tokenizer = make_tokenizer(pairs)
        model = make_model(tokenizer)
        log("vocabulary", len(tokenizer), "parameters", model.num_parameters())
        train(model, make_samples(tokenizer, pairs), options.steps, rng, peak=2e-3)
    rng = random.Random(4)
    pairs = make_pairs(WISHES, rng, COMPANIONS)
    train(model, make_samples(tokenizer, pairs), options.companion_steps, rng, peak=5e-4)
    save(model, tokenizer, options.out)
    log("saved", options.out, "cpu seconds", round(time.process_time()))


if __name__ == "__main__":
    main()
