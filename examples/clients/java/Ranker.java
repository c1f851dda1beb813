// Look embeddings up and score with a model that tbe-serve serves.
//
//   java Ranker ADDRESS MODEL
//
// The model is the ranker of the project's README: ids of "genres" and "item_id", and three dense features.

import com.google.protobuf.ByteString;
import inference.GRPCInferenceServiceGrpc;
import inference.GRPCInferenceServiceGrpc.GRPCInferenceServiceBlockingStub;
import inference.GrpcService.InferParameter;
import inference.GrpcService.ModelInferRequest;
import inference.GrpcService.ModelInferRequest.InferInputTensor;
import inference.GrpcService.ModelInferRequest.InferRequestedOutputTensor;
import inference.GrpcService.ModelInferResponse;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.concurrent.TimeUnit;

public final class Ranker {
  // A call that no server answered is sent again. Other errors are final.
  private static final Map<String, Object> RETRIES = Map.of("methodConfig", List.of(Map.of(
      "name", List.of(Map.of()),
      "retryPolicy", Map.of("maxAttempts", 3.0, "initialBackoff", "0.02s", "maxBackoff", "0.5s",
          "backoffMultiplier", 2.0, "retryableStatusCodes", List.of("UNAVAILABLE")))));

  private static ByteBuffer littleEndian(int bytes) {
    return ByteBuffer.allocate(bytes).order(ByteOrder.LITTLE_ENDIAN);
  }

  /** Add an input. The first dimension is always 1. */
  private static void add(
      ModelInferRequest.Builder request, String name, String datatype, ByteBuffer numbers, long... shape) {
    InferInputTensor.Builder input = InferInputTensor.newBuilder().setName(name).setDatatype(datatype).addShape(1);
    for (long dimension : shape) {
      input.addShape(dimension);
    }
    request.addInputs(input).addRawInputContents(ByteString.copyFrom(numbers.flip()));
  }

  /** A request with the ids of two samples: genres [3, 5] and [], items [7] and [8]. */
  private static ModelInferRequest.Builder ids(String model, String output, long item) {
    ModelInferRequest.Builder request = ModelInferRequest.newBuilder()
        .setModelName(model)
        .putParameters("features", InferParameter.newBuilder().setStringParam("genres,item_id").build())
        .addOutputs(InferRequestedOutputTensor.newBuilder().setName(output));
    add(request, "values", "INT64", littleEndian(32).putLong(3).putLong(5).putLong(7).putLong(item), 4);
    add(request, "lengths", "INT32", littleEndian(16).putInt(2).putInt(0).putInt(1).putInt(1), 4);
    return request;
  }

  private static ModelInferResponse infer(GRPCInferenceServiceBlockingStub stub, ModelInferRequest.Builder request) {
    return stub.withDeadlineAfter(30, TimeUnit.SECONDS).modelInfer(request.build());
  }

  private static ByteBuffer numbers(ModelInferResponse response) {
    return response.getRawOutputContents(0).asReadOnlyByteBuffer().order(ByteOrder.LITTLE_ENDIAN);
  }

  public static void main(String[] arguments) {
    if (arguments.length != 2) {
      System.err.println("usage: java Ranker ADDRESS MODEL");
      System.exit(1);
    }
    Locale.setDefault(Locale.ROOT);
    String model = arguments[1];
    ManagedChannel channel = ManagedChannelBuilder.forTarget(arguments[0])
        .usePlaintext().defaultServiceConfig(RETRIES).enableRetry().build();
    GRPCInferenceServiceBlockingStub stub = GRPCInferenceServiceGrpc.newBlockingStub(channel);

    // A row for each sample: the embeddings of genres and of item_id, side by side.
    ModelInferResponse rows = infer(stub, ids(model, "embeddings", 8));
    List<Long> shape = rows.getOutputs(0).getShapeList();
    System.out.printf("embeddings [%d %d] of version %s, the first %.6f%n",
        shape.get(1), shape.get(2), rows.getModelVersion(), numbers(rows).getFloat());

    ModelInferRequest.Builder request = ids(model, "scores", 8);
    ByteBuffer dense = littleEndian(24);
    for (float number : new float[] {0.5f, 1, 0, 0, 2, 1}) {
      dense.putFloat(number);
    }
    add(request, "dense_features", "FP32", dense, 2, 3);
    ByteBuffer scores = numbers(infer(stub, request));
    System.out.printf("scores [%.6f %.6f]%n", scores.getFloat(), scores.getFloat());

    try {
      infer(stub, ids(model, "embeddings", 1L << 40));
    } catch (StatusRuntimeException error) {
      if (error.getStatus().getCode() != Status.Code.INVALID_ARGUMENT) {
        throw error;
      }
      // It names the feature, the limit and the sample.
      System.out.println("refused: " + error.getStatus().getDescription());
    }
    channel.shutdown();
  }
}
