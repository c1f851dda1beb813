// Look embeddings up and score with a model that tbe-serve serves.
//
//   ranker ADDRESS MODEL
//
// The model is the ranker of the project's README: ids of "genres" and "item_id", and three dense features.
// The numbers are little-endian on the wire, as they are in the memory of x86-64 and aarch64.

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "grpc_service.grpc.pb.h"

using inference::GRPCInferenceService;
using inference::ModelInferRequest;
using inference::ModelInferResponse;

// A call that no server answered is sent again. Other errors are final.
constexpr char kRetries[] = R"({"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 3,
  "initialBackoff": "0.02s", "maxBackoff": "0.5s", "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}}]})";

// Add an input. The first dimension is always 1.
template <typename Number>
void Add(ModelInferRequest& request, const std::string& name, const std::string& datatype,
         const std::vector<Number>& numbers, const std::vector<int64_t>& shape) {
  auto* input = request.add_inputs();
  input->set_name(name);
  input->set_datatype(datatype);
  input->add_shape(1);
  for (int64_t dimension : shape) input->add_shape(dimension);
  request.add_raw_input_contents(numbers.data(), numbers.size() * sizeof(Number));
}

// A request with the ids of two samples: genres [3, 5] and [], items [7] and [8].
ModelInferRequest Ids(const std::string& model, const std::string& output, int64_t item) {
  ModelInferRequest request;
  request.set_model_name(model);
  (*request.mutable_parameters())["features"].set_string_param("genres,item_id");
  request.add_outputs()->set_name(output);
  Add<int64_t>(request, "values", "INT64", {3, 5, 7, item}, {4});
  Add<int32_t>(request, "lengths", "INT32", {2, 0, 1, 1}, {4});
  return request;
}

grpc::Status Infer(GRPCInferenceService::Stub& stub, const ModelInferRequest& request, ModelInferResponse& response) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  return stub.ModelInfer(&context, request, &response);
}

// The numbers of the answer's first output. Ends the program if there is no answer.
std::vector<float> Numbers(const grpc::Status& status, const ModelInferResponse& response) {
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.error_message().c_str());
    std::exit(1);
  }
  std::vector<float> numbers(response.raw_output_contents(0).size() / sizeof(float));
  std::memcpy(numbers.data(), response.raw_output_contents(0).data(), numbers.size() * sizeof(float));
  return numbers;
}

int main(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "usage: ranker ADDRESS MODEL\n");
    return 1;
  }
  const std::string model = arguments[2];
  grpc::ChannelArguments options;
  options.SetServiceConfigJSON(kRetries);
  auto stub = GRPCInferenceService::NewStub(
      grpc::CreateCustomChannel(arguments[1], grpc::InsecureChannelCredentials(), options));

  // A row for each sample: the embeddings of genres and of item_id, side by side.
  ModelInferResponse rows;
  const auto embeddings = Numbers(Infer(*stub, Ids(model, "embeddings", 8), rows), rows);
  std::printf("embeddings [%ld %ld] of version %s, the first %.6f\n", long{rows.outputs(0).shape(1)},
              long{rows.outputs(0).shape(2)}, rows.model_version().c_str(), embeddings[0]);

  ModelInferResponse answer;
  ModelInferRequest request = Ids(model, "scores", 8);
  Add<float>(request, "dense_features", "FP32", {0.5, 1, 0, 0, 2, 1}, {2, 3});
  const auto scores = Numbers(Infer(*stub, request, answer), answer);
  std::printf("scores [%.6f %.6f]\n", scores[0], scores[1]);

  ModelInferResponse none;
  const grpc::Status refused = Infer(*stub, Ids(model, "embeddings", int64_t{1} << 40), none);
  if (refused.error_code() == grpc::StatusCode::INVALID_ARGUMENT) {
    std::printf("refused: %s\n", refused.error_message().c_str());  // it names the feature, the limit, the sample
  }
}
