"""The prose of the reference page; `reference.py` puts the tables between."""

from __future__ import annotations

HEAD = """
# Pipeline files

<!-- Made by `python -m stagemesh.config.reference > docs/reference/pipeline.md`; a test keeps it true. -->

A pipeline is a graph of stages in one YAML file. This one is complete:

```yaml
name: shapes
stages:
  - name: writer
    model: models/writer            # relative to this file
    input_adapter: chat
    final_output: true
    runtime: {shared_devices: true}
  - name: painter                   # reads the stage before it
    stage_type: diffusion
    model: models/painter
    runtime: {num_replicas: 2}
    default_sampling_params: {num_inference_steps: 20, guidance_scale: 2.0}
```

```bash
stagemesh validate pipeline.yaml    # good, or the first thing that is wrong, and what would be right
stagemesh render pipeline.yaml      # everything filled in, and where each value came from
stagemesh schema > stagemesh.schema.json   # for editors: `# yaml-language-server: $schema=stagemesh.schema.json`
```

Values may refer to others (`${stages.0.model}`) and to the environment (`${oc.env:MODELS,/models}`), by OmegaConf's
rules; `\\${` is a plain `${`. `???` marks a value that somebody must fill in. A key that nobody knows is an error.
"""

SAMPLING = """
## Default sampling parameters

`default_sampling_params` has the names of the requests' typed parameters. What only an engine knows goes into
`extra`.
"""

FILLED_IN = """
## What loading fills in

| when unset | it becomes |
|---|---|
| `name` | the file's name |
| `stage_id` | the position, from 0 |
| `name` of a stage | `stage-` and its id |
| `engine` | `vllm` for `llm`, `diffusion` for `diffusion`; another `stage_type` must name its engine |
| `inputs` | the stage before; none for the first. Names or ids; `[]` reads the prompt |
| `media_inputs` | all kinds for a stage that reads no other; none for one that does |
| `final_output` | true for stages that nobody reads |
| `final_output_type` | `text` for `llm`, `image` for `diffusion` |

`model`, the paths of `lora_modules`, and `lora_path` and `allowed_local_media_path` of `engine_args` are relative
to the file that they are written in. A name that is no path there, such as `org/model`, stays as it is.
`input_adapter` is `prompt`, `text`, `chat`, `tokens`, `embeds`, `diffusion`, or code of your own. The stages must
form a graph without cycles.

Code of your own (`engine`, `input_adapter`, `prompt_expand`) is named by `package.module:name` of what is installed
where it runs, or by `file.py:name`, with the file relative to the one that names it, as for `model`. It is looked up
when the file is checked, and imported only where it is used. An adapter is a function, or a class that is made once a
request and may remember; `examples/speak` has one, and an engine.

`prompt_expand` of the first stage makes *companions* (classifier-free guidance): further visits to that stage, on the
replica of the request's own, whose outputs the stages with `edge: whole` that read it get beside the request's own, by
role. It is `function(prompt, params)`, with copies of the request's `stagemesh.v1` messages `Prompt` and
`SamplingParams`, and returns a list of up to 8 mappings, which may be empty:

| key | what |
|---|---|
| `suffix` | the companion's id is the request's id and this; each has its own |
| `role` | what adapters know it by |
| `prompt` | a text, chat messages, token ids, or a `Prompt` |
| `overrides` | sampling parameters that differ from the request's own; may be left out |

The head runs it, and so does each gateway: the code must be there. It is called on a thread, has 10 s, and should do no
more than look at a text. The adapter `diffusion` takes the role `negative` (`adapter_args.negative_role`) as its
negative prompt, unless the request brings one. When the function fails, or a companion does, so does the request; the
request's own output waits for its companions for `limits.companion_timeout`. A request that ends at the first stage has
none, and an interactive one that goes further is refused. `examples/shapes` has a companion.

A prefill/decode pair is two `llm` stages of one model, `is_prefill_only` and `is_decode_only`, with the same
`connector`, `tensor_parallel_size`, `dtype` and `kv_cache_dtype`; the decode stage reads the prefill stage and nothing
else does. It takes over the prefill stage's `input_adapter` and `adapter_args`, for both read the same prompt, and
requests give their sampling parameters to the decode stage alone. `kv_transfer_config` needs to say only what differs
from the mesh's own choice.

`engine_args` go to the engine. The worker checks them against the engine that it has, and the head tells what is
wrong.
"""

LAYERS = """
## Layers

From the weakest: default, pipeline file, deploy overlays in their order, engine arguments for all stages
(`--engine-arg`), overrides of a stage (`--stage-overrides`). Mappings merge key by key; everything else is
replaced.

* `--stage-overrides '{{"painter": {{"runtime": {{"num_replicas": 2}}}}}}'` names stages by name or id. Fields of a
  stage and of `runtime` may stand side by side there; any other name is an engine argument.
* `--engine-arg KEY=VALUE` is for all stages at once. Where the pipeline file gives a stage its own value, that is
  the more specific one: the argument is left out there, with one warning that names it, and so is one that equals
  vLLM's default. It wins over overlays. Kept in any case: {kept}.
* Only fill what is unset: {fill_all} in all stages; in diffusion stages {fill_diffusion}.
* Not for `llm` stages: {diffusion_only}. What only vLLM knows is not laid over diffusion stages.
* `--policy` and `--stage-init-timeout` win over the file; `--model` is for stages that name no model.
"""

OVERLAYS = """
## Deploy overlays

What differs from one deployment to another, laid over a pipeline by `--deploy-config FILE`:

```yaml
base_config: common.yaml            # another overlay, or the pipeline itself, that this one is laid over
async_chunk: true                   # edges between llm stages that say nothing become streams
stages:
  - {stage_id: 0, devices: "0,1", tensor_parallel_size: 2, max_num_seqs: 32}
  - {name: painter, num_replicas: 2}
platforms:
  npu:                              # used with --platform npu; wins over all common parts
    stages:
      - {stage_id: 0, gpu_memory_utilization: 0.7}
```

A stage is named by `stage_id` or `name`. Its other keys are flat: fields of a stage, of `runtime`, or else engine
arguments. Engine arguments beside `stages` (`trust_remote_code`, `dtype`, `quantization` and their like) are for
all `llm` stages. With `base_config` a file can be served by itself. Stages whose devices an overlay lists twice
share them.
"""

OMNI = """
## Files of vLLM-Omni

Files with `stage_args` load as they are, and so do deploy files of that system. A stage takes its name from
`engine_args.model_stage`; `runtime.edges` with a `window_size` other than -1, and `async_chunk`, make streams;
stages that list the same device share it; a sampling parameter without a typed field moves to `extra`. What has no
meaning in this mesh is listed in one warning. Those files leave the model to the command line: give `--model`.
Functions that such a file names by dotted path, and models that it leaves out, are worth a warning, not an error:
they may be on other machines.
"""

DEVICES = """
## Devices

A replica of an `llm` stage takes tensor parallel × pipeline parallel × local data parallel devices, one of a
`diffusion` stage the world size of its `parallel_config`. Unset or `auto`, placement chooses: free devices first,
never one that is in use, unless `shared_devices` lets replicas of different stages lie together. On a node without
accelerators a replica gets one core set. `stagemesh render FILE --devices cuda:0=80GiB,cuda:1=80GiB` shows which
replica gets which, and the memory ledger of each device; `stagemesh validate` refuses what does not fit.

Devices that are listed are divided like this. Numbers are those of the node's visible devices.
"""

DEFAULTS = """
## A model without a file

`stagemesh up --model DIR` makes a pipeline of one stage. A folder with `model_index.json` becomes a `diffusion`
stage (`max_num_seqs: 1`, `dtype: auto`; its output is audio or video when its pipeline's class says so, else an
image), one with `config.json` an `llm` stage, whose adapter is `chat` when the model has a chat template.
`--engine-arg` sets its engine arguments; degrees of parallelism of a diffusion stage go into its `parallel_config`,
where sequence parallelism is Ulysses × ring. A cache that is named alone gets these settings:
"""
