"""An Idefics3 with random weights: a small model that reads pictures, and whose processor does without torchvision."""

from __future__ import annotations

import json
from pathlib import Path

import tiny_llama

IMAGE_TOKENS = 4
"""Places of the prompt that a picture's features take; "<image>" stands for them, three more go around them."""
PICTURE_PIXELS = 32
TEMPLATE = """
{%- for message in messages -%}
<|{{ message['role'] }}|>
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}{{ '<image>' if part['type'] == 'image' else part['text'] }}{%- endfor -%}
{%- endif -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def make(folder: Path) -> Path:
    """Write the model into `folder`; the same weights every time."""
    import torch
    from transformers import AutoTokenizer, Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tiny_llama.make(folder)
    (folder / "model.safetensors").unlink()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]}
    )
    edge = {"longest_edge": PICTURE_PIXELS}
    pictures = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = Idefics3Processor(
        image_processor=pictures, tokenizer=tokenizer, image_seq_len=IMAGE_TOKENS, chat_template=TEMPLATE
    )
    processor.save_pretrained(folder)
    text = json.loads((folder / "config.json").read_text()) | {"vocab_size": len(tokenizer)}
    config = Idefics3Config(
        text_config=text,
        vision_config={
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": PICTURE_PIXELS, "patch_size": 8,
        },
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(7)
    model = Idefics3ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    return folder
