// Look embeddings up and score with a model that tbe-serve serves.
//
//   node ranker.mjs ADDRESS MODEL DESCRIPTORS
//
// The model is the ranker of the project's README: ids of "genres" and "item_id", and three dense features.
// DESCRIPTORS is serving/protocol/descriptors.binpb of the package; loadSync("grpc_service.proto") does as well.
import { readFileSync } from "node:fs";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const [address, model, descriptors] = process.argv.slice(2);
if (!descriptors) {
  console.error("usage: node ranker.mjs ADDRESS MODEL DESCRIPTORS");
  process.exit(1);
}
const { inference } = grpc.loadPackageDefinition(
  loader.loadFileDescriptorSetFromBuffer(readFileSync(descriptors), { keepCase: true, longs: Number }),
);
// A call that no server answered is sent again. Other errors are final.
const retryPolicy = {
  maxAttempts: 3,
  initialBackoff: "0.02s",
  maxBackoff: "0.5s",
  backoffMultiplier: 2,
  retryableStatusCodes: ["UNAVAILABLE"],
};
const client = new inference.GRPCInferenceService(address, grpc.credentials.createInsecure(), {
  "grpc.service_config": JSON.stringify({ methodConfig: [{ name: [{}], retryPolicy }] }),
});

const arrays = {
  INT64: (numbers) => BigInt64Array.from(numbers, BigInt),
  INT32: (numbers) => Int32Array.from(numbers),
  FP32: (numbers) => Float32Array.from(numbers),
};

/** Send inputs [name, datatype, shape, numbers] and ask for one output. The first dimension is always 1. */
function infer(output, inputs) {
  const request = {
    model_name: model,
    inputs: inputs.map(([name, datatype, shape]) => ({ name, datatype, shape: [1, ...shape] })),
    outputs: [{ name: output }],
    raw_input_contents: inputs.map(([, datatype, , numbers]) => Buffer.from(arrays[datatype](numbers).buffer)),
    // From compiled descriptors a map is a list of its entries.
    parameters: [{ key: "features", value: { string_param: "genres,item_id" } }],
  };
  return new Promise((resolve, reject) =>
    client.ModelInfer(request, { deadline: Date.now() + 30_000 }, (error, response) => {
      if (error) return reject(error);
      const bytes = Uint8Array.from(response.raw_output_contents[0]);
      const shape = response.outputs[0].shape.slice(1);
      resolve({ numbers: new Float32Array(bytes.buffer), shape, version: response.model_version });
    }),
  );
}

/** The ids of two samples: genres [3, 5] and [], items [7] and [8]. */
const ids = (item) => [
  ["values", "INT64", [4], [3, 5, 7, item]],
  ["lengths", "INT32", [4], [2, 0, 1, 1]],
];
const fixed = (numbers) => Array.from(numbers, (number) => number.toFixed(6)).join(" ");

// A row for each sample: the embeddings of genres and of item_id, side by side.
const { numbers, shape, version } = await infer("embeddings", ids(8));
console.log(`embeddings [${shape.join(" ")}] of version ${version}, the first ${fixed([numbers[0]])}`);

const dense = ["dense_features", "FP32", [2, 3], [0.5, 1, 0, 0, 2, 1]];
console.log(`scores [${fixed((await infer("scores", [...ids(8), dense])).numbers)}]`);

try {
  await infer("embeddings", ids(2 ** 40));
} catch (error) {
  if (error.code !== grpc.status.INVALID_ARGUMENT) throw error;
  console.log(`refused: ${error.details}`); // it names the feature, the limit and the sample
}
client.close();
