"""Adapters that the pipeline files of this folder name by dotted path."""


def thinker2talker(request, inputs, stage):
    """Hidden states of the thinker as embeddings of the talker."""


def talker2code2wav(request, inputs, stage):
    """Codes of the talker as tokens of the vocoder."""


def ar2dit(request, inputs, stage):
    """Hidden states of an autoregressive model as conditions of a diffusion model."""


def expand_negative(prompt, params):
    """The companion that writes the negative prompt."""
