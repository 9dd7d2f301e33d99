#!/usr/bin/env node
// Sends a wish through a pipeline: streams the text, shows the picture's progress, saves the picture.

import { mkdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { call, connect, errorInfo, seconds, status } from "./mesh.js";

const usage = `usage: node generate.js WISH [--head HOST:PORT] [--pipeline NAME] [--out DIR] [--seed N] [--steps N]
                        [--painter STAGE] [--timeout SECONDS] [--cancel-half-way]
       node generate.js --list [--head HOST:PORT]`;

const { values: options, positionals: [wish] } = (() => {
  try {
    return parseArgs({
      allowPositionals: true,
      options: {
        head: { type: "string", default: process.env.STAGEMESH_HEAD || "127.0.0.1:8470" },
        pipeline: { type: "string", default: "" },
        out: { type: "string", default: "." },
        seed: { type: "string" },
        steps: { type: "string" },
        painter: { type: "string", default: "painter" },
        timeout: { type: "string", default: "600" },
        "cancel-half-way": { type: "boolean", default: false },
        list: { type: "boolean", default: false },
      },
    });
  } catch (error) {
    console.error(`${error.message}\n${usage}`);
    process.exit(2);
  }
})();

const client = connect(options.head);
try {
  if (options.list) await list();
  else if (wish !== undefined) await generate();
  else {
    console.error(usage);
    process.exitCode = 2;
  }
} catch (error) {
  process.exitCode = report(error);
} finally {
  client.close();
}

/** Prints the pipelines with their stages. */
async function list() {
  let page_token = "";
  do {
    const page = await call(client, "ListPipelines", { page_token });
    for (const pipeline of page.pipelines) {
      console.log(`${pipeline.name} ${pipeline.revision}`);
      for (const stage of pipeline.stages) {
        const ready = `${stage.ready_replicas} of ${stage.target_replicas} ready`;
        const output = stage.final_output ? `, gives ${stage.output_modality.replace("MODALITY_", "").toLowerCase()}` : "";
        console.log(`  ${stage.stage_id} ${stage.name}: ${stage.stage_type} on ${stage.engine}${output}, ${ready}`);
      }
    }
    page_token = page.next_page_token;
  } while (page_token);
}

/** Runs one request to its end, or cancels it when its picture is half done. */
async function generate() {
  const diffusion = {};
  if (options.seed !== undefined) diffusion.seed = Number(options.seed);
  if (options.steps !== undefined) diffusion.num_inference_steps = Number(options.steps);
  const sampling = Object.keys(diffusion).length ? [{ stage: options.painter, params: { diffusion } }] : [];
  const request = { pipeline: options.pipeline, prompt: { text: wish }, sampling };
  const stream = client.Generate(request, { deadline: Date.now() + Number(options.timeout) * 1000 });
  let isInLine = false;
  const line = (text) => {
    console.log(isInLine ? `\n${text}` : text);
    isInLine = false;
  };
  try {
    // Leaving this loop early, or failing inside it, cancels the call: every stage stops.
    for await (const response of stream) {
      if (response.event === "finished") {
        line(`finished: ${response.finished.finish_reason} after ${seconds(response.finished.total).toFixed(2)} s`);
        continue;
      }
      const { stage, replica_id, content, ...frame } = response.frame;
      switch (content) {
        case "text":
          if (!isInLine) process.stdout.write(`${stage}: `);
          process.stdout.write(frame.text.text);
          isInLine = true;
          break;
        case "progress": {
          const { step, total_steps } = frame.progress;
          line(`${stage}/${replica_id}: step ${step} of ${total_steps}`);
          if (options["cancel-half-way"] && step >= total_steps / 2) {
            line(`cancelled at step ${step}`);
            return;
          }
          break;
        }
        case "media": {
          const { index, mime_type, data, width, height, seed } = frame.media;
          mkdirSync(options.out, { recursive: true });
          const path = join(options.out, `${response.request_id}-${stage}-${index}.${mime_type.split("/")[1]}`);
          writeFileSync(path, data);
          line(`${stage}: saved ${path} (${width} x ${height}, ${data.length} bytes, seed ${seed})`);
          break;
        }
        case "stage_finished":
          line(`${stage}: ${frame.stage_finished.finish_reason}`);
          break;
      }
    }
  } finally {
    stream.cancel();
  }
}

/** Prints a failed call the way the mesh means it; returns the exit status. */
function report(error) {
  if (!(error.code in status)) throw error; // not a failed call
  const info = errorInfo(error);
  const field = info?.metadata.field ? ` (field ${info.metadata.field})` : "";
  console.error(`${status[error.code]} ${info?.reason ?? "-"}${field}: ${error.details}`);
  return 1;
}
