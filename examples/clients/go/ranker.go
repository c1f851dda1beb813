// Look embeddings up and score with a model that tbe-serve serves.
//
//	ranker ADDRESS MODEL
//
// The model is the ranker of the project's README: ids of "genres" and "item_id", and three dense features.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "example.com/inference"
)

// A call that no server answered is sent again. Other errors are final.
const retries = `{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 3, "initialBackoff": "0.02s",
	"maxBackoff": "0.5s", "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}}]}`

// add adds an input: numbers are []int64, []int32 or []float32. The first dimension is always 1.
func add(request *pb.ModelInferRequest, name, datatype string, numbers interface{}, shape ...int64) {
	var raw bytes.Buffer
	if err := binary.Write(&raw, binary.LittleEndian, numbers); err != nil {
		log.Fatal(err)
	}
	input := &pb.ModelInferRequest_InferInputTensor{Name: name, Datatype: datatype, Shape: append([]int64{1}, shape...)}
	request.Inputs = append(request.Inputs, input)
	request.RawInputContents = append(request.RawInputContents, raw.Bytes())
}

// ids is a request with the ids of two samples: genres [3, 5] and [], items [7] and [8].
func ids(model, output string, item int64) *pb.ModelInferRequest {
	features := &pb.InferParameter{ParameterChoice: &pb.InferParameter_StringParam{StringParam: "genres,item_id"}}
	request := &pb.ModelInferRequest{
		ModelName:  model,
		Parameters: map[string]*pb.InferParameter{"features": features},
		Outputs:    []*pb.ModelInferRequest_InferRequestedOutputTensor{{Name: output}},
	}
	add(request, "values", "INT64", []int64{3, 5, 7, item}, 4)
	add(request, "lengths", "INT32", []int32{2, 0, 1, 1}, 4)
	return request
}

// infer sends a request. It returns the numbers of the first output, its shape, and the version that answered.
func infer(client pb.GRPCInferenceServiceClient, request *pb.ModelInferRequest) ([]float32, []int64, string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	response, err := client.ModelInfer(ctx, request)
	if err != nil {
		return nil, nil, "", err
	}
	numbers := make([]float32, len(response.RawOutputContents[0])/4)
	err = binary.Read(bytes.NewReader(response.RawOutputContents[0]), binary.LittleEndian, numbers)
	return numbers, response.Outputs[0].Shape[1:], response.ModelVersion, err
}

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: ranker ADDRESS MODEL")
	}
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure(), grpc.WithDefaultServiceConfig(retries))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := pb.NewGRPCInferenceServiceClient(connection)

	// A row for each sample: the embeddings of genres and of item_id, side by side.
	rows, shape, version, err := infer(client, ids(os.Args[2], "embeddings", 8))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("embeddings %v of version %s, the first %.6f\n", shape, version, rows[0])

	request := ids(os.Args[2], "scores", 8)
	add(request, "dense_features", "FP32", []float32{0.5, 1, 0, 0, 2, 1}, 2, 3)
	scores, _, _, err := infer(client, request)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("scores %.6f\n", scores)

	// The message names the feature, the limit and the sample.
	_, _, _, err = infer(client, ids(os.Args[2], "embeddings", 1<<40))
	if status.Code(err) == codes.InvalidArgument {
		fmt.Printf("refused: %s\n", status.Convert(err).Message())
	}
}
