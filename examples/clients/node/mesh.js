// The contract as JavaScript: loads the .proto files, opens a client, reads the mesh's typed errors.

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import { fileURLToPath } from "node:url";

const root = fileURLToPath(new URL("../../../", import.meta.url));

const contract = protoLoader.loadSync("stagemesh/v1/inference.proto", {
  includeDirs: [`${root}protos`, `${root}third_party/googleapis`],
  keepCase: true,
  longs: Number, // sequences, seeds and sizes are far below 2^53
  enums: String,
  defaults: true,
  oneofs: true,
});
const { stagemesh } = grpc.loadPackageDefinition(contract);

// google.rpc.ErrorInfo, the detail that every error of the mesh has.
const details = protoLoader.fromJSON({
  nested: { google: { nested: { rpc: { nested: { ErrorInfo: { fields: {
    reason: { type: "string", id: 1 },
    domain: { type: "string", id: 2 },
    metadata: { keyType: "string", type: "string", id: 3 },
  } } } } } } },
}, { keepCase: true, defaults: true });

export const status = grpc.status;

/** Opens a client of the InferenceService at `address` (host:port). */
export function connect(address) {
  return new stagemesh.v1.InferenceService(address, grpc.credentials.createInsecure(), {
    "grpc.max_receive_message_length": 64 << 20,
    "grpc.keepalive_time_ms": 30_000,
    "grpc.keepalive_timeout_ms": 10_000,
    "grpc.enable_http_proxy": 0,
  });
}

/** Calls a unary method with a deadline in seconds; resolves to its answer. */
export function call(client, method, request, timeout = 10) {
  return new Promise((resolve, reject) => {
    const deadline = Date.now() + timeout * 1000;
    client[method](request, { deadline }, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

/** What the mesh says of a failed call: {reason, metadata}, or null when the error is not the mesh's own. */
export function errorInfo(error) {
  const [packed] = error.metadata?.get("grpc-status-details-bin") ?? [];
  if (!packed) return null;
  for (const detail of contract["google.rpc.Status"].deserialize(packed).details) {
    if (!detail.type_url.endsWith("/google.rpc.ErrorInfo")) continue;
    const info = details["google.rpc.ErrorInfo"].deserialize(detail.value);
    if (info.domain === "stagemesh") return { reason: info.reason, metadata: info.metadata };
  }
  return null;
}
