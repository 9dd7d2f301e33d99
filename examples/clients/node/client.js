#!/usr/bin/env node
// A StageMesh client in JavaScript, made from the .proto files alone. See ../README.md for what it does.

import { mkdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { call, connect, errorInfo, status } from "./mesh.js";

const CANCELLED = 3, FAILED = 2;
const usage = `usage: node client.js list      [--head HOST:PORT]
       node client.js generate  [--head HOST:PORT] [--pipeline NAME] [--out DIR] [--seed N] [--steps N]
                                [--cancel-after N] [--timeout SECONDS] PROMPT`;

const { values: options, positionals: [command, ...words] } = read();
const client = connect(options.head);
try {
  if (command === "list") await list();
  else if (command === "generate" && words.length) await generate(words.join(" "));
  else {
    console.error(usage);
    process.exitCode = FAILED;
  }
} catch (error) {
  process.exitCode = report(error);
} finally {
  client.close();
}

function read() {
  try {
    return parseArgs({
      allowPositionals: true,
      options: {
        head: { type: "string", default: process.env.STAGEMESH_HEAD || "127.0.0.1:8470" },
        pipeline: { type: "string", default: "" },
        out: { type: "string", default: "." },
        seed: { type: "string" },
        steps: { type: "string" },
        "cancel-after": { type: "string", default: "0" },
        timeout: { type: "string", default: "600" },
      },
    });
  } catch (error) {
    console.error(`${error.message}\n${usage}`);
    process.exit(FAILED);
  }
}

/** Prints the pipelines with their stages, page by page. */
async function list() {
  let page_token = "";
  do {
    const page = await call(client, "ListPipelines", { page_token });
    for (const pipeline of page.pipelines) {
      for (const stage of pipeline.stages) {
        const ready = `${stage.ready_replicas}/${stage.target_replicas}`;
        console.log(`${pipeline.name}/${stage.name} ${stage.stage_type} ${ready}`);
      }
    }
    page_token = page.next_page_token;
  } while (page_token);
}

/** Runs one request to its end, or cancels it after some steps of its picture. */
async function generate(prompt) {
  const diffusion = {};
  if (options.seed !== undefined) diffusion.seed = Number(options.seed);
  if (options.steps !== undefined) diffusion.num_inference_steps = Number(options.steps);
  const sampling = Object.keys(diffusion).length ? [{ stage: "painter", params: { diffusion } }] : [];
  const request = { pipeline: options.pipeline, prompt: { text: prompt }, sampling };
  const stream = client.Generate(request, { deadline: Date.now() + Number(options.timeout) * 1000 });
  const cancelAfter = Number(options["cancel-after"]);
  for await (const { request_id, event, frame } of stream) {
    if (event !== "frame") continue; // the end of the request: its timings, for who wants them
    switch (frame.content) {
      case "text":
        process.stdout.write(frame.text.text);
        break;
      case "progress":
        console.error(`${frame.stage} ${frame.progress.step}/${frame.progress.total_steps}`);
        // Cancelling the call stops the request in every stage.
        if (cancelAfter > 0 && frame.progress.step >= cancelAfter) stream.cancel();
        break;
      case "media":
        save(request_id, frame.stage, frame.media);
        break;
    }
  }
}

function save(request_id, stage, { index, mime_type, data }) {
  mkdirSync(options.out, { recursive: true });
  const path = join(options.out, `${request_id}-${stage}-${index}.${mime_type.split("/")[1]}`);
  writeFileSync(path, data);
  console.log(`\nsaved ${path}`);
}

/** Prints a failed call the way the mesh means it; returns the exit status. */
function report(error) {
  if (!(error.code in status)) throw error; // not a failed call
  if (error.code === status.CANCELLED) {
    console.log("\ncancelled");
    return CANCELLED;
  }
  const info = errorInfo(error);
  const field = info?.metadata.field ? ` (field ${info.metadata.field})` : "";
  console.error(`${status[error.code]} ${info?.reason ?? ""}${field}: ${error.details}`);
  return FAILED;
}
