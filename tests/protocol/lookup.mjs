// A client of docs/protocol.md that shares no code with ours.
//
// Usage: node lookup.mjs ADDRESS DESCRIPTORS MODEL < request.json
//   DESCRIPTORS is KServe's grpc_service.proto as a compiled FileDescriptorSet.
//   request.json is {"features": [...], "values": [...], "lengths": [...], "weights": [...]?}.
// Prints {"version": ..., "shape": [B, D], "embeddings": [...]}, or {"code": ..., "message": ...}.
import { readFileSync } from "node:fs";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const [address, descriptors, model] = process.argv.slice(2);
const asked = JSON.parse(readFileSync(0, "utf8"));

const { inference } = grpc.loadPackageDefinition(
  loader.loadFileDescriptorSetFromBuffer(readFileSync(descriptors), { keepCase: true, longs: String }),
);
const client = new inference.GRPCInferenceService(address, grpc.credentials.createInsecure());

const littleEndian = {
  INT64: (numbers) => Buffer.from(BigInt64Array.from(numbers, BigInt).buffer),
  INT32: (numbers) => Buffer.from(Int32Array.from(numbers).buffer),
  FP32: (numbers) => Buffer.from(Float32Array.from(numbers).buffer),
};
const inputs = [["values", "INT64"], ["lengths", "INT32"], ["weights", "FP32"]].filter(([name]) => asked[name]);

const request = {
  model_name: model,
  inputs: inputs.map(([name, datatype]) => ({ name, datatype, shape: [1, asked[name].length] })),
  raw_input_contents: inputs.map(([name, datatype]) => littleEndian[datatype](asked[name])),
  // From compiled descriptors a map is what it is on the wire: entries.
  parameters: asked.features ? [{ key: "features", value: { string_param: asked.features.join(",") } }] : [],
};

client.ModelInfer(request, { deadline: Date.now() + 30_000 }, (error, response) => {
  if (error) {
    console.log(JSON.stringify({ code: grpc.status[error.code], message: error.details }));
  } else {
    const [output] = response.outputs;
    const bytes = response.raw_output_contents[0];
    const floats = new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
    console.log(
      JSON.stringify({
        version: response.model_version,
        shape: output.shape.slice(1).map(Number),
        embeddings: Array.from(floats),
      }),
    );
  }
  client.close();
});
